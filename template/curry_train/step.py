"""One optimizer step, top to bottom."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from curry_train.data.loader import Batch
from curry_train.layers.routing import move_correction_biases
from curry_train.loss import token_sums, zero_totals
from curry_train.optim import lr_at, set_lr
from curry_train.parallel import grads
from curry_train.parallel.context_parallel import take
from curry_train.parallel.data_parallel import hand_round
from curry_train.parallel.mesh import Mesh
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

    Groups: world, one all-reduce of four numbers and the experts' counts; then the gradients'.
    """
    start = time.perf_counter()
    config, spans = runtime.config, runtime.spans

    with spans("data"):
        micro_batches = [
            take(batch, runtime.mesh.group("cp")) for batch in runtime.batches.next_step()
        ]
    totals, loads = accumulate(runtime, micro_batches)

    with spans("optimizer"):
        totals, loads = sum_over_world(totals, loads, runtime.mesh)
        nll, aux, z, count, *imbalance = totals.tolist()
        report = grads.finish(
            runtime.shards,
            token_count=int(count),
            max_norm=config.optim.max_grad_norm,
            mesh=runtime.mesh,
            loss_scale=runtime.loss_scale.value,
        )
        lr = lr_at(runtime.step + 1, config.optim, config.run.max_steps)
        if report.finite:
            set_lr(runtime.optimizer, lr)
            runtime.optimizer.step()
            hand_round(runtime.shards)
            if loads is not None:
                move_correction_biases(runtime.chunks, loads)
        forget_gradients(runtime)
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


def accumulate(runtime: Runtime, micro_batches: list[Batch]) -> tuple[Tensor, Tensor | None]:
    """Run forward and backward of all micro-batches; gradients add up in the parameters.

    Returns what this rank counts of [nll, aux, z, count], so that the sum over all ranks has every
    token once, and the choices int64 [MoE blocks, E] of its own tokens and blocks.
    """
    if runtime.pipeline is not None:
        totals, loads = runtime.pipeline.step(runtime, micro_batches)
        return count_once(totals, runtime.mesh), loads
    totals, loads = zero_totals(runtime.device), None
    for batch in micro_batches:
        with runtime.spans("forward"):
            sums = token_sums(runtime.model, batch)
        with runtime.spans("backward"):
            (sums.total * runtime.loss_scale.value).backward()
        totals += sums.detached()
        if sums.tokens_per_expert is not None:
            loads = sums.tokens_per_expert + (0 if loads is None else loads)
    return count_once(totals, runtime.mesh), loads


def count_once(totals: Tensor, mesh: Mesh) -> Tensor:
    """Drop from [nll, aux, z, count] what another rank counts too.

    Ranks of tp have the same logits and labels, those of cp and tp the same auxiliary losses.
    """
    first_tp, first_cp = mesh.index("tp") == 0, mesh.index("cp") == 0
    kept = [first_tp, first_tp and first_cp, first_tp and first_cp, first_tp]
    return totals * torch.tensor(kept, dtype=totals.dtype, device=totals.device)


def forget_gradients(runtime: Runtime) -> None:
    """Drop the gradients of the parameters and of what the optimizer has of them."""
    for shard in runtime.shards:
        shard.parameter.grad = shard.owned.grad = None


def sum_over_world(
    totals: Tensor, loads: Tensor | None, mesh: Mesh
) -> tuple[Tensor, Tensor | None]:
    """Return totals [4] and loads int64 [MoE blocks, E] of all ranks, in one all-reduce.

    With loads the totals get a fifth number, the load's maximum over mean of the worst block.
    Group: world.
    """
    group = mesh.group("world")
    if loads is None:
        return grads.sum_counts(totals, group), None
    both = grads.sum_counts(torch.cat([totals, loads.flatten().to(totals.dtype)]), group)
    totals, loads_of_all = both.split([4, loads.numel()])
    shares = loads_of_all.view_as(loads)
    worst = (shares.amax(1) / shares.mean(1).clamp(min=1e-9)).amax(0, keepdim=True)
    return torch.cat([totals, worst]), shares.to(loads.dtype)
