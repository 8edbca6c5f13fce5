"""What a forked rank finds out: split layers against whole ones, bytes sent, the largest tensor.

Only what the project's own package has is run; nothing here knows how a layer is split.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, ROUNDS, TIMED_TOKENS = 2, 3, 256
IGNORED = -100


def size_of(tensor: Any) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


class Meter(TorchDispatchMode):
    """Counts what this rank sends in each group, whoever calls the collective.

    Rings: an all-gather or reduce-scatter of n ranks sends (n - 1) / n of the whole tensor, an
    all-reduce twice that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[tuple[int, ...], bool], float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.note(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def note(self, name: str, args: Any) -> None:
        handle = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
        if handle is None:
            return
        group = dist.ProcessGroup.unbox(handle)
        share = (group.size() - 1) / group.size()
        if name == "alltoall_base_":
            rows, splits = args[1], args[4]
            away = sum(splits) - splits[group.rank()] if splits else len(rows) * share
            size = away * size_of(rows) / max(len(rows), 1)
        else:
            larger, factor = {
                "allreduce_": (0, 2 * share), "_allgather_base_": (0, share),
                "allgather_": (0, share), "_reduce_scatter_base_": (1, share),
                "reduce_scatter_": (1, share), "send": (0, 1.0), "broadcast_": (0, share),
            }.get(name, (None, 0.0))  # fmt: skip
            size = 0.0 if larger is None else factor * sum(map(size_of, tree_leaves(args[larger])))
        # Rows of experts apart, whose number is chance: only they go in parts of unequal size.
        uneven = name == "alltoall_base_" and len(args[4]) > 0
        self.sent[tuple(dist.get_process_group_ranks(group)), uneven] += size


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes, views of parameters apart."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.own = {storage_of(p) for p in model.parameters()}
        self.elements, self.made_by = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            larger = isinstance(leaf, torch.Tensor) and leaf.numel() > self.elements
            if larger and storage_of(leaf) not in self.own:
                self.elements, self.made_by = leaf.numel(), str(func)
        return out


def storage_of(tensor: Any) -> int:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.untyped_storage().data_ptr()


def mesh_of(config: Any, rank: int) -> Any:
    """Build this rank's groups."""
    from curry_train.parallel.mesh import build_mesh

    return build_mesh(
        config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60.0
    )


def sent_on_rank(rank: int, world: int, config: Any, corpus: Any) -> dict[tuple, float]:
    """Take one optimizer step; return the bytes sent by (ranks of the group, uneven parts)."""
    from curry_train.runtime import assemble
    from curry_train.step import train_step

    runtime = assemble(config, corpus, mesh_of(config, rank))
    with Meter() as meter:
        train_step(runtime)
    return dict(meter.sent)


def split_on_rank(rank: int, world: int, config: Any) -> dict[str, Any]:
    """Hold every split layer against the whole one; config.parallel has no axis but tp."""
    from curry_train.parallel.mesh import Mesh
    from curry_train.parallel.parallelize import build_chunks

    mesh = mesh_of(config, rank)
    alone = replace(config, parallel=replace(config.parallel, tp=1))
    whole: Any
    (whole,), _ = build_chunks(alone, Mesh.single())
    (split,), _ = build_chunks(config, mesh)
    rows = list(layers(whole, split, config.data.seq_len, mesh))
    rows += list(cross_entropy(config, whole.padded_vocab, mesh))
    return {"rows": rows, **largest_of(config, split), **timed(config, mesh)}


def draw(name: str, *shape: int) -> Any:
    """Draw the same numbers on every rank."""
    luck = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=luck, dtype=torch.float64)


def error(found: Any, wanted: Any) -> float:
    """Return max|found - wanted| over max|wanted|; infinite where the shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    worst = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))
    return worst if worst == worst else float("inf")


def layers(whole: Any, split: Any, length: int, mesh: Any) -> Iterator[tuple[str, str, float]]:
    """Yield (layer, what, error) of every column, row and vocabulary parallel layer."""
    from curry_train.parallel import tensor_parallel as tp

    there = dict(whole.named_modules())
    for name, module in split.named_modules():
        if isinstance(module, tp.ColumnParallelLinear):
            found = linear(name, there[name], module, length, mesh, column=True)
        elif isinstance(module, tp.RowParallelLinear):
            found = linear(name, there[name], module, length, mesh, column=False)
        elif isinstance(module, tp.VocabParallelEmbedding):
            found = embedding(name, there[name], module, length, mesh)
        else:
            continue
        yield from ((name, what, value) for what, value in found)


def linear(
    name: str, whole: Any, module: Any, length: int, mesh: Any, *, column: bool
) -> Iterator[tuple[str, float]]:
    """A column layer reads all and returns its features; a row layer the other way round."""
    from curry_train.layers.linear import local

    group, ranks, at = mesh.group("tp"), mesh.size("tp"), mesh.index("tp")

    def own(x: Any, dim: int) -> Any:
        return x.chunk(ranks, dim)[at]

    x = draw(name, BATCH, length, whole.weight.shape[1])
    forget(whole, module)
    everything = x.clone().requires_grad_()
    mine = (x if column else own(x, -1)).clone().requires_grad_()
    wanted, out = whole(everything), module(mine)
    grad = draw(f"grad of {name}", *wanted.shape)
    wanted.backward(grad)
    shared = -1 if column else 1
    yield "output", error(out.detach(), own(wanted.detach(), shared))
    out.backward(own(grad, shared).contiguous())
    below = mine.grad
    if column:
        dist.all_reduce(below, group=group)
    yield (
        "gradient of the input",
        error(below, everything.grad if column else own(everything.grad, -1)),
    )
    rows = own(whole.weight.grad, 0 if column else 1)
    yield "gradient of the weight", error(local(module.weight.grad), rows)
    if whole.bias is not None:
        bias = local(module.bias.grad)
        if not column:
            dist.all_reduce(bias, group=group)
        yield (
            "gradient of the bias",
            error(bias, own(whole.bias.grad, 0) if column else whole.bias.grad),
        )


def forget(*modules: Any) -> None:
    """A tied weight has the gradient of its other layer."""
    for module in modules:
        module.zero_grad()


def embedding(
    name: str, whole: Any, module: Any, length: int, mesh: Any
) -> Iterator[tuple[str, float]]:
    """Rows by id, of the own tokens."""
    from curry_train.layers.linear import local

    ranks, at = mesh.size("tp"), mesh.index("tp")
    luck = torch.Generator().manual_seed(5)
    ids = torch.randint(len(whole.weight), (BATCH, length), generator=luck)
    forget(whole, module)
    wanted, out = whole(ids), module(ids)
    grad = draw(f"grad of {name}", *wanted.shape)
    wanted.backward(grad)
    yield "output", error(out.detach(), wanted.detach().chunk(ranks, 1)[at])
    out.backward(grad.chunk(ranks, 1)[at].contiguous())
    yield (
        "gradient of the weight",
        error(local(module.weight.grad), whole.weight.grad.chunk(ranks, 0)[at]),
    )


def cross_entropy(config: Any, padded: int, mesh: Any) -> Iterator[tuple[str, str, float]]:
    """The loss of own columns, with ignored labels and a padded vocabulary."""
    from curry_train.loss import token_nll
    from curry_train.parallel.tensor_parallel import vocab_parallel_nll

    ranks, at, count = mesh.size("tp"), mesh.index("tp"), 4 * BATCH
    luck = torch.Generator().manual_seed(6)
    labels = torch.randint(config.model.vocab_size, (count,), generator=luck)
    labels[::3] = IGNORED
    logits = 3 * draw("logits", count, padded)
    logits[:, config.model.vocab_size :] = -torch.inf
    everything = logits.clone().requires_grad_()
    mine = logits.chunk(ranks, 1)[at].clone().requires_grad_()
    wanted, found = (
        token_nll(everything, labels),
        vocab_parallel_nll(mine, labels, mesh.group("tp")),
    )
    yield "cross entropy", "loss", error(found.detach(), wanted.detach())
    grad = draw("grad of the loss", count)
    wanted.backward(grad)
    found.backward(grad)
    yield (
        "cross entropy",
        "gradient of the logits",
        error(mine.grad, everything.grad.chunk(ranks, 1)[at]),
    )


def largest_of(config: Any, split: Any) -> dict[str, Any]:
    """Run a forward pass with its loss; return the largest tensor over the full logits."""
    from curry_train.loss import token_sums

    luck = torch.Generator().manual_seed(7)
    ids = torch.randint(config.model.vocab_size, (BATCH, config.data.seq_len), generator=luck)
    with Largest(split) as seen:
        token_sums(split, {"input_ids": ids, "labels": ids})
    return {"share": seen.elements / (ids.numel() * split.padded_vocab), "made_by": seen.made_by}


def timed(config: Any, mesh: Any) -> dict[str, float]:
    """Return CPU seconds of a dense feed-forward, forward and backward: split, and whole."""
    from curry_train.parallel.mesh import Mesh
    from curry_train.parallel.parallelize import build_chunks

    model = replace(
        config.model, num_experts=0, hidden_size=512, intermediate_size=512 * 2 * mesh.size("tp"),
        num_hidden_layers=1, vocab_size=64, tie_word_embeddings=False,
        shared_expert_intermediate_size=0, first_k_dense_replace=0,
    )  # fmt: skip
    config = replace(config, model=model, precision="fp32")
    alone = replace(config, parallel=replace(config.parallel, tp=1))
    found = {}
    chunk: Any
    for name, one, where in (("cpu_split", config, mesh), ("cpu_whole", alone, Mesh.single())):
        (chunk,), _ = build_chunks(one, where)
        layer, seconds = chunk.layers["0"].mlp, []
        x = torch.randn(1, TIMED_TOKENS // where.size("tp"), 512, requires_grad=True)
        for _ in range(ROUNDS):
            began = time.process_time()
            layer(x).sum().backward()
            seconds.append(time.process_time() - began)
        found[name] = min(seconds)
    return found
