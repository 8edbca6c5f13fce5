"""Documents of text files and folders: .txt, .jsonl, .jsonl.gz, .parquet.

A record of jsonl or parquet is a document. A .txt file is one where a folder has several and it is
no longer than 64 kB; else it is cut at <|endoftext|>, at blank lines, or at line ends, whichever it
has first. Nothing is held but one batch.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import UsageError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
WHOLE_FILE_BYTES = 64 * 1024
END_OF_TEXT = "<|endoftext|>"
BATCH_CHARACTERS = 4 * 2**20
BATCH_DOCUMENTS = 20_000


@dataclass
class Document:
    """One text and where it is."""

    text: str
    place: str
    """FILE:LINE, or FILE for a whole one."""
    group: Any = None
    """Value under --group, or None."""


@dataclass
class Collection:
    """All text of one flag: its files, and the keys of what is in a record."""

    name: str
    """train, test, or the name of an --eval."""
    files: list[Path]
    text_key: str = "text"
    group_key: str | None = None

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def documents(self) -> Iterator[Document]:
        """Yield the documents that hold any text, in order."""
        several = sum(suffix_of(file) == ".txt" for file in self.files) > 1
        for file in self.files:
            kind = suffix_of(file)
            if kind == ".txt":
                found = _text_file(file, several)
            elif kind == ".parquet":
                found = _parquet(file, self.text_key, self.group_key)
            else:
                found = _jsonl(file, self.text_key, self.group_key)
            yield from (document for document in found if document.text.strip())

    def batches(self) -> Iterator[list[Document]]:
        """Yield documents in lists of some megabytes."""
        batch: list[Document] = []
        size = 0
        for document in self.documents():
            batch.append(document)
            size += len(document.text)
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def suffix_of(path: Path) -> str:
    """Name the format, or nothing."""
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")


def open_collection(
    flag: str, path: str, *, name: str, text_key: str, group_key: str | None
) -> Collection:
    """Find the files of one flag; refuses what holds no text that can be read."""
    place = Path(path)
    if not place.exists():
        raise UsageError(f"{flag} {path}: no such file or folder", fix=f"set {flag} PATH")
    found = [place]
    if place.is_dir():
        found = sorted(file for file in place.rglob("*") if file.is_file() and suffix_of(file))
        found = [f for f in found if not any(p.startswith(".") for p in f.relative_to(place).parts)]
    allowed = f"it takes {', '.join(SUFFIXES)}, or a folder of them"
    if not found or not suffix_of(found[0]):
        raise UsageError(
            f"{flag} {path}: no text file", allowed, "name the file's format by its end"
        )
    found = [file for file in found if file.stat().st_size]
    if not found:
        raise UsageError(f"{flag} {path} is empty", "a check needs documents", f"set {flag} PATH")
    if any(suffix_of(f) == ".parquet" for f in found):
        need_pyarrow(flag, path)
    return Collection(name, found, text_key, group_key)


def need_pyarrow(flag: str, path: str) -> None:
    """Refuse parquet where nothing can read it."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError(
            f"{flag} {path} is parquet", "reading it needs pyarrow", "pip install pyarrow"
        )


def _decoded(file: Path, data: bytes, offset: int = 0) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise UsageError(
            f"{file} is no UTF-8: byte 0x{data[error.start]:02x} at offset {at}",
            "text is read as UTF-8",
            "save it as UTF-8 (iconv -f LATIN1 -t UTF-8, say)",
        ) from None


def _text_file(file: Path, several: bool) -> Iterator[Document]:
    text = _decoded(file, file.read_bytes()).removeprefix("\ufeff").replace("\r\n", "\n")
    if several and len(text) <= WHOLE_FILE_BYTES:
        yield Document(text, str(file))
        return
    cut = next((c for c in (END_OF_TEXT, "\n\n") if c in text.strip()), "\n")
    line = 1
    for piece in text.split(cut):
        before = len(piece) - len(piece.lstrip("\n"))
        yield Document(piece, f"{file}:{line + before}")
        line += piece.count("\n") + cut.count("\n")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
            yield from enumerate(stream, start=1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"{file} is a broken gzip file: {error}",
            "it must decompress to its end",
            "fetch or compress it again",
        ) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from None


def _jsonl(file: Path, text_key: str, group_key: str | None) -> Iterator[Document]:
    for number, data in _lines(file):
        line = _decoded(file, data).removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{file}:{number} is no JSON: {error}", "each line is one JSON object"
            ) from None
        yield _record(record, f"{file}:{number}", text_key, group_key)


def _record(record: Any, place: str, text_key: str, group_key: str | None) -> Document:
    if not isinstance(record, dict):
        raise UsageError(f"{place} is a {type(record).__name__}", "each line is one JSON object")
    for key, flag in ((text_key, "--text-key"), (group_key, "--group")):
        if key is not None and key not in record:
            raise UsageError(
                f"{place} has no {key!r} (it has {', '.join(map(str, record))})",
                "each record needs it",
                f"set {flag} KEY",
            )
    if not isinstance(record[text_key], str):
        raise UsageError(
            f"{place}: {text_key!r} is {type(record[text_key]).__name__}", "it must be a string"
        )
    return Document(record[text_key], place, None if group_key is None else record[group_key])


def _parquet(file: Path, text_key: str, group_key: str | None) -> Iterator[Document]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(file) as opened:
            keys = [text_key, *([group_key] if group_key else [])]
            missing = [key for key in keys if key not in opened.schema_arrow.names]
            if missing:
                raise UsageError(
                    f"{file} has no column {missing[0]!r} "
                    f"(it has {', '.join(opened.schema_arrow.names)})",
                    fix="set --text-key or --group to a column",
                )
            number = 0
            for batch in opened.iter_batches(columns=keys, batch_size=4096):
                for record in batch.to_pylist():
                    yield _record(record, f"{file}: row {number}", text_key, group_key)
                    number += 1
    except ArrowException as error:
        raise UsageError(
            f"{file} is no whole parquet file: {' '.join(str(error).split())}"
        ) from None
