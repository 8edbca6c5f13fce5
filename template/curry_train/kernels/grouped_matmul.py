"""Grouped products over sorted rows in Triton; `reference.py` holds their meaning.

Why this way. A program owns one tile of rows of one expert, found in a table that the sort wrote:
no row is padded, and the grid needs no number from the GPU. Rows are gathered by pointer as they
are read, so no copy of x in expert order exists. Gate and up lie interleaved in one product: two
`tl.dot` into one accumulator in a loop are compiled wrongly for sm_100 (triton #10821), and two
accumulators spill registers. Tiles run expert by expert, so that a weight stays in the L2 cache.
Offsets of rows and experts are int64: [R, D] passes 2**31 elements at ordinary sizes. Every sum has
one fixed order: calls repeat bit for bit, and a row does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from curry_train.kernels import reference
from curry_train.kernels.launches import (
    UNSPECIALISED,
    Launch,
    Run,
    run_on_gpu,
    sorted_arguments,
    strides,
    tile_constants,
)
from curry_train.kernels.reference import Sorted
from curry_train.kernels.tuning import Tile, tile_for

SIGMOID_SCALE = tl.constexpr(reference.SIGMOID_SCALE)


@triton.jit
def _place(tiles, columns, GROUP_M: tl.constexpr):
    """Return tile of rows and tile of columns: GROUP_M row tiles share a column tile in turn."""
    program = tl.program_id(0)
    first = program // (GROUP_M * columns) * GROUP_M
    height = tl.minimum(tiles - first, GROUP_M)
    within = program - first * columns
    return first + within % height, within // height


@triton.jit
def _store(y, value, rows, end, columns, width, EVEN: tl.constexpr):
    """Write a tile into y[:, width], but for rows from `end` and columns from `width` on."""
    inside = (rows < end)[:, None]
    if not EVEN:
        inside = inside & (columns < width)[None, :]
    pointers = y + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(pointers, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    x_rows, w_columns, columns, N, K, x_column, w_column,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return x_rows[BLOCK_M, K] times w_columns[K, BLOCK_N] in float32, given by pointers."""
    ks = tl.arange(0, BLOCK_K)
    x_pointers = x_rows[:, None] + ks.to(tl.int64)[None, :] * x_column
    w_pointers = w_columns[None, :] + ks.to(tl.int64)[:, None] * w_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        inside = ks < K - k * BLOCK_K
        if EVEN_K:
            x_tile = tl.load(x_pointers)
        else:
            x_tile = tl.load(x_pointers, mask=inside[None, :], other=0.0)
        if EVEN_K and EVEN_N:
            w_tile = tl.load(w_pointers)
        else:
            mask = inside[:, None] & (columns < N)[None, :]
            w_tile = tl.load(w_pointers, mask=mask, other=0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
        x_pointers += BLOCK_K * x_column
        w_pointers += BLOCK_K * w_column
    return acc


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr):
    # where, not minimum: NaN has to pass.
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    return gate, tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))


@triton.jit
def _swiglu(gate, up, LIMIT: tl.constexpr):
    if LIMIT is None:
        a = gate * tl.sigmoid(gate) * up
    else:
        gate, up = _clamped(gate, up, LIMIT)
        a = gate * tl.sigmoid(gate * SIGMOID_SCALE) * (up + 1)
    return a


@triton.jit
def _swiglu_backward(da, gate, up, LIMIT: tl.constexpr):
    if LIMIT is None:
        share = tl.sigmoid(gate)
        dgate = da * up * share * (1 + gate * (1 - share))
        dup = da * gate * share
    else:
        g, u = _clamped(gate, up, LIMIT)
        share = tl.sigmoid(g * SIGMOID_SCALE)
        dgate = da * (u + 1) * share * (1 + g * SIGMOID_SCALE * (1 - share))
        dgate = tl.where(gate > LIMIT, 0.0, dgate)
        dup = tl.where(tl.abs(up) > LIMIT, 0.0, da * g * share)
    return dgate, dup


@triton.jit(do_not_specialize=UNSPECIALISED)
def gmm_kernel(
    x, w, bias, y, a, order, offsets, tile_expert, tile_row, num_tiles,
    R, tiles, E, N, K, x_row, x_column, w_expert, w_row, w_column,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of y[R, N] = x[rows, K] @ w[E, N, K].T (+ bias[E, N]), and of a[R, N/2]."""
    tile, column = _place(tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    halves = column * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    used = tl.load(num_tiles)
    if tile >= used:
        # The tiles that are left over cover the rows of no expert: those are zero.
        rows = tl.load(offsets + E) + (tile - used) * BLOCK_M + tl.arange(0, BLOCK_M)
        zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        _store(y, zeros, rows, R, columns, N, EVEN_N)
        if ACTIVATION:
            half = tl.zeros((BLOCK_M, BLOCK_N // 2), dtype=tl.float32)
            _store(a, half, rows, R, halves, N // 2, EVEN_N)
        return
    expert = tl.load(tile_expert + tile)
    end = tl.load(offsets + expert + 1)
    rows = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
    # Rows past the end read the last row again: no mask in the loop, and they are not stored.
    source = tl.minimum(rows, end - 1)
    if GATHER:
        source = tl.load(order + source) // TOP_K
    x_rows = x + source.to(tl.int64) * x_row
    w_columns = w + expert.to(tl.int64) * w_expert + columns.to(tl.int64) * w_row
    acc = _product(
        x_rows, w_columns, columns, N, K, x_column, w_column,
        EVEN_N, EVEN_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if bias is not None:
        row = bias + expert.to(tl.int64) * N + columns
        acc += tl.load(row, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    # The activation is that of the rounded y, which is what the backward pass finds in memory.
    rounded = acc.to(y.dtype.element_ty)
    _store(y, rounded, rows, end, columns, N, EVEN_N)
    if ACTIVATION:
        gate, up = tl.split(tl.reshape(rounded, (BLOCK_M, BLOCK_N // 2, 2)))
        activated = _swiglu(gate.to(tl.float32), up.to(tl.float32), LIMIT)
        _store(a, activated, rows, end, halves, N // 2, EVEN_N)


@triton.jit
def _dswiglu_part(
    da, h_rows, weight, dh, aw, rows, end, first, F, h_column,
    LIMIT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N columns of aw and as many pairs of dh; return their share of ds."""
    columns = first + tl.arange(0, BLOCK_N)
    pairs = 2 * first + tl.arange(0, 2 * BLOCK_N)
    pointers = h_rows + pairs.to(tl.int64)[None, :] * h_column
    if EVEN:
        h_tile = tl.load(pointers)
    else:
        h_tile = tl.load(pointers, mask=(pairs < 2 * F)[None, :], other=0.0)
    gate, up = tl.split(tl.reshape(h_tile, (BLOCK_M, BLOCK_N, 2)))
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    activated = _swiglu(gate, up, LIMIT)
    _store(aw, activated * weight, rows, end, columns, F, EVEN)
    dgate, dup = _swiglu_backward(da * weight, gate, up, LIMIT)
    both = tl.reshape(tl.join(dgate, dup), (BLOCK_M, 2 * BLOCK_N))
    _store(dh, both, rows, end, pairs, 2 * F, EVEN)
    return tl.sum(da * activated, axis=1)


@triton.jit(do_not_specialize=UNSPECIALISED)
def gmm_dswiglu_kernel(
    dout, w2, h, weights, dh, aw, partials, order, offsets, tile_expert, tile_row, num_tiles,
    R, tiles, E, F, D, dout_row, dout_column, h_row, h_column, w_expert, w_row, w_column,
    TOP_K: tl.constexpr, LIMIT: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of dh[R, 2F] and aw[R, F], and its share of ds in partials[columns, R]."""
    tile, column = _place(tiles, tl.cdiv(F, BLOCK_N), GROUP_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    used = tl.load(num_tiles)
    if tile >= used:
        rows = tl.load(offsets + E) + (tile - used) * BLOCK_M + tl.arange(0, BLOCK_M)
        zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        _store(aw, zeros, rows, R, columns, F, EVEN_N)
        pairs = column * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        wide = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        _store(dh, wide, rows, R, pairs, 2 * F, EVEN_N)
        return
    expert = tl.load(tile_expert + tile)
    end = tl.load(offsets + expert + 1)
    rows = tl.load(tile_row + tile) + tl.arange(0, BLOCK_M)
    source = tl.minimum(rows, end - 1)
    choice = tl.load(order + source)
    x_rows = dout + (choice // TOP_K).to(tl.int64) * dout_row
    w_columns = w2 + expert.to(tl.int64) * w_expert + columns.to(tl.int64) * w_column
    acc = _product(
        x_rows, w_columns, columns, F, D, dout_column, w_row,
        EVEN_N, EVEN_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    weight = tl.load(weights + choice).to(tl.float32)[:, None]
    h_rows = h + source.to(tl.int64)[:, None] * h_row
    # In two halves of the columns: gate, up and their gradients of all at once spill registers.
    HALF: tl.constexpr = BLOCK_N // 2
    left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    first = column * BLOCK_N
    partial = _dswiglu_part(
        left, h_rows, weight, dh, aw, rows, end, first, F, h_column,
        LIMIT, EVEN_N, BLOCK_M, HALF,
    )  # fmt: skip
    partial += _dswiglu_part(
        right, h_rows, weight, dh, aw, rows, end, first + HALF, F, h_column,
        LIMIT, EVEN_N, BLOCK_M, HALF,
    )  # fmt: skip
    tl.store(partials + column.to(tl.int64) * R + rows, partial, mask=rows < end)


@triton.jit(do_not_specialize=UNSPECIALISED)
def sum_partials_kernel(partials, ds, offsets, R, E, columns, BLOCK: tl.constexpr):
    """ds[R] = partials[columns, R] summed from the first column to the last; unused rows zero."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tl.load(offsets + E)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    pointers = partials + rows
    for _ in range(columns):
        total += tl.load(pointers, mask=inside, other=0.0)
        pointers += R
    tl.store(ds + rows, total, mask=rows < R)


@triton.jit
def gmm_wgrad_kernel(
    dy, x, out, order, offsets, N, M, dy_row, dy_column, x_row, x_column,
    out_expert, out_row, out_column,
    TOP_K: tl.constexpr, GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_M: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out[E, N, M] (+)= dy[rows of e, N].T @ x[rows of e, M]: zero without rows."""
    across = tl.cdiv(M, BLOCK_M)
    tiles = tl.cdiv(N, BLOCK_N) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    ns = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)
    ms = tile % across * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.load(offsets + expert + 1)
    dy_columns = dy + ns.to(tl.int64)[:, None] * dy_column
    x_columns = x + ms.to(tl.int64)[None, :] * x_column
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for first in range(tl.load(offsets + expert), end, BLOCK_K):
        rows = first + tl.arange(0, BLOCK_K)
        inside = rows < end
        dy_rows = rows
        x_rows = rows
        if GATHER_DY or GATHER_X:
            tokens = tl.load(order + rows, mask=inside, other=0) // TOP_K
            dy_rows = tokens if GATHER_DY else rows
            x_rows = tokens if GATHER_X else rows
        # Both sides are masked: zero times what lies past the end is not zero if that is NaN.
        dy_mask = inside[None, :] if EVEN_N else inside[None, :] & (ns < N)[:, None]
        x_mask = inside[:, None] if EVEN_M else inside[:, None] & (ms < M)[None, :]
        dy_pointers = dy_columns + dy_rows.to(tl.int64)[None, :] * dy_row
        dy_tile = tl.load(dy_pointers, mask=dy_mask, other=0.0)
        x_tile = tl.load(x_columns + x_rows.to(tl.int64)[:, None] * x_row, mask=x_mask, other=0.0)
        acc = tl.dot(dy_tile, x_tile, acc, input_precision=PRECISION)
    out_rows = out + expert.to(tl.int64) * out_expert + ns.to(tl.int64)[:, None] * out_row
    pointers = out_rows + ms.to(tl.int64)[None, :] * out_column
    mask = (ns < N)[:, None] & (ms < M)[None, :]
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_rows_kernel(
    dy, out, order, offsets, N, dy_row, dy_column,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[E, N] = the sum of dy[rows of e, N], in the order of the rows."""
    across = tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // across
    ns = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(tl.load(offsets + expert), end, BLOCK_K):
        rows = first + tl.arange(0, BLOCK_K)
        inside = rows < end
        if GATHER:
            rows = tl.load(order + rows, mask=inside, other=0) // TOP_K
        pointers = dy + rows.to(tl.int64)[:, None] * dy_row + ns.to(tl.int64)[None, :] * dy_column
        mask = inside[:, None] & (ns < N)[None, :]
        total += tl.sum(tl.load(pointers, mask=mask, other=0.0).to(tl.float32), axis=0)
    tl.store(out + expert.to(tl.int64) * N + ns, total, mask=ns < N)


def _gmm(x, w, bias, y, a, sorted, gather, limit, tile, precision, run: Run) -> None:
    N, K = w.shape[1:]
    arguments = {"x": x, "w": w, "bias": bias, "y": y, "a": a, "N": N, "K": K}
    arguments |= sorted_arguments(sorted) | strides("x", x) | strides("w", w)
    constants = {"GATHER": gather, "ACTIVATION": a is not None, "LIMIT": limit}
    constants |= tile_constants(sorted, tile, N, K, precision)
    grid = arguments["tiles"] * triton.cdiv(N, tile.block_n) if y.shape[0] else 0
    run(Launch(gmm_kernel, grid, arguments, constants, tile.num_warps, tile.num_stages))


def gmm(
    x: Tensor,
    w: Tensor,
    sorted: Sorted,
    *,
    gather: bool,
    tile: Tile | None = None,
    precision: str | None = None,
    run: Run = run_on_gpu,
) -> Tensor:
    """Multiply each row by the weight of its expert.

    Shapes and values: `reference.gmm`, y [R, N]; x and w of one dtype (bf16, fp16, float32), any
    strides; accumulated in float32. FLOPs 2*R*N*K; reads each row and each used weight once per
    tile that needs it. Deterministic; precision, "ieee" or "tf32", None: see `float32_precision`.
    """
    N, K = w.shape[1:]
    tile = tile or tile_for("gmm", x.device, x.dtype, sorted.block_m, N, K)
    y = x.new_empty(sorted.order.shape[0], N)
    _gmm(x, w, None, y, None, sorted, gather, None, tile, precision, run)
    return y


def gmm_swiglu(
    x: Tensor,
    w13: Tensor,
    bias13: Tensor | None,
    sorted: Sorted,
    *,
    limit: float | None = None,
    tile: Tile | None = None,
    precision: str | None = None,
    run: Run = run_on_gpu,
) -> tuple[Tensor, Tensor]:
    """Multiply each token's rows by gate and up of their expert and apply the activation.

    Shapes and values: `reference.gmm_swiglu`, x [T, D], h [R, 2F], a [R, F]. FLOPs 4*R*F*D; writes
    3*R*F elements, and no copy of x in expert order. Deterministic.
    """
    (N, K), R = w13.shape[1:], sorted.order.shape[0]
    tile = tile or tile_for("gmm_swiglu", x.device, x.dtype, sorted.block_m, N, K)
    h, a = x.new_empty(R, N), x.new_empty(R, N // 2)
    bias = None if bias13 is None else bias13.contiguous()
    _gmm(x, w13, bias, h, a, sorted, True, limit, tile, precision, run)
    return h, a


def gmm_dswiglu(
    dout: Tensor,
    w2: Tensor,
    h: Tensor,
    weights: Tensor,
    sorted: Sorted,
    *,
    limit: float | None = None,
    tile: Tile | None = None,
    precision: str | None = None,
    run: Run = run_on_gpu,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the gradient of the combined output back through w2 and the activation.

    Shapes and values: `reference.gmm_dswiglu`, dout [T, D], dh [R, 2F], aw [R, F], ds [R] float32.
    FLOPs 2*R*F*D; reads 2*R*F and writes 3*R*F elements, neither y nor a is read. Deterministic:
    ds is summed over column tiles in their order.
    """
    (D, F), R, E = w2.shape[1:], h.shape[0], sorted.counts.shape[0]
    tile = tile or tile_for("gmm_dswiglu", h.device, h.dtype, sorted.block_m, F, D)
    dh, aw, ds = h.new_empty(R, 2 * F), h.new_empty(R, F), h.new_empty(R, dtype=torch.float32)
    columns = triton.cdiv(F, tile.block_n)
    partials = h.new_empty(columns, R, dtype=torch.float32)
    arguments = {"dout": dout, "w2": w2, "h": h, "weights": weights.contiguous(), "F": F, "D": D}
    arguments |= {"dh": dh, "aw": aw, "partials": partials, **sorted_arguments(sorted)}
    arguments |= strides("dout", dout) | strides("h", h) | strides("w", w2)
    constants = {"LIMIT": limit, **tile_constants(sorted, tile, F, D, precision)}
    grid = arguments["tiles"] * columns if R else 0
    run(Launch(gmm_dswiglu_kernel, grid, arguments, constants, tile.num_warps, tile.num_stages))
    arguments = {"partials": partials, "ds": ds, "offsets": sorted.offsets, "R": R, "E": E}
    arguments |= {"columns": columns}
    run(Launch(sum_partials_kernel, triton.cdiv(R, 256), arguments, {"BLOCK": 256}, 4, 1))
    return dh, aw, ds


def gmm_wgrad(
    dy: Tensor,
    x: Tensor,
    sorted: Sorted,
    *,
    gather_dy: bool = False,
    gather_x: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    bias: bool = False,
    tile: Tile | None = None,
    precision: str | None = None,
    run: Run = run_on_gpu,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the gradient of the weights of a grouped product, and of its bias.

    Shapes and values: `reference.gmm_wgrad`, dw [E, N, M] in the dtype of out, else of x; db [E, N]
    float32. FLOPs 2*R*N*M; every element of dw is written, zeros for experts without rows.
    Deterministic: one program sums all rows of a tile in their order. block_k counts rows.
    """
    E, N, M = sorted.counts.shape[0], dy.shape[1], x.shape[1]
    tile = tile or tile_for("gmm_wgrad", x.device, x.dtype, sorted.block_m, N, M)
    dw = x.new_empty(E, N, M) if out is None else out
    rows = {"order": sorted.order, "offsets": sorted.offsets, "dy": dy, "N": N}
    arguments = {"x": x, "out": dw, "M": M, **rows}
    arguments |= strides("dy", dy) | strides("x", x) | strides("out", dw)
    constants = {"GATHER_DY": gather_dy, "GATHER_X": gather_x, "ACCUMULATE": accumulate}
    constants |= {"EVEN_M": M % tile.block_m == 0, **tile_constants(sorted, tile, N, M, precision)}
    del constants["EVEN_K"], constants["GROUP_M"]
    grid = E * triton.cdiv(N, tile.block_n) * triton.cdiv(M, tile.block_m)
    run(Launch(gmm_wgrad_kernel, grid, arguments, constants, tile.num_warps, tile.num_stages))
    if not bias:
        return dw
    db = x.new_empty(E, N, dtype=torch.float32)
    arguments = {**rows, "out": db, **strides("dy", dy)}
    constants = {"TOP_K": constants["TOP_K"], "GATHER": gather_dy, "BLOCK_N": 64, "BLOCK_K": 64}
    run(Launch(sum_rows_kernel, E * triton.cdiv(N, 64), arguments, constants, 4, 2))
    return dw, db
