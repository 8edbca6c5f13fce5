#!/usr/bin/env python3
"""Measure what recomputing activations saves and costs, and that it changes no gradient.

A project runs one micro-batch as it is, then with parallel.recompute=selective, 2 and full (and as
configured): bytes kept for backward, time, gradients. Of other code, which calls
torch.utils.checkpoint itself, the model as written is set against the same model with those calls
switched off. --memory names the setting to use.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: activation-checkpointing needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from recompute_meter import (  # noqa: E402
    Calls,
    Setting,
    changed,
    checkpoints,
    generators,
    gradient_error,
    run_once,
    time_once,
    weigh,
)

from kit import cli  # noqa: E402
from kit.batches import count_targets  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.memory import read_bytes, show_bytes, state_bytes  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "activation-checkpointing"
THRESHOLDS = {
    "recompute-gradients-differ": 1e-6,  # of the largest gradient; on a CPU it is 0
    "recompute-saves-nothing": 0.95,  # bytes kept over those without; above it nothing is gained
}
ROUNDS, LEAST_ROUNDS = 7, 3
SAME_TIME = 0.02
"""Times closer than this share are one time: the setting that needs less is named."""


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--memory", metavar="SIZE", help="bytes that one rank has, as 24GiB: names what fits"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"timed runs of each setting (default {ROUNDS})"
    )


def check_flags(args: Any) -> None:
    """Refuse flags that cannot work."""
    if args.rounds < LEAST_ROUNDS:
        raise UsageError(f"--rounds {args.rounds}", f"it takes at least {LEAST_ROUNDS}")
    args.budget = None if args.memory is None else read_bytes(args.memory, flag="--memory")
    asked = [o for o in args.set if o.partition("=")[0].lstrip("+") == "compile"]
    if asked and asked[-1].partition("=")[2].lower() in ("true", "1", "yes", "on"):
        raise UsageError(
            "compile=true: what a compiled block keeps cannot be seen",
            "bytes are measured in plain blocks",
            "leave compile out",
        )


def measure(call: cli.Invocation) -> Report:
    """Measure every setting on one micro-batch, judge, choose, draw."""
    call.expect(None, "then a few forward and backward passes of one micro-batch")
    target, settings, configured, calls = prepare(call)
    report = Report(SKILL)
    with preserved(target):
        batch = next(iter(target.batches))
        with user_code("a step of the target"):
            noise, state = run_all(call, target, batch, settings)
    plain = settings[0]
    if judge_found(report, target, calls):
        judge_equal(report, target, batch, settings, noise)
        judge_savings(report, target, settings)
    tell(report, target, batch, settings, configured, state)
    if call.args.budget is not None:
        choose(report, settings, sum(state.values()), call.args.budget, target.kind)
    if plain.kept:
        picture = draw(settings, call.out / "trade_off.png")
        report.artifacts += [str(picture)] if picture else []
    return report


def prepare(call: cli.Invocation) -> tuple[Target, list[Setting], Any, Calls]:
    """Build the target and its settings, the one without recomputation first."""
    args, calls = call.args, Calls()
    if args.target is not None:
        target = call.load_target()
        names = (("none", "off"), ("as written", "on"))
        settings = [
            Setting(name, lambda mode=mode: checkpoints(mode, calls)) for name, mode in names
        ]
        return target, settings, None, calls
    asked = list(args.set)
    args.set = [*asked, "parallel.recompute=none", "compile=false"]
    target = call.load_target()
    args.set = asked
    with user_code("reading the configuration"):
        from curry_train.compose import load_config
        from curry_train.config import config_hash

        seed = [] if args.seed is None else [f"seed={args.seed}"]
        config = load_config([*asked, *seed], project=call.project)
        target.config_hash = config_hash(config)
    layers, configured = target.model.layers, config.parallel.recompute
    asked_for: list[str | int] = ["none", "selective", "full"]
    if len(layers) > 1:
        asked_for.insert(2, 2)
    if configured not in asked_for:
        asked_for.append(configured)
    settings = [
        Setting(label(value), lambda value=value: blocks(layers, value), asked=value)
        for value in asked_for
    ]
    return target, settings, configured, calls


def label(value: str | int) -> str:
    """Name a value of parallel.recompute."""
    if isinstance(value, str):
        return value
    return {1: "every", 2: "every 2nd", 3: "every 3rd"}.get(value, f"every {value}th")


@contextlib.contextmanager
def blocks(layers: Any, value: str | int) -> Any:
    """Run the project's blocks with another parallel.recompute."""
    from curry_train.parallel.activation_checkpoint import recompute_blocks

    recompute_blocks(layers, value)
    try:
        yield
    finally:
        recompute_blocks(layers, "none")


def run_all(
    call: cli.Invocation, target: Target, batch: Any, settings: list[Setting]
) -> tuple[float, dict[str, int]]:
    """Measure; returns how far two plain runs are apart and the bytes of the training state."""
    states = generators()
    for setting in [settings[0], *settings]:  # the first one twice: the very first run warms up
        earlier = setting.gradients
        with preserved(target):
            target.model.zero_grad(set_to_none=True)
            run_once(target, batch, setting, states)
        if earlier:
            noise, _ = gradient_error(setting.gradients, earlier)
    target.model.zero_grad(set_to_none=True)
    with settings[0].enter():
        target.loss_fn(target.model, batch).backward()
    for setting in settings:
        weigh(target, batch, setting)
    total = call.args.rounds * len(settings)
    for number in range(total):
        time_once(target, batch, settings[number % len(settings)])
        call.progress(number + 1, total, "timed runs")
    with preserved(target):
        return noise, state_bytes(target)


def judge_found(report: Report, target: Target, calls: Calls) -> bool:
    """Other code must call torch.utils.checkpoint, or there is nothing to compare."""
    if target.kind == "project":
        return True
    report.check(
        "recompute-found",
        "pass" if calls.count else "unclear",
        value=calls.count,
        unit="calls",
        message=""
        if calls.count
        else "the model never calls torch.utils.checkpoint.checkpoint, or is compiled",
    )
    return calls.count > 0


def judge_equal(
    report: Report, target: Target, batch: Any, settings: list[Setting], noise: float
) -> None:
    """Gradients, random numbers and side effects are those of the plain run."""
    plain = settings[0]
    limit = max(THRESHOLDS["recompute-gradients-differ"], 4 * noise)
    errors = {s.name: gradient_error(s.gradients, plain.gradients) for s in settings[1:]}
    name = max(errors, key=lambda key: errors[key][0])
    worst, where = errors[name]
    differs = not worst <= limit
    by_chance = bool(differs and plain.drew and from_chance(target, batch, plain, limit))
    report.check(
        "recompute-gradients-differ",
        "fail" if differs and not by_chance else "pass",
        value=worst,
        threshold=limit,
        message=f"{name}: {where}" + (" (explained by random numbers)" if by_chance else "")
        if differs
        else "every gradient as without recomputation",
    )
    drew = ", ".join(sorted(plain.drew))
    report.check(
        "recompute-randomness",
        "fail" if by_chance else "pass",
        message=f"drawn anew from {drew}: keep preserve_rng_state=True and draw from torch only"
        if by_chance
        else f"draws from {drew} repeat"
        if drew
        else "nothing is drawn",
    )
    twice = {s.name: changed(s.effects, plain.effects) for s in settings[1:]}
    names = sorted({name for found in twice.values() for name in found})
    report.check(
        "recompute-counted-twice",
        "fail" if names else "pass",
        value=len(names),
        message=f"{', '.join(names[:4])}: move what counts out of the part that runs again"
        if names
        else "buffers and counters as without recomputation",
    )


def from_chance(target: Target, batch: Any, plain: Setting, limit: float) -> bool:
    """Tell whether random numbers explain other gradients: they draw alike once all are kept."""
    if plain.drew - {"torch", "cuda"}:
        return True
    if target.kind == "project":
        return False  # its recomputation always keeps the generators of torch
    kept = Setting("kept", lambda: checkpoints("keep", Calls()))
    off = Setting("off", lambda: checkpoints("off", Calls()))
    states = generators()
    for setting in (off, kept):
        with preserved(target):
            target.model.zero_grad(set_to_none=True)
            run_once(target, batch, setting, states)
    return gradient_error(kept.gradients, off.gradients)[0] <= limit


def judge_savings(report: Report, target: Target, settings: list[Setting]) -> None:
    """A setting that keeps as much as none only costs time."""
    plain, limit = settings[0], THRESHOLDS["recompute-saves-nothing"]
    shares = {s.name: s.kept / max(plain.kept, 1) for s in settings[1:]}
    name = max(shares, key=lambda key: shares[key])
    fails = shares[name] > limit
    advice = "recompute whole blocks, not single layers"
    if target.kind == "project":
        advice = f"a model of {len(target.model.layers)} blocks needs a smaller number, or full"
    report.check(
        "recompute-saves-nothing",
        "fail" if fails else "pass",
        value=shares[name],
        threshold=limit,
        unit="of the bytes of none",
        message=f"{name}: {advice}" if fails else f"{name} keeps the most",
    )


def tell(
    report: Report,
    target: Target,
    batch: Any,
    settings: list[Setting],
    configured: Any,
    state: dict[str, int],
) -> None:
    """Fill numbers, the summary and the table."""
    plain, rows, always = settings[0], [], sum(state.values())
    for s in settings:
        ratios = [a / b for a, b in zip(s.times, plain.times, strict=True)]
        spread = statistics.quantiles(ratios, n=5, method="inclusive")
        rows.append(
            {
                "setting": s.name,
                "kept_bytes": s.kept,
                "kept_share": s.kept / max(plain.kept, 1),
                "peak_bytes": s.peak,
                "needs_bytes": always + s.peak,
                "time": statistics.median(s.times),
                "time_ratio": statistics.median(ratios),
                "time_ratio_p20": spread[0],
                "time_ratio_p80": spread[3],
            }
        )
    targets, unit = count_targets(batch)
    report.numbers = {
        "settings": rows,
        "state_bytes": state,
        "targets": targets,
        "targets_unit": unit,
        "configured": configured,
    }
    least = min(rows[1:], key=lambda row: row["kept_bytes"])
    report.summary = (
        f"{targets:,} {unit} a micro-batch on {target.device}: {least['setting']} keeps "
        f"{least['kept_share']:.2f} of {show_bytes(plain.kept)} at "
        f"{least['time_ratio']:.2f} x the time"
    )
    noisy = max(row["time_ratio_p80"] / row["time_ratio_p20"] for row in rows)
    table = [("", "kept", "time"), *((r["setting"], show_bytes(r["kept_bytes"]),
             f"{r['time_ratio']:.2f} x") for r in rows)]  # fmt: skip
    widths = [max(map(len, column)) for column in table]
    for line in range(3):
        cells = [column[line].rjust(width) for column, width in zip(table, widths, strict=True)]
        report.evidence.append("  ".join(cells))
    report.evidence.append(
        f"paired time ratios spread by p80/p20 = {noisy:.2f}; weights, gradients and moments take "
        f"{show_bytes(always)} more"
    )
    if noisy > 1.3:
        report.next.append(f"times spread by {noisy:.2f}: raise --rounds, or free the machine")


def choose(report: Report, settings: list[Setting], always: int, budget: int, kind: str) -> None:
    """Name the fastest setting that fits into the budget; of equally fast ones the smallest."""
    rows = report.numbers["settings"]
    fitting = [n for n, row in enumerate(rows) if row["needs_bytes"] <= budget]
    if not fitting:
        least = min(rows, key=lambda row: row["needs_bytes"])
        report.check(
            "recompute-budget",
            "fail",
            value=least["needs_bytes"],
            threshold=budget,
            unit="bytes",
            message=f"nothing fits; {least['setting']} needs {show_bytes(least['needs_bytes'])}",
        )
        report.next.append("lower data.micro_batch_size (gradient-accumulation) or raise zero")
        return
    fastest = min(rows[n]["time_ratio"] for n in fitting)
    equal = [n for n in fitting if rows[n]["time_ratio"] <= fastest * (1 + SAME_TIME)]
    best = min(equal, key=lambda n: rows[n]["needs_bytes"])
    name = settings[best].name
    setting = f"parallel.recompute={settings[best].asked}" if kind == "project" else name
    report.numbers["choice"] = setting
    report.check(
        "recompute-budget",
        "pass",
        value=rows[best]["needs_bytes"],
        threshold=budget,
        unit="bytes",
        message=f"{setting} is the fastest that fits",
    )


def draw(settings: list[Setting], path: Path) -> Path | None:
    """Draw kept bytes against time; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = settings[0]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for setting, marker in zip(settings, itertools.cycle("osD^v"), strict=False):
        ratios = [a / b for a, b in zip(setting.times, plain.times, strict=True)]
        low, _, _, high = statistics.quantiles(ratios, n=5, method="inclusive")
        middle = statistics.median(ratios)
        kept = setting.kept / 2**20
        axes.errorbar(
            kept,
            middle,
            yerr=[[max(middle - low, 0)], [max(high - middle, 0)]],
            marker=marker,
            capsize=3,
            label=setting.name,
        )
    axes.set(
        xlabel="MiB kept for backward",
        ylabel="time of none",
        title="Recomputation: bytes against time",
        xlim=(0, None),
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, measure, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
