"""What a row of the bank says: a small diff on a clean model, and the checks that must see it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

CLEAN = Path(__file__).resolve().parent / "clean"
PREFLIGHT, INIT, ONE_BATCH, FLOW = (
    "preflight-checks",
    "init-loss",
    "overfit-one-batch",
    "gradient-flow",
)


@dataclass(frozen=True)
class Row:
    """One planted bug."""

    name: str
    on: str
    """The clean model, FILE:FUNCTION in clean/."""
    edits: tuple[tuple[str, str], ...]
    """(old, new) pairs; each old stands in the file exactly once."""
    fails: tuple[str, ...]
    """Check ids that must fail."""
    told: str
    """The failure as somebody tells it."""
    link: str = ""
    """Where it was reported, if it was."""
    may: tuple[str, ...] = ()
    """Further ids that may fail: consequences of the same bug. No other id may."""
    stage: str = PREFLIGHT
    before_check: bool = False
    """Written from the description before the check that should find it existed."""

    def source(self) -> str:
        """Give the source text of the clean model with the bug planted."""
        text = (CLEAN / self.on.partition(":")[0]).read_text(encoding="utf-8")
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(
                    f"{self.name}: {old!r} stands {text.count(old)} times in {self.on}"
                )
            text = text.replace(old, new)
        return text

    def diff(self) -> list[str]:
        """Give the changed lines, - before and + after."""
        before = (CLEAN / self.on.partition(":")[0]).read_text(encoding="utf-8").splitlines()
        lines = difflib.unified_diff(before, self.source().splitlines(), lineterm="", n=0)
        return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
