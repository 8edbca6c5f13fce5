"""Write a plan into a project and take it out again; a record says what was made.

The record, .curry-train/scaffold-NAME.json, is written before the first file, so that whatever
ends the writing, `--undo` knows what may be there. Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scaffold_edit
from scaffold_edit import EditError, Entry
from scaffold_plan import Plan

from kit.errors import UsageError

FOLDER = ".curry-train"
WRITING = ".writing-"
"""What a file is called until it is whole; under the lock there is one writer."""


def record_path(project: Path, name: str) -> Path:
    """Return where the record of a scaffold stands."""
    return project / FOLDER / f"scaffold-{name}.json"


def recorded(project: Path) -> list[str]:
    """Return the names of the scaffolds that the project has."""
    prefix = "scaffold-"
    found = (project / FOLDER).glob(f"{prefix}*.json")
    return sorted(path.stem.removeprefix(prefix) for path in found)


def sha256(data: bytes) -> str:
    """Return the hash that a record keeps of a file."""
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def alone(project: Path) -> Iterator[None]:
    """Hold the project's lock: two scaffolds at once would lose one's line."""
    folder = project / FOLDER
    handle = _locked(folder)
    try:
        for leftover in folder.glob(f"{WRITING}*"):  # of a writer that was killed
            leftover.unlink()
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # stays while a record is in it
        os.close(handle)


def _locked(folder: Path) -> int:
    """Return the locked folder; one that its last holder removed meanwhile is made again."""
    while True:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(folder).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)


def apply(project: Path, plan: Plan, bundle_version: str) -> None:
    """Write everything that a plan names; call it under `alone`.

    Raises UsageError when a file appeared or changed since the plan was made.
    """
    path = record_path(project, plan.name)
    if path.exists():
        raise UsageError(
            f"{path.relative_to(project)} exists: {plan.name} was made before",
            "nothing was written",
            f"set another --name, or take it out first: --undo {plan.name}",
        )
    for edit in plan.edits:
        if (project / edit.path).read_bytes() != edit.before:
            raise UsageError(f"{edit.path} changed meanwhile", "nothing was written", "try again")
    record: dict[str, Any] = {
        "schema": 1,
        "name": plan.name,
        "what": plan.what,
        "version": bundle_version,
        "complete": False,
        "create": {p: sha256(text.encode()) for p, text in plan.create.items()},
        "edits": [
            {
                "path": edit.path,
                **edit.entry.__dict__,
                "before": sha256(edit.before),
                "after": sha256(edit.after),
            }
            for edit in plan.edits
        ],
    }
    _write(path, _dump(record))
    for name, text in plan.create.items():
        _create(project / name, text.encode(), path.parent)
    for edit in plan.edits:
        _write(project / edit.path, edit.after, beside=path.parent)
    _write(path, _dump(record | {"complete": True}))


def undo(project: Path, name: str, *, force: bool = False) -> tuple[list[str], list[str]]:
    """Take a scaffold out again; call it under `alone`. Returns (what was done, what was kept).

    A file that was changed since is kept unless `force`, and the record with it. Lines are taken
    out of files however they were edited around them. Raises UsageError without a record.
    """
    path = record_path(project, name)
    if not path.is_file():
        known = ", ".join(recorded(project)) or "none"
        raise UsageError(f"--undo {name}: the project has no such scaffold", f"there are: {known}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        created, edits = record["create"], record["edits"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path.relative_to(project)} cannot be read: {error}", fix="restore it from git"
        ) from None
    done: list[str] = []
    kept = _take_out_lines(project, edits, done)
    for file, wanted in created.items():
        _delete(project / file, file, wanted, force, done, kept)
    if not kept:
        path.unlink()
    return done, kept


def _take_out_lines(project: Path, edits: list[dict[str, str]], done: list[str]) -> list[str]:
    kept = []
    for edit in edits:
        path, entry = edit["path"], Entry(edit["dict_name"], edit["key"], edit["value"])
        try:
            found = (project / path).read_bytes()
            left = _without(found, entry, edit)
        except FileNotFoundError:
            continue
        except EditError as error:
            kept.append(str(error))
            continue
        if left != found:
            _write(project / path, left, beside=project / FOLDER)
            done.append(f"changed  {path}: without {entry.line}")
    return kept


def _without(found: bytes, entry: Entry, edit: dict[str, str]) -> bytes:
    """Return a file without its entry; bit for bit what it was, if nothing else was changed."""
    left = scaffold_edit.remove(found, entry, edit["path"])
    if sha256(found) != edit["after"] or sha256(left) == edit["before"]:
        return left
    # White space in a dict that was empty: of all places where it may have been, one is right.
    place = found.find(entry.line.encode())
    for start in range(place, -1, -1):
        for end in range(place + len(entry.line), min(place + len(entry.line) + 3, len(found)) + 1):
            if sha256(found[:start] + found[end:]) == edit["before"]:
                return found[:start] + found[end:]
    return left


def _delete(
    path: Path, name: str, wanted: str, force: bool, done: list[str], kept: list[str]
) -> None:
    if not path.is_file() or path.is_symlink():
        return
    if sha256(path.read_bytes()) != wanted and not force:
        kept.append(f"{name} was changed since it was made; delete it yourself, or add --force")
        return
    path.unlink()
    cache = path.parent / "__pycache__"
    for compiled in cache.glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    done.append(f"deleted  {name}")


def _dump(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()


def _create(path: Path, data: bytes, scratch: Path) -> None:
    """Make a file that is whole from its first moment; never one that is there already."""
    temporary = _temporary(scratch, path, data)
    try:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with open(path, "xb") as file:
                file.write(data)
    except FileExistsError:
        raise UsageError(
            f"{path} appeared meanwhile and was left alone",
            "what was written before it is there",
            "take it out with --undo, and choose another --name",
        ) from None
    finally:
        temporary.unlink()


def _write(path: Path, data: bytes, beside: Path | None = None) -> None:
    """Replace a file at once, with its permissions; a link stays one."""
    real = path.resolve()
    temporary = _temporary(beside or path.parent, real, data)
    if real.exists():
        os.chmod(temporary, real.stat().st_mode & 0o7777)
    os.replace(temporary, real)


def _temporary(folder: Path, path: Path, data: bytes) -> Path:
    temporary = folder / f"{WRITING}{path.name}"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary
