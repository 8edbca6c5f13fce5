"""Which documents count, which are held out, which are repeated: all by the document's own hash.

A decision by hash depends on nothing else: not on the order of the files, the number of workers,
or what else is in the corpus. Exact duplicates go before the split, since a copy on each side
would let the model be graded on text that it has read.
"""

from __future__ import annotations

import hashlib

import numpy as np


def document_hash(text: str) -> int:
    """Identify a document by its text: the first 64 bits of its sha256."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def assign(hashes: np.ndarray, weight: np.ndarray, val_fraction: float) -> dict[str, np.ndarray]:
    """Say how often each document appears in "train" and "val".

    Shapes: hashes uint64[documents], weight float[documents], each result int64[documents].
    Only the first of equal documents appears. It is held out when its hash lies in the lowest
    `val_fraction` of all hashes; where that leaves nothing held out, the one of the lowest hash is,
    so that a short text can be validated too. The others appear int(weight) times, and once more
    when the low half of the hash, which the split does not depend on, lies in the lowest
    `weight - int(weight)`.
    """
    unique, positions = np.unique(hashes, return_index=True)
    first = np.zeros(len(hashes), dtype=np.int64)
    first[positions] = 1
    held_out = hashes < np.uint64(int(val_fraction * 2**64))
    if len(unique) > 1 and not held_out.any():
        held_out = hashes == unique[0]
    whole = np.floor(weight)
    more = (hashes & np.uint64(2**32 - 1)) < (weight - whole) * 2**32
    repeats = whole.astype(np.int64) + more
    return {"train": first * ~held_out * repeats, "val": first * held_out}
