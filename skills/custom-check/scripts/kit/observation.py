"""What a loss is made of: one call of loss_fn, and every loss function that it called inside.

A check of foreign code knows (model, batch, loss_fn) and no more. Here it learns which scores met
which labels, how the scores were made, and which tensor of a batch is an input and which a label.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .batch_tree import leaves, replaced
from .fix import caller_line
from .target import Target
from .tensor_marks import SUBTRACTIONS, Marks

CLASSES = {"cross_entropy", "nll_loss"}
BINARY = {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "multilabel_soft_margin_loss",
    "soft_margin_loss",
}
VALUES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
OTHER = {
    "cosine_embedding_loss",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "kl_div",
    "margin_ranking_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "poisson_nll_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
}
OPTIONS = (
    *("label_smoothing", "ignore_index", "weight", "reduction", "pos_weight"),
    *("beta", "delta", "log_target"),
)


@dataclass
class LossCall:
    """One call of a loss function inside loss_fn."""

    kind: str
    """classes, binary, values (regression) or other."""
    function: str
    """What was called: cross_entropy, gather (of log-probabilities), sub (a difference), ..."""
    scores: Any
    """classes: float [N, C], classes last, ignored rows and padded classes left out, with its
    graph; else the predictions in the caller's shape."""
    labels: Any
    """classes: int64 [N] or probabilities [N, C]; else of the shape that the caller gave."""
    options: dict[str, Any]
    """label_smoothing, ignore_index, weight, reduction, pos_weight as given; log_probabilities:
    each row of scores is already normalised."""
    origin: str
    """How the scores were made: raw, softmax, sigmoid or log_softmax."""
    where: tuple[str, int] | None
    """File and line of the user's code that called."""
    raw_scores: Any = None
    """The tensor as it was given, before rows were left out; its shape is the caller's."""
    raw_labels: Any = None
    result: Any = None
    """What the function returned; None when it raised."""
    share: float = 0.0
    """What this call adds to the loss: the sum of result times the loss's gradient by it."""

    @property
    def on_simplex(self) -> bool:
        """Tell whether every row of scores is a probability distribution."""
        if self.kind != "classes" or self.scores.numel() == 0 or self.scores.shape[-1] < 2:
            return False
        rows = self.scores.detach().double()
        sums_to_one = ((rows.sum(-1) - 1).abs() < 1e-2).all()
        return bool((rows >= 0).all() and (rows <= 1).all() and sums_to_one)

    @property
    def is_double_softmax(self) -> bool:
        """Tell whether a softmax is taken of a softmax."""
        takes_softmax = self.function == "cross_entropy" or self.options["log_probabilities"]
        if self.kind != "classes" or not takes_softmax:
            return False
        return self.origin == "softmax" or (self.function == "cross_entropy" and self.on_simplex)


@dataclass
class Observation:
    """One call of loss_fn(model, batch)."""

    loss: Any = None
    """The scalar, with its graph; None when loss_fn raised."""
    calls: list[LossCall] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    """Float tensors that the root model returned, of all its calls in order."""
    error: Exception | None = None
    """What loss_fn raised, when asked to catch it."""

    @property
    def main(self) -> LossCall | None:
        """The call that decides most of the loss; a named loss before a bare difference."""
        known = [call for call in self.calls if call.kind != "other" and call.result is not None]
        named = [call for call in known if call.function != "sub"] or known
        return max(named, key=lambda call: abs(call.share), default=None)

    @property
    def scores(self) -> list[Any]:
        """What the model says of the batch: its outputs, else the scores that met labels."""
        main = self.main
        if self.outputs or main is None:
            return self.outputs
        return [main.raw_scores, *(c.raw_scores for c in self.named if c is not main)]

    @property
    def named(self) -> list[LossCall]:
        """The calls of loss functions by name, of scores with a graph."""
        return [
            call
            for call in self.calls
            if call.kind != "other" and call.function != "sub"
            if getattr(call.raw_scores, "requires_grad", False)
        ]


def observe(target: Target, batch: Any, *, catch: bool = False) -> Observation:
    """Call loss_fn(model, batch) once in the model's present mode, with gradients enabled.

    Nothing is put back: use kit.state.preserved. `catch` keeps an exception of loss_fn in `error`.
    """
    import torch

    found = Observation()
    recorder = _recorder()(batch, found.calls)
    with torch.enable_grad(), _outputs_of(target.model, found), _fused_loss(target, recorder):
        try:
            with recorder:
                found.loss = target.loss_fn(target.model, batch)
        except Exception as error:
            if not catch:
                raise
            found.error = error
    if found.loss is not None:
        _weigh(found)
    return found


def roles(target: Target, batch: Any) -> dict[str, str]:
    """Tell of each tensor of a batch whether it is input, label, both or unused.

    Each is rolled by one example (one place where that changes nothing) under the same random
    numbers: a tensor that moves the scores is an input, one that moves only loss or labels a label.
    """
    import torch

    training = {module: module.training for module in target.model.modules()}
    target.model.eval()  # what others see of an example is no matter of its role
    try:
        with torch.random.fork_rng(devices=_devices(target)):
            plain = _seeded(target, batch)
            found = {}
            for path, tensor in leaves(batch):
                kinds = set()
                for rolled in _rolled(tensor):
                    changed = _seeded(target, replaced(batch, {path: rolled}))
                    kinds |= _what_changed(plain, changed)
                    if kinds:
                        break
                found[path] = "both" if len(kinds) == 2 else next(iter(kinds), "unused")
    finally:
        for module, mode in training.items():
            module.training = mode
    return found


def _devices(target: Target) -> list[Any]:
    return [target.device] if getattr(target.device, "type", "cpu") == "cuda" else []


def _seeded(target: Target, batch: Any) -> Observation:
    import torch

    torch.manual_seed(0)
    found = observe(target, batch, catch=True)
    if found.error is None:
        found.loss = found.loss.detach()
    return found


def _rolled(tensor: Any) -> Iterator[Any]:
    """Yield the tensor rolled along its dims, without those in which nothing changes."""
    for dim in range(tensor.dim()):
        rolled = tensor.roll(1, dim)
        if not rolled.equal(tensor):
            yield rolled


def _what_changed(plain: Observation, changed: Observation) -> set[str]:
    if plain.error is not None or changed.error is not None:
        return {"input"} if changed.error is not None and plain.error is None else set()
    before, after = plain.main, changed.main
    if before is None or after is None:
        scores = not _same(plain.scores, changed.scores)
        return {"input"} if scores else ({"label"} if _differs(plain, changed) else set())
    kinds = set() if _same([before.raw_scores], [after.raw_scores]) else {"input"}
    if not _same([c.raw_scores for c in plain.named], [c.raw_scores for c in changed.named]):
        kinds.add("input")  # of another task, or of another part as in a GAN
    labels = not _same([before.raw_labels], [after.raw_labels])
    if labels or (not kinds and _differs(plain, changed)):
        kinds.add("label")
    return kinds


def _differs(plain: Observation, changed: Observation) -> bool:
    return not _same([plain.loss], [changed.loss])


def _same(before: list[Any], after: list[Any]) -> bool:
    import torch

    return len(before) == len(after) and all(
        a.shape == b.shape and torch.allclose(a.detach(), b.detach(), 0.0, 0.0, equal_nan=True)
        for a, b in zip(before, after, strict=True)
    )


def _weigh(found: Observation) -> None:
    """Fill `share` of every call: exact where the loss is linear in what the call returned."""
    import torch

    calls = [c for c in found.calls if c.result is not None and c.result.requires_grad]
    if not calls or not getattr(found.loss, "requires_grad", False):
        return
    results = [call.result for call in calls]
    gradients = torch.autograd.grad(found.loss, results, retain_graph=True, allow_unused=True)
    for call, gradient in zip(calls, gradients, strict=True):
        if gradient is not None:
            call.share = float((gradient.double() * call.result.detach().double()).sum())


def _unwrapped(tensor: Any) -> Any:
    """Take a tensor out of vmap and grad of torch.func: of all examples at once, with its graph."""
    functorch: Any = importlib.import_module("torch._C._functorch")

    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def _outputs_of(model: Any, found: Observation) -> Iterator[None]:
    def keep(module: Any, arguments: Any, output: Any) -> None:
        floats = [t for _, t in leaves(output) if t.is_floating_point() and t.dim() > 0]
        found.outputs += map(_unwrapped, floats)

    handle = model.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _fused_loss(target: Target, recorder: Any) -> Iterator[None]:
    """Let a project's loss be seen on a GPU too, where one kernel computes it."""
    module = sys.modules.get("curry_train.loss") if target.kind == "project" else None
    on_gpu = getattr(target.device, "type", "cpu") == "cuda"
    if module is None or not on_gpu or not hasattr(module, "token_nll"):
        yield
        return
    plain = module.token_nll

    def token_nll(logits: Any, labels: Any) -> Any:
        result = plain(logits, labels)
        options = {"ignore_index": -100, "reduction": "none"}
        recorder.record("cross_entropy", logits, labels, options, result)
        return result

    vars(module)["token_nll"] = token_nll
    try:
        yield
    finally:
        vars(module)["token_nll"] = plain


def _recorder() -> Any:
    """Make the class that watches torch's functions; torch is imported by then."""
    from torch.overrides import TorchFunctionMode

    functorch: Any = importlib.import_module("torch._C._functorch")

    class Recorder(TorchFunctionMode):
        def __init__(self, batch: Any, calls: list[LossCall]) -> None:
            super().__init__()
            self.calls = calls
            self.marks = Marks(batch)

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if functorch.maybe_current_level() is not None:
                return func(*args, **kwargs)  # inside of vmap and grad tensors have no values
            name = getattr(func, "__name__", "")
            if name in CLASSES | BINARY | VALUES | OTHER and not name.endswith("_"):
                return self._loss(name, func, args, kwargs)
            result = func(*args, **kwargs)
            picked = self.marks.picked(name, args, kwargs)
            if picked is not None:
                call = self.record("gather", *picked, {"reduction": "none"}, result)
                call.origin = self.marks.origin(args[0])  # rows that were picked have no mark
            elif name in SUBTRACTIONS and (pair := self.marks.difference(args)) is not None:
                self.record("sub", *pair, {"reduction": "none"}, result)
            self.marks.follow(name, args, kwargs, result)
            return result

        def _loss(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
            given = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
            options = {key: given[key] for key in OPTIONS if given.get(key) is not None}
            call = self.record(name, given.get("input"), given.get("target"), options, None)
            call.result = func(*args, **kwargs)
            return call.result

        def record(
            self, name: str, scores: Any, labels: Any, options: dict[str, Any], result: Any
        ) -> LossCall:
            call = LossCall(
                _kind(name),
                name,
                scores,
                labels,
                {"log_probabilities": False, **options},
                self.marks.origin(scores),
                caller_line(),
                raw_scores=scores,
                raw_labels=labels,
                result=result,
            )
            if call.kind == "classes":
                _rows(call)
            self.calls.append(call)
            return call

    return Recorder


def _kind(name: str) -> str:
    for kind, names in (("classes", CLASSES), ("binary", BINARY), ("values", VALUES)):
        if name in names:
            return kind
    return {"gather": "classes", "sub": "values"}.get(name, "other")


def _rows(call: LossCall) -> None:
    """Bring scores and labels of classes to [N, C] and [N]; leave out what counts nowhere."""
    scores, labels = call.raw_scores, call.raw_labels
    if scores is None or labels is None or scores.dim() == 0:
        return
    class_dim = -1 if call.function == "gather" or scores.dim() == 1 else 1
    if scores.dim() > 1:
        scores = scores.movedim(class_dim, -1).flatten(0, -2)
    else:
        scores = scores.unsqueeze(0)
    if labels.is_floating_point():
        whole = labels.shape == call.raw_scores.shape and labels.dim() > 1
        labels = labels.movedim(class_dim, -1).flatten(0, -2) if whole else labels.reshape(1, -1)
    else:
        labels = labels.reshape(-1)
        if len(labels) == len(scores):
            kept = labels != call.options.get("ignore_index", -100)
            scores, labels = scores[kept], labels[kept]
    call.scores, call.labels = _without_padding(scores), labels
    if call.function != "cross_entropy":
        sums = call.scores.detach().double().logsumexp(-1)
        call.options["log_probabilities"] = bool((sums.abs() < 1e-2).all())


def _without_padding(scores: Any) -> Any:
    """Leave out the last columns that are minus infinity in every row."""
    absent = scores.detach().isneginf().all(0) if len(scores) else scores.new_zeros(0)
    columns = scores.shape[-1]
    while columns > 1 and len(absent) and bool(absent[columns - 1]):
        columns -= 1
    return scores[:, :columns]
