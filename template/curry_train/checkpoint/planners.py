"""Who writes and reads which part: torch's own planners, refusing what they let pass.

torch drops one of two parts with equal name and offset without looking at them. Expert-parallel
ranks that each call their own experts `experts.up_proj` would lose all but one rank's, and the
loss would show only after the next load. So every part that several ranks hold is compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from curry_train.checkpoint import CheckpointError


class SavePlanner(DefaultSavePlanner):
    """Write each part once, spread over the ranks; refuse parts that clash or leave holes."""

    def __init__(self, *, compare_replicas: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._compare_replicas = compare_replicas

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if not _is_empty_shard(item)]
        bits = {}
        if self._compare_replicas:
            for item in items:
                if _has_replicas(self.state_dict[item.index.fqn]):
                    bits[item.index] = _fingerprint(self.lookup_object(item.index))
        return replace(plan, items=items, planner_data=bits)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors = _parts_by_name(all_plans)
        problems = [problem for parts in tensors.values() for problem in _clashes(parts)]
        if problems:
            raise CheckpointError(problems)
        try:
            return super().create_global_plan(all_plans)
        except ValueError as error:
            overlaps = [problem for parts in tensors.values() for problem in _overlaps(parts)]
            raise CheckpointError(overlaps or str(error)) from None


class LoadPlanner(DefaultLoadPlanner):
    """Read tensors only; torch's planner would unpickle anything else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor; nothing is unpickled here")


class _Part(NamedTuple):
    name: str
    rank: int
    kind: str
    total: int
    offset: list[int]
    shape: list[int]
    bits: int | None


def _parts_by_name(plans: list[SavePlan]) -> dict[str, list[_Part]]:
    tensors: dict[str, list[_Part]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None or item.tensor_data.chunk is None:
                raise CheckpointError(f"{item.index.fqn} is no tensor; only tensors are saved")
            chunk, size = item.tensor_data.chunk, item.tensor_data.size
            dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
            name, kind, bits = item.index.fqn, f"{dtype} {[*size]}", plan.planner_data
            place = [*chunk.offsets], [*chunk.sizes]
            part = _Part(name, rank, kind, math.prod(size), *place, bits.get(item.index))
            tensors[name].append(part)
    return tensors


def _clashes(parts: list[_Part]) -> list[str]:
    """Say which ranks disagree about one tensor, or how much of it no rank writes."""
    first, problems = parts[0], []
    unique: dict[tuple[int, ...], _Part] = {}
    for part in parts:
        if part.kind != first.kind:
            problems.append(
                f"tensor {part.name}: rank {first.rank} holds {first.kind}, rank {part.rank} "
                f"{part.kind}; every rank must hold the global shape"
            )
        twin = unique.setdefault(tuple(part.offset), part)
        if (twin.shape, twin.bits) != (part.shape, part.bits):
            problems.append(
                f"tensor {part.name}: ranks {twin.rank} and {part.rank} write the same part, "
                f"offset {part.offset}, with different content; shard the tensor (DTensor) or "
                "make the replicas equal"
            )
    if problems:
        return problems
    written = sum(math.prod(part.shape) for part in unique.values())
    if written == first.total:
        return []
    return _overlaps(parts) or [
        f"tensor {first.name} ({first.kind}): ranks {sorted({part.rank for part in parts})} write "
        f"{written} of its {first.total} elements; every element must be written"
    ]


def _overlaps(parts: list[_Part]) -> list[str]:
    """Name the first two ranks whose parts of one tensor overlap without being the same part."""
    for at, part in enumerate(parts):
        for other in parts[:at]:
            axes = zip(part.offset, part.shape, other.offset, other.shape, strict=True)
            if part.offset != other.offset and all(
                start < low + width and low < start + length for start, length, low, width in axes
            ):
                return [
                    f"tensor {part.name}: ranks {other.rank} and {part.rank} write overlapping "
                    f"parts, {other.shape} at {other.offset} and {part.shape} at {part.offset}"
                ]
    return []


def _is_empty_shard(item: WriteItem) -> bool:
    """Uneven sharding leaves some ranks without rows; such a part has nothing to write."""
    data = item.tensor_data
    return (
        data is not None
        and data.chunk is not None
        and math.prod(data.chunk.sizes) == 0
        and math.prod(data.size) > 0
    )


def _has_replicas(value: Tensor) -> bool:
    if not isinstance(value, DTensor):
        return True
    axes = zip(value.placements, value.device_mesh.shape, strict=True)
    return any(placement.is_replicate() and size > 1 for placement, size in axes)


def _fingerprint(tensor: Tensor) -> int:
    """Sum the bits of every row, weighted by the row: unequal replicas show in eight bytes."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
    rows = bits.reshape(bits.shape[0] if bits.ndim else 1, -1).sum(1, dtype=torch.int64)
    return int((rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum())
