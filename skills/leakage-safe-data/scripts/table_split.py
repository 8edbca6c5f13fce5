"""What the flags say of a table: the target, which rows are held out, groups and times."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from table_reading import Column, Table, times_of

from kit.errors import UsageError

MAX_CLASSES = 100
CLASSES_JUDGED = 10
FEW_VALUES = 20
TRAIN_WORDS = re.compile(r"tr(ain(ing)?)?", re.IGNORECASE)
HELD_OUT_WORDS = re.compile(
    r"(te(st)?|val(id(ation)?)?|dev|eval(uation)?|hold_?out|oos)(ing)?", re.IGNORECASE
)
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass
class Rows:
    """A table with its roles."""

    features: list[Column]
    """All columns but target, split, group and time."""
    target: Column
    classes: list[str]
    """Names of the classes; empty for a target of values."""
    labels: Any
    """int64 [rows], the class, or float64 [rows], the value."""
    train: Any
    """int64 row numbers; all rows where there is no split."""
    test: Any
    """int64 row numbers; empty where there is no split."""
    group: Column | None = None
    time: Any = None
    """float64 [rows]: numbers as they are, dates as days."""
    embargo: float = 0.0
    seed: int = 0

    @property
    def count(self) -> int:
        return len(self.labels)

    @property
    def is_split(self) -> bool:
        return len(self.test) > 0

    @property
    def one_hot(self) -> Any:
        """float64 [rows, classes], or the values [rows, 1]."""
        if not self.classes:
            return self.labels[:, None]
        return (self.labels[:, None] == np.arange(len(self.classes))).astype(float)

    @property
    def main_targets(self) -> list[int]:
        """Columns of one_hot that are judged: both classes are told by one, of many the largest."""
        if not self.classes:
            return [0]
        if len(self.classes) == 2:
            return [1]
        counts = np.bincount(self.labels, minlength=len(self.classes))
        return np.sort(np.argsort(-counts, kind="stable")[:CLASSES_JUDGED]).tolist()

    def chance(self, rows: Any) -> float:
        """Accuracy on some rows of naming the commonest class of train; 0 (R2) for values."""
        if not self.classes:
            return 0.0
        most = np.bincount(self.labels[self.train], minlength=len(self.classes)).argmax()
        return float((self.labels[rows] == most).mean())


def assign(table: Table, args: Any, parts: tuple[Any, Any] | None) -> Rows:
    """Give the columns their roles. `parts`: the rows of train and test, when files say so."""
    target = table.column(args.column, "--target")
    _refuse_missing(target)
    classes, labels = _labels(target, args.task)
    used = {args.column}
    train, test = parts or (np.arange(table.rows), np.arange(0))
    for flag, name in (("--split", args.split), ("--group", args.group), ("--time", args.time)):
        if name is None:
            continue
        if name == args.column:
            raise UsageError(f"{flag} {name} is the target", "it takes another column")
        table.column(name, flag)
        used.add(name)
    if args.split is not None:
        train, test = _split(table.columns[args.split])
    time, unit = None, ""
    if args.time is not None:
        time, unit = times_of(table.columns[args.time], "--time")
    features = [column for name, column in table.columns.items() if name not in used]
    for column in features:  # infinities are as unusable as what is missing
        column.values = np.where(np.isfinite(column.values), column.values, np.nan)
    if not features:
        raise UsageError("the table has no column besides the named ones", "a check needs features")
    group = None if args.group is None else table.columns[args.group]
    embargo = embargo_of(args.embargo, unit)
    return Rows(
        features, target, classes, labels, train, test, group, time, embargo, args.seed or 0
    )


def embargo_of(text: str | None, unit: str) -> float:
    """Read --embargo: a number in the unit of the times, or 36h, 7d for dates."""
    if text is None:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d*)?)(s|min|h|d|w)?", text.strip())
    if not found or (found[2] and unit != "days"):
        raise UsageError(
            f"--embargo {text}",
            "it takes a number of at least 0 in the unit of --time; for dates days, or 36h, 7d, 2w",
        )
    value = float(found[1])
    return value * SECONDS[found[2]] / SECONDS["d"] if found[2] else value


def _refuse_missing(target: Column) -> None:
    missing = np.flatnonzero(~np.isfinite(target.values))
    if len(missing):
        raise UsageError(
            f"--target {target.name}: {len(missing)} rows have no value (NaN), first row "
            f"{int(missing[0])}",
            "each row needs a target",
            "drop the rows without one",
        )


def _labels(target: Column, task: str) -> tuple[list[str], Any]:
    """Tell classes from values: text, or few whole numbers, are classes."""
    distinct = np.unique(target.values)
    if len(distinct) < 2:
        shown = target.levels[0] if target.levels else f"{distinct[0]:g}"
        raise UsageError(
            f"--target {target.name} is {shown} in every row",
            "a target takes at least two values; nothing can leak into a constant",
        )
    whole = bool((distinct == np.round(distinct)).all())
    few = whole and len(distinct) <= min(FEW_VALUES, max(2, len(target.values) // 3))
    if task == "values" or (task == "auto" and target.levels is None and not few):
        if target.levels is not None:
            raise UsageError(f"--task values: {target.name} holds text", "values are numbers")
        return [], target.values.astype(float)
    most = min(MAX_CLASSES, max(2, len(target.values) // 2))
    if len(distinct) > most:
        raise UsageError(
            f"--target {target.name} has {len(distinct)} classes in {len(target.values)} rows",
            f"at most {most} can be judged here",
            "name the column to be predicted, or set --task values",
        )
    names = [target.levels[int(v)] if target.levels else f"{v:g}" for v in distinct.tolist()]
    return names, np.searchsorted(distinct, target.values)


def _split(column: Column) -> tuple[Any, Any]:
    """Read which rows are held out from words, or from 0 and 1 under a name that says what 1 is."""
    values = column.values
    allowed = "rows are told apart by words such as train, val and test, or by is_test of 0 and 1"
    fix = "write train or test into that column"
    if np.isnan(values).any():
        raise UsageError(f"--split {column.name}: some rows have no value", allowed, fix)
    bare = re.sub(r"^(is|in)_?", "", column.name, flags=re.IGNORECASE)
    levels = column.levels or [f"{v:g}" for v in np.unique(values).tolist()]
    lowered = {level.lower() for level in levels}
    if lowered <= {"0", "1"} or lowered <= {"false", "true"}:
        yes = np.isin(values, [n for n, v in enumerate(levels) if v.lower() in ("1", "true")])
        yes = yes if column.levels is not None else values == 1
        if TRAIN_WORDS.fullmatch(bare):
            train = yes
        elif HELD_OUT_WORDS.fullmatch(bare):
            train = ~yes
        else:
            raise UsageError(f"--split {column.name} holds {', '.join(levels)}", allowed, fix)
    else:
        unknown = [
            level
            for level in levels
            if not (TRAIN_WORDS.fullmatch(level) or HELD_OUT_WORDS.fullmatch(level))
        ]
        if unknown or column.levels is None:
            shown = ", ".join((unknown or levels)[:5])
            raise UsageError(f"--split {column.name} holds {shown}", allowed, fix)
        train = np.isin(values, [n for n, v in enumerate(levels) if TRAIN_WORDS.fullmatch(v)])
    if train.all() or not train.any():
        empty = "held-out" if train.all() else "training"
        raise UsageError(f"--split {column.name} leaves no {empty} row", allowed, fix)
    return np.flatnonzero(train), np.flatnonzero(~train)
