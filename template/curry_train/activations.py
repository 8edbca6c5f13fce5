"""What backward keeps of a micro-batch: closed forms of the decoder family, bytes per token."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import comb

from curry_train.config import Config, ModelConfig
from curry_train.sizes import is_dense, padded_vocab


def activation_bytes_per_token(
    model: ModelConfig, compute: int, wide: int, layers: Iterable[int] | None = None, **split: int
) -> float:
    """Return the bytes that backward keeps per token of a micro-batch, attention masks apart.

    `compute` and `wide` are the bytes of an element in matrices and in norms and softmax. Counted
    are the tensors that autograd saves for this package's own layers, attention without its score
    matrix; the test holds the sum against the tensors that a real forward pass saves. layers: the
    blocks; None is all of them, with the head. split: tp and ep, as in block_bytes.
    """
    if layers is not None:
        return sum(block_bytes(model, is_dense(model, i), compute, wide, **split) for i in layers)
    blocks = range(model.num_hidden_layers)
    kept = activation_bytes_per_token(model, compute, wide, blocks, **split)
    return kept + head_bytes(model, compute, wide, split.get("tp", 1))


def head_bytes(model: ModelConfig, compute: int, wide: int, tp: int = 1) -> float:
    """Return the bytes that the last norm, the head and the loss keep per token of a cp rank."""
    return norm_bytes(model.hidden_size, compute, wide, tp) + padded_vocab(model) * wide / tp


@lru_cache(maxsize=1024)
def block_bytes(
    model: ModelConfig,
    dense: bool,
    compute: int,
    wide: int,
    tp: int = 1,
    ep: int = 1,
    gathered: int = 1,
) -> float:
    """Return the bytes that a block keeps per token of a cp rank.

    Of tp ranks each keeps its slice of norms and residuals and its share of heads and features;
    all keep the gathered inputs of attention and feed-forward. gathered: how many cp ranks' keys
    are kept (parallel.cp_kind=all_gather). Experts are taken to get equal shares of the tokens.
    """
    total = 2 * norm_bytes(model.hidden_size, compute, wide, tp)
    total += attention_bytes(model, compute, wide, tp)
    total += (gathered - 1) * key_value_width(model) * compute / tp
    if dense:
        return total + 4 * model.intermediate_size * compute / tp
    # Router and experts take slices as they are, the shared expert gathers them besides.
    shared, row = model.shared_expert_intermediate_size > 0, model.hidden_size * compute
    total += row / tp * (tp > 1) - row * (tp > 1 and not shared)
    experts = model.num_experts
    chosen = experts if model.routing == "expert_choice" else model.num_experts_per_tok
    # The bank: gate and up of every row, weights, and int32 tables of the order of rows.
    own = chosen * (2 * model.moe_intermediate_size * compute + compute + 8)
    # The router: its input once more where it is cast, logits, scores, ids and weights.
    own += model.hidden_size * wide * (compute < wide)
    own += (2 * experts + 3) * wide + chosen * (8 + wide)
    own += (experts * compute + chosen * 8) * model.expert_bias
    if ep > 1:
        # The rows that came, ids and weights of all experts with each.
        own += ranks_visited(model, ep) * (row + 8 + chosen * (8 + wide)) + 4 * ep
    return total + 4 * model.shared_expert_intermediate_size * compute / tp + own / tp


@lru_cache(maxsize=1024)
def selective_bytes(model: ModelConfig, dense: bool, compute: int, wide: int, tp: int = 1) -> float:
    """Return the bytes that recompute=selective keeps per token: results of dear operations."""
    heads, keys = model.num_attention_heads, model.num_key_value_heads
    kept = 3 * model.hidden_size * compute / tp  # the block's input, both sums over ranks
    kept += heads * (model.value_dim * compute + wide) / tp
    if model.kv_lora_rank:
        kept += (model.kv_lora_rank + model.qk_rope_head_dim + model.q_lora_rank) * compute
        expanded = heads * (model.query_dim + model.qk_nope_head_dim + model.v_head_dim)
    else:
        expanded = (heads + 2 * keys) * model.head_dim
        # What tp ranks summed for norms of whole projections.
        kept += 2 * wide * (tp > 1 and model.qk_norm and model.qk_norm_width == "projection")
    kept += expanded * compute / tp
    if dense:
        return kept + 2 * model.intermediate_size * compute / tp
    kept += 2 * model.shared_expert_intermediate_size * compute / tp
    rows = model.num_experts_per_tok * (2 * model.moe_intermediate_size * compute + compute + 8)
    return kept + (rows + model.num_experts * wide + model.hidden_size * compute) / tp


def norm_bytes(width: int, compute: int, wide: int, tp: int = 1) -> float:
    """Count what RMSNorm keeps of a row, with its output, which the next product reads whole."""
    return (width * (wide + compute) + wide) / tp + width * compute


def key_value_width(model: ModelConfig) -> int:
    """Return the entries of all keys and values of a token, as attention reads them."""
    return model.num_key_value_heads * (model.query_dim + model.value_dim)


def attention_bytes(model: ModelConfig, compute: int, wide: int, tp: int = 1) -> float:
    """Count queries, keys, values and output as the fused kernel gets them, and what made them."""
    heads, keys = model.num_attention_heads, model.num_key_value_heads
    width, values = model.query_dim, model.value_dim
    kept, whole = heads * wide, 0.0
    if model.kv_lora_rank:
        whole += norm_bytes(model.kv_lora_rank, compute, wide)
        whole += norm_bytes(model.q_lora_rank, compute, wide) if model.q_lora_rank else 0
    else:
        # The last term: scales of the rows, of tp ranks each has those of whole projections.
        whole_rows = model.qk_norm_width == "projection"
        kept += (heads + keys) * width * (wide + compute) * model.qk_norm
        kept += (heads + keys) * wide * (model.qk_norm and not whole_rows)
        whole += 2 * wide * (model.qk_norm and whole_rows)
        kept += (heads + 2 * keys) * width * compute * (model.clip_qkv is not None)
    if model.attention_sinks:
        from curry_train.layers.attention import SINK_DIMS

        width += SINK_DIMS
    kept += 2 * (heads + keys) * width * compute
    if model.kv_lora_rank or model.attention_sinks:
        kept += heads * values * compute  # the output in the order that the projection reads
        # Values as wide as queries stay where the latent was expanded, beside the keys' still part.
        kept += heads * model.qk_nope_head_dim * compute if width == values else 0
    return whole + kept / tp


@lru_cache(maxsize=1024)
def ranks_visited(model: ModelConfig, ep: int) -> float:
    """Return how many of ep ranks a token's experts are on, in the mean of even routing.

    ep * (1 - P(none of its K of E experts is on a rank)), without replacement. With groups a token
    draws topk_group of n_group groups first, as DeepSeek's node-limited routing.
    """
    experts, chosen = model.num_experts, model.num_experts_per_tok
    if model.routing == "expert_choice" or chosen >= experts:
        return float(ep)
    here, open_groups, groups = experts // ep, model.topk_group, model.n_group
    size, missed = experts // groups, 0.0
    on_rank = max(here // size, 1)  # groups that a rank has experts of
    for hit in range(min(on_rank, open_groups) + 1):
        if open_groups - hit > groups - on_rank:
            continue
        ways = comb(on_rank, hit) * comb(groups - on_rank, open_groups - hit)
        theirs = open_groups * size - hit * min(size, here)
        none = comb(theirs, chosen) / comb(open_groups * size, chosen)
        missed += ways / comb(groups, open_groups) * none
    return ep * (1 - missed)


def mask_bytes(config: Config, samples: int, compute: int) -> int:
    """Return the bytes of the masks that all blocks of a micro-batch share, none under cp."""
    model, length = config.model, config.data.seq_len
    if not isinstance(model, ModelConfig) or config.parallel.cp > 1:
        return 0
    windows = {model.window_of(layer) for layer in range(model.num_hidden_layers)}
    masked = [w for w in windows if config.data.document_mask or (w is not None and w < length)]
    side = length + model.attention_sinks
    return len(masked) * side * side * compute * (samples if config.data.document_mask else 1)
