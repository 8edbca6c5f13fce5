"""Saving beside the training loop, which waits for nothing but a copy of its state.

The training thread copies tensors to buffers; one other thread compares, writes, hashes and commits
them as dcp.save does, over a process group of its own: two threads that share a group would take
each other's messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curry_train.checkpoint import CheckpointError, dcp
from curry_train.checkpoint.storage import as_part
from curry_train.parallel.mesh import Mesh, agreed
from curry_train.parallel.shards import Part
from curry_train.tracking.crash import is_lost_peer


class Staging:
    """Copies of tensors, any shapes, in CPU buffers that are allocated once and used again.

    Buffers of CUDA tensors are pinned, so that they are filled at the speed of the bus; torch's
    allocator rounds each up to a power of two bytes.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor | Part]) -> dict[str, Any]:
        """Return the same tensors as buffers, Parts of them where a box is not all of a tensor.

        The copies are whole when this returns; those of CUDA tensors queue on the current stream,
        behind the optimizer's step. What is no dense tensor with data is returned as it is, for
        the save to refuse it.
        """
        staged: dict[str, Any] = {}
        streams = set()
        for name, tensor in tensors.items():
            inner = tensor.tensor if isinstance(tensor, Part) else tensor
            if not isinstance(inner, Tensor) or inner.is_meta or inner.layout != torch.strided:
                staged[name] = tensor
                continue
            part = as_part(tensor)
            source = part.tensor.detach()
            buffer = self._buffer(name, source)
            buffer.copy_(source, non_blocking=source.is_cuda)
            whole = buffer.shape == torch.Size(part.shape)
            staged[name] = buffer if whole else part._replace(tensor=buffer)
            if source.is_cuda:
                streams.add(torch.cuda.current_stream(source.device))
        for stream in streams:
            stream.synchronize()
        return staged

    def _buffer(self, name: str, source: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            pinned = source.is_cuda
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer


class AsyncSave:
    """One save at a time in a thread of its own; all ranks call every method together.

    mesh: of the training loop; with several ranks a gloo group over all of them is made for the
    saves, whose collectives wait at most `timeout` seconds for a peer.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self._mesh, self._shared, self._own = mesh, Staging(), Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.step = 0
        groups: dict[str, Any] = {}
        if mesh.world > 1:
            ranks, limit = list(range(mesh.world)), timedelta(seconds=timeout)
            groups["world"] = dist.new_group(
                ranks, timeout=limit, backend="gloo", group_desc="checkpoint"
            )
        self._own_mesh = replace(mesh, groups=groups)

    @property
    def busy(self) -> bool:
        """Say whether this rank still writes; ranks may differ."""
        return self._pending is not None and not self._pending.done()

    def start(
        self,
        root: Path,
        *,
        step: int,
        tensors: Mapping[str, Tensor | Part],
        rank_tensors: Mapping[str, Tensor],
        committed: Callable[[Path, float], None],
        failed: Callable[[Exception], None] = lambda _: None,
        **options: Any,
    ) -> None:
        """Copy the tensors and return; dcp.save(root, ...) goes on with the copies.

        The caller has waited for the save before. committed: called in the thread once the
        checkpoint stands, with its path and the time.monotonic() at which the copies were whole.
        failed: called there with what ended the save instead, which wait() then raises. options:
        the other arguments of dcp.save but mesh.
        """
        if self._pending is not None:
            raise ValueError("a save is still pending; call wait() before the next start()")
        shared, own = self._shared.copy(tensors), self._own.copy(rank_tensors)
        copied = time.monotonic()

        def write() -> None:
            held = {"tensors": shared, "rank_tensors": own}
            try:
                path = dcp.save(root, step=step, mesh=self._own_mesh, **held, **options)
                committed(path, copied)
            except Exception as error:
                failed(error)
                raise

        self.step = step
        self._pending = self._thread.submit(write)

    def wait(self) -> float:
        """Wait for the save that is under way, if any; return the seconds that this took.

        Group: world, one collective. Raises: CheckpointError on every rank if any rank failed, or
        what says that a peer is gone: asking it once more would take run.comm_timeout once more.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return 0.0
        begin, error = time.monotonic(), pending.exception()
        if error is not None and not isinstance(error, CheckpointError) and is_lost_peer(error):
            raise error
        if agreed(int(error is not None), self._mesh):
            head = f"the save of step {self.step} failed"
            if isinstance(error, CheckpointError):
                raise CheckpointError([f"{head}: {p}" for p in error.problems]) from error
            why = f"{type(error).__name__}: {error}" if error else "another rank failed"
            raise CheckpointError(f"{head}: {why}") from error
        return time.monotonic() - begin
