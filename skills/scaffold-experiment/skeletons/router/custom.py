"""A router to be changed: as it stands, the mathematics of the baseline.

Change `logits` and keep `tests/test_skeleton_name_router.py` green; scores, choice, capacity,
balance and z-loss follow from it. A new parameter starts normal with model.initializer_range unless
`constants` or `deviations` name it (layers/variants.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from curry_train.config import ModelConfig
from curry_train.layers.linear import local
from curry_train.layers.routing import TopKRouter, without_autocast


class SkeletonNameRouter(TopKRouter):
    """`TopKRouter` with logits of its own.

    Shapes: as `TopKRouter`. Layouts beyond `proved` are refused: name tp, cp, pp or ep there once
    the tests, which then prove it, pass.
    """

    proved = frozenset({"dp"})

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [..., E] of x [..., D], in float32 (float64 for float64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else local(self.bias).to(wide)
        with without_autocast(x.device.type):
            return F.linear(x.to(wide), local(self.weight).to(wide), bias)
