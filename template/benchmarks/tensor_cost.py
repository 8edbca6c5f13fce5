"""What tensor parallelism adds to the products that it splits, in CPU time of a rank.

A rank of two runs attention and SwiGLU of width 512, forward and backward, as the trainer does:
gather the sequence, the column-parallel products on its half of the features, the row-parallel
product, sum and scatter; twice forward, and their counterparts backward. Against it stand

halves: the same half of the same products, attention and activation on the gathered sequence, on
    plain tensors without layers, DTensors or messages: what a rank would do if nothing had to be
    sent. Added cost = rank / halves - 1.
unsplit: one process with the whole layers, its time divided by two. Added cost = rank / (unsplit /
    2) - 1; what two ranks both do, or do worse on smaller matrices, counts as well.

CPU time of the whole process, so that the threads of the transport count; one computing thread; the
three ways take turns on both ranks at once, and the ratio is the median over the rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.config import Config, ModelConfig, ParallelConfig
from curry_train.layers.attention import Attention, Positions, positions_of
from curry_train.layers.linear import local
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.rope import rotate
from curry_train.parallel.collectives import own_slice
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.parallel.parallelize import set_groups
from curry_train.testing import run_ranks

WARMUP = 2
SAME = 1e-5
"""Largest relative difference (norms) of the split layers from whole ones, in float32."""


class Sizes(NamedTuple):
    """Batch, sequence, width, heads, width of the feed-forward."""

    batch: int = 1
    sequence: int = 1024
    width: int = 512
    heads: int = 8
    hidden: int = 1536


def measure_cost(rounds: int, sizes: Sizes) -> dict[str, Any]:
    """Return the added cost against both references, by the median, the worse of two ranks."""
    answers = run_ranks(_costs_of_rank, 2, rounds, sizes, timeout=170.0)
    rank, halves, unsplit = (np.array(times) for times in zip(*answers, strict=True))
    return {
        **sizes._asdict(),
        "rounds": rounds,
        "rank_ms": float(np.median(rank) * 1e3),
        "halves_ms": float(np.median(halves) * 1e3),
        "unsplit_ms": float(np.median(unsplit) * 1e3),
        "added_to_halves": float(np.median(rank / halves, axis=1).max() - 1),
        "added_to_unsplit": float(np.median(2 * rank / unsplit, axis=1).max() - 1),
    }


def _costs_of_rank(rank: int, world: int, rounds: int, sizes: Sizes) -> tuple[list[float], ...]:
    mesh = build_mesh(
        ParallelConfig(tp=2), device=torch.device("cpu"), local_rank=rank, comm_timeout=60
    )
    ways = ways_of(mesh, sizes)
    times: dict[str, list[float]] = {name: [] for name in ways}
    gc.disable()
    for turn in range(rounds + WARMUP):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            ways[name]()
            times[name].append(time.process_time() - start)
    return tuple(times[name][WARMUP:] for name in ("rank", "halves", "unsplit"))


def ways_of(mesh: Mesh, sizes: Sizes) -> dict[str, Callable[[], None]]:
    """Return the three ways as functions that do one forward and backward; checks them first."""
    config = ModelConfig(
        hidden_size=sizes.width,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.width // sizes.heads,
        num_hidden_layers=1,
        qk_norm=False,
    )
    torch.manual_seed(0)
    whole, tp = layers_of(config, sizes, Mesh.single()), mesh.group("tp")
    split = layers_of(config, sizes, mesh)
    for (name, own), given in zip(split.named_parameters(), whole.parameters(), strict=True):
        dim = own.placements[0].dim
        assert given.shape == own.shape, name
        local(own).detach().copy_(own_slice(given.detach(), dim, tp))
    halves = {name: local(p).detach().requires_grad_() for name, p in split.named_parameters()}
    x = torch.randn(sizes.batch, sizes.sequence, sizes.width)
    upstream, places = torch.randn_like(x), torch.arange(sizes.sequence)[None]
    positions = positions_of(config, places, None, x.dtype)

    def through(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return layers[1](layers[0](x, positions))

    def half(x: Tensor) -> Tensor:
        return half_of_layers(halves, x, positions, sizes.width // sizes.heads)

    ours = own_slice(x, 1, tp).contiguous(), own_slice(upstream, 1, tp).contiguous()
    runs = {
        "rank": (lambda x: through(split, x), *ours, list(split.parameters())),
        "halves": (half, x, upstream, list(halves.values())),
        "unsplit": (lambda x: through(whole, x), x, upstream, list(whole.parameters())),
    }
    found = {name: step(*run) for name, run in runs.items()}
    for mine, theirs in zip(found["rank"], found["unsplit"], strict=True):
        theirs = own_slice(theirs, 1, tp)
        distance = float((mine - theirs).norm() / theirs.norm())
        assert distance <= SAME, f"the split layers are off by {distance:.1e}; nothing was measured"
    return {name: lambda run=run: step(*run) for name, run in runs.items()}


def layers_of(config: ModelConfig, sizes: Sizes, mesh: Mesh) -> nn.ModuleList:
    """Return attention and SwiGLU as the trainer splits them over the mesh."""
    with torch.device("meta"):
        layers = nn.ModuleList([Attention(config), SwiGLU(sizes.width, sizes.hidden)])
    set_groups(layers, Config(parallel=ParallelConfig(tp=mesh.size("tp"))), mesh)
    layers.to_empty(device="cpu")
    for parameter in layers.parameters():
        nn.init.normal_(local(parameter).detach(), std=0.05)
    return layers


def half_of_layers(
    weights: dict[str, Tensor], x_BSD: Tensor, positions: Positions, head_dim: int
) -> Tensor:
    """Return what a rank's half of the weights makes of the whole sequence [B, S, D]."""
    q, k, v = (
        F.linear(x_BSD, weights[f"0.{name}_proj.weight"])
        .unflatten(-1, (-1, head_dim))
        .transpose(1, 2)
        for name in "qkv"
    )
    q, k = (rotate(x, positions.cos, positions.sin) for x in (q, k))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x_BSD = F.linear(out, weights["0.o_proj.weight"])
    gate, up = (F.linear(x_BSD, weights[f"1.{name}_proj.weight"]) for name in ("gate", "up"))
    return F.linear(F.silu(gate) * up, weights["1.down_proj.weight"])


def step(
    function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run forward and backward; returns the output and the gradient of x."""
    for weight in weights:
        weight.grad = None
    x = x.detach().requires_grad_()
    out = function(x)
    out.backward(upstream)
    return out.detach(), x.grad
