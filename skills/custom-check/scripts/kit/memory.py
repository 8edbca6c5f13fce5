"""Bytes, measured: what is alive, the highest point, the training state; written and read."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from .target import Target

UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def read_bytes(text: str, *, flag: str) -> int:
    """Read 24GiB, 512 MB or a plain number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get((found.group(2) or "B").upper()) if found else None
    size = int(float(found.group(1)) * unit) if found and unit else 0
    if size < 1:
        raise UsageError(f"{flag} {text}", "it takes bytes, as 24GiB, 512MB or 1000000")
    return size


def show_bytes(size: float) -> str:
    """Write bytes for people: 3.21 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


class Meter:
    """Bytes alive that were not there at first, and their highest sum so far."""

    live: int
    peak: int


@contextlib.contextmanager
def metered(device: Any) -> Iterator[Meter]:
    """Measure memory while a block runs: CUDA by its allocator, else storage by storage.

    Storages are those that ops of the block return, each until it is freed: what autograd, a
    checkpoint or Python keeps alike. What an op uses inside itself is not seen.
    """
    if device.type == "cuda":
        yield _CudaMeter(device)
        return
    meter = _storage_meter()
    with meter:
        yield meter


class _CudaMeter(Meter):
    def __init__(self, device: Any) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    @property
    def live(self) -> int:
        return self._cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return self._cuda.max_memory_allocated(self._device) - self._before


def _storage_meter() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class StorageMeter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live = self.peak = 0
            self.known: dict[int, Any] = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.note((args, kwargs), made=False)
            out = func(*args, **(kwargs or {}))
            self.note(out, made=True)
            return out

        def note(self, tree: Any, made: bool) -> None:
            for tensor in tree_leaves(tree):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.known:
                        self.add(storage, storage.nbytes() if made else 0)

        def add(self, storage: Any, size: int) -> None:
            key = storage._cdata

            def freed(_: Any) -> None:
                self.live -= size
                self.known.pop(key, None)

            self.known[key] = weakref.ref(storage, freed)
            self.live += size
            self.peak = max(self.peak, self.live)

    return StorageMeter()


def tensor_bytes(tensors: Any) -> int:
    """Add up the bytes of tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def state_bytes(target: Target) -> dict[str, int]:
    """Measure what training keeps all the time: weights, gradients, what the optimizer remembers.

    The optimizer takes a step with the gradients that are there, so call it inside `preserved`.
    """
    import torch

    model, optimizer = target.model, target.optimizer
    weights = tensor_bytes([*model.parameters(), *model.buffers()])
    gradients = tensor_bytes([p.grad for p in model.parameters() if p.grad is not None])
    moments = []
    if optimizer is not None:
        optimizer.step()
        for state in optimizer.state.values():
            moments += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return {"weights": weights, "gradients": gradients, "moments": tensor_bytes(moments)}
