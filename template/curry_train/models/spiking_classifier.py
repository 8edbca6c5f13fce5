"""The blocks of the spiking transformer under a pooled head, for events that arrive over time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curry_train.layers.linear import Linear
from curry_train.models.spiking import SpikingBody, SpikingConfig, init_constant, init_std


class SpikingClassifier(nn.Module):
    """Classify frames by the mean over time steps and places of what the blocks make of them.

    Shapes: frames [B, time, S, C] of events, time as in the config; returns logits [B, classes] in
    the compute dtype. It is trained as it stands by any loop; `init_weights` of protocol.py gives
    it its first values.
    Raises ValueError when the frames have another number of time steps than the neurons.
    """

    vocab_size, vocab_parameters, active_share = 0, (), 1.0

    def __init__(
        self, config: SpikingConfig, *, channels: int, classes: int, compute_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.embed_frames = Linear(channels, config.hidden_size)
        self.model = SpikingBody(config)
        self.head = Linear(config.hidden_size, classes)

    @property
    def layers(self) -> nn.ModuleDict:
        return self.model.layers

    def init_constant(self, name: str) -> float | None:
        """Return the value that all of `name` starts with, None when it is drawn."""
        return init_constant(self, name)

    def init_std(self, name: str) -> float:
        """Return the standard deviation that the matrix `name` starts with."""
        channels = self.embed_frames.weight.shape[1]
        return channels**-0.5 if "embed_frames" in name else init_std(self.config, name)

    def forward(self, frames: Tensor) -> Tensor:
        if frames.dim() != 4 or frames.shape[1] != self.config.time_steps:
            raise ValueError(
                f"frames have shape {list(frames.shape)}: they must be [B, time, S, C] with time"
                f" {self.config.time_steps}; set time_steps of the config to that of the frames"
            )
        current = self.embed_frames(frames.to(self.compute_dtype)).transpose(0, 1)
        return self.head(self.model(current).mean(1))
