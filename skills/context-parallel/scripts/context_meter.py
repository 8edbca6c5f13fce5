"""What attention over ranks keeps, computes and returns: counted, or held against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

BATCH = 2
POSITIONS = "positions"
NOISE = 1e-6
"""Of the norm of the gradient: some, as that of a key's bias, are zero but for rounding."""


def kept_bytes(model: Any, length: int, ranks: int, dtype: Any) -> int:
    """Return the bytes that attention of one block keeps for backward on one of `ranks` ranks.

    Shapes only, no memory: the project's heads at their full number and width. Neighbours in the
    ring are simulated; what came from one is new memory.
    """
    from curry_train.layers.attention import attend
    from curry_train.parallel.context_parallel import Ring, ring_attend

    heads, groups, tokens = model.num_attention_heads, model.num_key_value_heads, length // ranks
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        holding.append(tensor)
        return tensor

    def pass_on(tensors: list[Any]) -> Any:
        return lambda: [torch.empty_like(tensor) for tensor in tensors]

    holding: list[Any] = []
    with FakeTensorMode(), saved_tensors_hooks(pack, lambda tensor: tensor):
        q = torch.empty(1, heads, tokens, model.query_dim, dtype=dtype, requires_grad=True)
        k = torch.empty(1, groups, tokens, model.query_dim, dtype=dtype, requires_grad=True)
        v = torch.empty(1, groups, tokens, model.value_dim, dtype=dtype, requires_grad=True)
        sinks = torch.empty(heads, requires_grad=True) if model.attention_sinks else None
        if ranks == 1:
            attend(q, k, v, None, 1.0, sinks)
        else:
            ring_attend(q, k, v, sinks, None, Ring(0, ranks, 1.0, None, pass_on))
    return sum(kept.values())


def pairs(length: int, ranks: int, window: int | None) -> list[int]:
    """Return the pairs of query and key that each rank computes; a tile counts as a whole."""
    from curry_train.parallel import context_parallel as cp

    chunk, found = length // (2 * ranks), []
    for rank in range(ranks):
        total = 0
        for source in range(ranks):
            for block in cp.blocks(rank, source, ranks, chunk, window):
                rows, columns = (s.stop - s.start for s in (block.rows, block.columns))
                if block.form == "masked":
                    tiles = cp._tiles(block, window, cp.TILE)
                    total += sum(
                        (t.rows.stop - t.rows.start) * (t.columns.stop - t.columns.start)
                        for t in tiles
                    )
                else:
                    total += rows * (columns + 1) // 2 if block.form == "causal" else rows * columns
        found.append(total)
    return found


def attention_on_rank(rank: int, world: int, config: Any) -> list[tuple[str, str, float, bool]]:
    """Hold every block's attention on this rank's tokens against that on the whole sequence.

    Returns (block or positions, what, error, whether positions count from this rank's own start),
    for the ring and for gathered keys, without and with documents.
    """
    from curry_train.parallel.mesh import Mesh, build_mesh
    from curry_train.parallel.parallelize import build_chunks

    mesh = build_mesh(
        config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60.0
    )
    alone = replace(config, parallel=replace(config.parallel, cp=1))
    (whole,), _ = build_chunks(alone, Mesh.single())
    rows = []
    for kind in ("ring", "all_gather"):
        one = replace(config, parallel=replace(config.parallel, cp_kind=kind))
        (split,), _ = build_chunks(one, mesh)
        for documents in (False, True):
            rows += compare(whole, split, batch_of(config, documents), mesh, label(kind, documents))
    return rows


def label(kind: str, documents: bool) -> str:
    return f"{kind}{' with documents' if documents else ''}"


def batch_of(config: Any, documents: bool) -> dict[str, Any]:
    """Make a batch as the loader does."""
    length = config.data.seq_len
    luck = torch.Generator().manual_seed(2)
    ids = torch.randint(config.model.vocab_size, (BATCH, length), generator=luck)
    batch = {"input_ids": ids, "labels": ids}
    if documents:
        cuts = torch.stack([torch.arange(length) // 5, (torch.arange(length) + 3) // 7])
        starts = torch.cat((torch.ones(BATCH, 1, dtype=torch.bool), cuts.diff(dim=1) > 0), 1)
        at = torch.arange(length).expand(BATCH, -1)
        first = torch.where(starts, at, 0).cummax(1).values
        batch |= {"doc_ids": cuts, "position_ids": at - first}
    return batch


def compare(whole: Any, split: Any, batch: dict, mesh: Any, name: str) -> list[tuple]:
    """Positions as the step hands them to the model, then each block's attention."""
    from curry_train.step import take

    group, length = mesh.group("cp"), batch["input_ids"].shape[1]
    held = places_of(take, length, group)
    taken = take(batch, group)
    own = held[mesh.index("cp")]
    luck = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH, length, whole.config.hidden_size, generator=luck, dtype=torch.float64)
    grad = torch.randn(x.shape, generator=luck, dtype=torch.float64)
    there = whole.positions(x, batch.get("position_ids"), batch.get("doc_ids"))
    here = split.positions(x[:, own], taken.get("position_ids"), taken.get("doc_ids"))
    wanted = there.cos[..., own, :]
    local = there.cos[..., : len(own), :].expand_as(here.cos)
    gap = error(here.cos, wanted.expand_as(here.cos))
    from_zero = gap > 0 and "doc_ids" not in batch and error(here.cos, local) == 0
    rows = [(f"{POSITIONS}, {name}", "rotation", gap, from_zero)]
    for index, block in split.layers.items():
        layer, other = block.self_attn, whole.layers[index].self_attn
        mine, all_of_it = x[:, own].clone().requires_grad_(), x.clone().requires_grad_()
        out, reference = layer(mine, here), other(all_of_it, there)
        title = f"block {index}, {name}"
        split.zero_grad()
        whole.zero_grad()
        rows.append((title, "output", error(out.detach(), reference.detach()[:, own]), False))
        out.backward(grad[:, own].contiguous())
        reference.backward(grad)
        whole_grad = all_of_it.grad
        assert whole_grad is not None
        rows.append((title, "gradient of the input", error(mine.grad, whole_grad[:, own]), False))
        theirs, floor = dict(other.named_parameters()), NOISE * float(whole_grad.norm())
        for parameter, value in layer.named_parameters():
            found = value.grad.clone()
            dist.all_reduce(found, group=group)
            gap = error(found, theirs[parameter].grad, floor)
            rows.append((title, f"gradient of {parameter}", gap, False))
    return rows


def places_of(take: Any, length: int, group: Any) -> list[Any]:
    """Return the tokens that each rank gets, as the step cuts a sequence."""
    numbers = torch.arange(length)[None]
    own = take({"input_ids": numbers, "labels": numbers}, group)["input_ids"][0]
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own.contiguous(), group=group)
    return everyone


def error(found: Any, wanted: Any, floor: float = 1e-300) -> float:
    """Return max|found - wanted| over max|wanted|, or over `floor` where that is rounding noise."""
    worst = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=floor))
    return worst if worst == worst else float("inf")
