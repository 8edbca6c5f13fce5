"""Which line to change: a place in the user's code, as the `fix` of a check."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple({_PATHS[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_KIT = str(Path(__file__).resolve().parent)
SKILLS = Path(__file__).resolve().parents[3]


def fix_at(file: str, line: int, text: str) -> dict[str, Any]:
    """Name a place and what to do there."""
    return {"file": str(file), "line": int(line), "text": text}


def fix_in(place: Any, text: str, pattern: str | None = None) -> dict[str, Any] | None:
    """Name the first line of a function, class or module (its forward, for a torch.nn.Module) that
    matches a regular expression, or its first line; None where there is no source of the user's.
    """
    if hasattr(place, "named_parameters") and not isinstance(place, type):
        place = _entrance(type(place))
    try:
        place = inspect.unwrap(place) if callable(place) else place
        lines, start = inspect.getsourcelines(place)
        file = inspect.getsourcefile(place)
    except (OSError, TypeError, ValueError):
        return None
    if file is None or is_foreign_to_user(file):
        return None
    start = max(start, 1)
    for offset, line in enumerate(lines):
        if pattern is not None and re.search(pattern, line):
            return fix_at(file, start + offset, text)
    return fix_at(file, start, text) if pattern is None else None


def _entrance(kind: Any) -> Any:
    """Give a module's forward, or the training_step of one that has no forward of its own."""
    step = getattr(kind, "training_step", None)
    if step is None or not is_foreign_to_user(inspect.getfile(kind.forward)):
        return kind.forward
    return step


def source_line(fix: dict[str, Any]) -> str:
    """Read the line that a fix names."""
    return linecache.getline(fix["file"], fix["line"]).strip()


def caller_line() -> tuple[str, int] | None:
    """Return file and line of the nearest frame that is neither ours nor a library's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_foreign_to_user(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def is_foreign_to_user(file: str) -> bool:
    """Tell whether a source file is a library's, python's or the bundle's own."""
    if file.startswith(("<", _KIT)) or file.startswith(_LIBRARIES) or "site-packages" in file:
        return True
    path = Path(file)
    return SKILLS in path.parents and path.parent.name in ("scripts", "kit")
