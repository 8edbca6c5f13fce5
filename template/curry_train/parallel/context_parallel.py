"""Attention over a sequence whose tokens are spread over the ranks of a group.

The sequence is cut into 2 * ranks chunks, and rank r holds chunks r and 2 * ranks - 1 - r: an early
and a late one, so that causal attention is the same work for every rank. Keys and values travel
round the ring while each rank's queries stay, and what a query saw of each visit is merged by its
log-sum-exp. Nothing larger than one rank's share of the sequence exists at any time.
Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; which chunks a rank holds as
in Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from curry_train.parallel.collectives import gather_sequence, stack_ranks

TILE = 128  # queries and keys whose scores exist at once where no fused kernel takes the mask
KINDS = ("ring", "all_gather")


def places(length: int, index: int, world: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the places in the whole sequence of the tokens that rank `index` of `world` holds.

    Shapes: int64 [S / world], ascending, S = length: a chunk from the front, then its mirror from
    the back. One rank holds every place. Raises ValueError when 2 * world does not divide length.
    """
    if world == 1:
        return torch.arange(length, device=device)
    if length % (2 * world):
        raise ValueError(
            f"a sequence of {length} tokens does not cut into 2 * parallel.cp = {2 * world} equal "
            f"chunks; its length must be a multiple of {2 * world}; set data.seq_len="
            f"{-(-length // (2 * world)) * 2 * world} or parallel.cp=1"
        )
    chunk = length // (2 * world)
    head = torch.arange(index * chunk, (index + 1) * chunk, device=device)
    return torch.cat((head, head + (2 * world - 1 - 2 * index) * chunk))


def take(batch: dict[str, Any], group: ProcessGroup | None) -> dict[str, Any]:
    """Return this rank's tokens of a micro-batch, with `position_ids` of the whole sequence.

    Shapes: every tensor [B or 1, S, ...] becomes [B or 1, S / ranks, ...], anything else stays.
    position_ids [1, S / ranks] are added where the batch has none. Group: the ranks that share the
    sequence, no communication; None returns the batch itself. Raises ValueError as `places` does.
    """
    if group is None:
        return batch
    ids = batch["input_ids"]
    length = ids.shape[1]
    own = places(length, dist.get_rank(group), dist.get_world_size(group), ids.device)

    def cut(value: Any) -> Any:
        spread = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
        return value.index_select(1, own) if spread else value

    taken = {name: cut(value) for name, value in batch.items()}
    if taken.get("position_ids") is None:
        taken["position_ids"] = own[None]
    return taken


def context_attend(
    q_BHSA: Tensor,
    k_BGSA: Tensor,
    v_BGSA: Tensor,
    *,
    scale: float,
    window: int | None,
    doc_ids: Tensor | None,
    sinks_H: Tensor | None,
    group: ProcessGroup | None,
    kind: str = "ring",
    mask: Tensor | None = None,
) -> Tensor:
    """Do for this rank's tokens what `layers.attention.attend` does for the whole sequence.

    Shapes: S is this rank's share, in the order of `places`; q [B, H, S, A]; k [B, G, S, A];
    v [B, G, S, any width up to A]; doc_ids int64 [B, S] or None; sinks [H] or None. Returns
    [B, S, H * width of v] in the dtype of q. Causal by place in the whole sequence, at most
    `window` tokens back (itself included). Gradients of q, k and v are whole; that of the sinks
    is this rank's part. Only the first derivative exists.
    Group: the ranks that share the sequence; None means that S is all of it. `ring` passes keys
    and values to the next rank ranks - 1 times, and their gradients once more; `all_gather` holds
    those of the whole sequence and a mask, for kernels that take one: `mask`, made of
    `visible_rows` as Positions has it, lets blocks share one, None makes it here. Every rank must
    call with the same shapes, in the same order. Raises ValueError for an unknown kind, and as
    `places` does.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; allowed: {KINDS}; set parallel.cp_kind=ring")
    if group is None or kind == "all_gather":
        from curry_train.layers.attention import attend  # which imports this module

        if mask is None:
            mask = visible_rows(q_BHSA.shape[2], window, doc_ids, group, q_BHSA.device)
            if mask is not None and sinks_H is not None:
                mask = F.pad(mask, (1, 0, 1, 0), value=True)
        if group is not None:
            k_BGSA, v_BGSA = (_in_order(gather_sequence(x, group), group) for x in (k_BGSA, v_BGSA))
        return attend(q_BHSA, k_BGSA, v_BGSA, mask, scale, sinks_H)
    index, world = dist.get_rank(group), dist.get_world_size(group)
    places(q_BHSA.shape[2] * world, index, world)  # refuses what has no two halves
    ring = Ring(index, world, scale, window, partial(_pass_on, group=group))
    return ring_attend(q_BHSA, k_BGSA, v_BGSA, sinks_H, doc_ids, ring)


def visible_rows(
    length: int,
    window: int | None,
    doc_ids: Tensor | None,
    group: ProcessGroup | None,
    device: torch.device | str,
) -> Tensor | None:
    """Return the rows of `layers.attention.visible_keys` that are this rank's `length` tokens.

    Shapes: doc_ids int64 [B, length] or None; returns bool [B or 1, 1, length, length * ranks].
    Group: one all-gather of the documents; None gives all rows, or None where they are causal.
    """
    from curry_train.layers.attention import visible_keys

    if group is None:
        return visible_keys(length, window, doc_ids, device)
    world = dist.get_world_size(group)
    own = places(length * world, dist.get_rank(group), world, device)
    distance = own[:, None] - torch.arange(length * world, device=device)
    other = None
    if doc_ids is not None:
        gathered = stack_ranks(doc_ids, group).movedim(0, 1).flatten(1)
        other = _in_order(gathered[..., None], group)[..., 0]
    return _seen(distance, window, doc_ids, other)


def _seen(distance: Tensor, window: int | None, own: Tensor | None, other: Tensor | None) -> Tensor:
    seen = (distance >= 0)[None, None]
    if window is not None:
        seen = seen & (distance < window)
    if own is not None and other is not None:
        seen = seen & (own[:, None, :, None] == other[:, None, None, :])
    return seen


def _in_order(x: Tensor, group: ProcessGroup) -> Tensor:
    """Put the gathered shares of all ranks, [..., S, any], into the order of the sequence."""
    length, world = x.shape[-2], dist.get_world_size(group)
    held = [places(length, rank, world, x.device) for rank in range(world)]
    return x.index_select(-2, torch.cat(held).argsort())


class Ring(NamedTuple):
    """A rank's place in the ring, the scale and window of its attention, and its neighbours.

    `pass_on` starts an exchange: the given tensors go to the next rank; the call it returns waits
    and hands out the previous rank's, of the same shapes.
    """

    index: int
    world: int
    scale: float
    window: int | None
    pass_on: Callable[[list[Tensor]], Callable[[], list[Tensor]]]


def _pass_on(tensors: list[Tensor], group: ProcessGroup) -> Callable[[], list[Tensor]]:
    index, world = dist.get_rank(group), dist.get_world_size(group)
    after = dist.get_global_rank(group, (index + 1) % world)
    before = dist.get_global_rank(group, (index - 1) % world)
    came = [torch.empty_like(tensor) for tensor in tensors]
    ops = [dist.P2POp(dist.isend, tensor, after, group) for tensor in tensors]
    ops += [dist.P2POp(dist.irecv, tensor, before, group) for tensor in came]
    works = dist.batch_isend_irecv(ops)

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        ops.clear()  # the sent tensors had to live until here
        return came

    return wait


def _visits(tensors: list[Tensor], ring: Ring) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield whose tensors are here, and them; the next are on their way meanwhile."""
    for step in range(ring.world):
        wait = ring.pass_on(tensors) if step < ring.world - 1 else None
        yield (ring.index - step) % ring.world, tensors
        if wait is not None:
            tensors = wait()


class Block(NamedTuple):
    """Queries `rows` against keys `columns` of two ranks' shares; `gap`: how far apart they start.

    `form`: every query sees every key ("full"), a triangle ("causal"), or neither ("masked").
    """

    rows: slice
    columns: slice
    gap: int
    form: str


def _form(gap: int, rows: int, columns: int, window: int | None) -> str | None:
    nearest, farthest = gap - columns + 1, gap + rows - 1
    if farthest < 0 or (window is not None and nearest >= window):
        return None
    if window is None or farthest < window:
        if nearest >= 0:
            return "full"
        if gap == 0 and rows == columns:
            return "causal"
    return "masked"


def blocks(index: int, source: int, world: int, chunk: int, window: int | None) -> list[Block]:
    """Return the blocks of rank `index`'s queries and rank `source`'s keys that see anything.

    Without a window a rank has 2 full blocks for every other rank, and 1 full and 2 causal ones
    of its own: 2 * world * chunk^2 + chunk pairs in all, whichever rank it is.
    """
    found = []
    for i, mine in enumerate((index, 2 * world - 1 - index)):
        for j, theirs in enumerate((source, 2 * world - 1 - source)):
            gap = (mine - theirs) * chunk
            form = _form(gap, chunk, chunk, window)
            if form is not None:
                rows = slice(i * chunk, (i + 1) * chunk)
                found.append(Block(rows, slice(j * chunk, (j + 1) * chunk), gap, form))
    return found


def _tiles(block: Block, window: int | None, edge: int) -> Iterator[Block]:
    for top in range(block.rows.start, block.rows.stop, edge):
        rows = slice(top, min(top + edge, block.rows.stop))
        for left in range(block.columns.start, block.columns.stop, edge):
            columns = slice(left, min(left + edge, block.columns.stop))
            gap = block.gap + (top - block.rows.start) - (left - block.columns.start)
            form = _form(gap, rows.stop - top, columns.stop - left, window)
            if form is not None:
                yield Block(rows, columns, gap, form)


def _pieces(
    ring: Ring, source: int, q: Tensor, v: Tensor, docs: list[Tensor]
) -> Iterator[tuple[Block, Tensor | None]]:
    """Yield what is to be computed, with the mask of a tile, or None where a fused kernel can.

    docs: none, or this rank's and the visited rank's.
    """
    fused = not docs and _can_fuse(q, v)
    edge = TILE if q.device.type == "cpu" else 4 * TILE  # a cache is small, a launch is dear
    for block in blocks(ring.index, source, ring.world, q.shape[2] // 2, ring.window):
        if fused and block.form != "masked":
            yield block, None
            continue
        for tile in _tiles(block, ring.window, edge):
            rows = torch.arange(tile.rows.stop - tile.rows.start, device=q.device)
            columns = torch.arange(tile.columns.stop - tile.columns.start, device=q.device)
            distance = rows[:, None] - columns + tile.gap
            ids = (docs[0][:, tile.rows], docs[1][:, tile.columns]) if docs else (None, None)
            seen = _seen(distance, ring.window, *ids)
            if docs and not seen.any():
                continue
            yield tile, seen


def _can_fuse(q: Tensor, v: Tensor) -> bool:
    if v.shape[-1] > q.shape[-1]:
        return False
    if q.device.type == "cuda":
        half = q.dtype in (torch.float16, torch.bfloat16)
        return half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, _widen(v, q.shape[-1]), 0.0, causal, scale=scale)[:2]
    return out.narrow(-1, 0, v.shape[-1]), lse


def _fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one block, given `out` and `lse` of the whole softmax."""
    aten, width = torch.ops.aten, v.shape[-1]
    grad, v, out = (_widen(x, q.shape[-1]) for x in (grad, v, out))
    lse = lse.contiguous()
    if q.device.type == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        seed, offset = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in (2, ()))
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset, scale=scale
        )
    return dq, dk, dv.narrow(-1, 0, width)


def _fold(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    # The query heads of a group become rows of one matrix, so keys are never repeated.
    return x.to(dtype).reshape(x.shape[0], groups, -1, x.shape[-1])


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    scores = _fold(q, k.shape[1], dtype) @ k.to(dtype).transpose(-1, -2) * scale
    return scores.view(*q.shape[:3], k.shape[2]).masked_fill(~seen, -torch.inf)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, seen, scale, dtype)
    lse = scores.logsumexp(-1)
    shares = (scores - _finite(lse)[..., None]).exp_()
    out = _fold(shares, k.shape[1], dtype) @ v.to(dtype)
    return out.view(*q.shape[:3], v.shape[-1]), lse


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    seen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one tile; delta [B, H, S]: grad times out, summed over the width."""
    groups, dtype = k.shape[1], lse.dtype
    shares = (_scores(q, k, seen, scale, dtype) - lse[..., None]).exp_()
    grad = _fold(grad, groups, dtype)
    dv = _fold(shares, groups, dtype).transpose(-1, -2) @ grad
    pull = (grad @ v.to(dtype).transpose(-1, -2)).view(shares.shape) - delta[..., None]
    pull = _fold(pull.mul_(shares).mul_(scale), groups, dtype)
    dq = (pull @ k.to(dtype)).view(q.shape)
    return dq, pull.transpose(-1, -2) @ _fold(q, groups, dtype), dv


def _finite(lse: Tensor) -> Tensor:
    # Of a row that has seen nothing yet: exp(-inf - -inf) would be NaN, and must be 0.
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add to out [B, H, S, any] and lse [B, H, S], in place, what was seen of further keys."""
    total = torch.logaddexp(lse, more_lse)
    safe = _finite(total)
    out.mul_((lse - safe).exp_()[..., None]).add_(more * (more_lse - safe).exp_()[..., None])
    lse.copy_(total)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        doc_ids: Tensor | None,
        ring: Ring,
    ) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        docs = [] if doc_ids is None else [doc_ids.contiguous()]
        for source, (k_, v_, *docs_) in _visits([k.contiguous(), v.contiguous(), *docs], ring):
            for block, seen in _pieces(ring, source, q, v, docs + docs_):
                rows, columns = block.rows, block.columns
                share = (q[:, :, rows], k_[:, :, columns], v_[:, :, columns])
                if seen is None:
                    more = _fused(*share, block.form == "causal", ring.scale)
                else:
                    more = _plain(*share, seen, ring.scale, dtype)
                _merge(out[:, :, rows], lse[:, :, rows], *more)
        if sinks is not None:
            # A logit without a value: it only makes the other shares smaller.
            with_sink = torch.logaddexp(lse, sinks.to(dtype)[:, None])
            out.mul_((lse - with_sink).exp_()[..., None])
            lse = with_sink
        out_BSD = out.to(q.dtype).transpose(1, 2).flatten(2)
        ctx.save_for_backward(q, k, v, sinks, doc_ids, out_BSD, lse)
        ctx.ring = ring
        return out_BSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, doc_ids, out_BSD, lse = ctx.saved_tensors
        ring, dtype = ctx.ring, lse.dtype
        grad, out = (x.unflatten(2, (q.shape[1], -1)).transpose(1, 2) for x in (grad_BSD, out_BSD))
        delta = (grad.to(dtype) * out).sum(-1)
        docs = [] if doc_ids is None else [doc_ids.contiguous()]
        dq = torch.zeros_like(q, dtype=dtype)
        arrive = None
        for source, (k_, v_, *docs_) in _visits([k.contiguous(), v.contiguous(), *docs], ring):
            dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k_, v_))
            for block, seen in _pieces(ring, source, q, v, docs + docs_):
                rows, columns = block.rows, block.columns
                share = (grad[:, :, rows], q[:, :, rows], k_[:, :, columns], v_[:, :, columns])
                whole = (out[:, :, rows] if seen is None else delta[:, :, rows], lse[:, :, rows])
                if seen is None:
                    more = _fused_backward(*share, *whole, block.form == "causal", ring.scale)
                else:
                    more = _plain_backward(*share, *whole, seen, ring.scale)
                sums = (dq[:, :, rows], dk[:, :, columns], dv[:, :, columns])
                for total, part in zip(sums, more, strict=True):
                    total.add_(part)
            if arrive is not None:
                # Of the ranks that had these keys before.
                dk, dv = (own.add_(more) for own, more in zip((dk, dv), arrive(), strict=True))
            if ring.world > 1:
                arrive = ring.pass_on([dk, dv])
        if arrive is not None:
            dk, dv = arrive()  # the last exchange went to their owner
        dsinks = None
        if sinks is not None:
            dsinks = -((sinks.to(dtype)[:, None] - lse).exp_() * delta).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


# Arguments q, k, v, sinks, doc_ids as in `context_attend`, and the Ring, whoever passes them on.
ring_attend = _RingAttention.apply
