"""The picture: loss by step, its floor, the entropy of the labels, ln C, and the blind baseline."""

from __future__ import annotations

import math
from pathlib import Path

from one_batch_case import Case


def draw(case: Case, path: Path) -> Path | None:
    """Draw the best attempt; None where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 4.5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    best = case.best
    for attempt in case.attempts:
        if attempt is not best:
            axes.plot(*_points(attempt), color="0.75", label=f"lr {attempt.lr:.1e}")
    axes.plot(range(len(best.losses)), best.losses, color="C0", alpha=0.4, label="loss_fn")
    axes.plot(*_points(best), color="C0", label=f"known terms, lr {best.lr:.1e}")
    if case.baseline is not None:
        axes.plot(*_points(case.baseline), color="C1", label="without inputs")
    lines = {"floor": best.last.floor, "entropy of the labels": case.prior, "ln C": case.guess}
    for number, (name, value) in enumerate(lines.items(), start=2):
        if math.isfinite(value):
            axes.axhline(value, color=f"C{number}", linestyle="--", label=f"{name} {value:.4f}")
    finite = [v for v in best.losses if math.isfinite(v)]
    if finite and min(finite) > 0:
        axes.set_yscale("symlog", linthresh=0.01)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(f"one batch of {case.fixed.size} examples")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    return path


def _points(attempt: object) -> tuple[list[int], list[float]]:
    looks = [look for look in attempt.looks if math.isfinite(look.loss)]
    return [look.step for look in looks], [look.loss for look in looks]
