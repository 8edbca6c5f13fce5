"""Run a command and end it when whoever started this goes away: `leash.py WORD ... < pipe`.

Standard input is a pipe that nobody writes to. It closes when the runner asks for an end or is
itself killed, by whatever signal; then the command and what it started get SIGTERM, and SIGKILL
after some seconds. On Linux that finds what went into a session of its own too (torchrun's
workers). Standard library only; exits with the command's code, 128 + N for signal N.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

GRACE_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36


def main(command: Sequence[str]) -> int:
    """Start, watch, end."""
    if list(command) in ([], ["--help"]):
        print(__doc__)
        return 0
    with contextlib.suppress(OSError, AttributeError):  # orphans of the job become ours
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", flush=True)
        return 127
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    code = child.wait()
    _signal_group(child.pid, signal.SIGKILL)  # whatever it left behind
    while orphans := _own_children():
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
    return code if code >= 0 else 128 - code


def _watch(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):
        pass
    _signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)
    _signal_group(child.pid, signal.SIGKILL)


def _own_children() -> list[int]:
    try:
        files = [f"/proc/self/task/{task}/children" for task in os.listdir("/proc/self/task")]
        return [int(pid) for file in files for pid in open(file, encoding="ascii").read().split()]
    except OSError:
        return []


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
