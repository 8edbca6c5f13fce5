#!/usr/bin/env python3
"""Measure what parallel.zero 0 to 3 leaves on each rank, and prove that all give one gradient.

Forked CPU ranks train a small model of the project's kind at every level in float64: bytes of
parameters, gradients and moments, what is gathered at once, gradients against one process. With
--target a user's own fully_shard model is looked at instead.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: zero-fsdp needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

import level_meter  # noqa: E402
import sharded_ranks  # noqa: E402
import target_rules  # noqa: E402

from kit import cli, fewer_ranks, layouts  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.memory import read_bytes, show_bytes  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import parse_spec  # noqa: E402

SKILL = "zero-fsdp"
THRESHOLDS = {
    "zero-bytes": 0.0,  # relative difference of measured bytes and the plan's
    "zero-gradients": 1e-12,  # worst error of a gradient against one process, in float64
    "zero-resharding": 0.99,  # gathered at once at zero 3, over what zero 2 keeps gathered
    "zero-memory": 0.9,  # share of a GPU's memory that the plan may fill; the rest is slack
    "zero-unsharded": 0.0,  # share of the trainable parameters that fully_shard does not hold
    "zero-giant-group": 0.5,  # share of the parameters in one group of several blocks
    "zero-small-groups": 3,  # groups in a block: the block, its experts, its router
    "zero-clip": 0.001,  # relative difference of the clip's factor or norm between ranks
}
PARTS = ("parameters", "gradients", "optimizer")
BLOCKS = 4
WORLD = 4
COLOURS = {"parameters": "#4c9be8", "gradients": "#f2a541", "optimizer": "#7cc47f"}


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--world",
        type=int,
        help=f"ranks to plan for (default: those of the axes; {WORLD} replicas where dp_shard=-1)",
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="CPU ranks to measure on, at most (default 4)"
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of a GPU, in GiB or as 80GB")
    parser.add_argument(
        "--loop", metavar="FILE.py:FUNCTION", help="a --target's step, to look at its clip"
    )
    parser.add_argument("--max-norm", type=float, help="the norm that a clip by hand should give")


def check_flags(args: Any) -> None:
    """Refuse what cannot work, before anything is imported."""
    if not 2 <= args.ranks <= 16:
        raise UsageError(f"--ranks {args.ranks}", "it takes 2 to 16")
    if args.world is not None and args.world < 1:
        raise UsageError(f"--world {args.world}", "it takes at least 1")
    if args.device not in ("auto", "cpu"):
        raise UsageError(f"--device {args.device}", "ranks are forked on the CPU", "leave it out")
    if args.memory is not None:
        text = f"{args.memory}GiB" if args.memory.replace(".", "").isdigit() else args.memory
        args.memory = read_bytes(text, flag="--memory")
    if args.target is None and (args.loop is not None or args.max_norm is not None):
        raise UsageError(
            "--loop and --max-norm with a project", "it has its own step", "leave them out"
        )
    if args.target is not None and (args.memory is not None or args.world is not None):
        raise UsageError("--memory and --world with --target", "plans belong to a project")
    if args.loop is not None:
        path, function = parse_spec(args.loop, flag="--loop")
        args.loop = f"{path}:{function}"
    if args.max_norm is not None and not args.max_norm > 0:
        raise UsageError(f"--max-norm {args.max_norm:g}", "it takes a number above 0")


def look(call: cli.Invocation) -> Report:
    """Look at a user's model, or measure a project's levels."""
    report = Report(SKILL)
    if call.args.target is None:
        return look_at_project(call, report)
    call.expect(None, f"{call.args.ranks} ranks")

    seed = call.args.seed or 0
    args = call.args
    ranks = sharded_ranks.look(args.target, args.loop, call.project, args.ranks, seed)
    target_rules.judge(report, ranks, THRESHOLDS, args.max_norm)
    return report


def look_at_project(call: cli.Invocation, report: Report) -> Report:
    """Measure every level on small ranks, plan it for the real ones, judge, draw."""
    words = layouts.words_of(call)
    config, problems = layouts.load(call, words)
    if config is None:
        raise layouts.refuse("the configuration", problems)
    world = call.args.world or planned_ranks(config)
    refused = layouts.refused(config, world)
    if refused:
        raise layouts.refuse(f"this layout on {world} ranks", refused)
    import torch

    from curry_train.config import config_hash

    unused: Any = None  # each rank builds its own model
    call.target = Target(
        unused, unused, unused, unused, torch.device("cpu"), config_hash(config), "project"
    )
    call.expect(None, "four levels on forked ranks")
    rows = measure_levels(call, config, world, words)
    print(table(rows), flush=True)
    judge_bytes(report, rows)
    judge_gradients(report, rows)
    judge_resharding(report, rows, getattr(config.model, "num_hidden_layers", 0))
    recommend(call, report, config, world)
    tell(report, config, world, rows)
    picture = draw(rows, call.out / "levels.png")
    report.artifacts += [str(picture)] if picture else []
    return report


def planned_ranks(config: Any) -> int:
    """Return the ranks that the axes name; WORLD shares in the place of dp_shard=-1."""
    parallel = config.parallel
    if parallel.dp_shard == -1 and not isinstance(config.devices, int):
        parallel = replace(parallel, dp_shard=max(WORLD, parallel.ep))
    return layouts.ranks_of(replace(config, parallel=parallel), None)


def measure_levels(
    call: cli.Invocation, config: Any, world: int, words: list[str]
) -> list[dict[str, Any]]:
    """Train three steps at each level; return what was measured, planned and proved."""
    from curry_train import equality, plan
    from curry_train.parallel.dims import resolve

    sizes = {**resolve(config.parallel, world).sizes, "pp": 1}
    axes = fewer_ranks.fewer_axes(sizes, call.args.ranks, ("dp_replicate", "cp", "dp_shard"))
    if axes["dp_shard"] * axes["cp"] == 1:
        axes |= dict.fromkeys(fewer_ranks.AXES, 1) | {"dp_shard": 2, "ep": 1}
    fewer_ranks.import_for_ranks()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        single = replace(config, parallel=replace(config.parallel, pp_split="auto", overlap=False))
        small, ranks = fewer_ranks.small_words(single, axes, Path(folder))
        if hasattr(config.model, "num_hidden_layers"):
            small.append(f"model.num_hidden_layers={min(BLOCKS, config.model.num_hidden_layers)}")
        for number, (zero, reshard) in enumerate(level_meter.LEVELS):
            call.progress(number, len(level_meter.LEVELS), f"zero {zero}")
            own = [*words, *small, f"parallel.zero={zero}", f"parallel.reshard={reshard}"]
            own += ["parallel.overlap=false"]
            row = {"zero": zero, "ranks": ranks, "axes": axes, "overrides": own}
            rows.append(row)
            changed, found = layouts.load(call, own)
            if changed is None:
                row["error"] = found[0]
                continue
            row["plan"] = plan.estimate(changed, ranks)
            place = Path(folder) / f"zero-{zero}"
            place.mkdir()
            os.environ[level_meter.FILES] = str(place)
            try:
                row["proof"] = equality.prove(
                    own, ranks, prepare=level_meter.prepare, project=call.project
                )
                row["measured"] = level_meter.read(place, ranks)
            except AssertionError as error:
                row["error"] = str(error).splitlines()[0]
    return rows


def most(row: dict[str, Any], part: str) -> int:
    """Return the bytes of a part on the rank that has most."""
    return max(one[part] for one in row["measured"])


def shares(row: dict[str, Any]) -> int:
    """Return how many ranks divide the dense parameters."""
    return row["axes"]["dp_shard"] * row["axes"]["cp"]


def ideal(rows: list[dict[str, Any]], row: dict[str, Any], part: str) -> float | None:
    """Return a part's bytes if dp_shard*cp ranks divided it evenly, from the measured level 0."""
    if "measured" not in rows[0]:
        return None
    divided = row["zero"] >= {"optimizer": 1, "gradients": 2, "parameters": 2}[part]
    mean = sum(one[part] for one in rows[0]["measured"]) / len(rows[0]["measured"])
    return mean / shares(row) if divided else mean


def judge_bytes(report: Report, rows: list[dict[str, Any]]) -> None:
    """Hold every measured part against the plan."""
    worst, where = 0.0, ""
    for row in rows:
        for part in PARTS if "measured" in row else ():
            found, wanted = most(row, part), row["plan"][part]
            off = abs(found - wanted) / wanted
            if off > worst:
                worst, where = off, f"zero {row['zero']} {part}: {found}, plan {wanted} bytes"
    limit = THRESHOLDS["zero-bytes"]
    known = any("measured" in row for row in rows)
    report.check(
        "zero-bytes",
        "fail" if worst > limit else "pass" if known else "skipped",
        value=worst if known else None,
        threshold=limit,
        unit="off",
        message=where or "the fullest rank has what plan.estimate says, at every level",
    )


def judge_gradients(report: Report, rows: list[dict[str, Any]]) -> None:
    """Every level gives one process's gradients; a whole factor is named as averaging."""
    limit, wrong, worst, averaged = THRESHOLDS["zero-gradients"], [], 0.0, []
    for row in rows:
        if "proof" not in row:
            wrong.append(f"zero {row['zero']}: {row['error']}")
            worst = float("inf")
            continue
        proof, gap = row["proof"], row["proof"].gaps["gradient"]
        worst = max(worst, gap.error)
        if not (proof.equal and gap.error <= limit):
            gap = max(proof.gaps.values(), key=lambda one: one.ratio)
            wrong.append(f"zero {row['zero']}: {gap.kind} {gap.name} off by {gap.error:.2g}")
            factor = averaging(row, proof.gaps["gradient"])
            averaged += [f"zero {row['zero']} divides by {factor}"] * (factor is not None)
    report.check(
        "zero-averaging",
        "fail" if averaged else "pass",
        message="; ".join(averaged) + ": fully_shard averages; set_gradient_divide_factor(1.0) on "
        "every module, in parallel/data_parallel.py"
        if averaged
        else "",
    )
    report.check(
        "zero-gradients",
        "fail" if wrong else "pass",
        value=worst,
        threshold=limit,
        message="; ".join(wrong) or "gradients, norm, updates and losses as of one process",
    )


def averaging(row: dict[str, Any], gap: Any) -> int | None:
    """Return the whole number of ranks that a gradient was divided by, None where it was not."""
    if not gap.found:
        return None
    ratio = gap.wanted / gap.found
    whole = round(ratio)
    divides = whole > 1 and row["ranks"] % whole == 0
    return whole if divides and abs(ratio - whole) < 1e-6 * ratio else None


def judge_resharding(report: Report, rows: list[dict[str, Any]], blocks: int) -> None:
    """Zero 3 must never have gathered everything at once, where there are blocks to drop."""
    kept, row = rows[2], rows[3]
    if "measured" not in row or "measured" not in kept or blocks < 2:
        report.check("zero-resharding", "skipped", message="needs zero 2 and 3, and two blocks")
        return
    share, limit = most(row, "gathered") / most(kept, "gathered"), THRESHOLDS["zero-resharding"]
    report.check(
        "zero-resharding",
        "fail" if share > limit else "pass",
        value=share,
        threshold=limit,
        unit="of what zero 2 has gathered at once",
        message="blocks stay gathered after their forward pass" if share > limit else "",
    )


def recommend(call: cli.Invocation, report: Report, config: Any, world: int) -> None:
    """Plan every level of the real model, and name the lowest that fits."""
    from curry_train import plan

    totals = {}
    for zero in range(4):
        reshard = config.parallel.reshard if zero >= 2 else "auto"
        parallel = replace(config.parallel, zero=zero, reshard=reshard)
        parts = plan.estimate(replace(config, parallel=parallel), world)
        totals[zero] = parts, sum(amount or 0 for amount in parts.values())
    report.numbers["plan"] = {
        str(zero): {**parts, "total": total} for zero, (parts, total) in totals.items()
    }
    planned = ", ".join(f"zero {zero} {show_bytes(t)}" for zero, (_, t) in totals.items())
    report.evidence.append(f"plan of the real model on {world} ranks: {planned}")
    memory = call.args.memory
    if memory is None:
        return
    room, now = memory * THRESHOLDS["zero-memory"], totals[config.parallel.zero][1]
    fitting = [zero for zero, (_, total) in totals.items() if total <= room]
    report.numbers["recommended"] = min(fitting, default=None)
    report.check(
        "zero-memory",
        "fail" if now > room else "pass",
        value=now / memory,
        threshold=THRESHOLDS["zero-memory"],
        unit=f"of {show_bytes(memory)}",
        message=f"zero {config.parallel.zero} needs {show_bytes(now)}",
    )
    if not fitting:
        report.next.append("no level fits: more ranks in parallel.dp_shard, or choose-parallelism")
    elif min(fitting) != config.parallel.zero:
        report.next.append(
            f"set parallel.zero={min(fitting)}, the lowest that fits: "
            f"{show_bytes(totals[min(fitting)][1])}"
        )


def tell(report: Report, config: Any, world: int, rows: list[dict[str, Any]]) -> None:
    """Fill numbers and the summary."""
    axes = rows[0]["axes"]
    shown = " ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
    report.summary = (
        f"levels measured on {rows[0]['ranks']} CPU ranks ({shown}), a small model of the kind"
    )
    gathered = [f"zero {r['zero']} {show_bytes(most(r, 'gathered'))}" for r in rows[2:]
                if "measured" in r]  # fmt: skip
    if gathered:
        report.evidence.append(f"parameters gathered at once in a step: {', '.join(gathered)}")
    report.numbers |= {
        "world": world,
        "levels": [
            {
                "zero": row["zero"],
                "axes": row["axes"],
                "overrides": row["overrides"],
                "error": row.get("error"),
                "measured": row.get("measured"),
                "plan": row.get("plan"),
                "ideal": {part: ideal(rows, row, part) for part in PARTS},
                "gaps": {k: g._asdict() for k, g in row["proof"].gaps.items()}
                if "proof" in row
                else None,
            }
            for row in rows
        ],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Write bytes of the fullest rank as lines, with the plan and the ideal share."""
    lines = ["  zero  parameters   gradients   optimizer       total        plan       ideal"]
    for row in rows:
        if "measured" not in row:
            lines.append(f"  {row['zero']:<4}  {row['error']}"[:150])
            continue
        found = [most(row, part) for part in PARTS]
        plan = sum(row["plan"][part] for part in PARTS)
        even = sum(ideal(rows, row, part) or 0 for part in PARTS)
        cells = "".join(f"{value:>12,.0f}" for value in (*found, sum(found), plan, even))
        lines.append(f"  {row['zero']:<4}{cells}")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> Path | None:
    """Draw the bytes of each level, stacked; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "measured" in row]
    names = [f"zero {row['zero']}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    bottom = [0.0] * len(rows)
    for part in PARTS:
        sizes = [most(row, part) / 1024 for row in rows]
        axes.bar(names, sizes, bottom=bottom, label=part, color=COLOURS[part])
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    gathered = [most(row, "gathered") / 1024 for row in rows]
    axes.bar(
        names, gathered, bottom=bottom, label="gathered at once", fill=False, edgecolor="#888888"
    )
    axes.set(ylabel="KiB on the fullest rank", title="Bytes at each level, small model in float64")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, look, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
