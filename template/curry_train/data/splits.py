"""Which documents count, which are held out, which are repeated: all by the document's own hash.

A decision by hash depends on nothing else: not on the order of the files, the number of workers,
or what else is in the corpus. Exact duplicates go before the split, since a copy on each side
would let the model be graded on text that it has read.
"""

from __future__ import annotations

import hashlib

import numpy as np

DROPPED, TRAIN, VAL = 0, 1, 2
GROUPS = COMMON, MORE, HELD_OUT = 0, 1, 2
"""Where a document stands in its shard: training, training once more, validation."""
HASH_DTYPE = np.dtype([("split", ">u8"), ("repeat", ">u8")])
"""The first 16 bytes of a document's sha256: one half decides the split, the other the repeats."""


def document_hash(text: str) -> bytes:
    """Identify a document by its text, 16 bytes."""
    return hashlib.sha256(text.encode("utf-8")).digest()[:16]


def hash_array(hashes: list[bytes]) -> np.ndarray:
    """Put document hashes into one array of HASH_DTYPE."""
    return np.frombuffer(b"".join(hashes), dtype=HASH_DTYPE)


def first_copies(hashes: np.ndarray) -> np.ndarray:
    """Mark the first of each group of equal documents, bool[documents]."""
    order = np.lexsort((hashes["repeat"], hashes["split"]))  # stable: equal hashes stay in order
    ordered = hashes[order]
    first = np.ones(len(hashes), dtype=bool)
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first


def assign(hashes: np.ndarray, val_fraction: float) -> np.ndarray:
    """Say for each document whether it is DROPPED (a duplicate), TRAIN or VAL, uint8[documents].

    A document is held out when its hash lies in the lowest `val_fraction` of all hashes. Where that
    leaves nothing held out, the document of the lowest hash is, so that a short text can be
    validated too.
    """
    kinds = np.full(len(hashes), DROPPED, dtype=np.uint8)
    unique = np.flatnonzero(first_copies(hashes))
    keys = hashes["split"][unique].astype(np.uint64)
    held_out = keys < np.uint64(int(val_fraction * 2**64))
    if len(unique) > 1 and not held_out.any():
        held_out[np.argmin(keys)] = True
    kinds[unique] = np.where(held_out, VAL, TRAIN)
    return kinds


def groups(hashes: np.ndarray, kinds: np.ndarray, weight: float) -> np.ndarray:
    """Say in which of GROUPS each document belongs, int8[documents]; -1 is not used at all.

    A training document appears int(weight) times, and once more when its hash lies in the lowest
    `weight - int(weight)` of all hashes.
    """
    fraction = weight - int(weight)
    more = hashes["repeat"].astype(np.uint64) < np.uint64(int(fraction * 2**64))
    found = np.where(more, MORE, COMMON if weight >= 1 else -1).astype(np.int8)
    found[kinds == VAL] = HELD_OUT
    found[kinds == DROPPED] = -1
    return found
