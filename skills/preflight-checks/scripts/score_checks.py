"""Checks of scores: squashed once and by the right loss, and following the input."""

from __future__ import annotations

import math
from typing import Any

from evidence import (
    CannotJudge,
    Evidence,
    Finding,
    UserError,
    at,
    failed,
    passed,
    relative_change,
    skipped,
)

from kit import observation
from kit.batch_tree import leaves
from kit.fix import fix_in

SUMS_TO_ONE, SUMS_TO_ONE_HALF = 1e-3, 2e-2


def check_double_softmax(evidence: Evidence, limit: Any) -> Finding:
    """No softmax or sigmoid is taken of scores that already went through one."""
    seen: list[Any] = [s for s in evidence.all_observed if s.main is not None]
    if not seen or seen[0].main.kind not in ("classes", "binary"):
        return skipped("the loss takes no softmax or sigmoid")
    for observation_ in seen:
        for call in _decisive(observation_):
            message = _squashed_twice(call)
            if message is not None:
                text = "give the loss the raw scores (logits)"
                return failed(message[0], message[1], at(call.where, text))
    main: Any = seen[0].main
    note = " (log_softmax before cross_entropy changes nothing)"
    harmless = main.function == "cross_entropy" and main.origin == "log_softmax"
    return passed(f"{main.function} of {main.origin} scores" + (note if harmless else ""))


def _decisive(seen: Any) -> list[Any]:
    """Calls that decide a part of the loss worth naming."""
    total = sum(abs(call.share) for call in seen.calls) or 1.0
    return [c for c in seen.calls if abs(c.share) > 0.01 * total and c.kind != "other"]


def _squashed_twice(call: Any) -> tuple[str, float] | None:
    if call.kind == "classes":
        classes = call.scores.shape[-1]
        if classes < 2 or not call.scores.numel():
            return None
        floor = math.log(math.e + classes - 1) - 1
        if call.is_double_softmax or _rows_on_simplex(call):
            return (
                f"{call.function} takes the softmax of a softmax: with {classes} classes the loss "
                f"cannot fall below ln(e+C-1)-1 = {floor:.4f}",
                floor,
            )
        takes = call.function == "cross_entropy" or call.options["log_probabilities"]
        if takes and call.origin == "sigmoid":
            return (
                f"cross_entropy of sigmoid scores in [0, 1]: with {classes} classes the loss "
                f"cannot fall below {floor:.4f}",
                floor,
            )
        return None
    if call.function in ("binary_cross_entropy", "soft_margin_loss") or call.kind != "binary":
        return None
    if call.origin in ("sigmoid", "softmax"):
        labels = call.labels.detach().double()
        floor = float((labels * math.log1p(math.exp(-1)) + (1 - labels) * math.log(2)).mean())
        return (
            f"{call.function} of {call.origin} scores: it takes the sigmoid itself, and the loss "
            f"cannot fall below {floor:.4f}",
            floor,
        )
    return None


def _rows_on_simplex(call: Any) -> bool:
    """Tell whether the scores are probabilities: one number a row, the same for every row."""
    if call.function != "cross_entropy":
        return False
    rows = call.scores.detach().double()
    half = call.scores.element_size() < 4
    close = SUMS_TO_ONE_HALF if half else SUMS_TO_ONE
    return bool((rows >= 0).all() and ((rows.sum(-1) - 1).abs() < close).all())


def check_missing_log_softmax(evidence: Evidence, limit: Any) -> Finding:
    """What takes log-probabilities gets them, what takes probabilities too."""
    try:
        calls = [c for seen in evidence.all_observed for c in _decisive(seen)]
    except UserError as error:
        if error.id != "missing-log-softmax":
            raise
        return failed(f"loss_fn raises {error}", fix=error.fix("use the loss that takes logits"))
    nll = [c for c in calls if c.kind == "classes" and c.function == "nll_loss"]
    for call in nll:
        if call.options["log_probabilities"] or not call.scores.numel():
            continue
        sums = float(call.scores.detach().double().logsumexp(-1).abs().mean())
        kind = "probabilities, not their logarithms" if call.on_simplex else "raw scores"
        text = "use cross_entropy, or log_softmax before nll_loss"
        return failed(
            f"nll_loss gets {kind}: the loss falls without bound or to -1 and is no likelihood",
            sums,
            at(call.where, text),
        )
    other = _normalised_elsewhere(evidence)
    if other is not None and other["verdict"] == "fail":
        return other
    if nll:
        return passed("nll_loss gets log-probabilities")
    return other or skipped("the loss takes logits")


def _normalised_elsewhere(evidence: Evidence) -> Finding | None:
    """Judge ctc_loss, whose rows are log-probabilities, and kl_div, whose input is at most 0."""
    found = None
    for call in (call for seen in evidence.all_observed for call in seen.calls):
        if call.function not in ("ctc_loss", "kl_div") or not call.raw_scores.numel():
            continue
        scores = call.raw_scores.detach().double()
        highest = float(scores.max())
        off = highest if call.function == "kl_div" else float(scores.logsumexp(-1).abs().max())
        if off > SUMS_TO_ONE_HALF:
            text = "take log_softmax of the scores first"
            return failed(
                f"{call.function} gets scores up to {highest:.3g}, which are no log-probabilities",
                off,
                at(call.where, text),
            )
        found = passed(f"{call.function} gets log-probabilities", off)
    return found


def check_dead_outputs(evidence: Evidence, limit: float) -> Finding:
    """Outputs follow the input: swapped inputs swap the outputs."""
    evidence.needs_finite()
    if not evidence.outputs(evidence.batches[0]):
        return skipped("the model returns no floating-point tensor")
    change = _moves(evidence)
    if change > limit:
        return passed("the outputs follow the inputs", change)
    change = evidence.warmed(lambda: _moves(evidence))
    if change > limit:
        return passed("zero at the start, follows the inputs after a few steps", change)
    return failed(
        "the outputs do not change with the input, also after a few steps: the model does not see "
        "it, or is dead",
        change,
        fix_in(evidence.target.model, "follow the input from here; model-skeleton traces it"),
    )


def _moves(evidence: Evidence) -> float:
    """Relative change of the outputs when the examples' inputs are exchanged."""
    batch = evidence.batches[0]
    inputs = evidence.paths("input", "both") or [p for p, _ in leaves(batch)]
    tensors = dict(leaves(batch))
    changes = []
    plain = evidence.outputs(batch)
    others = [dict(leaves(b)) for b in evidence.batches[1:]]
    rolled = {p: tensors[p].roll(1, 0) for p in inputs if tensors[p].dim() > 0}
    candidates = [rolled] + [
        {p: other[p] for p in inputs if p in other and other[p].shape == tensors[p].shape}
        for other in others
    ]
    for candidate in candidates:
        if not candidate or all(bool((candidate[p] == tensors[p]).all()) for p in candidate):
            continue
        changed = evidence.probe(observation.replaced(batch, candidate), "exchanged inputs")
        changes.append(relative_change(plain, changed))
    if not changes:
        raise CannotJudge("all examples of the first batches have the same inputs")
    return max(changes)
