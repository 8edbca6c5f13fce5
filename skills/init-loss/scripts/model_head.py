"""Which layer makes the scores, where it is made, and whether the weights are fresh ones."""

from __future__ import annotations

from typing import Any

from kit.fix import fix_at, fix_in
from kit.loss_terms import Term
from kit.target import Target


def trained_by(target: Target) -> str | None:
    """Say how the weights are known to be trained: run.init_from, or from_pretrained; else None."""
    if target.runtime is not None:
        source = getattr(getattr(target.runtime.config, "run", None), "init_from", None)
        return f"run.init_from={source}" if source else None
    for name, module in target.model.named_modules():
        source = getattr(getattr(module, "config", None), "_name_or_path", "")
        if source and hasattr(module, "from_pretrained"):
            return f"from_pretrained({source!r})" + (f" in {name}" if name else "")
    return None


def head_of(target: Target, term: Term) -> tuple[str, Any]:
    """Find the last layer that makes as many scores as there are classes."""
    found: tuple[str, Any] = ("", None)
    for name, module in target.model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if not hasattr(weight, "dim") or weight.dim() < 2:
            continue
        if "Embedding" not in type(module).__name__ and 0 <= weight.shape[0] - term.classes < 64:
            found = (name, module)
    return found


def head_line(target: Target, term: Term, text: str) -> dict[str, Any] | None:
    """Name the line that makes the head."""
    name, head = head_of(target, term)
    if head is None:
        return None
    owner, _, leaf = name.rpartition(".")
    text = f"{name}: {text}" if text else name
    parent = target.model.get_submodule(owner)
    if type(parent).__module__.startswith("torch.") or not leaf:
        return _loss_line(term, text)
    return fix_in(type(parent), text, rf"self\.{leaf}\s*[:=]") or _loss_line(term, text)


def _loss_line(term: Term, text: str) -> dict[str, Any] | None:
    return None if term.where is None else fix_at(*term.where, text)
