"""Where examples of a batch begin to see each other: outputs with one of them exchanged."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from findings import Finding, place, shown
from op_tape import Tape, tensors_in
from shape_findings import misplaced

from kit.batch_tree import leaves, replaced
from kit.target import Target

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
HALF = 3e-2


@dataclass
class Seen:
    """What one call of a module read and made."""

    path: str
    parent: int | None
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def batch_axis(batch: Any) -> tuple[int, str]:
    """Return (examples, why not): 0 and a reason where a batch has no plain rows."""
    found = [(path, tensor) for path, tensor in leaves(batch) if tensor.dim()]
    sizes = {tensor.shape[0] for _, tensor in found}
    if not found or len(sizes) != 1:
        return 0, "the tensors of the batch have no first size in common"
    (size,) = sizes
    if size < 2:
        return 0, "one example alone shares a batch with nobody"
    return size, ""


def mixing(target: Target, batch: Any, dims: set[int]) -> tuple[Finding | None, str]:
    """Exchange one example and compare the others: (finding or None, reason when not judged).

    `dims` are all sizes that the model makes: so many examples are taken that no other dim has
    their number, as far as the batch allows.
    """
    size, why = batch_axis(batch)
    if not size:
        return None, why
    fewer = next((n for n in range(size - 1, 1, -1) if n not in dims), 0)
    if fewer:
        rows = {path: tensor[:fewer] for path, tensor in leaves(batch) if tensor.dim()}
        with contextlib.suppress(Exception):  # a loss may need the whole batch
            return _mixing(target, replaced(batch, rows), fewer)
    return _mixing(target, batch, size)


def _mixing(target: Target, batch: Any, size: int) -> tuple[Finding | None, str]:
    if any(t.dim() > 1 and t.shape[1] == size for _, t in leaves(batch)):
        return None, f"a tensor of the batch has {size} rows and {size} columns"
    other = _exchanged(batch, 0)
    if other is None:
        return None, "all examples are alike"
    before, after = _run(target, batch), _run(target, other)
    if len(before) != len(after) or not before:
        return None, "the two passes called different modules"
    roots = [at for at, seen in enumerate(before) if seen.parent is None]
    again = _run(target, batch)
    if any(_differ(before[at].outputs, again[at].outputs) for at in roots):
        return None, "two passes of one batch differ"
    if not any(_any_leaks(before[at].outputs, after[at].outputs, size) for at in roots):
        return None, ""
    if not _rows_are_examples(target, batch):
        turned = _exchanged(batch, 1)
        if turned is not None and not _leaks_along(target, batch, turned, before, roots):
            return None, "examples may stand in the second dim, and there they are apart"
    return _culprit(target, batch, other, before, after, roots, size), ""


def _rows_are_examples(target: Target, batch: Any) -> bool:
    """Tell whether the first dim must be the batch: a project's, a DataLoader's, labels of one dim,
    or labels that are the inputs shifted along the second."""
    loader = getattr(target.batches, "inner", target.batches)
    found = [tensor for _, tensor in leaves(batch)]
    if (
        target.kind == "project"
        or getattr(loader, "batch_size", None)
        or getattr(loader, "batch_sampler", None)
    ):
        return True
    if any(tensor.dim() == 1 for tensor in found) or all(t.dim() > 2 for t in found):
        return True
    whole = [t for t in found if t.dim() == 2 and not t.is_floating_point() and t.shape[1] > 1]
    pairs = ((a, b) for a in whole for b in whole if a is not b and a.shape == b.shape)
    return any(a[:, 1:].equal(b[:, :-1]) for a, b in pairs)


def _exchanged(batch: Any, dim: int) -> Any:
    """Copy the batch with its first row (column) replaced by another; None where none differs."""
    tensors = {path: t for path, t in leaves(batch) if t.dim() > dim and t.shape[dim] > 1}
    for row in range(1, min((t.shape[dim] for t in tensors.values()), default=0)):
        changed = {}
        for path, tensor in tensors.items():
            copy = tensor.clone()
            copy.select(dim, 0).copy_(tensor.select(dim, row))
            changed[path] = copy
        if any(not changed[path].equal(tensors[path]) for path in tensors):
            return replaced(batch, changed)
    return None


def _run(target: Target, batch: Any) -> list[Seen]:
    """Run the loss in evaluation mode and keep what every module read and made."""
    torch = sys.modules["torch"]
    calls: list[Seen] = []
    stack: list[int] = []
    names = {id(m): n for n, m in reversed(list(target.model.named_modules()))}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        path = names[id(module)] or type(module).__name__
        calls.append(Seen(path, stack[-1] if stack else None, _kept([args, kwargs])))
        stack.append(len(calls) - 1)

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls[stack.pop()].outputs = _kept(output)

    handles = []
    for module in target.model.modules():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        with _evaluation(target), torch.no_grad():
            target.loss_fn(target.model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextlib.contextmanager
def _evaluation(target: Target) -> Iterator[None]:
    torch = sys.modules["torch"]
    modes = [(module, module.training) for module in target.model.modules()]
    target.model.eval()
    torch.manual_seed(0)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _kept(value: Any) -> list[Any]:
    return [t.detach().clone() for t in tensors_in(value) if t.is_floating_point() and t.dim()]


def _changed(one: Any, other: Any) -> Any:
    """Return bool of the shape of both: values that differ by more than rounding."""
    kind = str(one.dtype).removeprefix("torch.")
    scale = one.double().square().nan_to_num(0, 0, 0).mean().sqrt()
    close = TOLERANCE.get(kind, HALF) * max(float(scale), 1e-12)
    differ = (one.double() - other.double()).abs()
    return (differ > close) & ~(one.isinf() & (one == other))


def _leaks(one: Any, other: Any, size: int, dim: int = 0) -> bool | None:
    """Tell whether another example than the first changed; None where rows cannot be told."""
    shape = one.shape
    if one.shape != other.shape or list(shape).count(size) > 1 or one.numel() < size:
        return None
    changed = _changed(one, other)
    if dim == 0 and shape[0] == size:
        rows = changed
    elif len(shape) > 1 and shape[1] == size:
        rows = changed.transpose(0, 1)
    elif dim == 0 and shape[0] % size == 0 and len(shape) > 1:
        rows = changed.reshape(size, -1)
    else:
        return None
    return bool(rows[1:].any())


def _differ(before: list[Any], after: list[Any]) -> bool:
    pairs = zip(before, after, strict=False)
    return any(a.shape != b.shape or bool(_changed(a, b).any()) for a, b in pairs)


def _any_leaks(before: list[Any], after: list[Any], size: int) -> bool:
    return any(_leaks(a, b, size) for a, b in zip(before, after, strict=False))


def _leaks_along(
    target: Target, batch: Any, turned: Any, before: list[Seen], roots: list[int]
) -> bool:
    """Tell whether columns see each other too: else the second dim is the batch."""
    sizes = {t.shape[1] for _, t in leaves(batch) if t.dim() > 1}
    if len(sizes) != 1:
        return True
    after = _run(target, turned)
    if len(after) != len(before):
        return True
    (size,) = sizes
    told = [
        _leaks(a, b, size, dim=1)
        for at in roots
        for a, b in zip(before[at].outputs, after[at].outputs, strict=False)
    ]
    return True in told or False not in told


def _culprit(
    target: Target,
    batch: Any,
    other: Any,
    before: list[Seen],
    after: list[Seen],
    roots: list[int],
    size: int,
) -> Finding:
    """Descend to the innermost module that mixes examples of inputs that are not mixed."""
    at = next(r for r in roots if _any_leaks(before[r].outputs, after[r].outputs, size))
    while True:
        inner = next(
            (
                n
                for n, seen in enumerate(before)
                if seen.parent == at
                and _any_leaks(seen.outputs, after[n].outputs, size)
                and not _any_leaks(seen.inputs, after[n].inputs, size)
            ),
            None,
        )
        if inner is None:
            break
        at = inner
    path, kind = before[at].path, dict(target.model.named_modules())
    module = kind.get(path, target.model)
    message = f"an example changes what others get, first in {path} ({type(module).__name__})"
    op = _first_mixing_op(target, batch, other, path, size)
    if op is None:
        return Finding("trace-shape", message, value=path)
    message += f", at {place(op)}: {shown(op.given[0]) if op.given else ''} to"
    message += f" {shown(op.made[0]) if op.made else ''}"
    todo = "keep the batch dim where it is: transpose instead of view, or batch_first=True"
    return Finding("trace-shape", message, op.where, todo, path)


def _first_mixing_op(target: Target, batch: Any, other: Any, path: str, size: int) -> Any:
    """Find the call inside a module whose result changes in more than one example's share."""
    torch = sys.modules["torch"]
    runs = []
    for one in (batch, other):
        tape = Tape(target.model, one)
        kept: list[Any] = []
        with _evaluation(target), torch.no_grad(), _within(target.model, tape), _values(tape, kept):
            target.loss_fn(target.model, one)
        runs.append((tape, kept))
    (tape, kept), (_, later) = runs
    root = type(target.model).__name__
    inside = [op for op in tape.ops if op.path == path or (not op.path and path == root)]
    for op in inside:
        given = op.given[0] if op.given else ()
        moves = op.name in ("view", "reshape") and op.made
        if moves and misplaced(given, op.made[0], size):
            return op
    for (number, value), (_, changed) in zip(kept, later, strict=False):
        op = tape.ops[number]
        if op not in inside or value.shape != changed.shape or value.numel() < size:
            continue
        if float(_changed(value, changed).double().mean()) > 1.5 / size:
            return op
    return inside[0] if inside else None


@contextlib.contextmanager
def _within(model: Any, tape: Tape) -> Iterator[None]:
    """Tell the tape which module runs."""
    names = {id(m): n for n, m in reversed(list(model.named_modules()))}
    stack: list[str] = []

    def before(module: Any, args: Any) -> None:
        stack.append(tape.path)
        tape.path = names[id(module)] or type(module).__name__

    def after(module: Any, args: Any, output: Any) -> None:
        tape.path = stack.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _values(tape: Tape, kept: list[Any]) -> Iterator[None]:
    """Keep (number, value) of the first float tensor that every call makes."""
    record = tape.record

    def keeping(name: str, args: Any, kwargs: Any, result: Any) -> None:
        record(name, args, kwargs, result)
        made = _kept(result)
        if made and tape.ops:
            kept.append((tape.ops[-1].index, made[0]))

    vars(tape)["record"] = keeping
    with tape.mode():
        yield
