"""Blocks over the ranks of a pipeline: which rank holds which, and a step over all micro-batches.

The order of passes, and who sends what when, are those of torch.distributed.pipelining. A stage is
this rank's chunk of the model with another forward, so that the hooks of fully_shard stay on.
Hidden states travel from stage to stage with the auxiliary losses so far, whose gradient so reaches
every router; positions, documents and labels are read on each rank from its own micro-batches.
Nothing here averages: every micro-batch's loss is a sum over tokens, `grads.finish` divides.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curry_train.config import Config
from curry_train.data.loader import Batch
from curry_train.layers.routing import moe_rows
from curry_train.loss import sums_of_output, zero_totals
from curry_train.models.protocol import ModelOutput
from curry_train.parallel.dims import stages_of, stages_per_rank
from curry_train.parallel.mesh import Mesh
from curry_train.sizes import block_costs
from curry_train.stages import stage_blocks

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
READ_BY_ALL = ("position_ids", "doc_ids")
"""What every stage reads of a micro-batch."""


def split_blocks(config: Config) -> list[list[int]]:
    """Return the global block indices of every stage, in model order."""
    model = config.model
    head = 6.0 * model.vocab_size * model.hidden_size
    costs = block_costs(model, config.data.seq_len)
    return [list(blocks) for blocks in stage_blocks(config.parallel, costs, head)]


def build_pipeline(config: Config, chunks: list[nn.Module], mesh: Mesh) -> Pipeline:
    """Make this rank's chunks, in the order of `stages_of`, the stages of a pipeline."""
    if config.parallel.overlap:
        from curry_train.parallel.overlap import OverlappedPipeline

        return OverlappedPipeline(config, chunks, mesh)
    return Pipeline(config, chunks, mesh)


class Pipeline:
    """This rank's stages and their schedule. Group: pp; hidden states there, gradients back.

    chunks: stage -> chunk; owner: stage -> rank of the group. A rank keeps one schedule of torch,
    made anew when the number or the shape of the micro-batches changes.
    """

    def __init__(self, config: Config, chunks: list[nn.Module], mesh: Mesh) -> None:
        parallel = config.parallel
        self.config, self.mesh, self.group = config, mesh, mesh.group("pp")
        self.chunks = dict(zip(stages_of(parallel, mesh.index("pp")), chunks, strict=True))
        ranks = range(parallel.pp)
        self.owner = {stage: rank for rank in ranks for stage in stages_of(parallel, rank)}
        self.last = len(self.owner) - 1
        self.wide = torch.promote_types(chunks[0].compute_dtype, torch.float32)
        self.scale = 1.0
        self.totals = zero_totals(mesh.device)
        self.loads: Tensor | None = None
        self.made: tuple[Any, Any] = None, None
        for chunk in chunks:
            chunk.forward = partial(self.forward, chunk)

    def forward(
        self,
        chunk: nn.Module,
        x: Tensor,
        auxiliary: Tensor | None = None,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Run one stage.

        Shapes: x int64 [B, S] in the first stage, hidden states [B, S', D] in others; auxiliary
        [B, 2], balance and z losses of the stages before. Returns the next stage's x and auxiliary,
        in the last stage logits [B, S, padded vocabulary] and auxiliary; none of a dense model.
        """
        if chunk.model.embed_tokens is not None:
            x = chunk.embed(x)
        elif x.requires_grad:
            # The runtime sends this gradient, and can send contiguous tensors only.
            x = x.view_as(x)
            x.register_hook(torch.Tensor.contiguous)
        x, routings = chunk.run_blocks(x, chunk.positions(x, position_ids, doc_ids))
        if routings and self.loads is not None:
            self.loads[moe_rows(chunk)] += torch.stack([r.tokens_per_expert for r in routings])
        x = x.contiguous() if chunk.lm_head is None else chunk.logits(x)
        if not self.config.model.num_experts:
            return (x,)
        if routings:
            own = torch.stack(chunk.auxiliary(routings), 1).to(self.wide)
        else:
            # With a gradient, so that the messages of all stages are alike.
            own = torch.zeros(len(x), 2, dtype=self.wide, device=x.device)
            own.requires_grad_(torch.is_grad_enabled())
        return x, own if auxiliary is None else auxiliary + own

    def loss(self, output: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return what backward starts from for labels [B, S]; counts the totals."""
        logits, *auxiliary = output
        aux, z = auxiliary[0].unbind(1) if auxiliary else (None, None)
        sums = sums_of_output(self.chunks[self.last], ModelOutput(logits, aux, z), labels)
        self.totals += sums.detached()
        return sums.total * self.scale

    def step(self, runtime: Any, micro_batches: list[Batch]) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward of all micro-batches; gradients add up in the parameters.

        Returns the sums [nll, aux, z, count], zero but on the last stage's ranks, and the choices
        int64 [MoE blocks, E] of the own tokens, zero in rows of other stages.
        """
        self.begin_step(runtime)
        names = [name for name in READ_BY_ALL if micro_batches[0].get(name) is not None]
        whole = {
            name: torch.cat([batch[name] for batch in micro_batches])
            for name in ("input_ids", "labels", *names)
        }
        schedule = self.schedule(len(micro_batches), micro_batches[0]["input_ids"])
        with runtime.spans("pipeline"):
            schedule.step(
                *([whole["input_ids"]] if 0 in self.chunks else []),
                target=whole["labels"] if self.last in self.chunks else None,
                return_outputs=False,
                **{name: whole[name] for name in names},
            )
        return self.end_step()

    def begin_step(self, runtime: Any) -> None:
        """Empty the totals and counts of a step."""
        model = self.config.model
        self.scale, self.totals = runtime.loss_scale.value, zero_totals(self.mesh.device)
        rows = model.num_hidden_layers - model.first_k_dense_replace
        if model.num_experts and rows:
            self.loads = torch.zeros(
                rows, model.num_experts, dtype=torch.int64, device=self.mesh.device
            )

    def end_step(self) -> tuple[Tensor, Tensor | None]:
        """Return the totals [4] and counts int64 [MoE blocks, E] of a step."""
        loads, self.loads = self.loads, None
        return self.totals, loads

    def forward_sums(self, runtime: Any, batch: Batch) -> Tensor:
        """Return the sums [nll, aux, z, count] of a batch of any shape, forward only.

        Zero but on the last stage's ranks; a rank goes on to the next batch meanwhile.
        """
        self.totals = zero_totals(self.mesh.device)
        with torch.no_grad():
            output = self.output(batch)
            if output is not None:
                self.loss(output, batch["labels"])
        return self.totals

    @torch.no_grad()
    def output(self, batch: Batch) -> tuple[Tensor, ...] | None:
        """Pass a batch of any shape through the stages, one after the other, forward only.

        Returns logits [B, S, padded vocabulary] and auxiliary losses as `forward` does on the last
        stage's ranks, None on others, which have sent theirs on. Group: pp.
        """
        inputs: tuple[Tensor, ...] = (batch["input_ids"],)
        read = {name: batch.get(name) for name in READ_BY_ALL}
        for stage, chunk in self.chunks.items():
            if stage > 0 and stage - 1 not in self.chunks:
                inputs = self.message(batch["input_ids"], self.mesh.device)
                for tensor in inputs:
                    dist.recv(tensor, group=self.group, group_src=self.owner[stage - 1])
            inputs = chunk(*inputs, **read)
            if stage < self.last and stage + 1 not in self.chunks:
                for tensor in inputs:
                    dist.send(tensor, group=self.group, group_dst=self.owner[stage + 1])
        return inputs if self.last in self.chunks else None

    def from_last(self, x: Tensor) -> Tensor:
        """Return what the last stage's ranks have in x, any shape, on all. Group: pp, in place."""
        dist.broadcast(x, group=self.group, group_src=self.owner[self.last])
        return x

    def message(
        self, input_ids: Tensor, device: Any, *, last: bool = False, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return empty tensors like a stage's, [B, S', D] and [B, 2], or the last one's."""
        chunk, (batch, length) = next(iter(self.chunks.values())), input_ids.shape
        tp = self.mesh.size("tp")
        shape = batch, length // tp, self.config.model.hidden_size
        if last:
            shape = batch, length, chunk.padded_vocab // tp
        x = torch.empty(shape, dtype=chunk.compute_dtype, device=device, **options)
        if not self.config.model.num_experts:
            return (x,)
        return x, torch.empty(batch, 2, dtype=self.wide, device=device, **options)

    def schedule(self, micro_batches: int, input_ids: Tensor) -> Any:
        """Return torch's schedule for micro-batches like int64 [B, S]."""
        key = micro_batches, input_ids.shape
        if self.made[0] == key:
            return self.made[1]
        from torch.distributed.pipelining import PipelineStage, schedules

        # Before 2.13 nodes of the graph written in Python die between the halves of a split
        # backward: there the first half makes all gradients, and the second none.
        old = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
        # Said, not found out by torch, whose trial run would send garbage to experts.
        message = partial(self.message, input_ids, "meta", requires_grad=True)
        self.stages = [
            PipelineStage(
                chunk,
                stage,
                self.last + 1,
                self.mesh.device,
                input_args=(input_ids.to("meta"),) if stage == 0 else message(),
                output_args=message(last=stage == self.last),
                group=self.group,
                dw_builder=(lambda: lambda: None) if old else None,
            )
            for stage, chunk in self.chunks.items()
        ]
        if old and self.mesh.device.type == "cpu":
            for stage in self.stages:
                # It would greet neighbours, itself among them in a V, which gloo cannot.
                stage._get_init_p2p_neighbors_ops = list
        name = self.config.parallel.schedule
        if name == "1f1b" and micro_batches <= self.last:
            # Torch refuses what does not fill the pipeline. The first rank then holds all
            # micro-batches anyway, so this order costs neither time nor peak memory.
            name = "gpipe"
        kind = getattr(schedules, SCHEDULES[name])
        single = stages_per_rank(self.config.parallel) == 1
        schedule = kind(
            self.stages[0] if single else self.stages,
            micro_batches,
            loss_fn=self.loss,
            scale_grads=False,
        )
        self.made = key, schedule
        return schedule
