"""One micro-batch under one setting of recomputation: bytes, time, gradients, side effects."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kit.memory import metered
from kit.target import Target

FLOOR = 1e-6
"""A tensor of rounding noise is held against this share of the norm of all gradients."""


@dataclass
class Setting:
    """A way to run the model, and what was measured of it."""

    name: str
    enter: Callable[[], Any]
    """Returns the context in which the model runs like that."""
    asked: str | int = ""
    kept: int = 0
    peak: int = 0
    times: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    effects: dict[str, Any] = field(default_factory=dict)
    drew: set[str] = field(default_factory=set)


def generators() -> dict[str, Any]:
    """Return the state of every generator that a model may draw from."""
    torch = sys.modules["torch"]
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def rewind(states: dict[str, Any]) -> None:
    """Put every generator back."""
    torch = sys.modules["torch"]
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])


def moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Name the generators that were drawn from."""
    return {name for name in before if repr_state(before[name]) != repr_state(after[name])}


def repr_state(state: Any) -> Any:
    if isinstance(state, (list, tuple)):
        return [repr_state(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state


def run_once(target: Target, batch: Any, setting: Setting, states: dict[str, Any]) -> None:
    """Take gradients, side effects and the generators that the forward pass drew from."""
    rewind(states)
    with setting.enter():
        loss = target.loss_fn(target.model, batch)
        setting.drew = moved(states, generators())
        loss.backward()
    setting.gradients = {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in target.model.named_parameters()
        if p.requires_grad
    }
    setting.effects = module_state(target.model)


def weigh(target: Target, batch: Any, setting: Setting) -> None:
    """Measure what backward needs, with gradients that stand already, as in an accumulated step."""
    with metered(target.device) as meter, setting.enter():
        loss = target.loss_fn(target.model, batch)
        setting.kept = meter.live
        loss.backward()
        setting.peak = meter.peak


def time_once(target: Target, batch: Any, setting: Setting) -> None:
    """Time forward and backward: CPU seconds on a CPU, else wall seconds."""
    torch = sys.modules["torch"]
    on_gpu = target.device.type == "cuda"
    clock = time.process_time if target.device.type == "cpu" else time.perf_counter
    with setting.enter():
        if on_gpu:
            torch.cuda.synchronize(target.device)
        start = clock()
        target.loss_fn(target.model, batch).backward()
        if on_gpu:
            torch.cuda.synchronize(target.device)
        setting.times.append(clock() - start)


def module_state(model: Any) -> dict[str, Any]:
    """Return buffers, and numbers and tensors that modules keep as attributes, by name."""
    torch = sys.modules["torch"]
    state = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                state[f"{path}.{key}".lstrip(".")] = value.detach().clone()
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                state[f"{path}.{key}".lstrip(".")] = value
    return state


def changed(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Name what two runs left behind differently."""
    torch = sys.modules["torch"]

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.shape == b.shape and bool(torch.equal(a, b))
        return type(a) is type(b) and a == b

    return [name for name in wanted if name not in found or not same(found[name], wanted[name])]


def gradient_error(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, str]:
    """Return the worst error of any gradient and its name; infinity where one is missing."""
    torch = sys.modules["torch"]
    norms = [gradient.double().norm() for gradient in wanted.values() if gradient is not None]
    floor = max(FLOOR * float(torch.stack(norms).norm()), 1e-300) if norms else 1.0
    worst, where = 0.0, ""
    for name, reference in wanted.items():
        gradient = found.get(name)
        if reference is None and gradient is None:
            continue
        if reference is None or gradient is None:
            return float("inf"), name
        if not reference.numel():
            continue
        gap = (gradient.double() - reference.double()).abs().max()
        error = float(gap / reference.double().abs().max().clamp(min=floor))
        if not error <= worst:
            worst, where = error, name
    return worst, where


class Calls:
    """How often the target asked for a checkpoint."""

    count = 0


@contextlib.contextmanager
def checkpoints(mode: str, calls: Calls) -> Iterator[None]:
    """Let torch.utils.checkpoint work (on), do nothing (off), or always keep generators (keep).

    Both forms of checkpoint look these names up when they are called, however they were imported.
    """
    module = sys.modules["torch"].utils.checkpoint
    generator, function = module._checkpoint_without_reentrant_generator, module.CheckpointFunction

    def plain(fn: Any, preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        if mode == "off":
            return iter((None,))
        return generator(fn, preserve or mode == "keep", *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(run: Any, preserve: bool, *args: Any) -> Any:
            calls.count += 1
            if mode == "off":
                return run(*args)
            return function.apply(run, preserve or mode == "keep", *args)

    module._checkpoint_without_reentrant_generator = plain
    module.CheckpointFunction = Reentrant
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        module.CheckpointFunction = function
