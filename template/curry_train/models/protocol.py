"""What the trainer asks of a model.

A model is a module whose forward takes a batch and returns `ModelOutput`, with a class attribute
`Config` (the dataclass of its `model` group) and these attributes:
`layers` (blocks keyed by their global index), `vocab_size`, `vocab_parameters`, `compute_dtype`,
`active_share`, `init_constant(name)`, `init_std(name)` and `tie_weights()`.
A model of samples that are no text returns what it likes, and its `loss_sums(batch)` calls itself
and returns loss.TokenSums; `vocab_size` is 0, `vocab_parameters` empty.
A block is five parts. Whoever keeps them gets every parallelism and the overlapped pipeline,
which runs the parts of two micro-batches in turn.

Parameters carry Hugging-Face-like names. Two things stand otherwise in memory than on disk: the
vocabulary is padded, and the experts' gate and up projections are one matrix. `saved_parts` is
the one place that knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from curry_train.config import Config
from curry_train.layers.attention import Positions
from curry_train.layers.moe import GateUpLinear
from curry_train.layers.routing import Routing
from curry_train.models import MODELS
from curry_train.parallel.shards import Part

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


class ModelOutput(NamedTuple):
    """What a forward pass returns.

    Shapes: logits [B, S, padded vocabulary] in the compute dtype, minus infinity at the padding;
    aux_loss and z_loss [B], summed over blocks, already multiplied by their coefficients;
    tokens_per_expert int64 [MoE blocks, E]; all three None for a model without experts.
    """

    logits: Tensor
    aux_loss: Tensor | None = None
    z_loss: Tensor | None = None
    tokens_per_expert: Tensor | None = None


class Block(Protocol):
    """The five parts of a decoder block; T = B*S tokens here, any number on the way.

    attention:  [B, S, D] -> residual [B, S, D], x [T, D], routing (None for a dense block)
    dispatch:   x and routing -> the rows that the experts of this rank work on, and theirs
    experts:    rows -> rows, each the weighted sum over its experts of this rank
    combine:    rows and their routing -> out [T, D], summed over the ranks that worked on a token
    aggregate:  residual + out -> [B, S, D]
    """

    def attention(
        self, x_BSD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Routing | None]: ...

    def dispatch(self, x_TD: Tensor, routing: Routing | None) -> tuple[Tensor, Routing | None]: ...

    def experts(self, x_TD: Tensor, routing: Routing | None) -> Tensor: ...

    def combine(self, out_TD: Tensor, routing: Routing | None) -> Tensor: ...

    def aggregate(self, residual_BSD: Tensor, out_TD: Tensor) -> Tensor: ...


def run_block(block: Block, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Routing | None]:
    """Compose the five parts; returns [B, S, D] and the routing (None for a dense block)."""
    residual, x, routing = block.attention(x_BSD, positions)
    rows, local = block.dispatch(x, routing)
    out = block.combine(block.experts(rows, local), local)
    return block.aggregate(residual, out), routing


def meta_model(config: Config) -> nn.Module:
    """Return the configured model without values, on the meta device.

    Parameters are float32 (float64 under fp64). Raises KeyError when model.architecture is unknown
    (config.check says it first).
    """
    module, name = MODELS[config.model.architecture].split(":")
    model_class = getattr(import_module(module), name)
    compute = COMPUTE_DTYPES[config.precision]
    stored = torch.promote_types(compute, torch.float32)
    default = torch.get_default_dtype()
    torch.set_default_dtype(stored)
    try:
        with torch.device("meta"):
            return model_class(config.model, compute_dtype=compute)
    finally:
        torch.set_default_dtype(default)


def give_memory(model: nn.Module, device: torch.device | str) -> None:
    """Move a model from the meta device to `device`; parameters without values, buffers zero."""
    model.to_empty(device=device)
    model.tie_weights()
    for module in model.modules():
        if isinstance(module, GateUpLinear):
            module.interleaved = torch.device(device).type == "cuda"
    for buffer in model.buffers():
        buffer.zero_()


def build_model(config: Config, device: torch.device | str) -> nn.Module:
    """Build the whole model on `device`; on "meta" it has shapes and no values.

    Parameters hold the values of `init_weights`. Raises as `meta_model` does.
    """
    model = meta_model(config)
    if str(device) != "meta":
        give_memory(model, device)
        init_weights(model, config.seed)
    return model


def saved_parts(model: nn.Module, name: str, part: Part) -> dict[str, Part]:
    """Return what a part of a parameter (or of its gradient, its moment) is under files' names.

    Shapes: a padded vocabulary [padded, D] becomes [vocab_size, D]; a gate_up_proj [E, 2F, ...]
    gate_proj and up_proj [E, F, ...]; all else is itself. Tensors are views.
    """
    tensor, shape, offset = part
    if name in model.vocab_parameters:
        real = model.vocab_size
        rows = min(max(real - offset[0], 0), len(tensor))
        first = min(offset[0], real)
        return {name: Part(tensor[:rows], (real, *shape[1:]), (first, *offset[1:]))}
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if not isinstance(module, GateUpLinear):
        return {name: part}
    bank = owner.rpartition(".")[0]
    half = (shape[0], shape[1] // 2, *shape[2:])
    return {
        f"{bank}.{piece}.{leaf}": Part(view, half, offset)
        for piece, view in module.parts(tensor).items()
    }


def saved_views(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return `saved_parts` of a whole tensor as plain views."""
    parts = saved_parts(model, name, Part.whole(tensor))
    return {saved: part.tensor for saved, part in parts.items()}


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, view of its real part) of every parameter once, then of buffers."""
    for name, parameter in model.named_parameters():
        yield from saved_views(model, name, parameter.detach()).items()
    yield from model.named_buffers()


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends on (seed, name) only, not on what was drawn before."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def init_weights(model: nn.Module, seed: int) -> None:
    """Give every parameter of a whole model the values of `init_part`; buffers are zero."""
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        init_part(model, name, Part.whole(parameter), seed)


@torch.no_grad()
def init_part(model: nn.Module, name: str, part: Part, seed: int) -> None:
    """Fill a part of a parameter from the parameter's own generator.

    What `model.init_constant` knows gets that value; the rest is normal with mean 0 and standard
    deviation `model.init_std(name)`, drawn in float32 at the full global shape, of stacked experts
    [E, ...] expert by expert, and then cut: no layout changes a value. Padding is zero.
    """
    part.tensor.zero_()
    for saved, (view, shape, offset) in saved_parts(model, name, part).items():
        constant = model.init_constant(saved)
        if constant is not None:
            view.fill_(constant)
            continue
        std = model.init_std(saved)
        box = tuple(slice(at, at + size) for at, size in zip(offset, view.shape, strict=True))
        if view.dim() == 3:
            for expert, weight in enumerate(view, start=offset[0]):
                generator = generator_for(seed, f"{saved}#{expert}")
                weight.copy_(_normal(shape[1:], std, generator)[box[1:]])
        elif view.numel():
            view.copy_(_normal(shape, std, generator_for(seed, saved))[box])


def _normal(shape: Any, std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (all, active per token) parameters with the unpadded vocabulary."""
    total = active = 0
    for name, parameter in model.named_parameters():
        for saved, view in saved_views(model, name, parameter).items():
            total += view.numel()
            share = model.active_share if ".experts." in saved else 1.0
            active += round(view.numel() * share)
    return total, active
