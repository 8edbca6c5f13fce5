"""Words and columns for people: sizes, ages, tables that fit a terminal, progress."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

LEAST = 32
"""Columns that a shortened cell keeps, however narrow a terminal is."""
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def size_words(count: float) -> str:
    """Write bytes with three digits: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def parse_size(text: str) -> int:
    """Read bytes from 5GB, 200 MB or 1000. Raises: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    size = int(float(match[1]) * 1000 ** " kmgt".index(match[2] or " ")) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; allowed: 5GB, 200MB, bytes")
    return size


def saved_at(seconds: float) -> str:
    """Write a time of the last two days as an age, an older one as a date (UTC)."""
    age = time.time() - seconds
    if age < 0 or age > 48 * 3600:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    for unit, length in (("h", 3600), ("min", 60)):
        if age >= 2 * length:
            return f"{age / length:.0f} {unit} ago"
    return f"{age:.0f} s ago"


def mesh_words(mesh: Mapping[str, Any]) -> str:
    """Write the axes that have more than one rank: pp2 tp2."""
    known = [axis for axis in AXES if axis in mesh] + sorted(mesh.keys() - set(AXES))
    return " ".join(f"{axis}{mesh[axis]}" for axis in known if mesh[axis] != 1) or "1 process"


def number(value: float | None) -> str:
    """Write a number in few digits; a dash for none."""
    return "-" if value is None else f"{value:.4g}"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, give: int = 0) -> list[str]:
    """Return lines of aligned columns; on a terminal column `give` is shortened to fit it.

    Numbers stand to the right. What is shortened keeps both of its ends and the number of a layer.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - sum(widths) - 2 * (len(widths) - 1)
        widths[give] = min(widths[give], max(widths[give] + room, LEAST))
    right = [
        bool(cells) and all(row[at][:1] in "-0123456789.in" for row in cells)
        for at in range(len(heads))
    ]
    lines = []
    for row in [list(heads), *cells]:
        row[give] = _shorten(row[give], widths[give])
        padded = (
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(row, widths, right, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def _shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    layer = re.search(r"(?<=\.)\d+\.", text)
    end = text[layer.start() :] if layer else text
    head = width - 2 - len(end)
    if head >= 8:
        return f"{text[:head]}..{end}"
    middle = f"..{layer[0]}." if layer else ".."
    begin = text[: 4 if layer else (width - 2) // 2] + middle
    return begin + text[len(begin) - width :]


class Meter:
    """Tells on stderr how much of long work is done: live on a terminal, else every ten seconds.

    A context manager: whatever comes after it starts on a clean line.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.live, self.shown = sys.stderr.isatty(), False
        self.next = time.monotonic() + (2.0 if self.live else 10.0)
        self.lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Count bytes; several threads may."""
        with self.lock:
            self.done += count
            if time.monotonic() < self.next:
                return
            self.next = time.monotonic() + (0.2 if self.live else 10.0)
            of = f" of {size_words(self.total)}" if self.done <= self.total else ""
            begin, end = ("\r\033[K", "") if self.live else ("", "\n")
            print(
                f"{begin}{self.what}: {size_words(self.done)}{of}",
                end=end, file=sys.stderr, flush=True,
            )  # fmt: skip
            self.shown = self.live

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *error: object) -> None:
        """Take the live line away."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
