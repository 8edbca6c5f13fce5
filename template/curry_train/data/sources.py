"""Find text on disk and read it as documents.

What a document is: one record of a jsonl, jsonl.zst or parquet file; for plain text the whole file
where an input has 100 files or more, else a piece of a file. Pieces are cut at blank lines (within
a very long paragraph at a line or word end), about 256 to a file and each 1 to 16 thousand
characters, so that one book yields a useful validation split; joined they give the file back.
Plain text is UTF-8; a byte order mark is dropped, CR LF and CR become LF, all else stays.

Work is divided into parts, a function of the files alone, so that results do not depend on the
number of workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from curry_train.data import DataError

SUFFIXES = (".txt", ".jsonl", ".jsonl.zst", ".parquet")
NEED_PYARROW = (".jsonl.zst", ".parquet")
MANY_TEXT_FILES = 100
PIECES_PER_FILE = 256
PIECE_CHARACTERS = (1024, 16384)
RANGE_BYTES = 4 * 2**20
MAX_PARTS = 1024
MIN_LIBRARY_BYTES = 5_000_000
SKIPPED_IN_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
EMBEDDED = Path(__file__).resolve().parents[2] / "corpus" / "devils_dictionary.jsonl"


@dataclass(frozen=True)
class Source:
    """One input: its files in a fixed order, each with one of SUFFIXES as its format."""

    name: str
    files: tuple[tuple[Path, str], ...]
    sha256: str
    """Of a single file, else one over the names below the input and the sha256 of each file."""
    weight: float = 1.0
    """Times that each training document appears in one epoch; see curry_train.data.prepare."""


@dataclass(frozen=True)
class FileRange:
    """A stretch of one file: the lines that begin in it, or row groups of a parquet file."""

    path: Path
    suffix: str
    start: int
    stop: int
    bytes: int
    piece: int = 0
    """Characters in one document of plain text; 0 takes the whole range as one."""


@dataclass
class Part:
    """What one worker reads in one go: ranges of one source, by its number."""

    source: int
    ranges: list[FileRange]
    bytes: int


def find_source(path: Path, *, weight: float = 1.0) -> Source:
    """Find the files of one input, a file or a folder of them.

    In a folder, hidden, empty and foreign files are passed over.
    Raises: DataError when there is nothing to read or a reader is not installed.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; name a text file or a folder of them")
    found = {path.name: path}
    if path.is_dir():
        found = {name: file for name, file in _files(path, "*") if not re.match(r"\.|.*/\.", name)}
    found = {name: file for name, file in found.items() if _suffix(file)}
    if not found:
        raise DataError(f"{path}: no file that ends in {', '.join(SUFFIXES)}")
    found = {name: file for name, file in found.items() if file.stat().st_size}
    if not found:
        raise DataError(f"{path} is empty; give it text")
    return _source(path.resolve().name, found, weight=weight)


def embedded() -> Source:
    """The text that comes with the template: The Devil's Dictionary (see NOTICE)."""
    if not EMBEDDED.is_file():
        raise DataError(
            f"the embedded text is missing ({EMBEDDED.parent.name}/{EMBEDDED.name}); "
            "restore it or set data.input to a text of yours"
        )
    return _source("embedded", {EMBEDDED.name: EMBEDDED})


def python_stdlib() -> Source:
    """The running interpreter's own library: its .py files without tests and installed packages."""
    found = {
        name: entry
        for name, entry in _files(Path(sysconfig.get_paths()["stdlib"]), "*.py")
        if not SKIPPED_IN_LIBRARY.intersection(name.split("/")) and entry.stat().st_size
    }
    size = sum(entry.stat().st_size for entry in found.values())
    if size < MIN_LIBRARY_BYTES:
        raise DataError(
            f"this Python's library holds {size} bytes of source, data=python_stdlib needs "
            f"{MIN_LIBRARY_BYTES}; use a full Python or set data.input to a text of yours"
        )
    return _source("python_stdlib", found, suffix=".txt")


def plan_parts(sources: Sequence[Source]) -> list[Part]:
    """Divide the sources into parts of similar size, at most about MAX_PARTS of them."""
    total = sum(path.stat().st_size for source in sources for path, _ in source.files)
    target = max(RANGE_BYTES, total // MAX_PARTS)
    parts: list[Part] = []
    for number, source in enumerate(sources):
        parts.append(Part(number, [], 0))
        for piece in _ranges(source):
            if parts[-1].ranges and parts[-1].bytes + piece.bytes > target:
                parts.append(Part(number, [], 0))
            parts[-1].ranges.append(piece)
            parts[-1].bytes += piece.bytes
    return parts


def read_documents(part: Part, text_key: str) -> Iterator[str]:
    """Yield the documents of a part in order; those without any text are left out.

    Raises: DataError naming the file and the offset, line or row of the first thing wrong.
    """
    readers = {".txt": _read_text, ".parquet": _read_parquet}
    for piece in part.ranges:
        try:
            documents = readers.get(piece.suffix, _read_jsonl)(piece, text_key)
            yield from (text for text in documents if text and not text.isspace())
        except OSError as error:
            raise DataError(f"{piece.path} cannot be read: {error.strerror or error}") from None


def cut_text(text: str, size: int) -> Iterator[str]:
    """Cut text into pieces of about `size` characters at blank lines; joined they give it back."""
    paragraphs = re.split(r"(\n(?:[ \t]*\n)+)", text)
    piece = ""
    for number in range(0, len(paragraphs), 2):
        piece += "".join(paragraphs[number : number + 2])
        while len(piece) > 2 * size:
            cut = max(piece.rfind("\n", size // 2, size), piece.rfind(" ", size // 2, size)) + 1
            cut = cut or size
            yield piece[:cut]
            piece = piece[cut:]
        if len(piece) >= size:
            yield piece
            piece = ""
    if piece:
        yield piece


def _files(folder: Path, pattern: str) -> list[tuple[str, Path]]:
    files = (entry for entry in folder.rglob(pattern) if entry.is_file())
    return sorted((entry.relative_to(folder).as_posix(), entry) for entry in files)


def _suffix(path: Path) -> str:
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")


def _source(
    name: str, found: dict[str, Path], *, weight: float = 1.0, suffix: str | None = None
) -> Source:
    files = tuple((path, suffix or _suffix(path)) for path in found.values())
    for path, kind in files:
        if kind in NEED_PYARROW and importlib.util.find_spec("pyarrow") is None:
            raise DataError(f"{path} needs pyarrow; install it with: pip install pyarrow")
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(_sha256, found.values()))
    if len(hashes) == 1:
        return Source(name, files, hashes[0], weight)
    lines = "".join(f"{sha256}  {name}\n" for sha256, name in zip(hashes, found, strict=True))
    return Source(name, files, hashlib.sha256(lines.encode("utf-8")).hexdigest(), weight)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _ranges(source: Source) -> Iterator[FileRange]:
    """Divide the files where their format allows it: at line ends or row groups."""
    whole = [suffix for _, suffix in source.files].count(".txt") >= MANY_TEXT_FILES
    low, high = PIECE_CHARACTERS
    for path, suffix in source.files:
        size = path.stat().st_size
        if suffix == ".parquet":
            groups = _parquet(path).num_row_groups
            for group in range(groups):
                yield FileRange(path, suffix, group, group + 1, size // groups)
        elif suffix == ".jsonl.zst" or (suffix == ".txt" and whole):
            yield FileRange(path, suffix, 0, sys.maxsize, size)
        else:
            piece = min(high, max(low, size // PIECES_PER_FILE))
            for start in range(0, size, RANGE_BYTES):
                stop = min(size, start + RANGE_BYTES)
                yield FileRange(path, suffix, start, stop, stop - start, piece)


def _lines(piece: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield each line that begins in the range with its offset in the (decompressed) file."""
    if piece.suffix == ".jsonl.zst":
        import pyarrow

        stream = pyarrow.input_stream(piece.path, compression="zstd")
        file = io.BufferedReader(stream, 2**20)
    else:
        file = piece.path.open("rb")
    with file:
        offset = 0
        if piece.start:  # a line that begins before the range belongs to the one before
            file.seek(piece.start - 1)
            offset = piece.start - 1 + len(file.readline())
        while offset < piece.stop and (line := file.readline()):
            yield offset, line
            offset += len(line)


def _read_text(piece: FileRange, _: str) -> Iterator[str]:
    lines = list(_lines(piece))
    try:
        text = _decode(b"".join(line for _, line in lines), lines[0][0] if lines else 0)
    except ValueError as error:
        raise DataError(f"{piece.path} {error}; give text, saved as UTF-8") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return cut_text(text, piece.piece) if piece.piece else iter([text])


def _decode(data: bytes, offset: int) -> str:
    """Decode UTF-8 without a leading byte order mark; what is no text is named by its offset."""
    at = data.find(b"\0")
    text = ""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start if at < 0 else min(at, error.start)
    if at >= 0:
        raise ValueError(f"is not UTF-8 text: byte 0x{data[at]:02x} at offset {offset + at}")
    return text.removeprefix("\ufeff") if offset == 0 else text


def _read_jsonl(piece: FileRange, text_key: str) -> Iterator[str]:
    for offset, line in _lines(piece):
        try:
            decoded = _decode(line, offset)
            yield _record(decoded, text_key) if decoded.strip() else ""
        except ValueError as error:
            before = dataclasses.replace(piece, start=0, stop=offset)
            number = sum(1 for _ in _lines(before)) + 1
            raise DataError(f"{piece.path}:{number} {error}") from None


def _record(line: str, text_key: str) -> str:
    """Return the text of one JSON object; a ValueError says what is wrong with the line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        found = list(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"has no text under {text_key!r} (found: {found}); see prepare --text-key")
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"holds half a surrogate pair, {half[0]!a}; repair it")
    return text


def _parquet(path: Path):
    from pyarrow import ArrowException, parquet

    try:
        return parquet.ParquetFile(path)
    except ArrowException as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is no intact parquet file: {reason}") from None


def _read_parquet(piece: FileRange, text_key: str) -> Iterator[str]:
    file = _parquet(piece.path)
    names = file.schema_arrow.names
    if text_key not in names:
        raise DataError(
            f"{piece.path} has no column {text_key!r} (found: {names}); see prepare --text-key"
        )
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, piece.stop))
    for batch in file.iter_batches(row_groups=groups, columns=[text_key]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                kind = type(text).__name__
                raise DataError(f"{piece.path} row {row}: {text_key!r} holds no text, but {kind}")
            yield text
            row += 1
