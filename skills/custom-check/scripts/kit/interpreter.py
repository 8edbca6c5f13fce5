"""Which python runs a check: this one, or another that has what this one lacks.

The scripts are started by whatever `python3` is first in PATH. When it lacks torch they replace
themselves, once, by the project's .venv, the active venv or the active conda environment.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import UsageError

MARK = "CURRY_KIT_REEXECUTED"
PROBE = (
    "import sys, importlib.util as u; sys.path.pop(0); "
    "s = [u.find_spec(m) for m in sys.argv[1:]]; sys.exit(not all(x and x.origin for x in s))"
)


def missing_modules(modules: Sequence[str]) -> list[str]:
    """List the modules that this interpreter cannot import (namespace folders do not count)."""
    specs = {name: importlib.util.find_spec(name) for name in modules}
    return [name for name, spec in specs.items() if spec is None or spec.origin is None]


def has_modules(python: Path, modules: Sequence[str]) -> bool:
    """Ask another interpreter whether it finds the modules; a broken one has none."""
    try:
        probe = subprocess.run(
            [str(python), "-c", PROBE, *modules], capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def candidates(folders: Sequence[Path]) -> list[Path]:
    """List the environments' interpreters: .venv of each folder, then the active venv and conda."""
    roots = [folder / ".venv" for folder in folders]
    roots += [
        Path(os.environ[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)
    ]
    pythons = [Path(os.path.abspath(root / "bin" / "python")) for root in roots]
    return [python for python in dict.fromkeys(pythons) if os.access(python, os.X_OK)]


def ensure_modules(
    modules: Sequence[str], *, folders: Sequence[Path], python: str | None = None
) -> None:
    """Return when this interpreter has the modules, else replace the process by one that has.

    Args are as the flags: `python` is --python and is then the only candidate.
    """
    reached_by_us = os.environ.pop(MARK, None) is not None
    here = Path(os.path.abspath(sys.executable))
    missing = missing_modules(modules)
    if python is not None and not reached_by_us:
        wanted = _named(python)
        if wanted != here:
            if not has_modules(wanted, modules):
                raise UsageError(
                    f"--python {python} lacks one of {', '.join(modules)}",
                    "it must be able to import them",
                    "set --python to the python of the environment that trains the model",
                )
            _replace(wanted)
    if not missing:
        return
    tried = [here]
    if not reached_by_us and python is None:
        for candidate in candidates(folders):
            if candidate == here:
                continue
            tried.append(candidate)
            if has_modules(candidate, modules):
                _replace(candidate)
    raise UsageError(
        f"no python with {', '.join(missing)} (tried {', '.join(map(str, tried))})",
        "a project needs its .venv (the start-project skill's init.py DIR --install makes it), "
        "other code an active environment",
        "set --python PY, or activate the environment",
    )


def _named(python: str) -> Path:
    found = shutil.which(python)
    if found is None:
        raise UsageError(f"--python {python} is no executable", fix="set --python to a python")
    return Path(os.path.abspath(found))


def _replace(python: Path) -> None:
    print(f"python: going on with {python}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.environ[MARK] = "1"
    os.execv(str(python), [str(python), *sys.argv])
