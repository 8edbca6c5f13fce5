"""One entry into a literal dict of a source file, and out again: every other byte stays.

The syntax tree says where the dict and its entries stand; the bytes between are the user's.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

BOM = b"\xef\xbb\xbf"


class EditError(Exception):
    """The file holds no dict that an entry can be put into; the message says what to do by hand."""


@dataclass(frozen=True)
class Entry:
    """A key and a value of a literal dict, both text."""

    dict_name: str
    key: str
    value: str

    @property
    def line(self) -> str:
        """The entry as it is typed."""
        return f'"{self.key}": "{self.value}",'


def find_dict(source: bytes, name: str, path: str, line: str) -> ast.Dict:
    """Return the one literal dict that a module binds to `name` at its top level.

    Raises EditError, which names the line to add by hand.
    """
    by_hand = f"add by hand to {name} of {path}: {line}"
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise EditError(f"{path} is no Python: {error}; mend it, or {by_hand}") from None
    found = [getattr(node, "value", None) for node in body if name in _targets(node)]
    if len(found) == 1 and isinstance(found[0], ast.Dict):
        return found[0]
    what = f"binds {name} {len(found)} times" if len(found) > 1 else f"has no literal dict {name}"
    raise EditError(f"{path} {what}, so nothing was written; {by_hand}")


def _targets(node: ast.stmt) -> list[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def keys_of(node: ast.Dict) -> list[str]:
    """Return the keys that are written as text."""
    return [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]


def insert(source: bytes, entry: Entry, path: str) -> bytes:
    """Return the file with the entry after the dict's last, or first where no comma ends the last.

    Raises EditError when there is no such dict, or it has the key.
    """
    node = find_dict(source, entry.dict_name, path, entry.line)
    if entry.key in keys_of(node):
        raise EditError(f"{path}: {entry.dict_name} has {entry.key!r} already; choose another name")
    text, newline = entry.line.encode(), _newline(source)
    if not node.keys:
        at = _start(source, node) + 1
        end = _end(source, node) - 1
        blank = b"" if source[at:end].strip() or b"\n" in source[at:end] else newline
        changed = source[:at] + newline + b"    " + text + blank + source[at:]
    else:
        changed = _beside(source, node, text)
    again = find_dict(changed, entry.dict_name, path, entry.line)
    if keys_of(again).count(entry.key) != 1:
        raise EditError(f"{path}: {entry.dict_name} is written in a way that is not understood;"
                        f" nothing was written; add by hand: {entry.line}")  # fmt: skip
    return changed


def _beside(source: bytes, node: ast.Dict, text: bytes) -> bytes:
    """Put text after the last entry when a comma ends it, else before the first."""
    last = _end(source, node.values[-1])
    comma = _comma(source, last, _end(source, node) - 1)
    if comma is None:
        at = _start_of_entry(source, node, 0)
        own_line = _indent(source, at)
        gap = b" " if own_line is None else _newline(source) + own_line
        return source[:at] + text + gap + source[at:]
    indent = _indent(source, _start_of_entry(source, node, len(node.keys) - 1))
    line_end = source.find(b"\n", comma)
    if indent is None or not 0 <= line_end < _end(source, node):
        return source[:comma] + b" " + text + source[comma:]
    return source[: line_end + 1] + indent + text + _newline(source) + source[line_end + 1 :]


def remove(source: bytes, entry: Entry, path: str) -> bytes:
    """Return the file without the entry, whatever else was changed around it.

    Raises EditError when the dict is gone, or the key leads elsewhere; a key that is gone is fine.
    """
    node = find_dict(source, entry.dict_name, path, f"(remove) {entry.line}")
    places = [i for i, key in enumerate(node.keys) if _text(key) == entry.key]
    if not places:
        return source
    index = places[0]
    if _text(node.values[index]) != entry.value:
        raise EditError(
            f"{path}: {entry.key!r} of {entry.dict_name} was changed; remove it by hand"
        )
    start, end = _start_of_entry(source, node, index), _end(source, node.values[index])
    comma = _comma(source, end, _end(source, node) - 1)
    if comma is None and index:  # the last one, without a comma: the one before it goes too
        return source[: _end(source, node.values[index - 1])] + source[end:]
    end = comma or end
    indent, line_end = _indent(source, start), _blank_until_line_end(source, end)
    if indent is not None and line_end is not None:
        start, end = start - len(indent), line_end
    elif (
        indent is None
        and source[start - 1 : start] == b" "
        and source[start - 2 : start - 1] == b","
    ):
        start -= 1
    else:
        while source[end : end + 1] == b" ":
            end += 1
    left = source[:start] + source[end:]
    return _closed_up(left, entry, path)


def _closed_up(source: bytes, entry: Entry, path: str) -> bytes:
    """Write an empty dict that holds nothing but white space as {}."""
    node = find_dict(source, entry.dict_name, path, entry.line)
    inside = slice(_start(source, node) + 1, _end(source, node) - 1)
    if node.keys or source[inside].strip():
        return source
    return source[: inside.start] + source[inside.stop :]


def _text(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _line_starts(source: bytes) -> list[int]:
    """Return where each line begins, as the syntax tree counts; it knows no byte order mark."""
    starts = [len(BOM) if source.startswith(BOM) else 0]
    return starts + [match.end() for match in re.finditer(rb"\r\n|\r|\n", source)]


def _start(source: bytes, node: ast.expr) -> int:
    return _line_starts(source)[node.lineno - 1] + node.col_offset


def _end(source: bytes, node: ast.expr) -> int:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return _line_starts(source)[node.end_lineno - 1] + node.end_col_offset


def _start_of_entry(source: bytes, node: ast.Dict, index: int) -> int:
    key = node.keys[index]
    if key is not None:
        return _start(source, key)
    return source.rindex(b"**", 0, _start(source, node.values[index]))


def _comma(source: bytes, start: int, stop: int) -> int | None:
    """Return the place after the first comma of source[start:stop], comments left out."""
    match = re.match(rb"(?:\s|\\\n|\)|#[^\n]*+)*+,", source[start:stop])
    return start + match.end() if match else None


def _indent(source: bytes, at: int) -> bytes | None:
    """Return the white space before `at` when nothing else stands before it on its line."""
    line = max(source.rfind(b"\n", 0, at), source.rfind(b"\r", 0, at)) + 1
    return source[line:at] if not source[line:at].strip() else None


def _blank_until_line_end(source: bytes, at: int) -> int | None:
    match = re.match(rb"[ \t]*(?:\r\n|\n|\r)", source[at:])
    return at + match.end() if match else None


def _newline(source: bytes) -> bytes:
    return b"\r\n" if b"\r\n" in source else b"\n"
