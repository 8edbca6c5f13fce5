"""The dense feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.layers.linear import Linear


class SwiGLU(nn.Module):
    """Compute down(silu(gate(x)) * up(x)).

    Shapes: x [..., hidden_size]; returns the same shape and dtype.
    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
