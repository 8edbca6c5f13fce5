"""Mixture of experts: the router (routing.py), the expert bank, the shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curry_train.config import ModelConfig
from curry_train.kernels.experts import experts
from curry_train.layers.linear import local
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.routing import Routing, TopKRouter
from curry_train.layers.variants import part_class
from curry_train.parallel import expert_parallel


class ExpertLinear(nn.Module):
    """One matrix an expert, [E, out_features, in_features], and perhaps a bias [E, out_features].

    It holds parameters; the bank multiplies by them in one operation.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if bias else None


class GateUpLinear(ExpertLinear):
    """Gate and up projections of all experts as one matrix, weight [E, 2F, D], bias [E, 2F].

    In memory either all gate rows come before all up rows (fast on a CPU), or they alternate
    (`interleaved`, what the Triton epilogue splits without moving data). Files know neither:
    `parts` gives the two halves under names of their own.
    """

    interleaved = False

    def parts(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the views gate_proj and up_proj [E, F, ...] of a tensor [E, 2F, ...]."""
        if self.interleaved:
            return {"gate_proj": tensor[:, 0::2], "up_proj": tensor[:, 1::2]}
        half = tensor.shape[1] // 2
        return {"gate_proj": tensor[:, :half], "up_proj": tensor[:, half:]}


class Experts(nn.Module):
    """A bank of E SwiGLU experts, or this rank's share of one.

    Shapes: x [T, D] and its Routing; returns [T, D] in the dtype of x: the weighted sum over the
    experts of each token, zero for a token without any. An expert without tokens costs nothing
    and gets a zero gradient. With `swiglu_limit` the activation is gpt-oss's clamped one.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = (config.num_experts, config.hidden_size, config.moe_intermediate_size)
        count, width, hidden = sizes
        self.gate_up_proj = GateUpLinear(count, width, 2 * hidden, config.expert_bias)
        self.down_proj = ExpertLinear(count, hidden, width, config.expert_bias)
        self.limit = config.swiglu_limit
        self.backend = config.moe_backend

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        first, second = self.gate_up_proj, self.down_proj
        out_TD = experts(
            x_TD,
            routing.expert_ids,
            routing.weights,
            local(first.weight).to(x_TD.dtype),
            local(second.weight).to(x_TD.dtype),
            bias13=None if first.bias is None else local(first.bias).to(x_TD.dtype),
            limit=self.limit,
            interleaved=first.interleaved,
            backend=self.backend,
        )
        if second.bias is None:
            return out_TD
        # Every token gets its experts' biases, weighted: one small product, no row of its own.
        bias_ED = local(second.bias)
        share_TE = x_TD.new_zeros(x_TD.shape[0], bias_ED.shape[0])
        visited = routing.weights * (routing.expert_ids >= 0)
        share_TE = share_TE.scatter_add(1, routing.expert_ids.clamp(min=0), visited)
        return out_TD + share_TE @ bias_ED.to(x_TD.dtype)


class MoE(nn.Module):
    """Router, expert bank and, when the config names one, a shared expert that every token visits.

    It holds the parts; the block that owns it composes them (models/protocol.py), because the
    pipeline executor runs them one at a time. With expert parallelism `ep` is its group, and the
    bank holds num_experts / ranks experts.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ep: ProcessGroup | None = None
        self.experts_per_rank = config.num_experts
        self.gate = part_class(config, "router", TopKRouter)(config)
        self.experts = Experts(config)
        self.shared_experts = None
        if config.shared_expert_intermediate_size:
            mlp = part_class(config, "mlp", SwiGLU)
            self.shared_experts = mlp(config.hidden_size, config.shared_expert_intermediate_size)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """Return the rows [R, D] that this rank's experts work on, and their routing."""
        if self.ep is None:
            return x_TD, routing
        return expert_parallel.dispatch(x_TD, routing, self.experts_per_rank, self.ep)

    def combine(self, out: Tensor, routing: Routing) -> Tensor:
        """Return the sum over all ranks' experts of each token [T, D]; `routing` as dispatched."""
        return out if routing.exchange is None else expert_parallel.combine(out, routing.exchange)
