"""Records which rows of a table every fit has seen while a pipeline runs, without changing it.

Any Python method or function named fit, fit_transform, partial_fit or fit_resample counts, of a
library or of one's own. Rows are known by their values; what transform returns row by row is known
again. A pipeline of one's own can use it too:

    with recording(features, train) as recorder:
        predictions = pipeline(features, target, train, test)
    for call in recorder.calls:
        print(call.name, call.line, len(call.rows))
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from kit.fix import is_foreign_to_user

FITS = {"fit", "fit_transform", "partial_fit", "fit_resample"}
TRANSFORMS = {"transform", "fit_transform"}


@dataclass
class FitCall:
    """One call of a fit."""

    name: str
    """Class and method, or the function."""
    file: str
    line: int
    """Of the user's code that called it."""
    rows: Any
    """int64: the known rows that it was given, ascending; of equal rows the one in train."""
    with_target: bool
    """Whether a target or labels came with them."""


class Recorder:
    """Knows rows by their values and listens to fit and transform."""

    def __init__(self, features: Any, train: Any = ()) -> None:
        self.calls: list[FitCall] = []
        self._train = {int(row) for row in train}
        self._known: dict[bytes, int] = {}
        self._inputs: dict[int, list[int | None]] = {}
        self._learn(np.asarray(features), list(range(len(features))))

    def _learn(self, array: Any, origins: list[int | None]) -> None:
        for key, row in zip(_keys(array), origins, strict=True):
            if row is not None and (key not in self._known or row in self._train):
                self._known[key] = row

    def _origins(self, array: Any) -> list[int | None]:
        return [self._known.get(key) for key in _keys(array)]

    def listen(self, frame: FrameType, event: str, returned: Any) -> None:
        """Take one event of sys.setprofile."""
        name = frame.f_code.co_name
        if name not in FITS and name not in TRANSFORMS:
            return
        if event == "call":
            given = _table(frame)
            if given is None:
                return
            origins = self._origins(given)
            if name in TRANSFORMS:
                self._inputs[id(frame)] = origins
            if name in FITS:
                self._note(frame, name, origins)
        elif event == "return" and id(frame) in self._inputs:
            origins, made = self._inputs.pop(id(frame)), _array(returned)
            if made is not None and len(made) == len(origins):
                self._learn(made, origins)

    def _note(self, frame: FrameType, name: str, origins: list[int | None]) -> None:
        rows = sorted({row for row in origins if row is not None})
        caller = frame.f_back
        while caller is not None and is_foreign_to_user(caller.f_code.co_filename):
            caller = caller.f_back
        owner = frame.f_locals.get("self")
        self.calls.append(
            FitCall(
                f"{type(owner).__name__}.{name}" if owner is not None else name,
                caller.f_code.co_filename if caller else frame.f_code.co_filename,
                caller.f_lineno if caller else frame.f_lineno,
                np.array(rows, np.int64),
                any(_is_target(v, len(origins)) for v in list(frame.f_locals.values())),
            )
        )


def _array(value: Any) -> Any:
    """Return a dense array of two or more dims, of an array or a frame of pandas; else None."""
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if hasattr(value, "toarray"):
        value = value.toarray()
    return value if isinstance(value, np.ndarray) and value.ndim >= 2 else None


def _table(frame: FrameType) -> Any:
    """Return the first argument of a call that is a table."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    for name in names:
        found = _array(frame.f_locals.get(name))
        if found is not None:
            return found
    return None


def _is_target(value: Any, rows: int) -> bool:
    return hasattr(value, "ndim") and value.ndim == 1 and len(value) == rows


def _keys(array: Any) -> list[bytes]:
    flat = np.ascontiguousarray(array).reshape(len(array), -1)
    if flat.dtype == object:
        return [repr(row.tolist()).encode() for row in flat]
    return [row.tobytes() for row in flat]


@contextlib.contextmanager
def recording(features: Any, train: Any = ()) -> Iterator[Recorder]:
    """Record while the block runs; a profiler that was set before is put back."""
    recorder, before = Recorder(features, train), sys.getprofile()
    sys.setprofile(recorder.listen)
    try:
        yield recorder
    finally:
        sys.setprofile(before)
