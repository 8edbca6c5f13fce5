"""A router that compares directions: logits are cosines over a learned temperature.

    logit_e = cos(x, w_e) / tau

The length of a token's vector has no say, so that hidden states need not gather round the experts'
vectors to be told apart. One number is new. We leave out the projection to a smaller space.
Source: Chi et al. 2022, "On the Representation Collapse of Sparse Mixture of Experts", section 3.2,
where tau starts at 0.3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.config import ModelConfig
from curry_train.layers.linear import local
from curry_train.layers.routing import TopKRouter, without_autocast

START, FLOOR = 0.3, 0.01


class SkeletonNameRouter(TopKRouter):
    """`TopKRouter` with other logits; all else, balance and z-loss too, is its own.

    Shapes: as `TopKRouter`. The temperature is learned and stays above FLOOR.
    """

    proved = frozenset({"dp", "tp", "cp", "pp", "ep"})

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.temperature = nn.Parameter(torch.empty(1))
        self.constants = {"temperature": START}

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [..., E] of x [..., D], in float32 (float64 for float64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else local(self.bias).to(wide)
        with without_autocast(x.device.type):
            x, weight = (F.normalize(each.to(wide), dim=-1) for each in (x, local(self.weight)))
            tau = local(self.temperature).to(wide).clamp(min=FLOOR)
            return F.linear(x / tau, weight, bias)
