#!/usr/bin/env python3
"""Run preflight-checks, init-loss, overfit-one-batch and gradient-flow, and print one table.

Each is a process of its own; one that fails stops none of the others. Exit code 1: a stage found
something; 2: a stage could not run; 3: a stage cannot tell; 0: all passed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
SKILLS = Path(__file__).resolve().parents[2]
KIT_HOME = SKILLS / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: preflight-checks needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.target import Target, check_request  # noqa: E402

SKILL = "check"
STAGES = {
    "preflight-checks": 15.0,
    "init-loss": 8.0,
    "overfit-one-batch": 45.0,
    "gradient-flow": 10.0,
}
"""The stages in their order, and the seconds that each takes for a tiny model."""
CODES = {0: "pass", 1: "fail", 3: "unclear"}


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--only", metavar="STAGE", nargs="+", choices=list(STAGES), help="these stages alone"
    )


def run_stages(call: cli.Invocation) -> Report:
    """Run the stages in order and put what they found into one report."""
    args, report = call.args, Report(SKILL)
    check_request(call.project, args.target, args.set, args.device)
    chosen = [stage for stage in STAGES if args.only is None or stage in args.only]
    call.expect(sum(STAGES[stage] for stage in chosen), f"{len(chosen)} stages of a tiny model")
    hashes, not_run = set(), 0
    for number, stage in enumerate(chosen):
        start = time.time()
        found, error = _run(call, stage)
        seconds = round(time.time() - start, 1)
        if found is None:
            not_run += 1
            report.check(
                stage, "unclear", value=seconds, unit="s", message=f"could not run: {error}"
            )
        else:
            report.check(stage, found["verdict"], value=seconds, unit="s",
                         message=found["summary"])  # fmt: skip
            for check in found["checks"]:
                if check["verdict"] == "fail":
                    report.check(**check)
            report.artifacts.append(str(call.out / stage / "report.json"))
            report.numbers[stage] = {"seconds": seconds, "verdict": found["verdict"]}
            hashes.add(found["target"]["config_hash"])
        word = "could not run" if found is None else found["verdict"]
        call.progress(number + 1, len(chosen), f"{stage}: {word}, {seconds:.0f} s")
    _conclude(call, report, chosen, hashes, not_run)
    return report


def _conclude(
    call: cli.Invocation, report: Report, chosen: list[str], hashes: set[Any], not_run: int
) -> None:
    verdicts = [c["verdict"] for c in report.checks if c["id"] in STAGES]
    passed = sum(verdict == "pass" for verdict in verdicts)
    report.summary = f"{passed} of {len(chosen)} stages passed"
    if not_run and report.verdict != "fail":
        report.exit_code = cli.BAD_USAGE
    failed = [c["id"] for c in report.checks if c["id"] in STAGES and c["verdict"] != "pass"]
    report.next += [f"the skill {stage} says what its numbers mean" for stage in failed[:2]]
    if len(hashes) == 1:  # the ledger says which configuration was checked
        nothing: Any = None
        kind = "project" if call.args.target is None else "foreign"
        call.target = Target(nothing, nothing, nothing, nothing, nothing, hashes.pop(), kind)


def _run(call: cli.Invocation, stage: str) -> tuple[dict[str, Any] | None, str]:
    """Run one stage; return its report, or None and the first line of what went wrong."""
    script = SKILLS / stage / "scripts" / f"{stage.replace('-', '_')}.py"
    if not script.is_file():
        return None, f"there is no {script.name}; install the whole curry-train bundle"
    out = call.out / stage
    out.mkdir(parents=True, exist_ok=True)
    written = out / "stage.json"
    written.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(script), *_flags(call), "--out", str(out), "--json", str(written)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    (out / "output.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    try:
        found = json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
    except (OSError, ValueError):
        return None, _first_error(done)
    return (found, "") if done.returncode in CODES else (None, _first_error(done))


def _flags(call: cli.Invocation) -> list[str]:
    args = call.args
    words = ["--project", str(call.project), "--device", args.device]
    words += ["--target", args.target] if args.target else []
    words += ["--seed", str(args.seed)] if args.seed is not None else []
    words += ["--python", args.python] if args.python else []
    return words + (["--set", *args.set] if args.set else [])


def _first_error(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name} (SIGKILL: out of memory?)"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")] or lines[-1:]
    return told[0].removeprefix("error:").strip() if told else f"exit code {done.returncode}"


def no_modules(args: Any) -> list[str]:
    """The stages import torch, in processes of their own."""
    return []


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, run_stages, doc=__doc__, add_flags=add_flags, modules=no_modules))
