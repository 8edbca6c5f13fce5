"""What texts of a test set are in the training text: whole, nearly, or in part.

The held-out side is held in memory as hashes; the training text streams by once, so memory grows
with the held-out side and by 8 bytes a training document. Candidates for near-duplicates come from
MinHash and are then compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from text_documents import Document
from text_hashing import Words, band_keys, grams, words_of

NEAR_JACCARD = 0.8
LEAST_WORDS = 8
"""Shorter texts repeat by themselves ("yes", a heading) and are judged by how often."""
CLASSES = ((8, 2), (30, 3), (60, 5), (160, 13))
"""From so many words on, n-grams of so many: one changed word leaves the index above .8."""
SLACK = 0.75
"""Training texts this near to a class are compared with its held-out texts too."""
EVAL_GRAM = 13
COMMON_IN_TRAIN = 10
TEMPLATE_SHARE, TEMPLATE_TEXTS = 0.1, 5
"""An n-gram in this share of the held-out texts, and in so many, is a form, not content."""
WHOLE_COVER, RARE_COVER = 0.9, 0.5
"""Share of a text's words in n-grams of the training text: all, and rare ones alone."""
TEXTS_OF_BAND, TRIES = 8, 500
FILTER_BITS = 24


@dataclass
class HeldOut:
    """One held-out set: what is known of each of its texts. All arrays are [texts]."""

    name: str
    places: list[str]
    texts: list[str]
    words: Words
    copied: Any = field(init=False)
    """Bool: the same words are a training document."""
    jaccard: Any = field(init=False)
    """Largest Jaccard index with a training document that was compared, 0 without."""
    source: list[str] = field(init=False)
    """Where the first copy or near copy is in the training text."""
    cover: Any = field(init=False)
    """Share of the words that lie in n-grams of the training text, forms left out."""
    rare_cover: Any = field(init=False)
    """The same without n-grams in more than COMMON_IN_TRAIN training documents."""

    def __post_init__(self) -> None:
        count = len(self.places)
        self.copied, self.jaccard = np.zeros(count, bool), np.zeros(count)
        self.cover, self.rare_cover = np.zeros(count), np.zeros(count)
        self.source = [""] * count

    @property
    def long(self) -> Any:
        """Bool: texts of enough words to be judged one by one."""
        return self.words.counts >= LEAST_WORDS

    @property
    def near(self) -> Any:
        """Bool: nearly a training document, and no copy of one."""
        return ~self.copied & (self.jaccard >= NEAR_JACCARD)

    @property
    def partly(self) -> Any:
        """Bool: most of it is in the training text, but it is neither copy nor near copy."""
        found = (self.cover >= WHOLE_COVER) | (self.rare_cover >= RARE_COVER)
        return found & ~self.copied & ~self.near


def hold_out(name: str, documents: Iterable[Document]) -> HeldOut:
    """Hash all documents of a held-out set."""
    kept = list(documents)
    texts = [document.text for document in kept]
    return HeldOut(name, [document.place for document in kept], texts, words_of(texts))


def classes_of(counts: Any, *, slack: float) -> list[tuple[int, Any]]:
    """Give for each class the size of its n-grams and the texts in it, or this near to it.

    A held-out text is in one class (slack 1), a training text also in those of texts near its size.
    """
    tops = [begin for begin, _ in CLASSES[1:]] + [np.inf]
    return [
        (size, np.flatnonzero((counts >= slack * low) & (counts < top / slack)))
        for (low, size), top in zip(CLASSES, tops, strict=True)
    ]


class _NearIndex:
    """The held-out texts of one class, by the keys of their bands."""

    def __init__(self, held: HeldOut, size: int, texts: Any) -> None:
        self.held, self.size = held, size
        values, owners = grams(held.words, size, texts)
        self.members, keys = band_keys(values, owners)
        self.tried = np.zeros(len(held.places), np.int64)
        self.sets = {
            int(text): np.unique(part)
            for text, part in zip(
                self.members, np.split(values, np.flatnonzero(np.diff(owners)) + 1), strict=False
            )
        }
        order = np.argsort(keys, axis=None, kind="stable")
        self.keys = keys.reshape(-1)[order]
        self.owners = np.repeat(self.members, keys.shape[1])[order]

    def compare(self, words: Words, texts: Any, places: list[str]) -> None:
        """Hold the candidates among training texts against the held-out ones, exactly."""
        if not len(self.members):
            return
        values, owners = grams(words, self.size, texts)
        trained, keys = band_keys(values, owners)
        pairs = self._pairs(trained, keys)
        bounds = np.searchsorted(owners, [[text, text + 1] for text, _ in pairs]).tolist()
        for (text, own), (begin, end) in zip(pairs, bounds, strict=True):
            if self.held.jaccard[own] >= NEAR_JACCARD:
                continue
            theirs, ours = np.unique(values[begin:end]), self.sets[own]
            shared = len(np.intersect1d(theirs, ours, assume_unique=True))
            index = shared / (len(theirs) + len(ours) - shared)
            self.tried[own] += 1
            if index > self.held.jaccard[own]:
                self.held.jaccard[own] = index
                if index >= NEAR_JACCARD and not self.held.copied[own]:
                    self.held.source[own] = places[text]

    def _pairs(self, trained: Any, keys: Any) -> list[tuple[int, int]]:
        """Pair training texts with the held-out texts that share a band and have no twin yet.

        Of a crowded band some training texts are taken, others in each band; a held-out text that
        was compared TRIES times in vain is left alone.
        """
        open_ones = (self.held.jaccard < NEAR_JACCARD) & (self.tried < TRIES)
        flat = keys.reshape(-1)
        low = np.searchsorted(self.keys, flat, side="left")
        high = np.searchsorted(self.keys, flat, side="right")
        hits = np.flatnonzero(high > low)
        sharing: dict[int, list[int]] = {}
        for hit in hits.tolist():
            sharing.setdefault(int(low[hit]), []).append(hit)
        pairs: set[tuple[int, int]] = set()
        for begin, found in sharing.items():
            band = found[0] % keys.shape[1]
            turned = np.roll(found, -band * TEXTS_OF_BAND)[:TEXTS_OF_BAND]
            owners = self.owners[begin : high[found[0]]]
            owners = owners[open_ones[owners]]
            pairs |= {
                (int(trained[hit // keys.shape[1]]), own)
                for hit in turned.tolist()
                for own in owners.tolist()
            }
        return sorted(pairs)


class _GramIndex:
    """The n-grams of the held-out texts of one length, and in how many training texts they are."""

    def __init__(self, held: HeldOut, size: int, texts: Any) -> None:
        self.size = size
        self.values, self.owners = grams(held.words, size, texts)
        self.known, self.number = np.unique(self.values, return_inverse=True)
        self.trained = np.zeros(len(self.known), np.int64)
        self.filter = np.zeros(2**FILTER_BITS, bool)
        self.shift = np.uint64(64 - FILTER_BITS)
        self.filter[(self.known >> self.shift).astype(np.int64)] = True

    def count(self, words: Words) -> None:
        """Add the training texts of a batch in which each n-gram is."""
        if not len(self.known):
            return
        values, owners = grams(words, self.size)
        likely = np.flatnonzero(self.filter[(values >> self.shift).astype(np.int64)])
        values, owners = values[likely], owners[likely]
        at = np.minimum(np.searchsorted(self.known, values), len(self.known) - 1)
        hit = self.known[at] == values
        once = np.unique(at[hit] * len(words.keys) + owners[hit])
        self.trained += np.bincount(once // len(words.keys), minlength=len(self.known))


class Overlap:
    """Compares any number of held-out sets with training text that streams by."""

    def __init__(self, sets: list[HeldOut]) -> None:
        self.sets = sets
        self.keys: list[Any] = []
        self.counts: list[Any] = []
        self.documents = 0
        self._near = [
            _NearIndex(held, size, texts)
            for held in sets
            for size, texts in classes_of(held.words.counts, slack=1.0)
        ]
        self._grams = [(held, index) for held in sets for index in self._gram_indexes(held)]

    @staticmethod
    def _gram_indexes(held: HeldOut) -> list[_GramIndex]:
        """Whole texts below 13 words are one n-gram of their own length."""
        counts = held.words.counts
        sizes = range(LEAST_WORDS, EVAL_GRAM + 1)
        chosen = {s: counts == s if s < EVAL_GRAM else counts >= s for s in sizes}
        return [_GramIndex(held, s, np.flatnonzero(c)) for s, c in chosen.items() if c.any()]

    def add(self, batch: list[Document]) -> None:
        """Take in one batch of training documents."""
        words = words_of([document.text for document in batch])
        places = [document.place for document in batch]
        self.keys.append(words.keys)
        self.counts.append(words.counts)
        self.documents += len(batch)
        order = np.argsort(words.keys, kind="stable")
        for held in self.sets:
            at = np.searchsorted(words.keys, held.words.keys, sorter=order)
            at = order[np.minimum(at, len(order) - 1)]
            for text in np.flatnonzero((words.keys[at] == held.words.keys) & ~held.copied).tolist():
                held.copied[text], held.source[text] = True, places[at[text]]
        members = dict(classes_of(words.counts, slack=SLACK))
        for index in self._near:
            index.compare(words, members[index.size], places)
        for _, index in self._grams:
            index.count(words)

    def finish(self) -> None:
        """Turn counts of n-grams into the share of each held-out text that they cover."""
        for held in self.sets:
            own = [index for other, index in self._grams if other is held]
            _cover(held, own)

    def repeated_short(self) -> float:
        """Share of the short training documents whose words are those of another one."""
        keys = np.concatenate(self.keys)[np.concatenate(self.counts) < LEAST_WORDS]
        if not len(keys):
            return 0.0
        _, times = np.unique(keys, return_counts=True)
        return float(times[times > 1].sum() / len(keys))

    def repeated(self) -> int:
        """Training documents of enough words that are copies of an earlier one."""
        keys = np.concatenate(self.keys)[np.concatenate(self.counts) >= LEAST_WORDS]
        return len(keys) - len(np.unique(keys))


def _cover(held: HeldOut, indexes: list[_GramIndex]) -> None:
    words, begins = len(held.words.hashes), held.words.begins
    marks = {kind: np.zeros(words + 1, np.int64) for kind in ("form", "any", "rare")}
    for index in indexes:
        _, first = np.unique(index.owners * len(index.known) + index.number, return_index=True)
        spread = np.bincount(index.number[first], minlength=len(index.known))
        form = spread >= max(TEMPLATE_TEXTS, TEMPLATE_SHARE * len(held.places))
        trained = index.trained
        chosen = {
            "form": form,
            "any": ~form & (trained > 0),
            "rare": ~form & (trained > 0) & (trained <= COMMON_IN_TRAIN),
        }
        texts, start = np.unique(index.owners, return_index=True)
        offset = np.arange(len(index.owners)) - np.repeat(
            start, np.diff([*start, len(index.owners)])
        )
        places = begins[index.owners] + offset
        for kind, which in chosen.items():
            at = places[which[index.number]]
            np.add.at(marks[kind], at, 1)
            np.add.at(marks[kind], at + index.size, -1)
    covered = {kind: np.cumsum(mark[:-1]) > 0 for kind, mark in marks.items()}
    content = ~covered["form"]
    total = _sums(content, begins)
    for name, kind in (("cover", "any"), ("rare_cover", "rare")):
        share = _sums(covered[kind] & content, begins) / np.maximum(total, 1)
        setattr(held, name, np.where(total >= LEAST_WORDS, share, 0.0))


def _sums(flags: Any, begins: Any) -> Any:
    running = np.concatenate([[0], np.cumsum(flags)])
    return running[begins[1:]] - running[begins[:-1]]


def compare(
    train: Iterable[list[Document]],
    sets: list[HeldOut],
    told: Callable[[int], None] = lambda characters: None,
) -> Overlap:
    """Compare held-out sets with batches of training documents; `told` hears of characters."""
    overlap = Overlap(sets)
    for batch in train:
        overlap.add(batch)
        told(sum(len(document.text) for document in batch))
    overlap.finish()
    return overlap
