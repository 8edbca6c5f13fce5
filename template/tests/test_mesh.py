"""Groups of forked ranks are those that dims.py names, one object for equal ranks, and give up."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from curry_train.config import ParallelConfig
from curry_train.parallel.dims import DENSE_GROUPS, SPARSE_GROUPS, ParallelDims
from curry_train.parallel.mesh import VIEWS, Mesh, agreed, build_mesh
from curry_train.testing import run_ranks

NAMES = (*DENSE_GROUPS, *SPARSE_GROUPS)
LAYOUTS = (
    {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2},
    {"dp_shard": 4, "tp": 2, "ep": 1},
)


def mesh_of(rank: int, axes: dict, comm_timeout: float = 30.0) -> Mesh:
    return build_mesh(
        ParallelConfig(**axes),
        device=torch.device("cpu"),
        local_rank=rank,
        comm_timeout=comm_timeout,
    )


def groups_of(rank, world, axes):
    mesh, dims = mesh_of(rank, axes), ParallelDims(**axes).resolve(world)
    assert mesh.dims == dims and mesh.sizes == dims.sizes and mesh.world == world
    found, objects = {}, {}
    for name in NAMES:
        members = dims.members(name, rank)
        group = mesh.group(name)
        assert (group is None) == (len(members) == 1), name
        assert mesh.size(name) == len(members) and mesh.index(name) == members.index(rank), name
        if group is None:
            found[name] = [rank]
            continue
        # What the group itself says, then what travels through it.
        assert dist.get_process_group_ranks(group) == members, name
        seen = [torch.zeros(1, dtype=torch.int64) for _ in members]
        dist.all_gather(seen, torch.tensor([rank]), group=group)
        found[name] = [int(one) for one in seen]
        same = objects.setdefault(tuple(members), group)
        assert same is group, f"{name} is a second group of {members}"
    for view, axes_of in VIEWS.items():
        for axis, name in axes_of.items():
            assert mesh.views[view][axis].size() == mesh.size(name), (view, axis)
            if mesh.group(name) is not None:
                assert mesh.views[view].get_group(axis) is mesh.group(name), (view, axis)
    return found


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_every_group_has_the_ranks_that_its_name_says(axes):
    dims = ParallelDims(**axes).resolve(8)
    for rank, found in enumerate(run_ranks(groups_of, 8, axes)):
        assert found == {name: dims.members(name, rank) for name in NAMES}


def sharded_over_views(rank, world, axes):
    """fully_shard over slices of both views, HSDP included; every gradient is a plain sum."""
    mesh, out = mesh_of(rank, axes), []
    for view, axis in (("dense", "fsdp"), ("sparse", "efsdp")):
        torch.manual_seed(0)
        model = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        whole = model.weight.detach().clone()
        fully_shard(model, mesh=mesh.views[view]["dp_replicate", axis])
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        x = torch.full((1, 3), float(rank + 1), dtype=torch.float64)
        model(x).sum().backward()
        shard = model.weight.to_local()
        rows = -(-5 // mesh.size(axis))
        first = mesh.index(axis) * rows
        assert torch.equal(shard.detach(), whole[first : first + rows])
        out.append((mesh.index(axis), model.weight.grad.to_local().flatten().tolist()))
    return out


def test_torch_shards_over_slices_of_the_views():
    axes = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2}
    dims = ParallelDims(**axes).resolve(8)
    for rank, found in enumerate(run_ranks(sharded_over_views, 8, axes)):
        for axis, (index, grad) in zip(("fsdp", "efsdp"), found, strict=True):
            holders = "stage" if axis == "fsdp" else "expert_data"
            wanted = float(sum(member + 1 for member in dims.members(holders, rank)))
            rows = -(-5 // len(dims.members(axis, rank)))
            kept = max(min(rows, 5 - index * rows), 0)
            assert grad == [wanted] * (3 * kept), (rank, axis)


def waits_in_vain(rank, world, axes, name):
    mesh = mesh_of(rank, axes, comm_timeout=1.0)
    group = mesh.group(name)
    timeouts = {
        n: g._get_backend(mesh.device).options._timeout for n, g in mesh.groups.items() if g
    }
    assert set(timeouts.values()) == {timedelta(seconds=1)}, timeouts
    waited = 0.0
    if rank == dist.get_process_group_ranks(group)[0]:
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        waited = time.monotonic() - began
    else:
        time.sleep(2.5)
    return waited


@pytest.mark.parametrize("name", ["tp", "world"])
def test_a_group_gives_up_after_the_timeout(name):
    waited = max(run_ranks(waits_in_vain, 2, {"tp": 2}, name))
    assert 0.5 < waited < 20


def largest_of_all(rank, world):
    mesh = mesh_of(rank, {})
    return agreed(rank * 3, mesh), agreed(-5 - rank, mesh)


def test_ranks_agree_on_the_largest_value():
    assert run_ranks(largest_of_all, 3) == [(6, -5)] * 3
    assert agreed(4, Mesh.single()) == 4


def alone(rank, world):
    mesh = mesh_of(rank, {})
    return mesh.groups, mesh.views, [mesh.size(name) for name in NAMES], mesh.index("tp")


def test_one_process_has_no_group_with_or_without_a_launcher():
    assert run_ranks(alone, 1) == [({}, {}, [1] * len(NAMES), 0)]
    single = mesh_of(0, {"tp": 1})
    assert single == Mesh.single() and single.group("world") is None


def refused(rank, world):
    with pytest.raises(ValueError, match="make 3 ranks, but 2 were started"):
        mesh_of(rank, {"tp": 3})
    return True


def test_a_mesh_that_does_not_fit_the_world_is_refused():
    assert run_ranks(refused, 2) == [True, True]
