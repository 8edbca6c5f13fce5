"""Train on one batch: a fresh AdamW, constant learning rate, no dropout, no weight decay."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from batch_floor import accuracy_of

from kit.loss_terms import Term, terms
from kit.observation import Observation, observe
from kit.state import preserved
from kit.target import Target, seed_everything

LOOK_EVERY = 10
"""Steps between two looks at terms and accuracy."""
FLAT_STEPS, FLAT = 150, 0.01
"""An attempt ends when its loss fell by less than FLAT of itself over so many steps."""


@dataclass
class Look:
    """One term-wise look: losses for one unit of weight of the known terms."""

    step: int
    total: float
    """What loss_fn returned."""
    loss: float
    """The known terms; the total when no term is known."""
    floor: float
    accuracy: float
    """Lowest of the terms with classes; nan without."""
    terms: list[Term] = field(default_factory=list)


@dataclass
class Attempt:
    """One training from the first weights."""

    lr: float
    losses: list[float] = field(default_factory=list)
    """Total loss before every step."""
    looks: list[Look] = field(default_factory=list)
    gradient: float = math.nan
    """Largest gradient of the first step; 0: none."""
    ended: str = ""
    """passed, flat, steps, time or non-finite."""

    @property
    def last(self) -> Look:
        return self.looks[-1]


@dataclass
class Plan:
    """What an attempt is told."""

    steps: int
    most_steps: int
    deadline: float
    passed: Callable[[Look], bool]
    look: Callable[[int, Observation], Look]
    random: bool
    """loss_fn draws random numbers: every step draws the same ones."""
    progress: Callable[[int, float], None] = lambda step, loss: None
    terms_alone: bool = False
    """Leave out what the known terms do not explain."""


def quiet(target: Target) -> list[str]:
    """Put the model in training mode with every dropout at 0; returns what was set, by name.

    Every float attribute of a module whose name has `drop` in it, and `p` of dropout layers.
    """
    target.model.train()
    changed = []
    for name, module in target.model.named_modules():
        dropout = "drop" in type(module).__name__.lower()
        for key, value in list(vars(module).items()):
            named = "drop" in key.lower() or (dropout and key == "p")
            if named and isinstance(value, float) and 0 < value <= 1:
                setattr(module, key, 0.0)
                changed.append(f"{name}.{key}".strip("."))
    return changed


@contextlib.contextmanager
def no_functional_dropout() -> Iterator[None]:
    """Let dropout that is called as a function change nothing."""
    from torch.overrides import TorchFunctionMode

    class Quiet(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
            if "dropout" in name and args and not name.startswith("_"):
                return args[0]
            if name == "scaled_dot_product_attention":
                if len(args) > 4:
                    args = (*args[:4], 0.0, *args[5:])
                else:
                    kwargs["dropout_p"] = 0.0
            return func(*args, **kwargs)

    with Quiet():
        yield


def trainable(target: Target) -> list[Any]:
    """List the parameters that can be trained, those of a loss that is a module too."""
    owners = [target.model, *([target.loss_fn] if hasattr(target.loss_fn, "parameters") else [])]
    every = {id(p): p for owner in owners for p in owner.parameters() if p.requires_grad}
    return list(every.values())


def train(target: Target, copy: Callable[[], Any], lr: float, plan: Plan) -> Attempt:
    """Train on copies of a batch and put everything back."""
    attempt = Attempt(lr)
    with preserved(target):
        quiet(target)
        parameters = trainable(target)
        optimizer = WideAdamW(parameters, lr) if parameters else None
        seed_everything(0)
        step, until = 0, plan.steps
        while True:
            if plan.random:
                seed_everything(0)
            if step % LOOK_EVERY == 0 or step == until:
                seen = observe(target, copy())
                attempt.looks.append(plan.look(step, seen))
                attempt.ended = _end(attempt, step, until, plan)
                if attempt.ended == "steps" and still_falls(attempt) and until < plan.most_steps:
                    until = min(until * 2, plan.most_steps)
                elif attempt.ended:
                    break
                loss = _wanted(seen) if plan.terms_alone else seen.loss
            else:
                seen = observe(target, copy()) if plan.terms_alone else None
                loss = _wanted(seen) if seen else target.loss_fn(target.model, copy())
            attempt.losses.append(float(loss.detach()))
            plan.progress(step, attempt.losses[-1])
            if optimizer is None or not loss.requires_grad:
                attempt.gradient, attempt.ended = 0.0, "flat"
                break
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                sizes = [float(p.grad.abs().max()) for p in parameters if p.grad is not None]
                attempt.gradient = max(sizes, default=0.0)
                if attempt.gradient == 0:
                    attempt.ended = "flat"
                    break
            optimizer.step()
            step += 1
    return attempt


def _wanted(seen: Observation) -> Any:
    """Return the known terms of an observed loss alone, with their weights as constants."""
    import torch

    known = [c for c in seen.calls if c.kind != "other" and c.share and c.result is not None]
    named = [c for c in known if c.function != "sub"] or known
    results = [call.result for call in named if call.result.requires_grad]
    if not results:
        return seen.loss
    weights = torch.autograd.grad(seen.loss, results, retain_graph=True)
    return sum((w.detach() * r).sum() for w, r in zip(weights, results, strict=True))


def _end(attempt: Attempt, step: int, until: int, plan: Plan) -> str:
    look = attempt.last
    if not math.isfinite(look.total):
        return "non-finite"
    if plan.passed(look):
        return "passed"
    if time.monotonic() > plan.deadline:
        return "time"
    if step >= FLAT_STEPS and _is_flat(attempt, step):
        return "flat"
    return "steps" if step >= until else ""


def _is_flat(attempt: Attempt, step: int) -> bool:
    """Tell whether the best of the last FLAT_STEPS / 2 steps is no better than that before them."""
    half = FLAT_STEPS // 2
    now = [look.loss for look in attempt.looks if look.step > step - half]
    before = [look.loss for look in attempt.looks if step - 2 * half < look.step <= step - half]
    return bool(before) and min(before) - min(now) < FLAT * abs(min(before))


def still_falls(attempt: Attempt) -> bool:
    """Tell whether one of the last five looks is lower by a twentieth than all before."""
    looks = attempt.looks
    return len(looks) > 6 and min(x.loss for x in looks[-5:]) < 0.95 * min(
        x.loss for x in looks[:-5]
    )


def look_at(step: int, seen: Observation, floors: dict[Any, float]) -> Look:
    """Sum up the known terms of an observed loss; floors by where and function."""
    known, total = terms(seen), float(seen.loss.detach())
    weight = sum(float((t.weights * t.mass).sum()) for t in known)
    if not known or not weight or not math.isfinite(weight):
        return Look(step, total, total, 0.0, math.nan)
    loss = sum(t.share for t in known) / weight
    low = sum(
        floors.get((t.where, t.function), 0.0) * float((t.weights * t.mass).sum()) for t in known
    )
    right = [a for a in (accuracy_of(t) for t in known) if not math.isnan(a)]
    return Look(step, total, loss, low / weight, min(right, default=math.nan), known)


class WideAdamW:
    """AdamW without weight decay whose weights and moments are float32 at least.

    Half-precision parameters get the rounded values, so that small steps are not lost.
    """

    def __init__(self, parameters: list[Any], lr: float) -> None:
        import torch

        self.pairs = []
        for parameter in parameters:
            narrow = parameter.dtype in (torch.float16, torch.bfloat16)
            wide = parameter.detach().float().requires_grad_() if narrow else parameter
            self.pairs.append((parameter, wide))
        self.inner = torch.optim.AdamW([wide for _, wide in self.pairs], lr, weight_decay=0.0)

    def zero_grad(self) -> None:
        for parameter, _ in self.pairs:
            parameter.grad = None

    def step(self) -> None:
        import torch

        for parameter, wide in self.pairs:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            if wide is not parameter:
                wide.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for parameter, wide in self.pairs:
                if wide is not parameter:
                    parameter.copy_(wide)
