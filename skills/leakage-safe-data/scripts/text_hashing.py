"""Words and word n-grams of many texts at once, as 64-bit hashes in numpy arrays.

A word is a run of letters, digits or underscores in any script (an ideograph is a word of its own),
case, width and signs apart. Hashes depend on the text only: no seed, no process.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np

SPACE = 32
_WORD_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_")
ASCII_TABLE = bytes(byte if byte in _WORD_BYTES or byte >= 128 else SPACE for byte in range(256))
IDEOGRAPH = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af])")
SIGNS = re.compile(r"\W+")
BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 2**64)
HASHES, BAND = 64, 4
"""MinHash: 16 bands of 4 values; a pair of Jaccard .8 is missed with probability .0002."""


def normal_form(text: str) -> bytes:
    """Give the words of a text, lower case, between spaces, as UTF-8."""
    text = text.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        text = IDEOGRAPH.sub(r" \1 ", SIGNS.sub(" ", text))
    return text.encode("utf-8", errors="replace").translate(ASCII_TABLE)


def text_hash(normal: bytes, text: str) -> int:
    """Hash a text by its words; one without words by itself."""
    words = b" ".join(normal.split()) or text.strip().encode("utf-8", errors="replace")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def mixed(x: Any) -> Any:
    """Scramble uint64 one to one (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Powers:
    """Powers of a number modulo 2**64, uint64, made as far as they are asked for."""

    def __init__(self, base: int) -> None:
        self.base, self.known = base, np.ones(1, np.uint64)

    def upto(self, count: int) -> Any:
        while len(self.known) < count:
            step = np.uint64(pow(self.base, len(self.known), 2**64))
            self.known = np.concatenate([self.known, self.known * step])
        return self.known[:count]


_FORWARD, _BACKWARD = _Powers(BASE), _Powers(INVERSE)


@dataclass
class Words:
    """The words of a batch of texts, one behind the other."""

    hashes: Any
    """uint64 [words]."""
    begins: Any
    """int64 [texts + 1]: words of text i are begins[i] to begins[i + 1]."""
    keys: Any
    """uint64 [texts]: hash of each whole text, words only."""

    @property
    def counts(self) -> Any:
        return np.diff(self.begins)


def words_of(texts: list[str]) -> Words:
    """Hash every word of the texts."""
    normal = [normal_form(text) for text in texts]
    keys = [text_hash(one, text) for one, text in zip(normal, texts, strict=True)]
    ends = np.cumsum([len(one) + 1 for one in normal], dtype=np.int64)
    data = np.frombuffer(b" ".join([*normal, b""]), np.uint8)
    inside = np.zeros(len(data) + 2, np.int8)
    inside[1:-1] = data != SPACE
    edges = np.diff(inside)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(data * _FORWARD.upto(len(data)), out=sums[1:])
    value = (sums[stops] - sums[starts]) * _BACKWARD.upto(len(data) + 1)[starts]
    begins = np.concatenate([[0], np.searchsorted(starts, ends)]).astype(np.int64)
    return Words(mixed(value), begins, np.array(keys, np.uint64))


def grams(words: Words, size: int, texts: Any = None) -> tuple[Any, Any]:
    """Hash the n-grams of `size` words of all texts, or of the texts of these numbers.

    Returns: uint64 [n-grams] and the number of the text of each, int64, ascending.
    """
    counts = np.maximum(words.counts - size + 1, 0)
    if texts is not None:
        chosen = np.zeros(len(counts), bool)
        chosen[texts] = True
        counts = np.where(chosen, counts, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    places = np.arange(len(owners)) - np.repeat(first - words.begins[:-1], counts)
    value = np.zeros(len(places), np.uint64)
    for at in range(size):
        value *= np.uint64(BASE)
        value += words.hashes[places + at]
    return mixed(value), owners


def band_keys(values: Any, owners: Any) -> tuple[Any, Any]:
    """MinHash the n-grams of each text. Shapes: [G], ascending [G] -> [texts], [texts, 16].

    Returns: the texts that have n-grams, and a key for each of their bands.
    """
    texts, first = np.unique(owners, return_index=True)
    keys = np.zeros((len(texts), HASHES // BAND), np.uint64)
    if not len(texts):
        return texts, keys
    drawn = mixed(np.arange(1, HASHES + 1, dtype=np.uint64) * np.uint64(BASE))
    for number, key in enumerate(drawn.tolist()):
        product = values * np.uint64(key | 1)
        product ^= product >> np.uint64(32)
        least = np.minimum.reduceat(product, first)
        keys[:, number // BAND] = mixed(keys[:, number // BAND] * np.uint64(BASE) + least)
    return texts, keys + np.arange(HASHES // BAND, dtype=np.uint64)
