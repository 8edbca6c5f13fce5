"""Activations made again in backward instead of kept: none, full, selective, every n-th block.

The graph is the one of plain execution; only the tensors that it saves are left out and come back
when backward first asks for one, by running the function once more. So inputs without gradients,
results in dataclasses (Routing) and hooks work, and what the first run returned, such as counts of
tokens, stands. Gradients are equal bit for bit: the same operations on the same numbers, under the
same random state, which is put back afterwards.

full keeps the input of a block and runs the whole block again, its messages to other ranks too, in
the same order on every rank. selective keeps what is dear to make, matrix products, attention,
experts and messages, and makes norms, rotations, activations and casts again.

torch.utils.checkpoint serves compiled blocks. In plain execution it would run a block again for
every call of backward that meets it; schedules with a split backward make one for the input and
one for each group of weights, a dozen a block, and its selective form refuses the second one.
Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm")
KEPT = {f"aten::{name}" for name in PRODUCTS} | {
    "curry_train::gmm",
    "curry_train::gmm_swiglu",
    "curry_train::moe_experts",
}
KEPT_FAMILIES = ("aten::_scaled_dot_product_", "_c10d_functional")
"""Attention kernels, and what a compiler makes of a collective; see `message` for plain ones."""
_here = threading.local()


def kept_ops(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Tell for an op of any shape whether selective keeps its result or makes it again."""
    name = op.name().partition(".")[0]
    kept = name in KEPT or name.startswith(KEPT_FAMILIES)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def message(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a function that returns what other ranks sent, any shape, without a gradient.

    Where selective makes a part again, the tensor of its first run is returned and nothing is
    sent: a collective writes into a buffer, so the policy of ops cannot keep its result.
    Group: the function's own.
    """

    @wraps(function)
    def send_once(*args: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return function(*args)
        region: _Region | None = getattr(_here, "region", None)
        if region is None:
            return function(*args)
        if not region.again:
            region.received.append(function(*args).detach())
            return region.received[-1].detach()
        return region.received.pop(0)

    return send_once


class _Saved:
    """What the graph holds in the place of a tensor, and the tensor once it was made again."""

    def __init__(self, tensor: Tensor) -> None:
        self.kind = (tensor.shape, tensor.dtype, tensor.device)
        self.tensor: Tensor | None = None


class _Enough(Exception):
    """Every tensor that the graph still waits for was made again."""


class _Region:
    """function(*args) whose saved tensors, any shape, are made again, all of them at once.

    A tensor lives from then on until its node of the graph has run for the last time, as in plain
    execution. That is what lets several calls of backward share one repetition.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], selective: bool):
        self.function = function
        self.args = [_cut(arg) for arg in args]
        self.slots: list[weakref.ref[_Saved]] = []
        self.again, self.received = False, []
        self.ops = create_selective_checkpoint_contexts(kept_ops) if selective else None
        devices = {arg.device for arg in args if isinstance(arg, Tensor)}
        self.gpus = [device for device in devices if device.type == "cuda"]
        self.random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.gpus)]
        kinds = {"cpu", *(device.type for device in devices)} - {"meta"}
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]

    def run(self, args: Any, pack: Callable[[Tensor], Any]) -> Any:
        before = getattr(_here, "region", None)
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(pack, self.unpack))
            if self.ops is not None:
                stack.callback(setattr, _here, "region", before)
                stack.enter_context(self.ops[self.again])
                _here.region = self
            return self.function(*args)

    def pack(self, tensor: Tensor) -> _Saved:
        slot = _Saved(tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Saved) -> Tensor:
        if slot.tensor is None:
            self.make_again()
        if slot.tensor is None:
            raise RuntimeError(self.differs("fewer tensors"))
        return slot.tensor

    def make_again(self) -> None:
        self.again = True
        slots = [slot() for slot in self.slots]
        missing = sum(slot is not None for slot in slots)
        rest = iter(slots)

        def pack(tensor: Tensor) -> None:
            nonlocal missing
            slot = next(rest)
            if slot is None:
                return
            if slot.kind != (tensor.shape, tensor.dtype, tensor.device):
                raise RuntimeError(self.differs(f"{list(tensor.shape)}, not {list(slot.kind[0])}"))
            slot.tensor = tensor.detach()
            missing -= 1
            if not missing:
                raise _Enough

        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.gpus))
            torch.set_rng_state(self.random[0])
            for device, state in zip(self.gpus, self.random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(torch.enable_grad())
            with suppress(_Enough):
                self.run(self.args, pack)
        self.args, self.received, self.ops = [], [], None

    def differs(self, what: str) -> str:
        return (
            f"{getattr(self.function, '__qualname__', self.function)} made {what} when it ran "
            "again; it must do the same twice: pass what changes as an argument and draw random "
            "numbers from torch, or set parallel.recompute=none"
        )


def _cut(arg: Any) -> Any:
    """Return a tensor without the graph behind it, any shape, and anything else as it is."""
    return arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg


def kind_of(recompute: str | int, index: int) -> str:
    """Return none, full or selective for the block with global index `index`.

    `recompute` is parallel.recompute; a number n means blocks n-1, 2n-1 and so on in full, so a
    model with fewer than n blocks makes none again.
    """
    if isinstance(recompute, str):
        return recompute
    return "none" if (index + 1) % recompute else "full"


def recompute_part(kind: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args), any shape, keeping for backward what `kind` keeps.

    Everything that the function reads must be in `args` or never change: what a closure finds may
    be another value by the time backward runs it again. Groups: those of the function, once more
    under full, not under selective.
    Raises RuntimeError in backward when the function then does something else than at first.
    """
    if kind == "none" or not torch.is_grad_enabled():
        return function(*args)
    if not torch.compiler.is_compiling():
        region = _Region(function, args, kind == "selective")
        return region.run(args, region.pack)
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept_ops)
    return checkpoint(function, *args, use_reentrant=False, **options)


def recompute_blocks(layers: nn.ModuleDict, recompute: str | int) -> None:
    """Make the forward of blocks, any shape, keep what `recompute` says; the last call counts.

    `layers` are keyed by global block index, so pipeline chunks agree with one process. Names of
    parameters and the five parts stay as they are: whoever runs the parts one by one wraps them by
    `recompute_part`. Comes before block.compile() and fully_shard, whose hooks then stand outside.
    """
    for index, block in layers.items():
        block.__dict__.pop("forward", None)
        kind = kind_of(recompute, int(index))
        if kind != "none":
            block.forward = partial(recompute_part, kind, block.forward)
