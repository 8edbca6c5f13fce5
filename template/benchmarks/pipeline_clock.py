"""Pipelines on a clock of their own: PyTorch's tables, and the overlapped executor itself.

A rank's clock moves by what a piece of work is said to cost, not by what it takes, so the result is
the same on every machine. Work is real all the same: the executor computes and sends, and only its
hooks for parts and messages are told to keep time. A message between stages carries the sender's
time; one between experts is ready a delay after it started, counted from the own start, as ranks
of one stage keep the same time. The exchange of counts and sends between stages cost nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from curry_train.compose import load_config
from curry_train.config import Config, ParallelConfig
from curry_train.data import open_corpus
from curry_train.parallel.dims import stages_of
from curry_train.parallel.mesh import build_mesh
from curry_train.parallel.overlap import OverlappedPipeline
from curry_train.parallel.pipeline_parallel import SCHEDULES
from curry_train.rules import problems
from curry_train.runtime import assemble
from curry_train.step import accumulate, forget_gradients
from curry_train.testing import run_ranks

Order = dict[int, list[tuple[str, int, int]]]
"""For each rank its passes in order: F, I (for the input), W (for weights) or B (both); stage;
micro-batch."""


# PyTorch's tables


class RecordedStage:
    """As much of a stage as torch's schedules look at; notes the passes that it is asked for."""

    has_backward, device, submod, group = True, "cpu", None, None

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = index % ranks, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.passes: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.passes.append(("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.passes.append(("B", self.stage_index, number))

    def no_message(self, *_: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_message
    perform_reduce_grad = scale_grads = no_message


def order_of(schedule: str, pp: int, micro_batches: int) -> Order:
    """Return the order in which torch's schedule runs its passes."""
    from torch.distributed.pipelining import schedules

    kind, own = getattr(schedules, SCHEDULES[schedule]), ParallelConfig(pp=pp, schedule=schedule)
    if len(stages_of(own, 0)) > 1:
        stages = [RecordedStage(stage, 2 * pp, pp) for stage in stages_of(own, 0)]
        table = kind(stages, micro_batches, loss_fn=lambda *_: 0).pipeline_order
        return {rank: list(_passes(actions)) for rank, actions in table.items()}
    order = {}
    for rank in range(pp):  # no table: run the schedule on a stage that only takes notes
        stage = RecordedStage(rank, pp, pp)
        made = kind(stage, micro_batches, loss_fn=lambda *_: 0)
        nothing: list[Any] = [()] * micro_batches
        for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss"):
            setattr(made, name, lambda *_: None)
        made._check_inputs = lambda *_: (nothing, [{}] * micro_batches)  # noqa: B023
        made._step_microbatches()
        order[rank] = stage.passes
    return order


def _passes(actions: Sequence[Any]) -> Any:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            yield from _passes(action.sub_actions)
        elif action.computation_type.value in ("F", "I", "W", "B"):
            yield action.computation_type.value, action.stage_index, action.microbatch_index


def simulate(order: Order, forward: float, backward: float, weights: float) -> tuple[float, float]:
    """Run the passes of all ranks on their clocks; returns the step's time and its bubble.

    backward is that for the input, weights that for the parameters. The bubble is the step less the
    work of one rank; all have the same.
    """
    cost = {"F": forward, "I": backward, "W": weights, "B": backward + weights}
    last = max(stage for passes in order.values() for _, stage, _ in passes)
    waiting = {rank: deque(passes) for rank, passes in order.items()}
    clock, work = Counter(dict.fromkeys(order, 0.0)), Counter()
    done: dict[tuple[str, int, int], float] = {}
    while any(waiting.values()):
        before = len(done)
        for rank, passes in waiting.items():
            while passes:
                kind, stage, number = passes[0]
                need = _needed(kind, stage, number, last)
                if need is not None and need not in done:
                    break
                clock[rank] = max(clock[rank], done.get(need, 0.0)) + cost[kind]
                work[rank] += cost[kind]
                done["I" if kind == "B" else kind, stage, number] = clock[rank]
                passes.popleft()
        assert len(done) > before, "the table does not come to an end"
    step = max(clock.values())
    return step, step - max(work.values())


def _needed(kind: str, stage: int, number: int, last: int) -> tuple[str, int, int] | None:
    """Return the pass that has to end before this one starts."""
    if kind == "F":
        return ("F", stage - 1, number) if stage else None
    if kind == "W":
        return "I", stage, number
    return ("I", stage + 1, number) if stage < last else ("F", stage, number)


# The overlapped executor

COSTS = {"until_router": (1.0, 2.0), "bank": (1.0, 2.0)}
"""Time of a part, forward and backward, in units of one attention forward; others take none."""
TAGS = 1 << 20
"""Added to the tag of a message between stages for that of its time."""


class VirtualClock:
    """Time that moves only by what it is told."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def spend(self, cost: float) -> None:
        self.time += cost

    def until(self, moment: float) -> None:
        self.time = max(self.time, moment)


class WallClock:
    """The machine's time in units of `unit` seconds; to spend it is to sleep."""

    unit = 0.005

    def now(self) -> float:
        return time.monotonic() / self.unit

    def spend(self, cost: float) -> None:
        time.sleep(cost * self.unit)

    def until(self, moment: float) -> None:
        self.spend(max(moment - self.now(), 0.0))


class ClockedPipeline(OverlappedPipeline):
    """The overlapped executor that keeps time, see the head of this file."""

    def begin(self, clock: VirtualClock | WallClock, delay: float, overlap: bool) -> None:
        """Start a step's time; a message between experts takes `delay`."""
        self.clock, self.delay, self.overlap, self.place = clock, delay, overlap, "alone"
        self.travelled: Counter[str] = Counter()
        self.exposed: Counter[str] = Counter()
        self.idle, self.times = 0.0, {}

    def act(self, action: Any) -> None:
        self.place = "alone" if action.sub_actions is None else "pairs"
        plain = not self.overlap and action.sub_actions is not None
        for one in action.sub_actions if plain else (action,):
            super().act(one)

    def part(self, kind: str, function: Any, *inputs: Any) -> Any:
        part = super().part(kind, function, *inputs)
        part.costs = COSTS.get(function.__name__, (0.0, 0.0))
        self.clock.spend(part.costs[0])
        return part

    def back(self, part: Any, *grads: Any) -> Any:
        found = super().back(part, *grads)
        self.clock.spend(part.costs[1])
        return found

    def start(self, *message: Any) -> Any:
        started = super().start(*message)
        started.ready = self.clock.now() + self.delay
        self.travelled[self.place] += self.delay
        return started

    def wait(self, message: Any) -> Any:
        before = self.clock.now()
        self.clock.until(message.ready)
        self.exposed[self.place] += self.clock.now() - before
        return super().wait(message)

    def send(self, what: str, stage: int, number: int) -> None:
        to = self.owner[stage + (1 if what == "out" else -1)]
        now = torch.tensor([self.clock.now()], dtype=torch.float64)
        tag = TAGS + self.tag(what, stage, number, 0)
        self.sent.append((dist.isend(now, group=self.group, group_dst=to, tag=tag), now))
        super().send(what, stage, number)

    def receive(self, what: str, stage: int, number: int) -> None:
        source, then = stage + (-1 if what == "out" else 1), torch.zeros(1, dtype=torch.float64)
        tag = TAGS + self.tag(what, source, number, 0)
        work = dist.irecv(then, group=self.group, group_src=self.owner[source], tag=tag)
        self.times[what, source, number] = work, then
        super().receive(what, stage, number)

    def arrived(self, what: str, stage: int, number: int) -> Any:
        before = self.clock.now()
        work, then = self.times.pop((what, stage, number), (None, None))
        if work is not None:
            work.wait()
            self.clock.until(float(then))
        out = super().arrived(what, stage, number)
        self.idle += self.clock.now() - before
        return out


class Case(NamedTuple):
    """One step to measure: micro-batches, delay over attention's time, passes in pairs or not."""

    micro_batches: int
    delay: float
    overlap: bool = True


def measure_steps(
    pp: int, cases: Sequence[Case], *, each: int = 1, wall: bool = False
) -> list[dict[str, Any]]:
    """Return for each case what a step of the executor on 2 * pp ranks hid, by its clocks.

    A stage has `each` blocks; every other rank of a stage has half of the experts.
    hidden_pairs, hidden_step: share of the time of messages between experts during which the rank
    computed, in pairs and altogether; step: time of the last rank; idle: share of the ranks' time
    in which they waited for another stage; even: whether ranks of a stage kept the same time.
    """
    most = max(case.micro_batches for case in cases)
    words = (
        f"devices={2 * pp} accelerator=cpu precision=fp64 model.hidden_size=8"
        f" model.num_hidden_layers={each * 2 * pp} model.num_attention_heads=2 model.head_dim=4"
        " model.num_key_value_heads=2 model.num_experts=4 model.moe_intermediate_size=8"
        f" data.seq_len=8 data.global_batch_size={2 * most} data.micro_batch_size=1"
        f" parallel.pp={pp} parallel.dp_shard=2 parallel.ep=2 parallel.schedule=dualpipev"
        f" parallel.overlap=true parallel.pp_split=[{','.join([str(each)] * 2 * pp)}]"
    )
    config = load_config(words.split(), project=None)
    refused = problems(config, 2 * pp)
    assert not refused, refused
    for name in ("tensor", "pipelining"):
        import_module(f"torch.distributed.{name}")  # once, before the ranks are forked
    corpus = open_corpus(config.data, cache_dir=None)
    answers = run_ranks(_steps_of_rank, 2 * pp, config, corpus, cases, wall, timeout=150.0)
    return [
        {"pp": pp, **case._asdict(), **_summary(found)}
        for case, *found in zip(cases, *answers, strict=True)
    ]


def _steps_of_rank(
    rank: int, world: int, config: Config, corpus: Any, cases: Sequence[Case], wall: bool
) -> list[tuple[float, float, dict[str, float], dict[str, float]]]:
    mesh = build_mesh(config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60)
    runtime = assemble(config, corpus, mesh)
    micro_batches, found = runtime.batches.next_step(), []
    pipeline: Any = runtime.pipeline
    pipeline.__class__ = ClockedPipeline
    for case in cases:
        dist.barrier()
        clock = WallClock() if wall else VirtualClock()
        before = clock.now()
        pipeline.begin(clock, case.delay, case.overlap)
        accumulate(runtime, micro_batches[: case.micro_batches])
        forget_gradients(runtime)
        taken = clock.now() - before
        found.append((taken, pipeline.idle, dict(pipeline.travelled), dict(pipeline.exposed)))
    return found


def _summary(found: Sequence[tuple[float, float, dict, dict]]) -> dict[str, Any]:
    times, idle, travelled, exposed = zip(*found, strict=True)

    def hidden(*places: str) -> float:
        total = sum(one[place] for one in travelled for place in places)
        return 1 - sum(one[place] for one in exposed for place in places) / total

    return {
        "hidden_pairs": hidden("pairs"),
        "hidden_step": hidden("pairs", "alone"),
        "step": max(times),
        "idle": sum(idle) / sum(times),
        "even": times[0::2] == times[1::2],
    }
