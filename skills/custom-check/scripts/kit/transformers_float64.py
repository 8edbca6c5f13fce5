"""transformers as a reference in float64; imports torch."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch


class Float64Torch:
    """torch, in which float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64(model_class: type) -> Iterator[None]:
    """Let a model of transformers take norms, angles and router scores in float64 too.

    Its files ask for float32 there even in a float64 model: logits would then agree to 1e-6 and
    gradients to 6e-6 only, as much as a small mistake may cost. Build and run the model inside.
    """
    rope = importlib.import_module("transformers.modeling_rope_utils")
    modules: list[Any] = [rope, sys.modules[model_class.__module__]]
    kept, real = [module.torch for module in modules], torch.Tensor.float
    for module in modules:
        module.torch = Float64Torch()
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = real
        for module, original in zip(modules, kept, strict=True):
            module.torch = original
