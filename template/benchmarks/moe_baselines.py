"""Other ways to compute the expert bank, written plainly, to be measured against.

All take x [T, D], ids [T, K], weights [T, K], w13 [E, 2F, D] with rows [gate; up] and w2 [E, D, F],
return [T, D] and leave the backward pass to autograd, but for scatter_style.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from curry_train.kernels.backends import kernels_of
from curry_train.kernels.expert_rows import sort_choices

PAD = 128
"""Rows to which megablocks_style fills up every expert."""


def float64_loop(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Compute expert by expert: what the others are held against, in float64 mostly."""
    out = torch.zeros_like(x)
    for expert, (first, second) in enumerate(zip(w13.unbind(), w2.unbind(), strict=True)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], first).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, second)
        out = out.index_add(0, token, y * weights[token, choice, None].to(y.dtype))
    return out


def _grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, w.transpose(1, 2), offs=ends)


def torch_grouped(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Copy the rows into expert order, two grouped_mm, copy them back, weigh and add."""
    experts, order = ids.flatten().sort(stable=True)
    edges = torch.arange(w13.shape[0], device=x.device)
    ends = torch.searchsorted(experts, edges, right=True, out_int32=True)
    gate, up = _grouped(x[order // ids.shape[1]], w13, ends).chunk(2, -1)
    y = _grouped(F.silu(gate) * up, w2, ends) * weights.flatten()[order, None].to(x.dtype)
    home = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return y[home].view(*ids.shape, -1).sum(1)


def megablocks_style(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Fill every expert's rows up to a multiple of 128, so that each tile has one expert.

    After MegaBlocks (Gale et al. 2022): the products are dense, the filling is multiplied too.
    """
    count, choices = w13.shape[0], ids.shape[1]
    flat = ids.flatten()
    experts, order = flat.sort(stable=True)
    counts = torch.bincount(flat, minlength=count)
    padded = (counts + PAD - 1) // PAD * PAD
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(len(order), device=x.device) + shift[experts]
    rows = x.new_zeros(int(ends[-1]), x.shape[1]).index_copy(0, place, x[order // choices])
    ends = ends.to(torch.int32)
    gate, up = _grouped(rows, w13, ends).chunk(2, -1)
    y = _grouped(F.silu(gate) * up, w2, ends)[place]
    y = y * weights.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // choices, y)


class _Scatter(torch.autograd.Function):
    """One grouped product that gathers its rows; its backward pass copies them into order."""

    @staticmethod
    def forward(ctx, x, w, sorted, gather, kernels):
        ctx.save_for_backward(x, w)
        ctx.sorted, ctx.gather, ctx.kernels = sorted, gather, kernels
        return kernels.gmm(x, w, sorted, gather=gather)

    @staticmethod
    def backward(ctx, dy):
        (x, w), sorted, kernels = ctx.saved_tensors, ctx.sorted, ctx.kernels
        dy, choices = dy.contiguous(), sorted.inverse.shape[1]
        rows = x[sorted.order // choices] if ctx.gather else x
        dw = kernels.gmm_wgrad(dy, rows, sorted, gather_dy=False, gather_x=False)
        dx = kernels.gmm(dy, w.transpose(1, 2), sorted, gather=False)
        if ctx.gather:
            dx = torch.zeros_like(x).index_add(0, sorted.order // choices, dx)
        return dx, dw, None, None, None


def scatter_style(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Gather in the product, but keep h, the activation and all R outputs of the experts.

    After ScatterMoE (Tan et al. 2024), with our grouped products (their twins on a CPU): what
    differs from `experts` is the fusion and what is saved, not the speed of a product.
    """
    kernels = kernels_of("triton" if x.is_cuda else "reference")
    if x.is_cuda:
        from curry_train.kernels.tuning import block_m_for

        block_m = block_m_for(ids.numel(), w13.shape[0])
        sorted = kernels.moe_sort(ids, w13.shape[0], block_m)
    else:
        sorted = sort_choices(ids, w13.shape[0])
    gate, up = _Scatter.apply(x, w13, sorted, True, kernels).chunk(2, -1)
    y = _Scatter.apply(F.silu(gate) * up, w2, sorted, False, kernels)
    expanded = y[sorted.inverse.long()]
    return (weights[:, None].to(x.dtype) @ expanded).squeeze(1)


BASELINES = {
    "torch_grouped": torch_grouped,
    "megablocks_style": megablocks_style,
    "scatter_style": scatter_style,
}
