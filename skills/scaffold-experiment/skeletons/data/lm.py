"""The text of `data.dataset=skeleton_name`: put your own file or folder in the place of TEXT.

Files end in .txt, .jsonl (a document a line, under "text"), .jsonl.zst or .parquet. Which documents
are held out follows from a hash of each, so the same text in two files is on one side.
"""

from __future__ import annotations

from pathlib import Path

from curry_train.data.sources import Source, find_source

TEXT = Path(__file__).resolve().parents[2] / "corpus" / "devils_dictionary.jsonl"


def skeleton_name() -> Source:
    """Find the files. Raises: DataError when there is nothing to read."""
    return find_source(TEXT)
