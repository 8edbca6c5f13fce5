"""Every function of torch that one forward pass calls: who made which tensor, of what, and where.

A tensor's way is followed by value, so also through detach, numpy and integers, where autograd sees
nothing. What the first value was that is not finite, and which call made it, is known for each.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kit.batch_tree import leaves
from kit.fix import is_foreign_to_user

QUIET = {
    *("__get__", "__hash__", "__len__", "__repr__", "size", "dim", "ndimension", "stride", "numel"),
    *("nelement", "element_size", "data_ptr", "storage_offset", "untyped_storage", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "register_hook", "_set_grad_enabled"),
}
EXITS = {"numpy", "item", "tolist", "__array__", "__float__", "__int__", "__index__", "__bool__"}
UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
FILLS = {"masked_fill", "masked_fill_", "full", "full_like", "new_full", "fill_", "where", "tril"}
FILLS |= {"triu", "__setitem__", "tensor", "as_tensor", "scatter_", "scatter", "index_fill_"}
ATTRIBUTES = {"data", "T", "mT", "real", "imag", "H"}
"""Properties that give a tensor; all others are looked up without a trace."""


@dataclass
class Op:
    """One call of a function of torch."""

    index: int
    name: str
    path: str
    """Module that was running, by its name in the model; empty outside."""
    where: tuple[str, int] | None
    """Nearest file and line of the user's code."""
    sources: list[Any] = field(default_factory=list)
    """Makers of the tensors that it read: op numbers, "parameter NAME" or "batch PATH"."""
    makers: list[Any] = field(default_factory=list)
    """The same beside `given`, None where nobody knows."""
    given: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the tensors it read, in order."""
    made: list[tuple[int, ...]] = field(default_factory=list)
    wanted_grad: bool = False
    """A tensor that it read has a gradient to come."""
    gives_grad: bool = False
    grad_off: bool = False
    """It ran where gradients are switched off."""
    bad: str = ""
    """nan or inf: the worst value in what it made."""
    origin: Any = None
    """Op, parameter or batch path from which that comes; its own number where it began here."""
    filled: bool = False
    """It wrote an infinity that was given as a constant."""
    in_place: bool = False
    place: int = 0
    """Memory that it wrote into in place."""
    dtypes: tuple[str, str] = ("", "")
    """Widest float that it read, and what it made."""


@functools.cache
def _is_foreign(file: str) -> bool:
    return is_foreign_to_user(file) or "/torch/" in file


def user_line() -> tuple[str, int] | None:
    """Return the nearest frame of the user's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_foreign(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors of nested tuples, lists, dicts and dataclasses."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from (tensor for _, tensor in leaves(value))


def worst(tensor: Any) -> str:
    """Say nan or inf of a float tensor that holds one, else nothing."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return ""
    if tensor.is_meta or tensor.layout != _torch().strided:
        return ""
    flat = tensor.detach()
    if bool(flat.isfinite().all()):
        return ""
    return "nan" if bool(flat.isnan().any()) else "inf"


def _torch() -> Any:
    return sys.modules["torch"]


class Known:
    """What is known of tensors, without keeping them alive."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def set(self, tensor: Any, value: Any) -> None:
        self._by_id[id(tensor)] = (weakref.ref(tensor), value)

    def get(self, tensor: Any) -> Any:
        found = self._by_id.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]


class Tape:
    """The calls of one forward pass in order. `path` tells which module runs now."""

    def __init__(self, model: Any, batch: Any) -> None:
        self.ops: list[Op] = []
        self.nodes: dict[Any, int] = {}
        """Node of autograd -> number of the op that made it."""
        self.path = ""
        self.silent = False
        """True while somebody looks at tensors who is no part of the model."""
        self.strangers: list[tuple[int, Any]] = []
        """(op, Parameter) read inside the model, of no module of it."""
        self._makers = Known()
        self._writers: dict[int, int] = {}
        self._left: dict[str, list[int]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._makers.set(tensor, f"parameter {name}")
        for path, tensor in leaves(batch):
            self._makers.set(tensor, f"batch {path}")

    def maker(self, tensor: Any) -> Any:
        """Return who made a tensor or wrote into it last; None when nobody knows."""
        made = self._makers.get(tensor)
        node = tensor.grad_fn
        hidden = isinstance(made, int) and not self.ops[made].gives_grad
        if node is not None and (made is None or hidden) and node not in self.nodes:
            made = self._behind(tensor)  # of a custom function only its own backward counts
        wrote = self._writers.get(_address(tensor) or -1)
        later = wrote is not None and (not isinstance(made, int) or wrote > made)
        return wrote if later and not isinstance(made, str) else made

    def _behind(self, tensor: Any) -> int:
        """Add an op for a tensor that a function of its own made: an autograd.Function's."""
        sources, waiting, seen = [], [tensor.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.nodes:
                sources.append(self.nodes[node])
            elif hasattr(node, "variable"):
                sources.append(self._makers.get(node.variable))
            else:
                waiting += [other for other, _ in node.next_functions]
        name = type(tensor.grad_fn).__name__.removesuffix("Backward")
        op = Op(len(self.ops), name, self.path, user_line(), [s for s in sources if s is not None])
        op.wanted_grad = op.gives_grad = True
        op.made = [tuple(tensor.shape)]
        self.ops.append(op)
        self._judge_values(op, [], [tensor], ())
        self._know(op, [tensor])
        return op.index

    def record(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Add what a function did; called after it returned."""
        read, made = [*tensors_in(args), *tensors_in(kwargs)], [*tensors_in(result)]
        if not read and not made:
            return
        sources = [self.maker(tensor) for tensor in read]
        op = Op(len(self.ops), name, self.path, user_line(), [s for s in sources if s is not None])
        torch = _torch()
        op.given, op.makers = [tuple(tensor.shape) for tensor in read], sources
        op.made = [tuple(tensor.shape) for tensor in made]
        shape_alone = name.endswith("_like") or name.startswith("new_")
        op.sources = [] if shape_alone else op.sources
        op.wanted_grad = not shape_alone and any(tensor.requires_grad for tensor in read)
        op.gives_grad = any(tensor.requires_grad for tensor in made)
        op.grad_off = not torch.is_grad_enabled()
        op.in_place = any(one is other for one in made for other in read) or name == "__setitem__"
        op.dtypes = (_widest(read), _widest(made))
        if name in EXITS:
            self._left.setdefault(self.path, []).append(op.index)
        elif not read:
            op.sources += self._left.get(self.path, [])  # values may have come back from Python
        self.ops.append(op)
        if self.path:
            unknown = [t for t, s in zip(read, sources, strict=True) if s is None]
            parameter = _torch().nn.Parameter
            self.strangers += [(op.index, t) for t in unknown if isinstance(t, parameter)]
        written = [*made, *read[:1]] if op.in_place else made
        self._judge_values(op, list(zip(read, sources, strict=True)), written, (args, kwargs))
        self._know(op, written)
        if op.in_place and written:
            op.place = _address(written[-1])
            self._writers[op.place] = op.index

    def _know(self, op: Op, made: list[Any]) -> None:
        for tensor in made:
            self._makers.set(tensor, op.index)
            waiting = [tensor.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is None or node in self.nodes or hasattr(node, "variable"):
                    continue
                self.nodes[node] = op.index
                waiting += [other for other, _ in node.next_functions]

    def _judge_values(self, op: Op, read: list[Any], made: list[Any], given: Any) -> None:
        if op.name in UNWRITTEN:
            return
        kinds = [kind for kind in map(worst, made) if kind]
        if not kinds:
            return
        op.bad = "nan" if "nan" in kinds else "inf"
        op.filled = op.name in FILLS and op.bad == "inf" and _has_infinity(given)
        found = [(worst(tensor), source) for tensor, source in read]
        same = [source for kind, source in found if kind == op.bad]
        other = [source for kind, source in found if kind]
        cause = next((s for s in [*same, *other] if s is not None), None)
        if isinstance(cause, int):
            before = self.ops[cause]
            began_here = op.bad == "nan" and before.bad != "nan" and self._is_filled(before)
            op.origin = op.index if began_here else before.origin
        else:
            op.origin = op.index if cause is None else cause
        if op.origin is None:
            op.origin = op.index

    def _is_filled(self, op: Op) -> bool:
        return isinstance(op.origin, int) and self.ops[op.origin].filled

    def behind(self, op: int) -> set[Any]:
        """Return all ops, parameters and batch paths from which an op's values come."""
        seen: set[Any] = set()
        waiting: list[Any] = [op]
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            if isinstance(at, int):
                waiting += self.ops[at].sources
        return seen

    def mode(self) -> Any:
        """Make the mode that records; torch is imported by then."""
        from torch.overrides import TorchFunctionMode

        tape = self

        class Recorder(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                name = getattr(func, "__name__", "")
                if name == "__get__":
                    name = getattr(getattr(func, "__self__", None), "__name__", "")
                    name = name if name in ATTRIBUTES else "__get__"
                result = func(*args, **(kwargs or {}))
                if name not in QUIET and not tape.silent:
                    tape.record(name, args, kwargs or {}, result)
                return result

        return Recorder()


def _address(tensor: Any) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _widest(tensors: list[Any]) -> str:
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim()]
    if not floats:
        return ""
    return str(max(floats, key=lambda tensor: tensor.element_size()).dtype).removeprefix("torch.")


def _has_infinity(given: Any) -> bool:
    """Tell whether a number among the arguments is infinite, or a tensor without dims is."""
    if isinstance(given, float):
        return math.isinf(given)
    if isinstance(given, (tuple, list)):
        return any(map(_has_infinity, given))
    if isinstance(given, dict):
        return any(map(_has_infinity, given.values()))
    if hasattr(given, "untyped_storage"):
        return given.numel() == 1 and worst(given) == "inf"
    return False
