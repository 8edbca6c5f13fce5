"""Tables of CSV, Parquet and NumPy files as columns of numbers or of categories."""

from __future__ import annotations

import csv
import difflib
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from text_documents import need_pyarrow

from kit.errors import UsageError

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".parquet", ".npy", ".npz")
MISSING = {"", "na", "n/a", "nan", "null", "none"}
ROWS_AT_ONCE = 50_000
DECIMAL_COMMA = re.compile(r"^(\s*[-+]?\d*),(\d+(?:[eE][-+]?\d+)?\s*)$")


@dataclass
class Column:
    """One column: float64 [rows] with NaN for what is missing, or categories."""

    name: str
    values: Any
    """float64 [rows]; of a category its number, NaN where it is missing."""
    levels: list[str] | None = None
    """The categories by number; None for a column of numbers."""

    def take(self, rows: Any) -> Column:
        """Give the column at some rows."""
        return Column(self.name, self.values[rows], self.levels)


class Table:
    """Columns of one length by their names."""

    def __init__(self, columns: list[Column]) -> None:
        self.columns = {column.name: column for column in columns}
        self.rows = len(columns[0].values) if columns else 0

    def column(self, name: str, flag: str) -> Column:
        """Return a column, or say which are there."""
        if name in self.columns:
            return self.columns[name]
        near = difflib.get_close_matches(name, self.columns, n=1)
        known = ", ".join(list(self.columns)[:12])
        hint = f"did you mean {near[0]}?" if near else f"its columns are {known}"
        raise UsageError(f"{flag} {name}: the table has no such column", hint)


def is_table(path: str) -> bool:
    """Tell whether a name ends as a table's does (Parquet may be either)."""
    return path.lower().endswith(SUFFIXES)


def read_table(flag: str, path: str) -> Table:
    """Read one file; refuses what is no table of at least two rows."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{flag} {path}: no such file", fix=f"set {flag} FILE")
    kind = next((s for s in SUFFIXES if file.name.lower().endswith(s)), None)
    if kind is None:
        raise UsageError(
            f"{flag} {path}: its end names no format", f"it takes {', '.join(SUFFIXES)}"
        )
    if file.stat().st_size == 0:
        raise UsageError(f"{flag} {path} is empty", "a table has a header and rows")
    if kind == ".parquet":
        need_pyarrow(flag, path)
        columns = _parquet(file)
    elif kind in (".npy", ".npz"):
        columns = _numpy(file)
    else:
        columns = _csv(file)
    table = Table(columns)
    if len(table.columns) != len(columns):
        raise UsageError(f"{path} names a column twice", "each column needs a name of its own")
    if table.rows < 2:
        raise UsageError(f"{path} has {table.rows} rows", "a check compares rows: at least 2")
    return table


def joined(train: Table, test: Table) -> Table:
    """Put the rows of test behind those of train; both need the same columns of one kind."""
    only = [sorted(set(a.columns) - set(b.columns)) for a, b in ((train, test), (test, train))]
    if only[0] or only[1]:
        parts = [
            f"{w} alone has {', '.join(n[:5])}"
            for w, n in zip(("train", "test"), only, strict=True)
            if n
        ]
        raise UsageError(
            f"the columns differ: {'; '.join(parts)}", "both files need the same columns"
        )
    columns = []
    for name, one in train.columns.items():
        other = test.columns[name]
        if (one.levels is None) != (other.levels is None):
            one, other = _as_category(one), _as_category(other)
        if one.levels is None or other.levels is None:
            columns.append(Column(name, np.concatenate([one.values, other.values])))
            continue
        levels = list(dict.fromkeys([*one.levels, *other.levels]))
        place = {level: number for number, level in enumerate(levels)}
        moved = np.array([place[level] for level in other.levels] or [0], float)
        known = ~np.isnan(other.values)
        values = np.full(len(other.values), np.nan)
        values[known] = moved[other.values[known].astype(int)]
        columns.append(Column(name, np.concatenate([one.values, values]), levels))
    return Table(columns)


def _as_category(column: Column) -> Column:
    if column.levels is not None:
        return column
    levels, codes = np.unique(column.values[~np.isnan(column.values)], return_inverse=True)
    values = np.full(len(column.values), np.nan)
    values[~np.isnan(column.values)] = codes
    return Column(column.name, values, [f"{level:g}" for level in levels.tolist()])


def _csv(file: Path) -> list[Column]:
    """Read a CSV; a column that turns out to be no numbers makes the reading begin again."""
    forced: set[int] = set()
    while True:
        try:
            return _csv_columns(file, forced)
        except _NoNumbers as caught:
            forced.add(caught.number)


class _NoNumbers(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def _csv_columns(file: Path, forced: set[int]) -> list[Column]:
    rows = _csv_rows(file)
    _, header = next(rows, (0, []))
    if not header:
        raise UsageError(f"{file} has no header", "its first line names the columns")
    levels: dict[int, dict[str, int]] = {}
    parts: list[list[Any]] = [[] for _ in header]
    chunk: list[list[str]] = []

    def store() -> None:
        for number, texts in enumerate(zip(*chunk, strict=True)):
            parts[number].append(_values(number, texts, levels, forced, first=not parts[number]))

    for line, row in rows:
        if len(row) != len(header):
            raise UsageError(
                f"{file}:{line} has {len(row)} fields, the header {len(header)}",
                "every line needs as many as the header",
            )
        chunk.append(row)
        if len(chunk) >= ROWS_AT_ONCE:
            store()
            chunk = []
    if chunk:
        store()
    return [
        Column(
            name.strip(),
            np.concatenate([np.empty(0), *parts[number]]),
            list(levels[number]) if number in levels else None,
        )
        for number, name in enumerate(header)
    ]


def _values(
    number: int,
    texts: tuple[str, ...],
    levels: dict[int, dict[str, int]],
    forced: set[int],
    *,
    first: bool,
) -> Any:
    """Turn fields into numbers, or into numbers of categories."""
    if number not in levels and number not in forced:
        try:
            return np.array(
                [t if t.strip().lower() not in MISSING else "nan" for t in texts], float
            )
        except ValueError:
            if not first:
                raise _NoNumbers(number) from None
    known = levels.setdefault(number, {})
    stripped = (text.strip() for text in texts)
    return np.array(
        [np.nan if t.lower() in MISSING else known.setdefault(t, len(known)) for t in stripped],
        float,
    )


def _csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    opener: Any = gzip.open if file.name.lower().endswith(".gz") else open
    try:
        with opener(file, "rt", encoding="utf-8-sig", newline="") as stream:
            start = stream.readline()
            stream.seek(0)
            delimiter = max("\t,;|", key=re.sub(r'"[^"]*"', "", start).count)
            reader = csv.reader(stream, delimiter=delimiter)
            for row in reader:
                if row and delimiter == ";":  # where numbers may have a decimal comma
                    row = [DECIMAL_COMMA.sub(r"\1.\2", field) for field in row]
                if row:
                    yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is no UTF-8: byte 0x{error.object[error.start]:02x}",
            "tables are read as UTF-8",
            "save it as UTF-8 (iconv -f LATIN1 -t UTF-8, say)",
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"{file} is a broken gzip file: {error}", "it must decompress to its end"
        ) from None
    except csv.Error as error:
        raise UsageError(f"{file} is no CSV: {error}") from None


def _parquet(file: Path) -> list[Column]:
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(file)
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file} is no whole parquet file: {reason}") from None
    return [
        _column(name, np.asarray(table[name].to_pylist(), dtype=object))
        for name in table.column_names
    ]


def _numpy(file: Path) -> list[Column]:
    try:
        loaded = np.load(file, allow_pickle=False)
        arrays = {name: loaded[name] for name in loaded.files} if file.suffix == ".npz" else None
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"{file} cannot be read: {error}", "it takes arrays of numbers or text, no objects"
        ) from None
    except Exception as error:  # zipfile raises its own for a file that is no archive
        raise UsageError(f"{file} is no {file.suffix} file: {error}") from None
    if arrays is None:
        if loaded.dtype.names:
            arrays = {name: loaded[name] for name in loaded.dtype.names}
        elif loaded.ndim == 2:
            arrays = {str(number): loaded[:, number] for number in range(loaded.shape[1])}
        else:
            raise UsageError(f"{file} has shape {loaded.shape}", "a table is [rows, columns]")
    columns = []
    arrays = {name: array for name, array in arrays.items() if array.ndim}  # a version, a comment
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) != 1:
        raise UsageError(f"{file} has arrays of {sorted(lengths)} rows", "all need the same")
    for name, array in arrays.items():
        columns += spread(name, array)
    return columns


def spread(name: str, array: Any) -> list[Column]:
    """Turn an array [rows, ...] into columns; those of a wide one are NAME[0], NAME[1] and on."""
    if array.ndim <= 1:
        return [_column(name, array)]
    flat = array.reshape(len(array), -1)
    return [_column(f"{name}[{number}]", flat[:, number]) for number in range(flat.shape[1])]


def _column(name: str, array: Any) -> Column:
    if array.dtype.kind in "iufb":
        return Column(name, array.astype(float))
    if array.dtype.kind in "mM":
        array = np.where(np.isnat(array), "", np.datetime_as_string(array))
    values = array.tolist()
    if all(value is None or isinstance(value, (int, float)) for value in values):
        return Column(name, np.array([np.nan if v is None else v for v in values], float))
    levels: dict[str, int] = {}
    texts = ["" if value is None else str(value).strip() for value in values]
    codes = [np.nan if t.lower() in MISSING else levels.setdefault(t, len(levels)) for t in texts]
    return Column(name, np.array(codes, float), list(levels))


def times_of(column: Column, flag: str) -> tuple[Any, str]:
    """Return when each row is, float64 [rows], and the unit: "" for numbers, "days" for dates."""
    if np.isnan(column.values).any():
        row = int(np.flatnonzero(np.isnan(column.values))[0])
        raise UsageError(f"{flag} {column.name}: row {row} has no time", "each row needs one")
    if column.levels is None:
        return column.values, ""
    days = []
    for level in column.levels:
        try:
            stamp = np.datetime64(level.replace("/", "-").removesuffix("Z"))
        except ValueError:
            raise UsageError(
                f"{flag} {column.name} holds {level!r}",
                "times are numbers or dates such as 2024-05-31 or 2024-05-31T18:00",
            ) from None
        days.append(stamp.astype("M8[us]").astype(np.int64) / 86_400e6)
    return np.array(days)[column.values.astype(int)], "days"
