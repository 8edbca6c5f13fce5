"""The grouped products as torch.library ops: curry_train::gmm, gmm_swiglu, gmm_dswiglu, gmm_wgrad.

An op runs the Triton kernel on a GPU, or on the CPU under TRITON_INTERPRET=1, and its twin of
`reference.py` elsewhere. As ops with a fake they can be planned, compiled and checkpointed; gmm and
gmm_swiglu have gradients. The functions of this file check their arguments and call the ops.
float32 products follow `torch.set_float32_matmul_precision`: "highest", the default, is exact.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from curry_train.kernels import reference
from curry_train.kernels.reference import DTYPES, Sorted
from curry_train.kernels.routing_ops import kernels_run, moe_combine

Table = list[Tensor]
"""The tensors of a Sorted, in its order: an op takes no tuple with names."""


def kernels_for(x: Tensor) -> ModuleType:
    """Return the module whose functions run on x: Triton's launchers where they can, else twins.

    Shapes: x of any shape. Twins run what Triton cannot: float64, and devices without it.
    """
    if not kernels_run(x):
        return reference
    from curry_train.kernels import grouped_matmul

    return grouped_matmul


def _sorted(table: Table, block_m: int) -> Sorted:
    return Sorted(*table, block_m)


@torch.library.custom_op("curry_train::gmm", mutates_args=())
def _gmm(x: Tensor, w: Tensor, table: Table, block_m: int, gather: bool) -> Tensor:
    kernels = kernels_for(x)
    return kernels.gmm(x, w, _sorted(table, block_m), gather=gather)


@_gmm.register_fake
def _(x, w, table, block_m, gather):
    return x.new_empty(table[0].shape[0], w.shape[1])


@torch.library.custom_op("curry_train::gmm_swiglu", mutates_args=())
def _gmm_swiglu(
    x: Tensor, w13: Tensor, bias13: Tensor | None, table: Table, block_m: int, limit: float | None
) -> tuple[Tensor, Tensor]:
    kernels = kernels_for(x)
    return kernels.gmm_swiglu(x, w13, bias13, _sorted(table, block_m), limit=limit)


@_gmm_swiglu.register_fake
def _(x, w13, bias13, table, block_m, limit):
    rows, wide = table[0].shape[0], w13.shape[1]
    return x.new_empty(rows, wide), x.new_empty(rows, wide // 2)


@torch.library.custom_op("curry_train::gmm_dswiglu", mutates_args=())
def _gmm_dswiglu(
    dout: Tensor,
    w2: Tensor,
    h: Tensor,
    weights: Tensor,
    table: Table,
    block_m: int,
    limit: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = kernels_for(h)
    return kernels.gmm_dswiglu(dout, w2, h, weights, _sorted(table, block_m), limit=limit)


@_gmm_dswiglu.register_fake
def _(dout, w2, h, weights, table, block_m, limit):
    rows, wide = h.shape
    sums = h.new_empty(rows, dtype=torch.promote_types(h.dtype, torch.float32))
    return h.new_empty(rows, wide), h.new_empty(rows, wide // 2), sums


@torch.library.custom_op("curry_train::gmm_wgrad", mutates_args=())
def _gmm_wgrad(
    dy: Tensor, x: Tensor, table: Table, block_m: int, gather_dy: bool, gather_x: bool, bias: bool
) -> tuple[Tensor, Tensor]:
    kernels = kernels_for(x)
    options = {"gather_dy": gather_dy, "gather_x": gather_x, "bias": bias}
    found = kernels.gmm_wgrad(dy, x, _sorted(table, block_m), **options)
    return found if bias else (found, dy.new_empty(0, 0, dtype=_wide(dy)))


@_gmm_wgrad.register_fake
def _(dy, x, table, block_m, gather_dy, gather_x, bias):
    experts = table[3].shape[0]
    sums = (experts, dy.shape[1]) if bias else (0, 0)
    dw = x.new_empty(experts, dy.shape[1], x.shape[1])
    return dw, dy.new_empty(sums, dtype=_wide(dy))


@torch.library.custom_op("curry_train::gmm_wgrad_into", mutates_args=("out",))
def _gmm_wgrad_into(
    out: Tensor,
    dy: Tensor,
    x: Tensor,
    table: Table,
    block_m: int,
    gather_dy: bool,
    gather_x: bool,
    accumulate: bool,
    bias: bool,
) -> Tensor:
    kernels = kernels_for(x)
    options = {"gather_dy": gather_dy, "gather_x": gather_x, "bias": bias}
    options |= {"out": out, "accumulate": accumulate}
    found = kernels.gmm_wgrad(dy, x, _sorted(table, block_m), **options)
    return found[1] if bias else dy.new_empty(0, 0, dtype=_wide(dy))


@_gmm_wgrad_into.register_fake
def _(out, dy, x, table, block_m, gather_dy, gather_x, accumulate, bias):
    return dy.new_empty((out.shape[:2] if bias else (0, 0)), dtype=_wide(dy))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _keep_gmm(ctx, inputs, output) -> None:
    x, w, table, ctx.block_m, ctx.gather = inputs
    ctx.save_for_backward(x, w, *table)


def _gmm_backward(ctx, dy):
    x, w, *table = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = _gmm(dy, w.transpose(1, 2), table, ctx.block_m, False)
        dx = moe_combine(dx, table[1], None, None) if ctx.gather else dx
    if ctx.needs_input_grad[1]:
        dw, _ = _gmm_wgrad(dy, x, table, ctx.block_m, False, ctx.gather, False)
    return dx, dw, [None] * len(table), None, None


_gmm.register_autograd(_gmm_backward, setup_context=_keep_gmm)


def _keep_gmm_swiglu(ctx, inputs, output) -> None:
    x, w13, bias13, table, ctx.block_m, ctx.limit = inputs
    ctx.bias_dtype = None if bias13 is None else bias13.dtype
    ctx.save_for_backward(x, w13, output[0], *table)


def _gmm_swiglu_backward(ctx, dh, da):
    x, w13, h, *table = ctx.saved_tensors
    dh = dh + reference.swiglu_backward(da, h, ctx.limit)
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        rows = _gmm(dh, w13.transpose(1, 2), table, ctx.block_m, False)
        dx = moe_combine(rows, table[1], None, None)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        has_bias = ctx.bias_dtype is not None
        dw, db = _gmm_wgrad(dh, x, table, ctx.block_m, False, True, has_bias)
        db = db.to(ctx.bias_dtype) if has_bias else None
    return dx, dw, db, [None] * len(table), None, None


_gmm_swiglu.register_autograd(_gmm_swiglu_backward, setup_context=_keep_gmm_swiglu)


def _check_rows(name: str, x: Tensor, sorted: Sorted, gather: bool) -> None:
    """Raise ValueError unless x is [T, ...] when gathered, else [R, ...], of a float dtype."""
    (T, K), R = sorted.inverse.shape, sorted.order.shape[0]
    rows, letter = (T, "T") if gather else (R, "R")
    if x.ndim != 2 or x.shape[0] != rows:
        raise ValueError(
            f"{name} has the shape {list(x.shape)}; allowed: [{rows}, width], since ids were "
            f"[T={T}, K={K}] and rows are {letter}; pass the Sorted of the same tokens"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} is {x.dtype}; allowed: bfloat16, float16, float32, float64")


def _check_weight(
    name: str, w: Tensor, sorted: Sorted, shape: tuple[int | None, int | None], like: Tensor
) -> None:
    """Raise ValueError unless w is [E, *shape], with None for any size, in the dtype of like."""
    E = sorted.counts.shape[0]
    wanted = (E, *shape)
    fits = w.ndim == 3 and all(b is None or a == b for a, b in zip(w.shape, wanted, strict=True))
    if not fits:
        allowed = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ValueError(f"{name} has the shape {list(w.shape)}; allowed: [{allowed}], E first")
    if w.dtype != like.dtype:
        raise ValueError(
            f"{name} is {w.dtype}; allowed: {like.dtype}, the dtype of the rows; cast one of them"
        )


def _check_even(name: str, size: int) -> None:
    if size % 2:
        raise ValueError(
            f"{name} has {size} columns; allowed: an even number, gate and up in pairs"
        )


def gmm(x: Tensor, w: Tensor, sorted: Sorted, *, gather: bool) -> Tensor:
    """Multiply each row by the weight of its expert; differentiable for x and w.

    Shapes: x [T, K] when gathered, else [R, K]; w [E, N, K], any strides; returns [R, N].
    Deterministic; saves x and w for the backward pass. Values: `reference.gmm`.
    Raises: ValueError naming the argument that does not fit.
    """
    _check_rows("x", x, sorted, gather)
    _check_weight("w", w, sorted, (None, x.shape[1]), x)
    return _gmm(x, w, list(sorted[:7]), sorted.block_m, gather)


def gmm_swiglu(
    x: Tensor, w13: Tensor, bias13: Tensor | None, sorted: Sorted, *, limit: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return h and a = swiglu(h) of each token's rows; differentiable for x, w13 and bias13.

    Shapes: x [T, D]; w13 [E, 2F, D] and bias13 [E, 2F] interleaved; h [R, 2F]; a [R, F].
    Deterministic; saves x, w13 and h for the backward pass. Values: `reference.gmm_swiglu`.
    Raises: ValueError naming the argument that does not fit.
    """
    _check_rows("x", x, sorted, True)
    _check_weight("w13", w13, sorted, (None, x.shape[1]), x)
    _check_even("w13", w13.shape[1])
    if bias13 is not None and (bias13.shape != w13.shape[:2] or bias13.dtype not in DTYPES):
        raise ValueError(
            f"bias13 is {bias13.dtype} {list(bias13.shape)}; allowed: a float dtype, "
            f"{list(w13.shape[:2])} as w13"
        )
    return _gmm_swiglu(x, w13, bias13, list(sorted[:7]), sorted.block_m, limit)


def gmm_dswiglu(
    dout: Tensor,
    w2: Tensor,
    h: Tensor,
    weights: Tensor,
    sorted: Sorted,
    *,
    limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dh, aw and ds for the gradient dout of the combined output.

    Shapes: dout [T, D]; w2 [E, D, F]; h [R, 2F] interleaved; weights [T, K]; returns dh [R, 2F],
    aw [R, F], ds [R] float32. Deterministic. Values: `reference.gmm_dswiglu`.
    Raises: ValueError naming the argument that does not fit.
    """
    _check_rows("dout", dout, sorted, True)
    _check_rows("h", h, sorted, False)
    _check_even("h", h.shape[1])
    _check_weight("w2", w2, sorted, (dout.shape[1], h.shape[1] // 2), dout)
    if h.dtype != dout.dtype:
        raise ValueError(f"h is {h.dtype}; allowed: {dout.dtype}, the dtype of dout")
    if weights.shape != sorted.inverse.shape or not weights.is_floating_point():
        raise ValueError(
            f"weights is {weights.dtype} {list(weights.shape)}; allowed: a float dtype, "
            f"{list(sorted.inverse.shape)}, as ids"
        )
    return _gmm_dswiglu(dout, w2, h, weights, list(sorted[:7]), sorted.block_m, limit)


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Return dw [E, N, M], and with bias db [E, N], of a grouped product.

    Shapes: dy [R, N] and x [R, M], or [T, N] and [T, M] when gathered; out [E, N, M] of any float
    dtype is written, or with accumulate added to, and returned. Deterministic; experts without
    rows get zeros. Values: `reference.gmm_wgrad`.
    Raises: ValueError naming the argument that does not fit.
    """
    _check_rows("dy", dy, sorted, gather_dy)
    _check_rows("x", x, sorted, gather_x)
    if dy.dtype != x.dtype:
        raise ValueError(f"dy is {dy.dtype}; allowed: {x.dtype}, the dtype of x")
    table, block_m = list(sorted[:7]), sorted.block_m
    if out is None:
        if accumulate:
            raise ValueError("accumulate is True without out; pass the tensor to add to as out")
        dw, db = _gmm_wgrad(dy, x, table, block_m, gather_dy, gather_x, bias)
    else:
        _check_weight("out", out, sorted, (dy.shape[1], x.shape[1]), out)
        db = _gmm_wgrad_into(out, dy, x, table, block_m, gather_dy, gather_x, accumulate, bias)
        dw = out
    return (dw, db) if bias else dw
