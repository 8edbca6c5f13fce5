"""Bytes that each rank really has at every parallel.zero, and its gradients against one process.

Runs inside the ranks of curry_train.equality, through its `prepare`: every rank writes what it has
measured into a file of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LEVELS = ((0, "auto"), (1, "auto"), (2, "auto"), (3, "auto"))
FILES = "CURRY_ZERO_METER"
"""The folder that ranks write into; a variable, so that one `prepare` serves every level."""


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the distinct storages behind tensors, DTensors by their local part."""
    torch, found = sys.modules["torch"], {}
    with torch.no_grad():
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def prepare(runtime: Any) -> None:
    """Measure this rank's first step; the one process of the reference is left alone."""
    if runtime.mesh.world == 1:
        return
    path = Path(os.environ[FILES]) / f"rank-{runtime.mesh.rank}.json"
    rows = {"parameters": parameters_of(runtime), "elements": elements_of(runtime)}
    watch = Gathered(runtime.chunks)
    watch.__enter__()

    def before(optimizer: Any, *_: Any) -> None:
        if runtime.step == 0:
            watch.__exit__(None, None, None)
            grads = [s.parameter.grad for s in runtime.shards if s.parameter.grad is not None]
            rows["gradients"] = storage_bytes(grads)
            rows["gathered"] = watch.peak

    def after(optimizer: Any, *_: Any) -> None:
        if runtime.step == 0:
            moments = [
                value
                for state in optimizer.state.values()
                for value in state.values()
                if hasattr(value, "dim") and value.dim()
            ]
            rows["optimizer"] = storage_bytes(moments)
            rows["between_steps"] = parameters_of(runtime)
            path.write_text(json.dumps(rows), encoding="utf-8")

    runtime.optimizer.register_step_pre_hook(before)
    runtime.optimizer.register_step_post_hook(after)


def parameters_of(runtime: Any) -> int:
    """Return the bytes of the parameters that lie on this rank now."""
    return storage_bytes(p for chunk in runtime.chunks for p in chunk.parameters())


def elements_of(runtime: Any) -> int:
    """Return the elements of the whole parameters that this rank would have at zero 0."""
    from curry_train.parallel.shards import values

    return sum(values(shard.parameter).numel() for shard in runtime.shards)


class Gathered:
    """The most bytes of whole parameters that fully_shard had gathered at once, op by op.

    A gathered parameter is a plain tensor in the place of the DTensor; its storage is watched, not
    its name, so that one that is dropped late still counts.
    """

    def __init__(self, chunks: Iterable[Any]) -> None:
        self.places = []
        for chunk in chunks:
            for module in chunk.modules():
                for name, parameter in module._parameters.items():
                    if hasattr(parameter, "to_local"):
                        self.places.append((module, name))
        self.storages: dict[int, Any] = {}
        self.peak = 0
        self.mode: Any = None

    def look(self) -> None:
        """Count what is gathered now."""
        for module, name in self.places:
            parameter = module._parameters[name]
            if not hasattr(parameter, "to_local"):
                storage = parameter.untyped_storage()
                self.storages[storage._cdata] = storage
        self.peak = max(self.peak, sum(s.nbytes() for s in self.storages.values()))

    def __enter__(self) -> Gathered:
        from torch.utils._python_dispatch import TorchDispatchMode

        meter = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                meter.look()
                return function(*args, **(kwargs or {}))

        if self.places:
            self.mode = Mode()
            self.mode.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None


def read(folder: Path, ranks: int) -> list[dict[str, int]]:
    """Return what every rank has written; raises when one has not."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
