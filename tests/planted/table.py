#!/usr/bin/env python3
"""Print the bank as a table: bug, where it is from, what must be found, what was found.

`python3 tests/planted/table.py [--only WORD] [--clean] [--list] [--diff]`. Without an interpreter
that has torch it starts itself with the environment of tests/run.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from planted import bank  # noqa: E402
from planted.row import Row  # noqa: E402


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/planted/table.py", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name has it")
    parser.add_argument("--clean", action="store_true", help="the clean models, every stage")
    parser.add_argument("--stage", action="append", choices=bank.STAGES, help="repeatable")
    parser.add_argument("--list", action="store_true", help="do not run anything")
    parser.add_argument("--diff", action="store_true", help="the changed lines, too")
    parser.add_argument("--show", action="store_true", help="what the checks printed, too")
    return parser.parse_args(argv)


def origin(row: Row) -> str:
    """Say where a bug is from."""
    if row.link:
        return row.link
    return "a description, before its check" if row.before_check else "this bank"


def bugs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the text of every planted bug and whether it came out as expected."""
    rows = [row for row in bank.ROWS if options.only in row.name]
    rows = [row for row in rows if not options.stage or row.stage in options.stage]

    for row in rows:
        found = None if options.list else bank.judge(row, folder / row.name)
        lines = [f"{row.name} ({row.stage} on {row.on})", f"  {row.told}"]
        lines += [f"  from      {origin(row)}"]
        lines += [f"    {line}" for line in row.diff()] if options.diff else []
        also = f" (and perhaps {', '.join(row.may)})" if row.may else ""
        lines += [f"  expected  {', '.join(row.fails)}{also}"]
        problem = ""
        if found is not None:
            problem = bank.wrong(row, found)
            lines += [f"  found     {', '.join(sorted(found.fail)) or f'exit {found.code}'}"]
            lines += [f"  RED       {problem}"] if problem else []
            lines += [found.text] if options.show else []
        yield "\n".join(lines), not problem


def clean(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield what every stage says of every clean model."""
    stages = options.stage or bank.STAGES
    for target in bank.CLEAN_MODELS:
        for stage in stages if options.only in target else ():
            found = bank.judge_clean(target, folder / f"{target.replace(':', '-')}-{stage}", stage)
            problem = bank.accused(found)
            line = f"{target:<32} {stage:<18} exit {found.code}  {problem or 'clean'}"
            yield line + (f"\n{found.text}" if options.show or found.code == 2 else ""), not problem


def main(argv: list[str]) -> int:
    options = parse(argv)
    if not options.list and importlib.util.find_spec("torch") is None:
        from run import environment, make_environment

        python = make_environment("")
        os.execve(python, [str(python), __file__, *argv], environment(python))
    green = red = 0
    with tempfile.TemporaryDirectory(prefix="curry-train-bank-") as folder:
        for text, good in (clean if options.clean else bugs)(options, Path(folder)):
            print(text, flush=True)
            green, red = green + good, red + (not good)
    print(f"{green} rows, none of them run" if options.list else f"{green} as expected, {red} not")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
