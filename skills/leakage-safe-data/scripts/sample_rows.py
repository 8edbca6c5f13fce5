"""A project's samples that are no text, as the rows of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from table_reading import Column, spread
from table_split import MAX_CLASSES, Rows

IGNORED = -100


def rows_of_samples(samples: Any, seed: int) -> Rows:
    """Lay training and held-out samples below one another; each value of a sample is a column.

    A sample with several labels gets their mean as its target, left-out ones apart; one without
    any is left out. More classes than MAX_CLASSES are taken as values.
    """
    sides = [samples.train, samples.val]
    labels = [_one_label(np.asarray(side["labels"])) for side in sides]
    kept = [np.flatnonzero(~np.isnan(values)) for values in labels]
    columns: list[Column] = []
    for name in samples.train:
        if name == "labels":
            continue
        both = [np.asarray(side[name])[rows] for side, rows in zip(sides, kept, strict=True)]
        columns += spread(name, np.concatenate(both))
    target = np.concatenate([values[rows] for values, rows in zip(labels, kept, strict=True)])
    raw = np.asarray(samples.train["labels"])
    classes, numbers = [], target
    distinct = np.unique(target)
    if raw.ndim == 1 and raw.dtype.kind in "iu" and len(distinct) <= MAX_CLASSES:
        classes = [f"{value:g}" for value in distinct.tolist()]
        numbers = np.searchsorted(distinct, target)
    train = np.arange(len(kept[0]))
    test = np.arange(len(kept[0]), len(target))
    return Rows(columns, Column("labels", target), classes, numbers, train, test, seed=seed)


def _one_label(labels: Any) -> Any:
    """Give one number a sample, NaN where it has none."""
    values = labels.astype(float)
    if labels.dtype.kind != "f":
        values[labels == IGNORED] = np.nan
    if values.ndim == 1:
        return values
    flat = values.reshape(len(values), -1)
    known = ~np.isnan(flat)
    total = np.where(known, flat, 0.0).sum(axis=1)
    return np.where(known.any(axis=1), total / np.maximum(known.sum(axis=1), 1), np.nan)
