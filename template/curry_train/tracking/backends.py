"""The trackers there are. Each imports its library when a run starts, not before."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curry_train.config import TrackingConfig
from curry_train.tracking.journal import plain
from curry_train.tracking.logger import Logger

_NOT_CURVES = ("step", "attempt", "time")


def build_loggers(tracking: TrackingConfig, folder: Path) -> list[Logger]:
    """Return the trackers that the configuration asks for, not yet started."""
    return [TensorBoard(folder / "tb")] if tracking.tensorboard else []


class TensorBoard:
    """Scalars under the keys of metrics.jsonl, at the times of its rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, run_id: str, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier attempt logged beyond the checkpoint.
        purge_step = first_step if first_step > 1 else None
        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)
        self.text("config", _code(config), first_step)

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        walltime = float(row.get("time", time.time()))
        for key, value in row.items():
            if key in _NOT_CURVES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            self._writer.add_scalar(key, value, step, walltime=walltime)

    def text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, text, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._writer.add_text("summary", _code(values))

    def finish(self, status: str) -> None:
        self._writer.close()


def _code(values: Mapping[str, Any]) -> str:
    """Render values as a code block, four spaces before each line, as TensorBoard reads it."""
    lines = json.dumps(plain(values), indent=2).splitlines()
    return "\n".join(f"    {line}" for line in lines)
