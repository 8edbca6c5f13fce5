"""Checks of gradients and of the optimizer: what is trained, by what, and does it move."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from evidence import MORE_BATCHES, Evidence, Finding, failed, passed, skipped
from step_run import cycled, drive, kept

from kit.fix import fix_in

NEGLIGIBLE = 1e-6
"""Share of the largest gradient below which one is rounding noise, as of a bias before a norm."""
SHAKEN = 48
"""Passes with random choices, so that every expert is chosen once."""
CHOOSERS = {"topk", "argmax", "sort", "argsort", "multinomial", "gumbel_softmax", "one_hot"}


def check_no_gradient(evidence: Evidence, limit: Any) -> Finding:
    """Every trainable parameter gets a finite gradient that is not zero."""
    if not evidence.trainable:
        return failed("no parameter wants a gradient (requires_grad is False everywhere)", 0)
    if not evidence.observed.loss.requires_grad:
        return failed(
            "the loss has no graph: a detach, .item(), argmax or no_grad cut it off",
            0,
            fix_in(
                evidence.target.loss_fn, "let the gradient through", r"detach|no_grad|item|argmax"
            ),
        )
    alive = _alive(evidence, evidence.first_gradients)
    still = [name for name in evidence.trainable if name not in alive]
    if still:
        alive |= _alive(evidence, evidence.warmed_gradients)
        still = [name for name in still if name not in alive]
    left_out = [n for n in still if not in_optimizer(evidence, n) and _is_none(evidence, n)]
    biases = [n for n in still if n.endswith("bias") and n[:-4] + "weight" in alive]
    experts = [n for n in still if n in _experts(evidence)]
    reached = _reached_when_shaken(evidence, experts) if experts else set()
    dead = [n for n in still if n not in {*left_out, *biases} and n not in reached]
    if dead:
        cut = sum(_is_none(evidence, n) for n in dead)
        how = "no gradient" if cut == len(dead) else "a zero gradient"
        shown = ", ".join(dead[:3]) + (", ..." if len(dead) > 3 else "")
        return failed(
            f"{len(dead)} of {len(evidence.trainable)} trainable tensors get {how} in "
            f"{len(evidence.batches)} batches: {shown}",
            len(dead),
            place_of(evidence, dead[0]),
        )
    notes = []
    if left_out:
        notes.append(f"{len(left_out)} not trained on purpose: no gradient and in no optimizer")
    if biases:
        notes.append(f"{len(biases)} biases that nothing depends on (a norm follows)")
    if reached:
        notes.append(f"{len(reached)} of experts that got nothing in these batches")
    frozen = sum(not p.requires_grad for p in evidence.target.model.parameters())
    notes += [f"{frozen} frozen"] if frozen else []
    return passed("; ".join([f"{len(alive)} tensors", *notes]), 0)


def _alive(evidence: Evidence, gradients: list[dict[str, Any]]) -> set[str]:
    """Names with a gradient that is not zero in any of the batches."""
    return {n for found in gradients for n, g in found.items() if g is not None and bool(g.any())}


def _is_none(evidence: Evidence, name: str) -> bool:
    return all(found[name] is None for found in evidence.first_gradients)


def place_of(evidence: Evidence, name: str) -> Any:
    """Name the place where the module that owns a parameter is used: its parent's forward."""
    model, parts = evidence.target.model, name.split(".")
    for length in range(len(parts) - 2, -1, -1):
        with contextlib.suppress(AttributeError):
            parent = model.get_submodule(".".join(parts[:length]))
            attribute = parts[length]
            found = fix_in(parent, f"let the loss depend on {name}", rf"\b{attribute}\b")
            if found is not None:
                return found
    text = f"let the loss depend on {name}"
    return fix_in(model, text, r"detach|no_grad|argmax|\.data\b|\.item") or fix_in(model, text)


def check_unused_parameters(evidence: Evidence, limit: Any) -> Finding:
    """No trainable parameter is left out of the loss: DDP would raise or wait for ever."""
    if not evidence.observed.loss.requires_grad:
        return skipped("the loss has no graph; see no-gradient")
    absent = [n for n in evidence.trainable if _is_none(evidence, n)]
    absent = [n for n in absent if in_optimizer(evidence, n)]
    experts = [n for n in absent if n in _experts(evidence)]
    reached = _reached_when_shaken(evidence, experts) if experts else set()
    unused = [n for n in absent if n not in reached]
    sometimes = [
        n
        for n in evidence.trainable
        if not _is_none(evidence, n) and any(found[n] is None for found in evidence.first_gradients)
    ]
    by_batch = [n for n in sometimes if n not in _experts(evidence)]
    if unused or by_batch:
        first = (unused or by_batch)[0]
        when = "take no part in the loss" if unused else "take part in some batches only"
        return failed(
            f"{len(unused or by_batch)} trainable tensors {when}, e.g. {first}: DDP would raise or "
            "wait for ever",
            len(unused or by_batch),
            place_of(evidence, first),
        )
    note = f"; {len(sometimes)} not in every batch: DDP needs find_unused_parameters=True"
    return passed("all take part" + (note if sometimes else ""), 0)


def _experts(evidence: Evidence) -> set[str]:
    """Parameters below a module that chooses among several by topk, argmax or the like."""
    return evidence.once("routed", lambda: routed_parameters(evidence))


def routed_parameters(evidence: Evidence) -> set[str]:
    """Find modules in whose forward something is chosen, and the module lists beside it."""
    from torch import nn

    model, running, choosing = evidence.target.model, [], set()
    names = {module: name for name, module in model.named_modules()}

    def enter(module: Any, arguments: Any) -> None:
        running.append(module)

    def leave(module: Any, arguments: Any, output: Any) -> None:
        running.pop()

    def chosen(name: str) -> None:
        if running:
            choosing.add(names[running[-1]])

    hooks = [m.register_forward_pre_hook(enter) for m in names]
    hooks += [m.register_forward_hook(leave, always_call=True) for m in names]
    try:
        with evidence.mode(True), evidence.user(), watching(chosen):
            evidence.target.loss_fn(model, evidence.batches[0])
    finally:
        for hook in hooks:
            hook.remove()
    found: set[str] = set()
    for name in choosing:
        for home in {name, name.rpartition(".")[0]} - {""}:
            inside = model.get_submodule(home)
            lists = [m for m in inside.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict))]
            inner = {id(p) for group in lists for p in group.parameters()}
            found |= {n for n, p in model.named_parameters() if id(p) in inner}
    if "" in choosing or any("." not in name for name in choosing):
        lists = [m for m in model.children() if isinstance(m, (nn.ModuleList, nn.ModuleDict))]
        inner = {id(p) for group in lists if _alike(group) for p in group.parameters()}
        found |= {n for n, p in model.named_parameters() if id(p) in inner and "expert" in n}
    return found


def _alike(group: Any) -> bool:
    shapes = {tuple(tuple(p.shape) for p in child.parameters()) for child in group.children()}
    return len(shapes) == 1


def watching(chosen: Any, shake: bool = False) -> Any:
    """Call `chosen` at every function that picks among scores; `shake` makes the picks random."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            by_dim = name == "max" and (len(args) > 1 or kwargs)
            if name not in CHOOSERS and not by_dim:
                return func(*args, **(kwargs or {}))
            chosen(name)
            scores: Any = args[0] if args else None
            if shake and hasattr(scores, "is_floating_point") and scores.is_floating_point():
                noise = torch.rand_like(scores.detach())
                args = (scores * 0 + noise, *args[1:])
            return func(*args, **(kwargs or {}))

    return Mode()


def _reached_when_shaken(evidence: Evidence, names: list[str]) -> set[str]:
    """Which of these get a gradient on more batches, at the end with random choices."""
    reached: set[str] = set()
    parameters = [evidence.trainable[name] for name in names]
    batches = evidence.first(MORE_BATCHES)
    shaken = itertools.islice(itertools.cycle(batches), SHAKEN)
    for number, batch in enumerate([*batches, *shaken]):
        with evidence.mode(True), evidence.user():
            evidence.torch.manual_seed(number)
            with watching(lambda name: None, shake=number >= len(batches)):
                loss = evidence.target.loss_fn(evidence.target.model, batch)
            found = evidence.torch.autograd.grad(loss, parameters, allow_unused=True)
        reached |= {n for n, g in zip(names, found, strict=True) if g is not None and bool(g.any())}
        if len(reached) == len(names):
            break
    return reached


# The optimizer -----------------------------------------------------------------------------------


def held(evidence: Evidence) -> list[Any]:
    """Every parameter that the optimizer holds, in the order of its groups."""
    return [p for group in evidence.target.optimizer.param_groups for p in group["params"]]


def in_optimizer(evidence: Evidence, name: str) -> bool:
    """Tell whether the optimizer trains a parameter; where there is none, everything is."""
    if evidence.target.optimizer is None:
        return True
    return id(evidence.trainable[name]) in _trained_ids(evidence)


def _trained_ids(evidence: Evidence) -> set[int]:
    """Ids of the model's parameters that the optimizer updates, through a project's shards too."""
    ids = {id(p) for p in held(evidence)}
    runtime = evidence.target.runtime
    if runtime is not None:
        ids |= {id(s.parameter) for s in runtime.shards if id(s.owned) in ids}
    return ids


def check_optimizer_parameters(evidence: Evidence, limit: Any) -> Finding:
    """The optimizer holds each trainable parameter of the model once, and nothing else."""
    target = evidence.target
    unknown = _unregistered(evidence)
    if unknown:
        return failed(
            f"{len(unknown)} tensors in the loss want a gradient and are parameters of nothing "
            f"(first of shape {list(unknown[0].shape)}): layers in a plain list or dict?",
            len(unknown),
            fix_in(type(target.model), "put layers into nn.ModuleList, tensors into nn.Parameter"),
        )
    if target.optimizer is None:
        return skipped("no optimizer was given")
    parameters, own = held(evidence), _trained_ids(evidence)
    twice = [p for p, count in Counter(map(id, parameters)).items() if count > 1]
    if twice:
        names = [n for n, p in target.model.named_parameters() if id(p) in twice] or ["a tensor"]
        return failed(f"{names[0]} is in the optimizer more than once", len(twice))
    missing = [n for n, p in evidence.trainable.items() if id(p) not in own]
    missing = [n for n in missing if not _is_none_in_all(evidence, n)]
    known = _known_ids(evidence)
    foreign = [p for p in parameters if id(p) not in known]
    build = "make the optimizer from model.parameters() after the model has its last form"
    if foreign and len(foreign) == len(parameters):
        return failed(
            f"all {len(foreign)} tensors of the optimizer are of another model (stale): nothing "
            "of this one moves",
            len(foreign),
            optimizer_place(evidence, build),
        )
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        return failed(
            f"{len(missing)} of {len(evidence.trainable)} trainable tensors are not in the "
            f"optimizer: {shown}",
            len(missing),
            optimizer_place(evidence, build),
        )
    if foreign:
        return failed(
            f"{len(foreign)} tensors of the optimizer are not of the model, e.g. of shape "
            f"{list(foreign[0].shape)}",
            len(foreign),
            optimizer_place(evidence, build),
        )
    groups = [g for g in target.optimizer.param_groups if not g["params"]]
    note = f"; {len(groups)} empty groups" if groups else ""
    return passed(f"{len(parameters)} tensors, each once{note}", 0)


def _is_none_in_all(evidence: Evidence, name: str) -> bool:
    return evidence.observed.loss.requires_grad and _is_none(evidence, name)


def _known_ids(evidence: Evidence) -> set[int]:
    target = evidence.target
    known = {id(p) for p in target.model.parameters()}
    if hasattr(target.loss_fn, "parameters"):
        known |= {id(p) for p in target.loss_fn.parameters()}
    if target.runtime is not None:
        known |= {id(s.owned) for s in target.runtime.shards}
    return known | {id(p) for p in graph_leaves(evidence.observed.loss)}


def _unregistered(evidence: Evidence) -> list[Any]:
    """Tensors that the loss would train and that neither model, loss nor optimizer hold."""
    target = evidence.target
    known = {id(p) for p in target.model.parameters()}
    if hasattr(target.loss_fn, "parameters"):
        known |= {id(p) for p in target.loss_fn.parameters()}
    if target.optimizer is not None:
        known |= {id(p) for p in held(evidence)}
    unknown = [t for t in graph_leaves(evidence.observed.loss) if id(t) not in known]
    if not unknown:
        return []
    again = graph_leaves(evidence.observe(evidence.batches[0]).loss)
    lasting = {id(t) for t in again}  # made anew in every call: points to differentiate at
    return [t for t in unknown if id(t) in lasting or isinstance(t, evidence.torch.nn.Parameter)]


def graph_leaves(loss: Any) -> list[Any]:
    """List the tensors at which the gradient of a loss ends."""
    found, seen, waiting = {}, set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        waiting += [following for following, _ in node.next_functions]
    return list(found.values())


def optimizer_place(evidence: Evidence, text: str) -> Any:
    """Name the line that makes the optimizer, where the target's code shows one."""
    import sys

    if evidence.target.runtime is not None:
        return fix_in(sys.modules["curry_train.optim"].build_optimizer, text)
    return evidence.in_builder(text, r"optim\w*\.\w+\(|Adam\w*\(|SGD\(")


def check_parameters_still(evidence: Evidence, limit: float) -> Finding:
    """One optimizer step moves every trained parameter that has a gradient."""
    target = evidence.target
    if target.optimizer is None:
        return skipped("no optimizer was given")
    if not evidence.observed.loss.requires_grad:
        return skipped("the loss has no graph; see no-gradient")
    evidence.needs_finite()
    gradients = evidence.first_gradients[0]
    sizes = {n: rms(g) for n, g in gradients.items() if g is not None and in_optimizer(evidence, n)}
    least = NEGLIGIBLE * max(sizes.values(), default=0.0)
    watched = {n: evidence.trainable[n] for n, size in sizes.items() if size > least}
    if not watched:
        trained = [p for p in evidence.trainable.values() if gradients]
        message = f"none of {len(trained)} trainable tensors is moved by the optimizer"
        return failed(message, 0.0, optimizer_place(evidence, "give it the model's parameters"))
    with kept(target), evidence.user(), _learning_rate(target):
        if all(group["lr"] == 0 for group in target.optimizer.param_groups):
            return failed("the learning rate of every group is 0", 0.0,
                          optimizer_place(evidence, "set a learning rate above 0"))  # fmt: skip
        before = {n: p.detach().clone() for n, p in watched.items()}
        _one_step(evidence)
        still = [n for n, p in watched.items() if bool((p.detach() == before[n]).all())]
    half = [n for n in still if watched[n].element_size() < 4]
    share = len(still) / len(watched)
    if still and (len(half) < len(still) or share > 0.5):
        shown = ", ".join(still[:3]) + (", ..." if len(still) > 3 else "")
        rounded = "; steps below half of their precision round away" if half else ""
        return failed(
            f"{len(still)} of {len(watched)} tensors with a gradient do not move in a step: "
            f"{shown}{rounded}",
            share,
            optimizer_place(evidence, "see that the step is taken on these tensors"),
        )
    note = f"; {len(half)} in half precision whose first step rounds away" if half else ""
    return passed(f"{len(watched) - len(half)} of {len(watched)} tensors moved{note}", share)


@contextlib.contextmanager
def _learning_rate(target: Any) -> Iterator[None]:
    """Give groups that a warm-up keeps at 0 now the rate that it leads to."""
    for group in target.optimizer.param_groups:
        if float(group["lr"]) == 0 and float(group.get("initial_lr", 0)) > 0:
            group["lr"] = group["initial_lr"]
    yield


def rms(tensor: Any) -> float:
    """Root mean square of a tensor of any shape."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _one_step(evidence: Evidence) -> None:
    """Take the step of the real loop, else a plain one."""
    target = evidence.target
    target.model.train()
    if evidence.step is not None:
        drive(evidence, cycled(evidence))
        return

    def closure() -> Any:
        target.optimizer.zero_grad()
        loss = target.loss_fn(target.model, evidence.batches[0])
        loss.backward()
        return loss

    target.optimizer.step(closure)


def check_weight_decay_groups(evidence: Evidence, limit: Any) -> Finding:
    """A note on weight decay of norms, biases and embeddings; fails when only those decay."""
    if evidence.target.optimizer is None:
        return skipped("no optimizer was given")
    decayed = {id(p) for g in evidence.target.optimizer.param_groups
               if g.get("weight_decay", 0) for p in g["params"]}  # fmt: skip
    if not decayed:
        return passed("no weight decay", 0)
    from torch import nn

    embeddings = {id(m.weight) for m in evidence.target.model.modules()
                  if isinstance(m, nn.Embedding)}  # fmt: skip
    named = [n for n, p in evidence.target.model.named_parameters()
             if id(p) in decayed and (p.dim() < 2 or id(p) in embeddings)]  # fmt: skip
    if not named:
        return passed("weight decay on matrices alone", 0)
    mine = {id(p) for p in held(evidence)} - embeddings
    matrices = [p for p in evidence.trainable.values() if p.dim() > 1 and id(p) in mine]
    if matrices and not any(id(p) in decayed for p in matrices):
        return failed(
            f"weight decay shrinks {len(named)} norms, biases or embeddings and no matrix: the "
            "groups are swapped",
            len(named),
            optimizer_place(evidence, "give the weight decay to the group of the matrices"),
        )
    shown = ", ".join(named[:3]) + (", ..." if len(named) > 3 else "")
    return passed(
        f"note: weight decay also shrinks {len(named)} norms, biases or embeddings: {shown}",
        len(named),
    )
