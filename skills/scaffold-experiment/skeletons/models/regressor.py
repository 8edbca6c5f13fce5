"""A regressor of sequences: a value for each place from what stands at it and before.

Causal attention and feed-forwards behind norms, as in the decoder, under a head of one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curry_train.config import Count, ModelConfig, Positive
from curry_train.layers.attention import Attention, Positions, positions_of
from curry_train.layers.linear import Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.norm import RMSNorm
from curry_train.loss import TokenSums, value_sums
from curry_train.model_rules import model_problems


@dataclass(frozen=True)
class SkeletonNameConfig:
    """A regressor of sequences."""

    architecture: str = "skeleton_name"
    """Key of curry_train.models.MODELS."""
    channels: Count = 1
    """Numbers at each place of the input."""
    hidden_size: Count = 64
    """Width of the residual stream."""
    intermediate_size: Count = 128
    """Hidden width of a feed-forward."""
    num_hidden_layers: Count = 2
    """Blocks."""
    num_attention_heads: Count = 4
    """Heads."""
    head_dim: Count = 16
    """Width of one head."""
    max_position_embeddings: Count = 4096
    """Longest sequence the model is meant for; data.seq_len may not exceed it."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square inside RMSNorm."""

    def of_layers(self) -> ModelConfig:
        """Return the settings as the layers of the package read them."""
        return ModelConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
        )

    def problems(self) -> list[str]:
        """Say in sentences which values do not go together."""
        return model_problems(self.of_layers())


class SkeletonNameBlock(nn.Module):
    """Attention and a feed-forward, each behind a norm and added to the residual stream.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.attention_norm(x_BSD), positions)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class SkeletonName(nn.Module):
    """A regressor.

    Shapes: inputs float32 [B, S, channels]; returns values [B, S] in the compute dtype.
    """

    Config = SkeletonNameConfig
    vocab_size, vocab_parameters, active_share = 0, (), 1.0

    def __init__(self, config: SkeletonNameConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.of_layers = config.of_layers()
        self.embed = Linear(config.channels, config.hidden_size, bias=True)
        self.layers = nn.ModuleDict(
            {str(i): SkeletonNameBlock(self.of_layers, i) for i in range(config.num_hidden_layers)}
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, 1, bias=True)

    def tie_weights(self) -> None:
        """Do nothing: no weights are shared."""

    def init_constant(self, name: str) -> float | None:
        """Return the value that all of `name` starts with, None when it is drawn."""
        return 1.0 if name.endswith("norm.weight") else 0.0 if name.endswith(".bias") else None

    def init_std(self, name: str) -> float:
        """Return the standard deviation that the matrix `name` starts with.

        The head starts near zero, so that the first loss is that of predicting zero.
        """
        return 0.02 if name.startswith("head.") else self.get_parameter(name).shape[-1] ** -0.5

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs.to(self.compute_dtype))
        places = torch.arange(x.shape[1], device=x.device)[None]
        positions = positions_of(self.of_layers, places, None, self.compute_dtype)
        for block in self.layers.values():
            x = block(x, positions)
        return self.head(self.norm(x)).squeeze(-1)

    def loss_sums(self, batch: Mapping[str, Tensor]) -> TokenSums:
        """Return the squared error of a batch, summed, and its number of values."""
        return value_sums(self(batch["inputs"]), batch["labels"])
