"""Will it fit: memory and tokens per step of a layout, in closed form, no device.

`python train.py dry_run=true` prints it, with what the ranks send (communication). The closed forms
know the decoder family; of another model parameters are counted on the built model, and its
activations, FLOP and messages are unknown.
"""

from __future__ import annotations

import os
from dataclasses import replace

from curry_train.activations import key_value_width, ranks_visited
from curry_train.communication import print_communication
from curry_train.config import Config, ConfigError, planned_world
from curry_train.data import holds_samples
from curry_train.layout import Layout
from curry_train.parallel import dims
from curry_train.parallel.grads import BUCKET_ELEMENTS
from curry_train.rules import problems
from curry_train.sizes import Held, flops_per_token, is_dense
from curry_train.stages import live_micro_batches


def estimate(config: Config, world: int) -> dict[str, int | None]:
    """Return bytes per rank, of the pipeline's fullest: parameters, gradients, optimizer,
    activations, buffers.

    Exact (held against real ranks in the tests), where sizes do not divide for the rank with most:
    parameters, gradients and both AdamW moments between two steps, in float32 (float64 under fp64),
    after tp, ep and pp have split them; of them dp_shard*cp ranks divide the moments (parallel.zero
    1) or all three (2, 3), experts over dp_shard*cp*tp/ep.
    Close: activations of the micro-batches that are alive at once, with the copy of the weights in
    the compute dtype; tests hold them against what ranks keep, within 3 percent, 10 under ep, whose
    experts are taken to be evenly used. What recomputation keeps is counted, not measured. None
    where no closed form knows the model.
    Buffers: the bucket of the all-reduce, or gathered parameters and gradients before they are
    divided, and messages under way. Not counted: temporaries of kernels and of backward, the
    allocator's losses, what the driver and the libraries take.
    Raises ValueError when the axes do not make `world` ranks.
    """
    ranks = estimate_ranks(config, world)
    return max(ranks, key=lambda parts: sum(amount or 0 for amount in parts.values()))


def estimate_ranks(config: Config, world: int) -> list[dict[str, int | None]]:
    """Return `estimate` for each place of the pipeline, the first stage's first."""
    layout = Layout(config, world)
    return [_estimate_rank(layout, index) for index in range(layout.dims.pp)]


def _estimate_rank(layout: Layout, index: int) -> dict[str, int | None]:
    zero, wide, parallel = layout.parallel.zero, layout.wide, layout.parallel
    stages = layout.stages_of(index)
    total = layout.held_by(index)
    shown = layout.micro_batches if layout.dims.pp > 1 else 1
    live = live_micro_batches(parallel.schedule, layout.dims.pp, index, shown)
    activations = None
    if layout.known:
        activations = round(sum(_alive(layout, *pair) for pair in zip(stages, live, strict=True)))
        again = {is_dense(layout.model, i) for stage in stages for i in layout.made_again(stage)}
        activations += round(max(map(layout.block_bytes, again), default=0) * layout.tokens)
    divided = total.shard if zero > 1 else total.local
    return {
        "parameters": divided * wide,
        "gradients": divided * wide,
        "optimizer": 2 * wide * (total.shard if zero else total.local),
        "activations": activations,
        "buffers": round(_buffers(layout, stages, total) + _messages(layout)),
    }


def _alive(layout: Layout, stage: int, live: int) -> float:
    """Count the activations of a stage that holds so many micro-batches."""
    compute, parts = layout.compute, layout.parts_of(stage)
    kept = sum(layout.kept(part) for part in parts) * layout.tokens
    if compute < layout.wide and layout.parallel.zero < 2:
        # Every forward pass casts the weights anew and keeps the copy; recomputation drops it.
        dropped = set(layout.made_again(stage)) | {"embedding"}
        cast = [part for part in parts if part not in dropped]
        kept += sum(layout.held(part).local for part in cast) * compute
    masks = layout.masks if layout.split[stage] else 0
    return live * (kept + masks)


def _buffers(layout: Layout, stages: list[int], total: Held) -> float:
    """Count what summing gradients and gathering parameters needs."""
    d, zero = layout.dims, layout.parallel.zero
    if zero < 2 or d.world == 1:
        return min(total.local, BUCKET_ELEMENTS) * layout.wide * (d.world > d.pp)
    units = [layout.held(i).local for stage in stages for i in layout.split[stage]]
    ends, largest = total.local - sum(units), max(units)
    # The ends stay gathered; of blocks the one in use and the next, or all until the step's end.
    gathered = ends + 2 * largest if layout.reshards else total.local
    undivided = ends + largest if d.pp == 1 else total.local
    return min(gathered, total.local) * layout.compute + undivided * layout.wide


def _messages(layout: Layout) -> float:
    """Count what is sent and received at once in a block."""
    if not layout.known:
        return 0.0
    d, model, compute = layout.dims, layout.model, layout.compute
    row = model.hidden_size * compute
    most = 2 * row * (d.tp > 1) + 2 * row / d.tp * (d.pp > 1)
    if d.cp > 1 and layout.parallel.cp_kind == "ring":
        most += 2 * key_value_width(model) / d.tp * (compute + layout.wide)
    if d.ep > 1:
        most += 2 * ranks_visited(model, d.ep) * row / d.tp
    return most * layout.tokens


def ranks_to_plan(config: Config) -> int:
    """Return the number of ranks the plan is for: those of the launch, else what the mesh names."""
    world = planned_world(config)
    if world is not None:
        return world
    axes = dims.ParallelDims.of(config.parallel)
    return replace(axes, dp_shard=max(axes.dp_shard, 1)).world


def print_plan(config: Config) -> int:
    """Build the model on the meta device, print the plan on rank 0, train nothing; returns 0.

    Raises ConfigError when the layout does not fit the world.
    """
    from curry_train.models.protocol import build_model, count_parameters

    world = ranks_to_plan(config)
    found = problems(config, world)
    if found:
        raise ConfigError(found)
    total, active = count_parameters(build_model(config, "meta"))
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
        return 0
    layout, data = Layout(config, world), config.data
    sizes, micro = layout.dims, layout.samples
    print(f"parameters: {total} (active {active})")
    batch = data.global_batch_size
    amount = f"tokens per step: {batch * data.seq_len} (global batch {batch} x {data.seq_len}; "
    if holds_samples(data):
        amount = f"samples per step: {batch} ("
    print(f"{amount}{layout.micro_batches} micro-batches of {micro} on each rank)")
    parts = estimate(config, world)
    known = [amount for amount in parts.values() if amount is not None]
    without = "" if len(known) == len(parts) else ", without activations"
    print(f"memory per rank: {readable(sum(known))} ({config.precision}{without})")
    for part, amount in parts.items():
        if amount is None:
            print(f"  {part:<12}          unknown for architecture {config.model.architecture}")
        else:
            print(f"  {part:<12} {amount:>16} bytes  {readable(amount):>10}")
    flops = flops_per_token(config.model, data.seq_len)
    if flops is not None:
        print(f"work per step: {flops * data.global_batch_size * data.seq_len:.3e} FLOP")
    axes = "  ".join(f"{axis} {size}" for axis, size in sizes.sizes.items())
    print(f"mesh of {world} {'rank' if world == 1 else 'ranks'}: {axes}")
    print_communication(config, world)
    return 0


def readable(amount: int) -> str:
    """Return bytes in the largest unit that keeps the number above 1."""
    value, unit = float(amount), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.2f} {unit}"
