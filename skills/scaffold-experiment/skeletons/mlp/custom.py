"""A feed-forward to be changed: as it stands, the mathematics of the baseline.

Change `forward` and keep `tests/test_skeleton_name_mlp.py` green. A new parameter starts normal
with model.initializer_range unless `constants` or `deviations` name it (layers/variants.py).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from curry_train.layers.mlp import SwiGLU
from curry_train.parallel.collectives import gather_sequence


class SkeletonNameMLP(SwiGLU):
    """Compute down(silu(gate(x)) * up(x)).

    Shapes: x [..., S, hidden_size]; returns the same shape and dtype. Layouts beyond `proved` are
    refused: name tp, cp, pp or ep there once the tests, which then prove it, pass.
    """

    proved = frozenset({"dp"})

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(hidden_size, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        x = gather_sequence(x, self.tp)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
