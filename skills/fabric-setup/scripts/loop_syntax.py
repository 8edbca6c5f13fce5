"""Small questions about Python's syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def last_name(expr: ast.AST) -> str:
    """Return the last part of a dotted name, or an empty word."""
    if isinstance(expr, ast.Attribute):
        return expr.attr
    return expr.id if isinstance(expr, ast.Name) else ""


def has_word(expr: ast.AST, *words: str) -> bool:
    """Tell whether a word stands in an expression's text."""
    text = ast.unparse(expr)
    return any(word in text for word in words)


def pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of a binding with its value; a loop's target with what is iterated."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if (
                isinstance(target, ast.Tuple)
                and isinstance(node.value, ast.Tuple)
                and len(target.elts) == len(node.value.elts)
            ):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield node.target, node.iter


def makes_module(call: ast.Call) -> bool:
    """Tell whether a call builds a module of a library: nn.Linear, models.resnet18."""
    text = ast.unparse(call.func)
    if text.startswith(("nn.", "torch.nn.")) and last_name(call.func)[:1].isupper():
        return "functional" not in text and not text.endswith(("Loss", "Parameter"))
    if last_name(call.func) in ("from_pretrained", "from_config"):
        return "Tokenizer" not in text and "Config" not in text and "Processor" not in text
    return text.startswith(("models.", "torchvision.models.", "timm.create_model"))
