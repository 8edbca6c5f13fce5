"""The parallel state: which rank this is, and which process group stands for which axis.

It is an argument everywhere and never a module global, so a function's signature says whether it
communicates. A group of one is None: the same code then runs without any communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from curry_train.config import ParallelConfig
from curry_train.parallel import dims


@dataclass(frozen=True)
class Mesh:
    """Rank, device and the named groups. `batch`: the ranks with different samples."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    sizes: dict[str, int]
    groups: dict[str, dist.ProcessGroup | None] = field(default_factory=dict)

    @staticmethod
    def single(device: torch.device | str = "cpu") -> Mesh:
        """Return the mesh of one process without any group."""
        sizes = dims.resolve(ParallelConfig(), 1)
        return Mesh(0, 1, 0, torch.device(device), sizes)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group called `name` ("world" or "batch"); None means a group of one."""
        return self.groups.get(name)

    def size(self, name: str) -> int:
        """Return the number of ranks in the group called `name`."""
        group = self.group(name)
        return 1 if group is None else dist.get_world_size(group)

    def index(self, name: str) -> int:
        """Return this rank's place in the group called `name`."""
        group = self.group(name)
        return 0 if group is None else dist.get_rank(group)


def build_mesh(
    parallel: ParallelConfig, *, device: torch.device, local_rank: int, comm_timeout: float
) -> Mesh:
    """Build the mesh over the default process group, or over one process when there is none.

    Every group waits at most `comm_timeout` seconds for a peer. Collective: all ranks call it.
    """
    if not dist.is_initialized():
        return Mesh.single(device)
    world = dist.get_world_size()
    sizes = dims.resolve(parallel, world)
    group = dist.new_group(timeout=timedelta(seconds=comm_timeout)) if world > 1 else None
    return Mesh(dist.get_rank(), world, local_rank, device, sizes, {"world": group, "batch": group})


def agreed(value: int, mesh: Mesh) -> int:
    """Return the largest `value` of any rank, so that every rank decides the same."""
    group = mesh.group("world")
    if group is None:
        return value
    box = torch.tensor(value, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=group)
    return int(box)
