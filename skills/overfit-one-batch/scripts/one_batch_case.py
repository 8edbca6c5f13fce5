"""One batch of one target: what it is, how low it can go, and all trainings on it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import real_steps
from batch_floor import Floor, floor_of, visible
from fixed_batch import FixedBatch, changed_at_second_read, choose, shuffled_inside
from one_batch_training import (
    Attempt,
    Look,
    Plan,
    look_at,
    no_functional_dropout,
    quiet,
    still_falls,
    train,
)

from kit.batch_tree import leaves, replaced
from kit.loss_terms import Term, terms
from kit.observation import Observation, observe
from kit.state import preserved
from kit.target import Target, seed_everything

BASELINE_STEPS = 60
SLOW = 0.05
"""Share of the first loss that may be left when every label is right and it still falls."""
FEW = 0.01
"""Share of labels that may be wrong then: a pixel or two of an image."""
FACTORS = (1.0, 3.0, 1 / 3)
"""Learning rates tried, over the first."""


@dataclass
class Case:
    """What is known of the batch before training, and the trainings."""

    target: Target
    fixed: FixedBatch
    random: bool
    """loss_fn draws random numbers even without dropout."""
    quiet_calls: bool
    """Dropout that is called as a function has to be turned off."""
    shuffled: str | None
    """How labels change between reads or calls."""
    compared: int
    """Examples whose labels could be compared between two reads."""
    first: Observation
    terms: list[Term]
    floors: dict[Any, Floor]
    """Of each term, by where and function."""
    real: real_steps.RealSteps | None
    start: Look
    near: float = 0.02
    share: float = 0.01
    attempts: list[Attempt] = field(default_factory=list)
    alone: Attempt | None = None
    """Known terms alone, when the others may hold them up."""
    baseline: Attempt | None = None

    @property
    def best(self) -> Attempt:
        """The attempt that passed, else the one that ended lowest."""
        every = [*self.attempts, *([self.alone] if self.alone else [])]
        passed = [a for a in every if a.ended == "passed"]
        finite = [a for a in every if math.isfinite(a.last.loss)] or every
        return passed[0] if passed else min(finite, key=lambda attempt: attempt.last.loss)

    @property
    def passed(self) -> bool:
        return self.best.ended == "passed"

    @property
    def nearly(self) -> bool:
        """Tell whether every label is right and the loss low, only slow: it still falls after all
        steps, or label i is row i (contrastive), whose scores are bounded."""
        last = self.best.last
        if self.values:  # the jitter of Adam ends absolute errors early, far or tiny labels late
            squares = all(term.options["rule"] == "mse_loss" for term in self.terms)
            return last.loss - last.floor < (SLOW if squares else math.sqrt(SLOW)) * self.scale
        right = not math.isnan(last.accuracy) and last.accuracy >= self.best_accuracy - FEW
        low = last.loss - last.floor < SLOW * self.scale
        falls = self.best.ended in ("steps", "time") and still_falls(self.best)
        return right and low and (falls or any(map(_is_contrastive, self.terms)))

    @property
    def values(self) -> bool:
        """Tell whether the known terms are all of a regression."""
        return bool(self.terms) and all(term.kind == "values" for term in self.terms)

    @property
    def scale(self) -> float:
        """What the loss is held against: the first one, or that of the best constant where labels
        far from 0 make the first one large without any bearing on what is learnt."""
        start = abs(self.start.loss)
        return min(start, self.prior) if self.values and self.prior > 0 else start

    @property
    def goal(self) -> float:
        """How far above the floor a passing loss may be; `near` is in nats, or relative."""
        return max(self.share * self.scale, self.near * (self.scale if self.values else 1.0))

    @property
    def best_accuracy(self) -> float:
        known = [f.accuracy for f in self.floors.values() if not math.isnan(f.accuracy)]
        return min(known, default=math.nan)

    @property
    def prior(self) -> float:
        """What constant scores reach, over the known terms."""
        return self._sum({key: floor.prior for key, floor in self.floors.items()})

    @property
    def guess(self) -> float:
        """Zero scores: ln C or ln 2; nan for a regression."""
        term = self.terms[0] if len(self.terms) == 1 else None
        if term is None or term.kind == "values":
            return math.nan
        return math.log(2 if term.kind == "binary" else term.classes)

    @property
    def doubled(self) -> bool:
        """Tell whether a softmax is seen to go into a softmax: no rate will change that floor."""
        return any(call.is_double_softmax for call in self.first.calls if call.share)

    @property
    def unbounded(self) -> bool:
        """Tell whether the loss has no lower bound that is known to be 0 or more."""
        named = {call.function for call in self.first.calls}
        below = any(a.last.total < -0.01 * abs(self.start.total) for a in self.attempts)
        return "gaussian_nll_loss" in named or (below and not self.terms)

    def passes(self, look: Look) -> bool:
        """Tell whether a look is at the floor with every label right that can be."""
        above = look.loss - look.floor
        low = above < self.goal
        low = low or (not self.values and 0 <= look.total < self.share * self.start.total)
        if not self.terms:
            low = 0 <= look.total < self.share * abs(self.start.total)
        right = math.isnan(look.accuracy) or look.accuracy >= self.best_accuracy - 1e-9
        return low and right and math.isfinite(look.loss)

    def look(self, step: int, seen: Observation) -> Look:
        return look_at(step, seen, {key: floor.loss for key, floor in self.floors.items()})

    @property
    def blind(self) -> float:
        """What scores without inputs can reach, over the known terms; nan for values."""
        if any(term.kind == "values" for term in self.terms):
            return math.nan
        return self._sum({key: floor.blind for key, floor in self.floors.items()})

    def _sum(self, losses: dict[Any, float]) -> float:
        weight = [float((t.weights * t.mass).sum()) for t in self.terms]
        values = [losses[(t.where, t.function)] for t in self.terms]
        total = sum(weight)
        if not total:
            return math.nan
        return sum(w * v for w, v in zip(weight, values, strict=True)) / total


def prepare(target: Target, *, examples: int, tokens: int) -> Case:
    """Choose the batch, find its floors, look for shuffling, take the user's own steps."""
    with preserved(target):
        quiet(target)
        fixed = choose(target, examples, tokens)
        calls = [observe(target, fixed.copy()) for _ in range(2)]
        inside = shuffled_inside(*calls)
        random, quiet_calls = _differ(calls), False
        if random:
            with no_functional_dropout():
                calls = [observe(target, fixed.copy()) for _ in range(2)]
            quiet_calls = not _differ(calls)
            random = not quiet_calls
        with no_functional_dropout() if quiet_calls else contextlib.nullcontext():
            watch = partial(_watch, target, random)
            first = watch(fixed.copy())
            known = terms(first)
            floors = {
                (term.where, term.function): _floor(target, fixed, term, first, watch)
                for term in known
            }
    outside, compared = changed_at_second_read(target, fixed)
    real = real_steps.take(target, fixed.copy) if first.loss.requires_grad else None
    case = Case(
        target, fixed, random, quiet_calls, inside or outside, compared, first, known, floors,
        real, Look(0, 0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip
    case.start = case.look(0, first)
    return case


def _watch(target: Target, random: bool, batch: Any) -> Observation:
    """Observe with the random numbers that training draws at every step."""
    if random:
        seed_everything(0)
    return observe(target, batch, catch=True)


def _floor(target: Target, fixed: FixedBatch, term: Term, first: Observation, watch: Any) -> Floor:
    own = [c for c in first.calls if c.where == term.where and c.function == term.function]
    names, places, note = visible(target, fixed, term, own, watch)
    floor = floor_of(term, names)
    floor.blind, floor.note = floor_of(term, places).loss, note
    return floor


def _is_contrastive(term: Term) -> bool:
    return term.hard and term.classes > 1 and term.labels.tolist() == list(range(term.classes))


def _differ(calls: list[Observation]) -> bool:
    one, two = (float(call.loss.detach()) for call in calls)
    return abs(one - two) > 1e-6 * max(abs(one), 1e-12)


def run_attempts(
    case: Case, *, lr: float, steps: int, most_steps: int, deadline: float, progress: Any
) -> None:
    """Train with three learning rates until one passes, then without the inputs."""
    began = time.monotonic()
    most_steps = steps if case.doubled else most_steps
    plan = Plan(steps, most_steps, deadline, case.passes, case.look, case.random)
    if progress is not None:
        plan.progress = partial(_tell, progress, steps)
    wrapped = _wrapped(case)
    for factor in FACTORS:
        case.attempts.append(wrapped(case.fixed.copy, lr * factor, plan))
        ended = case.attempts[-1].ended
        if case.passed or case.doubled or case.attempts[-1].gradient == 0 or ended == "time":
            break
    last = case.best.last
    others = last.total - sum(term.share for term in last.terms)
    if not case.passed and case.terms and others > 0.02 * abs(last.total):
        alone = Plan(steps, most_steps, deadline, case.passes, case.look, case.random)
        alone.terms_alone = True
        case.alone = wrapped(case.fixed.copy, lr, alone)
    spare = deadline + 0.25 * (deadline - began)
    empty = case.fixed.without_inputs()
    if empty is not None and case.best.gradient != 0:
        copy = partial(_copy, empty)
        used = min(max(len(case.best.losses), 20), BASELINE_STEPS if case.passed else most_steps)
        blind = Plan(used, used, spare, lambda look: False, case.look, case.random)
        case.baseline = _try(lambda: wrapped(copy, case.best.lr, blind))


def _tell(progress: Any, steps: int, step: int, loss: float) -> None:
    if step % 10 == 0:
        progress(min(step, steps), steps, f"steps, loss {loss:.4g}")


def _wrapped(case: Case) -> Callable[..., Attempt]:
    def run(copy: Callable[[], Any], lr: float, plan: Plan) -> Attempt:
        if not case.quiet_calls:
            return train(case.target, copy, lr, plan)
        with no_functional_dropout():
            return train(case.target, copy, lr, plan)

    return run


def _copy(batch: Any) -> Any:
    return replaced(batch, {path: t.clone() for path, t in leaves(batch)})


def _try(work: Callable[[], Attempt]) -> Attempt | None:
    """Run the baseline; constant inputs may be none that the model can take."""
    try:
        found = work()
    except Exception:
        return None
    return found if math.isfinite(found.last.loss) else None
