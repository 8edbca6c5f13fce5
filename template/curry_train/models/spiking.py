"""A spiking transformer: spike-driven linear attention over several time steps, "CSLA-MT".

We found no publication under that name. We take it to mean Causal Spike-driven Linear Attention,
Multiple Time steps. At every time step t, with LIF a layer of neurons whose membranes last over t,
W matrices, h a head with decay d_h and i, j positions of the sequence:

    S = LIF(norm(x_t));  Q, K, V = LIF(norm(W_q S)), LIF(norm(W_k S)), LIF(norm(W_v S))  all 0 or 1
    M_i = d_h * M_(i-1) + K_i^T V_i                      the causal running sum, reset per document
    x_t = x_t + W_o LIF(norm(Q_i M_i));  x_t = x_t + W_down LIF(norm(W_up LIF(norm(x_t))))

No softmax; the sum over j <= i costs S, not S^2, in chunks. Spikes meet matrices only, so products
with them are additions. Sources: Q(K^T V) on spikes followed by neurons is SDSA-3 of Yao et al.
2024, "Spike-driven Transformer V2", after Zhou et al. 2023, "Spikformer"; the membrane shortcut
(currents, not spikes, are added) is Yao et al. 2023, "Spike-driven Transformer"; the running sum is
Katharopoulos et al. 2020, "Transformers are RNNs". Ours: the decay of Sun et al. 2023, "Retentive
Network", in powers of two, which is all that positions are told by; RMSNorm for BatchNorm, which
would look at later tokens and other ranks.

Time is folded into the batch between layers: [time*B, S, D], time first, so that a block has the
five parts of protocol.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from curry_train.config import Count, Positive
from curry_train.layers.attention import Positions
from curry_train.layers.lif import decode_mean, encode_direct
from curry_train.layers.linear import Embedding, Linear
from curry_train.layers.norm import RMSNorm
from curry_train.layers.spiking_attention import SpikingAttention, SpikingNorm
from curry_train.models.protocol import ModelOutput, run_block
from curry_train.parallel.dims import VOCAB_MULTIPLE


@dataclass(frozen=True)
class SpikingConfig:
    """The spiking transformer."""

    architecture: str = "spiking"
    """Key of curry_train.models.MODELS."""
    vocab_size: Count = 257
    """Token ids the model can predict, the tokenizer's or more; inside a multiple of 64."""
    hidden_size: Count = 128
    """Width of the residual stream of currents."""
    intermediate_size: Count = 256
    """Hidden neurons of a feed-forward."""
    num_hidden_layers: Count = 2
    """Blocks."""
    num_attention_heads: Count = 4
    """Heads; divides hidden_size. Head h, from 0, remembers about 2**(h+1) tokens."""
    time_steps: Count = 4
    """Time steps that every token is shown for."""
    leak: float = 0.5
    """Share of its potential that a neuron keeps from one time step to the next, at the start."""
    learn_leak: bool = True
    """One leak per layer of neurons is trained."""
    threshold: Positive = 1.0
    """Potential at which a neuron fires."""
    surrogate: Literal["fast_sigmoid", "atan", "triangle"] = "atan"
    """What stands in for the derivative of a spike."""
    surrogate_slope: Positive | None = None
    """Its slope; null: 25 for fast_sigmoid, 2 for atan, 1 for triangle."""
    reset: Literal["soft", "hard", "delayed"] = "soft"
    """What a spike does to the potential: subtract the threshold, clear it, subtract it later."""
    detach_reset: bool = False
    """No gradient through the reset."""
    rms_norm_eps: Positive = 1e-2
    """Added to the mean square inside RMSNorm; too small, and gradients burst where none fires."""
    initializer_range: Positive = 0.02
    """Standard deviation of the output head; embeddings have 1, matrices fan-in ** -0.5."""

    def problems(self) -> list[str]:
        """Say in sentences which values do not go together."""
        return list(self._refusals())

    def _refusals(self) -> Iterator[str]:
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads:
            fitting = ", ".join(str(n) for n in range(1, width + 1) if width % n == 0)
            yield (
                f"model.num_attention_heads={heads}: does not divide model.hidden_size={width};"
                f" set it to one of {fitting}"
            )
        if not (0 < self.leak < 1 if self.learn_leak else 0 <= self.leak <= 1):
            yield (
                f"model.leak={self.leak}: must be 0 to 1, and between them with"
                " model.learn_leak=true; set model.leak=0.5, say"
            )


class SpikingFeedForward(nn.Module):
    """Compute down(LIF(norm(up(spikes)))).

    Shapes: spikes [time*..., D]; returns a current of the same shape and dtype.
    """

    def __init__(self, config: SpikingConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_spikes = SpikingNorm(config, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, spikes: Tensor) -> Tensor:
        return self.down_proj(self.up_spikes(self.up_proj(spikes)))


class SpikingBlock(nn.Module):
    """Attention and feed-forward, each behind neurons; currents are added to the stream.

    The five parts of protocol.py, with time*B in the place of B.
    """

    def __init__(self, config: SpikingConfig) -> None:
        super().__init__()
        self.input_spikes = SpikingNorm(config, config.hidden_size)
        self.self_attn = SpikingAttention(config)
        self.post_attention_spikes = SpikingNorm(config, config.hidden_size)
        self.mlp = SpikingFeedForward(config)

    def attention(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Tensor, None]:
        residual = x_BSD + self.self_attn(self.input_spikes(x_BSD), positions)
        return residual, self.post_attention_spikes(residual).flatten(0, 1), None

    def dispatch(self, x_TD: Tensor, routing: None) -> tuple[Tensor, None]:
        return x_TD, None

    def experts(self, x_TD: Tensor, routing: None) -> Tensor:
        return self.mlp(x_TD)

    def combine(self, out_TD: Tensor, routing: None) -> Tensor:
        return out_TD

    def aggregate(self, residual_BSD: Tensor, out_TD: Tensor) -> Tensor:
        return residual_BSD + out_TD.view_as(residual_BSD)

    def forward(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, None]:
        return run_block(self, x_BSD, positions)


class SpikingBody(nn.Module):
    """Blocks and the last norm over every time step, then the mean over time.

    Shapes: current [time, B, S, D]; doc_ids int64 [B, S] or None; returns [B, S, D].
    """

    def __init__(self, config: SpikingConfig) -> None:
        super().__init__()
        self.time_steps = config.time_steps
        blocks = {str(index): SpikingBlock(config) for index in range(config.num_hidden_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, current: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        nothing = current.new_empty(0)
        positions = Positions(nothing, nothing, doc_ids)  # the decay tells positions, no rotation
        x = current.flatten(0, 1)
        for block in self.layers.values():
            x, _ = block(x, positions)
        return decode_mean(self.norm(x).unflatten(0, (self.time_steps, -1)))


def init_constant(model: nn.Module, name: str) -> float | None:
    """Return the value that all of a spiking model's `name` starts with, None when it is drawn."""
    if name.endswith("leak_logit"):
        return model.get_submodule(name.rpartition(".")[0]).initial_logit
    return 1.0 if name.endswith("norm.weight") else None


def init_std(config: SpikingConfig, name: str) -> float:
    """Return the standard deviation a matrix starts with: currents must reach the threshold."""
    if "head." in name:
        return config.initializer_range
    if "embed_tokens" in name:
        return 1.0
    return (config.intermediate_size if ".down_proj." in name else config.hidden_size) ** -0.5


class SpikingTransformer(nn.Module):
    """A causal language model of spiking neurons.

    Shapes: input_ids int64 [B, S]; position_ids are not used; doc_ids int64 [B, S] or None (the
    running sum is not cut at document ends). Returns ModelOutput. A token's embedding is the
    constant current of all its time steps (direct code).
    """

    Config = SpikingConfig
    active_share = 1.0

    def __init__(self, config: SpikingConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.vocab_size = config.vocab_size
        self.padded_vocab = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.vocab_parameters = ("embed_tokens.weight", "lm_head.weight")
        self.embed_tokens = Embedding(self.padded_vocab, config.hidden_size)
        self.model = SpikingBody(config)
        self.lm_head = Linear(config.hidden_size, self.padded_vocab)

    def tie_weights(self) -> None:
        """Do nothing: head and embedding are two parameters, of very different size."""

    @property
    def layers(self) -> nn.ModuleDict:
        return self.model.layers

    def init_constant(self, name: str) -> float | None:
        """Return the value that all of `name` starts with, None when it is drawn."""
        return init_constant(self, name)

    def init_std(self, name: str) -> float:
        """Return the standard deviation that the matrix `name` starts with."""
        return init_std(self.config, name)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
    ) -> ModelOutput:
        current = self.embed_tokens(input_ids).to(self.compute_dtype)
        hidden = self.model(encode_direct(current, self.config.time_steps), doc_ids)
        logits = self.lm_head(hidden)
        logits[..., self.vocab_size :] = -torch.inf
        return ModelOutput(logits)
