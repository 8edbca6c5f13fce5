"""What a LightningModule asks of its Trainer, answered without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .errors import UsageError


class UnknownOutside(UsageError, AttributeError):
    """Asked for what only a run has; hasattr and getattr with a default go on."""


class Silent:
    """A logger that takes everything: every attribute and every call gives itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Silent:
        return self

    def __bool__(self) -> bool:
        return False


class StandIn:
    """The few attributes of a Trainer that training steps and configure_optimizers read."""

    def __init__(self, module: Any, batches: Any, total_steps: int | None, datamodule: Any) -> None:
        try:
            length = len(batches)
        except TypeError:
            length = 1
        self.lightning_module = self.model = module
        self.datamodule = datamodule
        self.train_dataloader = batches
        self.num_training_batches = length
        self.steps_asked = total_steps
        self.max_steps = total_steps or -1
        self.max_epochs = 1 if total_steps is None else -(-total_steps // max(1, length))
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.global_step = self.current_epoch = self.global_rank = self.local_rank = 0
        self.batch_idx = 0
        self.world_size = self.num_nodes = self.num_devices = self.accumulate_grad_batches = 1
        self.training = self.is_global_zero = self.is_last_batch = True
        self.sanity_checking = self.validating = self.testing = self.evaluating = False
        self.gradient_clip_val = self.gradient_clip_algorithm = None
        self.progress_bar_callback = None
        self.precision = "32-true"
        self.callbacks: list[Any] = []
        self.callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self.logger = Silent()
        self.loggers: list[Any] = []
        self.log_dir = None

    @property
    def estimated_stepping_batches(self) -> int:
        """The run's steps as given, else one pass over the batches, which then is the run."""
        self.steps_asked = self.steps_asked or max(1, self.num_training_batches)
        return self.steps_asked

    def __deepcopy__(self, _: Any) -> StandIn:
        return self

    def __getattr__(self, name: str) -> Any:
        raise UnknownOutside(
            f"self.trainer.{name} is not known outside of a Lightning run",
            fix="return (model, batches, loss_fn) with a loss that does not ask for it",
        )


class _NoSteps:
    """An optimizer that is looked at, but neither steps nor clears gradients."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def toggle_model(self, *_: Any, **__: Any) -> Iterator[None]:
        """Do what a LightningOptimizer's does where no gradient is synchronised: nothing."""
        yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _Nothing:
    """Called instead of self.log and its kin."""

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


NOTHING = _Nothing()


@contextlib.contextmanager
def attached(module: Any, trainer: StandIn, losses: list[Any] | None = None) -> Iterator[None]:
    """Answer self.trainer, self.log, self.optimizers and their kin for the time of a block.

    With a list in `losses` nothing is stepped and what is given to manual_backward is put there.
    """
    dry = losses is not None

    def one_or_all(values: list[Any]) -> Any:
        return values[0] if len(values) == 1 else values

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        del use_pl_optimizer
        return one_or_all([_NoSteps(o) if dry else o for o in trainer.optimizers])

    def lr_schedulers() -> Any:
        found = [_NoSteps(s) if dry else s for s in trainer.schedulers]
        return one_or_all(found) if found else None

    def all_gather(data: Any, *_: Any, **__: Any) -> Any:
        return data

    def manual_backward(loss: Any, *given: Any, **named: Any) -> None:
        loss.backward(*given, **named)

    answers = {
        "_trainer": trainer,
        "log": NOTHING,
        "log_dict": NOTHING,
        "print": NOTHING,
        "optimizers": optimizers,
        "lr_schedulers": lr_schedulers,
        "manual_backward": manual_backward,
        "all_gather": all_gather,
        "clip_gradients": NOTHING if dry else _clip_gradients,
    }
    owners = [m for m in module.modules() if hasattr(m, "training_step")]
    before = [dict(vars(owner)) for owner in owners]
    try:
        for owner in owners:
            vars(owner).update(answers)
        yield
    finally:
        for owner, kept in zip(owners, before, strict=True):
            for name in answers:
                vars(owner).pop(name, None)
                if name in kept:
                    vars(owner)[name] = kept[name]


def _clip_gradients(
    optimizer: Any,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
) -> None:
    import torch

    if not gradient_clip_val:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if str(gradient_clip_algorithm or "norm").lower().endswith("value"):
        torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
