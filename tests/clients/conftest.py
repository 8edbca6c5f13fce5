"""Real clients in a scratch HOME, given a clean copy of the tracked files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bundle.tree import ROOT, export
from clients.install import InstallError, install_clients

OFFLINE = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}
ENTRIES = {"claude": "cli-wrapper.cjs", "codex": "bin/codex.js", "pyright": "index.js"}


class Client:
    """One command-line program of node_modules, with a home folder of its own."""

    def __init__(self, package: Path, home: Path) -> None:
        entry = package / ENTRIES[package.name.split("-")[0]]
        self.command = [shutil.which("node") or "node", str(entry)]
        self.home = home
        home.mkdir(parents=True)
        self.env = {"PATH": os.environ["PATH"], "HOME": str(home), **OFFLINE}

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *arguments],
            cwd=cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def ok(self, *arguments: str, cwd: Path) -> str:
        """Run, demand exit code 0, return what was printed."""
        done = self.run(*arguments, cwd=cwd)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def node_modules() -> Path:
    try:
        return install_clients()
    except InstallError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tracked files in a path with a space."""
    return export(ROOT, tmp_path_factory.mktemp("clean export") / "curry-train")


@pytest.fixture
def client(node_modules: Path, tmp_path: Path):
    """Return a function that starts a client by its name in package.json."""

    def start(name: str) -> Client:
        return Client(node_modules / name, tmp_path / "home")

    return start


@pytest.fixture(scope="session")
def skills_ref() -> Path:
    return Path(sys.executable).parent / "agentskills"
