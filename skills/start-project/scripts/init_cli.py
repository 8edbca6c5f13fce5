"""The command line of init: what can be asked for, in which order it happens, what is told."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from init_copy import copied
from init_files import VENV, InitError
from init_gpu import CPU_INDEX
from init_process import Stopped, environment, raise_on_signals
from init_session import Session, open_session, trainer
from init_train import fabric_script, gpu_lines, next_lines, summary, train
from init_transaction import FolderLock

DESCRIPTION = """\
Copy the training system into DIR, make its environment DIR/.venv, and with --train train a small
language model there. Exit codes: 0 done, 1 the training failed, 2 refused or not finished (one
line says why)."""

OPTIONS = {
    "name": "the project's name, for pyproject.toml and the stamp",
    "python": "the Python to make the environment with; after --no-install the one to train with",
    "pip-args": f"further arguments of pip install as one word, for example '{CPU_INDEX}'",
}
FLAGS = {
    "train": "train the quickstart and tell the result",
    "no-install": "make no environment",
    "install": "copy nothing; make or finish the environment",
    "force": "move what is in the way to .curry-train.bak; with --upgrade, allow an older bundle",
    "upgrade": "bring a project to this bundle's version; what you changed stays, and the new "
    "version lies beside as FILE.new",
    "json": "print one JSON object on stdout and all text on stderr",
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("init.py", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("dir", metavar="DIR", help="the project's folder; made where there is none")
    for name, text in OPTIONS.items():
        metavar = {"name": "NAME", "python": "PY", "pip-args": "'...'"}[name]
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    for name, text in FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    args = parser.parse_args(_joined(argv))
    if args.install and args.no_install:
        parser.error("--install and --no-install exclude each other; drop one")
    if args.install and not args.upgrade and args.name is not None:
        parser.error("--name goes with copying and --install copies nothing; drop one")
    return args


def _joined(argv: list[str]) -> list[str]:
    """Let `--pip-args '--no-index'` pass: argparse takes the value for a flag of its own."""
    if "--pip-args" in argv[:-1]:
        at = argv.index("--pip-args")
        return [*argv[:at], f"--pip-args={argv[at + 1]}", *_joined(argv[at + 2 :])]
    return argv


def main(argv: list[str]) -> int:
    args = parse(argv)
    stream = sys.stderr if args.json else sys.stdout
    for one in (sys.stdout, sys.stderr):
        if isinstance(one, io.TextIOWrapper):
            one.reconfigure(errors="backslashreplace")  # a C locale must not end the run
    raise_on_signals()
    try:
        return run(args, lambda text: print(text, file=stream, flush=True))
    except InitError as error:
        print(f"init.py: {error}", file=sys.stderr)
    except OSError as error:
        print(f"init.py: {_plain(error, args.dir)}", file=sys.stderr)
    except Stopped as stop:
        print(f"init.py: stopped by {stop}; the same command goes on", file=sys.stderr)
        return stop.code
    return 2


def _plain(error: OSError, folder: str) -> str:
    where = error.filename or folder
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{where}: no write permission ({error.strerror}); choose another folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}: the disk is full; free some space or choose another folder"
    return f"{where}: {error.strerror or error}"


def run(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    session = open_session(args, say)
    with copied(session) as lock:
        make_repository(session.project, say)
        code = finished(session, lock)
    if code == 0 and args.train:
        code = trained(session)
    elif code == 0:
        venv = session.project / VENV
        complete = session.environment().record()
        steps = next_lines(session.project, venv / "bin") if complete else [unmade(session)]
        for line in steps:
            say(line)
    if args.json:
        print(json.dumps(report(session)))
    return code


def unmade(session: Session) -> str:
    return f"no environment made; to make it: {session.call('--install')}"


def make_repository(project: Path, say: Callable[[str], None]) -> None:
    """Put the project under git, unless it lies in a repository or there is no git."""
    git = shutil.which("git")
    if not git or any(os.path.lexists(one / ".git") for one in (project, *project.parents)):
        return
    clean = {key: value for key, value in environment().items() if not key.startswith("GIT_")}
    done = subprocess.run(
        [git, "init", "--quiet"], cwd=project, env=clean, capture_output=True, text=True
    )
    text = (done.stderr.strip().splitlines() or [""])[-1]
    say("git: new repository" if done.returncode == 0 else f"git: no repository made: {text}")


def finished(session: Session, lock: FolderLock) -> int:
    """Make or finish the environment. When that fails the project stays, and the code is 2."""
    try:
        install(session, lock)
    except (InitError, Stopped, OSError) as error:
        again = session.call("--install", *(["--train"] if session.args.train else []))
        session.say(f"the files of {session.project} are complete, its environment is not; go on:")
        session.say(f"  {again}")
        if isinstance(error, Stopped):
            raise
        text = _plain(error, str(session.project)) if isinstance(error, OSError) else error
        print(f"init.py: {text}", file=sys.stderr)
        return 2
    return 0


def install(session: Session, lock: FolderLock) -> None:
    args, venv, say = session.args, session.environment(), session.say
    if args.no_install or not (session.makes_environment or venv.made()):
        return
    if venv.complete():
        say(f"environment: {venv.folder} is complete, nothing to install")
        return
    say(f"environment: {venv.folder}, Python {session.python.text}")
    began = time.monotonic()
    venv.install(session.python, session.pip_args, say=say, to_stderr=args.json, lock_fd=lock.fd)
    say(f"environment: complete after {time.monotonic() - began:.0f} s")


def trained(session: Session) -> int:
    """Train the quickstart and tell what came of it."""
    say, to_stderr = session.say, session.args.json
    python, scripts = trainer(session)
    fabric = fabric_script(scripts)
    result, code, signum = train(session.project, python, fabric, say=say, to_stderr=to_stderr)
    session.result = result
    for line in summary(result, session.project, scripts, gpu_lines(python)):
        say(line)
    if signum is not None:
        print(f"init.py: training stopped by {signal.Signals(signum).name}", file=sys.stderr)
        return 128 + signum
    if code or result.run is None or result.status in ("aborted", "crashed"):
        status = f", status {result.status}" if result.status else ""
        print(f"init.py: training failed with code {code}{status}", file=sys.stderr)
        return 1
    return 0


def report(session: Session) -> dict:
    """Return what --json prints. `files`: how many files this call wrote, the stamp not counted."""
    venv, result = session.environment(), session.result
    return {
        "project": str(session.project),
        "version": session.version,
        "action": session.action,
        "files": session.files,
        "venv": str(venv.folder) if venv.record() else None,
        "run": str(result.run) if result.run else None,
        "loss_first": result.loss_first,
        "loss_last": result.loss_last,
        "val_loss": result.val_loss,
        "val_bpb": result.val_bpb,
        "tokens_per_s": result.tokens_per_s,
    }
