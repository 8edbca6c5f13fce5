"""What a program trains with: its backward calls, steps, trained models, and who sums gradients."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from loop_source import Program, Tag
from loop_syntax import has_word, last_name

TRAINERS = ("pytorch_lightning", "lightning.pytorch", "lightning", "transformers")
BACKWARD = ("backward", "manual_backward")
REDUCTIONS = ("all_reduce", "reduce_scatter_tensor", "all_reduce_coalesced")
NO_OPTIMIZER = re.compile(r"sched|scaler|prof|progress|bar|warmup|env", re.IGNORECASE)


class Finding(NamedTuple):
    """One thing that is missing or wrong."""

    id: str
    node: ast.AST
    message: str
    text: str


@dataclass
class Loop:
    """The training loop of a program."""

    program: Program
    raw: list[ast.Call]
    """backward calls that are not Fabric's."""
    backward: list[ast.Call]
    """All backward calls."""
    steps: list[ast.Call]
    setups: list[ast.Call]
    made: list[ast.Call]
    """Where Fabric is constructed."""
    trained: dict[ast.AST, ast.AST]
    """Model sites, with the expression whose parameters an optimizer got."""
    own_sum: ast.Call | None
    """The call that sums gradients over processes, when the loop leaves that to no strategy."""

    @property
    def any_fabric(self) -> bool:
        kinds = {tag.kind for tags in self.program.slots.values() for tag in tags}
        return bool(self.made) or "fabric" in kinds or bool(self.backward and not self.raw)

    @property
    def strategies(self) -> str:
        """Name the sharding strategies that the program asks for."""
        names = ("fully_shard", "ModelParallelStrategy", "FSDPStrategy", "fsdp", "deepspeed")
        found = set()
        for node in self.program.nodes:
            word = node.value if isinstance(node, ast.Constant) else last_name(node)
            if isinstance(node, ast.alias):
                word = node.name
            found.update(name for name in names if word == name)
        return " ".join(sorted(found))


def read_loop(program: Program) -> Loop:
    """Collect the facts."""
    backward = [
        call
        for call in program.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in BACKWARD
    ]
    ours = program.fabric_calls("backward")
    steps = [call for call in program.calls if _is_step(program, call)]
    trained = {}
    for call in program.calls:
        if program.has(call, "optimizer") and Tag("optimizer", call) in program.tags(call):
            for node in ast.walk(call):
                if isinstance(node, ast.Call) and "parameters" in last_name(node.func):
                    holder = getattr(node.func, "value", None)
                    for tag in program.tags(holder):
                        if tag.kind == "model":
                            trained[tag.site] = holder
    return Loop(
        program=program,
        raw=[call for call in backward if call not in ours],
        backward=backward,
        steps=steps,
        setups=program.fabric_calls("setup", "setup_module"),
        made=[c for c in program.calls if Tag("fabric", c) in program.tags(c)],
        trained=trained,
        own_sum=_own_sum(program),
    )


def _is_step(program: Program, call: ast.Call) -> bool:
    """Tell whether a call is an optimizer's step, directly or through a gradient scaler."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    receiver = call.func.value
    if program.has(receiver, "scaler"):
        return bool(call.args)
    if program.has(receiver, "optimizer"):
        return True
    name = ast.unparse(receiver)
    return "opt" in name.lower() and not NO_OPTIMIZER.search(name)


def _own_sum(program: Program) -> ast.Call | None:
    """Find the call by which code sums its gradients itself over a group that it was given.

    Code that opens the process group itself is a loop still to be moved.
    """
    if any(last_name(call.func) == "init_process_group" for call in program.calls):
        return None
    if program.fabric_calls("setup", "setup_module"):
        return None
    for call in program.calls:
        by_group = any(k.arg in ("group", "process_group", "mesh") for k in call.keywords)
        hands = any(
            isinstance(node, ast.Call) and last_name(node.func) == "parameters"
            for arg in call.args
            for node in ast.walk(arg)
        )
        named = "grad" in ast.unparse(call.func) and "clip" not in last_name(call.func)
        if by_group and (hands or named or reduces_gradient(call)):
            return call
    return None


def reduces_gradient(call: ast.Call) -> bool:
    """Tell whether a call reduces a parameter's .grad over processes."""
    return (
        last_name(call.func) in REDUCTIONS
        and bool(call.args)
        and ".grad" in ast.unparse(call.args[0])
    )


def trainer_of(program: Program) -> tuple[str, int] | None:
    """Name the Trainer class that a file hands its loop to, with the line; None for a raw loop."""
    origin: dict[str, str] = {}
    for node in program.nodes:
        if isinstance(node, ast.ImportFrom):
            origin |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            origin |= {a.asname or a.name: a.name for a in node.names}
    for call in sorted(program.calls, key=lambda c: c.lineno):
        if not last_name(call.func).endswith("Trainer"):
            continue
        text = ast.unparse(call.func)
        first, _, rest = text.partition(".")
        full = origin.get(first, first) + (f".{rest}" if rest else "")
        if full.startswith(TRAINERS):
            return full, call.lineno
    for node in program.classes.values():
        bases = [last_name(base) for base in node.bases]
        if "LightningModule" in bases and not any(
            last_name(call.func) == "backward" for call in program.calls
        ):
            return f"{node.name}(LightningModule)", node.lineno
    return None


def micro_batches(loop: Loop) -> tuple[ast.Call, list[ast.Call]] | None:
    """Return an optimizer step with the backward calls that run several times before it."""
    program = loop.program
    for step in loop.steps:
        around = program.loops(step)
        inner = [
            call
            for call in loop.backward
            if (chain := program.loops(call))
            and around
            and chain[: len(around)] == around
            and len(chain) > len(around)
        ]
        if inner:
            return step, inner
        tests = [test for test in program.conditions(step) if _counts(program, test)]
        shared = [test for call in loop.backward for test in program.conditions(call)]
        same_loop = [call for call in loop.backward if program.loops(call)[-1:] == around[-1:]]
        # A test around both, as around a generator's whole turn, delays no step.
        if same_loop and any(test not in shared for test in tests):
            return step, same_loop
    return None


def _counts(program: Program, test: ast.expr) -> bool:
    """Tell whether a test is true every so many steps."""
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        for meaning in program.meanings(test, 2)
        for node in ast.walk(meaning)
    )


def on_rank_zero(program: Program, node: ast.AST) -> bool:
    """Tell whether only some processes come to a node."""
    words = ("rank", "is_global_zero", "is_main", "is_master", "main_process", "master_process")
    if any(has_word(test, *words) for test in program.conditions(node)):
        return True
    return any(
        has_word(mark, "rank_zero")
        for up in program.ancestors(node)
        for mark in getattr(up, "decorator_list", [])
    )


def before(program: Program, first: ast.AST, second: ast.AST) -> bool:
    """Tell whether a node stands above another in the same function."""
    same = program.scope(first) is program.scope(second)
    return same and program.line(first) < program.line(second)


def calls_in(program: Program, *names: str) -> Iterator[ast.Call]:
    """Yield the calls of functions or methods of these names, in the order of the text."""
    found = [call for call in program.calls if last_name(call.func) in names]
    yield from sorted(found, key=lambda call: (str(program.file[call]), call.lineno))
