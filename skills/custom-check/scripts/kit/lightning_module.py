"""A LightningModule with its dataloader as a target, without Lightning's Trainer.

The loss is what training_step returns (automatic optimization) or the sum of what it gives to
backward (manual optimization). Known by its methods; Lightning is not imported.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .batches import device_of, to_device
from .errors import UsageError
from .joined_optimizer import JoinedOptimizer
from .lightning_trainer import StandIn, attached

FORMS = (
    "configure_optimizers must return an optimizer, a list of them, (optimizers, schedulers), "
    '{"optimizer": ..., "lr_scheduler": ...} or a list of such dicts'
)


def is_module(value: Any) -> bool:
    """Tell whether a value has what a LightningModule has."""
    return all(callable(getattr(value, m, None)) for m in ("training_step", "configure_optimizers"))


def parts(found: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Complete the parts of a target: loss_fn, and what the function did not return itself."""
    module = found["model"]
    stage = _data_stage(found["batches"])
    batches = found["batches"] if stage is None else stage.train_dataloader()
    trainer = StandIn(module, batches, found.get("total_steps"), stage)
    with attached(module, trainer):
        _set_up(module)
        optimizers, schedulers = _optimizers_of(module.configure_optimizers(), what)
    trainer.optimizers, trainer.schedulers = optimizers, schedulers
    own = {
        "optimizer": optimizers[0] if len(optimizers) == 1 else None,
        "scheduler": schedulers[0] if schedulers else None,
        "total_steps": trainer.steps_asked,
        "train_step": _ManualStep(trainer) if _is_manual(module) else _AutomaticStep(trainer),
        "evaluate": _Evaluate(trainer) if _overrides(module, "validation_step") else None,
    }
    if len(optimizers) > 1 and _disjoint(optimizers):
        own["optimizer"] = JoinedOptimizer(optimizers)
    elif len(optimizers) > 1:
        own["train_step"] = None  # two states for one parameter could not be put back
    given = {key: value for key, value in found.items() if value is not None}
    return {**own, **given, "batches": batches, "loss_fn": _Loss(trainer)}


def _data_stage(batches: Any) -> Any:
    """Take a LightningDataModule in place of the dataloader; it is set up as its Trainer would."""
    if not callable(getattr(batches, "train_dataloader", None)):
        return None
    if callable(getattr(batches, "setup", None)):
        batches.setup("fit")
    return batches


def _set_up(module: Any) -> None:
    """Call the hooks that may make layers, in Lightning's order."""
    if callable(getattr(module, "setup", None)):
        module.setup("fit")
    if callable(getattr(module, "configure_model", None)):
        module.configure_model()


def _is_manual(module: Any) -> bool:
    return not getattr(module, "automatic_optimization", True)


def _overrides(module: Any, name: str) -> bool:
    """Tell whether the user's class brings a hook that is not Lightning's own empty one."""
    method = getattr(type(module), name, None)
    libraries = ("pytorch_lightning.", "lightning.")
    return callable(method) and not method.__module__.startswith(libraries)


def _optimizers_of(returned: Any, what: str) -> tuple[list[Any], list[Any]]:
    """Take apart every form that configure_optimizers may return."""
    import torch

    optimizer = torch.optim.Optimizer
    schedulers: list[Any] = []
    entries: Any = [returned] if isinstance(returned, (optimizer, Mapping)) else returned
    if entries is None:
        return [], []
    if not isinstance(entries, (list, tuple)):
        raise UsageError(f"the LightningModule of {what} returned {entries!r}", FORMS)
    if len(entries) == 2 and isinstance(entries[0], (list, tuple)):
        entries, last = entries
        schedulers = list(last) if isinstance(last, (list, tuple)) else [last]
    optimizers = []
    for entry in entries:
        found = entry.get("optimizer") if isinstance(entry, Mapping) else entry
        if not isinstance(found, optimizer):
            raise UsageError(
                f"the LightningModule of {what} has the optimizer {type(found).__name__}", FORMS
            )
        optimizers.append(found)
        if isinstance(entry, Mapping) and entry.get("lr_scheduler") is not None:
            schedulers.append(entry["lr_scheduler"])
    return optimizers, [s["scheduler"] if isinstance(s, Mapping) else s for s in schedulers]


def _disjoint(optimizers: list[Any]) -> bool:
    held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    return len(held) == len(set(held))


def call_step(step: Callable[..., Any], batch: Any, index: int) -> Any:
    """Call training_step or validation_step with as much as it takes: batch, its number, loader."""
    accepted = inspect.signature(step).parameters
    known = {"batch_idx": index, "dataloader_idx": 0}
    extra = {name: known[name] for name in known if name in accepted}
    if not extra and len(accepted) > 1:
        return step(batch, index)
    return step(batch, **extra)


def moved(module: Any, batch: Any) -> Any:
    """Bring a batch to the module's device with the hooks around it, where users augment."""
    for hook, change in (
        ("on_before_batch_transfer", None),
        ("on_after_batch_transfer", device_of(module)),
    ):
        batch = batch if change is None else to_device(batch, change)
        own = getattr(module, hook, None)
        batch = own(batch, 0) if callable(own) else batch
    return batch


class _Loss:
    """loss_fn(model, batch)."""

    def __init__(self, trainer: StandIn) -> None:
        self.trainer = trainer

    def __call__(self, module: Any, batch: Any) -> Any:
        if not _is_manual(module):
            with attached(module, self.trainer):
                return self.returned(call_step(module.training_step, moved(module, batch), 0))
        losses: list[Any] = []
        with attached(module, self.trainer, losses), _backward_into(losses):
            call_step(module.training_step, moved(module, batch), 0)
        if not losses:
            raise UsageError(
                f"training_step of {type(module).__name__} called no backward",
                "with automatic_optimization = False it must, for every batch",
                "call self.manual_backward(loss)",
            )
        return sum(losses[1:], losses[0])

    def returned(self, output: Any) -> Any:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            shown = "None" if output is None else f"a dict of {', '.join(map(str, output))}"
            raise UsageError(
                f"training_step returned {shown}",
                "it must return the loss, or a dict with the key loss",
                "return it for every batch, or set automatic_optimization = False",
            )
        return loss


@contextlib.contextmanager
def _backward_into(losses: list[Any]) -> Iterator[None]:
    """Keep what loss.backward() is called on, instead of running it: its graph is needed later."""
    import torch

    genuine = torch.Tensor.backward
    setattr(torch.Tensor, "backward", lambda loss, *_, **__: losses.append(loss))  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.Tensor, "backward", genuine)  # noqa: B010


class _AutomaticStep:
    """One optimizer step by Lightning's order, with the user's own hooks where there are some."""

    def __init__(self, trainer: StandIn) -> None:
        self.trainer = trainer
        self.loss = _Loss(trainer)

    def __call__(self, module: Any, batch: Any, optimizer: Any) -> Any:
        def closure() -> Any:
            loss = self.loss.returned(call_step(module.training_step, moved(module, batch), 0))
            self.hook(module, "optimizer_zero_grad", optimizer.zero_grad, 0, 0, optimizer)
            self.hook(module, "backward", loss.backward, loss)
            if _overrides(module, "configure_gradient_clipping"):
                module.configure_gradient_clipping(optimizer, None, None)
            return loss

        with attached(module, self.trainer):
            again = closure
            if type(optimizer).__name__ != "LBFGS":  # which asks for the loss several times
                loss = closure()  # before step(), where others look at the gradients

                def again() -> Any:
                    return loss

            if _overrides(module, "optimizer_step"):
                return module.optimizer_step(0, 0, optimizer, again)
            return optimizer.step(again)

    def hook(self, module: Any, name: str, otherwise: Callable[[], Any], *given: Any) -> None:
        if _overrides(module, name):
            getattr(module, name)(*given)
        else:
            otherwise()


class _ManualStep:
    """training_step of manual optimization as it is, which steps the optimizers itself."""

    def __init__(self, trainer: StandIn) -> None:
        self.trainer = trainer

    def __call__(self, module: Any, batch: Any, optimizer: Any) -> Any:
        del optimizer  # the module steps its own, whose state the target's optimizer shares
        with attached(module, self.trainer, None):
            output = call_step(module.training_step, moved(module, batch), self.trainer.batch_idx)
        self.trainer.batch_idx += 1
        return output


class _Evaluate:
    """evaluate(model, batches) by validation_step; the mean of the losses that it returns."""

    def __init__(self, trainer: StandIn) -> None:
        self.trainer = trainer

    def __call__(self, module: Any, batches: Any) -> float | None:
        import torch

        losses = []
        modes = {part: part.training for part in module.modules()}
        module.eval()
        with torch.no_grad(), attached(module, self.trainer):
            for index, batch in enumerate(batches):
                output = call_step(module.validation_step, moved(module, batch), index)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                    losses.append(float(loss))
        for part, mode in modes.items():
            part.training = mode
        return sum(losses) / len(losses) if losses else None
