"""A Trainer of transformers as a target, without its loop and without accelerate's doings.

The loss is the Trainer's own compute_loss with the number of items of the batch, as its loop calls
it. Known by what it has, so that a Trainer of another library with the same methods works too.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .batches import device_of, to_device
from .errors import UsageError

METHODS = ("get_train_dataloader", "compute_loss", "create_optimizer")


def is_trainer(value: Any) -> bool:
    """Tell whether a value has what a Trainer has."""
    return hasattr(value, "model") and all(callable(getattr(value, m, None)) for m in METHODS)


def parts(trainer: Any, what: str, seed: int) -> dict[str, Any]:
    """Give model, batches, loss_fn, optimizer, scheduler and total_steps, and own steps if any."""
    model = _seeded_model(trainer, seed)
    if model is None:
        raise UsageError(f"the Trainer of {what} has no model", fix="give it model or model_init")
    if getattr(getattr(trainer, "args", None), "n_gpu", 1) > 1:
        trainer.args._n_gpu = 1  # as the Trainer does itself; else it counts for DataParallel
    with _unprepared(trainer):
        batches = trainer.get_train_dataloader()
    steps = _total_steps(trainer, batches)
    _make_optimizer(trainer, steps)
    found = {
        "model": model,
        "batches": batches,
        "loss_fn": _Loss(trainer),
        "optimizer": trainer.optimizer,
        "scheduler": getattr(trainer, "lr_scheduler", None),
        "total_steps": steps,
    }
    if _own(trainer, "training_step"):
        found["train_step"] = _TrainStep(trainer)
    if _own(trainer, "prediction_step"):
        found["evaluate"] = _Evaluate(trainer)
    return found


def _seeded_model(trainer: Any, seed: int) -> Any:
    """A Trainer with model_init seeds itself by args.seed; draw the weights by the asked seed."""
    from .target import seed_everything

    if getattr(trainer, "model_init", None) is None or not hasattr(trainer, "call_model_init"):
        return trainer.model
    device = device_of(trainer.model)
    seed_everything(seed)
    trainer.model = trainer.call_model_init().to(device)
    if hasattr(trainer, "model_wrapped"):
        trainer.model_wrapped = trainer.model
    return trainer.model


@contextlib.contextmanager
def _unprepared(trainer: Any) -> Iterator[None]:
    """Let the Trainer make a plain DataLoader: accelerate would shard it and keep a list of it."""
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is None or not hasattr(accelerator, "prepare"):
        yield
        return
    accelerator.prepare = lambda *given, **_: given[0] if len(given) == 1 else given
    try:
        yield
    finally:
        del accelerator.prepare


def _total_steps(trainer: Any, batches: Any) -> int | None:
    """Count the optimizer steps of the run: max_steps, else epochs of the loader."""
    args = getattr(trainer, "args", None)
    asked = getattr(args, "max_steps", None)
    if asked is not None and asked > 0:
        return asked
    epochs = getattr(args, "num_train_epochs", None)
    try:
        length = len(batches)
    except TypeError:
        return None
    if epochs is None or length == 0:
        return None
    accumulated = max(1, getattr(args, "gradient_accumulation_steps", None) or 1)
    return max(1, math.ceil(epochs * math.ceil(length / accumulated)))


def _make_optimizer(trainer: Any, steps: int | None) -> None:
    if steps is not None and callable(getattr(trainer, "create_optimizer_and_scheduler", None)):
        trainer.create_optimizer_and_scheduler(num_training_steps=steps)
    else:
        trainer.create_optimizer()


def _own(trainer: Any, name: str) -> bool:
    """Tell whether the user's class brings a method of its own."""
    method = getattr(type(trainer), name, None)
    return method is not None and not method.__module__.startswith("transformers.")


@dataclass(frozen=True)
class _Smoothing:
    """What transformers' LabelSmoother computes, by the cross entropy that checks can read."""

    epsilon: float
    ignore_index: int

    def __call__(
        self,
        model_output: Any,
        labels: Any,
        shift_labels: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        import torch

        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class _Loss:
    """loss_fn(model, batch) by the Trainer's compute_loss."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        accepted = inspect.signature(trainer.compute_loss).parameters
        self.takes_count = "num_items_in_batch" in accepted or any(
            p.kind is p.VAR_KEYWORD for p in accepted.values()
        )

    def __call__(self, model: Any, batch: Any) -> Any:
        smoother: Any = getattr(self.trainer, "label_smoother", None)
        known = type(smoother).__module__.startswith("transformers.")
        if known:
            self.trainer.label_smoother = _Smoothing(smoother.epsilon, smoother.ignore_index)
        try:
            with self.autocast(model):
                inputs, count = self.prepared(model, batch)
                return self.trainer.compute_loss(model, inputs, **count)
        finally:
            if known:
                self.trainer.label_smoother = smoother

    def prepared(self, model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Give the batch on the model's device, a copy: compute_loss takes the labels out of it."""
        inputs = to_device(batch, device_of(model))
        inputs = dict(inputs) if hasattr(inputs, "keys") else inputs
        counter = getattr(self.trainer, "_get_num_items_in_batch", None)
        if not self.takes_count or counter is None:
            return inputs, {}
        return inputs, {"num_items_in_batch": counter([inputs], device_of(model))}

    def autocast(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """The Trainer leaves bf16 and fp16 to accelerate, which wraps the model; do the same."""
        import torch

        args = getattr(self.trainer, "args", None)
        bf16, fp16 = getattr(args, "bf16", False), getattr(args, "fp16", False)
        if not bf16 and not fp16:
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if bf16 else torch.float16
        return torch.autocast(device_of(model).type, dtype=dtype)


class _TrainStep:
    """One optimizer step around the user's own training_step, as the Trainer's loop makes it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.loss = _Loss(trainer)
        accepted = inspect.signature(trainer.training_step).parameters
        self.takes_count = "num_items_in_batch" in accepted

    def __call__(self, model: Any, batch: Any, optimizer: Any) -> Any:
        import torch

        trainer = self.trainer
        inputs, count = self.loss.prepared(model, batch)
        trainer.current_gradient_accumulation_steps = 1
        before, trainer.optimizer = trainer.optimizer, optimizer
        try:
            with self.loss.autocast(model):
                loss = trainer.training_step(model, inputs, **(count if self.takes_count else {}))
        finally:
            trainer.optimizer = before
        longest = getattr(getattr(trainer, "args", None), "max_grad_norm", None)
        if longest:
            torch.nn.utils.clip_grad_norm_(model.parameters(), longest)
        optimizer.step()
        model.zero_grad()
        return loss


class _Evaluate:
    """evaluate(model, batches) by the user's own prediction_step; the mean of its losses."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.loss = _Loss(trainer)

    def __call__(self, model: Any, batches: Any) -> float | None:
        losses = []
        was_training = model.training
        model.eval()
        for batch in batches:
            inputs, _ = self.loss.prepared(model, batch)
            loss = self.trainer.prediction_step(model, inputs, prediction_loss_only=True)[0]
            losses += [] if loss is None else [float(loss)]
        model.train(was_training)
        return sum(losses) / len(losses) if losses else None
