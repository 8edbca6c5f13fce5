"""A spiking language model with a block of its own: neurons, linear attention, neurons, neurons.

As it stands it computes what the spiking transformer computes. Change `SkeletonNameBlock.forward`;
what meets a matrix should be spikes, and no token may see a later one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curry_train.layers.attention import Positions
from curry_train.layers.spiking_attention import SpikingAttention, SpikingNorm
from curry_train.models.spiking import SpikingConfig, SpikingFeedForward, SpikingTransformer


@dataclass(frozen=True)
class SkeletonNameConfig(SpikingConfig):
    """The settings of the spiking transformer; add yours, a sentence under each."""

    architecture: str = "skeleton_name"
    """Key of curry_train.models.MODELS."""


class SkeletonNameBlock(nn.Module):
    """Attention and feed-forward, each behind neurons; currents are added to the stream.

    Shapes: x [time*B, S, hidden_size], a current for each time step; returns the same shape and
    dtype, and None in the place of a routing.
    """

    def __init__(self, config: SkeletonNameConfig) -> None:
        super().__init__()
        self.input_spikes = SpikingNorm(config, config.hidden_size)
        self.self_attn = SpikingAttention(config)
        self.post_attention_spikes = SpikingNorm(config, config.hidden_size)
        self.mlp = SpikingFeedForward(config)

    def forward(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, None]:
        x_BSD = x_BSD + self.self_attn(self.input_spikes(x_BSD), positions)
        return x_BSD + self.mlp(self.post_attention_spikes(x_BSD)), None


class SkeletonName(SpikingTransformer):
    """A causal language model of spiking neurons.

    Shapes: input_ids int64 [B, S]; position_ids are not used; doc_ids int64 [B, S] or None (the
    running sum is not cut at document ends). Returns ModelOutput.
    """

    Config = SkeletonNameConfig

    def __init__(self, config: SkeletonNameConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__(config, compute_dtype=compute_dtype)
        blocks = {str(i): SkeletonNameBlock(config) for i in range(config.num_hidden_layers)}
        self.model.layers = nn.ModuleDict(blocks)
