"""Judges the rows of a table: copies across the split, groups on both sides, the order of time."""

from __future__ import annotations

from typing import Any

import numpy as np
from severities import SURE, THRESHOLDS, Finding, percent
from table_models import nearest, r2, ranks
from table_split import Rows
from text_hashing import mixed

NEAR_RATIO = 0.1
"""A row is a near copy when its nearest training row is so much closer than its tenth."""
NEIGHBOURS = 20
FLOPS = 4e10
MOSTLY_DISTINCT = 0.5
HARDLY, FEW, MANY_VALUES = 0.01, 3, 50
ROWS_RANKED, COLUMNS_RANKED, COLUMNS_MULTIPLIED, SAME_COLUMN = 2000, 500, 8, 0.98
WITHIN_ROWS, LEAST_PAIRS = 2000, 20


def _is_name(values: Any, *, text: bool) -> bool:
    """Tell whether a column only names its rows: each value once, text or whole numbers."""
    if np.isnan(values).any() or len(np.unique(values)) < len(values):
        return False
    return text or bool((values == np.round(values)).all())


def naming_columns(rows: Rows) -> list[str]:
    """Name the columns that hold another value in every row and measure nothing."""
    return [c.name for c in rows.features if _is_name(c.values, text=c.levels is not None)]


def row_keys(rows: Rows) -> tuple[Any, float]:
    """Hash the features of every row; columns that only name rows are left out beside others.

    Returns: uint64 [rows], and the probability that two different rows agree by coincidence, as far
    as the measured columns say.
    """
    names = set(naming_columns(rows))
    chosen = [column for column in rows.features if column.name not in names] or rows.features
    keys = np.zeros(rows.count, np.uint64)
    for number, column in enumerate(chosen, start=1):
        plain = np.where(np.isnan(column.values), np.nan, column.values + 0.0)  # no minus zero
        salt = np.uint64(number * 0x9E3779B97F4A7C15 % 2**64)
        keys += mixed(np.ascontiguousarray(plain).view(np.uint64) ^ salt)
    return keys, _coincidence(rows, chosen)


def _coincidence(rows: Rows, chosen: list[Any]) -> float:
    """Multiply what the columns' steps allow: prices in cents agree once in some thousand pairs.

    Columns that follow one another count once; those of few values and with gaps not at all.
    """
    sample = np.random.default_rng(rows.seed).permutation(rows.count)[:ROWS_RANKED]
    steps = sorted(
        (step, number)
        for number, column in enumerate(chosen[:COLUMNS_RANKED])
        if column.levels is None and (step := _step(column.values)) < 1
    )
    product, taken = 1.0, []
    for step, number in steps[:COLUMNS_MULTIPLIED]:
        placed = ranks(chosen[number].values[sample])
        placed = placed - placed.mean()
        placed /= max(float(np.linalg.norm(placed)), 1e-12)
        if all(abs(float(placed @ other)) < SAME_COLUMN for other in taken):
            taken.append(placed)
            product *= step
    return product


def _step(values: Any) -> float:
    """Give the probability that two rows agree in a column of many values; 1 for others.

    It is the smallest step over the quartiles' distance, but at least one over the values seen.
    """
    distinct = len(np.unique(values))
    if np.isnan(values).any() or distinct < MANY_VALUES:
        return 1.0
    low, high = np.quantile(values, [0.25, 0.75])
    if high <= low:
        return 1.0
    for digits in range(9):
        scaled = values * 10.0**digits
        if np.abs(scaled - np.round(scaled)).max() < 1e-4:
            return max(1 / distinct, min(1.0, 10.0**-digits / float(high - low)))
    return 1 / distinct


def check_copies(rows: Rows) -> Finding:
    """Judge held-out rows whose features are those of a training row."""
    keys, coincidence = row_keys(rows)
    if not rows.is_split:
        return _copies_without_split(keys, coincidence)
    train, test = keys[rows.train], keys[rows.test]
    copied = np.isin(test, train)
    share, within = float(copied.mean()), _repeated(train)
    by_chance = min(1.0, coincidence * len(train))
    measured = by_chance < HARDLY
    if not measured:  # few values repeat anyway, as often as they do within train
        by_chance = (within * len(train) + FEW) / (len(train) + FEW)
    count = f"{int(copied.sum())} of {len(test)} held-out rows are training rows"
    if share <= THRESHOLDS["leak-duplicates"]:
        return Finding("leak-duplicates", "pass", count, value=share)
    if not _surely_more(int(copied.sum()), len(test), by_chance):
        message = f"{count}, as few values do by chance ({percent(within)} of train repeat)"
        return Finding("leak-duplicates", "pass" if measured else "skipped", message, value=share)
    same, accuracy = _recalled(rows, train, test)
    base = rows.chance(rows.test)
    message = count
    if rows.classes:
        message += f", by heart {accuracy:.3f} right, by chance {base:.3f}"
    conflicting = float(copied.mean()) - same
    message += f", {percent(conflicting)} with another target" if conflicting > 1e-9 else ""
    message += f": row {int(rows.test[np.flatnonzero(copied)[0]])}"
    inflation = max(0.0, accuracy - base) if rows.classes else same
    return Finding("leak-duplicates", "fail", message, value=share, inflation=inflation)


def _copies_without_split(keys: Any, coincidence: float) -> Finding:
    extra = 1 - len(np.unique(keys)) / len(keys)
    by_chance = min(1.0, coincidence * len(keys))
    if by_chance >= HARDLY:
        message = "no split is named, and rows of few values repeat anyway"
        return Finding("leak-duplicates", "skipped", message, value=extra)
    fails = extra > THRESHOLDS["leak-duplicates"]
    fails = fails and _surely_more(round(extra * len(keys)), len(keys), by_chance)
    message = "of all rows repeat an earlier one; a random split puts copies on both sides"
    return Finding(
        "leak-duplicates",
        "fail" if fails else "pass",
        message if extra else "no row repeats another",
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
    near, neighbour, by_chance = _too_near(nearest(x[rows.train], x[test], NEIGHBOURS))
    share, count = float(near.mean()), int(near.sum())
    message = f"{count} of {len(near)} held-out rows lie next to a training row"
    id = "leak-near-duplicates"
    if share <= THRESHOLDS[id] or not _surely_more(count, len(near), by_chance):
        message += f", as chance gives ({percent(by_chance)})" if count else ""
        return Finding(id, "pass", message, value=share)
    within = _within_train(x[rows.train], rows.seed)
    tells = _shared_targets(rows, test[near], rows.train[neighbour[near]])
    first = int(test[np.flatnonzero(near)[0]])
    if not _surely_more(count, len(near), max(by_chance, within)) and not tells:
        message += f", as training rows do among themselves ({percent(within)}): --group tells"
        return Finding(id, "skipped", message, value=share)
    message += f" (chance gives {percent(by_chance)}): row {first}"
    gain = share * (1 - rows.chance(rows.test))
    return Finding(id, "fail", message, value=share, inflation=gain)


def _too_near(found: tuple[Any, Any]) -> tuple[Any, Any, float]:
    """Tell which rows are too near to their first neighbour for the distance of their tenth.

    Returns: bool [rows], the first neighbour, and the share that is so near by chance: r**d of the
    nine others, with the dimension d that the tenth and twentieth neighbour show.
    """
    distance, neighbour = found
    first, tenth, last = distance[:, 0], distance[:, NEIGHBOURS // 2 - 1], distance[:, -1]
    near = (first > 0) & (first < NEAR_RATIO * tenth)
    growth = float(np.median(np.log(np.maximum(last, 1e-300) / np.maximum(tenth, 1e-300))))
    dims = np.log(2) / growth if growth > 0 else np.inf
    return near, neighbour[:, 0], min(1.0, (NEIGHBOURS // 2 - 1) * NEAR_RATIO**dims)


def _within_train(x: Any, seed: int) -> float:
    """Share of training rows that lie as near to another training row."""
    most = int(np.clip(FLOPS / (8 * len(x) * x.shape[1]), 100, WITHIN_ROWS))
    chosen = np.random.default_rng(seed).permutation(len(x))[:most]
    distance, neighbour = nearest(x, x[chosen], NEIGHBOURS + 1)
    return float(_too_near((distance[:, 1:], neighbour[:, 1:]))[0].mean())


def _shared_targets(rows: Rows, test: Any, train: Any) -> bool:
    """Tell whether rows next to each other have one target, though rows as a whole do not."""
    one, other = rows.labels[test], rows.labels[train]
    if len(one) < LEAST_PAIRS:
        return False
    if rows.classes:
        anyway = float(np.square(np.bincount(rows.labels) / rows.count).sum())
        return float((one == other).mean()) >= 0.99 and anyway < 0.8
    return float(np.median(np.abs(one - other))) < 0.01 * float(rows.labels.std())


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
