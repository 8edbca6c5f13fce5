"""From a configuration and a mesh to this rank's part of the model: the order of all wrapping.

Pipeline stage, split matrices, experts, attention across ranks, recomputation, compilation,
fully_shard, memory, values. Every step is off when its group is None.
"""

from __future__ import annotations

from torch import nn

from curry_train.config import Config
from curry_train.layers.attention import Attention
from curry_train.layers.latent_attention import LatentAttention
from curry_train.layers.linear import Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.moe import MoE
from curry_train.layers.norm import RMSNorm
from curry_train.models.decoder import Decoder
from curry_train.models.protocol import give_memory, init_part, meta_model
from curry_train.parallel.activation_checkpoint import recompute_blocks
from curry_train.parallel.data_parallel import build_shard, fully_shard_chunk, settle
from curry_train.parallel.dims import stages_of, stages_per_rank
from curry_train.parallel.mesh import Mesh
from curry_train.parallel.shards import Part, Shard
from curry_train.parallel.tensor_parallel import (
    ColumnParallelLinear,
    ColumnParallelNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    split_parameter,
)

COLUMN = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"}
ROW = {"o_proj", "down_proj"}
NORMS = ("q_norm", "k_norm")


def build_chunks(config: Config, mesh: Mesh) -> tuple[list[nn.Module], list[Shard]]:
    """Build this rank's chunks of the model, one for each of its pipeline stages, with values.

    Returns them and the shards of all their parameters. The values are those of one process,
    whatever the mesh. Collective: all ranks call it.
    """
    chunks, shards = [], []
    for stage in stages_of(config.parallel, mesh.index("pp")):
        chunk = meta_model(config)
        if config.parallel.pp > 1:
            keep_stage(chunk, config, stage)
        set_groups(chunk, config, mesh)
        recompute_blocks(chunk.layers, config.parallel.recompute)
        if config.compile:
            for block in chunk.layers.values():
                block.compile()
        shards += place(chunk, config, mesh, known={shard.name for shard in shards})
        chunks.append(chunk.train())
    return chunks, shards


def keep_stage(chunk: nn.Module, config: Config, stage: int) -> None:
    """Leave in a meta model what a pipeline stage holds."""
    from curry_train.parallel.pipeline_parallel import split_blocks

    blocks = split_blocks(config)
    last = config.parallel.pp * stages_per_rank(config.parallel) - 1
    chunk.keep_stage(blocks[stage], first=stage == 0, last=stage == last)


def set_groups(chunk: nn.Module, config: Config, mesh: Mesh) -> None:
    """Hand the layers their groups and split what tensor and expert parallelism split."""
    tp, cp, ep = mesh.group("tp"), mesh.group("cp"), mesh.group("ep")
    if isinstance(chunk, Decoder):
        chunk.tp, chunk.cp, chunk.cp_kind = tp, cp, config.parallel.cp_kind
    for module in list(chunk.modules()):
        if isinstance(module, Attention | LatentAttention):
            module.tp, module.cp, module.cp_kind = tp, cp, config.parallel.cp_kind
        elif isinstance(module, SwiGLU):
            module.tp = tp
        elif isinstance(module, MoE):
            module.gate.sequence, module.gate.batch = mesh.group("sequence"), mesh.group("batch")
            module.ep = ep
    if tp is not None:
        split_matrices(chunk, mesh)
    if ep is not None:
        split_experts(chunk, mesh)


def split_matrices(chunk: nn.Module, mesh: Mesh) -> None:
    """Split the matrices of attention, feed-forward, embedding and head over tp."""
    tp, tp_mesh = mesh.group("tp"), mesh.views["dense"]["tp"]
    assert tp is not None
    for module in list(chunk.modules()):
        if not isinstance(module, Attention | LatentAttention | SwiGLU):
            continue
        for name, child in list(module.named_children()):
            if name in COLUMN:
                setattr(module, name, ColumnParallelLinear(child, tp_mesh))
            elif name in ROW:
                setattr(module, name, RowParallelLinear(child, tp_mesh, tp))
            elif name in NORMS and module.norm_whole and isinstance(child, RMSNorm):
                setattr(module, name, ColumnParallelNorm(child, tp_mesh, tp))
        if isinstance(module, Attention) and module.sinks is not None:
            module.sinks = split_parameter(module.sinks, tp_mesh, 0)
        elif isinstance(module, LatentAttention):
            module.heads //= tp.size()
    if isinstance(chunk, Decoder) and chunk.model.embed_tokens is not None:
        chunk.model.embed_tokens = VocabParallelEmbedding(chunk.model.embed_tokens, tp_mesh, tp)
    if isinstance(chunk, Decoder) and isinstance(chunk.lm_head, Linear):
        chunk.lm_head = ColumnParallelLinear(chunk.lm_head, tp_mesh)
        chunk.tie_weights()


def split_experts(chunk: nn.Module, mesh: Mesh) -> None:
    """Leave this rank its share of the experts of every bank."""
    ep_mesh = mesh.views["sparse"]["ep"]
    for module in chunk.modules():
        if not isinstance(module, MoE):
            continue
        module.experts_per_rank //= ep_mesh.size()
        for bank in (module.experts.gate_up_proj, module.experts.down_proj):
            for name, parameter in list(bank.named_parameters()):
                setattr(bank, name, split_parameter(parameter, ep_mesh, 0))


def place(chunk: nn.Module, config: Config, mesh: Mesh, known: set[str]) -> list[Shard]:
    """Give a chunk memory and values; returns its shards. `known`: names that the rank has."""
    boxes = {name: box_of(parameter) for name, parameter in chunk.named_parameters()}
    zero = config.parallel.zero if mesh.world > 1 else 0
    if zero >= 2:
        fully_shard_chunk(chunk, config, mesh)
    give_memory(chunk, mesh.device)
    if zero >= 2:
        settle(chunk)
    shards = []
    for name, parameter in chunk.named_parameters():
        tied = bool(config.parallel.pp > 1) and is_tied_head(chunk, name)
        canonical = chunk.vocab_parameters[0] if tied else name
        assert tied or canonical not in known, canonical
        shard = build_shard(canonical, parameter, boxes[name], mesh, zero=zero, tied=tied)
        init_part(chunk, canonical, shard.local, config.seed)
        shards.append(shard)
    return shards


def is_tied_head(chunk: nn.Module, name: str) -> bool:
    """Tell whether a parameter is the head's own copy of the embedding, on another chunk."""
    tied = getattr(chunk.config, "tie_word_embeddings", False)
    return tied and name == "lm_head.weight"


def box_of(parameter: nn.Parameter) -> Part:
    """Return the box of a parameter that may be split over one axis, before fully_shard."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return Part.whole(parameter.detach())
    (placement,), mesh = placements, parameter.device_mesh
    tensor = parameter.to_local().detach()
    offset = [0] * tensor.dim()
    offset[placement.dim] = mesh.get_local_rank() * tensor.shape[placement.dim]
    return Part(tensor, tuple(parameter.shape), tuple(offset))
