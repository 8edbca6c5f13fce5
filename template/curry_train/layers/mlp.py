"""The dense feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curry_train.layers.linear import Linear
from curry_train.parallel.collectives import gather_sequence


class SwiGLU(nn.Module):
    """Compute down(silu(gate(x)) * up(x)).

    Shapes: x [..., S, hidden_size]; returns the same shape and dtype. With tensor parallelism (`tp`
    is its group, and the projections are parallel ones) S is the rank's own slice.
    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.tp: ProcessGroup | None = None
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = gather_sequence(x, self.tp)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
