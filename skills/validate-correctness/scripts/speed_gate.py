"""The performance gate: step time, tokens a second and peak memory of head over base.

A median of each side over the steps after warm-up, with a bootstrap interval for their ratio. Runs
of one state differ more than their steps do, so the interval is widened by what the base's own runs
differ by.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from run_folders import FinishedRun
from step_comparison import Group

from kit.report import Report

THRESHOLDS = {
    "validate-step-time": 1.05,  # head over base
    "validate-tokens-per-s": 1.05,  # base over head
    "validate-peak-memory": 1.05,  # head over base
}
WARMUP, LEAST_STEPS = 3, 5
RESAMPLES = 2000
APART_SECONDS = 3600.0
"""Runs further apart than this met another machine."""
IDS = tuple(THRESHOLDS)
KEYS = dict(zip(IDS, ("step_time", "tokens_per_s", "memory_bytes"), strict=True))


def judge_speed(report: Report, groups: Sequence[Group], slowdown: float, memory: float) -> str:
    """Add the three checks; return the gate's own verdict."""
    base, head = ([r for g in groups for r in getattr(g, side)] for side in ("base", "head"))
    lost = {id: key for id, key in KEYS.items() if not_logged(base, head, key)}
    problem = "" if lost else incomparable([*base, *head])
    if lost or problem:
        for id in IDS:
            told = f"the head does not log {lost[id]}" if id in lost else problem or "not judged"
            report.check(id, "fail" if id in lost else "unclear", message=told)
        return "fail" if lost else "unclear"
    gates = {
        "validate-step-time": ("step_time", slowdown, False),
        "validate-tokens-per-s": ("tokens_per_s", slowdown, True),
    }
    verdicts = []
    for id, (key, limit, upside_down) in gates.items():
        samples = [[steps_of(run, key) for run in runs] for runs in (base, head)]
        if upside_down:
            samples = [[[1 / value for value in run] for run in runs] for runs in samples]
        verdicts.append(judge_ratio(report, id, samples[0], samples[1], limit))
        report.numbers[id.removeprefix("validate-")] = numbers_of(base, head, key)
    if all(logs(run, "memory_bytes") for run in base):
        peaks = [[[peak(run)] for run in runs] for runs in (base, head)]
        verdicts.append(judge_ratio(report, "validate-peak-memory", peaks[0], peaks[1], memory))
    else:
        report.check("validate-peak-memory", "skipped", message="the base logs none")
    return next((v for v in ("fail", "unclear") if v in verdicts), "pass")


def not_logged(base: Sequence[FinishedRun], head: Sequence[FinishedRun], key: str) -> bool:
    """Tell whether some base logs a quantity that some run of the head, with rows, never does."""
    return any(logs(run, key) for run in base) and any(
        run.rows and not logs(run, key) for run in head
    )


def logs(run: FinishedRun, key: str) -> bool:
    """Tell whether a run has a number for a quantity in any step."""
    return any(isinstance(row.get(key), (int, float)) for row in run.rows.values())


def looks_slower(base: Sequence[FinishedRun], head: FinishedRun, limit: float) -> bool:
    """Tell whether the head's median step takes more than `limit` times the base's."""
    times = [[t for run in runs for t in steps_of(run, "step_time")] for runs in (base, [head])]
    before, now = (statistics.median(found) if found else 0.0 for found in times)
    return now > limit * before > 0


def incomparable(runs: Sequence[FinishedRun]) -> str:
    """Say why these runs have no step times to compare; empty when they have."""
    from itertools import pairwise

    if any(run.crash() for run in runs):
        return "a run did not end well"
    if any(len(steps_of(run, "step_time")) < LEAST_STEPS for run in runs):
        return f"fewer than {WARMUP} + {LEAST_STEPS} steps; raise --steps"
    order = sorted(runs, key=lambda run: run.started)
    waits = [later.started - run.ended for run, later in pairwise(order)]
    if max(waits, default=0.0) > APART_SECONDS:
        return f"runs lie {max(waits) / 3600:.1f} h apart; set --fresh"
    return ""


def steps_of(run: FinishedRun, key: str) -> list[float]:
    """List a positive quantity of the steps after warm-up."""
    values = [row.get(key) for step, row in sorted(run.rows.items()) if step > WARMUP]
    return [value for value in values if isinstance(value, (int, float)) and value > 0]


def peak(run: FinishedRun) -> float:
    """Return the highest memory_bytes; 1 where all are 0, so that ratios are 1."""
    return max((row.get("memory_bytes") or 0 for row in run.rows.values()), default=0) or 1.0


def numbers_of(
    base: Sequence[FinishedRun], head: Sequence[FinishedRun], key: str
) -> dict[str, Any]:
    """Give the median of every run."""
    return {
        side: [statistics.median(steps_of(run, key)) for run in runs]
        for side, runs in (("base", base), ("head", head))
    }


def judge_ratio(
    report: Report, id: str, base: list[list[float]], head: list[list[float]], limit: float
) -> str:
    """Judge head over base: fail above the limit, unclear where the interval reaches over it."""
    pooled = [[value for run in runs for value in run] for runs in (base, head)]
    ratio = statistics.median(pooled[1]) / statistics.median(pooled[0])
    medians = [statistics.median(run) for run in base]
    between = max(medians) / min(medians)
    low, high = interval(pooled[0], pooled[1])
    low, high = low / between, high * between
    verdict = "fail" if low > limit else "pass" if high <= limit else "unclear"
    text = f"95 % [{low:.3f}, {high:.3f}], base's own runs differ by {between:.3f}"
    report.check(id, verdict, value=ratio, threshold=limit, unit="x", message=text)
    return verdict


def interval(base: Sequence[float], head: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of median(head) / median(base).

    A state with one number has no interval of its own; the base's runs then say what differs.
    """
    import numpy
    from scipy import stats

    if min(len(base), len(head)) < LEAST_STEPS or len({*base, *head}) == 1:
        ratio = statistics.median(head) / statistics.median(base)
        return ratio, ratio

    def of_medians(head: Any, base: Any, axis: int) -> Any:
        return numpy.median(head, axis) / numpy.median(base, axis)

    options: dict[str, Any] = {"n_resamples": RESAMPLES, "method": "percentile", "random_state": 0}
    found = stats.bootstrap(
        (head, base), of_medians, vectorized=True, **options
    ).confidence_interval
    return float(found.low), float(found.high)
