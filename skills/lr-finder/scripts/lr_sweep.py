"""Sweeps of the learning rate: take steps at a given rate, smooth, stop, read off suggestions."""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kit.errors import UsageError
from kit.target import Target

SMOOTHING = 0.9
SETTLED = 0.1
"""Share of the points before which a sweep is not stopped: the first losses are few."""
EDGE = 5
"""First points, at which a slope is an artefact of smoothing."""
QUIET = 20
"""Losses in a row that must have fallen for a sweep of SGD to count as free of noise."""
RISE = 1e-4
"""Relative rise of such a loss that rounding does not explain."""
SOLVED = 1e-12
"""Share of the first loss below which the gradient tells more than a loss near its underflow."""
BEGUN, DONE = 0.25, 0.95
"""Shares of the whole fall between which the valley lies. The first quarter of it is what any small
rate learns, such as how often each token occurs; the end is noise, or a solved task."""


@dataclass
class Sweep:
    """Losses of one seed at rising rates; losses[i] is from before the step at rates[i]."""

    seed: int
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    stopped: str = "end"
    """end, rise or non-finite."""
    stopped_at: float | None = None
    """Rate of the step that ended the sweep."""
    diverges_at: float | None = None
    """Where the loss began to rise for good: of losses without noise the first rate whose step
    raised it, else the rate of the lowest smoothed loss; None where it did not rise."""
    fall: tuple[int, int] | None = None
    """Indices between which the smoothed loss falls from BEGUN to DONE of its whole way."""
    valley: float | None = None
    """The rate in the middle of the fall."""
    steepest: float | None = None


class Stepper:
    """Takes optimizer steps of a target at a given learning rate, warm-up and schedule off.

    The rate is that of the group with the largest one; other groups keep their share of it.
    """

    def __init__(self, target: Target, *, skip: int = 0) -> None:
        self.target = target
        self.shares: list[float] = []
        self.gradient: float | None = None
        """Squared norm of the last gradient, where it could be read."""
        if target.runtime is None:
            self.shares = group_shares(target.optimizer)
        self._batches = self._endless(skip)

    def _endless(self, skip: int) -> Iterator[Any]:
        taken = 0
        while True:
            for batch in self.target.batches:
                taken += 1
                if taken > skip:
                    yield batch

    def step(self, rate: float) -> float:
        """Take one step; return the loss from before it, NaN where it was not finite."""
        if self.target.runtime is not None:
            return self._project_step(rate)
        target, optimizer = self.target, self.target.optimizer
        for group, share in zip(optimizer.param_groups, self.shares, strict=True):
            set_rate(group, rate * share)
        batch = next(self._batches)
        if target.train_step is not None:
            with torch.no_grad():
                loss = float(target.loss_fn(target.model, batch))
            target.train_step(target.model, batch, optimizer)
            return loss
        optimizer.zero_grad(set_to_none=True)
        found = target.loss_fn(target.model, batch)
        loss = float(found.detach())
        if math.isfinite(loss):
            found.backward()
            self.gradient = squared_gradient(optimizer)
            optimizer.step()
        return loss

    def _project_step(self, rate: float) -> float:
        from curry_train.step import train_step

        runtime = self.target.runtime
        optim = dataclasses.replace(
            runtime.config.optim, lr=rate, warmup_steps=0, schedule="constant"
        )
        runtime.config = dataclasses.replace(runtime.config, optim=optim)
        out = train_step(runtime)
        return out.loss if out.finite or out.rescaled else math.nan


def squared_gradient(optimizer: Any) -> float:
    """Return the squared norm of all gradients that an optimizer is about to use."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    dense = [g.coalesce().values() if g.layout != torch.strided else g for g in grads]
    norms = torch.ops.aten._foreach_norm.Scalar(dense, 2) if dense else []
    return float(sum(norm.double().square() for norm in norms))


@contextlib.contextmanager
def schedule_kept(target: Target) -> Iterator[None]:
    """Put back what kit.state.preserved does not know: a project's config, a scheduler."""
    runtime: Any = target.runtime
    config = None if runtime is None else runtime.config
    scheduler: Any = target.scheduler
    state = None
    if scheduler is not None and hasattr(scheduler, "state_dict"):
        state = copy.deepcopy(scheduler.state_dict())
    try:
        yield
    finally:
        if runtime is not None:
            runtime.config = config
        if scheduler is not None and state is not None:
            scheduler.load_state_dict(state)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's rate; a tensor (capturable optimizers) keeps its place."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def group_shares(optimizer: Any) -> list[float]:
    """Return every group's rate over the largest, of the schedule's peak where there is one."""
    peaks = [
        max(float(group.get(key) or 0.0) for key in ("lr", "initial_lr", "max_lr"))
        for group in optimizer.param_groups
    ]
    if not max(peaks, default=0.0) > 0:
        raise UsageError(
            "every group of the optimizer has the learning rate 0",
            "the sweep keeps the groups' rates relative to each other",
            "make the optimizer with a rate above 0",
        )
    return [peak / max(peaks) for peak in peaks]


def is_adam_like(optimizer: Any) -> bool:
    """Tell whether steps are normalised, so that a large rate does not blow the loss up at once."""
    return not isinstance(optimizer, (torch.optim.SGD, torch.optim.ASGD))


def grid(low: float, high: float, points: int) -> list[float]:
    """Return rates from low to high, each the same factor above the one before."""
    return [low * (high / low) ** (i / (points - 1)) for i in range(points)]


def sweep(
    stepper: Stepper,
    rates: Sequence[float],
    *,
    seed: int,
    factor: float,
    noiseless_stop: bool,
    progress: Callable[[], None] = lambda: None,
) -> Sweep:
    """Take one step at each rate until the smoothed loss is `factor` times its best.

    noiseless_stop: where the losses have fallen without exception, end at the first lasting rise.
    """
    run = Sweep(seed)
    average, best, quiet = 0.0, math.inf, noiseless_stop
    gradients: list[float] = []
    for index, rate in enumerate(rates):
        loss = stepper.step(rate)
        progress()
        if not math.isfinite(loss):
            run.stopped = "non-finite"
            break
        run.rates.append(rate)
        run.losses.append(loss)
        gradients.append(math.nan if stepper.gradient is None else stepper.gradient)
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        run.smoothed.append(average / (1 - SMOOTHING ** (index + 1)))
        if quiet and index and _rose(run.losses, gradients):
            quiet = False
            if index >= QUIET:
                run.stopped, run.diverges_at = "rise", run.rates[-2]
                break
        if index < SETTLED * len(rates):
            continue
        if run.smoothed[-1] > best + (factor - 1) * abs(best):
            run.stopped = "rise"
            break
        best = min(best, run.smoothed[-1])
    run.stopped_at = run.diverges_at or (run.rates[-1] if run.rates else None)
    if run.stopped != "end" and run.diverges_at is None and run.rates:
        run.diverges_at = run.rates[min(range(len(run.rates)), key=run.smoothed.__getitem__)]
    suggest(run)
    return run


def _rose(losses: Sequence[float], gradients: Sequence[float]) -> bool:
    """Tell whether the last loss is above the one before, or its gradient where both are near 0."""
    signal = losses if losses[-2] > SOLVED * abs(losses[0]) else gradients
    return signal[-1] > signal[-2] + RISE * abs(signal[-2])


def suggest(run: Sweep) -> None:
    """Read valley and steepest descent off the smoothed losses; None where they never fall."""
    start, end = longest_fall(run.smoothed)
    if end <= start:
        return
    fall = run.smoothed[start] - run.smoothed[end]
    if fall <= RISE * abs(run.smoothed[start]):
        return
    high, low = run.smoothed[start] - BEGUN * fall, run.smoothed[start] - DONE * fall
    start = max(i for i in range(start, end) if run.smoothed[i] > high)
    end = min(i for i in range(start, end + 1) if run.smoothed[i] < low)
    run.fall = start, end
    run.valley = run.rates[start + (end - start) // 2]
    slopes = {
        i: run.smoothed[i + 1] - run.smoothed[i - 1]
        for i in range(max(start, EDGE), min(end + 1, len(run.rates) - 1))
    }  # rates are evenly spaced in log
    least = min(slopes, key=slopes.__getitem__, default=None)
    run.steepest = None if least is None else run.rates[least]


def longest_fall(values: Sequence[float]) -> tuple[int, int]:
    """Return the first and last index of the longest falling subsequence (patience sorting)."""
    tops: list[float] = []  # minus the smallest end of a fall of each length
    ends: list[int] = []
    before: list[int] = []
    for index, value in enumerate(values):
        place = bisect.bisect_left(tops, -value)
        before.append(ends[place - 1] if place else -1)
        if place == len(tops):
            tops.append(-value)
            ends.append(index)
        else:
            tops[place], ends[place] = -value, index
    if not ends:
        return 0, 0
    start = end = ends[-1]
    while before[start] >= 0:
        start = before[start]
    return start, end


def geometric_median(values: Sequence[float]) -> float:
    """Return the median in logarithms."""
    logs = sorted(map(math.log, values))
    middle = len(logs) // 2
    return math.exp(logs[middle] if len(logs) % 2 else (logs[middle - 1] + logs[middle]) / 2)
