#!/usr/bin/env python3
"""Write template/MANIFEST, what init copies: `python3 tests/manifest.py [--check]`.

The list is what git tracks below template/, less MANIFEST itself, sorted. A new file of the
template needs `git add` first. With --check nothing is written; differences end with code 1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = "MANIFEST"


class ManifestError(Exception):
    """The template holds something that cannot be listed."""


def tracked(root: Path) -> list[str]:
    """Return the tracked files below template/, relative to it."""
    command = ["git", "ls-files", "-z", "--stage", "--", "template"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ManifestError(f"git ls-files: {done.stderr.strip()}")
    paths = []
    for entry in filter(None, done.stdout.split("\0")):
        kind, _, path = entry.partition("\t")
        name = path.removeprefix("template/")
        if kind.split()[0] not in ("100644", "100755"):
            raise ManifestError(f"{path}: is no plain file; init copies plain files only")
        if not name.isprintable() or "\\" in name:
            raise ManifestError(f"{path!r}: has a character that a line of MANIFEST cannot hold")
        if name != MANIFEST:
            paths.append(name)
    return sorted(paths)


def compare(root: Path) -> list[str]:
    """Return one line a difference between MANIFEST and git."""
    path = root / "template" / MANIFEST
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    listed, wanted = text.splitlines(), tracked(root)
    lines = [f"+ {name} (tracked, not listed)" for name in wanted if name not in listed]
    lines += [f"- {name} (listed, not tracked)" for name in listed if name not in wanted]
    if not lines and text != render(wanted):
        lines.append("~ the same files, not in the generated form")
    return lines


def render(names: list[str]) -> str:
    return "".join(f"{name}\n" for name in names)


def main(argv: list[str], root: Path = ROOT) -> int:
    if argv not in ([], ["--check"]):
        print(f"manifest.py: found {argv}; nothing or --check is allowed", file=sys.stderr)
        return 2
    try:
        lines = compare(root)
        if argv:
            for line in lines:
                print(line)
            if lines:
                print("template/MANIFEST differs from git; run python3 tests/manifest.py")
            return 1 if lines else 0
        names = tracked(root)
        (root / "template" / MANIFEST).write_text(render(names), encoding="utf-8")
        print(f"template/MANIFEST: {len(names)} files")
    except (ManifestError, FileNotFoundError) as error:
        print(f"manifest.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
