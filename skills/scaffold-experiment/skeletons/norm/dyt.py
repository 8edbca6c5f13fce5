"""Dynamic tanh: no statistics at all, a learned squashing of every entry.

    y = weight * tanh(alpha * x) + bias

alpha is one number a norm and starts at 0.5; model.rms_norm_eps is not read.
Source: Zhu et al. 2025, "Transformers without Normalization", equation 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curry_train.layers.linear import local

START = 0.5


class SkeletonNameNorm(nn.Module):
    """Compute weight * tanh(alpha * x) + bias in the place of `RMSNorm`.

    Shapes: x [..., width] of any float dtype; returns the same shape and dtype.
    """

    proved = frozenset({"dp", "tp", "cp", "pp", "ep"})

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.constants = {"alpha": START, "weight": 1.0, "bias": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        alpha, weight, bias = (local(p).to(x.dtype) for p in (self.alpha, self.weight, self.bias))
        return weight * torch.tanh(alpha * x) + bias
