"""What a trace shows that should not be, each with the module and the line where it begins."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from module_trace import Trace
from op_tape import EXITS, Op

from kit.fix import fix_at, fix_in
from kit.target import Target

HALVES = ("bfloat16", "float16")
CHOICES = {"topk", "argmax", "sort", "argsort", "multinomial", "nonzero", "one_hot", "max"}
CHOICES |= {"gumbel_softmax", "bincount", "unique", "__bool__"}
"""What code calls that sends some rows here and some there."""
LOOKUPS = {"embedding", "__getitem__", "index_select", "gather", "embedding_bag"}


@dataclass
class Finding:
    """One thing that is wrong."""

    id: str
    message: str
    where: tuple[str, int] | None = None
    todo: str = ""
    value: Any = None

    def fix(self) -> dict[str, Any] | None:
        return fix_at(*self.where, self.todo) if self.where else None


def place(op: Op) -> str:
    """Say where an op ran: short, for a line of the report is cut."""
    file, line = op.where or ("", 0)
    at = f" at {file.rpartition('/')[2]}:{line}" if file else ""
    return f"`{op.name}`{at} in {op.path or 'the loss'}"


def shown(shape: Any) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def raised(found: Trace) -> Finding:
    """Turn an exception of the forward or backward pass into the finding that it is."""
    error, text = found.error, " ".join(str(found.error).split())
    lower, id = text.lower(), "trace-raised"
    if "same device" in lower or ("device" in lower and "expected" in lower):
        id = "trace-device"
    elif "inplace" in lower or "second time" in lower or "does not require grad" in lower:
        id = "trace-detached"
    elif "dtype" in lower or "scalar type" in lower:
        id = "trace-dtype"
    elif any(word in lower for word in ("shape", "size", "dimension", "broadcast")):
        id = "trace-shape"
    running = found.running[-1] if found.running else None
    at = f" in {running.path} ({running.kind})" if running else ""
    given = ", ".join(
        f"{shown(made.shape)} {made.dtype} {made.device}"
        for made in (running.inputs if running else ())
    )
    message = f"{found.stage} raised {type(error).__name__}{at}: {text[:150]}"
    if given:
        message += f"; the module got {given}"
    return Finding(id, message, found.error_line, "the batch breaks off here; see the message")


def not_finite(found: Trace) -> Finding | None:
    """Name where the first NaN or infinity begins that reaches the loss or a gradient."""
    op = found.loss_op
    if isinstance(op, int) and found.tape.ops[op].bad:
        return _from_origin(found, found.tape.ops[op], "the loss")
    if not found.bad_gradients:
        return None
    name = found.bad_gradients[0]
    many = len(found.bad_gradients)
    rest = f"the loss is finite, {many} gradient{'s are' if many > 1 else ' is'} not ({name} first)"
    node, number = found.bad_node or ("", None)
    if number is None:
        message = f"it begins in backward of {node}; {rest}" if node else rest
        return Finding("trace-nonfinite", message, value=name)
    made = found.tape.ops[number]
    todo = f"keep what {made.name} gets away from where its derivative is infinite (clamp, add eps)"
    message = f"begins in backward of {place(made)} ({node}); {rest}"
    return Finding("trace-nonfinite", message, made.where, todo)


def _from_origin(found: Trace, last: Op, what: str) -> Finding:
    kind = {"nan": "NaN", "inf": "infinite"}[last.bad]
    origin = last.origin
    if not isinstance(origin, int):
        sort, _, name = str(origin).partition(" ")
        message = f"{what} is {kind}: {'the batch holds it, ' if sort == 'batch' else ''}{origin}"
        return Finding("trace-nonfinite", f"{message} is not finite before the pass", value=name)
    begun = found.tape.ops[origin]
    value = {"nan": "NaN", "inf": "an infinity"}[begun.bad]
    message = f"{value} begins with {place(begun)}, of finite values; {what} is {kind}"
    masks = [found.tape.ops[s] for s in begun.sources if isinstance(s, int)]
    mask = next((m for m in masks if m.bad == "inf"), None)
    if mask is not None:
        message = f"NaN begins with {place(begun)}; {what} is {kind}; it got infinities"
        filled = found.tape.ops[mask.origin] if isinstance(mask.origin, int) else mask
        message += f" written {place(filled)}: a row may be masked as a whole"
    todo = f"{begun.name} makes {value} here: guard what it gets (mask, clamp, add eps)"
    return Finding("trace-nonfinite", message, begun.where, todo)


def trained_names(target: Target) -> set[str]:
    """Return the parameters that should learn: trainable, and in the optimizer if there is one."""
    held = None
    if target.optimizer is not None:
        held = {id(p) for group in target.optimizer.param_groups for p in group["params"]}
    if target.kind == "project":
        held = None  # a project's optimizer may hold parts of its parameters
    named = target.model.named_parameters()
    return {n for n, p in named if p.requires_grad and (held is None or id(p) in held)}


def without_gradient(found: Trace, missing: set[str]) -> tuple[list[Finding], dict[str, str]]:
    """Say of parameters without a gradient: cut off on the way (findings), or not used (why)."""
    behind = found.tape.behind(found.loss_op) if found.loss_op is not None else set()
    used = {s for op in found.tape.ops for s in op.sources if isinstance(s, str)}
    cuts: dict[Any, list[tuple[int, str]]] = defaultdict(list)
    unused: dict[str, str] = {}
    for name in sorted(missing):
        key = f"parameter {name}"
        cut = _first_cut(found, key, behind) if key in behind else _left(found, key)
        if cut is not None:
            cuts[cut.where or cut.index].append((cut.index, name))
        elif key in used:
            last = [op for op in found.tape.ops if key in op.sources][-1]
            unused[name] = f"what {place(last)} makes of it does not reach the loss"
        else:
            owner = name.rpartition(".")[0]
            called = not owner or any(call.path == owner for call in found.calls)
            unused[name] = "is read by no operation" if called else "its module is never called"
    made = [
        _cut_finding(found, sorted({number for number, _ in pairs}), [name for _, name in pairs])
        for pairs in cuts.values()
    ]
    return made, unused


def _first_cut(found: Trace, key: str, behind: set[Any]) -> Op | None:
    """Follow a parameter's value towards the loss to the first op whose result has no gradient."""
    readers: dict[Any, list[Op]] = defaultdict(list)
    for op in found.tape.ops:
        if op.index in behind:
            for source in op.sources:
                readers[source].append(op)
    waiting: list[Any] = [key]
    seen: set[int] = set()
    while waiting:
        at = waiting.pop(0)
        for op in readers[at]:
            if op.index in seen:
                continue
            seen.add(op.index)
            if not op.gives_grad:
                return op
            waiting.append(op.index)
    return None


def _left(found: Trace, key: str) -> Op | None:
    """Find where a parameter's value leaves torch for Python or NumPy."""
    made: set[Any] = {key}
    for op in found.tape.ops:
        if made & set(op.sources):
            made.add(op.index)
            if op.name in EXITS and op.name != "__bool__":
                return op
    return None


def _cut_finding(found: Trace, numbers: list[int], names: list[str]) -> Finding:
    op = found.tape.ops[numbers[0]]
    how = f"{place(op)} gives a tensor without a gradient"
    todo = f"{op.name} cuts the graph here; use a differentiable operation on the tensor itself"
    if op.name in ("detach", "detach_", "data", "item", "numpy", "tolist"):
        how, todo = f"{place(op)} cuts the graph", f"remove .{op.name} from the way to the loss"
    elif op.grad_off:
        how = f"{place(op)} runs where gradients are off (no_grad or inference)"
        todo = (
            "move this out of no_grad, or freeze the parameters before it by requires_grad_(False)"
        )
    elif op.name in EXITS:
        how = f"{place(op)} takes the value out of torch"
    again = f" (and {len(numbers) - 1} calls more)" if len(numbers) > 1 else ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    message = f"{how}{again}: no gradient for {', '.join(names[:1])}{more}"
    return Finding("trace-detached", message, op.where, todo)


def unregistered(target: Target, found: Trace) -> Finding | None:
    """Name a Parameter that the model reads and neither it nor the optimizer holds."""
    held = {id(p) for p in target.model.parameters()}
    if target.optimizer is not None:
        held |= {id(p) for group in target.optimizer.param_groups for p in group["params"]}
    strangers = [(number, p) for number, p in found.tape.strangers if id(p) not in held]
    if not strangers:
        return None
    op = found.tape.ops[strangers[0][0]]
    shape = shown(strangers[0][1].shape)
    message = f"{place(op)} reads a Parameter {shape} that model.parameters() does not hold"
    todo = "keep modules in a ModuleList or ModuleDict, not in a list or dict"
    return Finding("trace-unused", message, op.where, todo, len({id(p) for _, p in strangers}))


def not_chosen(found: Trace, name: str) -> bool:
    """Tell whether a parameter is one of several equal modules among which the data chooses."""
    path = name.split(".")
    for at, part in enumerate(path):
        if not part.isdigit():
            continue
        row = ".".join(path[:at])
        own = f"{row}.{part}"
        others = any(
            call.path.startswith(f"{row}.") and f"{call.path}.".startswith(f"{own}.") is False
            for call in found.calls
        )
        owner = row.rpartition(".")[0]
        chosen = any(
            op.name in CHOICES
            and (op.path == owner or op.path.startswith(f"{owner}." * bool(owner)))
            for op in found.tape.ops
        )
        if others and chosen:
            return True
    return False


def place_of(target: Target, found: Trace, name: str) -> tuple[str, int] | None:
    """Return the line that should use a parameter: in the forward of the innermost module that was
    called above it, else where that module makes it."""
    called = {call.path for call in found.calls} | {""}
    path = name.split(".")
    above = [at for at in range(len(path)) if ".".join(path[:at]) in called]
    for at in reversed(above):
        owner = type(target.model.get_submodule(".".join(path[:at])))
        if owner.__module__.startswith("torch."):
            continue
        for place in (owner.forward, owner):
            line = fix_in(place, "", rf"\b\w+\.{path[at]}\b")
            if line:
                return line["file"], line["line"]
    return None


def loss_without_graph(found: Trace) -> Finding:
    """Name what cut off a loss that has no graph at all."""
    message = "the loss has no graph (grad_fn is None)"
    behind = found.tape.behind(found.loss_op) if found.loss_op is not None else set()
    ops = [op for op in found.tape.ops if op.wanted_grad and not op.gives_grad]
    cut = max((op for op in ops if op.index in behind), key=lambda op: op.index, default=None)
    cut = cut or max((op for op in ops if op.name in EXITS), key=lambda op: op.index, default=None)
    if cut is None:
        todo = "build the loss from what the model returns, with gradients on"
        return Finding("trace-detached", f"{message}: nothing it is made of needs one", None, todo)
    found_cut = _cut_finding(found, [cut.index], [])
    message = f"{message}: {found_cut.message.partition(': no gradient')[0]}"
    return Finding("trace-detached", message, cut.where, found_cut.todo)


def stop_gradients(found: Trace) -> list[Op]:
    """Return the detach and .data on the way to the loss."""
    behind = found.tape.behind(found.loss_op) if found.loss_op is not None else set()
    return [
        op
        for op in found.tape.ops
        if op.index in behind
        and op.wanted_grad
        and not op.gives_grad
        and op.name in ("detach", "data")
    ]


def rows_without_gradient(target: Target, found: Trace) -> Finding | None:
    """Name a matrix of which a whole stretch of rows gets a gradient of exactly 0 behind a
    stop-gradient: queries and keys of a fused projection, say."""
    looked_up = {
        source
        for op in found.tape.ops
        if op.name in LOOKUPS
        for source in op.sources
        if isinstance(source, str)
    }
    for op in stop_gradients(found):
        behind = found.tape.behind(op.index) - looked_up
        for name, (first, last, total) in found.silent_rows.items():
            if f"parameter {name}" in behind and last - first >= total / 4:
                message = f"{place(op)} cuts the graph: the gradient of rows {first} to {last - 1}"
                message += f" of {total} of {name} is exactly 0"
                todo = f"remove .{op.name} from the way to the loss"
                return Finding("trace-detached", message, op.where, todo)
    return None


def dtypes(target: Target, found: Trace) -> Iterator[Finding]:
    """Name a float64 or float32 that nobody asked for."""
    held = Counter(str(p.dtype).removeprefix("torch.") for p in target.model.parameters())
    if not held or "float64" in held:
        wide = []
    else:
        wide = [c for c in found.calls if any(m.dtype == "float64" for m in c.outputs)]
    if wide:
        first = min(wide, key=lambda call: call.last_op)
        inside = found.tape.ops[first.first_op : first.last_op]
        op = next((op for op in inside if op.dtypes[1] == "float64"), None)
        while op is not None:
            before = [found.tape.ops[s] for s in op.sources if isinstance(s, int)]
            wider = next((b for b in before if b.dtypes[1] == "float64"), None)
            if wider is None:
                break
            op = wider
        message = f"{first.path} returns float64, its parameters are {held.most_common(1)[0][0]}"
        todo = "a float64 came in here: give NumPy and Python values the tensor's dtype"
        if op is not None:
            message += f"; it begins at {place(op)}"
        yield Finding("trace-dtype", message, op.where if op else None, todo, "float64")
        return
    yield from _stream(target, found)


def _stream(target: Target, found: Trace) -> Iterator[Finding]:
    """Compare what equal blocks of a row get: a residual stream keeps its dtype."""
    if found.autocast:
        return
    rows: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for call in found.calls:
        parent, _, last = call.path.rpartition(".")
        if last.isdigit() and call.inputs:
            rows[parent, call.kind].append(call)
    for calls in rows.values():
        kinds = [next((m.dtype for m in call.inputs if "float" in m.dtype), "") for call in calls]
        asked = str(getattr(target.model, "compute_dtype", "")).removeprefix("torch.")
        if target.kind == "project" and asked in HALVES and kinds[0] == "float32":
            shape = next(m.shape for m in calls[0].inputs if "float" in m.dtype)
            before = found.tape.ops[: calls[0].first_op]
            fitting = (op for op in reversed(before) if op.made == [shape])
            last = next((op for op in fitting if op.dtypes[1] == "float32"), None)
            message = f"{calls[0].path} gets float32, the model computes in {asked}"
            todo = "cast the stream: .to(self.compute_dtype)"
            yield Finding("trace-dtype", message, last.where if last else None, todo, "float32")
            return
        if kinds[0] not in HALVES or len(calls) < 2:
            continue
        changed = next((i for i, kind in enumerate(kinds) if kind == "float32"), None)
        if changed is None:
            continue
        before = calls[changed - 1]
        inside = found.tape.ops[before.first_op : calls[changed].first_op]
        promoted = [op for op in inside if op.dtypes[1] == "float32" and op.dtypes[0] == "float32"]
        last = next((op for op in reversed(promoted)), None)
        message = f"{calls[changed].path} gets float32, {before.path} got {kinds[0]}"
        if last is not None:
            message += f"; the last operation between them is {place(last)}"
        todo = "something of float32 met the stream here; cast it to the stream's dtype"
        yield Finding("trace-dtype", message, last.where if last else None, todo, "float32")


def devices(target: Target, found: Trace) -> Iterator[Finding]:
    """Name a module whose output lies on another device than all parameters."""
    held = {str(p.device) for p in target.model.parameters()}
    if len(held) != 1:
        return
    for call in found.calls:
        made = {m.device for m in call.outputs if "float" in m.dtype}
        got = {m.device for m in call.inputs if "float" in m.dtype}
        if made - held and not got - held:
            message = f"{call.path} returns a tensor on {', '.join(made - held)}, parameters are on"
            inside = found.tape.ops[call.first_op : call.last_op]
            op = next((op for op in inside if op.name in ("to", "cpu", "cuda")), None)
            todo = "leave the tensor on the device of its input"
            where = op.where if op else None
            yield Finding("trace-device", f"{message} {held.pop()}", where, todo, call.path)
            return
