"""Routing and loss as operators of torch, `curry_train::router_topk` and so on.

As operators they are opaque to torch.compile, have shapes under FakeTensor and gradients under
autograd. The body is the Triton kernel where kernels run (see `kernels_run`), else its twin;
importing this file needs no Triton.

The losses are two layers: operators that return one value per row and have gradients, and thin
ones that reduce them, which autograd and the compiler see through.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from curry_train.kernels import dispatch, reference_loss, reference_routing
from curry_train.kernels.reference import Sorted
from curry_train.kernels.reference_loss import IGNORE
from curry_train.kernels.reference_routing import tile_bound


def kernels_run(tensor: Tensor) -> bool:
    """Return whether Triton works on a tensor of any shape: on its device, in its dtype.

    On the CPU that is the case under TRITON_INTERPRET=1, for tests.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if tensor.dtype == torch.float64 or not (tensor.device.type == "cuda" or interpreted):
        return False
    return _ready(tensor.device, interpreted)


@functools.cache
def _ready(device: torch.device, interpreted: bool) -> bool:
    return dispatch.triton_ready(device)[0]


def _code(file: str, twin: ModuleType, tensor: Tensor) -> ModuleType:
    """Return the file with the kernels, imported where they are used, or the one with the twins."""
    if kernels_run(tensor):
        return importlib.import_module(f"curry_train.kernels.{file}")
    return twin


@torch.library.custom_op("curry_train::router_topk", mutates_args=())
def router_topk(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str = "softmax",
    norm: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    group_topk: int = 1,
    group_score: str = "top2",
    pad_mask: Tensor | None = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose k of E experts for each token: `reference_routing.router_topk` as an operator.

    Shapes: logits [T, E] -> weights [T, K], ids int32 [T, K], lse [T]. Differentiable in logits.
    """
    options = {"score": score, "norm": norm, "scale": scale, "groups": groups}
    options |= {"group_topk": group_topk, "group_score": group_score}
    code = _code("router", reference_routing, logits)
    return code.router_topk(logits, bias, k, **options, pad_mask=pad_mask, validate=validate)


@router_topk.register_fake
def _(logits, bias, k, *options):
    T = logits.shape[0]
    ids = logits.new_empty(T, k, dtype=torch.int32)
    return logits.new_empty(T, k), ids, logits.new_empty(T)


@torch.library.custom_op("curry_train::router_topk_bwd", mutates_args=())
def router_topk_bwd(
    dweights: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    ids: Tensor,
    lse: Tensor,
    score: str = "softmax",
    norm: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """Return the gradient of router_topk for logits: its twin as an operator.

    Shapes: dweights [T, K], dlse [T] or None, logits [T, E], ids int32 [T, K], lse [T]; -> [T, E].
    """
    code = _code("router", reference_routing, logits)
    options = {"score": score, "norm": norm, "scale": scale}
    return code.router_topk_bwd(dweights, dlse, logits, ids, lse, **options).contiguous()


@router_topk_bwd.register_fake
def _(dweights, dlse, logits, *rest):
    return logits.new_empty(logits.shape)


def _save_router(ctx, inputs, output) -> None:
    weights, ids, lse = output
    ctx.options = inputs[3:6]
    ctx.inputs = len(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(ids)
    ctx.save_for_backward(inputs[0], ids, lse)


def _router_backward(ctx, dweights, _, dlse):
    logits, ids, lse = ctx.saved_tensors
    nothing = (None,) * (ctx.inputs - 1)
    if dweights is None and dlse is None:
        return None, *nothing
    if dweights is None:
        dweights = logits.new_zeros(ids.shape)
    return router_topk_bwd(dweights, dlse, logits, ids, lse, *ctx.options), *nothing


router_topk.register_autograd(_router_backward, setup_context=_save_router)


@torch.library.custom_op("curry_train::moe_sort", mutates_args=())
def sorted_tables(
    ids: Tensor, num_experts: int, block_m: int, validate: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sort choices by expert: the tensors of `reference_routing.moe_sort` as an operator.

    Shapes: ids [T, K] -> the fields of `Sorted`, but for block_m, in their order.
    """
    code = _code("moe_permute", reference_routing, ids)
    return code.moe_sort(ids, num_experts, block_m, validate=validate)[:-1]


@sorted_tables.register_fake
def _(ids, num_experts, block_m, validate=False):
    R = ids.numel()
    tiles = tile_bound(R, num_experts, block_m)
    shapes = (R,), ids.shape, (num_experts + 1,), (num_experts,), (tiles,), (tiles,), (1,)
    return tuple(ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


def moe_sort(ids: Tensor, num_experts: int, block_m: int, *, validate: bool = False) -> Sorted:
    """Sort the choices of T tokens by expert, by the operator `curry_train::moe_sort`.

    Shapes: ids int32 or int64 [T, K]; see `reference_routing.moe_sort`.
    """
    return Sorted(*sorted_tables(ids, num_experts, block_m, validate), block_m=block_m)


@torch.library.custom_op("curry_train::moe_combine", mutates_args=())
def moe_combine(
    y: Tensor, inverse: Tensor, weights: Tensor | None = None, base: Tensor | None = None
) -> Tensor:
    """Add the K rows of each token: `reference_routing.moe_combine` as an operator.

    Shapes: y [R, D], inverse int32 [T, K], weights [T, K], base [T, D] -> [T, D]. Differentiable in
    y, weights and base; rows of y that no choice names get a gradient of zero. A row must not be
    named twice, as `moe_sort` never does.
    """
    return _code("moe_permute", reference_routing, y).moe_combine(y, inverse, weights, base)


@moe_combine.register_fake
def _(y, inverse, weights=None, base=None):
    return y.new_empty(inverse.shape[0], y.shape[1])


def _save_combine(ctx, inputs, output) -> None:
    y, inverse, weights, base = inputs
    ctx.base = base is not None
    ctx.rows = y.shape[0]
    # Nothing but the gradient of weights reads y again; without it the memory can go.
    ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, inverse, weights)


def _combine_backward(ctx, dout):
    """dy[inverse[t, k]] = weights[t, k] * dout[t]; dweights[t, k] = <dout[t], y[inverse[t, k]]>."""
    y, inverse, weights = ctx.saved_tensors
    wide = torch.promote_types(dout.dtype, torch.float32)
    # One row more, for choices of no expert: all write there, nobody reads it.
    dy = dout.new_zeros(ctx.rows + 1, dout.shape[1])
    dweights = []
    for k in range(inverse.shape[1]):
        named = inverse[:, k] >= 0
        row = torch.where(named, inverse[:, k], ctx.rows).long()
        if weights is None:
            dy.index_copy_(0, row, dout)
            continue
        dy.index_copy_(0, row, (dout.to(wide) * weights[:, k, None].to(wide)).to(dout.dtype))
        if y is not None and ctx.rows:
            product = (dout.to(wide) * y[row.clamp(max=ctx.rows - 1)].to(wide)).sum(-1)
            dweights.append(torch.where(named, product, 0).to(weights.dtype))
    stacked = torch.stack(dweights, 1) if dweights else None
    return dy[: ctx.rows], None, stacked, dout if ctx.base else None


moe_combine.register_autograd(_combine_backward, setup_context=_save_combine)


@torch.library.custom_op("curry_train::cross_entropy_rows", mutates_args=())
def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, lse and correction of each row: its twin as an operator.

    Shapes: logits [N, V], target int64 [N] -> three [N]. Differentiable in logits, by loss and lse.
    """
    options = {"ignore": ignore, "z": z, "smoothing": smoothing, "softcap": softcap}
    return _code("cross_entropy", reference_loss, logits).cross_entropy_rows(
        logits, target, **options
    )


@cross_entropy_rows.register_fake
def _(logits, target, *options):
    wide = torch.promote_types(logits.dtype, torch.float32)
    return tuple(logits.new_empty(logits.shape[0], dtype=wide) for _ in range(3))


@torch.library.custom_op("curry_train::cross_entropy_rows_bwd", mutates_args=())
def cross_entropy_rows_bwd(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    correction: Tensor,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the gradient of cross_entropy_rows for logits: its twin as an operator.

    Shapes: dloss, dlse, lse and correction [N], dlse or None; logits [N, V]; target [N]; -> [N, V].
    """
    options = {"ignore": ignore, "z": z, "smoothing": smoothing, "softcap": softcap}
    code = _code("cross_entropy", reference_loss, logits)
    return code.cross_entropy_rows_bwd(
        dloss, dlse, logits, target, lse, correction, **options
    ).contiguous()


@cross_entropy_rows_bwd.register_fake
def _(dloss, dlse, logits, *rest):
    return logits.new_empty(logits.shape)


def _save_rows(ctx, inputs, output) -> None:
    logits, target, *ctx.options = inputs
    _, lse, correction = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(correction)
    ctx.save_for_backward(logits, target, lse, correction)


def _rows_backward(ctx, dloss, dlse, _):
    logits, target, lse, correction = ctx.saved_tensors
    nothing = (None,) * (1 + len(ctx.options))
    if dloss is None and dlse is None:
        return None, *nothing
    if dloss is None:
        dloss = torch.zeros_like(lse)
    saved = (logits, target, lse, correction)
    return cross_entropy_rows_bwd(dloss, dlse, *saved, *ctx.options), *nothing


cross_entropy_rows.register_autograd(_rows_backward, setup_context=_save_rows)


@torch.library.custom_op("curry_train::linear_cross_entropy_rows", mutates_args=())
def linear_cross_entropy_rows(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk: int,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
    validate: bool = False,
) -> Tensor:
    """Return the loss of each row of hidden @ weight.T, chunk rows of logits at a time.

    Shapes: hidden [N, D], weight [V, D], target int64 [N] -> [N]. Differentiable in hidden and
    weight; nothing is saved but the inputs, the backward pass forms the logits of a chunk again.
    """
    options = {"ignore": ignore, "z": z, "smoothing": smoothing, "softcap": softcap}
    return _code("cross_entropy", reference_loss, hidden).linear_cross_entropy_rows(
        hidden, weight, target, chunk=chunk, validate=validate, **options
    )


@linear_cross_entropy_rows.register_fake
def _(hidden, weight, target, *options):
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.new_empty(hidden.shape[0], dtype=wide)


@torch.library.custom_op("curry_train::linear_cross_entropy_rows_bwd", mutates_args=())
def linear_cross_entropy_rows_bwd(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk: int,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of linear_cross_entropy_rows for hidden and weight.

    Shapes: dloss [N], hidden [N, D], weight [V, D], target [N] -> [N, D], [V, D].
    """
    options = {"ignore": ignore, "z": z, "smoothing": smoothing, "softcap": softcap}
    code = _code("cross_entropy", reference_loss, hidden)
    return code.linear_cross_entropy_rows_bwd(dloss, hidden, weight, target, chunk=chunk, **options)


@linear_cross_entropy_rows_bwd.register_fake
def _(dloss, hidden, weight, *rest):
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _save_linear(ctx, inputs, output) -> None:
    hidden, weight, target, *ctx.options, _ = inputs
    ctx.save_for_backward(hidden, weight, target)


def _linear_backward(ctx, dloss):
    grads = linear_cross_entropy_rows_bwd(dloss, *ctx.saved_tensors, *ctx.options)
    return *grads, *(None,) * (2 + len(ctx.options))


linear_cross_entropy_rows.register_autograd(_linear_backward, setup_context=_save_linear)

torch.library.define(
    "curry_train::cross_entropy",
    f"(Tensor logits, Tensor target, *, int ignore={IGNORE}, float z=0.0, float smoothing=0.0, "
    'float? softcap=None, str reduction="none", bool validate=False) -> (Tensor, Tensor)',
)
torch.library.define(
    "curry_train::linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor target, *, SymInt chunk, "
    f"int ignore={IGNORE}, float z=0.0, float smoothing=0.0, float? softcap=None, "
    'str reduction="none", bool validate=False) -> Tensor',
)
cross_entropy = functools.partial(reference_loss.cross_entropy, rows=cross_entropy_rows)
linear_cross_entropy = functools.partial(
    reference_loss.linear_cross_entropy, rows=linear_cross_entropy_rows
)
torch.library.impl("curry_train::cross_entropy", "CompositeImplicitAutograd", cross_entropy)
torch.library.impl(
    "curry_train::linear_cross_entropy", "CompositeImplicitAutograd", linear_cross_entropy
)
