"""`.ci/run` works in a bare shell: it sets CI, installs or names what is missing, hands on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bundle.tree import ROOT

STUB = """
import os, shutil, sys
print("CI is", os.environ["CI"], "arguments are", sys.argv[1:], flush=True)
os.execvp("npm", ["npm", "--version"]) if sys.argv[1:] == ["npm"] else sys.exit(7)
"""


@pytest.fixture
def bare(tmp_path):
    """Return a function that runs .ci/run with the given programs and no others on PATH."""
    (tmp_path / "clone" / ".ci").mkdir(parents=True)
    (tmp_path / "clone" / "tests").mkdir()
    shutil.copy2(ROOT / ".ci/run", tmp_path / "clone/.ci/run")
    (tmp_path / "clone/tests/run.py").write_text(STUB)
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(*names: str, arguments: tuple[str, ...] = (), home: Path = tmp_path / "home"):
        for name in ("bash", "dirname", "id", "rm", "touch", *names):
            source = sys.executable if name == "python3" else shutil.which(name)
            (programs / name).write_text(f'#!/bin/sh\nexec "{source}" "$@"\n')
            (programs / name).chmod(0o755)
        env = {"PATH": str(programs), "HOME": str(home)}
        env |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        command = [shutil.which("bash"), str(tmp_path / "clone/.ci/run"), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)

    return run


def test_it_is_executable():
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_it_hands_on_arguments_and_the_exit_code(bare):
    done = bare("git", "python3", "npm", "node", arguments=("--suite", "bundle"))
    assert done.returncode == 7, done.stderr
    assert done.stdout == "CI is true arguments are ['--suite', 'bundle']\n"


def test_without_apt_get_the_missing_program_is_named(bare):
    done = bare("python3", "npm", "node")
    assert done.returncode == 1
    assert "git is missing and there is no apt-get" in done.stderr


@pytest.mark.skipif("CURRY_TRAIN_FULL" not in os.environ, reason="downloads Node.js (--full)")
def test_without_npm_it_brings_its_own(bare):
    done = bare("git", "python3", arguments=("npm",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("11.")
