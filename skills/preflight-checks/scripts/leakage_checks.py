"""Checks of what an output may know: nothing of other examples, of later tokens, of its label."""

from __future__ import annotations

from typing import Any

import sight as seeing
from evidence import (
    SEED,
    CannotJudge,
    Evidence,
    Finding,
    UserError,
    eval_noise,
    failed,
    passed,
    relative_change,
    skipped,
)
from sequence_checks import attention_place, time_first

from kit.batch_tree import leaves, replaced
from kit.fix import fix_in

EXAMPLES = 4


def check_example_leakage(evidence: Evidence, limit: float) -> Finding:
    """No output or score of an example changes with the inputs of another one."""
    size = evidence.size
    if size < 2:
        return skipped("a batch of one example")
    structure = seeing.relations(evidence)
    if structure is not None:
        return skipped(structure)
    if _silent(evidence):
        return evidence.warmed(lambda: _judged_leakage(evidence, limit))
    return _judged_leakage(evidence, limit)


def _silent(evidence: Evidence) -> bool:
    """Tell whether no output sees an input yet, as behind a layer that begins at 0."""
    found = seeing.look(evidence, training=False)
    seeing.needs_inputs(found)
    judged = [tensor for _, tensor, _ in _judged_tensors(evidence, found)]
    return not any(bool(g.any()) for t in judged for g in found.of(seeing.projected(t)))


def _judged_leakage(evidence: Evidence, limit: float) -> Finding:
    size = evidence.size
    try:
        (leak, what), mode = _worst_leak(evidence, training=True), "training"
    except UserError as error:
        if "inplace operation" not in str(error):
            raise  # else training writes into weights, and its graph is no longer what it was
        (leak, what), mode = _worst_leak(evidence, training=False), "evaluation"
    if leak <= limit:
        return passed(f"of {size} examples, in {mode} mode", leak)
    eval_leak, where = _worst_leak(evidence, training=False)
    normed = seeing.normalises_over_the_batch(evidence)
    if eval_leak <= limit and normed:
        return passed(f"batch normalisation mixes examples in training only ({normed})", eval_leak)
    if eval_leak <= limit and _partners_drawn(evidence):
        return passed("note: in training each example meets others drawn at random (mixup?)", leak)
    mode = "also in evaluation mode" if eval_leak > limit else "in training mode"
    text = "look for reductions, softmax, reshape or attention over the batch dim"
    return failed(
        f"{what} of an example depends on other examples, {mode}: {max(leak, eval_leak):.2g} of "
        "its own gradient",
        max(leak, eval_leak),
        _mixing_place(evidence, text),
    )


def _partners_drawn(evidence: Evidence) -> bool:
    """Tell whether the examples that an output sees in training are others by another seed."""
    return _partners(evidence, SEED) != _partners(evidence, SEED + 1)


def _partners(evidence: Evidence, seed: int) -> list[list[int]]:
    """For some examples, those whose inputs the output sees."""
    found, partners = seeing.look(evidence, training=True, seed=seed), []
    size = evidence.size
    for _, tensor, groups in _judged_tensors(evidence, found):
        for example in _some(size):
            gradients = found.of(seeing.projected(tensor[groups(example)]))
            for gradient in (g for g in gradients if g.dim() and len(g) == size):
                partners.append(seeing.by_example(gradient, 0).nonzero().flatten().tolist())
    return partners


def _mixing_place(evidence: Evidence, text: str) -> Any:
    """Name a likely line of the model's forward."""
    pattern = r"\(0\b|dim=0|\bview\(|reshape\(|batch_first|transpose|permute"
    return fix_in(evidence.target.model, text, pattern) or fix_in(evidence.target.model, text)


def _worst_leak(evidence: Evidence, *, training: bool) -> tuple[float, str]:
    """Largest gradient by another example's input, over the example's own."""
    found = seeing.look(evidence, training=training)
    seeing.needs_inputs(found)
    size = evidence.size
    ambiguous = any(tuple(t.shape[:2]) == (size, size) for _, t, _ in found.inputs)
    leaks = [_leak_along(evidence, found, prefer) for prefer in ((0, 1) if ambiguous else (0,))]
    return min(leaks)  # as many time steps as examples: the dim that keeps them apart counts them


def _leak_along(evidence: Evidence, found: seeing.Sight, prefer: int) -> tuple[float, str]:
    size = evidence.size
    inputs = [
        (number, seeing.batch_dim(tensor, size, prefer))
        for number, (_, tensor, _) in enumerate(found.inputs)
    ]
    dims = {number: dim for number, dim in inputs if dim is not None}
    if not dims:
        raise CannotJudge(f"no input has a dim of {size} examples")
    worst, what = 0.0, "an output"
    for name, tensor, groups in _judged_tensors(evidence, found):
        for example in _some(size):
            gradients = found.of(seeing.projected(tensor[groups(example)]))
            for number, dim in dims.items():
                by_example = seeing.by_example(gradients[number], dim)
                own = float(by_example[example])
                other = float(by_example[[j for j in range(size) if j != example]].max())
                if other > 0 and other / max(own, other) > worst:
                    worst, what = other / max(own, other), name
    return worst, what


def _some(size: int) -> list[int]:
    return sorted({0, size - 1, size // 2, 1})[:EXAMPLES] if size > EXAMPLES else list(range(size))


def _judged_tensors(evidence: Evidence, found: seeing.Sight) -> list[tuple[str, Any, Any]]:
    """(name, tensor, index of example i) of the outputs and of the scores in the loss."""
    size, judged = evidence.size, []
    for tensor in found.seen.outputs:
        dim = seeing.batch_dim(tensor, size)
        if dim is not None and tensor.requires_grad:
            judged.append(("the output", tensor.movedim(dim, 0), lambda i: i))
    main: Any = found.seen.main
    labelled = any(role in ("label", "both") for role in evidence.roles.values())
    if main is not None and labelled and not time_first(evidence):
        rows = seeing.score_rows(main)
        pairs = main.kind == "classes" and rows.shape[-1] == len(rows)
        if len(rows) % size == 0 and not pairs and rows.requires_grad:
            each = len(rows) // size
            judged.append(("the score", rows, lambda i: slice(i * each, (i + 1) * each)))
    if not judged:
        raise CannotJudge(f"no output and no score has a dim of {size} examples")
    return judged


def check_batch_size_dependence(evidence: Evidence, limit: float) -> Finding:
    """In evaluation mode an example's outputs are the same alone; padding changes nothing."""
    batch, size = evidence.batches[0], evidence.size
    padded = _padding(evidence, limit)
    if padded is not None:
        return padded
    if size < 2:
        return skipped("a batch of one example")
    structure = seeing.relations(evidence)
    if structure is not None:
        return skipped(structure)
    whole = evidence.outputs(batch)
    dims = [seeing.batch_dim(t, size) for t in whole]
    if not any(dim is not None for dim in dims):
        return skipped(f"no output has a dim of {size} examples")
    half = any(t.element_size() < 4 for t in whole)
    limit = limit * 500 if half else limit
    change = eval_noise(evidence)
    if change > limit:
        return skipped(f"the outputs are random in evaluation mode ({change:.2g})")
    worst = 0.0
    for example in sorted({0, size - 1}):
        alone = evidence.probe(_cut(batch, size, example), "a batch of one example")
        for tensor, single, dim in zip(whole, alone, dims, strict=True):
            if dim is None:
                continue
            own = tensor.narrow(dim, example, 1)
            if single.shape != own.shape:
                return skipped("outputs of one example have another shape")
            worst = max(worst, relative_change([own], [single]))
    if worst <= limit:
        return passed("outputs of an example alone and in its batch agree", worst)
    return _explained(evidence, worst)


def _explained(evidence: Evidence, worst: float) -> Finding:
    from gradient_checks import routed_parameters

    if routed_parameters(evidence):
        return passed("note: routing depends on the other tokens of a batch (capacity?)", worst)
    text = "look for statistics over the batch, shapes taken from it, or padding that counts"
    return failed(
        f"outputs of an example alone and in its batch differ by {worst:.2g} of their size",
        worst,
        _mixing_place(evidence, text),
    )


def _cut(batch: Any, size: int, example: int) -> Any:
    new = {}
    for path, tensor in leaves(batch):
        dim = seeing.batch_dim(tensor, size)
        if dim is not None:
            new[path] = tensor.narrow(dim, example, 1).clone()
    return replaced(batch, new)


def _padding(evidence: Evidence, limit: float) -> Finding | None:
    """Change ids under a zero of the mask: no output that counts may change."""
    batch = evidence.batches[0]
    tensors = dict(leaves(batch))
    masks = [(p, t) for p, t in tensors.items() if "mask" in p.lower() and t.dim() == 2
             and bool((t == 0).any()) and bool((t != 0).any())]  # fmt: skip
    if len(masks) != 1:
        return None
    path, mask = masks[0]
    hidden = mask == 0
    ids = {p: t for p, t in tensors.items() if p != path and t.shape == mask.shape
           and not t.is_floating_point() and evidence.roles[p] in ("input", "both")
           and "type" not in p and "position" not in p}  # fmt: skip
    if not ids:
        return None
    new = {}
    for name, tensor in ids.items():
        other = tensor[~hidden].flatten()
        changed = tensor.clone()
        changed[hidden] = other[:1].expand(int(hidden.sum()))
        new[name] = changed
    before = evidence.outputs(batch)
    after = evidence.probe(replaced(batch, new), "other ids under the padding")
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.shape[: mask.dim()] == mask.shape:
            a, b = a[~hidden], b[~hidden]
        worst = max(worst, relative_change([a], [b]))
    if worst > limit:
        return failed(
            f"tokens that {path} hides change the outputs by {worst:.2g} of their size: padding "
            "counts",
            worst,
            attention_place(evidence, f"use {path} in attention and pooling", r"mask|mean\("),
        )
    return None
