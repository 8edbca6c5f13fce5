"""Build a target from FILE.py:FUNCTION, and refuse what no check could use."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .adapters import describe, parts_of
from .batches import OnDevice, device_of, to_device
from .errors import UsageError
from .state import preserved
from .target import Target, seed_everything
from .user_code import load_function, parse_spec, user_code


def load_foreign(
    project: Path, spec: str, *, seed: int | None, device: str, probe: bool = True
) -> Target:
    """Call the function and turn what it returns into a target; UsageError says what is wrong."""
    path, name = parse_spec(spec, flag="--target")
    seed = 0 if seed is None else seed
    source = hashlib.sha256(path.read_bytes()).hexdigest()
    identity = json.dumps({"source": source, "function": name, "seed": seed}, sort_keys=True)
    what = f"{path.name}:{name}"
    with user_code("seeding"):
        seed_everything(seed)  # a model at the top of the file is drawn by it
    function = load_function(spec, flag="--target", project=project)
    target = _call(function, what, seed, device)
    target.config_hash = hashlib.sha256(identity.encode()).hexdigest()

    def build(other: int) -> Target:
        found = _another(target, function, project, spec, other, device)
        return _on_device(found, device)

    target.build = build
    with preserved(target):
        batch = _first_batch(target.batches, what)
        if device != "auto":
            batch = to_device(batch, target.device)
        _probe_loss(target, batch, what, probe)
    return _on_device(target, device)


def _on_device(target: Target, device: str) -> Target:
    if device != "auto":
        target.batches = OnDevice(target.batches, target.device)
    return target


def _call(function: Callable[[], Any], what: str, seed: int, device: str) -> Target:
    """Seed, call, and look at what came back."""
    _refuse_required_arguments(function, what)
    with user_code("seeding"):
        seed_everything(seed)
    with user_code(what):
        returned = function()
    found = parts_of(returned, what, seed)
    target = Target(device=None, config_hash="", kind="foreign", **vars(found))
    _check_parts(target, what)
    _check_optional_parts(target, what)
    if type(target.scheduler).__name__ == "ReduceLROnPlateau":
        target.scheduler = None  # its values follow a metric, not the step
    _place_model(target, device)
    return target


def _another(
    first: Target,
    function: Callable[[], Any],
    project: Path,
    spec: str,
    seed: int,
    device: str,
) -> Target:
    """Build once more; where the function gives out the same parameters, run its file anew."""
    path, name = parse_spec(spec, flag="--target")
    what = f"{path.name}:{name}"
    own = {id(parameter) for parameter in first.model.parameters() if parameter.requires_grad}
    target = _call(function, what, seed, device)
    if not own.isdisjoint(map(id, target.model.parameters())):
        with user_code("seeding"):
            seed_everything(seed)
        function = load_function(spec, flag="--target", project=project, anew=True)
        target = _call(function, what, seed, device)
    if not own.isdisjoint(map(id, target.model.parameters())):
        raise UsageError(
            f"{what} returns the same model at every call",
            "a check needs it with other weights",
            "make the model inside the function",
        )
    target.config_hash, target.build = first.config_hash, first.build
    return target


def _refuse_required_arguments(function: Callable[..., Any], what: str) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(
            f"{what} needs arguments ({', '.join(needed)})",
            "it is called without any",
            "give them defaults",
        )


def _check_parts(target: Target, what: str) -> None:
    """Refuse parts that no check could use; names the function, what came back, what may."""
    import torch

    if not isinstance(target.model, torch.nn.Module):
        raise UsageError(
            f"{what} returned {describe(target.model)} as model", "it must be a torch.nn.Module"
        )
    if any(torch.nn.parameter.is_lazy(p) for p in target.model.parameters()):
        raise UsageError(
            f"{what} returned a model with lazy parameters",
            "their shapes must be known",
            "run one batch through the model before returning it",
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in target.model.modules()):
        raise UsageError(
            f"{what} returned a model with TorchScript in it",
            "a check must be able to put it back",
            "return the model from before torch.jit",
        )
    if any(t.is_inference() for t in [*target.model.parameters(), *target.model.buffers()]):
        raise UsageError(
            f"{what} returned a model made under torch.inference_mode",
            "a check must be able to train it and to put it back",
            "make the model outside of it",
        )
    if not callable(target.loss_fn):
        raise UsageError(
            f"{what} returned {describe(target.loss_fn)} as loss_fn",
            "it must be a function of (model, batch)",
        )
    optimizer = target.optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{what} returned {describe(optimizer)} as optimizer",
            "it must be a torch.optim.Optimizer, or be left out",
        )


def _check_optional_parts(target: Target, what: str) -> None:
    for name in ("train_step", "evaluate"):
        value = getattr(target, name)
        if value is not None and not callable(value):
            raise UsageError(
                f"{what} returned {describe(value)} as {name}", "it must be a function, or left out"
            )
    if target.scheduler is not None and not callable(getattr(target.scheduler, "step", None)):
        raise UsageError(
            f"{what} returned {describe(target.scheduler)} as scheduler",
            "it must have step() as those of torch.optim.lr_scheduler, or be left out",
        )
    steps = target.total_steps
    if steps is not None and (type(steps) is not int or steps < 1):
        raise UsageError(
            f"{what} returned total_steps {steps!r}", "it must be a whole number, 1 or more"
        )
    data = target.data
    right = isinstance(data, (tuple, list)) and len(data) == 3 and callable(data[2])
    if data is not None and not right:
        raise UsageError(
            f"{what} returned {describe(data)} as data",
            "it must be (inputs, labels, transform), transform(inputs, labels) -> list of batches",
        )


def _first_batch(batches: Any, what: str) -> Any:
    """Take the first batch; refuse what is empty, one batch, or can be read once only."""
    import torch

    allowed = "it must be a list, a DataLoader or another iterable that starts anew at every iter()"
    shown = f"{what} returned {describe(batches)} as batches"
    if isinstance(batches, (str, bytes, Mapping, torch.Tensor)):
        raise UsageError(f"{shown}, which is one batch at most", allowed, "wrap it: [batch]")
    with user_code(f"iter(batches) of {what}", allowed):
        try:
            iterator = iter(batches)
        except TypeError:
            raise UsageError(shown, allowed) from None
        if iterator is batches:
            raise UsageError(
                f"{shown}, which can be read once only",
                allowed,
                "return list(...) or an object whose __iter__ makes the generator",
            )
        batch = next(iterator, iterator)
    if batch is iterator:
        raise UsageError(f"{what} returned empty batches", "there must be at least one")
    return batch


def _place_model(target: Target, device: str) -> None:
    """Leave the model where the function put it (auto), or move it."""
    import torch

    target.device = device_of(target.model)
    if device == "auto":
        return
    wanted = torch.device(device)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(wanted.type, True):
        raise UsageError(f"--device {device}: this torch sees none", fix="set --device cpu")
    target.device = wanted
    with user_code(f"moving the model to {device}"):
        target.model.to(wanted)
        if isinstance(target.loss_fn, torch.nn.Module):
            target.loss_fn.to(wanted)


def _probe_loss(target: Target, batch: Any, what: str, strict: bool) -> None:
    """Call loss_fn once, so that a wrong one is named before a check leans on it.

    Otherwise than strict its exceptions pass, and a GPU, which a wrong index would leave unusable
    for good, is not tried.
    """
    import torch

    allowed = "it must return a scalar floating-point tensor"
    if not strict and target.device.type != "cpu":
        return
    try:
        with user_code(f"loss_fn of {what}", allowed):
            loss = target.loss_fn(target.model, batch)
    except UsageError as error:
        if strict or error.__cause__ is None:
            raise
        return
    shown = f"loss_fn of {what} returned {describe(loss)}"
    if not isinstance(loss, torch.Tensor):
        raise UsageError(shown, allowed)
    if loss.numel() != 1:
        raise UsageError(shown, allowed, "take the mean over non-ignored targets")
    if not loss.is_floating_point():
        raise UsageError(shown, allowed)
