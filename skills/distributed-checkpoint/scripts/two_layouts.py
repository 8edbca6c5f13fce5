"""One small model in two layouts: the first saves and goes on, the second loads and goes on."""

from __future__ import annotations

import importlib
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from kit import layouts
from kit.errors import UsageError

if TYPE_CHECKING:
    from kit.cli import Invocation

BEFORE, AFTER = 2, 2
"""Steps before the save and after it."""
TIMEOUT = 300.0
POSITION = {
    "optim.schedule": "cosine", "optim.warmup_steps": 3, "run.max_steps": 8, "run.keep": 0,
}  # fmt: skip
"""Every step has a learning rate of its own, so that a lost position shows."""


class Side(NamedTuple):
    """A layout and the small configuration that runs in it. role: first or second."""

    role: str
    name: str
    world: int
    config: Any


def small_sides(
    call: Invocation, words: list[str], source: list[str], goal: list[str], home: Path
) -> tuple[list[Side], dict[str, list[Any]]]:
    """Return both sides with one small model that fits both, and the sizes that were changed.

    Raises: UsageError with what the rules refuse of one of them.
    """
    asked, worlds = [], []
    for flag, more in (("--from", source), ("--to", goal)):
        config, sentences = layouts.load(call, [*words, *more])
        if config is None:
            raise layouts.refuse(f"layout-refused, {flag}", sentences)
        world = layouts.ranks_of(config, None)
        if world > layouts.MOST_RANKS:
            raise UsageError(f"{flag} makes {world} ranks", f"at most {layouts.MOST_RANKS} start")
        if sentences := layouts.refused(config, world):
            raise layouts.refuse(f"layout-refused, {flag}", sentences)
        asked.append(config)
        worlds.append(world)
    values, dims = _values(asked, worlds, home)
    sides = []
    for at, (role, more) in enumerate((("first", source), ("second", goal))):
        own = {"parallel.dp_shard": dims[at].dp_shard, "devices": worlds[at]}
        config, sentences = layouts.load(call, [*words, *more, *layouts.written(values | own)])
        sentences = sentences or layouts.refused(config, worlds[at])
        if config is None or sentences:
            raise layouts.refuse("the small model of these layouts", sentences)
        axes = {axis: n for axis, n in dims[at].sizes.items() if n > 1}
        axes |= {"zero": config.parallel.zero} if config.parallel.zero else {}
        name = " ".join(f"{axis}{n}" for axis, n in axes.items()) or "one process"
        sides.append(Side(role, name, worlds[at], config))
    changed = layouts.changes(asked[0], sides[0].config)
    changed.pop("data.input", None)
    return sides, changed


def _values(asked: list[Any], worlds: list[int], home: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return settings whose sizes the axes of both layouts divide, and their resolved axes.

    They are those of a layout whose axes are common multiples.
    """
    from curry_train.parallel.dims import ParallelDims, stages_per_rank

    pairs = zip(asked, worlds, strict=True)
    dims = [ParallelDims.of(config.parallel).resolve(world) for config, world in pairs]
    sizes = {a: math.lcm(*(getattr(d, a) for d in dims)) for a in ("pp", "cp", "tp", "ep")}
    batch = math.lcm(*(d.batch for d in dims))
    longest = max(asked, key=lambda config: stages_per_rank(config.parallel))
    parallel = replace(
        longest.parallel, **sizes, dp_replicate=1, dp_shard=batch, pp_split="auto", zero=0
    )
    data = replace(asked[0].data, global_batch_size=2 * sizes["pp"] * batch, micro_batch_size=1)
    both = replace(asked[0], parallel=parallel, data=data)
    world = batch * sizes["pp"] * sizes["cp"] * sizes["tp"]
    values = layouts.small(both, world, home) | POSITION
    if any(isinstance(config.parallel.pp_split, list) for config in asked):
        for key in ("num_hidden_layers", "first_k_dense_replace"):  # the lists count real blocks
            values.pop(f"model.{key}", None)
    if any(isinstance(config.parallel.recompute, int) for config in asked):
        values.pop("parallel.recompute", None)
    values.pop("parallel.pp_split", None)
    return values, dims


def save_and_go_on(sides: list[Side], home: Path) -> list[dict[str, Any]]:
    """Run both sides; return for each the names of its checkpoints and the steps' numbers.

    Raises: AssertionError with the traceback of the first rank that failed.
    """
    from curry_train.data import open_corpus
    from curry_train.testing import run_ranks

    for name in ("tensor", "fsdp", "pipelining"):  # once, before ranks are forked
        importlib.import_module(f"torch.distributed.{name}")
    importlib.import_module("curry_train.parallel.overlap")
    corpus, answers = open_corpus(sides[0].config.data, cache_dir=None), []
    for side in sides:
        found = [home / sides[0].role / "checkpoints"] if answers else []
        loaded = found[0] / answers[0]["names"][0] if found else None
        # One rank is forked as well: what checked code leaves behind dies with it.
        answers.append(run_ranks(_rank, side.world, side, corpus, home, loaded, timeout=TIMEOUT)[0])
    return answers


def draw(count: int) -> None:
    """Move every generator of this process away from where its seed put it."""
    torch, numpy = (importlib.import_module(name) for name in ("torch", "numpy"))
    torch.rand(count)
    numpy.random.random(count)
    random.random()


def _rank(
    rank: int, world: int, side: Side, corpus: Any, home: Path, loaded: Path | None
) -> dict[str, Any]:
    """Begin anew or load, save, take steps and save again."""
    import torch

    from curry_train.checkpoint import training_state
    from curry_train.parallel.mesh import Mesh, build_mesh
    from curry_train.runtime import assemble
    from curry_train.step import train_step

    config, device = side.config, torch.device("cpu")
    mesh = Mesh.single()
    if world > 1:
        limit = config.run.comm_timeout
        mesh = build_mesh(config.parallel, device=device, local_rank=rank, comm_timeout=limit)
    runtime = assemble(config, corpus, mesh)
    if loaded is None:
        for _ in range(BEFORE):
            train_step(runtime)
        draw(rank + 1)
    else:
        training_state.restore(runtime, loaded)
    run: Any = SimpleNamespace(dir=home / side.role, event=lambda *args, **fields: None)
    names = [training_state.save(runtime, run).name]
    numbers = {}
    for step in range(1, AFTER + 1):
        out = train_step(runtime)
        for name in ("loss", "aux_loss", "grad_norm", "lr", "tokens"):
            numbers[f"{name} of step {step}"] = float(getattr(out, name))
    names.append(training_state.save(runtime, run).name)
    return {"names": names, "numbers": numbers}
