"""How tensors get to disk and back: torch plans the parts, this file guards and moves them.

torch.distributed.checkpoint's planners say who writes and reads which part of which tensor. Its
own storage keeps metadata in a pickle, which must never be opened, so storage is ours: safetensors
files, written in one pass and read through a memory map.

torch drops one of two parts with equal name and offset without looking at them. Expert-parallel
ranks that each call their own experts `experts.up_proj` would lose all but one rank's, and the
loss would show only after the next load. So every part that several ranks hold is compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.tensor import DTensor

from curry_train.checkpoint import DTYPES, CheckpointError


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as the manifest does: float32, not torch.float32."""
    return str(dtype).removeprefix("torch.")


def rank_file(rank: int) -> str:
    """Name the file of what belongs to one rank alone."""
    return f"rank-{rank:05d}.safetensors"


class GuardedPlanner(DefaultSavePlanner):
    """Write each part once, spread over the ranks; refuse parts that clash or leave holes."""

    def __init__(self, *, compare_replicas: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._compare_replicas = compare_replicas

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # Uneven sharding leaves some ranks without rows; such a part has nothing to write.
        items = [i for i in plan.items if _elements(i) > 0 or math.prod(_data(i).size) == 0]
        bits = {
            item.index: _fingerprint(self.lookup_object(item.index))
            for item in items
            if self._compare_replicas and _has_replicas(self.state_dict[item.index.fqn])
        }
        return replace(plan, items=items, planner_data=bits)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        problems = _clashes(all_plans)
        if problems:
            raise CheckpointError(problems)
        return super().create_global_plan(all_plans)


def _clashes(plans: list[SavePlan]) -> list[str]:
    """Say which ranks disagree about a tensor, or how much of it no rank writes.

    Parts that overlap and leave as much unwritten elsewhere are left to torch, which refuses them.
    """
    tensors: dict[str, dict[torch.Size, tuple[int, WriteItem, Any]]] = defaultdict(dict)
    problems = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data, bits = item.index.fqn, _data(item), plan.planner_data.get(item.index)
            parts = tensors[name]
            twin, other, twin_bits = parts.setdefault(data.chunk.offsets, (rank, item, bits))
            first, known, _ = next(iter(parts.values()))
            if _kind(known) != _kind(item):
                problems.append(
                    f"tensor {name}: rank {first} holds {_kind(known)}, rank {rank} {_kind(item)}; "
                    "every rank must hold the global shape"
                )
            elif (_data(other).chunk.sizes, twin_bits) != (data.chunk.sizes, bits):
                problems.append(
                    f"tensor {name}: ranks {twin} and {rank} write the same part, offset "
                    f"{[*data.chunk.offsets]}, with different content; shard the tensor (DTensor) "
                    "or make the replicas equal"
                )
    for name, parts in tensors.items() if not problems else ():
        ranks, items, _ = zip(*parts.values(), strict=True)
        written, total = sum(map(_elements, items)), math.prod(_data(items[0]).size)
        if written != total:
            problems.append(
                f"tensor {name} ({_kind(items[0])}): ranks {sorted({*ranks})} write {written} of "
                f"its {total} elements; every element must be written once"
            )
    return problems


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "dcp.save lets only tensors pass"
    return item.tensor_data


def _elements(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes)


def _kind(item: WriteItem) -> str:
    data = _data(item)
    return f"{dtype_name(data.properties.dtype)} {[*data.size]}"


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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the disk into a CheckpointError that names what was written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; the new checkpoint is dropped, older "
            "ones stay valid. Free disk space or lower run.keep"
        ) from error


def write_file(path: Path, chunks: Iterable[Any]) -> dict[str, Any]:
    """Write byte chunks to a new file, flush it to disk and return its entry for the manifest.

    The hash is taken beside the write, so a save costs the slower of the two, not their sum.
    """
    digest, size = hashlib.sha256(), 0
    with writing(path), path.open("xb") as file, ThreadPoolExecutor(1) as hashing:
        for chunk in chunks:
            data = memoryview(chunk).cast("B")
            hashed = hashing.submit(digest.update, data)
            size += file.write(data)
            hashed.result()
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Stream tensors to a safetensors file; at most one of them is held as a CPU copy."""
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    header, end = {}, 0
    for key, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPES[dtype_name(tensor.dtype)]
        header[key] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in ordered:
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    return write_file(path, chunks())


def write_parts(
    folder: Path, rank: int, plan: SavePlan, planner: SavePlanner
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write what the plan gives this rank; return its words for files and tensors in the manifest.

    Nothing to write: no file.
    """
    file, parts, entries = f"tensors-{rank:05d}.safetensors", {}, {}
    for item in plan.items:
        data, key = _data(item), item.index.fqn
        offset, shape = [*data.chunk.offsets], [*data.chunk.sizes]
        if data.chunk.sizes != data.size:
            key += "@" + ",".join(map(str, offset))
        parts[key] = planner.resolve_data(item)
        dtype = dtype_name(data.properties.dtype)
        entry = {"dtype": dtype, "shape": [*data.size], "chunks": []}
        chunk = {"offset": offset, "shape": shape, "file": file, "key": key}
        entries.setdefault(item.index.fqn, entry)["chunks"].append(chunk)
    return [write_safetensors(folder / file, parts)] if parts else [], entries


def read_parts(folder: Path, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Copy what this rank holds of each tensor from the files' memory maps, in place.

    saved: the tensors of the manifest. Raises: CheckpointError with the file and key.
    """
    places, state = {}, {}
    for name, entry in saved.items():
        boxes = []
        for chunk in entry["chunks"]:
            offset = torch.Size(chunk["offset"])
            boxes.append(ChunkStorageMetadata(offset, torch.Size(chunk["shape"])))
            places[MetadataIndex(name, offset)] = (DTYPES[entry["dtype"]], chunk)
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        state[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), boxes)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), Metadata(state))
    by_file = defaultdict(list)
    for item in planner.create_local_plan().items:
        by_file[places[item.storage_index][1]["file"]].append(item)
    for file, items in by_file.items():
        path = folder / file
        try:
            with safe_open(path, framework="pt") as stored:
                for item in items:
                    region = _region(stored, path, item, *places[item.storage_index])
                    planner.resolve_tensor(item).detach().copy_(region)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no valid safetensors file: {error}") from None


def _region(stored: Any, path: Path, item: ReadItem, dtype: str, chunk: dict[str, Any]) -> Tensor:
    """Return the slice of a stored chunk that an item asks for."""
    block = stored.get_slice(chunk["key"])
    found = f"{block.get_dtype()} {block.get_shape()}"
    if found != f"{dtype} {chunk['shape']}":
        wanted = f"{dtype} {chunk['shape']}"
        raise CheckpointError(f"{path} key {chunk['key']} is {found}, the manifest says {wanted}")
    if not chunk["shape"]:
        return stored.get_tensor(chunk["key"])
    bounds = zip(item.storage_offsets, item.lengths, strict=True)
    return block[tuple(slice(start, start + length) for start, length in bounds)]
