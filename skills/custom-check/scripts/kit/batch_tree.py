"""A batch as a tree: its tensors by path, and a copy with some of them replaced."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any


def leaves(batch: Any, path: str = "") -> list[tuple[str, Any]]:
    """List (path, tensor) of nested mappings, lists, tuples and dataclasses.

    Paths are keys, places and fields joined by dots; a batch that is one tensor has path "batch".
    """
    if _is_tensor(batch):
        return [(path or "batch", batch)]
    found = []
    for key, value in _parts(batch):
        found += leaves(value, f"{path}.{key}" if path else str(key))
    return found


def replaced(batch: Any, tensors: Mapping[str, Any], path: str = "") -> Any:
    """Copy a batch with the tensors of these paths replaced; the others are shared."""
    if _is_tensor(batch):
        return tensors.get(path or "batch", batch)
    new = {
        key: replaced(value, tensors, f"{path}.{key}" if path else str(key))
        for key, value in _parts(batch)
    }
    if isinstance(batch, Mapping):
        return new if type(batch) is dict else _same_mapping(batch, new)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*new.values())
    if isinstance(batch, (list, tuple)):
        return type(batch)(new.values())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        other = copy.copy(batch)
        for key, value in new.items():
            object.__setattr__(other, str(key), value)
        return other
    return batch


def batch_size(batch: Any) -> int:
    """Return the first size that most tensors share; 1 when there is none."""
    sizes = Counter(tensor.shape[0] for _, tensor in leaves(batch) if tensor.dim() > 0)
    return sizes.most_common(1)[0][0] if sizes else 1


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dim") and hasattr(value, "detach")


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        yield from zip(names, value, strict=True)
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def _same_mapping(batch: Any, new: dict[Any, Any]) -> Any:
    other = copy.copy(batch)
    for key, value in new.items():
        other[key] = value
    return other
