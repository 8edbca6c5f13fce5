"""The one exception for bad usage or input (exit code 2)."""

from __future__ import annotations


class UsageError(Exception):
    """Bad input: what was found, what is allowed, what to set."""

    def __init__(self, found: str, allowed: str = "", fix: str = "", *, where: str = "") -> None:
        self.sentence = "; ".join(part for part in (found, allowed, fix) if part)
        self.where = where
        super().__init__(self.sentence + (f"\n  {where}" if where else ""))
