"""Pictures of a look: one PNG, and the same numbers as TensorBoard events."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kit import plots

MANY = 40
"""Modules of which histograms are drawn; more would not be read."""
ROOM = 28
"""Characters of a module's label."""


def draw(seen: Any, path: Path, limits: dict[str, float]) -> list[str]:
    """Draw depth profiles, update ratios, histograms, attention; returns the artifacts."""
    if not plots.available():
        return []
    figure, panels = plots.figure("Gradient flow", rows=2, columns=3, width=5.4, height=4.2)
    depth, updates, attention, activations, gradients, units = panels
    _depth(depth, seen.flow)
    _updates(updates, seen.steps.ratios, limits)
    _attention(attention, seen.flow.attention, limits)
    order = seen.recorder.order
    _histograms(activations, seen.recorder.samples, order, "activations")
    _histograms(gradients, seen.recorder.gradient_samples, order, "gradients")
    _units(units, seen.flow, limits)
    return plots.save(figure, path)


def _depth(axes: Any, flow: Any) -> None:
    axes.set(title="Over depth", xlabel="block", ylabel="norm of gradient, rms of output")
    for number, stack in enumerate(flow.stacks):
        shown = [g for g in stack.gradients if g and math.isfinite(g)]
        if len(shown) == len(stack.gradients):
            axes.plot(shown, marker="o", label=f"gradient, {stack.names[0]} ...")
        axes.plot(stack.rms, marker=".", linestyle="--", label=f"rms, stack {number}")
    if not flow.stacks:
        axes.set_xlabel("module, in the order of the calls")
        rows = [m for m in flow.modules if m["gradient_norm"]]
        axes.plot([m["gradient_norm"] for m in rows], marker="o", label="gradient by module")
        axes.plot([m["rms"] for m in rows], marker=".", linestyle="--", label="rms by module")
    axes.set_yscale("log")
    axes.locator_params(axis="x", integer=True)
    axes.legend(fontsize=7)


def _updates(axes: Any, ratios: dict[str, list[float]], limits: dict[str, float]) -> None:
    axes.set(title="Updates at the peak rate", xlabel="step", ylabel="|dW|/|W| by matrix")
    for values in list(ratios.values())[:MANY]:
        plots.curve(axes, values, linewidth=0.8, linestyle="-")
    for key in ("update-ratio-high", "update-ratio-low"):
        axes.axhline(limits[key], **plots.LIMIT)
    axes.axhline(1e-3, color=plots.COLOURS[2], linestyle="--", label="usual")
    axes.legend()
    axes.set_yscale("log")


def _attention(axes: Any, rows: list[dict[str, Any]], limits: dict[str, float]) -> None:
    axes.set(title="Entropy of attention", xlabel="layer", ylabel="of ln(keys seen)")
    axes.set_ylim(-0.02, 1.05)
    for number, row in enumerate(rows):
        shares = [h["entropy"] for h in row["heads"] if h["entropy"] is not None]
        axes.scatter([number] * len(shares), shares, s=12)
    axes.axhline(limits["attention-entropy"], **plots.LIMIT)
    axes.locator_params(axis="x", integer=True)
    if not rows:
        axes.text(0.5, 0.5, "no softmax attention", ha="center", transform=axes.transAxes)


def _histograms(axes: Any, samples: dict[str, Any], order: list[str], what: str) -> None:
    """One row a module: how often each size occurs, log10."""
    names = [name for name in order if name in samples]
    names = names[:: max(1, -(-len(names) // MANY))]
    sizes = [_log_sizes(samples[name]) for name in names]
    known = [s for s in sizes if len(s)]
    axes.set(title=f"Size of {what}", xlabel="log10 of the size", ylabel="module")
    axes.grid(False)
    if not known:
        return
    low = max(min(float(s.min()) for s in known), -20.0)
    high = max(float(s.max()) for s in known) + 1e-3
    grid = [s.float().histc(60, low, high) / max(len(s), 1) for s in sizes]
    axes.imshow(
        [row.tolist() for row in grid],
        aspect="auto",
        extent=(low, high, len(names) - 0.5, -0.5),
        cmap="magma",
        interpolation="nearest",
    )
    axes.set_yticks(range(len(names)), [_ending(name) for name in names], fontsize=5)


def _ending(name: str) -> str:
    """As many of a module's last names as there is room for."""
    while len(name) > ROOM and "." in name:
        name = name.split(".", 1)[1]
    return name


def _log_sizes(values: Any) -> Any:
    values = values.cpu().abs()
    return values[values.isfinite() & (values > 0)].log10()


def _units(axes: Any, flow: Any, limits: dict[str, float]) -> None:
    rows = [(u["name"], u["dead"] or 0.0, "dead") for u in flow.units]
    rows += [(s["name"], s["saturated"], s["kind"]) for s in flow.squashes]
    rows = rows[:MANY]
    axes.set(title="Dead and saturated", xlim=(0, 1.02), xlabel="share", ylabel="activation")
    if not rows:
        axes.text(0.5, 0.5, "no activation function seen", ha="center", transform=axes.transAxes)
        return
    axes.barh(range(len(rows)), [value for _, value, _ in rows])
    axes.set_yticks(range(len(rows)), [f"{_ending(n)} {k}" for n, _, k in rows], fontsize=5)
    axes.axvline(limits["dead-units"], **plots.LIMIT)
    axes.invert_yaxis()


def write_events(seen: Any, folder: Path) -> tuple[Path | None, str]:
    """Write scalars and histograms by module as event files; (folder, what to say if not)."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None, "tensorboard is not installed: no event files"
    with SummaryWriter(str(folder)) as writer:
        for row in seen.flow.modules:
            writer.add_scalar(f"activation_rms/{row['name']}", row["rms"], 0)
            if row["gradient_norm"] is not None:
                writer.add_scalar(f"gradient_norm/{row['name']}", row["gradient_norm"], 0)
        for name, values in seen.steps.ratios.items():
            for step, value in enumerate(values):
                writer.add_scalar(f"update_ratio/{name}", value, step)
        for what, samples in (
            ("activations", seen.recorder.samples),
            ("gradients", seen.recorder.gradient_samples),
        ):
            for name, values in samples.items():
                if values.isfinite().all() and values.numel():
                    writer.add_histogram(f"{what}/{name}", values.cpu(), 0)
    return folder, ""
