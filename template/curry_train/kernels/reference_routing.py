"""Router, sort and combine in plain torch: what the Triton kernels have to equal.

Each function has the name, the arguments and the results of a kernel and runs on any device, in
float64 too. `router_topk` and `moe_combine` are differentiable by autograd, so that the written
backward passes have something to be held against.

What is wrong about shapes and dtypes is said before anything runs. What is wrong about values (NaN
logits, expert ids out of range) is looked up on the CPU only, or anywhere with validate=True,
because on a GPU the look costs a synchronisation; there a bad value becomes NaN, or no expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curry_train.kernels.reference import DTYPES, Sorted

NORM_EPS = 1e-20
"""Keeps weights that all underflow at 0 instead of NaN. Source: DeepSeek-V3's gate."""


def looks(tensor: Tensor, validate: bool) -> bool:
    """Return whether the values of a tensor of any shape may be read by the host."""
    # A subclass may be a FakeTensor, which has no values.
    if torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    return validate or tensor.device.type == "cpu"


def check_router(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int,
    group_topk: int,
    group_score: str,
    pad_mask: Tensor | None,
) -> None:
    """Raise ValueError for what router_topk cannot take: logits [T, E], bias [E], pad_mask [T]."""
    if logits.dtype not in (torch.float32, torch.float64) or logits.ndim != 2:
        raise ValueError(
            f"logits is {logits.dtype} {list(logits.shape)}; allowed: float32 or float64 [T, E]; "
            "compute the router in float32: logits.float()"
        )
    tokens, experts = logits.shape
    if not 1 <= k <= experts:
        raise ValueError(
            f"k is {k}; allowed: 1 to {experts}, the experts in logits; set num_experts_per_tok"
        )
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score is {score!r}; allowed: 'softmax', 'sigmoid'")
    if bias is not None and (bias.dtype != logits.dtype or bias.shape != (experts,)):
        raise ValueError(
            f"bias is {bias.dtype} {list(bias.shape)}; allowed: {logits.dtype} [{experts}], one "
            "value for each expert in the dtype of logits"
        )
    if pad_mask is not None and (pad_mask.dtype != torch.bool or pad_mask.shape != (tokens,)):
        raise ValueError(
            f"pad_mask is {pad_mask.dtype} {list(pad_mask.shape)}; allowed: torch.bool [{tokens}], "
            "True for a real token"
        )
    if groups < 1 or experts % groups:
        raise ValueError(f"groups is {groups}; allowed: a divisor of the {experts} experts")
    if not 1 <= group_topk <= groups or group_topk * (experts // groups) < k:
        raise ValueError(
            f"group_topk is {group_topk}; allowed: 1 to groups={groups}, with at least k={k} "
            f"experts in the chosen groups of {experts // groups}"
        )
    if group_score not in ("top2", "max"):
        raise ValueError(f"group_score is {group_score!r}; allowed: 'top2', 'max'")
    if groups > 1 and group_score == "top2" and experts // groups < 2:
        raise ValueError(
            f"group_score is 'top2' with {experts // groups} expert in a group; allowed: groups of "
            "two or more; set group_score='max'"
        )


def check_lse(name: str, lse: Tensor, validate: bool) -> None:
    """Raise ValueError when a row of the named input has no finite log-sum-exp, given as [T]."""
    if not looks(lse, validate):
        return
    bad = ~lse.isfinite()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} has {int(bad.sum())} rows with NaN, +inf or nothing finite, the first is row "
            f"{row}; allowed: numbers, and -inf beside a number; look for the layer that made them"
        )


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose k of E experts for each token and weigh them.

    Shapes: logits [T, E] float32 (or float64); bias [E] in the same dtype; pad_mask bool [T], True
    for a real token; returns weights [T, K] in the dtype of logits, ids int32 [T, K] from the best
    down, lse [T], the log-sum-exp of the logits (for the z-loss, whatever the score is). Padding
    gets id -1, weight 0, lse 0, and its logits are not looked at.
    Score: softmax or sigmoid of the logits. The bias counts in the choice only, the weight is that
    of the score; norm divides the k scores by their sum; scale multiplies after that. Without a
    bias experts are compared by logit, which orders as the score does but cannot tie by rounding.
    Ties go to the lowest id.
    Groups: E / groups neighbours form a group; only experts of the group_topk best groups can be
    chosen. A group counts as much as its two best biased scores together, or as its best.
    Raises: ValueError for wrong shapes, dtypes or options; for rows without a finite log-sum-exp
    where the host can look. Elsewhere such a row gets NaN weights and valid ids.
    Source: groups: DeepSeek-V3 (2024) section 2.1.2 for "top2", DeepSeek-V2 (2024) section 2.2.2
    for "max". A group that is not chosen stays out even if every bias is negative.
    """
    check_router(logits, bias, k, score, groups, group_topk, group_score, pad_mask)
    if pad_mask is not None:
        logits = torch.where(pad_mask[:, None], logits, 0)
    lse = logits.logsumexp(-1)
    check_lse("logits", lse, validate)
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    with torch.no_grad():
        lowest = torch.finfo(logits.dtype).min
        biased = scores if bias is None else scores + bias
        choice = (logits if bias is None else biased).nan_to_num(lowest, None, lowest)
        biased = biased.nan_to_num(lowest, None, -torch.inf)
        ids = best_experts(choice, biased, k, groups, group_topk, group_score)
    weights = scores.gather(1, ids)
    if norm:
        weights = weights / (weights.sum(-1, keepdim=True) + NORM_EPS)
    # NaN must not be hidden by a score that is not its own, as a sigmoid's is not.
    weights = torch.where(lse.isnan()[:, None], lse[:, None], weights * scale)
    ids = ids.to(torch.int32)
    if pad_mask is not None:
        weights = torch.where(pad_mask[:, None], weights, 0)
        ids = torch.where(pad_mask[:, None], ids, -1)
        lse = torch.where(pad_mask, lse, 0)
    return weights, ids, lse


def best_experts(
    choice: Tensor, biased: Tensor, k: int, groups: int, group_topk: int, group_score: str
) -> Tensor:
    """Return the ids int64 [..., K] of the best experts, of the best groups if there are any.

    Shapes: choice [..., E] compares experts, biased [..., E] makes the scores of groups.
    """
    closed = None
    if groups > 1:
        members = biased.unflatten(-1, (groups, -1))
        best = members.topk(2 if group_score == "top2" else 1).values.sum(-1)
        chosen = largest(best, group_topk)
        closed = (chosen[..., None] != torch.arange(groups, device=best.device)).all(-2)
        closed = closed.repeat_interleave(members.shape[-1], -1)
    return largest(choice, k, closed)


def largest(values: Tensor, count: int, closed: Tensor | None = None) -> Tensor:
    """Return the ids int64 [..., count] of the largest of values [..., E], the best first.

    Ties go to the lowest id and NaN comes first; closed bool [..., E] takes ids out of the choice.
    torch.topk leaves the order of ties to the device; a stable sort would keep it and take three
    times as long as these few rounds.
    """
    # Even -inf is above what is closed or taken.
    left, found = values.clamp(min=torch.finfo(values.dtype).min), []
    if closed is not None:
        left.masked_fill_(closed, -torch.inf)
    for _ in range(count):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def check_router_bwd(
    dweights: Tensor, dlse: Tensor | None, logits: Tensor, ids: Tensor, lse: Tensor, score: str
) -> None:
    """Raise ValueError unless dweights and ids are [T, K], dlse and lse [T], logits [T, E]."""
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score is {score!r}; allowed: 'softmax', 'sigmoid'")
    if logits.dtype not in (torch.float32, torch.float64) or logits.ndim != 2:
        raise ValueError(
            f"logits is {logits.dtype} {list(logits.shape)}; allowed: float32 or float64 [T, E]"
        )
    if ids.dtype != torch.int32 or ids.ndim != 2 or ids.shape[0] != logits.shape[0]:
        raise ValueError(
            f"ids is {ids.dtype} {list(ids.shape)}; allowed: int32 [{logits.shape[0]}, K], as "
            "router_topk returned it"
        )
    wanted = {"dweights": (dweights, ids.shape), "lse": (lse, ids.shape[:1])}
    if dlse is not None:
        wanted["dlse"] = (dlse, ids.shape[:1])
    for name, (tensor, shape) in wanted.items():
        if tensor.dtype != logits.dtype or tensor.shape != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; allowed: {logits.dtype} "
                f"{list(shape)}, as logits and ids have it"
            )


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
) -> Tensor:
    """Return the gradient of router_topk for its logits; the choice itself has none.

    Shapes: dweights [T, K], dlse [T] or None, logits [T, E], ids int32 [T, K] and lse [T] as
    router_topk returned them; returns [T, E]. Rows of padding (ids -1) are zero, whatever their
    logits and gradients hold. Bias, groups and padding enter through ids alone.
    """
    check_router_bwd(dweights, dlse, logits, ids, lse, score)
    real = (ids >= 0).all(-1, keepdim=True)
    logits = torch.where(real, logits, 0)
    # The sum takes back the rounding of lse, which at logits of 1e4 is the third digit.
    probs = (logits - torch.where(real, lse[:, None], 0)).exp()
    probs = probs / probs.sum(-1, keepdim=True)
    scores = logits.sigmoid() if score == "sigmoid" else probs
    slots = ids.long().clamp(min=0)
    share = scores.gather(1, slots)
    if norm:
        share = share / (share.sum(-1, keepdim=True) + NORM_EPS)
    dshare = share * dweights * scale
    if norm:
        dshare = dshare - share * dshare.sum(-1, keepdim=True)
    if score == "sigmoid":
        dshare = dshare * (-logits).sigmoid().gather(1, slots)
    dlogits = torch.zeros_like(logits).scatter_add(1, slots, dshare)
    if score == "softmax":
        dlogits = dlogits - probs * dshare.sum(-1, keepdim=True)
    if dlse is not None:
        dlogits = dlogits + probs * dlse[:, None]
    return torch.where(real, dlogits, 0)


def check_sort(ids: Tensor, num_experts: int, block_m: int) -> None:
    """Raise ValueError unless ids is an integer [T, K] that can be sorted."""
    if ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2 or ids.shape[1] < 1:
        raise ValueError(
            f"ids is {ids.dtype} {list(ids.shape)}; allowed: int32 or int64 [T, K], K at least 1"
        )
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; allowed: 1 or more")
    if block_m < 1:
        raise ValueError(f"block_m is {block_m}; allowed: 1 or more rows in a tile")
    if ids.numel() >= 2**31:
        raise ValueError(
            f"ids has {ids.numel()} choices; allowed: fewer than 2**31, since rows are int32; "
            "set a smaller micro_batch_size"
        )


def check_ids(ids: Tensor, num_experts: int, validate: bool) -> None:
    """Raise ValueError for expert ids [T, K] out of range, where the host can look."""
    if not looks(ids, validate):
        return
    bad = (ids < -1) | (ids >= num_experts)
    if bad.any():
        token, slot = bad.nonzero()[0].tolist()
        raise ValueError(
            f"ids holds {int(ids[token, slot])} at token {token}, choice {slot}; allowed: 0 to "
            f"{num_experts - 1}, or -1 for no expert"
        )


def tile_bound(rows: int, num_experts: int, block_m: int) -> int:
    """Return NT: no split of rows [R] into tiles of one expert each has more tiles."""
    return -(-rows // block_m) + num_experts - 1


def moe_sort(ids: Tensor, num_experts: int, block_m: int, *, validate: bool = False) -> Sorted:
    """Sort the choices of T tokens by expert, stably, and cut each expert's rows into tiles.

    Shapes: ids int32 or int64 [T, K], -1 for no expert; returns `Sorted`. Tiles past num_tiles
    have expert -1 and row -1.
    Raises: ValueError for ids out of range where the host can look; elsewhere they are no expert.
    """
    check_sort(ids, num_experts, block_m)
    check_ids(ids, num_experts, validate)
    flat = ids.flatten().long()
    used = (flat >= 0) & (flat < num_experts)
    key = torch.where(used, flat, num_experts)
    order = key.argsort(stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    inverse = torch.where(used, row, -1).view(ids.shape)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, key, torch.ones_like(key))[:-1]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    tiles = (counts + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    tile = torch.arange(tile_bound(len(flat), num_experts, block_m), device=ids.device)
    owner = torch.searchsorted(ends, tile, right=True)
    real = owner < num_experts
    expert = owner.clamp(max=num_experts - 1)
    first = offsets[expert] + (tile - (ends - tiles)[expert]) * block_m
    tensors = (
        order,
        inverse,
        offsets,
        counts,
        torch.where(real, expert, -1),
        torch.where(real, first, -1),
        ends[-1:],
    )
    return Sorted(*(tensor.to(torch.int32) for tensor in tensors), block_m)


def check_combine(y: Tensor, inverse: Tensor, weights: Tensor | None, base: Tensor | None) -> None:
    """Raise ValueError unless y is [R, D], inverse and weights [T, K] and base [T, D]."""
    if y.ndim != 2 or y.dtype not in DTYPES:
        raise ValueError(
            f"y is {y.dtype} {list(y.shape)}; allowed: rows [R, D] of bfloat16, float16, float32 "
            "or float64"
        )
    if inverse.dtype != torch.int32 or inverse.ndim != 2:
        raise ValueError(
            f"inverse is {inverse.dtype} {list(inverse.shape)}; allowed: int32 [T, K], as moe_sort "
            "returned it"
        )
    if weights is not None and (
        weights.dtype not in (y.dtype, torch.float32) or weights.shape != inverse.shape
    ):
        raise ValueError(
            f"weights is {weights.dtype} {list(weights.shape)}; allowed: {y.dtype} or "
            f"torch.float32 {list(inverse.shape)}, one for each choice"
        )
    shape = (inverse.shape[0], y.shape[1])
    if base is not None and (base.dtype != y.dtype or base.shape != shape):
        raise ValueError(
            f"base is {base.dtype} {list(base.shape)}; allowed: {y.dtype} {list(shape)}"
        )


def moe_combine(
    y: Tensor, inverse: Tensor, weights: Tensor | None = None, base: Tensor | None = None
) -> Tensor:
    """Add the K rows of each token, weighted, to its base.

    Shapes: y [R, D]; inverse int32 [T, K], the row of each choice, -1 for none; weights [T, K] in
    the dtype of y or float32, 1 if None; base [T, D], 0 if None; returns [T, D] in the dtype of y,
    summed in float32 (float64 for float64): base, then k = 0, 1, .... Rows that no choice names are
    not read.
    """
    check_combine(y, inverse, weights, base)
    tokens, slots = inverse.shape
    wide = torch.promote_types(y.dtype, torch.float32)
    shape = (tokens, y.shape[1])
    out = torch.zeros(shape, dtype=wide, device=y.device)
    if base is not None:
        out = out + base.to(wide)
    for k in range(slots if y.shape[0] else 0):
        named = inverse[:, k, None] >= 0
        rows = y[inverse[:, k].clamp(min=0).long()].to(wide)
        if weights is not None:
            rows = rows * weights[:, k, None].to(wide)
        out = out + torch.where(named, rows, 0)
    return out.to(y.dtype)
