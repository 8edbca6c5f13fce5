"""Dense and expert parameters over the ranks that hold the same blocks: parallel.zero 0 to 3.

0 and 1 keep plain parameters; `grads.finish` adds their gradients. At 1 a rank has the moments of
its rows alone, updates them and hands them round. 2 and 3 are torch's fully_shard: a rank keeps its
rows, gathers a block's parameters to compute with them and reduces their gradients to rows again;
3 drops the gathered ones after each forward. fully_shard would average over ranks: switched off.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import nn

from curry_train.config import Config
from curry_train.parallel.collectives import stack_ranks
from curry_train.parallel.dims import SPLIT_BACKWARD
from curry_train.parallel.mesh import Mesh
from curry_train.parallel.shards import Part, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

EXPERTS = ".experts."
# Blocks hand out views inside their Routing, into which nobody writes.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def reshards(config: Config) -> bool:
    """Tell whether gathered parameters are dropped after each forward."""
    parallel = config.parallel
    if parallel.reshard != "auto":
        return parallel.reshard
    splits = parallel.pp > 1 and parallel.schedule in SPLIT_BACKWARD
    return parallel.zero == 3 and not splits


def fully_shard_chunk(model: nn.Module, config: Config, mesh: Mesh) -> None:
    """Apply fully_shard to experts, routers, blocks and the rest of a model on the meta device.

    Under bf16 and fp16 weights travel and are used in the compute dtype, but for routers, whose
    logits need float32; gradients are reduced in float32. Groups: fsdp, efsdp for experts, with
    dp_replicate around both.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dense, sparse = _mesh_of(mesh, "dense", "fsdp"), _mesh_of(mesh, "sparse", "efsdp")
    exact = MixedPrecisionPolicy()
    policy = exact
    if config.precision in ("bf16", "fp16"):
        policy = MixedPrecisionPolicy(
            param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    drop = reshards(config)
    for block in model.layers.values():
        for name, module in block.named_modules():
            if name.endswith("mlp.experts") or name == "mlp.experts":
                _shard(module, sparse, policy, drop)
            elif name == "mlp.gate" and policy is not exact:
                _shard(module, dense, exact, drop)
        _shard(block, dense, policy, drop)
    _shard(model, dense, policy, False)


def _mesh_of(mesh: Mesh, view: str, axis: str) -> DeviceMesh:
    whole = mesh.views[view]
    return whole["dp_replicate", axis] if mesh.dims.dp_replicate > 1 else whole[axis]


def _shard(
    module: nn.Module, device_mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=device_mesh, mp_policy=policy, reshard_after_forward=reshard)
    module.set_gradient_divide_factor(1.0)
    # Else a factor asks for a scaling reduction, which gloo has not.
    module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of a model that fully_shard took, the outermost first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def settle(model: nn.Module) -> None:
    """Gather and drop every parameter once: fully_shard moves its rows on the first use."""
    for module in fsdp_modules(model):
        module.unshard()
        module.reshard()


def build_shard(
    name: str, parameter: nn.Parameter, box: Part, mesh: Mesh, *, zero: int, tied: bool
) -> Shard:
    """Describe a parameter. `box`: the part that tensor and expert parallelism left this rank.

    Its tensor is ignored. The parameter may be a DTensor; at zero 2 and 3 its values are rows.
    """
    expert, split = EXPERTS in name, any(box.offset) or box.tensor.shape != box.shape
    shares = mesh.group("efsdp" if expert else "fsdp")
    if expert:
        holders = "expert_data"
    else:
        holders = "data" if split else "stage"
    rank, ranks = (0, 1) if shares is None else (shares.rank(), shares.size())
    if zero >= 2:
        local = own = box.rows(rank, ranks)
        sums = mesh.group("tp") if holders == "stage" else None
    else:
        local, sums = box, mesh.group(holders)
        own = box.rows(rank, ranks) if zero == 1 else box
    copies = mesh.size(holders) // (ranks if zero else 1)
    plain = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    local = local._replace(tensor=plain.detach())
    assert local.tensor.shape == (own if zero >= 2 else box).tensor.shape, name
    gathers = shares if zero == 1 else None
    if plain is parameter and gathers is None:
        owned = parameter
    else:
        view = local.tensor if gathers is None else local.rows(rank, ranks).tensor
        owned = nn.Parameter(view)
    own = own._replace(tensor=owned)
    return Shard(name, parameter, local, own, sums, gathers, copies, tied)


@torch.no_grad()
def hand_round(shards: list[Shard]) -> None:
    """Give every rank the rows that others have updated (parallel.zero=1).

    Groups: those of the shards, one all-gather each.
    """
    waiting: dict[object, list[Shard]] = defaultdict(list)
    for shard in shards:
        if shard.gathers is not None:
            waiting[shard.gathers].append(shard)
    for found in waiting.values():
        group = found[0].gathers
        assert group is not None
        rows = [-(-len(shard.local.tensor) // group.size()) for shard in found]
        padded = [
            shard.local.tensor.new_zeros(count, *shard.local.tensor.shape[1:])
            for shard, count in zip(found, rows, strict=True)
        ]
        for shard, box in zip(found, padded, strict=True):
            box[: len(shard.owned)] = shard.owned
        stacked = stack_ranks(torch.cat([box.flatten() for box in padded]), group)
        pieces = stacked.split([box.numel() for box in padded], dim=1)
        for shard, box, piece in zip(found, padded, pieces, strict=True):
            whole = piece.reshape(-1, *box.shape[1:])
            shard.local.tensor.copy_(whole[: len(shard.local.tensor)])
