"""Every layout that the rules accept for a number of GPUs: its memory, its estimated step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from curry_train import plan
from curry_train.communication import Links, step_time
from curry_train.config import resolve_micro_batch
from curry_train.parallel import dims

GIB = 2**30
LADDER = (
    "micro-batch",
    "recompute",
    "zero 1",
    "zero 2",
    "zero 3",
    "tensor parallel",
    "expert parallel",
    "context parallel",
    "pipeline parallel",
)
"""From the cheapest primitive to the dearest: in code to understand, messages and constraints."""
SCHEDULES = ("1f1b", "interleaved1f1b", "zbv", "dualpipev")
"""gpipe holds more at the bubble of 1f1b, interleaved_zb as much as zbv at its bubble."""
SAME_TIME = 1.04
"""Steps closer than this are equal within an estimate; the simpler layout comes first."""
LARGEST_MICRO_BATCH = 16


@dataclass
class Candidate:
    """A layout: its configuration, bytes of the fullest rank, seconds of the slowest."""

    config: Any
    world: int
    memory: dict[str, int | None]
    time: dict[str, Any] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the fullest rank."""
        return sum(amount or 0 for amount in self.memory.values())

    @property
    def total(self) -> float | None:
        """Seconds of a step."""
        return None if self.time is None else self.time["total"]

    @property
    def used(self) -> list[str]:
        """What the layout makes use of, the cheapest first."""
        parallel, found = self.config.parallel, []
        found += ["recompute"] * (parallel.recompute != "none")
        found += [f"zero {parallel.zero}"] * (parallel.zero > 0)
        axes = {"tp": "tensor", "ep": "expert", "cp": "context", "pp": "pipeline"}
        return found + [f"{n} parallel" for axis, n in axes.items() if getattr(parallel, axis) > 1]

    def level(self, present: Candidate) -> int:
        """Return the place in LADDER of the dearest thing that `present` does not use."""
        new = [LADDER.index(name) for name in self.used if name not in present.used]
        return max(new, default=0)

    @property
    def complexity(self) -> int:
        """Return how much there is to understand; only its order means anything."""
        several = self.config.parallel.dp_replicate > 1
        return sum(1 + LADDER.index(name) for name in self.used) + several

    def overrides(self) -> list[str]:
        """Return what to set for this layout, on the command line's terms."""
        parallel, d = self.config.parallel, dims.resolve(self.config.parallel, self.world)
        found = [f"parallel.{a}={n}" for a, n in d.sizes.items() if n > 1 or a == "dp_shard"]
        found += [f"parallel.zero={parallel.zero}"]
        if d.pp > 1:
            found += [f"parallel.schedule={parallel.schedule}"]
            found += ["parallel.overlap=true"] * parallel.overlap
        if parallel.recompute != "none":
            found += [f"parallel.recompute={parallel.recompute}"]
        return [*found, f"data.micro_batch_size={self.micro_batch}"]

    def instead_of(self, present: Any) -> list[str]:
        """Return what to set where `present`, a parallel configuration, stands; see overrides."""
        found, own = self.overrides(), self.config.parallel
        named = {word.partition("=")[0] for word in found}
        for field in ("pp", "dp_replicate", "cp", "tp", "ep", "recompute", "overlap"):
            value = getattr(own, field)
            if f"parallel.{field}" not in named and getattr(present, field) != value:
                found.append(f"parallel.{field}={str(value).lower()}")
        return found

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch."""
        ranks = dims.resolve(self.config.parallel, self.world).batch
        return resolve_micro_batch(self.config, ranks)


def price(config: Any, world: int, links: Links | None) -> Candidate:
    """Return a layout with its memory and, with links, its step time."""
    found = Candidate(config, world, plan.estimate(config, world))
    return timed(found, links)


def timed(candidate: Candidate, links: Links | None) -> Candidate:
    """Fill in the step time, where the links are known."""
    if links is not None:
        candidate.time = step_time(candidate.config, candidate.world, links)
    return candidate


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def meshes(config: Any, world: int, per_node: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes of every mesh worth a price.

    Left out: tp and ep that do not stay in a node while fewer would do (tp always), cp of short
    sequences where cp ranks could hold samples of their own, replicas that do not fill nodes.
    """
    model, data = config.model, config.data
    long = data.seq_len >= 8192 or data.global_batch_size < world
    for pp in divisors(world):
        for tp in divisors(world // pp):
            if pp > model.num_hidden_layers or tp > per_node:
                continue
            for cp in divisors(world // pp // tp) if long else [1]:
                rest = world // pp // tp // cp
                for dp_shard in divisors(rest):
                    inner = dp_shard * cp * tp
                    if rest > dp_shard and (dp_shard == 1 or inner % per_node):
                        continue
                    experts = max(model.num_experts, 1)
                    for ep in divisors(math.gcd(inner, experts)) if model.num_experts else [1]:
                        sizes = {"pp": pp, "dp_replicate": rest // dp_shard, "dp_shard": dp_shard}
                        yield {**sizes, "cp": cp, "tp": tp, "ep": ep}


def variants(config: Any, world: int, per_node: int) -> Iterator[list[Any]]:
    """Yield lists of accepted configurations that differ in micro-batch and recomputation only."""
    for sizes in meshes(config, world, per_node):
        local, over = divmod(
            config.data.global_batch_size, sizes["dp_replicate"] * sizes["dp_shard"]
        )
        if over or not local:
            continue
        divided = sizes["dp_shard"] * sizes["cp"] > 1 or sizes["tp"] > sizes["ep"]
        levels = (2, 3) if sizes["dp_replicate"] > 1 else (0, 1, 2, 3) if divided else (0,)
        rows = [n for n in divisors(local) if n <= LARGEST_MICRO_BATCH]
        for zero in levels:
            for schedule in SCHEDULES if sizes["pp"] > 1 else ("1f1b",):
                overlap = schedule == "dualpipev" and sizes["ep"] > 1 and sizes["pp"] > 1
                asked = {**sizes, "zero": zero, "schedule": schedule, "overlap": overlap}
                parallel = replace(config.parallel, **asked, reshard="auto", pp_split="auto")
                found = []
                for again in ("none", "selective", "full"):
                    for size in reversed(rows):
                        data = replace(config.data, micro_batch_size=size)
                        again_too = replace(parallel, recompute=again)
                        one = replace(config, parallel=again_too, data=data)
                        if next(iter(dims.refusals(one, world)), None) is None:
                            found.append(one)
                if found:
                    yield found


@dataclass
class Search:
    """What was looked at: candidates that fit, the best first; the least memory of each level."""

    fitting: list[Candidate]
    accepted: int
    least: dict[int, Candidate]


def search(config: Any, world: int, room: float, links: Links | None, present: Candidate) -> Search:
    """Price every accepted layout; `room`: bytes that a rank may use.

    For each mesh, zero level, schedule and kind of recomputation the largest micro-batch that
    fits is timed, and the smallest one with a pipeline, where more of them shorten the bubble.
    """
    per_node = min(links.per_node, world) if links else world
    fitting, least, accepted = [], {}, 0
    for group in variants(config, world, per_node):
        accepted += len(group)
        for again in ("none", "selective", "full"):
            # From the smallest micro-batch, which needs the least, to the largest that fits.
            same = [one for one in group if one.parallel.recompute == again][::-1]
            fit: list[Candidate] = []
            for one in same:
                found = Candidate(one, world, plan.estimate(one, world))
                level = found.level(present)
                if level not in least or found.bytes < least[level].bytes:
                    least[level] = found
                if found.bytes > room:
                    break
                fit.append(found)
            several = fit[:1] if config_of(fit, "pp") > 1 and len(fit) > 1 else []
            fitting += [timed(found, links) for found in [*fit[-1:], *several]]
    fitting.sort(key=lambda found: (found.total or 0.0, found.complexity))
    return Search(ranked(fitting), accepted, least)


def config_of(found: list[Candidate], axis: str) -> int:
    """Return the size of an axis of the first candidate, 1 of none."""
    return getattr(found[0].config.parallel, axis) if found else 1


def ranked(fitting: list[Candidate]) -> list[Candidate]:
    """Order by step time, and by simplicity where times are equal within the estimate."""
    ordered, left = [], list(fitting)
    while left:
        near = [one for one in left if (one.total or 0.0) <= (left[0].total or 0.0) * SAME_TIME]
        near.sort(key=lambda one: (one.complexity, one.total or 0.0))
        ordered += near
        left = left[len(near) :]
    return ordered


def distinct(ordered: list[Candidate], count: int) -> list[Candidate]:
    """Return the first of every mesh and zero level, two of a mesh, at most so many."""
    found: dict[tuple, dict[int, Candidate]] = {}
    for one in ordered:
        mesh = tuple(dims.resolve(one.config.parallel, one.world).sizes.values())
        levels = found.setdefault(mesh, {})
        if len(levels) < 2:
            levels.setdefault(one.config.parallel.zero, one)
    kept = {id(one) for levels in found.values() for one in levels.values()}
    return [one for one in ordered if id(one) in kept][:count]
