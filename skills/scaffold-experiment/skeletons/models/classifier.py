"""A classifier of rows of numbers: residual feed-forwards behind norms, then one logit a class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curry_train.config import Count, Positive
from curry_train.layers.linear import Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.norm import RMSNorm
from curry_train.loss import TokenSums, class_sums


@dataclass(frozen=True)
class SkeletonNameConfig:
    """A classifier of rows."""

    architecture: str = "skeleton_name"
    """Key of curry_train.models.MODELS."""
    features: Count = 16
    """Numbers in a row."""
    classes: Count = 4
    """Classes to tell apart; labels are 0 to classes - 1, -100 where there is none."""
    hidden_size: Count = 64
    """Width of the residual stream."""
    intermediate_size: Count = 128
    """Hidden width of a feed-forward."""
    num_hidden_layers: Count = 2
    """Blocks."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square inside RMSNorm."""


class SkeletonNameBlock(nn.Module):
    """A feed-forward behind a norm, added to the residual stream.

    Shapes: x [B, hidden_size]; returns the same shape and dtype.
    """

    def __init__(self, config: SkeletonNameConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.mlp(self.norm(x_BD))


class SkeletonName(nn.Module):
    """A classifier.

    Shapes: inputs float32 [B, features]; returns logits [B, classes] in the compute dtype.
    """

    Config = SkeletonNameConfig
    vocab_size, vocab_parameters, active_share = 0, (), 1.0

    def __init__(self, config: SkeletonNameConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.embed = Linear(config.features, config.hidden_size, bias=True)
        blocks = {str(i): SkeletonNameBlock(config) for i in range(config.num_hidden_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.classes, bias=True)

    def tie_weights(self) -> None:
        """Do nothing: no weights are shared."""

    def init_constant(self, name: str) -> float | None:
        """Return the value that all of `name` starts with, None when it is drawn."""
        return 1.0 if name.endswith("norm.weight") else 0.0 if name.endswith(".bias") else None

    def init_std(self, name: str) -> float:
        """Return the standard deviation that the matrix `name` starts with.

        The head starts near zero, so that the first loss is that of guessing.
        """
        return 0.02 if name.startswith("head.") else self.get_parameter(name).shape[-1] ** -0.5

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs.to(self.compute_dtype))
        for block in self.layers.values():
            x = block(x)
        return self.head(self.norm(x))

    def loss_sums(self, batch: Mapping[str, Tensor]) -> TokenSums:
        """Return the cross entropy of a batch, summed, and its number of labels."""
        return class_sums(self(batch["inputs"]), batch["labels"])
