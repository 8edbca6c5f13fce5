"""Run other programs so that signals reach them once and nothing is left half told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BEAT_SECONDS = 20
"""Between two signs of life where output is no terminal."""


class Stopped(Exception):
    """A signal asked this process to end."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


def _stop(signum: int, _frame: object) -> None:
    raise Stopped(signum)


def raise_on_signals() -> None:
    """Turn the ending signals into Stopped; those the parent ignores stay ignored (nohup)."""
    for signum in SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _stop)


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a child: the user's, without what would bend another Python."""
    dropped = {"PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, **extra}


def run_child(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    env: dict[str, str],
    to_stderr: bool = False,
    keep_open: Sequence[int] = (),
    beat: Callable[[int], None] | None = None,
) -> tuple[int, int | None]:
    """Run a program to its end; return its exit code and the first signal that came meanwhile.

    The program has a process group of its own and gets every signal that this process gets, once:
    a terminal's Ctrl-C and a `kill` of this process look the same to it.
    """
    received: list[int] = []
    early: list[int] = []
    started: list[subprocess.Popen] = []

    def forward(signum: int, _frame: object) -> None:
        received.append(signum)
        if started:
            _send(started[0], signum)
        else:
            early.append(signum)

    before = {
        signum: signal.signal(signum, forward)
        for signum in SIGNALS
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if to_stderr else None,
            pass_fds=keep_open,
            process_group=0,
        )
        started.append(child)
        for signum in early:
            _send(child, signum)
        return _wait(child, beat), (received or [None])[0]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _send(child: subprocess.Popen, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have just ended
        os.killpg(child.pid, signum)


def _wait(child: subprocess.Popen, beat: Callable[[int], None] | None) -> int:
    seconds = 0
    while True:
        try:
            return child.wait(timeout=BEAT_SECONDS if beat else None)
        except subprocess.TimeoutExpired:
            seconds += BEAT_SECONDS
            if beat:
                beat(seconds)
