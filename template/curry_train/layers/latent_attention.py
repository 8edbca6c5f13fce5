"""Multi-head latent attention: keys and values are read from a narrow vector a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curry_train.config import ModelConfig
from curry_train.layers.attention import Positions, attend_with
from curry_train.layers.linear import Linear
from curry_train.layers.norm import RMSNorm
from curry_train.layers.rope import rotate, softmax_scale
from curry_train.parallel.collectives import gather_sequence


class LatentAttention(nn.Module):
    """Compress to a latent, norm it, expand it to the keys and values of every head, attend.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype. A head of a query or key is
    qk_nope_head_dim entries without rotation, then qk_rope_head_dim that are turned; the turned
    part of a key is one vector that all heads share. A head of a value is v_head_dim wide. What a
    cache must keep of a token is the latent and that shared key: kv_lora_rank + qk_rope_head_dim.
    Groups tp and cp are as in Attention; `heads` are the rank's own. attention_bias gives q_a_proj,
    kv_a_proj_with_mqa and o_proj biases, as DeepSeek's files have.
    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1; names as in the published files. The
    norms of both latents take rms_norm_eps, which those files fix at 1e-6, their rms_norm_eps.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.tp: ProcessGroup | None = None
        self.cp: ProcessGroup | None = None
        self.cp_kind = "ring"
        self.sinks = None
        self.heads = config.num_attention_heads
        self.query_parts = (config.qk_nope_head_dim, config.qk_rope_head_dim)
        self.latent_parts = (config.kv_lora_rank, config.qk_rope_head_dim)
        self.key_value_parts = (config.qk_nope_head_dim, config.v_head_dim)
        self.window = config.window_of(layer)
        self.scale = softmax_scale(config)
        self.interleaved = config.rope_interleave
        width, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        query_width = self.heads * sum(self.query_parts)
        self.compresses_queries = config.q_lora_rank > 0
        if self.compresses_queries:
            self.q_a_proj = Linear(width, config.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = Linear(config.q_lora_rank, query_width)
        else:
            self.q_proj = Linear(width, query_width)
        self.kv_a_proj_with_mqa = Linear(width, sum(self.latent_parts), bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, self.heads * sum(self.key_value_parts))
        self.o_proj = Linear(self.heads * config.v_head_dim, width, bias)

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        x_BSD = gather_sequence(x_BSD, self.tp)
        heads = (*x_BSD.shape[:2], self.heads, -1)
        if self.compresses_queries:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        else:
            q = self.q_proj(x_BSD)
        q_still, q_turned = q.view(heads).transpose(1, 2).split(self.query_parts, dim=-1)
        latent, k_turned = self.kv_a_proj_with_mqa(x_BSD).split(self.latent_parts, dim=-1)
        key_value = self.kv_b_proj(self.kv_a_layernorm(latent)).view(heads).transpose(1, 2)
        k_still, v = key_value.split(self.key_value_parts, dim=-1)
        q_turned = rotate(q_turned, positions.cos, positions.sin, self.interleaved)
        k_turned = rotate(k_turned[:, None], positions.cos, positions.sin, self.interleaved)
        q = torch.cat((q_still, q_turned), dim=-1)
        k = torch.cat((k_still, k_turned.expand(*k_still.shape[:-1], -1)), dim=-1)
        return self.o_proj(attend_with(self, q, k, v, positions))
