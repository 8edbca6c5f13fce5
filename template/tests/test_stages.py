"""Bubbles and live micro-batches against PyTorch's own tables, run on a clock; splits by hand."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest

from curry_train.config import ParallelConfig
from curry_train.parallel.dims import stages_of
from curry_train.stages import bubble, live_micro_batches, paired_share, split_blocks

TABLES = {
    "gpipe": "ScheduleGPipe",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
SIZES = [(2, 2), (2, 4), (3, 6), (4, 8), (4, 12), (8, 32)]


class Stage:
    """As much of a pipeline stage as torch's schedules read to make their tables."""

    has_backward, device, submod, group = True, "cpu", None, None

    def __init__(self, index, stages, pp):
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, pp
        self.is_first, self.is_last = index == 0, index == stages - 1


def flat(actions):
    for action in actions:
        if action is not None and action.sub_actions:
            yield from flat(action.sub_actions)
        elif action is not None and action.computation_type.value in "FIWB":
            yield action.stage_index, action.computation_type.value, action.microbatch_index


def table(schedule, pp, micro_batches):
    """Return for each rank its passes in order: (stage, F, I, W or B, micro-batch)."""
    if schedule == "1f1b":  # torch 2.13 makes no table of it that can be read
        return {rank: one_forward_one_backward(rank, pp, micro_batches) for rank in range(pp)}
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, TABLES[schedule])
    if schedule == "gpipe":
        made = kind(Stage(0, pp, pp), micro_batches, loss_fn=lambda a, b: 0)
        order = made._get_pipeline_order()
    else:
        own = stages_of(ParallelConfig(pp=pp, schedule=schedule), 0)
        stages = [Stage(stage, 2 * pp, pp) for stage in own]
        order = kind(stages, micro_batches, loss_fn=lambda a, b: 0).pipeline_order
    return {rank: list(flat(actions)) for rank, actions in order.items()}


def one_forward_one_backward(rank, pp, micro_batches):
    first = min(micro_batches, pp - rank)
    order = [(rank, "F", i) for i in range(first)]
    for done in range(micro_batches):
        order.append((rank, "B", done))
        if first + done < micro_batches:
            order.append((rank, "F", first + done))
    return order


def idle_of(order, forward=1.0, backward=1.0, weights=1.0):
    """Run a table on a clock and return the time of the step less that of a rank's work."""
    cost = {"F": forward, "I": backward, "W": weights, "B": backward + weights}
    last = max(stage for passes in order.values() for stage, _, _ in passes)
    done, clock, work, waiting = {}, Counter(), Counter(), {r: list(p) for r, p in order.items()}
    while any(waiting.values()):
        before = len(done)
        for rank, passes in waiting.items():
            while passes:
                stage, kind, index = passes[0]
                needs = [("F", stage - 1, index)] if kind == "F" and stage else []
                if kind in "IB":
                    needs = [("I", stage + 1, index) if stage < last else ("F", stage, index)]
                if any(need not in done for need in needs):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + cost[kind]
                work[rank] += cost[kind]
                done["I" if kind == "B" else kind, stage, index] = clock[rank]
                passes.pop(0)
        assert len(done) > before, "the table does not come to an end"
    return max(clock.values()) - max(work.values())


def peak_of(passes):
    live, peak = Counter(), 0
    for stage, kind, _ in passes:
        live[stage] += (kind == "F") - (kind in "BW")
        peak = max(peak, live.total())
    return peak


@pytest.mark.parametrize("pp, micro_batches", SIZES)
@pytest.mark.parametrize("schedule", [*TABLES, "1f1b"])
@pytest.mark.sampled(2)
def test_bubble_and_live_micro_batches_are_those_of_the_table(schedule, pp, micro_batches):
    if schedule == "dualpipev" and micro_batches < 2 * pp:
        pytest.skip("refused")
    order = table(schedule, pp, micro_batches)
    assert bubble(schedule, pp, micro_batches) == pytest.approx(idle_of(order))
    for rank, passes in order.items():
        assert sum(live_micro_batches(schedule, pp, rank, micro_batches)) == peak_of(passes)


@pytest.mark.parametrize("schedule", [*TABLES, "1f1b"])
@pytest.mark.parametrize("times", [(1, 1.3, 0.7), (1, 1.2, 0.9)])
def test_bubble_of_unequal_passes_is_within_five_percent_of_a_step(schedule, times):
    order = table(schedule, 4, 16)
    step = 16 * len({stage for stage, _, _ in order[0]}) * sum(times)
    assert bubble(schedule, 4, 16, *times) == pytest.approx(idle_of(order, *times), abs=0.05 * step)


@pytest.mark.parametrize("pp, micro_batches", [(2, 8), (4, 16), (4, 32), (8, 64)])
def test_share_of_pairs_is_about_that_of_the_table(pp, micro_batches):
    from torch.distributed.pipelining import schedules

    stages = [Stage(stage, 2 * pp, pp) for stage in (0, 2 * pp - 1)]
    made = schedules.ScheduleDualPipeV(stages, micro_batches, loss_fn=lambda a, b: 0)
    shares = []
    for actions in made.pipeline_order.values():
        paired = sum(2 for action in actions if action is not None and action.sub_actions)
        shares.append(paired / (4 * micro_batches))
    assert paired_share(pp, micro_batches) == pytest.approx(sum(shares) / pp, abs=0.08)


def test_blocks_are_split_by_cost():
    assert split_blocks((1.0,) * 8, 0.0, 4) == [2, 2, 2, 2]
    assert split_blocks((1.0,) * 8, 2.0, 2) == [5, 3]
    assert split_blocks((3.0, 1.0, 1.0, 1.0), 0.0, 2) == [1, 3]
    assert split_blocks((1.0, 1.0), 99.0, 2) == [1, 1]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_other_split_has_a_cheaper_dearest_stage(stages):
    costs, head = (2.0, 1.0, 1.0, 3.0, 1.0, 2.0, 1.0), 2.0

    def dearest(counts):
        loads, start = defaultdict(float), 0
        for stage, count in enumerate(counts):
            loads[stage] = sum(costs[start : start + count])
            start += count
        loads[len(counts) - 1] += head
        return max(loads.values())

    found = split_blocks(costs, head, stages)
    ways = itertools.product(range(1, len(costs) + 1), repeat=stages)
    assert sum(found) == len(costs) and min(found) >= 1
    assert dearest(found) == min(dearest(way) for way in ways if sum(way) == len(costs))
