"""From the first difference to the kind of cause that fits, and the files that hold such code."""

from __future__ import annotations

from typing import Any, NamedTuple

from step_comparison import Comparison, Gap


class Cause(NamedTuple):
    """A sentence, and the files of the project to read first."""

    text: str
    files: tuple[str, ...]


DATA = ("curry_train/data/loader.py", "curry_train/data/prepare.py")
SCHEDULE = ("curry_train/optim.py", "configs/optim")
FORWARD = ("curry_train/models", "curry_train/layers", "curry_train/loss.py")
BACKWARD = ("curry_train/parallel/grads.py", "curry_train/kernels", "curry_train/step.py")
ROUTER = ("curry_train/layers/routing.py", "curry_train/layers/moe.py")
UPDATE = ("curry_train/step.py", "curry_train/optim.py", "curry_train/parallel/grads.py")


def likely_cause(
    comparison: Comparison,
    *,
    batches: int | None,
    hashed: bool,
    tokens: int | None,
    shifted: int,
    repeats: bool | None,
) -> Cause | None:
    """Name what fits the first difference; None without one.

    batches, tokens: the first step whose batch or token count differs, None if none does; hashed:
    whether batches could be compared; shifted: see step_comparison.shift; repeats: whether the head
    repeats itself, None when that was not tried.
    """
    first = comparison.first()
    if shifted:
        text = f"the head's step s is the base's step s{shifted:+d}: rows or batches are shifted"
        return Cause(text, ("curry_train/data/loader.py", "train.py"))
    if batches is not None or tokens is not None:
        step = min(step for step in (batches, tokens) if step is not None)
        what = "batches" if batches is not None else "token counts"
        return Cause(f"changed data: {what} differ from step {step} on", DATA)
    if first is None:
        return None
    if first.found is None:
        text = f"the head does not log {first.key} from step {first.step} on"
        return Cause(text, ("curry_train/step.py", "train.py"))
    if repeats is False:
        text = "the head does not repeat itself: randomness without a seed, or a race"
        return Cause(text, (*FORWARD, "curry_train/data/loader.py"))
    if first.step == 1:
        return in_first_step(comparison, first, hashed)
    if first.id == "validate-val-loss" and not comparison.beyond("validate-loss"):
        text = f"training steps are equal, validation after step {first.step} is not"
        return Cause(
            f"{text}: evaluation, or the last update", ("curry_train/evaluate.py", *UPDATE)
        )
    if first.id == "validate-lr":
        return learning_rate(first)
    if first.step == 2:
        return Cause("equal in step 1, not in step 2: optimizer, clipping or schedule", UPDATE)
    what, files = "something that depends on the step or the data seen", UPDATE
    if any(gap.step == first.step - 1 for gap in comparison.gaps["validate-val-loss"]):
        what = "what evaluation after that step leaves behind, or " + what
        files = ("curry_train/evaluate.py", *UPDATE)
    text = f"equal up to step {first.step - 1}: {what}"
    return Cause(text, (*files, "curry_train/data/loader.py"))


def in_first_step(comparison: Comparison, first: Gap, hashed: bool) -> Cause:
    """Tell apart what one step without any history can differ in."""
    differs = {id for id in comparison.gaps if any(g.step == 1 for g in comparison.beyond(id))}
    if "validate-loss" in differs:
        if hashed:
            text = "the loss of step 1 differs on equal batches: forward pass or initial weights"
            return Cause(text, FORWARD)
        text = "the loss of step 1 differs: forward pass, data or initial weights"
        return Cause(text, (*FORWARD, *DATA))
    if differs & {"validate-aux-loss", "validate-router-load"}:
        return Cause("only the router's numbers differ: routing or its auxiliary losses", ROUTER)
    if "validate-grad-norm" in differs:
        text = "the loss is equal and the norm is not: backward pass or gradient reduction"
        return Cause(text, BACKWARD)
    if "validate-lr" in differs:
        return learning_rate(first)
    return Cause("only validation differs: evaluation", ("curry_train/evaluate.py",))


def learning_rate(gap: Gap) -> Cause:
    """Say by which factor the learning rate differs."""
    found: Any = gap.found
    factor = f", {found / gap.wanted:.9g} of the base's" if found and gap.wanted else ""
    return Cause(f"the learning rate differs from step {gap.step} on{factor}: schedule", SCHEDULE)
