"""How layouts are shown: a table, bars of memory, the rows of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GIB = 2**30


def gib(size: float) -> str:
    """Write bytes in GiB."""
    return f"{size / GIB:.1f} GiB"


def described(one: Any) -> dict[str, Any] | None:
    """Give what the report keeps of a layout."""
    if one is None:
        return None
    return {"overrides": one.overrides(), "memory": one.memory, "bytes": one.bytes, **times(one)}


def times(one: Any) -> dict[str, Any]:
    """Give the estimated seconds, the step's under a name that says so."""
    return {"step_time": one.total, "time": one.time}


def table(shown: list[Any], present: Any, memory: float, share: float) -> str:
    """Write the candidates, the best first, the present layout last."""
    lines = [f"{'memory':>10}  {'step':>8}  {'exposed':>8}  {'bubble':>8}  layout"]
    rows = [(one, " ".join(one.overrides())) for one in shown]
    rows += [(present, "present: " + " ".join(present.overrides()))] if present else []
    for one, words in rows:
        figures = ["", "", ""]
        if one.time is not None:
            figures = [f"{one.time[key]:.3g} s" for key in ("total", "exposed", "bubble")]
        over = "!" if one.bytes > memory * GIB * share else ""
        words = words.replace("parallel.", "")
        lines.append(
            f"{over + gib(one.bytes):>10}  " + "  ".join(f"{f:>8}" for f in figures) + f"  {words}"
        )
    return "\n".join(lines)


def draw(shown: list[Any], present: Any, memory: float, path: Path) -> Path | None:
    """Draw the memory of the candidates and of the present layout; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [*shown, *([present] if present else [])][::-1]
    if not bars:
        return None
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.6 * len(bars)))
    left = [0.0] * len(bars)
    for part in bars[0].memory:
        sizes = [(one.memory[part] or 0) / GIB for one in bars]
        axes.barh(range(len(bars)), sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    names = [" ".join(one.overrides()).replace("parallel.", "") for one in bars]
    if present:
        names[0] = f"present: {names[0]}"
    axes.set_yticks(range(len(bars)), names, fontsize=6)
    axes.axvline(memory, color="black", linestyle="--", linewidth=0.8)
    axes.set(xlabel="GiB of the fullest rank", title="Memory of the layouts")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
