"""The answer of the finder: a range, whether the seeds agree, what the confirm runs say."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

from lr_sweep import SMOOTHING, geometric_median

from kit.fix import fix_in
from kit.report import Report
from kit.target import Target

FIRST = 0.1
"""Share of a sweep whose losses count as those before any learning."""
EQUAL = 0.01
"""Confirm runs whose loss is this close to the best, relative, are as good."""
VISIBLE = 0.1
"""Share of the whole fall that must not have happened in the first twentieth of the rates."""
EDGE_SHARE = 0.02
"""Share of a sweep's points at an end within which a fall is cut off."""


def judge(report: Report, target: Target, found: Any, limits: dict[str, float]) -> None:
    """Fill checks, numbers, evidence and summary."""
    report.numbers = numbers(found)
    broken = [s for s in found.sweeps if len(s.losses) < 2]
    if broken:
        report.summary = "the loss is not finite from the first steps on"
        report.check(
            "lr-range",
            "fail",
            message=f"seed {broken[0].seed}: not finite after {len(broken[0].losses)} steps at "
            "the lowest rate",
            fix=fix_in(target.loss_fn, "find what is not finite: the gradient-flow skill names it"),
        )
        return _rest_skipped(report)
    learned = [improvement(s, limits) for s in found.sweeps]
    if not all(ok for ok, _ in learned):
        some = any(ok for ok, _ in learned)
        report.summary = "not every seed learns" if some else "no learning rate lowers the loss"
        worst = min(learned, key=lambda pair: pair[1])[1]
        message = "gained at best in a sweep: this model does not learn at any rate"
        if not some and worst > VISIBLE and all(s.stopped != "end" for s in found.sweeps):
            some = True
            message = "gained before the loss rose, in too few steps to read: set --low below "
            message += f"{found.sweeps[0].rates[0]:.2g}"
            report.summary = "the sweep begins too close to where the loss rises"
        elif some:
            message = "gained at best in a sweep, too little against the noise: a larger batch"
        report.check(
            "lr-range",
            "unclear" if some else "fail",
            value=worst,
            threshold=limits["improvement"],
            unit="of the first loss",
            message=message,
            fix=None if some else fix_in(target.loss_fn, "see the overfit-one-batch skill first"),
        )
        return _rest_skipped(report)
    answer(report, target, found, limits)


def _rest_skipped(report: Report) -> None:
    for name in ("lr-spread", "lr-confirm"):
        report.check(name, "skipped", message="there is no suggestion")


def improvement(sweep: Any, limits: dict[str, float]) -> tuple[bool, float]:
    """Tell whether the loss fell by more than its noise; (it did, share of the first losses)."""
    count = max(3, round(FIRST * len(sweep.losses)))
    first = sweep.losses[:count]
    level = statistics.fmean(first)
    # Of the level, and of one smoothed loss: (1 - s) / (1 + s) of a loss's own variance.
    variance = 1 / count + (1 - SMOOTHING) / (1 + SMOOTHING)
    # From neighbours: a fall within the first losses is no noise.
    steps = [b - a for a, b in itertools.pairwise(first)]
    error = math.sqrt(statistics.fmean(step * step for step in steps) / 2 * variance)
    gain = level - min(sweep.smoothed[count // 2 :], default=level)
    share = gain / max(abs(level), 1e-30)
    enough = gain > limits["noise"] * error and share > limits["improvement"]
    return enough and sweep.valley is not None, share


def answer(report: Report, target: Target, found: Any, limits: dict[str, float]) -> None:
    """Judge range, spread and confirm runs; say what to set."""
    valleys = [s.valley for s in found.sweeps]
    steepest = [s.steepest for s in found.sweeps if s.steepest is not None]
    middles = [geometric_median(kind) for kind in (valleys, steepest) if kind]
    spread = max(valleys) / min(valleys)
    winner, good = confirmed_range(found)
    low, high = min([*middles, *good]), max([*middles, *good])
    chosen = winner if winner is not None else geometric_median(valleys)
    report.numbers |= {"low": low, "high": high, "chosen": chosen, "spread": spread}
    edge = cut_off(found)
    report.check(
        "lr-range",
        "unclear" if edge else "pass",
        value=[float(f"{low:.3g}"), float(f"{high:.3g}")],
        message=edge
        or f"valley {geometric_median(valleys):.2g}"
        + (f", steepest {geometric_median(steepest):.2g}" if steepest else "")
        + f", medians of {len(found.sweeps)} seeds",
    )
    report.check(
        "lr-spread",
        "unclear" if spread > limits["lr-spread"] else "pass",
        value=spread,
        threshold=limits["lr-spread"],
        unit="x between seeds",
        message="the seeds disagree: raise --seeds or the batch"
        if spread > limits["lr-spread"]
        else f"valleys {min(valleys):.2g} to {max(valleys):.2g}",
    )
    confirm(report, found, winner)
    say(report, target, found, low, high, chosen)


def cut_off(found: Any) -> str:
    """Say which end of the sweep cuts the fall off in most seeds, if one does."""
    pairs = [(s, max(1, round(EDGE_SHARE * len(s.rates)))) for s in found.sweeps]
    late = [s for s, n in pairs if s.stopped == "end" and s.fall[1] >= len(s.rates) - 1 - n]
    early = [s for s, _ in pairs if falls_at_once(s)]
    if 2 * len(late) > len(pairs):
        return f"the loss still falls at {late[0].rates[-1]:.2g}: set --high above it"
    if 2 * len(early) > len(pairs):
        return f"the loss falls from {early[0].rates[0]:.2g} on: set --low below it"
    return ""


def falls_at_once(sweep: Any) -> bool:
    """Tell whether the loss falls visibly between the first twentieth of the rates and the next."""
    count = max(5, len(sweep.losses) // 20)
    first, second = sweep.losses[:count], sweep.losses[count : 2 * count]
    if len(second) < count:
        return False
    drop = statistics.fmean(first) - statistics.fmean(second)
    error = math.hypot(statistics.stdev(first), statistics.stdev(second)) / math.sqrt(count)
    whole = sweep.smoothed[0] - min(sweep.smoothed)
    return drop > VISIBLE * whole and (drop > 3 * error or min(first) > max(second))


def confirmed_range(found: Any) -> tuple[float | None, list[float]]:
    """Return the best rate of the confirm runs and all that are as good within the noise."""
    runs = [run for run in found.confirmed if all(map(math.isfinite, run.ends))]
    if not runs:
        return None, []
    best = min(runs, key=lambda run: statistics.fmean(run.ends))
    good = []
    for run in runs:
        pairs = [a - b for a, b in zip(run.ends, best.ends, strict=True)]
        noise = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
        allowed = max(2 * noise, EQUAL * abs(statistics.fmean(best.ends)))
        if statistics.fmean(pairs) <= allowed:
            good.append(run.rate)
    return best.rate, good


def confirm(report: Report, found: Any, winner: float | None) -> None:
    """Judge the short runs."""
    if not found.confirmed:
        report.check("lr-confirm", "skipped", message="no confirm runs were asked for")
        return
    told = ", ".join(f"{r.rate:.2g}: {statistics.fmean(r.ends):.4g}" for r in found.confirmed)
    firsts = [run[0] for confirmed in found.confirmed for run in confirmed.losses if run]
    first = statistics.fmean([f for f in firsts if math.isfinite(f)] or [math.nan])
    best = min(statistics.fmean(r.ends) for r in found.confirmed)
    fail = winner is None or not best < first
    message = f"{found.confirm_steps} steps each from {first:.4g}; {told}"
    if not fail and winner == max(r.rate for r in found.confirmed):
        message += "; the largest won: the best may lie above"
    report.check(
        "lr-confirm",
        "fail" if fail else "pass",
        value=winner,
        message=message,
    )


def say(report: Report, target: Target, found: Any, low: float, high: float, chosen: float) -> None:
    """Give the range in a sentence, what to set, and what moves it."""
    report.summary = f"train at {low:.2g} to {high:.2g}, {chosen:.2g} first"
    if found.configured is not None:
        inside = "inside" if low <= found.configured <= high else "outside"
        report.summary += f"; configured is {found.configured:.2g}, {inside}"
    if target.runtime is not None:
        report.next.append(f"--set optim.lr={chosen:.2g}")
    else:
        report.next.append(f"lr={chosen:.2g} for the group with the largest rate, others in scale")
    diverging = [s.diverges_at for s in found.sweeps if s.diverges_at is not None]
    where = f"the loss rises from {min(diverging):.3g} on" if diverging else "no rate diverged"
    report.evidence.append(where + "; ".join(["", *_same(found)]))
    report.evidence.append("a larger batch moves the best rate up, a longer run down")


def _same(found: Any) -> list[str]:
    return ["seeds share their weights, only the data moves"] if found.same_weights else []


def numbers(found: Any) -> dict[str, Any]:
    """Everything that was measured, for report.json."""
    return {
        "sweeps": [
            {
                "seed": s.seed,
                "valley": s.valley,
                "steepest": s.steepest,
                "stopped": s.stopped,
                "stopped_at": s.stopped_at,
                "diverges_at": s.diverges_at,
                "rates": s.rates,
                "losses": s.losses,
                "smoothed": s.smoothed,
            }
            for s in found.sweeps
        ],
        "confirmed": [
            {"rate": r.rate, "ends": r.ends, "losses": r.losses} for r in found.confirmed
        ],
        "confirm_steps": found.confirm_steps,
        "configured": found.configured,
        "seconds": found.seconds,
    }
