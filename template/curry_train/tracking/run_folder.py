"""The folder of a run: made once by rank 0, the same on every rank, written by rank 0 alone.

    <run.dir>/<run.name>-<UTC stamp>-<6 hex>/
      config.yaml      resolved settings      overrides.txt    the command line, scrubbed
      journal.jsonl    events                 metrics.jsonl    one object a logged step
      tb/              TensorBoard            checkpoints/     see curry_train.checkpoint
      code.diff        against the commit     environment.txt  packages
      failure.json     after a crash          lease.json       locked while a process writes here
      flight-recorder/ after a lost rank: the newest collectives of every rank that still lived

A resumed attempt that finds other settings, code or packages keeps the older file beside the new
one, as config.attempt-1.yaml.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curry_train.checkpoint import read_manifest
from curry_train.config import RUN_NAME, Config, ConfigError, config_hash, to_dict
from curry_train.tracking import flight_recorder, provenance, scrub
from curry_train.tracking.journal import END_STATUS, Journal, JsonLines, plain
from curry_train.tracking.lease import Lease
from curry_train.tracking.logger import Trackers
from curry_train.tracking.progress import tell
from curry_train.tracking.resume import (
    CHECKPOINTS,
    JOURNAL,
    STAMP,
    Resume,
    changed_keys,
    find_resume,
    read_config,
    resume_hash,
)

if TYPE_CHECKING:
    from curry_train.parallel.mesh import Mesh

FAILURE = "failure.json"
METRICS = "metrics.jsonl"
PROJECT = Path(__file__).resolve().parents[2]
"""The folder that holds curry_train."""


@dataclass
class Outputs:
    """What rank 0 holds open of its run folder, and how far the run has come."""

    folder: Path
    lease: Lease
    journal: Journal
    metrics: JsonLines
    trackers: Trackers
    step: int
    tokens: int
    dropped: int = 0


class Run:
    """An open run. Other ranks than 0 have the same methods, which write nothing there."""

    def __init__(self, folder: Path, attempt: int, resume: Resume, out: Outputs | None) -> None:
        self.dir, self.attempt = folder, attempt
        self.parent, self.checkpoint = resume.parent, resume.checkpoint
        self.message = resume.message
        self._out = out

    @staticmethod
    def open(
        config: Config,
        mesh: Mesh,
        *,
        argv: Sequence[str],
        data_hash: str,
        resume: Resume | None = None,
        project: Path = PROJECT,
    ) -> Run:
        """Make or continue the run folder and journal the start; all ranks call it together.

        resume: the answer of find_resume; None asks it here. project: whose git state is recorded.
        Group: world; two gathers. Raises: ConfigError on every rank.
        """
        hosts = sorted(set(_gather(mesh, socket.gethostname())))
        out, folder, attempt, problems = None, Path(), 0, []
        if mesh.rank == 0:
            try:
                resume = resume or find_resume(config, data_hash)
                facts = {"world": mesh.world, "mesh": dict(mesh.sizes), "hosts": hosts}
                facts |= {"data_hash": data_hash, "resume_hash": resume_hash(config, data_hash)}
                out = _start(config, resume, argv, facts, project)
                folder, attempt = out.folder, out.journal.attempt
            except ConfigError as error:
                problems = error.problems
            except OSError as error:
                where = error.filename or config.run.dir
                problems = [f"{where}: {error.strerror}; set run.dir elsewhere"]
        mine = folder, attempt, resume, problems
        folder, attempt, resume, problems = _gather(mesh, mine)[0]
        if problems:
            raise ConfigError(problems)
        run = Run(folder, attempt, resume or Resume(), out)
        if out is not None and run.message:
            tell(run.message)
        return run

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl and mirror it to the trackers; never raises."""
        out = self._out
        if out is None:
            return
        out.step, out.tokens = step, row.get("tokens", out.tokens)
        head = {"step": step, "attempt": self.attempt}
        full = {**head, "tokens": None, "time": time.time(), **row, **head}
        try:
            full = plain({key: value for key, value in full.items() if value is not None})
            out.metrics.append(full)
        except Exception as error:
            self._drop(out, METRICS, error)
        out.trackers.call("log", step, full)

    def event(
        self, ev: str, *, step: int | None = None, tokens: int | None = None, **fields: Any
    ) -> None:
        """Append an event to the journal and flush it to disk.

        A disk that refuses costs the event, with one warning. Raises: ValueError for an event or
        a field that the journal does not allow.
        """
        out = self._out
        if out is None:
            return
        # A checkpoint that was written beside the steps is told after later ones.
        out.step = max(out.step, step or 0)
        out.tokens = max(out.tokens, tokens or 0)
        try:
            out.journal.event(ev, step=step, tokens=tokens, **fields)
        except OSError as error:
            self._drop(out, JOURNAL, error)

    def sample(self, step: int, text: str) -> None:
        """Keep a generated text in the journal and show it in the trackers."""
        self.event("note", step=step, sample=text)
        if self._out is not None:
            self._out.trackers.call("text", "sample", text, step)

    def finish(self, status: str, reason: str | None = None, code: int = 0) -> None:
        """Journal the end, close the trackers and give up the lease; a second call does nothing."""
        if status not in END_STATUS:
            raise ValueError(f"status {status!r} is unknown; allowed: {', '.join(END_STATUS)}")
        out = self._out
        if out is None:
            return
        out.trackers.call("finish")
        dropped = {"dropped": out.dropped, "tracker_dropped": out.trackers.dropped}
        ending = {"status": status, "reason": reason, "code": code, **dropped}
        self.event("end", step=out.step, tokens=out.tokens, **ending)
        for opened in (out.metrics, out.journal, out.lease):
            opened.close()
        self._out = None

    def _drop(self, out: Outputs, name: str, error: Exception) -> None:
        out.dropped += 1
        if out.dropped == 1:
            warnings.warn(
                f"{self.dir / name}: a line was not written ({error}); training goes on, "
                "further losses are only counted",
                stacklevel=3,
            )

    def fail(
        self,
        *,
        rank: int,
        error: BaseException,
        traceback_text: str | None = None,
        lost_peer: bool = False,
        told: str = "",
    ) -> bool:
        """Write failure.json; any rank may call it. Returns whether this failure is the first.

        lost_peer: the error only says that another rank went away; a failure with a cause of its
        own replaces it. told: what is known beyond the error, put before it. A disk that refuses
        answers True, so that the error is at least printed.
        """
        path, text = self.dir / FAILURE, traceback_text
        text = text or "".join(traceback.format_exception(error))
        record = {
            "v": 1,
            "time": time.time(),
            "rank": rank,
            "host": socket.gethostname(),
            "attempt": self.attempt,
            "type": type(error).__name__,
            "message": scrub.scrub(f"{told}: {error}" if told else str(error)),
            "traceback": scrub.scrub(text),
            "lost_peer": lost_peer,
        }
        content = json.dumps(record, indent=1) + "\n"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            if lost_peer or '"lost_peer": true' not in path.read_text(encoding="utf-8"):
                return False
            _write(path, content)
        except OSError:
            pass
        return True

    def failure(self) -> str:
        """Return the failure that failure.json tells, in one line."""
        try:
            told = json.loads((self.dir / FAILURE).read_text(encoding="utf-8"))
            return f"rank {told['rank']}: {told['type']}: {told['message']}"
        except (OSError, ValueError, TypeError, KeyError):
            return "another rank failed"

    def failure_time(self) -> int | None:
        """Return when failure.json of this attempt was written, in ns, or None; peers watch it."""
        try:
            return (self.dir / FAILURE).stat().st_mtime_ns
        except OSError:
            return None


def _start(
    config: Config,
    resume: Resume,
    argv: Sequence[str],
    facts: Mapping[str, Any],
    project: Path,
) -> Outputs:
    """Take the folder, write the files that describe the run and journal how it begins."""
    folder = _make_folder(config, resume)
    lease = Lease(folder)
    try:
        before = read_config(folder)
        journal = Journal(folder / JOURNAL, run=folder.resolve().name)
        metrics = JsonLines(folder / METRICS)
        packages = _write_files(folder, journal.attempt, config, argv, project)
        source = {} if resume.checkpoint is None else read_manifest(resume.checkpoint)
        at = {"step": source.get("step", 0), "tokens": source.get("tokens", 0)}
        journal.event(
            "start",
            **at,
            argv=scrub.scrub_argv(argv),
            config_hash=config_hash(config),
            **provenance.git_state(project),
            **facts,
            seeds={"seed": config.seed},
            env=scrub.environment(),
            packages_hash=hashlib.sha256(packages.encode()).hexdigest(),
            parent=resume.parent,
        )
        for lines in (journal, metrics):
            if lines.torn_tail:
                journal.event("note", torn_tail={"file": lines.path.name, "bytes": lines.torn_tail})
        changes = changed_keys(before, read_config(folder)) if before else {}
        changes.pop("run.resume", None)  # what continued the run, not what it is
        if changes:
            journal.event("config_change", step=at["step"], changes=changes)
        if resume.checkpoint is not None:
            journal.event(
                "resume",
                **at,
                checkpoint=str(resume.checkpoint),
                from_attempt=journal.attempt - 1 or None,
                samples_consumed=source.get("samples_consumed"),
                old_mesh=source.get("mesh"),
                mesh=facts["mesh"],
            )
    except BaseException:
        lease.close()
        raise
    trackers = Trackers(config.tracking, folder)
    trackers.call("start", _scrubbed(to_dict(config)), at["step"] + 1)
    return Outputs(folder, lease, journal, metrics, trackers, **at)


def _write_files(
    folder: Path, attempt: int, config: Config, argv: Sequence[str], project: Path
) -> str:
    """Write the files that describe the run; return the list of packages."""
    import yaml

    packages, diff = provenance.packages(), provenance.code_diff(project)
    tree = _scrubbed(to_dict(config))
    files = {
        "config.yaml": yaml.safe_dump(tree, sort_keys=False, allow_unicode=True),
        "overrides.txt": "".join(f"{word}\n" for word in scrub.scrub_argv(argv)),
        "environment.txt": packages,
        "code.diff": None if diff is None else scrub.scrub_urls(diff),
        FAILURE: None,
    }
    (folder / CHECKPOINTS).mkdir(exist_ok=True)
    records = folder / flight_recorder.FOLDER
    if records.is_dir():
        os.replace(records, records.with_name(f"{records.name}.attempt-{attempt - 1}"))
    for name, content in files.items():
        path = folder / name
        if path.exists() and path.read_bytes() != _encoded(content or ""):
            older = f"{path.stem}.attempt-{attempt - 1}{path.suffix}"
            os.replace(path, path.with_name(older))
        if content is not None:
            _write(path, content)
    return packages


def _make_folder(config: Config, resume: Resume) -> Path:
    if resume.folder is not None:
        resume.folder.mkdir(parents=True, exist_ok=True)
        return resume.folder
    if not RUN_NAME.fullmatch(config.run.name):
        raise ConfigError(
            [f"run.name={config.run.name!r}; allowed: letters, digits, dot, dash and underscore"]
        )
    stamp = time.strftime(STAMP, time.gmtime())
    folder = Path(config.run.dir) / f"{config.run.name}-{stamp}-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    return folder


def _write(path: Path, content: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(3)}")
    temporary.write_bytes(_encoded(content))
    os.replace(temporary, path)


def _encoded(content: str) -> bytes:
    return content.encode("utf-8", "backslashreplace")


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(item) for key, item in value.items()}
    return scrub.scrub_urls(value) if isinstance(value, str) else plain(value)


def _gather(mesh: Mesh, value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    group = mesh.group("world")
    if group is None:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * mesh.world
    dist.all_gather_object(values, value, group=group)
    return values
