"""Where a run came from: the state of the code, the packages, the machine. Imports no torch."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

DIFF_LIMIT = 1_000_000
"""Bytes of code.diff; what is longer is cut, with a last line that says so."""
UNTRACKED_LIMIT = 50
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false")
_TIMEOUT = 20.0


def git_state(project: Path) -> dict[str, Any]:
    """Return git_sha, git_dirty and git_untracked; all None outside a repository.

    Untracked files count as dirty: a diff does not show them, so the first ones are named.
    """
    status = _git(project, "status", "--porcelain", "--untracked-files=all", "--", ".")
    if status is None:
        return {"git_sha": None, "git_dirty": None, "git_untracked": None}
    sha = _git(project, "rev-parse", "--verify", "HEAD")
    untracked = [line[3:] for line in status.splitlines() if line.startswith("??")]
    return {
        "git_sha": sha.strip() if sha else None,
        "git_dirty": bool(status.strip()),
        "git_untracked": untracked[:UNTRACKED_LIMIT],
    }


def code_diff(project: Path) -> str | None:
    """Return what differs from the last commit in the project's folder; None outside git."""
    if _git(project, "rev-parse", "--git-dir") is None:
        return None
    base = "HEAD" if _git(project, "rev-parse", "--verify", "HEAD") else "--cached"
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--relative")
    diff = _git(project, "diff", *options, base, "--", ".", limit=DIFF_LIMIT + 1)
    if diff is not None and len(diff) > DIFF_LIMIT:
        return diff[:DIFF_LIMIT] + f"\n# cut after {DIFF_LIMIT} characters\n"
    return diff


def packages() -> str:
    """List interpreter, platform and every installed package with its version, one a line."""
    installed = set()
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            installed.add(f"{name}=={distribution.version}")
    head = [f"# python {platform.python_version()}", f"# platform {platform.platform()}"]
    return "\n".join([*head, *sorted(installed, key=str.lower)]) + "\n"


def _git(project: Path, *arguments: str, limit: int = -1) -> str | None:
    """Return git's answer, at most `limit` bytes of it; None when git is absent or fails."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        process = subprocess.Popen(
            [*_GIT, "-C", str(project), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError:
        return None
    with process:
        assert process.stdout is not None
        answer = process.stdout.read(limit)
        cut = 0 <= limit <= len(answer)
        if cut:
            process.kill()
        try:
            failed = process.wait(_TIMEOUT) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    return None if failed and not cut else answer.decode(errors="replace")
