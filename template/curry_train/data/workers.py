"""Run a function over jobs in processes, with progress on stderr.

Results come back in the order of the jobs, and so does the first error: what the user sees does not
depend on the number of workers. Workers are spawned, since a fork of a process that uses torch may
hang; they end with their parent, even when it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from typing import Any

from curry_train.data import DataError

SMALL_INPUT_BYTES = 16 * 2**20
"""Below this, starting processes takes longer than the work."""
PATIENCE = 2.0
"""Seconds without a line; shorter work prints nothing when quiet."""
SECONDS_BETWEEN = {True: 0.2, False: 15.0}
"""Between progress reports, on a terminal and elsewhere."""


class WorkerDied(DataError):
    """The input is not to blame; what is finished is worth keeping."""


def map_jobs(
    function: Callable[..., Any], jobs: Sequence[tuple], *, workers: int | None, size: int
) -> Iterator[Any]:
    """Yield function(*job) for each job, in order; `workers` None: by cores and `size` in bytes.

    Raises: what the first failing job raises, or WorkerDied.
    """
    workers = workers or (1 if size < SMALL_INPUT_BYTES else _usable_cores())
    if min(workers, len(jobs)) <= 1:
        yield from (function(*job) for job in jobs)
        return
    others = set(active_children())
    resource_tracker.ensure_running()  # its first start would let Ctrl-C through again
    # Ctrl-C waits until the workers run; they never see it, though a terminal tells all.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker)
    try:
        futures = [pool.submit(function, *job) for job in jobs]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from (future.result() for future in futures)
    except BrokenProcessPool:
        raise WorkerDied(
            "a worker was killed, perhaps for lack of memory; run the command again (what is "
            "finished is kept), with fewer workers"
        ) from None
    except BaseException:  # nobody waits for the rest
        for worker in set(active_children()) - others:
            worker.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pool.shutdown(cancel_futures=True)


def show_progress(
    title: str, sizes: Sequence[int], results: Iterable[Any], *, quiet: bool
) -> list[Any]:
    """Collect the results of work whose items have these sizes in bytes; say how far it is."""
    terminal = sys.stderr.isatty()
    start, clear = ("\r", "\033[K") if terminal else ("", "")
    began = time.monotonic()
    due = began + PATIENCE
    total, done = sum(sizes) / 1e6, 0.0
    found: list[Any] = []
    for size, result in zip(sizes, results, strict=True):
        found.append(result)
        done += size / 1e6
        seconds = max(time.monotonic() - began, 1e-3)
        line = f"{start}{title}: {done:.1f} of {total:.1f} MB, {done / seconds:.1f} MB/s"
        if began + seconds >= due and done and len(found) < len(sizes):
            left = (total - done) * seconds / done
            end = clear if terminal else "\n"
            print(f"{line}, {left:.0f} s left", end=end, file=sys.stderr, flush=True)
            due = began + seconds + SECONDS_BETWEEN[terminal]
    if found and (not quiet or seconds >= PATIENCE):
        print(f"{line} in {seconds:.1f} s{clear}", file=sys.stderr, flush=True)
    return found


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_worker() -> None:
    """Use one core, and end when the parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
