"""What a worker does with one part of the input: hash its documents, then write its shard.

Every file appears by a rename, and a part counts as finished once its record, written last, exists
and the hashes in it match. So work that was cut off at any moment is either kept or done again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from curry_train.data import DataError, splits, token_file, tokenizer
from curry_train.data.sources import Part, read_documents

BATCH_CHARACTERS = 2**20


def scan_part(partial: Path, part: Part, text_key: str) -> dict[str, Any]:
    """Hash the documents of a part into `part-*.hashes`, 16 bytes each."""
    record = partial / f"part-{part.index:05d}.scan.json"
    path = partial / f"part-{part.index:05d}.hashes"
    if finished := _finished(record, {path: "sha256"}):
        return finished
    hashes = [splits.document_hash(text) for text in read_documents(part, text_key)]
    data = b"".join(hashes)
    write_atomically(path, data)
    found = {"documents": len(hashes), "sha256": hashlib.sha256(data).hexdigest()}
    write_json(record, found)
    return found


def read_hashes(partial: Path, part: Part) -> np.ndarray:
    """Read what scan_part wrote."""
    data = (partial / f"part-{part.index:05d}.hashes").read_bytes()
    return np.frombuffer(data, dtype=splits.HASH_DTYPE)


def write_part(
    partial: Path, part: Part, text_key: str, group_of: np.ndarray, scanned: str
) -> dict[str, Any]:
    """Write a part's shard, one stretch for each of splits.GROUPS; `group_of` assigns documents.

    Raises: DataError when the documents are no longer those whose hashes have sha256 `scanned`.
    """
    corpus = partial / "corpus"
    name = f"shard-{part.index:05d}"
    record = partial / f"part-{part.index:05d}.shard.json"
    path, ends_path = corpus / f"{name}.bin", corpus / f"{name}.ends.bin"
    if finished := _finished(record, {path: "sha256", ends_path: "ends_sha256"}):
        return finished
    coder = tokenizer.load_tokenizer(corpus / token_file.TOKENIZER)
    dtype = token_file.dtype_for(coder.vocab_size)
    groups = [_Group(path.with_suffix(f".{n}.tmp"), dtype, coder.eos_id) for n in splits.GROUPS]
    documents = 0
    read = hashlib.sha256()
    for texts in _batches(read_documents(part, text_key)):
        chosen = group_of[documents : documents + len(texts)]
        documents += len(texts)
        read.update(b"".join(map(splits.document_hash, texts)))
        if documents > len(group_of):
            break
        for number, group in enumerate(groups):
            group.write([t for t, c in zip(texts, chosen, strict=True) if c == number], coder)
    if read.hexdigest() != scanned:
        where = part.ranges[0].path
        raise DataError(f"{where} changed while it was read; run the command again")
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as shard:
        for group in groups:
            group.move_to(shard)
        shard.flush()
        os.fsync(shard.fileno())
    ends = np.concatenate([group.lengths() for group in groups]).cumsum().astype(token_file.ENDS)
    write_atomically(ends_path, ends.tobytes())
    os.replace(temporary, path)
    found = {
        "file": path.name,
        "ends_file": ends_path.name,
        "tokens": int(ends[-1]) if len(ends) else 0,
        "documents": len(ends),
        "sha256": token_file.file_sha256(path),
        "ends_sha256": hashlib.sha256(ends.tobytes()).hexdigest(),
        "groups": [group.counts() for group in groups],
    }
    write_json(record, found)
    return found


class _Group:
    """Documents of one part that share a fate, spooled to a file of their own."""

    def __init__(self, path: Path, dtype: np.dtype, eos_id: int) -> None:
        self.path = path
        self.file = path.open("w+b")
        self.dtype = dtype
        self.eos = np.array([eos_id], dtype=dtype)
        self.bytes = 0
        self.sizes: list[int] = []

    def write(self, texts: list[str], coder: tokenizer.Tokenizer) -> None:
        """Append documents, each with its eos."""
        for text, ids in zip(texts, coder.encode_batch(texts), strict=True):
            array = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.asarray(ids)
            self.file.write(np.concatenate([array.astype(self.dtype), self.eos]).tobytes())
            self.sizes.append(len(ids) + 1)
            self.bytes += len(text.encode("utf-8"))

    def lengths(self) -> np.ndarray:
        """Ids of each document, eos included."""
        return np.array(self.sizes, dtype=np.int64)

    def counts(self) -> dict[str, int]:
        """What a segment of the manifest says about it."""
        return {"tokens": sum(self.sizes), "documents": len(self.sizes), "bytes": self.bytes}

    def move_to(self, shard: BinaryIO) -> None:
        """Append all to the shard and remove the spool file."""
        self.file.seek(0)
        shutil.copyfileobj(self.file, shard, 2**20)
        self.file.close()
        self.path.unlink()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group documents until a batch holds BATCH_CHARACTERS."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _finished(record: Path, files: dict[Path, str]) -> dict[str, Any] | None:
    """Read the record of a finished part; None unless every file's sha256 is as recorded."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        for path, key in files.items():
            if token_file.file_sha256(path) != found[key]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode("utf-8"))
