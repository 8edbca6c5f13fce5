"""Batches of any shape: move them, count what a step learns from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

IGNORED_LABEL = -100


class OnDevice:
    """Batches, each moved to a device when it is taken."""

    def __init__(self, inner: Any, device: Any) -> None:
        self.inner = inner
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            yield to_device(batch, self.device)


def to_device(value: Any, device: Any) -> Any:
    """Move the tensors of nested mappings, lists and tuples."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value


def count_targets(batch: Any) -> tuple[int, str]:
    """Count the labels that are not ignored ("tokens"), else the first tensor's rows ("samples").

    Labels are a batch's entry `labels` of integers with at least two dims, [B, S].
    """
    labels: Any = batch.get("labels") if isinstance(batch, Mapping) else None
    if hasattr(labels, "dim") and labels.dim() >= 2 and not labels.is_floating_point():
        return int((labels != IGNORED_LABEL).sum()), "tokens"
    first = next(tensors(batch), None)
    return (1 if first is None or first.dim() == 0 else first.shape[0]), "samples"


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors of nested mappings, lists and tuples."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "shape") and hasattr(value, "dim"):
        yield value


def device_of(model: Any) -> Any:
    """Name the device of a model's first parameter, or the CPU when it has none."""
    import torch

    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
