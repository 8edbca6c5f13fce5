"""What one rank holds of a tensor that all ranks together make."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
        """Return the box that is all of `tensor`."""
        return Part(tensor, tuple(tensor.shape), (0,) * tensor.dim())
