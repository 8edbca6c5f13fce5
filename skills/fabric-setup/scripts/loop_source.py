"""Read training code without importing it: which names hold models, optimizers, loaders, Fabric.

Values are followed through assignments, calls of functions and classes of the same files, returns
and attributes of self. Order is ignored, so a name that is bound twice holds both values. What
cannot be followed stays unknown, and rules say nothing about it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from loop_syntax import last_name, makes_module, pairs

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SETUPS = ("setup", "setup_module", "setup_optimizers", "setup_dataloaders")
THROUGH = {
    "enumerate", "iter", "zip", "tqdm", "cycle", "islice", "chain", "batched", "track", "next",
    "list", "compile", "to", "cuda", "cpu", "train", "eval", "half", "float", "double", "bfloat16",
    "requires_grad_", "tuple", "DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP",
    "DataParallel", "fully_shard", "apply",
}  # fmt: skip
"""Calls whose result stands for what they were given."""
OPTIMIZERS = {
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "LBFGS", "ASGD", "SparseAdam", "Adafactor", "Muon", "Lion",
}  # fmt: skip


class Tag(NamedTuple):
    """One thing that a name can hold."""

    kind: str
    """model, optimizer, loader, sampler, scaler, fabric, device (chosen by hand) or place."""
    site: ast.AST
    """Where it is made."""
    ready: bool = False
    """It came out of Fabric's setup."""


Tags = frozenset[Tag]
NONE: Tags = frozenset()


class Source(NamedTuple):
    path: Path
    tree: ast.Module


class Program:
    """The given files as one program."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources
        self.parent: dict[ast.AST, ast.AST] = {}
        self.file: dict[ast.AST, Path] = {}
        self.nodes: list[ast.AST] = []
        for source in sources:
            self._index(source)
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.classes = {n.name: n for n in self.nodes if isinstance(n, ast.ClassDef)}
        self.functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append(node)
        self.bound = self._bindings()
        self.slots: dict[tuple[ast.AST, str], Tags] = {}
        self.assigned: dict[tuple[ast.AST, str], list[ast.expr]] = {}
        self._assignments()
        self._settle()
        if self._guess():
            self._settle()

    def _index(self, source: Source) -> None:
        todo: list[ast.AST] = [source.tree]
        while todo:
            node = todo.pop()
            self.nodes.append(node)
            self.file[node] = source.path
            for child in ast.iter_child_nodes(node):
                # Contexts such as ast.Load are shared objects; only places in the text matter.
                if not isinstance(child, ast.expr_context | ast.operator | ast.cmpop):
                    self.parent[child] = node
                    todo.append(child)

    # Places in the text

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parent:
            node = self.parent[node]
            yield node

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function or module that a node stands in."""
        return next(
            (up for up in self.ancestors(node) if isinstance(up, (*FUNCTIONS, ast.Module))), node
        )

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class that a node stands in."""
        return next((up for up in self.ancestors(node) if isinstance(up, ast.ClassDef)), None)

    def line(self, node: ast.AST) -> int:
        return getattr(node, "lineno", 1)

    def called_at(self, function: ast.AST) -> list[ast.Call]:
        """Return the calls in these files that reach a function, by name."""
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return []
        name, owner = function.name, self.parent.get(function)
        wanted = owner.name if name == "__init__" and isinstance(owner, ast.ClassDef) else name
        return [call for call in self.calls if last_name(call.func) == wanted]

    def reached_at(self, function: ast.AST) -> list[ast.AST]:
        """Return the calls of a function; for a closure that is handed on, its place."""
        inner = isinstance(function, FUNCTIONS) and not isinstance(self.scope(function), ast.Module)
        return list(self.called_at(function)) or ([function] if inner else [])

    def loops(self, node: ast.AST, depth: int = 6) -> list[ast.AST]:
        """Return the loops around a node, the outermost first, also those around its one caller."""
        inside = [
            up
            for up in self._up_to_scope(node)
            if isinstance(up, ast.For | ast.AsyncFor | ast.While)
        ]
        calls = self.reached_at(self.scope(node)) if depth else []
        outer = self.loops(calls[0], depth - 1) if len(calls) == 1 else []
        return outer + inside[::-1]

    def conditions(self, node: ast.AST, depth: int = 4) -> list[ast.expr]:
        """Return the tests that a node depends on, also those around every one of its callers."""
        found = []
        child = node
        for up in self._up_to_scope(node):
            if isinstance(up, ast.If | ast.IfExp | ast.While):
                found.append(up.test)
            found += self._early_exits(up, child)
            child = up
        scope = self.scope(node)
        found += self._early_exits(scope, child)
        calls = self.reached_at(scope) if depth else []
        if calls:
            of_all = [self.conditions(call, depth - 1) for call in calls]
            if all(of_all):
                found += [test for tests in of_all for test in tests]
        return found

    def _early_exits(self, block: ast.AST, child: ast.AST) -> list[ast.expr]:
        """Return the tests of `if ...: return` or `continue` before a statement of a block."""
        for name in ("body", "orelse", "finalbody"):
            body = getattr(block, name, None)
            if isinstance(body, list) and child in body:
                return [
                    earlier.test
                    for earlier in body[: body.index(child)]
                    if isinstance(earlier, ast.If)
                    and isinstance(earlier.body[-1], ast.Return | ast.Continue | ast.Raise)
                ]
        return []

    def _up_to_scope(self, node: ast.AST) -> Iterator[ast.AST]:
        for up in self.ancestors(node):
            if isinstance(up, (*FUNCTIONS, ast.Module)):
                return
            yield up

    # Names

    def _bindings(self) -> dict[ast.AST, set[str]]:
        bound: dict[ast.AST, set[str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.setdefault(self.scope(node), set()).add(node.id)
            elif isinstance(node, ast.arg):
                bound.setdefault(self.scope(node), set()).add(node.arg)
        return bound

    def slot(self, expr: ast.AST) -> tuple[ast.AST, str] | None:
        """Return what a name, a dotted name or an entry with a constant key stands for."""
        if isinstance(expr, ast.Name):
            scope = self.scope(expr)
            while expr.id not in self.bound.get(scope, ()) and not isinstance(scope, ast.Module):
                scope = self.scope(scope)
            return scope, expr.id
        if isinstance(expr, ast.Attribute):
            owner = self.owner(expr)
            if isinstance(expr.value, ast.Name) and expr.value.id == "self" and owner:
                return self._root(owner), expr.attr
            base = self.slot(expr.value)
            return base and (base[0], f"{base[1]}.{expr.attr}")
        if isinstance(expr, ast.Subscript) and isinstance(expr.slice, ast.Constant):
            base = self.slot(expr.value)
            return base and (base[0], f"{base[1]}[{expr.slice.value!r}]")
        return None

    def _root(self, node: ast.ClassDef, depth: int = 5) -> ast.ClassDef:
        """Return the class of these files that a class descends from: they share attributes."""
        bases = [
            self.classes[name] for base in node.bases if (name := last_name(base)) in self.classes
        ]
        return self._root(bases[0], depth - 1) if bases and depth else node

    def _assignments(self) -> None:
        for node in self.nodes:
            for target, value in pairs(node):
                elements = [target]
                if isinstance(node, ast.Assign) and isinstance(target, ast.Tuple):
                    elements = target.elts
                for element in elements:
                    slot = self.slot(element)
                    if slot is not None:
                        self.assigned.setdefault(slot, []).append(value)

    def meanings(self, expr: ast.AST, depth: int = 3) -> Iterator[ast.AST]:
        """Yield an expression and what the names in it were assigned, a few steps back."""
        yield expr
        if depth:
            for node in ast.walk(expr):
                slot = self.slot(node) if isinstance(node, ast.Name | ast.Attribute) else None
                for value in self.assigned.get(slot, []) if slot else []:
                    if value is not expr:
                        yield from self.meanings(value, depth - 1)

    def is_module_class(self, node: ast.ClassDef | None, depth: int = 5) -> bool:
        """Tell whether a class is a torch module."""
        for base in node.bases if node and depth else []:
            name = last_name(base)
            if name.endswith(("Module", "PreTrainedModel")):
                return True
            if name in self.classes and self.is_module_class(self.classes[name], depth - 1):
                return True
        return False

    # Values

    def has(self, expr: ast.AST, kind: str, *, ready: bool | None = None) -> bool:
        """Tell whether an expression may hold something of a kind."""
        return any(t.kind == kind and ready in (None, t.ready) for t in self.tags(expr))

    def is_fabric(self, expr: ast.AST) -> bool:
        return self.has(expr, "fabric")

    def _of_fabric(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Attribute) and self.is_fabric(call.func.value)

    def fabric_calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of these methods of a Fabric, in the order of the text."""
        found = [
            call for call in self.calls if last_name(call.func) in names and self._of_fabric(call)
        ]
        return sorted(found, key=lambda call: (str(self.file[call]), call.lineno))

    def tags(self, expr: ast.AST | None, depth: int = 8) -> Tags:
        """Return what an expression may hold."""
        if expr is None or not depth:
            return NONE
        if isinstance(expr, ast.Call):
            return self._call_tags(expr, depth)
        if isinstance(expr, ast.IfExp):
            return self.tags(expr.body, depth - 1) | self.tags(expr.orelse, depth - 1)
        if isinstance(expr, ast.BoolOp):
            return NONE.union(*(self.tags(value, depth - 1) for value in expr.values))
        if isinstance(expr, ast.NamedExpr | ast.Starred | ast.Await):
            return self.tags(expr.value, depth - 1)
        if isinstance(expr, ast.Constant) and isinstance(expr.value, str):
            by_hand = expr.value.startswith(("cuda", "mps", "xpu"))
            return frozenset({Tag("device", expr)}) if by_hand else NONE
        if isinstance(expr, ast.Tuple | ast.List):
            return NONE.union(*(self.tags(value, depth - 1) for value in expr.elts))
        slot = self.slot(expr)
        found = self.slots.get(slot, NONE) if slot else NONE
        if isinstance(expr, ast.Attribute) and expr.attr == "device":
            found |= {Tag("place", expr)} if self.is_fabric(expr.value) else NONE
        if slot and slot[1].rpartition(".")[2] in ("fabric", "_fabric"):
            found |= {Tag("fabric", slot[0])}
        if slot and slot[1] == "self":
            owner = self.owner(expr)
            if owner and any(last_name(base) == "Fabric" for base in owner.bases):
                found |= {Tag("fabric", owner)}
        return found

    def _call_tags(self, call: ast.Call, depth: int) -> Tags:
        name = last_name(call.func)
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if receiver is not None and name in SETUPS and self.is_fabric(receiver):
            parts = self.setup_parts(call)
            return parts[0] if name.startswith("setup") and parts else NONE
        if name == "Fabric" or any(
            last_name(base) == "Fabric" for base in getattr(self.classes.get(name), "bases", [])
        ):
            return frozenset({Tag("fabric", call)})
        if name in OPTIMIZERS or (
            name[:1].isupper() and any(".parameters()" in ast.unparse(arg) for arg in call.args)
        ):
            return frozenset({Tag("optimizer", call)})
        made = {
            "DataLoader": "loader", "DistributedSampler": "sampler", "GradScaler": "scaler",
            "device": "device",
        }.get(name)  # fmt: skip
        text = ast.unparse(call)
        if made == "device" and not any(w in text for w in ("cuda", "mps", "local_rank", "LOCAL_")):
            made = None
        if "LOCAL_RANK" in text and name == "int":
            made = "device"
        if made:
            return frozenset({Tag(made, call)})
        if self.is_module_class(self.classes.get(name)) or makes_module(call):
            return frozenset({Tag("model", call)})
        if name in THROUGH and not (receiver is None and name in self.functions):
            through = [*call.args, *([receiver] if receiver is not None else [])]
            return NONE.union(*(self.tags(arg, depth - 1) for arg in through))
        return NONE.union(*(self.tags(value, depth - 2) for value in self._returns(call)))

    def _returns(self, call: ast.Call) -> list[ast.expr]:
        """Return the values that a function of these files gives back."""
        return [
            node.value
            for function in self.functions.get(last_name(call.func), [])
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value and self.scope(node) is function
        ]

    def setup_parts(self, call: ast.Call) -> list[Tags]:
        """Return what Fabric's setup makes of each argument."""
        given = [*call.args, *(k.value for k in call.keywords if k.arg in ("module", "optimizer"))]
        return [frozenset(tag._replace(ready=True) for tag in self.tags(arg)) for arg in given]

    def unpack(self, value: ast.expr, count: int, depth: int = 4) -> list[Tags]:
        """Return what each of several targets gets."""
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == count:
            return [self.tags(element) for element in value.elts]
        if isinstance(value, ast.IfExp) and depth:
            sides = [self.unpack(side, count, depth - 1) for side in (value.body, value.orelse)]
            return [one | other for one, other in zip(*sides, strict=True)]
        if isinstance(value, ast.Call):
            if last_name(value.func) in SETUPS and self.tags(value):
                parts = self.setup_parts(value)
                return [*parts, *[NONE] * count][:count]
            results = [self.unpack(r, count, depth - 1) for r in self._returns(value) if depth]
            return [NONE.union(*(r[i] for r in results)) for i in range(count)]
        return [NONE] * count

    # Following values until nothing new comes

    def _settle(self) -> None:
        for _ in range(12):
            before = sum(map(len, self.slots.values()))
            for node in self.nodes:
                self._flow(node)
            if sum(map(len, self.slots.values())) == before:
                return

    def _hold(self, target: ast.AST, tags: Tags) -> None:
        slot = self.slot(target)
        if slot and tags:
            self.slots[slot] = self.slots.get(slot, NONE) | tags

    def _flow(self, node: ast.AST) -> None:
        if isinstance(node, ast.For | ast.AsyncFor) and self.has(node.iter, "model"):
            return
        for target, value in pairs(node):
            if isinstance(target, ast.Tuple | ast.List):
                shares = self.unpack(value, len(target.elts))
                for element, tags in zip(target.elts, shares, strict=True):
                    self._hold(element, tags)
            elif not isinstance(node, ast.For | ast.AsyncFor):
                self._hold(target, self.tags(value))
        if isinstance(node, ast.arg) and "Fabric" in ast.unparse(node.annotation or ast.Pass()):
            scope = self.scope(node)
            known = self.slots.get((scope, node.arg), NONE)
            self.slots[scope, node.arg] = known | {Tag("fabric", node)}
        if isinstance(node, ast.Call):
            self._arguments(node)

    def _arguments(self, call: ast.Call) -> None:
        """Hand the arguments of a call to the parameters of every function that it may reach."""
        name = last_name(call.func)
        targets = list(self.functions.get(name, []))
        given = list(call.args)
        first: list[Tags] = []
        if name in self.classes:
            body = self.classes[name].body
            targets = [f for f in body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        elif (
            name == "launch" and given and isinstance(given[0], ast.Name) and self._of_fabric(call)
        ):
            targets = list(self.functions.get(given[0].id, []))
            given, first = given[1:], [frozenset({Tag("fabric", call)})]
        for function in targets:
            names = [arg.arg for arg in [*function.args.posonlyargs, *function.args.args]]
            if names[:1] in (["self"], ["cls"]):
                names = names[1:]
            shares = first + [self.tags(arg) for arg in given]
            for parameter, tags in zip(names, shares, strict=False):
                if tags:
                    known = self.slots.get((function, parameter), NONE)
                    self.slots[function, parameter] = known | tags
            for keyword in call.keywords:
                tags = self.tags(keyword.value)
                if keyword.arg and tags:
                    known = self.slots.get((function, keyword.arg), NONE)
                    self.slots[function, keyword.arg] = known | tags

    def _guess(self) -> bool:
        """Take what an unknown call returned for a model or an optimizer if it is used as one."""
        found = False
        for call in self.calls:
            if not isinstance(call.func, ast.Attribute) or self.tags(call.func.value):
                continue
            kind = {"parameters": "model", "zero_grad": "optimizer"}.get(call.func.attr)
            slot = self.slot(call.func.value)
            values = self.assigned.get(slot, []) if kind and slot else []
            made = [value for value in values if isinstance(value, ast.Call)]
            if kind and slot and made and slot[1] != "self":
                if kind == "optimizer" and "opt" not in slot[1].lower():
                    continue
                self.slots[slot] = frozenset({Tag(kind, made[0])})
                found = True
        return found
