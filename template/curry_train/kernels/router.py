"""Triton kernels of the router: top-k choice of experts, and its backward pass.

A program holds whole rows of logits in registers, so one read of [T, E] does it all. The columns
are laid out by group, each padded to a power of two, which keeps neighbours in order: the lowest
id wins a tie by being the first column. What one row holds never reaches another row, so results
do not depend on the batch and repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from curry_train.kernels.launches import UNSPECIALISED, Launch, Run, run_on_gpu
from curry_train.kernels.reference_routing import (
    NORM_EPS,
    check_lse,
    check_router,
    check_router_bwd,
)

ELEMENTS, BWD_ELEMENTS = 2048, 1024
"""Logits in a program of 128 threads; with more of them the backward kernel spills."""
EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _best(value, free, column):
    """Return in each row the first free column with the largest value."""
    best = tl.max(tl.where(free, value, -float("inf")), axis=1)
    tied = free & (value == best[:, None])
    return tl.min(tl.where(tied, column[None, :], 1 << 30), axis=1)


@triton.jit
def _group_columns(
    biased,
    GROUP_TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return 1 for the columns of each row's best groups, else 0; biased is -inf where padded."""
    members = tl.reshape(biased, (BLOCK_T, BLOCK_G, BLOCK_M))
    score = tl.max(members, axis=2)
    if TOP2:
        member = tl.arange(0, BLOCK_M)[None, None, :]
        first = tl.min(tl.where(members == score[:, :, None], member, BLOCK_M), axis=2)
        rest = tl.where(member == first[:, :, None], -float("inf"), members)
        score += tl.max(rest, axis=2)
    group = tl.arange(0, BLOCK_G)
    free = (group < GROUPS)[None, :] & (score == score)
    chosen = tl.zeros((BLOCK_T, BLOCK_G), tl.int32)
    for _ in range(GROUP_TOPK):
        hit = group[None, :] == _best(score, free, group)[:, None]
        chosen = tl.where(hit, 1, chosen)
        free = free & (hit == 0)
    chosen = tl.broadcast_to(chosen[:, :, None], (BLOCK_T, BLOCK_G, BLOCK_M))
    return tl.reshape(chosen, (BLOCK_T, BLOCK_G * BLOCK_M))


@triton.jit(do_not_specialize=UNSPECIALISED)
def router_topk_kernel(
    logits_ptr,
    bias_ptr,
    pad_mask_ptr,
    weights_ptr,
    ids_ptr,
    lse_ptr,
    T,
    logits_row,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    TOP2: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """weights[T, K], ids[T, K] and lse[T] of logits[T, E], BLOCK_T rows in a program."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = t < T
    if pad_mask_ptr is not None:
        real = real & (tl.load(pad_mask_ptr + t, mask=real, other=0) != 0)
    column = tl.arange(0, BLOCK_G * BLOCK_M)
    group, member = column // BLOCK_M, column % BLOCK_M
    expert = group * (E // GROUPS) + member
    exists = (group < GROUPS) & (member < E // GROUPS)
    inside = real[:, None] & exists[None, :]
    pointers = logits_ptr + t[:, None] * logits_row + expert[None, :]
    logits = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)

    peak = tl.max(logits, axis=1)
    peak = tl.where(peak > -float("inf"), peak, 0.0)
    total = tl.where(real, tl.sum(tl.exp(logits - peak[:, None]), axis=1), 1.0)
    lse = peak + tl.log(total)

    choice = logits
    if bias_ptr is not None or GROUPS > 1:
        if SIGMOID:
            biased = _sigmoid(logits)
        else:
            biased = tl.exp(logits - peak[:, None]) / total[:, None]
        if bias_ptr is not None:
            biased += tl.load(bias_ptr + expert, mask=exists, other=0.0)[None, :]
            choice = biased
        biased = tl.where(exists[None, :] & (biased == biased), biased, -float("inf"))
    free = tl.broadcast_to(exists[None, :], (BLOCK_T, BLOCK_G * BLOCK_M))
    if GROUPS > 1:
        free = free & (
            _group_columns(biased, GROUP_TOPK, GROUPS, TOP2, BLOCK_T, BLOCK_G, BLOCK_M) > 0
        )
    choice = tl.where(choice == choice, choice, -float("inf"))

    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    picked = tl.full((BLOCK_T, BLOCK_K), -float("inf"), tl.float32)
    for k in range(K):
        hit = expert[None, :] == _best(choice, free, expert)[:, None]
        hit = hit & free
        here = (slot == k)[None, :]
        ids = tl.where(here, tl.sum(tl.where(hit, expert[None, :], 0), axis=1)[:, None], ids)
        picked = tl.where(here, tl.sum(tl.where(hit, logits, 0.0), axis=1)[:, None], picked)
        free = free & (hit == 0)

    if SIGMOID:
        weights = _sigmoid(picked)
    else:
        weights = tl.exp(picked - peak[:, None]) / total[:, None]
    in_k = (slot < K)[None, :]
    weights = tl.where(in_k, weights, 0.0)
    if NORM:
        weights = weights / (tl.sum(weights, axis=1) + EPS)[:, None]
    # NaN must not be hidden by a score that is not its own, as a sigmoid's is not.
    weights = tl.where((lse == lse)[:, None], weights * scale, lse[:, None])
    weights = tl.where(real[:, None], weights, 0.0)
    ids = tl.where(real[:, None], ids, -1)
    where = t[:, None] * K + slot[None, :]
    stored = (t < T)[:, None] & in_k
    tl.store(weights_ptr + where, weights, mask=stored)
    tl.store(ids_ptr + where, ids, mask=stored)
    tl.store(lse_ptr + t, lse, mask=t < T)


@triton.jit(do_not_specialize=UNSPECIALISED)
def router_topk_bwd_kernel(
    dweights_ptr,
    dlse_ptr,
    logits_ptr,
    ids_ptr,
    lse_ptr,
    dlogits_ptr,
    T,
    logits_row,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dlogits[T, E], BLOCK_T rows in a program."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.arange(0, BLOCK_K)
    in_k = (t < T)[:, None] & (slot < K)[None, :]
    where = t[:, None] * K + slot[None, :]
    ids = tl.load(ids_ptr + where, mask=in_k, other=-1)
    real = (t < T) & (tl.sum((in_k & (ids < 0)).to(tl.int32), axis=1) == 0)
    expert = tl.arange(0, BLOCK_E)
    inside = real[:, None] & (expert < E)[None, :]
    pointers = logits_ptr + t[:, None] * logits_row + expert[None, :]
    logits = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)
    lse = tl.load(lse_ptr + t, mask=real, other=0.0)
    probs = tl.exp(logits - lse[:, None])
    # The sum takes back the rounding of lse, which at logits of 1e4 is the third digit.
    total = tl.where(real, tl.sum(probs, axis=1), 1.0)
    probs = probs / total[:, None]

    chosen = real[:, None] & in_k & (ids < E)
    pointers = logits_ptr + t[:, None] * logits_row + tl.where(chosen, ids, 0)
    picked = tl.load(pointers, mask=chosen, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        share = _sigmoid(picked)
    else:
        share = tl.exp(picked - lse[:, None]) / total[:, None]
    if NORM:
        share = share / (tl.sum(share, axis=1) + EPS)[:, None]
    dweights = tl.load(dweights_ptr + where, mask=chosen, other=0.0).to(tl.float32)
    dshare = share * dweights * scale
    if NORM:
        dshare -= share * tl.sum(dshare, axis=1)[:, None]
    if SIGMOID:
        # Where nothing is chosen share is 0 and the sigmoid of +inf is 1: 0, not NaN.
        dshare = dshare * _sigmoid(-picked)

    dlogits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for k in range(K):
        here = (slot == k)[None, :]
        id_k = tl.sum(tl.where(here, ids, 0), axis=1)
        dshare_k = tl.sum(tl.where(here, dshare, 0.0), axis=1)
        dlogits += tl.where(expert[None, :] == id_k[:, None], dshare_k[:, None], 0.0)
    if not SIGMOID:
        dlogits -= probs * tl.sum(dshare, axis=1)[:, None]
    if dlse_ptr is not None:
        dlogits += probs * tl.load(dlse_ptr + t, mask=real, other=0.0)[:, None]
    tl.store(
        dlogits_ptr + t[:, None] * E + expert[None, :],
        tl.where(real[:, None], dlogits, 0.0),
        mask=(t < T)[:, None] & (expert < E)[None, :],
    )


def _blocks(experts: int, k: int, groups: int) -> dict[str, int]:
    """Return the tile of a program, by what the model fixes and never by the number of tokens."""
    block_g = triton.next_power_of_2(groups)
    block_m = triton.next_power_of_2(experts // groups)
    block_t = max(1, min(64, ELEMENTS // (block_g * block_m)))
    block_k = triton.next_power_of_2(k)
    return {"BLOCK_T": block_t, "BLOCK_G": block_g, "BLOCK_M": block_m, "BLOCK_K": block_k}


def _bwd_blocks(experts: int, k: int) -> dict[str, int]:
    block_e, block_k = triton.next_power_of_2(experts), triton.next_power_of_2(k)
    block_t = max(1, min(32, BWD_ELEMENTS // block_e))
    return {"BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_K": block_k}


def _rows(x: Tensor) -> Tensor:
    """Return x [T, E] with neighbouring columns next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def router_topk(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    score: str = "softmax",
    norm: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    group_topk: int = 1,
    group_score: str = "top2",
    pad_mask: Tensor | None = None,
    validate: bool = False,
    run: Run = run_on_gpu,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose k of E experts for each token and weigh them, on a GPU.

    Shapes: logits float32 [T, E], any row stride; bias float32 [E]; pad_mask bool [T]; returns
    weights float32 [T, K], ids int32 [T, K], lse float32 [T]. Meaning and errors are those of the
    twin, `reference_routing.router_topk`, except that float64 is refused.
    Bytes: 4*T*(E + 2*K + 1). Deterministic; a row does not depend on other rows.
    """
    check_router(logits, bias, k, score, groups, group_topk, group_score, pad_mask)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits is {logits.dtype}; allowed on this backend: torch.float32")
    tokens, experts = logits.shape
    logits = _rows(logits)
    weights = logits.new_empty(tokens, k)
    ids = logits.new_empty(tokens, k, dtype=torch.int32)
    lse = logits.new_empty(tokens)
    arguments = {
        "logits_ptr": logits,
        "bias_ptr": None if bias is None else bias.contiguous(),
        "pad_mask_ptr": None if pad_mask is None else pad_mask.contiguous().view(torch.uint8),
        "weights_ptr": weights,
        "ids_ptr": ids,
        "lse_ptr": lse,
        "T": tokens,
        "logits_row": logits.stride(0),
        "scale": float(scale),
    }
    constants = {"E": experts, "K": k, "GROUPS": groups, "GROUP_TOPK": group_topk, "NORM": norm}
    constants |= {"TOP2": group_score == "top2", "SIGMOID": score == "sigmoid"}
    constants |= _blocks(experts, k, groups)
    grid = triton.cdiv(tokens, constants["BLOCK_T"])
    run(Launch(router_topk_kernel, grid, arguments, constants, num_warps=4, num_stages=1))
    check_lse("logits", lse, validate)
    return weights, ids, lse


def router_topk_bwd(
    dweights: Tensor,
    dlse: Tensor | None,
    logits: Tensor,
    ids: Tensor,
    lse: Tensor,
    *,
    score: str = "softmax",
    norm: bool = True,
    scale: float = 1.0,
    run: Run = run_on_gpu,
) -> Tensor:
    """Return the gradient of router_topk for its logits, on a GPU.

    Shapes: dweights float32 [T, K], dlse float32 [T] or None, logits float32 [T, E], ids int32
    [T, K], lse float32 [T]; returns float32 [T, E]. Meaning and errors are those of the twin.
    Bytes: 4*T*(2*E + 2*K + 2). Deterministic.
    """
    check_router_bwd(dweights, dlse, logits, ids, lse, score)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits is {logits.dtype}; allowed on this backend: torch.float32")
    tokens, experts = logits.shape
    logits = _rows(logits)
    dlogits = logits.new_empty(tokens, experts)
    arguments = {
        "dweights_ptr": dweights.contiguous(),
        "dlse_ptr": None if dlse is None else dlse.contiguous(),
        "logits_ptr": logits,
        "ids_ptr": ids.contiguous(),
        "lse_ptr": lse.contiguous(),
        "dlogits_ptr": dlogits,
        "T": tokens,
        "logits_row": logits.stride(0),
        "scale": float(scale),
    }
    constants = {"E": experts, "K": ids.shape[1], "SIGMOID": score == "sigmoid", "NORM": norm}
    constants |= _bwd_blocks(experts, ids.shape[1])
    grid = triton.cdiv(tokens, constants["BLOCK_T"])
    run(Launch(router_topk_bwd_kernel, grid, arguments, constants, num_warps=4, num_stages=1))
    return dlogits
