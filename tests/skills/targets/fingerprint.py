"""One hash over everything that a check may change, written without the kit's own code."""

from __future__ import annotations

import hashlib
import random

import numpy
import torch


def raw(tensor):
    if tensor is None:
        return None
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return (str(tensor.dtype), tuple(tensor.shape), values)


def tree(value):
    if isinstance(value, torch.Tensor):
        return raw(value)
    if isinstance(value, dict):
        return [(str(key), tree(item)) for key, item in value.items()]
    return [tree(v) for v in value] if isinstance(value, (list, tuple)) else repr(value)


def parts(target):
    """Return the named parts of a target's state."""
    model, optimizer, batches = target.model, target.optimizer, target.batches
    found = {
        "structure": [(name, type(module).__name__) for name, module in model.named_modules()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "parameters": [(name, raw(p), id(p)) for name, p in model.named_parameters()],
        "buffers": [(name, raw(b)) for name, b in model.named_buffers()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "gradients": [raw(p.grad) for p in model.parameters()],
        "python": random.getstate(),
        "numpy": tree(numpy.random.get_state()[1].tolist()),
        "torch": raw(torch.get_rng_state()),
        "position": getattr(batches, "samples_consumed", None),
        "loader": raw(batches.generator.get_state()) if hasattr(batches, "generator") else None,
    }
    if optimizer is not None:
        states = [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
        found["moments"] = [tree(state) for state in states]
        found["groups"] = [
            [(k, repr(v)) for k, v in sorted(g.items()) if k != "params"]
            + [list(map(id, g["params"]))]
            for g in optimizer.param_groups
        ]
    if target.runtime is not None:
        found["counters"] = (target.runtime.step, target.runtime.tokens)
        found["loss_scale"] = vars(target.runtime.loss_scale)
    return found


def fingerprint(target):
    """Return a hash for each part, so that a test can name the one that differs."""
    return {
        name: hashlib.sha256(repr(value).encode()).hexdigest()
        for name, value in parts(target).items()
    }
