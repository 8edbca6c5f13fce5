"""Is a checkpoint whole? Every problem of it, each with its file and key. Imports no torch.

Loading stops a run at the first kind of damage; here all of it is told: the manifest's own hash,
every file's size and sha256, what the headers of safetensors files say against the manifest, keys
and files that nothing refers to, the number of experts, moments without weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from curry_train.checkpoint import (
    DTYPES,
    MANIFEST,
    CheckpointError,
    file_problem,
    folder_name,
    is_file_entry,
    read_manifest,
)

SUFFIX = ".safetensors"
MOMENTS = ("optim.exp_avg.", "optim.exp_avg_sq.")
BLOCK = 4 << 20
MOST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}

Told = Callable[[int], None]
"""Is called with the bytes that were just read."""


def audit(checkpoint: Path, told: Told = lambda _: None) -> list[str]:
    """Return every problem of one checkpoint folder; reads all of it, told: see Told."""
    try:
        manifest, problems = read_manifest(checkpoint), []
    except CheckpointError as error:
        manifest, problems = {}, error.problems
    entries = manifest.get("files") or _entries_of_damaged(checkpoint)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        problems += filter(None, pool.map(lambda e: _file_problem(checkpoint, e, told), entries))
    if manifest:
        step = manifest["step"]
        if checkpoint.name.startswith("step-") and checkpoint.name != folder_name(step):
            problems.append(f"{checkpoint / MANIFEST}: key step is {step}, the folder's another")
        problems += _header_problems(checkpoint, manifest)
        where = f"{checkpoint / MANIFEST}: tensor"
        problems += (f"{where} {told_of}" for told_of in _tensor_problems(manifest))
    listed = {MANIFEST, *(entry["name"] for entry in entries)}
    for path in sorted(checkpoint.iterdir()) if entries else ():
        if path.name not in listed and not path.name.startswith("."):
            problems.append(f"{path} is not in the manifest: of another writer, or lost from it")
    return problems


def stored_bytes(checkpoint: Path) -> int:
    """Return the bytes of the files below a folder, 0 for one that is not there."""
    files = (Path(at) / name for at, _, names in os.walk(checkpoint) for name in names)
    total = 0
    for path in files:
        with suppress(FileNotFoundError):  # a run that goes on has renamed or pruned it
            total += path.lstat().st_size
    return total


def _entries_of_damaged(checkpoint: Path) -> list[dict[str, Any]]:
    """Return what an invalid manifest still says of files, so that their damage is told too."""
    try:
        entries = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        return [entry for entry in entries if is_file_entry(entry)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _file_problem(checkpoint: Path, entry: dict[str, Any], told: Told) -> str | None:
    problem = file_problem(checkpoint, entry, verify=False)
    if problem is not None:
        return problem
    path, digest, block = checkpoint / entry["name"], hashlib.sha256(), bytearray(BLOCK)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(memoryview(block)[:count])
                told(count)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if digest.hexdigest() != entry["sha256"]:
        return f"{path} does not have the sha256 of the manifest: it was damaged"
    return None


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return key -> {dtype, shape, data_offsets} of a safetensors file, checked against its size.

    Raises: CheckpointError with the file, and the key where there is one.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER):
                raise ValueError(f"its header would have {length} of its {size} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        unknown = {entry["dtype"] for entry in header.values()} - set(DTYPES.values())
        if unknown:
            raise ValueError(f"dtype {min(unknown)} is none of {', '.join(DTYPES.values())}")
        end = 0
        for key, entry in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            wanted = math.prod(entry["shape"]) * _SIZES.get(entry["dtype"], 1)
            if start != end or stop - start != wanted:
                raise ValueError(f"key {key} holds bytes {start} to {stop}, wanted {wanted} bytes")
            end = stop
        if end != size - 8 - length:
            raise ValueError(f"its keys hold {end} of {size - 8 - length} bytes")
        return header
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid safetensors file: {error}") from None


def _header_problems(checkpoint: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Hold each file's header against the chunks that the manifest places in it."""
    named: dict[str, set[str]] = {}
    headers: dict[str, dict[str, Any]] = {}
    for entry in manifest["files"]:
        path = checkpoint / entry["name"]
        if path.suffix == SUFFIX and path.is_file():
            try:
                headers[path.name] = read_header(path)
            except CheckpointError as error:
                yield from error.problems
    for name, entry in manifest["tensors"].items():
        for chunk in entry["chunks"]:
            file, key = chunk["file"], chunk["key"]
            named.setdefault(file, set()).add(key)
            if file not in headers:
                continue
            found, wanted = headers[file].get(key), f"{DTYPES[entry['dtype']]} {chunk['shape']}"
            if found is None:
                yield f"{checkpoint / file} key {key} is missing; tensor {name} needs it"
            elif (kind := f"{found['dtype']} {found['shape']}") != wanted:
                yield f"{checkpoint / file} key {key} is {kind}, the manifest says {wanted}"
    for file, header in headers.items():
        if not file.startswith("rank-"):  # what belongs to one rank has no place in the manifest
            for key in sorted(header.keys() - named.get(file, set())):
                yield f"{checkpoint / file} key {key} is in no tensor of the manifest"


def _tensor_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Say which tensors no run of this model can have saved so."""
    tensors, model = manifest["tensors"], manifest["model"]
    experts = model.get("num_experts")
    for name, entry in tensors.items():
        if ".experts." in name and entry["shape"][:1] != [experts]:
            yield f"{name} has shape {entry['shape']}, but model.num_experts is {experts}"
    if "architecture" not in model:
        return
    moments = {name.removeprefix(m) for m in MOMENTS for name in tensors if name.startswith(m)}
    for weight in sorted(moments):
        for name in (weight, *(moment + weight for moment in MOMENTS)):
            if name not in tensors:
                yield f"{name} is missing; the optimizer has moments of {weight}"
            elif tensors[name]["shape"] != tensors.get(weight, tensors[name])["shape"]:
                yield f"{name} has shape {tensors[name]['shape']}, its weight another"
    if moments and "optim.step" not in tensors:
        yield "optim.step is missing; the optimizer has moments"
