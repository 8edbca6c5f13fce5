"""Causal grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.config import ModelConfig
from curry_train.layers.linear import Linear
from curry_train.layers.norm import RMSNorm
from curry_train.layers.rope import rotate


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a micro-batch stand; made once per forward, read by every block.

    Shapes: cos and sin [B or 1, 1, S, A] in the compute dtype; doc_ids int64 [B, S] or None.
    Attention stays inside a document when doc_ids is given.
    """

    cos: Tensor
    sin: Tensor
    doc_ids: Tensor | None = None


def visible_keys(
    length: int, window: int | None, doc_ids: Tensor | None, device: torch.device | str
) -> Tensor | None:
    """Return the boolean mask [B or 1, 1, S, S] of keys a query may see, None for plain causal.

    A query sees itself and earlier tokens, at most `window` of them (itself included), and with
    doc_ids only those of its own document. Every row keeps its diagonal, so no softmax is empty.
    """
    if window is None and doc_ids is None:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    mask = mask[None, None]
    if doc_ids is not None:
        mask = mask & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    return mask


class Attention(nn.Module):
    """Project to heads, rotate, attend causally, project back.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype. Query head h reads key/value
    head h // (H / G). With qk_norm, queries and keys are RMS-normalised per head before rotation.
    Source: Ainslie et al. 2023, "GQA"; q/k norm as in Qwen3. The core is PyTorch's SDPA.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = config.sliding_window
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_width)
        self.k_proj = Linear(config.hidden_size, key_width)
        self.v_proj = Linear(config.hidden_size, key_width)
        self.o_proj = Linear(query_width, config.hidden_size)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        batch, length, _ = x_BSD.shape
        heads = (batch, length, -1, self.head_dim)
        q = self.q_norm(self.q_proj(x_BSD).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BSD).view(heads)).transpose(1, 2)
        v = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        q = rotate(q, positions.cos, positions.sin)
        k = rotate(k, positions.cos, positions.sin)
        mask = visible_keys(length, self.window, positions.doc_ids, x_BSD.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
