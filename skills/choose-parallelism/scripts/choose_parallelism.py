#!/usr/bin/env python3
"""Name the bottleneck of a layout and the next primitive to turn on, with numbers.

Enumerates the layouts that a project's rules accept for --gpus, drops those that do not fit,
ranks the rest by estimated step time and simplicity. A preset is a file of configs/model. A
benchmark-step report or a profiler's trace adds what was measured.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: choose-parallelism needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

import machines  # noqa: E402
from kernel_sums import MESSAGES, sums  # noqa: E402
from tables import GIB, described, draw, gib, table  # noqa: E402

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import SCHEMA, Report  # noqa: E402
from kit.user_code import put_first_on_path, user_code  # noqa: E402

SKILL = "choose-parallelism"
THRESHOLDS = {
    "parallelism-memory": 0.9,  # share of a GPU's memory that the plan may fill; the rest is slack
    "parallelism-speed": 1.1,  # present step over the best one's; above it a change is worth it
    "parallelism-measured": 2.0,  # measured step over the estimate; above it something else is slow
}
SHOWN, MOST_GPUS = 5, 4096
CHEAPER = "cheaper, but needs so much or is so much slower"
DEARER = "dearer, with a step of"


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("--preset", metavar="NAME", help="a model of configs/model, as model=NAME")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs (processes) to plan for")
    machines.add_flags(parser)
    parser.add_argument(
        "--report", metavar="REPORT.json", help="what benchmark-step measured on one GPU or a run"
    )
    parser.add_argument("--trace", metavar="TRACE.json", help="chrome trace of torch.profiler")


def check_flags(args: Any) -> None:
    """Refuse what cannot be planned, before anything is imported."""
    if args.target is not None:
        raise UsageError("--target", "layouts belong to a project", "set --project and --set")
    if not 1 <= args.gpus <= MOST_GPUS:
        raise UsageError(f"--gpus {args.gpus}", f"it takes 1 to {MOST_GPUS}")
    args.machine = machines.machine_of(args)
    args.measured = None if args.report is None else read_report(Path(args.report))
    args.sums = None if args.trace is None else sums(Path(args.trace))


def read_report(path: Path) -> dict[str, Any]:
    """Read the numbers of a benchmark-step report."""
    wanted = "--report takes the report.json of a benchmark-step run"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--report {path}: {error.strerror}", wanted) from None
    except ValueError:
        raise UsageError(f"--report {path} is no JSON", wanted) from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise UsageError(f"--report {path} is no report", wanted)
    if report.get("skill") != "benchmark-step":
        raise UsageError(f"--report {path} is a report of {report.get('skill')}", wanted)
    step = (report.get("numbers") or {}).get("step_time")
    if not isinstance(step, (int, float)) or isinstance(step, bool) or not step > 0:
        raise UsageError(f"--report {path} has step_time {step!r}", wanted)
    return report


def load(call: cli.Invocation) -> Any:
    """Return the project's configuration for the model asked for, on any machine."""
    args, project = call.args, call.project
    put_first_on_path(project)
    with user_code("importing curry_train of the project"):
        from curry_train.compose import load_config, options

        try:
            from curry_train.communication import step_time  # noqa: F401
        except ImportError:
            raise UsageError(
                "this project's curry_train has no communication.py",
                "it is of an older version",
                "update it by the start-project skill",
            ) from None
    words = list(args.set)
    if args.preset is not None:
        known = options(project, "model")
        if args.preset not in known:
            raise UsageError(f"--preset {args.preset} is unknown", f"known are {', '.join(known)}")
        words.insert(0, f"model={args.preset}")
    os.environ.pop("WORLD_SIZE", None)
    os.environ["SLURM_NTASKS"] = str(args.gpus)  # the rules then leave the world to this script
    with user_code("the configuration"):
        config = load_config(words, project=project)
    from curry_train.config import ModelConfig

    if not isinstance(config.model, ModelConfig):
        raise UsageError(
            f"model.architecture={config.model.architecture} has no closed forms",
            "layouts are planned for the decoder family",
        )
    return config


def choose(call: cli.Invocation) -> Report:
    """Price the present layout and all others, judge, advise, draw."""
    args, machine = call.args, call.args.machine
    if machine.memory_gb is None:
        raise UsageError(
            "no memory is known",
            f"--node takes {', '.join(sorted(machines.NODES))}",
            "set --node, or --memory-gb",
        )
    config, report = load(call), Report(SKILL)
    call.expect(None, f"layouts of {args.gpus} GPUs")
    import candidates

    from curry_train.communication import Links
    from curry_train.parallel import dims

    links = None
    if not machine.missing:
        links = Links(
            inside=machine.inside_gbps * 1e9,
            between=machine.between_gbps * 1e9,
            per_node=machine.gpus_per_node,
            peak=machine.peak_tflops * 1e12 / (4 if config.precision in ("fp32", "fp64") else 1),
            memory=machine.memory_gbps * 1e9,
        )
    room = machine.memory_gb * GIB * THRESHOLDS["parallelism-memory"]
    refused = [f"{key}: {why}" for key, why in dims.refusals(config, args.gpus)]
    present = None if refused else candidates.price(config, args.gpus, links)
    base = present or candidates.Candidate(config, args.gpus, {})
    found = candidates.search(config, args.gpus, room, links, base)
    judge_present(report, present, refused, machine)
    judge_speed(report, present, found, room, machine)
    advise(report, present, base, found, room, links)
    measured(report, args, present, found, room)
    shown = candidates.distinct(found.fitting, SHOWN)
    print(table(shown, present, machine.memory_gb, THRESHOLDS["parallelism-memory"]), flush=True)
    report.numbers |= {
        "gpus": args.gpus,
        "machine": vars(machine),
        "accepted": found.accepted,
        "fitting": len(found.fitting),
        "present": described(present),
        "candidates": [described(one) for one in shown],
    }
    picture = draw(shown, present, machine.memory_gb, call.out / "memory.png")
    report.artifacts += [str(picture)] if picture else []
    return report


def judge_present(report: Report, present: Any, refused: list[str], machine: Any) -> None:
    """Say whether the present layout is accepted and fits."""
    if present is None:
        report.check("parallelism-accepted", "fail", message=refused[0])
        report.summary = "the present layout is refused by the project's rules"
        return
    report.check("parallelism-accepted", "pass")
    share = present.bytes / (machine.memory_gb * GIB)
    largest = max(present.memory, key=lambda part: present.memory[part] or 0)
    fits = share <= THRESHOLDS["parallelism-memory"]
    report.check(
        "parallelism-memory",
        "pass" if fits else "fail",
        value=share,
        threshold=THRESHOLDS["parallelism-memory"],
        unit=f"of {machine.memory_gb:g} GiB",
        message=f"{gib(present.bytes)}, most of it {largest} ({gib(present.memory[largest])})",
    )
    if not fits:
        states = sum(present.memory[p] for p in ("parameters", "gradients", "optimizer"))
        what = "parameters, gradients and moments" if states > present.bytes / 2 else largest
        size = states if states > present.bytes / 2 else present.memory[largest]
        report.summary = (
            f"does not fit: a rank needs {gib(present.bytes)} of {machine.memory_gb:g} GiB; "
            f"the bottleneck is memory, {what} take {gib(size)}"
        )


def judge_speed(report: Report, present: Any, found: Any, room: float, machine: Any) -> None:
    """Hold the present step against the best one's."""
    if present is None or present.bytes > room:
        return
    if present.time is None:
        report.summary = f"fits ({gib(present.bytes)}); no figures to estimate time from"
        missing = f"set --node, or {' '.join(machine.missing)}"
        report.check("parallelism-speed", "unclear", message="figures are missing")
        report.next.append(missing)
        return
    best = found.fitting[0] if found.fitting else present
    ratio = present.total / min(best.total, present.total)
    slower = ratio > THRESHOLDS["parallelism-speed"]
    name, seconds, words = bottleneck(present)
    report.check(
        "parallelism-speed",
        "unclear" if slower else "pass",
        value=ratio,
        threshold=THRESHOLDS["parallelism-speed"],
        unit="x the best step",
        message=f"estimated {present.total:.3g} s; {words}",
    )
    crossing = [g for g, row in present.time["communication"].items() if row["crosses"]]
    costly = [g for g in ("tp", "ep") if g in crossing]
    for group in costly:
        share = present.time["communication"][group]["exposed"] / present.total
        report.check(
            "parallelism-nodes",
            "unclear" if slower else "pass",
            value=share,
            unit="of the step",
            message=f"parallel.{group}={getattr(present.config.parallel, group)} crosses nodes of "
            f"{machine.gpus_per_node} GPUs ({machine.between_gbps:g} GB/s between)",
        )
    report.numbers["bottleneck"] = {"name": name, "seconds": seconds, "step": present.total}
    report.summary = f"fits ({gib(present.bytes)}); bottleneck {words}"


def bottleneck(one: Any) -> tuple[str, float, str]:
    """Return the part of a step that costs most beside the products themselves."""
    parts = {"optimizer": one.time["optimizer"], "pipeline bubble": one.time["bubble"]}
    for group, row in one.time["communication"].items():
        name = f"{group} messages" + (" between nodes" if row["crosses"] else "")
        parts[name] = row["exposed"]
    name = max(parts, key=lambda part: parts[part])
    if parts[name] < 0.05 * one.total:
        return "compute", one.time["compute"], f"compute, {one.time['compute'] / one.total:.0%}"
    share = parts[name] / one.total
    return name, parts[name], f"{name}, {parts[name]:.3g} s of {one.total:.3g} ({share:.0%})"


def advise(report: Report, present: Any, base: Any, found: Any, room: float, links: Any) -> None:
    """Say what to set next, and why what is cheaper was not enough."""
    from candidates import LADDER

    if not found.fitting:
        more = enough_gpus(base, room)
        report.next.append(more)
        report.numbers["next"] = {"needs": more}
        reject(report, found, [], base, len(LADDER))
        return
    fits = present is not None and present.bytes <= room
    best = found.fitting[0]
    if links is None:
        if fits:
            return
        best = min(found.fitting, key=lambda one: (one.complexity, one.bytes))
    if (
        present is not None
        and fits
        and present.total <= best.total * THRESHOLDS["parallelism-speed"]
    ):
        reject(report, found, found.fitting, base, -1, present)
        return
    words = best.instead_of(base.config.parallel)
    new = [name for name in best.used if name not in base.used] or ["micro-batch"]
    time = "" if best.total is None else f", step {best.total:.3g} s"
    report.next.append(f"{' + '.join(new)} ({gib(best.bytes)}{time}); set {' '.join(words)}")
    report.numbers["next"] = {"primitives": new, "overrides": words}
    reject(report, found, found.fitting, base, best.level(base), best)


def reject(
    report: Report,
    found: Any,
    fitting: list[Any],
    base: Any,
    level: int,
    best: Any = None,
) -> None:
    """Name the best of every cheaper (and of the present's unneeded) primitives, and its figure."""
    from candidates import LADDER

    cheaper, dearer = [], []
    for index, name in enumerate(LADDER):
        own = [one for one in fitting if one.level(base) == index]
        rows = cheaper if index <= level else dearer
        if own and best is not None and best.total is not None and own[0] is not best:
            ratio = own[0].total / best.total - 1
            if index != level:
                rows.append(f"{name} {ratio:+.0%}")
        elif not own and index < level and index in found.least:
            rows.append(f"{name} {gib(found.least[index].bytes)}")
    report.numbers["rejected"] = {"cheaper": cheaper, "dearer": dearer}
    for what, rows in ((CHEAPER, cheaper), (DEARER, dearer)):
        if rows:
            report.evidence.append(f"{what}: " + ", ".join(rows))


def enough_gpus(base: Any, room: float) -> str:
    """Find how many GPUs hold the model, doubling; simpler layouts on twice as many come first."""
    import candidates

    world, batch, first = base.world, base.config.data.global_batch_size, ""
    while world < MOST_GPUS:
        world *= 2
        data = replace(base.config.data, global_batch_size=max(batch, world))
        found = candidates.search(replace(base.config, data=data), world, room, None, base)
        if found.fitting:
            one = min(found.fitting, key=lambda one: (one.complexity, one.bytes))
            new = " + ".join(name for name in one.used if name not in base.used)
            words = f"{world} GPUs: {new}: {' '.join(one.instead_of(base.config.parallel))}"
            words += f" ({gib(one.bytes)})"
            simple = one.level(base) <= candidates.LADDER.index("zero 3")
            if first:
                return f"{words}; or {first}" if simple else first
            if simple:
                return words
            first = f"{world} GPUs: {new}"
    return first or f"no layout fits on {MOST_GPUS} GPUs; take GPUs with more memory"


def measured(report: Report, args: Any, present: Any, found: Any, room: float) -> None:
    """Hold a measured step and a trace against the estimate."""
    if args.sums is not None:
        trace, window = args.sums, args.sums["window"]
        kinds = {**trace["kinds"], "idle": trace["idle"]}
        report.numbers["trace"] = trace
        shares = ", ".join(f"{name} {s / window:.0%}" for name, s in list(kinds.items())[:6])
        report.evidence.insert(
            0,
            f"trace of {window:.3g} s: {shares}, exposed messages {trace['exposed'] / window:.0%}",
        )
        report.numbers["bottleneck_of_trace"] = largest_waste(trace)
        report.next.insert(0, TRACE_ADVICE[largest_waste(trace)])
    if args.measured is None or present is None or present.total is None:
        return
    numbers = args.measured["numbers"]
    ratio = numbers["step_time"] / present.total
    slow = ratio > THRESHOLDS["parallelism-measured"]
    mfu = numbers.get("mfu")
    shown = "unknown" if not isinstance(mfu, float) else f"{mfu:.1%}"
    larger = larger_micro_batch(present, room) if slow else None
    report.check(
        "parallelism-measured",
        "unclear" if slow else "pass",
        value=ratio,
        threshold=THRESHOLDS["parallelism-measured"],
        unit="x the estimate",
        message=f"measured {numbers['step_time']:.3g} s, MFU {shown}"
        + (f"; micro-batches of {present.micro_batch} are too small" if larger else ""),
    )
    if larger:
        report.numbers["bottleneck"] = {"name": "small micro-batch", "seconds": None}
        report.summary = (
            f"fits ({gib(present.bytes)}); bottleneck small micro-batch: {present.micro_batch} x "
            f"{present.config.data.seq_len} tokens keep the GPU at MFU {shown}"
        )
        report.next.insert(0, f"micro-batch: data.micro_batch_size={larger} fits and is free")
        report.numbers["next"] = {
            "primitives": ["micro-batch"],
            "overrides": [f"data.micro_batch_size={larger}"],
        }
    elif slow:
        report.next.insert(0, "the step waits for what no layout changes; record a trace")


def largest_waste(trace: dict[str, Any]) -> str:
    """Name what keeps a GPU from products: idle, a kind of messages, or the rest."""
    wastes = {"idle": trace["idle"], "rest": trace["kinds"].get("rest", 0.0) / 2}
    told = {kind: trace["kinds"].get(kind, 0.0) for kind in MESSAGES}
    if sum(told.values()):
        kind = max(told, key=lambda name: told[name])
        wastes[kind] = trace["exposed"]
    name = max(wastes, key=lambda waste: wastes[waste])
    return name if wastes[name] > 0.05 * trace["window"] else "products"


TRACE_ADVICE = {
    "idle": "trace: the GPU waits for the host; a larger data.micro_batch_size, or compile=true",
    "rest": "trace: small operations take the time; compile=true fuses them",
    "products": "trace: products and attention take nearly all; no layout makes them faster",
    "all-gather": "trace: all-gathers are exposed; lower parallel.tp or parallel.zero=2",
    "reduce-scatter": "trace: reduce-scatters are exposed; lower parallel.tp, or accumulate more",
    "all-reduce": "trace: the all-reduce is exposed; parallel.zero=2 hides it, or accumulate more",
    "all-to-all": "trace: experts' messages are exposed; parallel.ep inside a node, or "
    "parallel.overlap=true with parallel.schedule=dualpipev",
    "send-receive": "trace: sends are exposed; parallel.ep inside a node, more micro-batches",
    "other messages": "trace: messages are exposed; see the kinds in report.json",
}


def larger_micro_batch(present: Any, room: float) -> int | None:
    """Return the largest micro-batch that fits and is larger than the present one."""
    import candidates

    from curry_train.parallel import dims

    ranks = dims.resolve(present.config.parallel, present.world).batch
    local = present.config.data.global_batch_size // ranks
    for size in reversed(candidates.divisors(local)):
        data = replace(present.config.data, micro_batch_size=size)
        config = replace(present.config, data=data)
        if size <= present.micro_batch or any(dims.refusals(config, present.world)):
            continue
        if candidates.price(config, present.world, None).bytes <= room:
            return size
    return None


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, choose, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
