"""Verdicts on the start of each term of a loss, averaged over seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from expected_loss import Start
from model_head import head_line, head_of

from kit.fix import fix_at
from kit.loss_terms import class_costs
from kit.report import Report
from kit.target import Target

LOW, HIGH, RELATIVE = -0.05, 0.15, 0.05
"""Passes: from LOW to HIGH nats around the expected loss, or within RELATIVE of it."""
CHANCE = 3.0
"""Scores know their labels when they save this many standard deviations of luck."""
WIDE, WIDEST = 3.0, 10.0
"""values: predictions (or their offset) over the labels' standard deviation; said, and failed."""
KNOWS, KNOWS_ALONE = 0.9, 0.25
"""values: loss over that of the best constant, below which predictions know their labels: with
several seeds, and with one."""


@dataclass
class Finding:
    """A term under all seeds: means of what `Start` says, and what the loss should be."""

    first: Start
    seeds: int
    loss: float
    guess: float
    prior: float
    constant: float
    unpaired: float
    spread: float
    chance: float
    scale: float
    """What loss_fn multiplies the mean by."""
    least_informed: float
    mean_correlation: float
    offset: float

    @property
    def classes(self) -> int:
        return self.first.term.classes

    @property
    def follows_prior(self) -> bool:
        """Tell whether constant scores (a bias) hold the labels' frequencies."""
        if not self.first.term.normalised:
            return False
        gained, gap = self.guess - self.constant, self.constant - self.prior
        return gained > -LOW and (gap <= HIGH or gap <= RELATIVE * self.prior) and gained > gap

    @property
    def expected(self) -> float:
        return self.prior if self.follows_prior else self.guess

    @property
    def expectation(self) -> str:
        if self.first.term.kind == "values":
            return "best constant"
        if self.follows_prior:
            return "label entropy"
        even = abs(self.guess - math.log(max(self.classes, 1))) < 1e-9
        binary = self.first.term.kind == "binary"
        return "ln 2" if binary else f"ln {self.classes}" if even else "mean of ln C"

    @property
    def excess(self) -> float:
        return self.loss - self.expected

    @property
    def informed(self) -> float:
        return self.unpaired - self.loss

    @property
    def close(self) -> bool:
        """Tell whether the loss is within the relative band."""
        return abs(self.excess) <= RELATIVE * self.expected


def judge_start(
    report: Report, target: Target, runs: list[Any], trained: str | None, limits: dict[str, float]
) -> list[dict[str, Any]]:
    """Judge every term of the runs' losses; each id is reported once, with its worst term."""
    found: dict[str, list[dict[str, Any]]] = {}
    numbers, alone = [], len(runs[0].starts) == 1
    for index in range(len(runs[0].starts)):
        finding = _average([run.starts[index] for run in runs])
        own = Report(report.skill)
        if finding.first.term.kind == "values":
            _judge_values(own, target, finding, trained)
        else:
            _judge_scores(own, target, finding, trained, limits)
        if alone and _of(own, "initial-loss")["verdict"] == "pass" and trained is None:
            _judge_scale(own, finding, runs[0])
        for check in own.checks:
            found.setdefault(check["id"], []).append(check)
        report.next += own.next
        numbers.append(_numbers(finding))
    order = ("fail", "unclear", "pass", "skipped")
    for checks in found.values():
        worst = min(checks, key=lambda check: order.index(check["verdict"]))
        report.checks.append(worst)
    return numbers


def _of(report: Report, name: str) -> dict[str, Any]:
    return next(check for check in report.checks if check["id"] == name)


def _average(starts: list[Start]) -> Finding:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    first, count = starts[0], len(starts)
    return Finding(
        first=first,
        seeds=count,
        loss=mean([s.mean for s in starts]),
        guess=mean([s.guess for s in starts]),
        prior=mean([s.prior for s in starts]),
        constant=mean([s.constant for s in starts]),
        unpaired=mean([s.unpaired for s in starts]),
        spread=mean([s.spread for s in starts]),
        chance=mean([s.chance for s in starts]) / math.sqrt(count),
        scale=_scale(first.term),
        least_informed=min(s.informed for s in starts),
        mean_correlation=mean([s.correlation for s in starts]),
        offset=mean([s.offset for s in starts]),
    )


def _scale(term: Any) -> float:
    """Say what multiplies the mean; class weights and pos_weight that are not divided out do not
    count, and weights of single targets have no one scale."""
    counted = term.weights[term.weights != 0]
    if not len(counted) or float(counted.std()) > 0.01 * abs(float(counted.mean())):
        return 1.0
    plain = float(term.weights.sum())
    return plain if term.kind != "classes" or abs(plain - 1) < 0.03 else _mass(term)


def _mass(term: Any) -> float:
    return float((term.weights * term.mass).sum())


def _numbers(finding: Finding) -> dict[str, Any]:
    term = finding.first.term
    shown = ("loss", "expected", "expectation", "prior", "constant", "unpaired", "spread", "scale")
    where = None if term.where is None else f"{term.where[0]}:{term.where[1]}"
    return {
        **{name: getattr(finding, name) for name in shown},
        "kind": term.kind,
        "function": term.function,
        "classes": finding.classes,
        "targets": len(term.rows),
        "where": where,
        "known_of_own_labels": finding.informed,
        "offset": finding.offset,
        "correlation": finding.mean_correlation,
    }


def _line(finding: Finding, text: str) -> dict[str, Any] | None:
    where = finding.first.term.where
    return None if where is None else fix_at(*where, text)


def _judge_scores(
    report: Report, target: Target, f: Finding, trained: str | None, limits: dict[str, float]
) -> None:
    """Judge a loss of classes or of yes and no."""
    said = f"{f.loss:.4f}, expected {f.expected:.4f} ({f.expectation})"
    high = f.excess > limits["logit-scale"] and not f.close and not _is_contrastive(f)
    low = f.excess < -limits["initial-loss"] and not f.close
    verdict, message, fix, limit = "pass", said, None, [LOW, HIGH]
    if not f.first.term.normalised:
        verdict, fix = "fail", _line(f, "take log_softmax of the scores first")
        message = f"{said}: {f.first.term.function} wants log-probabilities, and got raw scores"
    elif high:
        verdict, limit = "fail", limits["logit-scale"]
        message = f"{said}: {_why_high(target, f)}"
        better = (
            f"set its bias to {_bias(f)}" if _cause(target, f) == "bias" else "start it smaller"
        )
        fix = head_line(target, f.first.term, better) or _line(f, "look at the scores")
    elif low:
        verdict, message = _judge_low(f, said, trained, -limits["initial-loss"])
        limit = -limits["initial-loss"]
        fix = _line(f, "see what the scores know of these labels") if verdict == "fail" else None
    elif _is_contrastive(f) and f.excess > HIGH:
        message = f"{said}: higher by the temperature; label i is row i, whose scores have one"
    elif not (LOW <= f.excess <= HIGH or f.close):
        message = f"{said}: outside {LOW} to {HIGH} but no fault, {_why_between(f)}"
    report.check(
        "initial-loss",
        verdict,
        value=f.excess,
        threshold=limit,
        unit="nats",
        message=message,
        fix=fix,
    )
    wide = high and _cause(target, f) == "spread"
    report.check(
        "logit-scale",
        "fail" if wide else "pass",
        value=f.excess,
        threshold=limits["logit-scale"],
        unit="nats",
        message=f"above the expected loss; standard deviation of the logits {f.spread:.3g}",
        fix=head_line(target, f.first.term, "a smaller start, e.g. std 0.02") if wide else None,
    )
    _judge_bias(report, target, f, trained, high, limits["head-prior-bias"])


def _cause(target: Target, f: Finding) -> str:
    """Say what a loss that is too high comes from: the head's bias, other labels, or the spread.

    Large random scores have large means too, so that a bias is to blame only when it, alone, costs
    too much; labels only beyond chance.
    """
    _, head = head_of(target, f.first.term)
    bias = getattr(head, "bias", None)
    wrong_bias = f.constant - f.expected > 2 * (f.unpaired - f.constant)
    if hasattr(bias, "detach"):
        wrong_bias = _bias_alone(f, bias) - f.guess > 0.5 * f.excess
    if wrong_bias:
        return "bias"
    contradicted = -f.informed > max(CHANCE * f.chance, f.unpaired - f.expected)
    return "labels" if contradicted else "spread"


def _bias_alone(f: Finding, bias: Any) -> float:
    """Return the loss of the head's bias without its inputs."""
    import torch

    term = f.first.term
    alone = bias.detach().double().cpu()[: term.classes].expand(len(term.scores), -1)
    if term.kind == "binary":
        softplus = torch.nn.functional.softplus
        costs = term.labels * softplus(-alone) + (1 - term.labels) * softplus(alone)
        return term.average(costs * term.mass)
    return term.average(class_costs(alone, term.labels, term.options)[0])


def _why_high(target: Target, f: Finding) -> str:
    return {
        "spread": f"the logits are too large, their standard deviation is {f.spread:.3g}",
        "bias": "constant scores (a bias) contradict how often each label comes",
        "labels": "the scores contradict the labels: weights trained on other labels, or a sign",
    }[_cause(target, f)]


def _why_between(f: Finding) -> str:
    if f.excess > 0:
        return f"logits of standard deviation {f.spread:.3g} cost about half their variance"
    return "constant scores and chance make this much"


def _is_contrastive(f: Finding) -> bool:
    """Tell whether label i is class i in every group of C rows: the others are the negatives."""
    term = f.first.term
    if not term.hard or term.classes < 2 or len(term.labels) % term.classes:
        return False
    import torch

    places = torch.arange(len(term.labels)) % term.classes
    return bool((term.labels == places).all())


def _judge_low(f: Finding, said: str, trained: str | None, limit: float) -> tuple[str, str]:
    if trained is not None:
        return "pass", f"{said}: lower, as weights that are trained should be ({trained})"
    if _is_contrastive(f):
        return "pass", f"{said}: lower, as views of one thing are alike before training"
    if f.informed <= -limit:
        return "pass", f"{said}: lower by constant scores only, which know no input"
    if f.informed < CHANCE * f.chance or (f.seeds > 1 and f.least_informed < 0):
        return "pass", f"{said}: lower, but within what chance gives for {f.seeds} seed(s)"
    return "fail", (
        f"{said}: before any step the scores know their labels: a label leaks into the input, the "
        "causal mask is missing, or a checkpoint was loaded (then say --trained)"
    )


def _judge_bias(
    report: Report, target: Target, f: Finding, trained: str | None, high: bool, limit: float
) -> None:
    """Judge the head's bias by the entropy of the labels; suggest one where it would help."""
    gain = f.guess - f.prior
    name, head = head_of(target, f.first.term)
    verdict, message, fix = (
        "pass",
        f"constant scores could reach {f.prior:.4f}, the labels' entropy",
        None,
    )
    if trained is not None or _is_contrastive(f):
        verdict, message = "skipped", trained or "labels are places in the batch"
    elif high and _cause(target, f) == "bias":
        verdict = "fail"
        message += f", the head's cost {f.constant:.4f}"
        fix = head_line(target, f.first.term, f"set its bias to {_bias(f)}")
    elif gain <= limit:
        verdict, message = "skipped", f"labels are even enough, their entropy is {f.prior:.4f}"
    elif f.follows_prior:
        message += ", and the head's do"
    elif head is not None and getattr(head, "bias", None) is not None:
        place = head_line(target, f.first.term, "")
        at = f" ({place['file']}:{place['line']})" if place else ""
        report.next.append(f"start the bias of {name}{at} at {_bias(f)}: saves {gain:.2f} nats")
    else:
        message += "; a head without bias learns it in the first steps"
    report.check(
        "head-prior-bias",
        verdict,
        value=gain,
        threshold=None if verdict == "pass" else limit,  # a pass above it is a suggestion
        unit="nats",
        message=message,
        fix=fix,
    )


def _bias(f: Finding) -> str:
    values = f.first.bias
    shown = ", ".join(f"{value:.2f}" for value in values[:6])
    what = "mean label" if f.first.term.kind == "values" else "log prior"
    what = "log(p / (1 - p))" if f.first.term.kind == "binary" else what
    return f"the {what}, [{shown}{', ...' if len(values) > 6 or f.classes > 6 else ''}]"


def _judge_values(report: Report, target: Target, f: Finding, trained: str | None) -> None:
    """Judge a regression against the best constant."""
    ratio = f.loss / f.guess if f.guess else math.inf
    said = f"{f.loss:.4g}, the best constant loses {f.guess:.4g}"
    verdict, fix = "pass", None
    knows = ratio < (KNOWS if f.seeds > 1 else KNOWS_ALONE) and f.mean_correlation > 0.5
    if not f.guess:
        verdict, said = "skipped", f"{f.loss:.4g}; the labels are constant"
    elif knows and trained is not None:
        said += f": lower, as weights that are trained should be ({trained})"
    elif knows:
        said += f": predictions follow the labels already (correlation {f.mean_correlation:.2f}): "
        said += "right where the input is carried to the output, else a leak or --trained"
    report.check(
        "initial-loss", verdict, value=ratio, unit="of the best constant", message=said, fix=fix
    )
    wide = f.spread > WIDEST and f.spread > f.offset and math.isfinite(f.spread)
    report.check(
        "logit-scale",
        "fail" if wide else "pass" if f.guess else "skipped",
        value=f.spread,
        threshold=WIDEST,
        message="spread of the predictions over that of the labels",
        fix=head_line(target, f.first.term, "a smaller start, or labels divided by their std")
        if wide
        else None,
    )
    far = f.offset > WIDEST and math.isfinite(f.offset)
    report.check(
        "head-prior-bias",
        "fail" if far else "pass" if f.guess else "skipped",
        value=f.offset,
        threshold=WIDEST,
        message="distance of the mean prediction from the mean label over the labels' spread",
        fix=head_line(
            target, f.first.term, f"set its bias to {_bias(f)}, or subtract it from the labels"
        )
        if far
        else None,
    )
    if f.guess and 0.5 < f.offset <= WIDEST:
        place = head_line(target, f.first.term, "")
        at = f" ({place['file']}:{place['line']})" if place else ""
        report.next.append(f"start the bias of the last layer{at} at {_bias(f)}")
    if f.guess and WIDE < f.spread <= WIDEST:
        report.next.append("divide the labels by their standard deviation")


def _judge_scale(report: Report, f: Finding, run: Any) -> None:
    """Fail a loss that is no mean over its targets: a sum, or divided once more."""
    term, check = f.first.term, _of(report, "initial-loss")
    rows = len(term.rows) / max(len(run.losses), 1)
    size = _size(run.batch, rows)
    per_row = term.costs.numel() / max(len(term.costs), 1)
    elements = rows * per_row
    allowed = {1.0, float(run.calls), per_row, elements / size}
    if any(abs(f.scale / scale - 1) < 0.03 for scale in allowed):
        return
    kept = rows / max(run.rows_given, 1)
    counted = float((term.weights != 0).double().mean())
    said = None
    if term.kind == "values":
        sums = {size, rows, elements, 1 / size, 1 / rows, 1 / elements}
        said = size > 2 and any(abs(f.scale / s - 1) < 0.03 for s in sums)
        said = f"loss_fn returns {f.scale:.4g} times the mean" if said else None
    elif abs(f.scale - kept) < 0.01 or abs(f.scale - counted) < 0.01:
        said = f"loss_fn divides by all places: {f.scale:.3g} of the mean over targets that count"
    elif (f.scale - 1) * f.loss > 0.5 or (f.scale - 1) * f.loss < -0.1:
        said = f"loss_fn returns {f.scale:.4g} times the mean over its targets"
    if said is not None:
        returned = f.scale * f.loss
        check.update(
            verdict="fail",
            value=returned - f.expected,
            message=f"{returned:.4g}, expected {f.expected:.4f} ({f.expectation}): {said}",
            fix=_line(f, "return the mean over the targets that are not ignored"),
        )


def _size(batch: Any, rows: float) -> float:
    from kit.batch_tree import batch_size

    return float(batch_size(batch)) if batch is not None else rows
