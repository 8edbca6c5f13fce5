"""The folder of one run: a lock while it lives, state.json, detach, status, wait.

A record lock belongs to a process and goes with it, whatever ends it, and is not inherited by
fork: a run whose lock is free and that left no exit code was killed. Process ids are only shown.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError
from .progress import Progress, duration
from .report import EXIT_CODES, write_json

STATE, LOCK, LOG = "state.json", "lock", "log.txt"
DETACHED = "CURRY_KIT_DETACHED"
START_SECONDS = 60.0
POLL_SECONDS = 0.2
HEARTBEAT_SECONDS = 30.0


class Job:
    """A running check: says what to expect, how far it is, how it ended."""

    def __init__(self, out: Path, skill: str) -> None:
        self.out = out
        self.last_written = 0.0
        self.bar = Progress()
        self.state: dict[str, Any] = {
            "schema": 1,
            "skill": skill,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": [sys.executable, *sys.argv],
            "started": time.time(),
            "expected_s": None,
            "done": 0,
            "total": None,
            "finished": None,
            "exit_code": None,
            "error": None,
        }

    def expect(self, seconds: float | None, what: str) -> None:
        """Print how long it will take before it is done."""
        self.state["expected_s"] = (
            None if seconds is None else time.time() - self.state["started"] + seconds
        )
        length = "a few seconds to load" if seconds is None else f"about {duration(seconds)}"
        say(f"expected: {length} ({what})")
        self._write()

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Report progress: a bar on a terminal, else a line a quarter, and in state.json."""
        self.state.update(done=done, total=total)
        if time.time() - self.last_written > 1.0:
            self._write()
        self.bar.show(done, total, note)

    def finish(self, code: int, error: str | None) -> None:
        """Write how it ended."""
        self.state.update(exit_code=code, error=error, finished=time.time())
        self._write()

    def _write(self) -> None:
        self.last_written = time.time()
        write_json(self.out / STATE, self.state)


def say(line: str) -> None:
    """Print one line of progress to stderr; stdout is the report's."""
    print(line, file=sys.stderr, flush=True)


def new_folder(project: Path, skill: str) -> Path:
    """Make <project>/runs/checks/<skill>/<stamp>, unique by mkdir."""
    parent = project / "runs" / "checks" / skill
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt:03d}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise UsageError(f"{parent} has 1000 runs of this second", fix="set --out DIR")


def discard(folder: Path) -> None:
    """Remove the folder of a run that never began."""
    for name in (STATE, LOCK):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def locked(out: Path, in_use: tuple[str, str] | None = None) -> Iterator[None]:
    """Hold the folder's lock; a second run in the same folder is refused, by the words given."""
    with open(out / LOCK, "w", encoding="utf-8") as file:
        for attempt in range(10):  # a reader may hold it for a moment
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if attempt == 9:
                    usual = (f"--out {out} is in use by another run", "set another --out DIR")
                    found, fix = in_use or usual
                    raise UsageError(found, fix=fix) from None
                time.sleep(0.05)
        yield


def is_locked(out: Path) -> bool:
    """Tell whether a run lives in this folder."""
    try:
        with open(out / LOCK, "r+", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def read_status(out: Path) -> dict[str, Any]:
    """Read state.json and add status (running, done, failed, killed), elapsed_s and eta_s."""
    alive = is_locked(out)  # before the state: a run writes its code, then lets go
    try:
        state = json.loads((out / STATE).read_text(encoding="utf-8"))
        code, elapsed = state["exit_code"], (state["finished"] or time.time()) - state["started"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{out} holds no run ({STATE} is missing or damaged)",
            fix="set --out to the folder that was printed",
        ) from None
    if alive:
        state["status"] = "running"
    elif code is None:
        state["status"] = "killed"
    else:
        state["status"] = "done" if code in EXIT_CODES.values() and not state["error"] else "failed"
    state["elapsed_s"] = round(elapsed, 1)
    state["eta_s"] = _eta(state, elapsed) if alive else None
    return state


def _eta(state: dict[str, Any], elapsed: float) -> float | None:
    if state["expected_s"] is not None:
        return round(max(0.0, state["expected_s"] - elapsed), 1)
    if state["done"] and state["total"]:
        return round(elapsed / state["done"] * (state["total"] - state["done"]), 1)
    return None


def describe_status(state: dict[str, Any], out: Path) -> str:
    """Put a status on one line."""
    parts = [f"{state['status']}: {state['skill']}"]
    if state["total"]:
        parts.append(f"{state['done']}/{state['total']}")
    parts.append(f"{duration(state['elapsed_s'])} so far" if state["status"] == "running" else "")
    if state["status"] == "running":
        eta = state["eta_s"]
        parts.append("time left unknown" if eta is None else f"about {duration(eta)} left")
    if state["exit_code"] is not None:
        parts.append(f"exit {state['exit_code']}")
    if state["error"]:
        parts.append(str(state["error"]).splitlines()[0])
    if state["status"] == "killed":
        parts.append(f"process {state['pid']} is gone and left no exit code; start it again")
    return ", ".join(part for part in parts if part) + f" ({out})"


def newest_folder(project: Path, skill: str) -> Path:
    """Find the run that was started last."""
    parent = project / "runs" / "checks" / skill
    found = sorted(path.parent for path in parent.glob(f"*/{STATE}"))
    if not found:
        raise UsageError(f"no run of {skill} in {parent}", fix="set --out to the folder of a run")
    return found[-1]


def detach(argv: Sequence[str], out: Path) -> tuple[int | None, int]:
    """Start the same command as its own session; return (exit code if it ended at once, pid).

    Returns when the child holds the folder's lock, so that a status asked next is true.
    """
    command = [sys.executable, *argv, "--out", str(out)]
    with open(out / LOG, "ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, DETACHED: "1"},
        )
    deadline = time.time() + START_SECONDS
    while time.time() < deadline and child.poll() is None:
        if is_locked(out) and _started_by(out, child.pid):
            break
        time.sleep(0.05)
    return child.poll(), child.pid


def _started_by(out: Path, pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((out / STATE).read_text(encoding="utf-8"))["pid"] == pid
    return False


def wait_for(out: Path, *, timeout: float | None) -> dict[str, Any]:
    """Block until the run ends or the timeout passes; return its status."""
    started = printed = time.time()
    while True:
        state = read_status(out)
        now = time.time()
        if state["status"] != "running" or (timeout is not None and now - started >= timeout):
            return state
        if now - printed >= HEARTBEAT_SECONDS:
            printed = now
            say(describe_status(state, out))
        time.sleep(POLL_SECONDS)
