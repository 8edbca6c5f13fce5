#!/usr/bin/env python3
"""Check how a PyTorch training loop uses Lightning Fabric: what is missing, what is wrong.

--check reads files without importing them; several files are read as one program. --run calls
FUNCTION(fabric, batch_size) of a file in one process and in two with half the batch each, and
compares losses and gradients of the first steps.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: fabric-setup needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

import loop_rules  # noqa: E402
import setup_rules  # noqa: E402
from loop_facts import Finding, Loop, read_loop, trainer_of  # noqa: E402
from loop_source import Program, Source  # noqa: E402

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.user_code import parse_spec  # noqa: E402

SKILL = "fabric-setup"
THRESHOLDS = {
    "fabric-run-loss": 1e-4,  # of two processes to one, relative; float32 sums in another order
    "fabric-run-gradients": 1e-4,  # largest element's difference over its tensor's largest
}
STEPS = 3
RULES = {
    "fabric-model-setup": setup_rules.model_setup,
    "fabric-optimizer-setup": setup_rules.optimizer_setup,
    "fabric-optimizer-order": setup_rules.optimizer_order,
    "fabric-dataloaders": setup_rules.dataloaders,
    "fabric-sampler": setup_rules.sampler,
    "fabric-backward": setup_rules.backward,
    "fabric-accumulation": loop_rules.accumulation,
    "fabric-clip": setup_rules.clip,
    "fabric-zero-grad": loop_rules.zero_grad,
    "fabric-grad-scaling": loop_rules.grad_scaling,
    "fabric-forward-methods": loop_rules.forward_methods,
    "fabric-device-moves": loop_rules.device_moves,
    "fabric-autocast": loop_rules.autocast,
    "fabric-launch": setup_rules.launch,
    "fabric-cli-conflict": setup_rules.command_line,
    "fabric-seed": loop_rules.seed,
    "fabric-rank-zero": loop_rules.rank_zero,
    "fabric-collectives": loop_rules.collectives,
    "fabric-metrics": loop_rules.metrics,
}
OF_A_STRATEGY = {
    "fabric-model-setup", "fabric-optimizer-setup", "fabric-optimizer-order", "fabric-dataloaders",
    "fabric-sampler", "fabric-backward", "fabric-accumulation", "fabric-clip",
    "fabric-forward-methods", "fabric-grad-scaling",
}  # fmt: skip
"""What does not concern code that sums its own gradients."""

OF_FABRIC = {
    "fabric-launch", "fabric-cli-conflict", "fabric-sampler", "fabric-optimizer-order",
    "fabric-collectives", "fabric-metrics", "fabric-forward-methods",
}  # fmt: skip
"""What can only be wrong once Fabric is there."""


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--check", metavar="FILE.py", nargs="+", help="read these files as one program"
    )
    parser.add_argument(
        "--run",
        metavar="FILE.py:FUNCTION",
        help="call it with (fabric, batch_size) in 1 and 2 ranks",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="of all processes together, even (default 8)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"optimizer steps to compare (default {STEPS})"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds for a run (default 120)"
    )


def check_flags(args: Any) -> None:
    """Refuse flags that cannot work, and files that cannot be read."""
    if not (args.check or args.run):
        raise UsageError("nothing to do", "set --check FILE.py ... or --run FILE.py:FUNCTION")
    if args.target is not None or args.set:
        raise UsageError(
            "--target and --set", "this check reads a loop, not the parts of one", "set --check"
        )
    if args.batch_size < 2 or args.batch_size % 2:
        raise UsageError(f"--batch-size {args.batch_size}", "it takes an even number, 2 at least")
    if args.steps < 1 or args.timeout <= 0:
        raise UsageError("--steps and --timeout", "both must be positive")
    if args.run:
        parse_spec(args.run, flag="--run")
    args.sources = [read(Path(name)) for name in args.check or []]


def modules(args: Any) -> list[str]:
    """Name what the work imports: nothing to read files, torch and Fabric to run a loop."""
    if not args.run:
        return []
    path, _ = parse_spec(args.run, flag="--run")
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = re.search(r"^\s*(from|import) lightning\b(?!_)", text, re.MULTILINE)
    return ["torch", "lightning" if whole else "lightning_fabric"]


def read(path: Path) -> Source:
    """Parse a file; one that is no Python text is refused with its line."""
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(
            f"--check {path}: " + ("no Python file" if path.exists() else "there is no such file"),
            "it takes files ending in .py",
        )
    try:
        with tokenize.open(path) as file:  # obeys a coding line, as Python does
            text = file.read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UsageError(
            f"--check {path} is not text in its encoding ({error})",
            "Python reads UTF-8, or what a coding line in the first two lines names",
            "save it as UTF-8",
        ) from None
    try:
        return Source(path, ast.parse(text, filename=str(path)))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        shown = text.splitlines()[line - 1].strip()[:80] if text.splitlines()[line - 1 :] else ""
        raise UsageError(
            f"--check {path} has a syntax error in line {line}: {getattr(error, 'msg', error)}",
            where=f"{path}:{line}: {shown}",
        ) from None
    except RecursionError:
        raise UsageError(f"--check {path} is nested too deeply to be read") from None


def measure(call: cli.Invocation) -> Report:
    """Read, run, report."""
    report = Report(SKILL)
    if call.args.sources:
        check_files(report, call.args.sources)
    if call.args.run:
        from loop_run import compare

        compare(call, report, THRESHOLDS)
    return report


def check_files(report: Report, sources: list[Source]) -> None:
    """Judge the files by every rule."""
    program = Program(sources)
    names = ", ".join(source.path.name for source in sources)
    trainer = trainer_of(program)
    loop = read_loop(program)
    if trainer is not None and not (loop.backward and loop.steps):
        report.summary = (
            f"{names} is no raw loop: {trainer[0]} in line {trainer[1]} owns the loop and the "
            "processes, and Fabric would be a second owner; nothing to check"
        )
        report.check("fabric-loop", "unclear", message="a Trainer's file")
        return
    if not (loop.backward and loop.steps):
        found = "backward but no optimizer.step()" if loop.backward else "no backward()"
        found = "optimizer.step() but no backward()" if loop.steps else found
        report.summary = f"no training loop found in {names}"
        report.next.append("give --check all files of the loop")
        report.check("fabric-loop", "unclear", message=found)
        return
    first = loop.backward[0]
    place = f"backward in line {first.lineno} of {program.file[first].name}"
    report.check("fabric-loop", "pass", message=place)
    findings = [finding for id in RULES for finding in judge(report, loop, id)]
    report.summary = f"{names}: {len(findings)} finding{'s' * (len(findings) != 1)}"
    if loop.own_sum is not None:
        call = loop.own_sum
        report.evidence.append(
            f"sums its own gradients ({program.file[call].name}:{call.lineno}), so rules about "
            "strategies do not apply"
        )
    report.numbers["findings"] = [
        {"id": f.id, "file": str(program.file[f.node]), "line": program.line(f.node)}
        for f in findings
    ]


def judge(report: Report, loop: Loop, id: str) -> list[Finding]:
    """Apply one rule: a check for each finding, or one that passed."""
    if loop.own_sum is not None and id in OF_A_STRATEGY:
        report.check(id, "skipped", message="this code sums its own gradients")
        return []
    program = loop.program
    found = {(program.file[f.node], program.line(f.node), f.message): f for f in RULES[id](loop)}
    for (path, line, message), finding in sorted(found.items(), key=lambda item: item[0][:2]):
        fix = {"file": str(path), "line": line, "text": finding.text}
        report.check(id, "fail", message=message, fix=fix)
    if not found and id in OF_FABRIC and not loop.any_fabric:
        report.check(id, "skipped", message="there is no Fabric yet")
    elif not found:
        report.check(id, "pass")
    return list(found.values())


if __name__ == "__main__":
    sys.exit(
        cli.run(
            SKILL,
            measure,
            doc=__doc__,
            add_flags=add_flags,
            check_flags=check_flags,
            modules=modules,
        )
    )
