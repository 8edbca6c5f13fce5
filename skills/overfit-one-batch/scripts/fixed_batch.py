"""The one batch: small, read once, never changed; and what reading it again says of its labels."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kit.batch_tree import batch_size, leaves, replaced
from kit.loss_terms import terms
from kit.observation import Observation, observe, roles
from kit.state import preserved
from kit.target import Target

EXAMPLES, SEQUENCES, LENGTH = 8, 4, 64
"""Examples kept; sequences of tokens kept, and tokens of each."""
READ_ROWS, READ_SECONDS = 2048, 3.0
CHANGED = 0.3
"""Share of labels that may differ at a second read, as label noise makes them."""


@dataclass
class FixedBatch:
    """A batch whose tensors are copied at every use, so that loss_fn may change them."""

    batch: Any
    size: int
    """Examples."""
    cut: str
    """What was cut off, in words; empty when it is the target's own batch."""
    roles: dict[str, str]

    def copy(self) -> Any:
        return replaced(self.batch, {path: t.clone() for path, t in leaves(self.batch)})

    def inputs(self) -> list[tuple[str, Any]]:
        """List what moves the scores; with a head that begins at 0, what may move them later."""
        every = leaves(self.batch)
        seen = [(p, t) for p, t in every if self.roles.get(p) in ("input", "both")]
        return seen or [(p, t) for p, t in every if self.roles.get(p) == "unused" and t.dim()]

    def without_inputs(self) -> Any | None:
        """Give the batch with constant inputs; None when an input is also a label, or none is."""
        seen = self.inputs()
        if not seen or any(self.roles[path] == "both" for path, _ in seen):
            return None
        return replaced(self.batch, {path: _constant(tensor) for path, tensor in seen})


def _constant(tensor: Any) -> Any:
    if tensor.is_floating_point():
        return tensor.new_zeros(tensor.shape)
    first = tensor.flatten()[:1]
    return tensor if not first.numel() else first.expand(tensor.numel()).view(tensor.shape).clone()


def choose(target: Target, examples: int = EXAMPLES, length: int = LENGTH) -> FixedBatch:
    """Take the first batch and cut it down as far as loss_fn still works on it.

    The model should be in the mode and without the dropout that it is trained with here.
    """
    whole = next(iter(target.batches))
    whole = replaced(whole, {path: t.detach().clone() for path, t in leaves(whole)})
    for batch, cut in _smaller(whole, examples, length):
        if _works(target, batch):
            return FixedBatch(batch, batch_size(batch), cut, roles(target, batch))
    return FixedBatch(whole, batch_size(whole), "", roles(target, whole))


def _smaller(whole: Any, examples: int, length: int) -> Iterator[tuple[Any, str]]:
    """Yield smaller batches, the smallest first, with what was cut."""
    size, tensors = batch_size(whole), dict(leaves(whole))
    tokens = [t for t in tensors.values() if t.dim() == 2 and t.shape[0] == size]
    tokens = [t for t in tokens if not t.is_floating_point() and t.shape[1] >= 16]
    lengths = {t.shape[1] for t in tokens}
    rows = min(SEQUENCES if tokens else examples, examples)
    few = {p: t[:rows] for p, t in tensors.items() if t.dim() and t.shape[0] == size > rows}
    said = f"{rows} of {size} examples"
    if len(lengths) == 1 and (long := lengths.pop()) > length:
        short = {
            path: few.get(path, t)[:, :length].contiguous()
            for path, t in tensors.items()
            if t.dim() > 1 and t.shape[:2] == (size, long)
        }
        words = [said] if few else []
        yield replaced(whole, few | short), ", ".join([*words, f"{length} of {long} tokens"])
    if few:
        yield replaced(whole, few), said


def _works(target: Target, batch: Any) -> bool:
    with preserved(target):
        copied = replaced(batch, {path: t.clone() for path, t in leaves(batch)})
        seen = observe(target, copied, catch=True)
        if seen.error is not None or not math.isfinite(float(seen.loss.detach())):
            return False
        return seen.main is None or sum(len(term.rows) for term in terms(seen)) > 0


def shuffled_inside(first: Observation, second: Observation) -> str | None:
    """Say how two calls of loss_fn on the same batch and weights pair scores and labels anew."""
    one, two = first.main, second.main
    if one is None or two is None or one.raw_labels is None or two.raw_labels is None:
        return None
    labels = one.raw_labels.detach(), two.raw_labels.detach()
    scores = one.raw_scores.detach(), two.raw_scores.detach()
    if any(a.shape != b.shape for a, b in (labels, scores)):
        return None
    same_labels, same_scores = _same(*labels), _same(*scores)
    if same_scores and not same_labels:
        changed = float((labels[0] != labels[1]).double().mean())
        if _same(*(x.flatten().sort().values for x in labels)):
            return f"the labels of a batch are shuffled at every call ({changed:.0%} move)"
        return (
            f"{changed:.0%} of a batch's labels change at every call" if changed > CHANGED else None
        )
    if same_labels and not same_scores and scores[0].dim() > 1:
        sums = [x.double().flatten(1).sum(1).sort().values for x in scores]
        if _same(*sums) and float(sums[0].std()) > 1e-6:
            return "the inputs of a batch are shuffled at every call, its labels are not"
    return None


def _same(one: Any, two: Any) -> bool:
    if one.is_floating_point():
        scale = float(one.double().abs().max()) if one.numel() else 0.0
        return bool(((one.double() - two.double()).abs() <= 1e-6 * max(scale, 1e-30)).all())
    return bool((one == two).all())


def changed_at_second_read(target: Target, known: FixedBatch) -> tuple[str | None, int]:
    """Read the data twice; say how labels of equal inputs differ, and how many could be compared.

    Random generators go on between the reads, as between two epochs.
    """
    paths = {role: [p for p, r in known.roles.items() if r == role] for role in ("input", "label")}
    if not paths["input"] or not paths["label"]:
        return None, 0
    with preserved(target):
        start = getattr(target.batches, "samples_consumed", None)
        before = _labels_by_input(target.batches, paths)
        if start is not None:
            target.batches.samples_consumed = start
        after = _labels_by_input(target.batches, paths)
    both = [key for key in before if before[key] is not None and after.get(key) is not None]
    changed = sum(before[key] != after[key] for key in both)
    if len(both) >= 4 and changed > CHANGED * len(both):
        return f"{changed} of {len(both)} examples have another label at the second read", len(both)
    return None, len(both)


def _labels_by_input(batches: Any, paths: dict[str, list[str]]) -> dict[bytes, bytes | None]:
    """Map each example's inputs to its labels; None where equal inputs came with two labels."""
    found: dict[bytes, bytes | None] = {}
    began, rows = time.monotonic(), 0
    for batch in itertools.islice(iter(batches), 64):
        tensors, size = dict(leaves(batch)), batch_size(batch)
        kept: dict[str, list[Any]] = {
            role: [tensors.get(p) for p in names] for role, names in paths.items()
        }
        every = [t for group in kept.values() for t in group]
        if any(t is None or t.dim() == 0 or t.shape[0] != size for t in every):
            return {}
        for row in range(size):
            key, label = (
                hashlib.sha1(b"".join(_bytes(t[row]) for t in kept[role])).digest()
                for role in ("input", "label")
            )
            found[key] = label if found.get(key, label) == label else None
        rows += size
        if rows >= READ_ROWS or time.monotonic() - began > READ_SECONDS:
            break
    return found


def _bytes(tensor: Any) -> bytes:
    import torch

    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
