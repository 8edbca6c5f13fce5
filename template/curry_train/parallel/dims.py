"""Sizes of the mesh axes, who shares what with whom, and what a layout cannot do: no torch.

Apart from `mesh` so that checks, hooks and plans can reason about a layout in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from curry_train.config import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    resolve_micro_batch,
)

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the slowest links to the fastest: ranks that differ in tp only are neighbours."""
DENSE_GROUPS = {
    "world": AXES,
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard",),
    "cp": ("cp",),
    "tp": ("tp",),
    "fsdp": ("dp_shard", "cp"),
    "batch": ("dp_replicate", "dp_shard"),
    "data": ("dp_replicate", "dp_shard", "cp"),
    "sequence": ("cp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
}
SPARSE_GROUPS = {"ep": ("ep",), "efsdp": ("efsdp",), "expert_data": ("dp_replicate", "efsdp")}
PURPOSE = {
    "pp": "hand hidden states from stage to stage",
    "dp_replicate": "hold equal shards of replicas; sum gradients",
    "batch": "hold different samples",
    "fsdp": "share dense parameters, gradients or moments (parallel.zero)",
    "cp": "share a sequence; pass keys and values round",
    "tp": "share every dense matrix; gather and scatter the sequence in each block",
    "sequence": "hold slices of the same sequences; sum what the routers count",
    "stage": "hold the same blocks; sum gradients of what is not split",
    "ep": "share the experts; send tokens to them",
    "efsdp": "share the experts' parameters, gradients or moments (parallel.zero)",
    "expert_data": "hold the same experts; sum their gradients",
}
VOCAB_MULTIPLE = 64
V_SCHEDULES = ("zbv", "dualpipev")
"""Rank r holds stages r and 2*pp-1-r, so both ends of the model are on the first."""
SPLIT_BACKWARD = ("interleaved_zb", "zbv", "dualpipev")
"""Gradients of activations and of weights are computed at different times."""


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the axes. ep is carved out of dp_shard*cp*tp and is no factor of the world."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @staticmethod
    def of(parallel: ParallelConfig) -> ParallelDims:
        """Return the axes that a configuration names."""
        return ParallelDims(**{axis: getattr(parallel, axis) for axis in (*AXES, "ep")})

    def resolve(self, world: int) -> ParallelDims:
        """Return the dims of `world` ranks: integers, dp_shard=-1 filled.

        Raises ValueError when the axes cannot multiply to `world`; the message names the numbers.
        """
        sizes = {axis: getattr(self, axis) for axis in AXES}
        if self.dp_shard == -1:
            others = replace(self, dp_shard=1).world
            sizes["dp_shard"] = max(world // others, 1)
        dims = ParallelDims(**sizes, ep=self.ep)
        if dims.world != world:
            terms = " * ".join(f"parallel.{axis}={size}" for axis, size in sizes.items())
            way = "leave parallel.dp_shard at -1 to fill the world"
            if self.dp_shard == -1:
                way = f"start a multiple of {others} ranks, such as devices={others}"
                way += f", or set the others so that their product divides {world}"
            started = f"{world} {'was' if world == 1 else 'were'} started"
            raise ValueError(f"{terms} make {dims.world} ranks, but {started}; {way}")
        return dims

    def fewest(self) -> ParallelDims:
        """Return the dims with dp_shard=-1 filled for the fewest ranks that hold the axes."""
        if self.dp_shard != -1:
            return self
        return replace(self, dp_shard=self.ep // math.gcd(self.ep, self.cp * self.tp))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, as the journal keeps them."""
        return asdict(self)

    @property
    def world(self) -> int:
        """Number of ranks."""
        ranks = 1
        for axis in AXES:
            ranks *= getattr(self, axis)
        return ranks

    @property
    def batch(self) -> int:
        """Number of ranks that hold different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Ranks that share the parameters of the same experts; their axis in the sparse view."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def dense(self) -> dict[str, int]:
        """The view of the ranks for everything but experts: axis -> size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def sparse(self) -> dict[str, int]:
        """The view of the same ranks for experts: axis -> size, outermost first."""
        outer = {axis: getattr(self, axis) for axis in ("pp", "dp_replicate")}
        return {**outer, "efsdp": self.efsdp, "ep": self.ep}

    def groups(self, name: str) -> list[list[int]]:
        """Return every group called `name`, each a list of ranks in order.

        Raises ValueError for dp_shard=-1 and for an ep that does not divide dp_shard*cp*tp.
        """
        if self.dp_shard == -1 or self.efsdp * self.ep != self.dp_shard * self.cp * self.tp:
            raise ValueError(
                f"{self}: found axes that lay out no ranks; allowed is an ep that divides"
                " dp_shard * cp * tp, and no -1; call resolve(world) first, set parallel.ep"
            )
        view, axes = self.sparse, SPARSE_GROUPS.get(name)
        if axes is None:
            view, axes = self.dense, DENSE_GROUPS[name]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*map(range, view.values()))):
            fixed = tuple(at for axis, at in zip(view, place, strict=True) if axis not in axes)
            found.setdefault(fixed, []).append(rank)
        return list(found.values())

    def members(self, name: str, rank: int) -> list[int]:
        """Return the ranks of the group called `name` that `rank` is in."""
        return next(group for group in self.groups(name) if rank in group)

    def explain(self) -> str:
        """Say who talks to whom, one line for each kind of group that has more than one rank."""
        axes = "  ".join(f"{axis} {size}" for axis, size in {**self.dense, "ep": self.ep}.items())
        lines = [f"{self.world} {'rank' if self.world == 1 else 'ranks'}: {axes}"]
        for name, purpose in PURPOSE.items():
            groups = self.groups(name)
            if len(groups[0]) == 1 or (name in SPARSE_GROUPS and self.ep == 1):
                continue
            shown = " ".join("[" + " ".join(map(str, group)) + "]" for group in groups[:4])
            more = f" and {len(groups) - 4} more" if len(groups) > 4 else ""
            lines.append(f"  {name:<12} {purpose}: {shown}{more}")
        return "\n".join(lines)

    def problems(self, model: ModelConfig, data: DataConfig) -> list[str]:
        """Say in sentences what of this layout does not fit the sizes of model and data.

        dp_shard=-1 stands for any number that fits.
        """
        refused = [*size_refusals(self.fewest(), model, data)]
        if self.dp_shard != -1:
            refused += batch_refusals(self.batch, data)
        sizes = {**self.sizes, **asdict(data)}
        return [f"{key}={sizes[key.rpartition('.')[2]]}: {why}" for key, why in refused]


def size_refusals(
    dims: ParallelDims, model: ModelConfig, data: DataConfig
) -> Iterator[tuple[str, str]]:
    """Yield (key, why) for every size of model and data that an axis does not divide."""
    tp, cp, ep = dims.tp, dims.cp, dims.ep
    if tp > 1:
        split = {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
        }
        if model.num_experts == 0 or model.first_k_dense_replace:
            split["intermediate_size"] = model.intermediate_size
        if model.num_experts and model.shared_expert_intermediate_size:
            split["shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
        for name, size in split.items():
            if size % tp:
                fitting = divisors(size)
                yield (
                    "parallel.tp",
                    f"does not divide model.{name}={size}; set it to one of {fitting}",
                )
        padded = -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if padded % tp:
            yield (
                "parallel.tp",
                f"does not divide the vocabulary in memory, {padded} (model.vocab_size="
                f"{model.vocab_size} up to a multiple of {VOCAB_MULTIPLE}); set it to a power of 2"
                f" up to {VOCAB_MULTIPLE}",
            )
    if data.seq_len % (cp * tp) or (cp > 1 and data.seq_len % (2 * cp)):
        unit = 2 * cp * tp if cp > 1 else tp
        yield (
            "parallel.cp" if cp > 1 else "parallel.tp",
            f"data.seq_len={data.seq_len} does not divide into the slices of parallel.cp={cp} and"
            f" parallel.tp={tp} ranks; set data.seq_len to a multiple of {unit}",
        )
    inner = dims.dp_shard * cp * tp
    if inner % ep:
        yield (
            "parallel.ep",
            f"does not divide parallel.dp_shard * parallel.cp * parallel.tp = {inner}, the ranks"
            f" it is carved out of; set it to one of {divisors(inner)}",
        )
    if model.num_experts % ep:
        yield (
            "parallel.ep",
            f"does not divide model.num_experts={model.num_experts}; set it to one of"
            f" {divisors(model.num_experts)}",
        )


def batch_refusals(ranks: int, data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, why) when ranks that hold different samples cannot share the batch evenly."""
    batch, size = data.global_batch_size, data.micro_batch_size
    local, over = divmod(batch, ranks)
    if over:
        fitting = " or ".join(str(n * ranks) for n in (local, local + 1) if n)
        yield (
            "data.global_batch_size",
            f"{ranks} ranks cannot share it evenly; set data.global_batch_size to {fitting}",
        )
    elif isinstance(size, int) and local % size:
        yield (
            "data.micro_batch_size",
            f"does not divide the {local} samples of one rank (data.global_batch_size={batch} over"
            f" {ranks}); set it to auto or one of {divisors(local)}",
        )


def refusals(config: Config, world: int | None) -> Iterator[tuple[str, str]]:
    """Yield (key, why) for everything that the layout of a Config cannot do on `world` ranks.

    world: number of processes; None takes those that the axes name, the fewest for dp_shard=-1.
    """
    dims, model = ParallelDims.of(config.parallel), config.model
    unfit = []
    try:
        dims = dims.fewest() if world is None else dims.resolve(world)
    except ValueError as error:
        unfit = [("parallel.dp_shard", str(error))]
        dims = dims.fewest()
    if isinstance(model, ModelConfig):
        yield from size_refusals(dims, model, config.data)
    else:
        yield from _data_parallel_only(config)
    unfit = unfit or [*batch_refusals(dims.batch, config.data)]
    yield from unfit
    # How many micro-batches a step has is known when ranks and batch fit.
    micro_batches = None
    if not unfit:
        local = config.data.global_batch_size // dims.batch
        micro_batches = local // resolve_micro_batch(config, dims.batch)
    yield from pipeline_refusals(config, micro_batches)
    yield from _global_scope(config, micro_batches)


def _data_parallel_only(config: Config) -> Iterator[tuple[str, str]]:
    for axis in ("pp", "cp", "tp", "ep"):
        if getattr(config.parallel, axis) > 1:
            yield (
                f"parallel.{axis}",
                f"not proved equal to one process for model.architecture="
                f"{config.model.architecture}, which can share samples and parameters only; set"
                f" parallel.{axis}=1",
            )


def _global_scope(config: Config, micro_batches: int | None) -> Iterator[tuple[str, str]]:
    scope = getattr(config.model, "router_aux_loss_scope", None)
    several = micro_batches is not None and micro_batches > 1
    if scope == "global" and (several or config.parallel.pp > 1):
        found = f"a step has {micro_batches} micro-batches and " if several else ""
        yield (
            "model.router_aux_loss_scope",
            f"needs the whole batch in one pass, and {found}parallel.pp={config.parallel.pp}; set"
            " data.micro_batch_size=auto and parallel.pp=1, or the scope to sequence",
        )


def resolve(parallel: ParallelConfig, world: int) -> ParallelDims:
    """Return the axes of a configuration for `world` ranks; raises as `ParallelDims.resolve`."""
    return ParallelDims.of(parallel).resolve(world)


def stages_per_rank(parallel: ParallelConfig) -> int:
    """Return the pipeline stages that one rank holds: 2, or 1 of gpipe, 1f1b and no pipeline."""
    return 1 if parallel.pp == 1 or parallel.schedule in ("gpipe", "1f1b") else 2


def stages_of(parallel: ParallelConfig, index: int) -> list[int]:
    """Return the stages of the pipeline's rank `index`, in the order of the model."""
    pp, each = parallel.pp, stages_per_rank(parallel)
    if each == 1:
        return [index]
    second = 2 * pp - 1 - index if parallel.schedule in V_SCHEDULES else index + pp
    return [index, second]


def pipeline_refusals(config: Config, micro_batches: int | None) -> Iterator[tuple[str, str]]:
    """Yield (key, why) for what the pipeline of a Config cannot do with so many micro-batches.

    micro_batches: of a step of one rank; None when nobody knows.
    """
    parallel, model = config.parallel, config.model
    schedule, pp = parallel.schedule, parallel.pp
    splits = schedule in SPLIT_BACKWARD
    if parallel.overlap and schedule != "dualpipev":
        yield (
            "parallel.overlap",
            (
                f"parallel.schedule={schedule} has no pairs of forward and backward to overlap; set"
                " parallel.schedule=dualpipev, or parallel.overlap=false"
            ),
        )
    if pp == 1 or not isinstance(model, ModelConfig):
        return
    if splits and parallel.reshard is True:
        yield (
            "parallel.reshard",
            (
                f"parallel.schedule={schedule} computes weight gradients after a block's parameters"
                " would be gone, which gives wrong gradients; set parallel.reshard=auto, or"
                " parallel.schedule=1f1b"
            ),
        )
    if splits and config.compile:
        yield (
            "compile",
            (
                f"a compiled block is one node to autograd, and parallel.schedule={schedule} splits"
                " its backward; set compile=false, or parallel.schedule=1f1b"
            ),
        )
    if model.tie_word_embeddings and schedule not in V_SCHEDULES:
        yield (
            "model.tie_word_embeddings",
            (
                f"embedding and head are on different ranks of parallel.pp={pp} stages; set"
                " parallel.schedule=zbv or dualpipev, which have both on one, or"
                " model.tie_word_embeddings=false"
            ),
        )
    if micro_batches is not None:
        yield from _micro_batch_refusals(schedule, pp, micro_batches)
    yield from _split_refusals(parallel, model.num_hidden_layers)


def _micro_batch_refusals(schedule: str, pp: int, micro_batches: int) -> Iterator[tuple[str, str]]:
    rounds = max(micro_batches // pp, 1)
    if schedule == "dualpipev" and micro_batches < 2 * pp:
        yield (
            "parallel.schedule",
            f"needs at least 2 * parallel.pp = {2 * pp} micro-batches, and a step has"
            f" {micro_batches}; set data.micro_batch_size lower or data.global_batch_size higher",
        )
    elif schedule in ("interleaved1f1b", "interleaved_zb") and micro_batches % rounds:
        yield (
            "parallel.schedule",
            (
                f"goes round in {rounds} rounds of parallel.pp={pp}, which do not divide the"
                f" {micro_batches} micro-batches of a step; set data.micro_batch_size or"
                f" data.global_batch_size so that a rank has a multiple of {pp}"
            ),
        )


def _split_refusals(parallel: ParallelConfig, layers: int) -> Iterator[tuple[str, str]]:
    stages = parallel.pp * stages_per_rank(parallel)
    if layers < stages:
        yield (
            "parallel.pp",
            (
                f"parallel.schedule={parallel.schedule} makes {stages} stages, more than"
                f" model.num_hidden_layers={layers}; set parallel.pp lower"
            ),
        )
    elif parallel.pp_split != "auto":
        found = list(parallel.pp_split)
        if len(found) != stages or sum(found) != layers:
            yield (
                "parallel.pp_split",
                (
                    f"names {len(found)} stages with {sum(found)} blocks, not {stages} that sum to"
                    f" model.num_hidden_layers={layers}; set it so, or to auto"
                ),
            )


def divisors(number: int) -> str:
    """Return the divisors of a number as text."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
