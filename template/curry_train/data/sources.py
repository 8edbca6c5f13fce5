"""Find text on disk and read it as documents.

What a document is: one record of a jsonl, jsonl.zst or parquet file; for plain text the whole file
where an input comes as 100 files or more, else a piece of a file. Pieces are cut at blank lines
(within a very long paragraph at a line or word end), about 256 to a file and each 1 to 16 thousand
characters, so that one book yields a useful validation split; joined they give the file back.
Plain text is UTF-8; a byte order mark is dropped, CR LF and CR become LF, all else stays.

Work is divided into parts, a function of the files alone, so that results do not depend on the
number of workers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from curry_train.data import DataError

SUFFIXES = (".txt", ".jsonl", ".jsonl.zst", ".parquet")
EXTRAS = {".jsonl.zst": "zstandard", ".parquet": "pyarrow"}
MANY_TEXT_FILES = 100
PIECES_PER_FILE = 256
PIECE_CHARACTERS = (1024, 16384)
RANGE_BYTES = 4 * 2**20
MAX_PARTS = 128
MIN_LIBRARY_BYTES = 5_000_000
SKIPPED_IN_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
EMBEDDED = Path(__file__).resolve().parents[2] / "corpus" / "devils_dictionary.jsonl"


@dataclass(frozen=True)
class SourceFile:
    """One file of an input."""

    path: Path
    name: str
    """Relative to the input, with forward slashes; the same on every machine."""
    suffix: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """One input: its files in a fixed order."""

    name: str
    files: tuple[SourceFile, ...]
    weight: float = 1.0
    """Times that each training document appears in one epoch; see curry_train.data.prepare."""

    @property
    def sha256(self) -> str:
        """Identify the content: a single file's own sha256, else one over names and sha256s."""
        if len(self.files) == 1:
            return self.files[0].sha256
        lines = "".join(f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256(lines.encode("utf-8")).hexdigest()

    @property
    def bytes(self) -> int:
        """Size of all files on disk."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class FileRange:
    """A stretch of one file that is read on its own: bytes, or row groups of a parquet file."""

    path: Path
    suffix: str
    start: int
    stop: int
    piece: int = 0
    """Characters in one document of plain text; 0 takes the whole range as one."""


@dataclass(frozen=True)
class Part:
    """What one worker reads and writes in one go: ranges of one source."""

    index: int
    source: int
    ranges: tuple[FileRange, ...]
    bytes: int


def find_source(path: Path, *, weight: float = 1.0) -> Source:
    """Find the files of one input, a file or a folder of them.

    In a folder, hidden, empty and foreign files are passed over.
    Raises: DataError when there is nothing to read or a reader is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; name a text file or a folder of them")
    if path.is_dir():
        found = sorted(
            (entry.relative_to(path).as_posix(), entry)
            for entry in path.rglob("*")
            if entry.is_file() and not any(p.startswith(".") for p in entry.relative_to(path).parts)
        )
        known = [(name, entry) for name, entry in found if _suffix(entry)]
        if not known:
            raise DataError(f"{path} holds no file that ends in {', '.join(SUFFIXES)}")
        known = [(name, entry) for name, entry in known if entry.stat().st_size]
        if not known:
            raise DataError(f"{path} holds empty files only; give it text")
    else:
        if not _suffix(path):
            raise DataError(f"{path} has an unknown ending; known are {', '.join(SUFFIXES)}")
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; give it text")
        known = [(path.name, path)]
    return _source(path.resolve().name, known, weight=weight)


def embedded() -> Source:
    """The text that comes with the template: The Devil's Dictionary (see NOTICE)."""
    if not EMBEDDED.is_file():
        raise DataError(
            f"the embedded text is missing ({EMBEDDED.parent.name}/{EMBEDDED.name}); "
            "restore it or set data.input to a text of yours"
        )
    return _source("embedded", [(EMBEDDED.name, EMBEDDED)])


def python_stdlib() -> Source:
    """The running interpreter's own library: its .py files without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(
        (entry.relative_to(root).as_posix(), entry)
        for entry in root.rglob("*.py")
        if not SKIPPED_IN_LIBRARY.intersection(entry.relative_to(root).parts)
    )
    found = [(name, entry) for name, entry in found if entry.stat().st_size]
    size = sum(entry.stat().st_size for _, entry in found)
    if size < MIN_LIBRARY_BYTES:
        raise DataError(
            f"this Python's library holds {size} bytes of source, data=python_stdlib needs "
            f"{MIN_LIBRARY_BYTES}; use a full Python or set data.input to a text of yours"
        )
    return _source("python_stdlib", found, suffix=".txt")


def plan_parts(sources: Iterable[Source]) -> list[Part]:
    """Divide the sources into parts of similar size, at most about MAX_PARTS of them."""
    sources = list(sources)
    texts = sum(file.suffix == ".txt" for source in sources for file in source.files)
    target = max(RANGE_BYTES, sum(source.bytes for source in sources) // MAX_PARTS)
    parts: list[Part] = []
    for number, source in enumerate(sources):
        ranges: list[FileRange] = []
        size = 0
        for file in source.files:
            extent = _parquet(file.path).num_row_groups if file.suffix == ".parquet" else file.bytes
            for piece in _ranges(file, extent, whole=texts >= MANY_TEXT_FILES):
                cost = file.bytes * (piece.stop - piece.start) // extent
                if ranges and size + cost > target:
                    parts.append(Part(len(parts), number, tuple(ranges), size))
                    ranges, size = [], 0
                ranges.append(piece)
                size += cost
        parts.append(Part(len(parts), number, tuple(ranges), size))
    return parts


def read_documents(part: Part, text_key: str) -> Iterator[str]:
    """Yield the documents of a part in order; those without any text are left out.

    Raises: DataError naming the file and the offset, line or row of the first thing wrong.
    """
    readers = {".jsonl": _read_jsonl, ".jsonl.zst": _read_zst, ".parquet": _read_parquet}
    for piece in part.ranges:
        try:
            if piece.suffix == ".txt":
                documents = _read_text(piece)
            else:
                documents = readers[piece.suffix](piece, text_key)
            yield from (text for text in documents if not text.isspace() and text)
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


def _suffix(path: Path) -> str | None:
    return next((s for s in reversed(SUFFIXES) if path.name.lower().endswith(s)), None)


def _source(
    name: str, found: list[tuple[str, Path]], *, weight: float = 1.0, suffix: str | None = None
) -> Source:
    for ending, module in EXTRAS.items():
        first = next((path for _, path in found if _suffix(path) == ending), None)
        if suffix is None and first and importlib.util.find_spec(module) is None:
            raise DataError(f"{first} needs {module}; install it with: pip install {module}")
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(_sha256, (path for _, path in found)))
    files = tuple(
        SourceFile(path, relative, suffix or str(_suffix(path)), path.stat().st_size, sha256)
        for (relative, path), sha256 in zip(found, hashes, strict=True)
    )
    return Source(name, files, weight)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _ranges(file: SourceFile, extent: int, *, whole: bool) -> Iterator[FileRange]:
    """Divide a file where its format allows it: at line ends, blank lines or row groups."""
    if file.suffix == ".parquet":
        for group in range(extent):
            yield FileRange(file.path, file.suffix, group, group + 1)
        return
    if file.suffix == ".jsonl.zst" or (file.suffix == ".txt" and whole):
        yield FileRange(file.path, file.suffix, 0, file.bytes)
        return
    boundary = re.compile(rb"\n" if file.suffix == ".jsonl" else rb"\n\r?\n")
    low, high = PIECE_CHARACTERS
    characters = min(high, max(low, file.bytes // PIECES_PER_FILE))
    start = 0
    with file.path.open("rb") as handle:
        while start < file.bytes:
            stop = _after(boundary, handle, start + RANGE_BYTES, file.bytes)
            yield FileRange(file.path, file.suffix, start, stop, characters)
            start = stop


def _after(boundary: re.Pattern[bytes], handle, offset: int, size: int) -> int:
    """Offset just behind the first boundary at or after `offset`, or the end of the file."""
    tail = b""
    while offset < size:
        handle.seek(offset)
        block = tail + (handle.read(2**16) or b"\n\n")
        if match := boundary.search(block):
            return min(size, offset - len(tail) + match.end())
        offset += len(block) - len(tail)
        tail = block[-2:]
    return size


def _read_text(piece: FileRange) -> Iterator[str]:
    with piece.path.open("rb") as handle:
        handle.seek(piece.start)
        text = _decode(handle.read(piece.stop - piece.start), piece.path, piece.start)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return cut_text(text, piece.piece) if piece.piece else iter([text])


def _decode(data: bytes, where: object, offset: int) -> str:
    """Decode UTF-8 without a leading byte order mark; what is no text is named by its offset."""
    at = data.find(b"\0")
    text = ""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start if at < 0 else min(at, error.start)
    if at >= 0:
        raise DataError(
            f"{where} is not UTF-8 text: byte 0x{data[at]:02x} at offset {offset + at}; "
            "give text, saved as UTF-8"
        )
    return text.removeprefix("\ufeff") if offset == 0 else text


@dataclass(frozen=True)
class _Line:
    """A line of a range, for messages; lines before the range are counted only when printed."""

    path: Path
    start: int
    number: int

    def __str__(self) -> str:
        before = 0
        with self.path.open("rb") as handle:
            while block := handle.read(min(2**20, self.start - handle.tell())):
                before += block.count(b"\n")
        return f"{self.path}:{before + self.number}"


def _read_jsonl(piece: FileRange, text_key: str) -> Iterator[str]:
    with piece.path.open("rb") as handle:
        handle.seek(piece.start)
        offset = piece.start
        number = 0
        while offset < piece.stop and (data := handle.readline()):
            number += 1
            yield _record(data, _Line(piece.path, piece.start, number), offset, text_key)
            offset += len(data)


def _read_zst(piece: FileRange, text_key: str) -> Iterator[str]:
    offset = number = 0
    rest = b""
    for block in _decompressed(piece.path):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for data in lines:
            number += 1
            yield _record(data, _Line(piece.path, 0, number), offset, text_key)
            offset += len(data) + 1
    if rest:
        yield _record(rest, _Line(piece.path, 0, number + 1), offset, text_key)


def _decompressed(path: Path) -> Iterator[bytes]:
    import zstandard

    frame = None
    with path.open("rb") as handle:
        while data := handle.read(2**20):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise DataError(f"{path} is no intact zstd file: {error}") from None
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise DataError(f"{path} is no intact zstd file: it ends inside a frame; copy it again")


def _record(data: bytes, where: _Line, offset: int, text_key: str) -> str:
    """Text of one jsonl line; an empty line gives an empty text."""
    decoded = _decode(data, where, offset)
    if not decoded.strip():
        return ""
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}") from None
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f"{where} {_lacks(record, text_key)}; every line needs a text under that key "
            "(prepare: --text-key)"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(f"{where} holds half a surrogate pair, \\u{code:04x}; repair it") from None
    return text


def _lacks(record: object, text_key: str) -> str:
    if not isinstance(record, dict):
        return f"is no JSON object, so it has no key {text_key!r}"
    if text_key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        return f"has no key {text_key!r} (keys: {keys})"
    return f"has no text under {text_key!r}, but {type(record[text_key]).__name__}"


def _parquet(path: Path):
    from pyarrow import ArrowException, parquet

    try:
        return parquet.ParquetFile(path)
    except ArrowException as error:
        raise DataError(
            f"{path} is no intact parquet file: {' '.join(str(error).split())}"
        ) from None


def _read_parquet(piece: FileRange, text_key: str) -> Iterator[str]:
    file = _parquet(piece.path)
    names = file.schema_arrow.names
    if text_key not in names:
        raise DataError(
            f"{piece.path} has no column {text_key!r} (columns: {', '.join(names)}); "
            "choose one (prepare: --text-key)"
        )
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    for batch in file.iter_batches(
        row_groups=list(range(piece.start, piece.stop)), columns=[text_key]
    ):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                kind = type(text).__name__
                raise DataError(f"{piece.path} row {row}: {text_key!r} holds no text, but {kind}")
            yield text
            row += 1
