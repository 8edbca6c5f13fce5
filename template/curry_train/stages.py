"""Arithmetic of pipelines: which blocks a stage holds, what is alive at once, what stands idle.

No torch. Times are those of one stage and one micro-batch; a rank of a schedule with two stages
does twice as much. The tests hold every figure against the tables of PyTorch's own schedules.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, pairwise

from curry_train.config import ParallelConfig
from curry_train.parallel.dims import V_SCHEDULES, stages_per_rank

NEARLY = 1.03
"""Costs in FLOP say no more than this about the time of a stage."""
ROUNDING = 1 + 1e-9


def stage_blocks(parallel: ParallelConfig, costs: tuple[float, ...], head: float) -> list[range]:
    """Return the blocks of every pipeline stage, in model order.

    costs: of every block; head: that of the model's end, which the last stage has too.
    """
    stages = parallel.pp * stages_per_rank(parallel)
    counts = parallel.pp_split
    if counts == "auto" and stages == parallel.pp:
        counts = split_blocks(costs, head, stages)
    elif counts == "auto":
        counts = split_blocks_in_pairs(costs, head, parallel.pp, parallel.schedule in V_SCHEDULES)
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + n) for start, n in zip(starts, counts, strict=True)]


@functools.lru_cache(maxsize=256)
def split_blocks(costs: tuple[float, ...], head: float, stages: int) -> list[int]:
    """Return the number of blocks of each stage, in model order, at least one each.

    The dearest stage is as cheap as can be; among equals the stages are as even as can be.
    """
    layers, sums = len(costs), [0.0, *accumulate(costs)]

    def best(score: Callable[[float, float], float]) -> tuple[float, list[int]]:
        # row[end]: the best score of the stages so far when they hold the first `end` blocks.
        row = {0: (0.0, [])}
        for stage in range(stages):
            after = stages - stage - 1
            ways = {}
            for end in range(stage + 1, layers - after + 1):
                extra = 0.0 if after else head
                options = (
                    (score(so_far, sums[end] - sums[start] + extra), [*counts, end - start])
                    for start, (so_far, counts) in row.items()
                    if start < end
                )
                ways[end] = min(options, key=lambda way: way[0])
            row = ways
        return row[layers]

    limit, _ = best(max)
    over = float("inf")
    return best(lambda so_far, x: so_far + x * x if x <= limit * ROUNDING else over)[1]


@functools.lru_cache(maxsize=256)
def split_blocks_in_pairs(
    costs: tuple[float, ...], head: float, ranks: int, turned: bool
) -> list[int]:
    """Return the number of blocks of each stage where a rank has two of them.

    Rank r has the stages r and ranks + r, or where `turned` r and 2 * ranks - 1 - r. No rank is
    more than NEARLY dearer than the dearest must be, since a few percent of a rank are not worth
    stages of very different size; within that the dearest stage is as cheap as can be.
    """
    layers = len(costs)
    even = split_blocks(costs, head, 2 * ranks)
    starts = [0, *accumulate(even)]
    stages = [sum(costs[start:end]) for start, end in pairwise(starts)]
    stages[-1] += head
    least = max(stages) * ROUNDING
    limit, found, counts = _least_of_a_rank(costs, head, ranks), float("inf"), []
    while not counts:
        limit *= NEARLY
        # The border between first and second stages, nearest to the middle first.
        for border in sorted(range(ranks, layers - ranks + 1), key=lambda at: abs(2 * at - layers)):
            ways = _pairs(costs, head, ranks, turned, border, limit, found)
            if ways is not None:
                found, pairs = ways
                first, second = map(list, zip(*pairs, strict=True))
                counts = first + (second[::-1] if turned else second)
            if found <= least:
                break
    return counts


def _least_of_a_rank(costs: tuple[float, ...], head: float, ranks: int) -> float:
    """Return what the dearest rank costs at least: the mean, or so many of the cheapest blocks."""
    layers, cheap = len(costs), [0.0, *accumulate(sorted(costs))]
    others = max(ranks - 1, 1)
    whole = (
        max(head + cheap[own], cheap[-(-(layers - own) // others)])
        for own in range(2, layers - 2 * (ranks - 1) + 1)
    )
    return max((cheap[-1] + head) / ranks, min(whole))


def _pairs(
    costs: tuple[float, ...],
    head: float,
    ranks: int,
    turned: bool,
    border: int,
    limit: float,
    below: float,
) -> tuple[float, list[tuple[int, int]]] | None:
    """Return (cost of the dearest stage, blocks of both stages of each rank), or None.

    Each rank in turn takes the next blocks before `border` and the next ones behind it, from the
    other end where `turned`. No rank costs more than `limit`, every stage less than `below`.
    """
    behind = costs[border:][::-1] if turned else costs[border:]
    one, two = ([0.0, *accumulate(row)] for row in (costs[:border], behind))
    total, has_head = one[-1] + two[-1] + head, 0 if turned else ranks - 1
    reached: dict[tuple[int, int], tuple[float, list]] = {(0, 0): (0.0, [])}
    for rank in range(ranks):
        after, extra = ranks - rank - 1, head * (rank == has_head)
        # What is left after this rank must fit into the others.
        need = total - limit * after - head * (rank >= has_head)
        ways: dict[tuple[int, int], tuple[float, list]] = {}
        for (i, j), (dearest, pairs) in reached.items():
            for a in range(i + 1, border - after + 1) if after else (border,):
                x = one[a] - one[i]
                if x >= below:
                    break
                last = len(behind) - after
                first = max(j + 1, bisect_left(two, need - one[a])) if after else last
                for b in range(first, last + 1):
                    y = two[b] - two[j] + extra
                    if y >= below or x + y > limit:
                        break
                    worst = max(dearest, x, y)
                    if (a, b) not in ways or worst < ways[a, b][0]:
                        ways[a, b] = worst, [*pairs, (a - i, b - j)]
        reached = ways
    return reached.get((border, len(behind)))


def live_micro_batches(schedule: str, pp: int, index: int, micro_batches: int) -> list[int]:
    """Return how many micro-batches' activations a rank holds at its peak, for each of its stages.

    index: the rank's place in the pipeline. A micro-batch is alive from its forward pass to the
    end of its backward pass, that for the weights included. Source: PyTorch's schedules; the peaks
    are those of Narayanan et al. 2021 (PipeDream-Flush, interleaved), Qi et al. 2023 (zero bubble),
    Qi et al. 2024 (V schedules) and DeepSeek-AI 2025 (DualPipeV).
    """
    many, after = micro_batches, pp - 1 - index
    turn = many // max(many // pp, 1)  # micro-batches that one stage does before the next one
    if pp == 1:
        return [1]
    if schedule == "gpipe":
        return [many]
    if schedule == "1f1b":
        return [min(many, after + 1)]
    if schedule == "interleaved1f1b":
        return [min(many, turn + after), min(many, 1 + after + max(turn + after - many, 0))]
    if schedule == "interleaved_zb":
        return [min(many, turn), min(many, pp)]
    first = 2 * pp - index - (schedule == "zbv")
    return [min(many, first), min(many, index + 1)]


def bubble(
    schedule: str,
    pp: int,
    micro_batches: int,
    forward: float = 1.0,
    backward: float = 1.0,
    weights: float = 1.0,
) -> float:
    """Return the time that a rank of the pipeline stands idle in a step.

    forward, backward, weights: times of one stage, one micro-batch; backward is that for the input,
    weights that for the parameters. Sources: Huang et al. 2019 (GPipe) and Narayanan et al. 2021
    (1F1B; interleaved: divided by the stages of a rank): (pp - 1) * (forward + backward + weights).
    Qi et al. 2023, section 3.2: (pp - 1) * (forward + backward - weights); Qi et al. 2024 (V): none
    but the way to the last rank. DualPipeV as PyTorch orders it, without overlap. Exact where
    the three times are equal, within a few percent of a step where they differ by a third; zbv and
    dualpipev with too few micro-batches to fill the pipeline are approximate.
    """
    way, whole = pp - 1, forward + backward + weights
    if schedule in ("gpipe", "1f1b"):
        return way * whole
    if schedule == "interleaved1f1b":
        return (way + max(pp - micro_batches, 0)) * whole
    if schedule == "interleaved_zb":
        missing = max(pp - micro_batches, 0) * (forward + backward)
        return way * (forward + max(backward - weights, 0)) + missing
    if schedule == "zbv":
        missing = max(2 * pp - 1 - micro_batches, 0)
        return way * max(forward, backward) + missing * forward
    return way * (forward + max(backward - weights, 0))


def paired_share(pp: int, micro_batches: int) -> float:
    """Return the share of a step's passes that dualpipev makes as pairs, a forward in a backward.

    Counted on PyTorch's table for up to 8 ranks; what is overlapped can hide in pairs only.
    """
    return max(0.0, 1 - 1.25 * pp / micro_batches)
