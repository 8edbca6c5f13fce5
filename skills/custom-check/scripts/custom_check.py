#!/usr/bin/env python3
"""Run a check of your own on a project made by init, or on any code through --target.

FILE.py:FUNCTION is called with the target (model, batches, loss_fn, optimizer, device,
config_hash, kind, runtime) and, when it takes a second argument, a folder for its artifacts.
It returns what it found; afterwards the target is put back, bit for bit.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
SCRIPTS = Path(__file__).resolve().parent
if not (SCRIPTS / "kit" / "cli.py").is_file():
    print(
        "error: custom-check needs scripts/kit, which is missing; install the whole curry-train "
        "bundle",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(SCRIPTS))

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.user_code import load_function, parse_spec, user_code  # noqa: E402

SKILL = "custom-check"
SKELETON = SCRIPTS.parent / "references" / "example_check.py"
ALLOWED = (
    "it must return a check {id, verdict, ...}, a list of checks, or "
    "{checks, summary, numbers, evidence, next, artifacts}"
)
CHECK_KEYS = {"id", "verdict", "value", "threshold", "unit", "message", "fix"}
LISTS = ("evidence", "next", "artifacts")


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("--check", metavar="FILE.py:FUNCTION", help="the check to run")
    parser.add_argument("--new", metavar="FILE.py", help="write a working check to start from")


def check_flags(args: Any) -> int | None:
    """Write the skeleton, or make sure that there is a check to run."""
    if (args.check is None) == (args.new is None):
        raise UsageError("needs exactly one of --check FILE.py:FUNCTION and --new FILE.py")
    if args.new is None:
        path, function = parse_spec(args.check, flag="--check")
        args.check = f"{path}:{function}"  # a target may change the current folder
        return None
    path = Path(os.path.abspath(os.path.expanduser(args.new)))
    if path.suffix != ".py" or not path.parent.is_dir():
        raise UsageError(f"--new {args.new}", "it takes FILE.py in a folder that exists")
    try:
        with open(path, "xb") as file, open(SKELETON, "rb") as skeleton:
            shutil.copyfileobj(skeleton, file)
    except FileExistsError:
        raise UsageError(
            f"--new {args.new} exists", "nothing is overwritten", "name another file"
        ) from None
    except OSError as error:
        raise UsageError(f"--new {args.new}: {error.strerror}", fix="name another file") from None
    print(f"wrote {args.new}; run it with --check {args.new}:check_gradients")
    return cli.OK


def run_check(call: cli.Invocation) -> Report:
    """Call the user's function on the preserved target and take in what it returns."""
    spec = call.args.check
    call.expect(None, f"then {spec.rpartition(':')[2]}")
    target = call.load_target()
    function = load_function(spec, flag="--check", project=call.project)
    path, name = parse_spec(spec, flag="--check")
    what = f"{path.name}:{name}"
    arguments = [target, call.out][: _wanted_arguments(function, what)]
    with preserved(target), user_code(what):
        found = function(*arguments)
    return take_in(found, what)


def _wanted_arguments(function: Any, what: str) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional if p.default is p.empty]
    if len(positional) == 0 or len(needed) > 2:
        raise UsageError(
            f"{what} takes ({', '.join(p.name for p in positional)})",
            "a check is called with (target) or (target, out)",
        )
    return min(2, len(positional))


def take_in(found: Any, what: str) -> Report:
    """Turn what a check returned into a report; names what is wrong with it."""
    report = Report(SKILL, summary=what)
    if isinstance(found, dict) and "checks" in found:
        unknown = set(found) - {"checks", "summary", "numbers", *LISTS}
        if unknown:
            raise UsageError(f"{what} returned unknown keys {sorted(unknown)}", ALLOWED)
        numbers = found.get("numbers", {})
        lists = {key: found.get(key, []) for key in LISTS}
        if not isinstance(numbers, dict):
            raise UsageError(f"{what} returned numbers {numbers!r}", "they must be a dict")
        for key, items in lists.items():
            if not isinstance(items, (list, tuple)):
                raise UsageError(f"{what} returned {key} {items!r}", "it must be a list")
            setattr(report, key, [str(item) for item in items])
        report.summary = str(found.get("summary", what))
        report.numbers = dict(numbers)
        found = found["checks"]
    for check in found if isinstance(found, (list, tuple)) else [found]:
        if not isinstance(check, dict) or not {"id", "verdict"} <= set(check) <= CHECK_KEYS:
            shown = f"keys {sorted(map(str, check))}" if isinstance(check, dict) else repr(check)
            raise UsageError(f"{what} returned {shown} as a check", ALLOWED)
        try:
            report.check(**check)
        except ValueError as error:
            raise UsageError(f"{what} returned a {error}") from None
    return report


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, run_check, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
