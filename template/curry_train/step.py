"""One optimizer step, top to bottom."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from curry_train.layers.routing import move_correction_biases
from curry_train.loss import token_sums, zero_totals
from curry_train.optim import lr_at, set_lr
from curry_train.parallel import grads
from curry_train.runtime import Runtime


class StepOut(NamedTuple):
    """What one step measured, the same on every rank.

    loss, aux_loss, z_loss: means over the global tokens, in nats (auxiliary ones weighted);
    grad_norm: before clipping; tokens: global non-ignored targets; step_time: wall seconds;
    finite: False when the update was skipped because a gradient was not finite; rescaled: that
    was an overflow of fp16, and the next step tries a smaller loss scale; load_max_over_mean: the
    busiest expert's tokens over the mean, of the most uneven block; None without experts.
    """

    loss: float
    aux_loss: float
    z_loss: float
    lr: float
    grad_norm: float
    tokens: int
    step_time: float
    finite: bool
    rescaled: bool
    load_max_over_mean: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_time

    def row(self) -> dict[str, float]:
        """Return what metrics.jsonl keeps of this step."""
        kept = ("loss", "aux_loss", "z_loss", "lr", "grad_norm", "step_time", "tokens_per_s")
        load = self.load_max_over_mean
        experts = {} if load is None else {"moe/load_max_over_mean": load}
        return {name: getattr(self, name) for name in kept} | experts


def train_step(runtime: Runtime) -> StepOut:
    """Take one optimizer step and advance `runtime.step` and `runtime.tokens`.

    Groups: batch; one all-reduce of four numbers and the experts' counts, then the gradients'.
    """
    start = time.perf_counter()
    config, spans = runtime.config, runtime.spans
    group = runtime.mesh.group("batch")

    with spans("data"):
        micro_batches = runtime.batches.next_step()
    totals, loads = zero_totals(runtime.device), None
    for batch in micro_batches:
        with spans("forward"):
            sums = token_sums(runtime.model, batch)
        with spans("backward"):
            (sums.total * runtime.loss_scale.value).backward()
        totals += sums.detached()
        if sums.tokens_per_expert is not None:
            loads = sums.tokens_per_expert + (0 if loads is None else loads)

    with spans("optimizer"):
        totals, loads = sum_over_batch(totals, loads, group)
        nll, aux, z, count, *imbalance = totals.tolist()
        report = grads.finish(
            runtime.model.parameters(),
            token_count=int(count),
            max_norm=config.optim.max_grad_norm,
            group=group,
            loss_scale=runtime.loss_scale.value,
        )
        lr = lr_at(runtime.step + 1, config.optim, config.run.max_steps)
        if report.finite:
            set_lr(runtime.optimizer, lr)
            runtime.optimizer.step()
            if loads is not None:
                move_correction_biases(runtime.model, loads)
        runtime.optimizer.zero_grad(set_to_none=True)
        rescaled = runtime.loss_scale.update(report.finite) and math.isfinite(nll)

    runtime.step += 1
    runtime.tokens += int(count)
    return StepOut(
        loss=nll / max(count, 1.0),
        aux_loss=aux / max(count, 1.0),
        z_loss=z / max(count, 1.0),
        lr=lr,
        grad_norm=report.norm,
        tokens=int(count),
        step_time=time.perf_counter() - start,
        finite=report.finite,
        rescaled=rescaled,
        load_max_over_mean=imbalance[0] if imbalance else None,
    )


def sum_over_batch(
    totals: Tensor, loads: Tensor | None, group: ProcessGroup | None
) -> tuple[Tensor, Tensor | None]:
    """Return totals [4] and loads int64 [MoE blocks, E] of all ranks, in one all-reduce.

    With loads the totals get a fifth number, the load's maximum over mean of the worst block.
    """
    if loads is None:
        return grads.sum_counts(totals, group), None
    both = grads.sum_counts(torch.cat([totals, loads.flatten().to(totals.dtype)]), group)
    totals, loads_of_all = both.split([4, loads.numel()])
    shares = loads_of_all.view_as(loads)
    worst = (shares.amax(1) / shares.mean(1).clamp(min=1e-9)).amax(0, keepdim=True)
    return torch.cat([totals, worst]), shares.to(loads.dtype)
