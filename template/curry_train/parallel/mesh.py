"""The parallel state: which rank this is, and which process group stands for which axis.

It is an argument everywhere and never a module global, so a function's signature says whether it
communicates. A group of one is None: the same code then runs without any communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from curry_train.config import ParallelConfig
from curry_train.parallel.dims import DENSE_GROUPS, SPARSE_GROUPS, ParallelDims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

VIEWS = {
    "dense": {"pp": "pp", "dp_replicate": "dp_replicate", "fsdp": "fsdp", "tp": "tp"},
    "sparse": {"pp": "pp", "dp_replicate": "dp_replicate", "efsdp": "efsdp", "ep": "ep"},
}
"""Torch's meshes: the dense view as parameters are stored, and the experts'. Axis -> group."""


@dataclass(frozen=True)
class Mesh:
    """Rank, device, sizes and the named groups of parallel/dims.py."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    dims: ParallelDims
    groups: dict[str, dist.ProcessGroup | None] = field(default_factory=dict)
    views: dict[str, DeviceMesh] = field(default_factory=dict)

    @staticmethod
    def single(device: torch.device | str = "cpu") -> Mesh:
        """Return the mesh of one process without any group."""
        return Mesh(0, 1, 0, torch.device(device), ParallelDims().resolve(1))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis."""
        return self.dims.sizes

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group called `name`, see dims.PURPOSE; None means a group of one."""
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
    rank, world = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims.of(parallel).resolve(world)
    if world == 1:
        return Mesh(rank, world, local_rank, device, dims)
    timeout = timedelta(seconds=comm_timeout)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(name: str) -> dist.ProcessGroup:
        ranks = tuple(dims.members(name, rank))
        if ranks not in made:  # groups of the same ranks are one
            made[ranks] = dist.new_group(
                list(ranks), timeout=timeout, use_local_synchronization=True
            )
        return made[ranks]

    names = (*DENSE_GROUPS, *SPARSE_GROUPS)
    groups = {name: group(name) for name in names if len(dims.members(name, rank)) > 1}
    return Mesh(rank, world, local_rank, device, dims, groups, _views(dims, device, group))


def _views(dims: ParallelDims, device: torch.device, group) -> dict[str, DeviceMesh]:
    from torch.distributed.device_mesh import DeviceMesh

    outer = (dims.pp, dims.dp_replicate)
    shapes = {
        "dense": (*outer, dims.dp_shard * dims.cp, dims.tp),
        "sparse": (*outer, dims.efsdp, dims.ep),
    }
    views = {}
    for view, axes in VIEWS.items():
        ranks = torch.arange(dims.world).view(shapes[view])
        own = [group(name) for name in axes.values()]
        views[view] = DeviceMesh.from_group(own, device.type, ranks, mesh_dim_names=tuple(axes))
    return views


def agreed(value: int, mesh: Mesh) -> int:
    """Return the largest `value` of any rank, so that every rank decides the same."""
    group = mesh.group("world")
    if group is None:
        return value
    box = torch.tensor(value, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=group)
    return int(box)
