"""The journal of a run: one JSON object a line, one write a line, events flushed to disk.

A writer that is killed can leave only a torn last line. Readers drop it; the next writer cuts it
off and says so in a note. Numbers are written by repr and non-finite ones as strings, because
NaN is not JSON. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION = 1
EVENTS = (
    *("start", "eval", "ckpt_begin", "ckpt_commit", "signal", "stop_requested", "resume"),
    *("rollback", "anomaly", "config_change", "check", "note", "end"),
)
END_STATUS = ("done", "preempted", "aborted", "crashed")

_COMMON = ("v", "seq", "ts", "mono", "run", "attempt", "ev")
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """An append-only file of JSON objects. `torn_tail`: bytes cut off at opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        self.torn_tail = len(content) - whole
        if self.torn_tail:
            os.ftruncate(self._descriptor, whole)

    def append(self, record: Mapping[str, Any], *, sync: bool = False) -> None:
        """Write one line by one write, and with sync flush it to disk.

        Raises: OSError when it could not be written whole; then none of it stays.
        """
        line = (json.dumps(plain(record), allow_nan=False) + "\n").encode()
        written = os.write(self._descriptor, line)
        if written != len(line):
            size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, size - written)
            raise OSError(f"{self.path}: wrote {written} of {len(line)} bytes; is the disk full?")
        if sync:
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Journal:
    """The writer of journal.jsonl; rank 0 has one. Events may come from several threads."""

    def __init__(self, path: Path, *, run: str) -> None:
        self._lines, self.path = JsonLines(path), path
        self.torn_tail = self._lines.torn_tail
        earlier = read_journal(path)
        self._run, self._lock = run, threading.Lock()
        self._next = 1 + max((e["seq"] for e in earlier if type(e.get("seq")) is int), default=-1)
        self.attempt = last_attempt(earlier) + 1

    def event(
        self, ev: str, *, step: int | None = None, tokens: int | None = None, **fields: Any
    ) -> None:
        """Write one event and flush it to disk.

        Raises: ValueError for an unknown event or a field with a name of the common ones, OSError
        when the disk does not take it.
        """
        if ev not in EVENTS:
            raise ValueError(f"event {ev!r} is unknown; allowed: {', '.join(EVENTS)}")
        taken = [name for name in fields if name in _COMMON]
        if taken:
            raise ValueError(f"event {ev}: {', '.join(taken)} is set by the journal; rename it")
        with self._lock:
            now = (VERSION, self._next, time.time_ns(), time.monotonic_ns())
            common = dict(zip(_COMMON, (*now, self._run, self.attempt, ev), strict=True))
            self._lines.append({**common, "step": step, "tokens": tokens, **fields}, sync=True)
            self._next += 1

    def close(self) -> None:
        self._lines.close()


def plain(value: Any) -> Any:
    """Turn a value into what JSON can hold: scalars of arrays as numbers, NaN as a string."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file; a torn or foreign line is left out.

    A last line without its newline is torn, whatever it holds: the next writer will cut it off.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the events of a journal in the order they were written."""
    return [record for record in read_lines(path) if isinstance(record.get("ev"), str)]


def last_attempt(events: list[dict[str, Any]]) -> int:
    """Return the number of the latest attempt; 0 before the first."""
    return max((e["attempt"] for e in events if type(e.get("attempt")) is int), default=0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one row a step, in order of steps, from the highest attempt that reached it.

    A resumed run repeats steps that an earlier attempt had logged. Rows of one step and attempt
    (training and validation) are joined. Non-finite strings become floats again.
    """
    rows: dict[int, dict[str, Any]] = {}
    for record in read_lines(path):
        step, attempt = record.get("step"), record.get("attempt")
        if type(step) is not int or type(attempt) is not int:
            continue
        row = {key: number(value) for key, value in record.items()}
        known = rows.get(step)
        if known is None or attempt > known["attempt"]:
            rows[step] = row
        elif attempt == known["attempt"]:
            known.update(row)
    return [rows[step] for step in sorted(rows)]


def number(value: Any) -> Any:
    """Turn the strings for non-finite numbers into floats again; everything else stays."""
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
