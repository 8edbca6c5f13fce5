"""What fully_shard has made of a user's model, looked at on forked CPU ranks over gloo."""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import UsageError
from kit.target import seed_everything
from kit.user_code import load_function, user_code

SCALE = 1000.0
"""Losses are made this much larger, so that clipping has something to clip."""


def look(spec: str, loop: str | None, project: Path, ranks: int, seed: int) -> list[dict]:
    """Call the function on every rank; return what each rank found. Raises UsageError."""
    for name in ("torch.distributed.fsdp", "torch._dynamo"):  # once, not on every rank
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            words = (rank, ranks, folder, theirs, spec, loop, project, seed)
            process = context.Process(target=_rank, args=words)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = [_answer(pipe, time.monotonic() + 120) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        raise UsageError(errors[0])
    return answers


def _answer(pipe: Any, deadline: float) -> dict:
    try:
        if pipe.poll(max(deadline - time.monotonic(), 0.1)):
            return json.loads(pipe.recv())
    except EOFError:
        pass
    return {"error": "a rank ended without an answer, or was silent for 120 seconds"}


def _rank(rank: int, ranks: int, folder: str, pipe: Any, spec: str, loop: str | None,
          project: Path, seed: int) -> None:  # fmt: skip
    import torch.distributed as dist

    torch = sys.modules["torch"]
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
    }  # fmt: skip
    try:
        store = torch.distributed.FileStore(os.path.join(folder, "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        dist.init_process_group = lambda *args, **kwargs: None  # the user's own, done already
        found = _found(spec, loop, project, seed)
    except UsageError as error:
        found = {"error": str(error)}
    except BaseException as error:
        found = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
    pipe.send(json.dumps(found))
    pipe.close()
    time.sleep(120)  # until the parent has all answers: others may still need this rank


def _found(spec: str, loop: str | None, project: Path, seed: int) -> dict:
    torch = sys.modules["torch"]
    function = load_function(spec, flag="--target", project=project)
    step = load_function(loop, flag="--loop", project=project) if loop else None
    seed_everything(seed)
    with user_code(Path(spec).name):
        parts = function()
    if not isinstance(parts, (tuple, list)) or len(parts) not in (3, 4):
        raise UsageError(
            f"{Path(spec).name} returned {type(parts).__name__}",
            "it must return (model, batches, loss_fn) or (model, batches, loss_fn, optimizer)",
        )
    model, optimizer = parts[0], parts[3] if len(parts) == 4 else None
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{Path(spec).name} returned a {type(model).__name__} as model",
            "it must be a torch.nn.Module",
        )
    found = facts(model, optimizer)
    if step is not None:
        if optimizer is None:
            raise UsageError("--loop without an optimizer", fix="return it as the fourth part")
        found["clip"] = clip_facts(step, model, parts[1], parts[2], optimizer)
    return found


def facts(model: Any, optimizer: Any) -> dict:
    """Say what is sharded, in which groups, how it is reduced, what the optimizer holds."""
    from torch.distributed.fsdp import FSDPModule

    sharded = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    groups: dict[str, list[tuple[str, int]]] = {name: [] for name in sharded}
    unsharded, frozen, total = [], 0, 0
    for name, parameter in model.named_parameters():
        owner = _owner(name, sharded)
        total += parameter.numel()
        if owner is not None and hasattr(parameter, "to_local"):
            groups[owner].append((name, parameter.numel()))
        elif parameter.requires_grad:
            unsharded.append((name, parameter.numel()))
        else:
            frozen += parameter.numel()
    blocks = _blocks(model)
    own = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
    return {
        "total": total,
        "unsharded": unsharded,
        "frozen": frozen,
        "root": isinstance(model, FSDPModule),
        "groups": {name: sum(size for _, size in found) for name, found in groups.items()},
        "blocks_of_group": {
            name: len({b for b in blocks for n, _ in found if n.startswith(b + ".")})
            for name, found in groups.items()
        },
        "groups_of_block": {
            b: sum(n == b or n.startswith(b + ".") for n in sharded) for b in blocks
        },
        "reduce": {name: _reduced_in(module) for name, module in sharded.items()},
        "strays": sum(id(parameter) not in own for parameter in held),
        "held": len(held),
        "has_optimizer": optimizer is not None,
    }


def _owner(name: str, sharded: dict[str, Any]) -> str | None:
    """Return the innermost sharded module that a parameter is in."""
    inside = [owner for owner in sharded if owner == "" or name.startswith(owner + ".")]
    return max(inside, key=len, default=None)


def _blocks(model: Any) -> list[str]:
    """Return the names of the blocks: the children of the list that holds most parameters."""
    nn = sys.modules["torch"].nn
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(module) > 1
    ]
    if not lists:
        return []
    _, name, module = max(lists, key=lambda row: row[0])
    prefix = f"{name}." if name else ""
    return [prefix + child for child, _ in module.named_children()]


def _reduced_in(module: Any) -> str | None:
    """Return the dtype that a module's gradients are reduced in; None where torch hides it."""
    from torch.distributed.fsdp import fully_shard

    policy = getattr(fully_shard.state(module), "_mp_policy", None)
    parameter = next(module.parameters(), None)
    if policy is None or parameter is None:
        return None
    return str(policy.reduce_dtype or policy.param_dtype or parameter.dtype)


def clip_facts(step: Callable, model: Any, batches: Any, loss_fn: Any, optimizer: Any) -> dict:
    """Take one step by the user's loop with a large loss; compare gradients around the clip."""
    torch = sys.modules["torch"]
    kept: dict[int, Any] = {}
    seen: dict[str, Any] = {"max_norm": None}
    backward, clip = torch.Tensor.backward, torch.nn.utils.clip_grad_norm_

    def keep(tensor: Any, *args: Any, **kwargs: Any) -> None:
        backward(tensor, *args, **kwargs)
        for p in model.parameters():
            if p.grad is not None:
                kept[id(p)] = p.grad.detach().clone()

    def clipping(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        seen["max_norm"] = float(max_norm)
        return clip(parameters, max_norm, *args, **kwargs)

    def before(*_: Any) -> None:
        if "after" not in seen:
            pairs = [(kept[id(p)], p.grad) for p in model.parameters() if id(p) in kept]
            seen["before"] = _norm([a for a, _ in pairs])
            seen["after"] = _norm([b for _, b in pairs])
            mine = [(_local(a).double().flatten(), _local(b).double().flatten()) for a, b in pairs]
            square = sum(float(a @ a) for a, _ in mine)
            seen["factor"] = sum(float(a @ b) for a, b in mine) / square if square else None

    torch.Tensor.backward, torch.nn.utils.clip_grad_norm_ = keep, clipping
    handle = optimizer.register_step_pre_hook(before)
    try:
        with user_code("the loop"):
            step(
                model,
                list(itertools.islice(batches, 2)),
                lambda m, b: loss_fn(m, b) * SCALE,
                optimizer,
            )
    finally:
        torch.Tensor.backward, torch.nn.utils.clip_grad_norm_ = backward, clip
        handle.remove()
    if "after" not in seen:
        raise UsageError("the loop took no optimizer step over 2 batches", "it must take one")
    return seen


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _norm(grads: list[Any]) -> float:
    """Return the norm of whole gradients, each element once. Collective."""
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    return sum(float(g.double().square().sum()) for g in whole) ** 0.5
