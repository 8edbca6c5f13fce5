"""Arithmetic of pipelines: which blocks a stage holds, what is alive at once, what stands idle.

No torch. Times are those of one stage and one micro-batch; a rank of a schedule with two stages
does twice as much. The tests hold every figure against the tables of PyTorch's own schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable


@functools.lru_cache(maxsize=256)
def split_blocks(costs: tuple[float, ...], ends: tuple[float, float], stages: int) -> list[int]:
    """Return the number of blocks of each stage, in model order, at least one each.

    costs: of every block; ends: what embedding and head add to the first and the last stage. The
    dearest stage is as cheap as can be; among equals the stages are as even as can be.
    """
    layers, sums = len(costs), [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def load(stage: int, start: int, end: int) -> float:
        extra = ends[0] * (stage == 0) + ends[1] * (stage == stages - 1)
        return sums[end] - sums[start] + extra

    def best(score: Callable[[float, float], float]) -> tuple[float, list[int]]:
        # row[end]: the best score of the stages so far when they hold the first `end` blocks.
        row = {0: (0.0, [])}
        for stage in range(stages):
            after = stages - stage - 1
            ways = {}
            for end in range(stage + 1, layers - after + 1):
                options = (
                    (score(row[start][0], load(stage, start, end)), row[start][1] + [end - start])
                    for start in row
                    if start < end
                )
                ways[end] = min(options, key=lambda way: way[0])
            row = ways
        return row[layers]

    limit, _ = best(max)
    over = float("inf")
    return best(lambda so_far, x: so_far + x * x if x <= limit * (1 + 1e-9) else over)[1]


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
