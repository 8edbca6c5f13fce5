"""One batch through model, loss and gradients: what every call of a module read and made."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from op_tape import Op, Tape, tensors_in, worst

from kit.target import Target


@dataclass
class Made:
    """A tensor that a module read or made."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    has_grad: bool
    rms: float | None = None
    low: float | None = None
    high: float | None = None
    bad_share: float = 0.0


@dataclass
class Call:
    """One call of a module."""

    number: int
    path: str
    kind: str
    depth: int
    inputs: list[Made] = field(default_factory=list)
    outputs: list[Made] = field(default_factory=list)
    bytes: int = 0
    """Of the tensors it made that are no views of what it read."""
    parameters: int = 0
    """Bytes of its own parameters, those of its children left out."""
    gradient_rms: float | None = None
    gradient_bad: float = 0.0
    first_op: int = 0
    last_op: int = 0


@dataclass
class Trace:
    """What one forward and backward pass showed."""

    tape: Tape
    calls: list[Call] = field(default_factory=list)
    running: list[Call] = field(default_factory=list)
    """Calls that had not returned: those around an exception, or none."""
    loss: Any = None
    loss_op: Any = None
    error: Exception | None = None
    stage: str = "forward"
    """Where the error came: forward, backward or second."""
    error_line: tuple[str, int] | None = None
    reached: set[str] = field(default_factory=set)
    """Trainable parameters that got a gradient."""
    bad_gradients: list[str] = field(default_factory=list)
    silent_rows: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Matrix -> (first, last + 1, rows): its longest stretch of rows with a gradient of 0."""
    bad_node: tuple[str, int | None] | None = None
    """First node of backward whose gradient is not finite: its name and its op."""
    autocast: bool = False


def trace(target: Target, batch: Any) -> Trace:
    """Call the loss on one batch and go back; the caller keeps the target's state."""
    torch = sys.modules["torch"]
    model = target.model
    found = Trace(Tape(model, batch))
    for parameter in model.parameters():
        parameter.grad = None
    with _hooks(model, found), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        try:
            with found.tape.mode():
                found.loss = target.loss_fn(model, batch)
                found.loss_op = found.tape.maker(found.loss)
        except Exception as error:
            found.error, found.error_line = error, _raised_at(error)
    if found.error is None and found.loss.requires_grad:
        _back(found, model)
    return found


def _raised_at(error: Exception) -> tuple[str, int] | None:
    """Return the innermost line of the user's code in a traceback."""
    from kit.fix import is_foreign_to_user

    line, at = None, error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not is_foreign_to_user(file):
            line = (file, at.tb_lineno)
        at = at.tb_next
    return line


def _back(found: Trace, model: Any) -> None:
    handles = _watch_nodes(found)
    try:
        found.loss.backward()
    except Exception as error:
        found.error, found.stage, found.error_line = error, "backward", _raised_at(error)
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and parameter.grad is not None:
            found.reached.add(name)
            gradient = _local(parameter.grad)
            if worst(gradient):
                found.bad_gradients.append(name)
            elif gradient.dim() == 2 and gradient.layout == sys.modules["torch"].strided:
                found.silent_rows[name] = _longest_silence(gradient)


def _longest_silence(gradient: Any) -> tuple[int, int, int]:
    best, start = (0, 0), None
    silent = (gradient == 0).all(1).tolist()
    for at, zero in enumerate([*silent, False]):
        start = at if zero and start is None else start
        if not zero and start is not None:
            best = max(best, (start, at), key=lambda pair: pair[1] - pair[0])
            start = None
    return (*best, len(silent))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _watch_nodes(found: Trace) -> list[Any]:
    """Let every node of the graph say when its gradient stops being finite."""
    nodes, waiting, seen = found.tape.nodes, [found.loss.grad_fn], set()
    handles = []

    def after(node: Any) -> Any:
        def look(grad_inputs: Any, grad_outputs: Any) -> None:
            if found.bad_node is not None or any(map(worst, tensors_in(grad_outputs))):
                return
            if any(map(worst, tensors_in(grad_inputs))):
                found.bad_node = (node.name(), nodes.get(node))

        return look

    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not hasattr(node, "variable"):
            handles.append(node.register_hook(after(node)))
        waiting += [other for other, _ in node.next_functions]
    return handles


@contextlib.contextmanager
def _hooks(model: Any, found: Trace) -> Iterator[None]:
    """Follow every module of the model while the forward pass lasts."""
    stack: list[Call] = found.running
    handles = []
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}

    def looking(hook: Any) -> Any:
        def look(*given: Any) -> None:
            found.tape.silent = True
            try:
                hook(*given)
            finally:
                found.tape.silent = False

        return look

    def before(module: Any, args: Any, kwargs: Any) -> None:
        path = names[id(module)] or type(module).__name__
        call = Call(len(found.calls), path, type(module).__name__, len(stack))
        call.inputs = [_describe(tensor) for tensor in tensors_in([args, kwargs])]
        call.parameters = sum(
            parameter.numel() * parameter.element_size()
            for parameter in module.parameters(recurse=False)
        )
        call.first_op = len(found.tape.ops)
        found.calls.append(call)
        stack.append(call)
        found.tape.path = path

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        call = stack.pop()
        made, read = [*tensors_in(output)], [*tensors_in([args, kwargs])]
        call.outputs = [_describe(tensor, values=True) for tensor in made]
        known = {_place(tensor) for tensor in read}
        call.bytes = sum(
            tensor.numel() * tensor.element_size() for tensor in made if _place(tensor) not in known
        )
        call.last_op = len(found.tape.ops)
        found.tape.path = stack[-1].path if stack else ""
        first = next((t for t in made if t.requires_grad and t.is_floating_point()), None)
        if first is not None:
            first.register_hook(lambda gradient: _gradient(call, gradient))

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(looking(before), with_kwargs=True))
        handles.append(module.register_forward_hook(looking(after), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _place(tensor: Any) -> Any:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except RuntimeError:
        return id(tensor)


def _gradient(call: Call, gradient: Any) -> None:
    values = _local(gradient).detach()
    if values.numel():
        call.gradient_rms = float(values.double().square().mean().sqrt())
        call.gradient_bad = 1 - float(values.isfinite().double().mean())


def _describe(tensor: Any, values: bool = False) -> Made:
    made = Made(
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        tensor.requires_grad,
    )
    torch = sys.modules["torch"]
    plain = tensor.layout == torch.strided and not tensor.is_meta
    if values and plain and tensor.is_floating_point() and tensor.numel():
        flat = _local(tensor).detach().double()
        there = flat[flat.isfinite()]
        made.bad_share = 1 - there.numel() / flat.numel()
        if there.numel():
            made.rms = float(there.square().mean().sqrt())
            made.low, made.high = float(there.min()), float(there.max())
    return made


def writers_of(target: Target, batch: Any) -> tuple[Op, Op] | None:
    """Run the forward pass again; return (reader, writer) of a tensor that was changed in place
    after the reader had kept it for backward. None when no such pair is found."""
    torch = sys.modules["torch"]
    found = Trace(Tape(target.model, batch))
    kept: list[tuple[Any, int, int]] = []

    def pack(tensor: Any) -> Any:
        kept.append((tensor, tensor._version, len(found.tape.ops)))
        return tensor

    with _hooks(target.model, found), torch.enable_grad():
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with found.tape.mode(), saving:
            target.loss_fn(target.model, batch)
    ops = found.tape.ops
    for tensor, version, reader in kept:
        if tensor._version == version or reader >= len(ops):
            continue
        later = ops[reader + 1 :]
        shapes = {tuple(tensor.shape)}
        place = _place(tensor)
        writer = next((op for op in later if op.in_place and op.place == place), None)
        writer = writer or next(
            (op for op in later if op.in_place and shapes & {*op.made, *op.given}), None
        )
        if writer is not None:
            return ops[reader], writer
    return None
