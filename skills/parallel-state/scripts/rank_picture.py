"""A picture of the rank grid: for every kind of group, which ranks are in one group."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def shared_groups(dims: Any) -> dict[str, list[list[int]]]:
    """Return name -> groups of every kind that has more than one rank in a group."""
    from curry_train.parallel.dims import PURPOSE

    groups = {name: dims.groups(name) for name in PURPOSE}
    return {name: found for name, found in groups.items() if len(found[0]) > 1}


def places(dims: Any) -> list[str]:
    """Return for each rank where it stands on the axes that have more than one place."""
    names = []
    for rank in range(dims.world):
        at = []
        for axis, size in dims.dense.items():
            if size > 1:
                group = next(g for g in dims.groups(axis) if rank in g)
                at.append(f"{axis} {group.index(rank)}")
        names.append("\n".join([f"rank {rank}", *at]))
    return names


def draw(dims: Any, path: Path) -> Path | None:
    """Draw one row for every kind of group; equal numbers talk to each other. None without
    matplotlib, or without groups."""
    try:
        import matplotlib
    except ImportError:
        return None
    groups = shared_groups(dims)
    if not groups:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = [
        [next(i for i, group in enumerate(found) if rank in group) for rank in range(dims.world)]
        for found in groups.values()
    ]
    shades = [[n % 10 for n in row] for row in table]
    size = (min(2.2 + 0.62 * dims.world, 24), 1.6 + 0.36 * len(groups))
    figure, axes = pyplot.subplots(figsize=size)
    axes.imshow(shades, aspect="auto", cmap="tab10", vmin=0, vmax=9, alpha=0.55)
    for row, numbers in enumerate(table):
        for rank, number in enumerate(numbers):
            axes.text(rank, row, str(number), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_xticks(range(dims.world), places(dims), fontsize=6)
    axes.set_title("Ranks with the same number in a row are one group", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
