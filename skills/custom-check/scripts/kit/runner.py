"""Many processes, one on a device at a time: seeds, arms of an ablation, points of a sweep.

A job is a command and the hash of what it computes. Its folder, named by that hash and the hash of
the code, gets record.json when it is over. A job whose record says 0 is never run again; one
without a record, because it or the runner was killed, starts anew in an empty folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .job import LOG, locked, say
from .progress import duration
from .report import write_json

if TYPE_CHECKING:
    from .cli import Invocation

FOLDER = "{folder}"
"""Stands in a command for the job's own folder."""
RECORD, ORPHANS = "record.json", "orphans"
LEASH = Path(__file__).with_name("leash.py")
TAIL_LINES, TAIL_BYTES = 5, 20_000
POLL_SECONDS = 0.05
ORPHAN_SECONDS = 30.0


@dataclass(frozen=True)
class Work:
    """One process to run."""

    name: str
    """How it is called in progress and reports."""
    command: Sequence[str]
    """Its words; `{folder}` in one becomes the job's folder, where its results go."""
    config_hash: str
    """What it computes; with the hash of the code it says whether it has been done."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Slot:
    """Room for one job at a time."""

    name: str
    env: Mapping[str, str]


@dataclass
class Outcome:
    """How a job ended."""

    name: str
    folder: str
    exit_code: int
    seconds: float
    slot: str
    kept: bool = False
    """It had been done before this call."""
    tail: list[str] = field(default_factory=list)
    """The last lines of its log when it failed."""


def slots(cpu_jobs: int | None = None) -> list[Slot]:
    """One slot a visible GPU, else `cpu_jobs` that share the cores (default: one for two cores).

    CUDA_VISIBLE_DEVICES says which GPUs there are; unset, torch is asked.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cpu_jobs is None:
        gpus = _all_gpus() if named is None else [part.strip() for part in named.split(",")]
        gpus = gpus[: gpus.index("-1")] if "-1" in gpus else gpus
        found = [Slot(f"GPU {gpu}", {"CUDA_VISIBLE_DEVICES": gpu}) for gpu in gpus if gpu]
        if found:
            return list({slot.name: slot for slot in found}.values())
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    count = max(1, cores // 2) if cpu_jobs is None else cpu_jobs
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count)))
    settings = {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
    return [Slot(f"CPU {number}", settings) for number in range(count)]


def _all_gpus() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    return [str(number) for number in range(torch.cuda.device_count())]


def run_all(
    call: Invocation,
    home: Path,
    jobs: Sequence[Work],
    *,
    tree_hash: str,
    places: Sequence[Slot],
    guess_s: float | None = None,
) -> list[Outcome]:
    """Run what is not done yet and return how every job ended, in the order given.

    `home` keeps the jobs' folders from call to call; a second runner in it is refused. Jobs start
    in the order given, each on a free slot. `guess_s` is what one job may take, measured or not;
    finished jobs know better. A job that fails stops no other. Ctrl-C and SIGTERM end them all.
    """
    folders = _folders(home, jobs, tree_hash)
    home.mkdir(parents=True, exist_ok=True)
    in_use = (f"another run works on the jobs in {home}", "wait for it or end it")
    with locked(home, in_use), _orphans_gone(home) as inherited:
        ended = {name: kept for name in folders if (kept := _kept(folders[name]))}
        waiting = [job for job in jobs if job.name not in ended]
        _announce(call, home, len(jobs), list(ended.values()), len(waiting), places, guess_s)
        if waiting:
            queue = _Queue(call, folders, places, inherited, [k.seconds for k in ended.values()])
            with _interruptible():
                ended.update(queue.run(waiting, len(jobs)))
    for outcome in ended.values():
        if outcome.exit_code:
            say(f"failed: {outcome.name}, exit {outcome.exit_code}, {outcome.folder}/{LOG}")
            for line in outcome.tail:
                say(f"  {line}")
    return [ended[job.name] for job in jobs]


def _folders(home: Path, jobs: Sequence[Work], tree_hash: str) -> dict[str, Path]:
    """Give each job its folder; two jobs of one name or one configuration are a mistake."""
    found: dict[str, Path] = {}
    names: dict[Path, str] = {}
    for job in jobs:
        identity = json.dumps({"config_hash": job.config_hash, "tree_hash": tree_hash})
        folder = home / hashlib.sha256(identity.encode()).hexdigest()[:16]
        if job.name in found or folder in names:
            raise UsageError(
                f"the jobs {names.get(folder, job.name)} and {job.name} are the same",
                "each needs a name and a configuration of its own",
            )
        found[job.name], names[folder] = folder, job.name
    return found


def _kept(folder: Path) -> Outcome | None:
    """Read the record of a job that was done; a failed or damaged one counts as none."""
    try:
        outcome = Outcome(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    outcome.kept, outcome.folder = True, str(folder)  # the project may have been moved
    return None if outcome.exit_code else outcome


def _announce(
    call: Invocation,
    home: Path,
    total: int,
    kept: Sequence[Outcome],
    waiting: int,
    places: Sequence[Slot],
    guess_s: float | None,
) -> None:
    """Say first what is to do and how long it may take."""
    if not waiting:
        say(f"all {total} jobs were done before, nothing is run ({home})")
        return
    measured = [outcome.seconds for outcome in kept]
    each = sum(measured) / len(measured) if measured else guess_s
    rounds = -(-waiting // len(places))
    what = f"{waiting} jobs on {', '.join(place.name for place in places)}"
    what += f"; {len(kept)} were done before" if kept else ""
    if each is None:
        say(f"expected: known when the first job ends ({what})")
    else:
        call.expect(each * rounds, what)


@contextlib.contextmanager
def _orphans_gone(home: Path) -> Iterator[int]:
    """Wait until the jobs of a killed runner are ended; yield the lock that ours will hold.

    The lock is of the open file, so the leashes of a killed runner keep it until they are done.
    """
    with open(home / ORPHANS, "a", encoding="utf-8") as file:
        deadline = time.monotonic() + ORPHAN_SECONDS
        while True:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise UsageError(
                    f"jobs of an earlier runner still live in {home}", fix="end their processes"
                )
            time.sleep(POLL_SECONDS)
        yield file.fileno()


def _tail(log: Path) -> list[str]:
    """Read the last lines of a log of any size; none when the job removed it."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end a block as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class _Running:
    job: Work
    slot: Slot
    process: subprocess.Popen[bytes]
    began: float


class _Queue:
    """Free slots, running jobs, ended jobs."""

    def __init__(
        self,
        call: Invocation,
        folders: Mapping[str, Path],
        places: Sequence[Slot],
        inherited: int,
        seconds: Sequence[float],
    ) -> None:
        self.call = call
        self.folders = folders
        self.places = places
        self.free = list(places)
        self.inherited = inherited
        self.seconds = list(seconds)
        self.running: list[_Running] = []

    def run(self, jobs: Sequence[Work], total: int) -> dict[str, Outcome]:
        """Keep every slot busy until all have ended; whatever happens, no process is left."""
        waiting, ended = list(jobs), {}
        try:
            while waiting or self.running:
                while waiting and self.free:
                    self.running.append(self._start(waiting.pop(0), self.free.pop(0)))
                time.sleep(POLL_SECONDS)
                for one in [r for r in self.running if r.process.poll() is not None]:
                    self.running.remove(one)
                    self.free.append(one.slot)
                    ended[one.job.name] = self._record(one)
                    self._report(one, total - len(waiting) - len(self.running), total)
        finally:
            self._end_all()
        return ended

    def _start(self, job: Work, slot: Slot) -> _Running:
        folder = self.folders[job.name]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        words = [word.replace(FOLDER, str(folder)) for word in job.command]
        with open(folder / LOG, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LEASH), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[self.inherited],
                env={**os.environ, **slot.env, **job.env},
            )
        return _Running(job, slot, process, time.monotonic())

    def _record(self, one: _Running) -> Outcome:
        """Write how a job ended, all at once."""
        folder = self.folders[one.job.name]
        code = one.process.returncode
        seconds = round(time.monotonic() - one.began, 3)
        outcome = Outcome(one.job.name, str(folder), code, seconds, one.slot.name)
        outcome.tail = _tail(folder / LOG) if code else []
        folder.mkdir(exist_ok=True)  # a job may have cleared the place for its results
        write_json(folder / RECORD, asdict(outcome))
        if one.process.stdin is not None:
            one.process.stdin.close()
        return outcome

    def _report(self, one: _Running, done: int, total: int) -> None:
        code = one.process.returncode
        self.seconds += [] if code else [time.monotonic() - one.began]
        note = f"{one.job.name} {'done' if not code else f'failed, exit {code}'}"
        if self.seconds and done < total:
            each = sum(self.seconds) / len(self.seconds)
            rounds = -(-(total - done) // len(self.places))
            note += f", about {duration(each * rounds)} left"
        self.call.progress(done, total, note)

    def _end_all(self) -> None:
        """Close the pipes, which ends the jobs, and wait."""
        for one in self.running:
            if one.process.stdin is not None:
                one.process.stdin.close()
        for one in self.running:
            one.process.wait()
