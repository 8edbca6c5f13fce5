"""All gradient arithmetic between backward and optimizer, in one place.

The rule: every rank's backward leaves the gradient of its own sum over tokens; here the sums are
added over ranks and divided once by the global token count. Nothing else scales a gradient, so
accumulation, ranks and unequal token counts cannot change the result.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from curry_train.parallel.mesh import Mesh
from curry_train.parallel.shards import Shard, values

BUCKET_ELEMENTS = 32 * 1024 * 1024


class GradReport(NamedTuple):
    """Global gradient norm before clipping, and whether every gradient is finite."""

    norm: float
    finite: bool


@torch.no_grad()
def finish(
    shards: list[Shard],
    *,
    token_count: int,
    max_norm: float,
    mesh: Mesh | None = None,
    loss_scale: float = 1.0,
) -> GradReport:
    """Sum gradients over ranks, divide by the token count, clip to `max_norm`, vote on finiteness.

    Leaves them in `owned.grad` of each shard. `token_count` is global; 0 (every label ignored)
    leaves zero gradients. `max_norm` 0 clips nothing. The norm is that of the divided gradient,
    before clipping, as torch's clip_grad_norm_ returns. Groups: those of the shards, one all-reduce
    a bucket; world, one number.
    """
    waiting: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
    for shard in shards:
        grad = shard.local_grad()
        if shard.sums is not None:
            waiting[shard.sums].append(grad)
    for group, grads in waiting.items():
        sum_over_ranks(grads, group)
    _add_tied(shards)
    owned = [_hand_over(shard) for shard in shards]
    scale = 1.0 / (max(token_count, 1) * loss_scale)
    norm = global_norm(shards, mesh) * scale
    finite = norm == norm and norm != float("inf")
    if max_norm and finite and norm > max_norm:
        scale *= max_norm / norm
    if finite:
        torch._foreach_mul_(owned, scale)
    return GradReport(norm, finite)


def _add_tied(shards: list[Shard]) -> None:
    """Give both copies of a tied weight the sum of their gradients."""
    first = {shard.name: shard for shard in shards if not shard.tied}
    for shard in shards:
        if shard.tied:
            here, there = shard.local_grad(), first[shard.name].local_grad()
            there += here
            here.copy_(there)


def _hand_over(shard: Shard) -> Tensor:
    """Point the owned parameter's gradient at its part of the local one."""
    grad = shard.local_grad()
    if shard.gathers is not None:
        group = shard.gathers
        grad = shard.local._replace(tensor=grad).rows(group.rank(), group.size()).tensor
    if shard.owned is not shard.parameter:
        shard.owned.grad = grad
    return grad


def global_norm(shards: list[Shard], mesh: Mesh | None) -> float:
    """Return the norm of all owned gradients of all ranks, each element counted once.

    Group: world; one all-reduce of a float64 (float32 on mps) number.
    """
    counted = [shard for shard in shards if not shard.tied]
    if not counted:
        total = torch.zeros(())
    else:
        norms = torch.stack(torch._foreach_norm([_owned_grad(shard) for shard in counted]))
        wide = torch.float32 if norms.device.type == "mps" else torch.float64
        copies = torch.tensor([shard.copies for shard in counted], dtype=wide)
        total = (norms.to(wide).square() / copies.to(norms.device)).sum()
    group = None if mesh is None else mesh.group("world")
    if group is not None:
        total = total.to(mesh.device, torch.float64)
        dist.all_reduce(total, group=group)
    return float(total.sqrt())


def _owned_grad(shard: Shard) -> Tensor:
    grad = shard.owned.grad
    assert grad is not None, "handed over before"
    return values(grad)


def sum_over_ranks(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Add each gradient over the ranks of `group`, in place, in few large messages.

    Gradients of any shape, the same on every rank, of one dtype. One all-reduce per bucket.
    """
    bucket: list[Tensor] = []
    elements = 0
    for index, grad in enumerate(grads):
        bucket.append(grad)
        elements += grad.numel()
        last = index == len(grads) - 1
        if elements >= BUCKET_ELEMENTS or last:
            flat = torch.cat([part.reshape(-1) for part in bucket])
            dist.all_reduce(flat, group=group)
            for part, summed in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                part.copy_(summed.view_as(part))
            bucket, elements = [], 0


def sum_counts(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add a small tensor of totals, of any shape, over ranks; in place, and returned.

    Group: one all-reduce; None means one rank.
    """
    if group is not None:
        dist.all_reduce(numbers, group=group)
    return numbers
