"""One live writer per run folder: a lease file with who writes, refreshed while it lives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from curry_train.config import ConfigError

LEASE = "lease.json"
HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 180.0
"""Silence after which a writer on another host counts as dead; file servers cache for a minute."""


class Lease:
    """Held from acquire to release; a thread refreshes the file's time in between."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    @staticmethod
    def acquire(folder: Path) -> Lease:
        """Take the lease of a run folder, from a dead writer if need be.

        Raises: ConfigError naming the live writer.
        """
        path = folder / LEASE
        with _locked(path) as descriptor:
            holder = _live_holder(os.pread(descriptor, 4096, 0), os.fstat(descriptor).st_mtime)
            if holder is not None:
                raise ConfigError(
                    [f"{folder} is being written by {holder}; wait for it or stop it"]
                )
            pid = os.getpid()
            mine = {"pid": pid, "host": socket.gethostname(), "started": process_start(pid)}
            content = json.dumps(mine).encode()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
        return Lease(path, content)

    def release(self) -> None:
        """Give the lease up, unless another writer has taken it over; safe to call twice."""
        self._stop.set()
        try:
            if self._path.read_bytes() == self._content:
                self._path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self._path)
            except OSError:
                continue


def live_writer(folder: Path) -> str | None:
    """Describe the live writer of a run folder, or None; writes nothing."""
    path = folder / LEASE
    try:
        return _live_holder(path.read_bytes(), path.stat().st_mtime)
    except OSError:
        return None


def _live_holder(content: bytes, touched: float) -> str | None:
    try:
        holder: Any = json.loads(content)
        pid, host, started = int(holder["pid"]), str(holder["host"]), holder["started"]
    except (ValueError, TypeError, KeyError):
        return None
    if host == socket.gethostname():
        return f"process {pid} on this host" if process_start(pid) == started else None
    age = time.time() - touched
    if age > STALE_SECONDS:
        return None
    return f"process {pid} on host {host} (last sign of life {max(age, 0):.0f} s ago)"


def process_start(pid: int) -> str | None:
    """Return when a living process began, in the system's own words; None when there is none.

    The pid alone would take an unrelated process, born later under the same number, for it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return None
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file under an exclusive lock, so that two starters cannot both take it over."""
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # On a file system without locks the content alone decides.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                same = os.stat(path).st_ino == os.fstat(descriptor).st_ino
            except FileNotFoundError:
                same = False
            if same:
                yield descriptor
                return
        finally:
            os.close(descriptor)
