#!/usr/bin/env python3
"""Check a model, its loss, its data and its optimizer for silent bugs before a run.

Each check gives a verdict, its number and, when it fails, the line to change. --list names them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
SCRIPTS = Path(__file__).resolve().parent
KIT_HOME = SCRIPTS.parents[1] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: preflight-checks needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
for folder in (KIT_HOME, SCRIPTS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import batch_checks  # noqa: E402
import data_checks  # noqa: E402
import gradient_checks  # noqa: E402
import leakage_checks  # noqa: E402
import loop_checks  # noqa: E402
import mode_checks  # noqa: E402
import repeat_checks  # noqa: E402
import score_checks  # noqa: E402
import sequence_checks  # noqa: E402
from evidence import (  # noqa: E402
    CannotJudge,
    Evidence,
    Finding,
    UserError,
    failed,
    skipped,
    unclear,
)

from kit import cli  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.tree_hash import tree_hash  # noqa: E402

SKILL = "preflight-checks"
THRESHOLDS = {
    "batch-size-dependence": 1e-4,  # of the outputs' size; 500 times that in half precision
    "example-leakage": 1e-6,  # largest gradient by another example over the example's own
    "future-leakage": 1e-4,  # gradient by a later token over the score's largest
    "label-shift": 0.8,  # share of the labels that are the next token
    "missing-zero-grad": 1e-6,  # difference to a fresh gradient, of its size
    "train-eval-mode": 1e-6,  # change of the outputs in evaluation mode by other random numbers
    "schedule-values": 0.02,  # share of the last steps that have a learning rate of 0
    "loss-scale": 1.8,  # loss of a doubled batch over that of the batch
    "accumulation-mean-of-means": 1e-5,  # difference of gradients, of their size
    "checkpoint-round-trip": 1e-6,  # relative difference of the next losses
    "not-repeatable": 1e-6,  # relative difference of the first losses
    "dead-outputs": 1e-6,  # relative change of the outputs when inputs are exchanged
}
CHECKS: list[tuple[str, Callable[[Evidence, Any], Finding]]] = [
    ("batch-mismatch", batch_checks.check_batch_mismatch),
    ("labels-out-of-range", batch_checks.check_labels_out_of_range),
    ("tokens-out-of-range", batch_checks.check_tokens_out_of_range),
    ("non-finite", batch_checks.check_non_finite),
    ("double-softmax", score_checks.check_double_softmax),
    ("missing-log-softmax", score_checks.check_missing_log_softmax),
    ("dead-outputs", score_checks.check_dead_outputs),
    ("no-gradient", gradient_checks.check_no_gradient),
    ("unused-parameters", gradient_checks.check_unused_parameters),
    ("optimizer-parameters", gradient_checks.check_optimizer_parameters),
    ("parameters-still", gradient_checks.check_parameters_still),
    ("example-leakage", leakage_checks.check_example_leakage),
    ("future-leakage", sequence_checks.check_future_leakage),
    ("label-shift", sequence_checks.check_label_shift),
    ("batch-size-dependence", leakage_checks.check_batch_size_dependence),
    ("missing-zero-grad", loop_checks.check_missing_zero_grad),
    ("train-eval-mode", mode_checks.check_train_eval_mode),
    ("evaluation-gradients", mode_checks.check_evaluation_gradients),
    ("schedule-values", data_checks.check_schedule_values),
    ("loss-scale", loop_checks.check_loss_scale),
    ("accumulation-mean-of-means", loop_checks.check_accumulation),
    ("label-in-inputs", data_checks.check_label_in_inputs),
    ("order-not-repeatable", data_checks.check_order),
    ("not-repeatable", repeat_checks.check_not_repeatable),
    ("checkpoint-round-trip", repeat_checks.check_checkpoint_round_trip),
    ("weight-decay-groups", gradient_checks.check_weight_decay_groups),
]


def preflight(
    target: Target,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    overrides: Sequence[str] = (),
    project: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[dict[str, Any]]:
    """Run the checks on a target and return their findings; the target is put back afterwards.

    Each finding is {id, verdict, value, threshold, message, fix}. `only` and `skip` are check ids;
    `overrides` and `project` say what a project's target was built from. An exception in the
    target's code is the finding of the check that it belongs to, and the others run where they can.
    """
    wanted = None if only is None else set(only)
    left_out = set(skip)
    chosen = [(i, f) for i, f in CHECKS if (wanted is None or i in wanted) and i not in left_out]
    findings: list[dict[str, Any]] = []
    raised: list[tuple[str, UserError]] = []
    with preserved(target):
        evidence = Evidence(target)
        evidence.overrides, evidence.project = list(overrides), project
        for number, (name, check) in enumerate(chosen):
            if progress is not None:
                progress(number, len(chosen), name)
            finding = _judged(name, check, evidence, raised)
            findings.append({"id": name, "threshold": THRESHOLDS.get(name), **finding})
    return _told(findings, raised)


def _told(
    findings: list[dict[str, Any]], raised: list[tuple[str, UserError]]
) -> list[dict[str, Any]]:
    """Make a check unclear that an exception kept from judging, if none fails for it."""
    failing = {finding["id"] for finding in findings if finding["verdict"] == "fail"}
    untold = {name: error for name, error in raised if error.id not in failing}
    for finding in findings:
        if finding["id"] in untold:
            finding.update(unclear(f"not judged, the code raises {untold[finding['id']]}"))
    return findings


def _judged(
    name: str,
    check: Callable[[Evidence, Any], Finding],
    evidence: Evidence,
    raised: list[tuple[str, UserError]],
) -> Finding:
    """Run one check; what keeps it from judging becomes its finding."""
    try:
        return check(evidence, THRESHOLDS.get(name))
    except CannotJudge as reason:
        return skipped(str(reason))
    except UserError as error:
        if error.id == name:
            return failed(f"the code raises {error}", fix=error.fix("see the message"))
        raised.append((name, error))
        return skipped(f"not judged, the code raises {error}; see {error.id}")
    except Exception as error:
        return unclear(f"the check itself failed: {type(error).__name__}: {error}")


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    ids = [name for name, _ in CHECKS]
    parser.add_argument("--only", metavar="ID", nargs="+", choices=ids, help="these checks alone")
    parser.add_argument(
        "--skip", metavar="ID", nargs="+", choices=ids, default=[], help="not these checks"
    )
    parser.add_argument("--list", action="store_true", help="name the checks and stop")


def check_flags(args: Any) -> int | None:
    """Answer --list."""
    if not args.list:
        return None
    from kit.check_ids import CHECK_IDS

    for name, _ in CHECKS:
        print(f"{name:28} {CHECK_IDS[name]}")
    return cli.OK


def measure(call: cli.Invocation) -> Report:
    """Build the target, run the checks, write what a hook looks for."""
    args, report = call.args, Report(SKILL)
    call.expect(None, "then about 20 s for a tiny model, minutes for a large one")
    target = call.load_target(probe=False)
    findings = preflight(
        target,
        only=args.only,
        skip=args.skip,
        overrides=args.set,
        project=call.project,
        progress=call.progress,
    )
    for finding in findings:
        report.check(finding.pop("id"), finding.pop("verdict"), **finding)
    if args.target is None and args.only is None and not args.skip:
        record(call, report)
    counts = {v: sum(c["verdict"] == v for c in report.checks) for v in ("pass", "fail", "skipped")}
    report.summary = ", ".join(f"{n} {v}" for v, n in counts.items())
    return report


def record(call: cli.Invocation, report: Report) -> None:
    """Add a line to runs/checks/preflight.jsonl: which code and overrides were looked at.

    A hook knows a preflighted launch by `overrides` and `tree_hash`.
    """
    args = call.args
    overrides = list(args.set)
    overrides += [] if args.seed is None else [f"seed={args.seed}"]
    overrides += [] if args.device == "auto" else [f"accelerator={args.device}"]
    entry = {
        "overrides": overrides,
        "tree_hash": tree_hash(call.project),
        "verdict": report.verdict,
        "config_hash": call.target.config_hash if call.target else None,
        "time": time.time(),
        "report": str(call.out / "report.json"),
    }
    path = call.project / "runs" / "checks" / "preflight.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(entry) + "\n").encode())  # one write a line
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, measure, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
