"""Triton kernels that put choices in the order of experts, and bring rows home.

The sort is a counting sort in four launches: count each block's choices per expert, turn the counts
into starting rows by a scan over blocks, cut tiles, and let every choice find its row. A choice's
place among equals is counted by comparing keys, never by an atomic, so the sort is stable and the
same in every run. Nothing is read back by the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from curry_train.kernels.launches import UNSPECIALISED, Launch, Run, run_on_gpu
from curry_train.kernels.reference import Sorted
from curry_train.kernels.reference_routing import check_combine, check_ids, check_sort, tile_bound

PART = 64
"""Choices that compare their keys in one program of the scatter; 128 spill on gfx942."""
PARTS = 8
"""Parts of a block. More make the table of counts smaller and the scatter slower."""
BLOCK = PART * PARTS
SCAN_ROWS, SCAN_COLUMNS = 32, 32
OWNERS = 4096
"""Pairs of a tile and an expert that a program compares to find the owners of tiles."""


@triton.jit
def _load_keys(ids_ptr, r, R, E: tl.constexpr):
    """Return the expert of each choice; E for no expert, for an id out of range and beyond R."""
    ids = tl.load(ids_ptr + r, mask=r < R, other=-1).to(tl.int32)
    return tl.where((ids >= 0) & (ids < E), ids, E)


@triton.jit(do_not_specialize=UNSPECIALISED)
def count_kernel(ids_ptr, table_ptr, R, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """table[block, e] = the choices of e in the block; column E counts those of no expert."""
    block = tl.program_id(0).to(tl.int64)
    key = _load_keys(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), R, E)
    bins = tl.arange(0, BINS)
    tl.store(table_ptr + block * (E + 1) + bins, tl.histogram(key, BINS), mask=bins <= E)


@triton.jit(do_not_specialize=UNSPECIALISED)
def scan_kernel(
    table_ptr,
    counts_ptr,
    R,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Replace table[block, e] by the sum over earlier blocks; counts[e] = the sum over all."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    blocks = tl.cdiv(R, BLOCK)
    for first in range(0, blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        pointers = table_ptr + row.to(tl.int64)[:, None] * (E + 1) + column[None, :]
        inside = (row < blocks)[:, None] & (column <= E)[None, :]
        counts = tl.load(pointers, mask=inside, other=0)
        tl.store(pointers, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=inside)
        before += tl.sum(counts, axis=0)
    tl.store(counts_ptr + column, before, mask=column < E)


@triton.jit(do_not_specialize=UNSPECIALISED)
def tile_kernel(
    counts_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    tiles,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write offsets[E+1] and, for TILES tiles of the table, their expert and first row."""
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    ends = tl.cumsum(counts, axis=0)
    parts = (counts + BLOCK_M - 1) // BLOCK_M
    part_ends = tl.cumsum(parts, axis=0)
    if tl.program_id(0) == 0:
        tl.store(offsets_ptr + expert, ends - counts, mask=expert < E)
        tl.store(offsets_ptr + E, tl.sum(counts, axis=0))
        tl.store(num_tiles_ptr, tl.sum(parts, axis=0))
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    # The owner is the one expert whose tiles begin at or before this tile and end after it.
    owns = (part_ends[None, :] > tile[:, None]) & ((part_ends - parts)[None, :] <= tile[:, None])
    first = (ends - counts)[None, :] + (tile[:, None] - (part_ends - parts)[None, :]) * BLOCK_M
    # Shifted by one, so that the sum over no owner gives -1.
    owner = tl.sum(tl.where(owns, expert[None, :] + 1, 0), axis=1) - 1
    row = tl.sum(tl.where(owns, first + 1, 0), axis=1) - 1
    tl.store(tile_expert_ptr + tile, owner, mask=tile < tiles)
    tl.store(tile_row_ptr + tile, row, mask=tile < tiles)


@triton.jit(do_not_specialize=UNSPECIALISED)
def scatter_kernel(
    ids_ptr,
    table_ptr,
    offsets_ptr,
    order_ptr,
    inverse_ptr,
    R,
    E: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Give each choice its row: start of the expert + earlier blocks + earlier in the block."""
    part = tl.program_id(0)
    block = (part // PARTS).to(tl.int64)
    lane = tl.arange(0, PART)
    r = part.to(tl.int64) * PART + lane
    key = _load_keys(ids_ptr, r, R, E)
    inside = r < R
    row = tl.load(offsets_ptr + key, mask=inside, other=0)
    row += tl.load(table_ptr + block * (E + 1) + key, mask=inside, other=0)
    for earlier in range(part // PARTS * PARTS, part):
        other = _load_keys(ids_ptr, r - (part - earlier) * PART, R, E)
        row += tl.sum((key[:, None] == other[None, :]).to(tl.int32), axis=1)
    same = (key[:, None] == key[None, :]) & (lane[None, :] < lane[:, None])
    row += tl.sum(same.to(tl.int32), axis=1)
    tl.store(order_ptr + row, r.to(tl.int32), mask=inside)
    tl.store(inverse_ptr + r, tl.where(key < E, row, -1), mask=inside)


@triton.jit(do_not_specialize=UNSPECIALISED)
def combine_kernel(
    y_ptr,
    inverse_ptr,
    weights_ptr,
    base_ptr,
    out_ptr,
    T,
    D,
    y_row,
    base_row,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[T, D] = base + sum over k of weights[t, k] * y[inverse[t, k]], in float32."""
    across = tl.cdiv(D, BLOCK_D)
    t = (tl.program_id(0) // across).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(0) % across * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    if base_ptr is not None:
        base = tl.load(base_ptr + t[:, None] * base_row + d[None, :], mask=inside, other=0.0)
        total += base.to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(inverse_ptr + t * K + k, mask=t < T, other=-1)
        named = inside & (row >= 0)[:, None]
        pointers = y_ptr + row.to(tl.int64)[:, None] * y_row + d[None, :]
        y = tl.load(pointers, mask=named, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + t * K + k, mask=t < T, other=0.0).to(tl.float32)
            # Not 0 * weight: the weight of a dropped choice may hold anything.
            y = tl.where(named, y * weight[:, None], 0.0)
        total += y
    tl.store(out_ptr + t[:, None] * D + d[None, :], total, mask=inside)


def moe_sort(
    ids: Tensor,
    num_experts: int,
    block_m: int,
    *,
    validate: bool = False,
    run: Run = run_on_gpu,
) -> Sorted:
    """Sort the choices of T tokens by expert and cut each expert's rows into tiles, on a GPU.

    Shapes: ids int32 or int64 [T, K]; returns `Sorted`. Meaning and errors are those of the twin,
    `reference_routing.moe_sort`.
    Bytes: about 4*R*(4 + E/128), R = T*K. Deterministic and stable; no host synchronisation.
    """
    check_sort(ids, num_experts, block_m)
    check_ids(ids, num_experts, validate)
    ids = ids.contiguous()
    R, tiles = ids.numel(), tile_bound(ids.numel(), num_experts, block_m)
    blocks = triton.cdiv(R, BLOCK)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    table = new(blocks, num_experts + 1)
    found = Sorted(
        order=new(R),
        inverse=new(*ids.shape),
        offsets=new(num_experts + 1),
        counts=new(num_experts),
        tile_expert=new(tiles),
        tile_row=new(tiles),
        num_tiles=new(1),
        block_m=block_m,
    )
    choices = {"ids_ptr": ids, "table_ptr": table, "R": R}
    bins = triton.next_power_of_2(num_experts + 1)
    constants = {"E": num_experts, "BINS": bins, "BLOCK": BLOCK}
    run(Launch(count_kernel, blocks, choices, constants, num_warps=4, num_stages=1))

    arguments = {"table_ptr": table, "counts_ptr": found.counts, "R": R}
    constants = {"E": num_experts, "BLOCK": BLOCK, "ROWS": SCAN_ROWS, "COLUMNS": SCAN_COLUMNS}
    grid = triton.cdiv(num_experts + 1, SCAN_COLUMNS)
    run(Launch(scan_kernel, grid, arguments, constants, num_warps=4, num_stages=1))

    names = ("counts", "offsets", "tile_expert", "tile_row", "num_tiles")
    arguments = {f"{name}_ptr": getattr(found, name) for name in names} | {"tiles": tiles}
    block_e = triton.next_power_of_2(num_experts)
    constants = {"E": num_experts, "BLOCK_M": block_m, "BLOCK_E": block_e}
    constants["TILES"] = min(128, max(1, OWNERS // block_e))
    # One program at least, since it also writes the offsets.
    grid = max(1, triton.cdiv(tiles, constants["TILES"]))
    run(Launch(tile_kernel, grid, arguments, constants, num_warps=4, num_stages=1))

    arguments = {f"{name}_ptr": getattr(found, name) for name in ("offsets", "order", "inverse")}
    constants = {"E": num_experts, "PART": PART, "PARTS": PARTS}
    grid = triton.cdiv(R, PART)
    run(Launch(scatter_kernel, grid, choices | arguments, constants, num_warps=4, num_stages=1))
    return found


def moe_combine(
    y: Tensor,
    inverse: Tensor,
    weights: Tensor | None = None,
    base: Tensor | None = None,
    *,
    run: Run = run_on_gpu,
) -> Tensor:
    """Add the K rows of each token, weighted, to its base, on a GPU.

    Shapes: y [R, D] bf16, fp16 or float32 with any row stride; inverse int32 [T, K]; weights [T, K]
    in the dtype of y or float32; base [T, D] in the dtype of y; returns [T, D] in it. Meaning and
    errors are those of the twin, `reference_routing.moe_combine`, except that float64 is refused.
    Bytes: (R + T) * D elements, and as many as T * D for the base. FLOPs: 2*R*D. Deterministic.
    """
    check_combine(y, inverse, weights, base)
    if y.dtype == torch.float64:
        raise ValueError("y is torch.float64; allowed on this backend: bfloat16, float16, float32")
    (T, K), D = inverse.shape, y.shape[1]
    y = y if y.stride(1) == 1 else y.contiguous()
    base = base if base is None or base.stride(1) == 1 else base.contiguous()
    out = y.new_empty(T, D)
    arguments = {
        "y_ptr": y,
        "inverse_ptr": inverse.contiguous(),
        "weights_ptr": None if weights is None else weights.contiguous(),
        "base_ptr": base,
        "out_ptr": out,
        "T": T,
        "D": D,
        "y_row": y.stride(0),
        "base_row": 0 if base is None else base.stride(0),
    }
    block_d = min(512, triton.next_power_of_2(max(D, 16)))
    constants = {"K": K, "BLOCK_T": 2048 // block_d, "BLOCK_D": block_d}
    grid = triton.cdiv(T, constants["BLOCK_T"]) * triton.cdiv(D, block_d)
    run(Launch(combine_kernel, grid, arguments, constants, num_warps=4, num_stages=1))
    return out
