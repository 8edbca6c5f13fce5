#!/usr/bin/env python3
"""Time one training step of a project or of any code through --target.

A project is timed by its own curry_train.benchmark.run_accumulated_step, the code path that trains
it; other code by one batch a step: data, forward, backward, optimizer. With --baseline the time
per token (or sample) is set against that of an earlier report.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: benchmark-step needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli  # noqa: E402
from kit.batches import count_targets  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import SCHEMA, Report, device_name  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "benchmark-step"
THRESHOLDS = {
    "step-time-noise": 1.3,  # p80/p20 of the step times; above it their median is no verdict
    "step-time-ratio": 1.05,  # time a token against the baseline's; above it the step is slower
}
STEPS, WARMUP, LEAST_STEPS = 20, 3, 5
RESAMPLES = 2000
PARTS = ("data", "forward", "backward", "optimizer")


@dataclass
class Timing:
    """Seconds of each measured step, by part, and what each step learned from."""

    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PARTS})
    unit: str = "samples"
    loss: float = float("nan")


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"measured steps (default {STEPS})"
    )
    parser.add_argument(
        "--warmup", type=int, default=WARMUP, help=f"unmeasured ones (default {WARMUP})"
    )
    parser.add_argument(
        "--baseline", metavar="REPORT.json", help="an earlier report to compare with"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help=f"how much slower still passes (default {THRESHOLDS['step-time-ratio'] - 1:.2f})",
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="the device's dense peak, for mfu of a --target"
    )


def check_flags(args: Any) -> None:
    """Refuse numbers that measure nothing and baselines that are no report of this skill."""
    if args.steps < LEAST_STEPS:
        raise UsageError(f"--steps {args.steps}", f"it takes at least {LEAST_STEPS}")
    if args.warmup < 1:
        raise UsageError(f"--warmup {args.warmup}", "it takes at least 1: the first step allocates")
    if args.tolerance is not None and args.baseline is None:
        raise UsageError("--tolerance without --baseline", fix="set --baseline REPORT.json")
    if args.tolerance is not None and not args.tolerance >= 0:
        raise UsageError(
            f"--tolerance {args.tolerance}", "it takes a share of at least 0, e.g. 0.05"
        )
    if args.peak_tflops is not None and not args.peak_tflops > 0:
        raise UsageError(f"--peak-tflops {args.peak_tflops}", "it must be above 0")
    args.baseline_report = None if args.baseline is None else read_baseline(Path(args.baseline))


def read_baseline(path: Path) -> dict[str, Any]:
    """Read an earlier report.json of this skill."""
    wanted = "it takes the report.json of an earlier benchmark-step run"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--baseline {path}: {error.strerror}", wanted) from None
    except ValueError:
        raise UsageError(f"--baseline {path} is no JSON", wanted) from None
    if (
        not isinstance(report, dict)
        or report.get("skill") != SKILL
        or report.get("schema") != SCHEMA
    ):
        raise UsageError(f"--baseline {path} is no report of {SKILL}", wanted)
    numbers = report.get("numbers")
    for key in ("step_time", "targets_per_step"):
        number = numbers.get(key) if isinstance(numbers, dict) else None
        if not isinstance(number, (int, float)) or number <= 0:
            raise UsageError(f"--baseline {path} has {key} {number!r}", wanted)
    return report


def benchmark(call: cli.Invocation) -> Report:
    """Measure, judge the noise, compare, draw."""
    args = call.args
    call.expect(None, f"then {args.warmup} + {args.steps} steps; their time follows the first one")
    target = call.load_target()
    baseline = args.baseline_report
    if baseline is not None:
        refuse_other_hardware(baseline, target)
    with preserved(target):
        measure = measure_project if target.kind == "project" else measure_foreign
        numbers, notes = measure(call, target)
    report = Report(SKILL, numbers=numbers, evidence=notes)
    times = numbers.get("step_times")
    bounds = add_interval(report, times)
    judge_noise(report)
    if baseline is not None:
        given = args.tolerance
        limit = THRESHOLDS["step-time-ratio"] if given is None else 1 + given
        judge_ratio(report, baseline, limit)
        if baseline["target"]["config_hash"] != target.config_hash:
            report.evidence.append("the baseline is of another configuration or source")
    spread = f" [{', '.join(map(milliseconds, bounds))}]" if bounds else ""
    report.summary = (
        f"step {milliseconds(numbers['step_time'])} ms{spread}, "
        f"{numbers['tokens_per_s']:,.0f} {numbers['targets_unit']}/s on {target.device}"
    )
    parts = [f"{name} {milliseconds(numbers[name])}" for name in PARTS if numbers[name] is not None]
    report.evidence.insert(
        0, f"ms: {', '.join(parts)}; process CPU {milliseconds(numbers['cpu_time'])}"
    )
    if times:
        picture = draw(times, numbers["step_time"], call.out / "step_times.png")
        report.artifacts += [str(picture)] if picture else []
    return report


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds with three figures."""
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def measure_project(call: cli.Invocation, target: Target) -> tuple[dict[str, Any], list[str]]:
    """Time the project's own step."""
    args, notes = call.args, []
    with user_code("run_accumulated_step"):
        from curry_train.benchmark import run_accumulated_step

        started = time.perf_counter()
        run_accumulated_step(target.runtime, steps=1, warmup=0)
        first = time.perf_counter() - started
        call.expect(first * (args.steps + args.warmup), f"{args.warmup} + {args.steps} steps")
        cpu = time.process_time()
        numbers = dict(run_accumulated_step(target.runtime, steps=args.steps, warmup=args.warmup))
        cpu = time.process_time() - cpu
    if "step_times" not in numbers:
        notes.append("no interval: this project's run_accumulated_step returns no step_times")
    numbers.setdefault("cpu_time", cpu / (args.steps + args.warmup))
    numbers["targets_per_step"] = numbers["tokens_per_s"] * numbers["step_time"]
    numbers["targets_unit"] = "tokens"
    return numbers, notes


def measure_foreign(call: cli.Invocation, target: Target) -> tuple[dict[str, Any], list[str]]:
    """Time a training step of other code, part by part, with the keys of run_accumulated_step."""
    with user_code("a step of the target"):
        timing = time_steps(call, target)
        flops = count_flops(target)
    step = statistics.median(timing.step)
    p20, _, _, p80 = statistics.quantiles(timing.step, n=5, method="inclusive")
    targets = statistics.median(timing.targets)
    if not targets:
        raise UsageError(
            "a batch of the target has no target: no row, or -100 for every label",
            "a step must learn from something",
        )
    peak = call.args.peak_tflops
    numbers: dict[str, Any] = {"step_time": step, "p20": p20, "p80": p80}
    for name, seconds in timing.parts.items():
        numbers[name] = statistics.median(seconds) if seconds else None
    numbers |= {
        "tokens_per_s": targets / step,
        "memory_bytes": peak_memory(target.device),
        "flops": flops,
        "mfu": flops / step / (peak * 1e12) if flops and peak else None,
        "targets_per_step": targets,
        "targets_unit": timing.unit,
        "cpu_time": statistics.median(timing.cpu),
        "loss": timing.loss,
        "step_times": timing.step,
    }
    notes = []
    if target.optimizer is None:
        notes.append("no optimizer: the target returned none, so its time is not in the step")
    if not target.model.training:
        notes.append("the model is in eval mode, as the target returned it")
    return numbers, notes


def time_steps(call: cli.Invocation, target: Target) -> Timing:
    """Run warm-up and measured steps; every part ends when the device has finished it."""
    args, timing, batches = call.args, Timing(), endless(target.batches)
    for index in range(-args.warmup, args.steps):
        cpu, marks = time.process_time(), [now(target.device)]
        batch = next(batches)
        marks.append(now(target.device))
        loss = target.loss_fn(target.model, batch)
        marks.append(now(target.device))
        if not loss.requires_grad:
            raise UsageError(
                "the loss of the target has no graph",
                "a step needs a loss that depends on a trainable parameter",
                "remove detach(), no_grad or requires_grad_(False)",
            )
        loss.backward()
        marks.append(now(target.device))
        if target.optimizer is not None:
            target.optimizer.step()
        (target.optimizer or target.model).zero_grad(set_to_none=True)
        marks.append(now(target.device))
        if index == -args.warmup:
            rest = (marks[-1] - marks[0]) * (args.warmup + args.steps - 1)
            call.expect(rest, f"{args.warmup} + {args.steps} steps")
        if index < 0:
            continue
        timing.step.append(marks[-1] - marks[0])
        timing.cpu.append(time.process_time() - cpu)
        for name, start, end in zip(PARTS, marks[:-1], marks[1:], strict=True):
            if name != "optimizer" or target.optimizer is not None:
                timing.parts[name].append(end - start)
        count, timing.unit = count_targets(batch)
        timing.targets.append(count)
        timing.loss = float(loss.detach())
        call.progress(index + 1, args.steps, "steps")
    return timing


def endless(batches: Any) -> Any:
    """Go through the batches again and again."""
    while True:
        yield from batches


def now(device: Any) -> float:
    """Read the clock after the device has done what it was given."""
    torch = sys.modules["torch"]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def count_flops(target: Target) -> int | None:
    """Count the matrix work of one forward and backward pass (torch's counter; SDPA not on CPU)."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        target.loss_fn(target.model, next(iter(target.batches))).backward()
    return counter.get_total_flops() or None


def peak_memory(device: Any) -> int:
    """Give the peak: what torch allocated on CUDA, else the process's resident memory."""
    torch = sys.modules["torch"]
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def add_interval(report: Report, times: Sequence[float] | None) -> tuple[float, float] | None:
    """Add the 95 % bootstrap interval of the median step time, when scipy is there."""
    if not times:
        return None
    bounds = bootstrap([times], _median)
    if bounds is None:
        report.evidence.append("no interval: this environment has no scipy")
    report.numbers["step_time_95"] = list(bounds) if bounds else None
    return bounds


def _median(values: Any, axis: int) -> Any:
    import numpy

    return numpy.median(values, axis=axis)


def bootstrap(samples: list[Sequence[float]], statistic: Any) -> tuple[float, float] | None:
    """Give the 95 % percentile interval of a statistic of the samples; None without scipy."""
    try:
        from scipy import stats
    except ImportError:
        return None
    if all(len(set(sample)) == 1 for sample in samples):
        value = float(statistic(*samples, axis=-1))
        return value, value
    options: dict[str, Any] = {"n_resamples": RESAMPLES, "method": "percentile", "random_state": 0}
    result = stats.bootstrap(samples, statistic, vectorized=True, **options)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def judge_noise(report: Report) -> None:
    """Say unclear when the step times spread too widely to be summed up by their median."""
    ratio = report.numbers["p80"] / report.numbers["p20"]
    report.numbers["noise"] = ratio
    load = os.getloadavg()[0]
    quiet = ratio <= THRESHOLDS["step-time-noise"]
    report.check(
        "step-time-noise",
        "pass" if quiet else "unclear",
        value=ratio,
        threshold=THRESHOLDS["step-time-noise"],
        unit="p80/p20",
        message="the steps agree" if quiet else f"the steps disagree (load average {load:.1f})",
    )
    if not quiet:
        report.next.append(
            "run again with more --steps on a quiet machine, or with OMP_NUM_THREADS=1; "
            "batches of unequal length spread too"
        )


def refuse_other_hardware(baseline: dict[str, Any], target: Target) -> None:
    """A step time compares only with one of the same device and thread count."""
    threads = sys.modules["torch"].get_num_threads()
    here = {"device_name": device_name(target.device), "threads": threads}
    there = {key: baseline["env"].get(key) for key in here}
    if here != there:
        raise UsageError(
            f"the baseline was measured on {there['device_name']} with {there['threads']} threads, "
            f"this is {here['device_name']} with {here['threads']}",
            "step times compare on one machine only",
            "measure the baseline here, or set OMP_NUM_THREADS as it was",
        )


def judge_ratio(report: Report, baseline: dict[str, Any], limit: float) -> None:
    """Compare the time per token or sample; between the interval's ends there is no verdict."""
    ours, theirs = report.numbers, baseline["numbers"]
    if ours["targets_unit"] != theirs.get("targets_unit"):
        raise UsageError(
            f"the baseline counts {theirs.get('targets_unit')}, this target {ours['targets_unit']}",
            "both must count the same",
        )
    scale = theirs["targets_per_step"] / ours["targets_per_step"]
    ratio = ours["step_time"] / theirs["step_time"] * scale
    samples = [ours.get("step_times"), theirs.get("step_times")]
    bounds = None
    if all(samples):
        bounds = bootstrap(samples, lambda a, b, axis: scale * _median(a, axis) / _median(b, axis))
    low, high = bounds or (ratio, ratio)
    verdict = "fail" if low > limit else "pass" if high <= limit else "unclear"
    interval = f"95 % [{low:.3f}, {high:.3f}]" if bounds else "no interval"
    report.numbers |= {"ratio": ratio, "ratio_95": list(bounds) if bounds else None}
    report.check(
        "step-time-ratio",
        verdict,
        value=ratio,
        threshold=limit,
        unit=f"x the baseline's time a {ours['targets_unit'].rstrip('s')}",
        message=interval,
    )
    if verdict == "unclear":
        report.next.append(f"the interval reaches over {limit:g}; raise --steps in both runs")
    if verdict == "fail":
        report.next.append("compare the parts (data, forward, backward, optimizer) of both reports")


def draw(times: Sequence[float], median: float, path: Path) -> Path | None:
    """Draw the step times; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3))
    axes.plot(range(1, len(times) + 1), [1000 * t for t in times], marker="o", linewidth=0.8)
    axes.axhline(1000 * median, linestyle="--", color="black", linewidth=0.8, label="median")
    axes.set(xlabel="measured step", ylabel="ms", title="Step time", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, benchmark, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
