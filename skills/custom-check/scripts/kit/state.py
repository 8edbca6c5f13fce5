"""Put back, bit for bit, whatever a check changes.

Kept: modules with their attributes, hooks and train/eval modes, parameters, buffers,
requires_grad, gradients, optimizer state and groups, the scheduler, generators (python, numpy,
torch CPU, CUDA and MPS, those of a DataLoader), the loader's position, a project's counters and
loss scale. Copies lie in host memory, so that they do not disturb the memory figures of an
accelerator.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .batches import OnDevice

if TYPE_CHECKING:
    from .target import Target


@contextlib.contextmanager
def preserved(target: Target) -> Iterator[Target]:
    """Run a block on a target and restore everything after it, also when it raises."""
    undo = [
        _keep_modules(target.model),
        *([_keep_modules(target.loss_fn)] if _is_module(target.loss_fn) else []),
        *([_keep_optimizer(target.optimizer)] if target.optimizer is not None else []),
        *([_keep_counters(target.runtime)] if target.runtime is not None else []),
        *([_keep_scheduler(target.scheduler)] if target.scheduler is not None else []),
        _keep_loader(target),
        _keep_generators(),
    ]
    try:
        yield target
    finally:
        for restore in undo:
            restore()


@contextlib.contextmanager
def undisturbed(target: Target) -> Iterator[Target]:
    """Run a forward pass and put back what one can change: buffers, modes and generators.

    Far cheaper than `preserved`, and nothing for a block that steps or registers anything.
    """
    modes = [(module, module.training) for module in target.model.modules()]
    buffers = [_keep_tensor(buffer) for buffer in target.model.buffers()]
    generators = _keep_generators()
    try:
        yield target
    finally:
        for module, mode in modes:
            module.training = mode
        for restore in (*buffers, generators):
            restore()


def _is_module(value: object) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _keep_tensor(tensor: Any) -> Callable[[], None]:
    """Keep the object, where its data lies, its values, requires_grad and gradient."""
    import torch

    place = tensor.data
    values = None if place.is_meta else _written_part(place).to("cpu", copy=True)
    wants_grad, grad = tensor.requires_grad, tensor.grad if tensor.is_leaf else None
    restore_grad = _keep_tensor(grad) if grad is not None else None

    def restore() -> None:
        with torch.no_grad():
            tensor.data = place
            if values is not None:
                _written_part(place).copy_(values)
        if restore_grad is not None:
            restore_grad()
        if tensor.is_leaf:
            tensor.requires_grad_(wants_grad)
            tensor.grad = grad

    return restore


def _written_part(tensor: Any) -> Any:
    """Take one element of every expanded dim: copy_ refuses tensors that overlap themselves."""
    import torch

    if tensor.layout != torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _keep_modules(root: Any) -> Callable[[], None]:
    """Keep every attribute of every module, with the dicts, sets, lists and tensors among them."""
    import torch

    modules = [(module, module.__class__, dict(module.__dict__)) for module in root.modules()]
    values = [value for _, _, attributes in modules for value in attributes.values()]
    inner = [(value, value.copy()) for value in values if isinstance(value, (dict, set))]
    lists = [(value, value.copy()) for value in values if type(value) is list]
    plain = [v for v in values if isinstance(v, torch.Tensor) and not v.is_inference()]
    tensors = {id(t): t for t in [*root.parameters(), *root.buffers(), *plain]}
    restore_tensors = [_keep_tensor(tensor) for tensor in tensors.values()]

    def restore() -> None:
        for module, kind, attributes in modules:
            module.__class__ = kind  # parametrizations change it
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for live, kept in inner:
            live.clear()
            live.update(kept)
        for live, kept in lists:
            live[:] = kept
        for restore_tensor in restore_tensors:
            restore_tensor()

    return restore


def _keep_tree(value: Any) -> Callable[[], Any]:
    """Keep nested dicts, lists, tuples and tensors; calling gives back the same tensor objects."""
    import torch

    if isinstance(value, torch.Tensor):
        restore_tensor = _keep_tensor(value)

        def tensor_again() -> Any:
            restore_tensor()
            return value

        return tensor_again
    if type(value) is dict:
        kept = {key: _keep_tree(item) for key, item in value.items()}
        return lambda: {key: again() for key, again in kept.items()}
    if type(value) in (list, tuple):
        items, kind = [_keep_tree(item) for item in value], type(value)
        return lambda: kind(again() for again in items)
    frozen = copy.deepcopy(value)
    return lambda: copy.deepcopy(frozen)


def _keep_optimizer(optimizer: Any) -> Callable[[], None]:
    # load_state_dict would cast the moments to the parameters' dtype, which is not bit-exact.
    groups = list(optimizer.param_groups)
    members = [list(group["params"]) for group in groups]
    options = [_keep_tree({k: v for k, v in group.items() if k != "params"}) for group in groups]
    states = {parameter: _keep_tree(dict(kept)) for parameter, kept in optimizer.state.items()}

    def restore() -> None:
        optimizer.param_groups[:] = groups
        for group, parameters, again in zip(groups, members, options, strict=True):
            group.clear()
            group.update(params=parameters, **again())
        optimizer.state.clear()
        optimizer.state.update({parameter: again() for parameter, again in states.items()})

    return restore


def _keep_scheduler(scheduler: Any) -> Callable[[], None]:
    """Keep what a scheduler counts; the rates are the optimizer's."""
    if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
        return lambda: None
    kept = copy.deepcopy(scheduler.state_dict())
    return lambda: scheduler.load_state_dict(copy.deepcopy(kept))


def _keep_counters(runtime: Any) -> Callable[[], None]:
    """Keep the finished steps and tokens of a project and its loss scale."""
    owners = [runtime, *([runtime.loss_scale] if hasattr(runtime, "loss_scale") else [])]
    numbers = [
        {key: value for key, value in vars(owner).items() if isinstance(value, int | float)}
        for owner in owners
    ]

    def restore() -> None:
        for owner, kept in zip(owners, numbers, strict=True):
            vars(owner).update(kept)

    return restore


def _keep_loader(target: Target) -> Callable[[], None]:
    """Keep the one integer of a project's loader, or what a DataLoader's order comes from."""
    import torch

    batches = target.batches.inner if isinstance(target.batches, OnDevice) else target.batches
    undo: list[Callable[[], Any]] = []
    if hasattr(batches, "samples_consumed"):
        position = batches.samples_consumed
        undo.append(lambda: setattr(batches, "samples_consumed", position))
    elif hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict"):
        kept = copy.deepcopy(batches.state_dict())
        undo.append(lambda: batches.load_state_dict(kept))
    batch_sampler = getattr(batches, "batch_sampler", None)
    owners = [batches, getattr(batches, "sampler", None), batch_sampler]
    owners.append(getattr(batch_sampler, "sampler", None))
    generators = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners)}
    for generator in generators.values():
        if isinstance(generator, torch.Generator):
            undo.append(_keep_generator(generator))

    def restore() -> None:
        for restore_part in undo:
            restore_part()

    return restore


def _keep_generator(generator: Any) -> Callable[[], Any]:
    state = generator.get_state()
    return lambda: generator.set_state(state)


def _keep_generators() -> Callable[[], None]:
    import torch

    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    mps_state = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def restore() -> None:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)

    return restore
