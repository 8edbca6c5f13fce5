"""What the bundle holds and what a project's stamp says about it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

STAMP = ".curry-train.json"
BACKUP = ".curry-train.bak"
PARTIAL = ".curry-train.partial"
VENV = ".venv"
OWN_NAMES = {STAMP, BACKUP, PARTIAL, VENV, ".git"}
"""What init and git make themselves at the top of a project; no template file may lie there."""


class InitError(Exception):
    """One line for the user: what was found, what is allowed, what to set. Exit code 2."""


@dataclass(frozen=True)
class File:
    """One file as it goes into a project."""

    data: bytes
    executable: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Stamp:
    """What a project was made from: bundle version, chosen name, sha256 of each file as copied.

    The sums are those of the files as they were written, after --name was put in: a file whose
    sum still equals the stamp's is one that the user never touched.
    """

    version: str
    name: str | None
    files: dict[str, str]

    def encode(self) -> bytes:
        record = {"version": self.version, "name": self.name, "files": self.files}
        return (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()


def checked_path(path: object, source: Path) -> str:
    """Return a relative path that stays inside its folder; anything else is refused."""
    text = path if isinstance(path, str) else ""
    parts = PurePosixPath(text).parts
    plain = text and "/".join(parts) == text and not text.startswith("/")
    if not plain or ".." in parts or "\\" in text or not text.isprintable():
        raise InitError(
            f"{source}: found the path {path!r}; only paths inside the folder may stand"
        )
    return text


def bundle_version(bundle: Path) -> str:
    """Return the version in the bundle's manifest."""
    manifest = bundle / ".claude-plugin" / "plugin.json"
    try:
        version = json.loads(manifest.read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InitError(
            f"{manifest}: no version could be read ({type(error).__name__}); "
            "the bundle is damaged; install it again"
        ) from None
    return str(version)


def read_template(template: Path, name: str | None = None) -> dict[str, File]:
    """Return the files that MANIFEST lists, with the project's name put in."""
    manifest = template / "MANIFEST"
    try:
        lines = manifest.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InitError(
            f"{manifest}: {error.strerror}; the bundle is damaged; install it again"
        ) from None
    files: dict[str, File] = {}
    for path in filter(None, lines):
        checked_path(path, manifest)
        if path in files or path.split("/")[0] in OWN_NAMES:
            raise InitError(f"{manifest}: {path} is listed twice or belongs to init itself")
        files[path] = _read(template, path)
    if not files:
        raise InitError(f"{manifest}: lists no file; the bundle is damaged; install it again")
    if name is not None:
        files["pyproject.toml"] = _renamed(files, name, manifest)
    return files


def _read(template: Path, path: str) -> File:
    source = template / path
    for part in [source, *source.parents]:
        if part == template:
            break
        if part.is_symlink():
            raise InitError(f"{part}: is a symbolic link; the template holds plain files only")
    try:
        mode = source.stat().st_mode
        if not stat.S_ISREG(mode):
            raise InitError(f"{source}: is no plain file; the template holds plain files only")
        return File(source.read_bytes(), bool(mode & 0o111))
    except OSError as error:
        raise InitError(
            f"{source}: {error.strerror}; the bundle is damaged; install it again"
        ) from None


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise InitError(
            f"--name: found {name!r}; letters, digits, and . _ - between them are allowed"
        )


def _renamed(files: dict[str, File], name: str, manifest: Path) -> File:
    """Put the name into [project] of pyproject.toml, the one place where a project is named."""
    file = files.get("pyproject.toml", File(b""))
    text, count = re.subn(
        rb'^(\[project\]\n(?:(?!\[).*\n)*?name = )"[^"\n]*"',
        lambda match: match[1] + f'"{name}"'.encode(),
        file.data,
        count=1,
        flags=re.MULTILINE,
    )
    if not count:
        raise InitError(f"{manifest.parent}: pyproject.toml has no project name; drop --name")
    return File(text, file.executable)


def read_stamp(project: Path) -> Stamp | None:
    """Return the stamp of a project, or None where there is none."""
    path = project / STAMP
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files = {checked_path(key, path): str(value) for key, value in record["files"].items()}
        name = None if record.get("name") is None else str(record["name"])
        return Stamp(str(record["version"]), name, files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InitError(
            f"{path}: found no readable stamp ({type(error).__name__}); "
            "restore it from git, or move it away and use --force to copy everything anew"
        ) from None


def version_key(version: str) -> tuple[tuple[int, ...], bool]:
    """Order versions: by their numbers, a final release after its pre-releases."""
    release = re.match(r"[\d.]*", version)
    text = release[0] if release else ""
    return tuple(int(part) for part in text.split(".") if part), text == version


def digest(path: Path) -> str | None:
    """Return the sha256 of a plain file, the kind of anything else, None where nothing is."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISREG(mode):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if stat.S_ISDIR(mode):
        return "folder"
    return "symbolic link" if stat.S_ISLNK(mode) else "special file"


def blocked_by(project: Path, path: str) -> tuple[str, str] | None:
    """Return the parent (and what it is) that keeps a file from lying at this path."""
    for parent in reversed(PurePosixPath(path).parents[:-1]):
        found = digest(project / parent)
        if found is None:
            return None
        if found != "folder":
            return str(parent), found
    return None


def differing(project: Path, files: dict[str, File]) -> tuple[list[str], dict[str, str]]:
    """Return the files that are not there as they should be, and what lies in their way."""
    absent: list[str] = []
    in_the_way: dict[str, str] = {}
    for path, file in files.items():
        blocked = blocked_by(project, path)
        found = None if blocked else digest(project / path)
        if found == file.sha256:
            continue
        absent.append(path)
        if blocked:
            in_the_way[blocked[0]] = blocked[1]
        elif found is not None:
            in_the_way[path] = found
    return absent, in_the_way
