#!/usr/bin/env python3
"""Find the range of learning rates in which a model trains, by sweeps over several seeds.

Each sweep raises the rate from step to step with the target's own optimizer, warm-up and schedule
off; short runs at once, twice and four times the suggestion then confirm it. Model, optimizer,
random numbers and data position are put back. Works on a project or on any code of --target.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: lr-finder needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
for folder in (str(KIT_HOME), str(Path(__file__).resolve().parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target, seed_everything  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "lr-finder"
THRESHOLDS = {
    "lr-spread": 4.0,  # largest suggestion of a seed over the smallest; above it unclear
    "rise": 2.0,  # smoothed loss over its best that ends a sweep of AdamW and its kin
    "rise-sgd": 4.0,  # the same for SGD
    "improvement": 0.01,  # share of the first loss that a sweep must gain; below it fails
    "noise": 4.0,  # the same in standard errors of the smoothed losses
}
POINTS, LEAST_POINTS, SEEDS, LEAST_SEEDS = 300, 200, 3, 3
RANGES = {"adam": (1e-6, 1.0), "sgd": (1e-4, 100.0)}
MULTIPLES = (1, 2, 4)
BUDGET_SHARE, CONFIRM_STEPS = 0.03, 30
"""Steps of a confirm run: this share of the run's length, or this many where it is unknown."""
TAIL = 0.25
"""Last share of a confirm run whose losses count."""


@dataclass
class Confirmed:
    """Short runs at one rate, one for each seed."""

    rate: float
    losses: list[list[float]] = field(default_factory=list)

    @property
    def ends(self) -> list[float]:
        """Mean loss of the last part of every run; infinite where one was not finite."""
        return [_tail(run) for run in self.losses]


@dataclass
class Found:
    """Everything that was measured."""

    sweeps: list[Any]
    confirmed: list[Confirmed]
    confirm_steps: int
    configured: float | None
    adam: bool
    seconds: float
    same_weights: bool


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--points", type=int, default=POINTS, help=f"steps of a sweep (default {POINTS})"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"sweeps (default {SEEDS})")
    parser.add_argument("--low", type=float, help="first rate (default 1e-6; SGD 1e-4)")
    parser.add_argument("--high", type=float, help="last rate (default 1; SGD 100)")
    parser.add_argument(
        "--confirm-steps",
        type=int,
        metavar="N",
        help=f"steps of a confirm run (default 3 %% of the run, or {CONFIRM_STEPS}); 0 for none",
    )


def check_flags(args: Any) -> None:
    """Refuse settings that measure noise."""
    if args.points < LEAST_POINTS:
        raise UsageError(
            f"--points {args.points}",
            f"it takes {LEAST_POINTS} or more: a short sweep suggests rates 3 to 4 times too high",
        )
    if args.seeds < LEAST_SEEDS:
        raise UsageError(f"--seeds {args.seeds}", f"it takes {LEAST_SEEDS} or more")
    if args.confirm_steps is not None and args.confirm_steps < 0:
        raise UsageError(f"--confirm-steps {args.confirm_steps}", "it takes 0 or more")
    for flag, value in (("--low", args.low), ("--high", args.high)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{flag} {value}", "it takes a rate above 0")


def work(call: cli.Invocation) -> Report:
    """Load, sweep, confirm, judge, draw."""
    args = call.args
    call.expect(None, f"then {args.seeds} sweeps of {args.points} steps; timed by the first")
    target = call.load_target()
    report = Report(SKILL)
    found = find(
        target,
        points=args.points,
        seeds=args.seeds,
        low=args.low,
        high=args.high,
        confirm_steps=args.confirm_steps,
        seed=args.seed,
        call=call,
    )
    from lr_verdicts import judge

    judge(report, target, found, THRESHOLDS)
    from lr_picture import draw

    report.artifacts += draw(found, report.numbers, call.out / "lr_finder.png")
    return report


def find(
    target: Target,
    *,
    points: int = POINTS,
    seeds: int = SEEDS,
    low: float | None = None,
    high: float | None = None,
    confirm_steps: int | None = None,
    seed: int | None = None,
    call: cli.Invocation | None = None,
) -> Found:
    """Sweep and confirm; everything is put back, whatever happens."""
    import lr_sweep

    if target.optimizer is None:
        raise UsageError(
            "the target returned no optimizer",
            "the sweep takes steps with the one that trains",
            "return (model, batches, loss_fn, optimizer)",
        )
    adam = lr_sweep.is_adam_like(target.optimizer)
    ends = RANGES["adam" if adam else "sgd"]
    low, high = ends[0] if low is None else low, ends[1] if high is None else high
    if not high > low * 10:
        raise UsageError(f"rates from {low:g} to {high:g}", "a sweep spans a factor of 10 or more")
    steps = confirm_length(target) if confirm_steps is None else confirm_steps
    first_seed = first_seed_of(target, seed)
    start = time.perf_counter()
    ticks = Ticks(seeds * (points + len(MULTIPLES) * steps), call)
    sweeps, confirmed = [], []
    with preserved(target):  # building anew draws from the generators of everybody
        rates = lr_sweep.grid(low, high, points)
        for number in range(seeds):
            with started(target, first_seed, number) as stepper:
                run = lr_sweep.sweep(
                    stepper,
                    rates,
                    seed=first_seed + number,
                    factor=THRESHOLDS["rise" if adam else "rise-sgd"],
                    noiseless_stop=not adam,
                    progress=ticks,
                )
            sweeps.append(run)
            ticks.done = (number + 1) * points
        known = [s.valley for s in sweeps if s.valley is not None]
        if steps and len(known) == len(sweeps):
            middle = lr_sweep.geometric_median(known)
            confirmed = confirm(target, middle, first_seed, seeds, steps, ticks)
    return Found(
        sweeps=sweeps,
        confirmed=confirmed,
        confirm_steps=steps,
        configured=configured_rate(target),
        adam=adam,
        seconds=time.perf_counter() - start,
        same_weights=target.build is None,
    )


def confirm(
    target: Target, rate: float, first_seed: int, seeds: int, steps: int, ticks: Ticks
) -> list[Confirmed]:
    """Train from the start at each multiple of a rate, all seeds; the same data for each rate."""
    runs = [Confirmed(rate * multiple) for multiple in MULTIPLES]
    for run in runs:
        for number in range(seeds):
            losses: list[float] = []
            with started(target, first_seed, number) as stepper:
                while len(losses) < steps and (not losses or math.isfinite(losses[-1])):
                    losses.append(stepper.step(run.rate))
                    ticks()
            run.losses.append(losses)
    return runs


@contextlib.contextmanager
def started(target: Target, first_seed: int, number: int) -> Iterator[Any]:
    """Give the Stepper of a seed at its start; what it does is put back afterwards.

    The first is the target itself, the others have new weights; without a way to build anew they
    have other random numbers and data that begin later.
    """
    import lr_sweep

    anew = number > 0 and target.build is not None
    one = target.rebuild(first_seed + number) if anew else target
    with preserved(one), lr_sweep.schedule_kept(one), user_code("a training step"):
        if number and not anew:
            seed_everything(first_seed + number)
        yield lr_sweep.Stepper(one, skip=0 if target.runtime is not None else number)


class Ticks:
    """Counts steps, says how long all will take once the first few were timed."""

    FIRST = 8

    def __init__(self, total: int, call: cli.Invocation | None) -> None:
        self.total, self.call, self.done, self.counted = total, call, 0, 0
        self.times: list[float] = []

    def __call__(self) -> None:
        self.done, self.counted = self.done + 1, self.counted + 1
        if self.call is None:
            return
        if self.counted <= self.FIRST:
            self.times.append(time.perf_counter())
        if self.counted == self.FIRST:
            # The first steps warm up; one that another program holds up says nothing of the rest.
            each = statistics.median(b - a for a, b in itertools.pairwise(self.times))
            self.call.expect(each * (self.total - self.FIRST), f"{self.total} steps at most")
        self.call.progress(min(self.done, self.total), self.total, "steps")


def first_seed_of(target: Target, asked: int | None) -> int:
    """Return the seed that the target was built with."""
    if asked is not None:
        return asked
    return 0 if target.runtime is None else target.runtime.config.seed


def confirm_length(target: Target) -> int:
    """Return a share of the run's steps, where its length is known."""
    length = target.total_steps
    if target.runtime is not None:
        length = target.runtime.config.run.max_steps
    return CONFIRM_STEPS if length is None else max(CONFIRM_STEPS, round(BUDGET_SHARE * length))


def configured_rate(target: Target) -> float | None:
    """Return the peak rate that is set now, that of the group with the largest."""
    if target.runtime is not None:
        return float(target.runtime.config.optim.lr)
    rates = [
        max(float(group.get(key) or 0.0) for key in ("lr", "initial_lr", "max_lr"))
        for group in target.optimizer.param_groups
    ]
    return max(rates, default=None)


def _tail(losses: list[float]) -> float:
    if not losses or not all(map(math.isfinite, losses)):
        return math.inf
    return statistics.fmean(losses[-max(1, round(TAIL * len(losses))) :])


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, work, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
