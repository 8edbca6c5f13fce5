"""What a finished run left: rows by step, how it ended, and why it failed.

Read from metrics.jsonl, journal.jsonl and failure.json alone, so that runs of any version of the
project compare.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass
class FinishedRun:
    """One run of one state. `code` is None when it stood still and was ended."""

    name: str
    code: int | None
    rows: dict[int, dict[str, Any]]
    """Step -> row, of the highest attempt."""
    repeated: list[int] = field(default_factory=list)
    """Steps that one attempt logged twice with different losses."""
    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False
    failure: str = ""
    place: tuple[str, int] | None = None
    """File of the project and line of the failure."""
    folder: Path = Path()
    started: float = 0.0
    ended: float = 0.0

    def steps_problem(self, steps: int) -> str:
        """Say which of the steps 1 to `steps` are missing, extra or logged twice; empty if none."""
        found, wanted = sorted(self.rows), list(range(1, steps + 1))
        parts = []
        if found != wanted:
            missing = [step for step in wanted if step not in self.rows]
            extra = [step for step in found if step not in wanted]
            parts += [f"step {spans(missing)} missing"] if missing else []
            parts += [f"step {spans(extra)} extra"] if extra else []
            by = found[0] - 1 if found else 0
            if by and len(found) == steps and found == [step + by for step in wanted]:
                parts = [f"steps {spans(found)} in the place of {spans(wanted)}: shifted by {by}"]
        parts += [f"step {spans(self.repeated)} logged twice"] if self.repeated else []
        parts += ["it continued an earlier run"] if self.resumed else []
        return ", ".join(parts)

    def crash(self) -> str:
        """Say how it ended when it did not end well; empty for a run that is done."""
        status = self.end.get("status")
        if self.code == 0 and status == "done":
            return ""
        if self.code is None:
            how = "stood still and was ended"
        elif self.code == 0:
            how = f"ended as {status or 'nothing, the journal has no end'}"
        else:
            how = f"ended with exit code {self.code}"
        last = f" after step {max(self.rows)}" if self.rows else " before the first step"
        why = self.failure or self.end.get("reason") or ""
        return f"{how}{last}" + (f": {why}" if why else "")


def spans(steps: Sequence[int]) -> str:
    """Write steps in short: 1-5, 8."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    texts = [f"{first}-{last}" if last > first else str(first) for first, last in parts]
    return ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")


def read_run(folder: Path, name: str, code: int | None, log: Path | None = None) -> FinishedRun:
    """Read the one run folder in `folder`, or `folder` itself; a run that made none has no rows."""
    found = sorted(folder.glob("*/journal.jsonl"))
    here = found[-1].parent if found else folder
    run = FinishedRun(name, code, {}, folder=here)
    for row in read_lines(here / "metrics.jsonl"):
        add_row(run, row)
    events = read_lines(here / "journal.jsonl")
    for event in events:
        if event.get("ev") in ("start", "end"):
            setattr(run, event["ev"], event)
        run.resumed |= event.get("ev") == "resume"
    run.failure, run.place = read_failure(here / "failure.json")
    if not run.failure and code and log is not None and log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        run.failure = lines[-1].strip() if lines else ""
    return run


def add_row(run: FinishedRun, record: dict[str, Any]) -> None:
    """Keep a row of a step, from the highest attempt; join what one attempt said in two rows."""
    step, attempt = record.get("step"), record.get("attempt", 1)
    if type(step) is not int:
        return
    row = {key: NON_FINITE.get(v, v) if isinstance(v, str) else v for key, v in record.items()}
    known = run.rows.get(step)
    if known is None or attempt > known.get("attempt", 1):
        run.rows[step] = row
    elif attempt == known.get("attempt", 1):
        if "loss" in known and "loss" in row:
            run.repeated.append(step)
        known.update(row)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON Lines file; a torn last line is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def read_failure(path: Path) -> tuple[str, tuple[str, int] | None]:
    """Return the error of failure.json on one line, and its last place in the project."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        text = f"rank {told['rank']}: {told['type']}: {told['message']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "", None
    place = None
    for frame in FRAME.finditer(str(told.get("traceback", ""))):
        name = re.search(r"(?:curry_train/.*|[^/]*train\.py)$", frame["file"])
        if name and "site-packages" not in frame["file"]:
            place = name[0], int(frame["line"])
    return " ".join(text.split()), place
