"""Start a skill's script as a user would: another process, a folder of its own.

`run` forks a server that has imported torch and its kin (`warm`), which saves some seconds of every
start; the script itself, and all of the bundle, is read anew. `run_fresh` starts an interpreter.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TARGETS = Path(__file__).resolve().parent
KIT_HOME = ROOT / "skills" / "custom-check" / "scripts"
CUSTOM_CHECK = KIT_HOME / "custom_check.py"
BENCHMARK_STEP = ROOT / "skills" / "benchmark-step" / "scripts" / "benchmark_step.py"
EXAMPLE_CHECK = ROOT / "skills" / "custom-check" / "references" / "example_check.py"
MLP = f"{TARGETS / 'mlp_regression.py'}:build"
CLASSIFIER = f"{TARGETS / 'image_classifier.py'}:build"
LANGUAGE_MODEL = f"{TARGETS / 'language_model.py'}:build"
TIMEOUT = 240

for folder in (KIT_HOME, BENCHMARK_STEP.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
custom_check = importlib.import_module("custom_check")
benchmark_step = importlib.import_module("benchmark_step")
sys.dont_write_bytecode = False  # the scripts set it for themselves


def environment(**changes: str | None) -> dict[str, str]:
    """Give this process's variables without an active environment; None removes one."""
    settings = {"OMP_NUM_THREADS": "1", "VIRTUAL_ENV": None, "CONDA_PREFIX": None, **changes}
    kept = {k: v for k, v in os.environ.items() if k not in settings and k != "PYTHONPATH"}
    return kept | {k: v for k, v in settings.items() if v is not None}


def run_fresh(script: Path, *words: object, cwd: Path, python: object = sys.executable, **changes):
    """Run a script in an interpreter of its own; return the finished process with text output."""
    return subprocess.run(
        [str(python), str(script), *map(str, words)],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["skills.targets.warm"])


def start_server() -> None:
    """Start the server, if there is none; it finds `warm` by PYTHONPATH, its forks have none."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT / "tests")
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def start(script: Path, *words: object, cwd: Path, output: Sequence[Path], **changes):
    """Start a script in a fork of the server, stdout and stderr into the two files of `output`."""
    argv = [str(script), *map(str, words)]
    files = [str(path) for path in output]
    start_server()
    process = FORKS.Process(target=_be, args=(argv, str(cwd), environment(**changes), files))
    process.start()
    return process


def run(script: Path, *words: object, cwd: Path, **changes):
    """Do what run_fresh does, in a fork of the server."""
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, name) for name in ("stdout", "stderr")]
        process = start(script, *words, cwd=cwd, output=output, **changes)
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired([str(script), *map(str, words)], TIMEOUT)
        found = [path.read_text(encoding="utf-8") for path in output]
    return subprocess.CompletedProcess([str(script), *words], process.exitcode, *found)


def _be(argv: list[str], cwd: str, variables: dict[str, str], output: list[str]) -> None:
    """Become `python argv` started in a folder with these variables."""
    for number, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [str(Path(argv[0]).parent), *installed]
    for name in list(sys.modules):
        if name.partition(".")[0] in {
            *("kit", "custom_check", "benchmark_step", "skills"),
            "huggingface_hub",  # reads its environment once
        }:
            del sys.modules[name]
    sys.argv[:] = argv
    sys.dont_write_bytecode = False
    sys.modules["torch"].set_num_threads(int(variables["OMP_NUM_THREADS"]))
    runpy.run_path(argv[0], run_name="__main__")
