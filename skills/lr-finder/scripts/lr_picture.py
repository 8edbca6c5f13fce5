"""The picture of the finder: loss over the rate of every seed, and the confirm runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit import plots


def draw(found: Any, numbers: dict[str, Any], path: Path) -> list[str]:
    """Draw sweeps with their suggestions and the confirm runs; returns the artifacts."""
    if not plots.available() or not any(s.rates for s in found.sweeps):
        return []
    columns = 2 if found.confirmed else 1
    figure, panels = plots.figure("Learning rates", columns=columns, width=6.4, height=4.4)
    sweeps = panels[0]
    sweeps.set(xscale="log", xlabel="learning rate", ylabel="loss", title="Sweeps, smoothed")
    top = 0.0
    for number, run in enumerate(found.sweeps):
        colour = plots.COLOURS[number % len(plots.COLOURS)]
        style: dict[str, Any] = {"color": colour, "linestyle": "-"}
        sweeps.plot(run.rates, run.losses, alpha=0.2, linewidth=0.6, **style)
        sweeps.plot(run.rates, run.smoothed, label=f"seed {run.seed}", **style)
        if run.valley is not None:
            sweeps.axvline(run.valley, color=colour, linewidth=0.7, linestyle="--")
        top = max([top, *run.smoothed[: len(run.smoothed) // 2 + 1]])
    if "low" in numbers:
        sweeps.axvspan(numbers["low"], numbers["high"], alpha=0.12, label="range")
    least = min(min(run.smoothed, default=top) for run in found.sweeps)
    if top > least:
        sweeps.set_ylim(least - 0.1 * (top - least), top + 0.3 * (top - least))
    sweeps.legend()
    if found.confirmed:
        confirm = panels[1]
        confirm.set(xlabel="step", ylabel="loss, mean over seeds", title="Confirm runs")
        for run in found.confirmed:
            length = min(len(losses) for losses in run.losses)
            means = [
                sum(losses[i] for losses in run.losses) / len(run.losses) for i in range(length)
            ]
            plots.curve(confirm, means, label=f"{run.rate:.2g}")
        confirm.legend()
    return plots.save(figure, path)
