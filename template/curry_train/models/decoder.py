"""The decoder family: RMSNorm, attention with rotary positions, SwiGLU, experts.

One file for all of them, since they differ in a block's attention and feed-forward only, by fields
of the configuration: Llama, Mixtral, Qwen3, Qwen3-MoE, DeepSeek-V2 and V3, gpt-oss. The files in
configs/model/ name the fields.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curry_train.config import ModelConfig
from curry_train.layers.attention import Attention, Positions, positions_of
from curry_train.layers.latent_attention import LatentAttention
from curry_train.layers.linear import Embedding, Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.moe import MoE
from curry_train.layers.norm import RMSNorm
from curry_train.layers.routing import Routing
from curry_train.models.protocol import ModelOutput, run_block

VOCAB_MULTIPLE = 64


def build_attention(config: ModelConfig, layer: int) -> Attention | LatentAttention:
    """Return the attention of block `layer`."""
    return (LatentAttention if config.kv_lora_rank else Attention)(config, layer)


class DenseBlock(nn.Module):
    """Attention and a SwiGLU feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = build_attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def attention(
        self, x_BSD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Routing | None]:
        residual = x_BSD + self.self_attn(self.input_layernorm(x_BSD), positions)
        return residual, self.post_attention_layernorm(residual).flatten(0, 1), None

    def dispatch(self, x_TD: Tensor, routing: None) -> tuple[Tensor, None]:
        return x_TD, None

    def experts(self, x_TD: Tensor, routing: None) -> Tensor:
        return self.mlp(x_TD)

    def combine(self, out_TD: Tensor) -> Tensor:
        return out_TD

    def aggregate(self, residual_BSD: Tensor, out_TD: Tensor) -> Tensor:
        return residual_BSD + out_TD.view_as(residual_BSD)

    def forward(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Routing | None]:
        return run_block(self, x_BSD, positions)


class MoEBlock(nn.Module):
    """Attention, then K of E experts per token, plus a shared expert where the config has one."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = build_attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config)

    def attention(
        self, x_BSD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Routing | None]:
        residual = x_BSD + self.self_attn(self.input_layernorm(x_BSD), positions)
        hidden = self.post_attention_layernorm(residual)
        # The loader gives padding the document -1.
        real = None if positions.doc_ids is None else positions.doc_ids >= 0
        routing = self.mlp.gate(hidden, real)
        if self.mlp.shared_experts is not None:
            residual = residual + self.mlp.shared_experts(hidden)
        return residual, hidden.flatten(0, 1), routing

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        return x_TD, routing

    def experts(self, x_TD: Tensor, routing: Routing) -> Tensor:
        return self.mlp.experts(x_TD, routing)

    def combine(self, out_TD: Tensor) -> Tensor:
        return out_TD

    def aggregate(self, residual_BSD: Tensor, out_TD: Tensor) -> Tensor:
        return residual_BSD + out_TD.view_as(residual_BSD)

    def forward(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Routing | None]:
        return run_block(self, x_BSD, positions)


class Body(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: ModelConfig, padded_vocab: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab, config.hidden_size)
        self.layers = nn.ModuleDict()
        for index in range(config.num_hidden_layers):
            sparse = config.num_experts > 0 and index >= config.first_k_dense_replace
            self.layers[str(index)] = (MoEBlock if sparse else DenseBlock)(config, index)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model.

    Shapes: input_ids int64 [B, S]; position_ids int64 [B, S] or None (0 to S-1); doc_ids int64
    [B, S], -1 for padding, or None (attention is not cut at document ends). Returns ModelOutput.
    """

    Config = ModelConfig

    def __init__(self, config: ModelConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.vocab_size = config.vocab_size
        self.padded_vocab = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.vocab_parameters = ("model.embed_tokens.weight", "lm_head.weight")
        self.active_share = config.num_experts_per_tok / max(config.num_experts, 1)
        self.model = Body(config, self.padded_vocab)
        self.lm_head = Linear(config.hidden_size, self.padded_vocab)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter; again after any call that replaces parameters."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def layers(self) -> nn.ModuleDict:
        return self.model.layers

    def init_constant(self, name: str) -> float | None:
        """Return the value that all of `name` starts with, None when it is drawn."""
        if name.endswith(("norm.weight", "layernorm.weight")):
            return 1.0
        return 0.0 if name.endswith((".bias", ".sinks")) else None

    def init_std(self, name: str) -> float:
        """Return the standard deviation that the matrix `name` starts with."""
        return self.config.initializer_range

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
    ) -> ModelOutput:
        config = self.config
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        positions = positions_of(config, position_ids, doc_ids, self.compute_dtype)
        x = self.model.embed_tokens(input_ids).to(self.compute_dtype)
        routings = []
        for block in self.layers.values():
            x, routing = block(x, positions)
            if routing is not None:
                routings.append(routing)
        logits = self.lm_head(self.model.norm(x))
        logits[..., self.vocab_size :] = -torch.inf
        if not routings:
            return ModelOutput(logits)
        return ModelOutput(
            logits,
            config.router_aux_loss_coef * torch.stack([r.aux_loss for r in routings]).sum(0),
            config.router_z_loss_coef * torch.stack([r.z_loss for r in routings]).sum(0),
            torch.stack([routing.tokens_per_expert for routing in routings]),
        )
