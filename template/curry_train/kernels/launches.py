"""What a launcher passes to a kernel, as data: run on a GPU, or described for a compiler.

One description for both, because an ahead-of-time check that compiles anything but what a launch
compiles proves nothing: divisibility by 16 alone decides whether copies are asynchronous.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curry_train.kernels.reference import Sorted
from curry_train.kernels.tuning import Tile

UNSPECIALISED = ["R", "T", "tiles"]
"""Arguments that follow the token count: a kernel must not be compiled again for their value."""


class Launch(NamedTuple):
    """One kernel launch over a one-dimensional grid; constants are compiled in."""

    kernel: Any
    grid: int
    arguments: dict[str, Tensor | int | float | None]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


Run = Callable[[Launch], object]
"""What a launcher does with a launch: run it, or note it down."""


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Return the strides of x [rows, columns] or w [E, rows, columns] as arguments: x_row, ..."""
    axes = ("expert", "row", "column")[-tensor.ndim :]
    return {f"{name}_{axis}": step for axis, step in zip(axes, tensor.stride(), strict=True)}


def sorted_arguments(sorted: Sorted) -> dict[str, Tensor | int]:
    """Return the table of tiles as arguments, for rows [R] of E experts."""
    return {
        "order": sorted.order,
        "offsets": sorted.offsets,
        "tile_expert": sorted.tile_expert,
        "tile_row": sorted.tile_row,
        "num_tiles": sorted.num_tiles,
        "R": sorted.order.shape[0],
        # One tile more than the sort may need: enough for the rows of no expert, too.
        "tiles": sorted.tile_expert.shape[0] + 1,
        "E": sorted.counts.shape[0],
    }


def float32_precision() -> str:
    """Return how float32 is multiplied: as `torch.set_float32_matmul_precision` says for all else.

    "highest", torch's default, is exact ("ieee"); below it NVIDIA's tensor cores take over.
    """
    exact = torch.get_float32_matmul_precision() == "highest" or torch.version.hip
    return "ieee" if exact else "tf32"


def tile_constants(
    sorted: Sorted, tile: Tile, N: int, K: int, precision: str | None
) -> dict[str, int | str]:
    """Return the constants of a tile of a product with [N, K]; even sizes need no masks."""
    return {
        "TOP_K": sorted.inverse.shape[1],
        "EVEN_N": N % tile.block_n == 0,
        "EVEN_K": K % tile.block_k == 0,
        "PRECISION": precision or float32_precision(),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
    }


def run_on_gpu(launch: Launch) -> None:
    """Launch on the device of the tensors, whichever is current; an empty grid is no launch.

    Raises: ValueError for a tensor on another device, where the kernel would read what it must not.
    """
    if launch.grid == 0:
        return
    tensors = {key: value for key, value in launch.arguments.items() if isinstance(value, Tensor)}
    first = next(iter(tensors))
    device = tensors[first].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"{name.removesuffix('_ptr')} is on {tensor.device}; allowed: {device}, the device "
                f"of {first.removesuffix('_ptr')}; move one of them"
            )
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        launch.kernel[(launch.grid,)](
            **launch.arguments,
            **launch.constants,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
