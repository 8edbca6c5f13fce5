"""Rules about what Fabric has to be given: model, optimizer, loaders, backward, clip, launch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from loop_facts import Finding, Loop, before, calls_in
from loop_source import Tag
from loop_syntax import has_word, last_name

WRAPPERS = ("DistributedDataParallel", "DDP", "DataParallel")
LAUNCHED = ("LT_CLI_USED", "_is_using_cli", "is_launched", "launched_by_cli", "using_cli")
GUARD = 'if "LT_CLI_USED" not in os.environ: fabric.launch()'


def model_setup(loop: Loop) -> Iterator[Finding]:
    """Every trained model goes through setup, and the loop calls what came out of it."""
    program = loop.program
    id = "fabric-model-setup"
    for call in calls_in(program, *WRAPPERS):
        if any(tag.site in loop.trained for arg in call.args for tag in program.tags(arg)):
            yield Finding(
                id, call, f"{last_name(call.func)} by hand wraps what setup wraps",
                "remove it; set up the plain model",
            )  # fmt: skip
    if not loop.any_fabric:
        yield Finding(
            id, loop.backward[0], "no Fabric in the code", "fabric = Fabric(); then references/"
            "recipe.md, line by line"
        )  # fmt: skip
        return
    wrapped = {tag.site for call in loop.setups for part in call.args for tag in program.tags(part)}
    unknown = any(not program.tags(arg) for call in loop.setups for arg in call.args[:1])
    for call in loop.setups:
        if isinstance(program.parent.get(call), ast.Expr):
            yield Finding(id, call, "what setup returns is thrown away", "model = " + _text(call))
    for site, holder in loop.trained.items():
        if site not in wrapped and not unknown:
            yield Finding(
                id, site, f"{ast.unparse(holder)} is trained but never set up",
                "model = fabric.setup_module(model)",
            )  # fmt: skip
    for call in program.calls:
        tags = {t for t in program.tags(call.func) if t.kind == "model" and t.site in loop.trained}
        inside = program.is_module_class(program.owner(call))
        if (
            tags
            and not inside
            and not any(t.ready for t in tags)
            and {t.site for t in tags} & wrapped
        ):
            yield Finding(
                id, call, f"calls {ast.unparse(call.func)} as it was before setup",
                "call what fabric.setup or setup_module returned",
            )  # fmt: skip


def _text(call: ast.Call) -> str:
    return ast.unparse(call)


def optimizer_setup(loop: Loop) -> Iterator[Finding]:
    """The optimizer that steps came out of setup."""
    program, id = loop.program, "fabric-optimizer-setup"
    seen = set()
    for step in loop.steps:
        receiver = step.func.value if isinstance(step.func, ast.Attribute) else step
        if program.has(receiver, "scaler"):
            receiver = step.args[0]
        tags = {tag for tag in program.tags(receiver) if tag.kind == "optimizer"}
        for tag in tags:
            if not any(t.ready for t in tags) and tag.site not in seen:
                seen.add(tag.site)
                yield Finding(
                    id, tag.site, f"{ast.unparse(receiver)} steps without being set up",
                    "optimizer = fabric.setup_optimizers(optimizer)",
                )  # fmt: skip
    for call in program.fabric_calls("setup_optimizers"):
        if isinstance(program.parent.get(call), ast.Expr):
            yield Finding(
                id,
                call,
                "what setup_optimizers returns is thrown away",
                "optimizer = " + _text(call),
            )


def optimizer_order(loop: Loop) -> Iterator[Finding]:
    """Where parameters are replaced, the optimizer is built over those that setup made."""
    program, id = loop.program, "fabric-optimizer-order"
    replaces = "fully_shard" in loop.strategies or "ModelParallelStrategy" in loop.strategies
    empty = any(
        k.arg == "empty_init" and isinstance(k.value, ast.Constant) and k.value.value is True
        for call in program.fabric_calls("init_module")
        for k in call.keywords
    )
    if not (replaces or empty):
        return
    reason = "fully_shard replaces the parameters" if replaces else "the parameters are still empty"
    fix = "setup_module first, then the optimizer over model.parameters(), then setup_optimizers"
    for call in loop.setups:
        optimizers = [arg for arg in call.args[1:] if program.has(arg, "optimizer")]
        for tag in {t for arg in optimizers for t in program.tags(arg) if t.kind == "optimizer"}:
            yield Finding(id, tag.site, f"built before setup, and {reason}", fix)
        sites = {t.site for arg in call.args[:1] for t in program.tags(arg) if t.kind == "model"}
        for made in program.calls:
            if Tag("optimizer", made) in program.tags(made) and before(program, made, call):
                names = [_expr(node) for arg in made.args for node in ast.walk(arg)]
                over = {tag.site for name in names for tag in program.tags(name)}
                if over & sites and not optimizers:
                    yield Finding(id, made, f"built before setup_module, and {reason}", fix)


def _expr(node: ast.AST) -> ast.expr | None:
    return node if isinstance(node, ast.Name | ast.Attribute) else None


def dataloaders(loop: Loop) -> Iterator[Finding]:
    """Every loader that is read went through setup_dataloaders, or shards and moves by itself."""
    program, id = loop.program, "fabric-dataloaders"
    held = [tag for tags in program.slots.values() for tag in tags]
    ready = {tag.site for tag in held if tag.kind == "loader" and tag.ready}
    setups = program.fabric_calls("setup_dataloaders")
    for call in setups:
        if isinstance(program.parent.get(call), ast.Expr):
            yield Finding(
                id, call, "what setup_dataloaders returns is thrown away", "loader = " + _text(call)
            )
        ready |= {tag.site for arg in call.args for tag in program.tags(arg)}
    if any(not program.tags(arg) for call in setups for arg in call.args):
        return  # a loader that could not be followed may be any of them
    moves = bool(program.fabric_calls("to_device")) or any(
        program.has(arg, "place") for call in calls_in(program, "to") for arg in call.args
    )
    for call in program.calls:
        if Tag("loader", call) not in program.tags(call) or call in ready:
            continue
        if not (moves and _shards(loop, call)):
            what = "nothing moves its batches" if _shards(loop, call) else "all read all of it"
            yield Finding(
                id, call, f"this DataLoader is not set up: {what}",
                "loader = fabric.setup_dataloaders(loader)",
            )  # fmt: skip


def _shards(loop: Loop, loader: ast.Call) -> bool:
    """Tell whether a loader's arguments choose this process's part of the data."""
    program = loop.program
    given = [*loader.args, *(k.value for k in loader.keywords)]
    if any(program.has(arg, "sampler") for arg in given):
        return True
    return any(has_word(m, "rank") for arg in given for m in program.meanings(arg))


def sampler(loop: Loop) -> Iterator[Finding]:
    """Each process reads its own part, in a new order each epoch."""
    program, id = loop.program, "fabric-sampler"
    if not loop.any_fabric:
        return
    setups = program.fabric_calls("setup_dataloaders")
    ready = {tag.site for call in setups for arg in call.args for tag in program.tags(arg)}
    plain = [
        call
        for call in setups
        for k in call.keywords
        if k.arg == "use_distributed_sampler"
        and isinstance(k.value, ast.Constant)
        and not k.value.value
    ]
    for call in plain:
        for tag in {t for arg in call.args for t in program.tags(arg) if t.kind == "loader"}:
            if isinstance(tag.site, ast.Call) and not _shards(loop, tag.site):
                yield Finding(
                    id, call, "use_distributed_sampler=False, and the loader has no sampler that "
                    "knows the rank", "leave the argument out",
                )  # fmt: skip
    epochs = any(True for _ in calls_in(program, "set_epoch"))
    for call in program.calls:
        loader = Tag("loader", call) in program.tags(call)
        if not loader or call in ready or epochs:
            continue
        for tag in {t for k in call.keywords for t in program.tags(k.value) if t.kind == "sampler"}:
            if not _off(tag.site, "shuffle"):
                yield Finding(
                    id, tag.site, "set_epoch is never called: every epoch has the same order",
                    "sampler.set_epoch(epoch), or setup_dataloaders, which does it",
                )  # fmt: skip
    for tag_site in [c for c in program.calls if Tag("loader", c) in program.tags(c)]:
        yield from _streams(loop, tag_site)


def _off(site: ast.AST, name: str) -> bool:
    return isinstance(site, ast.Call) and any(
        k.arg == name and isinstance(k.value, ast.Constant) and not k.value.value
        for k in site.keywords
    )


def _streams(loop: Loop, loader: ast.Call) -> Iterator[Finding]:
    """An IterableDataset gets no sampler, so it must look at the rank itself."""
    program = loop.program
    data = [*loader.args[:1], *(k.value for k in loader.keywords if k.arg == "dataset")]
    for value in [m for arg in data for m in program.meanings(arg)]:
        node = program.classes.get(last_name(value.func)) if isinstance(value, ast.Call) else None
        if node is None or not any(last_name(base) == "IterableDataset" for base in node.bases):
            continue
        if not (has_word(node, "rank") or has_word(value, "rank")):
            yield Finding(
                "fabric-sampler", node, f"{node.name} yields the same items in every process",
                "itertools.islice(items, fabric.global_rank, None, fabric.world_size)",
            )  # fmt: skip


def backward(loop: Loop) -> Iterator[Finding]:
    """Every backward call is Fabric's."""
    for call in loop.raw:
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else call
        shown = call.args[0] if call.args else receiver
        if isinstance(receiver, ast.Call) and last_name(receiver.func) == "scale" and receiver.args:
            shown = receiver.args[0]
        yield Finding(
            "fabric-backward", call, f"{ast.unparse(call)[:60]} goes past Fabric",
            f"fabric.backward({ast.unparse(shown)[:60]})",
        )  # fmt: skip


def clip(loop: Loop) -> Iterator[Finding]:
    """Gradients are clipped by Fabric, which undoes fp16's scale and knows sharded parameters."""
    for call in calls_in(loop.program, "clip_grad_norm_", "clip_grad_value_"):
        how = "max_norm=1.0" if "norm" in last_name(call.func) else "clip_val=1.0"
        if len(call.args) > 1:
            how = how.replace("1.0", ast.unparse(call.args[1]))
        yield Finding(
            "fabric-clip", call, f"{last_name(call.func)} knows no loss scale and no shards",
            f"fabric.clip_gradients(model, optimizer, {how})",
        )  # fmt: skip


def launch(loop: Loop) -> Iterator[Finding]:
    """launch is called, before setup, and not when `fabric run` has started the processes."""
    program, id = loop.program, "fabric-launch"
    calls = program.fabric_calls("launch")
    for call in calls_in(program, "init_process_group"):
        yield Finding(id, call, "opens the process group by hand", "remove it; launch opens it")
    if loop.made and not calls:
        yield Finding(id, loop.made[0], "launch is missing: only fabric run starts ranks", GUARD)
    for call in calls:
        guarded = any(
            has_word(meaning, *LAUNCHED)
            for test in program.conditions(call)
            for meaning in program.meanings(test, 2)
        ) or any(isinstance(up, ast.Try) for up in program.ancestors(call))
        if not guarded:
            yield Finding(id, call, "launch is an error under fabric run", GUARD)
        late = [s for s in program.fabric_calls(*SETUP_NAMES) if before(program, s, call)]
        if late:
            yield Finding(id, late[0], "is set up before launch", "call fabric.launch() first")


SETUP_NAMES = ("setup", "setup_module", "setup_optimizers", "setup_dataloaders")


def command_line(loop: Loop) -> Iterator[Finding]:
    """What `fabric run` always decides is not written into the code."""
    program = loop.program
    for call in loop.made:
        if any(has_word(test, *LAUNCHED) for test in program.conditions(call)):
            continue
        for keyword in call.keywords:
            value = keyword.value
            literal = isinstance(value, ast.Constant | ast.List) and ast.unparse(value) != "'auto'"
            harmless = keyword.arg == "num_nodes" and ast.unparse(value) == "1"
            if keyword.arg in ("devices", "num_nodes") and literal and not harmless:
                yield Finding(
                    "fabric-cli-conflict", call,
                    f"{keyword.arg}={ast.unparse(value)} in the code is an error beside another "
                    f"value of fabric run",
                    f"leave {keyword.arg} out and set it on the command line",
                )  # fmt: skip
