"""The decoder family: RMSNorm, attention with rotary positions, SwiGLU, experts.

One file for all of them, since they differ in a block's attention and feed-forward only, by fields
of the configuration: Llama, Mixtral, Qwen3, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3, gpt-oss. The
files in configs/model/ name the fields.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curry_train.config import ModelConfig
from curry_train.layers.attention import Attention, Positions, positions_of, sequence_places
from curry_train.layers.latent_attention import LatentAttention
from curry_train.layers.linear import Embedding, Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.moe import MoE
from curry_train.layers.norm import RMSNorm
from curry_train.layers.routing import Routing
from curry_train.layers.variants import declared, part_class
from curry_train.models.protocol import ModelOutput, run_block
from curry_train.parallel.collectives import gather_sequence
from curry_train.parallel.dims import VOCAB_MULTIPLE


def build_attention(config: ModelConfig, layer: int) -> Attention | LatentAttention:
    """Return the attention of block `layer`."""
    standard = LatentAttention if config.kv_lora_rank else Attention
    return part_class(config, "attention", standard)(config, layer)


def build_norm(config: ModelConfig) -> nn.Module:
    """Return a norm of the residual stream, [..., hidden_size] to the same shape."""
    return part_class(config, "norm", RMSNorm)(config.hidden_size, config.rms_norm_eps)


class DenseBlock(nn.Module):
    """Attention and a SwiGLU feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attn = build_attention(config, layer)
        self.post_attention_layernorm = build_norm(config)
        mlp = part_class(config, "mlp", SwiGLU)
        self.mlp = mlp(config.hidden_size, config.intermediate_size)

    def attention(
        self, x_BSD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Routing | None]:
        residual = x_BSD + self.self_attn(self.input_layernorm(x_BSD), positions)
        return residual, self.post_attention_layernorm(residual).flatten(0, 1), None

    def dispatch(self, x_TD: Tensor, routing: None) -> tuple[Tensor, None]:
        return x_TD, None

    def experts(self, x_TD: Tensor, routing: None) -> Tensor:
        return self.mlp(x_TD)

    def combine(self, out_TD: Tensor, routing: None) -> Tensor:
        return out_TD

    def aggregate(self, residual_BSD: Tensor, out_TD: Tensor) -> Tensor:
        return residual_BSD + out_TD.view_as(residual_BSD)

    def forward(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Routing | None]:
        return run_block(self, x_BSD, positions)


class MoEBlock(nn.Module):
    """Attention, then K of E experts per token, plus a shared expert where the config has one."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attn = build_attention(config, layer)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = MoE(config)

    def attention(
        self, x_BSD: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Routing | None]:
        residual = x_BSD + self.self_attn(self.input_layernorm(x_BSD), positions)
        hidden = self.post_attention_layernorm(residual)
        routing = self.mlp.gate(hidden, positions.real, positions.places)
        if self.mlp.shared_experts is not None:
            residual = residual + self.mlp.shared_experts(hidden)
        return residual, hidden.flatten(0, 1), routing

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        return self.mlp.dispatch(x_TD, routing)

    def experts(self, x_TD: Tensor, routing: Routing) -> Tensor:
        return self.mlp.experts(x_TD, routing)

    def combine(self, out_TD: Tensor, routing: Routing) -> Tensor:
        return self.mlp.combine(out_TD, routing)

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
        self.norm = build_norm(config)


class Decoder(nn.Module):
    """A causal language model.

    Shapes: input_ids int64 [B, S]; position_ids int64 [B, S] or None (0 to S-1); doc_ids int64
    [B, S], -1 for padding, or None (attention is not cut at document ends). Returns ModelOutput.
    With groups `cp` and `tp` (parallel/parallelize.py sets them) S are the tokens of this cp rank,
    hidden states [B, S', D] its tp slice of them, logits its columns of the vocabulary.
    """

    Config = ModelConfig

    def __init__(self, config: ModelConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.tp: ProcessGroup | None = None
        self.cp: ProcessGroup | None = None
        self.cp_kind = "ring"
        self.vocab_size = config.vocab_size
        self.padded_vocab = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.vocab_parameters = ("model.embed_tokens.weight", "lm_head.weight")
        self.active_share = config.num_experts_per_tok / max(config.num_experts, 1)
        self.model = Body(config, self.padded_vocab)
        self.lm_head = Linear(config.hidden_size, self.padded_vocab)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter; again after any call that replaces parameters."""
        if self.config.tie_word_embeddings and self.lm_head and self.model.embed_tokens:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def layers(self) -> nn.ModuleDict:
        return self.model.layers

    def init_constant(self, name: str) -> float | None:
        """Return the value that all of `name` starts with, None when it is drawn."""
        if (value := declared(self, name, "constants")) is not None:
            return value
        if name.endswith(("norm.weight", "layernorm.weight")):
            return 1.0
        return 0.0 if name.endswith((".bias", ".sinks")) else None

    def init_std(self, name: str) -> float:
        """Return the standard deviation that the matrix `name` starts with."""
        deviation = declared(self, name, "deviations")
        return self.config.initializer_range if deviation is None else deviation

    def keep_stage(self, blocks: list[int], *, first: bool, last: bool) -> None:
        """Drop what another pipeline stage holds: other blocks, and the ends of the model."""
        for name in list(self.layers):
            if int(name) not in blocks:
                del self.layers[name]
        if not first:
            self.model.embed_tokens = None
        if not last:
            self.model.norm = self.lm_head = None

    def positions(
        self, hidden: Tensor, position_ids: Tensor | None, doc_ids: Tensor | None
    ) -> Positions:
        """Return the Positions of hidden states [B, S', D], S' tokens on this rank."""
        if position_ids is None:
            length = hidden.shape[1] * (1 if self.tp is None else self.tp.size())
            position_ids = sequence_places(length, self.cp, hidden.device)[None]
        return positions_of(
            self.config,
            position_ids,
            doc_ids,
            self.compute_dtype,
            cp=self.cp,
            cp_kind=self.cp_kind,
            tp=self.tp,
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states [B, S', D] that the first block reads."""
        return self.model.embed_tokens(input_ids).to(self.compute_dtype)

    def run_blocks(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, list[Routing]]:
        """Run the blocks of this rank; returns hidden states and what their routers decided."""
        routings = []
        for block in self.layers.values():
            x_BSD, routing = block(x_BSD, positions)
            if routing is not None:
                routings.append(routing)
        return x_BSD, routings

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Return the logits [B, S, padded vocabulary], under tensor parallelism the own columns."""
        hidden = gather_sequence(self.model.norm(x_BSD), self.tp)
        logits = self.lm_head(hidden)
        first = 0 if self.tp is None else self.tp.rank() * logits.shape[-1]
        logits[..., max(self.vocab_size - first, 0) :] = -torch.inf
        return logits

    def auxiliary(self, routings: list[Routing]) -> tuple[Tensor, Tensor]:
        """Return balance and z losses [B] of some blocks, summed, times their coefficients."""
        return (
            self.config.router_aux_loss_coef * torch.stack([r.aux_loss for r in routings]).sum(0),
            self.config.router_z_loss_coef * torch.stack([r.z_loss for r in routings]).sum(0),
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
    ) -> ModelOutput:
        x = self.embed(input_ids)
        x, routings = self.run_blocks(x, self.positions(x, position_ids, doc_ids))
        if not routings:
            return ModelOutput(self.logits(x))
        loads = torch.stack([routing.tokens_per_expert for routing in routings])
        return ModelOutput(self.logits(x), *self.auxiliary(routings), loads)
