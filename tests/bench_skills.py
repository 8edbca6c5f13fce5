#!/usr/bin/env python3
"""Measure the speed of the skills' checks on a fresh quickstart project.

`python3 tests/bench_skills.py [--json] [--only NAME ...]` prints a table: what was measured, its
wall and CPU seconds (children included), the limit, and their ratio; --json prints the same as
JSON. Limits hold for the wall time on 2 cores that have nothing else to do; the kit's overhead is
CPU time, the least of several runs. Exits 1 when a limit is missed or a skill does not pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SKILLS = ROOT / "skills"
INIT = SKILLS / "start-project" / "scripts" / "init.py"
PREFLIGHT = SKILLS / "preflight-checks" / "scripts"
REPEATS = 4
IMPORTS = (
    "import sys, torch; sys.path.insert(0, '.'); "
    "from curry_train.runtime import build_runtime; build_runtime([], project=__import__("
    "'pathlib').Path('.').resolve())"
)
EMPTY = "def nothing(target):\n    return {'id': 'nothing', 'verdict': 'pass'}\n"


@dataclass
class Figure:
    """One measured number and what is allowed."""

    name: str
    value: float | None
    unit: str
    limit: float | None
    wall_s: float
    cpu_s: float
    exit_code: int
    command: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Value over limit; None where one is missing."""
        return None if self.value is None or self.limit is None else self.value / self.limit

    @property
    def ok(self) -> bool:
        """Within the limit, by a command that passed."""
        missed = self.limit is not None and (self.value is None or self.value >= self.limit)
        return self.exit_code == 0 and not missed


@dataclass
class Run:
    """A finished command."""

    wall_s: float
    cpu_s: float
    exit_code: int
    output: str


def run(words: list[str], project: Path) -> Run:
    """Run a command in the project; CPU seconds are its own and those of its children."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(words, cwd=project, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        output.seek(0)
        text = output.read()
    return Run(wall, used.ru_utime + used.ru_stime, process.returncode, text)


def skill(name: str, script: Path, limit: float | None, project: Path) -> tuple[Figure, Path]:
    """Time one script; return the figure and where its JSON lies."""
    found = project / f"{name}.json"
    done = run([sys.executable, str(script), "--json", str(found)], project)
    shown = f"python3 {script.relative_to(ROOT)}"
    last = done.output.strip().splitlines()[-1:] if done.exit_code else []
    wall, cpu = round(done.wall_s, 2), round(done.cpu_s, 2)
    figure = Figure(name, wall, "s", limit, wall, cpu, done.exit_code, shown, "".join(last))
    print(f"{name}: {wall:.1f} s", file=sys.stderr, flush=True)
    return figure, found


def hooks(flow: Figure, report: Path) -> Figure:
    """Take from gradient-flow's report by how much its hooks lengthen a step."""
    value = None
    if report.is_file():
        value = json.loads(report.read_text(encoding="utf-8"))["numbers"].get("overhead")
    note = "" if value is not None else "the report does not say"
    limit = None if value is None else 2.0
    return Figure("gradient-flow hooks", value, "x", limit, 0.0, 0.0, 0, flow.command, note)


def kit(project: Path) -> Figure:
    """Compare a check that does nothing with the imports it cannot do without, in turns."""
    (project / "nothing.py").write_text(EMPTY, encoding="utf-8")
    script = SKILLS / "custom-check" / "scripts" / "custom_check.py"
    words = [sys.executable, str(script), "--check", "nothing.py:nothing"]
    pairs = [
        (run([sys.executable, "-c", IMPORTS], project), run(words, project)) for _ in range(REPEATS)
    ]
    codes = [one.exit_code for pair in pairs for one in pair]
    cpu = min(p[1].cpu_s for p in pairs) - min(p[0].cpu_s for p in pairs)
    wall = min(p[1].wall_s for p in pairs) - min(p[0].wall_s for p in pairs)
    note = f"least of {REPEATS}; beyond {min(p[0].cpu_s for p in pairs):.2f} CPU s of imports"
    cpu, wall = round(cpu, 2), round(wall, 2)
    shown = "python3 skills/custom-check/scripts/custom_check.py --check nothing.py:nothing"
    return Figure("kit overhead", cpu, "CPU s", 0.5, wall, cpu, max(codes), shown, note)


def measure(only: list[str] | None) -> list[Figure]:
    """Make a project and measure everything, or what is asked for."""
    scripts = {
        "preflight-checks": (PREFLIGHT / "preflight_checks.py", 60.0),
        "init-loss": (SKILLS / "init-loss" / "scripts" / "init_loss.py", 15.0),
        "overfit-one-batch": (
            SKILLS / "overfit-one-batch" / "scripts" / "overfit_one_batch.py",
            90.0,
        ),
        "gradient-flow": (SKILLS / "gradient-flow" / "scripts" / "gradient_flow.py", None),
        "check.py": (PREFLIGHT / "check.py", None),
    }
    names = only or ["kit", *scripts]
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "demo"
        made = run([sys.executable, str(INIT), str(project), "--no-install"], Path(folder))
        if made.exit_code:
            sys.exit(f"init.py failed: {made.output}")
        if "kit" in names:
            figures.append(kit(project))
        for name, (script, limit) in scripts.items():
            if name in names:
                figure, report = skill(name, script, limit, project)
                figures.append(figure)
                if name == "gradient-flow":
                    figures.append(hooks(figure, report))
    return figures


def machine() -> dict[str, Any]:
    """Say where the figures were measured and how busy it was."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = named[0] if named else model
    usable = getattr(os, "sched_getaffinity", None)
    import torch

    return {
        "cpu": model,
        "cores": len(usable(0)) if usable else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(terse=True),
    }


def table(figures: list[Figure], where: dict[str, Any]) -> str:
    """Write the figures for people."""
    heads = ("figure", "value", "limit", "ratio", "wall s", "CPU s", "")
    rows = [heads]
    for f in figures:
        value = "-" if f.value is None else f"{f.value:g} {f.unit}"
        limit = "-" if f.limit is None else f"{f.limit:g}"
        ratio = "-" if f.ratio is None else f"{f.ratio:.2f}"
        word = "ok" if f.ok else (f"exit {f.exit_code}" if f.exit_code else "missed")
        note = f"{word} {f.note}".strip()
        rows.append((f.name, value, limit, ratio, f"{f.wall_s:.2f}", f"{f.cpu_s:.2f}", note))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    threads = where["omp_num_threads"] or "unset"
    lines.append(
        f"machine: {where['cpu']}, {where['cores']} cores, load {where['load']}, "
        f"OMP_NUM_THREADS {threads}, Python {where['python']}, torch {where['torch']}"
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether every limit was kept."""
    parser = argparse.ArgumentParser(prog="tests/bench_skills.py", description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="kit, a skill, or check.py")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        sys.path.insert(0, str(ROOT / "tests"))
        from run import make_environment

        python = make_environment("")
        os.execv(str(python), [str(python), *sys.argv])
    figures = measure(args.only)
    where = machine()
    if args.json:
        rows = [{**asdict(f), "ratio": f.ratio, "ok": f.ok} for f in figures]
        print(json.dumps({"figures": rows, "machine": where}, indent=2))
    else:
        print(table(figures, where))
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
