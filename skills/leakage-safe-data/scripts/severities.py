"""What each leak is judged by, how bad it is beside the others, and how findings are ranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kit.report import Report

THRESHOLDS = {
    "leak-duplicates": 0.001,  # share of held-out rows or documents; above it fails
    "leak-near-duplicates": 0.005,  # the same
    "leak-evaluation": 0.01,  # share of held-out documents that are partly in train
    "leak-packed-documents": 0,  # share of held-out documents of which train has parts
    "leak-groups": 0,  # share of held-out rows whose group is in train
    "leak-time-order": 0,  # share of train rows at or after the first test time less embargo
    "leak-single-feature": 0.95,  # AUC, |Spearman| or R2 of one column; above it fails
    "leak-adversarial": 0.6,  # AUC of telling test rows from train rows; above it fails
    "leak-target-encoding": 0.95,  # share of rows that hold their category's mean target
    "leak-fit-before-split": 0,  # share of predictions that other held-out rows change
    "leak-shuffled-labels": 0.0001,  # probability of such a score by chance; below it fails
    "leak-order": 0,  # samples that an epoch repeats or leaves out, or another order
}
SEVERITY = (
    "leak-shuffled-labels",
    "leak-single-feature",
    "leak-target-encoding",
    "leak-duplicates",
    "leak-groups",
    "leak-time-order",
    "leak-packed-documents",
    "leak-near-duplicates",
    "leak-evaluation",
    "leak-adversarial",
    "leak-order",
    "leak-fit-before-split",
)
"""Worst first, for findings without a measured inflation."""
SURE = 1e-4
"""Probability by chance below which a difference between shares or groups counts as one."""


@dataclass
class Finding:
    """One check's result, before it is ranked."""

    id: str
    verdict: str
    message: str
    value: Any = None
    unit: str | None = None
    inflation: float | None = None
    """Points (0 to 1) by which the held-out score is too good, where that can be computed."""
    fix: Mapping[str, Any] | None = None
    small: bool = False
    """Ranked below all others."""


def deliver(report: Report, findings: list[Finding]) -> None:
    """Write the findings into the report, worst first, and say how far each inflates the score."""
    for found in sorted(findings, key=_rank):
        limit = THRESHOLDS[found.id] if found.verdict in ("pass", "fail") else None
        if found.id == "leak-near-duplicates" and found.verdict == "pass" and found.value > limit:
            limit = None  # held against chance, which the message says
        report.check(
            found.id,
            found.verdict,
            value=found.value,
            threshold=limit,
            unit=found.unit,
            message=found.message,
            fix=found.fix,
        )
    known = {f.id: f.inflation for f in findings if f.inflation is not None}
    report.numbers["inflation"] = known
    failed = [f for f in sorted(findings, key=_rank) if f.verdict == "fail"]
    report.numbers["ranked"] = [f.id for f in failed]
    if len(failed) > 1:
        report.evidence.insert(0, f"worst first: {', '.join(f.id for f in failed)}")


def _rank(found: Finding) -> tuple[bool, float, int]:
    return found.small, -(found.inflation or 0.0), SEVERITY.index(found.id)


def percent(share: float) -> str:
    """Write a share for people."""
    return f"{100 * share:.3g} %"
