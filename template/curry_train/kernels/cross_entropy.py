"""Triton kernels of the cross entropy, one pass over the logits each way.

Forward: a program walks along its rows and keeps the largest logit so far and the sum of exp below
it (online softmax), so a row of any length is read once. Backward: every element is on its own.
Everything is computed in float32. Ignored rows are not read.
Source of the online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from curry_train.kernels import reference_loss
from curry_train.kernels.launches import UNSPECIALISED, Launch, Run, run_on_gpu
from curry_train.kernels.reference_loss import IGNORE

ELEMENTS = 4096
"""Logits that a program holds at a time: 32 in each of 128 threads."""


@triton.jit
def _tanh(x):
    """tanh without the device library, which the interpreter lacks, to 3 ulp."""
    near = tl.abs(x) < 0.3
    u = tl.where(near, x, 0.0)
    s = u * u
    # Taylor: the first term left out is below 2e-9 of the result.
    series = 62.0 / 2835.0 + s * (-1382.0 / 155925.0 + s * (21844.0 / 6081075.0))
    series = u + u * s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * series)))
    fall = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - fall) / (1.0 + fall)
    return tl.where(near, series, tl.where(x < 0, -far, far))


@triton.jit(do_not_specialize=[*UNSPECIALISED, "ignore"])
def rows_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    correction_ptr,
    T,
    V,
    logits_row,
    ignore,
    z,
    smoothing,
    softcap,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """loss[T], lse[T] and correction[T] of logits[T, V], BLOCK_T rows in a program."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    target = tl.load(target_ptr + t, mask=t < T, other=0)
    kept = (t < T) & (target != ignore)
    valid = kept & (target >= 0) & (target < V)
    peak = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    summed = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        inside = kept[:, None] & (v < V)[None, :]
        pointers = logits_ptr + t[:, None] * logits_row + v[None, :]
        x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        if CAPPED:
            x = softcap * _tanh(x / softcap)
        if SMOOTHED:
            summed += tl.sum(x, axis=1)
        x = tl.where(inside, x, -float("inf"))
        higher = tl.maximum(peak, tl.max(x, axis=1))
        # exp(-inf - -inf) is NaN; a row of -inf so far has a sum of 0.
        shift = tl.where(higher > -float("inf"), higher, 0.0)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        peak = higher
    label = tl.load(logits_ptr + t * logits_row + target, mask=valid, other=float("nan"))
    label = label.to(tl.float32)
    if CAPPED:
        label = softcap * _tanh(label / softcap)
    peak, total = tl.where(kept, peak, 0.0), tl.where(kept, total, 1.0)
    lse = peak + tl.log(total)
    # The largest logit goes first: lse - label would round away what is left at 1e4.
    loss = (peak - label) + tl.log(total)
    if SMOOTHED:
        evenly = (peak - summed / V) + tl.log(total)
        loss = (1 - smoothing) * loss + smoothing * evenly
    loss += z * lse * lse
    correction = total * tl.exp(peak - lse)
    tl.store(loss_ptr + t, tl.where(kept, loss, 0.0), mask=t < T)
    tl.store(lse_ptr + t, lse, mask=t < T)
    tl.store(correction_ptr + t, correction, mask=t < T)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "ignore"])
def rows_bwd_kernel(
    dloss_ptr,
    dlse_ptr,
    logits_ptr,
    target_ptr,
    lse_ptr,
    correction_ptr,
    dlogits_ptr,
    T,
    V,
    logits_row,
    dlogits_row,
    ignore,
    z,
    smoothing,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dlogits[T, V], a tile of BLOCK_T rows and BLOCK_V columns in a program."""
    across = tl.cdiv(V, BLOCK_V)
    t = (tl.program_id(0) // across).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    v = tl.program_id(0) % across * BLOCK_V + tl.arange(0, BLOCK_V)
    target = tl.load(target_ptr + t, mask=t < T, other=0)
    kept = (t < T) & (target != ignore)
    valid = kept & (target >= 0) & (target < V)
    inside = kept[:, None] & (v < V)[None, :]
    pointers = logits_ptr + t[:, None] * logits_row + v[None, :]
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        x = softcap * _tanh(x / softcap)
    lse = tl.load(lse_ptr + t, mask=kept, other=0.0)
    correction = tl.load(correction_ptr + t, mask=kept, other=1.0)
    dloss = tl.load(dloss_ptr + t, mask=kept, other=0.0)
    onto_lse = dloss * (1 + 2 * z * lse)
    if dlse_ptr is not None:
        onto_lse += tl.load(dlse_ptr + t, mask=kept, other=0.0)
    dx = (onto_lse / correction)[:, None] * tl.exp(x - lse[:, None])
    dx -= (dloss * (smoothing / V))[:, None]
    hit = v[None, :] == target[:, None]
    dx = tl.where(hit, dx - (dloss * (1 - smoothing))[:, None], dx)
    if CAPPED:
        dx *= 1 - (x / softcap) * (x / softcap)
    dx = tl.where(valid[:, None], dx, tl.where(kept[:, None], float("nan"), 0.0))
    where = t[:, None] * dlogits_row + v[None, :]
    tl.store(dlogits_ptr + where, dx, mask=(t < T)[:, None] & (v < V)[None, :])


def _blocks(vocab: int) -> dict[str, int]:
    block_v = min(ELEMENTS, triton.next_power_of_2(max(vocab, 64)))
    # Several rows take more registers than one of the same size: sm_90 would spill.
    return {"BLOCK_T": max(1, ELEMENTS // 2 // block_v), "BLOCK_V": block_v}


def _check_dtype(logits: Tensor) -> None:
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"logits is {logits.dtype}; allowed on this backend: bfloat16, float16, float32"
        )


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    *,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
    run: Run = run_on_gpu,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row, its log-sum-exp, and what lse lost by rounding, on a GPU.

    Shapes: logits [N, V] bf16, fp16 or float32 with any row stride, target int64 [N]; returns
    three float32 [N]. Meaning: the twin, `reference_loss.cross_entropy_rows`. A label out of range
    is not followed and gives NaN.
    Bytes: N*V elements are read once. Deterministic; a row does not depend on other rows.
    """
    _check_dtype(logits)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    T, V = logits.shape
    loss, lse, correction = (
        torch.empty(T, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    arguments = {
        "logits_ptr": logits,
        "target_ptr": target.contiguous(),
        "loss_ptr": loss,
        "lse_ptr": lse,
        "correction_ptr": correction,
        "T": T,
        "V": V,
        "logits_row": logits.stride(0),
        "ignore": ignore,
        "z": float(z),
        "smoothing": float(smoothing),
        "softcap": float(softcap or 0),
    }
    constants = {"SMOOTHED": smoothing > 0, "CAPPED": softcap is not None, **_blocks(V)}
    grid = triton.cdiv(T, constants["BLOCK_T"])
    run(Launch(rows_kernel, grid, arguments, constants, num_warps=4, num_stages=2))
    return loss, lse, correction


def cross_entropy_rows_bwd(
    dloss: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    correction: Tensor,
    *,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
    out: Tensor | None = None,
    run: Run = run_on_gpu,
) -> Tensor:
    """Return the gradient of cross_entropy_rows for its logits, on a GPU.

    Shapes: dloss, dlse, lse and correction float32 [N], dlse or None; logits [N, V]; target int64
    [N]; out [N, V] with neighbouring columns, may be logits itself; returns [N, V] in the dtype of
    logits. Meaning: the twin. Bytes: 2*N*V elements. Deterministic.
    """
    _check_dtype(logits)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    T, V = logits.shape
    dlogits = torch.empty_like(logits) if out is None else out
    arguments = {
        "dloss_ptr": dloss.contiguous(),
        "dlse_ptr": None if dlse is None else dlse.contiguous(),
        "logits_ptr": logits,
        "target_ptr": target.contiguous(),
        "lse_ptr": lse.contiguous(),
        "correction_ptr": correction.contiguous(),
        "dlogits_ptr": dlogits,
        "T": T,
        "V": V,
        "logits_row": logits.stride(0),
        "dlogits_row": dlogits.stride(0),
        "ignore": ignore,
        "z": float(z),
        "smoothing": float(smoothing),
        "softcap": float(softcap or 0),
    }
    constants = {"CAPPED": softcap is not None, **_blocks(V)}
    grid = triton.cdiv(T, constants["BLOCK_T"]) * triton.cdiv(V, constants["BLOCK_V"])
    run(Launch(rows_bwd_kernel, grid, arguments, constants, num_warps=4, num_stages=1))
    return dlogits


cross_entropy = functools.partial(reference_loss.cross_entropy, rows=cross_entropy_rows)
"""`reference_loss.cross_entropy` on a GPU. Not differentiable: see `routing_ops`."""

linear_cross_entropy_rows = functools.partial(
    reference_loss.linear_cross_entropy_rows, rows=cross_entropy_rows
)
linear_cross_entropy_rows_bwd = functools.partial(
    reference_loss.linear_cross_entropy_rows_bwd,
    rows=cross_entropy_rows,
    rows_bwd=cross_entropy_rows_bwd,
)
linear_cross_entropy = functools.partial(
    reference_loss.linear_cross_entropy, rows=linear_cross_entropy_rows
)
"""`reference_loss.linear_cross_entropy` on a GPU. Not differentiable: see `routing_ops`."""
