"""Rules of Triton kernels that no test on a CPU can see break. Pure ast, nothing is imported.

Each lint takes the root of a tree and returns sentences, one for each problem. Why each rule is
there stands in its docstring; sources are issues of other projects that met the fault.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from bundle.lint_house import PACKAGE, _at_import, _imports, _parse
from bundle.tree import python_files, relative

KERNELS = f"{PACKAGE}/kernels"
KERNEL_FILES = ("cross_entropy", "grouped_matmul", "moe_permute", "router")
"""The files that may hold @triton.jit functions, and so the only ones that import triton."""

TILE_SIZE = re.compile(r"^(?!.*(STRIDE|WIDTH|HIDDEN|VOCAB|DIM|SIZE))[A-Z][A-Z_0-9]{2,}$")
"""Constants that are the size of a tile; D, F or a WIDTH are those of a matrix."""

TOKEN_COUNT = re.compile(
    r"^(T|R|NT|(num_|n_|NUM_|N_)?(tokens|rows|tiles|TOKENS)|token_count|seq_len|batch|batch_size)$"
)
INTEGERS = re.compile(
    r"^(tile_expert|tile_row|num_tiles|(ids|order|inverse|offsets|counts|table|target|pad_mask)\d?)"
    r"(_ptr)?$"
)
"""Parameters that point to integers, by their names in `Sorted` and the signatures of kernels."""

RETURNS = "return"
MEMORY = {"tl.load", "tl.store"}
VARYING = {"tl.program_id", "tl.load", "tl.cumsum", "tl.num_programs"}
REDUCTIONS = {"sum", "max", "min", "argmax", "argmin", "reduce", "cumsum", "cumprod", "sort"}
REDUCTIONS |= {"topk", "associative_scan", "xor_sum", "softmax"}
WIDE = {"tl.float32", "tl.float64", "tl.int32", "tl.int64", "tl.int1"}


class Kernel:
    """A @triton.jit function with what its names were given."""

    def __init__(self, path: Path, node: ast.FunctionDef, decorator: ast.expr) -> None:
        self.path, self.node, self.decorator = path, node, decorator
        self.parameters = [arg.arg for arg in node.args.args]
        hints = {arg.arg: arg.annotation for arg in node.args.args if arg.annotation}
        self.constants = {name for name, hint in hints.items() if "constexpr" in ast.unparse(hint)}
        self.values: dict[str, list[ast.expr]] = {}
        self.loop_names: set[str] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    self._give(target, inner.value)
            elif isinstance(inner, ast.AnnAssign) and inner.value:
                self._give(inner.target, inner.value)
            elif isinstance(inner, ast.AugAssign):
                self._give(inner.target, ast.BinOp(inner.target, inner.op, inner.value))
            elif isinstance(inner, ast.For):
                self.loop_names |= {n.id for n in ast.walk(inner.target) if isinstance(n, ast.Name)}

    def _give(self, target: ast.expr, value: ast.expr) -> None:
        """Note the value of a name; of several names at once each has the whole or its part."""
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for name, part in zip(target.elts, parts, strict=False):
                self._give(name, part)

    def calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self.node) if isinstance(node, ast.Call))

    def holds(self, node: ast.expr, test, seen: frozenset[str] = frozenset()) -> bool:
        """Return whether the test is true of the expression or of a value of a name in it."""
        if test(node):
            return True
        if isinstance(node, ast.Name):
            if node.id in seen:
                return False
            seen |= {node.id}
            return any(self.holds(value, test, seen) for value in self.values.get(node.id, []))
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return any(self.holds(child, test, seen) for child in children)


def _name(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _called(node: ast.AST) -> str:
    return _name(node.func) if isinstance(node, ast.Call) else ""


@functools.cache
def kernels(root: Path) -> tuple[Kernel, ...]:
    """Return every @triton.jit function of the package."""
    found = []
    for path in python_files(root, KERNELS):
        for node in ast.walk(_parse(path)):
            for decorator in getattr(node, "decorator_list", []):
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                if _name(called) in ("triton.jit", "jit"):
                    found.append(Kernel(path, node, decorator))
    return tuple(found)


@functools.cache
def _helpers(root: Path) -> set[str]:
    """Return the functions that kernels call; the others are launched."""
    return {_called(call) for kernel in kernels(root) for call in kernel.calls()}


def _where(root: Path, kernel: Kernel, node: ast.AST) -> str:
    return f"{relative(root, kernel.path)}:{node.lineno}: {kernel.node.name}"


def _arguments(call: ast.Call, parameters: list[str]) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(parameters, call.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


def _bases(kernel: Kernel, node: ast.expr, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the parameters that a pointer may start from: its first term, names followed."""
    if isinstance(node, ast.BinOp):
        return _bases(kernel, node.left, seen) if isinstance(node.op, ast.Add) else set()
    if isinstance(node, ast.Subscript):
        return _bases(kernel, node.value, seen)
    if not isinstance(node, ast.Name) or node.id in seen:
        return set()
    found = {node.id} & set(kernel.parameters)
    for value in kernel.values.get(node.id, []):
        found |= _bases(kernel, value, seen | {node.id})
    return found


def _functions_in(kernel: Kernel, node: ast.expr, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the functions that give the first term of an address, names followed."""
    if isinstance(node, ast.BinOp):
        return _functions_in(kernel, node.left, seen)
    if isinstance(node, ast.Subscript):
        return _functions_in(kernel, node.value, seen)
    if isinstance(node, ast.Name) and node.id not in seen:
        values = kernel.values.get(node.id, [])
        return {f for v in values for f in _functions_in(kernel, v, seen | {node.id})}
    return {_called(node)}


@functools.cache
def _pointers(root: Path) -> dict[str, set[str]]:
    """Return, by function, the parameters that are added to and then read or written through.

    RETURNS stands among them where what the function returns is such an address.
    """
    found: dict[str, set[str]] = {kernel.node.name: set() for kernel in kernels(root)}
    size = -1
    while size != sum(map(len, found.values())):
        size = sum(map(len, found.values()))
        for kernel in kernels(root):
            for expression in _addresses(root, kernel, found):
                found[kernel.node.name] |= _bases(kernel, expression)
                for called in set(found) & _functions_in(kernel, expression):
                    found[called].add(RETURNS)
    return found


def _addresses(root: Path, kernel: Kernel, pointers: dict[str, set[str]]) -> Iterator[ast.expr]:
    """Yield the expressions of a kernel that are addresses, or passed on to be part of one."""
    parameters = {other.node.name: other.parameters for other in kernels(root)}
    if RETURNS in pointers[kernel.node.name]:
        for node in ast.walk(kernel.node):
            if isinstance(node, ast.Return) and node.value:
                yield node.value
    for call in kernel.calls():
        name = _called(call)
        if name in MEMORY and call.args:
            yield call.args[0]
        for parameter, value in _arguments(call, parameters.get(name, [])):
            if parameter in pointers.get(name, ()):
                yield value


def _products(
    kernel: Kernel, node: ast.expr, seen: frozenset[str] = frozenset()
) -> Iterator[ast.BinOp]:
    """Yield the products in an address, names followed, but not those that choose what is loaded.

    The address of an inner load is an address of its own.
    """
    if _called(node) in VARYING | {"tl.arange"}:
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield node
    if isinstance(node, ast.Name) and node.id not in seen:
        for value in kernel.values.get(node.id, []):
            yield from _products(kernel, value, seen | {node.id})
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _products(kernel, child, seen)


def _is_int64(kernel: Kernel, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether the expression is converted to int64 before it is used."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return bool(node.args) and _name(node.args[0]) == "tl.int64"
        wide = [*node.args, *(keyword.value for keyword in node.keywords)]
        return _called(node) in ("tl.cast", "tl.full") and "tl.int64" in map(_name, wide)
    if isinstance(node, ast.BinOp):
        return _is_int64(kernel, node.left, seen) or _is_int64(kernel, node.right, seen)
    if isinstance(node, ast.Subscript):
        return _is_int64(kernel, node.value, seen)
    if isinstance(node, ast.Name) and node.id not in seen:
        values = kernel.values.get(node.id, [])
        return bool(values) and all(_is_int64(kernel, v, seen | {node.id}) for v in values)
    return False


def int64_offsets(root: Path) -> list[str]:
    """A row or an expert is int64 before a stride multiplies it.

    [R, D] passes 2**31 elements at 131,072 tokens of a common model; int32 wraps around silently
    (Liger-Kernel #1246, vLLM #5938, sglang #4727).
    """
    problems: set[str] = set()
    functions = {kernel.node.name for kernel in kernels(root)}
    for kernel in kernels(root):
        # What a function is passed may be a row; what a launch passes is one number for all.
        helper = kernel.node.name in _helpers(root)
        passed = set(kernel.parameters) - kernel.constants if helper else set()
        for address in _addresses(root, kernel, _pointers(root)):
            problems |= {
                f"{_where(root, kernel, product)} multiplies {ast.unparse(product)} in int32; "
                "convert with .to(tl.int64) first"
                for product in _products(kernel, address)
                if _can_wrap(kernel, product, kernel.loop_names | passed, VARYING | functions)
            }
    return sorted(problems)


def _can_wrap(kernel: Kernel, product: ast.BinOp, changing: set[str], functions: set[str]) -> bool:
    """Return whether a product of an address may pass 2**31 and is not int64.

    A row of the whole matrix comes from the program's number, a load, another function, a loop or
    the caller (the names that change). The columns of a tile (tl.arange) times a constexpr stay
    small, and so does a tile's number times the size of a tile.
    """
    sides = (product.left, product.right)
    if any(isinstance(side, ast.Constant) or TILE_SIZE.search(_name(side)) for side in sides):
        return False
    if any(_is_int64(kernel, side) for side in sides):
        return False

    def varies(node: ast.AST) -> bool:
        return _called(node) in functions or _name(node) in changing

    def is_runtime(node: ast.AST) -> bool:
        return _name(node) in set(kernel.parameters) - kernel.constants

    if any(kernel.holds(side, varies) for side in sides):
        return True
    within = any(kernel.holds(side, lambda node: _called(node) == "tl.arange") for side in sides)
    return within and any(kernel.holds(side, is_runtime) for side in sides)


def _accumulator(call: ast.Call, statement: ast.stmt) -> str:
    """Return the name that a tl.dot adds to."""
    acc = next((k.value for k in call.keywords if k.arg == "acc"), None)
    acc = acc if acc is not None or len(call.args) < 3 else call.args[2]
    while isinstance(acc, ast.Call):
        inner = next((k.value for k in acc.keywords if k.arg == "acc"), None)
        acc = inner if inner is not None or len(acc.args) < 3 else acc.args[2]
    if acc is not None:
        return ast.unparse(acc)
    if isinstance(statement, ast.AugAssign):
        return ast.unparse(statement.target)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
        return ast.unparse(statement.targets[0])
    return ""


def one_dot(root: Path) -> list[str]:
    """No loop adds two tl.dot to one accumulator.

    It is compiled wrongly for sm_100 by Triton 3.6 and 3.7 (triton #10821), and has silently
    corrupted gradients elsewhere (Liger-Kernel #1413, #1435).
    """
    problems = []
    for kernel in kernels(root):
        loops = [node for node in ast.walk(kernel.node) if isinstance(node, ast.For | ast.While)]
        for loop in loops:
            into: dict[str, int] = {}
            for statement in ast.walk(loop):
                if isinstance(statement, ast.Assign | ast.AugAssign):
                    for call in ast.walk(statement.value):
                        if _called(call) == "tl.dot":
                            name = _accumulator(call, statement)
                            into[name] = into.get(name, 0) + 1
            problems += [
                f"{_where(root, kernel, loop)} adds {count} tl.dot to {name} in one loop"
                for name, count in into.items()
                if name and count > 1
            ]
    return problems


def atomics(root: Path) -> list[str]:
    """No atomic operation: the order of its sum changes from run to run, and with it the bits."""
    return [
        f"{_where(root, kernel, call)} calls {_called(call)}; sums have one fixed order"
        for kernel in kernels(root)
        for call in kernel.calls()
        if _called(call).startswith("tl.atomic_")
    ]


def _is_raw(kernel: Kernel, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether the value may still have the dtype of memory."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return not (node.args and _name(node.args[0]) in WIDE)
        if _called(node) == "tl.load":
            return not all(map(INTEGERS.match, _bases(kernel, node.args[0]) or {"unknown"}))
        passes = ("tl.where", "tl.abs", "tl.maximum", "tl.minimum", "tl.reshape", "tl.trans")
        return _called(node) in passes and _mixed(kernel, node.args, seen)
    if isinstance(node, ast.BinOp):
        return _mixed(kernel, [node.left, node.right], seen)
    if isinstance(node, ast.Subscript):
        return _is_raw(kernel, node.value, seen)
    if isinstance(node, ast.Name) and node.id not in seen:
        return any(_is_raw(kernel, v, seen | {node.id}) for v in kernel.values.get(node.id, []))
    return False


def _mixed(kernel: Kernel, sides: list[ast.expr], seen: frozenset[str]) -> bool:
    """Return whether sides together are raw: one is, and none is known to be wide."""
    wide = any(
        isinstance(node, ast.Attribute) and _name(node) in WIDE
        for side in sides
        for node in ast.walk(side)
    )
    return not wide and any(_is_raw(kernel, side, seen) for side in sides)


def upcasts(root: Path) -> list[str]:
    """What is reduced was converted to float32 (or a named integer type) first.

    A sum of bf16 loses its small terms, and the interpreter adds the raw bits.
    """
    problems = []
    for kernel in kernels(root):
        for call in kernel.calls():
            module, _, name = _called(call).rpartition(".")
            method = isinstance(call.func, ast.Attribute) and module != "tl"
            if name not in REDUCTIONS and not (method and call.func.attr in REDUCTIONS):
                continue
            value = call.func.value if method else call.args[0]
            if _is_raw(kernel, value):
                problems.append(
                    f"{_where(root, kernel, call)} reduces {ast.unparse(value)} in the dtype of "
                    "memory; convert with .to(tl.float32) first"
                )
    return problems


def dot_precision(root: Path) -> list[str]:
    """Every tl.dot says its input_precision: the default rounds float32 to tf32 on NVIDIA only."""
    return [
        f"{_where(root, kernel, call)} calls tl.dot without input_precision"
        for kernel in kernels(root)
        for call in kernel.calls()
        if _called(call) == "tl.dot" and "input_precision" not in {k.arg for k in call.keywords}
    ]


def autotune(root: Path) -> list[str]:
    """Nothing is tuned while training: it takes minutes at each new shape (SonicMoE #60)."""
    return [
        f"{relative(root, path)}:{node.lineno}: {_name(node)}; tiles come from a static table"
        for path in python_files(root, PACKAGE)
        for node in ast.walk(_parse(path))
        if _name(node) in ("triton.autotune", "triton.heuristics", "autotune", "triton.Config")
    ]


@functools.cache
def _lists(root: Path) -> dict[str, set[str]]:
    """Return the lists of strings that stand at the top of the kernel package's files, by name."""
    found: dict[str, set[str]] = {}
    for path in python_files(root, KERNELS):
        for node in _parse(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple):
                texts = {e.value for e in node.value.elts if isinstance(e, ast.Constant)}
                found.setdefault(_name(node.targets[0]), set()).update(map(str, texts))
    return found


def token_counts(root: Path) -> list[str]:
    """No kernel is compiled again because the number of tokens changed.

    A token count is no constexpr, and Triton does not specialise on its value either (1, or
    divisible by 16): it stands in do_not_specialize.
    """
    problems = []
    for kernel in kernels(root):
        fixed: set[str] = set()
        for keyword in getattr(kernel.decorator, "keywords", []):
            if keyword.arg == "do_not_specialize":
                for node in ast.walk(keyword.value):
                    fixed |= _lists(root).get(_name(node), {str(getattr(node, "value", ""))})
        where, helper = _where(root, kernel, kernel.node), kernel.node.name in _helpers(root)
        for name in filter(TOKEN_COUNT.match, kernel.parameters):
            if name in kernel.constants:
                problems.append(f"{where} takes {name} as constexpr; it follows the token count")
            elif not helper and name not in fixed | _pointers(root)[kernel.node.name]:
                problems.append(f"{where} specialises on {name}; list it in do_not_specialize")
    return problems


def triton_imports(root: Path) -> list[str]:
    """Triton is imported by the kernel files only, and those only where they are used.

    So the package works where Triton is not installed, and starts fast where it is.
    """
    problems = []
    allowed = {root / KERNELS / f"{stem}.py" for stem in KERNEL_FILES}
    modules = tuple(f"curry_train.kernels.{stem}" for stem in KERNEL_FILES)
    for path in python_files(root, PACKAGE):
        if path in allowed:
            continue
        name = relative(root, path)
        for dotted, line in _imports(ast.walk(_parse(path))):
            if dotted.split(".")[0] == "triton":
                problems.append(f"{name}:{line}: imports {dotted}; only kernel files may")
        for dotted, line in _imports(_at_import(_parse(path).body)):
            if dotted.startswith(modules):
                problems.append(f"{name}:{line}: imports {dotted} at import, not where it is used")
    return sorted(set(problems))


LINTS = [int64_offsets, one_dot, atomics, upcasts, dot_precision, autotune, token_counts]
LINTS += [triton_imports]
