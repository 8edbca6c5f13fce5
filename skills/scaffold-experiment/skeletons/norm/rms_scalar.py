"""RMSNorm with one learned gain instead of one for each entry.

A gain per entry can be folded into the matrix that follows; what is left is one number a norm. At
its start, 1, it is the baseline's norm at its start.
Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4, with a scalar.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curry_train.layers.linear import local


class SkeletonNameNorm(nn.Module):
    """Scale the last dimension to unit root mean square, then by one learned number.

    Shapes: x [..., width] of any float dtype; returns the same shape and dtype. The mean square is
    taken in float32 (float64 for float64).
    """

    proved = frozenset({"dp", "tp", "cp", "pp", "ep"})

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(1))
        self.constants = {"gain": 1.0}
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return local(self.gain).to(x.dtype) * (wide * scale).to(x.dtype)
