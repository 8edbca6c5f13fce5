"""Verdicts on the trainings on one batch: its floor, and the signatures of what went wrong."""

from __future__ import annotations

import math
from typing import Any

import real_steps
from batch_floor import double_sigmoid_floor, double_softmax_floor
from one_batch_case import Case

from kit.fix import fix_at, fix_in
from kit.report import Report

SLOW = "; slow, and every label is right"
SIGNATURE_ACCURACY = 0.99
"""A plateau is a double softmax only when this share of labels is right, where that is known."""


def judge(report: Report, case: Case, limits: dict[str, float]) -> None:
    """Add every check, the numbers and the next steps."""
    doubled = _judge_double(report, case, limits["double-softmax"])
    _judge_floor(report, case, limits, doubled)
    _judge_inputs(report, case, limits["input-independent"])
    _judge_learning(report, case, limits["no-learning"])
    _judge_labels(report, case)
    _judge_optimizer(report, case)
    best = case.best
    report.numbers |= _numbers(case)
    fate = "learnt by heart" if case.passed else "not learnt by heart"
    unit = f"{case.fixed.size} examples" + (f" ({case.fixed.cut})" if case.fixed.cut else "")
    report.summary = (
        f"{unit} {fate}: {case.start.loss:.4f} to {best.last.loss:.4f} in {best.last.step} steps, "
        f"floor {best.last.floor:.4f}"
    )


def _numbers(case: Case) -> dict[str, Any]:
    best = case.best
    rows = sum(len(term.rows) for term in case.terms)
    return {
        "first_loss": case.start.loss,
        "final_loss": best.last.loss,
        "returned_loss": best.last.total,
        "floor": best.last.floor,
        "prior_entropy": case.prior if case.terms else None,
        "ln_classes": case.guess,
        "accuracy": best.last.accuracy,
        "best_accuracy": case.best_accuracy,
        "steps": best.last.step,
        "lr": best.lr,
        "examples": case.fixed.size,
        "cut": case.fixed.cut,
        "targets": rows,
        "targets_seen": rows * sum(len(a.losses) for a in case.attempts),
        "without_inputs": None if case.baseline is None else case.baseline.last.loss,
        "draws_random_numbers": case.random,
        "functional_dropout": case.quiet_calls,
        "attempts": [
            {"lr": a.lr, "steps": a.last.step, "loss": a.last.loss, "ended": a.ended}
            for a in case.attempts
        ],
        "curve": [[look.step, look.total, look.loss] for look in best.looks],
        "baseline_curve": []
        if case.baseline is None
        else [[look.step, look.loss] for look in case.baseline.looks],
    }


def _where(case: Case, text: str) -> dict[str, Any] | None:
    """Name the line that calls the loss, else loss_fn."""
    main = case.first.main
    if main is not None and main.where is not None:
        return fix_at(*main.where, text)
    return fix_in(case.target.loss_fn, text)


def _forward(case: Case) -> dict[str, Any] | None:
    """Name where the inputs go in: forward of the user's model, else the line of the loss."""
    text = "follow the inputs through forward"
    ours = not type(case.target.model).__module__.startswith("torch.")
    return (fix_in(case.target.model, text) if ours else None) or _where(case, text)


def _doubled(case: Case, limit: float) -> tuple[str, float] | None:
    """Return how probabilities were taken for logits, and the floor of that; else None."""
    final, accuracy = case.best.last.loss, case.best.last.accuracy
    for call in case.first.calls:
        if call.result is None or not call.share:
            continue
        to_classes = call.function == "cross_entropy" and call.scores.shape[-1] > 1
        if to_classes and call.origin == "sigmoid" and not case.passed:
            return "cross_entropy gets a sigmoid", double_softmax_floor(call.scores.shape[-1])
        if call.is_double_softmax and call.scores.shape[-1] > 1:
            return "cross_entropy gets a softmax", double_softmax_floor(call.scores.shape[-1])
    for term in case.terms:
        logits = term.function == "binary_cross_entropy_with_logits"
        if logits and term.origin == "sigmoid":
            return "the loss with logits gets a sigmoid", double_sigmoid_floor(term)
    if case.passed or (not math.isnan(accuracy) and accuracy < SIGNATURE_ACCURACY):
        return None
    sizes = {term.classes for term in case.terms if term.kind == "classes"}
    if not case.terms:
        sizes = {t.shape[-1] for t in case.first.outputs if t.dim() > 1 and t.shape[-1] > 1}
    for size in sizes:
        low = double_softmax_floor(size)
        if abs(final - low) < limit * low:
            return "the plateau is that of a softmax of a softmax", low
    return None


def _judge_double(report: Report, case: Case, limit: float) -> bool:
    final = case.best.last.loss
    kinds = {term.kind for term in case.terms}
    if not case.terms or not kinds & {"classes", "binary"}:
        found = _doubled(case, limit) if not case.terms and case.first.outputs else None
        if found is None:
            report.check("double-softmax", "skipped", message="the loss has no classes")
            return False
    found = _doubled(case, limit)
    if found is None:
        low = double_softmax_floor(max(t.classes for t in case.terms if t.kind in kinds))
        message = "no plateau where a softmax of a softmax ends"
        report.check("double-softmax", "pass", value=final, threshold=low, message=message)
        return False
    how, low = found
    report.check(
        "double-softmax",
        "fail",
        value=final,
        threshold=low,
        unit="nats",
        message=f"{how}; it cannot get below {low:.4f}",
        fix=_where(case, "give the loss the logits, without softmax or sigmoid"),
    )
    return True


def _judge_floor(report: Report, case: Case, limits: dict[str, float], doubled: bool) -> None:
    best, last = case.best, case.best.last
    above, goal = last.loss - last.floor, case.goal
    notes = [floor.note for floor in case.floors.values() if floor.note]
    said = f"{last.loss:.4f} after {last.step} steps at lr {best.lr:.1e}, floor {last.floor:.4f}"
    said += "" if math.isnan(last.accuracy) else f", {last.accuracy:.1%} right"
    if not math.isnan(case.best_accuracy) and case.best_accuracy < 1:
        said += f" of at most {case.best_accuracy:.1%}"
    said += f"; {'; '.join(notes)}" if notes else ""
    verdict, fix = "pass", None
    if not math.isfinite(last.total):
        verdict, fix = "fail", _where(case, "find what is not finite: gradient-flow")
        said += "; the loss is not finite"
    elif case.unbounded:
        blind = case.baseline
        learns = blind is not None and min(x.loss for x in blind.looks) - last.loss > case.near
        verdict = "skipped" if learns else "unclear"
        said = f"{last.total:.4f} after {last.step} steps: the loss goes below 0 and its bound is "
        said += "not known; a likelihood with a variance of its own has none"
        said += ". It gets lower by its inputs" if learns else ""
    elif case.passed and case.alone is best:
        said += "; the known terms alone: the other terms hold the whole loss up"
    elif not case.passed and case.nearly:
        said += "; slow, and far below constant scores" if case.values else SLOW
    elif not case.passed and case.best.ended == "time":
        verdict = "unclear"
        said += "; time is up while it may still fall: raise --seconds or lower --tokens"
    elif not case.passed and not case.terms and best.gradient != 0 and not _flat(case, limits):
        verdict = "unclear"
        named = ", ".join(sorted({call.function for call in case.first.calls})) or "own arithmetic"
        said += f"; the loss is made by {named}, whose floor is not known here"
    elif not case.passed:
        verdict = "fail"
        said += "" if doubled else f"; {_hint(case)}"
        fix = _where(case, "see the other checks for the cause")
    report.check(
        "one-batch-floor",
        verdict,
        value=above,
        threshold=goal,
        unit="nats above the floor",
        message=said,
        fix=fix,
    )


def _flat(case: Case, limits: dict[str, float]) -> bool:
    start = case.start.loss
    return case.best.last.loss > (1 - limits["no-learning"]) * start


def _hint(case: Case) -> str:
    last = case.best.last
    broadcast = _broadcast(case)
    if broadcast:
        return broadcast
    if any(not term.normalised for term in case.terms):
        return "nll_loss wants log-probabilities and gets raw scores: it has no lower bound"
    if case.best.gradient == 0:
        return "no gradient reaches a parameter"
    if not math.isnan(last.accuracy) and last.accuracy >= case.best_accuracy - 1e-9:
        largest = max(float(t.scores.abs().max()) for t in last.terms)
        return f"every label is right, but no score is larger than {largest:.2f}: a bounded layer?"
    near = not math.isnan(case.prior) and abs(last.loss - case.prior) < 0.02 * max(case.prior, 1.0)
    if near:
        constant = "the best constant loses" if case.values else "the entropy of its labels is"
        return f"{constant} {case.prior:.4f}: the inputs seem to be ignored"
    if last.loss > case.start.loss:
        return "it rises"
    return "the model cannot fit it, or labels, inputs and loss do not belong together"


def _broadcast(case: Case) -> str:
    """Say that predictions and labels of different shapes were spread over each other."""
    main = case.first.main
    if main is None or main.kind == "classes":
        return ""
    scores, labels = tuple(main.raw_scores.shape), tuple(main.raw_labels.shape)
    if scores == labels or math.prod(scores) == math.prod(labels) == main.result.numel() > 1:
        return ""
    return f"predictions {list(scores)} meet labels {list(labels)}: each prediction meets all"


def _judge_inputs(report: Report, case: Case, limit: float) -> None:
    """Compare with the same training on constant inputs."""
    blind, last = case.baseline, case.best.last
    if blind is None:
        tensors = case.fixed.inputs()
        why = "an input is a label too" if tensors else "no tensor of the batch is an input"
        report.check("input-independent", "skipped", message=f"no baseline: {why}")
        return
    if not case.passed and (_broadcast(case) or not math.isfinite(last.loss)):
        report.check("input-independent", "skipped", message="see one-batch-floor")
        return
    at = min(len(case.best.looks), len(blind.looks)) - 1
    seen = last.loss if not case.passed else case.best.looks[at].loss
    low = min(look.loss for look in blind.looks)
    said = f"{seen:.4f} with its inputs, {low:.4f} without"
    said += f" (constant scores {case.prior:.4f})" if case.terms else ""
    verdict, fix = "pass", None
    alike = abs(seen - low) < limit * max(abs(low), 1e-12)
    if case.random and low < 0.9 * case.blind - case.near:
        verdict = "fail"
        said = f"{seen:.4f} with its inputs, {low:.4f} with constant ones, which allow "
        said += f"{case.blind:.4f}: random numbers tell the examples apart, noise for inputs?"
        fix = fix_in(case.target.loss_fn, "give the model the inputs of the batch")
    elif case.passed and low - last.floor < case.goal:
        verdict, said = "skipped", f"{said}: the labels of the batch are alike"
    elif not case.passed and alike and not _stuck_at_start(case):
        verdict = "fail"
        said += ": the model learns nothing from its inputs"
        fix = _forward(case)
    report.check(
        "input-independent", verdict, value=seen, threshold=low, unit="nats", message=said, fix=fix
    )


def _blind(case: Case) -> bool:
    """Tell whether a loss that did not fall is where constant scores end: the labels are even, and
    the inputs are to blame."""
    moved = any(look.loss != case.start.loss for look in case.best.looks)
    return moved and not math.isnan(case.prior) and case.best.last.loss < 1.02 * case.prior


def _stuck_at_start(case: Case) -> bool:
    return case.best.last.loss > 0.99 * case.start.loss and case.start.loss > case.prior * 1.02


def _judge_learning(report: Report, case: Case, limit: float) -> None:
    """Fail a loss that stays where it began, and a user's step that stands still or goes uphill."""
    best, start, real = case.best, case.start.loss, case.real
    fall = (start - best.last.loss) / abs(start) if start else 0.0
    verdict, fix = "pass", None
    said = f"of the first loss gone after {best.last.step} steps"
    if not math.isfinite(best.last.loss):
        verdict, fall, said = "skipped", None, "the loss is not finite"
    elif best.gradient == 0:
        verdict = "fail"
        said = "no gradient reaches a parameter: detach, no_grad, or nothing requires a gradient"
        fix = _where(case, "keep the graph from the parameters to this loss")
    elif not case.passed and not fall >= limit and not case.shuffled and not _blind(case):
        verdict = "fail"
        said = f"{start:.4f} to {best.last.loss:.4f} in {best.last.step} steps at every rate"
        fix = _where(case, "look at the sign and at what the loss depends on")
    elif real is not None and real.held and real.trained and not real.moved:
        verdict, fix = "fail", real.place
        why = "its gradients are cleared before the step, or backward is missing"
        why = why if real.stepped else "no call of optimizer.step was seen"
        why = why if any(real.rates) else "the learning rate is 0"
        said = f"a fresh AdamW learns the batch, but {real.by} moves no parameter: {why}"
    elif real is not None and real_steps.rises(real.losses) and case.passed:
        verdict, fix = "fail", real.place
        said = (
            f"a fresh AdamW learns the batch, but with {real.by} the loss rises at every step "
            f"({real.losses[0]:.4f} to {real.losses[-1]:.4f}): maximize, or a sign, or lr"
        )
    report.check("no-learning", verdict, value=fall, threshold=limit, message=said, fix=fix)


def _judge_labels(report: Report, case: Case) -> None:
    if case.shuffled is not None:
        fix = _where(case, "keep inputs and labels together")
        report.check("labels-reshuffled", "fail", message=case.shuffled, fix=fix)
        return
    said = "two calls of loss_fn pair scores and labels alike"
    said += f", {case.compared} examples read twice have their labels" if case.compared else ""
    report.check("labels-reshuffled", "pass", message=said)


def _judge_optimizer(report: Report, case: Case) -> None:
    real = case.real
    if real is None:
        report.check("optimizer-parameters", "skipped", message="the target returned no optimizer")
        return
    if real.trained == 0 or case.best.gradient == 0:
        report.check("optimizer-parameters", "skipped", message="there is no gradient to step by")
        return
    verdict, fix = "pass", None
    said = f"of {real.trained} parameters moved in steps of {real.by}"
    if real.moved == 0 and real.held:
        verdict, said = "skipped", "see no-learning"
    elif real.moved == 0:
        verdict, fix = "fail", real.place
        why = f"the optimizer holds none of the model's {real.trained} parameters"
        same = len(set(real.losses)) == 1 and len(real.losses) > 1
        said += f": {why}" + (", the loss stays the same to the last bit" if same else "")
    report.check(
        "optimizer-parameters",
        verdict,
        value=real.moved / real.trained,
        threshold=0,
        message=said,
        fix=fix,
    )
