"""What one rank holds of a tensor that all ranks together make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Part(NamedTuple):
    """A box of a global tensor: `tensor` holds its values, a view that may be written.

    Shapes: tensor [...] of as many dimensions as `shape`, the global tensor's; the box begins at
    `offset` [...], in elements. A rank without rows holds a box with a size of 0.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def whole(tensor: Tensor) -> Part:
        """Return the box that is all of `tensor`, any shape."""
        return Part(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    def rows(self, index: int, count: int) -> Part:
        """Return the `index`-th of `count` parts along the first dimension, perhaps empty.

        Divides as torch.chunk does: each part but the last has ceil(rows / count) rows.
        """
        rows = len(self.tensor)
        each = -(-rows // count)
        first = min(index * each, rows)
        tensor = self.tensor[first : min(first + each, rows)]
        return Part(tensor, self.shape, (self.offset[0] + first, *self.offset[1:]))


@dataclass
class Shard:
    """A parameter as this rank sees it.

    name: canonical, the same in every layout. parameter: the model's own. local: the part of it
    that this rank computes with, or keeps between steps when FSDP gathers it. own: the part whose
    moments this rank has; its tensor is the plain parameter that the optimizer updates. sums: the
    ranks whose gradients are still to be added after backward. gathers: the ranks that hold the
    other rows of `local` in their `own` (parallel.zero=1). copies: ranks with the same `own`. tied:
    this is a second copy of a weight, made equal to the first by every step.
    """

    name: str
    parameter: nn.Parameter
    local: Part
    own: Part
    sums: ProcessGroup | None = None
    gathers: ProcessGroup | None = None
    copies: int = 1
    tied: bool = False

    @property
    def owned(self) -> nn.Parameter:
        """What the optimizer updates."""
        assert isinstance(self.own.tensor, nn.Parameter)
        return self.own.tensor

    def local_grad(self) -> Tensor:
        """Return the gradient of `local`, same shape, zero when backward gave none; a view."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return values(self.parameter.grad)


def values(tensor: Tensor) -> Tensor:
    """Return this rank's values of a tensor or DTensor of any shape, a view."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_shards(named: Iterable[tuple[str, nn.Parameter]]) -> list[Shard]:
    """Return the shards of one process: every parameter is its own, whole."""
    return [Shard(name, p, Part.whole(p), Part.whole(p)) for name, p in named]
