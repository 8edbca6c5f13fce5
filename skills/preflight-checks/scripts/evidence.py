"""What the checks look at, each part measured once: batches, losses, gradients, a step's doings."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit import observation
from kit.batch_tree import leaves, replaced
from kit.fix import SKILLS, fix_at, fix_in, is_foreign_to_user
from kit.state import preserved, undisturbed
from kit.target import Target, seed_everything

SEED = 1234
BATCHES = 4
MORE_BATCHES = 16
WARM_STEPS = 3
WARM_LR = 1e-3
IGNORED = -100

Finding = dict[str, Any]


def passed(message: str = "", value: Any = None) -> Finding:
    """Nothing is wrong; the message says what was looked at or a note."""
    return {"verdict": "pass", "value": value, "message": message, "fix": None}


def failed(message: str, value: Any = None, fix: Any = None) -> Finding:
    """Something is wrong, and where to change it."""
    return {"verdict": "fail", "value": value, "message": message, "fix": fix}


def skipped(reason: str) -> Finding:
    """The check does not apply, and why."""
    return {"verdict": "skipped", "value": None, "message": reason, "fix": None}


def unclear(reason: str) -> Finding:
    """The check applies and its evidence is missing."""
    return {"verdict": "unclear", "value": None, "message": reason, "fix": None}


def at(where: Any, text: str) -> dict[str, Any] | None:
    """Make the fix of a place (file, line), None where it is not known."""
    return fix_at(where[0], where[1], text) if where else None


class CannotJudge(Exception):
    """Ends a check as skipped: the message is the reason."""


class UserError(Exception):
    """What the user's code raised on its own batches; `id` is the check that names it."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.id = id_of_error(error)
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
        shown = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
        super().__init__(f"{type(error).__name__}: {shown}")

    def fix(self, text: str) -> dict[str, Any] | None:
        """Name the last line of the user's own code that the exception went through."""
        for frame in reversed(traceback.extract_tb(self.error.__traceback__)):
            if not is_foreign_to_user(frame.filename):
                return fix_at(frame.filename, frame.lineno or 1, text)
        return None


CALLS_OF_USER = ("func(", "loss_fn(", "next(", "iter(", "step(", "dataset[", "transform(")


def raised_here(error: Exception) -> bool:
    """Tell whether a mistake is the bundle's own: its last frame is, and calls nothing of others.

    A function of torch has no frame; what it raises seems to come from the line that calls it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    path, line = Path(frames[-1].filename), frames[-1].line or ""
    ours = SKILLS in path.parents and path.parent.name in ("scripts", "kit")
    return ours and not any(call in line for call in CALLS_OF_USER)


def id_of_error(error: Exception) -> str:
    """Name the check that an exception of loss_fn belongs to."""
    text = str(error)
    if re.search(r"Target .* out of bounds|t >= 0 && t < n_classes|nll_loss.*assert", text):
        return "labels-out-of-range"
    if re.search(r"elements of target should be between 0 and 1", text):
        return "labels-out-of-range"
    if re.search(r"elements of input should be between 0 and 1", text):
        return "missing-log-softmax"
    if re.search(r"index out of range in self|srcIndex < srcSelectDimSize|vectorized_gather", text):
        return "tokens-out-of-range"
    return "batch-mismatch"


class Evidence:
    """Lazily measured facts of one target. Nothing of the target is changed after a measure."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.torch = sys.modules["torch"]
        self.handed_over_in_training = bool(target.model.training)
        self.leftover = [
            name
            for name, p in target.model.named_parameters()
            if p.grad is not None and bool(dense(p.grad).any())
        ]
        self.overrides: list[str] = []
        self.project: Path | None = None
        self._kept: dict[str, Any] = {}

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measure what several checks look at, the first time that one asks."""
        if name not in self._kept:
            self._kept[name] = measure()
        return self._kept[name]

    # What is there -----------------------------------------------------------------------------

    @functools.cached_property
    def batches(self) -> list[Any]:
        """The first few batches, fewer where there are fewer."""
        return self.first(BATCHES)

    @functools.cached_property
    def changed_in_place(self) -> list[str]:
        """Tensors of a batch that loss_fn writes into; the batches here are copied before."""
        batch = self.batches[0]
        before = {path: tensor.clone() for path, tensor in leaves(batch)}
        handed = {path: tensor.clone() for path, tensor in before.items()}
        with self.mode(True), self.user():
            self.target.loss_fn(self.target.model, replaced(batch, handed))
        return [path for path, tensor in handed.items() if not same_tensor(tensor, before[path])]

    def own(self, batch: Any) -> Any:
        """Give a batch that the code may write into."""
        if not self.changed_in_place:
            return batch
        return replaced(batch, {path: tensor.clone() for path, tensor in leaves(batch)})

    def first(self, count: int) -> list[Any]:
        """Take the first batches of the data; an endless loader goes back to its place."""
        seed_everything(SEED)
        with preserved(self.target), self.user():
            found = list(itertools.islice(iter(self.target.batches), count))
        if not found:
            raise CannotJudge("there are no batches")
        return found

    @functools.cached_property
    def trainable(self) -> dict[str, Any]:
        """Parameters that want a gradient, by name, each object once."""
        named = self.target.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad}

    @functools.cached_property
    def roles(self) -> dict[str, str]:
        """input, label, both or unused, of every tensor of the first batch."""
        self.needs_finite()
        again = [self.outputs(self.batches[0]) for _ in range(2)]
        if relative_change(*again) > 0:
            raise CannotJudge("the outputs differ under one seed; see not-repeatable")
        batch = self.batches[0]
        with preserved(self.target), self.user():
            found = observation.roles(self.target, batch)
        if self.observed.loss.requires_grad and not {"input", "both"} & {*found.values()}:
            return self.warmed(lambda: observation.roles(self.target, batch))  # begins at 0
        return found

    def needs_finite(self) -> None:
        """End a check that compares values where there are none to compare."""
        if not self.once("finite", self._finite):
            raise CannotJudge("the loss or its gradient is not finite; see non-finite")

    def _finite(self) -> bool:
        losses = all(bool(seen.loss.isfinite().all()) for seen in self.all_observed)
        return losses and all(
            g is None or bool(g.isfinite().all())
            for found in self.first_gradients
            for g in found.values()
        )

    def paths(self, *wanted: str) -> list[str]:
        """Name the tensors of a batch that have one of these roles."""
        return [path for path, role in self.roles.items() if role in wanted]

    @contextlib.contextmanager
    def user(self) -> Iterator[None]:
        """Turn an exception of the user's code into UserError."""
        try:
            yield
        except (UserError, CannotJudge):
            raise
        except SystemExit as error:
            told = RuntimeError(f"the code ends the process: exit({error.code!r})")
            raise UserError(told.with_traceback(error.__traceback__)) from error
        except Exception as error:
            if raised_here(error):
                raise
            raise UserError(error) from error

    # Losses and outputs --------------------------------------------------------------------------

    @contextlib.contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Seed, set the mode, and put modes, buffers and generators back afterwards."""
        with undisturbed(self.target):
            if not training:
                self.target.model.eval()
            elif not self.target.model.training:
                self.target.model.train()
            seed_everything(SEED)
            yield

    def observe(self, batch: Any, *, training: bool = True) -> observation.Observation:
        """Call loss_fn once in a mode, under the same random numbers every time."""
        with self.mode(training), self.user(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return observation.observe(self.target, self.own(batch))

    @functools.cached_property
    def observed(self) -> observation.Observation:
        """The first batch in training mode, with its graph."""
        return self.observe(self.batches[0])

    @functools.cached_property
    def all_observed(self) -> list[observation.Observation]:
        """Every one of the first batches in training mode, with their graphs."""
        return [self.observed, *(self.observe(batch) for batch in self.batches[1:])]

    def outputs(self, batch: Any, *, training: bool = False) -> list[Any]:
        """What the model says of a batch, without graph; evaluation mode by default."""
        return [t.detach() for t in self.observe(batch, training=training).scores]

    def probe(self, batch: Any, what: str, *, training: bool = False) -> list[Any]:
        """As outputs, for a batch that a check made up: what raises cannot be judged."""
        try:
            return self.outputs(batch, training=training)
        except UserError as error:
            raise CannotJudge(f"the model does not take {what} ({error})") from error

    @property
    def size(self) -> int:
        """Examples in the first batch: the first size of the label, else of most tensors."""
        return observation_size(self)

    # Gradients -----------------------------------------------------------------------------------

    def gradients(self, batch: Any) -> dict[str, Any]:
        """Gradients of the loss by name, None where it does not depend on the parameter."""
        seen = self.observed if batch is self.batches[0] else self.observe(batch)
        if not seen.loss.requires_grad:
            return dict.fromkeys(self.trainable)
        try:
            found = self.torch.autograd.grad(
                seen.loss, list(self.trainable.values()), retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            return self._anew(batch)  # a later forward has written into the weights
        return {name: dense(g) for name, g in zip(self.trainable, found, strict=True)}

    @functools.cached_property
    def first_gradients(self) -> list[dict[str, Any]]:
        """Gradients of each of the first batches."""
        with self.user():
            return [self.gradients(batch) for batch in self.batches]

    def warmed(self, measure: Callable[[], Any], steps: int = WARM_STEPS) -> Any:
        """Measure after a few AdamW steps: what starts at zero on purpose has moved by then."""
        with preserved(self.target), self.user():
            self.target.model.train()
            seed_everything(SEED)
            optimizer = self.torch.optim.AdamW(
                self.trainable.values(), lr=WARM_LR, weight_decay=0.0
            )
            for batch in itertools.islice(itertools.cycle(self.batches), steps):
                optimizer.zero_grad()
                self.target.loss_fn(self.target.model, batch).backward()
                optimizer.step()
            optimizer.zero_grad()
            return measure()

    @functools.cached_property
    def warmed_gradients(self) -> list[dict[str, Any]]:
        """Gradients of the first batches after a few steps."""
        return self.warmed(lambda: [self._anew(batch) for batch in self.batches])

    def _anew(self, batch: Any) -> dict[str, Any]:
        seen = self.observe(batch)
        found = self.torch.autograd.grad(
            seen.loss, list(self.trainable.values()), allow_unused=True
        )
        return {name: dense(g) for name, g in zip(self.trainable, found, strict=True)}

    def in_builder(self, text: str, pattern: str) -> dict[str, Any] | None:
        """Name a line of the code that builds a foreign target: of the function around its loss,
        of the model's configure_optimizers, else of its module."""
        loss_fn = self.target.loss_fn
        home = sys.modules.get(getattr(loss_fn, "__module__", "") or "")
        around = getattr(home, getattr(loss_fn, "__qualname__", "").split(".")[0], None)
        configure = getattr(self.target.model, "configure_optimizers", None)
        places = [place for place in (configure, around, home) if place is not None]
        return next(filter(None, (fix_in(place, text, pattern) for place in places)), None)

    # The loop ------------------------------------------------------------------------------------

    @property
    def step(self) -> Callable[[Any], Any] | None:
        """One optimizer step of the real loop, given a batch; None where no loop is known."""
        target = self.target
        if target.runtime is not None:
            take = importlib.import_module("curry_train.step").train_step
            return lambda batch: take(target.runtime)
        if target.train_step is None or target.optimizer is None:
            return None
        own: Any = target.train_step
        return lambda batch: own(target.model, batch, target.optimizer)


def same_tensor(a: Any, b: Any) -> bool:
    """Tell whether two tensors have the same shape and values, NaN included."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def dense(gradient: Any) -> Any:
    """Give the values of a gradient, of a sparse one those that it has."""
    if gradient is None:
        return None
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def observation_size(evidence: Evidence) -> int:
    """Return how many examples the first batch has."""
    main: Any = evidence.observed.main
    sizes = [t.shape[0] for _, t in leaves(evidence.batches[0]) if t.dim() > 0]
    if not sizes:
        return 1
    labels: Any = None if main is None else main.raw_labels
    if hasattr(labels, "dim") and labels.dim() == 1 and len(labels) in sizes:
        return len(labels)
    return max(set(sizes), key=sizes.count)


def relative_change(before: list[Any], after: list[Any]) -> float:
    """Largest difference of two lists of tensors over the size of the first; inf where one is
    finite and the other is not."""
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return float("inf")
        same = (a == b) | (a.isnan() & b.isnan())
        if bool(same.all()):
            continue
        wide_a, wide_b = a[~same].double(), b[~same].double()
        gap = (wide_a - wide_b).abs().max()
        finite = a[a.isfinite()]
        scale = float(finite.double().square().mean().sqrt()) if finite.numel() else 0.0
        worst = max(worst, float(gap) / max(scale, 1e-30))
    return worst


def eval_noise(evidence: Evidence) -> float:
    """Change of the outputs in evaluation mode under other random numbers."""
    return evidence.once("eval noise", lambda: _eval_noise(evidence))


def _eval_noise(evidence: Evidence) -> float:
    outputs = []
    for seed in (SEED, SEED + 1):
        with evidence.mode(False), evidence.user(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_everything(seed)
            seen = observation.observe(evidence.target, evidence.batches[0])
            outputs.append([t.detach() for t in seen.scores])
    return relative_change(*outputs) if outputs[0] else 0.0
