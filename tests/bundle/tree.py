"""What stands in the bundle: its files, skills, commands and documents.

Every function takes the root, so that the lints run on this repository and on planted trees.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "curry-train"


@functools.cache
def files(root: Path) -> tuple[Path, ...]:
    """Return every file of the tree; in a git repository those that git tracks or would track."""
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        paths = [root / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for path in root.rglob("*") if "__pycache__" not in path.parts]
    return tuple(sorted(path for path in paths if path.is_file() or path.is_symlink()))


def relative(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def export(root: Path, target: Path) -> Path:
    """Copy the files of the tree, as they are now, to a clean folder."""
    for path in files(root):
        copy = target / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy, follow_symlinks=False)
    return target


@dataclass(frozen=True)
class Page:
    """A Markdown file with a frontmatter of one-line values."""

    path: Path
    keys: dict[str, str]
    body: str
    problems: tuple[str, ...]


def read_page(path: Path) -> Page:
    """Read a page; what the strict subset of YAML does not allow is listed in its problems."""
    text = path.read_text(encoding="utf-8")
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return Page(path, {}, text, ("no frontmatter between two lines of ---",))
    keys: dict[str, str] = {}
    problems = []
    for line in match.group(1).splitlines():
        key = re.match(r"([a-z][a-z-]*):(?: (.*))?$", line)
        if key and key.group(1) in keys:
            problems.append(f"frontmatter has {key.group(1)} twice")
        elif key:
            value = (key.group(2) or "").strip()
            quoted = re.fullmatch(r'"[^"\\]*"', value)
            if not quoted and re.search(r"""^[\[{*&!%@`|>?#,"']|^- |: | #""", value):
                problems.append(f"{key.group(1)} is no plain text to YAML; put it in double quotes")
            keys[key.group(1)] = value.strip('"')
        elif not (keys and re.match(r"  [\w-]+: \S", line)):
            problems.append(f"frontmatter line is not 'key: value': {line!r}")
    return Page(path, keys, text[match.end() :], tuple(problems))


def skills(root: Path) -> list[Page]:
    """Return the skills a client loads: immediate folders of skills/ that hold SKILL.md."""
    return [read_page(path) for path in sorted((root / "skills").glob("*/SKILL.md"))]


def commands(root: Path) -> list[Page]:
    return [read_page(path) for path in sorted((root / "commands").glob("*.md"))]


def main_script(skill: str) -> str:
    """Return the path of a skill's main script inside its folder."""
    exceptions = {"start-project": "init", "diagnose-failure": "diagnose"}
    exceptions["preflight-checks"] = "check"
    return f"scripts/{exceptions.get(skill, skill.replace('-', '_'))}.py"


def documents(root: Path) -> list[Path]:
    """Return the documents whose names of files, flags and settings are held to the code."""
    patterns = [
        "README.md",
        "AGENTS.md",
        "commands/*.md",
        "agents/*.md",
        "skills/*/SKILL.md",
        "skills/*/references/*.md",
        "template/README.md",
        "template/AGENTS.md",
        "template/docs/*.md",
    ]
    return sorted({path for pattern in patterns for path in root.glob(pattern)})


def python_files(root: Path, *folders: str) -> list[Path]:
    """Return the Python files below the folders (or the named files)."""
    wanted = [root / name for name in folders]
    return [
        path
        for path in files(root)
        if path.suffix == ".py" and any(top == path or top in path.parents for top in wanted)
    ]
