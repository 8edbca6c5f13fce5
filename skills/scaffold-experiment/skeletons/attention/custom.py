"""Attention to be changed: as it stands, the mathematics of the baseline.

Change `forward` and keep `tests/test_skeleton_name_attention.py` green. A new parameter starts
normal with model.initializer_range unless `constants` or `deviations` name it (layers/variants.py).
"""

from __future__ import annotations

from torch import Tensor

from curry_train.config import ModelConfig
from curry_train.layers.attention import Attention, Positions, attend_with
from curry_train.layers.rope import rotate
from curry_train.parallel.collectives import gather_sequence


class SkeletonNameAttention(Attention):
    """Project to heads, rotate, attend causally, project back.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype. Heads are q [B, H, S, A], k and
    v [B, G, S, A], H and G those of this rank. Layouts beyond `proved` are refused: name tp, cp, pp
    or ep there once the tests, which then prove it, pass.
    """

    proved = frozenset({"dp"})

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self.tp)
        q = self.heads_of(self.q_proj(x_BSD), self.q_norm)
        k = self.heads_of(self.k_proj(x_BSD), self.k_norm)
        v = self.heads_of(self.v_proj(x_BSD), None)
        q = rotate(q, positions.cos, positions.sin, self.interleaved)
        k = rotate(k, positions.cos, positions.sin, self.interleaved)
        return self.o_proj(attend_with(self, q, k, v, positions))
