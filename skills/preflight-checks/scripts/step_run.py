"""Drive the real loop for a step or two and note what happens at the optimizer."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from evidence import SEED, CannotJudge, Evidence, dense

from kit.batch_tree import leaves
from kit.state import preserved
from kit.target import Target, seed_everything

MOST_CALLS = 16


@dataclass
class Pass:
    """What the loop did up to an optimizer step."""

    gradients: list[Any] = field(default_factory=list)
    """Of the optimizer's parameters, as the last step found them."""
    steps: int = 0
    calls: int = 0
    forwards: int = 0
    batches: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """First sizes of the tensors that each forward pass got."""
    modes: list[bool] = field(default_factory=list)
    """training of the model, at each of its forward passes."""
    returned: Any = None
    ticks: int = 0
    """Steps of the scheduler."""
    ticked_first: bool = False
    """The scheduler had stepped before the first step of the optimizer."""


@contextlib.contextmanager
def kept(target: Target) -> Iterator[None]:
    """As kit's preserved, the scheduler too."""
    scheduler = target.scheduler
    state = copy.deepcopy(scheduler.state_dict()) if hasattr(scheduler, "state_dict") else None
    try:
        with preserved(target):
            yield
    finally:
        if state is not None:
            scheduler.load_state_dict(state)


def drive(evidence: Evidence, batches: Iterator[Any], steps: int = 1) -> Pass:
    """Call the loop's step until the optimizer has stepped; nothing is put back."""
    target, seen = evidence.target, Pass()
    step = evidence.step
    if step is None or target.optimizer is None:
        raise CannotJudge("no training step to look at: return it as train_step")
    parameters = [p for group in target.optimizer.param_groups for p in group["params"]]
    members = getattr(target.optimizer, "members", [target.optimizer])
    taken: dict[Any, int] = {}
    gradients: dict[Any, Any] = {}

    def look(optimizer: Any, *_: Any) -> None:
        taken[optimizer] = taken.get(optimizer, 0) + 1
        seen.steps = max(taken.values())
        if seen.steps == 1 and getattr(target.scheduler, "last_epoch", 0) > before:
            seen.ticked_first = True
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            grad = parameter.grad
            gradients[parameter] = None if grad is None else dense(grad).detach().clone()
        seen.gradients = [gradients.get(p) for p in parameters]

    def enter(module: Any, arguments: Any, named: Any) -> None:
        seen.forwards += 1
        seen.modes.append(module.training)
        seen.sizes += [t.shape[0] for _, t in leaves([arguments, named]) if t.dim()]

    before = getattr(target.scheduler, "last_epoch", 0)
    hooks = [o.register_step_pre_hook(look) for o in dict.fromkeys([target.optimizer, *members])]
    hooks.append(target.model.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        with evidence.user(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while seen.steps < steps and seen.calls < MOST_CALLS:
                batch = next(batches)
                seen.batches.append(batch)
                seen.returned = step(batch)
                seen.calls += 1
    finally:
        for hook in hooks:
            hook.remove()
    seen.ticks = getattr(target.scheduler, "last_epoch", 0) - before
    if seen.steps < steps:
        raise CannotJudge(f"the training step took no optimizer step in {seen.calls} calls")
    return seen


def cycled(evidence: Evidence) -> Iterator[Any]:
    """The first batches over and over."""
    return itertools.cycle(evidence.batches)


def forget(target: Target) -> None:
    """Drop every gradient."""
    for parameter in target.model.parameters():
        parameter.grad = None
    if target.optimizer is not None:
        for group in target.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def flat(gradients: list[Any], like: list[Any] | None = None) -> Any:
    """One float64 vector of gradients, zeros for those that are absent."""
    torch = sys.modules["torch"]
    parts = []
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            parts.append(gradient.double().flatten().cpu())
        elif like is not None and like[number] is not None:
            parts.append(torch.zeros(like[number].numel(), dtype=torch.float64))
    return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64)


def gap(found: list[Any], wanted: list[Any]) -> float:
    """Size of the difference over the size of what was wanted."""
    a, b = flat(found, wanted), flat(wanted, found)
    if a.shape != b.shape:
        return float("inf")
    size = float(b.norm())
    return float((a - b).norm()) / size if size else float(bool(a.norm() > 0))


def losses(target: Target, batches: list[Any], steps: int, seed: int = SEED) -> list[float]:
    """Train a few steps in the plain way and return the loss before each."""
    seed_everything(seed)
    if target.runtime is not None:
        step = importlib.import_module("curry_train.step").train_step
        return [float(step(target.runtime).loss) for _ in range(steps)]
    target.model.train()
    found = []
    for batch in itertools.islice(itertools.cycle(batches), steps):
        found.append(plain_step(target, batch))
    return found


def plain_step(target: Target, batch: Any) -> float:
    """Train on a batch in the plain way and return the loss before; LBFGS asks several times."""
    told: list[float] = []

    def closure() -> Any:
        if target.optimizer is not None:
            target.optimizer.zero_grad()
        loss = target.loss_fn(target.model, batch)
        told.append(float(loss.detach()))
        if target.optimizer is not None and loss.requires_grad:
            loss.backward()
        return loss

    if target.optimizer is None or type(target.optimizer).__name__ != "LBFGS":
        loss = closure()
        if target.optimizer is not None and loss.requires_grad:
            target.optimizer.step()
    else:
        target.optimizer.step(closure)
    return told[0]


@contextlib.contextmanager
def unclipped() -> Iterator[None]:
    """Let torch's clipping leave the gradients as they are; it still tells their norm."""
    module = importlib.import_module("torch.nn.utils.clip_grad")
    name = "_clip_grads_with_norm_"
    plain = getattr(module, name, None)
    if plain is None:
        yield
        return
    setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(module, name, plain)
