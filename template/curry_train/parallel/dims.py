"""Sizes of the mesh axes: plain integers and sentences, no torch.

Apart from `mesh` so that checks, hooks and plans can reason about a layout in milliseconds.
"""

from __future__ import annotations

from curry_train.config import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def resolve(parallel: ParallelConfig, world: int) -> dict[str, int]:
    """Return the size of every axis for `world` ranks, `dp_shard=-1` filled, and `ep`.

    Raises ValueError when the axes cannot multiply to `world`; the message names the numbers.
    """
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    if sizes["dp_shard"] == -1:
        others = world_size({**sizes, "dp_shard": 1})
        sizes["dp_shard"] = max(world // others, 1)
    if world_size(sizes) != world:
        product = " * ".join(f"parallel.{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"{product} make {world_size(sizes)} ranks, but {world} were started; "
            "leave parallel.dp_shard at -1 to fill the world"
        )
    return {**sizes, "ep": parallel.ep}


def world_size(sizes: dict[str, int]) -> int:
    """Return the number of ranks that the axes make; ep is carved out of them, not a factor."""
    ranks = 1
    for axis in AXES:
        ranks *= sizes[axis]
    return ranks


def batch_world(sizes: dict[str, int]) -> int:
    """Return the number of ranks that hold different samples."""
    return sizes["dp_replicate"] * sizes["dp_shard"]
