"""A look: forward and backward of a batch with hooks, beside a plain one for the time."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple

import torch
from flow_numbers import Flow, fetch, gather, parameter_norms, stacks_of
from flow_recorder import Recorder, find_stacks, in_sequence
from kit.target import Target

FP16_SCALE = 1024.0
"""Keeps the gradients of a mean loss above the underflow of fp16."""


class Loss(NamedTuple):
    """Of one look."""

    value: float
    trains: bool
    """Whether any parameter is reached by its gradient."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value)


class Look:
    """Looks at batches of one target; `flow()` gives the numbers of all of them."""

    def __init__(self, target: Target, stacks: list[list[str]] | None = None) -> None:
        self.target = target
        self._find = stacks is None
        self.stacks = find_stacks(target.model) if stacks is None else stacks
        self.recorder = Recorder(target.model, {name for names in self.stacks for name in names})
        self.parameters: dict[str, dict[str, list[torch.Tensor]]] = {}
        self.losses: list[float] = []
        self.times: list[tuple[float, float]] = []
        """(plain, hooked) seconds of a forward and backward pass."""
        half = any(p.dtype == torch.float16 for p in target.model.parameters())
        runtime = target.runtime
        half = half or (runtime is not None and runtime.config.precision == "fp16")
        self.scale = FP16_SCALE if half else 1.0

    def take(self, batch: Any, *, timed: bool = False) -> Loss:
        """Look at one batch; with `timed` the same pass runs without hooks before it."""
        plain = self._timed(self._plain, batch) if timed else 0.0
        start = self._now()
        loss = self._hooked(batch)
        if timed:
            self.times.append((plain, self._now() - start))
        self.target.model.zero_grad(set_to_none=True)
        self.losses.append(loss.value)
        return loss

    def _hooked(self, batch: Any) -> Loss:
        target, recorder = self.target, self.recorder
        target.model.zero_grad(set_to_none=True)
        with recorder.look(keep_streams=self._find):
            loss = target.loss_fn(target.model, batch)
            recorder.forward_done()
            if self._find:
                kept = [in_sequence(names, recorder.stream_tensors or {}) for names in self.stacks]
                self.stacks = [names for names in kept if len(names) >= 2]
                recorder.stream_tensors, self._find = None, False
            if loss.requires_grad:
                (loss * self.scale).backward()
        for name, weight, gradient in parameter_norms(target.model):
            row = self.parameters.setdefault(name, {"weight": [], "gradient": []})
            row["weight"].append(weight)
            row["gradient"] += [] if gradient is None else [gradient]
        return Loss(float(loss.detach()), bool(loss.requires_grad))

    def _plain(self, batch: Any) -> None:
        self.target.model.zero_grad(set_to_none=True)
        loss = self.target.loss_fn(self.target.model, batch)
        if loss.requires_grad:
            (loss * self.scale).backward()

    def _timed(self, run: Any, batch: Any) -> float:
        start = self._now()
        run(batch)
        return self._now() - start

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def loss_of(self, batch: Any) -> float:
        """Return the loss of a batch, in training mode as in the looks."""
        with torch.no_grad():
            return float(self.target.loss_fn(self.target.model, batch))

    def overhead(self) -> float | None:
        """Return the time of a pass with hooks over that of a plain one, medians."""
        if not self.times:
            return None
        plain, hooked = zip(*self.times, strict=True)
        return statistics.median(hooked) / max(statistics.median(plain), 1e-9)

    def flow(self) -> Flow:
        """Return all numbers; gradients are those of the mean loss."""
        rows = []
        for name, found in self.parameters.items():
            weights, gradients = fetch(found["weight"]), fetch(found["gradient"])
            gradients = [g / self.scale for g in gradients]
            weight = weights[-1]
            mean = statistics.fmean(gradients) if gradients else None
            rows.append(
                {
                    "name": name,
                    "weight_norm": weight,
                    "gradient_norm": mean,
                    "gradient_over_weight": mean / weight if mean is not None and weight else None,
                    "largest_gradient": max(gradients, default=None, key=_nan_first),
                }
            )
        flow = gather(self.recorder, self.target.model, rows)
        flow.losses = self.losses
        for row in flow.modules:
            if row["gradient_norm"] is not None:
                row["gradient_norm"] /= self.scale
        if flow.bad_gradient is None:
            bad = (
                r["name"]
                for r in rows
                if r["largest_gradient"] is not None and not math.isfinite(r["largest_gradient"])
            )
            flow.bad_gradient = next(bad, None)
        flow.stacks = stacks_of(self.recorder, flow, self.stacks)
        return flow


def _nan_first(value: float) -> tuple[bool, float]:
    return (math.isnan(value), value)
