"""A layout cut down to the ranks that a CPU can fork; sizes are those of kit.layouts."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .layouts import small, written

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def fewer_axes(sizes: dict[str, int], most: int, keep: Sequence[str]) -> dict[str, int]:
    """Return sizes of the axes and ep that make at most `most` ranks; `keep` fall last."""
    found = {axis: sizes[axis] for axis in AXES}
    order = [axis for axis in AXES if axis not in keep]
    for axis in [*order, *(axis for axis in AXES if axis in keep)]:
        others = math.prod(found.values()) // found[axis]
        if others * found[axis] > most:
            found[axis] = max(1, most // others)
    inner = found["dp_shard"] * found["cp"] * found["tp"]
    return {**found, "ep": math.gcd(sizes["ep"], inner)}


def small_words(config: Any, axes: dict[str, int], folder: Path) -> tuple[list[str], int]:
    """Return the settings of a small model in a layout of these axes, and its ranks."""
    ranks = math.prod(axes[axis] for axis in AXES)
    split = config.parallel.pp_split
    if isinstance(split, list) and axes["pp"] != config.parallel.pp:
        split = "auto"
    parallel = replace(config.parallel, **axes, pp_split=split)
    values = small(replace(config, parallel=parallel), ranks, folder)
    values = {**{f"parallel.{axis}": size for axis, size in axes.items()}, **values}
    values.setdefault("parallel.pp_split", "auto")
    return [*written(values), f"devices={ranks}"], ranks


def import_for_ranks() -> None:
    """Import what forked ranks need once, before they are forked."""
    for name in ("tensor", "fsdp", "pipelining"):
        importlib.import_module(f"torch.distributed.{name}")
    importlib.import_module("curry_train.parallel.overlap")
