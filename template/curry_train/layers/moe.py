"""Mixture of experts: a router whose output is all that the expert bank needs to know.

The way of a token: `TopKRouter` chooses experts and weights; `sort_by_expert` turns the choice
into one permutation; the bank multiplies contiguous rows; `weighted_sum` brings the rows home.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.config import ModelConfig
from curry_train.layers.mlp import SwiGLU


@dataclass(frozen=True)
class Routing:
    """What the router decided for the T tokens of a micro-batch.

    Shapes: expert_ids int64 [T, K]; weights [T, K] in the compute dtype; aux_loss and z_loss [B],
    one value per sequence, in float32 (float64 under fp64), not yet multiplied by coefficients.
    """

    expert_ids: Tensor
    weights: Tensor
    aux_loss: Tensor
    z_loss: Tensor


class TopKRouter(nn.Module):
    """Choose K of E experts per token by the largest softmax probabilities.

    Shapes: x [B, S, hidden_size]; returns a Routing over T = B*S tokens. Probabilities are formed
    in float32 (float64 under fp64). Ties go to the lowest expert id, on every device.
    The balance loss of a sequence is E * sum_e f_e * p_e, with f_e the share of its K*S choices
    that fell on expert e and p_e the mean probability: 1 when balanced, E when collapsed.
    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6, with f over all K choices;
    z-loss: Zoph et al. 2022, "ST-MoE", equation 5.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.experts_per_token = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        self.scope = config.router_aux_loss_scope

    def forward(self, x_BSD: Tensor) -> Routing:
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        logits_BSE = F.linear(x_BSD.to(wide), self.weight.to(wide))
        probs_BSE = logits_BSE.softmax(-1)
        # A stable sort, not topk: topk leaves the order of ties to the device.
        ranked, ids = probs_BSE.sort(dim=-1, descending=True, stable=True)
        weights, ids = ranked[..., : self.experts_per_token], ids[..., : self.experts_per_token]
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(
            expert_ids=ids.flatten(0, 1),
            weights=weights.flatten(0, 1).to(x_BSD.dtype),
            aux_loss=self.balance_loss(probs_BSE, ids),
            z_loss=logits_BSE.logsumexp(-1).square().mean(-1),
        )

    def balance_loss(self, probs_BSE: Tensor, ids_BSK: Tensor) -> Tensor:
        """Return the balance loss [B]; one shared value when the scope is the micro-batch."""
        batch, _, experts = probs_BSE.shape
        chosen = torch.zeros(batch, experts, dtype=probs_BSE.dtype, device=probs_BSE.device)
        flat = ids_BSK.flatten(1)
        chosen.scatter_add_(1, flat, torch.ones_like(flat, dtype=probs_BSE.dtype))
        share_BE, mean_BE = chosen / flat.shape[1], probs_BSE.mean(1)
        if self.scope == "micro_batch":
            share_BE = share_BE.mean(0, keepdim=True).expand_as(share_BE)
            mean_BE = mean_BE.mean(0, keepdim=True).expand_as(mean_BE)
        return experts * (share_BE * mean_BE).sum(-1)


@dataclass(frozen=True)
class Route:
    """The permutation that takes tokens to experts and back.

    Shapes: order int64 [R], row r of the sorted rows is choice order[r] of token order[r] // K;
    weights [T, K]; tokens_per_expert is a list of E counts on the host, read once.
    """

    order: Tensor
    weights: Tensor
    tokens_per_expert: list[int]
    aux_loss: Tensor
    z_loss: Tensor


def sort_by_expert(routing: Routing, num_experts: int) -> Route:
    """Sort the T*K choices by expert, stably, so that equal experts keep token order.

    Shapes: see Routing and Route. One host synchronisation, for the counts.
    """
    flat = routing.expert_ids.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return Route(
        flat.argsort(stable=True), routing.weights, counts, routing.aux_loss, routing.z_loss
    )


def weighted_sum(rows_RD: Tensor, route: Route) -> Tensor:
    """Undo the sort and add the K rows of each token, weighted.

    Shapes: rows [R, D] in expert order; returns [T, D]. The sum runs over K in router order in a
    fixed order and without atomics, so it repeats bit for bit.
    """
    unsorted = torch.empty_like(rows_RD).index_copy(0, route.order, rows_RD)
    tokens, chosen = route.weights.shape
    return (unsorted.view(tokens, chosen, -1) * route.weights[..., None]).sum(1)


class ExpertLinear(nn.Module):
    """One weight for all experts, [E, out_features, in_features]: a parameter, not a product."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))


class Experts(nn.Module):
    """A bank of E SwiGLU experts over rows sorted by expert.

    Shapes: rows [R, D], the first tokens_per_expert[0] rows belong to expert 0 and so on; returns
    [R, D] in the dtype of rows. An expert without rows costs nothing and gets a zero gradient.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = (config.num_experts, config.hidden_size, config.moe_intermediate_size)
        experts, width, hidden = sizes
        self.gate_proj = ExpertLinear(experts, width, hidden)
        self.up_proj = ExpertLinear(experts, width, hidden)
        self.down_proj = ExpertLinear(experts, hidden, width)

    def forward(self, rows_RD: Tensor, tokens_per_expert: list[int]) -> Tensor:
        # unbind, not indexing: the backward pass of W[e] would fill a zero gradient of all experts.
        weights = zip(
            self.gate_proj.weight.to(rows_RD.dtype).unbind(),
            self.up_proj.weight.to(rows_RD.dtype).unbind(),
            self.down_proj.weight.to(rows_RD.dtype).unbind(),
            strict=True,
        )
        slices = rows_RD.split(tokens_per_expert)
        out = [
            F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
            for rows, (gate, up, down) in zip(slices, weights, strict=True)
        ]
        return torch.cat(out)


class MoE(nn.Module):
    """Router, expert bank and, when the config names one, a shared expert that every token visits.

    It holds the parts; the block that owns it composes them (models/protocol.py), because the
    pipeline executor runs them one at a time.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = TopKRouter(config)
        self.experts = Experts(config)
        self.shared_experts = None
        if config.shared_expert_intermediate_size:
            self.shared_experts = SwiGLU(config.hidden_size, config.shared_expert_intermediate_size)
