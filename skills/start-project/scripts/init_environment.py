"""The project's environment: which Python makes it, what goes in, whether it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from init_files import VENV, File, InitError
from init_process import Stopped, environment, run_child
from init_transaction import write_file

MARKER = "made-by-curry-train"
COMPLETE = ".complete"
LOCK = "requirements.lock"
OLDEST, NEWEST = (3, 11), (3, 13)

PROBE = """
import json, sys
found = {"version": list(sys.version_info[:3]), "executable": sys.executable}
if sys.version_info >= (3, 11):
    import importlib.util, sysconfig
    found["scripts"] = sysconfig.get_path("scripts")
    wanted = ["venv", "ensurepip", "torch", "lightning_fabric"]
    found["missing"] = [name for name in wanted if importlib.util.find_spec(name) is None]
sys.stdout.write(json.dumps(found))
"""

OFFLINE = re.compile(
    r"Max retries exceeded|after connection broken by|Could not fetch URL|Read timed out|"
    r"Temporary failure in name resolution|ProxyError|IncompleteRead|ProtocolError"
)
FULL = re.compile(r"No space left on device|Disk quota exceeded")


@dataclass(frozen=True)
class Python:
    """An interpreter and what it has."""

    executable: str
    version: tuple[int, ...]
    scripts: Path
    missing: tuple[str, ...]

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


def probe(given: str | None) -> Python:
    """Ask an interpreter (this one by default) what it is; refuse one that is too old."""
    command = sys.executable if given is None else os.path.expanduser(given)
    if given is not None and not shutil.which(command):
        raise InitError(
            f"--python: found no program {given!r}; give a path or a name on PATH, "
            "for example --python python3.12"
        )
    try:
        done = subprocess.run(
            [command, "-c", PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
        )
        found = json.loads(done.stdout)
        version = tuple(found["version"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
        raise InitError(
            f"--python: {command} does not run as Python; give a Python 3.11 to 3.13"
        ) from None
    if version < OLDEST:
        text = ".".join(map(str, version))
        raise InitError(f"--python: {command} is Python {text}; 3.11, 3.12 or 3.13 is needed")
    return Python(found["executable"], version, Path(found["scripts"]), tuple(found["missing"]))


def check_venv_modules(python: Python) -> None:
    """Refuse an interpreter that cannot make environments, naming the package that can."""
    missing = [name for name in ("venv", "ensurepip") if name in python.missing]
    if not missing:
        return
    package = f"python{python.version[0]}.{python.version[1]}-venv"
    raise InitError(
        f"{python.executable} has no {' and no '.join(missing)} module; install the system package "
        f"that has it (Debian and Ubuntu: apt install {package}), choose another Python with "
        "--python, or use --no-install"
    )


def split_pip_args(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InitError(f"--pip-args: found {text!r}: {error}; quote it as a shell would") from None


def extra_requirements(project: Path) -> list[str]:
    """Return what the extra `gpu` of the project's pyproject.toml names."""
    try:
        with open(project / "pyproject.toml", "rb") as stream:
            extras = tomllib.load(stream)["project"]["optional-dependencies"]
        return [str(requirement) for requirement in extras.get("gpu", [])]
    except (FileNotFoundError, KeyError):
        return []
    except (tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
        raise InitError(f"{project}/pyproject.toml: cannot be read: {error}; repair it") from None


class Environment:
    """The `.venv` of a project."""

    def __init__(self, project: Path, *, gpu: bool):
        self.project = project
        self.folder = project / VENV
        self.python = self.folder / "bin" / "python"
        self.gpu = gpu

    def wanted(self) -> dict:
        """Return what decides whether an environment is the right one."""
        try:
            lock = (self.project / LOCK).read_bytes()
        except FileNotFoundError:
            raise InitError(
                f"{self.project / LOCK}: is missing; restore it, it says what to install"
            ) from None
        return {
            "folder": str(self.folder),
            "lock": hashlib.sha256(lock).hexdigest(),
            "extras": extra_requirements(self.project) if self.gpu else [],
        }

    def record(self) -> dict:
        """Return what was written at the end of the install; empty for none that still runs."""
        try:
            found = json.loads((self.folder / COMPLETE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and self.python.exists() else {}

    def foreign(self) -> bool:
        """Return whether a .venv lies here that init did not make."""
        if self.folder.is_symlink() or not self.folder.is_dir():
            return os.path.lexists(self.folder)
        return not (self.folder / MARKER).exists() and any(self.folder.iterdir())

    def made(self) -> bool:
        return not self.foreign() and self.folder.is_dir()

    def complete(self) -> bool:
        """Return whether every package of the lock is in, at this very place."""
        if self.foreign():
            return False
        found, wanted = self.record(), self.wanted()
        same = all(found.get(key) == wanted[key] for key in ("folder", "lock"))
        return same and set(wanted["extras"]) <= set(found.get("extras", []))

    def install(
        self,
        python: Python,
        pip_args: list[str],
        *,
        say: Callable[[str], None],
        to_stderr: bool,
        lock_fd: int,
    ) -> None:
        """Make the environment, or bring it to the lock; the marker `.complete` ends it."""
        wanted = self.wanted()
        runs = {"cwd": self.project, "to_stderr": to_stderr, "keep_open": [lock_fd]}
        if self.record().get("folder") == wanted["folder"]:
            (self.folder / COMPLETE).unlink()  # same place, other lock: pip changes what differs
        else:
            self._clear()
            command = [python.executable, "-m", "venv", self.folder]
            self._run(command, "making the environment", env=environment(), **runs)
        pip_log = self.folder / "pip.log"
        pip_log.unlink(missing_ok=True)
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--no-input", "--log", pip_log, "-r", LOCK, *wanted["extras"], *pip_args]
        quiet = not (sys.stderr if to_stderr else sys.stdout).isatty()
        if quiet:
            command[5:5] = ["--quiet", "--progress-bar", "off"]
        self._run(
            command,
            "pip install",
            env=environment(VIRTUAL_ENV=str(self.folder)),
            beat=(lambda seconds: say(f"  pip install: {seconds} s")) if quiet else None,
            **runs,
        )
        done = self.folder / f"{COMPLETE}.tmp"
        done.unlink(missing_ok=True)
        write_file(done, File(json.dumps({**wanted, "python": python.text}, indent=1).encode()))
        os.replace(done, self.folder / COMPLETE)

    def _clear(self) -> None:
        """Empty the folder, the marker last, so that a killed run can tell it as its own."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / MARKER).touch()
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARKER:
                path.unlink()
        (self.folder / ".gitignore").write_text("*\n")

    def _run(self, command: list, what: str, **options) -> None:
        code, signum = run_child(command, **options)
        if signum is not None:
            raise Stopped(signum)
        if code:
            raise InitError(f"{what} failed with code {code}: {self._reason()}")

    def _reason(self) -> str:
        log = self.folder / "pip.log"
        text = log.read_text(errors="replace")[-200_000:] if log.is_file() else ""
        if FULL.search(text):
            return "the disk is full; free some space (TMPDIR moves pip's temporary files)"
        if OFFLINE.search(text):
            return (
                "pip could not reach its package index; check the network or the proxy, name "
                "another index with --pip-args '--index-url URL', or use --no-install with an "
                "environment of your own"
            )
        return f"see the lines above and {log}" if text else "see the lines above"
