"""Cross entropy in plain torch: what the Triton kernels have to equal, and the loop over chunks.

The work is done row by row (`cross_entropy_rows`) and reduced afterwards (`reduce_rows`), so that
a chunk of rows is a problem of its own. `linear_cross_entropy` walks over such chunks with the row
functions it is handed: those of this file, or the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curry_train.kernels.reference import DTYPES
from curry_train.kernels.reference_routing import check_lse, looks

IGNORE = -100


def check_options(z: float, smoothing: float, softcap: float | None, reduction: str) -> None:
    """Raise ValueError for what no loss of any shape can take."""
    if not z >= 0:
        raise ValueError(f"z is {z}; allowed: 0 or more, the weight of lse**2")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}; allowed: 0 up to, not including, 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; allowed: above 0, or None for no cap")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction is {reduction!r}; allowed: 'none', 'sum', 'mean'")


def check_rows(logits: Tensor, target: Tensor) -> None:
    """Raise ValueError unless logits is a float [N, V] and target an int64 [N]."""
    if logits.ndim != 2 or logits.dtype not in DTYPES or logits.shape[1] < 1:
        raise ValueError(
            f"logits is {logits.dtype} {list(logits.shape)}; allowed: [N, V] of bfloat16, float16, "
            "float32 or float64 with V at least 1; flatten batch and sequence first"
        )
    if target.dtype != torch.int64 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"target is {target.dtype} {list(target.shape)}; allowed: torch.int64 "
            f"[{logits.shape[0]}], one label for each row of logits"
        )


def check_labels(target: Tensor, vocab: int, ignore: int, validate: bool) -> None:
    """Raise ValueError for labels [N] out of range, where the host can look."""
    if not looks(target, validate):
        return
    bad = ((target < 0) | (target >= vocab)) & (target != ignore)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"target holds {int(target[row])} at row {row}; allowed: 0 to {vocab - 1}, or "
            f"ignore={ignore}; look at the tokenizer's size and at model.vocab_size"
        )


def check_linear(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> None:
    """Raise ValueError unless hidden is [N, D], weight [V, D] and target int64 [N]."""
    if hidden.ndim != 2 or hidden.dtype not in DTYPES:
        raise ValueError(
            f"hidden is {hidden.dtype} {list(hidden.shape)}; allowed: [N, D] of bfloat16, float16, "
            "float32 or float64"
        )
    if weight.dtype != hidden.dtype or weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)}; allowed: {hidden.dtype} "
            f"[V, {hidden.shape[1]}], the dtype and width of hidden"
        )
    if weight.shape[0] < 1:
        raise ValueError("weight has 0 rows; allowed: a vocabulary of 1 or more")
    if target.dtype != torch.int64 or target.shape != hidden.shape[:1]:
        raise ValueError(
            f"target is {target.dtype} {list(target.shape)}; allowed: torch.int64 "
            f"[{hidden.shape[0]}], one label for each row of hidden"
        )
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; allowed: 1 or more rows of logits held at a time")


def reduce_rows(loss: Tensor, target: Tensor, ignore: int, reduction: str) -> Tensor:
    """Return the loss [N] as it is, its sum, or its mean over rows that are not ignored.

    The mean over no rows is 0: a batch without a target asks for no change, not for NaN.
    """
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (target != ignore).sum().clamp(min=1)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if softcap is None else softcap * (wide / softcap).tanh()


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    *,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each row, its log-sum-exp, and what lse lost by rounding.

    Shapes: logits [N, V] of any float dtype, target int64 [N]; returns loss, lse and correction
    [N] in float32 (float64 for float64). The probability of v is exp(x_v - lse) / correction; lse
    alone would be wrong in the third digit at logits of 1e4. Ignored rows are not read and give
    loss 0, lse 0, correction 1; a label out of range gives NaN.
    With x = softcap * tanh(logits / softcap), a row costs
    (1 - smoothing) * (lse - x_target) + smoothing * (lse - mean(x)) + z * lse**2.
    Source: z: Chowdhery et al. 2022, "PaLM", section 5; smoothing: as in torch; softcap: Gemma 2.
    """
    kept = target != ignore
    valid = kept & (target >= 0) & (target < logits.shape[1])
    x = _capped(torch.where(kept[:, None], logits, 0), softcap)
    lse = x.logsumexp(-1)
    # log_softmax and not lse - x: it subtracts the largest logit before it rounds.
    log_probs = x.log_softmax(-1)
    label = log_probs.gather(1, torch.where(valid, target, 0)[:, None])[:, 0]
    loss = -label
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * log_probs.mean(-1)
    loss = torch.where(valid, loss + z * lse * lse, torch.nan)
    with torch.no_grad():
        correction = (x - lse[:, None]).exp().sum(-1)
    zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
    return (
        torch.where(kept, loss, zero),
        torch.where(kept, lse, zero),
        torch.where(kept, correction, zero + 1),
    )


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
) -> Tensor:
    """Return the gradient of cross_entropy_rows for its logits, written to `out` if given.

    Shapes: dloss [N], dlse [N] or None, logits [N, V], target [N], lse and correction [N] as
    cross_entropy_rows returned them; out [N, V], may be logits itself; returns [N, V] in the dtype
    of logits. Ignored rows are zero, rows with a label out of range NaN.
    """
    kept = target != ignore
    valid = kept & (target >= 0) & (target < logits.shape[1])
    x = _capped(torch.where(kept[:, None], logits, 0), softcap)
    probs = (x - lse[:, None]).exp() / correction[:, None]
    onto_lse = dloss * (1 + 2 * z * lse)
    if dlse is not None:
        onto_lse = onto_lse + dlse
    label = torch.where(valid, target, 0)[:, None]
    dx = onto_lse[:, None] * probs - (dloss * smoothing / logits.shape[1])[:, None]
    dx = dx.scatter_add(1, label, -(dloss * (1 - smoothing))[:, None])
    if softcap is not None:
        dx = dx * (1 - (x / softcap).square())
    dx = torch.where(valid[:, None], dx, torch.nan)
    dx = torch.where(kept[:, None], dx, 0).to(logits.dtype)
    return dx if out is None else out.copy_(dx)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "none",
    validate: bool = False,
    rows: Callable[..., tuple[Tensor, Tensor, Tensor]] = cross_entropy_rows,
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of logits against labels, and the log-sum-exp of each row.

    Shapes: logits [N, V] of any float dtype, target int64 [N]; returns the loss in nats, [N] or a
    scalar by reduction ("none", "sum", "mean" over rows not ignored, 0 when all are), and lse [N],
    in float32 (float64 for float64). See `cross_entropy_rows`, which `rows` replaces.
    Raises: ValueError for wrong shapes, dtypes or options; for labels out of range and for rows
    without a finite log-sum-exp where the host can look (on the CPU, or with validate=True).
    """
    check_options(z, smoothing, softcap, reduction)
    check_rows(logits, target)
    check_labels(target, logits.shape[1], ignore, validate)
    loss, lse, _ = rows(logits, target, ignore=ignore, z=z, smoothing=smoothing, softcap=softcap)
    check_lse("logits", lse, validate)
    return reduce_rows(loss, target, ignore, reduction), lse


def linear_cross_entropy_rows(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunk: int,
    validate: bool = False,
    rows: Callable[..., tuple[Tensor, Tensor, Tensor]] = cross_entropy_rows,
    **options,
) -> Tensor:
    """Return the loss of each row of hidden @ weight.T, `chunk` rows of logits at a time.

    Shapes: hidden [N, D], weight [V, D] in the same dtype, target int64 [N]; returns [N] in float32
    (float64 for float64). Logits are formed in the dtype of hidden, as a head without this does.
    Memory: chunk * V logits, unless autograd records the calls.
    """
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        span = slice(start, start + chunk)
        loss, lse, _ = rows(hidden[span] @ weight.T, target[span], **options)
        check_lse(f"hidden[{start}:] @ weight.T", lse, validate)
        parts.append(loss)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=wide)


def linear_cross_entropy_rows_bwd(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunk: int,
    rows: Callable[..., tuple[Tensor, Tensor, Tensor]] = cross_entropy_rows,
    rows_bwd: Callable[..., Tensor] = cross_entropy_rows_bwd,
    **options,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of linear_cross_entropy_rows for hidden and weight.

    Shapes: dloss [N], hidden [N, D], weight [V, D], target [N]; returns [N, D] and [V, D] in the
    dtype of hidden. The logits of a chunk are formed again and overwritten by their gradient; the
    gradient of weight is added over chunks in float32, in the order of the rows.
    FLOPs: 6*N*V*D, of which 2*N*V*D form the logits again.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    dhidden = torch.empty_like(hidden)
    dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    for start in range(0, hidden.shape[0], chunk):
        span = slice(start, start + chunk)
        logits = hidden[span] @ weight.T
        _, lse, correction = rows(logits, target[span], **options)
        dlogits = rows_bwd(
            dloss[span], None, logits, target[span], lse, correction, out=logits, **options
        )
        dhidden[span] = dlogits @ weight
        dweight += dlogits.T @ hidden[span]
    return dhidden, dweight.to(weight.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunk: int,
    ignore: int = IGNORE,
    z: float = 0.0,
    smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "none",
    validate: bool = False,
    rows: Callable[..., Tensor] = linear_cross_entropy_rows,
) -> Tensor:
    """Return the cross entropy of hidden @ weight.T against labels without all logits at once.

    Shapes: hidden [N, D], weight [V, D], target int64 [N]; returns [N] or a scalar by reduction.
    Options and errors are those of `cross_entropy`; the rows are worked off by `rows`.
    """
    check_options(z, smoothing, softcap, reduction)
    check_linear(hidden, weight, target, chunk)
    check_labels(target, weight.shape[0], ignore, validate)
    options = {"ignore": ignore, "z": z, "smoothing": smoothing, "softcap": softcap}
    loss = rows(hidden, weight, target, chunk=chunk, validate=validate, **options)
    return reduce_rows(loss, target, ignore, reduction)
