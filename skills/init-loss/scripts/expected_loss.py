"""What a head loses before it has learnt anything, and where a real loss departs from that.

For classes the loss of a term splits exactly: guessing (ln C), what constant scores add or save
(a bias), what the scores' spread over inputs adds (about Var/2), and what the scores know of the
labels of their own inputs, which nothing can know before the first step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kit.loss_terms import NO_SCORE, Term, value_costs


@dataclass
class Start:
    """One term of the loss at its start; losses in nats (values: in the loss's own unit)."""

    term: Term
    mean: float
    """The loss, one unit of weight a target."""
    guess: float
    """Zero scores: ln C or ln 2; values: the best constant."""
    prior: float
    """The best constant scores: entropy of the labels; values: the same as guess."""
    constant: float
    """The scores' own mean in the place of each row's scores."""
    unpaired: float
    """Each row's scores against labels of any row."""
    spread: float
    """Standard deviation of a row's scores over classes; values: over that of the labels."""
    chance: float
    """How far `mean` may lie from `unpaired` by luck, one standard deviation of a seed."""
    offset: float = 0.0
    """values: mean prediction less mean label, over the labels' standard deviation."""
    bias: list[float] = field(default_factory=list)
    """The best constant scores."""
    correlation: float = 0.0
    """values: of predictions and labels."""

    @property
    def informed(self) -> float:
        """What the scores save by knowing the labels of their own inputs."""
        return self.unpaired - self.mean


def start_of(term: Term) -> Start:
    """Measure one term."""
    return {"classes": _classes, "binary": _binary, "values": _values}[term.kind](term)


def _classes(term: Term) -> Start:
    import torch

    scores, here = term.scores, _present(term.scores)
    counts = here.sum(-1).clamp(min=1).double()
    share = term.weights * term.mass
    total = _nonzero(share.sum())
    if term.hard and not term.options.get("label_smoothing") and not _by_class(term):
        prior = torch.zeros(term.classes, dtype=torch.float64)
        prior.index_add_(0, term.labels, term.weights / total)
    else:
        prior = (term.weights[:, None] * term.targets).sum(0) / total
    filled = torch.where(here, scores, 0.0)
    average = (share[:, None] * filled).sum(0) / total
    seen = prior > 0
    entropy = -float((prior[seen] * prior[seen].log()).sum())
    effective = float(total) ** 2 / float(_nonzero(share.square().sum()))
    entropy += (int(seen.sum()) - 1) / (2 * effective)  # Miller and Madow: few rows hide entropy
    lse = scores.logsumexp(-1)
    level = float((share * lse).sum() / total) if term.normalised else 0.0
    spread = _spread(filled, here)
    return Start(
        term,
        mean=term.mean,
        guess=float((share * counts.log()).sum() / total),
        prior=entropy,
        constant=_constant(average, prior, term),
        unpaired=level - float((prior * average).sum()),
        spread=float((share * spread).sum() / total),
        chance=float((share * spread).sum() / total) * float(prior.square().sum().sqrt()),
        bias=[math.log(max(float(p), 1e-12)) for p in prior[:64]],
    )


def _present(scores: Any) -> Any:
    """Tell which classes a row has: those at minus infinity, or at -1e9 and the like among scores
    of common size, are taken away."""
    common = scores.amax(-1, keepdim=True) < -NO_SCORE / 10
    return ~scores.isneginf() & ~((scores < NO_SCORE) & common)


def _by_class(term: Term) -> bool:
    return term.options.get("weight") is not None


def _spread(filled: Any, here: Any) -> Any:
    counts = here.sum(-1).clamp(min=1)
    mean = filled.sum(-1) / counts
    square = ((filled - mean[:, None]).square() * here).sum(-1) / counts
    return square.sqrt()


def _constant(average: Any, prior: Any, term: Term) -> float:
    level = float(average.logsumexp(0)) if term.normalised else 0.0
    return level - float((prior * average).sum())


def _nonzero(value: Any) -> Any:
    """Give 1 in the place of 0: a loss of negative sign has negative weights."""
    import torch

    return torch.where(value == 0, 1.0, value)


def _binary(term: Term) -> Start:
    from torch.nn.functional import softplus

    scores, pull = term.scores, term.weights * term.mass
    pull = pull / _nonzero(pull.sum())
    up, down = (pull * term.labels).sum(0), (pull * (1 - term.labels)).sum(0)
    total = float((up + down).sum()) or 1e-300
    rows = max(len(scores), 1)
    share = (up / (up + down).clamp(min=1e-300)).clamp(0.5 / rows, 1 - 0.5 / rows)
    best, average = share.logit(), scores.mean(0)

    def cost(constant: Any) -> float:
        return float((up * softplus(-constant) + down * softplus(constant)).sum()) / total

    spread = float((scores - average).square().mean().sqrt())
    return Start(
        term,
        mean=term.mean,
        guess=math.log(2.0),
        prior=cost(best),
        constant=cost(average),
        unpaired=float((pull * softplus(scores)).sum() - (up * average).sum()) / total,
        spread=float(scores.square().mean().sqrt()),
        chance=spread * math.sqrt(float((share * (1 - share)).mean())),
        bias=best[:64].tolist(),
    )


def _values(term: Term) -> Start:
    labels, scores, rule = term.labels, term.scores, term.options["rule"]
    weights = term.weights * term.mass
    total = _nonzero(weights.sum(0))
    mean = (weights * labels).sum(0) / total
    median = labels.median(0).values
    found = []
    for constant in (mean, median):
        costs = value_costs(constant - labels, rule, term.options) * term.mass
        found.append((term.average(costs), constant))
    best, constant = min(found, key=lambda pair: pair[0])
    predicted = (weights * scores).sum(0) / total
    width = float((labels - mean).square().mean().sqrt())
    spread = float((scores - predicted).square().mean().sqrt())
    product = float(((labels - mean) * (scores - predicted)).mean())
    return Start(
        term,
        mean=term.mean,
        guess=best,
        prior=best,
        constant=term.average(value_costs(predicted - labels, rule, term.options) * term.mass),
        unpaired=math.nan,
        spread=spread / width if width else math.inf,
        chance=0.0,
        offset=float((predicted - mean).square().mean().sqrt()) / width if width else math.inf,
        bias=constant[:64].tolist(),
        correlation=product / (width * spread) if width and spread else 0.0,
    )
