"""A norm to be changed: as it stands, the mathematics of the baseline.

Change `forward` and keep `tests/test_skeleton_name_norm.py` green. Parameters start at what
`constants` says, others normal with model.initializer_range (layers/variants.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curry_train.layers.linear import local


class SkeletonNameNorm(nn.Module):
    """Scale the last dimension to unit root mean square, then by a learned weight.

    Shapes: x [..., width] of any float dtype; returns the same shape and dtype. Layouts beyond
    `proved` are refused: name tp, cp, pp or ep there once the tests, which then prove it, pass.
    """

    proved = frozenset({"dp"})

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.constants = {"weight": 1.0}
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return local(self.weight).to(x.dtype) * (wide * scale).to(x.dtype)
