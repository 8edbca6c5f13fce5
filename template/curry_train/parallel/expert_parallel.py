"""Experts spread over ranks: whole tokens travel to them and their weighted sums travel back.

A token goes to each rank at most once, with the ids and weights of its experts there, however many
of its experts that rank holds; the expert bank returns one row for it, already summed. With
tensor or context parallelism a rank sends the tokens of its own slice only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from curry_train.parallel.collectives import exchange_rows, swap_rows

if TYPE_CHECKING:
    from curry_train.layers.routing import Routing


class Exchange(NamedTuple):
    """Which tokens travel where.

    Shapes: tokens int64 [R], the token of each row sent, in order of the rank it goes to; inverse
    int32 [T, ranks], the row that goes to each rank, -1 for none. send and receive: rows to and
    from each rank, as Python integers.
    """

    tokens: Tensor
    inverse: Tensor
    send: list[int]
    receive: list[int]
    group: ProcessGroup


def plan(expert_ids: Tensor, experts_per_rank: int, group: ProcessGroup) -> Exchange:
    """Decide which tokens go to which rank.

    Shapes: expert_ids int64 [T, K], global ids, -1 for none. Group: ep; one all-to-all of the
    counts, and the one place where the host waits for the device.
    """
    ranks, count = dist.get_world_size(group), len(expert_ids)
    owner = torch.where(expert_ids < 0, ranks, expert_ids // experts_per_rank)
    visits = expert_ids.new_zeros(count, ranks + 1).scatter_(1, owner, 1)[:, :ranks].T
    send = visits.sum(1)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    send, receive = torch.stack([send, receive]).tolist()
    flat = visits.flatten()
    # A stable sort, since the length of its result is known without asking the device.
    order = flat.argsort(descending=True, stable=True)[: sum(send)]
    row = flat.cumsum(0) - 1
    inverse = torch.where(flat > 0, row, -1).view(ranks, count).T.contiguous().int()
    return Exchange(order % max(count, 1), inverse, send, receive, group)


def local_ids(expert_ids: Tensor, experts_per_rank: int, exchange: Exchange) -> Tensor:
    """Return the ids int64 [R', K] of the received rows as numbers of this rank's experts.

    Experts of other ranks are -1. Group: ep, one all-to-all.
    """
    ids = swap_rows(expert_ids[exchange.tokens], exchange.send, exchange.receive, exchange.group)
    return number_own(ids, experts_per_rank, exchange.group)


def number_own(expert_ids: Tensor, experts_per_rank: int, group: ProcessGroup) -> Tensor:
    """Return global ids int64 [any shape] as numbers of this rank's experts, -1 for others.

    Group: ep; nothing is sent.
    """
    ids = expert_ids - dist.get_rank(group) * experts_per_rank
    return ids.masked_fill((ids < 0) | (ids >= experts_per_rank), -1)


def _sum_rows(rows: Tensor, exchange: Exchange) -> Tensor:
    """Return [T, ...] with the sum of the rows [R, ...] of each token, in the order of ranks.

    Added in float32 (float64 of float64), on the CPU as in the kernel.
    """
    if rows.is_cuda:
        from curry_train.kernels.routing_ops import moe_combine

        return moe_combine(rows, exchange.inverse, None, None)
    out = rows.new_zeros(len(exchange.inverse), *rows.shape[1:])
    return out.index_add_(0, exchange.tokens, rows)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return x[exchange.tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad, ctx.exchange), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _sum_rows(rows, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.exchange.tokens], None


def pack(x: Tensor, exchange: Exchange) -> Tensor:
    """Return the rows to send, [R, ...], of the tokens [T, ...]; differentiable, no traffic."""
    return _Pack.apply(x, exchange)


def unpack(rows: Tensor, exchange: Exchange) -> Tensor:
    """Return the sum [T, D] of the rows [R, D] that came back for each token; differentiable."""
    return _Unpack.apply(rows, exchange)


def dispatch(
    x_TD: Tensor, routing: Routing, experts_per_rank: int, group: ProcessGroup
) -> tuple[Tensor, Routing]:
    """Send tokens to the ranks of their experts; returns the rows that came and their routing.

    Shapes: x [T, D] -> [R', D], any number of rows, 0 included. Group: ep; four all-to-alls
    forward (counts, ids, weights, rows), two backward.
    """
    exchange = plan(routing.expert_ids, experts_per_rank, group)
    ids = local_ids(routing.expert_ids, experts_per_rank, exchange)
    ways = exchange.send, exchange.receive, group
    weights = exchange_rows(pack(routing.weights, exchange), *ways)
    rows = exchange_rows(pack(x_TD, exchange), *ways)
    return rows, replace(routing, expert_ids=ids, weights=weights, exchange=exchange)


def combine(out: Tensor, exchange: Exchange) -> Tensor:
    """Send the experts' rows [R', D] back and add them up for each token, [T, D].

    Group: ep, one all-to-all forward, one backward.
    """
    back = exchange_rows(out, exchange.receive, exchange.send, exchange.group)
    return unpack(back, exchange)
