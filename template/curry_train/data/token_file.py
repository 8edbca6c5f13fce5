"""A prepared corpus on disk: shards of token ids, where documents end, and a manifest.

    shard-00000.bin        ids, little-endian uint16 or uint32, each document followed by eos
    shard-00000.ends.bin   int64: for each document the number of ids up to and with its eos
    tokenizer.json         what made the ids
    manifest.json          the rest: dtype, hashes, sources, which stretches are train and val

A split is a list of segments, stretches of shards; a segment may count several times (weights).
The folder appears by one rename, complete. Files are mapped, not read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curry_train.data import DataError
from curry_train.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from curry_train.config import DataConfig

FORMAT = 1
"""Raise it when the files change, or when the same text gives other ids: caches depend on it."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
VERIFY_LIMIT = 512 * 2**20
"""Corpora up to this many bytes are hashed whenever they are opened; larger ones on request."""
ENDS = np.dtype("<i8")


@dataclass(frozen=True)
class Segment:
    """A stretch of one shard that belongs to a split, `repeats` times in a row."""

    shard: int
    start: int
    """First id."""
    tokens: int
    first_document: int
    documents: int
    bytes: int
    """Of text, in UTF-8."""
    repeats: int = 1


class TokenStream:
    """All ids of a split behind one another, with one virtual eos in front.

    Position 0 is the virtual eos and position p the id p-1, so a window of S+1 positions from
    k*S holds S inputs and their S labels, and over all k every id is a label exactly once.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], split: str) -> None:
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self.eos_id: int = manifest["tokenizer"]["eos_id"]
        self.dtype = dtype
        self._pieces: list[np.ndarray] = []
        self._ends: list[tuple[np.ndarray, int]] = []
        shards: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        segments = [Segment(**fields) for fields in manifest["splits"][split]["segments"]]
        for segment in segments:
            if segment.shard not in shards:
                entry = manifest["shards"][segment.shard]
                shards[segment.shard] = (
                    np.memmap(folder / entry["file"], dtype=dtype, mode="r"),
                    np.memmap(folder / entry["ends_file"], dtype=ENDS, mode="r"),
                )
            ids, ends = shards[segment.shard]
            # Plain arrays over the same mapping: slicing a memmap object costs ten times as much.
            ids = np.asarray(ids[segment.start : segment.start + segment.tokens])
            ends = np.asarray(
                ends[segment.first_document : segment.first_document + segment.documents]
            )
            self._pieces += [ids] * segment.repeats
            self._ends += [(ends, segment.start)] * segment.repeats
        self._starts = np.cumsum([0] + [len(piece) for piece in self._pieces])
        self.tokens = int(self._starts[-1])
        """Ids in the split, the eos of every document included."""
        self.bytes = sum(segment.bytes * segment.repeats for segment in segments)
        """UTF-8 bytes of the split's text."""
        self.documents = sum(segment.documents * segment.repeats for segment in segments)

    def window(self, start: int, length: int) -> np.ndarray:
        """Return `length` positions from `start` as int64; fewer at the end of the stream."""
        out = np.full(max(0, min(length, self.tokens + 1 - start)), self.eos_id, dtype=np.int64)
        first = max(start - 1, 0)
        filled = 1 if start == 0 and len(out) else 0
        piece = int(np.searchsorted(self._starts, first, side="right")) - 1
        while filled < len(out):
            ids = self._pieces[piece][first - self._starts[piece] :][: len(out) - filled]
            out[filled : filled + len(ids)] = ids
            filled += len(ids)
            first += len(ids)
            piece += 1
        return out

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return full windows from each start, dtype of the files [len(starts), length]."""
        out = np.empty((len(starts), length), dtype=self.dtype)
        pieces = np.searchsorted(self._starts, starts - 1, side="right") - 1
        inside = (starts > 0) & (starts - 1 + length <= self._starts[pieces + 1])
        for piece in np.unique(pieces[inside]):
            rows = np.flatnonzero(inside & (pieces == piece))
            ids = self._pieces[piece]
            view = np.lib.stride_tricks.as_strided(
                ids, (len(ids) - length + 1, length), ids.strides * 2, writeable=False
            )
            out[rows] = view[starts[rows] - 1 - self._starts[piece]]
        for row in np.flatnonzero(~inside):  # over a segment's end, or from the virtual eos
            out[row] = self.window(int(starts[row]), length)
        return out

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Position at which each document's eos stands, int64[documents], ascending."""
        parts = [
            ends - offset + start
            for (ends, offset), start in zip(self._ends, self._starts, strict=False)
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, open for reading."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: TokenStream
    val: TokenStream

    @property
    def hash(self) -> str:
        """Identify the two token streams and the tokenizer, wherever the corpus lies."""
        shards = [[s["sha256"], s["ends_sha256"]] for s in self.manifest["shards"]]
        deciding = [self.manifest["tokenizer"]["sha256"], shards, self.manifest["splits"]]
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def dtype_for(vocab_size: int) -> np.dtype:
    """Choose the smallest of uint16 and uint32 that holds every id.

    Raises: DataError for a vocabulary beyond uint32.
    """
    for dtype in (np.dtype("<u2"), np.dtype("<u4")):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise DataError(
        f"the tokenizer has {vocab_size} ids, a corpus holds at most {2**32}; "
        "choose a tokenizer with fewer"
    )


def is_corpus(folder: Path) -> bool:
    """Say whether a folder holds a prepared corpus (sound or not)."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check manifest.json. Raises: DataError."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = manifest.get("format")
    except (OSError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read ({reason}); prepare the corpus again") from None
    if found != FORMAT:
        raise DataError(f"{path} has format {found!r}, this version reads {FORMAT}; prepare again")
    needed = ("dtype", "tokenizer", "shards", "splits")
    if missing := [key for key in needed if key not in manifest]:
        raise DataError(f"{path} lacks {', '.join(missing)}; prepare the corpus again")
    if manifest["dtype"] not in ("uint16", "uint32"):
        raise DataError(f"{path} has dtype {manifest['dtype']!r}, not uint16 or uint32")
    return manifest


def read_corpus(folder: Path, *, verify: bool | None = None) -> Corpus:
    """Open a prepared folder.

    Sizes are always checked; hashes when `verify` is true, or by default up to VERIFY_LIMIT bytes.
    Raises: DataError naming the first file that is torn or changed.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        width = np.dtype(manifest["dtype"]).itemsize
        total = sum(shard["tokens"] for shard in manifest["shards"]) * width
        verify = total <= VERIFY_LIMIT if verify is None else verify
        for shard in manifest["shards"]:
            size = shard["tokens"] * width
            _check_file(folder / shard["file"], size, shard["sha256"] if verify else None)
            size = shard["documents"] * ENDS.itemsize
            _check_file(folder / shard["ends_file"], size, shard["ends_sha256"] if verify else None)
        tokenizer = load_tokenizer(folder / TOKENIZER)
        if tokenizer.sha256 != manifest["tokenizer"]["sha256"]:
            raise DataError(
                f"{folder / TOKENIZER} is not the tokenizer that made this corpus: sha256 "
                f"{tokenizer.sha256[:12]}, made with {manifest['tokenizer']['sha256'][:12]}; "
                "restore it or prepare the corpus again"
            )
        train, val = (TokenStream(folder, manifest, split) for split in ("train", "val"))
    except (KeyError, TypeError, IndexError) as error:
        reason = f"{type(error).__name__} {error}"
        raise DataError(f"{folder / MANIFEST} is damaged ({reason}); prepare again") from None
    return Corpus(folder, manifest, tokenizer, train, val)


def check_tokenizer(corpus: Corpus, data: DataConfig) -> None:
    """Refuse a corpus that was made with another tokenizer than `data` names. Raises: DataError."""
    made = corpus.manifest["tokenizer"]
    if data.tokenizer == "auto":
        return
    if data.tokenizer == "byte":
        fits = made["kind"] == "byte"
    elif data.tokenizer == "bpe":
        fits = made["kind"] == "bpe" and made["asked_vocab_size"] == data.bpe_vocab_size
    else:
        fits = load_tokenizer(Path(data.tokenizer)).sha256 == made["sha256"]
    if not fits:
        asked = f" with data.bpe_vocab_size={data.bpe_vocab_size}" * (data.tokenizer == "bpe")
        right = "byte" if made["kind"] == "byte" else corpus.folder / TOKENIZER
        raise DataError(
            f"{corpus.folder} was made with a {made['kind']} tokenizer of {made['vocab_size']} ids "
            f"(sha256 {made['sha256'][:12]}), not data.tokenizer={data.tokenizer}{asked}; "
            f"set data.tokenizer={right}"
        )


def check_windows(stream: TokenStream, seq_len: int, split: str) -> None:
    """Refuse a split without one full window. Raises: DataError."""
    if stream.tokens < seq_len:
        raise DataError(
            f"the {split} split holds {stream.tokens} tokens, fewer than one window of "
            f"data.seq_len={seq_len}; give more text, set a smaller data.seq_len or another "
            "data.val_fraction"
        )


def _check_file(path: Path, size: int, sha256: str | None) -> None:
    try:
        found = path.stat().st_size
        if found != size:
            raise DataError(f"{path} has {found} bytes, not {size}; prepare the corpus again")
        if sha256 is not None and file_sha256(path) != sha256:
            raise DataError(f"{path} was changed: its sha256 differs; prepare the corpus again")
    except FileNotFoundError:
        raise DataError(f"{path} is missing; prepare the corpus again") from None


def file_sha256(path: Path) -> str:
    """Hash a file without reading it whole."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
