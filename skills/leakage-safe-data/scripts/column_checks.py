"""Judges the columns of a table: one that knows the target, its encodings, shift over the split."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any

import numpy as np
from row_checks import naming_columns
from severities import THRESHOLDS, Finding, percent
from table_models import auc, auc_deviation, bins_of, folds_of, out_of_fold, r2, ranks, told_apart
from table_reading import Column
from table_split import Rows

ROWS_SCORED = 50_000
COLUMNS_SCORED, ROWS_SKIMMED = 300, 20_000
BY_CHANCE = 0.01
"""Probability, over all columns, below which a score is no luck."""
SURE_DEVIATIONS = 4.0
OWN_PAST_MARGIN = 0.01
LEVELS_AS_COLUMNS = 20
LETTERS = string.ascii_letters + "_-"
PAIRS_UPTO = 10
PAIRS_LOOKED_AT = 50
ROWS_TOLD_APART = 20_000
TOLERANCE = 1e-3
"""Of a column's deviation; encodings are often written with few digits."""
LEAST_GROUPS, LEAST_SMOOTHED, LEAST_KNOWN = 3, 10, 50


@dataclass
class Scored:
    """How well one column alone tells the target."""

    name: str
    score: float
    kind: str
    """AUC, |Spearman| or R2."""


def score_columns(rows: Rows) -> list[Scored]:
    """Score every column alone, and what a text column that only names rows is made of."""
    chosen = np.arange(rows.count)
    if rows.count > ROWS_SCORED:
        generator = np.random.default_rng(rows.seed)
        chosen = np.sort(generator.choice(rows.count, ROWS_SCORED, replace=False))
    fold = folds_of(len(chosen), rows.seed)
    names = set(naming_columns(rows))
    scored = []
    for column in _promising(rows, chosen):
        parts = [column]
        if column.levels is not None and column.name in names:
            parts = _pieces(column)
        for part in parts:
            scored.append(_score(rows, part.take(chosen), chosen, fold))
    return sorted(scored, key=lambda s: -s.score)


def _promising(rows: Rows, chosen: Any) -> list[Column]:
    """Of very many columns keep those that alone follow the target most, by rank or by distance.

    Distance from the median sees a column that is high or low for one class.
    """
    if len(rows.features) <= COLUMNS_SCORED:
        return rows.features
    target = rows.one_hot[chosen[:ROWS_SKIMMED]][:, rows.main_targets]
    target = target - target.mean(axis=0)
    strength = np.zeros(len(rows.features))
    for start in range(0, len(rows.features), COLUMNS_SCORED):
        part = rows.features[start : start + COLUMNS_SCORED]
        x = np.column_stack([np.nan_to_num(c.values[chosen[:ROWS_SKIMMED]]) for c in part])
        placed = ranks(x) - (len(x) + 1) / 2
        for shape in (placed, np.abs(placed)):
            shape = shape - shape.mean(axis=0)
            spread = np.sqrt(np.square(shape).sum(axis=0))
            follows = np.abs(target.T @ shape).max(axis=0) / np.maximum(spread, 1e-12)
            strength[start : start + len(part)] = np.maximum(
                strength[start : start + len(part)], follows
            )
    best = np.sort(np.argsort(-strength, kind="stable")[:COLUMNS_SCORED])
    return [rows.features[number] for number in best.tolist()]


def _pieces(column: Column) -> list[Column]:
    """Take an id of text apart: its first word, its number, its length."""
    levels = column.levels or []
    texts = [levels[int(value)] for value in column.values]
    words = [text[: len(text) - len(text.lstrip(LETTERS))] for text in texts]
    found, number = np.unique(words, return_inverse=True)
    digits = [re.findall(r"\d{1,15}", text) for text in texts]
    last = np.array([float(d[-1]) if d else np.nan for d in digits])
    return [
        Column(f"{column.name} (first word)", number.astype(float), found.tolist()),
        Column(f"{column.name} (number)", last),
        Column(f"{column.name} (length)", np.array([len(text) for text in texts], float)),
    ]


def _score(rows: Rows, column: Column, chosen: Any, fold: Any) -> Scored:
    values, category = column.values, column.levels is not None
    known = ~np.isnan(values)
    target = rows.one_hot[chosen][:, rows.main_targets]
    bins = bins_of(values, category=category)
    predicted = out_of_fold(bins, target, fold)
    if rows.classes:
        each = [auc(predicted[:, k], target[:, k] > 0) for k in range(target.shape[1])]
        best = float(np.mean(each))
        if len(rows.classes) == 2 and not category and known.all():
            plain = auc(values, target[:, 0] > 0)
            best = max(best, plain, 1 - plain)
        return Scored(column.name, best, "AUC")
    explained = r2(predicted[:, 0], target[:, 0])
    rank = 0.0
    if not category and known.sum() > 2 and known.mean() > 0.5:
        rank = _correlation(ranks(values[known]), ranks(target[known, 0]))
    kind = "|Spearman|" if abs(rank) >= explained else "R2"
    return Scored(column.name, max(abs(rank), explained), kind)


def _correlation(one: Any, other: Any) -> float:
    one, other = one - one.mean(), other - other.mean()
    spread = float(np.sqrt(np.square(one).sum() * np.square(other).sum()))
    return float((one * other).sum() / spread) if spread else 0.0


def check_columns(rows: Rows, scored: list[Scored]) -> Finding:
    """Judge the best single column."""
    limit = THRESHOLDS["leak-single-feature"]
    own = _own_past(rows)
    judged = [s for s in scored if s.score > limit and _no_luck(rows, s, len(rows.features))]
    # A target that barely moves from row to row is told by its own past, which is no leak.
    judged = [s for s in judged if s.score > max(limit, min(own + OWN_PAST_MARGIN, 0.9999))]
    best = (judged or scored)[0]
    message = f"{best.kind} of {best.name} alone, the best of {len(rows.features)} columns"
    if own > limit and not judged:
        message += f"; the target's own past has {own:.3f}"
    if not judged:
        return Finding("leak-single-feature", "pass", message, value=best.score)
    more = [s.name for s in judged[1:4]]
    message = f"{best.kind} of {best.name} alone"
    message += f", then {', '.join(more)}" if more else ""
    message += ": known before the target is? else drop it"
    gain = 2 * best.score - 1 if rows.classes else best.score
    return Finding("leak-single-feature", "fail", message, value=best.score, inflation=gain / 2)


def _no_luck(rows: Rows, scored: Scored, columns: int) -> bool:
    """Tell whether noise of that many columns would hardly score so well."""
    from scipy import stats

    if rows.classes:
        counts = np.bincount(rows.labels, minlength=len(rows.classes))
        deviation = auc_deviation(int(counts.max()), int(max(counts.min(), 1)))
        return 2 * columns * float(stats.norm.sf((scored.score - 0.5) / deviation)) < BY_CHANCE
    return 2 * columns * float(stats.norm.sf(scored.score * np.sqrt(rows.count - 1))) < BY_CHANCE


def _own_past(rows: Rows) -> float:
    """Score the target of the row before, in order of time, as a column; 0 without times."""
    if rows.time is None:
        return 0.0
    order = np.argsort(rows.time, kind="stable")
    before = np.full(rows.count, np.nan)
    before[order[1:]] = rows.labels[order[:-1]]
    fold = folds_of(rows.count, rows.seed)
    return _score(rows, Column("", before), np.arange(rows.count), fold).score


def check_encodings(rows: Rows) -> Finding:
    """Judge columns that hold the mean target of their category, also smoothed, over all rows."""
    found: list[tuple[float, Column, str, int, Any]] = []
    own: list[str] = []
    targets = rows.one_hot[:, rows.main_targets]
    groups = _groups(rows)
    pairs = {by: _pairs(number) for by, number in groups}
    for column in rows.features:
        values = column.values
        whole = (values == np.round(values)).all()
        if column.levels is not None or np.isnan(values).any() or whole:
            continue
        repeats = _repeats(values)
        itself = np.unique(values, return_inverse=True)[1] if repeats else None
        others = [group for group in groups if group[0] != f" by {column.name}"]
        for by, number in [*([("", itself)] if repeats else []), *others]:
            for k in range(targets.shape[1]):
                share = train = 0.0
                if repeats:
                    share = _encoded(values, number, targets[:, k], judged=rows.test)
                whole_mean = None
                if by and not share:
                    whole_mean = _with_itself(values, number, targets[:, k], pairs[by])
                if whole_mean is not None:
                    share = _encoded(whole_mean, number, targets[:, k], judged=rows.test)
                if rows.is_split and repeats:
                    part = (values[rows.train], number[rows.train], targets[rows.train, k])
                    train = _encoded(*part, least=1)
                # Where targets are mostly equal both explain most rows; the true one all.
                if share >= max(train, THRESHOLDS["leak-target-encoding"]):
                    found.append((share, column, by, k, number))
                elif train >= THRESHOLDS["leak-target-encoding"]:
                    own.append(column.name)
    if not found:
        message = "no column holds the mean target of a category over all rows"
        if own:
            message = f"{', '.join(dict.fromkeys(own))} holds means of train alone: honest on test"
        return Finding("leak-target-encoding", "pass", message, value=0.0)
    share, column, by, k, number = max(found, key=lambda f: (f[0], f[2] != ""))
    where = rows.test if rows.is_split else np.arange(rows.count)
    seen = abs(_correlation(column.values[where], targets[where, k]))
    message = (
        f"{column.name} is the mean target{by} over all rows: correlation {seen:.2f} with held-out "
        "targets"
    )
    gain = None
    if by or number.max() >= LEAST_KNOWN:  # few means are those of many categories each
        honest = abs(_honest_correlation(rows, number, targets[:, k]))
        message += f", {honest:.2f} when encoded by train"
        gain = max(0.0, seen - honest)
    return Finding("leak-target-encoding", "fail", message, value=share, inflation=gain)


def _groups(rows: Rows) -> list[tuple[str, Any]]:
    """Give " by NAME" and the group of each row for every column that groups rows."""
    columns = [*rows.features, *([rows.group] if rows.group is not None else [])]
    found = []
    for column in columns:
        if not np.isnan(column.values).any() and _repeats(column.values):
            found.append((f" by {column.name}", np.unique(column.values, return_inverse=True)[1]))
    return found


def _pairs(number: Any) -> tuple[Any, Any]:
    """Give some pairs of rows of one group each."""
    order = np.argsort(number, kind="stable")
    same = np.flatnonzero(np.diff(number[order]) == 0)[:PAIRS_LOOKED_AT]
    return order[same], order[same + 1]


def _with_itself(values: Any, number: Any, target: Any, pairs: tuple[Any, Any]) -> Any:
    """Take values for means of the group's other rows, which tell the target; give those of all.

    None when already the pairs say that they are not.
    """
    one, other = pairs
    change = values[one] - values[other]
    if not change.any():
        return None
    count = np.bincount(number)
    slope = change * (count[number[one]] - 1)
    if np.abs(slope + target[one] - target[other]).max(initial=0.0) > 0.01 * target.std():
        return None
    count = count[number]
    return ((count - 1) * values + target) / count


def _repeats(values: Any) -> bool:
    """Tell whether a column has groups of rows with one value, and several of them."""
    known = values[~np.isnan(values)]
    groups = len(np.unique(known))
    return 1 < groups <= 0.8 * len(known)


def _encoded(values: Any, number: Any, target: Any, *, judged: Any = (), least: int = 2) -> float:
    """Give the share of rows whose value is (sum + m * p) / (count + m) of their group's target.

    m is 0 for the plain mean, else m and p are those of the least squares. Shapes: [rows] each.
    Groups of fewer than `least` rows, and those without a `judged` row if there are such, are left
    out.
    """
    counts = np.bincount(number)
    present = counts > 0
    counts = np.maximum(counts, 1)
    mean = np.bincount(number, values) / counts
    spread = values.std()
    if spread == 0 or np.abs(values - mean[number]).max() > TOLERANCE * spread:
        return 0.0  # no function of the group
    total = np.bincount(number, target)
    several = present & (counts >= least)
    if len(judged):
        several &= np.bincount(number[judged], minlength=len(counts)) > 0
    if several.sum() < LEAST_GROUPS:
        return 0.0
    close = np.abs(total / counts - mean) <= TOLERANCE * spread
    if not close[several].all() and several.sum() >= LEAST_SMOOTHED:
        # total - count * mean = m * mean - m * p is linear in m and m * p.
        design = np.column_stack([mean, -np.ones(len(mean))])[present]
        left = (total - counts * mean)[present]
        (m, mp), *_ = np.linalg.lstsq(design, left, rcond=None)
        if 0 < m < counts.sum():
            close |= np.abs((total + mp) / (counts + m) - mean) <= TOLERANCE * spread
    return float(counts[close & several].sum() / counts[several].sum())


def _honest_correlation(rows: Rows, number: Any, target: Any) -> float:
    """Encode each held-out row by the training rows of its group, or by the others of it."""
    if rows.is_split:
        total = np.bincount(number[rows.train], target[rows.train], minlength=number.max() + 1)
        count = np.bincount(number[rows.train], minlength=number.max() + 1)
        mean = np.where(count > 0, total / np.maximum(count, 1), target[rows.train].mean())
        return _correlation(mean[number[rows.test]], target[rows.test])
    total, count = np.bincount(number, target), np.bincount(number)
    others = (total[number] - target) / np.maximum(count[number] - 1, 1)
    return _correlation(np.where(count[number] > 1, others, target.mean()), target)


def check_shift(rows: Rows) -> tuple[Finding, Any]:
    """Judge whether a classifier tells held-out rows from training rows (adversarial validation).

    Returns: the finding, and (scores, is_test) of the judged rows for the picture, or None.
    """
    if not rows.is_split:
        return Finding("leak-adversarial", "skipped", "no split is named"), None
    generator = np.random.default_rng(rows.seed)
    parts = [
        part
        if len(part) <= ROWS_TOLD_APART
        else np.sort(generator.choice(part, ROWS_TOLD_APART, replace=False))
        for part in (rows.train, rows.test)
    ]
    if min(map(len, parts)) < 10:
        return Finding("leak-adversarial", "skipped", "fewer than 10 rows on a side"), None
    chosen = np.concatenate(parts)
    is_test = np.arange(len(chosen)) >= len(parts[0])
    groups = None if rows.group is None else rows.group.values[chosen]
    features, names = _design(rows, chosen)
    if not features.shape[1]:
        return Finding("leak-adversarial", "skipped", "no column but ids and constants"), None
    units = [int(is_test.sum()), int((~is_test).sum())]
    if groups is not None:
        units = [len(np.unique(groups[side])) for side in (is_test, ~is_test)]
    scores = told_apart(features, is_test, folds_of(len(chosen), rows.seed, groups))
    value = auc(scores, is_test)
    sure = value > 0.5 + SURE_DEVIATIONS * auc_deviation(*units)
    single = [abs(auc(features[:, n], is_test) - 0.5) for n in range(features.shape[1])]
    top = list(dict.fromkeys(names[n] for n in np.argsort(single)[::-1]))[:3]
    fails = value > THRESHOLDS["leak-adversarial"] and sure
    message = "AUC of telling held-out rows from training rows"
    if rows.time is not None:
        message += "; expected of a split by time"
        verdict = "skipped" if fails else "pass"
    else:
        verdict = "fail" if fails else "pass"
        message += f", most by {', '.join(top)}" if fails else ""
        if value > THRESHOLDS["leak-adversarial"] and not sure:
            message += (
                f", within chance for {min(units)} {'groups' if groups is not None else 'rows'}"
            )
    return Finding("leak-adversarial", verdict, message, value=value), (scores, is_test)


def _design(rows: Rows, chosen: Any) -> tuple[Any, list[str]]:
    """Turn columns into numbers of one scale: ranks and their squares, levels, what is missing."""
    from scipy.special import ndtri

    skipped = set(naming_columns(rows))
    columns, names, plain = [], [], []
    for column in rows.features:
        values = column.values[chosen]
        known = ~np.isnan(values)
        if column.name in skipped or len(np.unique(values[known])) < 2:
            if column.name not in skipped and 0 < known.sum() < len(known):
                columns.append(known.astype(float))
                names.append(column.name)
            continue
        if column.levels is not None:
            counts = np.bincount(values[known].astype(int))
            for level in np.argsort(-counts, kind="stable")[:LEVELS_AS_COLUMNS]:
                columns.append((values == level).astype(float))
                names.append(column.name)
        else:
            scaled = np.zeros(len(values))
            scaled[known] = ndtri((ranks(values[known]) - 0.5) / known.sum())
            columns += [scaled, np.square(scaled)]
            names += [column.name] * 2
            plain.append((column.name, scaled))
        if not known.all():
            columns.append((~known).astype(float))
            names.append(column.name)
    if 2 <= len(plain) <= PAIRS_UPTO:
        for at, (name, one) in enumerate(plain):
            for other_name, other in plain[:at]:
                columns.append(one * other)
                names.append(f"{name} with {other_name}")
    return (np.column_stack(columns) if columns else np.empty((len(chosen), 0))), names


def describe_columns(rows: Rows) -> list[str]:
    """Say which columns are constant and which only name rows."""
    constant = [c.name for c in rows.features if len(np.unique(c.values[~np.isnan(c.values)])) < 2]
    told = []
    for what, names in (
        ("constant", constant),
        ("another value in every row", naming_columns(rows)),
    ):
        if names:
            told.append(f"{what}: {', '.join(names[:6])}{' and more' if len(names) > 6 else ''}")
    return told


def suggestions(rows: Rows) -> list[str]:
    """Name columns that look like groups or times and were not named as such."""
    found = []
    if rows.is_split and rows.group is None:
        for column in rows.features:
            is_id = re.search(
                r"(^|_)(id|user|patient|subject|customer|group|doc|document|repo|session|device|"
                r"site|speaker|family)(_?id)?$",
                column.name.lower(),
            )
            test, train = column.values[rows.test], column.values[rows.train]
            if is_id and _repeats(column.values) and np.isin(test, train).any():
                share = percent(float(np.isin(test, train).mean()))
                found.append(f"--group {column.name}: {share} of held-out rows share it with train")
    if rows.is_split and rows.time is None:
        for column in rows.features:
            if re.search(r"(^|_)(time|date|timestamp|day|month|year)(_|$)", column.name.lower()):
                found.append(f"--time {column.name}: judges whether train is earlier")
    return found[:2]
