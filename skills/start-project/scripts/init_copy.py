"""Bring the bundle's files into a project: a new one, a folder with other things, an older one."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

from init_files import (
    BACKUP,
    STAMP,
    VENV,
    File,
    InitError,
    Stamp,
    differing,
    digest,
    read_stamp,
    read_template,
    version_key,
)
from init_gpu import CPU_INDEX, GB, SIZES, size_lines, torch_build
from init_session import BUNDLE, Session
from init_transaction import (
    FolderLock,
    Step,
    appear,
    apply,
    backup_folder,
    lock_folder,
    recover,
)
from init_upgrade import plan_upgrade, sums, table

BLOCK = 4096
"""Bytes that the smallest file takes on most disks."""


def copied(session: Session) -> FolderLock:
    """Bring the files in, by whichever way was asked for; return the project's lock, held."""
    args, project = session.args, session.project
    if vacant(project):
        files = read_template(BUNDLE / "template", args.name)
        tell_need(session, files)
        stamp = Stamp(session.version, args.name, sums(files))
        lock = appear(project, {**files, STAMP: File(stamp.encode())})
        if lock:
            session.files = len(files)
            session.say(f"made {project}: {len(files)} files of curry-train {session.version}")
            return lock
    lock = lock_folder(project, session.say)
    try:
        if recover(project):
            session.say("brought a change of files that had been cut off to its end")
        stamp = read_stamp(project)
        if args.upgrade and stamp:
            upgrade(session, stamp)
        elif args.install and stamp:
            session.action = "install"
            aside = move_aside(session, foreign_environment(session), stamp)
            apply(project, aside, {}, backup_folder())
            tell_need(session, {})
        else:
            add_files(session, stamp)
    except BaseException:
        os.close(lock.fd)
        raise
    return lock


def vacant(project: Path) -> bool:
    """Return whether the folder can be made, or replaced, by one rename."""
    if not project.exists():
        return True
    # A shell that stands in the folder would be left in the replaced one.
    here = project.samefile(os.getcwd())
    return not here and replaceable(project) and not any(project.iterdir())


def replaceable(folder: Path) -> bool:
    """Return whether another folder may be renamed to this one, which its parent decides."""
    parent = folder.parent.stat()
    may = {0, parent.st_uid, folder.stat().st_uid}
    ours = not parent.st_mode & stat.S_ISVTX or os.geteuid() in may
    return ours and os.access(folder.parent, os.W_OK | os.X_OK) and not folder.is_mount()


def foreign_environment(session: Session) -> dict[str, str]:
    """Return the .venv that stands where this call has to make one."""
    venv = session.environment()
    in_the_way = session.makes_environment and venv.foreign()
    return {VENV: str(digest(venv.folder))} if in_the_way else {}


def move_aside(session: Session, found: dict[str, str], stamp: Stamp | None) -> list[Step]:
    """Return the steps that move what is in the way to the backup; refuse without --force."""
    if found and not session.args.force:
        raise InitError(collision_text(session, found, stamp))
    return [Step(path, kind, None) for path, kind in found.items()]


def collision_text(session: Session, found: dict[str, str], stamp: Stamp | None) -> str:
    lines = [f"{session.project}: {len(found)} in the way, nothing was changed:"]
    for path, kind in sorted(found.items()):
        note = " (not made by init)" if path == VENV else f" ({kind})" if len(kind) < 64 else ""
        lines.append(f"  {path}{note}")
    if stamp:
        lines.append(
            f"this is a project of curry-train {stamp.version} already; --upgrade brings it up to "
            "date, --install finishes its environment, --install --train trains"
        )
    lines.append(f"--force moves these to {BACKUP}/ and copies the bundle's")
    return "\n".join(lines)


def add_files(session: Session, stamp: Stamp | None) -> None:
    """Copy into a folder that holds other things; what is in the way stops it, or moves."""
    args, project = session.args, session.project
    if stamp and stamp.version != session.version and not args.force:
        raise InitError(
            f"{project} is a project of curry-train {stamp.version}, this bundle is "
            f"{session.version}; bring it up to date with --upgrade"
        )
    name = args.name if args.name is not None or stamp is None else stamp.name
    files = read_template(BUNDLE / "template", name)
    absent, in_the_way = differing(project, files)
    in_the_way |= foreign_environment(session)
    steps = move_aside(session, in_the_way, stamp)
    steps += [Step(path, None, files[path].sha256) for path in absent]
    tell_need(session, {path: files[path] for path in absent})
    record = File(Stamp(session.version, name, sums(files)).encode())
    before = digest(project / STAMP)
    if before != record.sha256:
        steps.append(Step(STAMP, before, record.sha256))
    backup = backup_folder()
    apply(project, steps, {**files, STAMP: record}, backup)
    session.action, session.files = "add", len(absent)
    session.say(f"copied {len(absent)} of {len(files)} files into {project}; the rest was there")
    tell_backup(session, backup)


def upgrade(session: Session, stamp: Stamp) -> None:
    """Bring the files to this bundle's version."""
    args, project = session.args, session.project
    if version_key(session.version) < version_key(stamp.version) and not args.force:
        raise InitError(
            f"{project} is of curry-train {stamp.version}, newer than this bundle "
            f"({session.version}); update the bundle, or go back with --force"
        )
    name = args.name if args.name is not None else stamp.name
    files = read_template(BUNDLE / "template", name)
    plan = plan_upgrade(project, replace(stamp, name=name), files, session.version)
    aside = move_aside(session, foreign_environment(session), stamp)
    tell_need(session, plan.files)
    backup = backup_folder()
    apply(project, [*aside, *plan.steps], plan.files, backup)
    session.action, session.files = "upgrade", plan.changed()
    session.say(f"{project}: curry-train {stamp.version} -> {session.version}")
    for line in table(plan):
        session.say(line)
    tell_backup(session, backup)


def tell_backup(session: Session, backup: str) -> None:
    if (session.project / backup).is_dir():
        session.say(f"what was moved away lies in {session.project / backup}")


def tell_need(session: Session, files: dict[str, File]) -> None:
    """Say what will be downloaded and how much disk is needed; refuse when it is not there."""
    blocks = sum(-(-len(file.data) // BLOCK) * BLOCK for file in files.values())
    need, text = blocks, f"the files take {size(blocks)}"
    install = session.makes_environment and not session.environment().record()
    if install:
        pip_args = session.pip_args
        rerun = session.call(*session.flags(), pip_args=[*pip_args, *CPU_INDEX.split()])
        for line in size_lines(session.nvidia, pip_args, rerun):
            session.say(line)
        disk = int(SIZES[torch_build(session.nvidia, pip_args)][1] * GB)
        need, text = blocks + disk, f"{text}, the environment {size(disk)} or more"
    folder = next(one for one in (session.project, *session.project.parents) if one.exists())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise InitError(
            f"needs {size(need)} in {folder} ({text}), {size(free)} are free; free some space or "
            "choose another folder" + ("; --no-install makes no environment" if install else "")
        )


def size(count: int) -> str:
    for unit, name in ((GB, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1000:.0f} kB"
