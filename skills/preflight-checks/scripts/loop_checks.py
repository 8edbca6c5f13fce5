"""Checks of the loop: cleared gradients, loss scale, accumulation, repeats, checkpoints."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import sight as seeing
from evidence import (
    IGNORED,
    Evidence,
    Finding,
    UserError,
    at,
    failed,
    passed,
    skipped,
)
from sequence_checks import shift_of
from step_run import cycled, drive, flat, forget, gap, kept, unclipped

from kit.batch_tree import leaves, replaced
from kit.fix import fix_in
from kit.state import preserved

NOISE = 10.0
ROUNDINGS = 2.0
"""Relative errors of a 16-bit product that two orders of summing may differ by."""
"""Times the difference of two equal runs, below which a difference is not judged."""
NOISY = 0.01
"""Difference of two equal runs above which nothing is judged."""
LARGEST_SUM = 2.2
"""A sum over the examples doubles with the batch; what grows faster counts pairs, by design."""
LAST_ALONE = 1e-3
"""Distance of two directions of gradients that are taken as one."""
SUMMED = 1.5
"""A step's gradient over that of its loss, above which something scales it."""


def check_missing_zero_grad(evidence: Evidence, limit: float) -> Finding:
    """The second step's gradient is a fresh one: nothing of the first step is in it."""
    target = evidence.target
    left = evidence.leftover
    if evidence.step is None or target.optimizer is None:
        if left:
            return failed(
                f"{left[0]} and {len(left) - 1} others hold a gradient before the loop begins: the "
                "first step adds to it",
                len(left),
            )
        return skipped("no training step to look at: return it as train_step")
    evidence.needs_finite()
    with kept(target):
        if not left:
            forget(target)
        batches = cycled(evidence)
        drive(evidence, batches)
        second = list(itertools.islice(batches, 2 * len(evidence.batches)))
        on = _second(evidence, second, fresh=False)
        fresh = _second(evidence, second, fresh=True)
        noise = gap(_second(evidence, second, fresh=True), fresh)
    error = gap(on, fresh)
    if noise > NOISY:
        return skipped(f"two equal steps differ by {noise:.2g} of their gradient: not repeatable")
    if error <= max(limit, NOISE * noise):
        return passed("the second step's gradient is that of its own batch", error)
    return failed(
        f"the second step's gradient is off by {error:.2g} of its size: that of the first step is "
        "added",
        error,
        _step_place(evidence, "clear gradients once a step: optimizer.zero_grad()"),
    )


def _step_place(evidence: Evidence, text: str) -> Any:
    if evidence.target.runtime is not None:
        step = sys.modules["curry_train.step"].train_step
        return fix_in(step, text, r"optimizer\.step|forget") or fix_in(step, text)
    for place in (evidence.target.train_step, evidence.target.model):
        found = fix_in(place, text, r"backward|zero_grad|\.step\(")
        if found is not None:
            return found
    return fix_in(evidence.target.train_step, text)


def _second(evidence: Evidence, batches: list[Any], *, fresh: bool) -> list[Any]:
    with kept(evidence.target):
        held = {id(p) for g in evidence.target.optimizer.param_groups for p in g["params"]}
        for parameter in evidence.target.model.parameters():
            if fresh or id(parameter) not in held:  # nobody clears what nobody trains
                parameter.grad = None
        before = [p.detach().clone() for p in evidence.trainable.values()]
        seen = drive(evidence, itertools.cycle(batches))
        if type(evidence.target.optimizer).__name__ == "LBFGS":  # steps by a closure of its own
            after = evidence.trainable.values()
            return [a.detach() - b for a, b in zip(after, before, strict=True)]
        return seen.gradients


# The loss ----------------------------------------------------------------------------------------


def check_loss_scale(evidence: Evidence, limit: float) -> Finding:
    """The loss is a mean: a doubled batch has the same loss, and the step uses that loss."""
    evidence.needs_finite()
    ratio = _doubled(evidence)
    text = "divide by the number of targets: reduction='mean'"
    main: Any = evidence.observed.main
    fix = at(main.where if main else None, text) or fix_in(evidence.target.loss_fn, text)
    if ratio is not None and limit < ratio < LARGEST_SUM:
        return failed(f"the loss of a doubled batch is {ratio:.3g} times that of the batch: a sum",
                      ratio, fix)  # fmt: skip
    by_length = _per_token(evidence)
    if by_length is not None:
        return failed(by_length[0], by_length[1], fix)
    of_step = _of_step(evidence)
    if of_step is not None:
        return of_step
    if ratio is None:
        return skipped("a doubled batch does not run, and there is no training step")
    return passed("the loss of a doubled batch is that of the batch", ratio)


def _doubled(evidence: Evidence) -> float | None:
    torch, batch, size = evidence.torch, evidence.batches[0], evidence.size
    main: Any = evidence.observed.main
    new = {}
    if main is not None and main.kind == "classes" and main.scores.shape[-1] == len(main.scores):
        return None  # every example is a class: a doubled batch asks something else
    for path, tensor in leaves(batch):
        dim = seeing.batch_dim(tensor, size)
        if dim is not None:
            new[path] = torch.cat([tensor, tensor], dim)
    if not new:
        return None
    try:
        once = float(evidence.observe(batch, training=False).loss.detach())
        twice = float(evidence.observe(replaced(batch, new), training=False).loss.detach())
    except UserError:
        return None
    return twice / once if abs(once) > 1e-8 else None


def _per_token(evidence: Evidence) -> tuple[str, float] | None:
    """For language models: what a target weighs in the loss, summed over the targets; 1 is right.

    The gradient by a target's own score is weight times (probability - 1).
    """
    main: Any = evidence.observed.main
    if shift_of(evidence) is None or main is None or main.function != "cross_entropy":
        return None
    if main.options.get("weight") is not None or main.options.get("label_smoothing"):
        return None
    torch, scores = evidence.torch, main.raw_scores
    if not scores.requires_grad:
        return None
    with evidence.user():
        (gradient,) = torch.autograd.grad(
            evidence.observed.loss, [scores], retain_graph=True, allow_unused=True
        )
    if gradient is None:
        return None
    class_dim = 1 if scores.dim() > 1 else 0
    rows = gradient.movedim(class_dim, -1).flatten(0, -2).double()
    chances = scores.detach().double().movedim(class_dim, -1).flatten(0, -2).softmax(-1)
    labels = main.raw_labels.flatten()
    kept_rows = labels != main.options.get("ignore_index", IGNORED)
    picked = labels[kept_rows][:, None]
    missing = chances[kept_rows].gather(1, picked)[:, 0] - 1
    weights = rows[kept_rows].gather(1, picked)[:, 0] / missing.clamp(max=-1e-6)
    total, count = float(weights.sum()), int(kept_rows.sum())
    length = len(labels) / evidence.size
    if total > SUMMED and abs(total - length) < 0.05 * length:
        return f"the loss grows with the length: it is {total:.4g} times the mean", total
    share = count / len(labels)
    if share < 0.95 and abs(total - share) < 0.01 * share:
        return (
            f"the loss is divided by all {len(labels)} positions, not by the {count} targets",
            total,
        )
    return None


def _of_step(evidence: Evidence) -> Finding | None:
    """Compare the gradient at the optimizer with that of the loss; an own clip may shrink it."""
    target = evidence.target
    if evidence.step is None or target.optimizer is None:
        return None
    if type(target.optimizer).__name__ == "LBFGS" or hasattr(target.optimizer, "members"):
        return None  # each of several optimizers has a loss of its own
    parameters = [p for group in target.optimizer.param_groups for p in group["params"]]
    with kept(target):
        forget(target)
        target.model.train()
        batches = [_next_step_of(evidence)] if target.runtime is not None else evidence.batches
        wanted = _loss_gradient(evidence, parameters, batches[0])
        if target.runtime is not None:
            return _of_project_step(evidence, batches[0], wanted)
        with unclipped():
            seen = drive(evidence, itertools.cycle(batches))
        wanted = _mean_gradient(evidence, parameters, seen.calls) if seen.calls > 1 else wanted
    a, b = flat(seen.gradients, wanted), flat(wanted, seen.gradients)
    size = float(b.norm())
    if a.shape != b.shape or size == 0:
        return None
    ratio = float(a @ b) / size**2
    if ratio > SUMMED:
        return failed(
            f"the gradient at the optimizer is {ratio:.4g} times that of the loss: a loss scale "
            "that is not taken out, or micro-batches that are added and not averaged",
            ratio,
            fix_in(target.train_step, "unscale, or divide, before the step", r"\.step\("),
        )
    return None


def _of_project_step(evidence: Evidence, batch: Any, wanted: list[Any]) -> Finding | None:
    """The loss and the norm that a project's step tells are those of its loss_fn."""
    seen = drive(evidence, itertools.repeat(None))
    out = seen.returned
    if seen.calls > 1 or not hasattr(out, "grad_norm"):
        return None
    step = sys.modules["curry_train.step"].train_step
    told = out.loss + getattr(out, "aux_loss", 0.0) + getattr(out, "z_loss", 0.0)
    loss = float(evidence.observe(batch).loss.detach())
    norm = float(flat(wanted).norm())
    for name, ratio in (("loss", told / loss if loss else 1.0),
                        ("gradient norm", out.grad_norm / norm if norm else 1.0)):  # fmt: skip
        if not 1 / SUMMED < ratio < SUMMED:
            return failed(
                f"the {name} of train_step is {ratio:.4g} times that of loss_fn on its batch",
                ratio,
                fix_in(step, "divide the sums by the global token count, once", r"finish|count"),
            )
    return None


def _next_step_of(evidence: Evidence) -> Any:
    """The batch of a project's next step, its micro-batches together; the loader goes back."""
    with preserved(evidence.target):
        parts = evidence.target.runtime.batches.next_step()
    return _joined(evidence, parts)


def _joined(evidence: Evidence, parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return {key: evidence.torch.cat([part[key] for part in parts]) for key in parts[0]}


def _mean_gradient(evidence: Evidence, parameters: list[Any], calls: int) -> list[Any]:
    """Gradient of the mean loss of the batches that so many calls took."""
    used = list(itertools.islice(cycled(evidence), calls))
    parts = [_loss_gradient(evidence, parameters, batch) for batch in used]
    return [
        None if all(g is None for g in each) else sum(g for g in each if g is not None) / calls
        for each in zip(*parts, strict=True)
    ]


def _loss_gradient(evidence: Evidence, parameters: list[Any], batch: Any) -> list[Any]:
    torch = evidence.torch
    wanting = [p for p in parameters if p.requires_grad]
    with evidence.user():
        loss = evidence.target.loss_fn(evidence.target.model, batch)
        found = torch.autograd.grad(loss, wanting, allow_unused=True)
    by_id = {id(p): g for p, g in zip(wanting, found, strict=True)}
    return [by_id.get(id(p)) for p in parameters]


def check_accumulation(evidence: Evidence, limit: float) -> Finding:
    """k micro-batches give the gradient of the whole batch."""
    target = evidence.target
    if evidence.step is None or target.optimizer is None:
        return skipped("no training step to look at: return it as train_step")
    if seeing.normalises_over_the_batch(evidence) is not None:
        return skipped("batch normalisation depends on the micro-batch")
    evidence.needs_finite()
    if target.runtime is not None:
        return _project_accumulation(evidence, limit)
    return _foreign_accumulation(evidence, limit)


def _project_accumulation(evidence: Evidence, limit: float) -> Finding:
    target = evidence.target
    model_config = getattr(target.runtime.config, "model", None)
    if getattr(model_config, "router_aux_loss_scope", "sequence") != "sequence":
        return skipped("the auxiliary loss is that of a micro-batch, by router_aux_loss_scope")
    whole = dict(_next_step_of(evidence))
    size = evidence.size
    if size < 2:
        return skipped("a batch of one example")
    cut = max(1, size // 4)
    labels = whole.get("labels")
    if labels is not None and labels.dim() > 1 and not labels.is_floating_point():
        whole["labels"] = labels = labels.clone()
        labels[:cut, ::2] = IGNORED  # fewer targets an example in one micro-batch
    first, second = ({k: t[:cut] for k, t in whole.items()}, {k: t[cut:] for k, t in whole.items()})
    turned = {key: tensor.flip(0) for key, tensor in whole.items()}
    one, two, again = (
        _gradient_of(evidence, parts) for parts in ([whole], [first, second], [turned])
    )
    noise, error = gap(again, one), gap(two, one)
    allowed = max(limit, NOISE * noise, _half_rounding(evidence))
    if error <= allowed:
        return passed(f"micro-batches of {cut} and {size - cut} give the gradient of {size}", error)
    text = "divide once, by the targets of all micro-batches"
    return failed(
        f"micro-batches of {cut} and {size - cut} examples miss the gradient of their batch by "
        f"{error:.2g} of its size (noise {noise:.1g})",
        error,
        fix_in(sys.modules["curry_train.step"].accumulate, text, r"backward"),
    )


def _gradient_of(evidence: Evidence, micro_batches: list[Any]) -> list[Any]:
    """Let a project's own step train on these micro-batches."""
    from torch import nn

    runtime = evidence.target.runtime
    loader = runtime.batches
    with kept(evidence.target):
        for module in runtime.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()  # other masks would be drawn
        forget(evidence.target)
        runtime.batches = types.SimpleNamespace(next_step=lambda: micro_batches)
        try:
            return drive(evidence, itertools.repeat(None)).gradients
        finally:
            runtime.batches = loader


def _foreign_accumulation(evidence: Evidence, limit: float) -> Finding:
    """Tell whether several batches before a step are weighted by their targets."""
    target = evidence.target
    parameters = [p for group in target.optimizer.param_groups for p in group["params"]]
    with kept(target):
        forget(target)
        _quiet(target.model)
        parts = [_loss_gradient(evidence, parameters, batch) for batch in evidence.batches]
        counts = [_targets(evidence, number) for number in range(len(parts))]
        seen = drive(evidence, cycled(evidence))
        _quiet(target.model)
    if seen.calls > 1:
        used = seen.calls
        last = _only_last(evidence, seen, parts)
        if last is not None:
            return last
        if used > len(parts) or len(set(counts[:used])) == 1:
            return skipped(f"{used} micro-batches with as many targets each")
        weighted = sum(
            c * flat(p, seen.gradients) for c, p in zip(counts, parts[:used], strict=False)
        )
        plain = sum(flat(p, seen.gradients) for p in parts[:used])
    elif seen.forwards > 1 and max(seen.sizes, default=0) < evidence.size:
        weighted, plain = flat(parts[0], seen.gradients), None
    else:
        return skipped("one micro-batch a step")
    found = flat(seen.gradients, parts[0])
    error = _angle(found, weighted)
    if error <= max(limit, 1e-3, _half_rounding(evidence)):
        return passed("micro-batches are weighted by their targets", error)
    if plain is not None and _angle(found, plain) > 1e-3:
        return skipped("the gradient of the step is no sum of those of its micro-batches")
    return failed(
        "micro-batches are averaged as if each had as many targets: their gradient is "
        f"{error:.2g} away from that of the whole batch",
        error,
        fix_in(
            target.train_step, "divide once, by the targets of all micro-batches", r"backward|/"
        ),
    )


def _only_last(evidence: Evidence, seen: Any, parts: list[Any]) -> Finding | None:
    """Tell whether the gradients of all micro-batches but the last were cleared."""
    used = [parts[number % len(parts)] for number in range(seen.calls)]
    found = flat(seen.gradients, used[-1])
    if _angle(found, flat(used[-1], seen.gradients)) > LAST_ALONE:
        return None
    if _angle(found, sum(flat(part, seen.gradients) for part in used)) < 10 * LAST_ALONE:
        return None  # the batches are too alike to tell
    return failed(
        f"of {seen.calls} micro-batches before a step only the last counts: the gradients of the "
        "others are cleared",
        seen.calls,
        fix_in(evidence.target.train_step, "clear them after the optimizer's step", r"zero_grad"),
    )


def _half_rounding(evidence: Evidence) -> float:
    """Give what rounding alone may do to a gradient made in a 16-bit precision, else 0."""
    torch = evidence.torch
    dtypes = {p.dtype for p in evidence.trainable.values()}
    dtypes |= {t.dtype for t in evidence.observed.scores}
    config = getattr(evidence.target.runtime, "config", None)
    named = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(getattr(config, "precision", ""))
    halves = (dtypes | {named}) & {torch.bfloat16, torch.float16}
    return max((ROUNDINGS * torch.finfo(dtype).eps for dtype in halves), default=0.0)


def _quiet(model: Any) -> None:
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _targets(evidence: Evidence, number: int) -> int:
    main: Any = evidence.all_observed[number].main
    if main is None or not hasattr(main.labels, "shape"):
        return 1
    return int(main.labels.shape[0]) if main.labels.dim() else 1


def _angle(a: Any, b: Any) -> float:
    """Distance of two directions: 0 for the same, whatever the lengths."""
    if a.shape != b.shape:
        return float("inf")
    return float((a / a.norm().clamp(min=1e-300) - b / b.norm().clamp(min=1e-300)).norm())
