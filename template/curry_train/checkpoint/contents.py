"""What lies in checkpoints, read in pieces: statistics and differences of tensors of any size.

No two whole tensors are in memory together, so models that fill a machine can be compared on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curry_train.checkpoint.audit import Told
from curry_train.checkpoint.boxes import Box
from curry_train.checkpoint.storage import read_parts
from curry_train.parallel.shards import Part

PIECE = 16 << 20
"""Bytes of a tensor that are looked at together."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """How far a tensor of one checkpoint is from that of another; the first is the measure.

    largest: of |a - b|, infinite where only one is a NaN; relative: over the largest |a|;
    elements: how many differ in a bit, between dtypes in value; place: of the largest.
    """

    name: str
    largest: float
    relative: float
    elements: int
    of: int
    place: list[int]


class Statistics(NamedTuple):
    """Of the finite elements of a tensor; None without any. std: of all, not a sample."""

    name: str
    mean: float | None
    std: float | None
    smallest: float | None
    largest: float | None
    nonfinite: int


def read_box(checkpoint: Path, saved: Mapping[str, Any], name: str, box: Box) -> Tensor:
    """Return the elements of a box of a tensor, a new CPU tensor of the box's size."""
    (found,) = _read(checkpoint, saved, [(name, box)])
    return found


def pieces(shape: Iterable[int], itemsize: int, limit: int) -> Iterator[Box]:
    """Cut a shape into boxes of at most `limit` bytes (one element at least), in their order."""
    yield from _cut(Box((0,) * len(size := tuple(shape)), size), itemsize, limit)


def _cut(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    dim = next((d for d, size in enumerate(box.size) if size > 1), None)
    if dim is None or box.elements * itemsize <= limit:
        yield box
        return
    rows = max(limit * box.size[dim] // (box.elements * itemsize), 1)
    for start in range(0, box.size[dim], rows):
        offset, size = list(box.offset), list(box.size)
        offset[dim] += start
        size[dim] = min(rows, box.size[dim] - start)
        yield from _cut(Box(tuple(offset), tuple(size)), itemsize, limit)


def _batches(
    saved: Mapping[str, Any], names: Iterable[str], limit: int
) -> Iterator[list[tuple[str, Box]]]:
    """Yield pieces that are read together: a file is opened once for many small tensors."""
    batch: list[tuple[str, Box]] = []
    held = 0
    for name in names:
        itemsize = getattr(torch, saved[name]["dtype"]).itemsize
        for box in pieces(saved[name]["shape"], itemsize, limit):
            size = box.elements * itemsize
            if batch and (held + size > limit or batch[-1][0] == name):
                yield batch
                batch, held = [], 0
            batch.append((name, box))
            held += size
    if batch:
        yield batch


def _read(checkpoint: Path, saved: Mapping[str, Any], batch: list[tuple[str, Box]]) -> list[Tensor]:
    parts = {}
    for name, box in batch:
        memory = torch.empty(box.size, dtype=getattr(torch, saved[name]["dtype"]))
        parts[name] = Part(memory, tuple(saved[name]["shape"]), box.offset)
    read_parts(checkpoint, parts, saved)
    return [part.tensor for part in parts.values()]


def statistics(
    checkpoint: Path,
    saved: Mapping[str, Any],
    names: Iterable[str],
    told: Told = lambda _: None,
    limit: int = PIECE,
) -> Iterator[Statistics]:
    """Yield the statistics of tensors in the order of `names`."""
    name, count, mean, squares, low, high, wrong = "", 0, 0.0, 0.0, math.inf, -math.inf, 0

    def result() -> Statistics:
        if not count:
            return Statistics(name, None, None, None, None, wrong)
        return Statistics(name, mean, math.sqrt(squares / count), low, high, wrong)

    for batch in _batches(saved, names, limit):
        for (current, _), tensor in zip(batch, _read(checkpoint, saved, batch), strict=True):
            if current != name:
                if name:
                    yield result()
                name, count, mean, squares, low, high, wrong = (
                    current, 0, 0.0, 0.0, math.inf, -math.inf, 0,
                )  # fmt: skip
            told(tensor.nbytes)
            values = tensor.double().flatten()
            finite = values[values.isfinite()]
            wrong += values.numel() - finite.numel()
            if not finite.numel():
                continue
            here = float(finite.mean())
            # Chan's sum of two parts: a plain sum of squares loses a small spread about a mean.
            squares += float((finite - here).square().sum())
            squares += (here - mean) ** 2 * count * len(finite) / (count + len(finite))
            mean += (here - mean) * len(finite) / (count + len(finite))
            count += len(finite)
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if name:
        yield result()


def differences(
    first: tuple[Path, Mapping[str, Any]],
    second: tuple[Path, Mapping[str, Any]],
    names: Iterable[str],
    told: Told = lambda _: None,
    limit: int = PIECE,
) -> list[Difference]:
    """Compare tensors of equal shape of two checkpoints; return those that differ, worst first.

    first, second: (folder, tensors of its manifest); they may have other dtypes, chunks and files.
    """
    scales: dict[str, float] = {}
    found: dict[str, tuple[float, int, list[int]]] = {}
    for batch in _batches(first[1], names, limit):
        both = zip(_read(*first, batch), _read(*second, batch), strict=True)
        for (name, box), (here, there) in zip(batch, both, strict=True):
            told(here.nbytes + there.nbytes)
            unequal = _unequal(here, there)
            here, there = here.double(), there.double()
            size = here.abs().nan_to_num(nan=0.0, posinf=0.0)
            scales[name] = max(scales.get(name, 0.0), float(size.max()) if size.numel() else 0.0)
            if not (count := int(unequal.sum())):
                continue
            gap = torch.where(unequal, (here - there).abs(), 0.0)
            gap.nan_to_num_(nan=math.inf, posinf=math.inf)
            at = torch.unravel_index(gap.argmax(), gap.shape)
            place = [int(i) + start for i, start in zip(at, box.offset, strict=True)]
            worst, before, where = found.get(name, (-1.0, 0, []))
            top = float(gap.max())
            found[name] = max(top, worst), before + count, place if top > worst else where
    return sorted(
        (
            Difference(
                name, top, _ratio(top, scales[name]), count, math.prod(first[1][name]["shape"]), at
            )
            for name, (top, count, at) in found.items()
        ),
        key=lambda one: (-one.relative, -one.largest, -one.elements, one.name),
    )


def _unequal(here: Tensor, there: Tensor) -> Tensor:
    if here.dtype == there.dtype:
        kind = _INTEGERS[here.element_size()]
        return here.view(kind) != there.view(kind)
    here, there = here.double(), there.double()
    return (here != there) & ~(here.isnan() & there.isnan())


def _ratio(top: float, scale: float) -> float:
    if not top:
        return 0.0
    return top / scale if scale else math.inf
