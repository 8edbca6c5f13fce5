"""How tensors get to disk and back: who writes which box, what is read of which file.

A rank describes what it holds of a global tensor by a `Part`. Every distinct box is written once,
to safetensors files in one pass, and read through a memory map: only the regions that a rank
needs, whatever boxes the file has. torch.distributed.checkpoint is not used: its planners know
only DTensor's boxes, and its storage keeps metadata in a pickle, which must never be opened.

Expert-parallel ranks that each call their own experts `experts.up_proj` would lose all but one
rank's, and the loss would show only after the next load. So every box that several ranks hold is
compared by its bits, and boxes that overlap or leave a hole are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from curry_train.checkpoint import DTYPES, CheckpointError, chunk_key, file_problem
from curry_train.checkpoint.boxes import Box, cover_problem
from curry_train.parallel.shards import Part

ROW = 512
"""Words of eight bytes in a row of a fingerprint."""
FILES, FILE_BYTES = 4, 2**24
"""Most files that a rank writes of the global state, and the least bytes of each of several."""
UNHASHED = 2**26
"""Bytes of a file, perhaps of copies, that may wait for their hash after they are written."""


class Claim(NamedTuple):
    """What a rank says of a tensor before a save; bits tell unequal replicas apart."""

    dtype: str
    shape: tuple[int, ...]
    box: Box
    bytes: int
    bits: tuple[int, ...] | None

    @property
    def kind(self) -> str:
        """Return what must be equal on all ranks, in words."""
        return f"{self.dtype} {[*self.shape]}"


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as the manifest does: float32, not torch.float32."""
    return str(dtype).removeprefix("torch.")


def rank_file(rank: int) -> str:
    """Name the file of what belongs to one rank alone."""
    return f"rank-{rank:05d}.safetensors"


def tensor_file(rank: int, number: int) -> str:
    """Name one file of what a rank writes of the global state."""
    return f"tensors-{rank:05d}{f'-{number}' if number else ''}.safetensors"


def as_part(tensor: Tensor | Part) -> Part:
    """Return a view of a tensor with its place: a DTensor's shard, all of a plain one."""
    if isinstance(tensor, Part):
        return tensor
    if not hasattr(tensor, "__create_chunk_list__"):  # torch's word for checkpoints, of DTensor
        return Part.whole(tensor)
    sharded: Any = tensor
    (chunk,) = sharded.__create_chunk_list__()
    return Part(sharded.detach().to_local(), tuple(tensor.shape), tuple(chunk.offsets))


def box_of(part: Part) -> Box:
    """Return the place of a part in its global tensor."""
    return Box(tuple(part.offset), tuple(part.tensor.shape))


def claim(part: Part, *, compare: bool) -> Claim:
    """Describe a part to rank 0; compare: with the fingerprint of its values."""
    tensor = part.tensor
    bits = _fingerprint(tensor) if compare else None
    return Claim(dtype_name(tensor.dtype), tuple(part.shape), box_of(part), tensor.nbytes, bits)


def shared_names(ranks: Sequence[Mapping[str, Claim]]) -> set[str]:
    """Return the names of which several ranks hold the same box, so that its bits must agree."""
    holders = Counter((name, c.box) for claims in ranks for name, c in claims.items() if c.bytes)
    return {name for (name, _), count in holders.items() if count > 1}


def plan_save(
    ranks: Sequence[Mapping[str, Claim]],
) -> tuple[dict[str, Any], list[dict[str, dict[str, str]]]]:
    """Return the manifest's tensors and, for every rank, file -> name -> key of what it writes.

    Every distinct box goes to the rank with the least to write among those that hold it; boxes
    with the fewest holders choose first. Raises: CheckpointError when ranks disagree about a
    tensor or their boxes overlap or leave a hole.
    """
    held: dict[str, list[tuple[int, Claim]]] = defaultdict(list)
    for rank, claims in enumerate(ranks):
        for name, found in claims.items():
            held[name].append((rank, found))
    problems = [f"tensor {name}{text}" for name, of in held.items() if (text := _clash(of))]
    if problems:
        raise CheckpointError(problems)
    holders: dict[tuple[str, Claim], list[int]] = defaultdict(list)
    for name, of in held.items():
        filled = [(rank, found) for rank, found in of if found.bytes]
        for rank, found in filled or of[:1]:  # one empty box says that a tensor has no elements
            holders[name, found].append(rank)
    written: list[list[tuple[str, Claim]]] = [[] for _ in ranks]
    loads = [0] * len(ranks)
    order = sorted(holders.items(), key=lambda h: (len(h[1]), -h[0][1].bytes, h[0]))
    for (name, found), among in order:
        rank = min(among, key=lambda rank: (loads[rank], rank))
        loads[rank] += found.bytes
        written[rank].append((name, found))
    tensors: dict[str, Any] = {}
    files: list[dict[str, dict[str, str]]] = [{} for _ in ranks]
    for rank, boxes in enumerate(written):
        for name, found, file in _into_files(rank, boxes):
            offset, size, shape = [*found.box.offset], [*found.box.size], [*found.shape]
            key = chunk_key(name, shape, offset, size)
            files[rank].setdefault(file, {})[name] = key
            entry = tensors.setdefault(name, {"dtype": found.dtype, "shape": shape, "chunks": []})
            chunk = {"offset": offset, "shape": size, "file": file, "key": key}
            entry["chunks"].append(chunk)
    for entry in tensors.values():
        entry["chunks"].sort(key=lambda chunk: chunk["offset"])
    return dict(sorted(tensors.items())), files


def _into_files(rank: int, boxes: list[tuple[str, Claim]]) -> Iterator[tuple[str, Claim, str]]:
    """Share what a rank writes among as many files as it pays to hash and write side by side."""
    total = sum(found.bytes for _, found in boxes)
    loads = [0] * max(1, min(FILES, total // FILE_BYTES))
    for name, found in sorted(boxes, key=lambda box: (-box[1].bytes, box[0])):
        file = loads.index(min(loads))
        loads[file] += found.bytes
        yield name, found, tensor_file(rank, file)


def _clash(held: list[tuple[int, Claim]]) -> str | None:
    """Say how the ranks disagree about one tensor, or where their boxes overlap or miss some."""
    first, wanted = held[0]
    seen: dict[Box, tuple[int, tuple[int, ...] | None]] = {}
    for rank, found in held:
        if found.kind != wanted.kind:
            return (
                f": rank {first} holds {wanted.kind}, rank {rank} {found.kind}; every rank must "
                "hold the global shape"
            )
        twin, bits = seen.setdefault(found.box, (rank, found.bits))
        if bits != found.bits:
            return (
                f": ranks {twin} and {rank} write the same part, offset {[*found.box.offset]}, "
                "with different content; give each rank the offset of its Part or make the "
                "replicas equal"
            )
    problem = cover_problem(wanted.shape, seen)
    if problem is None:
        return None
    ranks = sorted({rank for rank, _ in held})
    return (
        f" ({wanted.kind}): {problem}; ranks {ranks} hold it, and every element must be written "
        "once: give each rank the shape and offset of its Part"
    )


def _fingerprint(tensor: Tensor) -> tuple[int, ...]:
    """Sum the bits of a tensor, eight bytes at a time, so that unequal replicas show.

    Sums of rows and of columns of the values in a row, weighted by their place: a swap shows too.
    """
    octets = _flat(tensor).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    words = octets[: len(octets) // 8 * 8].view(torch.int64)
    square = len(words) // ROW * ROW
    parts = (words[:square].view(-1, ROW), words[square:], octets[8 * len(words) :].long())
    return tuple(total for part in parts for total in _weighted(part))


def _weighted(words: Tensor) -> list[int]:
    """Sum int64 rows and columns [R, C] or [C], each times its place, modulo 2**64."""
    rows = words if words.dim() == 2 else words[None]
    sums = (rows.sum(dim) for dim in (1, 0))
    return [int((s * torch.arange(1, len(s) + 1, device=s.device)).sum()) for s in sums]


def _flat(tensor: Tensor) -> Tensor:
    """Return the values in a row; a view where they lie so."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,))  # reshape keeps an odd stride of one element


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the disk into a CheckpointError that names what was written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; the new checkpoint is dropped, older "
            f"ones stay valid. {_room(path)}"
        ) from error


def _room(path: Path) -> str:
    """Say what may be freed so that a checkpoint finds room."""
    there = next((folder for folder in path.parents if folder.is_dir()), Path())
    left = shutil.disk_usage(there).free / 1e6
    return (
        f"{left:.0f} MB are left on its disk: free space by removing older checkpoints or runs, or "
        "keep fewer (run.keep)"
    )


def write_file(path: Path, chunks: Iterable[Any]) -> dict[str, Any]:
    """Write byte chunks to a new file, flush it to disk and return its entry for the manifest.

    The hash is taken while the disk works, not before: a core does not keep it waiting.
    """
    digest, size, hashed = hashlib.sha256(), 0, 0
    waiting: deque[memoryview] = deque()
    with writing(path), path.open("xb") as file, ThreadPoolExecutor(1) as beside:
        for chunk in chunks:
            data = memoryview(chunk).cast("B")
            size += file.write(data)
            waiting.append(data)
            while size - hashed > UNHASHED:
                hashed += len(waiting[0])
                digest.update(waiting.popleft())
        file.flush()
        rest = beside.submit(lambda: [*map(digest.update, waiting)])
        os.fsync(file.fileno())
        rest.result()
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors to a safetensors file; at most one of them is held as a CPU copy."""
    kinds = {key: (dtype_name(tensor.dtype), [*tensor.shape]) for key, tensor in tensors.items()}
    return write_streamed(path, kinds, lambda key: tensors[key])


def write_streamed(
    path: Path,
    kinds: Mapping[str, tuple[str, Sequence[int]]],
    tensor_of: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write a safetensors file of tensors that are asked for one by one; see write_file.

    kinds: key -> (dtype as the manifest names it, shape), known before the first tensor is read.
    """
    sizes = {key: getattr(torch, dtype).itemsize for key, (dtype, _) in kinds.items()}
    ordered = sorted(kinds, key=lambda key: (-sizes[key], key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in ordered:
        dtype, shape = kinds[key]
        start, end = end, end + math.prod(shape) * sizes[key]
        header[key] = {"dtype": DTYPES[dtype], "shape": [*shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for key in ordered:
            yield _flat(tensor_of(key).cpu()).view(torch.uint8).numpy()

    return write_file(path, chunks())


def write_files(folder: Path, held: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Any]]:
    """Write safetensors files, name -> key -> tensor, side by side; return their entries."""
    with ThreadPoolExecutor(max(1, len(held))) as threads:
        paths = [folder / name for name in held]
        entries = [*threads.map(write_safetensors, paths, held.values())]
    for entry in entries:
        _check_written(folder, entry, held[entry["name"]])
    return entries


def _check_written(folder: Path, entry: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Read size and header of a file again before the checkpoint is named.

    tensors: what the manifest will say is in it, under its keys. Raises: CheckpointError.
    """
    problem, path = file_problem(folder, entry, verify=False), folder / entry["name"]
    if problem is None:
        wanted = {k: f"{DTYPES[dtype_name(t.dtype)]} {[*t.shape]}" for k, t in tensors.items()}
        try:
            with safe_open(path, framework="pt") as opened:
                blocks = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            found = {key: f"{b.get_dtype()} {b.get_shape()}" for key, b in blocks.items()}
        except (SafetensorError, OSError) as error:
            problem = f"{path} is no valid safetensors file: {error}"
        else:
            odd = min((k for k in {*found, *wanted} if found.get(k) != wanted.get(k)), default=None)
            if odd is not None:
                told = f"{found.get(odd)}, it was given {wanted.get(odd)}"
                problem = f"{path} key {odd} reads back as {told}"
    if problem is not None:
        raise CheckpointError(
            f"{problem}, just after it was written; the new checkpoint is dropped, older ones stay "
            "valid. The disk or another program changed it: save to another disk (run.dir)"
        )


def read_parts(folder: Path, parts: Mapping[str, Part], saved: Mapping[str, Any]) -> None:
    """Fill the parts of this rank from the files' memory maps, in place.

    saved: the tensors of the manifest. Raises: CheckpointError with the file and key.
    """
    by_file: dict[str, list[tuple[Tensor, Box, Box, str, dict[str, Any]]]] = defaultdict(list)
    for name, part in parts.items():
        mine, dtype = box_of(part), DTYPES[saved[name]["dtype"]]
        for chunk in saved[name]["chunks"]:
            stored = Box(tuple(chunk["offset"]), tuple(chunk["shape"]))
            both = mine.meet(stored)
            if both.elements:
                target = part.tensor.detach()[both.within(mine)]
                by_file[chunk["file"]].append((target, both, stored, dtype, chunk))
    for file, items in by_file.items():
        path = folder / file
        try:
            with safe_open(path, framework="pt") as opened:
                for target, both, stored, dtype, chunk in items:
                    block = opened.get_slice(chunk["key"])
                    found = f"{block.get_dtype()} {block.get_shape()}"
                    wanted = f"{dtype} {chunk['shape']}"
                    if found != wanted:
                        raise CheckpointError(
                            f"{path} key {chunk['key']} is {found}, the manifest says {wanted}"
                        )
                    if both == stored:
                        target.copy_(opened.get_tensor(chunk["key"]))
                    else:
                        target.copy_(block[both.within(stored)])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no valid safetensors file: {error}") from None
