"""A language model with a block of its own: norm, causal attention, norm, feed-forward.

As it stands it computes what the decoder computes. Change `SkeletonNameBlock.forward`, or put other
layers into it; whatever you change, no token may see a later one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from curry_train.config import Count, ModelConfig, Positive
from curry_train.layers.attention import Attention, Positions, positions_of
from curry_train.layers.linear import Embedding, Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.norm import RMSNorm
from curry_train.model_rules import model_problems
from curry_train.models.protocol import ModelOutput
from curry_train.parallel.dims import VOCAB_MULTIPLE


@dataclass(frozen=True)
class SkeletonNameConfig:
    """A language model of one kind of block."""

    architecture: str = "skeleton_name"
    """Key of curry_train.models.MODELS."""
    vocab_size: Count = 257
    """Token ids the model can predict, the tokenizer's or more; inside a multiple of 64."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    intermediate_size: Count = 352
    """Hidden width of a feed-forward."""
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

    def of_layers(self) -> ModelConfig:
        """Return the settings as the layers of the package read them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ModelConfig(**{**values, "architecture": "decoder"})

    def problems(self) -> list[str]:
        """Say in sentences which values do not go together."""
        return model_problems(self.of_layers())


class SkeletonNameBlock(nn.Module):
    """Attention and a feed-forward, each behind a norm and added to the residual stream.

    Shapes: x [B, S, hidden_size]; returns the same shape and dtype.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), positions)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class SkeletonName(nn.Module):
    """A causal language model.

    Shapes: input_ids int64 [B, S]; position_ids int64 [B, S] or None (0 to S-1); doc_ids int64
    [B, S] or None (attention is not cut at document ends). Returns ModelOutput.
    """

    Config = SkeletonNameConfig
    active_share = 1.0

    def __init__(self, config: SkeletonNameConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.vocab_size = config.vocab_size
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
        for block in self.layers.values():
            x = block(x, positions)
        logits = self.lm_head(self.norm(x))
        logits[..., self.vocab_size :] = -torch.inf
        return ModelOutput(logits)
