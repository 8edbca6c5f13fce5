"""Which inputs a score sees: gradients by float inputs and by embedded ids."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from evidence import SEED, CannotJudge, Evidence, UserError

from kit import observation
from kit.batch_tree import leaves, replaced
from kit.target import seed_everything


@dataclass
class Sight:
    """One forward pass whose inputs carry gradients."""

    inputs: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(path of the batch, tensor that wants a gradient, ids or None): [B, ...] each."""
    seen: Any = None
    """The Observation."""

    def of(self, score: Any) -> list[Any]:
        """Gradients of a scalar by every input, zeros where it sees nothing."""
        import torch

        tensors = [tensor for _, tensor, _ in self.inputs]
        if not score.requires_grad:
            return [torch.zeros_like(t) for t in tensors]
        try:
            found = torch.autograd.grad(score, tensors, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise UserError(error) from error
        return [
            torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors, strict=True)
        ]


def look(evidence: Evidence, *, training: bool, seed: int = SEED) -> Sight:
    """Run the first batch with gradients by its inputs; ids are followed from their embedding."""
    batch, sight = evidence.batches[0], Sight()
    new, ids = {}, []
    for path, tensor in leaves(batch):
        if evidence.roles[path] not in ("input", "both"):
            continue
        if tensor.is_floating_point():
            leaf = tensor.detach().clone().requires_grad_()
            sight.inputs.append((path, leaf, None))
            new[path] = leaf
        elif tensor.dtype != evidence.torch.bool and tensor.dim() > 0:
            ids.append((path, tensor))
    given = {path: leaf.clone() for path, leaf in new.items()}  # in-place work on it is allowed
    with evidence.mode(training), evidence.user(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_everything(seed)
        with _embeddings(sight, ids):
            sight.seen = observation.observe(evidence.target, replaced(batch, given))
    return sight


def _embeddings(sight: Sight, ids: list[tuple[str, Any]]) -> Any:
    """Make the mode that lets gradients begin at what a lookup of the batch's ids returns."""
    import torch
    from torch.overrides import TorchFunctionMode

    def path_of(looked_up: Any) -> str | None:
        for path, tensor in ids:
            if looked_up.dim() and looked_up.shape[0] == tensor.shape[0]:
                if looked_up.shape == tensor.shape and torch.equal(looked_up, tensor):
                    return path
                if looked_up.dim() == tensor.dim() == 2 and len(looked_up) == len(tensor):
                    return path  # a slice: inputs and labels in one tensor
        return None

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            name = getattr(func, "__name__", "")
            if name == "__getitem__" and len(args) == 2:
                index, table = args[1], args[0]
                if not (hasattr(index, "dim") and isinstance(table, torch.nn.Parameter)):
                    return result
            elif name in ("embedding", "embedding_bag"):
                index = args[0] if args else kwargs.get("input")
            else:
                return result
            if not hasattr(index, "dim") or index.is_floating_point() or index.dtype == torch.bool:
                return result
            path = path_of(index)
            if path is None or not hasattr(result, "is_floating_point"):
                return result
            leaf = result.detach().clone().requires_grad_()
            sight.inputs.append((path, leaf, index))
            return leaf.clone()

    return Mode()


def score_rows(call: Any) -> Any:
    """Bring the scores of a call to [rows, K], in the order of its labels; nothing left out."""
    scores = call.raw_scores
    if call.kind == "classes":
        if scores.dim() < 2:
            return scores.reshape(1, -1)
        class_dim = -1 if call.function == "gather" else 1
        return scores.movedim(class_dim, -1).flatten(0, -2)
    return scores.reshape(scores.shape[0], -1) if scores.dim() else scores.reshape(1, 1)


def projected(values: Any) -> Any:
    """Make one number of a score so that no part cancels another: fixed random weights."""
    import torch

    flat = values.reshape(-1)
    finite = flat.detach().isfinite()
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(flat.numel(), generator=generator).to(flat.device, flat.dtype)
    return (flat[finite] * weights[finite]).sum()


def batch_dim(tensor: Any, size: int, prefer: int = 0) -> int | None:
    """Say which of the first two dims counts examples, None when none has their number."""
    order = (0, 1) if prefer == 0 else (1, 0)
    for dim in (d for d in order if d < tensor.dim()):
        if tensor.shape[dim] == size:
            return dim
    return None


def by_example(gradient: Any, dim: int) -> Any:
    """Largest gradient of each example: [B]."""
    return gradient.movedim(dim, 0).flatten(1).abs().amax(1)


def relations(evidence: Evidence) -> str | None:
    """Say why examples of this batch are parts of one structure, or None."""
    size = evidence.size
    for path, tensor in leaves(evidence.batches[0]):
        if evidence.roles[path] != "input" or tensor.dim() == 0:
            continue
        if _adjacency(tensor, size):
            return f"{path} relates examples to each other"
        if "edge" in path or "adj" in path:
            return f"{path} relates examples to each other"
        if batch_dim(tensor, size) is None:
            return f"{path} has no dim of {size} examples"
    return None


def _adjacency(tensor: Any, size: int) -> bool:
    """Tell whether a matrix of as many columns as examples links them: symmetric, or sparse and
    never negative. As many features as examples are an accident."""
    if tuple(tensor.shape) != (size, size) or not tensor.is_floating_point():
        return False
    values = tensor.detach()
    return values.equal(values.t()) or bool((values >= 0).all() and (values == 0).any())


def needs_inputs(sight: Sight) -> None:
    """End a check for which nothing differentiable enters the model."""
    if not sight.inputs:
        raise CannotJudge("no input carries a gradient (nothing is embedded)")


def normalises_over_the_batch(evidence: Evidence) -> str | None:
    """Name a normalisation over the batch, None where there is none."""
    from torch import nn

    for name, module in evidence.target.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return name
        if any("running" in buffer for buffer, _ in module.named_buffers(recurse=False)):
            return name
    return None
