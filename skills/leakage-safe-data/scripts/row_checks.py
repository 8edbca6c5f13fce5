"""Judges the rows of a table: copies across the split, groups on both sides, the order of time."""

from __future__ import annotations

from typing import Any

import numpy as np
from severities import SURE, THRESHOLDS, Finding, percent
from table_models import nearest, r2
from table_split import Rows
from text_hashing import mixed

NEAR_RATIO = 0.1
"""A row is a near copy when its nearest training row is so much closer than its tenth."""
NEIGHBOURS = 20
FLOPS = 4e10
MOSTLY_DISTINCT = 0.5


def _is_name(values: Any, *, text: bool) -> bool:
    """Tell whether a column only names its rows: each value once, text or whole numbers."""
    if np.isnan(values).any() or len(np.unique(values)) < len(values):
        return False
    return text or bool((values == np.round(values)).all())


def naming_columns(rows: Rows) -> list[str]:
    """Name the columns that hold another value in every row and measure nothing."""
    return [c.name for c in rows.features if _is_name(c.values, text=c.levels is not None)]


def row_keys(rows: Rows, *, with_target: bool) -> tuple[Any, bool]:
    """Hash every row; columns that only name rows are left out where others are there.

    Returns: uint64 [rows], and whether a column of measured values is among them, so that two equal
    rows are no coincidence.
    """
    names = set(naming_columns(rows))
    chosen = [column for column in rows.features if column.name not in names] or rows.features
    keys, measured = np.zeros(rows.count, np.uint64), False
    arrays = [(column.values, column.levels is None) for column in chosen]
    arrays += [(rows.labels.astype(float), not rows.classes)] if with_target else []
    for number, (values, is_number) in enumerate(arrays, start=1):
        plain = np.where(np.isnan(values), np.nan, values + 0.0)  # one NaN, no minus zero
        salt = np.uint64(number * 0x9E3779B97F4A7C15 % 2**64)
        keys += mixed(np.ascontiguousarray(plain).view(np.uint64) ^ salt)
        known = values[~np.isnan(values)]
        distinct = len(np.unique(known)) > MOSTLY_DISTINCT * len(known)
        measured |= bool(is_number and len(known) > rows.count / 2 and distinct)
    return keys, measured


def check_copies(rows: Rows) -> Finding:
    """Judge held-out rows whose features are those of a training row."""
    keys, measured = row_keys(rows, with_target=False)
    if not rows.is_split:
        return _copies_without_split(keys, measured)
    train, test = keys[rows.train], keys[rows.test]
    copied = np.isin(test, train)
    share, within = float(copied.mean()), _repeated(train)
    count = f"{int(copied.sum())} of {len(test)} held-out rows are training rows"
    if not measured and not _surely_more(int(copied.sum()), len(test), within):
        if share <= THRESHOLDS["leak-duplicates"]:
            return Finding("leak-duplicates", "pass", count, value=share)
        message = f"{count}, but {percent(within)} of train repeat too: few values repeat anyway"
        return Finding("leak-duplicates", "skipped", message, value=share)
    fails = share > THRESHOLDS["leak-duplicates"]
    if not fails:
        return Finding("leak-duplicates", "pass", count, value=share)
    same, accuracy = _recalled(rows, train, test)
    base = rows.chance(rows.test)
    message = count
    if rows.classes:
        message += f", by heart {accuracy:.3f} right, by chance {base:.3f}"
    conflicting = float(copied.mean()) - same
    message += f", {percent(conflicting)} with another target" if conflicting else ""
    message += f": row {int(rows.test[np.flatnonzero(copied)[0]])}"
    inflation = max(0.0, accuracy - base) if rows.classes else same
    return Finding("leak-duplicates", "fail", message, value=share, inflation=inflation)


def _copies_without_split(keys: Any, measured: bool) -> Finding:
    extra = 1 - len(np.unique(keys)) / len(keys)
    if not measured:
        message = "no split is named, and rows of few values repeat anyway"
        return Finding("leak-duplicates", "skipped", message, value=extra)
    return Finding(
        "leak-duplicates",
        "fail" if extra > THRESHOLDS["leak-duplicates"] else "pass",
        "of all rows repeat an earlier one; a random split puts copies on both sides"
        if extra
        else "no row repeats another",
        value=extra,
    )


def _repeated(keys: Any) -> float:
    _, times = np.unique(keys, return_counts=True)
    return float(times[times > 1].sum() / len(keys))


def _surely_more(found: int, of: int, share: float) -> bool:
    from scipy import stats

    return found > 0 and float(stats.binom.sf(found - 1, of, min(1.0, 1.5 * share))) < SURE


def _recalled(rows: Rows, train: Any, test: Any) -> tuple[float, float]:
    """Answer with the target of the training copy.

    Returns: the share of held-out rows that have a copy with their own target, and the accuracy
    when all others get the commonest class.
    """
    order = np.argsort(train, kind="stable")
    at = order[np.minimum(np.searchsorted(train, test, sorter=order), len(train) - 1)]
    found = train[at] == test
    own, theirs = rows.labels[rows.test], rows.labels[rows.train][at]
    right = found & (own == theirs)
    if not rows.classes:
        return float(right.mean()), 0.0
    most = np.bincount(rows.labels[rows.train], minlength=len(rows.classes)).argmax()
    answered = np.where(found, theirs, most)
    return float(right.mean()), float((answered == own).mean())


def check_near_copies(rows: Rows) -> Finding:
    """Judge held-out rows far closer to a training row than the density there explains."""
    names = set(naming_columns(rows))
    chosen = [
        column.values
        for column in rows.features
        if column.levels is None
        and column.name not in names
        and not np.isnan(column.values).any()
        and len(np.unique(column.values)) > MOSTLY_DISTINCT * rows.count
    ]
    why = "" if rows.is_split else "no split is named"
    why = why or ("" if chosen else "no column of measured values without gaps")
    why = why or ("" if len(rows.train) > 3 * NEIGHBOURS else "too few training rows to compare")
    if why:
        return Finding("leak-near-duplicates", "skipped", why)
    x = np.column_stack(chosen)
    middle = np.median(x[rows.train], axis=0)
    spread = np.quantile(x[rows.train], 0.75, axis=0) - np.quantile(x[rows.train], 0.25, axis=0)
    x = (x - middle) / np.where(spread > 0, spread, 1.0)
    most = int(max(200, FLOPS / (2 * len(rows.train) * x.shape[1])))
    test = rows.test
    if len(test) > most:
        test = np.sort(np.random.default_rng(rows.seed).choice(test, most, replace=False))
    found = nearest(x[rows.train], x[test], NEIGHBOURS)
    first, tenth, last = found[:, 0], found[:, NEIGHBOURS // 2 - 1], found[:, -1]
    near = (first > 0) & (first < NEAR_RATIO * tenth)
    growth = float(np.median(np.log(np.maximum(last, 1e-300) / np.maximum(tenth, 1e-300))))
    dims = np.log(2) / growth if growth > 0 else np.inf
    by_chance = min(1.0, (NEIGHBOURS // 2 - 1) * NEAR_RATIO**dims)
    share = float(near.mean())
    sure = _surely_more(int(near.sum()), len(near), by_chance)
    fails = share > THRESHOLDS["leak-near-duplicates"] and sure
    message = f"{int(near.sum())} of {len(near)} held-out rows lie next to a training row"
    if near.any() and not fails:
        message += f", as many as chance gives ({percent(by_chance)})"
    elif near.any():
        message += f" (chance gives {percent(by_chance)}): row {int(test[np.flatnonzero(near)[0]])}"
    gain = share * (1 - rows.chance(rows.test)) if fails else None
    return Finding(
        "leak-near-duplicates", "fail" if fails else "pass", message, value=share, inflation=gain
    )


def check_groups(rows: Rows) -> Finding:
    """Judge held-out rows whose group is in the training rows too."""
    if rows.group is None:
        return Finding("leak-groups", "skipped", "no --group COLUMN")
    if not rows.is_split:
        return Finding("leak-groups", "skipped", "no split is named")
    values = np.where(np.isnan(rows.group.values), -np.inf, rows.group.values)
    train, test = values[rows.train], values[rows.test]
    both = np.isin(test, train) & (test != -np.inf)
    share = float(both.mean())
    if not both.any():
        message = f"{len(np.unique(test))} groups of held-out rows, none of them in train"
        return Finding("leak-groups", "pass", message, value=0.0)
    groups, number = np.unique(train, return_inverse=True)
    total = np.zeros((len(groups), rows.one_hot.shape[1]))
    np.add.at(total, number, rows.one_hot[rows.train])
    mean = total / np.bincount(number)[:, None]
    at = np.minimum(np.searchsorted(groups, test), len(groups) - 1)
    score = _score(rows, mean[at][both], rows.test[both])
    base = rows.chance(rows.test[both])
    shown = len(np.unique(test[both]))
    message = (
        f"of held-out rows: {shown} groups are on both sides; the group alone scores {score:.3f}, "
        f"{'chance' if rows.classes else 'the mean'} {base:.3f}"
    )
    gain = max(0.0, score - base) * share
    return Finding("leak-groups", "fail", message, value=share, inflation=gain)


def _score(rows: Rows, predicted: Any, where: Any) -> float:
    """Accuracy of class scores [n, classes], or R2 of values [n, 1]."""
    if rows.classes:
        return float((predicted.argmax(axis=1) == rows.labels[where]).mean())
    return r2(predicted[:, 0], rows.labels[where])


def check_time(rows: Rows) -> Finding:
    """Judge whether all training rows are earlier than all held-out ones, less the embargo."""
    if rows.time is None:
        return Finding("leak-time-order", "skipped", "no --time COLUMN")
    if not rows.is_split:
        return Finding("leak-time-order", "skipped", "no split is named")
    first = rows.time[rows.test].min()
    late = rows.time[rows.train] >= first - rows.embargo
    share = float(late.mean())
    if not late.any():
        gap = first - rows.time[rows.train].max()
        message = f"train ends {gap:g} before the held-out rows begin, embargo {rows.embargo:g}"
        return Finding("leak-time-order", "pass", message, value=0.0)
    as_split = _next_in_time(rows, rows.train, rows.test)
    order = np.argsort(rows.time, kind="stable")
    honest = _next_in_time(rows, order[: len(rows.train)], order[len(rows.train) :])
    within = rows.time[rows.train] >= first
    what = "not before the first held-out one"
    if not within.any():
        what = f"within the embargo of {rows.embargo:g} before held-out ones"
    kind = "accuracy" if rows.classes else "R2"
    message = (
        f"of training rows {what}; the target nearest in time: {kind} {as_split:.3f}, in order of "
        f"time {honest:.3f}"
    )
    gain = min(1.0, max(0.0, as_split - max(honest, rows.chance(rows.test))))
    return Finding("leak-time-order", "fail", message, value=share, inflation=gain)


def _next_in_time(rows: Rows, train: Any, test: Any) -> float:
    """Score the target of the training row that is nearest in time."""
    order = train[np.argsort(rows.time[train], kind="stable")]
    times = rows.time[order]
    after = np.searchsorted(times, rows.time[test])
    before = np.maximum(after - 1, 0)
    after = np.minimum(after, len(order) - 1)
    closer = np.abs(times[before] - rows.time[test]) <= np.abs(times[after] - rows.time[test])
    taken = order[np.where(closer, before, after)]
    if rows.classes:
        return float((rows.labels[taken] == rows.labels[test]).mean())
    return r2(rows.labels[taken], rows.labels[test])
