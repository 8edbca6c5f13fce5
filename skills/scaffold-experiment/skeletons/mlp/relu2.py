"""A feed-forward with squared ReLU and no gate: down(relu(up(x)) ** 2).

Two matrices instead of three: at equal model.intermediate_size it has two thirds of the parameters,
so compare it at 1.5 times the width.
Source: So et al. 2021, "Primer: Searching for Efficient Transformers", section 4.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curry_train.layers.linear import Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.parallel.collectives import gather_sequence


class SkeletonNameMLP(SwiGLU):
    """Compute down(relu(up(x)) ** 2), with the groups and names of `SwiGLU`.

    Shapes: x [..., S, hidden_size]; returns the same shape and dtype.
    """

    proved = frozenset({"dp", "tp", "cp", "pp", "ep"})

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        nn.Module.__init__(self)  # without the gate
        self.tp: ProcessGroup | None = None
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(gather_sequence(x, self.tp)).relu().square())
