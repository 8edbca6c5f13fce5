"""A prepared corpus on disk: shards of token ids, where documents end, and a manifest.

    train-00000.bin   ids, little-endian uint16 or uint32: one eos, then the documents, each with
                      its eos; a long split goes on in train-00001.bin
    train.ends.bin    int64: for each document the position of its eos
    val-00000.bin ..  the same of the documents that are held out
    tokenizer.json    what made the ids
    manifest.json     the rest: dtype, size and sha256 of every file, sources, settings

The folder appears by one rename, complete. Files are mapped, not read.
"""

from __future__ import annotations

import array
import bisect
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curry_train.data import DataError
from curry_train.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from curry_train.config import DataConfig

FORMAT = 2
"""Raise it when the files change, or when the same text gives other ids: caches depend on it."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SHARD_TOKENS = 2**31
VERIFY_LIMIT = 512 * 2**20
"""Corpora up to this many bytes are hashed whenever they are opened; larger ones on request."""
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS = np.dtype("<i8")


class SplitWriter:
    """Writes the files of one split, document by document."""

    def __init__(self, folder: Path, split: str, *, dtype: np.dtype, eos_id: int) -> None:
        self._folder = folder
        self._split = split
        self.dtype = dtype
        self._shards: list[Path] = []
        self._ends = array.array("q")
        self._bytes = 0
        self._open_shard()
        self._file.write(np.array([eos_id], dtype=dtype).tobytes())

    def _open_shard(self) -> None:
        self._shards.append(self._folder / f"{self._split}-{len(self._shards):05d}.bin")
        self._file = self._shards[-1].open("wb")

    def write(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append a document: its ids with the eos, and the size of its text."""
        if self._file.tell() >= SHARD_TOKENS * self.dtype.itemsize:
            self._close_shard()
            self._open_shard()
        self._file.write(ids.astype(self.dtype, copy=False).tobytes())
        self._ends.append(len(ids) + (self._ends[-1] if self._ends else 0))
        self._bytes += text_bytes

    def _close_shard(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def finish(self) -> dict[str, Any]:
        """Write what is left; return the split's entry in the manifest."""
        self._close_shard()
        ends = self._folder / f"{self._split}.ends.bin"
        write_atomically(ends, np.array(self._ends, dtype=ENDS).tobytes())
        return {
            "tokens": self._ends[-1] if self._ends else 0,
            "bytes": self._bytes,
            "documents": len(self._ends),
            "shards": [_describe(path) for path in self._shards],
            "ends": _describe(ends),
        }


class TokenStream:
    """All ids of a split behind one another, one eos in front.

    Position 0 is that eos, so a window of S+1 positions from k*S holds S inputs and their S labels,
    and over all k every id of the split is a label exactly once.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], split: str) -> None:
        entry = manifest["splits"][split]
        dtype = DTYPES[manifest["dtype"]]
        self.eos_id: int = manifest["tokenizer"]["eos_id"]
        # Plain arrays over the same mapping: slicing a memmap object costs ten times as much.
        self._shards = [
            np.asarray(np.memmap(folder / shard["file"], dtype=dtype, mode="r"))
            for shard in entry["shards"]
        ]
        self._starts = [0, *np.cumsum([len(shard) for shard in self._shards]).tolist()]
        self._views: dict[int, np.ndarray] = {}
        self.tokens: int = self._starts[-1] - 1
        """Ids in the split, the eos of every document included, the one in front not."""
        self.bytes: int = entry["bytes"]
        """UTF-8 bytes of the split's text."""
        self.documents: int = entry["documents"]
        self.document_ends = np.empty(0, dtype=ENDS)
        """Position at which each document's eos stands, int64[documents], ascending."""
        if self.documents:
            self.document_ends = np.memmap(folder / entry["ends"]["file"], dtype=ENDS, mode="r")

    def window(self, start: int, length: int) -> np.ndarray:
        """Return `length` positions from `start` as int64; fewer at the end of the stream."""
        stop = min(start + length, self._starts[-1])
        found: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
        shard = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            found.append(self._shards[shard][start - self._starts[shard] :][: stop - start])
            start += len(found[-1])
            shard += 1
        return np.concatenate(found)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return full windows from each start, integers [len(starts), length]."""
        if len(self._shards) > 1:
            return np.stack([self.window(start, length) for start in starts.tolist()])
        if length not in self._views:
            ids = self._shards[0]
            self._views[length] = np.lib.stride_tricks.sliding_window_view(ids, length)
        return self._views[length][starts]


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
        deciding = [self.manifest["tokenizer"]["sha256"], self.manifest["splits"]]
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def dtype_for(vocab_size: int) -> np.dtype:
    """Choose the smallest of DTYPES that holds every id."""
    return DTYPES["uint16" if vocab_size <= 2**16 else "uint32"]


def is_corpus(folder: Path) -> bool:
    """Say whether a folder holds a prepared corpus (sound or not)."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read manifest.json and check its format. Raises: DataError."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = manifest.get("format")
    except (OSError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read ({reason}); prepare the corpus again") from None
    if found != FORMAT:
        raise DataError(f"{path} has format {found!r}, this version reads {FORMAT}; prepare again")
    return manifest


def read_corpus(folder: Path, *, verify: bool | None = None) -> Corpus:
    """Open a prepared folder.

    Sizes are always checked; hashes when `verify` is true, or by default up to VERIFY_LIMIT bytes.
    Raises: DataError naming the first file that is torn or changed.
    """
    manifest = read_manifest(folder)
    try:
        splits = manifest["splits"].values()
        files = [file for split in splits for file in (*split["shards"], split["ends"])]
        if verify is None:
            verify = sum(file["bytes"] for file in files) <= VERIFY_LIMIT
        for file in files:
            _check_file(folder / file["file"], file, verify)
        made = manifest["tokenizer"]["sha256"]
        tokenizer = load_tokenizer(folder / TOKENIZER)
        if tokenizer.sha256 != made:
            raise DataError(
                f"{folder / TOKENIZER} is not the tokenizer that made this corpus: sha256 "
                f"{tokenizer.sha256[:12]}, made with {made[:12]}; restore it or prepare again"
            )
        train, val = (TokenStream(folder, manifest, split) for split in ("train", "val"))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__} {error}"
        raise DataError(f"{folder / MANIFEST} is damaged ({reason}); prepare again") from None
    return Corpus(folder, manifest, tokenizer, train, val)


def _check_file(path: Path, described: dict[str, Any], verify: bool) -> None:
    """Compare a file with what the manifest remembers of it."""
    problem = None
    if not path.is_file():
        problem = "is missing"
    elif (size := path.stat().st_size) != described["bytes"]:
        problem = f"has {size} bytes, not {described['bytes']}"
    elif verify and _describe(path) != described:
        problem = "was changed: its sha256 differs"
    if problem:
        raise DataError(f"{path} {problem}; prepare the corpus again")


def check_tokenizer(corpus: Corpus, data: DataConfig) -> None:
    """Refuse a corpus that was made with another tokenizer than `data` names. Raises: DataError."""
    made = corpus.manifest["tokenizer"]
    if data.tokenizer in ("byte", "bpe"):
        fits = made["kind"] == data.tokenizer
        fits &= data.tokenizer == "byte" or made["vocab_size"] == data.bpe_vocab_size
    else:
        fits = data.tokenizer == "auto" or (
            load_tokenizer(Path(data.tokenizer)).sha256 == made["sha256"]
        )
    if not fits:
        raise DataError(
            f"{corpus.folder} was made with a {made['kind']} tokenizer of {made['vocab_size']} ids "
            f"(sha256 {made['sha256'][:12]}), not data.tokenizer={data.tokenizer}; "
            "set data.tokenizer=auto"
        )


def check_windows(stream: TokenStream, seq_len: int, split: str) -> None:
    """Refuse a split without one full window. Raises: DataError."""
    if stream.tokens < seq_len:
        raise DataError(
            f"the {split} split holds {stream.tokens} tokens, fewer than one window of "
            f"data.seq_len={seq_len}; give more text, set a smaller data.seq_len or another "
            "data.val_fraction"
        )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _describe(path: Path) -> dict[str, Any]:
    """Say what the manifest remembers of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256}
