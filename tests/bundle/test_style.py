"""Ruff accepts and would not reformat the Python files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bundle.tree import ROOT, files

RUFF = Path(sys.executable).parent / "ruff"


def ruff(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RUFF, *arguments, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("check", [("check", "--quiet"), ("format", "--check")], ids=" ".join)
def test_ruff_finds_nothing(check):
    paths = [str(path) for path in files(ROOT) if path.suffix == ".py"]
    assert len(paths) > 50
    done = ruff(*check, *paths)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_settings_are_those_of_the_repository(tmp_path):
    """A line of 101 characters and an unused import are found with the root's settings."""
    bad = tmp_path / "bad.py"
    bad.write_text("import os\n" + "# " + "word " * 20 + "\n")
    done = ruff("check", "--config", str(ROOT / "pyproject.toml"), str(bad))
    assert "E501" in done.stdout
    assert "F401" in done.stdout
