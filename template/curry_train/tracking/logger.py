"""Trackers mirror the metrics. A tracker that fails is dropped; the run and its files go on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Logger(Protocol):
    """What a tracker must offer. Rank 0 alone calls it."""

    def start(self, run_id: str, config: Mapping[str, Any], first_step: int) -> None:
        """Begin or continue a run; rows from first_step on replace what is already there."""
        ...

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Take one row of metrics.jsonl."""
        ...

    def text(self, tag: str, text: str, step: int) -> None:
        """Take a text, such as a sample."""
        ...

    def summary(self, values: Mapping[str, Any]) -> None:
        """Take what stands at the end of a run."""
        ...

    def finish(self, status: str) -> None:
        """Flush and close."""
        ...


class Fanout:
    """Pass every call to all trackers; `dropped` counts the calls that one did not take."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._working = list(loggers)
        self._failed = 0
        self.dropped = 0

    def call(self, method: str, *args: Any) -> None:
        """Call one method of the Logger protocol on every tracker; never raises."""
        self.dropped += self._failed
        for logger in list(self._working):
            try:
                getattr(logger, method)(*args)
            except Exception as error:
                self._working.remove(logger)
                self._failed += 1
                self.dropped += 1
                warnings.warn(
                    f"{type(logger).__name__}.{method} failed and is dropped for this run "
                    f"({type(error).__name__}: {error}); metrics.jsonl keeps every row",
                    stacklevel=2,
                )
