"""One hash of the code and configuration that a project's run is made of.

Standard library alone, and nothing of the kit: a hook copies or imports this file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def tree_hash(project: Path) -> str:
    """Hash train.py, configs/** and curry_train/**/*.py: names and contents, sha256 in hex.

    The same for every copy of the same files, wherever it lies. Files that are missing or cannot
    be read count as absent.
    """
    files = [project / "train.py"]
    files += [p for p in (project / "configs").rglob("*") if "__pycache__" not in p.parts]
    files += (project / "curry_train").rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.relative_to(project).as_posix()):
        try:
            content = path.read_bytes() if path.is_file() else None
        except OSError:
            content = None
        if content is not None:
            name = path.relative_to(project).as_posix().encode()
            digest.update(len(name).to_bytes(8, "big") + name)
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()
