"""Where a model's inputs lie, whether they are whole, and how they get there.

A part is a folder with a manifest.json that lists its files with sizes and hashes. It is built
beside its place and moved there file by file, the manifest last: so it is complete or absent, and
what else lies in a damaged folder stays.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import UsageError

MANIFEST, RECORD, TOKENIZER = "manifest.json", "inputs.json", "tokenizer.json"
HASHED_BYTES = 512 * 2**20
"""Parts up to this size are hashed at every look; larger ones when a file's time has changed."""


@dataclass
class Part:
    """One of the two inputs. record: its inputs.json; {} when it has none."""

    id: str
    folder: Path
    record_path: Path
    problems: list[str] = field(default_factory=list)
    missing: bool = False
    record: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether it is there and whole."""
        return not self.missing and not self.problems

    @property
    def origin(self) -> str:
        """released, local, stand-in, or unknown for what others put there."""
        return str(self.record.get("origin", "unknown"))


def parts_of(project: Path, model: str) -> tuple[Part, Part]:
    """Return (checkpoint, corpus) of a model, not looked at yet."""
    root = project / "workspace"
    steps = root / "checkpoints" / model / "torch-dcp"
    corpus = root / "datasets" / "dclm-baseline" / "toktxt" / model
    return (
        Part("inputs-checkpoint", steps / "step-00000000", steps / RECORD),
        Part("inputs-corpus", corpus, corpus / RECORD),
    )


def look(part: Part, *, verify: bool = False) -> Part:
    """Fill in what is there and what is wrong with it."""
    part.problems, part.record, part.manifest = [], read_record(part.record_path), {}
    part.missing = not (part.folder / MANIFEST).exists()
    if part.missing:
        return part
    try:
        part.manifest, files = listed(part)
    except Exception as error:  # CheckpointError and DataError of the project's package
        part.problems = list(getattr(error, "problems", [str(error)]))
        return part
    if part.record.get("sha256") != {entry["name"]: entry["sha256"] for entry in files}:
        part.record = {}  # it describes what lay there before
    total = sum(entry["bytes"] for entry in files)
    known = part.record.get("files", {})
    unchanged = all(known.get(e["name"]) == stamp(part.folder / e["name"]) for e in files)
    hashed = verify or total <= HASHED_BYTES or not unchanged
    from curry_train.checkpoint import file_problem

    found = (file_problem(part.folder, entry, verify=hashed) for entry in files)
    part.problems = [problem for problem in found if problem]
    return part


def listed(part: Part) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the manifest and its files as {name, bytes, sha256}."""
    if part.id == "inputs-checkpoint":
        from curry_train.checkpoint import read_manifest

        manifest = read_manifest(part.folder)
        return manifest, manifest["files"]
    from curry_train.data import DataError, token_file
    from curry_train.data.tokenizer import load_tokenizer

    manifest = token_file.read_manifest(part.folder)
    if load_tokenizer(part.folder / TOKENIZER).sha256 != manifest["tokenizer"]["sha256"]:
        raise DataError(f"{part.folder / TOKENIZER} is not the tokenizer of the manifest")
    entries = [
        e for split in manifest["splits"].values() for e in (*split["shards"], split["ends"])
    ]
    return manifest, [
        {"name": e["file"], "bytes": e["bytes"], "sha256": e["sha256"]} for e in entries
    ]


def stamp(path: Path) -> list[int] | None:
    """Return what shows cheaply that a file was not touched: bytes and time of change."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def read_record(path: Path) -> dict[str, Any]:
    """Return an inputs.json; {} when it is absent or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def install(new: Path, part: Part, origin: str, source: str, **more: Any) -> None:
    """Move a whole new folder to its place and say where it comes from."""
    made = Part(part.id, new, part.record_path)
    _, files = listed(made)
    record = {
        "format": 1,
        "part": part.id.removeprefix("inputs-"),
        "origin": origin,
        "source": source,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "bytes": sum(entry["bytes"] for entry in files),
        "sha256": {entry["name"]: entry["sha256"] for entry in files},
        "files": {entry["name"]: stamp(new / entry["name"]) for entry in files},
        **more,
    }
    text = json.dumps(record, indent=1) + "\n"
    final = part.folder
    final.mkdir(parents=True, exist_ok=True)
    (final / MANIFEST).unlink(missing_ok=True)
    for file in sorted(new.iterdir()):
        if file.name != MANIFEST:
            os.replace(file, final / file.name)
    temporary = part.record_path.with_name(f".{RECORD}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, part.record_path)
    os.replace(new / MANIFEST, final / MANIFEST)
    new.rmdir()


@contextlib.contextmanager
def locked(project: Path) -> Iterator[None]:
    """Let one call at a time write; the lock ends with its process."""
    path = project / "workspace" / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for the call that holds {path}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
