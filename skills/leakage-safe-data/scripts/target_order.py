"""Judges the order of a foreign target's batches: the same seed gives the same samples."""

from __future__ import annotations

from typing import Any

from corpus_checks import hashes_of
from severities import THRESHOLDS, Finding

from kit.target import Target

BATCHES = 200


def check_target_order(target: Target, seed: int) -> tuple[Finding, int]:
    """Build the target twice from one seed and compare what its batches hold, in order."""
    first, second = (_read(target.rebuild(seed)) for _ in range(2))
    differing = sum(a != b for a, b in zip(first, second, strict=False))
    differing += abs(len(first) - len(second))
    repeats = len(first) - len(set(first))
    message = "the same seed gives the same samples in the same order"
    if differing:
        message = f"samples of {len(first)} differ between two builds from one seed"
    if repeats:
        message += f"; {repeats} of {len(first)} samples repeat an earlier one in one pass"
    fails = differing > THRESHOLDS["leak-order"]
    finding = Finding("leak-order", "fail" if fails else "pass", message, value=float(differing))
    return finding, len(first)


def _read(built: Any) -> list[bytes]:
    found: list[bytes] = []
    for number, batch in enumerate(built.batches):
        found += hashes_of(batch)
        if number + 1 >= BATCHES:
            break
    return found
