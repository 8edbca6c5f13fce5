#!/usr/bin/env python3
"""Make a model with its data and configuration, or a variant of one block, in a project.

    new --name NAME --kind lm|moe|classifier|regressor|spiking
    new --name NAME --block attention|mlp|router|norm --variant VARIANT [--model BASE]
    plan ...        the same words: shows every file and every difference, writes nothing
    list            the kinds, the variants of each block, and what a project holds already
    --undo NAME     takes out exactly what was made

`new` writes the files, trains three steps by train.py, runs the tests it made and the preflight
checks, and lists every file. Nothing is overwritten. It guesses nothing from words: choose a kind
or a block.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: scaffold-experiment needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

import scaffold_names as names  # noqa: E402
import scaffold_record  # noqa: E402
from scaffold_checks import before_writing, try_out  # noqa: E402
from scaffold_list import listing  # noqa: E402
from scaffold_plan import (  # noqa: E402
    BASE_OF,
    BLOCKS,
    KINDS,
    Plan,
    plan_block,
    plan_kind,
    variants,
)

from kit import cli, job  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report, bundle_version  # noqa: E402

SKILL = "scaffold-experiment"


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("verb", nargs="?", choices=("new", "plan", "list"), help="see above")
    parser.add_argument("--name", help="of the model, or the value of model.BLOCK")
    parser.add_argument("--kind", choices=KINDS, help="a model, its data set and a test")
    parser.add_argument("--block", choices=BLOCKS, help="one part of a decoder's block")
    parser.add_argument("--variant", help="of the block: see list; custom is the baseline, yours")
    parser.add_argument(
        "--model",
        metavar="BASE",
        help="file of configs/model that a variant goes into (default tiny_moe; mlp: tiny_dense)",
    )
    parser.add_argument("--undo", metavar="NAME", help="take out what was made under this name")
    parser.add_argument(
        "--force", action="store_true", help="with --undo: files that you changed since, too"
    )
    parser.add_argument("--no-checks", action="store_true", help="write the files and run nothing")


def check_flags(args: Any) -> int | None:
    """Refuse a wrong call; answer list, plan and --undo at once."""
    project = Path(args.project).expanduser().absolute()
    if args.undo and args.verb:
        raise UsageError(f"--undo with {args.verb}", "one of them", "leave the other out")
    if not args.undo and args.verb is None:
        raise UsageError("nothing to do", "new, plan, list or --undo NAME", "see --help")
    if args.target:
        raise UsageError("--target names code without configs", "a --project", "leave it out")
    if args.verb == "list":
        print(listing(project))
        return cli.OK
    names.check_project(project)
    if args.undo:
        return undo(project, args.undo, args.force)
    plan = make_plan(project, args)
    if args.verb == "plan":
        print(plan.show())
        return cli.OK
    return None


def make_plan(project: Path, args: Any) -> Plan:
    """Return the plan that the flags name. Raises UsageError."""
    if args.name is None:
        raise UsageError("no --name", "a name for files, key and class", "set --name")
    names.check_name(args.name)
    if (args.kind is None) == (args.block is None):
        raise UsageError(
            "--kind and --block" if args.kind else "neither --kind nor --block",
            "one of them: a new model, or a variant of a part of the decoder's block",
            f"set --kind to {', '.join(KINDS)}, or --block to {', '.join(BLOCKS)}",
        )
    if args.kind:
        if args.variant or args.model:
            raise UsageError("--variant or --model with --kind", "they belong to --block")
        return plan_kind(project, args.name, args.kind)
    ready = variants(args.block)
    if args.variant not in ready:
        raise UsageError(
            f"--variant {args.variant} of --block {args.block}",
            f"there are {', '.join(ready)}",
            "set --variant; custom is the baseline's own mathematics, for you to change",
        )
    base = args.model or BASE_OF.get(args.block, "tiny_moe")
    return plan_block(project, args.name, args.block, args.variant, base)


def undo(project: Path, name: str, force: bool) -> int:
    """Take a scaffold out, say what was done; returns 1 when something was kept."""
    with scaffold_record.alone(project):
        done, kept = scaffold_record.undo(project, name, force=force)
    print("\n".join([*done, *(f"kept     {why}" for why in kept)]))
    if kept:
        print(f"{name} is not all out: {len(kept)} kept (exit 1)")
        return cli.FINDING
    print(f"{name} is out: nothing of it is left (exit 0)")
    return cli.OK


def make(call: cli.Invocation) -> Report:
    """Write the files, try them out, list them."""
    args, project = call.args, call.project
    plan = make_plan(project, args)
    call.expect(2.0 if args.no_checks else 90.0, plan.what)
    before = None if args.no_checks else before_writing(call, plan)
    with scaffold_record.alone(project):
        plan = make_plan(project, args)
        scaffold_record.apply(project, plan, bundle_version())
    for line in plan.files():
        job.say(line)
    report = Report(SKILL, plan.what)
    report.artifacts += [*plan.create, *(edit.path for edit in plan.edits)]
    report.evidence += plan.summary()
    report.next += plan.next
    report.check(
        "scaffold-files",
        "pass",
        value=len(plan.create) + len(plan.edits),
        unit="files",
        message=f"{len(plan.create)} made, {len(plan.edits)} changed",
    )
    if not args.no_checks:
        try_out(call, plan, before, report)
    if report.verdict != "pass":
        report.next.insert(0, f"mend it, or take all of it out: --undo {plan.name}")
    return report


def main(argv: list[str] | None = None) -> int:
    """Run the script with the words of a command line; returns the exit code."""
    return cli.run(
        SKILL,
        make,
        doc=__doc__,
        add_flags=add_flags,
        check_flags=check_flags,
        modules=lambda args: [] if args.no_checks else ["torch", "hydra"],
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())
