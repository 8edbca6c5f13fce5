"""Find banks of experts, catch what they are called with, and compute them by a plain loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kit.batches import tensors
from kit.target import Target
from kit.user_code import user_code

CLAMPED_SCALE = 1.702
"""Of gpt-oss's activation."""


@dataclass
class Bank:
    """One bank with the tokens x [T, D], ids [T, K] and weights [T, K] that it was called with."""

    name: str
    module: Any
    x: Any
    ids: Any
    weights: Any
    experts: int
    width: int
    hidden: int
    run: Callable[[Any, Any, Any], Any]
    """run(x, ids, weights) -> [T, D], by the module itself."""
    layout: bool
    """Whether `split` can name gate, up and down."""
    limit: float | None = None
    asked: str = "auto"
    backend: str | None = None

    def split(self, tensors_by_name: dict[str, Any]) -> dict[str, Any]:
        """Give gate, up and down [E, F, D], [E, F, D], [E, D, F] and their biases, of tensors
        under the names of the module's parameters.
        """
        found = {}
        for name, tensor in tensors_by_name.items():
            owner, _, leaf = name.rpartition(".")
            kind = "_bias" if leaf == "bias" or leaf.endswith("_bias") else ""
            if "down" in name:
                found[f"down{kind}"] = tensor
                continue
            part: Any = getattr(self.module, owner) if owner else None
            if hasattr(part, "parts"):
                halves = part.parts(tensor)
                gate, up = halves["gate_proj"], halves["up_proj"]
            else:
                gate, up = tensor.chunk(2, dim=1)
            found |= {f"gate{kind}": gate, f"up{kind}": up}
        return found


def loop(bank: Bank, x: Any, ids: Any, weights: Any, upstream: Any, dtype: Any) -> dict[str, Any]:
    """Compute output and gradients expert by expert in a dtype; of visited experts only."""
    torch = sys.modules["torch"]
    visited = sorted(set(ids[ids >= 0].tolist()))
    named = {n: p.detach() for n, p in bank.module.named_parameters()}
    leaves = {
        name: tensor[visited].to(dtype).requires_grad_()
        for name, tensor in bank.split(named).items()
    }
    x, weights = (t.detach().to(dtype).requires_grad_() for t in (x, weights))
    out = torch.zeros_like(x)
    for place, expert in enumerate(visited):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        rows = x[token]
        gate, up = (rows @ leaves[name][place].T for name in ("gate", "up"))
        if "gate_bias" in leaves:
            gate, up = gate + leaves["gate_bias"][place], up + leaves["up_bias"][place]
        if bank.limit is None:
            hidden = torch.nn.functional.silu(gate) * up
        else:
            gate, up = gate.clamp(max=bank.limit), up.clamp(-bank.limit, bank.limit)
            hidden = gate * torch.sigmoid(CLAMPED_SCALE * gate) * (up + 1)
        y = hidden @ leaves["down"][place].T
        if "down_bias" in leaves:
            y = y + leaves["down_bias"][place]
        out = out.index_add(0, token, y * weights[token, choice, None])
    out.backward(upstream.to(dtype))
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    return {"output": out.detach(), "x": x.grad, "weights": weights.grad, **grads}


def one_batch(target: Target, modules: dict[str, Any], keep: Callable[..., None]) -> None:
    """Send a batch forward and hand every call of the modules to keep(name, args, kwargs)."""
    torch = sys.modules["torch"]
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: keep(name, args, kwargs), with_kwargs=True
        )
        for name, module in modules.items()
    ]
    try:
        with user_code("a forward pass of the model"), torch.no_grad():
            target.loss_fn(target.model, next(iter(target.batches)))
    finally:
        for handle in handles:
            handle.remove()


def project_banks(target: Target) -> list[Bank]:
    """Return the banks of a project's model, each with its part of a batch."""
    with user_code("importing the project's experts"):
        from curry_train.layers.moe import Experts
    found = {n: m for n, m in target.model.named_modules() if isinstance(m, Experts)}
    banks: list[Bank] = []

    def keep(name: str, args: Any, kwargs: Any) -> None:
        module, (x, routing) = found[name], args
        experts, width, hidden = module.down_proj.weight.shape

        def run(x: Any, ids: Any, weights: Any) -> Any:
            return module(x, replace(routing, expert_ids=ids, weights=weights))

        banks.append(
            Bank(
                name, module, x, routing.expert_ids, routing.weights, experts, width, hidden, run,
                layout=True, limit=module.limit, asked=module.backend,
            )
        )  # fmt: skip

    if found:
        one_batch(target, found, keep)
    return banks


def foreign_banks(target: Target) -> list[Bank]:
    """Return what looks like a bank in other code: stacked experts called with ids and weights."""
    stacked = {}
    for name, module in target.model.named_modules():
        if sum(p.dim() == 3 for p in module.parameters(recurse=False)) >= 2:
            stacked[name] = module
    banks: list[Bank] = []

    def keep(name: str, args: Any, kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        flat = [t for t in tensors(given) if t.dim() == 2]
        ids = next((t for t in flat if not t.is_floating_point()), None)
        weights = next((t for t in flat if ids is not None and t.is_floating_point()
                        and t.shape == ids.shape), None)  # fmt: skip
        x = next((t for t in flat if t.is_floating_point() and t is not weights), None)
        if ids is None or weights is None or x is None:
            return
        module = stacked[name]

        def run(new_x: Any, new_ids: Any, new_weights: Any) -> Any:
            new = {id(x): new_x, id(ids): new_ids, id(weights): new_weights}
            words = {key: new.get(id(value), value) for key, value in kwargs.items()}
            return module(*(new.get(id(value), value) for value in args), **words)

        banks.append(described(name, module, x, ids, weights, run))

    if stacked:
        one_batch(target, stacked, keep)
    return banks


def beside(sizes: list[int], width: int) -> list[int]:
    """Give the sizes without the width, once."""
    place = sizes.index(width) if width in sizes else len(sizes)
    return sizes[:place] + sizes[place + 1 :]


def described(name: str, module: Any, x: Any, ids: Any, weights: Any, run: Any) -> Bank:
    """Read sizes, layout and implementation off a module of other code."""
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() == 3]
    width = x.shape[1]
    # The shapes are [E, 2F, D] and [E, D, F], in any order of the last two: F is the smallest size
    # beside the width.
    hidden = min(size for _, *sizes in shapes for size in beside(sizes, width))
    experts = shapes[0][0]
    wanted = {"gate_up_proj": (experts, 2 * hidden, width), "down_proj": (experts, width, hidden)}
    named = {n: tuple(p.shape) for n, p in module.named_parameters()}
    activation = type(getattr(module, "act_fn", None)).__name__
    known = named == wanted and activation in ("SiLU", "SiLUActivation")
    config = getattr(module, "config", None)
    bank = Bank(name, module, x, ids, weights, experts, width, hidden, run, layout=known)
    bank.backend = getattr(config, "_experts_implementation", None)
    return bank
