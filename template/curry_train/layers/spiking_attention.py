"""Causal attention between spikes, without a softmax: a running sum of key-value products.

Source: Katharopoulos et al. 2020, "Transformers are RNNs", equations 16 to 20, without feature map
and divisor; the decay and the form in chunks: Sun et al. 2023, "Retentive Network", equation 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from curry_train.layers.attention import Positions
from curry_train.layers.lif import LIF
from curry_train.layers.linear import Linear
from curry_train.layers.norm import RMSNorm

if TYPE_CHECKING:
    from curry_train.models.spiking import SpikingConfig

CHUNK = 64


class SpikingNorm(nn.Module):
    """RMSNorm, then neurons over time.

    Shapes: x [time*B, ..., width]; returns spikes of 0 and 1 in the same shape and dtype.
    """

    def __init__(self, config: SpikingConfig, width: int) -> None:
        super().__init__()
        self.time_steps = config.time_steps
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lif = LIF(
            leak=config.leak,
            threshold=config.threshold,
            surrogate=config.surrogate,
            slope=config.surrogate_slope,
            reset=config.reset,
            detach_reset=config.detach_reset,
            learn_leak=config.learn_leak,
        )

    def forward(self, x: Tensor) -> Tensor:
        spikes, _ = self.lif(self.norm(x).unflatten(0, (self.time_steps, -1)))
        return spikes.flatten(0, 1)


def head_decay(heads: int) -> Tensor:
    """Return the decay of every head [H], float64: 1 - 2^-(h+1), a memory of about 2^(h+1) tokens.

    Each head sees twice as far as the one before; a shift and a subtraction do it.
    """
    return 1 - 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay_H: Tensor, doc_ids: Tensor | None, chunk: int = CHUNK
) -> Tensor:
    """Return q_i M_i with M_i = decay * M_(i-1) + k_i^T v_i, M = 0 before each document.

    Shapes: q, k, v [N, H, S, A]; decay [H]; doc_ids int64 [N, S] or None; returns [N, H, S, A].
    Inside a chunk by masked products, between chunks by the state [N, H, A, A]: exact, and linear
    in S. Documents are contiguous.
    """
    batch, heads, length, width = q.shape
    if doc_ids is None:
        doc_ids = torch.zeros(1, length, dtype=torch.int64, device=q.device)
    state, outs = q.new_zeros(batch, heads, width, width), []
    decay, before = decay_H[:, None], doc_ids[:, :1]
    parts = (x.split(chunk, dim) for x, dim in ((q, 2), (k, 2), (v, 2), (doc_ids, 1)))
    for q_now, k_now, v_now, docs in zip(*parts, strict=True):
        index = torch.arange(docs.shape[1], device=q.device)
        distance = index[:, None] - index
        seen = (distance >= 0) & (docs[:, None, :, None] == docs[:, None, None, :])
        inside = seen * decay[..., None] ** distance.clamp(min=0)
        reads = decay ** (index + 1) * (docs == before)[:, None]
        writes = decay ** (len(index) - 1 - index) * (docs == docs[:, -1:])[:, None]
        outs.append((q_now @ k_now.mT * inside) @ v_now + reads[..., None] * (q_now @ state))
        state = reads[..., -1:, None] * state + (k_now * writes[..., None]).mT @ v_now
        before = docs[:, -1:]
    return torch.cat(outs, 2)


class SpikingAttention(nn.Module):
    """Spike-driven linear attention at every time step; see models/spiking.py.

    Shapes: spikes [time*B, S, D]; returns a current of the same shape and dtype. Sums are formed
    in float32 (float64 under fp64).
    """

    def __init__(self, config: SpikingConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_attention_heads, self.time_steps = config.num_attention_heads, config.time_steps
        self.q_proj, self.k_proj = Linear(width, width), Linear(width, width)
        self.v_proj, self.o_proj = Linear(width, width), Linear(width, width)
        self.q_spikes, self.k_spikes = SpikingNorm(config, width), SpikingNorm(config, width)
        self.v_spikes, self.out_spikes = SpikingNorm(config, width), SpikingNorm(config, width)

    def forward(self, spikes: Tensor, positions: Positions) -> Tensor:
        wide = torch.promote_types(spikes.dtype, torch.float32)
        heads = self.num_attention_heads
        q, k, v = (
            x.to(wide).unflatten(-1, (heads, -1)).transpose(1, 2)
            for x in (
                self.q_spikes(self.q_proj(spikes)),
                self.k_spikes(self.k_proj(spikes)),
                self.v_spikes(self.v_proj(spikes)),
            )
        )
        decay = head_decay(heads).to(spikes.device, wide)
        docs = positions.doc_ids
        docs = None if docs is None else docs.repeat(self.time_steps, 1)
        out = linear_attention(q, k, v, decay, docs)
        return self.o_proj(self.out_spikes(out.transpose(1, 2).flatten(2).to(spikes.dtype)))
