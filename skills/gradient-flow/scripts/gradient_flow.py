#!/usr/bin/env python3
"""Measure how activations and gradients flow through a model in a few real optimizer steps.

Size of activations and gradients of every module, dead and saturated units, how far a step moves
each matrix, the trend of gradients and of the residual stream over depth, entropy and logits of
attention. A few steps are taken first, since parts that start at zero send no gradient on by
design; everything is put back afterwards. Works by hooks on a project or on any code of --target.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: gradient-flow needs skills/custom-check/scripts/kit, which is missing; "
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
from kit.target import Target  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "gradient-flow"
THRESHOLDS = {
    "vanishing-gradient": 0.2302585,  # ln(10)/10: slope of log gradient norm by block
    "exploding-gradient": 0.2302585,  # the same slope, gradients growing towards the input
    "decade": 10.0,  # change over the whole stack without which no slope is judged
    "short-stack-vanishing": 1000.0,  # the same for fewer than 10 blocks
    "short-stack-exploding": 100.0,  # and where gradients grow towards the input
    "deep-stack": 30.0,  # change over the whole stack that fails whatever the slope
    "tanh-stack": 5.0,  # the same for growth through tanh alone, which saturation holds down
    "dead-units": 0.95,  # share of a layer's units that are off on all batches; above it fails
    "saturated-units": 0.95,  # share of a tanh's or sigmoid's inputs beyond its slope
    "update-ratio-high": 0.1,  # median |dW|/|W|; above it fails when the loss rose
    "update-ratio-broken": 1.0,  # above it fails whatever the loss does
    "update-ratio-low": 0.00001,  # below it a note
    "update-ratio-still": 0.0000001,  # below it fails: less than float32 can add
    "update-lost": 0.9,  # share of 16-bit elements that a step leaves unchanged; above it fails
    "residual-growth": 3.0,  # growth of the stream over sqrt(depth); above it fails
    "attention-entropy": 0.1,  # mean entropy of a layer over ln(keys seen); below it fails
    "attention-logits": 50.0,  # largest logit; above it fails where its head's entropy collapsed
    "attention-logits-any": 1000.0,  # above it fails whatever the entropy
}
BATCHES, STEPS = 4, 10


@dataclass
class Seen:
    """What one run of the look has measured."""

    recorder: Any
    flow: Any
    cold: Any
    """Flow of one look before the first step."""
    steps: Any
    loss_before: float
    loss_after: float
    overhead: float | None
    seconds: float
    failed_at: int | None = None
    """Step after which the loss was not finite."""


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help=f"batches to look at (default {BATCHES})"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"optimizer steps before the look (default {STEPS})",
    )
    parser.add_argument(
        "--no-tensorboard", action="store_true", help="write no event files beside the picture"
    )


def check_flags(args: Any) -> None:
    """Refuse numbers that measure nothing."""
    if args.batches < 1:
        raise UsageError(f"--batches {args.batches}", "it takes at least 1")
    if args.steps < 0:
        raise UsageError(f"--steps {args.steps}", "it takes 0 or more")


def work(call: cli.Invocation) -> Report:
    """Load, look, judge, draw."""
    args = call.args
    call.expect(None, f"then {args.steps} steps and {args.batches} batches; timed by the first")
    target = call.load_target()
    report = Report(SKILL)
    seen = measure(target, batches=args.batches, steps=args.steps, call=call)
    judge(report, target, seen)
    from flow_pictures import draw, write_events

    report.artifacts += draw(seen, call.out / "gradient_flow.png", THRESHOLDS)
    if not args.no_tensorboard:
        events, said = write_events(seen, call.out / "tensorboard")
        report.artifacts += [str(events)] if events else []
        report.evidence += [said] if said else []
    return report


def judge_target(target: Target, *, batches: int = BATCHES, steps: int = STEPS) -> list[dict]:
    """Judge a target in this process, without pictures; returns the report's checks."""
    report = Report(SKILL)
    judge(report, target, measure(target, batches=batches, steps=steps))
    return report.checks


def judge(report: Report, target: Target, seen: Seen) -> None:
    """Hold what was seen against the thresholds; fills checks, numbers and summary."""
    from flow_verdicts import Judge

    Judge(report, target, seen, THRESHOLDS).all()


def measure(
    target: Target, *, batches: int, steps: int, call: cli.Invocation | None = None
) -> Seen:
    """Look once, take steps, look at `batches` batches with a step after each; put all back."""
    torch = sys.modules["torch"]
    with (
        preserved(target),
        torch.compiler.set_stance("force_eager"),  # a compiled block shows nothing of its inside
        user_code("a training step of the target"),
    ):
        return _measure(target, batches, steps, call)


def _measure(target: Target, batches: int, steps: int, call: cli.Invocation | None) -> Seen:
    from flow_look import Look
    from flow_steps import Steps

    taker = Steps(target)
    start = time.perf_counter()
    cold = Look(target)
    first = taker.batch()
    before = cold.take(first)
    failed_at = None
    if call is not None:
        each = time.perf_counter() - start
        call.expect(each * (steps + 4 * batches), f"{steps} steps and {batches} batches")
    try:
        for number in range(steps):
            if not before.trains:
                break
            taker.take()
            if call is not None:
                call.progress(number + 1, steps + batches, "steps")
        warm = Look(target, cold.stacks)
        for number in range(batches):
            batch = taker.batch()
            loss = warm.take(batch, timed=True)
            if not loss.finite and failed_at is None:
                failed_at = steps + number
            if before.trains and number + 1 < batches:
                taker.take()
            if call is not None:
                call.progress(steps + number + 1, steps + batches, "batches")
        after = warm.loss_of(first)
    finally:
        taker.restore_schedule()
    return Seen(
        recorder=warm.recorder,
        flow=warm.flow(),
        cold=cold.flow(),
        steps=taker,
        loss_before=before.value,
        loss_after=after,
        overhead=warm.overhead(taker.seconds[1:]),
        seconds=time.perf_counter() - start,
        failed_at=failed_at,
    )


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, work, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
