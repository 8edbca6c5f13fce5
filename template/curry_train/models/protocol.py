"""What the trainer asks of a model.

A model is a module whose forward takes a batch and returns `ModelOutput`, with a class attribute
`Config` (the dataclass of its `model` group) and these attributes:
`layers` (blocks keyed by their global index), `vocab_size`, `vocab_parameters`, `compute_dtype`,
`active_share`, `init_std(name)` and `tie_weights()`.
A block is five parts. Whoever keeps them gets every parallelism and the overlapped pipeline,
which runs the parts of two micro-batches in turn.

Parameters carry Hugging-Face-like names, the same in memory and on disk; `saved_view` says which
part of a parameter is real (the vocabulary is padded in memory only).
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
from curry_train.layers.moe import Route
from curry_train.models import MODELS

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


class ModelOutput(NamedTuple):
    """What a forward pass returns.

    Shapes: logits [B, S, padded vocabulary] in the compute dtype, minus infinity at the padding;
    aux_loss and z_loss [B], summed over blocks, already multiplied by their coefficients, or None
    for a model without experts.
    """

    logits: Tensor
    aux_loss: Tensor | None
    z_loss: Tensor | None


class Block(Protocol):
    """The five parts of a decoder block; T = B*S tokens, R rows sorted by expert (R = T if dense).

    attention:  [B, S, D] -> residual [B, S, D], rows [R, D], route
    dispatch:   rows in local order -> rows on the ranks that own their experts
    experts:    rows -> rows
    combine:    rows back on the ranks and in the order of `attention`
    aggregate:  residual + rows -> [B, S, D]
    """

    def attention(
        self, x_BSD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Route | None]: ...

    def dispatch(self, rows_RD: Tensor, route: Route | None) -> Tensor: ...

    def experts(self, rows_RD: Tensor, route: Route | None) -> Tensor: ...

    def combine(self, rows_RD: Tensor, route: Route | None) -> Tensor: ...

    def aggregate(self, residual_BSD: Tensor, rows_RD: Tensor, route: Route | None) -> Tensor: ...


def run_block(block: Block, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Route | None]:
    """Compose the five parts; returns [B, S, D] and the route (None for a dense block)."""
    residual, rows, route = block.attention(x_BSD, positions)
    rows = block.dispatch(rows, route)
    rows = block.experts(rows, route)
    rows = block.combine(rows, route)
    return block.aggregate(residual, rows, route), route


def build_model(config: Config, device: torch.device | str) -> nn.Module:
    """Build the configured model on `device`; on "meta" it has shapes and no values.

    Parameters are float32 (float64 under fp64) and hold the values of `init_weights`.
    Raises KeyError when model.architecture is unknown (config.check says it first).
    """
    module, name = MODELS[config.model.architecture].split(":")
    model_class = getattr(import_module(module), name)
    compute = COMPUTE_DTYPES[config.precision]
    stored = torch.promote_types(compute, torch.float32)
    default = torch.get_default_dtype()
    torch.set_default_dtype(stored)
    try:
        with torch.device("meta"):
            model = model_class(config.model, compute_dtype=compute)
    finally:
        torch.set_default_dtype(default)
    if str(device) != "meta":
        model.to_empty(device=device)
        model.tie_weights()
        init_weights(model, config.seed)
    return model


def saved_view(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return the part of `tensor` that is the parameter `name`: all but the padded vocabulary.

    Shapes: [padded, D] becomes a view [vocab_size, D] for the tensors in `model.vocab_parameters`.
    """
    return tensor[: model.vocab_size] if name in model.vocab_parameters else tensor


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter once as (canonical name, view of its real part)."""
    for name, parameter in model.named_parameters():
        yield name, saved_view(model, name, parameter.detach())


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends on (seed, name) only, not on what was drawn before."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter from its own generator, at its full global shape, in float32.

    Vectors become ones (all of them are norm weights); matrices are normal with mean 0 and the
    standard deviation `model.init_std(name)`; stacked experts [E, ...] draw expert by expert.
    A layout that holds a slice takes the slice of the same draw, so no layout changes a value.
    """
    for name, parameter in model.named_parameters():
        parameter.zero_()
        real = saved_view(model, name, parameter)
        if real.dim() == 1:
            real.fill_(1.0)
            continue
        std = model.init_std(name)
        if real.dim() == 3:
            for expert, weight in enumerate(real):
                weight.copy_(_normal(weight.shape, std, generator_for(seed, f"{name}#{expert}")))
        else:
            real.copy_(_normal(real.shape, std, generator_for(seed, name)))


def _normal(shape: Any, std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (all, active per token) parameters with the unpadded vocabulary."""
    total = active = 0
    for _, tensor in named_state(model):
        total += tensor.numel()
        share = model.active_share if tensor.dim() == 3 else 1.0
        active += round(tensor.numel() * share)
    return total, active
