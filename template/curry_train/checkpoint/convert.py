"""Write a checkpoint again: weights alone, another dtype, files of a bounded size.

The result is complete or absent, and holds what the source held: it was audited first, so that
no damage gets new hashes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from curry_train.checkpoint import (
    MANIFEST,
    CheckpointError,
    chunk_key,
    folder_name,
    is_step_folder,
    manifest_problems,
    manifest_sha256,
    read_manifest,
)
from curry_train.checkpoint.audit import SUFFIX, Told
from curry_train.checkpoint.boxes import Box
from curry_train.checkpoint.contents import pieces, read_box
from curry_train.checkpoint.storage import write_file, write_streamed, writing

OPTIMIZER = "optim."
RESUMABLE = ("float32", "float64")
"""Dtypes in which a run keeps its weights and moments."""


def convert(
    source: Path,
    out: Path,
    *,
    weights_only: bool = False,
    dtype: str | None = None,
    limit: int | None = None,
    told: Told = lambda _: None,
) -> Path:
    """Write `source` to the new folder `out` and return it; tensor by tensor.

    weights_only: without moments and random states. dtype: of all floating-point tensors but the
    optimizer's count of steps. limit: most bytes of a file's tensors, None for one file; a tensor
    that is larger is cut into chunks. told: see audit.Told.
    Raises: CheckpointError; nothing is left at `out` then.
    """
    manifest = read_manifest(source)
    if dtype not in (None, *RESUMABLE) and not weights_only:
        raise CheckpointError(
            f"dtype {dtype} with moments: a run keeps them in {' or '.join(RESUMABLE)}; "
            "set --weights-only"
        )
    named = folder_name(manifest["step"])
    if is_step_folder(out) and out.name != named:
        raise CheckpointError(f"{out} names another step than {source} holds; name it {named}")
    saved, tensors = manifest["tensors"], {}
    for name, entry in saved.items():
        if not (weights_only and name.startswith(OPTIMIZER)):
            fixed = name == "optim.step" or not getattr(torch, entry["dtype"]).is_floating_point
            tensors[name] = {**entry, "dtype": entry["dtype"] if fixed else dtype or entry["dtype"]}
    files = _place(tensors, limit)
    with fresh_folder(out) as folder:
        entries = []
        for file, boxes in files.items():
            kinds = {key: (tensors[name]["dtype"], box.size) for key, (name, box) in boxes.items()}

            def tensor_of(key: str, boxes: dict[str, tuple[str, Box]] = boxes) -> torch.Tensor:
                name, box = boxes[key]
                tensor = read_box(source, saved, name, box)
                told(tensor.nbytes)
                return tensor.to(getattr(torch, tensors[name]["dtype"]))

            entries.append(write_streamed(folder / file, kinds, tensor_of))
        for entry in manifest["files"]:
            ranks_own = entry["name"].startswith("rank-")
            if not entry["name"].endswith(SUFFIX) or (ranks_own and not weights_only):
                entries.append(_copy(source / entry["name"], folder / entry["name"]))
        seal(folder, {**manifest, "files": entries, "tensors": dict(sorted(tensors.items()))})
    return out


def _place(tensors: dict[str, Any], limit: int | None) -> dict[str, dict[str, tuple[str, Box]]]:
    """Return file -> key -> (name, box), and give the tensors' entries these chunks."""
    files: dict[str, dict[str, tuple[str, Box]]] = {}
    held = 0
    for name in sorted(tensors):
        entry, itemsize = tensors[name], getattr(torch, tensors[name]["dtype"]).itemsize
        entry["chunks"] = []
        whole = Box((0,) * len(entry["shape"]), tuple(entry["shape"]))
        for box in [whole] if limit is None else pieces(entry["shape"], itemsize, limit):
            size = box.elements * itemsize
            if not files or (limit is not None and held and held + size > limit):
                files[f"tensors-{len(files):05d}{SUFFIX}"], held = {}, 0
            held += size
            file = list(files)[-1]
            offset, sizes = [*box.offset], [*box.size]
            key = chunk_key(name, entry["shape"], offset, sizes)
            files[file][key] = name, box
            entry["chunks"].append({"offset": offset, "shape": sizes, "file": file, "key": key})
    return files


def _copy(source: Path, target: Path) -> dict[str, Any]:
    with source.open("rb") as file:
        return write_file(target, iter(lambda: file.read(1 << 22), b""))


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a folder with its own hash. Raises: CheckpointError if it is wrong."""
    manifest = {**manifest, "sha256": manifest_sha256(manifest)}
    problems = [f"{folder / MANIFEST}: {problem}" for problem in manifest_problems(manifest)]
    if problems:
        raise CheckpointError(problems)
    write_file(folder / MANIFEST, [json.dumps(manifest, allow_nan=False).encode()])


@contextmanager
def fresh_folder(out: Path) -> Iterator[Path]:
    """Give a temporary folder that gets the name `out` when all went well, else is removed.

    Raises: CheckpointError when `out` exists, before and after: nothing is overwritten.
    """
    temporary = out.with_name(f"{out.name}.tmp-{secrets.token_hex(3)}")
    with writing(out):
        _refuse_existing(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        yield temporary
        with writing(out):
            _refuse_existing(out)
            os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists, and nothing is overwritten; name a new folder")
    if (out.parent / MANIFEST).is_file():
        raise CheckpointError(f"{out.parent} is a checkpoint; name a folder outside of it")
