"""Who sends how much to whom in a step, and how long a step takes: closed forms, no device.

Messages are those of this package's own layers (parallel/). Seconds are an estimate from data-sheet
figures and one assumed efficiency: good for ordering layouts, not for promising a speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from curry_train.activations import key_value_width, ranks_visited
from curry_train.config import Config, ParallelConfig
from curry_train.layout import Layout
from curry_train.parallel.grads import BUCKET_ELEMENTS
from curry_train.sizes import attention_flops, is_dense
from curry_train.stages import bubble, paired_share

SPLIT_SECONDS = (1 / 3, 1 / 3, 1 / 3)
"""Shares of forward, backward for inputs, backward for weights: a product costs the same thrice."""
EXPERTS_EFFICIENCY = 0.5
"""What blocks with experts reach of the efficiency of large products: small, uneven products."""
MOMENT_TRAFFIC = 28
"""Bytes that AdamW moves per element: reads parameter, gradient and moments, writes all but one."""


class Traffic(NamedTuple):
    """One kind of message: `bytes` that a rank sends in an optimizer step, in `calls` calls.

    hidden: what may compute meanwhile: nothing, "attention", "compute", or "pairs" of dualpipev.
    """

    group: str
    what: str
    bytes: float
    calls: int
    hidden: str = ""


class Links(NamedTuple):
    """A machine: bytes/s that one GPU sends inside its node and to another, GPUs of a node, the
    device's peak FLOP/s and memory bytes/s, the share of the peak that large products reach, and
    seconds that a call takes before its first byte moves."""

    inside: float
    between: float
    per_node: int
    peak: float
    memory: float
    efficiency: float = 0.45
    latency: float = 2e-5


def communication(config: Config, world: int) -> list[tuple[str, str, float, int]]:
    """Return (group, what, bytes that a rank sends per optimizer step, calls) of the busiest rank.

    Rings: an all-gather or reduce-scatter of n ranks sends (n - 1) / n of the whole tensor, an
    all-reduce twice that. Tokens of experts go to each of their ranks once; with K of E experts on
    ep ranks that is ranks_visited in the mean. Totals of the loss and the norm are left out. Empty
    where no closed form knows the model. The tests count the bytes of real ranks.
    Raises ValueError when the axes do not make `world` ranks.
    """
    layout = Layout(config, world)
    ranks = [list(messages(layout, index)) for index in range(layout.dims.pp)]
    busiest = max(ranks, key=lambda rows: sum(row.bytes for row in rows))
    return [row[:4] for row in busiest]


def messages(layout: Layout, index: int) -> Iterator[Traffic]:
    """Yield what a rank at this place of the pipeline sends in a step; zeros are left out."""
    if not layout.known:
        return
    blocks = [i for stage in layout.stages_of(index) for i in layout.split[stage]]
    rows = [*_tensor_parallel(layout, index, blocks), *_context(layout, blocks)]
    rows += [*_experts(layout, blocks), *_routers(layout, blocks)]
    rows += [*_data(layout, index), *_pipeline(layout, index)]
    yield from (row for row in rows if row.bytes > 0)


def split_times(parallel: ParallelConfig) -> tuple[float, float, float]:
    """Return the shares of forward, backward for inputs and for weights in the time of a stage.

    The overlapped executor computes both backwards at once.
    """
    forward, inputs, weights = SPLIT_SECONDS
    return (forward, inputs + weights, 0.0) if parallel.overlap else SPLIT_SECONDS


def _passes(layout: Layout, layer: int) -> int:
    """Count how often a block's forward sends for each micro-batch; selective keeps what came."""
    return 1 + (layout.again(layer) == "full")


def _tensor_parallel(layout: Layout, index: int, blocks: list[int]) -> Iterator[Traffic]:
    """Gather and reduce-scatter of the sequence round attention and each dense feed-forward."""
    model, tp, steps = layout.model, layout.dims.tp, layout.micro_batches
    piece = (tp - 1) / tp * layout.tokens * model.hidden_size * layout.compute
    calls = 0
    for layer in blocks:
        dense = is_dense(model, layer)
        both = dense or model.shared_expert_intermediate_size > 0
        calls += (2 + 2 * both) * (1 + _passes(layout, layer))
        calls -= dense * (_passes(layout, layer) - 1)  # the last one is not made again
    yield Traffic("tp", "sequence of each block", steps * calls * piece, steps * calls)
    if model.qk_norm and model.qk_norm_width == "projection":
        size = 2 * (tp - 1) / tp * layout.tokens * layout.wide
        calls = steps * sum(2 * (1 + _passes(layout, layer)) for layer in blocks)
        yield Traffic("tp", "mean squares of queries and keys", calls * size, calls)
    parts = [part for stage in layout.stages_of(index) for part in layout.parts_of(stage)]
    ends = 2 * sum(part in ("embedding", "head") for part in parts)
    scalars = 3 * 2 * (tp - 1) / tp * layout.tokens * layout.wide * ("head" in parts)
    calls = ends + 2 * ("head" in parts)
    yield Traffic("tp", "vocabulary", steps * (ends * piece + scalars), steps * calls)


def _context(layout: Layout, blocks: list[int]) -> Iterator[Traffic]:
    """Keys and values round the ring, and their gradients once further in the norms' dtype."""
    cp, steps = layout.dims.cp, layout.micro_batches
    own = layout.tokens * key_value_width(layout.model) / layout.dims.tp
    total, calls = 0.0, 0
    ring = layout.parallel.cp_kind == "ring"
    for layer in blocks if cp > 1 else []:
        # A ring is passed round again wherever attention is made again.
        passes = 1 + (layout.again(layer) != "none") + 1 if ring else _passes(layout, layer)
        total += (cp - 1) * own * layout.compute * passes
        total += cp * own * layout.wide if ring else (cp - 1) * own * layout.compute
        calls += (cp - 1) * passes + cp if ring else 2 * (passes + 1)
    what = "keys and values, their gradients"
    yield Traffic("cp", what, steps * total, steps * calls, "attention" if ring else "")


def _experts(layout: Layout, blocks: list[int]) -> Iterator[Traffic]:
    """Whole tokens to the ranks of their experts, and the sums back."""
    model, d, steps = layout.model, layout.dims, layout.micro_batches
    sparse = [i for i in blocks if not is_dense(model, i)]
    if d.ep == 1 or not sparse:
        return
    sent = ranks_visited(model, d.ep) * (d.ep - 1) / d.ep * layout.tokens / d.tp
    row = model.hidden_size * layout.compute
    choice = model.num_experts_per_tok
    there = sent * (row + choice * (8 + layout.wide))  # ids int64 and weights travel along
    passes = sum(_passes(layout, i) for i in sparse)
    back = len(sparse) * sent * (row + choice * layout.wide)
    hidden = "pairs" if layout.parallel.overlap else ""
    calls = steps * (4 * passes + 2 * len(sparse))
    yield Traffic("ep", "dispatch of tokens", steps * (passes * there + back), calls, hidden)
    # Backward needs nothing that comes after the bank, so a combine is not made again.
    calls = 2 * steps * len(sparse)
    yield Traffic("ep", "combine of tokens", calls * sent * row, calls, hidden)


def _routers(layout: Layout, blocks: list[int]) -> Iterator[Traffic]:
    """What the balance losses need to know of whole sequences: counts and shares of each expert."""
    model, ranks = layout.model, layout.dims.cp * layout.dims.tp
    calls = sum(_passes(layout, i) for i in blocks if not is_dense(model, i))
    calls *= layout.micro_batches
    size = layout.samples * (2 * model.num_experts + 2) * layout.wide
    yield Traffic(
        "sequence", "counts of the routers", calls * 2 * (ranks - 1) / ranks * size, calls
    )


def _data(layout: Layout, index: int) -> Iterator[Traffic]:
    """Gradients, and parameters where parallel.zero divides them."""
    d, zero, wide = layout.dims, layout.parallel.zero, layout.wide
    stages = layout.stages_of(index)
    total = layout.held_by(index)
    fsdp = d.dp_shard * d.cp
    if zero < 2:
        kinds = {"data": (total.split, d.dp_replicate * fsdp)}
        kinds["stage"] = (total.whole, d.dp_replicate * fsdp * d.tp)
        kinds["expert_data"] = (total.experts, d.dp_replicate * d.efsdp)
        for group, (elements, ranks) in kinds.items():
            size = 2 * (ranks - 1) / ranks * elements * wide
            yield Traffic(group, "all-reduce of gradients", size, -(-elements // BUCKET_ELEMENTS))
    # A pipeline keeps what it has gathered, and the gradients, until the end of the step; else
    # each micro-batch gathers, the blocks twice where they were dropped, and reduces.
    parts = [part for stage in stages for part in layout.parts_of(stage)]
    ends = sum(layout.held(part).dense_rows for part in parts if isinstance(part, str))
    kept = d.pp > 1 and not layout.reshards
    sums = 1 if d.pp > 1 else layout.micro_batches
    rounds, again = (1 if kept else layout.micro_batches), 1 + layout.reshards
    shards = {"fsdp": (total.dense_rows, fsdp, ends), "efsdp": (total.expert_rows, d.efsdp, 0)}
    units = sum(isinstance(part, int) for part in parts) + 1
    for group, (rows, ranks, once) in shards.items():
        if zero == 1:
            yield Traffic(group, "all-gather of parameters", (ranks - 1) * rows * wide, 1)
        if zero < 2:
            continue
        size = (ranks - 1) * (rows * again - once * (again - 1)) * rounds * layout.compute
        yield Traffic(group, "all-gather of parameters", size, rounds * again * units, "compute")
        size = (ranks - 1) * rows * sums * wide
        yield Traffic(group, "reduce-scatter of gradients", size, sums * units, "compute")
    if zero > 1:
        partial = 2 * (d.tp - 1) / d.tp * total.whole / fsdp * wide
        yield Traffic("tp", "all-reduce of gradients", partial, 1)
        size = 2 * (d.dp_replicate - 1) / d.dp_replicate * total.shard * wide
        yield Traffic("dp_replicate", "all-reduce of gradients", size * sums, units * sums)


def _pipeline(layout: Layout, index: int) -> Iterator[Traffic]:
    """Hidden states to the next stage, gradients to the one before, where another rank has it."""
    d, stages = layout.dims, layout.stages_of(index)
    if d.pp == 1:
        return
    last, crossings = len(layout.split) - 1, 0
    for stage in stages:
        crossings += stage < last and stage + 1 not in stages
        crossings += stage > 0 and stage - 1 not in stages
    size = layout.tokens / d.tp * layout.model.hidden_size * layout.compute
    calls = crossings * layout.micro_batches
    yield Traffic("pp", "hidden states, their gradients", calls * size, calls, "compute")


def reach(layout: Layout, group: str, per_node: int) -> tuple[int, int]:
    """Return (members, members in one node) of a group of ranks placed node by node.

    Ranks are numbered with pp outermost, then dp_replicate, dp_shard, cp, tp; ep is innermost of
    dp_shard*cp*tp. A group whose span does not divide a node's GPUs counts as crossing nodes.
    """
    d = layout.dims
    inner = d.dp_shard * d.cp * d.tp
    size, stride = {
        "tp": (d.tp, 1),
        "cp": (d.cp, d.tp),
        "ep": (d.ep, 1),
        "efsdp": (d.efsdp, d.ep),
        "expert_data": (d.dp_replicate * d.efsdp, d.ep),
        "fsdp": (d.dp_shard * d.cp, d.tp),
        "data": (d.dp_replicate * d.dp_shard * d.cp, d.tp),
        "dp_replicate": (d.dp_replicate, inner),
        "sequence": (d.cp * d.tp, 1),
        "stage": (d.world // d.pp, 1),
        "pp": (d.pp, d.world // d.pp),
    }[group]
    if size * stride <= per_node and per_node % (size * stride) == 0:
        return size, size
    return size, max(1, min(size, per_node // stride))


def seconds_of(row: Traffic, layout: Layout, links: Links) -> float:
    """Return the seconds that a kind of message takes when nothing else uses the links.

    Across nodes a ring leaves through the links of all its members in a node; of an all-to-all the
    share for other nodes goes over each GPU's own link; a pipeline's messages go from GPU to GPU.
    """
    size, near = reach(layout, row.group, links.per_node)
    wait = row.calls * links.latency
    if near == size:
        return row.bytes / links.inside + wait
    if row.group == "ep":
        far = (size - near) / (size - 1)
        return row.bytes * max(far / links.between, (1 - far) / links.inside) + wait
    if row.group == "pp":
        return row.bytes / links.between + wait
    return row.bytes / min(links.inside, links.between * near) + wait


def step_time(config: Config, world: int, links: Links) -> dict[str, float | dict]:
    """Return estimated seconds of a step of the slowest place of the pipeline.

    total = compute + optimizer + exposed + bubble. compute: FLOP (recomputed ones too) over the
    assumed share of the peak, or the time to read the weights when a micro-batch is too small for
    that; optimizer: AdamW's memory traffic; communication: group -> {seconds, exposed, crosses
    (nodes)}; exposed: what no computation hides; bubble: see stages.bubble. Not counted: uneven
    experts, loading data, checkpoints, the host. Raises ValueError where the model is unknown.
    """
    layout = Layout(config, world)
    if not layout.known:
        raise ValueError(f"no closed form knows architecture {config.model.architecture}")
    ranks = [_rank_time(layout, index, links) for index in range(layout.dims.pp)]
    return max(ranks, key=lambda rank: rank["total"])


def _rank_time(layout: Layout, index: int, links: Links) -> dict[str, float | dict]:
    d, steps, parallel = layout.dims, layout.micro_batches, layout.parallel
    stages, stood = layout.stages_of(index), 0.0
    compute = steps * sum(_compute(layout, stage, links) for stage in stages)
    shares = {"compute": 0.6 * compute, "attention": _attention_share(layout) * compute}
    shares["pairs"] = paired_share(d.pp, steps) * compute
    groups: dict[str, dict] = {}
    for row in messages(layout, index):
        seconds = seconds_of(row, layout, links)
        room = shares.get(row.hidden, 0.0)
        shares[row.hidden] = max(0.0, room - seconds)
        found = groups.setdefault(row.group, {"seconds": 0.0, "exposed": 0.0})
        size, near = reach(layout, row.group, links.per_node)
        found["crosses"] = near < size
        found["seconds"] += seconds
        found["exposed"] += max(0.0, seconds - room)
        if row.group in ("tp", "cp", "ep") and "gradients" != row.what.split()[-1]:
            stood += max(0.0, seconds - room)
    total = layout.held_by(index)
    owned = total.shard if parallel.zero else total.local
    optimizer = owned * MOMENT_TRAFFIC * layout.wide / 4 / links.memory
    one = (compute + stood) / steps / len(stages)
    idle = 0.0
    if d.pp > 1:
        idle = bubble(parallel.schedule, d.pp, steps, *(one * x for x in split_times(parallel)))
    exposed = sum(found["exposed"] for found in groups.values())
    return {
        "compute": compute,
        "optimizer": optimizer,
        "communication": groups,
        "exposed": exposed,
        "bubble": idle,
        "total": compute + optimizer + exposed + idle,
    }


def _compute(layout: Layout, stage: int, links: Links) -> float:
    """Return the seconds of one micro-batch in one stage, forward and backward."""
    d, model, total = layout.dims, layout.model, 0.0
    for part in layout.parts_of(stage):
        if part == "embedding":
            continue
        extra, efficiency = 1.0, links.efficiency
        if part == "head":
            flops = 6.0 * model.vocab_size * model.hidden_size
        else:
            flops = layout.costs[part]
            efficiency *= 1.0 if is_dense(model, part) else EXPERTS_EFFICIENCY
            # Made again: all of the forward third, or what is no product, a tenth of it.
            extra += {"none": 0.0, "full": 1 / 3, "selective": 1 / 30}[layout.again(part)]
        busy = flops * layout.tokens / d.tp / (links.peak * efficiency)
        reading = 3 * layout.held(part).local * layout.compute / links.memory
        total += extra * max(busy, reading)
    return total


def _attention_share(layout: Layout) -> float:
    """Return the share of a step's FLOP that attention's scores and sums take."""
    model = layout.model
    whole = sum(layout.costs) + 6.0 * model.vocab_size * model.hidden_size
    return attention_flops(model, layout.config.data.seq_len) / whole


def print_communication(config: Config, world: int) -> None:
    """Print what the busiest rank sends, and what of the pipeline stands idle."""
    layout = Layout(config, world)
    rows = communication(config, world)
    if rows:
        print("sent per rank and step:")
    for group, what, size, calls in rows:
        print(f"  {group:<12} {round(size):>16} bytes  in {calls:>6} calls  {what}")
    if layout.dims.pp > 1:
        parallel, many = layout.parallel, layout.micro_batches
        stages = len(layout.stages_of(0))
        idle = bubble(parallel.schedule, layout.dims.pp, many, *split_times(parallel))
        idle /= many * stages
        split = " ".join(str(len(blocks)) for blocks in layout.split)
        print(f"pipeline: {parallel.schedule}, blocks of each stage {split}")
        print(f"  stands idle for {idle / (1 + idle):.1%} of a step ({many} micro-batches)")
