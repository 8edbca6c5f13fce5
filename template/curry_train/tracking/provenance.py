"""Where a run came from: the state of the code and the packages. Imports no torch."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

DIFF_LIMIT = 1_000_000
"""Bytes of code.diff; what is longer is cut, with a last line that says so."""
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
        "git_untracked": untracked[:50],
    }


def code_diff(project: Path) -> str | None:
    """Return what differs from the last commit in the project's folder; None outside git."""
    base = "HEAD" if _git(project, "rev-parse", "--verify", "HEAD") else "--cached"
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--relative")
    diff = _git(project, "diff", *options, base, "--", ".")
    if diff is not None and len(diff) > DIFF_LIMIT:
        return diff[:DIFF_LIMIT] + f"\n# cut after {DIFF_LIMIT} characters\n"
    return diff


def packages() -> str:
    """List interpreter, platform and every installed package with its version, one a line."""
    named = {(one.metadata["Name"], one.version) for one in metadata.distributions()}
    installed = sorted((f"{name}=={version}" for name, version in named if name), key=str.lower)
    head = [f"# python {platform.python_version()}", f"# platform {platform.platform()}"]
    return "\n".join([*head, *installed]) + "\n"


def _git(project: Path, *arguments: str) -> str | None:
    """Return git's answer, no more of it than a diff may have; None when git is absent or fails."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    command = [*_GIT, "-C", str(project), *arguments]
    with tempfile.TemporaryFile() as answer:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=_TIMEOUT,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        answer.seek(0)
        return answer.read(4 * DIFF_LIMIT).decode(errors="replace")
