#!/usr/bin/env python3
"""Measure the routers of a mixture of experts on real batches: load, entropy, drops, dead experts.

A project trains a few steps first (--steps) or takes the weights of a run (--checkpoint), since
the load of fresh weights says little. Of other code every module named gate or router counts that
returns logits [tokens, experts], alone or with expert ids and weights, as those of transformers do.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: topk-router needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from router_meter import NAMES, Meters, foreign_meters, project_meters  # noqa: E402

from kit import cli  # noqa: E402
from kit.batches import tensors  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "topk-router"
THRESHOLDS = {
    "router-dead-experts": 0.05,  # load over the mean load; an expert below it learns nothing
    "router-collapse": 0.5,  # 0: all tokens visit the same experts, 1: even; below it: collapsed
    "router-dropped-tokens": 0.1,  # share of choices that find their expert full
    "router-logit-scale": 50.0,  # largest |logit|; above it bf16 has steps of a quarter
    "router-bias-scale": 1.0,  # spread of the correction bias; scores lie between 0 and 1
    "router-weights": 0.02,  # largest difference to the scores' weight, over a token's sum
}
BATCHES, STEPS = 8, 100
ENOUGH_STEPS = 50
ENOUGH_CHOICES = 20
"""Choices an expert should get on average; fewer, and an empty one may be chance."""


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help=f"batches to measure on (default {BATCHES})"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"training steps before it, put back afterwards (default {STEPS}; 0 with "
        "--checkpoint and --target)",
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="run folder or checkpoint of the project to look at"
    )
    parser.add_argument(
        "--router", metavar="NAME", help="last part of the routers' module names in a --target"
    )
    parser.add_argument(
        "--experts-per-token", type=int, metavar="K", help="where a --target's config has none"
    )


def check_flags(args: Any) -> None:
    """Refuse flags that cannot work."""
    if args.batches < 1:
        raise UsageError(f"--batches {args.batches}", "it takes at least 1")
    if args.steps is not None and args.steps < 0:
        raise UsageError(f"--steps {args.steps}", "it takes at least 0")
    if args.experts_per_token is not None and args.experts_per_token < 1:
        raise UsageError(f"--experts-per-token {args.experts_per_token}", "it takes at least 1")
    if args.target is None:
        if args.router is not None or args.experts_per_token is not None:
            raise UsageError(
                "--router and --experts-per-token with a project",
                "they describe other code",
                "leave them out, or set --target",
            )
    elif args.steps or args.checkpoint:
        raise UsageError(
            "--steps and --checkpoint with --target",
            "the model is measured as the function returns it",
            "train or load it there",
        )


def measure(call: cli.Invocation) -> Report:
    """Train or load, measure, judge, draw."""
    args = call.args
    call.expect(None, f"then {args.batches} batches; their time follows the first one")
    target = call.load_target()
    of_project = target.kind == "project"
    report = Report(SKILL)
    with preserved(target):
        if of_project and not has_router(target):
            return nothing_to_measure(call, report, of_project)
        prepared = prepare(call, target)
        names = (args.router,) if args.router else NAMES
        listening = (
            project_meters(target.model)
            if of_project
            else foreign_meters(target.model, names, args.experts_per_token)
        )
        with listening as meters:
            run_batches(call, target, meters)
    rows = [meter.numbers(THRESHOLDS["router-dead-experts"]) for meter in meters.used]
    if not rows:
        return nothing_to_measure(call, report, of_project)
    report.numbers = {"routers": rows, "trained_steps": prepared["steps"], **prepared}
    report.evidence.append(prepared["weights"])
    judge(report, meters.used, rows, prepared, of_project)
    picture = draw(rows, call.out / "load.png")
    report.artifacts += [str(picture)] if picture else []
    return report


def has_router(target: Target) -> bool:
    """Tell whether a project's model routes at all, before anything is trained."""
    with project_meters(target.model) as meters:
        return bool(meters.all)


def prepare(call: cli.Invocation, target: Target) -> dict[str, Any]:
    """Bring the weights to where they are worth a look; says which they are."""
    args = call.args
    if target.kind != "project":
        return {"steps": 0, "trained": True, "weights": "weights as the target returned them"}
    if target.runtime.config.compile:
        raise UsageError(
            "compile=true: a compiled block does not show its router",
            "routers are measured in plain blocks",
            "add --set compile=false",
        )
    steps = (0 if args.checkpoint else STEPS) if args.steps is None else args.steps
    said = "the start's weights"
    if args.checkpoint:
        load_checkpoint(target, Path(args.checkpoint))
        said = f"weights of {args.checkpoint}"
    if steps:
        with user_code("train_step"):
            from curry_train.step import train_step

            for number in range(steps):
                train_step(target.runtime)
                call.progress(number + 1, steps, "training steps")
        said += f" and {steps} training steps"
    trained = bool(args.checkpoint) or steps >= ENOUGH_STEPS
    return {"steps": steps, "trained": trained, "weights": said}


def load_checkpoint(target: Target, path: Path) -> None:
    """Take the weights of a checkpoint folder, or of the newest one of a run folder."""
    allowed = "--checkpoint takes a run folder or a checkpoints/step-* folder"
    with user_code("load_weights", allowed):
        from curry_train.checkpoint import MANIFEST, latest
        from curry_train.checkpoint.training_state import load_weights

        found = path if (path / MANIFEST).exists() else latest(path / "checkpoints")
        if found is not None:
            load_weights(target.model, found)
    if found is None:
        raise UsageError(f"--checkpoint {path} holds no complete checkpoint", allowed)


def run_batches(call: cli.Invocation, target: Target, meters: Meters) -> None:
    """Send the batches forward, without gradients."""
    torch = sys.modules["torch"]
    total = call.args.batches
    with user_code("a forward pass of the model"), torch.no_grad():
        for number, batch in enumerate(itertools.islice(target.batches, total)):
            meters.sequences = next((len(t) for t in tensors(batch) if t.dim()), 1)
            target.loss_fn(target.model, batch)
            call.progress(number + 1, total, "batches")


def nothing_to_measure(call: cli.Invocation, report: Report, of_project: bool) -> Report:
    """Say in one sentence why there is no router: exit 3."""
    if of_project:
        report.summary = (
            "this model is dense (model.num_experts=0 or every block dense), so there is no router "
            "to measure; choose a mixture, such as --set model=tiny_moe"
        )
        return report
    asked = call.args.router or " or ".join(NAMES)
    report.summary = (
        f"no router found: a module named {asked} must return logits [tokens, experts], alone or "
        "with expert ids and weights; set --router NAME and, for logits alone, "
        "--experts-per-token K"
    )
    return report


def judge(
    report: Report, meters: list[Any], rows: list[dict], prepared: dict, of_project: bool
) -> None:
    """Hold every router against the thresholds; the worst of all routers is the value."""
    worst = min(rows, key=lambda row: row["evenness"] if row["evenness"] is not None else 1.0)
    busiest = max(rows, key=lambda row: row["max_over_mean"])
    report.summary = (
        f"{len(rows)} router{'s' * (len(rows) > 1)} of {worst['experts']} experts on "
        f"{worst['tokens']:,} tokens each: "
        f"busiest expert {busiest['max_over_mean']:.2f} x the mean, "
        f"{sum(len(row['dead_experts']) for row in rows)} dead"
    )
    judge_load(report, rows, prepared, of_project)
    judge_drops(report, meters, rows)
    judge_scale(report, rows)
    judge_scores(report, meters, rows, of_project)


def judge_load(report: Report, rows: list[dict], prepared: dict, of_project: bool) -> None:
    """Dead experts and collapse; unclear where chance or fresh weights explain them."""
    average = min(row["tokens"] * row["experts_per_token"] / row["experts"] for row in rows)
    bad = "fail"
    if not prepared["trained"]:
        bad = "unclear"
    elif average < ENOUGH_CHOICES:
        bad = "unclear"
        report.next.append(f"an expert gets {average:.0f} choices on average; raise --batches")
    lowest = min(rows, key=lambda row: row["min_over_mean"])
    limit = THRESHOLDS["router-dead-experts"]
    dead = [f"{row['router']}: {row['dead_experts'][:8]}" for row in rows if row["dead_experts"]]
    report.check(
        "router-dead-experts",
        bad if dead else "pass",
        value=lowest["min_over_mean"],
        threshold=limit,
        unit="x mean load",
        message="experts without tokens: " + "; ".join(dead) if dead else "every expert learns",
    )
    even = [row for row in rows if row["evenness"] is not None]
    if not even:
        report.check("router-collapse", "skipped", message="every token visits every expert")
        return
    worst = min(even, key=lambda row: row["evenness"])
    collapsed = worst["evenness"] < THRESHOLDS["router-collapse"]
    report.check(
        "router-collapse",
        bad if collapsed else "pass",
        value=worst["evenness"],
        threshold=THRESHOLDS["router-collapse"],
        unit="evenness",
        message=f"{worst['router']} uses {worst['experts_in_use']:.1f} of {worst['experts']}",
    )
    if (dead or collapsed) and bad == "unclear" and not prepared["trained"]:
        report.next.append("fresh routers are uneven; set --checkpoint DIR or a larger --steps")
    elif dead or collapsed:
        report.next.append(
            "raise model.router_aux_loss_coef, or set model.correction_bias=true"
            if of_project
            else "add a load-balance loss to the loss, or look for a bias that shuts experts out"
        )


def judge_drops(report: Report, meters: list[Any], rows: list[dict]) -> None:
    """Dropped choices at the configured capacity, and what other capacities would drop."""
    at = {f: max(row["dropped_at"][f] for row in rows) for f in rows[0]["dropped_at"]}
    would = ", ".join(f"{share:.1%} at {factor}" for factor, share in at.items())
    worst = max(row["dropped"] for row in rows)
    report.evidence.append(f"a capacity would drop in its worst router: {would}")
    if not any(meter.dropped for meter in meters):
        report.check("router-dropped-tokens", "pass", value=0.0, message="nothing is dropped")
        return
    limit = THRESHOLDS["router-dropped-tokens"]
    report.check(
        "router-dropped-tokens",
        "fail" if worst > limit else "pass",
        value=worst,
        threshold=limit,
        unit="of the choices",
        message="raise model.capacity_factor or balance the load" if worst > limit else "few",
    )


def judge_scale(report: Report, rows: list[dict]) -> None:
    """Logits that a half precision cannot tell apart; a bias that overrules every score."""
    largest = max(row["logit_max"] for row in rows)
    limit = THRESHOLDS["router-logit-scale"]
    report.check(
        "router-logit-scale",
        "fail" if not largest <= limit else "pass",
        value=largest,
        threshold=limit,
        unit="largest |logit|",
        message="" if largest <= limit else "add a z-loss: model.router_z_loss_coef=0.001",
    )
    entropy = sum(row["token_entropy"] for row in rows) / len(rows)
    rms = max(row["logit_rms"] for row in rows)
    report.evidence.append(
        f"entropy of a token's scores {entropy:.2f} of the uniform one, logits' RMS {rms:.2g}"
    )
    spreads = [row["bias_spread"] for row in rows if row["bias_spread"] is not None]
    if spreads:
        limit = THRESHOLDS["router-bias-scale"]
        far = max(spreads) > limit
        report.check(
            "router-bias-scale",
            "fail" if far else "pass",
            value=max(spreads),
            threshold=limit,
            unit="max - min",
            message="the bias chooses, not the scores: lower model.correction_bias_update_rate"
            if far
            else "",
        )


def judge_scores(report: Report, meters: list[Any], rows: list[dict], of_project: bool) -> None:
    """A softmax of a softmax; weights that are no scores of the logits at all."""
    limit = THRESHOLDS["router-weights"]
    fits = [meter.misfit for meter in meters if meter.misfit]
    single = [min(fit["softmax"], fit["sigmoid"]) for fit in fits]
    doubled = [
        fit["double softmax"] <= limit / 4 and once > 2 * fit["double softmax"] + 1e-6
        for fit, once in zip(fits, single, strict=True)
    ]
    already = [meter.name for meter in meters if meter.probabilities]
    found = any(doubled) or bool(already)
    message = "weights are a softmax of a softmax: at most e apart, whatever the logits"
    if already and not any(doubled):
        message = f"what {already[0]} calls logits is a softmax already"
    report.check(
        "router-double-softmax",
        "fail" if found else "pass",
        message=message if found else "one softmax or sigmoid",
    )
    if fits and of_project and not found:
        shares, sizes = max(single), max(fit["settings"] for fit in fits)
        wrong = "weights are no softmax or sigmoid of the logits"
        if shares <= limit:
            wrong = "not what norm_topk_prob, routed_scaling_factor and scoring_func say"
        report.check(
            "router-weights",
            "fail" if max(shares, sizes) > limit else "pass",
            value=max(shares, sizes),
            threshold=limit,
            unit="of a token's weight",
            message=wrong if max(shares, sizes) > limit else "",
        )


def draw(rows: list[dict], path: Path) -> Path | None:
    """Draw the load of every expert in every router; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = max(row["experts"] for row in rows)
    grid = [row["load_over_mean"] + [float("nan")] * (width - row["experts"]) for row in rows]
    figure, axes = pyplot.subplots(figsize=(min(4 + width / 6, 16), 1.6 + len(rows) / 4))
    image = axes.imshow(grid, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    axes.set(xlabel="expert", title="Load over the mean load")
    axes.set_yticks(range(len(rows)), [row["router"] for row in rows], fontsize=7)
    figure.colorbar(image, ax=axes, extend="max")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, measure, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
