"""Checks of one batch: does it fit the model, are labels and ids in range, is all of it finite."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from typing import Any

from evidence import (
    Evidence,
    Finding,
    UserError,
    at,
    failed,
    passed,
    skipped,
)

from kit import observation
from kit.batch_tree import leaves
from kit.fix import caller_line, fix_in
from kit.state import preserved

SCAN_BATCHES = 64
SCAN_SECONDS = 2.0


def check_batch_mismatch(evidence: Evidence, limit: Any) -> Finding:
    """Shapes, dtypes and devices: the loss of every first batch is a scalar, nothing broadcasts."""
    batches = evidence.batches
    sizes = {path: t.shape[0] for path, t in leaves(batches[0]) if t.dim() > 0}
    for number, batch in enumerate(batches):
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                with evidence.mode(True), evidence.user():
                    seen = observation.observe(evidence.target, batch)
                    loss = seen.loss
                    if number == 0 and loss.requires_grad and loss.numel() == 1:
                        evidence.gradients(batch)
        except UserError as error:
            if error.id != "batch-mismatch":
                return skipped(f"batch {number} raises {error}; see {error.id}")
            shapes = ", ".join(f"{path} {describe(t)}" for path, t in leaves(batch))
            return failed(
                f"loss_fn raises on batch {number}: {error} (batch: {shapes})",
                fix=error.fix("make shapes, dtypes and devices of the batch and the model agree"),
            )
        if loss.numel() != 1 or not loss.is_floating_point():
            return failed(
                f"the loss is {describe(loss)}; it must be a floating-point scalar",
                fix=fix_in(evidence.target.loss_fn, "return the mean over the targets"),
            )
        spread = broadcast_in(seen, told)
        if spread is not None:
            message, where = spread
            text = "give prediction and label one shape, e.g. prediction.squeeze(-1)"
            return failed(message, fix=at(where, text))
    shown = ", ".join(f"{path} {describe(t)}" for path, t in leaves(batches[0]))
    return passed(f"{len(batches)} batches: {shown}", value=len(set(sizes.values())))


def describe(tensor: Any) -> str:
    """Write dtype and shape: int64[8, 128]."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}"


def broadcast_in(seen: Any, told: list[Any]) -> tuple[str, Any] | None:
    """Find a loss of [B, 1] against [B], which pairs every prediction with every label."""
    for call in seen.calls:
        scores, labels = call.raw_scores, call.raw_labels
        if call.kind not in ("values", "binary") or not hasattr(labels, "shape"):
            continue
        a, b = tuple(scores.shape), tuple(labels.shape)
        accident = len(a) != len(b) and a != b and math.prod(a) == math.prod(b) > 1
        if accident and call.share != 0.0:
            return f"prediction {list(a)} and label {list(b)} broadcast to pairs", call.where
    for warning in told:
        if "Using a target size" in str(warning.message):
            return str(warning.message).splitlines()[0], None
    return None


def check_labels_out_of_range(evidence: Evidence, limit: Any) -> Finding:
    """Class labels lie in [0, C) or are ignored; binary labels lie in [0, 1]."""
    try:
        main: Any = evidence.observed.main
    except UserError as error:
        if error.id != "labels-out-of-range":
            raise
        return failed(
            f"loss_fn raises {error}",
            fix=error.fix("make labels 0 to C-1, or the head as wide as there are classes"),
        )
    if main is None or main.kind not in ("classes", "binary"):
        return skipped("the loss has no classes")
    if main.kind == "binary":
        return _binary_labels(evidence)
    if main.labels.is_floating_point():
        lowest = float(main.labels.min()) if main.labels.numel() else 0.0
        fix = at(main.where, "probabilities are 0 or more")
        if lowest < 0:
            return failed(f"class probabilities go down to {lowest:.3g}", lowest, fix)
        return passed("labels are probabilities", lowest)
    classes = main.scores.shape[-1]
    ignored = main.options.get("ignore_index", -100)
    low, high, seen = classes, -1, 0
    for labels in _label_tensors(evidence):
        kept = labels[labels != ignored]
        seen += kept.numel()
        if kept.numel():
            low, high = min(low, int(kept.min())), max(high, int(kept.max()))
    if seen == 0:
        return failed(f"every label is the ignored {ignored}: nothing is learned", 0)
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        fix = at(main.where, f"labels go from 0 to C-1, C is {classes} here")
        return failed(f"label {wrong} with {classes} classes (ignored: {ignored})", wrong, fix)
    return passed(f"{seen} labels from {low} to {high} of {classes} classes", high)


def _binary_labels(evidence: Evidence) -> Finding:
    lowest, highest = math.inf, -math.inf
    for seen in evidence.all_observed:
        main: Any = seen.main
        if main is not None and main.kind == "binary" and main.function != "soft_margin_loss":
            lowest = min(lowest, float(main.labels.min()))
            highest = max(highest, float(main.labels.max()))
    main: Any = evidence.observed.main
    if lowest > highest:
        return skipped("the loss takes labels of -1 and 1")
    if lowest < 0 or highest > 1:
        fix = at(main.where, "labels of a binary loss are 0 to 1")
        wrong = lowest if lowest < 0 else highest
        return failed(f"binary labels go from {lowest:.4g} to {highest:.4g}", wrong, fix)
    return passed(f"binary labels from {lowest:.3g} to {highest:.3g}", highest)


def _label_tensors(evidence: Evidence) -> list[Any]:
    """Labels of the loss of the first batches; of many more where a label is a tensor of them."""
    found = [seen.main.raw_labels for seen in evidence.all_observed if seen.main is not None]
    found = [labels for labels in found if not labels.is_floating_point()]
    paths = evidence.paths("label")
    return found + [
        dict(leaves(batch))[path]
        for batch in scanned(evidence)
        for path in paths
        if path in dict(leaves(batch)) and not dict(leaves(batch))[path].is_floating_point()
        and same_values(evidence, path)
    ]  # fmt: skip


def same_values(evidence: Evidence, path: str) -> bool:
    """Tell whether a tensor of the batch is what the loss calls labels, perhaps reshaped."""
    leaf, main = dict(leaves(evidence.batches[0]))[path], evidence.observed.main
    if main is None or not hasattr(main.raw_labels, "flatten"):
        return False
    given, used = leaf.flatten(), main.raw_labels.flatten()
    return given.shape == used.shape and bool((given == used).all())


def scanned(evidence: Evidence) -> list[Any]:
    """Read more of the data, for a moment, without the model."""
    return evidence.once("scanned", lambda: _scan(evidence))


def _scan(evidence: Evidence) -> list[Any]:
    start, found = time.perf_counter(), []
    with preserved(evidence.target), evidence.user():
        for batch in itertools.islice(iter(evidence.target.batches), SCAN_BATCHES):
            found.append(batch)
            if time.perf_counter() - start > SCAN_SECONDS:
                break
    return found


def check_tokens_out_of_range(evidence: Evidence, limit: Any) -> Finding:
    """Every id that is looked up is a row of its embedding."""
    lookups = Lookups()
    error: UserError | None = None
    for batch in evidence.batches:
        try:
            with evidence.mode(True), evidence.user(), lookups.recorded():
                evidence.target.loss_fn(evidence.target.model, batch)
        except UserError as raised:
            error = raised
            break
    for low, high, rows, where in lookups.ranges:
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            fix = at(where, f"ids go from 0 to {rows - 1}; give the embedding more rows")
            return failed(f"id {wrong} is looked up in an embedding of {rows} rows", wrong, fix)
    if error is not None:
        if error.id != "tokens-out-of-range":
            raise error
        return failed(f"loss_fn raises {error}", fix=error.fix("keep indices within the table"))
    if not lookups.ranges:
        return skipped("nothing is looked up in an embedding")
    widest = _widest_ids(evidence, lookups)
    if widest is not None:
        return widest
    high, rows = max((high, rows) for _, high, rows, _ in lookups.ranges)
    return passed(f"ids up to {high}, {rows} rows", high)


def _widest_ids(evidence: Evidence, lookups: Lookups) -> Finding | None:
    """Look for ids out of range further on in the data."""
    for path, leaf in leaves(evidence.batches[0]):
        rows = [r for ids, r in lookups.looked_up if ids.shape == leaf.shape and bool((ids == leaf).all())]  # fmt: skip  # noqa: E501
        if leaf.is_floating_point() or not rows:
            continue
        for number, batch in enumerate(scanned(evidence)):
            later = dict(leaves(batch)).get(path)
            if later is None or not later.numel():
                continue
            low, high = int(later.min()), int(later.max())
            if low < 0 or high >= min(rows):
                wrong = low if low < 0 else high
                return failed(f"id {wrong} in {path} of batch {number}; {min(rows)} rows", wrong)
    return None


class Lookups:
    """Records the ids, rows and place of every embedding lookup, also of one that raises."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, int, Any]] = []
        self.looked_up: list[tuple[Any, int]] = []

    def recorded(self) -> Any:
        """Give the mode that records while it is on."""
        from torch.overrides import TorchFunctionMode

        lookups = self

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                kwargs = kwargs or {}
                if getattr(func, "__name__", "") == "embedding":
                    given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
                    lookups.note(given.get("input"), given.get("weight"))
                return func(*args, **kwargs)

        return Mode()

    def note(self, ids: Any, weight: Any) -> None:
        """Keep one lookup: ids of any shape in a table [rows, width]."""
        if not hasattr(ids, "numel") or not hasattr(weight, "shape") or not ids.numel():
            return
        if weight.dim() != 2:  # torch.embedding is called with the weight first
            return
        if ids.is_floating_point():
            ids, weight = weight, ids
        rows = weight.shape[0]
        self.ranges.append((int(ids.min()), int(ids.max()), rows, caller_line()))
        self.looked_up.append((ids, rows))


def check_non_finite(evidence: Evidence, limit: Any) -> Finding:
    """Inputs, parameters, outputs, loss and gradients are finite."""
    target = evidence.target
    named = [*target.model.named_parameters(), *target.model.named_buffers()]
    for name, tensor in named:
        mask = tensor.is_floating_point() and "running" not in name and "mask" in name.lower()
        if not mask and has_nan(tensor, infinite=name in dict(target.model.named_parameters())):
            return failed(f"{name} holds NaN or infinity before the first step", name)
    for number, batch in enumerate(scanned(evidence)):
        for path, tensor in leaves(batch):
            if has_nan(tensor) and not _survives(evidence, batch):
                text = "drop or fill these values where the data is read"
                return failed(f"{path} of batch {number} holds NaN or infinity", path,
                              fix_in(type(target.batches), text))  # fmt: skip
    for number, (seen, gradients) in enumerate(
        zip(evidence.all_observed, evidence.first_gradients, strict=True)
    ):
        main: Any = seen.main
        where = at(main.where if main else None, "look for log(0), 0/0 or an overflow here")
        if not bool(seen.loss.isfinite()):
            return failed(f"the loss of batch {number} is {float(seen.loss)}", float(seen.loss),
                          where)  # fmt: skip
        bad = [n for n, g in gradients.items() if g is not None and has_nan(g)]
        if bad:
            return failed(f"the gradient of {bad[0]} ({len(bad)} tensors) is not finite", bad[0],
                          where)  # fmt: skip
        if any(bool(t.detach().isnan().any()) for t in seen.outputs):
            return failed(f"the model's output for batch {number} holds NaN", number)
    return passed("inputs, parameters, outputs, losses and gradients")


def has_nan(tensor: Any, *, infinite: bool = True) -> bool:
    """Tell whether a floating tensor holds NaN or, unless that is allowed, infinity."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return False
    tensor = tensor.detach()
    return bool((~tensor.isfinite()).any() if infinite else tensor.isnan().any())


def _survives(evidence: Evidence, batch: Any) -> bool:
    """A model may fill missing values itself, or carry minus infinity as a mask."""
    try:
        return bool(evidence.observe(batch).loss.isfinite())
    except UserError:
        return False
