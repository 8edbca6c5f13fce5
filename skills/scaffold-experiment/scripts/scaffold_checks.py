"""Try out what was made: three steps by train.py, the baseline again, its tests, preflight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scaffold_plan import Plan

from kit import cli, job
from kit.report import Report

PREFLIGHT = Path(__file__).parents[2] / "preflight-checks" / "scripts" / "preflight_checks.py"
STEPS, TIMEOUT = 3, 900
SHORT = (
    f"run.max_steps={STEPS}",
    "run.log_every=1",
    "run.save_every=0",
    "run.eval_every=0",
    "run.sample_tokens=0",
    "tracking.tensorboard=false",
    "devices=1",
)


@dataclass
class Trained:
    """What a short run left: its losses, as written, and what it said when it failed."""

    code: int
    losses: list[str]
    said: str


def train(call: cli.Invocation, words: Sequence[str], place: str) -> Trained:
    """Train a few steps by the project's train.py in a process of its own."""
    device = "cpu" if call.args.device == "auto" else call.args.device
    runs = call.out / place
    words = [*words, *SHORT, f"accelerator={device}", f"run.dir={runs}", *call.args.set]
    code, said = _run([sys.executable, "train.py", *words], call.project)
    losses = []
    for path in sorted(runs.glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        losses += [repr(row["loss"]) for row in rows if "loss" in row]
    return Trained(code, losses, said)


def before_writing(call: cli.Invocation, plan: Plan) -> Trained | None:
    """Train the baseline before anything is written; None where there is none."""
    if plan.baseline is None:
        return None
    job.say(f"three steps of the baseline: {' '.join(plan.baseline)}")
    return train(call, plan.baseline, "baseline-before")


def try_out(call: cli.Invocation, plan: Plan, before: Trained | None, report: Report) -> None:
    """Add a check to the report for each thing that must hold of a new scaffold."""
    job.say(f"three steps: python train.py {' '.join(plan.smoke)}")
    _smoke(report, train(call, plan.smoke, "smoke"))
    if plan.baseline is not None and before is not None:
        _baseline(report, before, train(call, plan.baseline, "baseline-after"))
    job.say(f"tests: python -m pytest {' '.join(plan.tests)}")
    _tests(call, plan, report)
    job.say("preflight checks")
    _preflight(call, plan, report)


def _smoke(report: Report, found: Trained) -> None:
    good = found.code == 0 and len(found.losses) == STEPS
    shown = ", ".join(f"{float(loss):.4f}" for loss in found.losses)
    report.numbers["losses"] = [float(loss) for loss in found.losses]
    report.check(
        "scaffold-smoke",
        "pass" if good else "fail",
        value=len(found.losses),
        threshold=STEPS,
        unit="steps",
        message=f"losses {shown}" if good else f"train.py ended with {found.code}: {found.said}",
    )


def _baseline(report: Report, before: Trained, after: Trained) -> None:
    """The baseline without the new setting gives the same losses, bit for bit."""
    if before.code or not before.losses:
        report.check(
            "scaffold-baseline",
            "unclear",
            message=f"it did not train before anything was written: {before.said}",
        )
        return
    same = before.losses == after.losses
    report.numbers["baseline_losses"] = [float(loss) for loss in after.losses]
    report.check(
        "scaffold-baseline",
        "pass" if same else "fail",
        value=len(after.losses),
        unit="losses",
        message="bit for bit as before"
        if same
        else f"losses were {before.losses} and are {after.losses} {after.said}",
    )


def _tests(call: cli.Invocation, plan: Plan, report: Report) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plan.tests]
    code, said = _run(words, call.project, OMP_NUM_THREADS="1")
    missing = "No module named pytest" in said
    verdict = "pass" if code == 0 else "unclear" if missing else "fail"
    last = "pytest is not installed: pip install pytest" if missing else said
    report.check("scaffold-tests", verdict, value=code, unit="exit code", message=last)


def _preflight(call: cli.Invocation, plan: Plan, report: Report) -> None:
    if not PREFLIGHT.is_file():
        report.check(
            "scaffold-preflight",
            "skipped",
            message=f"{PREFLIGHT.name} is not in this bundle; run the skill preflight-checks later",
        )
        return
    out = call.out / "preflight"
    words = [sys.executable, str(PREFLIGHT), "--project", str(call.project), "--out", str(out)]
    words += ["--device", call.args.device, "--set", *plan.smoke, *call.args.set]
    code, said = _run(words, call.project)
    verdict = {0: "pass", 1: "fail", 3: "unclear"}.get(code, "fail")
    failed = ""
    if (out / "report.json").is_file():
        checks = json.loads((out / "report.json").read_text(encoding="utf-8"))["checks"]
        names = [check["id"] for check in checks if check["verdict"] in ("fail", "unclear")]
        failed = ", ".join(names)
        report.artifacts.append(str(out / "report.json"))
    report.check(
        "scaffold-preflight", verdict, value=code, unit="exit code", message=failed or said
    )


def _run(words: Sequence[str], project: Path, **variables: str) -> tuple[int, str]:
    """Return the exit code and the last line that a command printed."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        done = subprocess.run(
            words,
            cwd=project,
            env={**kept, "PYTHONDONTWRITEBYTECODE": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no end after {TIMEOUT} s"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else ""
