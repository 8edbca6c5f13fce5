"""What a rank of a measured run writes down: samples, losses, gradients, weights."""

from __future__ import annotations

import hashlib
from typing import Any

from kit.batches import tensors


class Enough(BaseException):
    """Ends a loop after the steps that are compared; no `except Exception` catches it."""


class Recorder:
    """A Fabric that remembers what goes through it, and hooks that remember the rest.

    It changes torch for the whole process, which has to be one made for this run.
    """

    def __init__(self, fabric_class: Any, world: int, steps: int) -> None:
        self.limit = steps
        self.steps: list[dict[str, Any]] = []
        self.loss = 0.0
        self.rows: list[str] = []
        self.models: list[Any] = []
        self.before_clip: dict[str, Any] | None = None
        self.dropout = False
        self.depth = 0
        self._hook()
        self.fabric = self._subclass(fabric_class)(accelerator="cpu", devices=world, strategy="ddp")
        self.fabric.launch()

    def _subclass(self, fabric_class: Any) -> Any:
        recorder = self

        class RecordingFabric(fabric_class):
            def setup(self, module: Any, *optimizers: Any, **settings: Any) -> Any:
                recorder.models.append(module)
                return super().setup(module, *optimizers, **settings)

            def setup_module(self, module: Any, **settings: Any) -> Any:
                recorder.models.append(module)
                return super().setup_module(module, **settings)

            def backward(self, tensor: Any, *args: Any, **settings: Any) -> None:
                recorder.loss += float(tensor.detach())
                super().backward(tensor, *args, **settings)

            def clip_gradients(self, module: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
                # A wrong factor would disappear in the clip.
                recorder.before_clip = recorder.gradients(optimizer)
                return super().clip_gradients(module, optimizer, *args, **kw)

        return RecordingFabric

    def _hook(self) -> None:
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        register_optimizer_step_pre_hook(lambda optimizer, *_: self._before(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer))
        plain_call = torch.nn.Module.__call__

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = self.depth == 0 and module.training and torch.is_grad_enabled()
            if outermost and any(True for _ in module.parameters()):
                self.rows += fingerprints([args, kwargs])
            self.depth += 1
            try:
                return plain_call(module, *args, **kwargs)
            finally:
                self.depth -= 1

        def no_dropout(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
            self.dropout = self.dropout or p > 0
            return input

        torch.nn.Module.__call__ = call
        torch.nn.functional.dropout = no_dropout

    def gradients(self, optimizer: Any) -> dict[str, Any]:
        """Return the gradients that an optimizer sees, by the names of the models set up."""
        names = {}
        for number, model in enumerate(self.models):
            prefix = f"model {number} " if len(self.models) > 1 else ""
            names |= {id(p): prefix + name for name, p in model.named_parameters()}
        found = {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                name = names.get(id(parameter), f"parameter {number}")
                found[name] = parameter.grad.detach().float().cpu().numpy().copy()
        return found

    def _before(self, optimizer: Any) -> None:
        grads = self.before_clip or self.gradients(optimizer)
        self.steps.append({"grads": grads, "loss": self.loss, "rows": self.rows})
        self.loss, self.rows, self.before_clip = 0.0, [], None

    def _after(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(parameter.detach().double().cpu().numpy().tobytes())
        self.weights = digest.hexdigest()
        if len(self.steps) >= self.limit:
            raise Enough

    def result(self) -> dict[str, Any]:
        """Return everything, without tensors."""
        from torch.nn.modules.batchnorm import _BatchNorm

        norms = any(isinstance(m, _BatchNorm) for model in self.models for m in model.modules())
        return {
            "steps": self.steps,
            "weights": getattr(self, "weights", ""),
            "dropout": self.dropout,
            "batch_norm": norms,
        }


def fingerprints(inputs: Any) -> list[str]:
    """Return a word for each sample of a batch: for each row of its tensors together."""
    found = [t.detach().double().cpu().numpy() for t in tensors(inputs) if t.dim()]
    rows = len(found[0]) if found else 0
    together = [values for values in found if len(values) == rows]
    return [
        hashlib.sha1(b"".join(values[row].tobytes() for values in together)).hexdigest()
        for row in range(rows)
    ]
