"""Splits of rows that leak nothing: by group, by time, without copies on both sides.

All return row numbers, so that samples of any kind can be cut. A group's part follows from its own
hash, so rows that come later move no earlier one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from curry_train.data import DataError

Rows = dict[str, np.ndarray]  # name of the part -> its row numbers, int64, ascending
SHINGLE_WORDS, HASHES, BAND = 3, 64, 4  # a Jaccard index of .8 is missed by 0.02 % of pairs


def split_by_group(groups: Any, fractions: Mapping[str, float], *, seed: int = 0) -> Rows:
    """Put whole groups (any values, [N]) into parts by a hash of (seed, group).

    Fractions are of the groups, on average. Raises: DataError, also when a part stays empty.
    """
    ends = _ends(fractions)
    if any(group is None or group != group for group in groups):
        raise DataError("a row has no group; each row takes one; fill or drop the rows without")
    kinds, number = np.unique(np.array([str(group) for group in groups]), return_inverse=True)
    places = np.array([_hash(f"{seed}:{kind}".encode()) / 2**64 for kind in kinds])
    part = np.searchsorted(ends, places, side="right")[number]
    return _filled({name: np.flatnonzero(part == at) for at, name in enumerate(fractions)})


def split_by_time(times: Any, fractions: Mapping[str, float], *, embargo: Any = 0) -> Rows:
    """Cut rows at points of time, earliest part first. Shapes: times [N], numbers or datetime64.

    Rows of one time stay together; those within `embargo` (a number or timedelta64) before the next
    part are dropped: max(train) < min(val) - embargo. Raises: DataError as split_by_group.
    """
    times = np.asarray(times)
    times = times.astype(np.int64) if times.dtype.kind == "u" else times
    if times.ndim != 1 or times.dtype.kind not in "ifM" or (times != times).any():
        found = f"times are {times.dtype}{list(times.shape)}, or one is missing"
        raise DataError(f"{found}; each row takes a number or datetime64; drop the rows without")
    if abs(embargo) != embargo:
        raise DataError(f"embargo={embargo} is negative; set it to 0 or more")
    moments, counts = np.unique(times, return_counts=True)
    before = np.cumsum(counts) - counts
    parts, rest = {}, np.ones(len(times), bool)
    for name, end in zip(fractions, _ends(fractions), strict=True):
        early = rest
        if end < 1 and len(times):
            cut = moments[np.abs(before - end * len(times)).argmin()]
            early, rest = rest & (times < cut), rest & (times >= cut)
            early &= times < cut - embargo
        parts[name] = np.flatnonzero(early)
    return _filled(parts)


def fit_on_train(transform: Any, rows: Any, train: Any, labels: Any = None) -> Any:
    """Fit an object with fit and transform on rows[train] alone; return all rows transformed.

    Shapes: rows [N, ...], the whole table; train int[any]; labels [N]. Raises: DataError when
    `train` is no choice of row numbers that leaves some rows unseen.
    """
    rows, train = np.asarray(rows), np.asarray(train)
    numbers = np.unique(train) if train.dtype.kind in "iu" else train[:0]
    inside = len(numbers) and 0 <= numbers[0] <= numbers[-1] < len(rows)
    if not inside or train.shape != numbers.shape or len(numbers) == len(rows):
        found = (
            f"train is {train.dtype}{list(train.shape)} for {len(rows)} rows; it takes numbers of"
        )
        raise DataError(f"{found} rows, each once and not all; give the train part of a split")
    transform.fit(rows[train], *(() if labels is None else (np.asarray(labels)[train],)))
    return transform.transform(rows)


def ordered(positions: Any, size: int, *, seed: int) -> np.ndarray:
    """Say which of `size` samples stands at each position of an endless shuffled stream.

    Shapes: positions int64[any] from 0 on -> int64[any]. Each epoch of `size` positions is a
    permutation of its own. The state to save is one integer, the next position.
    """
    from curry_train.data.loader import permute

    epochs, places = np.divmod(np.asarray(positions, np.int64).reshape(-1), size)
    return permute(places, epochs, size, seed)


def group_duplicates(rows: Any, *, threshold: float = 0.8) -> np.ndarray:
    """Give equal and nearly equal rows one group, uint64[N], for split_by_group.

    Texts (a sequence of str): sets of three words in a row (case and signs apart) whose Jaccard
    index is `threshold` or more, also through a chain of texts. Arrays [N, ...]: equal bytes.
    A group's name is the hash of its first row, so it stays when rows are appended.
    Raises: DataError when some rows are text and some not.
    """
    texts = [text for text in rows if isinstance(text, str)]
    if texts and len(texts) != len(rows):
        found = f"{len(rows) - len(texts)} of {len(rows)} rows are no text"
        raise DataError(f"{found}; all or none are; write '' where a text is missing")
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    keys = [(" ".join(w) or t).encode() for w, t in zip(words, texts, strict=True)]
    keys = keys or [np.ascontiguousarray(row).tobytes() for row in rows]
    names = np.array([_hash(key) for key in keys], np.uint64)
    _, first, number = np.unique(names, return_index=True, return_inverse=True)
    root = first[number]
    wordy = [row for row in np.sort(first).tolist() if texts and words[row]]
    for one, other in _near_pairs(words, wordy, threshold):
        low, high = sorted((root[one], root[other]))
        root[root == high] = low
    return names[root]


def _near_pairs(words: list[list[str]], rows: list[int], threshold: float) -> list:
    """Find the pairs of `rows` whose shingles are alike: candidates by MinHash, then exactly."""
    tables: dict[tuple[int, bytes], list[int]] = {}
    sets, pairs = {}, []
    keys = np.random.default_rng(0).integers(2**63, size=(HASHES, 1), dtype=np.uint64) * 2 + 1
    for row in rows:
        grams = zip(*(words[row][at:] for at in range(SHINGLE_WORDS)), strict=False)
        shingles = {" ".join(gram).encode() for gram in grams} or {" ".join(words[row]).encode()}
        sets[row] = {_hash(shingle) for shingle in shingles}
        mixed = np.array(list(sets[row]), np.uint64) * keys
        least = (mixed ^ mixed >> np.uint64(29)).min(axis=1).reshape(-1, BAND)
        near = [tables.setdefault((at, band.tobytes()), []) for at, band in enumerate(least)]
        for other in {other for bucket in near for other in bucket[:8]}:
            if len(sets[row] & sets[other]) >= threshold * len(sets[row] | sets[other]):
                pairs.append((row, other))
        for bucket in near:
            bucket.append(row)
    return pairs


def _ends(fractions: Mapping[str, float]) -> np.ndarray:
    """Return where each part ends, the last at 1."""
    shares = np.array(list(fractions.values()), float)
    if len(shares) < 2 or not (shares > 0).all() or abs(shares.sum() - 1) > 1e-9:
        found = f"fractions {dict(fractions)} are not two or more shares above 0 with sum 1"
        raise DataError(f"{found}; set them to {{'train': 0.9, 'val': 0.1}}, say")
    return np.append(np.cumsum(shares)[:-1], 1.0)


def _filled(parts: Rows) -> Rows:
    if empty := [name for name, rows in parts.items() if not len(rows)]:
        found = f"nothing is left for {', '.join(empty)}; each part takes a group or point of time"
        raise DataError(f"{found}; give more of them, larger fractions or a smaller embargo")
    return parts


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
