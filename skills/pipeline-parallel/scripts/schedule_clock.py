"""The order of passes of every schedule, from torch's tables, run on a virtual clock.

gpipe and 1f1b are written down here: torch 2.13 makes no table of theirs that can be read. A pass
starts when its rank is free and its input has been computed; messages take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

TABLES = {
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
SCHEDULES = ("gpipe", "1f1b", *TABLES)


class Pass(NamedTuple):
    """One pass of a micro-batch over a stage. kind: F forward, I backward for the input, W for the
    weights, B both."""

    stage: int
    kind: str
    micro_batch: int


class Times(NamedTuple):
    """Times of one stage and one micro-batch: forward, backward for input, for weights."""

    forward: float
    backward: float
    weights: float

    @property
    def total(self) -> float:
        """All three."""
        return sum(self)

    def of(self, kind: str) -> float:
        """Return the time of a pass."""
        forward, backward, weights = self
        return {"F": forward, "I": backward, "W": weights, "B": backward + weights}[kind]


class Run(NamedTuple):
    """A step on the clock. spans: (rank, pass, start, end); work: busy time of each rank."""

    spans: list[tuple[int, Pass, float, float]]
    step: float
    work: list[float]

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they stand idle."""
        return 1 - sum(self.work) / (self.step * len(self.work)) if self.step else 0.0


class _Stage:
    """As much of a pipeline stage as torch's schedules read to make their tables."""

    has_backward, device, submod, group = True, "cpu", None, None

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1


def order_of(schedule: str, ranks: int, micro_batches: int) -> list[list[Pass]]:
    """Return the passes of each rank, in order; raises as torch does where it refuses."""
    if schedule == "1f1b" and micro_batches < ranks:
        schedule = "gpipe"  # as the project's pipeline does, which torch would refuse
    if schedule == "gpipe":
        return [list(_all_forward_first(rank, micro_batches)) for rank in range(ranks)]
    if schedule == "1f1b":
        return [list(_one_forward_one_backward(r, ranks, micro_batches)) for r in range(ranks)]
    from torch.distributed.pipelining import schedules

    own = (0, ranks) if schedule.startswith("interleaved") else (0, 2 * ranks - 1)
    stages = [_Stage(stage, 2 * ranks, ranks) for stage in own]
    kind = getattr(schedules, TABLES[schedule])
    table = kind(stages, micro_batches, loss_fn=lambda output, target: 0).pipeline_order
    return [list(_flat(table[rank])) for rank in range(ranks)]


def _all_forward_first(rank: int, micro_batches: int) -> Iterator[Pass]:
    for kind in "FB":
        yield from (Pass(rank, kind, number) for number in range(micro_batches))


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> Iterator[Pass]:
    first = min(micro_batches, ranks - rank)
    yield from (Pass(rank, "F", number) for number in range(first))
    for number in range(micro_batches):
        yield Pass(rank, "B", number)
        if first + number < micro_batches:
            yield Pass(rank, "F", first + number)


def _flat(actions: Sequence[Any]) -> Iterator[Pass]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _flat(action.sub_actions)
        elif action.computation_type.value in "FIWB":
            yield Pass(action.stage_index, action.computation_type.value, action.microbatch_index)


def run(order: list[list[Pass]], times: Mapping[int, Times]) -> Run:
    """Run the passes on a clock; `times` by stage."""
    last, ranks = max(times), range(len(order))
    done: dict[tuple[str, int, int], float] = {}
    clock, work, at = [0.0] * len(order), [0.0] * len(order), [0] * len(order)
    spans = []
    while any(at[rank] < len(order[rank]) for rank in ranks):
        before = len(spans)
        for rank in ranks:
            while at[rank] < len(order[rank]):
                one = order[rank][at[rank]]
                need = _need(one, last)
                if need is not None and need not in done:
                    break
                start = max(clock[rank], done[need] if need else 0.0)
                cost = times[one.stage].of(one.kind)
                clock[rank] = start + cost
                work[rank] += cost
                kind = "I" if one.kind == "B" else one.kind
                done[kind, one.stage, one.micro_batch] = clock[rank]
                spans.append((rank, one, start, clock[rank]))
                at[rank] += 1
        if len(spans) == before:
            raise ValueError("the table of passes does not come to an end")
    return Run(spans, max(clock), work)


def _need(one: Pass, last: int) -> tuple[str, int, int] | None:
    """Return what must be done before a pass, of another stage or of this one."""
    stage, kind, number = one
    if kind == "F":
        return ("F", stage - 1, number) if stage else None
    if kind == "W":
        return "I", stage, number
    return ("I", stage + 1, number) if stage < last else ("F", stage, number)
