"""AdamW, its parameter groups and its schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from curry_train.config import OptimConfig


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Tell whether weight decay applies: matrices do; vectors, biases and the embedding never."""
    return parameter.dim() >= 2 and "embed_tokens" not in name and not name.endswith(".bias")


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], optim: OptimConfig
) -> torch.optim.AdamW:
    """Build fused AdamW over two groups, with and without weight decay, chosen by name.

    named: canonical names and what this rank updates of them, [any shape].

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
    """
    named = [(n, p) for n, p in named if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": optim.weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )


def lr_at(step: int, optim: OptimConfig, max_steps: int) -> float:
    """Return the learning rate used in optimizer step `step` (the first is 1).

    Warm-up is linear and reaches optim.lr at step warmup_steps. After it: `cosine` falls to
    min_lr (null: a tenth of lr) at max_steps; `wsd` stays and falls linearly over the last
    decay_steps; `constant` stays. A warm-up longer than the run is cut off, never squeezed.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    floor = optim.lr / 10 if optim.min_lr is None else optim.min_lr
    span = optim.lr - floor
    if optim.schedule == "cosine":
        done = (step - optim.warmup_steps) / max(max_steps - optim.warmup_steps, 1)
        return floor + span * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    if optim.schedule == "wsd":
        length = optim.decay_steps or max(max_steps // 5, 1)
        start = max(max_steps - length, optim.warmup_steps)
        done = (step - start) / max(max_steps - start, 1)
        return optim.lr - span * min(max(done, 0.0), 1.0)
    return optim.lr


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def materialise_state(optimizer: torch.optim.AdamW) -> None:
    """Create zero moments for every parameter that has none, so that a checkpoint can fill them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


class LossScale:
    """The factor that keeps fp16 gradients above underflow; 1 for every other precision.

    A step whose gradients are not finite is skipped and halves the factor; `growth_interval`
    finite steps in a row double it.
    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    growth_interval = 200

    def __init__(self, precision: str) -> None:
        self.active = precision == "fp16"
        # The loss is a sum over tokens, so the first factor is far below the usual 2**16.
        self.value = 128.0 if self.active else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> bool:
        """Learn from one step; returns whether it failed for the factor alone, now smaller."""
        if not self.active:
            return False
        if not finite:
            before, self.good_steps = self.value, 0
            self.value = max(self.value / 2.0, 2.0**-14)
            return self.value < before
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2.0, 0
        return False
