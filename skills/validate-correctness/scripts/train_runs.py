"""Start a state's own train.py in its worktree, follow it, and find it again when it was done."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ref_worktrees import State
from run_folders import FinishedRun, read_run

from kit.errors import UsageError
from kit.report import write_json

PROBE = Path(__file__).resolve().parent / "probe_project.py"
LAUNCHERS = ("LT_", "SLURM_", "TORCHELASTIC_", "GIT_", "PMI_", "OMPI_")
RANKS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "CURRY_RUN_DIR", "PYTHONSAFEPATH"),
)
DECIDING = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CURRY_MOE_BACKEND", "PYTHONPATH")
FINISHED, LOG = "finished.json", "log.txt"
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Request:
    """One run: which state, with which words, and which of several alike it is."""

    state: State
    seed: int
    number: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.state.role}-{self.number}-seed-{self.seed}"

    def key(self) -> str:
        """Name what decides the outcome."""
        return key_of(self.name, self.state, self.words)


def key_of(name: str, state: State, words: Sequence[str]) -> str:
    """Hash code, words, environment and machine."""
    packages = {package: version(package) for package in ("torch", "triton", "numpy")}
    places = {variable: os.environ.get(variable) for variable in DECIDING}
    about = [name, state.tree, list(words), sys.executable, packages, places, platform.node()]
    about.append(stamps(words))
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def stamps(words: Sequence[str]) -> list[list[Any]]:
    """List path, size and time of the files that absolute paths in words name: git has them not."""
    named = [word.partition("=") for word in words]
    paths = [Path(value) for key, _, value in named if key != "data.cache_dir"]
    files = [
        file
        for path in paths
        if path.is_absolute()
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.is_file()
    ]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def version(package: str) -> str:
    """Return an installed package's version without importing it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def environment() -> dict[str, str]:
    """Give this process's variables without those that a launcher or git sets for its children."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in RANKS and not name.startswith(LAUNCHERS)
    }


def probe(folder: Path, project: Path, words: Sequence[str]) -> dict[str, Any] | str:
    """Ask a state for its configuration, data and batches; a sentence when it refuses or fails."""
    command = [sys.executable, str(PROBE), str(project), *words]
    with running(command, folder, subprocess.PIPE, subprocess.PIPE) as process:
        out, err = process.communicate()
    if process.returncode == 0:
        with contextlib.suppress(ValueError, IndexError):
            return json.loads(out.decode().splitlines()[-1])
    lines = [line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()]
    if process.returncode == 2:
        return "; ".join(lines) or "refused without a word"
    return lines[-1] if lines else f"exit code {process.returncode} without a word"


def probe_once(
    places: Sequence[Path], out: Path, state: State, folder: Path, project: Path, *words: str
) -> dict[str, Any] | str:
    """Return what an earlier call was told by the same state, or ask it; words: steps, settings."""
    key, name = key_of("probe", state, words), f"probe-{state.role}.json"
    for place in places:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads((place / name).read_text(encoding="utf-8"))
            if told["key"] == key and told["stamps"] == stamps(told["moved"]):
                return told
    answer = probe(folder, project, words)
    if not isinstance(answer, str):
        answer |= {"key": key, "stamps": stamps(answer["moved"])}
        write_json(out / name, answer)
    return answer


def find_finished(places: Sequence[Path], request: Request) -> FinishedRun | None:
    """Return an earlier run of the same code, words and machine that ended well."""
    key = request.key()
    for place in places:
        for path in sorted(place.glob(f"runs/{request.name}/{FINISHED}"), reverse=True):
            with contextlib.suppress(OSError, ValueError, KeyError):
                told = json.loads(path.read_text(encoding="utf-8"))
                if told["key"] == key and told["code"] == 0:
                    run = read_run(path.parent, request.name, 0)
                    run.started, run.ended = told["started"], told["ended"]
                    if run.rows:
                        return run
    return None


def train(
    request: Request,
    project: Path,
    out: Path,
    tick: Callable[[int], None],
    patience: float,
) -> FinishedRun:
    """Run train.py to its end; `tick` hears the number of rows. Its checkpoint is thrown away."""
    folder = out / "runs" / request.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "train.py", *request.words, f"run.dir={folder}"]
    started = time.time()
    with (
        open(folder / LOG, "wb") as log,
        running(command, project, log, subprocess.STDOUT) as process,
    ):
        code = follow(process, folder, tick, patience)
    run = read_run(folder, request.name, code, folder / LOG)
    run.started, run.ended = started, time.time()
    for checkpoint in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoint, ignore_errors=True)
    told = {"key": request.key(), "code": code, "started": started, "ended": run.ended}
    write_json(folder / FINISHED, {**told, "command": command})
    return run


def follow(
    process: subprocess.Popen[bytes], folder: Path, tick: Callable[[int], None], patience: float
) -> int | None:
    """Wait for the end; None when no row came for `patience` seconds."""
    rows, moved = 0, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_SECONDS)
        metrics = next(folder.glob("*/metrics.jsonl"), None)
        found = metrics.read_bytes().count(b"\n") if metrics else 0
        if found > rows:
            rows, moved = found, time.monotonic()
            tick(rows)
        if time.monotonic() - moved > patience:
            return None


@contextlib.contextmanager
def running(
    command: Sequence[str], folder: Path, out: Any, err: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own; whatever ends the block ends the group."""
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment(),
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from None
    try:
        yield process
    finally:
        end_group(process)


def end_with_parent() -> None:
    """Ask Linux for a SIGTERM to this process when its parent is gone, even by SIGKILL."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its ranks: they may finish their step, then they are killed."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived the first one
