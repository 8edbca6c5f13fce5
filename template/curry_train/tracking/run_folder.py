"""The folder of a run: made once by rank 0, the same on every rank, written by rank 0 alone.

    <run.dir>/<run.name>-<UTC stamp>-<6 hex>/
      config.yaml      resolved settings      overrides.txt    the command line, scrubbed
      journal.jsonl    events                 metrics.jsonl    one object a logged step
      tb/              TensorBoard            checkpoints/     see curry_train.checkpoint
      code.diff        against the commit     environment.txt  packages
      failure.json     after a crash          lease.json       while a process writes here

A resumed attempt that finds other settings, code or packages keeps the older file beside the new
one, as config.attempt-1.yaml.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from curry_train.checkpoint import read_manifest
from curry_train.config import Config, ConfigError, config_hash, to_dict
from curry_train.tracking import provenance, scrub
from curry_train.tracking.backends import build_loggers
from curry_train.tracking.journal import END_STATUS, Journal, JsonLines, plain
from curry_train.tracking.lease import Lease
from curry_train.tracking.logger import Fanout
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

Value = TypeVar("Value")


class Run:
    """An open run. Other ranks than 0 have the same methods, which write nothing there."""

    def __init__(self, folder: Path, resume: Resume, writer: Writer | None) -> None:
        self.dir = folder
        self.attempt = resume.attempt
        self.parent = resume.parent
        self.checkpoint = resume.checkpoint
        self.message = resume.message
        self._writer = writer

    @staticmethod
    def open(
        config: Config,
        mesh: Mesh,
        *,
        argv: Sequence[str],
        data_hash: str,
        resume: Resume | None = None,
        project: Path | None = None,
    ) -> Run:
        """Make or continue the run folder and journal the start; all ranks call it together.

        resume: the answer of find_resume; None asks it here. project: the folder whose git state
        is recorded, by default the one that holds curry_train.
        Group: world; one gather of host names, one broadcast.
        Raises: ConfigError on every rank.
        """
        hosts = sorted(set(_all_ranks(mesh, socket.gethostname())))
        writer, answer = None, (None, Resume(), list[str]())
        if mesh.rank == 0:
            try:
                decided = resume or find_resume(config, data_hash)
                facts = {"world": mesh.world, "mesh": dict(mesh.sizes), "hosts": hosts}
                writer = Writer(config, decided, argv, data_hash, facts, project)
                answer = (writer.folder, writer.resume, [])
            except ConfigError as error:
                answer = (None, Resume(), error.problems)
            except OSError as error:
                where = error.filename or config.run.dir
                answer = (None, Resume(), [f"{where}: {error.strerror}; set run.dir elsewhere"])
        folder, decided, problems = _from_rank_zero(mesh, answer)
        if folder is None:
            raise ConfigError(problems)
        if writer is not None and decided.message:
            print(decided.message, flush=True)
        return Run(folder, decided, writer)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl and mirror it to the trackers; never raises."""
        if self._writer is not None:
            self._writer.log(step, row)

    def event(
        self, ev: str, *, step: int | None = None, tokens: int | None = None, **fields: Any
    ) -> None:
        """Append an event to the journal and flush it to disk.

        A disk that refuses costs the event, with one warning. Raises: ValueError for an event or
        a field that the journal does not allow.
        """
        if self._writer is not None:
            self._writer.event(ev, step, tokens, fields)

    def sample(self, step: int, text: str) -> None:
        """Keep a generated text in the journal and show it in the trackers."""
        if self._writer is not None:
            self._writer.event("note", step, None, {"sample": text})
            self._writer.loggers.call("text", "sample", text, step)

    def finish(self, status: str, reason: str | None = None, code: int = 0) -> None:
        """Journal the end, close the trackers and give up the lease; a second call does nothing."""
        if status not in END_STATUS:
            raise ValueError(f"status {status!r} is unknown; allowed: {', '.join(END_STATUS)}")
        if self._writer is not None:
            self._writer.finish(status, reason, code)
            self._writer = None

    def fail(
        self,
        *,
        rank: int,
        error: BaseException,
        traceback_text: str | None = None,
        lost_peer: bool = False,
    ) -> bool:
        """Write failure.json; any rank may call it. Returns whether this failure is the first.

        lost_peer: the error only says that another rank went away; a failure with a cause of its
        own replaces it. A disk that refuses answers True, so that the error is at least printed.
        """
        text = traceback_text or "".join(traceback.format_exception(error))
        record = {
            "v": 1,
            "time": time.time(),
            "rank": rank,
            "host": socket.gethostname(),
            "attempt": self.attempt,
            "type": type(error).__name__,
            "message": scrub.scrub(str(error)),
            "traceback": scrub.scrub(text),
            "lost_peer": lost_peer,
        }
        content = json.dumps(plain(record), indent=1) + "\n"
        try:
            with (self.dir / FAILURE).open("x", encoding="utf-8") as file:
                file.write(content)
            return True
        except FileExistsError:
            if lost_peer or not _is_lost_peer(self.dir / FAILURE):
                return False
            _write(self.dir / FAILURE, content)
            return True
        except OSError:
            return True

    def failure_time(self) -> int | None:
        """Return when failure.json of this attempt was written, in ns, or None; peers watch it."""
        try:
            return (self.dir / FAILURE).stat().st_mtime_ns
        except OSError:
            return None


class Writer:
    """Rank 0's side of a run: everything that touches the disk."""

    def __init__(
        self,
        config: Config,
        resume: Resume,
        argv: Sequence[str],
        data_hash: str,
        facts: Mapping[str, Any],
        project: Path | None,
    ) -> None:
        self.folder, self.resume = _make_folder(config, resume), resume
        self._warned, self._dropped = False, 0
        self._last_step, self._tokens = 0, 0
        self._lease = Lease.acquire(self.folder)
        try:
            before = read_config(self.folder)
            self._journal = Journal(self.folder / JOURNAL, run=self.folder.resolve().name)
            self._metrics = JsonLines(self.folder / METRICS)
            self.resume = Resume(
                self.folder, resume.checkpoint, self._journal.attempt, resume.parent, resume.message
            )
            self._begin(config, argv, data_hash, dict(facts), project or _project(), before)
        except BaseException:
            self._lease.release()
            raise
        self.loggers = Fanout(build_loggers(config.tracking, self.folder))
        self.loggers.call("start", self.folder.resolve().name, to_dict(config), self._last_step + 1)

    def _begin(
        self,
        config: Config,
        argv: Sequence[str],
        data_hash: str,
        facts: dict[str, Any],
        project: Path,
        before: dict[str, Any],
    ) -> None:
        """Write the files that describe the run, then the events that open this attempt."""
        packages = provenance.packages()
        self._write_files(config, argv, packages, project)
        source = {} if self.resume.checkpoint is None else read_manifest(self.resume.checkpoint)
        self._last_step, self._tokens = source.get("step", 0), source.get("tokens", 0)
        self._journal.event(
            "start",
            step=self._last_step,
            tokens=self._tokens,
            argv=scrub.scrub_argv(argv),
            config_hash=config_hash(config),
            resume_hash=resume_hash(config, data_hash),
            data_hash=data_hash,
            **provenance.git_state(project),
            **facts,
            seeds={"seed": config.seed},
            env=scrub.environment(),
            packages_hash=hashlib.sha256(packages.encode()).hexdigest(),
            parent=self.resume.parent,
        )
        for name, torn in ((JOURNAL, self._journal.torn_tail), (METRICS, self._metrics.torn_tail)):
            if torn:
                self._journal.event("note", torn_tail={"file": name, "bytes": torn})
        changes = changed_keys(before, read_config(self.folder)) if before else {}
        changes.pop("run.resume", None)  # what continued the run, not what it is
        if changes:
            self._journal.event("config_change", step=self._last_step, changes=changes)
        if self.resume.checkpoint is not None:
            self._journal.event(
                "resume",
                step=self._last_step,
                tokens=self._tokens,
                checkpoint=str(self.resume.checkpoint),
                from_attempt=self._journal.attempt - 1 or None,
                samples_consumed=source.get("samples_consumed"),
                old_mesh=source.get("mesh"),
                mesh=facts["mesh"],
            )

    def _write_files(
        self, config: Config, argv: Sequence[str], packages: str, project: Path
    ) -> None:
        import yaml

        tree = _scrubbed(to_dict(config))
        diff = provenance.code_diff(project)
        files = {
            "config.yaml": yaml.safe_dump(tree, sort_keys=False, allow_unicode=True),
            "overrides.txt": "".join(f"{word}\n" for word in scrub.scrub_argv(argv)),
            "environment.txt": packages,
            "code.diff": None if diff is None else scrub.scrub_urls(diff),
        }
        (self.folder / CHECKPOINTS).mkdir(exist_ok=True)
        for name, content in files.items():
            _keep_older(self.folder / name, content, self._journal.attempt)
            if content is not None:
                _write(self.folder / name, content)
        _keep_older(self.folder / FAILURE, None, self._journal.attempt)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        self._last_step, self._tokens = step, row.get("tokens", self._tokens)
        head = {"step": step, "attempt": self.resume.attempt, "tokens": row.get("tokens")}
        full = {**head, "time": time.time(), **row, "step": step, "attempt": self.resume.attempt}
        try:
            full = plain({key: value for key, value in full.items() if value is not None})
            self._metrics.append(full)
        except Exception as error:
            self._drop(METRICS, error)
        self.loggers.call("log", step, {key: _as_float(value) for key, value in full.items()})

    def event(
        self, ev: str, step: int | None, tokens: int | None, fields: Mapping[str, Any]
    ) -> None:
        self._last_step = self._last_step if step is None else step
        self._tokens = self._tokens if tokens is None else tokens
        try:
            self._journal.event(ev, step=step, tokens=tokens, **fields)
        except OSError as error:
            self._drop(JOURNAL, error)

    def finish(self, status: str, reason: str | None, code: int) -> None:
        self.loggers.call("summary", {"status": status, "reason": reason, "step": self._last_step})
        self.loggers.call("finish", status)
        dropped = {"dropped": self._dropped, "tracker_dropped": self.loggers.dropped}
        ending = {"status": status, "reason": reason, "code": code, **dropped}
        self.event("end", self._last_step, self._tokens, ending)
        try:
            self._metrics.sync()
        except OSError as error:
            self._drop(METRICS, error)
        self._metrics.close()
        self._journal.close()
        self._lease.release()

    def _drop(self, name: str, error: Exception) -> None:
        self._dropped += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.folder / name}: a line was not written ({error}); training goes on, "
                "further losses are only counted",
                stacklevel=4,
            )


def _make_folder(config: Config, resume: Resume) -> Path:
    if resume.folder is not None:
        resume.folder.mkdir(parents=True, exist_ok=True)
        return resume.folder
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.run.name):
        raise ConfigError(
            [f"run.name={config.run.name!r}; allowed: letters, digits, dot, dash and underscore"]
        )
    stamp = time.strftime(STAMP, time.gmtime())
    folder = Path(config.run.dir) / f"{config.run.name}-{stamp}-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    return folder


def _project() -> Path:
    return Path(__file__).resolve().parents[2]


def _write(path: Path, content: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(3)}")
    temporary.write_text(content, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)


def _keep_older(path: Path, content: str | None, attempt: int) -> None:
    """Move what an earlier attempt wrote aside, unless it is the same."""
    if path.exists() and (content is None or path.read_text(encoding="utf-8") != content):
        os.replace(path, path.with_name(f"{path.stem}.attempt-{attempt - 1}{path.suffix}"))


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(item) for key, item in value.items()}
    return scrub.scrub_urls(value) if isinstance(value, str) else plain(value)


def _as_float(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _is_lost_peer(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("lost_peer") is True
    except (OSError, ValueError, AttributeError):
        return False


def _all_ranks(mesh: Mesh, value: Value) -> list[Value]:
    group = mesh.group("world")
    if group is None:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * mesh.world
    dist.all_gather_object(values, value, group=group)
    return values


def _from_rank_zero(mesh: Mesh, value: Value) -> Value:
    group = mesh.group("world")
    if group is None:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]
