#!/usr/bin/env python3
"""Learn one small batch by heart, down to the floor that its own data sets.

A fresh AdamW, constant learning rate, no dropout, no weight decay. What cannot be learnt by heart
is told from a bug: label smoothing, equal inputs with other labels, soft targets, auxiliary terms.
A plateau is named by its signature, and compared with training on the same batch without its
inputs. Some steps of the user's own optimizer show whether it moves this model. A missing zero_grad
is not visible here: one batch is learnt all the same.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: overfit-one-batch needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import user_code  # noqa: E402

import curve_picture  # noqa: E402  # isort: skip
from one_batch_case import Case, prepare, run_attempts  # noqa: E402  # isort: skip
from one_batch_verdicts import judge  # noqa: E402  # isort: skip

SKILL = "overfit-one-batch"
THRESHOLDS = {
    "one-batch-floor": 0.01,  # loss above the floor, of the first loss; or NEAR nats above it
    "double-softmax": 0.01,  # relative distance from ln(e + C - 1) - 1 that names it
    "input-independent": 0.02,  # relative distance from training without inputs that names it
    "no-learning": 0.01,  # fall of the loss that counts as learning, of the first loss
}
NEAR = 0.02
STEPS, LONGER, SECONDS = 300, 10 / 3, 60.0
"""An attempt whose loss still falls gets LONGER times its steps."""
BLIND = "not seen here: a missing zero_grad, and labels that are wrong the same way at every read"


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("--examples", type=int, default=8, help="kept of the batch (default 8)")
    parser.add_argument("--tokens", type=int, default=64, help="kept of each sequence (default 64)")
    parser.add_argument("--lr", type=float, default=1e-3, help="tried first (default 0.001)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"of each attempt (default {STEPS}); a loss that "
        f"still falls gets up to {LONGER:.2g} times as many"
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for all attempts (default {SECONDS:g})"
    )


def check_flags(args: Any) -> None:
    """Refuse numbers that measure nothing."""
    least = {"examples": 1, "tokens": 2, "steps": 20}
    for name, value in least.items():
        if getattr(args, name) < value:
            raise UsageError(f"--{name} {getattr(args, name)}", f"it takes {value} or more")
    for name in ("lr", "seconds"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name} {getattr(args, name)}", "it takes a number above 0")


def work(call: cli.Invocation) -> Report:
    """Load, train, judge, draw."""
    args = call.args
    call.expect(None, f"then {args.steps} steps or more, under {1.5 * args.seconds:.0f} s")
    target = call.load_target()
    report, case = examine(
        target,
        examples=args.examples,
        tokens=args.tokens,
        lr=args.lr,
        steps=args.steps,
        seconds=args.seconds,
        progress=call.progress,
    )
    report.artifacts += curve_picture.draw(case, call.out / "overfit_one_batch.png")
    return report


def judge_target(
    target: Target,
    *,
    examples: int = 8,
    tokens: int = 64,
    lr: float = 1e-3,
    steps: int = STEPS,
    seconds: float = SECONDS,
) -> list[dict[str, Any]]:
    """Return the checks as a list of {id, verdict, value, threshold, unit, message, fix}.

    The target is put back bit for bit. At most `examples` examples of the first batch are kept (4
    sequences of at most `tokens` tokens); each of up to four attempts has `steps` steps, or 10/3 of
    them while its loss falls; all end after `seconds`.
    """
    report, _ = examine(
        target, examples=examples, tokens=tokens, lr=lr, steps=steps, seconds=seconds
    )
    return report.checks


def examine(
    target: Target,
    *,
    examples: int = 8,
    tokens: int = 64,
    lr: float = 1e-3,
    steps: int = STEPS,
    seconds: float = SECONDS,
    progress: Any = None,
) -> tuple[Report, Case]:
    """Train on one batch and judge it; the case holds what the picture shows."""
    began = time.monotonic()
    with user_code("a forward or backward pass of the target"):
        case = prepare(target, examples=examples, tokens=tokens)
        case.near, case.share = NEAR, THRESHOLDS["one-batch-floor"]
        run_attempts(
            case,
            lr=lr,
            steps=steps,
            most_steps=round(LONGER * steps),
            deadline=began + seconds,
            progress=progress,
        )
    report = Report(SKILL)
    judge(report, case, THRESHOLDS)
    report.evidence.append(BLIND)
    report.numbers["seconds"] = time.monotonic() - began
    return report, case


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, work, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
