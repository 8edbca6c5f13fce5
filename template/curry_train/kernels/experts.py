"""The expert bank as one operation over whole tokens.

`experts` chooses a backend and calls the op `curry_train::moe_experts`. As one op it can leave out
what a chain of ops would keep for the backward pass: of the R = T*K rows it saves h [R, 2F] and the
order of the rows, but neither a gathered copy of x nor the output of each expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curry_train.kernels import backends, dispatch
from curry_train.kernels.backends import Bank, Needs
from curry_train.kernels.reference import DTYPES, Sorted

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
"""By name: torch.compile of torch 2.11 cannot trace the question whether a device has autocast."""
TABLES = 7
"""How many tensors of a Sorted travel from forward to backward."""


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    bias13: Tensor | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    backend: str = "auto",
    strict: bool = False,
) -> Tensor:
    """Return out[t] = sum over k of weights[t, k] * act(x[t] W13^T + b13) W2^T of expert ids[t, k].

    Shapes: x [T, D]; ids int32 or int64 [T, K], -1 for no expert, repeats of an expert add up, so
    K may exceed E; weights [T, K] in the dtype of x or float32; w13 [E, 2F, D], bias13 [E, 2F] and
    w2 [E, D, F] in the dtype of x; returns [T, D] in the dtype of x. Rows of w13 are [gate; up],
    or gate j and up j in turn when interleaved. act is silu(gate) * up; with a limit L gpt-oss's
    g * sigmoid(1.702 g) * (u + 1), g = min(gate, L), u = clamp(up, -L, L).
    Under autocast x, w13, w2 and bias13 are cast to its dtype, and so is the result, but for
    float64, which autocast leaves alone.
    Gradients: x, weights, w13, w2, bias13; zero for experts without tokens. Saved for them, beside
    the inputs: h [R, 2F] in the dtype of x and 4 * (2R + 2E + 2) bytes of order (tiles come on top
    under triton). FLOPs with R rows of experts: 6RDF forward, 12RDF backward.
    Deterministic: no atomics, sums in a fixed order; a token's result does not depend on its batch
    as far as the matrix product beneath keeps to that.
    Raises: ValueError for a wrong dtype, a shape that does not fit, a limit that is not above 0, a
    backend that cannot run here, and an id that is neither -1 nor below E; that on the CPU only,
    elsewhere it would synchronise and such an id is no expert. RuntimeError for a gradient of the
    gradient.
    """
    device = x.device.type
    castable = device in AUTOCAST_DEVICES and x.dtype != torch.float64
    if castable and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, w13, w2 = x.to(dtype), w13.to(dtype), w2.to(dtype)
        bias13 = None if bias13 is None else bias13.to(dtype)
    _check(x, ids, weights, w13, w2, bias13, limit)
    count, width, hidden = w2.shape
    name = dispatch.choose(
        x.device, x.dtype, width=width, hidden=hidden, backend=backend, strict=strict
    )
    block_m = dispatch.tile_rows(name, ids.numel(), count)
    return torch.ops.curry_train.moe_experts(
        x, ids, weights, w13, w2, bias13, limit, interleaved, name, block_m
    )[0]


def _check(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    bias13: Tensor | None,
    limit: float | None,
) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"x: found dtype {x.dtype}; allowed are {_names(DTYPES)}; cast x")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"ids: found dtype {ids.dtype}; allowed are torch.int32 and torch.int64; cast ids"
        )
    if weights.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"weights: found dtype {weights.dtype}; allowed are that of x, {x.dtype}, and "
            "torch.float32; cast weights"
        )
    if limit is not None and not limit > 0:
        raise ValueError(
            f"limit: found {limit}; allowed is a number above 0, or None for silu(gate) * up; set "
            "model.swiglu_limit"
        )
    if x.ndim != 2:
        raise ValueError(f"x: found shape {_size(x)}; allowed is [T, D]; flatten the tokens")
    if w2.ndim != 3 or w2.shape[1] != x.shape[1] or 0 in w2.shape:
        raise ValueError(
            f"w2: found shape {_size(w2)}; allowed is [E, D, F], none of them 0, with the "
            f"width D = {x.shape[1]} of x; set w2 or x to agree"
        )
    count, width, hidden = w2.shape
    if ids.ndim != 2 or ids.shape[0] != x.shape[0] or ids.shape[1] == 0:
        raise ValueError(
            f"ids: found shape {_size(ids)}; allowed is [T, K] with the T = {x.shape[0]} tokens "
            "of x and K at least 1; set ids or x to agree"
        )
    wanted = {
        "weights": (weights, (x.shape[0], ids.shape[1]), "[T, K] like ids"),
        "w13": (w13, (count, 2 * hidden, width), "[E, 2F, D] like w2 [E, D, F]"),
        "bias13": (bias13, (count, 2 * hidden), "[E, 2F] like w13"),
    }
    for name, (tensor, shape, form) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: found shape {_size(tensor)}; allowed is {form}, here {list(shape)}; "
                f"set {name} to agree"
            )
    for name, tensor in {"w13": w13, "w2": w2, "bias13": bias13}.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(
                f"{name}: found dtype {tensor.dtype}; allowed is that of x, {x.dtype}; cast {name}"
            )
    others = {"ids": ids, "weights": weights, "w13": w13, "w2": w2, "bias13": bias13}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{name}: found on {tensor.device}; allowed is the device of x, {x.device}; move it"
            )


def _names(values: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, values))


def _size(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


torch.library.define(
    "curry_train::moe_experts",
    "(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, Tensor? bias13, float? limit, "
    "bool interleaved, str backend, SymInt block_m) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "curry_train::moe_experts_bwd",
    "(Tensor dout, Tensor h, Tensor x, Tensor weights, Tensor w13, Tensor w2, Tensor? bias13, "
    "Tensor order, Tensor inverse, Tensor offsets, Tensor counts, Tensor tile_expert, "
    "Tensor tile_row, Tensor num_tiles, float? limit, bool interleaved, str backend, "
    "SymInt block_m, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _bank(x, weights, w13, w2, *others) -> Bank:
    # What multiplies reads rows one after the other; of a dense tensor this is the tensor itself.
    return Bank(x.contiguous(), weights.contiguous(), w13.contiguous(), w2.contiguous(), *others)


@torch.library.impl("curry_train::moe_experts", "default")
def _forward(x, ids, weights, w13, w2, bias13, limit, interleaved, backend, block_m):
    bank = _bank(x, weights, w13, w2, bias13, limit, interleaved)
    out, h, sorted = backends.forward(backend, bank, ids, block_m)
    return (out, h, *sorted[:TABLES])


@torch.library.impl("curry_train::moe_experts_bwd", "default")
def _backward(dout, h, x, weights, w13, w2, bias13, *rest):
    *tables, limit, interleaved, backend, block_m, needs = rest
    bank = _bank(x, weights, w13, w2, bias13, limit, interleaved)
    sorted = Sorted(*tables, block_m=block_m)
    grads = backends.backward(backend, bank, dout.contiguous(), h, sorted, Needs(*needs))
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


@torch.library.register_fake("curry_train::moe_experts")
def _forward_fake(x, ids, weights, w13, w2, bias13, limit, interleaved, backend, block_m):
    count, _, hidden = w2.shape
    rows = ids.numel()
    tiles = (rows + block_m - 1) // block_m + count - 1 if block_m else 0

    def whole(*shape: int) -> Tensor:
        return ids.new_empty(shape, dtype=torch.int32)

    tables = (rows,), ids.shape, (count + 1,), (count,), (tiles,), (tiles,), (1,)
    h = x.new_empty(rows, 2 * hidden)
    return (x.new_empty(x.shape), h, *(whole(*shape) for shape in tables))


@torch.library.register_fake("curry_train::moe_experts_bwd")
def _backward_fake(dout, h, x, weights, w13, w2, bias13, *rest):
    inputs = (x, weights, w13, w2, bias13)
    return tuple(
        tensor.new_empty(tensor.shape) if need and tensor is not None else x.new_empty(0)
        for tensor, need in zip(inputs, rest[-1], strict=True)
    )


def _save(ctx, inputs, output) -> None:
    x, _, weights, w13, w2, bias13, *ctx.options = inputs
    _, h, *tables = output
    ctx.mark_non_differentiable(h, *tables)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, x, weights, w13, w2, bias13, *tables)


def _differentiate(ctx, dout, *_):
    wanted = ctx.needs_input_grad
    needs = [wanted[0], *wanted[2:6]]
    none = [None] * len(ctx.options)
    if dout is None:
        return (None,) * 6 + tuple(none)
    grads = torch.ops.curry_train.moe_experts_bwd(dout, *ctx.saved_tensors, *ctx.options, needs)
    dx, *others = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return (dx, None, *others, *none)


torch.library.register_autograd("curry_train::moe_experts", _differentiate, setup_context=_save)


def _save_nothing(ctx, inputs, output) -> None:
    pass


def _refuse(ctx, *_):
    raise RuntimeError(
        "experts: found a gradient of its gradient; allowed are first derivatives; leave out "
        "create_graph=True, or compute the bank from operations of torch"
    )


# Without this autograd would look for operations inside, and find none in a kernel.
torch.library.register_autograd(
    "curry_train::moe_experts_bwd", _refuse, setup_context=_save_nothing
)
