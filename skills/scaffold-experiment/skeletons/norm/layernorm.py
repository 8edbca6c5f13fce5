"""LayerNorm: mean and variance of a row removed, then a learned weight and bias.

Source: Ba et al. 2016, "Layer Normalization", equation 4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.layers.linear import local


class SkeletonNameNorm(nn.Module):
    """Standardise the last dimension, then weight * x + bias.

    Shapes: x [..., width] of any float dtype; returns the same shape and dtype. Mean and variance
    are taken in float32 (float64 for float64).
    """

    proved = frozenset({"dp", "tp", "cp", "pp", "ep"})

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.constants = {"weight": 1.0, "bias": 0.0}
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        weight, bias = (local(each).to(wide.dtype) for each in (self.weight, self.bias))
        return F.layer_norm(wide, x.shape[-1:], weight, bias, self.eps).to(x.dtype)
