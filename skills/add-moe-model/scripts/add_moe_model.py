#!/usr/bin/env python3
"""Port an architecture from its Hugging Face config.json, and prove the port gate by gate.

draft       writes what of config.json and of the weights fits, what is unknown, every place of
            wiring with file and line, and a skeleton (--hf, --name; --index for the weights)
gate 1      module imports, YAML composes, config.json is read and says the same
gate 2      the model without values has as many parameters as transformers'
gate 3      logits and gradients of a tiny random model equal transformers, in float64
gate 4      pp1 ep1, pp2, ep2 and pp2 ep2 train as one process does
gate 5      greedy text is the same on all four meshes and in transformers
gate 6      weights go in and out bit for bit
gate all    all six, up to the first that fails
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: add-moe-model needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.target import PROJECT_MODULES  # noqa: E402

SKILL = "add-moe-model"
THRESHOLDS = {
    "port-parameters": 0,  # parameters more or fewer than transformers' model has
    "port-parity": 1e-11,  # error of logits and of any gradient over the largest element, float64
    "port-layouts": 1.0,  # worst gap of a mesh over the tolerance of curry_train.equality
    "port-text": 0,  # ranks whose greedy text is another than transformers'
    "port-round-trip": 0,  # tensors that are missing, new or changed after import and export
}
GATES = {
    1: "port-imports",
    2: "port-parameters",
    3: "port-parity",
    4: "port-layouts",
    5: "port-text",
    6: "port-round-trip",
}
INSTALL = "python -m pip install transformers"
NAME = re.compile(r"[a-z][a-z0-9_]*")
MESH_NAMES = ("pp1 ep1", "pp2", "ep2", "pp2 ep2")


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("verb", choices=("draft", "gate"), help="what to do, see above")
    parser.add_argument("number", nargs="?", metavar="N", help="gate: 1 to 6, or all")
    parser.add_argument("--name", metavar="NAME", help="the model's YAML in configs/model/")
    parser.add_argument(
        "--hf", metavar="PATH", help="config.json, or its folder (gate: default is the YAML's own)"
    )
    parser.add_argument(
        "--index",
        metavar="PATH",
        help="draft: model.safetensors.index.json, a .safetensors file or their folder",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="gate all: go on after a gate that fails"
    )
    parser.add_argument(
        "--mesh",
        nargs="+",
        choices=MESH_NAMES,
        default=MESH_NAMES,
        help="gates 4 and 5: these meshes only (default: all four)",
    )


def check_flags(args: Any) -> None:
    """Refuse what cannot be done, before anything is imported."""
    if args.name is None or not NAME.fullmatch(args.name):
        raise UsageError(
            f"--name {args.name}", "small letters, digits and _, a letter first", "--name olmoe_1b"
        )
    if args.target is not None:
        raise UsageError("--target", "a port belongs to a project", "set --project")
    if args.verb == "draft":
        if args.number is not None:
            raise UsageError(f"draft {args.number}", "draft takes no number")
        if args.hf is None:
            raise UsageError("draft without --hf", "it takes a config.json or its folder")
        return
    if args.number not in (*map(str, GATES), "all"):
        raise UsageError(f"gate {args.number}", f"allowed are {', '.join(map(str, GATES))}, all")
    if args.index is not None:
        raise UsageError("--index", "read by draft only; gates make tiny weights of their own")


def work(call: cli.Invocation) -> Report:
    """Draft a port, or run its gates."""
    if call.args.verb == "draft":
        import port_draft

        return port_draft.draft(call, Report(SKILL))
    return run_gates(call)


def run_gates(call: cli.Invocation) -> Report:
    """Run one gate or all, up to the first that fails; the report has a check for each."""
    report, args = Report(SKILL), call.args
    wanted = list(GATES) if args.number == "all" else [int(args.number)]
    if importlib.util.find_spec("transformers") is None and set(wanted) & {2, 3, 5, 6}:
        report.summary = "transformers is what the gates compare with, and it is not installed"
        report.check(GATES[wanted[0]], "unclear", message=f"install it: {INSTALL}")
        report.next.append(f"{sys.executable} -m pip install transformers")
        return report
    import torch

    torch.set_num_threads(1)
    call.expect(90 if args.number == "all" else None, "two CPU cores; gate 4 is the longest")
    with tempfile.TemporaryDirectory() as folder:
        passed = _gates(call, report, wanted, Path(folder))
    print(table(report))
    sys.stdout.flush()
    report.summary = f"{passed} of {len(wanted)} gates of {args.name} pass"
    return report


def _gates(call: cli.Invocation, report: Report, wanted: list[int], folder: Path) -> int:
    import port_gates

    args, began = call.args, time.monotonic()
    hf = None if args.hf is None else Path(args.hf)
    port, problem = port_gates.load_port(call, args.name, hf, folder)
    if 1 in wanted or port is None:
        report.check(
            GATES[1],
            "fail" if port is None else "pass",
            message="" if port is None else f"{port.architecture} is read as the YAML says",
        )
        report.checks[-1]["message"] += problem
        report.numbers["seconds 1"] = time.monotonic() - began
    rest = [number for number in wanted if number != 1]
    passed, stopped = int(1 in wanted and port is not None), port is None
    for done, number in enumerate(rest):
        if port is None or stopped:
            report.check(GATES[number], "skipped", message="a gate before it failed")
            continue
        began = time.monotonic()
        found = _gate(call, port, number)
        report.numbers[f"seconds {number}"] = time.monotonic() - began
        report.numbers[found.id] = found.numbers or {}
        report.check(
            found.id,
            "pass" if found.passed else "fail",
            value=found.value,
            threshold=found.threshold,
            message=found.message,
        )
        report.next += [found.next] if found.next else []
        passed += found.passed
        stopped = not found.passed and not args.keep_going
        call.progress(done + 1, len(rest), f"gate {number}")
    return passed


def _gate(call: cli.Invocation, port: Any, number: int) -> Any:
    """Run a gate; what the port itself raises is a finding, with its traceback on stderr."""
    import port_gates

    meshes = list(call.args.mesh)
    runs = {
        2: lambda: port_gates.parameters(port, THRESHOLDS),
        3: lambda: port_gates.parity(port, THRESHOLDS),
        4: lambda: port_gates.equal_layouts(port, THRESHOLDS, call, meshes),
        5: lambda: port_gates.same_text(port, THRESHOLDS, meshes),
        6: lambda: port_gates.round_trip(port, THRESHOLDS),
    }
    try:
        return runs[number]()
    except UsageError:
        raise
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or ["no message"])[0]
        told = f"raised {type(error).__name__}: {first}"
        return port_gates.Finding(GATES[number], False, message=told)


def table(report: Report) -> str:
    """Return a line a gate: verdict, seconds, what was found."""
    numbers = {id: number for number, id in GATES.items()}
    lines = [f"{'gate':<6}{'verdict':<9}{'seconds':>8}  {'check':<16} value"]
    for check in report.checks:
        number = numbers[check["id"]]
        seconds = report.numbers.get(f"seconds {number}")
        took = "" if seconds is None else f"{seconds:.1f}"
        value = check["value"]
        shown = f"{value:.2e}" if isinstance(value, float) else "" if value is None else str(value)
        lines.append(f"{number:<6}{check['verdict']:<9}{took:>8}  {check['id']:<16} {shown}")
    return "\n".join(lines)


def modules(args: Any) -> list[str]:
    """Say what has to be importable: gates of a project need transformers, where it has it."""
    return [*PROJECT_MODULES, "safetensors"] if args.verb == "gate" else ["yaml"]


if __name__ == "__main__":
    sys.exit(
        cli.run(
            SKILL, work, doc=__doc__, add_flags=add_flags, check_flags=check_flags, modules=modules
        )
    )
