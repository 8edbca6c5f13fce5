"""A few steps of the user's own optimizer on one batch: do the parameters move at all?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kit.fix import fix_in
from kit.state import preserved
from kit.target import Target

STEPS = 10
RISE = 1.05
"""A loss that rose at every step and ended this many times as high goes the wrong way."""


@dataclass
class RealSteps:
    """What the steps did."""

    by: str
    """Who took them, in words."""
    moved: int
    """Trainable parameters that changed."""
    trained: int
    held: int
    """Trainable parameters of the model that the optimizer holds."""
    losses: list[float]
    rates: list[float]
    """Of every group when it stepped last; before, where nothing stepped."""
    stepped: bool
    """Whether the optimizer's step was called; False as well where that cannot be seen."""
    place: dict[str, Any] | None = None


def take(target: Target, copy: Callable[[], Any]) -> RealSteps | None:
    """Take steps as the user does and put everything back; None when there is no optimizer.

    A project takes one of its train_step on its own data; other code its train_step, or
    zero_grad, backward and step of its optimizer, on the fixed batch.
    """
    if target.optimizer is None:
        return None
    from one_batch_training import quiet

    with preserved(target):
        quiet(target)
        model = [p for p in target.model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in model]
        losses: list[float] = []
        rates = _wake(target.optimizer)
        with _watched(target.optimizer) as used:
            if target.kind == "project":
                by = "curry_train.step.train_step"
                _project_step(target)
            else:
                by = "train_step" if target.train_step else "the optimizer"
                losses = _foreign_steps(target, copy)
        groups = target.optimizer.param_groups
        held = {id(p) for group in groups for p in group["params"]}
        moved = sum(not bool((a == p).all()) for a, p in zip(before, model, strict=True))
        return RealSteps(
            by,
            moved,
            len(model),
            sum(id(p) in held or _shares(p, groups) for p in model),
            losses,
            used[-1] if used else rates,
            bool(used),
            fix_in(target.train_step, "step the optimizer of this model", r"\.step\(")
            if target.train_step
            else None,
        )


@contextlib.contextmanager
def _watched(optimizer: Any) -> Iterator[list[list[float]]]:
    """Give the rates of every group at each step of an optimizer, as the steps come."""
    used: list[list[float]] = []

    def note(*_: Any) -> None:
        used.append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])

    add = getattr(optimizer, "register_step_pre_hook", None)
    hook = None if add is None else add(note)
    try:
        yield used
    finally:
        if hook is not None:
            hook.remove()


def _shares(parameter: Any, groups: Any) -> bool:
    place = parameter.data_ptr()
    return any(p.data_ptr() == place for group in groups for p in group["params"])


def _wake(optimizer: Any) -> list[float]:
    """Give a group that a warm-up holds at 0 the rate that it will have; returns all rates."""
    for group in optimizer.param_groups:
        if group.get("lr", 0.0) == 0:
            group["lr"] = group.get("initial_lr", group.get("lr", 0.0))
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def _project_step(target: Target) -> None:
    from curry_train.step import train_step

    train_step(target.runtime)


def _foreign_steps(target: Target, copy: Callable[[], Any]) -> list[float]:
    import torch

    losses = []
    for _ in range(STEPS):
        with torch.no_grad():
            losses.append(float(target.loss_fn(target.model, copy())))
        if target.train_step is not None:
            target.train_step(target.model, copy(), target.optimizer)
            continue
        target.optimizer.zero_grad()
        loss = target.loss_fn(target.model, copy())
        if not loss.requires_grad:
            break
        loss.backward()
        target.optimizer.step()
    with torch.no_grad():
        losses.append(float(target.loss_fn(target.model, copy())))
    return losses


def rises(losses: list[float]) -> bool:
    """Tell whether a loss rose at every step, and by more than noise."""
    upward = all(b > a for a, b in itertools.pairwise(losses))
    return len(losses) > 5 and upward and losses[-1] > RISE * abs(losses[0])
