"""Head against base, step by step: what differs first, and what kind of cause fits.

The tolerance comes from the base's own repeats. Where they agree bitwise it is zero. Else it is the
prediction interval of one more base run: t * sqrt(1 + 1/k) * S(s) with the quantile t of k - 1
degrees of freedom at 99.9 %, and S(s) the largest sample deviation of any step up to s (differences
grow from step to step, and one step alone can agree by luck).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from run_folders import FinishedRun, spans

from kit.report import Report

THRESHOLDS = {
    # The tolerance above which agreement is no evidence, relative.
    "validate-loss": 0.01,
    "validate-aux-loss": 0.1,
    "validate-router-load": 0.25,
    "validate-grad-norm": 0.25,
    "validate-val-loss": 0.01,
}
KEYS = {
    "validate-loss": ("loss",),
    "validate-aux-loss": ("aux_loss", "z_loss"),
    "validate-router-load": ("moe/load_max_over_mean",),
    "validate-grad-norm": ("grad_norm",),
    "validate-lr": ("lr",),
    "validate-val-loss": ("val/loss", "val/bpb"),
}
MEASURED = tuple(id for id in KEYS if id != "validate-lr")
FLOORS = {"fp64": 1e-14, "fp32": 1e-6, "bf16": 1e-4, "fp16": 1e-4}
"""Where repeats differ at all, less than this is rounding that they happened to share."""
LOAD_FLOOR = 0.05
"""The same for loads, which move by whole tokens."""
MISS = 0.001
FIRST_STEPS = 5
DRIFT_SHARE = 0.5
SHIFTS = 10


@dataclass
class Group:
    """The runs of one seed."""

    seed: int
    base: list[FinishedRun]
    head: list[FinishedRun]


class Gap(NamedTuple):
    """A value of the head against the mean of the base, of one step."""

    step: int
    id: str
    key: str
    found: float
    wanted: float
    error: float
    """Relative; infinite where only one is finite or there."""
    allowed: float
    seed: int


@dataclass
class Comparison:
    """What was found; `first` is the earliest difference beyond its tolerance."""

    gaps: dict[str, list[Gap]] = field(default_factory=lambda: {id: [] for id in KEYS})
    bitwise: bool = True
    """Whether the base repeats itself bit for bit, in every seed."""

    def beyond(self, id: str) -> list[Gap]:
        """List the gaps of a quantity that its tolerance does not allow, in order of steps."""
        found = (gap for gap in self.gaps[id] if not gap.error <= gap.allowed)
        return sorted(found, key=lambda gap: (gap.step, gap.seed))

    def first(self) -> Gap | None:
        """Return the earliest difference; within a step what the step computes first."""
        found = [self.beyond(id)[0] for id in KEYS if self.beyond(id)]
        order = list(KEYS)
        return min(found, key=lambda gap: (gap.step, order.index(gap.id)), default=None)


def repeats_bitwise(runs: Sequence[FinishedRun]) -> bool:
    """Tell whether all runs logged the same numbers, bit for bit."""
    keys = [key for id in KEYS for key in KEYS[id]]

    def shown(run: FinishedRun) -> list[Any]:
        return [(step, [repr(row.get(k)) for k in keys]) for step, row in sorted(run.rows.items())]

    return all(shown(run) == shown(runs[0]) for run in runs[1:])


def compare(groups: Sequence[Group], given: dict[str, float], precision: str) -> Comparison:
    """Compare by step number. `given`: tolerances of the user for intended changes, by key."""
    result = Comparison(bitwise=all(repeats_bitwise(group.base) for group in groups))
    for group in (group for group in groups if group.head):
        noisy = not repeats_bitwise(group.base)
        for id, keys in KEYS.items():
            for key in keys:
                floor = LOAD_FLOOR if id == "validate-router-load" else FLOORS[precision]
                own = noise(group.base, key, floor) if noisy and id in MEASURED else {}
                least = given.get(key, given.get("", 0.0)) if id in MEASURED else 0.0
                for gap in gaps_of(group, id, key):
                    allowed = max(own.get(gap.step, 0.0), least)
                    result.gaps[id].append(gap._replace(allowed=allowed))
    return result


def noise(runs: Sequence[FinishedRun], key: str, floor: float) -> dict[int, float]:
    """Return step -> relative tolerance of one more run, from the runs' own differences."""
    from scipy import stats

    count, spread, seen = len(runs), 0.0, {}
    for step in sorted(set.intersection(*(set(run.rows) for run in runs))):
        values: list[Any] = [run.rows[step].get(key) for run in runs]
        if all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
            mean = statistics.fmean(values)
            spread = max(spread, statistics.stdev(values) / abs(mean) if mean else 0.0)
            seen[step] = spread
    early = list(seen.values())[:FIRST_STEPS]
    quantile = float(stats.t.ppf(1 - MISS / 2, count - 1)) * math.sqrt(1 + 1 / count)
    return {step: max(floor, quantile * max(value, early[-1])) for step, value in seen.items()}


def gaps_of(group: Group, id: str, key: str) -> Iterator[Gap]:
    """Yield the gap of each step that base and head both have, of the first run of the head."""
    head = group.head[0].rows
    for step in sorted(set(head) & set.intersection(*(set(run.rows) for run in group.base))):
        logged = [run.rows[step].get(key) for run in group.base]
        wanted = [value for value in logged if isinstance(value, (int, float))]
        found: Any = head[step].get(key)
        if not wanted:
            continue  # a quantity that only the head logs
        mean = statistics.fmean(wanted) if len({repr(v) for v in wanted}) > 1 else wanted[0]
        yield Gap(step, id, key, found, mean, relative(found, mean), 0.0, group.seed)


def relative(found: Any, wanted: float) -> float:
    """Return |found - wanted| / |wanted|; infinite where one of them is not finite or not there."""
    if repr(found) == repr(wanted):
        return 0.0
    if not isinstance(found, (int, float)) or not math.isfinite(found) or not wanted:
        return math.inf
    return abs(found - wanted) / abs(wanted) if math.isfinite(wanted) else math.inf


def judge(report: Report, comparison: Comparison, groups: Sequence[Group]) -> None:
    """Add one check for each quantity."""
    seeds = len(groups) > 1
    for id in KEYS:
        gaps, beyond = comparison.gaps[id], comparison.beyond(id)
        if not gaps:
            report.check(id, "skipped", message="the base logs none")
            continue
        worst = max(gaps, key=lambda gap: (gap.error, -gap.step))
        limit = THRESHOLDS.get(id, math.inf)
        blind = [gap.step for gap in gaps if gap.allowed > limit]
        if beyond:
            verdict, text = "fail", told(beyond[0], seeds)
            if worst != beyond[0]:
                text += f"; worst at step {worst.step}, {worst.error:.3g}"
        elif blind:
            verdict = "unclear"
            text = f"the base's own repeats differ too much at step {spans(sorted(set(blind)))}"
        else:
            verdict, text = "pass", "equal" if worst.error == 0 else told(worst, seeds)
        allowed = (beyond[0] if beyond else worst).allowed
        report.check(id, verdict, value=worst.error, threshold=allowed, message=text)
    judge_drift(report, comparison, groups)


def told(gap: Gap, seeds: bool) -> str:
    """Write a gap: where, and both values."""
    found = "nothing" if gap.found is None else f"{gap.found:.9g}"
    of = f" of seed {gap.seed}" if seeds else ""
    return f"{gap.key} at step {gap.step}{of}: {found}, base {gap.wanted:.9g}"


def judge_drift(report: Report, comparison: Comparison, groups: Sequence[Group]) -> None:
    """Judge the mean of log(head / base) of the gradient norm over all steps.

    Rounding moves a step's norm both ways; what moves it one way in every step is another norm,
    even where each step alone is within its tolerance.
    """
    gaps = [gap for gap in comparison.gaps["validate-grad-norm"] if drifts(gap)]
    if not gaps:
        report.check("validate-norm-drift", "skipped", message="no finite norms to compare")
        return
    mean = math.expm1(statistics.fmean(math.log(gap.found / gap.wanted) for gap in gaps))
    allowed = DRIFT_SHARE * statistics.fmean(gap.allowed for gap in gaps)
    text = f"head's norm is {1 + mean:.6g} of base's, mean of {len(gaps)} steps"
    verdict = "fail" if abs(mean) > allowed else "pass"
    report.check("validate-norm-drift", verdict, value=mean, threshold=allowed, message=text)


def drifts(gap: Gap) -> bool:
    """Tell whether both norms have a logarithm."""
    return all(isinstance(v, float) and 0 < v < math.inf for v in (gap.found, gap.wanted))


def not_finite(run: FinishedRun, precision: str) -> list[tuple[int, str]]:
    """List (step, key) of losses and norms that are NaN or infinite.

    A norm under fp16 may overflow while the loss scale is found; the step is skipped then.
    """
    keys = [key for id in MEASURED for key in KEYS[id]]
    if precision == "fp16":
        keys.remove("grad_norm")
    return [
        (step, key)
        for step, row in sorted(run.rows.items())
        for key in keys
        if isinstance(row.get(key), float) and not math.isfinite(row[key])
    ]


def shift(base: FinishedRun, head: FinishedRun) -> int:
    """Return k when each step s of the head has the base's loss of step s + k; else 0."""
    for by in sorted(range(-SHIFTS, SHIFTS + 1), key=abs):
        common = [step for step in head.rows if step + by in base.rows]
        if by and len(common) >= max(3, len(head.rows) // 2):
            pairs = [(head.rows[s].get("loss"), base.rows[s + by].get("loss")) for s in common]
            if all(found == wanted for found, wanted in pairs) and len(set(pairs)) > 1:
                return by
    return 0
