"""The pinned Tritons of triton_versions.lock, installed side by side in the tests' cache folder."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).with_name("triton_versions.lock")
PIP_SECONDS = 900


class NotInstallableError(Exception):
    """A version cannot be had here; the text says why."""


def versions() -> list[str]:
    """Return the pinned versions."""
    return re.findall(r"^triton==(\S+)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)


def cache_folder() -> Path:
    """Return the folder of everything that tests install or compile."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "curry-train-tests"


def install(version: str) -> Path:
    """Return the folder of a version, for PYTHONPATH; the first call installs it.

    A folder counts only with its `.complete` file. A lock file keeps two installers apart.
    """
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_folder() / f"triton-{version}-{python}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / ".complete").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        command += ["--target", str(folder), f"triton=={version}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotInstallableError(f"pip took over {PIP_SECONDS} s for {version}") from None
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            words = done.stderr.strip().splitlines() or ["no output"]
            raise NotInstallableError(f"pip cannot install triton=={version}: {words[-1]}")
        (folder / ".complete").touch()
    return folder
