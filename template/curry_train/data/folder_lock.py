"""One process at a time in a folder that vanishes when the work is done.

The lock is a flock on a file inside: it ends with its owner, however that dies, and leaves nothing
behind beside the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 5.0
"""Seconds of waiting before the user is told why."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the work folder alone; others wait here until the work is done or its owner dead."""
    started = time.monotonic()
    told = False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / "lock").open("w")
        except FileNotFoundError:  # the owner has just finished and removed the folder
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told and time.monotonic() - started > PATIENCE:
                    print(f"waiting for the process that prepares {folder}", file=sys.stderr)
                    told = True
                time.sleep(0.05)
                continue
            if _is_same_file(file.fileno(), folder / "lock"):
                yield
                return


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Say whether `path` is still the opened file; an owner that finishes removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def remove_folder(folder: Path) -> None:
    """Remove a locked folder; it is renamed first, since a waiting process may write into it."""
    trash = folder.with_name(f"{folder.name}.{os.getpid()}.trash")
    os.replace(folder, trash)
    shutil.rmtree(trash)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
