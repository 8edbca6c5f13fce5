"""How far something is: a bar on a terminal, elsewhere a few lines.

No library: a library's bar redraws from a thread, which forked and killed processes carry along,
and the environment that trains the model need not have one.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

SECONDS_BETWEEN_LINES = 2.0
SECONDS_BETWEEN_DRAWINGS = 0.1
CELLS = 20


def duration(seconds: float) -> str:
    """Write a time for people: 8 s, 3 min, 2.5 h."""
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Progress:
    """Shows counts of one or several passes; a smaller `done` or another total begins a new one."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream
        self.clock = clock
        self.total: int | None = None
        self.first = self.done = self.quarter = 0
        self.began = self.drawn = clock()

    def show(self, done: int, total: int, note: str = "") -> None:
        """Draw the bar in place, or print a line for a quarter that took some seconds."""
        now = self.clock()
        new = total != self.total or done < self.done
        if new:
            self.total, self.quarter, self.first, self.began = total, 0, done, now
        self.done = done
        stream = sys.stderr if self.stream is None else self.stream
        line = self.line(done, total, now, note)
        if stream.isatty():
            if new or done >= total or now - self.drawn >= SECONDS_BETWEEN_DRAWINGS:
                self.drawn = now
                width = shutil.get_terminal_size().columns - 1
                cells = CELLS * min(done, total) // max(1, total)
                text = f"[{'#' * cells}{'.' * (CELLS - cells)}] {line}"[:width]
                print(f"\r{text}\033[K", end="\n" if done >= total else "", file=stream, flush=True)
            return
        quarter = 4 * done // max(1, total)
        if quarter > self.quarter:
            self.quarter = quarter
            if now - self.drawn > SECONDS_BETWEEN_LINES:
                self.drawn = now
                print(line, file=stream, flush=True)

    def line(self, done: int, total: int, now: float, note: str) -> str:
        """Say count, note and the time left by the rate so far."""
        parts = [f"{done}/{total}", note]
        if self.first < done < total and now - self.began > SECONDS_BETWEEN_LINES:
            each = (now - self.began) / (done - self.first)
            parts.append(f"about {duration(each * (total - done))} left")
        return " ".join(part for part in parts if part)
