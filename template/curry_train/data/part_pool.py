"""Run a function over the parts of an input, in processes, with progress.

Results come back in the order of the parts, and so does the first error: what the user sees does
not depend on the number of workers. Workers are spawned, since a fork of a process that uses torch
may hang; they end with their parent, even when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from typing import Any

from curry_train.data import DataError
from curry_train.data.sources import Part

SMALL_INPUT_BYTES = 16 * 2**20
"""Below this, starting processes takes longer than the work."""
PATIENCE = 2.0
"""Seconds without a line; shorter work prints nothing when quiet."""
SECONDS_BETWEEN = {True: 0.2, False: 15.0}
"""Between progress reports, on a terminal and elsewhere."""


class WorkerDied(DataError):
    """The input is not to blame; what is finished is worth keeping."""


class PartPool:
    """Maps functions over parts with `workers` processes (None: by cores and size of the input)."""

    def __init__(self, parts: Sequence[Part], *, workers: int | None, quiet: bool) -> None:
        self.parts = parts
        self.quiet = quiet
        small = sum(part.bytes for part in parts) < SMALL_INPUT_BYTES
        self.workers = min(len(parts), workers or (1 if small else usable_cores()))

    def run(self, title: str, function: Callable[..., Any], jobs: Sequence[tuple]) -> list[Any]:
        """Return function(*job) for every part's job, in order; print progress to stderr.

        Raises: DataError, the first one by part, also when a worker is killed.
        """
        if self.workers <= 1:
            return self._watch(title, (function(*job) for job in jobs))
        pool = ProcessPoolExecutor(self.workers, get_context("spawn"), initializer=_start_worker)
        others = set(active_children())
        futures: list[Future] = []
        try:
            with _interrupts_held_back():
                futures = [pool.submit(function, *job) for job in jobs]
            return self._watch(title, (future.result() for future in futures))
        except BrokenProcessPool:
            raise WorkerDied(
                f"{title}: a worker was killed, perhaps for lack of memory; run the command again "
                "(what is finished is kept), with fewer workers"
            ) from None
        finally:
            with _interrupts_held_back():
                if not all(future.done() for future in futures):  # nobody waits for the rest
                    for worker in set(active_children()) - others:
                        worker.kill()
                pool.shutdown(cancel_futures=True)

    def _watch(self, title: str, results: Iterator[Any]) -> list[Any]:
        terminal = sys.stderr.isatty()
        start = time.monotonic()
        reported = start - SECONDS_BETWEEN[terminal] + PATIENCE
        printed = False
        found: list[Any] = []
        done = 0
        total = sum(part.bytes for part in self.parts)
        for part, result in zip(self.parts, results, strict=True):
            found.append(result)
            done += part.bytes
            now = time.monotonic()
            due = now - reported >= SECONDS_BETWEEN[terminal]
            if due and done and len(found) < len(self.parts):
                rate = done / (now - start)
                line = (
                    f"{title}: {done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, "
                    f"{(total - done) / rate:.0f} s left"
                )
                print(
                    f"\r{line}\033[K" if terminal else line,
                    end="" if terminal else "\n",
                    file=sys.stderr,
                    flush=True,
                )
                reported = now
                printed = True
        if printed or not self.quiet:
            seconds = max(time.monotonic() - start, 1e-3)
            rate = total / seconds / 1e6
            line = f"{title}: {total / 1e6:.1f} MB in {seconds:.1f} s, {rate:.1f} MB/s"
            print(f"\r{line}\033[K" if terminal else line, file=sys.stderr, flush=True)
        return found


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C wait; processes started meanwhile never see it, though a terminal tells all."""
    resource_tracker.ensure_running()  # its first start would let the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    """Use one core, and end when the parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
