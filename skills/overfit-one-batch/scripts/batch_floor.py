"""How low the loss of a batch can go, and how many labels can be right: from its own data.

Rows that a model cannot tell apart cost at least the entropy of their labels together. Label
smoothing, soft targets, class weights and duplicated inputs with other labels are all of this form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fixed_batch import FixedBatch

from kit.batch_tree import replaced
from kit.loss_terms import Term, terms, value_costs
from kit.observation import LossCall, Observation
from kit.target import Target

LOOKS_AROUND = re.compile(
    r"attention|attn|lstm|gru|rnn|conv|mamba|ssm|mixer|retention|hyena|decoderblock|moeblock",
    re.IGNORECASE,
)


@dataclass
class Floor:
    """The lower bound of one term, for one unit of weight."""

    loss: float
    accuracy: float
    """Share of rows whose label can be right; of elements, for binary; nan without such labels."""
    prior: float
    """What constant scores reach."""
    blind: float = math.nan
    """What scores that see no input but a row's place in its example reach."""
    note: str = ""


def visible(
    target: Target,
    fixed: FixedBatch,
    term: Term,
    calls: list[LossCall],
    watch: Callable[[Any], Observation],
) -> tuple[list[Any], list[Any], str]:
    """Name what each row of a term sees: rows of one name cannot be told apart by their inputs.

    `calls` made the term; `watch` observes the loss of a batch. Returns the names, those that are
    left when all inputs are constant (the row's place in its example), and a note.
    A row of a sequence sees the tokens up to its own, or all of them, as the model does. Where
    every row's scores depend on its own token alone in a model without a layer that looks around,
    the token is its name.
    """
    inputs = [t for _, t in fixed.inputs() if t.dim() and t.shape[0] == fixed.size]
    rows, each = _places(term, calls, fixed.size)
    if not inputs or rows is None:
        alone = list(range(len(term.rows)))
        return alone, alone, ""
    places = [place for _, place in rows]
    length = next((t.shape[1] for t in inputs if t.dim() > 1 and t.shape[1] - each in (0, 1)), 0)
    if each == 1 or not length:
        whole = [_name(inputs, b) for b in range(fixed.size)]
        return [(whole[b], place) for b, place in rows], places, ""
    along = [t for t in inputs if t.dim() > 1 and t.shape[1] == length]
    if _is_causal(fixed, term, rows, watch):
        names = [_name([t[b, : place + 1] for t in along]) for b, place in rows]
    else:
        names = [(_name(inputs, b), place) for b, place in rows]
    own = [_name([t[b, place] for t in along]) for b, place in rows]
    if _sees_only(term, own, names):
        looks = [m for m in target.model.modules() if LOOKS_AROUND.search(type(m).__name__)]
        if not looks:
            return own, places, "every score depends on its own token alone"
        note = f"every score depends on its own token alone, in spite of {type(looks[0]).__name__}"
        return names, places, note
    return names, places, ""


def _places(
    term: Term, calls: list[LossCall], size: int
) -> tuple[list[tuple[int, int]] | None, int]:
    """Find each row's example and place in it, and the places of an example.

    Of several calls with a label an example, each is a place; those on the same scores are one.
    """
    labels = sum(call.raw_labels.numel() for call in calls)
    labels //= 1 if term.hard else term.classes
    if labels % size or not labels:
        return None, 0
    each = labels // size
    if len(calls) > 1 and each == len(calls):
        same = [
            next(j for j, other in enumerate(calls) if other.raw_scores is call.raw_scores)
            for call in calls
        ]
        return [(int(row) % size, same[int(row) // size]) for row in term.rows], each
    return [divmod(int(row), each) for row in term.rows], each


def _name(tensors: list[Any], row: int | None = None) -> bytes:
    parts = [t if row is None else t[row] for t in tensors]
    return b"|".join(part.detach().cpu().double().contiguous().numpy().tobytes() for part in parts)


def _is_causal(
    fixed: FixedBatch, term: Term, rows: list[Any], watch: Callable[[Any], Observation]
) -> bool:
    """Tell whether the scores of earlier places stay when the last place of the inputs changes."""
    last = max(place for _, place in rows)
    changed = {}
    for path, tensor in fixed.inputs():
        if tensor.dim() == 2 and tensor.shape[0] == fixed.size and tensor.dtype.itemsize >= 4:
            other = tensor.clone()
            other[:, last:] = tensor[:, :1]
            changed[path] = other
    if not changed:
        return False
    with_change = [
        t
        for t in terms(watch(replaced(fixed.copy(), changed)))
        if t.where == term.where and t.scores.shape == term.scores.shape
    ]
    if not with_change:
        return True
    moved = (with_change[0].scores - term.scores).abs().flatten(1).amax(1)
    early = [float(m) for m, (_, place) in zip(moved, rows, strict=True) if place < last]
    scale = float(term.scores.std()) if term.scores.numel() > 1 else 0.0
    return max(early, default=0.0) <= 1e-4 * scale + 1e-12


def _sees_only(term: Term, own: list[bytes], names: list[Any]) -> bool:
    """Tell whether rows with the same own token but other contexts have the same scores."""
    first: dict[bytes, int] = {}
    compared, scale = 0, float(term.scores.std(0).mean()) if len(term.scores) > 1 else 0.0
    for index, (token, name) in enumerate(zip(own, names, strict=True)):
        other = first.setdefault(token, index)
        if names[other] == name:
            continue
        if float((term.scores[index] - term.scores[other]).abs().max()) > 1e-4 * scale:
            return False
        compared += 1
    return compared >= 4 and scale > 0


def floor_of(term: Term, names: list[Any]) -> Floor:
    """Return the floor of a term whose rows see what `names` say."""
    groups: dict[Any, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(name, []).append(index)
    if term.kind == "values":
        costs = [_value_floor(term, rows) for rows in groups.values() if len(rows) > 1]
        total = float((term.weights * term.mass).sum()) or math.nan
        return Floor(sum(costs) / total, math.nan, _value_floor(term, range(len(names))) / total)
    measure = _class_entropy if term.kind == "classes" else _binary_entropy
    total = float((term.weights * term.mass).sum()) or math.nan
    lowest = sum(measure(term, rows) for rows in groups.values())
    prior = measure(term, range(len(names))) / total
    if not _is_hard(term):
        return Floor(lowest / total, math.nan, prior)
    right = sum(_right(term, rows) for rows in groups.values())
    counted = float((term.weights != 0).double().sum())
    return Floor(lowest / total, right / counted if counted else 1.0, prior)


def _is_hard(term: Term) -> bool:
    """Tell whether each row has one right answer."""
    if term.kind == "classes":
        return term.hard or bool((term.labels.amax(-1) > 0.99 * term.labels.sum(-1)).all())
    return bool(((term.labels == 0) | (term.labels == 1)).all())


def _class_entropy(term: Term, rows: Any) -> float:
    """Return the least weighted loss of rows that share their scores."""
    index = list(rows)
    plain = term.hard and not term.options.get("label_smoothing")
    if plain and len(index) == 1:
        return 0.0
    import torch

    options = term.options
    if plain and options.get("weight") is None:
        measure = torch.zeros(term.classes, dtype=torch.float64)
        measure.index_add_(0, term.labels[index], term.weights[index])
    else:
        from kit.loss_terms import target_measure

        each = target_measure(term.labels[index], term.classes, options)
        measure = (term.weights[index][:, None] * each).sum(0)
    seen = measure[measure > 0]
    return float(-(seen * (seen / seen.sum()).log()).sum())


def _binary_entropy(term: Term, rows: Any) -> float:
    import torch

    index = list(rows)
    pull = term.weights[index] * term.mass[index]
    up = (pull * term.labels[index]).sum(0)
    down = (pull * (1 - term.labels[index])).sum(0)
    total = (up + down).clamp(min=1e-300)
    return -float((torch.xlogy(up, up / total) + torch.xlogy(down, down / total)).sum())


def _value_floor(term: Term, rows: Any) -> float:
    index = list(rows)
    labels, weights = term.labels[index], term.weights[index]
    pull = weights * term.mass[index]
    mean = (pull * labels).sum(0) / pull.sum(0).clamp(min=1e-300)
    return min(
        float((pull * value_costs(best - labels, term.options["rule"], term.options)).sum())
        for best in (mean, labels.median(0).values)
    )


def _right(term: Term, rows: Any) -> float:
    """Return how many rows (elements) can be right when all of them get the same answer."""
    index = list(rows)
    counted = term.weights[index] != 0
    if term.kind == "binary":
        ups = ((term.labels[index] > 0.5) & counted).sum(0).double()
        return float(ups.maximum(counted.sum(0) - ups).sum())
    labels = term.labels[index] if term.hard else term.labels[index].argmax(-1)
    kept = labels[counted]
    return float(kept.bincount().max()) if len(kept) else 0.0


def accuracy_of(term: Term) -> float:
    """Return the share of counted rows (elements, for binary) that are right; nan for values and
    soft labels, where nothing is right or wrong."""
    if term.kind == "values" or not _is_hard(term):
        return math.nan
    counted = term.weights != 0
    if term.kind == "binary":
        right = (term.scores > 0) == (term.labels > 0.5)
    else:
        labels = term.labels if term.hard else term.labels.argmax(-1)
        right = term.scores.argmax(-1) == labels
    return float((right & counted).sum()) / max(float(counted.sum()), 1.0)


def double_softmax_floor(classes: int) -> float:
    """Return the least cross entropy of probabilities taken for logits: ln(e + C - 1) - 1."""
    return math.log(math.e + classes - 1) - 1


def double_sigmoid_floor(term: Term) -> float:
    """Return the least binary loss of probabilities taken for logits."""
    costs = term.labels * math.log1p(math.exp(-1)) + (1 - term.labels) * math.log(2)
    return term.average(costs * term.mass)
