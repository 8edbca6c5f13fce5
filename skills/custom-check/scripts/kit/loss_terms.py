"""The terms of a loss in one form: rows of scores and labels, what each costs and how it counts.

A loss is a sum of weight * cost over rows. The weights come from the loss itself (its gradient by
what the loss function returned), so that a mean, a sum, a mask that the caller multiplies and class
weights all look alike. Arithmetic is float64 on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from .observation import LossCall, Observation

NO_SCORE = -1e4
"""A score below this takes a class away, as minus infinity does."""
MOST_NUMBERS = 20_000_000
"""Scores that one term keeps; rows beyond are left out."""


@dataclass
class Term:
    """All calls of one line of code."""

    kind: str
    """classes, binary or values."""
    function: str
    origin: str
    where: tuple[str, int] | None
    options: dict[str, Any]
    scores: Any
    """classes: float64 [N, C]; binary (as logits) and values: [N, K]."""
    labels: Any
    """classes: int64 [N] or probabilities [N, C]; values: [N, K]; binary: [N, K] in [0, 1], where
    pos_weight has moved what is neither 0 nor 1."""
    costs: Any
    """Loss of each row (classes, [N]) or element ([N, K]) before the caller's weights."""
    mass: Any
    """What the cost is multiplied by inside: class weights, pos_weight; like costs."""
    weights: Any
    """What the caller multiplies each cost by, the division of a mean included; like costs."""
    rows: Any
    """int64 [N]: the place of each row in the caller's flattened labels."""
    share: float
    """What the term adds to the loss."""

    @property
    def classes(self) -> int:
        return self.scores.shape[-1]

    @property
    def hard(self) -> bool:
        """Tell whether labels are class numbers."""
        return self.kind == "classes" and self.labels.dim() == 1

    @property
    def normalised(self) -> bool:
        """Tell whether costs are negative logarithms of probabilities that sum to one."""
        takes_softmax = self.kind != "classes" or self.function == "cross_entropy"
        return takes_softmax or self.options["log_probabilities"]

    def average(self, costs: Any) -> float:
        """Weighted mean of costs over their weighted mass."""
        total = float((self.weights * self.mass).sum())
        return float((self.weights * costs).sum()) / total if total else math.nan

    @property
    def mean(self) -> float:
        """The loss of this term for one unit of weight."""
        return self.average(self.costs)

    @property
    def targets(self) -> Any:
        """classes: float64 [N, C], what each row's negative log-probabilities are weighted by."""
        return target_measure(self.labels, self.classes, self.options)


def terms(found: Observation) -> list[Term]:
    """Return the terms of an observed loss, the largest first; `other` losses are left out."""
    import torch

    calls = [
        call
        for call in found.calls
        if call.kind != "other" and call.result is not None and _is_whole(call)
    ]
    gradients: list[Any] = [None] * len(calls)
    if calls and getattr(found.loss, "requires_grad", False):
        inside = [call.result.requires_grad for call in calls]
        results = [call.result for call in calls if call.result.requires_grad]
        if results:
            given = iter(
                torch.autograd.grad(found.loss, results, retain_graph=True, allow_unused=True)
            )
            gradients = [next(given) if here else None for here in inside]
    made = [_term(call, gradient) for call, gradient in zip(calls, gradients, strict=True)]
    merged: dict[Any, Term] = {}
    for term in made:
        if term is None:
            continue
        key = (term.kind, term.function, term.where, term.classes, term.labels.dim())
        known = merged.get(key)
        merged[key] = term if known is None else joined([known, term])
    every = sorted(merged.values(), key=lambda term: -abs(term.share))
    if any(term.function != "sub" and term.share for term in every):
        every = [term for term in every if term.function != "sub"]
    return every


def joined(parts: list[Term]) -> Term:
    """Put terms of the same line of code into one, as if their batches had been one."""
    import torch

    new = {field.name: getattr(parts[0], field.name) for field in fields(Term)}
    for name in ("scores", "labels", "costs", "mass", "weights"):
        new[name] = torch.cat([getattr(part, name) for part in parts])
    offsets, seen = [], 0
    for part in parts:
        offsets.append(part.rows + seen)
        seen += int(part.rows.max()) + 1 if len(part.rows) else 0
    return Term(**new | {"rows": torch.cat(offsets), "share": sum(part.share for part in parts)})


def target_measure(labels: Any, classes: int, options: dict[str, Any]) -> Any:
    """Return float64 [N, C]: one-hot or soft labels, smoothed and weighted by class as torch does.

    labels: int64 [N] or probabilities [N, C].
    """
    import torch

    smoothing = float(options.get("label_smoothing") or 0.0)
    if labels.dim() == 1:
        measure = torch.zeros(len(labels), classes, dtype=torch.float64)
        measure.scatter_(1, labels[:, None].clamp(0, classes - 1), 1.0)
    else:
        measure = labels.double()
    if smoothing:
        measure = (1 - smoothing) * measure + smoothing / classes
    weight = options.get("weight")
    if weight is not None:
        measure = measure * weight.detach().double().cpu()[:classes]
    return measure


def _is_whole(call: LossCall) -> bool:
    tensors = (call.scores, call.labels, call.result)
    return all(hasattr(value, "detach") for value in tensors) and call.scores.numel() > 0


def _term(call: LossCall, gradient: Any) -> Term | None:
    """Bring one call to the form; None where scores and labels do not fit."""
    outer = None if gradient is None else gradient.detach().double().cpu()
    maker = _class_rows if call.kind == "classes" else _elements
    found = maker(call, outer)
    if found is None:
        return None
    share = float((found["weights"] * found["costs"]).sum())
    return Term(
        call.kind, call.function, call.origin, call.where, call.options, share=share, **found
    )


def _class_rows(call: LossCall, outer: Any) -> dict[str, Any] | None:
    import torch

    scores, labels = call.scores.detach().double().cpu(), call.labels.detach().cpu()
    if len(labels) != len(scores):
        return None
    if labels.dim() == 1:
        raw = call.raw_labels.detach().reshape(-1).cpu()
        kept = raw != call.options.get("ignore_index", -100)
        rows = kept.nonzero()[:, 0] if len(raw) != len(labels) else torch.arange(len(labels))
        if len(labels) and not bool(((labels >= 0) & (labels < scores.shape[1])).all()):
            return None
    else:
        rows, labels = torch.arange(len(labels)), labels.double()[:, : scores.shape[1]]
    most = max(MOST_NUMBERS // max(scores.shape[1], 1), 1)
    count = len(labels)
    scores, labels, rows = scores[:most], labels[:most], rows[:most]
    costs, mass = class_costs(scores, labels, call.options, normalise=_takes_softmax(call))
    reduction = "none" if call.function == "gather" else call.options.get("reduction", "mean")
    if outer is None:
        weights = torch.full_like(costs, 1.0 / max(count, 1))
    elif reduction == "none":
        sign = -1.0 if call.function == "gather" else 1.0
        weights = sign * outer.reshape(-1)[rows]
    else:
        divisor = 1.0
        if reduction == "mean":
            weight: Any = call.options.get("weight")
            divisor = count
            if labels.dim() == 1 and hasattr(weight, "detach"):
                divisor = float(weight.detach().double().cpu()[labels].sum())
        weights = torch.full_like(costs, float(outer) / max(divisor, 1e-300))
    return {
        "scores": scores,
        "labels": labels,
        "costs": costs,
        "mass": mass,
        "weights": weights,
        "rows": rows,
    }


def _takes_softmax(call: LossCall) -> bool:
    return call.function == "cross_entropy"


def class_costs(
    scores: Any, labels: Any, options: dict[str, Any], *, normalise: bool = True
) -> tuple[Any, Any]:
    """Return (cost, mass) of each row, float64 [N] each; scores float64 [N, C].

    `normalise` takes the log-softmax first; without it scores are log-probabilities as given.
    """
    import torch

    logs = scores.log_softmax(-1) if normalise else scores
    plain = labels.dim() == 1 and not options.get("label_smoothing")
    if plain and options.get("weight") is None:
        return -logs.gather(1, labels[:, None])[:, 0], torch.ones(len(labels), dtype=torch.float64)
    measure = target_measure(labels, scores.shape[1], options)
    costs = -torch.where(measure > 0, measure * logs, 0.0).sum(-1)
    return costs, measure.sum(-1)


def _elements(call: LossCall, outer: Any) -> dict[str, Any] | None:
    """Bring predictions and labels of any shape to [N, K]: K the last dim where it is a column."""
    import torch

    scores, labels = call.raw_scores.detach(), call.raw_labels.detach()
    try:
        scores, labels = torch.broadcast_tensors(scores.double().cpu(), labels.double().cpu())
        extra = [_spread(call.options.get(key), scores) for key in ("weight", "pos_weight")]
    except RuntimeError:
        return None
    shape = tuple(scores.shape)
    columns = shape[-1] if len(shape) == 2 or (len(shape) == 3 and shape[-1] <= 16) else 1
    table = (-1, columns)
    scores, labels = scores.reshape(table), labels.reshape(table)
    weight, positive = (value.reshape(table) for value in extra)
    if call.kind == "binary":
        scores, labels = _as_logits(call, scores, labels)
        up, mass = weight * positive * labels, weight * (positive * labels + 1 - labels)
        labels = torch.where(mass > 0, up / mass.clamp(min=1e-300), labels)
        costs = mass * binary_costs(scores, labels)
    else:
        rule = _rule_of_difference(call, outer) if call.function == "sub" else call.function
        if rule is None:
            return None
        call.options["rule"] = rule
        costs, mass = value_costs(scores - labels, rule, call.options) * weight, weight
    weights = _element_weights(call, outer, shape, columns, costs)
    missing = labels.isnan()  # a caller may mask them after the loss
    labels, costs = (torch.where(missing, 0.0, value) for value in (labels, costs))
    weights, mass = (torch.where(missing, 0.0, value) for value in (weights, mass))
    return {
        "scores": scores,
        "labels": labels,
        "costs": costs,
        "mass": mass,
        "weights": weights,
        "rows": torch.arange(len(scores)),
    }


def _spread(value: Any, like: Any) -> Any:
    import torch

    if value is None or not hasattr(value, "detach"):
        return torch.ones_like(like)
    return value.detach().double().cpu().expand_as(like)


def _as_logits(call: LossCall, scores: Any, labels: Any) -> tuple[Any, Any]:
    if call.function == "binary_cross_entropy":
        # torch stops the logarithm at -100; float64 reaches it before that
        scores = scores.clamp(1e-43, 1 - 1e-16).logit()
    if call.function == "soft_margin_loss":
        labels = (labels + 1) / 2
    return scores, labels


def binary_costs(scores: Any, labels: Any) -> Any:
    """Return the cost of each element for logits and labels in [0, 1]."""
    from torch.nn.functional import softplus

    return labels * softplus(-scores) + (1 - labels) * softplus(scores)


def value_costs(difference: Any, rule: str, options: dict[str, Any]) -> Any:
    """Return the loss of each difference between prediction and label."""
    import torch

    size = difference.abs()
    if rule == "mse_loss":
        return size.square()
    if rule == "l1_loss":
        return size
    name, default = ("delta", 1.0) if rule == "huber_loss" else ("beta", 1.0)
    bend = float(options.get(name, default)) or 1e-300
    inner = 0.5 * size.square()
    outer = bend * (size - 0.5 * bend)
    costs = torch.where(size < bend, inner, outer)
    return costs if rule == "huber_loss" else costs / bend


def _rule_of_difference(call: LossCall, outer: Any) -> str | None:
    """Say what the caller does with a difference, by the loss's gradient: square it or its size."""
    if outer is None:
        return None
    size, slope = call.result.detach().double().cpu().abs().flatten(), outer.abs().flatten()
    known = (size > 1e-6 * size.max()) & (slope > 0)
    if int(known.sum()) < 2:
        return None
    size, slope = size[known], slope[known]
    ratio = slope / size
    if float(ratio.std()) < 0.02 * float(ratio.mean()):
        return "mse_loss"
    return "l1_loss" if float(slope.std()) < 0.02 * float(slope.mean()) else None


def _element_weights(call: LossCall, outer: Any, shape: Any, columns: int, costs: Any) -> Any:
    import torch

    count = max(costs.numel(), 1)
    if call.function == "sub" and outer is not None:
        size = call.result.detach().double().cpu().abs().reshape(-1, columns)
        slope = outer.abs().expand(shape).reshape(-1, columns)
        power = 2.0 if call.options["rule"] == "mse_loss" else 1.0
        per = slope / (power * size.clamp(min=1e-300) ** (power - 1))
        return torch.where(size > 0, per, per[size > 0].mean() if bool((size > 0).any()) else 0.0)
    if outer is None:
        return torch.full_like(costs, 1.0 / count)
    reduction = call.options.get("reduction", "mean")
    if reduction != "none":
        divisor = count if reduction == "mean" else 1
        return torch.full_like(costs, float(outer) / divisor)
    if call.function == "multilabel_soft_margin_loss":
        return outer.reshape(-1, 1).expand_as(costs) / columns
    return outer.expand(shape).reshape(-1, columns)
