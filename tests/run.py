#!/usr/bin/env python3
"""Run every test of this repository: `python3 tests/run.py [--full] [--suite NAME] [-k EXPR]`.

The first run makes a virtual environment from template/requirements.lock and
tests/requirements.lock in the user's cache folder (XDG_CACHE_HOME, else ~/.cache); later runs
reuse it until a lock file changes. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from clients.install import (  # noqa: E402
    InstallError,
    building,
    cache_root,
    content_hash,
    install_clients,
)

SUITES = {
    "bundle": "tests/bundle",
    "skills": "tests/skills",
    "clients": "tests/clients",
    "template": "template/tests",
}
LOCKS = ["template/requirements.lock", "tests/requirements.lock"]
DOWNLOAD = (
    "it takes 2.5 GB with the CPU build of torch and 6 GB with the CUDA build, which pip chooses "
    "on Linux; for the CPU build pass "
    "--pip-args '--extra-index-url https://download.pytorch.org/whl/cpu'"
)
WORKERS = 2
SUITE_SECONDS = 30 * 60
"""A suite that takes longer hangs; it is ended and counted as one failure."""


@dataclass
class Outcome:
    """What one suite came to."""

    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    skips: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> Outcome:
        self.failed += 1
        self.failures.append(reason)
        return self


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/run.py", description="Run every test.")
    parser.add_argument("--full", action="store_true", help="the long versions too")
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="repeatable")
    parser.add_argument("-k", metavar="EXPR", help="only tests whose name matches (pytest -k)")
    parser.add_argument("--pip-args", default="", help="further arguments of pip install")
    return parser.parse_args(argv)


def require_python() -> None:
    """Stop with one line when this interpreter cannot make the test environment."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        sys.exit(
            f"found Python {platform.python_version()}; the tests need Python 3.11, 3.12 or 3.13; "
            "call this script with one of them"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"this Python has no module {error.name}; the tests make their own environment; "
            "install the system package python3-venv"
        )


def make_environment(pip_args: str) -> Path:
    """Return the python of an environment that holds exactly the pinned packages."""
    locks = [ROOT / name for name in LOCKS]
    key = content_hash(*locks, extra=f"{platform.python_version()}-{platform.machine()}")
    folder = cache_root() / f"venv-{key}"
    python = folder / "bin" / "python"
    with building(folder) as needed:
        if needed:
            print(f"install: new environment in {folder}; {DOWNLOAD}", flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            command = [str(python), "-m", "pip", "install", "--quiet"]
            command += ["--disable-pip-version-check", *shlex.split(pip_args)]
            for lock in locks:
                command += ["-r", str(lock)]
            began, code = time.monotonic(), None
            pip = subprocess.Popen(command)
            while code is None:
                try:
                    code = pip.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    print(f"install: {time.monotonic() - began:.0f} s", flush=True)
            if code:
                sys.exit(f"pip install failed with code {code}; the lines above say why")
    return python


def environment(python: Path) -> dict[str, str]:
    """Return the environment variables of the tests: few threads, little spinning."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "20000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": str(python.parents[1]),
    }
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, **settings}


def read_report(outcome: Outcome, report: Path) -> None:
    """Add the counts, failures and skips of a junit file to the outcome."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.fail(name)
        elif skip is not None:
            outcome.skipped += 1
            outcome.skips.append(f"{name}: {skip.get('message', 'no reason given')}")
        else:
            outcome.passed += 1


def run_suite(suite: str, python: Path, options: argparse.Namespace) -> Outcome:
    outcome = Outcome(suite)
    folder = ROOT / SUITES[suite]
    if not folder.is_dir():
        return outcome.fail(f"{SUITES[suite]} does not exist")
    cwd = ROOT / "template" if suite == "template" else ROOT
    env = environment(python)
    if options.full:
        env["CURRY_TRAIN_FULL"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="curry-train-tests-") as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(python), "-m", "pytest", str(folder.relative_to(cwd)), "-q"]
        command += ["-p", "no:cacheprovider", "-n", str(WORKERS), "--dist", "worksteal"]
        command += [f"--junitxml={report}"]
        command += [f"--basetemp={scratch}/tmp", *(["-k", options.k] if options.k else [])]
        process = subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True)
        try:
            code = process.wait(timeout=SUITE_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, KeyboardInterrupt):
                raise
            return outcome.fail(f"ended after {SUITE_SECONDS} seconds")
        finally:
            outcome.seconds = time.monotonic() - began
        if report.exists():
            read_report(outcome, report)
    nothing = code == 5
    if nothing and not options.k:
        outcome.fail("pytest found no test")
    elif code not in (0, 5) and not outcome.failed:
        outcome.fail(f"pytest ended with code {code}")
    return outcome


def summarize(outcomes: list[Outcome], install_seconds: float) -> int:
    """Print what happened, the sums last; return the exit code."""
    print("\nsuite      passed  failed  skipped  minutes")
    for one in outcomes:
        counts = f"{one.passed:6d}  {one.failed:6d}  {one.skipped:7d}"
        print(f"{one.suite:<9s}  {counts}  {one.seconds / 60:7.2f}")
    for one in outcomes:
        for text in one.skips:
            print(f"skipped: {text}")
    for one in outcomes:
        for text in one.failures:
            print(f"FAILED: {one.suite}: {text}")
    seconds = sum(one.seconds for one in outcomes)
    print(f"tests: {seconds / 60:.2f} minutes (install: {install_seconds / 60:.2f} minutes apart)")
    passed = sum(one.passed for one in outcomes)
    failed = sum(one.failed for one in outcomes)
    skipped = sum(one.skipped for one in outcomes)
    if not passed and not failed:
        print("no test ran; see -k and --suite")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


def main(argv: list[str]) -> int:
    options = parse(argv)
    require_python()
    began = time.monotonic()
    python = make_environment(options.pip_args)
    suites = options.suite or list(SUITES)
    if "clients" in suites or "bundle" in suites:
        try:
            install_clients()
        except InstallError as error:
            print(f"clients: {error}", flush=True)
    install_seconds = time.monotonic() - began
    outcomes = []
    for number, suite in enumerate(suites, start=1):
        print(f"\n[{number}/{len(suites)}] {suite}: {SUITES[suite]}", flush=True)
        outcomes.append(run_suite(suite, python, options))
    return summarize(outcomes, install_seconds)


if __name__ == "__main__":
    # A shell starts background jobs with SIGINT ignored, and every test would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
