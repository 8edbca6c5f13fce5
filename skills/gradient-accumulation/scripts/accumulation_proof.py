"""One batch against k micro-batches in float64, and what a loop that differs does instead.

The gradient of k micro-batches is a combination of the gradients s_i of their sums over targets.
Its coefficients say what the loop does, n_i being the targets of micro-batch i and N all of them:
1/N is right, 1/(k n_i) a mean of means, 1/n_i a sum of means, zeros but the last a zero_grad in
between. Under a norm that clips, coefficients that change by unequal factors are clipped each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kit.errors import UsageError
from kit.report import Report

FLOOR = 1e-6
EXPLAINED = 1e-5
"""Relative error up to which a combination or a pattern counts as found."""
FAULTS = {
    "accumulation-mean-of-means": "means of micro-batches are averaged, so a target in a short one "
    "counts more; add sums and divide by all targets",
    "accumulation-not-divided": "the gradient is not divided by the number of all targets",
    "accumulation-zeroes-between": "only the last micro-batch reaches the optimizer; zero_grad "
    "once a step",
}


@dataclass
class Seen:
    """What one call of a loop did: gradients at each optimizer step, and the loss it returned."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    loss: float | None = None

    @property
    def norm(self) -> float:
        torch = sys.modules["torch"]
        return float(torch.stack([g.norm() for g in self.steps[-1].values()]).norm())


def observe(loop: Callable[[list[Any]], Any], micro_batches: list[Any], optimizer: Any,
            names: dict[int, str]) -> Seen:  # fmt: skip
    """Run a loop over micro-batches and look at the gradients whenever the optimizer steps."""
    torch = sys.modules["torch"]
    seen = Seen()

    def look(stepping: Any, *_: Any) -> None:
        found = {}
        for group in stepping.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                grad = torch.zeros_like(parameter) if grad is None else grad
                found[names.get(id(parameter), str(len(found)))] = grad.detach().clone()
        seen.steps.append(found)

    handle = optimizer.register_step_pre_hook(look)
    try:
        loss = loop(micro_batches)
    finally:
        handle.remove()
    loss = getattr(loss, "loss", loss)
    if isinstance(loss, (int, float)) or (hasattr(loss, "numel") and loss.numel() == 1):
        seen.loss = float(loss)
    return seen


def sum_gradients(
    model: Any, loss_fn: Any, batches: list[Any], counts: list[int], names: list[str]
) -> list[dict[str, Any]]:
    """Return for each batch the gradient of its loss summed over its targets."""
    torch = sys.modules["torch"]
    parameters = dict(model.named_parameters())
    found = []
    for batch, count in zip(batches, counts, strict=True):
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        grads = {name: parameters[name].grad for name in names}
        found.append(
            {
                name: torch.zeros_like(parameters[name]) if g is None else g.detach() * count
                for name, g in grads.items()
            }
        )
    model.zero_grad(set_to_none=True)
    return found


def error_of(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest error of any tensor: max|a - b| / max(max|b|, 1e-6 of the whole norm)."""
    torch = sys.modules["torch"]
    floor = FLOOR * float(torch.stack([t.norm() for t in wanted.values()]).norm())
    errors = [0.0]
    for name, reference in wanted.items():
        if reference.numel():
            gap = (found[name] - reference).abs().max()
            errors.append(float(gap / reference.abs().max().clamp(min=max(floor, 1e-300))))
    return max(errors) if all(e == e for e in errors) else float("inf")


def coefficients(gradient: dict[str, Any], sums: list[dict[str, Any]]) -> list[float] | None:
    """Return the a_i with gradient = sum of a_i s_i, None when it is no such combination."""
    torch = sys.modules["torch"]
    flat = torch.cat([gradient[name].flatten().double() for name in gradient]).cpu()
    columns = torch.stack(
        [torch.cat([s[name].flatten().double() for name in gradient]).cpu() for s in sums], 1
    )
    sizes = columns.norm(dim=0).clamp(min=1e-300)
    solution = torch.linalg.lstsq(columns / sizes, flat[:, None]).solution[:, 0]
    rest = (columns / sizes) @ solution - flat
    if not float(rest.norm()) <= EXPLAINED * float(flat.norm()):
        return None
    return (solution / sizes).tolist()


def near(values: list[float], wanted: list[float]) -> bool:
    size = max(map(abs, wanted), default=0.0)
    return all(abs(a - b) <= EXPLAINED * size for a, b in zip(values, wanted, strict=True))


def fault_of(found: list[float], counts: list[int]) -> str | None:
    """Name what the coefficients of an unclipped step mean: a check id, None if right."""
    k, total = len(counts), sum(counts)
    if near(found, [1 / total] * k):
        return None
    size = max(map(abs, found))
    if size and all(abs(value) <= EXPLAINED * size for value in found[:-1]):
        return "accumulation-zeroes-between"
    means = [value * count for value, count in zip(found, counts, strict=True)]
    if near(means, [1 / k] * k):
        return "accumulation-mean-of-means"
    if near(means, [means[0]] * k) or near(found, [found[0]] * k):
        return "accumulation-not-divided"
    return "unknown"


def clips_each(plain: list[float], clipped: list[float]) -> bool:
    """Tell whether clipping shrank micro-batches by unequal factors."""
    factors = [b / a if a else 0.0 for a, b in zip(plain, clipped, strict=True)]
    return not near(factors, [factors[-1]] * len(factors))


def added(sums: list[dict[str, Any]]) -> dict[str, Any]:
    """Add gradients by name."""
    return {name: sum(s[name] for s in sums) for name in sums[0]}


def judge_additive(report: Report, error: float, limit: float) -> bool:
    """The loss itself must be a mean over targets, or no accumulation can be equal."""
    fine = error <= limit
    report.check(
        "accumulation-additive",
        "pass" if fine else "fail",
        value=error,
        threshold=limit,
        message="the loss of a batch is the sum over its targets"
        if fine
        else "the loss mixes samples: a term or a norm over the whole micro-batch",
    )
    return fine


def judge(
    report: Report,
    sums: list[dict[str, Any]],
    counts: list[int],
    whole: Seen,
    split: Seen,
    clipped: Seen,
    limit: float,
    additive: bool = True,
) -> None:
    """Name what a loop does wrong, then hold k micro-batches against one batch."""
    steps = max(len(seen.steps) for seen in (split, clipped))
    if not split.steps:
        raise UsageError(
            f"the loop took no optimizer step over {len(counts)} micro-batches",
            "it must take one",
            "set --micro-batches to the number that your loop accumulates",
        )
    if not whole.steps:  # a loop that steps after a fixed number: the formula stands in
        whole = Seen([{name: g / sum(counts) for name, g in added(sums).items()}])
    report.check(
        "accumulation-steps-each",
        "pass" if steps == 1 else "fail",
        value=steps,
        threshold=1,
        unit="optimizer steps",
        message="" if steps == 1 else f"for {len(counts)} micro-batches; step after the last one",
    )
    judge_pattern(report, sums, counts, split, clipped)
    errors = {"gradients": error_of(split.steps[-1], whole.steps[-1])}
    errors["norm"] = abs(split.norm - whole.norm) / max(whole.norm, 1e-300)
    if split.loss is not None and whole.loss is not None:
        errors["loss"] = abs(split.loss - whole.loss) / max(abs(whole.loss), 1e-300)
    report.numbers |= {"errors": errors, "targets_of_micro_batches": counts}
    worst = max(errors, key=lambda key: errors[key])
    verdict = "pass" if errors[worst] <= limit else "fail"
    if not additive:
        verdict = "skipped"
    report.check(
        "accumulation-equal",
        verdict,
        value=errors[worst],
        threshold=limit,
        message=f"{' and '.join(errors)} of {len(counts)} micro-batches as of one batch"
        if verdict == "pass"
        else f"{worst} of {len(counts)} micro-batches and of one batch differ the most",
    )


def judge_pattern(
    report: Report, sums: list[dict[str, Any]], counts: list[int], split: Seen, clipped: Seen
) -> None:
    """Read the coefficients of the micro-batches in the gradient that the optimizer gets."""
    found = coefficients(split.steps[-1], sums) if len(split.steps) == 1 else None
    fault = None if found is None else fault_of(found, counts)
    report.numbers["coefficients_times_targets"] = found and [a * sum(counts) for a in found]
    for name, message in FAULTS.items():
        verdict = "fail" if fault == name else "pass" if found is not None else "skipped"
        report.check(name, verdict, message=message if verdict == "fail" else "")
    tight = coefficients(clipped.steps[-1], sums) if len(clipped.steps) == 1 else None
    if found is None or tight is None or fault == "accumulation-zeroes-between":
        report.check(
            "accumulation-clips-each", "skipped", message="no combination of micro-batches"
        )
        return
    each = clips_each(found, tight)
    report.check(
        "accumulation-clips-each",
        "fail" if each else "pass",
        message="micro-batches are shrunk by unequal factors; clip once, before the step"
        if each
        else "",
    )
