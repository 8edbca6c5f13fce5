"""Gated attention: what a head found, times a gate that the token itself opens.

    out = W_o (softmax(Q K^T) V * sigmoid(W_g x))

The gate has one entry for each of a head's, no bias, and makes attention sinks needless: a head
that found nothing closes. One matrix of the size of W_q is new.
Source: Qiu et al. 2025, "Gated Attention for Large Language Models", equation 5, position G1.
"""

from __future__ import annotations

from torch import Tensor

from curry_train.config import ModelConfig
from curry_train.layers.attention import Attention, Positions, attend_with
from curry_train.layers.linear import Linear
from curry_train.layers.rope import rotate
from curry_train.parallel.collectives import gather_sequence


class SkeletonNameAttention(Attention):
    """Attention with a gate on its output, same arguments, groups and shapes as `Attention`.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype. Under tensor parallelism
    gate_proj is split as q_proj is, by heads.
    """

    proved = frozenset({"dp", "tp", "cp", "pp", "ep"})

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.gate_proj = Linear(config.hidden_size, config.num_attention_heads * config.head_dim)

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self.tp)
        q = self.heads_of(self.q_proj(x_BSD), self.q_norm)
        k = self.heads_of(self.k_proj(x_BSD), self.k_norm)
        v = self.heads_of(self.v_proj(x_BSD), None)
        q = rotate(q, positions.cos, positions.sin, self.interleaved)
        k = rotate(k, positions.cos, positions.sin, self.interleaved)
        found = attend_with(self, q, k, v, positions)
        return self.o_proj(found * self.gate_proj(x_BSD).sigmoid())
