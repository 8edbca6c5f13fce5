"""Attention whose scores are capped smoothly, so that none can run away.

    scores = cap * tanh(Q K^T * scale / cap)

Fused kernels know no cap: scores stand in memory, [B, H, S, S], and a long sequence costs more.
Nothing is learned. Source: Gemma Team 2024, "Gemma 2", section 2, where cap is 50.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curry_train.config import Config
from curry_train.layers.attention import Attention, Positions
from curry_train.layers.rope import rotate
from curry_train.parallel.collectives import gather_sequence

CAP = 50.0


class SkeletonNameAttention(Attention):
    """Attention with capped scores, same arguments and shapes as `Attention`.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype. Softmax is taken in float32
    (float64 for float64). Context parallelism is refused: the keys of other ranks are not here.
    """

    proved = frozenset({"dp", "tp", "pp", "ep"})

    @staticmethod
    def refusals(config: Config) -> Iterator[tuple[str, str]]:
        """Yield (key, why) for settings that this attention does not read."""
        if config.model.attention_sinks:
            yield (
                "model.attention_sinks",
                "model.attention=skeleton_name has none; set model.attention_sinks=false",
            )

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self.tp)
        q = self.heads_of(self.q_proj(x_BSD), self.q_norm)
        k = self.heads_of(self.k_proj(x_BSD), self.k_norm)
        v = self.heads_of(self.v_proj(x_BSD), None)
        q = rotate(q, positions.cos, positions.sin, self.interleaved)
        k = rotate(k, positions.cos, positions.sin, self.interleaved)
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
        scores = CAP * torch.tanh(scores * self.scale / CAP)
        mask, length = positions.masks[self.window], q.shape[2]
        if mask is None:
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        else:
            scores = scores + mask.to(scores.dtype)
        found = scores.softmax(-1).to(v.dtype) @ v
        return self.o_proj(found.transpose(1, 2).flatten(2))
