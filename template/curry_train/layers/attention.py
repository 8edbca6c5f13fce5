"""Causal grouped-query attention, with windows, documents and sinks, on PyTorch's SDPA.

A sink is a logit of a head that takes part in the softmax and gives no value. Here it is one more
token in front of the sequence: its key is a unit vector in a dimension of its own, in which every
query holds its head's logit, and its value is zero. So it is exact, its gradient is that of a query
entry, plain causal attention needs no mask, and every fused kernel, dtype and mask of SDPA works.
Scaling SDPA's output by the sink's share would need its log-sum-exp, which the public function
does not return; an additive mask with a gradient would cost [H, S, S] and the fused kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curry_train.config import ModelConfig
from curry_train.layers.linear import Linear, local
from curry_train.layers.norm import RMSNorm
from curry_train.layers.rope import rotary_angles, rotate, softmax_scale
from curry_train.parallel import context_parallel
from curry_train.parallel.collectives import gather_sequence, own_slice

SINK_DIMS = 8  # one is needed; fused kernels take widths that are multiples of 8


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a micro-batch stand; made once per forward, read by every block.

    Shapes: cos and sin [B or 1, 1, S, A] in the compute dtype; doc_ids int64 [B, S] or None;
    masks holds for each window of the model what SDPA adds to the scores, see `positions_of`;
    empty under ring attention, which knows what is visible. S are the tokens that attention
    sees here. Between the parts of a block a rank may hold a slice of them: real bool [B, S'] tells
    its tokens from padding (None: all are), places int64 [S'] where they stand in the whole
    sequence (None: it is whole).
    """

    cos: Tensor
    sin: Tensor
    doc_ids: Tensor | None = None
    masks: Mapping[int | None, Tensor | None] = field(default_factory=dict)
    real: Tensor | None = None
    places: Tensor | None = None


def sequence_places(length: int, cp: ProcessGroup | None, device: torch.device) -> Tensor:
    """Return where this rank's `length` tokens stand in the whole sequence, int64 [S]."""
    if cp is None:
        return torch.arange(length, device=device)
    return context_parallel.places(length * cp.size(), cp.rank(), cp.size(), device)


def positions_of(
    config: ModelConfig,
    position_ids: Tensor,
    doc_ids: Tensor | None,
    dtype: torch.dtype,
    *,
    cp: ProcessGroup | None = None,
    cp_kind: str = "ring",
    tp: ProcessGroup | None = None,
) -> Positions:
    """Return the Positions of a micro-batch for every block of the model.

    Shapes: position_ids int64 [B, S] (or [1, S] when all samples agree), which turn queries and
    keys; doc_ids int64 [B, S] or None, between which nothing is seen. A mask is [B or 1, 1, S, S]
    in `dtype`, 0 where a key is seen and minus infinity elsewhere, so that no block converts or
    keeps one of its own; None stands for plain causal attention. With sinks it has a row and a
    column more, in front. Groups: cp and tp, whose ranks share the sequence; with cp_kind
    all_gather masks have the keys of all ranks, and cp gathers the documents once.
    """
    length, device = position_ids.shape[1], position_ids.device
    cos, sin = rotary_angles(config, position_ids, dtype)
    masks: dict[int | None, Tensor | None] = {}
    for window in {config.window_of(layer) for layer in range(config.num_hidden_layers)}:
        if cp is not None and cp_kind == "ring":
            break
        seen = context_parallel.visible_rows(length, window, doc_ids, cp, device)
        if seen is None:
            masks[window] = None
            continue
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        mask = mask.masked_fill(~seen, -torch.inf)
        masks[window] = F.pad(mask, (1, 0, 1, 0)) if config.attention_sinks else mask
    # The loader gives padding the document -1.
    real = None if doc_ids is None else own_slice(doc_ids >= 0, 1, tp)
    places = None
    if cp is not None or tp is not None:
        places = own_slice(sequence_places(length, cp, device), 0, tp)
    return Positions(cos, sin, doc_ids, masks, real, places)


def visible_keys(
    length: int, window: int | None, doc_ids: Tensor | None, device: torch.device | str
) -> Tensor | None:
    """Return the boolean mask [B or 1, 1, S, S] of keys a query may see, None for plain causal.

    A query sees itself and earlier tokens, at most `window` of them (itself included), and with
    doc_ids only those of its own document. Every row keeps its diagonal, so no softmax is empty.
    """
    if (window is None or window >= length) and doc_ids is None:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    mask = mask[None, None]
    if doc_ids is not None:
        mask = mask & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    return mask


def attend(
    q_BHSA: Tensor,
    k_BGSA: Tensor,
    v_BGSA: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T + mask) v of every head, side by side.

    Shapes: q [B, H, S, A]; k [B, G, S, A]; v [B, G, S, any width up to A]; mask as in Positions,
    None for plain causal; sinks [H] or None. Returns [B, S, H * width of v] in the dtype of q.
    Query head h reads key/value head h // (H / G). A narrower v is padded with zeros, because
    fused kernels take one width only.
    """
    width = v_BGSA.shape[-1]
    if sinks_H is not None:
        # Row 0 is the sink. As a query it reads nothing that anyone uses: it is cut off below.
        q_BHSA = F.pad(q_BHSA, (0, SINK_DIMS, 1, 0))
        k_BGSA = F.pad(k_BGSA, (0, SINK_DIMS, 1, 0))
        q_BHSA[..., -1] = (sinks_H / scale).to(q_BHSA.dtype)[:, None]
        k_BGSA[:, :, 0, -1] = 1.0
        v_BGSA = F.pad(v_BGSA, (0, 0, 1, 0))
    if width != q_BHSA.shape[-1]:
        v_BGSA = F.pad(v_BGSA, (0, q_BHSA.shape[-1] - width))
    out_BHSA = F.scaled_dot_product_attention(
        q_BHSA,
        k_BGSA,
        v_BGSA,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_BHSA.shape[1] != k_BGSA.shape[1],
    )
    if sinks_H is not None:
        out_BHSA = out_BHSA[:, :, 1:]
    return out_BHSA[..., :width].transpose(1, 2).flatten(2)


def attend_with(
    layer: Any, q_BHSA: Tensor, k_BGSA: Tensor, v_BGSA: Tensor, positions: Positions
) -> Tensor:
    """Return [B, S, H * width of v]: attention by the window, scale and groups of `layer`.

    Shapes: q [B, H, S, A]; k [B, G, S, A]; v [B, G, S, width]. Group: cp of the layer.
    """
    sinks = None if layer.sinks is None else local(layer.sinks)
    if layer.cp is None:
        return attend(q_BHSA, k_BGSA, v_BGSA, positions.masks[layer.window], layer.scale, sinks)
    return context_parallel.context_attend(
        q_BHSA,
        k_BGSA,
        v_BGSA,
        scale=layer.scale,
        window=layer.window,
        doc_ids=positions.doc_ids,
        sinks_H=sinks,
        group=layer.cp,
        kind=layer.cp_kind,
        mask=positions.masks.get(layer.window),
    )


class Attention(nn.Module):
    """Project to heads, rotate, attend causally, project back.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype. With qk_norm, queries and keys
    are RMS-normalised before rotation, each head or all heads at once (qk_norm_width), and then
    clipped with the values to clip_qkv; attention_bias gives all four projections biases;
    `layer` decides whether sliding_window holds. With tensor parallelism (`tp` is its group) a rank
    has its share of the heads, and S of x is its slice; with context parallelism (`cp`, `cp_kind`)
    the keys of other ranks' tokens come from them.
    Source: Ainslie et al. 2023, "GQA"; q/k norm as in Qwen3, or as in OLMoE (Muennighoff et al.
    2024); sinks as in gpt-oss (OpenAI 2025), after Xiao et al. 2023, "Efficient Streaming Language
    Models with Attention Sinks".
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.tp: ProcessGroup | None = None
        self.cp: ProcessGroup | None = None
        self.cp_kind = "ring"
        self.head_dim = config.head_dim
        self.window = config.window_of(layer)
        self.scale = softmax_scale(config)
        self.interleaved = config.rope_interleave
        width, bias = config.hidden_size, config.attention_bias
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(width, query_width, bias)
        self.k_proj = Linear(width, key_width, bias)
        self.v_proj = Linear(width, key_width, bias)
        self.o_proj = Linear(query_width, width, bias and config.attention_out_bias)
        self.clip = config.clip_qkv
        self.norm_whole = config.qk_norm_width == "projection"
        if config.qk_norm:
            widths = (query_width, key_width) if self.norm_whole else (self.head_dim,) * 2
            self.q_norm, self.k_norm = (RMSNorm(width, config.rms_norm_eps) for width in widths)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.sinks = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self.tp)
        q = self.heads_of(self.q_proj(x_BSD), self.q_norm)
        k = self.heads_of(self.k_proj(x_BSD), self.k_norm)
        v = self.heads_of(self.v_proj(x_BSD), None)
        q = rotate(q, positions.cos, positions.sin, self.interleaved)
        k = rotate(k, positions.cos, positions.sin, self.interleaved)
        return self.o_proj(attend_with(self, q, k, v, positions))

    def heads_of(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Return a projection [B, S, heads * A] as heads [B, heads, S, A], normalised, clipped."""
        heads = (*x.shape[:2], -1, self.head_dim)
        if norm is None:
            x = x.view(heads)
        else:
            x = norm(x).view(heads) if self.norm_whole else norm(x.view(heads))
        if self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        return x.transpose(1, 2)
