"""The picture: loss by step, its floor, the entropy of the labels, ln C, and the blind baseline."""

from __future__ import annotations

import math
from pathlib import Path

from one_batch_case import Case
from one_batch_training import Attempt

from kit import plots


def draw(case: Case, path: Path) -> list[str]:
    """Draw the best attempt and return the picture as a list; empty where matplotlib is missing."""
    if not plots.available():
        return []
    figure, (axes,) = plots.figure(f"one batch of {case.fixed.size} examples", width=8, height=4.5)
    best = case.best
    for attempt in case.attempts:
        if attempt is not best:
            axes.plot(*_points(attempt), color="0.75", label=f"lr {attempt.lr:.1e}")
    blue, orange, *others = plots.COLOURS
    axes.plot(range(len(best.losses)), best.losses, color=blue, alpha=0.4, label="loss_fn")
    axes.plot(*_points(best), color=blue, linestyle="-", label=f"known terms, lr {best.lr:.1e}")
    if case.baseline is not None:
        axes.plot(*_points(case.baseline), color=orange, label="without inputs")
    lines = {"floor": best.last.floor, "constant scores": case.prior, "guessing": case.guess}
    for colour, (name, value) in zip(others, lines.items(), strict=False):
        if math.isfinite(value):
            axes.axhline(value, color=colour, linestyle=":", label=f"{name} {value:.4f}")
    finite = [value for value in best.losses if math.isfinite(value)]
    if finite and min(finite) > 0:
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_ylim(bottom=-0.002)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    return plots.save(figure, path)


def _points(attempt: Attempt) -> tuple[list[int], list[float]]:
    looks = [look for look in attempt.looks if math.isfinite(look.loss)]
    return [look.step for look in looks], [look.loss for look in looks]
