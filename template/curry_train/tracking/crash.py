"""How a run ends when a rank fails, dies or falls silent: told once, and no rank left hanging."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from curry_train.tracking import flight_recorder
from curry_train.tracking.progress import tell

if TYPE_CHECKING:
    from curry_train.launch import StopSignals
    from curry_train.parallel.mesh import Mesh
    from curry_train.tracking.run_folder import Run

PEER_GRACE = 5.0
"""Seconds that a rank has to end by itself once another rank has reported a failure."""
RECORD_SECONDS = 1.5
"""Longest wait of a failing rank for the flight records of the others."""
LAUNCHER_SECONDS = 1.5
"""A launcher that has not noticed for so long that a rank ended is stuck."""
LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "timed out waiting",
    "application timeout caused pair closure",
    "connectfull",
)


class CollectiveTimeout(RuntimeError):
    """A collective of a backend that does not raise by itself is open for too long."""


def leave(code: int) -> None:
    """End this process now: a clean shutdown would wait for ranks that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_stuck_launcher() -> None:
    """Leave a child behind that ends torchrun's agent if it does not notice that this rank ended.

    The agent asks a store on another node ten times a second, without a timeout: when the network
    is gone it hangs until the kernel gives the connection up, after a quarter of an hour. Until it
    has noticed the end of this rank, the number of this process is not free.
    """
    rank, agent, env = os.getpid(), os.getppid(), os.environ
    several_nodes = env.get("WORLD_SIZE") != env.get("LOCAL_WORLD_SIZE")
    try:
        command = Path(f"/proc/{agent}/cmdline").read_bytes()
    except OSError:
        return
    is_agent = b"torchrun" in command or b"torch.distributed.run" in command
    if "TORCHELASTIC_RUN_ID" not in env or not several_nodes or not is_agent or os.fork():
        return
    end = time.monotonic() + LAUNCHER_SECONDS
    try:
        while time.monotonic() < end:
            time.sleep(0.05)
            os.kill(rank, 0)
        os.kill(agent, signal.SIGKILL)
    except OSError:  # the agent saw the rank's end, or is gone itself
        pass
    finally:
        os._exit(0)


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether an error only says that another rank is gone or silent."""
    import torch.distributed as dist

    text = str(error).lower()
    named = isinstance(error, (dist.DistError, CollectiveTimeout))
    return named or any(words in text for words in LOST_PEER_WORDS)


def first_line(error: BaseException) -> str:
    """Return an error in one line; torch's own carry the stack of its C++ code."""
    text = traceback.format_exception_only(error)[0].strip()
    return text.splitlines()[0]


def report_crash(error: BaseException, run: Run, mesh: Mesh, limit: float) -> None:
    """Write failure.json if this rank is the first to fail, and print what its place allows."""
    text = "".join(traceback.format_exception(error))
    lost_peer, told = mesh.world > 1 and is_lost_peer(error), ""
    if lost_peer:
        told = lost_peer_story(error, run, mesh, limit)
    first = run.fail(
        rank=mesh.rank, error=error, traceback_text=text, lost_peer=lost_peer, told=told
    )
    last_line = traceback.format_exception_only(error)[-1].strip()
    if not first:
        tell(f"rank {mesh.rank} stops after another rank failed: {first_line(error)}", sys.stderr)
    elif lost_peer:
        tell(f"rank {mesh.rank} {told}: {first_line(error)}", sys.stderr)
    else:
        tell(f"rank {mesh.rank} failed first:\n{text.rstrip()}", sys.stderr)
    run.finish("crashed", (told or last_line) if first else run.failure(), 1)


def lost_peer_story(error: BaseException, run: Run, mesh: Mesh, limit: float) -> str:
    """Write this rank's flight record and say what is known of the peers, in one line.

    The rank that broke the connection may still be writing why: then its failure.json ends the
    wait for the records of the others.
    """
    stack = traceback.extract_tb(error.__traceback__) or flight_recorder.main_stack()
    record = flight_recorder.write(run.dir, mesh, stack)
    known = flight_recorder.explain(
        run.dir, mesh, wait=RECORD_SECONDS, enough=lambda: run.failure_time() is not None
    )
    silent = isinstance(error, CollectiveTimeout) or "timed out" in str(error).lower()
    story = "lost another rank, which left no word of why (killed?)"
    if silent:
        story = f"got no answer from another rank for {limit:g} s (run.comm_timeout)"
    story += f"; {known}" if known else ""
    return story + (f"; see {record.parent}" if record else "")


def watch(run: Run, mesh: Mesh, signals: StopSignals, limit: float) -> None:
    """Start a thread that looks once a second for what the main thread cannot see.

    A failure that another rank reported ends this one, since a collective on a GPU does not notice
    a dead peer before its timeout. A collective over NCCL that does not end is reported. When
    torchrun's agent is killed, its ranks stop as on SIGTERM: nobody else would ever end them.
    """
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if mesh.world == 1 and launcher is None:
        return
    known = run.failure_time()
    nccl = flight_recorder.Progress(mesh, limit) if mesh.device.type == "cuda" else None

    def look() -> None:
        nonlocal launcher
        while True:
            time.sleep(1.0)
            if launcher is not None and os.getppid() != launcher:
                launcher = None
                tell(f"rank {mesh.rank}: its launcher is gone, stopping", sys.stderr)
                signals.handle(signal.SIGTERM, None)
            if nccl is not None and nccl.stuck():
                report_crash(CollectiveTimeout("a collective did not end"), run, mesh, limit)
                leave(1)
            failed = run.failure_time() != known
            if failed or flight_recorder.reported(run.dir):
                flight_recorder.write(run.dir, mesh, flight_recorder.main_stack())
            if failed:
                break
        time.sleep(PEER_GRACE)
        tell(f"rank {mesh.rank} stops: another rank failed", sys.stderr)
        run.finish("crashed", run.failure(), 1)
        end_stuck_launcher()
        leave(1)

    threading.Thread(target=look, name="watch", daemon=True).start()
