"""Install the pinned command-line clients that the tests run, once per lock file.

They go to the user's cache folder and never into the repository, whose files the tests copy.
Standard library only: `tests/run.py` calls this before a test environment exists.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent


class InstallError(Exception):
    """The clients cannot be installed here; the text says why."""


def cache_root() -> Path:
    """Return the folder of everything that tests install."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "curry-train-tests"


def content_hash(*files: Path, extra: str = "") -> str:
    """Return 16 hex digits over the bytes of the files and the extra text."""
    digest = hashlib.sha256(extra.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def building(folder: Path) -> Iterator[bool]:
    """Yield whether the folder has to be built; complete it when the block ends without an error.

    A folder counts only with its `.complete` file. A lock file keeps two builders apart.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    marker = folder / ".complete"
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.exists():
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield True
        marker.touch()


def install_clients() -> Path:
    """Return the node_modules folder that holds the pinned clients, installing it when needed."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise InstallError(
            "npm and node are not on PATH; install Node.js 18 or newer to run the client tests"
        )
    files = [HERE / "package.json", HERE / "package-lock.json"]
    key = content_hash(*files, extra=f"{platform.system()}-{platform.machine()}")
    folder = cache_root() / f"clients-{key}"
    with building(folder) as needed:
        if needed:
            for file in files:
                shutil.copy(file, folder)
            command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                shutil.rmtree(folder)
                tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
                raise InstallError(f"npm ci failed with code {done.returncode}:\n{tail}")
    return folder / "node_modules"
