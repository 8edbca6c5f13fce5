"""How large a model is, part by part, and how much work: closed forms of the decoder family."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from curry_train.config import Config, ModelConfig
from curry_train.layers.variants import chosen
from curry_train.parallel.dims import VOCAB_MULTIPLE


class Weight(NamedTuple):
    """A parameter and what divides it before parallel.zero does.

    split: columns (dimension 0 over tp), rows (dimension 1 over tp), experts (dimension 0 over ep)
    or whole (every rank of a stage has it).
    """

    shape: tuple[int, ...]
    split: str = "whole"


def attention_weights(model: ModelConfig) -> list[Weight]:
    """Return the parameters of one block's attention, without the norm before it."""
    width, heads = model.hidden_size, model.num_attention_heads
    found = [Weight((width, heads * model.value_dim), "rows")]
    inputs = [(heads * model.query_dim, width)]
    if model.kv_lora_rank:
        latent, compressed = model.kv_lora_rank, model.q_lora_rank
        narrow = [latent + model.qk_rope_head_dim, compressed]
        found += [Weight((rows, width)) for rows in narrow if rows]
        found += [Weight((rows,)) for rows in (latent, compressed) if rows]
        found += [Weight((rows,)) for rows in (*narrow, width) if rows and model.attention_bias]
        inputs = [(heads * model.query_dim, compressed or width)]
        inputs += [(heads * (model.qk_nope_head_dim + model.v_head_dim), latent)]
    else:
        inputs += [(model.num_key_value_heads * model.head_dim, width)] * 2
        if model.attention_bias:
            found += [Weight((rows,), "columns") for rows, _ in inputs]
            found += [Weight((width,))] * model.attention_out_bias
        if model.qk_norm and model.qk_norm_width == "projection":
            found += [Weight((rows,), "columns") for rows, _ in inputs[:2]]
        elif model.qk_norm:
            found += [Weight((model.head_dim,))] * 2
        found += [Weight((heads,), "columns")] * model.attention_sinks
    return found + [Weight(shape, "columns") for shape in inputs]


def swiglu_weights(width: int, hidden: int) -> list[Weight]:
    """Return the parameters of a dense feed-forward."""
    return [Weight((hidden, width), "columns")] * 2 + [Weight((width, hidden), "rows")]


@lru_cache(maxsize=256)
def block_weights(model: ModelConfig, dense: bool) -> list[Weight]:
    """Return the parameters of a block with one feed-forward, or with experts."""
    width, hidden, count = model.hidden_size, model.moe_intermediate_size, model.num_experts
    found = attention_weights(model) + [Weight((width,))] * 2
    if dense:
        return found + swiglu_weights(width, model.intermediate_size)
    found += [Weight((count, width))] + [Weight((count,))] * model.router_bias
    shared = model.shared_expert_intermediate_size
    found += swiglu_weights(width, shared) if shared else []
    bank = [(count, 2 * hidden, width), (count, width, hidden)]
    bank += [(count, 2 * hidden), (count, width)] * model.expert_bias
    return found + [Weight(shape, "experts") for shape in bank]


def block_parameters(model: ModelConfig, layer: int) -> tuple[int, int]:
    """Return (all, active per token) parameters of block `layer`."""
    weights = block_weights(model, is_dense(model, layer))
    bank = sum(prod(w.shape) for w in weights if w.split == "experts")
    always = sum(prod(w.shape) for w in weights) - bank
    return always + bank, always + bank * model.num_experts_per_tok // max(model.num_experts, 1)


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


def padded_vocab(model: ModelConfig) -> int:
    """Return the vocabulary as it stands in memory."""
    return -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def score_flops(model: ModelConfig, layer: int, seq_len: int) -> float:
    """Return the FLOP of attention's scores and sums in block `layer` per token."""
    span = min(seq_len, model.window_of(layer) or seq_len)
    keys = span * (1 - span / (2 * seq_len))
    return 6.0 * model.num_attention_heads * keys * (model.query_dim + model.value_dim)


def block_flops(model: ModelConfig, layer: int, seq_len: int) -> float:
    """Return the FLOP of forward and backward of block `layer` per token; see flops_per_token."""
    return 6.0 * block_parameters(model, layer)[1] + score_flops(model, layer, seq_len)


@lru_cache(maxsize=256)
def attention_flops(model: ModelConfig, seq_len: int) -> float:
    """Return score_flops of all blocks."""
    return sum(score_flops(model, layer, seq_len) for layer in range(model.num_hidden_layers))


@lru_cache(maxsize=256)
def block_costs(model: ModelConfig, seq_len: int) -> tuple[float, ...]:
    """Return block_flops of every block."""
    return tuple(block_flops(model, layer, seq_len) for layer in range(model.num_hidden_layers))


def flops_per_token(model: Any, seq_len: int) -> float | None:
    """Return the FLOP of forward and backward per token, all ranks together; None if unknown.

    Six per active matrix parameter (the embedding is a lookup), and for attention six per entry of
    a query and of a value for each key that a token sees on average: half the sequence, or of a
    window w of S tokens w * (1 - w / 2S). Source: Kaplan et al. 2020, section 2.1, with the
    attention term of Chowdhery et al. 2022, appendix B, halved.
    """
    if not isinstance(model, ModelConfig) or chosen(model):
        return None
    return sum(block_costs(model, seq_len)) + 6.0 * (model.vocab_size + 1) * model.hidden_size


@lru_cache(maxsize=256)
def end_weights(model: ModelConfig, end: str) -> list[Weight]:
    """Return the parameters of the `embedding`, the `head`, or a `head of its own` though tied.

    The last norm stands with the head.
    """
    vocabulary = [Weight((padded_vocab(model), model.hidden_size), "columns")]
    if end == "embedding":
        return vocabulary
    shared = end == "head" and model.tie_word_embeddings
    return [Weight((model.hidden_size,))] + vocabulary * (not shared)


class Held(NamedTuple):
    """Elements on one rank: split over tp, whole, of experts; and its rows under parallel.zero."""

    split: int
    whole: int
    experts: int
    dense_rows: int
    expert_rows: int

    @property
    def local(self) -> int:
        """All that the rank would hold without parallel.zero."""
        return self.split + self.whole + self.experts

    @property
    def shard(self) -> int:
        """All that the rank has under parallel.zero."""
        return self.dense_rows + self.expert_rows

    @staticmethod
    def sum(parts: Iterable[Held]) -> Held:
        """Add parts up."""
        return Held(*map(sum, zip((0, 0, 0, 0, 0), *parts, strict=True)))


def held(weights: list[Weight], tp: int, ep: int, fsdp: int, efsdp: int) -> Held:
    """Return the elements of some parameters on the rank that holds most.

    tp and ep divide first; then fsdp ranks (efsdp for experts) divide dimension 0, and the first
    of them holds the rows that are left over.
    """
    found = dict.fromkeys(Held._fields, 0)
    for shape, split in weights:
        rows, inner = (*shape, 1)[0], prod(shape[1:])
        expert = split == "experts"
        rows = -(-rows // {"columns": tp, "experts": ep}.get(split, 1))
        inner = -(-inner // tp) if split == "rows" else inner
        found[split if split in found else "split"] += rows * inner
        shards = efsdp if expert else fsdp
        found["expert_rows" if expert else "dense_rows"] += -(-rows // shards) * inner
    return Held(**found)


@lru_cache(maxsize=4096)
def held_of(model: ModelConfig, part: str | bool, *ranks: int) -> Held:
    """Return `held` of an end, or of a dense (True) or MoE (False) block; ranks as there."""
    weights = block_weights if isinstance(part, bool) else end_weights
    return held(weights(model, part), *ranks)


def built_weights(config: Config) -> dict[str | int, list[Weight]]:
    """Return the parameters of a model without closed forms, read from one on the meta device."""
    from curry_train.models.protocol import build_model

    found: dict[str | int, list[Weight]] = {"embedding": [], "head": [], 0: []}
    for name, parameter in build_model(config, "meta").named_parameters():
        block = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        end = "head" if name.startswith(("lm_head.", "model.norm.")) else "embedding"
        weight = Weight(tuple(parameter.shape), split_of(name))
        found.setdefault(int(block[1]) if block else end, []).append(weight)
    if getattr(config.model, "tie_word_embeddings", False) and config.parallel.pp > 1:
        found["head"] += found["embedding"]
    return found


def split_of(name: str) -> str:
    """Return what divides a parameter by its name, as parallel/parallelize.py does: see Weight."""
    from curry_train.parallel.parallelize import COLUMN, ROW

    owner, _, leaf = name.rpartition(".")
    layer = owner.rpartition(".")[2]
    if ".experts." in name:
        return "experts"
    if layer in COLUMN or layer in ("embed_tokens", "lm_head") or leaf == "sinks":
        return "columns"
    return "rows" if layer in ROW and leaf == "weight" else "whole"
