"""Trackers mirror the metrics. A tracker that fails is dropped; the run and its files go on.

A tracker is a class with the methods of TensorBoard below and one line in Trackers.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curry_train.config import TrackingConfig
from curry_train.tracking.journal import number

_NOT_CURVES = ("step", "attempt", "time")


class Trackers:
    """All trackers that the configuration asks for; `dropped` counts the calls one did not take."""

    def __init__(self, tracking: TrackingConfig, folder: Path) -> None:
        self._working = [TensorBoard(folder / "tb")] if tracking.tensorboard else []
        self._failed = 0
        self.dropped = 0

    def call(self, method: str, *args: Any) -> None:
        """Call one method of every tracker; never raises."""
        self.dropped += self._failed
        for tracker in list(self._working):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self._working.remove(tracker)
                self._failed += 1
                self.dropped += 1
                warnings.warn(
                    f"{type(tracker).__name__}.{method} failed and is dropped for this run "
                    f"({type(error).__name__}: {error}); metrics.jsonl keeps every row",
                    stacklevel=2,
                )


class TensorBoard:
    """Scalars under the keys of metrics.jsonl, at the times of its rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, config: Mapping[str, Any], first_step: int) -> None:
        """Begin or continue; rows from first_step on replace what an earlier attempt logged."""
        from torch.utils.tensorboard import SummaryWriter

        purge_step = first_step if first_step > 1 else None
        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)
        # TensorBoard reads Markdown: four spaces make a line of code.
        lines = json.dumps(config, indent=2, default=str).splitlines()
        self.text("config", "\n".join(f"    {line}" for line in lines), first_step)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Take one row of metrics.jsonl."""
        walltime = float(row.get("time", time.time()))
        for key, value in row.items():
            value = number(value)
            if isinstance(value, int | float) and key not in _NOT_CURVES:
                self._writer.add_scalar(key, value, step, walltime=walltime)

    def text(self, tag: str, text: str, step: int) -> None:
        """Take a text, such as a sample."""
        self._writer.add_text(tag, text, step)

    def finish(self) -> None:
        self._writer.close()
