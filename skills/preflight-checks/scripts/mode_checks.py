"""Checks of training and evaluation mode, and of what an evaluation leaves behind."""

from __future__ import annotations

import itertools
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

from evidence import CannotJudge, Evidence, Finding, at, eval_noise, failed, passed, skipped
from step_run import cycled, drive, kept

from kit.fix import caller_line, fix_in

EVALUATED_BATCHES = 64
DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"),
    *("feature_alpha_dropout", "feature_dropout", "native_dropout"),
}
DRAWS = {
    *("rand", "rand_like", "randn", "randn_like", "normal", "normal_", "uniform_", "bernoulli"),
    *("bernoulli_", "randint", "randint_like"),
}
PRODUCTS = {"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__"}
SUMS = {"add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "__rsub__"}
COMPARISONS = {"gt", "lt", "ge", "le", "__gt__", "__lt__", "__ge__", "__le__"}


def check_train_eval_mode(evidence: Evidence, limit: float) -> Finding:
    """Training trains in training mode, and evaluation mode switches every random part off."""
    in_eval = draws_in_evaluation(evidence)
    if in_eval is not None:
        what, where = in_eval
        text = "pass training=self.training, or use nn.Dropout as a submodule"
        return failed(f"{what} in evaluation mode: eval() does not switch it off", what,
                      at(where, text))  # fmt: skip
    switched = _switched(evidence)
    trained = _trained_in_eval(evidence, switched)
    if trained is not None:
        return trained
    change = eval_noise(evidence)
    if change > limit:
        note = "outputs are random in evaluation mode too, by the model's own draws"
        return passed(f"note: {note}", change)
    if not switched:
        return passed("nothing in the model depends on the mode", change)
    return passed(f"{len(switched)} modules depend on the mode, evaluation repeats itself", change)


def _switched(evidence: Evidence) -> list[str]:
    """Modules that behave differently in training: dropout and batch normalisation."""
    from torch import nn

    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    found = []
    for name, module in evidence.target.model.named_modules():
        drops = isinstance(module, nn.MultiheadAttention) and module.dropout > 0
        if drops or (isinstance(module, kinds) and getattr(module, "p", 1.0) > 0):
            found.append(name)
    return found


def _trained_in_eval(evidence: Evidence, switched: list[str]) -> Finding | None:
    """The model is in training mode when the loop's step runs it; also after an evaluation."""
    target = evidence.target
    text = "call model.train() before the steps, and again after every evaluation"
    if evidence.step is not None and target.optimizer is not None:
        for after_evaluation in (False, True):
            with kept(target):
                target.model.train(evidence.handed_over_in_training)
                if after_evaluation and evaluated(evidence) is not None:
                    run_evaluation(evidence)
                elif after_evaluation:
                    continue
                modes = drive(evidence, cycled(evidence)).modes
            if modes and not any(modes) and (switched or target.runtime is not None):
                when = " after an evaluation" if after_evaluation else ""
                place = target.train_step or sys.modules["curry_train.evaluate"].evaluate
                return failed(f"the training step runs the model in evaluation mode{when}",
                              "eval", fix_in(place, text))  # fmt: skip
        return _evaluated_in_training(evidence, switched)
    told = _evaluated_in_training(evidence, switched)
    if told is not None:
        return told
    if evidence.handed_over_in_training or not switched or _loaded(target.model):
        return None
    return failed(
        f"the model is handed over in evaluation mode: {switched[0]} and {len(switched) - 1} other "
        "modules do not do their work",
        "eval",
        fix_in(sys.modules.get(type(target.model).__module__), text, r"\.eval\(\)"),
    )


def _evaluated_in_training(evidence: Evidence, switched: list[str]) -> Finding | None:
    seen = evaluated(evidence)
    if seen is None or not seen.modes or not any(seen.modes) or not switched:
        return None
    place = evidence.target.evaluate or sys.modules["curry_train.evaluate"].evaluate
    return failed("the evaluation runs the model in training mode", "train",
                  fix_in(place, "call model.eval() first"))  # fmt: skip


def _loaded(model: Any) -> bool:
    """from_pretrained hands over in evaluation mode, and loops expect that."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "_name_or_path", "") for config in configs)


def draws_in_evaluation(evidence: Evidence) -> tuple[str, Any] | None:
    """Name dropout, or noise of a fixed size, that the model's forward applies in eval mode."""
    torch, found = evidence.torch, []
    from torch.overrides import TorchFunctionMode

    drawn: dict[int, Any] = {}
    depth = [0]

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            name = getattr(func, "__name__", "")
            result = func(*args, **kwargs)
            if not depth[0]:
                return result
            if name in DROPOUTS and _drops(name, args, kwargs):
                found.append((f"{name} is active", caller_line()))
            elif name == "scaled_dot_product_attention":
                if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0:
                    found.append(("attention drops weights (dropout_p > 0)", caller_line()))
            elif name in DRAWS and isinstance(result, torch.Tensor):
                drawn[id(result)] = result
            elif any(id(a) in drawn for a in args if isinstance(a, torch.Tensor)):
                _follow(name, args, result)
            return result

    def _follow(name: str, args: Any, result: Any) -> None:
        """A draw that is compared with, scaled by or added as a constant is noise or dropout."""
        others = [a for a in args if not (isinstance(a, torch.Tensor) and id(a) in drawn)]
        constant = all(not isinstance(a, torch.Tensor) or _constant(a) for a in others)
        if name in COMPARISONS and constant:
            found.append(("a random mask is drawn", caller_line()))
        elif name in PRODUCTS and constant:
            drawn[id(result)] = result
        elif name in SUMS and not constant:
            found.append(("noise is added", caller_line()))

    def _constant(tensor: Any) -> bool:
        return tensor.numel() == 1 and not tensor.requires_grad

    hooks = [
        evidence.target.model.register_forward_pre_hook(lambda m, a: depth.__setitem__(0, 1)),
        evidence.target.model.register_forward_hook(
            lambda m, a, o: depth.__setitem__(0, 0), always_call=True
        ),
    ]
    try:
        with evidence.mode(False), evidence.user(), Mode():
            evidence.target.loss_fn(evidence.target.model, evidence.batches[0])
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _drops(name: str, args: Any, kwargs: Any) -> bool:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    training = given.get("training", given.get("train", True))
    return bool(training) and float(given.get("p", 0.5)) > 0


# Evaluation --------------------------------------------------------------------------------------


@dataclass
class Evaluated:
    """What the user's evaluation did."""

    modes: list[bool] = field(default_factory=list)
    graph: list[bool] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mode_after: bool = True
    training_before: bool = True


def evaluated(evidence: Evidence) -> Evaluated | None:
    """Run the evaluation once and compare everything before and after."""
    known = evidence.target.evaluate is not None or evidence.target.runtime is not None
    return evidence.once("evaluated", lambda: _evaluated(evidence)) if known else None


def run_evaluation(evidence: Evidence) -> None:
    """Call the user's evaluation on a few batches."""
    target = evidence.target
    with evidence.user(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if target.runtime is None:
            validate: Any = target.evaluate
            validate(target.model, evidence.batches)
            return
        from curry_train.evaluate import evaluate

        calls = itertools.count(1)
        evaluate(target.runtime, lambda: int(next(calls) > EVALUATED_BATCHES))


def _evaluated(evidence: Evidence) -> Evaluated:
    torch, target, seen = evidence.torch, evidence.target, Evaluated()
    modules = [m for m in target.model.modules() if not list(m.children())] or [target.model]

    def enter(module: Any, arguments: Any) -> None:
        seen.graph.append(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())

    with kept(target):  # puts hooks back too, so they begin and end inside
        target.model.train()
        states = {id(s): s for s in (target.optimizer.state if target.optimizer else {}).values()}
        before = _snapshot(target, states)
        random_before = torch.get_rng_state()
        hooks = [m.register_forward_pre_hook(enter) for m in modules]
        hooks.append(
            target.model.register_forward_pre_hook(lambda m, a: seen.modes.append(m.training))
        )
        try:
            run_evaluation(evidence)
        finally:
            for hook in hooks:
                hook.remove()
        seen.mode_after = bool(target.model.training)
        after = _snapshot(target, states)
        seen.changed = [n for n, t in before.items() if n not in after or not _equal(t, after[n])]
        seen.changed += [n for n in after if n not in before]
        if not torch.equal(random_before, torch.get_rng_state()):
            seen.notes.append("random numbers")
    return seen


def _equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _snapshot(target: Any, states: dict[int, Any]) -> dict[str, Any]:
    """Copies of parameters, saved buffers, gradients and moments."""
    model = target.model
    saved = set(model.state_dict())
    metrics = {
        f"{name}." for name, m in model.named_modules() if "torchmetrics" in type(m).__module__
    }
    found = {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    found |= {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()
              if n in saved and not n.startswith(tuple(metrics or ("\0",)))}  # fmt: skip
    found |= {f"gradient of {n}": p.grad.detach().to_dense().clone()
              for n, p in model.named_parameters() if p.grad is not None}  # fmt: skip
    for number, state in enumerate(states.values()):
        found |= {f"moment {number} {key}": value.detach().clone() for key, value in state.items()
                  if hasattr(value, "detach")}  # fmt: skip
    return found


def check_evaluation_gradients(evidence: Evidence, limit: Any) -> Finding:
    """Evaluation builds no graph, changes nothing and gives training mode back."""
    seen = evaluated(evidence)
    if seen is None:
        return skipped("no evaluation to look at: return it as evaluate")
    target = evidence.target
    place = target.evaluate
    if target.runtime is not None:
        place = sys.modules["curry_train.evaluate"].evaluate
    if not seen.modes and not seen.graph:
        raise CannotJudge("the evaluation never runs the model")
    if any(seen.graph):
        return failed("the evaluation builds a graph: memory and time for nothing", sum(seen.graph),
                      fix_in(place, "put it under torch.no_grad()"))  # fmt: skip
    if seen.changed:
        shown = ", ".join(seen.changed[:2]) + (", ..." if len(seen.changed) > 2 else "")
        return failed(f"the evaluation changes {len(seen.changed)} tensors: {shown}",
                      len(seen.changed), fix_in(place, "evaluate in eval mode, step nothing"))  # fmt: skip  # noqa: E501
    if any(seen.modes):
        return failed("the evaluation runs the model in training mode", sum(seen.modes),
                      fix_in(place, "call model.eval() first"))  # fmt: skip
    matters = target.runtime is not None or bool(_switched(evidence))
    if not seen.mode_after and matters and not _train_again(evidence):
        text = "call model.train() at the end"
        return failed(
            "the model is left in evaluation mode",
            "eval",
            fix_in(place, text, r"\.eval\(|train\("),
        )
    if seen.notes and target.runtime is not None:
        return failed("the evaluation draws random numbers, so training goes on otherwise", 1,
                      fix_in(place, "use a generator of its own"))  # fmt: skip
    notes = f"; note: it draws {', '.join(seen.notes)}" if seen.notes else ""
    return passed(f"no graph, nothing changed{notes}", 0)


def _train_again(evidence: Evidence) -> bool:
    """Tell whether the loop's step puts the model into training mode itself."""
    if evidence.step is None or evidence.target.optimizer is None:
        return False
    with kept(evidence.target):
        evidence.target.model.eval()
        return any(drive(evidence, cycled(evidence)).modes)
