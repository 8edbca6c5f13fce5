"""Runs a user's pipeline and asks what its predictions depend on.

The pipeline is FUNCTION(features, target, train, test) and returns a prediction for each test row;
or FUNCTION(features, target), which makes its own folds and returns one for each row. features is
float64 [rows, columns], or an object array when a column holds text; target is as in the table.

Predictions may depend on the training rows and on the row itself, nothing else. So they are made
again with other targets of the test rows, then with other features of half of them, and must stay
bit for bit. With shuffled targets the score must fall to chance.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fit_recorder import FitCall, recording
from severities import THRESHOLDS, Finding, percent
from table_models import auc, r2
from table_split import Rows

from kit.errors import UsageError
from kit.fix import fix_at, fix_in
from kit.user_code import user_code

SHUFFLES = 3
PERMUTATIONS = 200
TEST_SHARE = 4
"""Without a split every fourth row is held out."""


@dataclass
class Pipeline:
    """A user's function with the table that it gets."""

    function: Callable[..., Any]
    name: str
    rows: Rows
    features: Any
    target: Any
    train: Any
    test: Any
    own_folds: bool
    calls: list[FitCall] = field(default_factory=list)

    @property
    def judged(self) -> Any:
        """Rows that it predicts."""
        return np.arange(self.rows.count) if self.own_folds else self.test

    def predict(self, features: Any = None, target: Any = None, *, record: bool = False) -> Any:
        """Call it from one seed on copies of its inputs; returns what it predicts, checked."""
        x = (self.features if features is None else features).copy()
        y = (self.target if target is None else target).copy()
        args = (x, y) if self.own_folds else (x, y, self.train.copy(), self.test.copy())
        random.seed(self.rows.seed)
        np.random.seed(self.rows.seed % 2**32)
        with user_code(f"--pipeline {self.name}"):
            if record:
                with recording(x, self.train) as recorder:
                    found = self.function(*args)
                self.calls = recorder.calls
            else:
                found = self.function(*args)
        found = np.asarray(found)
        if found.ndim == 2 and found.shape[1] == 1:
            found = found[:, 0]
        if found.ndim not in (1, 2) or len(found) != len(self.judged):
            raise UsageError(
                f"--pipeline {self.name} returned shape {found.shape}",
                f"it must return one prediction for each of the {len(self.judged)} "
                f"{'rows' if self.own_folds else 'test rows'}",
            )
        return found

    def score(self, predicted: Any, labels: Any) -> float:
        """Accuracy of classes, AUC of numbers for two classes, R2 of values."""
        if not self.rows.classes:
            return r2(predicted.astype(float).reshape(len(labels), -1)[:, 0], labels)
        if predicted.ndim == 2:
            return float((predicted.argmax(axis=1) == labels).mean())
        known = np.unique(self.target)
        if np.isin(predicted, known).all():
            return float((np.searchsorted(known, predicted) == labels).mean())
        if len(known) == 2 and predicted.dtype.kind == "f":
            return auc(predicted, labels == 1)
        raise UsageError(
            f"--pipeline {self.name} returned {predicted[:3].tolist()} ...",
            "it must return classes of the target, a score [rows] for two classes or [rows, K]",
        )


def open_pipeline(function: Callable[..., Any], name: str, rows: Rows) -> Pipeline:
    """Lay the table out for the function, by the number of arguments that it takes."""
    try:
        wanted = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        wanted = []
    if len(wanted) not in (2, 4):
        raise UsageError(
            f"--pipeline {name} takes {len(wanted)} arguments",
            "it must be FUNCTION(features, target, train, test), or FUNCTION(features, target) "
            "with folds of its own",
        )
    text = any(column.levels is not None for column in rows.features)
    columns = [
        column.values
        if column.levels is None
        else np.array(
            [None if np.isnan(v) else column.levels[int(v)] for v in column.values], object
        )
        for column in rows.features
    ]
    features = np.empty((rows.count, len(columns)), object if text else float)
    for number, values in enumerate(columns):
        features[:, number] = values
    named = rows.target.levels
    target = np.array([named[int(v)] for v in rows.target.values]) if named else rows.target.values
    train, test = rows.train, rows.test
    if not rows.is_split:
        order = np.random.default_rng(rows.seed).permutation(rows.count)
        test, train = (np.sort(part) for part in np.split(order, [rows.count // TEST_SHARE]))
    return Pipeline(function, name, rows, features, target, train, test, len(wanted) == 2)


def check_pipeline(
    pipeline: Pipeline, told: Callable[[int, int, str], None]
) -> tuple[list[Finding], dict[str, Any]]:
    """Run it as often as the questions need; returns findings and numbers."""
    total = 4 + SHUFFLES
    told(0, total, "runs of the pipeline")
    plain = pipeline.predict(record=True)
    told(1, total, "runs of the pipeline")
    score = pipeline.score(plain, pipeline.rows.labels[pipeline.judged])
    repeats = np.array_equal(plain, pipeline.predict(), equal_nan=plain.dtype.kind == "f")
    told(2, total, "runs of the pipeline")
    shuffled, numbers = _shuffled_labels(pipeline, score, told, total)
    findings = [shuffled, _fit_before_split(pipeline, plain, repeats)]
    numbers["score"] = score
    numbers["fits"] = [
        {"fit": c.name, "file": c.file, "line": c.line, "rows": len(c.rows)} for c in pipeline.calls
    ]
    if shuffled.verdict == "fail" and shuffled.fix is None:
        shuffled.fix = _line(pipeline, needs_target=True)
    return findings, numbers


def _shuffled_labels(
    pipeline: Pipeline, score: float, told: Callable[[int, int, str], None], total: int
) -> tuple[Finding, dict[str, Any]]:
    """Train on targets in a random order: whoever still scores has seen those of test rows."""
    generator = np.random.default_rng(pipeline.rows.seed + 1)
    rows, judged = pipeline.rows, pipeline.judged
    scores, above = [], []
    for number in range(SHUFFLES):
        order = generator.permutation(rows.count)
        predicted = pipeline.predict(target=pipeline.target[order])
        labels = rows.labels[order][judged]
        found = pipeline.score(predicted, labels)
        chance = np.array(
            [pipeline.score(predicted, generator.permutation(labels)) for _ in range(PERMUTATIONS)]
        )
        scores.append(found)
        above.append((found - chance.mean()) / max(float(chance.std()), 1e-12))
        told(3 + number, total, "runs of the pipeline")
    from scipy import stats

    chance_p = float(stats.norm.sf(sum(above) / np.sqrt(SHUFFLES)))
    mean = float(np.mean(scores))
    fails = chance_p < THRESHOLDS["leak-shuffled-labels"]
    kind = "score" if rows.classes else "R2"
    message = f"by chance; {kind} {mean:.3f} on shuffled targets, {score:.3f} on real ones"
    base = _chance_level(pipeline)
    finding = Finding(
        "leak-shuffled-labels",
        "fail" if fails else "pass",
        message,
        value=chance_p,
        inflation=min(1.0, max(0.0, mean - base)) if fails else None,
    )
    return finding, {"shuffled_scores": scores}


def _chance_level(pipeline: Pipeline) -> float:
    return pipeline.rows.chance(pipeline.judged)


def _fit_before_split(pipeline: Pipeline, plain: Any, repeats: bool) -> Finding:
    """Change what must not matter and compare the predictions bit for bit."""
    if pipeline.own_folds:
        return Finding(
            "leak-fit-before-split",
            "skipped",
            "the pipeline makes its own folds; the shuffled targets judge it",
        )
    if not repeats:
        return Finding(
            "leak-fit-before-split",
            "unclear",
            "two equal runs of the pipeline differ: set its seeds (random_state)",
        )
    generator = np.random.default_rng(pipeline.rows.seed + 2)
    test = pipeline.test
    target = pipeline.target.copy()
    target[test] = generator.permutation(target[test])
    by_target = _moved(plain, pipeline.predict(target=target))
    features = pipeline.features.copy()
    changed = np.zeros(len(test), bool)
    changed[generator.permutation(len(test))[: max(1, len(test) // 2)]] = True
    features[test[changed]] = _others(features[test[changed]], generator)
    again = pipeline.predict(features=features)
    by_features = _moved(plain[~changed], again[~changed])
    seen = _outside(pipeline)
    if not by_target and not by_features and seen is not None:
        message = f"{seen.name} saw rows outside train; no prediction changes with them: small"
        return Finding(
            "leak-fit-before-split",
            "fail",
            message,
            value=float(len(np.setdiff1d(seen.rows, pipeline.train)) / len(test)),
            fix=_line(pipeline, needs_target=False),
            small=True,
        )
    if not by_target and not by_features:
        message = "predictions depend on the training rows and their own row alone"
        return Finding("leak-fit-before-split", "pass", message, value=0.0)
    fix = _line(pipeline, needs_target=by_target > 0)
    if by_target:
        message = f"{percent(by_target)} of predictions follow targets of test rows"
        return Finding("leak-fit-before-split", "fail", message, value=by_target, fix=fix)
    message = (
        f"{percent(by_features)} of predictions follow features of other test rows, none their "
        "targets: small"
    )
    return Finding("leak-fit-before-split", "fail", message, value=by_features, fix=fix, small=True)


def _others(features: Any, generator: np.random.Generator) -> Any:
    """Make other rows of the same kind: numbers ten times as large, text from other rows."""
    if features.dtype != object:
        spread = np.nanstd(features, axis=0)
        return 10 * features + 10 * np.where(spread > 0, spread, 1.0)
    made = features.copy()
    for number in range(made.shape[1]):
        column = made[:, number]
        if all(value is None or isinstance(value, float) for value in column):
            made[:, number] = [value if value is None else 10 * value + 10 for value in column]
        else:
            made[:, number] = generator.permutation(column)
    return made


def _moved(one: Any, other: Any) -> float:
    """Share of predictions that are not the same."""
    if not len(one):
        return 0.0
    same = one == other
    if one.dtype.kind == "f" and other.dtype.kind == "f":
        same = same | (np.isnan(one) & np.isnan(other))
    return float(1 - same.reshape(len(one), -1).all(axis=1).mean())


def _outside(pipeline: Pipeline, *, needs_target: bool = False) -> FitCall | None:
    """Return the first fit that saw a row outside train, or all rows where there are folds."""
    for call in pipeline.calls:
        if pipeline.own_folds:
            seen = len(call.rows) == pipeline.rows.count
        else:
            seen = bool(len(np.setdiff1d(call.rows, pipeline.train)))
        if seen and (call.with_target or not needs_target):
            return call
    return None


def _line(pipeline: Pipeline, *, needs_target: bool) -> dict[str, Any] | None:
    """Name the first fit that saw a row outside train, one that had targets where they matter.

    Without one it was done by hand: then the function itself.
    """
    call = _outside(pipeline, needs_target=needs_target)
    if call is not None:
        text = f"{call.name} saw {len(call.rows)} rows, before the folds; fit it inside"
        if not pipeline.own_folds:
            extra = len(np.setdiff1d(call.rows, pipeline.train))
            text = f"{call.name} saw {extra} rows outside train; fit it on train"
        return fix_at(call.file, call.line, text)
    return fix_in(pipeline.function, "something here is computed over all rows; use train alone")
