"""Every check id that the bundle's own scripts report, with its meaning. Ids are never renamed.

A user's check (custom_check.py) may report any other kebab-case word.
"""

from __future__ import annotations

import re

CHECK_IDS = {
    "step-time-noise": "the step times agree well enough to trust their median",
    "step-time-ratio": "time per token or sample against a baseline report",
}

KEBAB_CASE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def is_check_id(word: object) -> bool:
    """Tell whether a word has the form of a check id."""
    return isinstance(word, str) and KEBAB_CASE.fullmatch(word) is not None
