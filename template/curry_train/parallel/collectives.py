"""Collectives as differentiable functions of (tensor, group); None means off: the tensor itself.

torch 2.13 renamed two of its collectives; only this file calls them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from curry_train.parallel.activation_checkpoint import message

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_fused = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _reduce_scatter(out: Tensor, x: Tensor, group: ProcessGroup) -> None:
    if x.is_cuda:
        _fused(out, x, group=group)
        return
    parts = torch.empty_like(x)
    dist.all_to_all_single(parts, x, group=group)
    torch.sum(parts.view(dist.get_world_size(group), -1), 0, out=out)


@message
def stack_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensors [...] of all ranks as one [ranks, ...]; no gradient. One all-gather."""
    out = x.new_empty(dist.get_world_size(group) * x.numel())
    _all_gather(out, x.contiguous().view(-1), group=group)
    return out.view(-1, *x.shape)


@message
def sum_own_slice(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks of x[this rank], [...]; x [ranks, ...]. One reduce-scatter.

    Over gloo, whose own would sum everything on every rank, an all-to-all and a local sum.
    """
    out = x.new_empty(x[0].numel())
    _reduce_scatter(out, x.contiguous().view(-1), group=group)
    return out.view(x.shape[1:])


def own_slice(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """Return this rank's share of x [any shape] along `dim`, a view; nothing is sent."""
    if group is None:
        return x
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    at = x.dim() - 2
    return stack_ranks(x, group).movedim(0, at).flatten(at, at + 1)


def _scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    at, ranks = x.dim() - 2, dist.get_world_size(group)
    return sum_own_slice(x.unflatten(at, (ranks, -1)).movedim(at, 0), group)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


def gather_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Put the slices of all ranks behind each other in the last but one dimension.

    Shapes: x [..., S/ranks, D]; returns [..., S, D], contiguous. Backward sums the gradients over
    ranks and keeps the own slice: one all-gather, one reduce-scatter.
    """
    return x if group is None else _GatherSequence.apply(x, group)


def scatter_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over ranks and keep the own slice of the last but one dimension.

    Shapes: x [..., S, D]; returns [..., S/ranks, D], contiguous. Backward gathers the gradients:
    one reduce-scatter, one all-gather.
    """
    return x if group is None else _ScatterSequence.apply(x, group)


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_forward(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return x [any shape] summed over ranks; the gradient goes to the own part, unsummed.

    Right where every rank forms the same loss of the sum and starts backward from it once: each
    then owes only its own part. One all-reduce.
    """
    return x if group is None else _SumForward.apply(x, group)


@message
def all_reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x [any shape] summed over ranks; no gradient. One all-reduce."""
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduced(grad, ctx.group), None


def sum_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return x [any shape] summed over ranks; gradients are summed likewise.

    Right where every rank makes a loss of its own out of the sum. Two all-reduces.
    """
    return x if group is None else _SumRanks.apply(x, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.splits, ctx.group = (send, receive), group
        return swap_rows(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.splits
        return swap_rows(grad, receive, send, ctx.group), None, None, None


@message
def swap_rows(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Send the first send[0] rows of x to rank 0 and so on; returns what came, by rank.

    Shapes: x [sum(send), ...]; returns [sum(receive), ...]. No gradient. One all-to-all.
    """
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def exchange_rows(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Do what `swap_rows` does for x [R, ...]; gradients travel back the same way."""
    return _Exchange.apply(x, send, receive, group)
