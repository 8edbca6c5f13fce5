"""Checkpoint format 1 as it lies on disk: names, manifest, completeness. Imports no torch.

    checkpoints/
      latest                    the newest folder's name, moved by os.replace
      step-00000123/            exists under this name only when it is complete
        manifest.json           written last: step, data position, hashes, where every chunk lies
        tensors-00000.safetensors   what rank 0 wrote of the global state, with -1, -2 ... if large
        rank-00000.safetensors      what belongs to rank 0 alone (random states)
        <any other file>        listed in the manifest with bytes and sha256 like the rest

`manifest["tensors"]` maps a canonical name to {dtype, shape, chunks: [{offset, shape, file, key}]}.
Every chunk states its place in the global tensor, so any layout of ranks can read any other's
checkpoint. The manifest carries its own sha256 as well: a flipped digit in an offset or in
samples_consumed would otherwise load without a word. dcp.py saves and loads, storage.py moves the
bytes of tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from curry_train.checkpoint.boxes import Box, cover_problem, outside

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
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # stays inside its folder on every platform
_SHA256 = re.compile("[0-9a-f]{64}")
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
_MORE_FIELDS = {"tokens": int, "loss_scale": list, "metrics": dict}
"""Fields that not every checkpoint has."""


class CheckpointError(Exception):
    """A checkpoint that cannot be saved or loaded; says every problem with its file and key."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def folder_name(step: int) -> str:
    """Name the folder of a step, so that names sort as steps do."""
    return f"step-{step:08d}"


def is_step_folder(path: Path) -> bool:
    """Say whether a path has the name of a checkpoint, complete or not."""
    return _STEP_FOLDER.fullmatch(path.name) is not None


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
    problems = [f"{path}: {problem}" for problem in manifest_problems(manifest)]
    if not problems and not manifest.get("sha256"):
        problems = [f"{path}: key sha256 is missing: the manifest was damaged or edited"]
    if problems:
        raise CheckpointError(problems)
    return manifest


def manifest_problems(manifest: Any) -> Iterator[str]:
    """Yield what is wrong with a manifest, each problem with its key."""
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int or version != FORMAT:
        newer = type(version) is int and version > FORMAT
        hint = ": made by a newer version of curry_train, update the project to load it"
        yield f"key format is {version!r}{hint if newer else ''}; readable is format {FORMAT}"
        return
    try:
        if manifest.get("sha256", "") not in ("", manifest_sha256(manifest)):
            yield "key sha256 does not fit the content: the manifest was damaged or edited"
            return
    except (TypeError, ValueError, RecursionError) as error:
        yield f"is not plain JSON: {error}"
        return
    more = {key: kind for key, kind in _MORE_FIELDS.items() if key in manifest}
    for key, kind in {**_FIELDS, **more}.items():
        value = manifest.get(key)
        if not (_is_count(value) if kind is int else type(value) is kind):
            expected = "0 or more" if kind is int else kind.__name__
            yield f"key {key} is {value!r:.40}, expected {expected}"
            return
    for entry in manifest["files"]:
        if not is_file_entry(entry):
            yield f"key files holds {entry!r:.80}, expected name, bytes and sha256"
            return
    names = {entry["name"] for entry in manifest["files"]}
    for name, entry in manifest["tensors"].items():
        try:
            problem = _tensor_problem(name, entry, names)
        except (KeyError, TypeError):
            problem = "expected dtype, shape and chunks of offset, shape, file and key"
        if problem:
            yield f"key tensors, {name}: {problem}"


def is_file_entry(entry: Any) -> bool:
    """Say whether a value is a well-formed entry of a manifest's files."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and _FILE_NAME.fullmatch(entry["name"]) is not None
        and _is_count(entry.get("bytes"))
        and _SHA256.fullmatch(str(entry.get("sha256"))) is not None
    )


def _tensor_problem(name: str, entry: dict[str, Any], files: set[str]) -> str | None:
    """Say what is wrong with one tensor of a manifest; KeyError or TypeError: its structure."""
    dtype, shape, boxes = entry["dtype"], entry["shape"], []
    if dtype not in DTYPES:
        return f"dtype {dtype!r} is none of {', '.join(DTYPES)}"
    if not _is_shape(shape):
        return f"shape {shape!r} is not a list of sizes"
    for chunk in entry["chunks"]:
        offset, size = chunk["offset"], chunk["shape"]
        if not (_is_shape(offset) and _is_shape(size) and len(offset) == len(size) == len(shape)):
            return f"chunk offset {offset!r} and shape {size!r} do not fit shape {shape}"
        boxes.append(Box(tuple(offset), tuple(size)))
        if outside(boxes[-1], shape):
            return f"chunk at {offset} of shape {size} reaches outside shape {shape}"
        if chunk["file"] not in files or not isinstance(chunk["key"], str):
            return f"chunk {chunk['key']!r} of file {chunk['file']!r} is none of the listed files"
    if not boxes:
        return f"no chunks hold shape {shape}"
    if problem := cover_problem(shape, boxes):
        return f"{problem} (shape {shape})"
    for chunk in entry["chunks"]:
        own = chunk_key(name, shape, chunk["offset"], chunk["shape"])
        if chunk["key"] != own:  # another tensor's values, or another part's
            at, key = chunk["offset"], chunk["key"]
            return f"chunk at {at} has key {key!r}, that of this place is {own!r}"
    return None


def chunk_key(name: str, shape: list[int], offset: list[int], size: list[int]) -> str:
    """Name a chunk in its file after its place: no other tensor and no other part has this key."""
    return name if size == shape else f"{name}@{','.join(map(str, offset))}"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def manifest_sha256(manifest: dict[str, Any]) -> str:
    """Hash a manifest without its own sha256, independent of key order and white space."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


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


def is_complete(checkpoint: Path) -> bool:
    """Say whether a folder is a whole checkpoint; never raises.

    Complete means a valid manifest, the step of the folder's name, and every file in full size.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError:
        return False
    found = (file_problem(checkpoint, entry, verify=False) for entry in manifest["files"])
    return checkpoint.name == folder_name(manifest["step"]) and not any(found)


def complete_checkpoints(root: Path) -> Iterator[Path]:
    """Yield the complete checkpoints under root, newest step first; never raises."""
    try:
        folders = [entry for entry in Path(root).iterdir() if is_step_folder(entry)]
    except OSError:
        return
    folders.sort(key=lambda folder: int(folder.name.removeprefix("step-")), reverse=True)
    yield from filter(is_complete, folders)


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under root, or None; never raises.

    The file `latest` is for people and shell scripts: a kill between the two renames of a save
    leaves it one checkpoint behind, so the folders themselves decide.
    """
    return next(complete_checkpoints(root), None)


def weights_only(manifest: dict[str, Any]) -> bool:
    """Say whether a checkpoint lacks what a run needs to go on, as an imported model's does."""
    return "optim.step" not in manifest["tensors"]


def offer_older(checkpoint: Path, setting: str = "run.resume") -> list[str]:
    """Return a sentence that names the newest complete checkpoint before `checkpoint`, if any."""
    others = complete_checkpoints(Path(checkpoint).parent)
    older = next((path for path in others if path.name < Path(checkpoint).name), None)
    if older is None:
        return []
    return [f"nothing was changed; an older checkpoint is there: {setting}={older}"]
