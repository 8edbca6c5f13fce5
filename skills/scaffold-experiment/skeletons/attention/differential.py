"""Differential attention: the difference of two softmax maps.

Heads come in pairs. A pair of query and key heads makes two maps over the same values, which are
two value heads side by side, and what both maps have in common, noise mostly, is subtracted:

    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    head = (1 - lambda_init) * RMSNorm((softmax(Q1 K1^T) - lambda softmax(Q2 K2^T)) V)

with lambda_init = 0.8 - 0.6 exp(-0.3 l) in block l from 0; all heads of a block share lambda.
Projections have the sizes of the baseline; six vectors of a head's width are new.
Source: Ye et al. 2024, "Differential Transformer", equations 1 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.config import Config, ModelConfig
from curry_train.layers.attention import Attention, Positions, attend_with
from curry_train.layers.linear import local
from curry_train.layers.norm import RMSNorm
from curry_train.layers.rope import rotate
from curry_train.parallel.collectives import gather_sequence

LAMBDA_STD = 0.1


class SkeletonNameAttention(Attention):
    """Differential attention in the place of `Attention`, same arguments, groups and shapes.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype. Key heads 2j and 2j + 1 are K1
    and K2 of pair j, and the query heads that read them are its Q1 and Q2.
    """

    proved = frozenset({"dp", "tp", "cp", "pp", "ep"})

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambda_q1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k1 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_q2 = nn.Parameter(torch.empty(self.head_dim))
        self.lambda_k2 = nn.Parameter(torch.empty(self.head_dim))
        self.head_norm = RMSNorm(2 * self.head_dim, config.rms_norm_eps)
        names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        self.deviations = dict.fromkeys(names, LAMBDA_STD)

    @staticmethod
    def refusals(config: Config) -> Iterator[tuple[str, str]]:
        """Yield (key, why) for settings that leave half a pair on a rank, or have no pairs."""
        heads, tp = config.model.num_key_value_heads, config.parallel.tp
        if heads % 2:
            yield (
                "model.num_key_value_heads",
                "model.attention=skeleton_name pairs the key heads; set an even number",
            )
        elif heads % (2 * tp):
            yield (
                "parallel.tp",
                f"model.attention=skeleton_name needs whole pairs of key heads on every rank, and"
                f" model.num_key_value_heads={heads} makes {heads // 2}; set parallel.tp to a"
                " divisor of that",
            )
        if config.model.attention_sinks:
            yield (
                "model.attention_sinks",
                "model.attention=skeleton_name has none; set model.attention_sinks=false",
            )

    def mix(self) -> Tensor:
        """Return lambda as a scalar, in float32 (float64 for float64)."""
        vectors = (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        q1, k1, q2, k2 = (local(vector) for vector in vectors)
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self.tp)
        q_BHSA = self.heads_of(self.q_proj(x_BSD), self.q_norm)
        k_BGSA = self.heads_of(self.k_proj(x_BSD), self.k_norm)
        q_BHSA = rotate(q_BHSA, positions.cos, positions.sin, self.interleaved)
        k_BGSA = rotate(k_BGSA, positions.cos, positions.sin, self.interleaved)
        # Values are two heads wide, and fused attention takes one width: zeros change no score.
        q_BHSA, k_BGSA = (F.pad(x, (0, self.head_dim)) for x in (q_BHSA, k_BGSA))
        v_BGSA = self.heads_of(self.v_proj(x_BSD), None).unflatten(1, (-1, 2))
        v_BGSA = v_BGSA.transpose(2, 3).flatten(3).repeat_interleave(2, dim=1)
        maps = attend_with(self, q_BHSA, k_BGSA, v_BGSA, positions)
        pairs = k_BGSA.shape[1] // 2
        first, second = maps.unflatten(2, (pairs, 2, -1)).unbind(3)
        out = (first - self.mix().to(first.dtype) * second).unflatten(3, (-1, 2 * self.head_dim))
        return self.o_proj((self.head_norm(out) * (1 - self.lambda_init)).flatten(2))
