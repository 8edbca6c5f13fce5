"""A look: forward and backward of a batch with hooks, beside a plain one for the time."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, NamedTuple

import torch
from flow_numbers import Flow, fetch, gather, parameter_gradients, stacks_of
from flow_recorder import Recorder, find_stacks, in_sequence, norms_of

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
        named = [
            (n, p) for n, p in target.model.named_parameters() if p.requires_grad and p.numel()
        ]
        self.names, self.weights = [n for n, _ in named], [p for _, p in named]
        self.gradients: list[list[torch.Tensor | None]] = []
        self.losses: list[float] = []
        self.times: list[tuple[float, float]] = []
        """(plain, hooked) seconds of a forward and backward pass."""
        half = any(p.dtype == torch.float16 for p in target.model.parameters())
        runtime = target.runtime
        half = half or (runtime is not None and runtime.config.precision == "fp16")
        self.scale = FP16_SCALE if half else 1.0

    def take(self, batch: Any, *, timed: bool = False) -> Loss:
        """Look at one batch; with `timed` the same pass runs without hooks before it."""
        plain_first = len(self.times) % 2 == 0  # whoever runs first finds the caches cold
        plain = self._plain(batch) if timed and plain_first else 0.0
        self.target.model.zero_grad(set_to_none=True)
        with self.recorder.listening():
            start = self._now()
            loss = self._hooked(batch)
            hooked = self._now() - start
        if timed:
            self.times.append((plain if plain_first else self._plain(batch), hooked))
        self.target.model.zero_grad(set_to_none=True)
        value = float(loss.detach())
        self.losses.append(value)
        return Loss(value, bool(loss.requires_grad))

    def _hooked(self, batch: Any) -> torch.Tensor:
        target, recorder = self.target, self.recorder
        with recorder.look(keep_streams=self._find):
            loss = target.loss_fn(target.model, batch)
            recorder.active = False
            if self._find:
                kept = [in_sequence(names, recorder.stream_tensors or {}) for names in self.stacks]
                self.stacks = [names for names in kept if len(names) >= 2]
                recorder.stream_tensors, self._find = None, False
            recorder.forward_done()
            if loss.requires_grad:
                (loss * self.scale).backward()
        self.gradients.append(parameter_gradients(self.weights))
        return loss

    def _plain(self, batch: Any) -> float:
        """Return the seconds of the same pass without hooks."""
        self.target.model.zero_grad(set_to_none=True)
        start = self._now()
        loss = self.target.loss_fn(self.target.model, batch)
        if loss.requires_grad:
            (loss * self.scale).backward()
        return self._now() - start

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def loss_of(self, batch: Any) -> float:
        """Return the loss of a batch, in training mode as in the looks."""
        with torch.no_grad():
            return float(self.target.loss_fn(self.target.model, batch))

    def overhead(self, step_seconds: list[float]) -> float | None:
        """Return the time of a step with hooks over that of a plain one, medians.

        step_seconds: whole optimizer steps of the target without hooks.
        """
        if not self.times:
            return None
        plain, hooked = (statistics.median(kind) for kind in zip(*self.times, strict=True))
        whole = max(statistics.median(step_seconds or [plain]), plain, 1e-9)
        return (whole + hooked - plain) / whole

    def flow(self) -> Flow:
        """Return all numbers; gradients are those of the mean loss."""
        rows = []
        sizes = fetch(norms_of([p.detach() for p in self.weights]))
        looks = zip(*self.gradients, strict=True)
        for name, weight, found in zip(self.names, sizes, looks, strict=True):
            gradients = [g / self.scale for g in fetch([g for g in found if g is not None])]
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
