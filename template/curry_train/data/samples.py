"""Samples that are not text: rows, signals, pictures, and what is to be learnt of each.

Arrays are kept as they are, so that a mapped file stays on disk; what a batch draws gets the dtypes
that models expect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from curry_train.data import DataError

IGNORED = -100
CHUNK = 2**24
"""Values that are looked at or hashed at once."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples to train on and held-out ones, each a dict of arrays whose first axis is the sample.

    Keys: `labels`, integers (classes) or floats (values) of any shape, a target that is missing is
    -100 or NaN; `inputs`, numbers of any shape, or `input_ids`, integers, or both; further ones are
    for the model to know. Raises: DataError with the first thing wrong.
    """

    train: Mapping[str, np.ndarray]
    val: Mapping[str, np.ndarray]
    tokenizer = None

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise DataError(f"samples: {problem}")

    @cached_property
    def hash(self) -> str:
        """Identify all values, wherever they lie."""
        digest = hashlib.sha256()
        for split in (self.train, self.val):
            for name in sorted(split):
                array = split[name]
                digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
                for part in _chunks(array):
                    digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def count(split: Mapping[str, np.ndarray]) -> int:
    """Return the samples of a split."""
    return len(split["labels"])


def draw(split: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the samples of int64[B] rows, [B, ...] each: int64, bool or float32.

    `inputs` are always float32.
    """
    return {name: array[rows].astype(_drawn_as(name, array)) for name, array in split.items()}


def _drawn_as(name: str, array: np.ndarray) -> type:
    if array.dtype.kind == "f" or name == "inputs":
        return np.float32
    return np.bool_ if array.dtype.kind == "b" else np.int64


def _problems(samples: Samples) -> Iterator[str]:
    train, val = samples.train, samples.val
    if set(train) != set(val) or "labels" not in train or not {"inputs", "input_ids"} & set(train):
        yield (
            f"train has {sorted(train)} and val {sorted(val)}; both need the same keys, labels and"
            " inputs or input_ids"
        )
        return
    for name in train:
        for split, array in (("train", train[name]), ("val", val[name])):
            where, first = f"{split}[{name!r}]", train[name]
            known = isinstance(array, np.ndarray) and array.dtype.kind in "fiub" and array.ndim
            if not known:
                found = getattr(array, "dtype", type(array).__name__)
                yield f"{where} is {found}; give a NumPy array of numbers, first axis the sample"
            elif (array.shape[1:], array.dtype.kind) != (first.shape[1:], first.dtype.kind):
                yield (
                    f"{where} holds {array.dtype} {array.shape[1:]} and train {first.dtype}"
                    f" {first.shape[1:]}; both splits need one shape and kind"
                )
            else:
                yield from _wrong_values(name, where, array)
    for split, arrays in (("train", train), ("val", val)):
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1 or not count(arrays):
            yield f"{split} has {lengths} samples; every key needs the same number, at least 1"
        elif not any(_targets(part).any() for part in _chunks(arrays["labels"])):
            yield f"{split} has no target: all labels are -100 or NaN; give some"


def _wrong_values(name: str, where: str, array: np.ndarray) -> Iterator[str]:
    kind, start = array.dtype.kind, 0
    if (name == "labels" and kind == "b") or (name == "input_ids" and kind not in "iu"):
        yield f"{where} is {array.dtype}; classes and ids are integers, values floats"
        return
    for part in _chunks(array):
        if kind == "f":
            with np.errstate(over="ignore"):  # what is drawn is float32, with a smaller range
                wrong = ~np.isfinite(part.astype(np.float32))
            if name == "labels":
                wrong &= ~np.isnan(part)
        else:
            wrong = (part < 0) if name in ("labels", "input_ids") else np.zeros(part.shape, bool)
            if name == "labels":
                wrong &= part != IGNORED
        if wrong.any():
            at = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            missing = "; a missing label is " + ("NaN" if kind == "f" else str(IGNORED))
            yield (
                f"{where} holds {part[at]} in sample {start + at[0]}; allowed are"
                f" {'finite values of float32' if kind == 'f' else 'integers of at least 0'}"
                + (missing if name == "labels" else "")
            )
            return
        start += len(part)


def _targets(labels: np.ndarray) -> np.ndarray:
    return ~np.isnan(labels) if labels.dtype.kind == "f" else labels != IGNORED


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the array in stretches of samples, so that a mapped file never is in memory whole."""
    step = max(1, CHUNK // max(1, array[:1].size))
    return (array[start : start + step] for start in range(0, len(array), step))
