"""A gated feed-forward with GELU: down(gelu(gate(x)) * up(x)).

Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6, GEGLU; GELU is the exact one.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from curry_train.layers.mlp import SwiGLU
from curry_train.parallel.collectives import gather_sequence


class SkeletonNameMLP(SwiGLU):
    """Compute down(gelu(gate(x)) * up(x)), with the parameters and groups of `SwiGLU`.

    Shapes: x [..., S, hidden_size]; returns the same shape and dtype.
    """

    proved = frozenset({"dp", "tp", "cp", "pp", "ep"})

    def forward(self, x: Tensor) -> Tensor:
        x = gather_sequence(x, self.tp)
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))
