"""Grouped products over sorted rows in plain torch: what the Triton kernels have to equal.

Each function has the name, the arguments and the results of a kernel, runs on any device in any
float dtype (float64 too), and is differentiable by autograd where it has one natural gradient.
Rows past offsets[-1] belong to no expert: they are never read, and are zero in every result.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What the kernels and their twins compute in; float64 has twins only."""
SIGMOID_SCALE = 1.702
"""Of the clamped activation. Source: gpt-oss, `swiglu` of its reference model."""


class Sorted(NamedTuple):
    """The choices of T tokens, put in the order of their experts.

    Shapes, all int32: order [R], row r is choice order[r] % K of token order[r] // K, stable, with
    the choices of no expert (id -1) last; inverse [T, K], the row of each choice, -1 for no expert;
    offsets [E+1], rows offsets[e] to offsets[e+1] belong to expert e; counts [E]; tile_expert and
    tile_row [NT], expert and first row of each tile of at most block_m rows of one expert, of which
    num_tiles [1] are real. NT = ceil(R / block_m) + E - 1 is a bound that needs no synchronisation.
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor
    counts: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    num_tiles: Tensor
    block_m: int


def _bounds(sorted: Sorted) -> list[tuple[int, int]]:
    return list(itertools.pairwise(sorted.offsets.tolist()))


def _rows(x: Tensor, sorted: Sorted, gather: bool) -> Tensor:
    """Return the rows of experts: of tokens x [T, ...] when gathered, else of x [R, ...]."""
    used = int(sorted.offsets[-1])
    if not gather:
        return x[:used]
    return x[sorted.order[:used].long() // sorted.inverse.shape[1]]


def _whole(parts: list[Tensor], sorted: Sorted) -> Tensor:
    """Return the parts as R rows, with zeros for rows of no expert."""
    y = torch.cat(parts)
    return torch.cat([y, y.new_zeros(sorted.order.shape[0] - y.shape[0], *y.shape[1:])])


def split_gate_up(h: Tensor, interleaved: bool = True) -> tuple[Tensor, Tensor]:
    """Return gate and up [..., F] of h [..., 2F]: even and odd columns, or both halves."""
    if interleaved:
        gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
        return gate, up
    gate, up = h.chunk(2, -1)
    return gate, up


def join_gate_up(gate: Tensor, up: Tensor, interleaved: bool = True) -> Tensor:
    """Return h [..., 2F] of gate and up [..., F]: the inverse of split_gate_up."""
    if interleaved:
        return torch.stack([gate, up], -1).flatten(-2)
    return torch.cat([gate, up], -1)


def swiglu(h: Tensor, limit: float | None = None, interleaved: bool = True) -> Tensor:
    """Return silu(gate) * up, or its clamped variant when there is a limit.

    Shapes: h [..., 2F] of any float dtype; returns [..., F] in that dtype, computed in float32
    (float64 for float64). With a limit L: g * sigmoid(1.702 * g) * (u + 1) with g = min(gate, L)
    and u = clamp(up, -L, L). Source: gpt-oss, `swiglu` of its reference model.
    """
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    gate, up = split_gate_up(wide, interleaved)
    if limit is None:
        a = gate * torch.sigmoid(gate) * up
    else:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        a = gate * torch.sigmoid(SIGMOID_SCALE * gate) * (up + 1)
    return a.to(h.dtype)


def swiglu_backward(
    da: Tensor, h: Tensor, limit: float | None = None, interleaved: bool = True
) -> Tensor:
    """Return the gradient of swiglu for h.

    Shapes: da [..., F], h [..., 2F]; returns [..., 2F] in the dtype of h, computed in the wider of
    float32 and both dtypes. A clamped value passes its gradient up to the limit itself.
    """
    dtype = torch.promote_types(torch.promote_types(h.dtype, da.dtype), torch.float32)
    gate, up = split_gate_up(h.to(dtype), interleaved)
    da = da.to(dtype)
    if limit is None:
        share = torch.sigmoid(gate)
        dgate = da * up * share * (1 + gate * (1 - share))
        dup = da * gate * share
    else:
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        share = torch.sigmoid(SIGMOID_SCALE * g)
        dgate = da * (u + 1) * share * (1 + SIGMOID_SCALE * g * (1 - share))
        dgate = torch.where(gate <= limit, dgate, 0)
        dup = torch.where(up.abs() <= limit, da * g * share, 0)
    return join_gate_up(dgate, dup, interleaved).to(h.dtype)


def gmm(x: Tensor, w: Tensor, sorted: Sorted, *, gather: bool) -> Tensor:
    """Multiply each row by the weight of its expert: y[r] = x[r] @ w[e].T.

    Shapes: x [T, D] when gathered, row r reads token order[r] // K, else [R, D]; w [E, N, D];
    returns [R, N] in the dtype of x.
    """
    rows = _rows(x, sorted, gather)
    experts = zip(_bounds(sorted), w.unbind(), strict=True)
    return _whole([rows[first:last] @ expert.T for (first, last), expert in experts], sorted)


def gmm_swiglu(
    x: Tensor, w13: Tensor, bias13: Tensor | None, sorted: Sorted, *, limit: float | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply each token's rows by gate and up of their expert and apply the activation.

    Shapes: x [T, D]; w13 [E, 2F, D] and bias13 [E, 2F] interleaved, row 2j is gate j and row 2j+1
    is up j; returns h [R, 2F], interleaved, with the bias, and a = swiglu(h) [R, F].
    """
    h = gmm(x, w13, sorted, gather=True)
    if bias13 is not None:
        counts = [last - first for first, last in _bounds(sorted)]
        parts = [row.expand(n, -1) for row, n in zip(bias13.unbind(), counts, strict=True)]
        h = (h + _whole(parts, sorted)).to(h.dtype)
    a = swiglu(h, limit)
    return h, a


def gmm_dswiglu(
    dout: Tensor,
    w2: Tensor,
    h: Tensor,
    weights: Tensor,
    sorted: Sorted,
    *,
    limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the gradient of the combined output back through w2 and the activation.

    Shapes: dout [T, D]; w2 [E, D, F]; h [R, 2F] interleaved; weights [T, K]. Returns dh [R, 2F];
    aw [R, F] = swiglu(h) * weight, what the gradient of w2 needs; ds [R] in float32 (float64 for
    float64), the gradient of the weights: <dout @ w2, swiglu(h)>.
    """
    wide = torch.promote_types(h.dtype, torch.float32)
    da = gmm(dout, w2.transpose(1, 2), sorted, gather=True).to(wide)
    used = int(sorted.offsets[-1])
    h, da = h[:used], da[:used]
    a = swiglu(h.to(wide), limit)
    weight = weights.flatten()[sorted.order[:used].long(), None].to(wide)
    dh = swiglu_backward(da * weight, h, limit)
    aw, ds = (a * weight).to(h.dtype), (da * a).sum(-1)
    return _whole([dh], sorted), _whole([aw], sorted), _whole([ds], sorted)


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
    """Return the gradient of the weights of a grouped product: dw[e] = dy[rows of e].T @ x[rows].

    Shapes: dy [R, N] and x [R, M], or [T, N] and [T, M] when gathered; returns dw [E, N, M] in the
    dtype of out, else of x, zero for experts without rows; with bias also the sums of the rows of
    dy, db [E, N] in float32 (float64 for float64). out is written, or added to with accumulate.
    """
    rows_dy, rows_x = _rows(dy, sorted, gather_dy), _rows(x, sorted, gather_x)
    bounds = _bounds(sorted)
    dtype = x.dtype if out is None else torch.promote_types(x.dtype, out.dtype)
    pairs = [
        (rows_dy[first:last].to(dtype), rows_x[first:last].to(dtype)) for first, last in bounds
    ]
    dw = torch.stack([dy_rows.T @ x_rows for dy_rows, x_rows in pairs])
    if out is not None:
        dw = out.add_(dw) if accumulate else out.copy_(dw)
    if not bias:
        return dw
    wide = torch.promote_types(dy.dtype, torch.float32)
    return dw, torch.stack([rows_dy[first:last].sum(0, dtype=wide) for first, last in bounds])
