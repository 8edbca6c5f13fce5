"""Matrices split over the ranks of a group, with the sequence split where they are not.

Between the parts of a block a rank holds the hidden states of its own slice of the sequence. The
first matrix of attention and feed-forward is split by output features and reads the gathered
sequence; the last is split by input features, and summing over ranks hands out slices again.
Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2.

Weights are stored as DTensors, so that checkpoints and optimizers know what each rank holds, and
read as plain local tensors. What stays whole (norms, the router) sees only the rank's own tokens
or heads, so its gradient is a part: `grads.finish` adds the parts once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curry_train.data.loader import IGNORED
from curry_train.layers.linear import Embedding, Linear, local
from curry_train.layers.norm import RMSNorm
from curry_train.parallel.collectives import scatter_sequence, sum_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_parameter(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Return a parameter of the same global shape that is split along `dim` over a 1-D mesh.

    The parameter is on the meta device, and so is the result: values come from `init_weights`.
    """
    from torch.distributed.tensor import DTensor, Shard

    shape = list(parameter.shape)
    shape[dim] //= mesh.size()
    part = DTensor.from_local(
        torch.empty(shape, dtype=parameter.dtype, device="meta"),
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(part)


class ColumnParallelLinear(Linear):
    """Compute this rank's share of the output features.

    Shapes: x [..., in_features], whole; returns [..., out_features / ranks] in the dtype of x.
    Weight [out_features, in_features] and bias are split along their first dimension. Group: none,
    the caller gathers the sequence once for all its column-parallel layers.
    """

    def __init__(self, whole: Linear, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.weight = split_parameter(whole.weight, mesh, 0)
        self.bias = None if whole.bias is None else split_parameter(whole.bias, mesh, 0)


class RowParallelLinear(Linear):
    """Multiply this rank's share of the input features; sum over ranks, keep the own tokens.

    Shapes: x [..., S, in_features / ranks]; returns [..., S / ranks, out_features] in the dtype
    of x. The weight is split along its second dimension; the bias is whole and added to the own
    tokens. Group: tp, one reduce-scatter (backward: one all-gather).
    """

    def __init__(self, whole: Linear, mesh: DeviceMesh, group: ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.weight = split_parameter(whole.weight, mesh, 1)
        self.bias = whole.bias
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        out = scatter_sequence(F.linear(x, local(self.weight).to(x.dtype)), self.group)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class ColumnParallelNorm(RMSNorm):
    """Normalise this rank's share of a projection by the mean square of the whole one.

    Shapes: x [..., width / ranks] of any float dtype; returns the same shape and dtype. The weight
    [width] is split. Every rank's heads make a part of the gradient of the common mean square, so
    parts are summed in backward too. Group: tp, one all-reduce of [..., 1] each way.
    """

    def __init__(self, whole: RMSNorm, mesh: DeviceMesh, group: ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.weight = split_parameter(whole.weight, mesh, 0)
        self.eps, self.width, self.group = whole.eps, len(whole.weight), group

    def mean_square(self, wide: Tensor) -> Tensor:
        """Return the mean square [..., 1] of rows [..., width / ranks] of all ranks together."""
        return sum_ranks(wide.square().sum(-1, keepdim=True), self.group) / self.width


def check_ids(name: str, ids: Tensor, rows: int) -> None:
    """Raise ValueError for ids [any shape] outside 0 to rows - 1; on the CPU only, it would sync.

    No rank has such a row, so without this the sum over ranks would be a plausible zero.
    """
    if ids.device.type == "cpu" and ((ids < 0) | (ids >= rows)).any():
        found = int(ids[(ids < 0) | (ids >= rows)][0])
        raise ValueError(
            f"{name}: found {found}; allowed are 0 to {rows - 1}; set model.vocab_size to what the"
            " tokenizer has"
        )


class VocabParallelEmbedding(Embedding):
    """Look up the ids whose rows this rank holds; sum over ranks, keep the own tokens.

    Shapes: ids int64 [B, S]; returns [B, S / ranks, width] in the dtype of the weight. Group: tp,
    one reduce-scatter (backward: one all-gather). Raises: as check_ids.
    """

    def __init__(self, whole: Embedding, mesh: DeviceMesh, group: ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.weight = split_parameter(whole.weight, mesh, 0)
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        weight = local(self.weight)
        check_ids("input_ids", ids, len(self.weight))
        own = ids - dist.get_rank(self.group) * len(weight)
        absent = (own < 0) | (own >= len(weight))
        rows = F.embedding(own.masked_fill(absent, 0), weight)
        return scatter_sequence(rows.masked_fill(absent[..., None], 0), self.group)


class _VocabParallelNll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, group: ProcessGroup) -> Tensor:
        wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        own = labels_N - dist.get_rank(group) * wide.shape[1]
        absent = (own < 0) | (own >= wide.shape[1])
        own = own.masked_fill(absent, 0)
        largest = wide.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        probs = (wide - largest[:, None]).exp()
        target = wide.gather(1, own[:, None])[:, 0].masked_fill(absent, 0)
        sums = torch.stack([probs.sum(1), target])
        dist.all_reduce(sums, group=group)
        total, target = sums
        ignored = labels_N == IGNORED
        ctx.save_for_backward(probs.div_(total[:, None]), own, absent, ignored)
        ctx.dtype = logits_NV.dtype
        return (total.log() + largest - target).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        probs, own, absent, ignored = ctx.saved_tensors
        grad = probs.clone()
        hit = (~absent).to(grad.dtype)[:, None]
        grad.scatter_add_(1, own[:, None], -hit)
        grad *= grad_N.masked_fill(ignored, 0)[:, None]
        return grad.to(ctx.dtype), None, None


def vocab_parallel_nll(logits_NV: Tensor, labels_N: Tensor, group: ProcessGroup) -> Tensor:
    """Return what `loss.token_nll` returns of logits that are split over the vocabulary.

    Shapes: logits [N, V / ranks] of any float dtype, columns by rank; labels int64 [N], global ids,
    -100 ignored. Returns [N] in float32 (float64 of float64), the same on every rank, each of
    which owes the gradient of its own columns alone. Group: tp, two all-reduces of [N] and [2, N].
    Raises: as check_ids.
    """
    wanted = labels_N.masked_fill(labels_N == IGNORED, 0)
    check_ids("labels", wanted, logits_NV.shape[1] * dist.get_world_size(group))
    return _VocabParallelNll.apply(logits_NV, labels_N, group)
