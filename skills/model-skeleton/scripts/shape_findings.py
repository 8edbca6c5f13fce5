"""Shapes that surprise: silent broadcasts, and views that move a dim without moving its values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from findings import Finding, place, shown
from module_trace import Trace

from kit.batch_tree import leaves

ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rsub", "__rsub__", "__rtruediv__", "true_divide", "subtract"),
    *("multiply", "divide", "maximum", "minimum", "pow", "add_", "sub_", "mul_", "div_", "atan2"),
    *("__add__", "__sub__", "__mul__", "__truediv__", "__radd__", "__rmul__", "dist"),
}
GIVEN_SHAPE = {"unsqueeze", "__getitem__", "view", "reshape", "expand", "view_as", "reshape_as"}
GIVEN_SHAPE |= {"unflatten", "broadcast_to", "expand_as", "meshgrid", "permute", "transpose"}
MOVES = {"view", "reshape", "_unsafe_view"}


def broadcasts(found: Trace) -> Iterator[Finding]:
    """Name operations that pair every element of one tensor with every element of another, which
    has as many: [N, 1] with [N] gives [N, N]."""
    for op in found.tape.ops:
        pair = len(op.given) == 2 and len(op.made) == 1
        if op.name not in ELEMENTWISE or not pair or not op.wanted_grad:
            continue
        long, short = sorted(op.given, key=len, reverse=True)
        if len(long) != len(short) + 1 or long[-1] != 1 or long[:-1] != short:
            continue
        if short[-1:] in ((), (1,)) or op.made[0] == long:
            continue
        maker = op.makers[op.given.index(long)]
        if isinstance(maker, int) and found.tape.ops[maker].name in GIVEN_SHAPE:
            continue  # somebody asked for all pairs
        message = f"{place(op)} pairs {shown(op.given[0])} with {shown(op.given[1])}"
        message += f" and gives {shown(op.made[0])}: every element met every other"
        todo = "give both tensors one shape: squeeze(-1) the one, or unsqueeze(-1) the other"
        yield Finding("trace-shape", message, op.where, todo, shown(op.made[0]))


def loss_shapes(calls: list[Any]) -> Iterator[Finding]:
    """Name losses between numbers whose two sides have different shapes."""
    for call in calls:
        if call.kind not in ("values", "binary") or call.raw_labels is None:
            continue
        left, right = tuple(call.raw_scores.shape), tuple(call.raw_labels.shape)
        if left == right or call.function == "sub" or call.raw_labels.numel() == 1:
            continue
        message = (
            f"{call.function} compares {shown(left)} with labels {shown(right)}: it broadcasts"
        )
        todo = "give predictions and labels one shape: squeeze(-1) or unsqueeze(-1) one of them"
        yield Finding("trace-shape", message, call.where, todo, f"{shown(left)} {shown(right)}")


def moved_dims(found: Trace, batch: Any) -> Iterator[Finding]:
    """Name a view that puts the sequence at another place without a transpose."""
    lengths = {tensor.shape[1] for _, tensor in leaves(batch) if tensor.dim() > 1}
    length = lengths.pop() if len(lengths) == 1 else 0
    if length < 2:
        return
    for op in found.tape.ops:
        if op.name not in MOVES or not op.given or len(op.made) != 1:
            continue
        if misplaced(op.given[0], op.made[0], length):
            message = f"{place(op)} turns {shown(op.given[0])} into {shown(op.made[0])}: the dim of"
            message += f" {length} positions moved, and a view moves no values"
            todo = "split the dim where it stands (view), then transpose"
            yield Finding("trace-shape", message, op.where, todo, shown(op.made[0]))


def misplaced(before: tuple[int, ...], after: tuple[int, ...], size: int) -> bool:
    """Tell whether a dim of this size stands elsewhere in memory order after a view.

    Both shapes are cut where the product of what follows agrees; inside such a stretch a dim that
    keeps its size keeps what follows it, or it was taken apart and another put together.
    """
    left, right = _inner(before), _inner(after)
    common = {inner for _, inner in left} & {inner for _, inner in right}
    for n, inner in left:
        if n != size:
            continue
        if any(m == size and other == inner for m, other in right):
            return False
    borders = sorted({0, *common, _size(before)})
    for n, inner in left:
        if n != size:
            continue
        low = max(b for b in borders if b <= inner)
        high = min(b for b in borders if b > inner)
        if any(m == size and low <= other < high and other != inner for m, other in right):
            return True
    return False


def _size(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def _inner(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (size, product of the sizes after it) of every dim that is no 1."""
    return [(n, _size(shape[at + 1 :])) for at, n in enumerate(shape) if n > 1]
