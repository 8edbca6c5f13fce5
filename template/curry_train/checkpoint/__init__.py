"""Checkpoint format 1 as it lies on disk: names, manifest, completeness. Imports no torch.

    checkpoints/
      latest                    the newest folder's name, moved by os.replace
      step-00000123/            exists under this name only when it is complete
        manifest.json           written last: step, data position, hashes, where every chunk lies
        tensors-00000.safetensors   what rank 0 wrote of the global state
        rank-00000.safetensors      what belongs to rank 0 alone (random states)
        <any other file>        listed in the manifest with bytes and sha256 like the rest

`manifest["tensors"]` maps a canonical name to {dtype, shape, chunks: [{offset, shape, file, key}]}.
Every chunk states its place in the global tensor, so any layout of ranks can read any other's
checkpoint. The manifest carries its own sha256 as well: a flipped digit in an offset or in
samples_consumed would otherwise load without a word. commit.py makes and prunes the folders,
dcp.py saves and loads tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

FORMAT = 1
MANIFEST = "manifest.json"
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names in the manifest (torch's) and in safetensors headers."""

_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FIELDS = {
    "step": int,
    "samples_consumed": int,
    "data_hash": str,
    "config_hash": str,
    "model": dict,
    "mesh": dict,
    "files": list,
    "tensors": dict,
}


class CheckpointError(Exception):
    """A checkpoint that cannot be saved or loaded; says every problem with its file and key."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def folder_name(step: int) -> str:
    """Name the folder of a step, so that names sort as steps do."""
    return f"step-{step:08d}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read and validate the manifest of one checkpoint folder; opens no other file.

    Raises: CheckpointError naming the file and the key, or "made by a newer version".
    """
    path = Path(checkpoint) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: not a checkpoint, or one that was never completed. "
            "Give a folder checkpoints/step-XXXXXXXX"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    problems = _manifest_problems(manifest)
    if problems:
        raise CheckpointError(f"{path}: {problem}" for problem in problems)
    return manifest


def _manifest_problems(manifest: Any) -> list[str]:
    if not isinstance(manifest, dict):
        return [f"holds a {type(manifest).__name__}, expected an object"]
    version = manifest.get("format")
    if not _is_count(version):
        return [f"key format is {version!r}, expected the number {FORMAT}"]
    if version > FORMAT:
        return [
            f"key format is {version}: made by a newer version of curry_train "
            f"(this one reads format {FORMAT}). Update the project to load it"
        ]
    if version < FORMAT:
        return [f"key format is {version}, the first format is {FORMAT}"]
    if "sha256" in manifest and manifest["sha256"] != manifest_sha256(manifest):
        return ["key sha256 does not fit the content: the manifest was damaged or edited"]
    problems = [
        f"key {key} is {manifest.get(key)!r:.40}, expected {kind.__name__}"
        for key, kind in _FIELDS.items()
        if type(manifest.get(key)) is not kind
    ]
    if problems:
        return problems
    problems = [
        f"key {key} is {manifest[key]}, expected 0 or more"
        for key in ("step", "samples_consumed")
        if manifest[key] < 0
    ]
    names: set[str] = set()
    for entry in manifest["files"]:
        if not _is_file_entry(entry):
            problems.append(f"key files holds {entry!r:.80}, expected name, bytes and sha256")
        elif entry["name"] in names:
            problems.append(f"key files lists {entry['name']} twice")
        else:
            names.add(entry["name"])
    for name, entry in manifest["tensors"].items():
        problem = _tensor_problem(entry, names)
        if problem:
            problems.append(f"key tensors, {name}: {problem}")
    return problems


def _is_file_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and is_file_name(entry["name"])
        and _is_count(entry.get("bytes"))
        and isinstance(entry.get("sha256"), str)
        and re.fullmatch("[0-9a-f]{64}", entry["sha256"]) is not None
    )


def _tensor_problem(entry: Any, files: set[str]) -> str | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("chunks"), list):
        return "expected an object with dtype, shape and chunks"
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"dtype {dtype!r} is none of {', '.join(DTYPES)}"
    if not _is_shape(shape):
        return f"shape {shape!r} is not a list of sizes"
    covered = 0
    for chunk in entry["chunks"]:
        if not isinstance(chunk, dict) or not isinstance(chunk.get("key"), str):
            return "expected chunks with offset, shape, file and key"
        offset, size = chunk.get("offset"), chunk.get("shape")
        if not (_is_shape(offset) and _is_shape(size) and len(offset) == len(size) == len(shape)):
            return f"chunk offset {offset!r} and shape {size!r} do not fit shape {shape}"
        axes = zip(offset, size, shape, strict=True)
        if any(start + length > total for start, length, total in axes):
            return f"chunk at {offset} of shape {size} reaches outside shape {shape}"
        if chunk.get("file") not in files:
            return f"chunk file {chunk.get('file')!r} is not among the files of the manifest"
        covered += math.prod(size)
    if covered != math.prod(shape) or not entry["chunks"]:
        return f"chunks hold {covered} elements, shape {shape} has {math.prod(shape)}"
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(_is_count(size) for size in value)


def is_file_name(name: str) -> bool:
    """Say whether a name stays inside its folder on every platform."""
    return _FILE_NAME.fullmatch(name) is not None


def manifest_sha256(manifest: dict[str, Any]) -> str:
    """Hash a manifest without its own sha256, independent of key order and white space."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_problem(checkpoint: Path, entry: dict[str, Any], *, verify: bool) -> str | None:
    """Compare a listed file with its size and, to verify, its sha256; None when all is well."""
    path = checkpoint / entry["name"]
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path} has {size} bytes, the manifest says {entry['bytes']}"
        if not verify:
            return None
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if digest != entry["sha256"]:
        return f"{path} does not have the sha256 of the manifest: it was damaged"
    return None


def complete_checkpoints(root: Path) -> Iterator[Path]:
    """Yield the complete checkpoints under root, newest step first; never raises.

    Complete means a valid manifest, the step of the folder's name, and every file in full size.
    """
    try:
        names = [entry.name for entry in Path(root).iterdir()]
    except OSError:
        return
    matches = [match for name in names if (match := _STEP_FOLDER.fullmatch(name))]
    matches.sort(key=lambda match: int(match[1]), reverse=True)
    for match in matches:
        folder = Path(root) / match[0]
        if is_complete(folder):
            yield folder


def is_complete(checkpoint: Path) -> bool:
    """Say whether a folder is a whole checkpoint; never raises."""
    try:
        manifest = read_manifest(checkpoint)
        named = checkpoint.name == folder_name(manifest["step"])
        return named and not any(
            file_problem(checkpoint, entry, verify=False) for entry in manifest["files"]
        )
    except CheckpointError:
        return False


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under root, or None; never raises.

    The file `latest` is for people and shell scripts: a kill between the two renames of a save
    leaves it one checkpoint behind, so the folders themselves decide.
    """
    return next(complete_checkpoints(root), None)
