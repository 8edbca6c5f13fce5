"""What attention and activation functions are given, seen from inside the calls of torch.

A TorchFunctionMode meets every call that model code makes. It only reads: the call itself runs
unchanged. Of attention a few query rows are computed again, in float32 at least, since a fused
kernel returns neither logits nor weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

no_torch_function = torch._C.DisableTorchFunction
"""Switches the mode off for what we compute ourselves."""
ROWS, SAMPLES, HEADS = 16, 2, 64
"""Query rows, samples and heads of one call that are looked at."""
FEW_KEYS = 4
"""A row that sees fewer keys says nothing about a collapse."""
HIDDEN = 5000.0
"""A logit this far below the largest of its row is a mask's."""
RELU = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6}
CUTOFFS: dict[Any, float] = {
    **dict.fromkeys(RELU, 0.0),
    F.gelu: -3.0,
    F.silu: -5.0,
}
"""Activation -> the input below which it gives next to nothing and lets no gradient through."""
SQUASHING = {
    **dict.fromkeys((torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_, F.tanh), "tanh"),
    **dict.fromkeys(
        (torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, F.sigmoid), "sigmoid"
    ),
}
FLAT = {"tanh": 2.65, "sigmoid": 5.3}
"""Input beyond which the value is within .01 (.005) of its end: the slope is under 2 % of its
largest."""
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
ATTENTION = F.scaled_dot_product_attention
WHOLE_ATTENTION = F.multi_head_attention_forward


class Watch(TorchFunctionMode):
    """Hand logits and pre-activations to a recorder while `recorder.active` is true."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        seen = WATCHED.get(func) if self.recorder.active else None
        if seen is None:
            return func(*args, **kwargs)
        with no_torch_function(), torch.no_grad():
            seen(self.recorder, func, args, kwargs)
        return func(*args, **kwargs)


def _pre_activation(recorder: Any, func: Any, args: Any, kwargs: Any) -> None:
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2 and x.numel():
        if func in SQUASHING:
            recorder.squashed(SQUASHING[func], x.detach())
        else:
            recorder.rectified(x.detach(), CUTOFFS[func])


def _clamp(recorder: Any, func: Any, args: Any, kwargs: Any) -> None:
    """clamp(min=0) is a ReLU."""
    low = args[1] if len(args) > 1 else kwargs.get("min")
    high = args[2] if len(args) > 2 else kwargs.get("max")
    x = args[0] if args else kwargs.get("input")
    is_relu = isinstance(low, (int, float)) and low == 0 and high is None
    if is_relu and isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2 and x.numel():
        recorder.rectified(x.detach(), 0.0)


def _softmax(recorder: Any, func: Any, args: Any, kwargs: Any) -> None:
    x = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(x, Tensor) or not x.is_floating_point() or dim not in (-1, x.dim() - 1):
        return
    named = "att" in recorder.here.lower()
    if x.dim() == 4 or (x.dim() == 3 and named and x.shape[-2] > 1):
        x = x.detach()
        x = x[:SAMPLES, :HEADS] if x.dim() == 4 else x[:HEADS].unsqueeze(0)
        if x.numel() and x.shape[-1] >= FEW_KEYS:
            recorder.attended(*logit_statistics(x[:, :, rows_of(x.shape[-2], x.device)]))


def _attention(recorder: Any, func: Any, args: Any, kwargs: Any) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key = given["query"].detach(), given["key"].detach()
    if query.numel() and key.numel() and key.shape[-2] >= FEW_KEYS:
        logits = attention_logits(
            query,
            key,
            given.get("attn_mask"),
            causal=bool(given.get("is_causal", False)),
            scale=given.get("scale"),
        )
        recorder.attended(*logit_statistics(logits))


def _whole_attention(recorder: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Project queries and keys of nn.MultiheadAttention again: its parts are hidden in one call."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    query, key = given["query"].detach(), given["key"].detach()
    if query.dim() == 2:
        query, key = query[:, None], key[:, None]
    batch = query.shape[1]
    query, key = query[:, :SAMPLES], key[:, :SAMPLES]
    biases = given.get("in_proj_bias")
    biases = (None, None) if biases is None else biases.detach().chunk(3)[:2]
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{letter}_proj_weight"].detach() for letter in "qk"]
    else:
        weights = given["in_proj_weight"].detach().chunk(3)[:2]
    heads = given["num_heads"]
    query, key = (
        F.linear(x, weight, bias).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        for x, weight, bias in zip((query, key), weights, biases, strict=True)
    )
    if key.numel() and query.numel() and key.shape[-2] >= FEW_KEYS:
        shape = (batch, heads, query.shape[-2], key.shape[-2])
        mask = _added(given.get("attn_mask"), given.get("key_padding_mask"), shape, query)
        mask = None if mask is None else mask[:SAMPLES]
        logits = attention_logits(query, key, mask, causal=False, scale=None)
        recorder.attended(*logit_statistics(logits))


def _added(
    mask: Tensor | None, padding: Tensor | None, shape: tuple[int, ...], like: Tensor
) -> Tensor | None:
    """Join the masks of nn.MultiheadAttention (True: hidden) into one to add, [B, H, L, S]."""
    total = None
    for found, view in ((mask, None), (padding, (shape[0], 1, 1, shape[3]))):
        if found is None:
            continue
        if found.dtype == torch.bool:
            hidden = torch.zeros(found.shape, dtype=like.dtype, device=like.device)
            found = hidden.masked_fill(found, -torch.inf)
        if view is not None:
            found = found.reshape(view)
        elif found.dim() == 3:
            found = found.reshape(-1, shape[1], *found.shape[1:])
        total = found if total is None else total + found
    return None if total is None else total.detach().expand(shape)


WATCHED: dict[Any, Callable[..., None]] = {
    **dict.fromkeys([*CUTOFFS, *SQUASHING], _pre_activation),
    **dict.fromkeys((torch.clamp, Tensor.clamp, Tensor.clamp_, torch.clamp_min), _clamp),
    Tensor.clamp_min: _clamp,
    **dict.fromkeys(SOFTMAX, _softmax),
    ATTENTION: _attention,
    WHOLE_ATTENTION: _whole_attention,
}


def rows_of(count: int, device: Any) -> Tensor:
    """Choose up to ROWS query rows, evenly spread, the last one among them; int64 [R]."""
    return torch.linspace(0, count - 1, min(ROWS, count), device=device).round().long()


def attention_logits(
    query: Tensor, key: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    """Return the masked logits of some rows, [b, H, R, S] in float32 or wider.

    Shapes: query [B, H, L, A] or [H, L, A]; key [B, G, S, A], G divides H; mask bool (True: seen)
    or float (added), broadcast to [B, H, L, S], or None. Hidden keys are minus infinity.
    """
    if query.dim() == 3:
        query, key = query[None], key[None]
        mask = mask[None] if mask is not None and mask.dim() == 3 else mask
    batch, heads, length, width = query.shape
    rows = rows_of(length, query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = 1 / math.sqrt(width) if scale is None else scale
    queries = query[:SAMPLES][:, :, rows].to(wide)
    keys = key[:SAMPLES].to(wide)
    if keys.shape[1] != heads:
        keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
    queries, keys = queries[:, :HEADS], keys[:, :HEADS]
    logits = queries @ keys.mT * scale
    if causal:
        later = torch.arange(keys.shape[-2], device=rows.device) > rows[:, None]
        logits = logits.masked_fill(later, -torch.inf)
    if mask is not None:
        part = mask.detach().expand(batch, heads, length, keys.shape[-2])
        part = part[:SAMPLES, :HEADS][:, :, rows]
        if part.dtype == torch.bool:
            logits = logits.masked_fill(~part, -torch.inf)
        else:
            logits = logits + part.to(wide)
    return logits


def logit_statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return [H] each: the largest logit in size, and the entropy over ln(keys that are seen).

    Shapes: logits [b, H, R, S]. Rows that see fewer than FEW_KEYS keys count for neither; a head
    without other rows has entropy NaN and largest logit 0.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.amax(-1, keepdim=True)
    seen = logits > top - HIDDEN
    count = seen.sum(-1)
    enough = count >= FEW_KEYS
    largest = logits.abs().masked_fill(~(seen & enough[..., None]), 0.0).amax((0, 2, 3))
    log_p = logits.masked_fill(~seen, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~seen, 0.0)).sum(-1)
    share = entropy / count.clamp(min=2).log()
    share = share.masked_fill(~enough, 0.0).sum((0, 2)) / enough.sum((0, 2))
    return largest, share
