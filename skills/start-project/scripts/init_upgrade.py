"""Three-way update of a project: what the stamp says, what lies there, what the bundle has now."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from init_files import STAMP, File, InitError, Stamp, blocked_by, digest
from init_transaction import Step

MEANINGS = {
    "updated": "untouched by you; now the bundle's version",
    "added": "new in the bundle",
    "renamed": "untouched by you; follows the bundle",
    "removed": "gone from the bundle, untouched by you; moved to the backup",
    "beside": "yours differs from the bundle's new version, which lies beside as FILE.new",
    "kept": "changed by you, not by the bundle",
    "left": "gone from the bundle, changed by you; now yours alone",
    "deleted": "deleted by you; stays deleted",
}
QUIET = "unchanged"


@dataclass
class Upgrade:
    """What an upgrade does: one row a file, the steps, and the files that the steps write."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)

    def put(self, path: str, file: File, before: str | None) -> None:
        self.steps.append(Step(path, before, file.sha256))
        self.files[path] = file

    def changed(self) -> int:
        """Return how many files change, the stamp not counted."""
        return sum(step.path != STAMP for step in self.steps)


def plan_upgrade(project: Path, stamp: Stamp, files: dict[str, File], version: str) -> Upgrade:
    """Compare the three sides of every path; nothing is written."""
    plan = Upgrade()
    moved = _gone_files(project, stamp, files, plan)
    for path, file in files.items():
        base, theirs = stamp.files.get(path), file.sha256
        mine = _found(project, path, plan)
        if mine == theirs:
            status = QUIET
        elif mine is None:
            status = "deleted" if base else "added"
        elif mine == base:
            status = "updated"
        else:
            status = "kept" if base == theirs else "beside"
        if status in ("added", "updated", "beside"):
            _refuse_blocked(project, path, plan)
        if status in ("added", "updated"):
            plan.put(path, file, mine)
        elif status == "beside":
            _put_beside(project, path, file, plan)
        if status == "added" and path in moved:
            plan.rows.append(("renamed", f"{moved[path]} -> {path}"))
        else:
            plan.rows.append((status, path))
    _set_stamp(project, Stamp(version, stamp.name, sums(files)), plan)
    return plan


def sums(files: dict[str, File]) -> dict[str, str]:
    return {path: file.sha256 for path, file in files.items()}


def _gone_files(
    project: Path, stamp: Stamp, files: dict[str, File], plan: Upgrade
) -> dict[str, str]:
    """Plan the paths that the bundle no longer has; return the renames among them, new to old."""
    new_paths = {
        file.sha256: path
        for path, file in files.items()
        if path not in stamp.files and digest(project / path) is None
    }
    moved: dict[str, str] = {}
    for path, base in stamp.files.items():
        mine = digest(project / path)
        if path in files or mine is None:
            continue
        if mine != base or blocked_by(project, path):
            note = f" (the bundle has it as {new_paths[base]})" if base in new_paths else ""
            plan.rows.append(("left", path + note))
            continue
        plan.steps.append(Step(path, base, None))
        if base in new_paths:
            moved[new_paths.pop(base)] = path
        else:
            plan.rows.append(("removed", path))
    return moved


def _put_beside(project: Path, path: str, file: File, plan: Upgrade) -> None:
    beside = f"{path}.new"
    if digest(project / beside) != file.sha256:
        plan.put(beside, file, None)


def _set_stamp(project: Path, stamp: Stamp, plan: Upgrade) -> None:
    file = File(stamp.encode())
    found = digest(project / STAMP)
    if found != file.sha256:
        plan.put(STAMP, file, found)


def _leaving(plan: Upgrade) -> set[str]:
    return {step.path for step in plan.steps if step.after is None}


def _found(project: Path, path: str, plan: Upgrade) -> str | None:
    """Return the digest of a path as it is once the planned removals are done."""
    found = digest(project / path)
    if found != "folder":
        return found
    inside = (one for one in (project / path).rglob("*") if one.is_symlink() or not one.is_dir())
    stays = {one.relative_to(project).as_posix() for one in inside} - _leaving(plan)
    return found if stays else None


def _refuse_blocked(project: Path, path: str, plan: Upgrade) -> None:
    blocked = blocked_by(project, path)
    if blocked and blocked[0] not in _leaving(plan):
        what = blocked[1] if " " in blocked[1] else "file"
        raise InitError(
            f"{project / blocked[0]}: found a {what} where the bundle has a folder (for {path}); "
            "nothing was changed; give it another name and upgrade again"
        )


def table(plan: Upgrade) -> list[str]:
    """Return the lines that tell what happens to every file that is not simply unchanged."""
    counts = Counter(status for status, _ in plan.rows)
    lines = [
        f"  {status:<8s}  {path}"
        for wanted in MEANINGS
        for status, path in sorted(plan.rows)
        if status == wanted
    ]
    lines += [
        f"{counts[status]:4d} {status:<8s}  {meaning}"
        for status, meaning in MEANINGS.items()
        if counts[status]
    ]
    lines.append(f"{counts[QUIET]:4d} {QUIET}")
    return lines
