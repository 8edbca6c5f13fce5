"""What a check acts on: a project through its seam, or the parts FILE.py:FUNCTION returns.

Both become one small object, so that a check is written once.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .batches import OnDevice, to_device
from .errors import UsageError
from .state import preserved
from .user_code import load_function, parse_spec, put_first_on_path, user_code

ALLOWED = "it must return (model, batches, loss_fn) or (model, batches, loss_fn, optimizer)"
PROJECT_MODULES = ("torch", "omegaconf", "hydra")
FOREIGN_MODULES = ("torch",)


@dataclass
class Target:
    """The same few things, whoever's code they come from."""

    model: Any
    """The torch.nn.Module."""
    batches: Any
    """Iterable of batches; every iter() starts anew (a project's goes on at samples_consumed)."""
    loss_fn: Callable[[Any, Any], Any]
    """loss_fn(model, batch) -> scalar tensor."""
    optimizer: Any
    """torch optimizer, or None when the function returned none."""
    device: Any
    """torch.device of the parameters."""
    config_hash: str
    """Which configuration was checked: the project's own hash, or that of the target file."""
    kind: str
    """project or foreign."""
    runtime: Any = None
    """The project's Runtime; None for foreign code."""


def is_project(folder: Path) -> bool:
    """Tell whether a folder has the seam."""
    return (folder / "curry_train" / "runtime.py").is_file()


def check_request(project: Path, spec: str | None, overrides: Sequence[str], device: str) -> None:
    """Find what is wrong with the flags before anything is imported."""
    kind = device.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda", "mps"):
        raise UsageError(f"--device {device}", "it takes auto, cpu, cuda, cuda:N or mps")
    if spec is not None:
        parse_spec(spec, flag="--target")
        if overrides:
            raise UsageError(
                f"--set {' '.join(overrides)} with --target",
                "overrides belong to a project's configuration",
                "write the value into the target function",
            )
        return
    if not is_project(project):
        raise UsageError(
            f"{project} is no curry-train project (it has no curry_train/runtime.py)",
            "a check takes a project made by init, or any code through --target FILE.py:FUNCTION",
            "set --project DIR or --target",
        )
    if ":" in device:
        raise UsageError(
            f"--device {device} on a project",
            "a project takes auto, cpu, cuda or mps",
            "choose one GPU by CUDA_VISIBLE_DEVICES",
        )
    for override in overrides:
        if not override.partition("=")[1] or override.startswith(("=", "-")):
            raise UsageError(
                f"--set {override}", "it takes KEY=VALUE ...", "e.g. --set optim.lr=1e-3"
            )


def load_target(
    project: Path, spec: str | None, *, overrides: Sequence[str], seed: int | None, device: str
) -> Target:
    """Build the target that the flags name."""
    if spec is None:
        return _load_project(project, overrides, seed, device)
    return _load_foreign(project, spec, seed, device)


def _load_project(project: Path, overrides: Sequence[str], seed: int | None, device: str) -> Target:
    put_first_on_path(project)
    asked = list(overrides)
    asked += [] if seed is None else [f"seed={seed}"]
    asked += [] if device == "auto" else [f"accelerator={device}"]
    with user_code("importing curry_train of the project"):
        from curry_train.config import config_hash
        from curry_train.runtime import build_runtime
    home = Path(inspect.getfile(build_runtime)).resolve().parents[1]
    if home != project.resolve():
        raise UsageError(
            f"curry_train was imported from {home}, not from {project}",
            fix="remove that folder from PYTHONPATH or uninstall that curry_train",
        )
    with user_code("build_runtime"):
        runtime = build_runtime(asked, project=project)
        digest = config_hash(runtime.config)
    return Target(
        model=runtime.model,
        batches=runtime.batches,
        loss_fn=runtime.loss_fn,
        optimizer=runtime.optimizer,
        device=runtime.device,
        config_hash=digest,
        kind="project",
        runtime=runtime,
    )


def _load_foreign(project: Path, spec: str, seed: int | None, device: str) -> Target:
    path, name = parse_spec(spec, flag="--target")
    seed = 0 if seed is None else seed
    source = hashlib.sha256(path.read_bytes()).hexdigest()
    identity = json.dumps({"source": source, "function": name, "seed": seed}, sort_keys=True)
    what = f"{path.name}:{name}"
    function = load_function(spec, flag="--target", project=project)
    _refuse_required_arguments(function, what)
    with user_code("seeding"):
        seed_everything(seed)
    with user_code(what, ALLOWED):
        parts = function()
    target = Target(
        *_four_parts(parts, what),
        device=None,
        config_hash=hashlib.sha256(identity.encode()).hexdigest(),
        kind="foreign",
    )
    _check_parts(target, what)
    _place_model(target, device)
    with preserved(target):
        batch = _first_batch(target.batches, what)
        if device != "auto":
            batch = to_device(batch, target.device)
        _probe_loss(target, batch, what)
    if device != "auto":
        target.batches = OnDevice(target.batches, target.device)
    return target


def seed_everything(seed: int) -> None:
    """Seed python, numpy (when there is one) and every generator of torch."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


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


def describe(value: Any) -> str:
    """Say in a few words what came back."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(part).__name__ for part in value)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"


def _four_parts(parts: object, what: str) -> tuple[Any, Any, Any, Any]:
    if not isinstance(parts, (tuple, list)) or len(parts) not in (3, 4):
        shown = describe(tuple(parts)) if isinstance(parts, list) else describe(parts)
        raise UsageError(f"{what} returned {shown}", ALLOWED)
    model, batches, loss_fn = parts[:3]
    return model, batches, loss_fn, parts[3] if len(parts) == 4 else None


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

    first = next(target.model.parameters(), None)
    target.device = torch.device("cpu") if first is None else first.device
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


def _probe_loss(target: Target, batch: Any, what: str) -> None:
    """Call loss_fn once, so that a wrong one is named before a check leans on it."""
    import torch

    allowed = "it must return a scalar floating-point tensor"
    with user_code(f"loss_fn of {what}", allowed):
        loss = target.loss_fn(target.model, batch)
    shown = f"loss_fn of {what} returned {describe(loss)}"
    if not isinstance(loss, torch.Tensor):
        raise UsageError(shown, allowed)
    if loss.numel() != 1:
        raise UsageError(shown, allowed, "take the mean over non-ignored targets")
    if not loss.is_floating_point():
        raise UsageError(shown, allowed)
