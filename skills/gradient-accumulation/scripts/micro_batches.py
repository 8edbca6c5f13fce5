"""Real samples in batches of any size, and the largest of them that fits into memory."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kit.batches import IGNORED_LABEL, tensors
from kit.errors import UsageError
from kit.memory import metered, state_bytes
from kit.state import preserved
from kit.target import Target
from kit.user_code import user_code

MOST_BATCHES = 64


class Samples:
    """The samples of a target's batches, joined along the first dimension."""

    def __init__(self, target: Target, wanted: int) -> None:
        found, self.count = [], 0
        with preserved(target):
            for batch in itertools.islice(target.batches, MOST_BATCHES):
                found.append(batch)
                self.count += length(batch)
                if self.count >= wanted:
                    break
        with user_code("joining batches", "their tensors must agree but for the first dimension"):
            self.all = joined(found)

    def take(self, start: int, size: int) -> Any:
        """Return `size` samples from `start` on, from the beginning again where they end."""
        torch = sys.modules["torch"]
        rows = torch.arange(start, start + size) % self.count
        return picked(self.all, rows)


def length(batch: Any) -> int:
    """Count the samples of a batch: the rows of its first tensor."""
    first = next(tensors(batch), None)
    if first is None or not first.dim():
        raise UsageError(
            "a batch holds no tensor with rows", "samples are the first dimension of its tensors"
        )
    return first.shape[0]


def mapped(batches: list[Any], function: Callable[[list[Any]], Any]) -> Any:
    """Apply a function to the tensors that stand at the same place of nested batches."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: mapped([batch[key] for batch in batches], function) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(mapped(list(part), function) for part in zip(*batches, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)(mapped(list(part), function) for part in zip(*batches, strict=True))
    return function(batches) if hasattr(first, "dim") and first.dim() else first


def joined(batches: list[Any]) -> Any:
    """Put batches behind each other along the first dimension."""
    return mapped(batches, sys.modules["torch"].cat)


def picked(batch: Any, rows: Any) -> Any:
    """Return these rows of a batch."""
    return mapped([batch], lambda found: found[0][rows.to(found[0].device)])


def unequal(batch: Any) -> Any:
    """Mask labels so that sample j of n keeps the first (j+1)/n of its targets.

    A batch without integer labels [B, S] stays as it is.
    """
    torch = sys.modules["torch"]
    labels: Any = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return batch
    count, size = labels.shape[:2]
    kept = ((torch.arange(count) + 1) * size / count).ceil()
    masked = torch.arange(size)[None] >= kept[:, None]
    shape = (count, size, *[1] * (labels.dim() - 2))
    return {
        **batch,
        "labels": labels.masked_fill(masked.view(shape).to(labels.device), IGNORED_LABEL),
    }


def parts_of(batch: Any, count: int) -> list[Any]:
    """Split a batch into micro-batches; where every sample counts alike, into unequal ones."""
    torch = sys.modules["torch"]
    size = length(batch)
    share = size // count
    sizes = [share] * (count - 1)
    if unequal(batch) is batch:  # no labels to mask: what differs is the number of samples
        sizes = [max(share - (number % 2), 1) for number in range(count - 1)]
    starts = [0, *itertools.accumulate(sizes), size]
    return [picked(batch, torch.arange(a, b)) for a, b in itertools.pairwise(starts)]


class Trials:
    """Bytes that one forward and backward pass needs, by micro-batch size."""

    def __init__(self, target: Target, samples: Samples, budget: int | None) -> None:
        self.target, self.samples, self.budget = target, samples, budget
        self.needs: dict[int, int | None] = {}
        with preserved(target):
            self.backward(1)
            self.state = state_bytes(target)
        self.always = sum(self.state.values())

    def backward(self, size: int) -> None:
        with user_code(f"a step of {size} samples"):
            self.target.loss_fn(self.target.model, self.samples.take(0, size)).backward()

    def fits(self, size: int) -> bool:
        """Measure a size, with the gradients of an earlier micro-batch in place."""
        torch = sys.modules["torch"]
        if size not in self.needs:
            if not self.needs:
                self.backward(1)
            try:
                with metered(self.target.device) as meter:
                    self.backward(size)
                    peak = meter.peak
                self.needs[size] = self.always + peak
            except UsageError as error:
                if not isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                self.needs[size] = None
            if self.target.device.type == "cuda":
                torch.cuda.empty_cache()
        need = self.needs[size]
        return need is not None and (self.budget is None or need <= self.budget)

    def largest(self, limit: int, told: Callable[[int], None]) -> int:
        """Double until it no longer fits or `limit` is reached, then bisect; 0 if 1 is too much."""
        good, bad = 0, 1
        while bad <= limit and self.fits(bad):
            told(bad)
            good, bad = bad, bad * 2
        bad = min(bad, limit + 1)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.fits(middle) else (good, middle)
            told(middle)
        return good


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
