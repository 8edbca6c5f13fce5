"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curry_train.layers.linear import local


class RMSNorm(nn.Module):
    """Scale the last dimension to unit root mean square, then by a learned weight.

    Shapes: x [..., width] of any float dtype; returns the same shape and dtype. The mean square
    is taken in float32 (float64 for float64), because bf16 squares lose the sum.
    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def mean_square(self, wide: Tensor) -> Tensor:
        """Return the mean square [..., 1] of rows [..., width]."""
        return wide.square().mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(self.mean_square(wide) + self.eps)
        return local(self.weight).to(x.dtype) * (wide * scale).to(x.dtype)
