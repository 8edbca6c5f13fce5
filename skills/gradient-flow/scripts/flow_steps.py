"""Real optimizer steps of a target, and how far each one moved its weights."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kit.target import Target

OWN_LR = 1e-3
"""Of the AdamW that warms up a target without an optimizer."""


class Steps:
    """Takes steps as the target does, and measures |change| / |weight| of its matrices.

    Ratios are scaled to the largest learning rate of the schedule: under warm-up the first steps
    are tiny, and every optimizer's step is proportional to its rate.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.own = target.optimizer is None
        trainable = [p for p in target.model.parameters() if p.requires_grad]
        self.optimizer = (
            torch.optim.AdamW(trainable, lr=OWN_LR, weight_decay=0.0)
            if self.own and trainable
            else target.optimizer
        )
        scheduler: Any = target.scheduler
        self._schedule = None
        if scheduler is not None and hasattr(scheduler, "state_dict"):
            self._schedule = copy.deepcopy(scheduler.state_dict())
        self._batches = self._endless()
        self.matrices = judged_matrices(target.model)
        self.ratios: dict[str, list[float]] = {name: [] for name, _ in self.matrices}
        self.unmoved: dict[str, list[float]] = {}
        """Share of a 16-bit matrix that did not change at all, by step."""
        self._peaks: dict[int, float] = {}
        self.scaled_by = 1.0
        """Peak learning rate over that of the last step, the largest of all groups."""
        self.moved = False
        self.seconds: list[float] = []
        """Of every step taken."""

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.target.batches

    def batch(self) -> Any:
        """Take the next batch; a finite set begins anew."""
        return next(self._batches)

    def take(self) -> None:
        """Take one optimizer step and keep the ratios."""
        before = [p.detach().clone() for _, p in self.matrices]
        start = time.perf_counter()
        rates = self._step()
        self.seconds.append(time.perf_counter() - start)
        if not self.matrices or self.own or not any(rates.values()):
            return
        self.moved = True
        sizes, changes, still = [], [], []
        with torch.no_grad():
            for (_, p), old in zip(self.matrices, before, strict=True):
                wide = torch.promote_types(p.dtype, torch.float32)
                sizes.append(torch.linalg.vector_norm(old, dtype=wide))
                changes.append(torch.linalg.vector_norm(p.detach().to(wide) - old.to(wide)))
                still.append((p.detach() == old).sum() / p.numel())
        numbers = torch.stack([*sizes, *changes, *still]).double().tolist()
        count = len(self.matrices)
        self.scaled_by = 1.0
        for index, (name, p) in enumerate(self.matrices):
            size, change, same = numbers[index::count]
            rate, peak = rates.get(id(p), 0.0), self._peaks.get(id(p), 0.0)
            if not rate or not size or not math.isfinite(size):
                continue
            self.scaled_by = max(self.scaled_by, peak / rate)
            self.ratios[name].append(change / size * max(peak / rate, 1.0))
            if p.dtype in (torch.bfloat16, torch.float16):
                self.unmoved.setdefault(name, []).append(same)

    def _step(self) -> dict[int, float]:
        """Step; return the learning rate of each parameter that the optimizer holds."""
        target = self.target
        if target.runtime is not None:
            from curry_train.step import train_step

            lr = train_step(target.runtime).lr
            peak = max(target.runtime.config.optim.lr, lr)
            held = {id(p) for g in target.optimizer.param_groups for p in g["params"]}
            self._peaks = {key: float(peak) for key in held}
            return {key: float(lr) for key in held}
        if self.optimizer is None:
            return {}
        groups = self.optimizer.param_groups
        used = {id(p): float(g["lr"]) for g in groups for p in g["params"]}
        self._peaks = {
            id(p): max(float(g.get(key) or 0.0) for key in ("lr", "initial_lr", "max_lr"))
            for g in groups
            for p in g["params"]
        }
        batch = self.batch()
        if target.train_step is not None and not self.own:
            target.train_step(target.model, batch, self.optimizer)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            target.loss_fn(target.model, batch).backward()
            self.optimizer.step()
        after = [float(g["lr"]) for g in groups]
        waits = after == [float(lr) for lr in (used[id(g["params"][0])] for g in groups)]
        if target.scheduler is not None and waits:
            target.scheduler.step()
        return used

    def restore_schedule(self) -> None:
        """Put the scheduler back; everything else is kept by kit.state.preserved."""
        if self._schedule is not None:
            self.target.scheduler.load_state_dict(self._schedule)


def judged_matrices(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Name what an update ratio says something about: trainable matrices, no embeddings.

    Of an embedding only the rows of a batch's tokens move; biases and norms often start at zero.
    """
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or "embedding" in type(module).__name__.lower()
        for p in module.parameters(recurse=False)
    }
    return [
        (name, p)
        for name, p in model.named_parameters()
        if p.requires_grad and p.dim() >= 2 and p.numel() and id(p) not in tables
    ]
