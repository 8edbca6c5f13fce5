"""Boxes of a tensor as plain numbers, and whether boxes make a whole. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple


class Box(NamedTuple):
    """The elements offset[d] <= i[d] < offset[d] + size[d] of a tensor; no dimension: a scalar."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return how many elements the box holds."""
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        """Return the first index after the box, for every dimension."""
        return tuple(at + width for at, width in zip(self.offset, self.size, strict=True))

    def meet(self, other: Box) -> Box:
        """Return what both boxes hold; without a common element some size of it is 0."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = map(min, self.end, other.end)
        return Box(begin, tuple(max(end - at, 0) for at, end in zip(begin, ends, strict=True)))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the index that takes this box out of a tensor that holds `other`."""
        begins = [at - first for at, first in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(at, at + width) for at, width in zip(begins, self.size, strict=True))

    def __str__(self) -> str:
        bounds = zip(self.offset, self.end, strict=True)
        return "[" + ", ".join(f"{at}:{end}" for at, end in bounds) + "]"


def outside(box: Box, shape: Sequence[int]) -> bool:
    """Say whether a box is none of a tensor of this shape."""
    if not len(box.offset) == len(box.size) == len(shape):
        return True
    return min((*box.offset, *box.size), default=0) < 0 or any(map(int.__gt__, box.end, shape))


def cover_problem(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Say which boxes overlap or which element no box holds; None when each is held once."""
    held = sorted(box for box in boxes if box.elements)
    open_boxes: list[Box] = []
    for box in held if shape else ():
        # In order of their first row, so only those that reach this row can meet it.
        open_boxes = [other for other in open_boxes if other.end[0] > box.offset[0]]
        for other in open_boxes:
            if common := other.meet(box).elements:
                return f"boxes {other} and {box} overlap in {common} elements"
        open_boxes.append(box)
    found, total = sum(box.elements for box in held), math.prod(shape)
    if found == total:
        return None
    # The first element that is missing lies at the edge of the tensor or behind some box.
    edges = [sorted({0, *(box.end[dim] for box in held)} - {n}) for dim, n in enumerate(shape)]
    corners = (Box(corner, (1,) * len(shape)) for corner in product(*edges))
    first = next(c for c in corners if not any(box.meet(c).elements for box in held))
    return f"boxes hold {found} of its {total} elements, not the one at {[*first.offset]}"
