"""Where each of our tensors lies in the files of a family. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from curry_train.checkpoint.families import Family


class Source(NamedTuple):
    """Where a tensor of ours, or one expert of it, lies in files.

    key, shape: of the tensor in the file. expert: the index in our first dimension, None: all of
    it. half: 0 or 1 takes every second of the last dimension, from there on. transposed: the last
    two dimensions are swapped. rows: 0 or 1 takes the first or the second half of the last but one.
    """

    key: str
    shape: tuple[int, ...]
    expert: int | None = None
    half: int | None = None
    transposed: bool = False
    rows: int | None = None


def sources(family: Family, name: str, shape: tuple[int, ...]) -> list[Source]:
    """Return where the tensor `name` of this global shape lies in the files of a family."""

    def theirs(ours: str) -> str:
        for piece, other in family.names.items():
            ours = ours.replace(piece, other)
        return ours

    bank, stacked, leaf = name.partition(".experts.")
    if not stacked:
        return [Source(theirs(name), shape)]
    if family.experts == "each":
        return [
            Source(theirs(f"{bank}.experts.{expert}.{leaf}"), shape[1:], expert)
            for expert in range(shape[0])
        ]
    matrix, _, kind = leaf.partition(".")
    half = {"gate_proj": 0, "up_proj": 1}.get(matrix)
    if family.experts == "stacked":
        count, *others = shape
        if half is None:
            return [Source(f"{bank}.experts.{matrix}", shape)]
        sizes = (count, 2 * others[0], *others[1:])
        return [Source(f"{bank}.experts.gate_up_proj", sizes, rows=half)]
    transposed = kind == "weight"
    sizes = (shape[0], shape[2], shape[1]) if transposed else shape
    if half is not None:
        sizes, matrix = (*sizes[:-1], 2 * sizes[-1]), "gate_up_proj"
    key = theirs(f"{bank}.experts.{matrix}{'' if transposed else '_bias'}")
    return [Source(key, sizes, None, half, transposed)]
