"""What a person sees while a run goes on: one live line, or a few plain ones.

Only rank 0 prints. Without a terminal (a log file, a coding agent) about twenty lines a run are
written, because live redrawing would fill the file.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO

PLAIN_LINES = 20


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print a line. A reader that is gone, a full disk or a narrow encoding never ends a run."""
    out = stream or sys.stdout
    if out is None:  # closed before Python started
        return
    encoding = out.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=out, flush=True)
    except OSError:  # what is still buffered would fail again when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


class Progress:
    """Show step, loss, tokens per second and the time that is left."""

    def __init__(self, *, first_step: int, max_steps: int, enabled: bool) -> None:
        self.max_steps = max_steps
        self.enabled = enabled
        self.every = max(max_steps // PLAIN_LINES, 1)
        self.first_step = first_step
        self.started = time.monotonic()
        self.live: Any = None
        if enabled and sys.stderr.isatty():
            self.live = _live_bar(first_step, max_steps)

    def update(self, step: int, *, loss: float, tokens_per_s: float) -> None:
        """Report finished step `step`."""
        if not self.enabled:
            return
        if self.live is not None:
            self.live.update(
                self.live.task_ids[0],
                completed=step,
                description=f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s",
            )
        elif step % self.every == 0 or step in (self.first_step + 1, self.max_steps):
            done = step - self.first_step
            left = (time.monotonic() - self.started) / done * (self.max_steps - step)
            tell(
                f"step {step}/{self.max_steps}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  "
                f"{_clock(left)} left"
            )

    def say(self, text: str) -> None:
        """Print a line of its own without tearing the live one."""
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False)
        elif self.enabled:
            tell(text)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def _live_bar(first_step: int, max_steps: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )
    bar.add_task("", total=max_steps, completed=first_step)
    bar.start()
    return bar


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
