"""What must hold between the fields of a decoder; rules.py has what concerns the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from curry_train.config import ModelConfig
from curry_train.parallel import dims as layout

MIXTURE_ONLY = ("expert_bias", "swiglu_limit", "routing", "router_bias", "correction_bias")
MIXTURE_ONLY += ("capacity_factor", "shared_expert_intermediate_size", "first_k_dense_replace")

Refusals = Iterator[tuple[str, str]]


def model_problems(model: ModelConfig) -> list[str]:
    """Say what is wrong with a decoder whose values each fit their field."""
    found = chain(*(rule(model) for rule in MODEL_RULES))
    return [
        f"{key}={shown(getattr(model, key.removeprefix('model.')))}: {why}" for key, why in found
    ]


def shown(value: object) -> str:
    """Write a value as it is typed on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _decoder(model: ModelConfig) -> Refusals:
    layers = model.num_hidden_layers
    if model.first_k_dense_replace > layers:
        yield (
            "model.first_k_dense_replace",
            f"there are only model.num_hidden_layers={layers}; set at most that many",
        )


def _attention(model: ModelConfig) -> Refusals:
    if model.kv_lora_rank:
        yield from _latent(model)
    else:
        yield from _grouped(model)
    if model.qk_norm_width != "head" and not model.qk_norm:
        yield (
            "model.qk_norm_width",
            "read with model.qk_norm=true only; set that, or model.qk_norm_width=head",
        )
    if not model.attention_out_bias and (model.kv_lora_rank or not model.attention_bias):
        yield (
            "model.attention_out_bias",
            "read by grouped-query attention with model.attention_bias=true only; set"
            " model.attention_out_bias=true",
        )
    every, window = model.sliding_window_pattern, model.sliding_window
    if every and window is None:
        yield (
            "model.sliding_window_pattern",
            "names the blocks that model.sliding_window spares, and model.sliding_window=null is"
            " none; set model.sliding_window, or model.sliding_window_pattern=0",
        )
    elif every == 1:
        yield (
            "model.sliding_window_pattern",
            f"every block would see all keys, so that model.sliding_window={window} holds nowhere;"
            " set model.sliding_window_pattern to 0 or at least 2, or model.sliding_window=null",
        )


def _grouped(model: ModelConfig) -> Refusals:
    heads = model.num_attention_heads
    if heads % model.num_key_value_heads:
        fitting = layout.divisors(heads)
        yield (
            "model.num_key_value_heads",
            f"does not divide model.num_attention_heads={heads}; set it to one of {fitting}",
        )
    if model.head_dim % 2:
        even = model.head_dim + 1
        yield (
            "model.head_dim",
            f"rotary positions turn pairs, so it must be even; set model.head_dim={even}",
        )
    for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if getattr(model, name):
            yield (
                f"model.{name}",
                "read by latent attention only, and model.kv_lora_rank=0 means grouped-query"
                f" attention; set model.kv_lora_rank, or model.{name}=0",
            )


def _latent(model: ModelConfig) -> Refusals:
    heads, rank = model.num_attention_heads, model.kv_lora_rank
    parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    missing = [name for name in parts if not getattr(model, name)]
    for name in missing:
        yield (
            f"model.{name}",
            f"latent attention (model.kv_lora_rank={rank}) has no head without it; set"
            f" model.{name}, or model.kv_lora_rank=0",
        )
    if model.qk_rope_head_dim % 2:
        even = model.qk_rope_head_dim + 1
        yield (
            "model.qk_rope_head_dim",
            f"rotary positions turn pairs, so it must be even; set model.qk_rope_head_dim={even}",
        )
    if not missing and model.v_head_dim > model.query_dim:
        yield (
            "model.v_head_dim",
            f"fused attention takes values no wider than queries, {model.query_dim} here (the sum"
            " of model.qk_nope_head_dim and model.qk_rope_head_dim); set at most that",
        )
    if model.num_key_value_heads != heads:
        yield (
            "model.num_key_value_heads",
            f"under latent attention (model.kv_lora_rank={rank}) every head has keys of its own;"
            f" set model.num_key_value_heads={heads}",
        )
    for name, off in (("qk_norm", "false"), ("attention_sinks", "false"), ("clip_qkv", "null")):
        if getattr(model, name):
            yield (
                f"model.{name}",
                f"latent attention (model.kv_lora_rank={rank}) has none; set model.{name}={off}",
            )


def _rotation(model: ModelConfig) -> Refusals:
    kind, original = model.rope_type, model.original_max_position_embeddings
    if kind == "default" and model.rope_factor != 1:
        yield (
            "model.rope_factor",
            "model.rope_type=default scales nothing; set model.rope_type to linear, llama3 or yarn,"
            " or model.rope_factor=1",
        )
    elif model.rope_factor < 1:
        yield "model.rope_factor", "a context only grows; set it to at least 1"
    needed = kind in ("llama3", "yarn")
    if needed and original is None:
        yield (
            "model.original_max_position_embeddings",
            f"model.rope_type={kind} scales from the context before it; set it to that number of"
            " tokens",
        )
    elif original is not None and not needed:
        yield (
            "model.original_max_position_embeddings",
            f"model.rope_type={kind} does not read it; set it to null, or model.rope_type to llama3"
            " or yarn",
        )
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if kind == "llama3" and low >= high:
        yield (
            "model.rope_low_freq_factor",
            f"must be below model.rope_high_freq_factor={high:g}, between which frequencies are"
            " blended; Llama 3.1 has 1 and 4",
        )
    if kind == "yarn":
        yield from _yarn(model)
    for name in ("rope_mscale", "rope_mscale_all_dim"):
        if getattr(model, name) and (kind != "yarn" or not model.kv_lora_rank):
            yield (
                f"model.{name}",
                "read by yarn under latent attention only (model.rope_type=yarn and"
                f" model.kv_lora_rank above 0); set model.{name}=0",
            )


def _yarn(model: ModelConfig) -> Refusals:
    fast, slow = model.rope_beta_fast, model.rope_beta_slow
    if fast < slow:
        yield (
            "model.rope_beta_fast",
            f"must be at least model.rope_beta_slow={slow:g}: both are turns in the original"
            " context, fast ones are kept; the paper has 32 and 1",
        )
    if model.rope_theta <= 1:
        yield "model.rope_theta", "yarn needs frequencies that fall; set it above 1, say 10000"
    if model.kv_lora_rank and bool(model.rope_mscale) != bool(model.rope_mscale_all_dim):
        lone = "rope_mscale" if model.rope_mscale else "rope_mscale_all_dim"
        other = "rope_mscale_all_dim" if model.rope_mscale else "rope_mscale"
        yield (
            f"model.{lone}",
            f"means different things in DeepSeek's code and in transformers without"
            f" model.{other}; set both, or both to 0",
        )


def _routing(model: ModelConfig) -> Refusals:
    experts, chosen, groups = model.num_experts, model.num_experts_per_tok, model.n_group
    if model.router_aux_loss_scope not in ("sequence", "micro_batch", "global"):
        yield "model.router_aux_loss_scope", "allowed are sequence, micro_batch, global"
    if not experts:
        for name in MIXTURE_ONLY:
            default = getattr(ModelConfig, name)
            if getattr(model, name) != default:
                yield (
                    f"model.{name}",
                    "read by blocks with experts only, and model.num_experts=0 makes every block"
                    f" dense; set model.num_experts, or model.{name}={shown(default)}",
                )
        return
    if chosen > experts:
        yield (
            "model.num_experts_per_tok",
            f"a token cannot visit more than model.num_experts={experts}; set at most {experts}",
        )
    if model.topk_group > groups:
        yield "model.topk_group", f"there are only model.n_group={groups}; set at most {groups}"
    elif groups > 1:
        yield from _groups(model)
    if model.correction_bias and model.routing != "top_k":
        yield (
            "model.correction_bias",
            f"model.routing={model.routing} balances the experts by itself and reads no bias; set"
            " model.correction_bias=false or model.routing=top_k",
        )
    if model.capacity_factor and model.routing == "expert_choice":
        yield (
            "model.capacity_factor",
            "with model.routing=expert_choice every expert takes exactly"
            f" model.num_experts_per_tok={chosen} / model.num_experts={experts} of the tokens;"
            " set model.capacity_factor=0 and choose model.num_experts_per_tok",
        )


def _groups(model: ModelConfig) -> Refusals:
    experts, chosen, groups = model.num_experts, model.num_experts_per_tok, model.n_group
    if model.routing != "top_k":
        yield (
            "model.n_group",
            f"model.routing={model.routing} knows no groups; set model.n_group=1 or"
            " model.routing=top_k",
        )
        return
    if experts % groups:
        yield (
            "model.n_group",
            f"does not divide model.num_experts={experts}; set it to one of"
            f" {layout.divisors(experts)}",
        )
        return
    size, open_groups = experts // groups, model.topk_group
    if open_groups * size < chosen <= experts:
        needed = -(-chosen // size)
        yield (
            "model.topk_group",
            f"holds {open_groups * size} experts ({open_groups} x {size}), fewer than"
            f" model.num_experts_per_tok={chosen}; set model.topk_group={needed} or more",
        )
    if size == 1 and model.group_score == "top2":
        yield (
            "model.group_score",
            f"model.n_group={groups} leaves one expert in a group, so none has two best; set"
            " model.group_score=max or fewer groups",
        )


MODEL_RULES = (_decoder, _attention, _rotation, _routing)
