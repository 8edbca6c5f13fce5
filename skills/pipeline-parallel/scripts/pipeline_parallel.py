#!/usr/bin/env python3
"""Show a pipeline before it runs: stages, bubble and memory of every schedule, which are refused.

Schedules run on a virtual clock with the project's own stages: by FLOP, or with --measure by the
time of real blocks on this machine. A small model of the same kind is then trained on forked CPU
ranks in the project's layout, and gradients, updates and losses are held against one process.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: pipeline-parallel needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

import pipeline_proof  # noqa: E402
import schedule_clock as clock  # noqa: E402
import stage_times  # noqa: E402
import timeline  # noqa: E402

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.memory import show_bytes  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import put_first_on_path, user_code  # noqa: E402

SKILL = "pipeline-parallel"
THRESHOLDS = {
    "pipeline-bubble": 0.2,  # idle share of all ranks' time in a step, uneven stages included
    "pipeline-imbalance": 1.1,  # work of the dearest rank over the mean
    "pipeline-gradients": 1e-12,  # worst error of a gradient against one process, in float64
    "pipeline-losses": 1e-8,  # worst relative error of a loss of three steps and of validation
}
NEARLY = 1.02
"""Steps this close are equally fast: the schedule with less memory is then the better one."""
OF_PIPELINE = (
    "parallel.schedule", "parallel.reshard", "parallel.overlap", "parallel.pp", "parallel.pp_split",
    "compile", "model.tie_word_embeddings",
)  # fmt: skip


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("--world", type=int, help="ranks (default: the fewest that hold the axes)")
    parser.add_argument(
        "--measure", action="store_true", help="time real blocks here, not their FLOP"
    )
    parser.add_argument(
        "--proof-ranks", type=int, default=4, help="ranks of the proof at most; 0 leaves it out"
    )


def check_flags(args: Any) -> None:
    """Refuse what cannot be planned, before anything is imported."""
    if args.target is not None:
        raise UsageError("--target", "a pipeline belongs to a project", "set --project and --set")
    if args.world is not None and args.world < 2:
        raise UsageError(f"--world {args.world}", "a pipeline has at least 2 ranks")
    if args.proof_ranks < 0 or args.proof_ranks == 1:
        raise UsageError(f"--proof-ranks {args.proof_ranks}", "it takes 0, or 2 and more")


@dataclass
class Choice:
    """One schedule for this configuration. why: reasons of its refusal; the rest where accepted."""

    name: str
    why: list[str]
    layout: Any = None
    run: clock.Run | None = None
    even: float = 0.0
    formula: float = 0.0
    live: tuple[int, ...] = ()
    activations: tuple[int | None, ...] = ()
    memory: int = 0


def look(call: cli.Invocation) -> Report:
    """Load, judge every schedule, draw the configured one, prove it."""
    report = Report(SKILL)
    call.expect(None, "schedules on a virtual clock, then the proof")
    config, refused, words = load(call)
    if config is None:
        judge_refused(report, refused, [])
        report.summary = "the project's rules refuse this pipeline with every schedule"
        return report
    if config.parallel.pp == 1:
        report.summary = (
            "parallel.pp=1, so there is no pipeline to look at; add --set parallel.pp=N"
        )
        return report
    from curry_train.config import config_hash

    torch = sys.modules["torch"]
    unused: Any = None  # the proof's ranks build their own model
    call.target = Target(
        unused, unused, unused, unused, torch.device("cpu"), config_hash(config), "project"
    )
    world = call.args.world or fewest_ranks(config)
    parts = None
    if call.args.measure:
        parts = measure(call, config, world)
    choices = [weigh(config, world, name, parts) for name in clock.SCHEDULES]
    name = words.get("parallel.schedule", config.parallel.schedule) if refused else None
    present = next(c for c in choices if c.name == (name or config.parallel.schedule))
    best = recommended(choices)
    judge_refused(report, refused, choices)
    tell(report, config, world, present, choices, best, parts)
    print(timeline.table(choices, best), flush=True)
    if present.run is None or refused:
        report.summary = f"{present.name} is refused on {world} ranks"
        return report
    judge_times(report, present, best)
    picture = timeline.draw(present, call.out / "timeline.png", bool(parts))
    report.artifacts += [str(picture)] if picture else []
    if call.args.proof_ranks:
        pipeline_proof.prove(call, report, config, world, THRESHOLDS)
    return report


def load(call: cli.Invocation) -> tuple[Any, list[str], dict[str, str]]:
    """Return the configuration, what the rules refuse of its pipeline, and the words as a dict.

    Where they refuse, it is that of another schedule, so that the others can be looked at; None
    where all are refused.
    """
    put_first_on_path(call.project)
    asked = list(call.args.set)
    asked += [] if call.args.seed is None else [f"seed={call.args.seed}"]
    with user_code("importing curry_train of the project"):
        import torch  # noqa: F401

        from curry_train.compose import load_config
        from curry_train.config import ConfigError
        from curry_train.stages import bubble  # noqa: F401
    world = call.args.world
    os.environ |= {"SLURM_NTASKS": "1"} if world is None else {"WORLD_SIZE": str(world)}
    refused: list[str] = []
    others = [[], *([f"parallel.schedule={name}"] for name in clock.SCHEDULES)]
    try:
        for more in others:
            try:
                with user_code("the configuration"):
                    return load_config([*asked, *more], project=call.project), refused, pairs(asked)
            except UsageError as error:
                cause = error.__cause__
                if not isinstance(cause, ConfigError) or not about_pipeline(cause.problems):
                    if not refused:
                        raise
                    continue
                refused = refused or list(cause.problems)
        return None, refused, pairs(asked)
    finally:
        os.environ.pop("SLURM_NTASKS" if world is None else "WORLD_SIZE")


def pairs(words: list[str]) -> dict[str, str]:
    """Return the settings of a command line by key."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def about_pipeline(problems: list[str]) -> bool:
    """Tell whether all problems are of the pipeline, which this skill judges."""
    return all(text.partition("=")[0] in OF_PIPELINE for text in problems)


def fewest_ranks(config: Any) -> int:
    """Return the ranks that the axes name, with as few for dp_shard as they allow."""
    from curry_train.parallel.dims import ParallelDims

    dims = ParallelDims.of(config.parallel)
    if dims.dp_shard == -1:
        dims = replace(dims, dp_shard=dims.ep // math.gcd(dims.ep, dims.cp * dims.tp))
    return dims.world


def measure(call: cli.Invocation, config: Any, world: int) -> dict[str | int, Any]:
    """Time the blocks on the device that the flags name."""
    from curry_train.layout import Layout

    torch = sys.modules["torch"]
    device = call.args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with user_code("timing a block"):
        return stage_times.measured(
            Layout(config, world), device, lambda what: call.progress(0, 1, what)
        )


def weigh(config: Any, world: int, name: str, parts: dict | None) -> Choice:
    """Run one schedule on the clock with this configuration's stages, or say why it cannot be."""
    from curry_train import plan, stages
    from curry_train.layout import Layout
    from curry_train.parallel import dims

    overlap = config.parallel.overlap and name == "dualpipev"
    parallel = replace(config.parallel, schedule=name, overlap=overlap)
    changed = replace(config, parallel=parallel)
    why = [f"{key}: {reason}" for key, reason in dims.refusals(changed, world)]
    if why:
        return Choice(name, why)
    layout = Layout(changed, world)
    ranks, many = layout.dims.pp, layout.micro_batches
    order = clock.order_of(name, ranks, many)
    times = stage_times.of_stages(layout, parts or stage_times.by_flop(layout))
    run = clock.run(order, times)
    mean = clock.Times(1.0, 1.0, 1.0)
    even = clock.run(order, dict.fromkeys(times, mean)).idle
    each = len(layout.stages_of(0))
    idle = stages.bubble(name, ranks, many)
    memory = plan.estimate_ranks(changed, world)
    return Choice(
        name,
        [],
        layout,
        run,
        even,
        idle / (3 * many * each + idle),
        tuple(sum(stages.live_micro_batches(name, ranks, rank, many)) for rank in range(ranks)),
        tuple(one["activations"] for one in memory),
        max(sum(amount or 0 for amount in one.values()) for one in memory),
    )


def recommended(choices: list[Choice]) -> Choice | None:
    """Return the fastest schedule; of nearly as fast ones that with the least memory."""
    accepted = [choice for choice in choices if choice.run]
    if not accepted:
        return None
    limit = NEARLY * min(choice.run.step for choice in accepted if choice.run)
    fast = [choice for choice in accepted if choice.run and choice.run.step <= limit]
    return min(fast, key=lambda choice: (choice.memory, choice.run.step if choice.run else 0.0))


def judge_refused(report: Report, refused: list[str], choices: list[Choice]) -> None:
    """Say whether the rules accept the configured schedule, and name the refused ones."""
    names = [choice.name for choice in choices if choice.why]
    others = f"refused here: {', '.join(names)}" if names else ""
    report.check(
        "pipeline-refused", "fail" if refused else "pass", message=" ".join(refused[:1]) or others
    )
    report.next += [text.rpartition("; ")[2] for text in refused[:1]]
    report.numbers["refused"] = {choice.name: choice.why for choice in choices if choice.why}


def judge_times(report: Report, present: Choice, best: Choice | None) -> None:
    """Hold bubble and balance of the configured schedule against the limits."""
    assert present.run is not None
    idle, limit = present.run.idle, THRESHOLDS["pipeline-bubble"]
    many, ranks = present.layout.micro_batches, present.layout.dims.pp
    report.check(
        "pipeline-bubble",
        "fail" if idle > limit else "pass",
        value=idle,
        threshold=limit,
        unit="of all ranks' time",
        message=f"{many} micro-batches on {ranks} ranks; {present.formula:.1%} if stages were even"
        + ("; make more" if idle > limit else ""),
    )
    work = present.run.work
    mean = sum(work) / len(work)
    rank = max(range(len(work)), key=lambda at: work[at])
    ratio, limit = work[rank] / mean, THRESHOLDS["pipeline-imbalance"]
    held = [
        " and ".join(described(present.layout, stage)) for stage in present.layout.stages_of(rank)
    ]
    advice = "set parallel.pp_split=auto"
    if present.layout.parallel.pp_split == "auto":
        advice = "no split of whole blocks is better: fewer stages, or more blocks"
    report.check(
        "pipeline-imbalance",
        "fail" if ratio > limit else "pass",
        value=ratio,
        threshold=limit,
        unit="x the mean work",
        message=f"rank {rank} has {'; '.join(held)}" + (f": {advice}" if ratio > limit else ""),
    )
    if present.layout.parallel.overlap:
        report.next.append(
            "overlap hides the messages of experts, which this clock does not count: compare it "
            "by choose-parallelism or benchmark-step"
        )
    elif best is not None and best is not present and best.run is not None:
        ratio = best.run.step / present.run.step
        report.next.append(
            f"parallel.schedule={best.name}: step x {ratio:.2f}, bubble {best.run.idle:.1%}, "
            f"fullest rank {show_bytes(best.memory)} instead of {show_bytes(present.memory)}"
        )


def described(layout: Any, stage: int) -> list[str]:
    """Say what a stage holds: `blocks 0 to 3`, `head`."""
    blocks = layout.split[stage]
    words = [f"blocks {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"]
    ends = [part for part in layout.parts_of(stage) if isinstance(part, str)]
    return ends[:1] + words + ends[1:] if stage == 0 else words + ends


def tell(
    report: Report,
    config: Any,
    world: int,
    present: Choice,
    choices: list[Choice],
    best: Choice | None,
    parts: dict | None,
) -> None:
    """Fill numbers and evidence: stages, schedules, messages, what a split backward excludes."""
    from curry_train.communication import messages
    from curry_train.parallel.dims import SPLIT_BACKWARD

    report.numbers |= {
        "world": world,
        "unit": "seconds" if parts else "FLOP",
        "recommended": best.name if best else None,
        "schedules": [row_of(choice) for choice in choices],
    }
    report.evidence.append(
        f"{', '.join(SPLIT_BACKWARD)} split the backward: refused with parallel.reshard=true and "
        "compile=true" + ("; zero=3 keeps parameters gathered" * (config.parallel.zero == 3))
    )
    if present.run is None:
        return
    layout, run = present.layout, present.run
    ranks = range(layout.dims.pp)
    sent = [[row for row in messages(layout, rank) if row.group == "pp"] for rank in ranks]
    totals = [(sum(row.bytes for row in rows), sum(row.calls for row in rows)) for rows in sent]
    report.numbers |= {
        "micro_batches": layout.micro_batches,
        "stages": [
            {"stage": stage, "rank": rank, "parts": layout.parts_of(stage)}
            for rank in ranks
            for stage in layout.stages_of(rank)
        ],
        "work": run.work,
        "messages": [{"bytes": size, "calls": calls} for size, calls in totals],
    }
    blocks = "+".join(str(len(own)) for own in layout.split)
    shares = " ".join(f"{x / (sum(run.work) / len(run.work)):.2f}" for x in run.work)
    report.evidence.insert(0, f"blocks of each stage {blocks}; work of each rank {shares} x mean")
    size, calls = max(totals)
    alive = " ".join(map(str, present.live))
    report.evidence.insert(
        1,
        f"micro-batches in flight on each rank {alive}; a rank sends at most {show_bytes(size)} "
        f"in {calls} messages a step",
    )
    report.summary = (
        f"{present.name} on {layout.dims.pp} ranks stands idle for {run.idle:.1%} of a step of "
        f"{layout.micro_batches} micro-batches ({'measured' if parts else 'by FLOP'})"
    )


def row_of(choice: Choice) -> dict[str, Any]:
    """Return one schedule as the report keeps it."""
    if choice.run is None:
        return {"schedule": choice.name, "refused": choice.why}
    return {
        "schedule": choice.name,
        "refused": [],
        "bubble_formula": choice.formula,
        "bubble_clock_even": choice.even,
        "bubble_clock": choice.run.idle,
        "step": choice.run.step,
        "in_flight": choice.live,
        "activation_bytes": choice.activations,
        "fullest_rank_bytes": choice.memory,
        "split": [len(blocks) for blocks in choice.layout.split],
    }


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, look, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
