"""Start a skill's script as a user would: another process, a folder of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
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


def run(script: Path, *words: object, cwd: Path, python: object = sys.executable, **changes):
    """Run a script to its end and return the finished process with text output."""
    return subprocess.run(
        [str(python), str(script), *map(str, words)],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
