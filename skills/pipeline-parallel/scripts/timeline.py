"""The schedules as a table, and the passes of every rank over time as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.memory import show_bytes

COLOURS = {"F": "#4c9be8", "I": "#f2a541", "W": "#7cc47f", "B": "#e4572e"}
LEGEND = {"F": "forward", "I": "backward, input", "W": "backward, weights", "B": "backward, both"}


def table(choices: list[Any], best: Any) -> str:
    """Write the schedules as lines, the recommended one marked."""
    least = best.run.step if best and best.run else 1.0
    lines = ["  schedule         formula   clock    step  in flight  activations  fullest rank"]
    for choice in choices:
        mark = "*" if choice is best else " "
        if choice.run is None:
            lines.append(f"{mark} {choice.name:<16} refused: {choice.why[0]}"[:150])
            continue
        alive = f"{max(choice.live)}..{min(choice.live)}"
        kept = "unknown" if None in choice.activations else show_bytes(max(choice.activations))
        lines.append(
            f"{mark} {choice.name:<16} {choice.formula:>7.1%} {choice.run.idle:>7.1%} "
            f"{choice.run.step / least:>7.2f}  {alive:>9}  {kept:>11}  "
            f"{show_bytes(choice.memory):>12}"
        )
    return "\n".join(lines)


def draw(choice: Any, path: Path, seconds: bool) -> Path | None:
    """Draw the passes of every rank over time; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    ranks = choice.layout.dims.pp
    unit = 1.0 if seconds else choice.run.step / 100
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.45 * ranks))
    axes.set_facecolor("#eeeeee")
    for rank in range(ranks):
        rows = [row for row in choice.run.spans if row[0] == rank]
        axes.broken_barh(
            [(start / unit, (end - start) / unit) for _, _, start, end in rows],
            (rank - 0.4, 0.8),
            facecolors=[COLOURS[one.kind] for _, one, _, _ in rows],
            edgecolor="white",
            linewidth=0.4,
        )
    used = [kind for kind in COLOURS if any(one.kind == kind for _, one, _, _ in choice.run.spans)]
    handles = [patches.Patch(color=COLOURS[kind], label=LEGEND[kind]) for kind in used]
    handles.append(patches.Patch(color="#eeeeee", label=f"idle, {choice.run.idle:.1%}"))
    axes.legend(handles=handles, ncol=len(handles), loc="lower right", bbox_to_anchor=(1, 1))
    axes.set(xlabel="seconds" if seconds else "% of the step", ylabel="rank", yticks=range(ranks))
    axes.set_title(choice.name, loc="left")
    axes.set_xlim(0, choice.run.step / unit)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
