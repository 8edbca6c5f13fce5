"""The router: which experts a token visits and with which weights.

Its output, `Routing`, is all that the expert bank needs to know. Everything here acts on one
sequence at a time (balance, capacity, expert choice), so that no split of a batch over ranks and
micro-batches changes a result. Ranks that share a sequence add up what they count, and where a
choice needs the whole sequence they show each other their scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import register_dataclass

from curry_train.config import ModelConfig
from curry_train.kernels import routing_ops
from curry_train.kernels.experts import AUTOCAST_DEVICES
from curry_train.kernels.reference_routing import NORM_EPS, best_experts
from curry_train.parallel.collectives import stack_ranks, sum_forward, sum_ranks

if TYPE_CHECKING:
    from curry_train.parallel.expert_parallel import Exchange


@dataclass(frozen=True)
class Routing:
    """What the router decided for the T tokens of a micro-batch.

    Shapes: expert_ids int64 [T, K], -1 for no expert (dropped, padding); weights [T, K] in the
    compute dtype, 0 there; under expert choice both have E columns instead of K. aux_loss and
    z_loss [B], one value per sequence, in float32 (float64 under fp64), not yet multiplied by
    coefficients; tokens_per_expert int64 [E], choices of the own tokens before any was dropped.
    exchange is set on rows that came from other ranks, see parallel/expert_parallel.py.
    """

    expert_ids: Tensor
    weights: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    tokens_per_expert: Tensor
    exchange: Exchange | None = None


# fully_shard of torch 2.11 looks for the tensors of an output in pytrees alone; of a Routing that
# is none it would see no gradient, and not gather the router's weight for its backward.
register_dataclass(Routing)


class TopKRouter(nn.Module):
    """Choose K of E experts per token by the largest scores.

    Shapes: x [B, S, hidden_size]; pad_mask bool [B, S] or None, True for a real token; returns a
    Routing over T = B*S tokens. Logits and scores are formed in float32 (float64 under fp64).
    When this rank holds only some tokens of a sequence, `sequence` is the group that shares it and
    places int64 [S] tells where the own ones stand; `batch` are the ranks with other samples.
    Scores are the softmax or the sigmoid of the logits. The choice goes by logits or, with
    correction_bias, by score + bias; the weight is always that of the score, divided by the sum of
    the K (norm_topk_prob), times routed_scaling_factor. With n_group > 1 only the experts of the
    topk_group best groups can be chosen. Ties go to the lowest expert id, on every device.
    Padding visits no expert and counts nowhere. NaN in x gives NaN weights and losses with valid
    ids: the step then sees a loss that is not finite. Autocast changes nothing here.
    Raises: ValueError for an x or a pad_mask of another shape or dtype.

    Capacity: an expert takes at most ceil(capacity_factor * K * tokens / E) choices of a sequence,
    at least 1; the rest is dropped and the weights that stay are not divided again, as in Switch
    and Megatron. drop_policy "weight" keeps the largest weights, so a later token can take an
    earlier one's place; "position" keeps the earliest tokens and looks at nothing later.

    The balance loss of a sequence is E * sum_e f_e * p_e, with f_e the share of its choices that
    fell on expert e before any was dropped, and p_e the mean score, scores divided by their sum
    over the experts: 1 when balanced, E when collapsed. The z-loss is the mean squared
    log-sum-exp of the logits.

    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6, with f over all K choices;
    DeepSeek-V3 2024, equations 12 to 20, and Wang et al. 2024, "Auxiliary-Loss-Free Load
    Balancing Strategy"; groups: there and DeepSeek-V2 2024, section 2.2.2; z-loss: Zoph et al.
    2022, "ST-MoE", equation 5; expert choice: Zhou et al. 2022, equations 1 and 2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        # A buffer of its own dtype: in bf16 a step of 0.001 would vanish beside a bias of 1.
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        bias = torch.zeros(config.num_experts, dtype=wide) if config.correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.update_rate = config.correction_bias_update_rate
        self.routing = config.routing
        self.experts_per_token = config.num_experts_per_tok
        self.scoring = config.scoring_func
        self.normalise = config.norm_topk_prob
        self.scale = config.routed_scaling_factor
        self.groups, self.top_groups = config.n_group, config.topk_group
        self.group_score = config.group_score
        self.capacity_factor, self.drop_policy = config.capacity_factor, config.drop_policy
        # A fraction: in floating point 1.1 * 10 is above 11 and would be rounded up to 12.
        factor = 1 if config.routing == "expert_choice" else config.capacity_factor
        share = Fraction(str(factor)).limit_denominator(10**6) * config.num_experts_per_tok
        # Nobody chooses an expert twice, so a larger share than all tokens drops nothing either.
        self.share = min(share / max(config.num_experts, 1), Fraction(1)).as_integer_ratio()
        self.scope = config.router_aux_loss_scope
        self.sequence: ProcessGroup | None = None
        self.batch: ProcessGroup | None = None
        future = looks_ahead(config)
        if future:
            warnings.warn(future, stacklevel=2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move or cast as any module does, but never the bias below float32."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if bias is not None and moved.dtype.itemsize < torch.float32.itemsize:
            self.e_score_correction_bias = bias.to(moved.device, torch.float32)
        return self

    def forward(
        self, x_BSD: Tensor, pad_mask: Tensor | None = None, places: Tensor | None = None
    ) -> Routing:
        self.check(x_BSD, pad_mask)
        logits_BSE = self.logits(x_BSD)
        if pad_mask is not None:
            logits_BSE = logits_BSE.masked_fill(~pad_mask[..., None], 0)
        sigmoid = self.scoring == "sigmoid"
        scores_BSE = logits_BSE.sigmoid() if sigmoid else logits_BSE.softmax(-1)
        probs_BSE = scores_BSE
        if sigmoid:
            probs_BSE = scores_BSE / (scores_BSE.sum(-1, keepdim=True) + NORM_EPS)
        lse_BS1 = logits_BSE.logsumexp(-1, keepdim=True)
        ids, weights = self.choose(logits_BSE, scores_BSE, pad_mask, places)
        counts_BE = count_choices(ids, logits_BSE.shape[-1])
        if self.capacity_factor:
            limit_B = self.fair_share(ids, pad_mask)
            all_ids, all_weights = (self.whole(x, places) for x in (ids, weights.detach()))
            kept = within_capacity(all_ids, all_weights, limit_B, self.drop_policy)
            kept = kept if places is None else kept[:, places]
            ids, weights = ids.masked_fill(~kept, -1), weights.masked_fill(~kept, 0)
        aux_loss, z_loss = self.losses(probs_BSE, lse_BS1.square(), counts_BE, pad_mask)
        return Routing(
            expert_ids=ids.flatten(0, 1),
            weights=weights.flatten(0, 1).to(x_BSD.dtype),
            aux_loss=aux_loss,
            z_loss=z_loss,
            tokens_per_expert=counts_BE.sum(0),
        )

    def check(self, x_BSD: Tensor, pad_mask: Tensor | None) -> None:
        """Raise ValueError unless x is a float [B, S, D] and pad_mask None or bool [B, S]."""
        width = self.weight.shape[1]
        if x_BSD.ndim != 3 or x_BSD.shape[2] != width or not x_BSD.is_floating_point():
            raise ValueError(
                f"x: found {x_BSD.dtype} {list(x_BSD.shape)}; allowed is a float dtype [B, S, "
                f"{width}]; keep batch and sequence apart, set model.hidden_size to the width of x"
            )
        if pad_mask is None:
            return
        if pad_mask.dtype != torch.bool or pad_mask.shape != x_BSD.shape[:2]:
            raise ValueError(
                f"pad_mask: found {pad_mask.dtype} {list(pad_mask.shape)}; allowed is torch.bool "
                f"{list(x_BSD.shape[:2])}, True for a real token; set pad_mask.bool()"
            )

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [..., E] of x [..., D], in float32 (float64 for float64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        with without_autocast(x.device.type):
            return F.linear(x.to(wide), self.weight.to(wide), bias)

    def choose(
        self,
        logits_BSE: Tensor,
        scores_BSE: Tensor,
        pad_mask: Tensor | None,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return expert ids int64 [B, S, K] from the best down and their weights [B, S, K].

        Under expert choice both are [B, S, E], with -1 and 0 where an expert did not choose.
        """
        experts = scores_BSE.shape[-1]
        if self.routing == "top_k" and logits_BSE.device.type == "cuda":
            return self.choose_by_kernel(logits_BSE, pad_mask)
        if self.routing == "expert_choice":
            limit_B = self.fair_share(scores_BSE, pad_mask)
            real = None if pad_mask is None else self.whole(pad_mask, places)
            chosen = chosen_tokens(self.whole(scores_BSE.detach(), places), limit_B, real)
            chosen = chosen if places is None else chosen[:, places]
            ids = torch.arange(experts, device=chosen.device).expand_as(chosen)
            ids, weights = ids.masked_fill(~chosen, -1), scores_BSE.masked_fill(~chosen, 0)
        else:
            if self.routing == "round_robin":
                turns = torch.arange(scores_BSE.shape[1], device=scores_BSE.device)
                turns = turns if places is None else places
                choice = torch.arange(self.experts_per_token, device=scores_BSE.device)
                turns = turns[:, None] * self.experts_per_token + choice
                ids = (turns % experts).expand(len(scores_BSE), -1, -1)
            else:
                # Logits order as scores do and cannot tie by rounding; a bias needs scores.
                bias, biased = self.e_score_correction_bias, scores_BSE.detach()
                biased = biased if bias is None else biased + bias.to(biased.dtype)
                choice = logits_BSE.detach() if bias is None else biased
                of_groups = self.groups, self.top_groups, self.group_score
                ids = best_experts(choice, biased, self.experts_per_token, *of_groups)
            weights = scores_BSE.gather(-1, ids)
            if pad_mask is not None:
                ids = ids.masked_fill(~pad_mask[..., None], -1)
                weights = weights.masked_fill(~pad_mask[..., None], 0)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + NORM_EPS)
        return ids, weights * self.scale

    def choose_by_kernel(
        self, logits_BSE: Tensor, pad_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return what `choose` returns for top_k, [B, S, K] each, from one operator."""
        bias = self.e_score_correction_bias
        weights, ids, _ = routing_ops.router_topk(
            logits_BSE.flatten(0, 1),
            None if bias is None else bias.to(logits_BSE.dtype),
            self.experts_per_token,
            self.scoring,
            self.normalise,
            self.scale,
            self.groups,
            self.top_groups,
            self.group_score,
            None if pad_mask is None else pad_mask.flatten(),
        )
        shape = (*logits_BSE.shape[:2], self.experts_per_token)
        return ids.long().view(shape), weights.view(shape)

    def whole(self, x_BSX: Tensor, places: Tensor | None) -> Tensor:
        """Return [B, whole S, ...] of a tensor [B, S, ...], in the order of the sequence."""
        if self.sequence is None or places is None:
            return x_BSX
        order = stack_ranks(places, self.sequence).flatten().argsort()
        return stack_ranks(x_BSX.movedim(1, 0), self.sequence).flatten(0, 1)[order].movedim(0, 1)

    def fair_share(self, of_BSX: Tensor, pad_mask: Tensor | None) -> Tensor:
        """Return the tokens an expert takes of a whole sequence, int64 [B]; of_BSX gives B and S.

        ceil(capacity_factor * K * tokens / E), at least 1; under expert choice the factor is 1.
        """
        batch, length = of_BSX.shape[:2]
        tokens_B = torch.full((batch,), length, device=of_BSX.device)
        if pad_mask is not None:
            tokens_B = pad_mask.sum(1)
        tokens_B = sum_forward(tokens_B, self.sequence)
        numerator, denominator = self.share
        return ((tokens_B * numerator + denominator - 1) // denominator).clamp(min=1)

    def losses(
        self, probs_BSE: Tensor, lse2_BS1: Tensor, counts_BE: Tensor, pad_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the balance loss [B] and the z-loss [B] of whole sequences.

        The balance loss is one shared value when the scope is the micro-batch or, over all ranks
        with samples of the step, the global batch. Groups: sequence, one all-reduce; batch under
        the scope `global`, one more.
        """
        batch, length, experts = probs_BSE.shape
        if pad_mask is None:
            tokens_B1 = probs_BSE.new_full((batch, 1), length)
        else:
            tokens_B1 = pad_mask.sum(1, keepdim=True).to(probs_BSE.dtype)
            probs_BSE = probs_BSE.masked_fill(~pad_mask[..., None], 0)
            lse2_BS1 = lse2_BS1.masked_fill(~pad_mask[..., None], 0)
        counts_BE = counts_BE.to(probs_BSE.dtype)
        sums = torch.cat([probs_BSE.sum(1), counts_BE, lse2_BS1.sum(1), tokens_B1], dim=1)
        sums = sum_forward(sums, self.sequence)
        z_loss = sums[:, -2] / sums[:, -1].clamp(min=1)
        if self.scope != "sequence":
            sums = sums.sum(0, keepdim=True)
        if self.scope == "global":
            sums = sum_ranks(sums, self.batch)
        mean_BE = sums[:, :experts] / sums[:, -1:].clamp(min=1)
        counts_BE = sums[:, experts : 2 * experts]
        share_BE = counts_BE.detach() / counts_BE.detach().sum(-1, keepdim=True).clamp(min=1)
        aux_loss = experts * (share_BE * mean_BE).sum(-1)
        return aux_loss.expand(batch), z_loss

    @torch.no_grad()
    def move_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Raise the bias of experts that got fewer tokens than the mean, lower that of the others.

        Shapes: tokens_per_expert int [E], of the whole optimizer step over all ranks. The mean of
        the bias stays 0. Source: Wang et al. 2024, algorithm 1.
        """
        bias = self.e_score_correction_bias
        # In integers: the mean of many counts is no exact float.
        behind = tokens_per_expert.sum() - tokens_per_expert * len(tokens_per_expert)
        bias += self.update_rate * behind.sign().to(bias.dtype)
        bias -= bias.mean()


def move_correction_biases(chunks: list[nn.Module], tokens_per_expert: Tensor) -> None:
    """Move the correction bias of every router that has one; once an optimizer step.

    Shapes: tokens_per_expert int [L, E], a row for each MoE block of the whole model in order,
    summed over the micro-batches and ranks of the step: equal on every rank, so the biases stay
    equal too. A chunk of a pipeline has the rows of its own blocks (`moe_rows`).
    """
    for chunk in chunks:
        routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        for router, row in zip(routers, moe_rows(chunk), strict=True):
            if router.e_score_correction_bias is not None:
                router.move_correction_bias(tokens_per_expert[row])


def moe_rows(chunk: nn.Module) -> list[int]:
    """Return for each MoE block of a chunk its number among all MoE blocks of the model."""
    dense = getattr(chunk.config, "first_k_dense_replace", 0)
    blocks = chunk.layers.items()
    return [int(n) - dense for n, b in blocks for m in b.modules() if isinstance(m, TopKRouter)]


def without_autocast(device_type: str) -> AbstractContextManager:
    """Return a context in which autocast casts nothing, on devices that have it and others."""
    if device_type in AUTOCAST_DEVICES:
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def looks_ahead(config: ModelConfig) -> str | None:
    """Say how this routing lets later tokens decide about earlier ones; None when it does not."""
    if config.routing == "expert_choice":
        found, way = "model.routing=expert_choice: experts choose", "model.routing=top_k"
    elif config.capacity_factor and config.drop_policy == "weight":
        found = "model.capacity_factor with model.drop_policy=weight: a full expert chooses"
        way = "model.drop_policy=position"
    else:
        return None
    return (
        f"{found} among all tokens of a sequence, later ones included, so a causal language model"
        f" learns from its future: its loss looks better than its text will be; set {way}, unless"
        " the model is an encoder"
    )


def chosen_tokens(scores_BSE: Tensor, limit_B: Tensor, pad_mask: Tensor | None) -> Tensor:
    """Return bool [B, S, E]: each expert takes its limit [B] of tokens with the best scores.

    Ties, see `rounded`, go to the earliest token; padding is never taken.
    """
    scores_BSE = rounded(scores_BSE.detach())
    if pad_mask is not None:
        scores_BSE = scores_BSE.masked_fill(~pad_mask[..., None], -1)
    order = scores_BSE.sort(dim=1, descending=True, stable=True).indices
    chosen = order.argsort(1) < limit_B[:, None, None]
    return chosen if pad_mask is None else chosen & pad_mask[..., None]


def rounded(scores: Tensor) -> Tensor:
    """Return scores of float32 or float64, any shape, not negative, without their last bits.

    Tokens that are equal to a router, such as a character that is repeated at the beginning, differ
    by rounding errors only, and those depend on batch sizes and ranks: they must be a tie. 15 bits
    of the fraction stay in float32, 23 in float64.
    """
    bits, whole = (29, torch.int64) if scores.dtype == torch.float64 else (8, torch.int32)
    nearest = scores.contiguous().view(whole) + (1 << (bits - 1))
    return (nearest >> bits << bits).view(scores.dtype)


def within_capacity(ids_BSK: Tensor, weights_BSK: Tensor, limit_B: Tensor, policy: str) -> Tensor:
    """Return bool [B, S, K]: the choices that their expert has a place for.

    Shapes: ids int64 and weights [B, S, K]; limit int64 [B], places of an expert in a sequence.
    policy weight fills places from the largest weight down (ties, see `rounded`: the earliest
    token), position from the first token on.
    """
    flat = ids_BSK.flatten(1)
    order = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    if policy == "weight":
        ranking = rounded(weights_BSK.detach()).flatten(1)
        order = ranking.sort(dim=1, descending=True, stable=True).indices
    # Stable: inside an expert's queue the order stays.
    queued, by_expert = flat.gather(1, order).sort(dim=1, stable=True)
    begin = torch.searchsorted(queued, queued)
    place = torch.arange(flat.shape[1], device=flat.device) - begin
    kept = place < limit_B[:, None]
    # Back to the order of choices by a gather. Of a scatter into zeros, code that torch.compile
    # makes (inductor of torch 2.13, CPU) read the zeros before the scatter had filled them.
    return kept.gather(1, order.gather(1, by_expert).argsort(1)).view_as(ids_BSK)


def count_choices(ids_BSK: Tensor, experts: int) -> Tensor:
    """Return how often each expert was chosen, int64 [B, E]; ids int64 [B, S, K], -1 is nobody."""
    flat = ids_BSK.flatten(1)
    counts = flat.new_zeros(len(flat), experts + 1)
    flat = flat.masked_fill(flat < 0, experts)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))[:, :experts]
