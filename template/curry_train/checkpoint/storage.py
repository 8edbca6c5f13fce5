"""Tensors on disk: safetensors files, written in one pass and read through a memory map."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from curry_train.checkpoint import DTYPES, CheckpointError


class Block(NamedTuple):
    """One entry of a safetensors file; `value` is asked for when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Callable[[], Any]


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as the manifest does: float32, not torch.float32."""
    return str(dtype).removeprefix("torch.")


def write_file(path: Path, chunks: list[Callable[[], Any]]) -> dict[str, Any]:
    """Write byte chunks to a new file, flush it to disk and return its entry for the manifest.

    The hash is taken beside the write, so a save costs the slower of the two, not their sum.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("xb") as file, ThreadPoolExecutor(1) as hashing:
            for chunk in chunks:
                data = memoryview(chunk()).cast("B")
                hashed = hashing.submit(digest.update, data)
                file.write(data)
                hashed.result()
                size += len(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; the checkpoint is dropped, older ones "
            "stay valid. Free disk space or lower run.keep"
        ) from error
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


def write_safetensors(path: Path, blocks: list[Block]) -> dict[str, Any]:
    """Stream tensors to a safetensors file; at most one of them is held as a CPU copy."""
    ordered = sorted(blocks, key=lambda block: (-block.dtype.itemsize, block.key))
    header, end = {}, 0
    for key, dtype, shape, _ in ordered:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {
            "dtype": DTYPES[dtype_name(dtype)],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return write_file(path, [lambda: head, *(partial(_bytes_of, block) for block in ordered)])


def _bytes_of(block: Block) -> Any:
    tensor = block.value().detach()
    if tuple(tensor.shape) != block.shape or tensor.dtype != block.dtype:
        found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        raise CheckpointError(f"tensor {block.key} is {found}, planned as {list(block.shape)}")
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class Writer(StorageWriter):
    """Write this rank's parts; on rank 0 `commit(files, tensors)` ends the save for all ranks."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        rank_tensors: Mapping[str, Tensor],
        files: Mapping[str, bytes],
        commit: Callable[[list[dict[str, Any]], dict[str, Any]], None],
    ) -> None:
        self._folder, self._rank, self._commit = folder, rank, commit
        self._rank_tensors, self._files = rank_tensors, files

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> Future[list[WriteResult]]:
        name, blocks, results, entries = f"tensors-{self._rank:05d}.safetensors", [], [], []
        for item in plan.items:
            if item.tensor_data is None or item.tensor_data.chunk is None:
                raise CheckpointError(f"{item.index.fqn} is no tensor; only tensors are saved")
            chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
            whole = chunk.sizes == item.tensor_data.size
            place = "" if whole else "@" + ",".join(map(str, chunk.offsets))
            key = f"{item.index.fqn}{place}"
            value = partial(planner.resolve_data, item)
            blocks.append(Block(key, dtype, tuple(chunk.sizes), value))
            results.append(WriteResult(item.index, item.tensor_storage_size() or 0, (name, key)))
        if blocks:
            entries.append(write_safetensors(self._folder / name, blocks))
        if self._rank_tensors:
            own = [
                Block(key, tensor.dtype, tuple(tensor.shape), partial(Tensor.detach, tensor))
                for key, tensor in self._rank_tensors.items()
            ]
            entries.append(write_safetensors(self._folder / rank_file(self._rank), own))
        if self._rank == 0:
            for file_name, content in self._files.items():
                entries.append(write_file(self._folder / file_name, [partial(bytes, content)]))
        results += [WriteResult(MetadataIndex(e["name"]), e["bytes"], e) for e in entries]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        placed: dict[MetadataIndex, tuple[str, str]] = {}
        files: list[dict[str, Any]] = []
        for result in (result for rank_results in results for result in rank_results):
            if isinstance(result.storage_data, dict):
                files.append(result.storage_data)
            else:
                placed[result.index] = result.storage_data
        tensors = {}
        for name, entry in sorted(metadata.state_dict_metadata.items()):
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{name} is no tensor; only tensors are saved")
            chunks = []
            for chunk in entry.chunks:
                file, key = placed[MetadataIndex(name, chunk.offsets)]
                place = {"offset": [*chunk.offsets], "shape": [*chunk.sizes]}
                chunks.append({**place, "file": file, "key": key})
            dtype = dtype_name(entry.properties.dtype)
            tensors[name] = {"dtype": dtype, "shape": [*entry.size], "chunks": chunks}
        self._commit(sorted(files, key=lambda entry: entry["name"]), tensors)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Copy the wanted regions of each file straight from its memory map into the tensors."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self._folder, self._manifest = folder, manifest
        self._chunks = {
            MetadataIndex(name, torch.Size(chunk["offset"])): (entry["dtype"], chunk)
            for name, entry in manifest["tensors"].items()
            for chunk in entry["chunks"]
        }

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, entry["dtype"])),
                    torch.Size(entry["shape"]),
                    [
                        ChunkStorageMetadata(torch.Size(c["offset"]), torch.Size(c["shape"]))
                        for c in entry["chunks"]
                    ],
                )
                for name, entry in self._manifest["tensors"].items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: AnyLoadPlanner) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self._chunks[item.storage_index][1]["file"]].append(item)
        for file, items in by_file.items():
            path = self._folder / file
            try:
                with safe_open(path, framework="pt") as stored:
                    for item in items:
                        target = planner.resolve_tensor(item)
                        target.detach().copy_(self._region(stored, path, item))
                        planner.commit_tensor(item, target)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is no valid safetensors file: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _region(self, stored: Any, path: Path, item: Any) -> Tensor:
        dtype, chunk = self._chunks[item.storage_index]
        try:
            block = stored.get_slice(chunk["key"])
        except SafetensorError:
            raise CheckpointError(f"{path} has no key {chunk['key']}") from None
        found = block.get_dtype(), list(block.get_shape())
        if found != (DTYPES[dtype], chunk["shape"]):
            wanted = f"{DTYPES[dtype]} {chunk['shape']}"
            raise CheckpointError(
                f"{path} key {chunk['key']} is {found[0]} {found[1]}, the manifest says {wanted}"
            )
        if not chunk["shape"]:
            return stored.get_tensor(chunk["key"])
        bounds = zip(item.storage_offsets, item.lengths, strict=True)
        return block[tuple(slice(start, start + length) for start, length in bounds)]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def rank_file(rank: int) -> str:
    """Name the file of what belongs to one rank alone."""
    return f"rank-{rank:05d}.safetensors"
