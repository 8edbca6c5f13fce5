"""One live writer per run folder: whoever holds the lock of lease.json.

The system releases the lock when its process dies, however it dies and on whatever host, so a
killed run never has to be guessed dead. The file's content only tells people who wrote last.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
from pathlib import Path

from curry_train.config import ConfigError

LEASE = "lease.json"


class Lease:
    """The right to write a run folder, until it is closed.

    Raises: ConfigError naming the live writer.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / LEASE, os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(5):
            if _locked(self._descriptor):
                break
            time.sleep(0.1)  # live_writer holds the lock for a moment to see whether it is free
        else:
            holder = _holder(self._descriptor)
            os.close(self._descriptor)
            raise ConfigError(
                [
                    f"{folder} is being written by {holder}; wait for it or stop it, or start a "
                    "new run with run.resume=never"
                ]
            )
        os.ftruncate(self._descriptor, 0)
        mine = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.pwrite(self._descriptor, mine.encode(), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def live_writer(folder: Path) -> str | None:
    """Describe the live writer of a run folder, or None; writes nothing."""
    try:
        descriptor = os.open(folder / LEASE, os.O_RDWR)
    except OSError:
        return None
    try:
        return None if _locked(descriptor) else _holder(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Take the lock; False when another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(
            f"the file system of run.dir has no locks ({error.strerror}): two runs that continue "
            "one folder at the same time are not noticed",
            stacklevel=4,
        )
    return True


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on host {holder['host']}"
    except (ValueError, TypeError, KeyError):
        return "another process"
