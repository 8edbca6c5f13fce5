"""A mixture of experts with a block of its own: norm, causal attention, norm, router and experts.

As it stands it computes what the decoder computes with model.num_experts. Change
`SkeletonNameBlock.forward`, or put other layers into it; whatever you change, no token may see a
later one, in the router either.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from curry_train.config import Count, ModelConfig, NonNegative, Positive
from curry_train.layers.attention import Attention, Positions, positions_of
from curry_train.layers.linear import Embedding, Linear
from curry_train.layers.moe import MoE
from curry_train.layers.norm import RMSNorm
from curry_train.layers.routing import Routing
from curry_train.model_rules import model_problems
from curry_train.models.protocol import ModelOutput
from curry_train.parallel.dims import VOCAB_MULTIPLE


@dataclass(frozen=True)
class SkeletonNameConfig:
    """A mixture of experts of one kind of block."""

    architecture: str = "skeleton_name"
    """Key of curry_train.models.MODELS."""
    vocab_size: Count = 257
    """Token ids the model can predict, the tokenizer's or more; inside a multiple of 64."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    num_hidden_layers: Count = 4
    """Blocks."""
    num_attention_heads: Count = 4
    """Query heads."""
    num_key_value_heads: Count = 2
    """Key/value heads; divides num_attention_heads."""
    head_dim: Count = 32
    """Width of one head."""
    max_position_embeddings: Count = 4096
    """Longest sequence the model is meant for; data.seq_len may not exceed it."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square inside RMSNorm."""
    initializer_range: Positive = 0.02
    """Standard deviation of every normal-initialised matrix."""
    num_experts: Count = 4
    """Routed experts of a block."""
    num_experts_per_tok: Count = 2
    """Experts that each token visits."""
    moe_intermediate_size: Count = 176
    """Hidden width of one expert."""
    router_aux_loss_coef: NonNegative = 0.01
    """Weight of the load-balance loss."""
    router_z_loss_coef: NonNegative = 0.0
    """Weight of the router z-loss."""

    def of_layers(self) -> ModelConfig:
        """Return the settings as the layers of the package read them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ModelConfig(**{**values, "architecture": "decoder"})

    def problems(self) -> list[str]:
        """Say in sentences which values do not go together."""
        return model_problems(self.of_layers())


class SkeletonNameBlock(nn.Module):
    """Attention, then K of E experts for each token, each behind a norm and added to the stream.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype, and what the router decided.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config)

    def forward(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Routing]:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), positions)
        hidden = self.post_attention_layernorm(x_BSD)
        routing = self.mlp.gate(hidden, positions.real, positions.places)
        rows, local = self.mlp.dispatch(hidden.flatten(0, 1), routing)
        out_TD = self.mlp.combine(self.mlp.experts(rows, local), local)
        return x_BSD + out_TD.view_as(x_BSD), routing


class SkeletonName(nn.Module):
    """A causal language model.

    Shapes: input_ids int64 [B, S]; position_ids int64 [B, S] or None (0 to S-1); doc_ids int64
    [B, S] or None (attention is not cut at document ends). Returns ModelOutput.
    """

    Config = SkeletonNameConfig

    def __init__(self, config: SkeletonNameConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.vocab_size = config.vocab_size
        self.active_share = config.num_experts_per_tok / config.num_experts
        padded_vocab = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.vocab_parameters = ("embed_tokens.weight", "lm_head.weight")
        self.of_layers = config.of_layers()
        self.embed_tokens = Embedding(padded_vocab, config.hidden_size)
        self.layers = nn.ModuleDict(
            {str(i): SkeletonNameBlock(self.of_layers, i) for i in range(config.num_hidden_layers)}
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, padded_vocab)

    def tie_weights(self) -> None:
        """Do nothing: head and embedding are two parameters."""

    def init_constant(self, name: str) -> float | None:
        """Return the value that all of `name` starts with, None when it is drawn."""
        return 1.0 if name.endswith("norm.weight") else None

    def init_std(self, name: str) -> float:
        """Return the standard deviation that the matrix `name` starts with."""
        return self.config.initializer_range

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
    ) -> ModelOutput:
        x = self.embed_tokens(input_ids).to(self.compute_dtype)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=x.device)[None]
        positions = positions_of(self.of_layers, position_ids, doc_ids, self.compute_dtype)
        routings = []
        for block in self.layers.values():
            x, routing = block(x, positions)
            routings.append(routing)
        logits = self.lm_head(self.norm(x))
        logits[..., self.vocab_size :] = -torch.inf
        balance = torch.stack([routing.aux_loss for routing in routings]).sum(0)
        z_loss = torch.stack([routing.z_loss for routing in routings]).sum(0)
        return ModelOutput(
            logits,
            self.config.router_aux_loss_coef * balance,
            self.config.router_z_loss_coef * z_loss,
            torch.stack([routing.tokens_per_expert for routing in routings]),
        )
