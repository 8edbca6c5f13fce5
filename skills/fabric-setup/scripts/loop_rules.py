"""Rules about the loop itself: order, accumulation, ranks, seeds, metrics, precision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from loop_facts import (
    Finding,
    Loop,
    before,
    calls_in,
    micro_batches,
    on_rank_zero,
    reduces_gradient,
)
from loop_syntax import has_word, last_name

COLLECTIVES = ("save", "load", "barrier", "all_reduce", "all_gather", "broadcast")
SEEDS = ("seed_everything", "manual_seed", "manual_seed_all", "set_seed")
NOISE = re.compile(
    r"(torch|np|numpy)\.(random\.)?(rand(n|int)?(_like)?|bernoulli|multinomial|normal)"
)
COUNT_NAME = re.compile(r"(^|_)(counts?|correct|num|n|seen|samples|tokens|hits|sums?)(_|$|\b)")
BEHIND = ("module", "_forward_module")
MODULE_API = {
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules",
    "children", "named_children", "state_dict", "load_state_dict", "train", "eval", "zero_grad",
    "to", "cuda", "cpu", "apply", "requires_grad_", "mark_forward_method", "compile", "half",
    "float", "double", "bfloat16", "forward", "training_step", "validation_step", "test_step",
    "predict_step",
}  # fmt: skip
UNKNOWN_FORWARDS = {"generate", "loss", "compute_loss", "training_loss", "forward_features"}


def device_moves(loop: Loop) -> Iterator[Finding]:
    """Nothing names a device by hand: setup moves, and fabric.device says where."""
    program, id = loop.program, "fabric-device-moves"
    for call in calls_in(program, "to", "cuda", "set_device"):
        name = last_name(call.func)
        if not isinstance(call.func, ast.Attribute):
            continue
        given = [*call.args, *(k.value for k in call.keywords if k.arg == "device")]
        by_hand = name == "cuda" or any(program.has(arg, "device") for arg in given)
        if name == "set_device":
            by_hand = "cuda" in ast.unparse(call.func)
        if by_hand:
            yield Finding(
                id, call, f"{ast.unparse(call)[:60]} chooses a device by hand",
                "remove it: setup_module and setup_dataloaders move; else use fabric.device",
            )  # fmt: skip
    for call in program.calls:
        if last_name(call.func) in ("to", "device", "autocast", "GradScaler", "Fabric"):
            continue
        for keyword in call.keywords:
            if keyword.arg == "device" and program.has(keyword.value, "device"):
                yield Finding(
                    id, call, f"device={ast.unparse(keyword.value)} chooses a device by hand",
                    "device=fabric.device",
                )  # fmt: skip


def rank_zero(loop: Loop) -> Iterator[Finding]:
    """One process writes and prints."""
    program, id = loop.program, "fabric-rank-zero"
    for call in calls_in(program, "save", "print"):
        text = ast.unparse(call.func)
        saves = text in ("torch.save",) or _imported(loop, call, "torch", "save")
        if not saves and text != "print":
            continue
        if on_rank_zero(program, call) or any(k.arg == "file" for k in call.keywords):
            continue
        if any(before(program, call, made) for made in loop.made):
            continue  # arguments are checked before there are processes
        yield Finding(
            id, call, f"every process calls {text}",
            'fabric.save(path, {"model": model})' if saves else "fabric.print(...)",
        )  # fmt: skip


def _imported(loop: Loop, call: ast.Call, module: str, name: str) -> bool:
    """Tell whether a plain name was imported from a module."""
    return isinstance(call.func, ast.Name) and any(
        isinstance(node, ast.ImportFrom)
        and node.module == module
        and any(a.name == name and (a.asname or name) == call.func.id for a in node.names)
        for node in loop.program.nodes
    )


def collectives(loop: Loop) -> Iterator[Finding]:
    """What waits for all processes is called by all of them."""
    for call in loop.program.fabric_calls(*COLLECTIVES):
        if on_rank_zero(loop.program, call):
            yield Finding(
                "fabric-collectives", call,
                f"{ast.unparse(call.func)} waits for all processes, but only some come here",
                "move it out of the condition on the rank",
            )  # fmt: skip


def accumulation(loop: Loop) -> Iterator[Finding]:
    """Micro-batches before the last leave gradients unreduced, and none is thrown away."""
    program, id = loop.program, "fabric-accumulation"
    found = micro_batches(loop)
    if found is None:
        return
    step, calls = found
    words = ("no_backward_sync", "no_sync", "set_requires_gradient_sync")
    if not any(True for _ in calls_in(program, *words)):
        yield Finding(
            id, calls[0], "every micro-batch reduces gradients over all processes",
            "with fabric.no_backward_sync(model, enabled=not_last): around forward and backward",
        )  # fmt: skip
    every = program.conditions(calls[0])
    for call in calls_in(program, "zero_grad"):
        alike = program.loops(call) == program.loops(calls[0])
        if alike and all(test in every for test in program.conditions(call)):
            yield Finding(
                id, call, "zero_grad at every micro-batch throws away what was accumulated",
                "call it once for each optimizer.step()",
            )  # fmt: skip


def autocast(loop: Loop) -> Iterator[Finding]:
    """The precision flag is the only one that chooses a dtype."""
    program = loop.program
    keywords = [keyword for call in loop.made for keyword in call.keywords]
    flag = [ast.unparse(keyword.value) for keyword in keywords if keyword.arg == "precision"]
    for call in calls_in(program, "autocast"):
        off = any(k.arg == "enabled" and ast.unparse(k.value) == "False" for k in call.keywords)
        if off or call in program.fabric_calls("autocast"):
            continue
        beside = (
            f"beside precision={flag[0]}" if flag else "and the precision flag says nothing then"
        )
        yield Finding(
            "fabric-autocast", call, f"autocast by hand, {beside}",
            "remove it: the model that setup returned casts; outside of it, fabric.autocast()",
        )  # fmt: skip


def seed(loop: Loop) -> Iterator[Finding]:
    """Weights are drawn alike in all processes, and noise is not."""
    program, id = loop.program, "fabric-seed"
    made = [site for site in loop.trained if "from_pretrained" not in ast.unparse(site)]
    if not made:
        return
    seeds = [
        call for call in calls_in(program, *SEEDS, "seed")
        if last_name(call.func) != "seed" or "random" in ast.unparse(call.func)
    ]  # fmt: skip
    if not seeds:
        yield Finding(
            id, made[0], "no seed: processes draw different weights, which FSDP does not even out",
            "fabric.seed_everything(SEED) before the model is built",
        )  # fmt: skip
        return
    by_rank = [
        call for call in seeds
        if any(has_word(m, "rank") for arg in [*call.args, *(k.value for k in call.keywords)]
               for m in program.meanings(arg, 2))
    ]  # fmt: skip
    for call in by_rank:
        alike = [s for s in seeds if s not in by_rank]
        if any(before(program, call, site) for site in made) and not any(
            before(program, call, s) and before(program, s, made[0]) for s in alike
        ):
            yield Finding(
                id, call, "the seed differs by rank before the model is built",
                "one seed for the weights; add the rank after setup",
            )  # fmt: skip
    noise = _noise(loop)
    if not by_rank and noise is not None:
        yield Finding(
            id, noise, "equal noise: all processes drop and draw the same",
            "torch.manual_seed(SEED + fabric.global_rank) after setup",
        )  # fmt: skip


def _noise(loop: Loop) -> ast.AST | None:
    """Find what draws random numbers in a training step: dropout, or a draw inside a loop."""
    program = loop.program
    for call in program.calls:
        name = last_name(call.func)
        rate = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "p")]
        drops = name.startswith(("Dropout", "AlphaDropout")) or name == "dropout"
        if drops and not (rate and ast.unparse(rate[0]) in ("0", "0.0")):
            return call
    for call in program.calls:
        draws = NOISE.fullmatch(ast.unparse(call.func))
        if not draws or any(k.arg == "generator" for k in call.keywords):
            continue
        around = program.loops(call)[:1]
        if around and any(around == program.loops(b)[:1] for b in loop.backward):
            return call
    return None


def metrics(loop: Loop) -> Iterator[Finding]:
    """Counts and sums are added over processes; a mean of means is no mean."""
    program = loop.program
    plain = [
        call for call in program.fabric_calls("all_reduce")
        if call.args and _default_op(call)
    ]  # fmt: skip
    ratios = _ratio_names(loop, plain)
    for call in plain:
        value = call.args[0]
        if call in ratios:
            continue
        if _is_mean(loop, value):
            message = "a mean of means: shards hold unequally many targets"
        elif "loss" not in ast.unparse(value) and _is_count(loop, value):
            message = f"the default takes the mean over processes of {ast.unparse(value)[:40]}"
        else:
            continue
        yield Finding(
            "fabric-metrics", call, message,
            'reduce sum and count by reduce_op="sum", then divide',
        )  # fmt: skip


def _default_op(call: ast.Call) -> bool:
    ops = [k.value for k in call.keywords if k.arg == "reduce_op"] + call.args[2:3]
    return not ops or ast.unparse(ops[0]).strip("'\"").lower() in ("mean", "avg")


def _ratio_names(loop: Loop, calls: list[ast.Call]) -> set[ast.AST]:
    """Return the reductions of both sides of a division: a ratio of two means is one of sums."""
    found: set[ast.AST] = set()
    for node in loop.program.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            sides = [
                [c for c in calls for m in loop.program.meanings(side, 2) if c in set(ast.walk(m))]
                for side in (node.left, node.right)
            ]
            if all(sides):
                found.update(sides[0] + sides[1])
    return found


def _is_mean(loop: Loop, value: ast.expr) -> bool:
    """Tell whether a value was divided by a number of things before it is reduced."""
    for meaning in loop.program.meanings(value, 2):
        if isinstance(meaning, ast.Call) and last_name(meaning.func) in ("fmean", "mean"):
            receiver = meaning.func.value if isinstance(meaning.func, ast.Attribute) else None
            if receiver is not None and ast.unparse(receiver) in ("torch", "np", "statistics"):
                return True
            gathers = ("stack", "tensor", "cat")
            if isinstance(receiver, ast.Call) and last_name(receiver.func) in gathers:
                return True
        if isinstance(meaning, ast.BinOp) and isinstance(meaning.op, ast.Div):
            if has_word(meaning, "world_size"):
                return False
            if _is_count(loop, meaning.right) or "len(" in ast.unparse(meaning.right):
                return True
    return False


def _is_count(loop: Loop, value: ast.expr) -> bool:
    """Tell whether a value counts or sums things, by its name or by what it was assigned."""
    if isinstance(value, ast.Name | ast.Attribute) and COUNT_NAME.search(ast.unparse(value)):
        return not any(has_word(m, "world_size") for m in loop.program.meanings(value))
    for meaning in loop.program.meanings(value, 1):
        text = ast.unparse(meaning)
        if re.search(r"(\.sum\(\)(\.item\(\))?|\.numel\(\))$", text):
            return True
        if isinstance(meaning, ast.Call) and last_name(meaning.func) in ("len", "size"):
            return True
        if isinstance(meaning, ast.Subscript) and ".shape[" in text:
            return True
    return False


def forward_methods(loop: Loop) -> Iterator[Finding]:
    """A method that runs layers goes through the strategy's forward."""
    program, id = loop.program, "fabric-forward-methods"
    marked = {
        text
        for call in calls_in(program, "mark_forward_method")
        for arg in call.args
        for text in [ast.unparse(arg).strip("'\"").rpartition(".")[2]]
    }
    for call in program.calls:
        if not isinstance(call.func, ast.Attribute):
            continue
        name, receiver = call.func.attr, call.func.value
        if name in BEHIND and program.has(receiver, "model", ready=True):
            yield Finding(
                id, call, f"{ast.unparse(call.func)} goes past DDP, which then reduces nothing",
                f"call {ast.unparse(receiver)} itself",
            )  # fmt: skip
            continue
        holder = receiver
        if isinstance(receiver, ast.Attribute) and receiver.attr in BEHIND:
            holder = receiver.value
        if not program.has(holder, "model", ready=True) or name in MODULE_API | marked:
            continue
        if _runs_layers(loop, holder, name):
            yield Finding(
                id, call, f"{ast.unparse(call.func)} runs layers outside of forward",
                f'model.mark_forward_method("{name}") after setup',
            )  # fmt: skip


def _runs_layers(loop: Loop, holder: ast.expr, method: str, depth: int = 3) -> bool:
    """Tell whether a model's method calls its submodules; by its name if the class is unknown."""
    program = loop.program
    sites = [t.site for t in program.tags(holder) if t.kind == "model"]
    known = [program.classes.get(last_name(s.func)) for s in sites if isinstance(s, ast.Call)]
    classes = [node for node in known if node is not None]
    if not classes:
        return method in UNKNOWN_FORWARDS
    return any(_calls_layers(node, method, depth) for node in classes)


def _calls_layers(node: ast.ClassDef, method: str, depth: int) -> bool:
    methods = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
    if method not in methods:
        return method in UNKNOWN_FORWARDS
    for call in [n for n in ast.walk(methods[method]) if isinstance(n, ast.Call)]:
        func = call.func
        if isinstance(func, ast.Name) and func.id == "self":
            return True
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            if func.value.id != "self" or func.attr in MODULE_API - {"forward"}:
                continue
            if func.attr == "forward" or func.attr not in methods:
                return True
            if depth and _calls_layers(node, func.attr, depth - 1):
                return True
    return False


def zero_grad(loop: Loop) -> Iterator[Finding]:
    """Gradients are cleared once for each step, and not between backward and step."""
    program, id = loop.program, "fabric-zero-grad"
    calls = list(calls_in(program, "zero_grad"))
    cleared = [
        target for node in program.nodes if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "grad"
    ]  # fmt: skip
    for step in loop.steps[:1]:
        around = program.loops(step)
        inside = [c for c in [*calls, *cleared] if not around or around[-1] in program.loops(c)]
        known = not around or all(program.loops(c) for c in calls)
        if not calls and not cleared:
            message = "zero_grad is missing: gradients of all steps add up"
        elif not inside and (known or calls):
            message = "zero_grad is outside of the loop that steps"
        else:
            continue
        yield Finding(id, step, message, "optimizer.zero_grad() after optimizer.step()")
    for call in calls:
        for first in loop.backward:
            for last in loop.steps:
                if _in_one_block(loop, first, call, last):
                    yield Finding(
                        id, call, "zero_grad between backward and step: the step sees no gradient",
                        "move it behind optimizer.step()",
                    )  # fmt: skip


def _in_one_block(loop: Loop, *calls: ast.Call) -> bool:
    """Tell whether calls are statements of one block, in this order, the last on one object."""
    program = loop.program
    statements = [program.parent.get(call) for call in calls]
    blocks = {program.parent.get(s) for s in statements if isinstance(s, ast.Expr)}
    lines = [call.lineno for call in calls]
    same = [ast.unparse(c.func.value) for c in calls[1:] if isinstance(c.func, ast.Attribute)]
    return (
        all(isinstance(s, ast.Expr) for s in statements)
        and len(blocks) == 1
        and lines == sorted(set(lines))
        and len(set(same)) == 1
    )


def grad_scaling(loop: Loop) -> Iterator[Finding]:
    """The strategy takes the mean and the precision scales; nothing does it twice."""
    program, id = loop.program, "fabric-grad-scaling"
    for call in calls_in(program, "GradScaler"):
        yield Finding(
            id, call, "a GradScaler of your own beside Fabric's",
            'remove it; precision="16-mixed" scales',
        )  # fmt: skip
    if not loop.setups:
        return
    for call in program.calls:
        if reduces_gradient(call):
            yield Finding(
                id, call, "gradients are reduced by hand, and the strategy has done it",
                "remove it",
            )  # fmt: skip
    for node in program.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            left, right = node.target, node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            left, right = node.left, node.right
        elif isinstance(node, ast.Call) and last_name(node.func) in ("div_", "div") and node.args:
            left, right = node.func, node.args[0]
        else:
            continue
        if not any(_names_world(m) for m in program.meanings(right, 1)):
            continue
        if ".grad" in ast.unparse(left) or _reaches_backward(loop, node):
            yield Finding(
                id, node, "divided by the number of processes beside the strategy's mean",
                "remove the division",
            )  # fmt: skip


def _names_world(expr: ast.AST) -> bool:
    """Tell whether a divisor is the number of processes, alone or as a factor."""
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Mult):
        return _names_world(expr.left) or _names_world(expr.right)
    name = last_name(expr.func) if isinstance(expr, ast.Call) else last_name(expr)
    return name in ("world_size", "get_world_size", "num_processes")


def _reaches_backward(loop: Loop, division: ast.AST) -> bool:
    """Tell whether a division is part of what a backward call was given."""
    program = loop.program
    for call in loop.backward:
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        given = call.args[0] if call.args else receiver
        if given is None:
            continue
        if isinstance(division, ast.AugAssign):
            if program.slot(division.target) == program.slot(given):
                return True
        elif any(division in set(ast.walk(meaning)) for meaning in program.meanings(given, 3)):
            return True
    return False
