"""Files change all together or not at all, also when the process is killed.

A new project is written into a temporary sibling and appears by one rename.

In a folder that exists, the new files are first staged in `.curry-train.partial/new`. Writing
`.curry-train.partial/plan.json` is the moment of decision: a run killed before it has changed
nothing; one killed after it is carried to its end by the next init of whatever kind, which finds
the plan. Each step of the plan can be repeated, and none overwrites what a user wrote: whatever
is found that the plan did not expect goes to `.curry-train.bak/<stamp>/`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from init_files import BACKUP, PARTIAL, File, InitError, blocked_by, checked_path, digest

STAGING = ".curry-train.init-"
NOTE = "init was interrupted here; any init.py call on this folder finishes it"


@dataclass(frozen=True)
class Step:
    """One path of a plan.

    With `after`, the staged file of that sum is put there; what lies there is replaced when it
    has the sum `before`, else moved to the backup. Without, what has the digest `before` is moved
    to the backup.
    """

    path: str
    before: str | None
    after: str | None


class FolderLock:
    """Held by the one init that works on a folder; the kernel lets go of it when that one dies.

    Child processes inherit it, so that a pip that outlived its init still keeps others out.
    """

    def __init__(self, folder: Path):
        self.fd = os.open(folder, os.O_RDONLY)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def take(self, *, wait: bool) -> bool | None:
        """Return whether the lock is ours now; None where the file system knows no locks."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True


def lock_folder(folder: Path, say: Callable[[str], None]) -> FolderLock:
    lock = FolderLock(folder)
    if lock.take(wait=False) is False:
        say(f"another init works in {folder}; waiting for it")
        lock.take(wait=True)
    return lock


def write_file(path: Path, file: File) -> None:
    """Write a file that its user may change, durably, with the exec bits of the template."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = os.open(path, flags, 0o777 if file.executable else 0o666)
    with open(fd, "wb") as stream:
        os.fchmod(fd, os.fstat(fd).st_mode | 0o600)
        stream.write(file.data)
        stream.flush()
        os.fsync(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        pass  # some file systems cannot; the rename itself is atomic all the same
    finally:
        os.close(fd)


def appear(project: Path, files: dict[str, File]) -> FolderLock | None:
    """Make the project folder with all its files by one rename; return its lock.

    Returns None when another process made the folder meanwhile.
    """
    project.parent.mkdir(parents=True, exist_ok=True)
    _sweep(project.parent)
    staging, lock = _staging_folder(project.parent)
    try:
        if project.is_dir():
            os.chmod(staging, project.stat().st_mode & 0o7777)
        for path, file in files.items():
            write_file(staging / path, file)
        os.rename(staging, project)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock.fd)
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return None
        raise
    _sync_folder(project.parent)
    return lock


def _staging_folder(parent: Path) -> tuple[Path, FolderLock]:
    while True:
        staging = parent / f"{STAGING}{secrets.token_hex(4)}"
        staging.mkdir()
        try:
            lock = FolderLock(staging)
        except FileNotFoundError:
            continue
        lock.take(wait=True)
        # Between mkdir and the lock a sweep of another init may have taken it for litter.
        if staging.exists():
            return staging, lock
        os.close(lock.fd)


def _sweep(parent: Path) -> None:
    """Remove what killed runs left beside: staging folders that no process holds."""
    for staging in parent.glob(f"{STAGING}*"):
        try:
            with FolderLock(staging) as lock:
                if lock.take(wait=False):
                    shutil.rmtree(staging, ignore_errors=True)
        except OSError:
            continue


def backup_folder() -> str:
    """Return a fresh folder for what is moved away, relative to the project."""
    return f"{BACKUP}/{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def apply(project: Path, steps: Iterable[Step], files: dict[str, File], backup: str) -> None:
    """Carry out the steps as one change. The caller holds the lock and has called recover."""
    steps = list(steps)
    if not steps:
        return
    _refuse_what_cannot_end(project, steps, backup)
    partial = project / PARTIAL
    try:
        partial.mkdir()
        for step in steps:
            if step.after is not None:
                write_file(partial / "new" / step.path, files[step.path])
        plan = {"note": NOTE, "backup": backup, "steps": [asdict(step) for step in steps]}
        write_file(partial / "plan.tmp", File(json.dumps(plan, indent=1).encode()))
        os.replace(partial / "plan.tmp", partial / "plan.json")
        _sync_folder(partial)
    except BaseException:
        if not (partial / "plan.json").exists():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    _carry_out(project)


def _refuse_what_cannot_end(project: Path, steps: list[Step], backup: str) -> None:
    """Refuse, before anything is decided, a change that no later call could finish either."""
    blocked = blocked_by(project, f"{backup}/file")
    if blocked:
        raise InitError(
            f"{project / blocked[0]}: is no folder, and what init moves away goes there; "
            "nothing was changed; give it another name and run init again"
        )
    disk = project.stat().st_dev
    for step in steps:
        parent = next(one for one in (project / step.path).parents if one.exists())
        if parent.stat().st_dev != disk:
            raise InitError(
                f"{parent}: lies on another disk than {project} (for {step.path}); files change "
                "by renaming, on one disk; nothing was changed; choose another folder"
            )


def recover(project: Path) -> bool:
    """Bring a change that was cut off to its end, or clear one that had not been decided.

    Returns whether files were brought to their end.
    """
    partial = project / PARTIAL
    if not partial.is_dir() or partial.is_symlink():
        return False
    if (partial / "plan.json").exists():
        _carry_out(project)
        return True
    shutil.rmtree(partial)
    return False


def _carry_out(project: Path) -> None:
    partial = project / PARTIAL
    try:
        plan = json.loads((partial / "plan.json").read_text(encoding="utf-8"))
        backup = project / checked_path(plan["backup"], partial)
        steps = [Step(step["path"], step["before"], step["after"]) for step in plan["steps"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InitError(
            f"{partial}/plan.json: cannot be read ({type(error).__name__}); "
            "nothing was done; move the folder away and run init again"
        ) from None
    for step in steps:
        checked_path(step.path, partial)
        target = project / step.path
        found = digest(target)
        if step.after is None:
            if found is not None and found == step.before:
                _move_away(project, step.path, backup)
            continue
        staged = partial / "new" / step.path
        if not staged.exists():
            continue  # put in its place before the run was cut off
        if found is not None and found not in (step.before, step.after):
            _move_away(project, step.path, backup)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged, target)
    shutil.rmtree(partial)


def _move_away(project: Path, path: str, backup: Path) -> None:
    kept = backup / path
    while os.path.lexists(kept):
        kept = kept.with_name(kept.name + ".again")
    kept.parent.mkdir(parents=True, exist_ok=True)
    os.rename(project / path, kept)
    for parent in PurePosixPath(path).parents[:-1]:
        try:
            os.rmdir(project / parent)
        except OSError:
            break  # not empty
