"""One call of init: what was asked for, where, and what is refused before anything is written."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from init_environment import (
    NEWEST,
    Environment,
    Python,
    check_venv_modules,
    probe,
    split_pip_args,
)
from init_files import PARTIAL, STAMP, InitError, bundle_version, check_name, read_stamp
from init_gpu import Nvidia, find_nvidia, torch_build
from init_train import Result, fabric_script

BUNDLE = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).resolve().with_name("init.py")


@dataclass
class Session:
    """What was asked for, and what came of it so far."""

    args: argparse.Namespace
    project: Path
    version: str
    pip_args: list[str]
    python: Python
    say: Callable[[str], None]
    nvidia: Nvidia | None = None
    action: str = "create"
    files: int = 0
    result: Result = field(default_factory=lambda: Result(None))

    @property
    def makes_environment(self) -> bool:
        """Whether one is made where there is none; an upgrade alone only brings one up to date."""
        args = self.args
        return not args.no_install and (args.install or args.train or not args.upgrade)

    def environment(self) -> Environment:
        return Environment(self.project, gpu=torch_build(self.nvidia, self.pip_args) == "cuda")

    def call(self, *flags: str, pip_args: list[str] | None = None) -> str:
        """Return the line that calls init on this project with these flags."""
        chosen = self.pip_args if pip_args is None else pip_args
        found = shutil.which("python3")  # it may be another Python, and too old
        same = found is not None and os.path.samefile(found, sys.executable)
        words = ["python3" if same else sys.executable, str(SCRIPT), str(self.project), *flags]
        words += ["--python", self.args.python] if self.args.python else []
        words += ["--pip-args", shlex.join(chosen)] if chosen else []
        return shlex.join(words)

    def flags(self) -> list[str]:
        """Return the flags of this call that `call` does not add by itself."""
        wanted = ("train", "install", "force", "upgrade", "json")
        flags = [f"--{name}" for name in wanted if getattr(self.args, name)]
        return [*flags, *(["--name", self.args.name] if self.args.name is not None else [])]


def open_session(args: argparse.Namespace, say: Callable[[str], None]) -> Session:
    """Refuse what cannot work before anything is written."""
    project = place(args.dir)
    if args.name is not None:
        check_name(args.name)
    version = bundle_version(BUNDLE)
    session = Session(
        args, project, version, split_pip_args(args.pip_args or ""), probe(args.python), say
    )
    cut_off = (project / PARTIAL / "plan.json").exists()  # the stamp comes when it is finished
    if (args.install or args.upgrade) and not cut_off and read_stamp(project) is None:
        raise InitError(f"{project}: holds no {STAMP}; copy the files first: {session.call()}")
    if not args.no_install:
        check_venv_modules(session.python)
        check_same_python(session)
        if session.python.version[:2] > NEWEST:
            say(f"Python {session.python.text} is newer than the newest tested one, 3.{NEWEST[1]}")
        session.nvidia = find_nvidia()
    elif args.train:
        trainer(session)
    return session


def check_same_python(session: Session) -> None:
    """Refuse to bring an environment to its lock with another Python than its own."""
    venv, text = session.environment(), session.python.text
    found = venv.record().get("python", text)
    if session.args.python and found != text:
        raise InitError(
            f"{venv.folder} has Python {found}, --python is {text}; remove that folder first, "
            "or drop --python"
        )


def place(text: str) -> Path:
    """Return the absolute folder that DIR means; refuse places where no project can be."""
    if not text.strip():
        raise InitError("DIR: found an empty name; give a folder, for example ../demo")
    project = Path(os.path.realpath(os.path.expanduser(text)))
    for folder in (project, *project.parents):
        if (folder / "template" / "MANIFEST").is_file() and (folder / ".claude-plugin").is_dir():
            raise InitError(f"DIR: {project} lies in the bundle {folder}; choose a folder outside")
    bad = [char for char in str(project) if char == os.pathsep or char < " " or char == "\x7f"]
    if bad:
        raise InitError(
            f"DIR: {str(project)!r} holds {bad[0]!r}, which environments of Python cannot have in "
            "their path; choose another folder"
        )
    existing = next(one for one in (project, *project.parents) if os.path.lexists(one))
    if not existing.is_dir():
        raise InitError(f"DIR: {existing} is a file; give the path of a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InitError(f"DIR: no write permission in {existing}; choose another folder")
    return project


def trainer(session: Session) -> tuple[Path, Path]:
    """Return the interpreter and the scripts folder of the environment that trains."""
    venv = session.environment()
    if not session.args.no_install or (session.args.python is None and venv.record()):
        return venv.python, venv.python.parent
    python = session.python
    missing = [name for name in ("torch", "lightning_fabric") if name in python.missing]
    if missing:
        raise InitError(
            f"{python.executable} has no {' and no '.join(missing)}; --train needs the packages of "
            "requirements.lock; drop --no-install, or name an environment with --python"
        )
    fabric_script(python.scripts)
    return Path(python.executable), python.scripts
