"""The cells of the equality matrix: which layouts, with which options. Imports no torch.

Every factorisation of a world into axes, with every ep that can be carved out, is a layout. Options
are dealt out so that any two values that can meet do meet in some cell.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

FULL = bool(os.environ.get("CURRY_TRAIN_FULL"))
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleaved_zb", "zbv", "dualpipev")
SPLIT_BACKWARD = ("interleaved_zb", "zbv", "dualpipev")

MODEL = (
    "model.hidden_size=16", "model.num_attention_heads=8", "model.num_key_value_heads=8",
    "model.head_dim=4", "model.intermediate_size=16",
    "model.moe_intermediate_size=8", "model.initializer_range=0.25",
)  # fmt: skip
"""Every size divides by 8; weights large enough that no block's gradient drowns in another's."""
EXPERTS = (
    "model.num_experts=8",
    "model.router_aux_loss_coef=0.1",
    "model.router_z_loss_coef=0.01",
)
KINDS = {"moe": EXPERTS, "dense": ("model.num_experts=0",)}
TRAINING = (
    "data.seq_len=16", "optim.lr=0.01", "optim.warmup_steps=0", "optim.schedule=constant",
    "optim.max_grad_norm=0.05", "run.comm_timeout=60",
)  # fmt: skip
SAMPLES = {2: 8, 4: 8, 8: 16, 16: 16, 32: 16}
"""data.global_batch_size by ranks: enough that dualpipev has its 2*pp micro-batches."""

TRIES = 150
Options = dict[str, str]


class Cell(NamedTuple):
    """One layout with its options. layout: all axes and ep; options: those that it reads."""

    world: int
    kind: str
    layout: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """What the cell is, by name, as the cover takes it: an axis is whole or split."""
        axes = {axis: "split" if size > 1 else "whole" for axis, size in self.layout}
        return {"kind": self.kind, **axes, **dict(self.options)}

    @property
    def meetings(self) -> set[tuple]:
        """Every two values that meet in the cell, and every size that an axis has."""
        return pairs(self.values) | {(axis, size) for axis, size in self.layout}

    @property
    def name(self) -> str:
        """World, kind, the axes above 1 and the options that are no default."""
        sizes = [f"{axis}{size}" for axis, size in self.layout if size > 1]
        options = [label(*o) for o in self.options if o[1] != DEFAULTS.get(o[0])]
        return "-".join([f"w{self.world}", self.kind, *sizes, *options])

    @property
    def blocks(self) -> int:
        """Blocks of the model: 16 with --full, else one a stage, but at least 2 or 4.

        4 show several blocks of a stage: of 2 ranks, and in pipelines of 4.
        """
        pp, schedule = dict(self.layout)["pp"], dict(self.options).get("schedule")
        stages = pp if schedule in ("gpipe", "1f1b") else 2 * pp
        least = 4 if self.world == 2 or (self.world == 4 and pp > 1) else 2
        return 16 if FULL else max(least, stages if pp > 1 else 1)

    @property
    def micro_batch_size(self) -> str:
        """Samples of a micro-batch: auto, which makes 2*pp; of 8 ranks or more, when time is short,
        pp of them, except that dualpipev needs 2*pp.
        """
        sizes = dict(self.layout)
        many = dict(self.options).get("schedule") in (None, "dualpipev")
        if FULL or self.world < 8 or sizes["pp"] == 1 or many:
            return "auto"
        batch = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["pp"]
        return str(SAMPLES[self.world] // batch)

    @property
    def overrides(self) -> list[str]:
        """The settings of the run, as a command line has them."""
        words = [*MODEL, *KINDS[self.kind], *TRAINING]
        words += [f"model.num_hidden_layers={self.blocks}"]
        words += [f"data.global_batch_size={SAMPLES[self.world]}"]
        words += [f"data.micro_batch_size={self.micro_batch_size}"]
        words += [f"parallel.{axis}={size}" for axis, size in self.layout]
        return words + [f"{KEYS[name]}={value}" for name, value in self.options]


KEYS = {
    "schedule": "parallel.schedule",
    "overlap": "parallel.overlap",
    "zero": "parallel.zero",
    "reshard": "parallel.reshard",
    "recompute": "parallel.recompute",
    "cp_kind": "parallel.cp_kind",
    "documents": "data.document_mask",
    "compile": "compile",
}
DEFAULTS = {
    "zero": "0",
    "reshard": "auto",
    "recompute": "none",
    "documents": "false",
    "overlap": "false",
    "compile": "false",
}


def overrides_of(words: str, kind: str = "moe") -> list[str]:
    """Return the settings of a case, `tp=2 zero=3 model.num_experts=4`, say: two blocks, or four
    of a pipeline.

    Axes and options go by their short names; eight samples a step, or one for each rank.
    """
    out = [*MODEL, *KINDS[kind], *TRAINING]
    samples = max(8, 2 * world_of(words) if "dp_shard=8" in words else 0)
    blocks = 4 if "pp=" in words else 2
    out += [f"model.num_hidden_layers={blocks}", f"data.global_batch_size={samples}"]
    for word in words.split():
        key, _, value = word.partition("=")
        out.append(f"{KEYS.get(key, f'parallel.{key}' if key in (*AXES, 'ep') else key)}={value}")
    return out


def world_of(words: str) -> int:
    """Return the ranks that the axes of a case make."""
    sizes = [word.partition("=") for word in words.split()]
    return product_of(tuple(int(size) for axis, _, size in sizes if axis in AXES))


def label(name: str, value: str) -> str:
    """Write an option as a part of a cell's name."""
    if name in ("schedule", "cp_kind"):
        return value
    return name if value == "true" and name != "reshard" else f"{name}_{value}"


def factorisations(world: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `world` as the product of the axes' sizes."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for sizes in product(divisors, repeat=len(AXES) - 1):
        rest, over = divmod(world, product_of(sizes))
        if not over and rest:
            yield (rest, *sizes)


def product_of(sizes: tuple[int, ...]) -> int:
    """Return the product."""
    out = 1
    for size in sizes:
        out *= size
    return out


def layouts(world: int, kind: str) -> list[Cell]:
    """Return the cells of a world without options: every ep of a MoE, 1 (and 2) of a dense model.

    A dense model has no experts to share out, so that ep is accepted and changes nothing.
    """
    cells = []
    for sizes in factorisations(world):
        inner = product_of(sizes[2:])
        shares = [ep for ep in range(1, min(inner, 8) + 1) if inner % ep == 0]
        if kind == "dense":
            shares = shares[:2] if sizes[-1] == inner else shares[:1]
        for ep in shares:
            cells.append(Cell(world, kind, (*zip(AXES, sizes, strict=True), ("ep", ep))))
    return cells


@cache
def option_sets(pipelined: bool, sequence_split: bool, compiled: bool) -> list[Options]:
    """Return all sets of options that a layout can have together; only what it reads is named."""
    ways: list[Options] = [{}]
    if pipelined:
        ways = [{"schedule": name, "overlap": "false"} for name in SCHEDULES]
        ways.append({"schedule": "dualpipev", "overlap": "true"})
    found = []
    for way, zero, reshard, recompute, documents in product(
        ways, "0123", ("auto", "true", "false"), ("none", "full", "selective", "2"), (0, 1)
    ):
        splits = way.get("schedule") in SPLIT_BACKWARD
        if (zero in "01" and reshard != "auto") or (splits and (reshard == "true" or compiled)):
            continue
        chosen = {**way, "zero": zero, "reshard": reshard, "recompute": recompute}
        chosen |= {"documents": "true" if documents else "false"}
        if compiled:
            chosen["compile"] = "true"
        kinds = ("ring", "all_gather") if sequence_split else (None,)
        found += [chosen | ({"cp_kind": kind} if kind else {}) for kind in kinds]
    return found


def options_of(cell: Cell, compiled: bool = False) -> list[Options]:
    """Return all sets of options that the layout of a cell can have."""
    sizes = dict(cell.layout)
    return option_sets(sizes["pp"] > 1, sizes["cp"] > 1, compiled)


def with_options(cell: Cell, options: Options) -> Cell:
    """Return the cell with its options."""
    return cell._replace(options=tuple(options.items()))


def pairs(values: dict[str, str]) -> set[tuple]:
    """Return every two values that meet in a cell."""
    return set(combinations(sorted(values.items()), 2))


def possible_meetings(cells: list[Cell], compiled: bool = False) -> set[tuple]:
    """Return every two values that can meet in some cell of these layouts, and every size."""
    found: set[tuple] = set()
    within: dict[int, set] = {}
    for cell in cells:
        sets = options_of(cell, compiled)
        if id(sets) not in within:
            within[id(sets)] = {pair for options in sets for pair in pairs(options)}
        single = {item for pair in within[id(sets)] for item in pair}
        own = cell.values.items()
        found |= cell.meetings | within[id(sets)]
        found |= {tuple(sorted((one, other))) for one in own for other in single}
    return found


def deal(cells: list[Cell], seed: int) -> list[Cell]:
    """Give each cell options, so that as many pairs of values as possible meet."""
    wanted, luck, out = possible_meetings(cells), random.Random(seed), []
    for cell in cells:
        sets = options_of(cell)
        tried = [with_options(cell, luck.choice(sets)) for _ in range(60)]
        out.append(max(tried, key=lambda one: worth(one, wanted)))
        wanted -= out[-1].meetings
    return out


def worth(cell: Cell, wanted: set[tuple]) -> tuple[int, int]:
    """Order cells by the new meetings that they bring, and equal ones by how cheap they are."""
    chosen = dict(cell.options)
    cost = {"selective": 3, "full": 1, "2": 1}.get(chosen["recompute"], 0)
    return len(cell.meetings & wanted), -cost - 2 * (chosen["zero"] in "23")


def pairwise_cover(cells: list[Cell], seed: int, compiled: bool = False) -> list[Cell]:
    """Return cells with options in which every two values that can meet do meet.

    Greedy: of some cells drawn by a seeded generator among those that hold the first pair that has
    not met, the one with most new pairs; so the result is always the same.
    """
    wanted, luck, out = possible_meetings(cells, compiled), random.Random(seed), []
    while wanted:
        first = min(wanted, key=str)
        fitting = [pool for cell in cells if (pool := holding(cell, first, compiled))]
        tried = [with_options(*luck.choice(pool)) for pool in luck.choices(fitting, k=TRIES)]
        out.append(max(tried, key=lambda one: worth(one, wanted)))
        wanted -= out[-1].meetings
    return out


def holding(cell: Cell, meeting: tuple, compiled: bool) -> list[tuple[Cell, Options]]:
    """Return the cell with each of its sets of options that make it hold a pair or a size."""
    if meeting[0] in (*AXES, "ep"):
        sets = options_of(cell, compiled) if meeting in cell.layout else []
    else:
        own = cell.values.items()
        rest = [item for item in meeting if item not in own]
        sets = [o for o in options_of(cell, compiled) if all(item in o.items() for item in rest)]
    return [(cell, options) for options in sets]


def small_worlds() -> list[Cell]:
    """Return every layout of 2 and 4 ranks, dense and MoE, with options dealt out pairwise."""
    cells = [c for world in (2, 4) for kind in ("moe", "dense") for c in layouts(world, kind)]
    return deal(cells, seed=2)


@cache
def cover_of_eight() -> list[Cell]:
    """Return cells of 8 ranks in which every two values that can meet do meet."""
    return pairwise_cover(layouts(8, "moe") + layouts(8, "dense"), seed=4)


def all_of_eight() -> list[Cell]:
    """Return every layout of 8 ranks, with options dealt out pairwise."""
    cells = layouts(8, "moe") + layouts(8, "dense")
    return deal(cells, seed=9)


def compiled() -> list[Cell]:
    """Return compiled cells of 4 ranks in which every two values that can meet do meet."""
    return pairwise_cover(layouts(4, "moe"), seed=4, compiled=True)


def large(world: int, sizes: str, **options: str) -> Cell:
    """Return a MoE cell of many ranks; sizes: those of pp, dp_replicate, dp_shard, cp, tp, ep."""
    values = [int(size) for size in sizes.split()]
    return Cell(world, "moe", tuple(zip((*AXES, "ep"), values, strict=True)), (*options.items(),))


SIXTEEN = (
    large(16, "2 1 2 2 2 2", schedule="1f1b", zero="3", cp_kind="ring", documents="true"),
    large(16, "2 1 2 2 2 4", schedule="interleaved1f1b", zero="1", cp_kind="all_gather"),
    large(16, "2 1 2 2 2 8", schedule="dualpipev", overlap="true", zero="2", cp_kind="ring"),
    large(16, "2 1 2 2 2 4", schedule="zbv", zero="3", cp_kind="ring", recompute="selective"),
    large(16, "2 1 2 2 2 2", schedule="interleaved_zb", zero="0", cp_kind="all_gather"),
)
THIRTY_TWO = (
    large(32, "2 1 4 2 2 8", schedule="1f1b", zero="3", cp_kind="ring", documents="true"),
    large(32, "2 2 2 2 2 4", schedule="dualpipev", overlap="true", zero="2", cp_kind="ring"),
    large(32, "4 1 2 2 2 8", schedule="zbv", zero="1", cp_kind="all_gather"),
    large(32, "2 1 2 4 2 4", schedule="interleaved1f1b", zero="3", cp_kind="ring"),
    large(32, "2 1 2 2 4 2", schedule="gpipe", zero="0", cp_kind="ring", recompute="full"),
)
