"""DualPipeV whose expert messages travel while another micro-batch computes.

A pass over a stage is a generator that stops whenever a message is on its way; `run_all` resumes
several in turn, so one's wait is another's work. The plain order is the same generator alone: both
share every number. Which passes meet is torch's table for DualPipeV, read and not recomputed.

A pass is cut into parts (models/protocol.py), each a graph of its own: inputs are detached, and
backward is one call for each part. Messages between parts lie outside autograd; their gradients
travel back the same ways. BACKWARD_INPUT here computes weight gradients too, and BACKWARD_WEIGHT
nothing: the table's order holds, its filling of the last bubble does not.
Source: DeepSeek-AI 2025, "DualPipe"; the V form after Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory".
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curry_train.data.loader import Batch
from curry_train.layers.routing import Routing, moe_rows
from curry_train.models.decoder import MoEBlock
from curry_train.parallel.activation_checkpoint import kind_of, recompute_part
from curry_train.parallel.data_parallel import fsdp_modules
from curry_train.parallel.expert_parallel import Exchange, number_own, pack, plan, unpack
from curry_train.parallel.pipeline_parallel import READ_BY_ALL, Pipeline

Pass = Generator[None, None, Any]


def run_all(*passes: Pass) -> list[Any]:
    """Resume passes in turn until all are done; returns their results in the given order.

    The first one starts first: in a pair that is backward, since the end of a block's forward is
    too short to cover the first message of a forward that started before it.
    """
    results: dict[int, Any] = {}
    waiting = dict(enumerate(passes))
    while waiting:
        for index, run in list(waiting.items()):
            try:
                next(run)
            except StopIteration as stop:
                results[index] = stop.value
                del waiting[index]
    return [results[index] for index in range(len(passes))]


class Part:
    """A piece of a pass as a graph of its own.

    function(*inputs) returns a tuple of tensors of any shape, None among them; inputs that are
    floating point get gradients. Call `back` once, with a gradient or None for each output.
    """

    def __init__(self, kind: str, function: Callable[..., Any], *inputs: Any) -> None:
        self.inputs = [_leaf(x) for x in inputs]
        with torch.enable_grad():
            self.outputs = recompute_part(kind, function, *self.inputs)

    def detached(self) -> tuple[Any, ...]:
        """Return the outputs without their history."""
        return tuple(_without_history(x) for x in self.outputs)

    def back(self, *grads: Tensor | None) -> list[Tensor | None]:
        """Run backward; returns the inputs' gradients, any shape. The part is then empty."""
        pairs = [
            (out, grad)
            for out, grad in zip(self.outputs, grads, strict=True)
            if isinstance(out, Tensor) and out.requires_grad and grad is not None
        ]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        found = [_grad(x) for x in self.inputs]
        self.inputs, self.outputs = [], ()
        return found


def _without_history(x: Any) -> Any:
    if isinstance(x, Routing):
        lost = {name: getattr(x, name).detach() for name in ("weights", "aux_loss", "z_loss")}
        return replace(x, **lost)
    return x.detach() if isinstance(x, Tensor) else x


def _leaf(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.is_floating_point())


def _grad(x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or not x.requires_grad:
        return None
    return torch.zeros_like(x) if x.grad is None else x.grad


class Message:
    """Rows on their way to and from the ranks of an expert group, `wait` for them.

    Shapes: tensors [sum(send), ...]; wait returns as many [sum(receive), ...]. The group's ranks
    must start their messages in the same order.
    """

    def __init__(
        self, tensors: Sequence[Tensor], send: list[int], receive: list[int], group: Any
    ) -> None:
        self.tensors = [x.contiguous() for x in tensors]  # must live until they have left
        self.out = [x.new_empty(sum(receive), *x.shape[1:]) for x in tensors]
        self.works = [
            dist.all_to_all_single(out, x, receive, send, group=group, async_op=True)
            for out, x in zip(self.out, self.tensors, strict=True)
        ]

    def wait(self) -> list[Tensor]:
        """Return what came, as rows [R, ...]."""
        for work in self.works:
            work.wait()
        return self.out


@dataclass
class BlockTape:
    """What the backward of one block needs; a whole block has its first part only."""

    first: Part
    experts: Part | None = None
    last: Part | None = None
    exchange: Exchange | None = None


@dataclass
class Tape:
    """What the backward of one pass over a stage needs, in forward order."""

    begin: Part | None = None
    blocks: list[BlockTape] = field(default_factory=list)
    end: Part | None = None


class OverlappedPipeline(Pipeline):
    """A Pipeline that runs torch's DualPipeV table itself, see the head of this file.

    Groups: pp, hidden states and gradients; ep, two messages a block forward, two backward.
    """

    def step(self, runtime: Any, micro_batches: list[Batch]) -> tuple[Tensor, Tensor | None]:
        """Do what Pipeline.step does, ids int64 [B, S]."""
        self.begin_step(runtime)
        schedule = self.schedule(len(micro_batches), micro_batches[0]["input_ids"])
        self.batches = micro_batches
        self.tapes: dict[tuple[int, int], Tape] = {}
        self.values: dict[tuple[str, int, int], Any] = {}
        self.sent: list[Any] = []
        for chunk in self.chunks.values():
            hold(chunk)
        with runtime.spans("pipeline"):
            for action in schedule.pipeline_order_with_comms[self.mesh.index("pp")]:
                if action is not None:
                    self.act(action)
            for work, _ in self.sent:
                work.wait()
        for stage in self.stages:  # reduces gradients and drops gathered parameters
            stage.perform_reduce_grad(1)
        self.sent = []
        return self.end_step()

    def act(self, action: Any) -> None:
        """Do one entry of the table: a pass, a pair of them, or a message between stages."""
        kind = action.computation_type.name
        if action.sub_actions is not None:
            forward, backward = action.sub_actions
            run_all(self.backward(*_place(backward)), self.forward_pass(*_place(forward)))
            return
        stage, number = action.stage_index, action.microbatch_index
        if kind == "FORWARD":
            run_all(self.forward_pass(stage, number))
        elif kind in ("FULL_BACKWARD", "BACKWARD_INPUT"):
            run_all(self.backward(stage, number))
        elif kind in ("SEND_F", "SEND_B"):
            self.send("out" if kind == "SEND_F" else "grad", stage, number)
        elif kind in ("RECV_F", "RECV_B"):
            self.receive("out" if kind == "RECV_F" else "grad", stage, number)

    # Messages between stages

    def send(self, what: str, stage: int, number: int) -> None:
        """Start sending a stage's outputs on, or the gradients of its inputs back."""
        to = self.owner[stage + (1 if what == "out" else -1)]
        for index, tensor in enumerate(self.values.pop((what, stage, number))):
            tag = self.tag(what, stage, number, index)
            tensor = tensor.contiguous()
            work = dist.isend(tensor, group=self.group, group_dst=to, tag=tag)
            self.sent.append((work, tensor))

    def receive(self, what: str, stage: int, number: int) -> None:
        """Start receiving what the neighbour of a stage sends it."""
        source = stage + (-1 if what == "out" else 1)
        tensors = self.message(self.batches[number]["input_ids"], self.mesh.device)
        works = [
            dist.irecv(
                tensor,
                group=self.group,
                group_src=self.owner[source],
                tag=self.tag(what, source, number, index),
            )
            for index, tensor in enumerate(tensors)
        ]
        self.values[what, source, number] = (works, tensors)

    def tag(self, what: str, stage: int, number: int, index: int) -> int:
        """Return a number of its own for each message of a step."""
        return ((number * (self.last + 1) + stage) * 2 + (what == "grad")) * 2 + index

    def arrived(self, what: str, stage: int, number: int) -> tuple[Tensor, ...]:
        """Return what a stage put out, here or elsewhere: [B, S', D], [B, 2] with experts."""
        value = self.values.pop((what, stage, number))
        if isinstance(value[0], list):
            works, value = value
            for work in works:
                work.wait()
        return value

    # Passes

    def forward_pass(self, stage: int, number: int) -> Pass:
        """Run one micro-batch through one stage; leaves the outputs for the next stage."""
        chunk, batch, tape = self.chunks[stage], self.batches[number], Tape()
        self.tapes[stage, number] = tape
        auxiliary = None
        if stage == 0:
            tape.begin = self.part("none", lambda ids: (chunk.embed(ids),), batch["input_ids"])
            (x,) = tape.begin.detached()
        else:
            x, *rest = self.arrived("out", stage - 1, number)
            auxiliary = rest[0] if rest else None
        if self.config.model.num_experts and auxiliary is None:
            auxiliary = torch.zeros(len(x), 2, dtype=self.wide, device=x.device)
        positions = chunk.positions(x, *(batch.get(name) for name in READ_BY_ALL))
        for name, block in chunk.layers.items():
            kind = kind_of(self.config.parallel.recompute, int(name))
            x, own = yield from self.forward_block(chunk, block, kind, x, positions, tape)
            if own is not None:
                auxiliary = auxiliary + own
        if stage == self.last:
            tape.end = self.part("none", self.head, chunk, x, auxiliary, batch["labels"])
        else:
            self.values["out", stage, number] = (x,) if auxiliary is None else (x, auxiliary)

    def forward_block(
        self, chunk: nn.Module, block: Any, kind: str, x: Tensor, positions: Any, tape: Tape
    ) -> Pass:
        """Run one block; returns its output [B, S', D] and auxiliary losses [B, 2] or None."""
        if not isinstance(block, MoEBlock) or block.mlp.ep is None:
            first = self.part(kind, self.whole_block, chunk, block, x, positions)
            tape.blocks.append(BlockTape(first))
            x, own, routing = first.detached()
            self.count(chunk, block, routing)
            return x, own
        mlp, group = block.mlp, block.mlp.ep
        first = self.part(kind, self.until_router, chunk, block, x, positions)
        residual, hidden, weights, own, routing = first.detached()
        self.count(chunk, block, routing)
        exchange = plan(routing.expert_ids, mlp.experts_per_rank, group)
        sent = [pack(x, exchange) for x in (hidden, weights, routing.expert_ids)]
        message = self.start(sent, exchange.send, exchange.receive, group)
        yield
        rows, weights, ids = self.wait(message)
        ids = number_own(ids, mlp.experts_per_rank, group)
        local = replace(routing, expert_ids=ids, weights=weights)
        experts = self.part(kind, self.bank, block, rows, weights, local)
        message = self.start(experts.detached(), exchange.receive, exchange.send, group)
        yield
        (back,) = self.wait(message)
        last = self.part("none", self.aggregate, block, residual, back, exchange)
        tape.blocks.append(BlockTape(first, experts, last, exchange))
        return last.detached()[0], own

    def backward(self, stage: int, number: int) -> Pass:
        """Run the backward of one pass; leaves the gradients of the inputs for the stage before."""
        tape = self.tapes.pop((stage, number))
        if tape.end is not None:
            _, grad, auxiliary, _ = self.back(tape.end, torch.ones_like(tape.end.outputs[0]))
        else:
            grad, *rest = self.arrived("grad", stage + 1, number)
            auxiliary = rest[0] if rest else None
        while tape.blocks:
            grad = yield from self.backward_block(tape.blocks.pop(), grad, auxiliary)
        if tape.begin is not None:
            self.back(tape.begin, grad)
        else:
            self.values["grad", stage, number] = (grad,) if auxiliary is None else (grad, auxiliary)

    def backward_block(self, block: BlockTape, grad: Tensor, auxiliary: Tensor | None) -> Pass:
        """Run the backward of one block; returns the gradient of its input, [B, S', D]."""
        exchange = block.exchange
        if exchange is None or block.last is None or block.experts is None:
            return self.back(block.first, grad, auxiliary, None)[2]
        group = exchange.group
        _, residual, back, _ = self.back(block.last, grad)
        message = self.start([back], exchange.send, exchange.receive, group)
        yield
        _, rows, weights, _ = self.back(block.experts, *self.wait(message))
        message = self.start([rows, weights], exchange.receive, exchange.send, group)
        yield
        hidden, weights = (unpack(x, exchange) for x in self.wait(message))
        return self.back(block.first, residual, hidden, weights, auxiliary, None)[2]

    # What a benchmark replaces to keep a clock of its own

    def part(self, kind: str, function: Callable[..., Any], *inputs: Any) -> Part:
        """Run a piece of a pass."""
        return Part(kind, function, *inputs)

    def back(self, part: Part, *grads: Tensor | None) -> list[Any]:
        """Run a piece backward."""
        return part.back(*grads)

    def start(
        self, tensors: Sequence[Tensor], send: list[int], receive: list[int], group: Any
    ) -> Message:
        """Start a message between the ranks of the experts, see Message for shapes [R, ...]."""
        return Message(tensors, send, receive, group)

    def wait(self, message: Message) -> list[Tensor]:
        """Wait for a message; returns its rows [R, ...]."""
        return message.wait()

    # Functions of parts: everything they read is an argument

    def whole_block(self, chunk: nn.Module, block: Any, x: Tensor, positions: Any) -> Any:
        """Run all five parts of a block on x [B, S', D], without messages to other experts."""
        x, routing = type(block).forward(block, x, positions)
        return x, self.own_losses(chunk, routing), routing

    def until_router(self, chunk: nn.Module, block: Any, x: Tensor, positions: Any) -> Any:
        """Run attention and router on x [B, S', D]."""
        residual, hidden, routing = block.attention(x, positions)
        return residual, hidden, routing.weights, self.own_losses(chunk, routing), routing

    def bank(self, block: Any, rows: Tensor, weights: Tensor, routing: Routing) -> Any:
        """Run this rank's experts on the rows [R', D] that came."""
        return (block.experts(rows, replace(routing, weights=weights)),)

    def aggregate(self, block: Any, residual: Tensor, back: Tensor, exchange: Exchange) -> Any:
        """Add the rows [R, D] that came back to the tokens [B, S', D]."""
        return (block.aggregate(residual, unpack(back, exchange)),)

    def head(self, chunk: nn.Module, x: Tensor, auxiliary: Any, labels: Tensor) -> Any:
        """Return the loss that backward starts from, and count it; x [B, S', D]."""
        output = (chunk.logits(x),) if auxiliary is None else (chunk.logits(x), auxiliary)
        return (self.loss(output, labels),)

    def own_losses(self, chunk: nn.Module, routing: Routing | None) -> Tensor | None:
        """Return a block's balance and z losses [B, 2], None of a dense block."""
        if routing is None:
            return None
        return torch.stack(chunk.auxiliary([routing]), 1).to(self.wide)

    def count(self, chunk: nn.Module, block: Any, routing: Routing | None) -> None:
        """Add a block's choices to the counts of the step."""
        if routing is None or self.loads is None:
            return
        blocks = [b for b in chunk.layers.values() if isinstance(b, MoEBlock)]
        row = moe_rows(chunk)[blocks.index(block)]
        self.loads[row] += routing.tokens_per_expert


def hold(chunk: nn.Module) -> None:
    """Gather what fully_shard keeps in rows, until perform_reduce_grad lets it go again."""
    modules = fsdp_modules(chunk)
    if not modules:
        return
    from torch.distributed.fsdp import fully_shard

    # The parts are called without the chunk's own forward, which would do this.
    fully_shard.state(modules[0])._lazy_init()
    for module in modules:
        module.unshard()
    modules[0].set_is_last_backward(False)
    modules[0].set_reshard_after_backward(False)
    modules[0].set_requires_gradient_sync(False)


def _place(action: Any) -> tuple[int, int]:
    return action.stage_index, action.microbatch_index
