"""The router: which experts a token visits and with which weights.

Its output, `Routing`, is all that the expert bank needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.config import ModelConfig


@dataclass(frozen=True)
class Routing:
    """What the router decided for the T tokens of a micro-batch.

    Shapes: expert_ids int64 [T, K], -1 where a choice was dropped; weights [T, K] in the compute
    dtype; aux_loss and z_loss [B], one value per sequence, in float32 (float64 under fp64), not
    yet multiplied by coefficients; tokens_per_expert int64 [E], choices before any was dropped.
    """

    expert_ids: Tensor
    weights: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    tokens_per_expert: Tensor


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
            tokens_per_expert=ids.flatten().bincount(minlength=self.weight.shape[0]),
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
