#!/usr/bin/env python3
"""Compare the loss before the first step with what a model that knows nothing must lose.

Cross entropy ln C, binary losses ln 2, regression the loss of the best constant; class weights,
label smoothing, ignored rows, padded classes and auxiliary terms are taken out first. Several seeds
are averaged where building anew is cheap. It does not see a double softmax, wrong labels or a
missing zero_grad: their first loss is the right one.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: init-loss needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.loss_terms import Term, joined, terms  # noqa: E402
from kit.observation import observe  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import user_code  # noqa: E402

from auxiliary_terms import judge_auxiliary  # noqa: E402  # isort: skip
from expected_loss import Start, start_of  # noqa: E402  # isort: skip
from model_head import trained_by  # noqa: E402  # isort: skip
from start_verdicts import judge_start  # noqa: E402  # isort: skip

SKILL = "init-loss"
THRESHOLDS = {
    "initial-loss": 0.1,  # nats below the expected loss; further below fails
    "logit-scale": 0.5,  # nats above the expected loss; above it fails
    "head-prior-bias": 0.2,  # nats that the labels' entropy lies below ln C; above it a bias helps
    "initial-aux-loss": 1.5,  # auxiliary loss over that of a balanced router; above it fails
}
BATCHES, SEEDS = 8, 3
ENOUGH_ROWS = 4096
CHEAP, SECONDS = 2.0, 6.0
"""Of processor time: below CHEAP a measurement is made again with other weights; after SECONDS no
further batch is read."""
BLIND = "not seen here: double softmax, wrong labels, missing zero_grad"


@dataclass
class Measured:
    """The loss of some batches under one seed."""

    starts: list[Start] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """What loss_fn returned for each batch."""
    rest: float = 0.0
    """What the known terms do not explain of the mean loss."""
    unknown: list[str] = field(default_factory=list)
    """Loss functions that have no closed form of their start."""
    calls: int = 1
    """How often the main term's line ran for each batch."""
    rows_given: int = 0
    """Labels of the main term before ignored ones were left out."""
    batch: Any = None


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help=f"at most so many (default {BATCHES})"
    )
    parser.add_argument(
        "--seeds", type=int, help=f"weights drawn anew (default {SEEDS}, 1 where that is dear)"
    )
    parser.add_argument(
        "--trained", action="store_true", help="the weights are trained already: a low loss is fine"
    )


def check_flags(args: Any) -> None:
    """Refuse numbers that measure nothing."""
    for name in ("batches", "seeds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}", "it takes at least 1")


def work(call: cli.Invocation) -> Report:
    """Load, measure, judge."""
    args = call.args
    call.expect(
        None, f"then up to {args.batches} batches and {args.seeds or SEEDS} seeds, under 15 s"
    )
    target = call.load_target()
    return examine(target, batches=args.batches, seeds=args.seeds, trained=args.trained)


def judge_target(
    target: Target, *, batches: int = BATCHES, seeds: int | None = None, trained: bool = False
) -> list[dict[str, Any]]:
    """Return the checks as a list of {id, verdict, value, threshold, unit, message, fix}.

    The target is put back. `seeds` above 1 needs target.rebuild; None is 3, or 1 where measuring
    takes long. `trained` says that the weights are no fresh ones.
    """
    return examine(target, batches=batches, seeds=seeds, trained=trained).checks


def examine(
    target: Target, *, batches: int = BATCHES, seeds: int | None = None, trained: bool = False
) -> Report:
    """Measure the start of a target under some seeds and judge it."""
    began, report = time.process_time(), Report(SKILL)
    report.evidence.append(BLIND)
    reason = "--trained" if trained else trained_by(target)
    first = measure(target, batches)
    if seeds is None:
        seeds = SEEDS if time.process_time() - began < CHEAP else 1
    bad = next((value for value in first.losses if not math.isfinite(value)), None)
    if bad is not None:
        report.check("initial-loss", "fail", value=bad, message="the first loss is not finite")
        report.summary = f"the loss is {bad} before any step"
        return report
    if not first.starts:
        _nothing_known(report, first)
        return report
    runs = [first, *(again(target, batches, seeds, first) if reason is None else [])]
    numbers: dict[str, Any] = {"seeds": len(runs), "batches": len(first.losses), "trained": reason}
    numbers["returned_loss"] = _mean([value for run in runs for value in run.losses])
    numbers["terms"] = judge_start(report, target, runs, reason, THRESHOLDS)
    numbers["other_terms"] = first.rest
    numbers["auxiliary"] = judge_auxiliary(report, target, first, THRESHOLDS["initial-aux-loss"])
    report.numbers = numbers
    main, seeds_used = numbers["terms"][0], f"{len(runs)} seed{'s' * (len(runs) > 1)}"
    report.summary = (
        f"{main['loss']:.4f} at the start, {main['expected']:.4f} expected "
        f"({main['expectation']}), {seeds_used}, {main['targets']} targets"
    )
    if any(s.term.origin == "softmax" and s.term.function == "cross_entropy" for s in first.starts):
        report.next.append("cross_entropy gets probabilities: overfit-one-batch shows their floor")
    return report


def _nothing_known(report: Report, first: Measured) -> None:
    named = ", ".join(sorted(set(first.unknown)))
    made = f"it is made by {named}" if named else "no known loss function was called in loss_fn"
    report.summary = f"{first.losses[0]:.4f} at the start, no closed form to compare it with"
    report.check(
        "initial-loss",
        "skipped",
        value=first.losses[0],
        message=f"{made}; cross entropy, binary losses and regression have a known start",
    )
    report.numbers = {"returned_loss": _mean(first.losses), "seeds": 1}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def measure(target: Target, count: int) -> Measured:
    """Observe the loss of at most `count` batches in training mode; everything is put back."""
    found, parts, began = Measured(), {}, time.process_time()
    with preserved(target), user_code("a forward pass of the target"):
        target.model.train()
        for number, batch in enumerate(itertools.islice(iter(target.batches), count)):
            seen = observe(target, batch)
            found.losses.append(float(seen.loss.detach()))
            known = terms(seen)
            for term in known:
                key = (term.where, term.function, term.classes)
                parts.setdefault(key, []).append(term)
            found.unknown += [call.function for call in seen.calls if call.kind == "other"]
            main = seen.main
            if number == 0 and main is not None:
                found.batch = batch
                found.calls = sum(call.where == main.where for call in seen.calls)
                found.rows_given = sum(
                    call.raw_labels.numel() for call in seen.calls if call.where == main.where
                )
            rows = max((sum(map(_rows, kept)) for kept in parts.values()), default=0)
            if rows >= ENOUGH_ROWS or time.process_time() - began > SECONDS:
                break
    if not found.losses:
        raise UsageError("batches gave no batch", "there must be at least one")
    batches_seen = len(found.losses)
    whole = [joined(kept) for kept in parts.values()]
    for term in whole:
        term.share /= batches_seen
        term.weights = term.weights / batches_seen
    found.rest = _mean(found.losses) - sum(term.share for term in whole)
    whole.sort(key=lambda term: -abs(term.share))
    least = 0.02 * abs(whole[0].share) if whole else 0.0
    found.starts = [start_of(term) for term in whole if abs(term.share) > least or term is whole[0]]
    return found


def _rows(term: Term) -> int:
    return len(term.rows)


def again(target: Target, count: int, seeds: int, first: Measured) -> list[Measured]:
    """Measure other weights; a target that gives the same ones again ends it."""
    found: list[Measured] = []
    for number in range(1, seeds):
        if target.build is None:
            break
        with preserved(target):
            other = target.rebuild(1000 + number)
        run = measure(other, count)
        same = run.losses == first.losses
        if same or len(run.starts) != len(first.starts) or not all(map(math.isfinite, run.losses)):
            break
        found.append(run)
    return found


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, work, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
