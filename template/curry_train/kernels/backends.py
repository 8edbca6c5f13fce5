"""The ways to compute the expert bank: each a function forward and a function backward.

`grouped_mm` and `sorted` share one plan and differ in the products only. Both put the rows in the
order of their experts, multiply gate and up at once, and keep nothing but h = x W13^T: the
activation is made again in the backward pass, and the gradient of the router weights comes from
<dout W2, a>, so that neither the expert outputs y nor a gathered copy of x outlive the call.
`triton` composes the kernels. `reference` is the slow one that the others are held against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from curry_train.kernels.expert_rows import (
    all_rows,
    combine_rows,
    expert_rows,
    expert_sums,
    gather_rows,
    home,
    sort_choices,
    used_rows,
)
from curry_train.kernels.reference import Sorted, split_gate_up, swiglu, swiglu_backward
from curry_train.kernels.row_products import products_of


class Bank(NamedTuple):
    """What both directions read.

    Shapes: x [T, D]; weights [T, K]; w13 [E, 2F, D]; w2 [E, D, F]; bias13 [E, 2F] or None. Rows of
    w13 are [gate; up], or gate and up in turn when interleaved.
    """

    x: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor
    bias13: Tensor | None
    limit: float | None
    interleaved: bool


class Needs(NamedTuple):
    """Which gradients are wanted."""

    x: bool = True
    weights: bool = True
    w13: bool = True
    w2: bool = True
    bias13: bool = True


class Grads(NamedTuple):
    """Gradients in the shapes of the inputs; None where not wanted."""

    x: Tensor | None = None
    weights: Tensor | None = None
    w13: Tensor | None = None
    w2: Tensor | None = None
    bias13: Tensor | None = None


# The activation, in the dtype of h and without a copy of it.


def activate(h: Tensor, limit: float | None, interleaved: bool) -> Tensor:
    """Return silu(gate) * up [R, F] of h [R, 2F]; with a limit the clamped variant."""
    if limit is not None:
        return swiglu(h, limit, interleaved)
    gate, up = split_gate_up(h, interleaved)
    return F.silu(gate).mul_(up)


def activate_backward(
    da: Tensor, h: Tensor, weight: Tensor, limit: float | None, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dh [R, 2F], a * weight [R, F] and ds [R] in float32 (float64 for float64).

    Shapes: da [R, F], the gradient of the activation before the weight, is overwritten; h [R, 2F];
    weight [R, 1], of the router.
    """
    wide = torch.promote_types(h.dtype, torch.float32)
    if limit is not None:
        a = swiglu(h, limit, interleaved)
        ds = (da * a).sum(-1, dtype=wide)
        dh = swiglu_backward(da.mul_(weight), h, limit, interleaved)
        return dh, a.mul_(weight), ds
    gate, up = split_gate_up(h, interleaved)
    dh = torch.empty_like(h)
    dgate, dup = split_gate_up(dh, interleaved)
    share = F.silu(gate)
    a = share * up
    ds = (da * a).sum(-1, dtype=wide)
    da.mul_(weight)
    torch.mul(da, share, out=dup)
    torch.ops.aten.silu_backward.grad_input(da.mul_(up), gate, grad_input=dgate)
    return dh, a.mul_(weight), ds


# The plan that grouped_mm and sorted share.


def forward_rows(backend: str, bank: Bank, ids: Tensor) -> tuple[Tensor, Tensor, Sorted]:
    """Return out [T, D], h [R, 2F] and the Sorted of ids int [T, K]."""
    sorted = sort_choices(ids, bank.w13.shape[0])
    rows = used_rows(sorted)
    products = products_of(backend, bank.w13, rows)
    h = products.forward(gather_rows(bank.x, sorted, rows), bank.w13, sorted.offsets)
    if bank.bias13 is not None:
        h += expert_rows(bank.bias13, sorted, rows)
    y = products.forward(activate(h, bank.limit, bank.interleaved), bank.w2, sorted.offsets)
    return combine_rows(y, sorted.inverse, bank.weights), all_rows(h, sorted), sorted


def backward_rows(
    backend: str, bank: Bank, dout: Tensor, h: Tensor, sorted: Sorted, needs: Needs
) -> Grads:
    """Return the wanted gradients for dout [T, D], with h [R, 2F] and Sorted of the forward."""
    rows, offsets = used_rows(sorted), sorted.offsets
    products = products_of(backend, bank.w13, rows)
    dout_rows = gather_rows(dout, sorted, rows)
    weight = bank.weights.reshape(-1, 1).index_select(0, sorted.order[:rows]).to(h.dtype)
    da = products.dgrad(dout_rows, bank.w2, offsets)
    dh, aw, ds = activate_backward(da, h[:rows], weight, bank.limit, bank.interleaved)
    dx = dweights = dw13 = dw2 = dbias13 = None
    if needs.w2:
        dw2 = products.wgrad(dout_rows, aw, offsets)
    if needs.w13:
        dw13 = products.wgrad(dh, gather_rows(bank.x, sorted, rows), offsets)
    if needs.x:
        dx = combine_rows(products.dgrad(dh, bank.w13, offsets), sorted.inverse, None)
    if needs.weights:
        dweights = home(ds, sorted.inverse).to(bank.weights.dtype)
    if needs.bias13 and bank.bias13 is not None:
        dbias13 = expert_sums(dh, sorted).to(bank.bias13.dtype)
    return Grads(dx, dweights, dw13, dw2, dbias13)


# triton and reference: the kernels or their twins, composed.


class Kernels(NamedTuple):
    """Six primitives with the signatures of their twins; gate and up are interleaved."""

    moe_sort: Callable[..., Sorted]
    gmm: Callable[..., Tensor]
    gmm_swiglu: Callable[..., tuple[Tensor, Tensor]]
    gmm_dswiglu: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gmm_wgrad: Callable[..., Tensor | tuple[Tensor, Tensor]]
    moe_combine: Callable[..., Tensor]


def interleave(halves: Tensor) -> Tensor:
    """Return rows gate 0, up 0, gate 1 .. of [gate; up]. Shapes: [E, 2F, ...], a copy."""
    return halves.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def halve(interleaved: Tensor) -> Tensor:
    """Return [gate; up] of interleaved rows: the inverse of interleave. Shapes: [E, 2F, ...]."""
    return interleaved.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def forward_kernels(
    kernels: Kernels, bank: Bank, ids: Tensor, block_m: int
) -> tuple[Tensor, Tensor, Sorted]:
    """Return out [T, D], h [R, 2F] interleaved and the Sorted of ids int [T, K]."""
    w13, bias13 = bank.w13, bank.bias13
    if not bank.interleaved:
        w13 = interleave(w13)
        bias13 = None if bias13 is None else interleave(bias13)
    sorted = kernels.moe_sort(ids, w13.shape[0], block_m)
    h, a = kernels.gmm_swiglu(bank.x, w13, bias13, sorted, limit=bank.limit)
    y = kernels.gmm(a, bank.w2, sorted, gather=False)
    return kernels.moe_combine(y, sorted.inverse, bank.weights, None), h, sorted


def backward_kernels(
    kernels: Kernels, bank: Bank, dout: Tensor, h: Tensor, sorted: Sorted, needs: Needs
) -> Grads:
    """Return the wanted gradients for dout [T, D], with h [R, 2F] and Sorted of the forward."""
    w13 = bank.w13 if bank.interleaved else interleave(bank.w13)
    dh, aw, ds = kernels.gmm_dswiglu(dout, bank.w2, h, bank.weights, sorted, limit=bank.limit)
    dx = dweights = dw13 = dw2 = dbias13 = None
    if needs.w2:
        dw2 = kernels.gmm_wgrad(dout, aw, sorted, gather_dy=True, gather_x=False)
    needs_bias = needs.bias13 and bank.bias13 is not None
    if needs.w13 or needs_bias:
        found = kernels.gmm_wgrad(
            dh, bank.x, sorted, gather_dy=False, gather_x=True, bias=needs_bias
        )
        dw13, dbias13 = found if needs_bias else (found, None)
        if not bank.interleaved:
            dw13 = halve(dw13)
            dbias13 = None if dbias13 is None else halve(dbias13)
        if dbias13 is not None:
            dbias13 = dbias13.to(bank.bias13.dtype)
    if needs.x:
        rows = kernels.gmm(dh, w13.transpose(1, 2), sorted, gather=False)
        dx = kernels.moe_combine(rows, sorted.inverse, None, None)
    if needs.weights:
        dweights = home(ds, sorted.inverse).to(bank.weights.dtype)
    return Grads(dx, dweights, dw13 if needs.w13 else None, dw2, dbias13)


@functools.cache
def kernels_of(backend: str) -> Kernels:
    """Return the Triton launchers or, for `reference`, their twins. Imports triton only then."""
    if backend == "triton":
        from curry_train.kernels import grouped_matmul as products
        from curry_train.kernels import moe_permute as routing
    else:
        from curry_train.kernels import reference as products
        from curry_train.kernels import reference_routing as routing
    return Kernels(
        routing.moe_sort,
        products.gmm,
        products.gmm_swiglu,
        products.gmm_dswiglu,
        products.gmm_wgrad,
        routing.moe_combine,
    )


ROWS = ("grouped_mm", "sorted")
BACKENDS = ("triton", "grouped_mm", "sorted", "reference")
"""In the order in which dispatch tries them."""


def forward(backend: str, bank: Bank, ids: Tensor, block_m: int) -> tuple[Tensor, Tensor, Sorted]:
    """Run the bank forward by the named backend. Shapes: out [T, D], h [R, 2F] and the Sorted."""
    if backend in ROWS:
        return forward_rows(backend, bank, ids)
    return forward_kernels(kernels_of(backend), bank, ids, block_m)


def backward(
    backend: str, bank: Bank, dout: Tensor, h: Tensor, sorted: Sorted, needs: Needs
) -> Grads:
    """Run the bank backward by the named backend. Shapes: dout [T, D], h [R, 2F]."""
    if backend in ROWS:
        return backward_rows(backend, bank, dout, h, sorted, needs)
    return backward_kernels(kernels_of(backend), bank, dout, h, sorted, needs)
