"""All gradient arithmetic between backward and optimizer, in one place.

The rule: every rank's backward leaves the gradient of its own sum over tokens; here the sums are
added over ranks and divided once by the global token count. Nothing else scales a gradient, so
accumulation, ranks and unequal token counts cannot change the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_ELEMENTS = 32 * 1024 * 1024


class GradReport(NamedTuple):
    """Global gradient norm before clipping, and whether every gradient is finite."""

    norm: float
    finite: bool


@torch.no_grad()
def finish(
    parameters: Iterable[nn.Parameter],
    *,
    token_count: int,
    max_norm: float,
    group: dist.ProcessGroup | None = None,
    loss_scale: float = 1.0,
) -> GradReport:
    """Sum gradients over ranks, divide by the token count, clip to `max_norm`, vote on finiteness.

    `token_count` is global; 0 (every label ignored) leaves zero gradients. `max_norm` 0 clips
    nothing. Group: the ranks with different samples; one all-reduce per bucket, None means off.
    The norm is that of the divided gradient, before clipping, as torch's clip_grad_norm_ returns.
    """
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad)
    if group is not None:
        sum_over_ranks(grads, group)
    scale = 1.0 / (max(token_count, 1) * loss_scale)
    norm = float(torch.nn.utils.get_total_norm(grads)) * scale
    finite = norm == norm and norm != float("inf")
    if max_norm and finite and norm > max_norm:
        scale *= max_norm / norm
    if finite:
        torch._foreach_mul_(grads, scale)
    return GradReport(norm, finite)


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


def sum_counts(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add a small tensor of totals, of any shape, over ranks; in place, and returned.

    Group: one all-reduce; None means one rank.
    """
    if group is not None:
        dist.all_reduce(values, group=group)
    return values
