"""Will it fit: parameters, memory and tokens per step of a layout, in closed form, no device.

`python train.py dry_run=true` prints it. The closed forms know the decoder family; of another
model parameters are counted on the built model, and its activations and FLOP are unknown.
"""

from __future__ import annotations

import os
from typing import Any

from curry_train.config import (
    Config,
    ConfigError,
    ModelConfig,
    planned_world,
    resolve_micro_batch,
)
from curry_train.parallel import dims
from curry_train.parallel.grads import BUCKET_ELEMENTS
from curry_train.rules import problems

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def attention_parameters(model: ModelConfig) -> int:
    """Return the parameters of one block's attention, without the norm before it."""
    width, heads = model.hidden_size, model.num_attention_heads
    queries, values = heads * model.query_dim, heads * model.value_dim
    biased = model.attention_bias
    total = values * width + width * biased
    if model.kv_lora_rank:
        latent, turned = model.kv_lora_rank, model.qk_rope_head_dim
        total += (width + biased) * (latent + turned) + latent
        total += latent * heads * (model.qk_nope_head_dim + model.v_head_dim)
        if model.q_lora_rank == 0:
            return total + width * queries
        return total + (width + biased + 1 + queries) * model.q_lora_rank
    keys = model.num_key_value_heads * model.head_dim
    total += (width + biased) * (queries + 2 * keys)
    return total + 2 * model.head_dim * model.qk_norm + heads * model.attention_sinks


def block_parameters(model: ModelConfig, layer: int) -> tuple[int, int]:
    """Return (all, active per token) parameters of block `layer`."""
    width, hidden = model.hidden_size, model.moe_intermediate_size
    always = attention_parameters(model) + 2 * width
    if is_dense(model, layer):
        always += 3 * width * model.intermediate_size
        return always, always
    expert = 3 * width * hidden + (2 * hidden + width) * model.expert_bias
    always += (width + model.router_bias) * model.num_experts
    always += 3 * width * model.shared_expert_intermediate_size
    return always + model.num_experts * expert, always + model.num_experts_per_tok * expert


def is_dense(model: ModelConfig, layer: int) -> bool:
    """Tell whether block `layer` has one feed-forward instead of experts."""
    return model.num_experts == 0 or layer < model.first_k_dense_replace


def parameter_counts(model: ModelConfig) -> tuple[int, int]:
    """Return (all, active per token) parameters, with the unpadded vocabulary."""
    ends = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    total = active = ends + model.hidden_size
    for layer in range(model.num_hidden_layers):
        block, block_active = block_parameters(model, layer)
        total, active = total + block, active + block_active
    return total, active


def flops_per_token(model: Any, seq_len: int) -> float | None:
    """Return the FLOP of forward and backward per token, all ranks together; None if unknown.

    Six per active matrix parameter (the embedding is a lookup), and for attention six per entry of
    a query and of a value for each key that a token sees on average: half the sequence, or of a
    window w of S tokens w * (1 - w / 2S). Source: Kaplan et al. 2020, section 2.1, with the
    attention term of Chowdhery et al. 2022, appendix B, halved.
    """
    if not isinstance(model, ModelConfig):
        return None
    _, active = parameter_counts(model)
    if not model.tie_word_embeddings:
        active -= model.vocab_size * model.hidden_size
    keys = 0.0
    for layer in range(model.num_hidden_layers):
        span = min(seq_len, model.window_of(layer) or seq_len)
        keys += span * (1 - span / (2 * seq_len))
    return 6.0 * active + 6.0 * model.num_attention_heads * keys * (
        model.query_dim + model.value_dim
    )


def activation_bytes_per_token(model: ModelConfig, compute: int, wide: int) -> float:
    """Return the bytes that backward keeps per token of a micro-batch, attention masks apart.

    `compute` and `wide` are the bytes of an element in matrices and in norms and softmax. Counted
    are the tensors that autograd saves for this package's own layers, attention without its score
    matrix; the test holds the sum against the tensors that a real forward pass saves.
    """
    norm = _norm_bytes(model.hidden_size, compute, wide)
    total = norm + padded_vocab(model) * wide
    for layer in range(model.num_hidden_layers):
        total += 2 * norm + _attention_bytes(model, compute, wide)
        if is_dense(model, layer):
            total += 4 * model.intermediate_size * compute
            continue
        experts = model.num_experts
        chosen = experts if model.routing == "expert_choice" else model.num_experts_per_tok
        total += 4 * model.shared_expert_intermediate_size * compute
        # The bank: gate and up of every row, weights, and int32 tables of the order of rows.
        total += chosen * (2 * model.moe_intermediate_size * compute + compute + 8)
        # The router: its input once more where it is cast, logits, scores, ids and weights.
        total += model.hidden_size * wide * (compute < wide)
        total += (2 * experts + 3) * wide + chosen * (8 + wide)
        total += (experts * compute + chosen * 8) * model.expert_bias
    return total


def _norm_bytes(width: int, compute: int, wide: int) -> int:
    """Count what RMSNorm keeps of a row, with its output, which the next product reads."""
    return width * (wide + 2 * compute) + wide


def _attention_bytes(model: ModelConfig, compute: int, wide: int) -> int:
    """Count queries, keys, values and output as the fused kernel gets them, and what made them."""
    heads, keys = model.num_attention_heads, model.num_key_value_heads
    width, values = model.query_dim, model.value_dim
    kept = heads * wide
    if model.kv_lora_rank:
        kept += _norm_bytes(model.kv_lora_rank, compute, wide)
        kept += _norm_bytes(model.q_lora_rank, compute, wide) if model.q_lora_rank else 0
    elif model.qk_norm:
        kept += (heads + keys) * (width * (wide + compute) + wide)
    if model.attention_sinks:
        from curry_train.layers.attention import SINK_DIMS

        width += SINK_DIMS
    kept += 2 * (heads + keys) * width * compute
    if not model.kv_lora_rank and not model.attention_sinks:
        return kept
    kept += heads * values * compute  # the output in the order that the projection reads
    # Values as wide as queries stay where the latent was expanded, beside the still part of keys.
    return kept + (heads * model.qk_nope_head_dim * compute if width == values else 0)


def mask_bytes(config: Config, samples: int, compute: int) -> int:
    """Return the bytes of the masks that all blocks of a micro-batch share."""
    model, length = config.model, config.data.seq_len
    if not isinstance(model, ModelConfig):
        return 0
    windows = {model.window_of(layer) for layer in range(model.num_hidden_layers)}
    masked = [w for w in windows if config.data.document_mask or (w is not None and w < length)]
    side = length + model.attention_sinks
    return len(masked) * side * side * compute * (samples if config.data.document_mask else 1)


def padded_vocab(model: ModelConfig) -> int:
    """Return the vocabulary as it stands in memory, a multiple of 64."""
    return -(-model.vocab_size // 64) * 64


def stored_elements(config: Config) -> int:
    """Return the parameters as they stand in memory, the padded vocabulary included."""
    model = config.model
    if not isinstance(model, ModelConfig):
        from curry_train.models.protocol import build_model

        return sum(p.numel() for p in build_model(config, "meta").parameters())
    padding = padded_vocab(model) - model.vocab_size
    ends = 1 if model.tie_word_embeddings else 2
    return parameter_counts(model)[0] + padding * model.hidden_size * ends


def estimate(config: Config, world: int) -> dict[str, int | None]:
    """Return bytes per rank: parameters, gradients, optimizer, activations, buffers.

    Parameters, gradients and both AdamW moments are float32 (float64 under fp64), whole on every
    rank at parallel.zero=0. Activations are those of one micro-batch; a copy of the weights in
    the compute dtype is counted with them; None where no closed form knows the model. Buffers are
    the gradient bucket of the all-reduce.
    Raises ValueError when the axes do not make `world` ranks.
    """
    sizes = dims.resolve(config.parallel, world)
    compute = COMPUTE_BYTES[config.precision]
    wide = max(compute, 4)
    total, ranks = stored_elements(config), dims.batch_world(sizes)
    samples = resolve_micro_batch(config, ranks)
    activations = None
    if isinstance(config.model, ModelConfig):
        tokens = samples * config.data.seq_len
        activations = round(tokens * activation_bytes_per_token(config.model, compute, wide))
        activations += mask_bytes(config, samples, compute)
        activations += total * compute if compute < wide else 0
    return {
        "parameters": total * wide,
        "gradients": total * wide,
        "optimizer": 2 * total * wide,
        "activations": activations,
        "buffers": min(total, BUCKET_ELEMENTS) * wide if ranks > 1 else 0,
    }


def ranks_to_plan(config: Config) -> int:
    """Return the number of ranks the plan is for: those of the launch, else what the mesh names."""
    world = planned_world(config)
    if world is not None:
        return world
    sizes = {axis: getattr(config.parallel, axis) for axis in dims.AXES}
    return dims.world_size({**sizes, "dp_shard": max(sizes["dp_shard"], 1)})


def print_plan(config: Config) -> int:
    """Build the model on the meta device, print the plan on rank 0, train nothing; returns 0.

    Raises ConfigError when the layout does not fit the world.
    """
    from curry_train.models.protocol import build_model, count_parameters

    world = ranks_to_plan(config)
    found = problems(config, world)
    if found:
        raise ConfigError(found)
    total, active = count_parameters(build_model(config, "meta"))
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
        return 0
    sizes = dims.resolve(config.parallel, world)
    data = config.data
    local = data.global_batch_size // dims.batch_world(sizes)
    micro = resolve_micro_batch(config, dims.batch_world(sizes))
    print(f"parameters: {total} (active {active})")
    print(
        f"tokens per step: {data.global_batch_size * data.seq_len} "
        f"(global batch {data.global_batch_size} x {data.seq_len}; "
        f"{local // micro} micro-batches of {micro} on each rank)"
    )
    parts = estimate(config, world)
    known = [amount for amount in parts.values() if amount is not None]
    without = "" if len(known) == len(parts) else ", without activations"
    print(f"memory per rank: {readable(sum(known))} ({config.precision}{without})")
    for part, amount in parts.items():
        if amount is None:
            print(f"  {part:<12}          unknown for architecture {config.model.architecture}")
        else:
            print(f"  {part:<12} {amount:>16} bytes  {readable(amount):>10}")
    flops = flops_per_token(config.model, data.seq_len)
    if flops is not None:
        print(f"work per step: {flops * data.global_batch_size * data.seq_len:.3e} FLOP")
    axes = "  ".join(f"{axis} {size}" for axis, size in sizes.items())
    print(f"mesh of {world} {'rank' if world == 1 else 'ranks'}: {axes}")
    return 0


def readable(amount: int) -> str:
    """Return bytes in the largest unit that keeps the number above 1."""
    value, unit = float(amount), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.2f} {unit}"
