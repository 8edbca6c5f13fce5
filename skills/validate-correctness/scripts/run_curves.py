"""The picture: loss, its difference and the gradient norm of base and head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_folders import FinishedRun
from step_comparison import Comparison, Group


def draw(groups: Sequence[Group], comparison: Comparison, path: Path) -> Path | None:
    """Draw the runs of all seeds; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True)
    for side, style in (("base", "-"), ("head", "--")):
        for number, run in enumerate(run for group in groups for run in getattr(group, side)):
            looks: dict[str, Any] = {"linestyle": style, "linewidth": 1.2, "alpha": 0.8}
            looks["color"] = "tab:blue" if side == "base" else "tab:red"
            looks["label"] = side if not number else None
            axes[0].plot(*series(run, "loss"), **looks)
            axes[2].plot(*series(run, "grad_norm"), **looks)
    gaps = sorted(gap for gap in comparison.gaps["validate-loss"] if math.isfinite(gap.error))
    steps = [gap.step for gap in gaps]
    axes[1].plot(steps, [gap.error for gap in gaps], ".", color="tab:red", label="head")
    axes[1].plot(steps, [gap.allowed for gap in gaps], "k:", linewidth=1.0, label="tolerance")
    axes[1].set_yscale("symlog", linthresh=1e-9)
    axes[0].set(ylabel="loss, nats per token", title="Base and head")
    axes[1].set(ylabel="relative difference of loss")
    axes[2].set(ylabel="gradient norm", xlabel="step", yscale="log")
    axes[0].legend()
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def series(run: FinishedRun, key: str) -> tuple[list[int], list[float]]:
    """Return steps and values; what is not finite leaves a gap in the line."""
    steps = sorted(step for step, row in run.rows.items() if isinstance(row.get(key), float))
    values = [run.rows[step][key] for step in steps]
    return steps, [value if math.isfinite(value) else math.nan for value in values]
