"""Interleaved pairs of two ways to do one thing, and what their times say.

Each pair runs both ways on the same input, in turn first and second, so that a busy moment of the
machine hits both. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy.stats import bootstrap

WARMUP = 4
CONFIDENCE = 0.95


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Return the CPU time that this process spends in a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure_pairs(
    ours: Callable[[Any], Any],
    theirs: Callable[[Any], Any],
    inputs: Iterable[Any],
    *,
    clock: Callable[[Callable[[], Any]], float] = cpu_seconds,
    warmup: int = WARMUP,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of ours and of theirs for each input after the first `warmup`."""
    times = []
    gc.collect()
    gc.disable()
    try:
        for turn, value in enumerate(inputs):
            if turn % 2:
                b, a = clock(lambda: theirs(value)), clock(lambda: ours(value))  # noqa: B023
            else:
                a, b = clock(lambda: ours(value)), clock(lambda: theirs(value))  # noqa: B023
            times.append((a, b))
    finally:
        gc.enable()
    found = np.array(times[warmup:])
    return found[:, 0], found[:, 1]


def ratio_interval(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Return the median of theirs / ours over the pairs with its 95 % bootstrap interval."""
    ratios = theirs / ours
    found = {"ratio": float(np.median(ratios)), "pairs": len(ratios)}
    if np.ptp(ratios) == 0:
        return {**found, "low": found["ratio"], "high": found["ratio"]}
    low, high = bootstrap(
        (ratios,), np.median, confidence_level=CONFIDENCE, method="percentile", rng=0
    ).confidence_interval
    return {**found, "low": float(low), "high": float(high)}


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of ratios; NaN of none."""
    values = list(values)
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")
