"""Listen to routers at work and add up what they did, batch by batch."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kit.batches import tensors
from kit.user_code import user_code

CAPACITIES = (1.0, 1.25)
NAMES = ("gate", "router")


@dataclass
class Meter:
    """What one router did, added up over batches."""

    name: str
    experts: int = 0
    choices: int = 0
    """Experts per token; under expert choice as many as there are on average."""
    tokens: int = 0
    counts: Any = None
    """Choices of each expert before any was dropped, float64 [experts]."""
    dropped: float = 0.0
    would_drop: dict[float, float] = field(default_factory=lambda: dict.fromkeys(CAPACITIES, 0.0))
    entropy: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    bias_spread: float | None = None
    misfit: dict[str, float] = field(default_factory=dict)
    probabilities: bool = True
    """Whether every row of what should be logits was a distribution."""

    def add(self, logits: Any, chosen: Any, kept: Any, weights: Any) -> None:
        """Add one batch.

        logits [sequences, tokens, experts]; chosen ids [sequences, tokens, k] before drops, kept
        ids after them, both with -1 for none; weights like kept, or None where nobody says them.
        """
        torch = sys.modules["torch"]
        logits, real = logits.detach().double(), (chosen >= 0).any(-1)
        self.experts = logits.shape[-1]
        counts = torch.stack([(chosen == e).sum((1, 2)) for e in range(self.experts)], 1).double()
        self.counts = counts.sum(0) + (0 if self.counts is None else self.counts)
        self.tokens += int(real.sum())
        self.dropped += int((chosen >= 0).sum()) - int((kept >= 0).sum())
        for factor in CAPACITIES:
            limit = (factor * counts.sum(1, keepdim=True) / self.experts - 1e-9).ceil()
            self.would_drop[factor] += float((counts - limit).clamp(min=0).sum())
        rows = logits[real]
        shares = rows.softmax(-1)
        self.entropy += float(-(shares * shares.clamp(min=1e-300).log()).sum())
        self.squares += float(rows.square().mean(-1).sum())
        if rows.numel():
            self.largest = max(self.largest, largest(rows.abs()))
            sums = rows.sum(-1)
            self.probabilities &= bool((rows >= 0).all() and ((sums - 1).abs() < 1e-3).all())
        if weights is not None:
            self.fit(logits, kept, weights.detach().double())

    def fit(self, logits: Any, kept: Any, weights: Any) -> None:
        """Compare the weights' shares of their token's sum with those that scores would give."""
        candidates = {
            "softmax": logits.softmax(-1),
            "sigmoid": logits.sigmoid(),
            "double softmax": logits.softmax(-1).softmax(-1),
        }
        several = (kept >= 0).sum(-1) > 1  # one weight alone has a share of 1, whatever it is
        for name, scores in candidates.items():
            found = scores.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, 0)
            gap = (share_of(weights) - share_of(found))[several].abs()
            worst = largest(gap)
            self.misfit[name] = max(self.misfit.get(name, 0.0), worst)

    def size(
        self, scoring: str, normalised: bool, scale: float, logits: Any, chosen: Any, *parts: Any
    ) -> None:
        """Compare the weights (the second of parts, kept ids the first) with what the
        configuration makes of the scores, over a token's sum of them.
        """
        kept, weights = parts[0], parts[1].detach().double()
        logits = logits.detach().double()
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        wanted = scores.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0)
        if normalised:
            wanted = share_of(wanted)
        wanted, real = wanted * scale, (chosen >= 0).any(-1)
        gap = (weights - wanted.masked_fill(kept < 0, 0)).abs() / wanted.sum(-1, keepdim=True)
        self.misfit["settings"] = max(self.misfit.get("settings", 0.0), largest(gap[real]))

    def numbers(self, least_load: float) -> dict[str, Any]:
        """Give what the report keeps of this router; under least_load x the mean lies the dead."""
        load, total = self.counts, float(self.counts.sum())
        mean = total / self.experts
        share = load / max(total, 1.0)
        used = math.exp(float(-(share * share.clamp(min=1e-300).log()).sum()))
        k = total / max(self.tokens, 1)
        dead = (load < least_load * mean).nonzero().flatten().tolist()
        return {
            "router": self.name,
            "experts": self.experts,
            "tokens": self.tokens,
            "experts_per_token": k,
            "load_over_mean": (load / max(mean, 1e-9)).tolist(),
            "max_over_mean": float(load.max()) / max(mean, 1e-9),
            "min_over_mean": float(load.min()) / max(mean, 1e-9),
            "experts_in_use": used,
            "evenness": (used - k) / (self.experts - k) if self.experts > k + 1e-9 else None,
            "dead_experts": dead,
            "dropped": self.dropped / max(total, 1.0),
            "dropped_at": {f"{f:.2f}": n / max(total, 1.0) for f, n in self.would_drop.items()},
            "token_entropy": self.entropy / max(self.tokens, 1) / math.log(max(self.experts, 2)),
            "logit_rms": math.sqrt(self.squares / max(self.tokens, 1)),
            "logit_max": self.largest,
            "bias_spread": self.bias_spread,
            "misfit": self.misfit,
        }


@dataclass
class Meters:
    """One meter for each module that may be a router; sequences is how many a batch has."""

    all: list[Meter] = field(default_factory=list)
    sequences: int = 1

    def new(self, name: str) -> Meter:
        """Add a meter."""
        self.all.append(Meter(name))
        return self.all[-1]

    @property
    def used(self) -> list[Meter]:
        """Those that saw a router at work."""
        return [meter for meter in self.all if meter.tokens]


def largest(errors: Any) -> float:
    """Give the largest of errors, infinity where one is NaN, 0 of none."""
    return float(errors.nan_to_num(nan=math.inf, posinf=math.inf).max()) if errors.numel() else 0.0


def share_of(weights: Any) -> Any:
    """Divide by the sum of each token's weights."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)


@contextlib.contextmanager
def project_meters(model: Any) -> Iterator[Meters]:
    """Listen to every TopKRouter of the project's model."""
    with user_code("importing the project's router"):
        from curry_train.layers.routing import TopKRouter
    meters, handles = Meters(), []
    c = model.config
    settings = (getattr(c, "norm_topk_prob", False), getattr(c, "routed_scaling_factor", 1.0))

    def listen(meter: Meter, router: Any) -> None:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            x, pad_mask = inputs[0], inputs[1] if len(inputs) > 1 else None
            logits = module.logits(x)
            kept = output.expert_ids.view(*x.shape[:2], -1)
            chosen = kept
            if module.capacity_factor:
                sigmoid = module.scoring == "sigmoid"
                scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
                chosen = module.choose(logits, scores, pad_mask)[0]
            weights = output.weights.view_as(kept)
            meter.add(logits, chosen, kept, weights)
            meter.size(module.scoring, *settings, logits, chosen, kept, weights)
            bias = module.e_score_correction_bias
            if bias is not None:
                meter.bias_spread = float(bias.max() - bias.min())

        handles.append(router.register_forward_hook(hook))

    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            listen(meters.new(name), module)
    with listening(handles):
        yield meters


@contextlib.contextmanager
def foreign_meters(model: Any, names: tuple[str, ...], k: int | None) -> Iterator[Meters]:
    """Listen to every module of such a name whose output looks like a router's."""
    config = getattr(model, "config", None)
    k = k or getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", None)
    meters, handles = Meters(), []

    def listen(meter: Meter, router: Any) -> None:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found = read_output(output, k)
            if found is not None:
                logits, ids, weights = (split(t, meters.sequences) for t in found)
                meter.add(logits, ids, ids, weights)

        handles.append(router.register_forward_hook(hook))

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            listen(meters.new(name), module)
    with listening(handles):
        yield meters


@contextlib.contextmanager
def listening(handles: list[Any]) -> Iterator[None]:
    """Remove hooks at the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def split(tensor: Any, sequences: int) -> Any:
    """Give [sequences, tokens, n] of a tensor [tokens of all sequences, n]; None stays."""
    if tensor is None or tensor.dim() == 3:
        return tensor
    return tensor.view(sequences if len(tensor) % sequences == 0 else 1, -1, tensor.shape[-1])


def read_output(output: Any, k: int | None) -> tuple[Any, Any, Any] | None:
    """Find (logits, ids, weights) in what a module returned; weights may be None.

    Ids are its integers; weights its floats of their shape; logits its floats with more columns.
    """
    parts = [t for t in tensors(output) if t.dim() in (2, 3)]
    ids = next((t for t in parts if not t.is_floating_point() and t.shape[-1] <= 64), None)
    floats = [t for t in parts if t.is_floating_point()]
    if ids is None:
        logits = next((t for t in floats if k is not None and t.shape[-1] >= max(k, 2)), None)
        return None if logits is None else (logits, logits.topk(k).indices, None)
    weights = next((t for t in floats if t.shape == ids.shape), None)
    logits = next((t for t in floats if t.shape[-1] > ids.shape[-1]), None)
    return None if logits is None else (logits, ids.long(), weights)
