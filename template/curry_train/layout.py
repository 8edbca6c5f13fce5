"""A configuration and a number of ranks, read as what every rank holds and does."""

from __future__ import annotations

from functools import cached_property

from curry_train.activations import block_bytes, head_bytes, mask_bytes, selective_bytes
from curry_train.config import Config, ModelConfig, resolve_micro_batch
from curry_train.layers.variants import chosen
from curry_train.parallel import dims
from curry_train.parallel.activation_checkpoint import kind_of
from curry_train.sizes import Held, Weight, block_costs, built_weights, held, held_of, is_dense
from curry_train.stages import stage_blocks

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


class Layout:
    """What the closed forms read of a configuration for `world` ranks.

    dims: the sizes of the axes; samples: those of a micro-batch; micro_batches: of a step;
    tokens: of a micro-batch on a cp rank, tp ranks share them; compute and wide: bytes of an
    element in matrices, and in norms, parameters and moments; costs: FLOP of each block per token.
    Raises ValueError when the axes do not make `world` ranks.
    """

    def __init__(self, config: Config, world: int) -> None:
        self.config, self.parallel, self.model = config, config.parallel, config.model
        self.dims = dims.resolve(config.parallel, world)
        self.samples = resolve_micro_batch(config, self.dims.batch)
        self.micro_batches = config.data.global_batch_size // self.dims.batch // self.samples
        self.tokens = self.samples * config.data.seq_len // self.dims.cp
        self.compute = COMPUTE_BYTES[config.precision]
        self.wide = max(self.compute, 4)
        self.decoder = isinstance(config.model, ModelConfig)
        self.known = self.decoder and not chosen(config.model)
        self._held: dict[str | int | bool, Held] = {}
        self._kept: dict[tuple[str | int | bool, str], float] = {}

    @cached_property
    def costs(self) -> tuple[float, ...]:
        if not self.decoder:
            return (1.0,) * max(1, sum(isinstance(part, int) for part in self.built))
        return block_costs(self.model, self.config.data.seq_len)

    @cached_property
    def split(self) -> list[range]:
        """The blocks of every pipeline stage, in model order."""
        head = 6.0 * self.model.vocab_size * self.model.hidden_size if self.decoder else 0.0
        return stage_blocks(self.parallel, self.costs, head)

    def stages_of(self, index: int) -> list[int]:
        """Return the stages of the pipeline's rank `index`."""
        return dims.stages_of(self.parallel, index)

    def parts_of(self, stage: int) -> list[str | int]:
        """Return what a stage holds: embedding, blocks by number, head (with the last norm)."""
        first, last = stage == 0, stage == len(self.split) - 1
        return ["embedding"] * first + list(self.split[stage]) + ["head"] * last

    @cached_property
    def masks(self) -> int:
        """The bytes of the masks that all blocks of a micro-batch share."""
        return mask_bytes(self.config, self.samples, self.compute)

    @cached_property
    def built(self) -> dict[str | int, list[Weight]]:
        """The parameters of a model without closed forms."""
        return built_weights(self.config)

    def kind(self, part: str | int) -> str | int | bool:
        """Return what parts of equal size have in common: the end, or whether a block is dense."""
        if part == "head" and self.dims.pp > 1:
            return "head of its own"  # a tied one too: every stage has its own copy
        return is_dense(self.model, part) if self.known and isinstance(part, int) else part

    def held(self, part: str | int) -> Held:
        """Return the elements of a part on the rank that holds most."""
        kind = self.kind(part)
        if kind not in self._held:
            d = self.dims
            ranks = (d.tp, d.ep, d.dp_shard * d.cp, d.efsdp)
            known = self.known and isinstance(kind, str | bool)
            self._held[kind] = (
                held_of(self.model, kind, *ranks)
                if known
                else held(self.built.get(part, []), *ranks)
            )
        return self._held[kind]

    def held_by(self, index: int) -> Held:
        """Return the elements of all parts of the pipeline's rank `index`."""
        parts = (part for stage in self.stages_of(index) for part in self.parts_of(stage))
        return Held.sum(self.held(part) for part in parts)

    def kept(self, part: str | int) -> float:
        """Return the bytes that backward keeps of a part per token of a cp rank."""
        kind, again = self.kind(part), self.again(part) if isinstance(part, int) else "none"
        if (kind, again) not in self._kept:
            self._kept[kind, again] = self._kept_of(kind, again)
        return self._kept[kind, again]

    def _kept_of(self, kind: str | int | bool, again: str) -> float:
        model, sizes, tp = self.model, (self.compute, self.wide), self.dims.tp
        if kind in ("head", "head of its own"):
            return head_bytes(model, *sizes, tp)
        if kind == "embedding":
            return 0.0
        if again == "full":
            return model.hidden_size * self.compute / tp
        if again == "selective":
            return selective_bytes(model, bool(kind), *sizes, tp)
        return self.block_bytes(bool(kind))

    def block_bytes(self, dense: bool) -> float:
        """Return the bytes that a block makes per token, whatever is made again later."""
        d = self.dims
        gathered = d.cp if self.parallel.cp_kind == "all_gather" else 1
        return block_bytes(self.model, dense, self.compute, self.wide, d.tp, d.ep, gathered)

    @property
    def reshards(self) -> bool:
        """Whether gathered parameters are dropped after each forward pass."""
        if self.parallel.zero < 2 or self.parallel.reshard is False:
            return False
        splits = self.dims.pp > 1 and self.parallel.schedule in dims.SPLIT_BACKWARD
        return self.parallel.reshard is True or (self.parallel.zero == 3 and not splits)

    def again(self, layer: int) -> str:
        """Return what is made again of a block in backward: none, full or selective."""
        return kind_of(self.parallel.recompute, layer)

    def made_again(self, stage: int) -> list[int]:
        """Return the blocks of a stage that keep less than all for backward."""
        return [layer for layer in self.split[stage] if self.again(layer) != "none"]
