"""Small measures and models for tables: AUC, out-of-fold scores, a ridge logistic regression."""

from __future__ import annotations

from typing import Any

import numpy as np

FOLDS = 5
BINS = 32
FEATURES_IN_FOLD = 60


def ranks(values: Any) -> Any:
    """Give average ranks along the first axis, from 1 on."""
    from scipy.stats import rankdata

    return rankdata(values, axis=0)


def auc(scores: Any, positive: Any) -> float:
    """Give the probability that a positive row scores above another, half for ties."""
    good = int(positive.sum())
    other = len(positive) - good
    if not good or not other:
        return 0.5
    return float((ranks(scores)[positive].sum() - good * (good + 1) / 2) / (good * other))


def auc_deviation(good: int, other: int) -> float:
    """Give the standard deviation of the AUC of noise."""
    return float(np.sqrt((good + other + 1) / (12 * max(good, 1) * max(other, 1))))


def folds_of(count: int, seed: int, groups: Any = None) -> Any:
    """Deal rows, or whole groups, into FOLDS. Returns int64 [rows]."""
    generator = np.random.default_rng(seed)
    if groups is None:
        return generator.permutation(np.arange(count) % FOLDS)
    _, number = np.unique(groups, return_inverse=True)
    return generator.permutation(np.arange(number.max() + 1) % FOLDS)[number]


def bins_of(values: Any, *, category: bool) -> Any:
    """Put values into bins, what is missing into one of its own. Returns int64 [rows]."""
    known = ~np.isnan(values)
    bins = np.zeros(len(values), np.int64)
    if category:
        bins[known] = values[known].astype(np.int64) + 1
        return bins
    distinct = np.unique(values[known])
    if len(distinct) > BINS:
        count = int(np.clip(len(values) // 20, 4, BINS))
        distinct = np.unique(np.quantile(values[known], np.linspace(0, 1, count + 1)[1:-1]))
        bins[known] = np.searchsorted(distinct, values[known], side="right") + 1
        return bins
    bins[known] = np.searchsorted(distinct, values[known]) + 1
    return bins


def out_of_fold(bins: Any, target: Any, fold: Any) -> Any:
    """Predict each row by the mean target of its bin in the other folds.

    Shapes: bins [rows], target [rows, K] -> [rows, K]; a bin that was not seen gets the mean.
    """
    size = int(bins.max()) + 1
    total, counts = np.zeros((size, target.shape[1])), np.bincount(bins, minlength=size)
    np.add.at(total, bins, target)
    predicted = np.empty(target.shape)
    for number in range(FOLDS):
        inside = fold == number
        own = np.zeros_like(total)
        np.add.at(own, bins[inside], target[inside])
        left = counts - np.bincount(bins[inside], minlength=size)
        mean = target[~inside].mean(axis=0) if (~inside).any() else target.mean(axis=0)
        # One pseudo-row of the mean keeps a bin of one row from outvoting large ones.
        table = (total - own + mean) / (left[:, None] + 1)
        predicted[inside] = table[bins[inside]]
    return predicted


def logistic(features: Any, positive: Any, *, ridge: float = 1.0, rounds: int = 12) -> Any:
    """Fit a logistic regression by Newton's method; returns float64 [columns + 1], bias last."""
    x = np.column_stack([features, np.ones(len(features))])
    penalty = np.full(x.shape[1], ridge)
    penalty[-1] = 1e-6
    weight = np.zeros(x.shape[1])
    for _ in range(rounds):
        p = 1 / (1 + np.exp(-np.clip(x @ weight, -30, 30)))
        curvature = (x * (p * (1 - p) + 1e-6)[:, None]).T @ x + np.diag(penalty)
        step = np.linalg.solve(curvature, x.T @ (positive - p) - penalty * weight)
        weight += step
        if np.abs(step).max() < 1e-6:
            break
    return weight


def told_apart(features: Any, positive: Any, fold: Any) -> Any:
    """Score each row by a logistic regression on the other folds, on its best columns there."""
    scores = np.zeros(len(positive))
    for number in range(FOLDS):
        inside = fold == number
        seen, labels = features[~inside], positive[~inside].astype(float)
        if not inside.any() or labels.min() == labels.max():
            scores[inside] = 0.0
            continue
        mean, deviation = seen.mean(axis=0), seen.std(axis=0)
        scaled = (features - mean) / np.where(deviation > 1e-12, deviation, 1.0)
        strength = np.abs((labels - labels.mean()) @ scaled[~inside])
        best = np.sort(np.argsort(-strength, kind="stable")[:FEATURES_IN_FOLD])
        weight = logistic(scaled[~inside][:, best], labels)
        scores[inside] = scaled[inside][:, best] @ weight[:-1] + weight[-1]
    return scores


def r2(predicted: Any, target: Any) -> float:
    """Give the share of the variance that is explained, below 0 when worse than the mean."""
    spread = float(np.square(target - target.mean()).sum())
    return 1.0 - float(np.square(target - predicted).sum()) / spread if spread else 0.0


def nearest(train: Any, test: Any, count: int) -> tuple[Any, Any]:
    """Find the `count` nearest train rows of each test row.

    Returns: distances and row numbers in train, [tests, count] each, nearest first.
    """
    if train.shape[1] <= 8:
        from scipy.spatial import KDTree

        distance, at = KDTree(train).query(test, k=count)
        return np.asarray(distance), np.asarray(at)
    distances, numbers = np.empty((len(test), count)), np.empty((len(test), count), np.int64)
    squares = np.square(train).sum(axis=1)
    step = max(1, int(2e7 // len(train)))
    for start in range(0, len(test), step):
        part = test[start : start + step]
        square = squares - 2 * part @ train.T
        at = np.argpartition(square, count - 1, axis=1)[:, :count]
        # Exactly, once more: the short form loses the distance of near rows.
        exact = np.sqrt(np.square(part[:, None] - train[at]).sum(axis=2))
        order = np.argsort(exact, axis=1, kind="stable")
        distances[start : start + step] = np.take_along_axis(exact, order, axis=1)
        numbers[start : start + step] = np.take_along_axis(at, order, axis=1)
    return distances, numbers
