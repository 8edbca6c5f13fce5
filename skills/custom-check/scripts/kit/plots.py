"""Pictures of one look: Agg, a palette that colour-blind readers tell apart, labelled axes.

matplotlib is imported when a picture is made. A skill asks `available()` first, which says in one
line what is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's, darkest contrasts first."""
LINES = ("-", "--", "-.", ":", "-", "--", "-.")
"""Curves differ by their line too."""
LIMIT = {"color": "#555555", "linestyle": ":", "linewidth": 1.0}
"""How the limits of a verdict are drawn: axes.axhline(limit, **LIMIT)."""
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
}


def available() -> bool:
    """Tell whether pictures can be made; say so in one line when not."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    say(f"no picture: {sys.executable} has no matplotlib")
    return False


def figure(
    title: str, *, rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 3.6
) -> tuple[Figure, list[Axes]]:
    """Make a figure of rows x columns panels, each width x height inches; panels row by row."""
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    cycle: Any = cycler(color=list(COLOURS)) + cycler(linestyle=list(LINES))
    style: Any = {**STYLE, "axes.prop_cycle": cycle}
    with matplotlib.rc_context(style):
        made = Figure(figsize=(width * columns, height * rows), layout="constrained")
        made.suptitle(title, fontsize=11)
        panels = made.subplots(rows, columns, squeeze=False)
        return made, list(panels.flat)


def save(figure: Figure, path: Path) -> list[str]:
    """Write a PNG and return it as the list of artifacts; every panel in use has two labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for axes in figure.axes:
        used = axes.get_visible() and axes.has_data() and axes.get_label() != "<colorbar>"
        if used and not (axes.get_xlabel() and axes.get_ylabel()):
            raise ValueError(f"the panel {axes.get_title()!r} of {path.name} lacks a label")
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    return [str(path)]


def curve(axes: Any, values: Sequence[float], *, label: str = "", **style: Any) -> None:
    """Draw values against 1, 2, ...; what is not finite leaves a gap."""
    import math

    shown = [v if math.isfinite(v) else math.nan for v in values]
    axes.plot(range(1, len(shown) + 1), shown, label=label or None, **style)
