"""How tensors were made: softmax, sigmoid, log-probabilities, or parts of the batch.

A mark follows a tensor through views, casts and copies, and is lost in arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .batch_tree import leaves

SUBTRACTIONS = {"sub", "__sub__", "__rsub__", "subtract", "rsub"}
_MADE_BY = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "expit": "sigmoid",
    "log_softmax": "log_softmax",
}
_SAME_VALUES = {
    *("to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone"),
    *("reshape", "flatten", "__getitem__", "index_select", "masked_select", "detach", "cpu"),
    *("cuda", "clamp", "clamp_min", "clamp_max", "clip", "cat", "stack", "long", "int"),
}
_NUDGES = {"add", "__add__", "__radd__"}
_SCALINGS = {
    *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__"),
    *("div", "__truediv__", "true_divide", "neg", "__neg__", "log", "log1p", "sqrt"),
}
NUDGE = 1e-3
"""A constant up to this size guards a logarithm and changes nothing else."""


def _vector(part: Any) -> Any:
    """Turn range(N) or a list of numbers, a part of an index, into a tensor."""
    import torch

    numbers = isinstance(part, (range, list)) and all(type(place) is int for place in part)
    return torch.tensor(list(part)) if numbers else part


class Mark(NamedTuple):
    """origin: softmax, sigmoid, log_softmax or batch; source: the origin of what that was made
    of."""

    origin: str
    source: str


class Marks:
    """Marks of the tensors of one call; tensors are kept, so that no id is used twice."""

    def __init__(self, batch: Any) -> None:
        self.known: dict[int, tuple[Any, Mark]] = {}
        for _, tensor in leaves(batch):
            self._set(tensor, Mark("batch", "raw"))

    def of(self, tensor: Any) -> Mark | None:
        found = self.known.get(id(tensor))
        return None if found is None else found[1]

    def origin(self, tensor: Any) -> str:
        """Say how scores were made: raw, softmax, sigmoid or log_softmax."""
        mark = self.of(tensor)
        if mark is None or mark.origin == "batch":
            return "raw"
        if mark.origin == "log_softmax" and mark.source == "softmax":
            return "softmax"  # the logarithm of a softmax of a softmax
        return mark.origin

    def follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Give the result of a function its mark."""
        first = args[0] if args else None
        if name in ("cat", "stack") and isinstance(first, (list, tuple)) and first:
            first = first[0]
        if not hasattr(result, "untyped_storage") or not hasattr(first, "untyped_storage"):
            return
        mark = self.of(first)
        if name in _MADE_BY:
            source = self.origin(first)
            self._set(result, Mark(_MADE_BY[name], source))
        elif name in ("log", "log_") and mark is not None and mark.origin == "softmax":
            self._set(result, Mark("log_softmax", mark.source))
        elif name in ("exp", "exp_") and mark is not None and mark.origin == "log_softmax":
            self._set(result, Mark("softmax", mark.source))
        elif mark is not None and self._keeps(name, args, first, result):
            self._set(result, mark)
        elif name.endswith("_") and not name.endswith("__"):
            self.known.pop(id(result), None)

    def picked(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return (log-probabilities, labels) when a function picks a label's from each row."""
        mark = self.of(args[0]) if args else None
        if mark is None or mark.origin != "log_softmax":
            return None
        scores = args[0]
        if name in ("gather", "take_along_dim"):
            order = ("input", "dim", "index") if name == "gather" else ("input", "indices", "dim")
            given = dict(zip(order, args, strict=False)) | kwargs
            index, dim = given.get("index", given.get("indices")), given.get("dim")
            if index is None or dim not in (-1, scores.dim() - 1) or index.shape[-1] != 1:
                return None
            same = index.dim() == scores.dim() and index.shape[:-1] == scores.shape[:-1]
            return (scores, index[..., 0]) if same else None
        if name == "__getitem__" and isinstance(args[1], tuple) and scores.dim() == 2:
            index: Any = tuple(_vector(part) for part in args[1])
            vectors = all(hasattr(part, "dim") and part.dim() == 1 for part in index)
            if len(index) == 2 and vectors:
                return scores[index[0]], index[1]
        return None

    def difference(self, args: Any) -> tuple[Any, Any] | None:
        """Return (prediction, label) when a tensor of the batch is subtracted from a computed one,
        or the other way round."""
        if len(args) < 2 or not all(hasattr(value, "requires_grad") for value in args[:2]):
            return None
        for prediction, label in (args[:2], args[1::-1]):
            mark = self.of(label)
            from_batch = mark is not None and mark.origin == "batch"
            if from_batch and not label.requires_grad and prediction.grad_fn is not None:
                return prediction, label
        return None

    def _keeps(self, name: str, args: Any, first: Any, result: Any) -> bool:
        if name in _SAME_VALUES:
            return True
        mark = self.of(first)
        if mark is not None and mark.origin == "batch" and name in _SCALINGS:
            return all(isinstance(value, (int, float)) for value in args[1:])
        if name in _NUDGES and len(args) > 1 and isinstance(args[1], (int, float)):
            return abs(args[1]) <= NUDGE
        if name.endswith("_") and not name.endswith("__"):
            return False
        if result.is_sparse or first.is_sparse or result.is_meta:
            return False
        return result.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() != 0

    def _set(self, tensor: Any, mark: Mark) -> None:
        self.known[id(tensor)] = (tensor, mark)
