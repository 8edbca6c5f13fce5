"""Does a layout of ranks train as one process does? The answer for one set of overrides.

`python -m curry_train.equality parallel.tp=2 ...` takes the words of train.py, runs the ranks on
this machine's CPU and prints the worst value of each kind; 0 equal, 1 not, 2 refused.
One process takes a few steps in float64 and keeps its gradients and weights; then forked ranks take
the same steps by the code that train.py runs, and each holds what it has against that, part by
part. Parts of all ranks together must make every tensor, so none goes unseen.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curry_train.checkpoint.boxes import Box, cover_problem
from curry_train.command_line import load_or_exit, refuse
from curry_train.compose import load_config
from curry_train.config import Config, ConfigError, ParallelConfig, resolve_micro_batch
from curry_train.data import open_corpus
from curry_train.data.loader import IGNORED, Batch
from curry_train.data.samples import Samples
from curry_train.data.token_file import Corpus
from curry_train.evaluate import evaluate
from curry_train.models.protocol import saved_parts
from curry_train.parallel.dims import ParallelDims
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.parallel.shards import Part
from curry_train.rules import problems
from curry_train.runtime import Runtime, assemble
from curry_train.step import train_step
from curry_train.testing import run_ranks

USAGE = """usage: python -m curry_train.equality KEY=VALUE ...

Takes the words of train.py, such as parallel.tp=2 parallel.ep=4, and proves on this machine's CPU
that the ranks of this layout train as one process does: three steps in float64, every gradient,
weight, norm and loss. The ranks are as many as the axes need, or devices=N. The whole model is
in memory several times, so take one of the tiny ones with the layout of a large one.

Exit codes: 0 equal, 1 not equal, 2 refused. `python train.py --help` lists the settings."""
STEPS = 3
GRADIENT = 1e-12
"""Largest error of a gradient or norm, over its largest element or 1e-6 of the global norm."""
UPDATE, UPDATE_OF_NOISE = 1e-8, 1e-5
"""Largest difference of an update over the learning rate; of a weight without gradient to speak
of, which AdamW moves by the sign of rounding errors."""
NO_GRADIENT = 1e-8
LOSS = 1e-12


class Gap(NamedTuple):
    """The worst element of one kind of value. ratio: error over tolerance, above 1 is a miss."""

    ratio: float
    error: float
    kind: str
    name: str
    place: list[int]
    found: float
    wanted: float
    rank: int

    @property
    def layer(self) -> str:
        """The number of the block that the tensor is in, or none."""
        inside = re.search(r"layers\.(\d+)\.", self.name)
        return inside.group(1) if inside else "none"


@dataclass
class Recorded:
    """What some steps left on one rank.

    grads: those of the first step, before clipping; weights: after the last, buffers among them;
    numbers: loss, aux loss, z loss, tokens, gradient norm of each step, and the validation loss.
    """

    grads: list[tuple[str, Part]] = field(default_factory=list)
    weights: list[tuple[str, Part]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass
class Proof:
    """How far the worst value of every kind is from one process.

    clipped: steps whose gradients were clipped; wall, cpu: seconds of the ranks; tensors: how many
    gradients, weights and buffers were compared.
    """

    overrides: list[str]
    world: int
    gaps: dict[str, Gap]
    problems: list[str]
    clipped: int
    wall: float
    cpu: float
    tensors: int

    @property
    def equal(self) -> bool:
        """Tell whether nothing is missing and every value is within its tolerance."""
        return not self.problems and all(gap.ratio <= 1.0 for gap in self.gaps.values())

    def row(self, cell: str) -> dict[str, Any]:
        """Return the proof as a table keeps it."""
        gaps = {kind: gap._asdict() for kind, gap in self.gaps.items()}
        return {"cell": cell, "equal": self.equal, **asdict(self), "gaps": gaps}

    def __str__(self) -> str:
        head = f"{'equal' if self.equal else 'NOT equal'} to one process on {self.world} ranks: "
        lines = [head + " ".join(self.overrides), *self.problems]
        for kind, gap in self.gaps.items():
            mark = "" if gap.ratio <= 1.0 else "  <-- above its tolerance"
            lines.append(
                f"  {kind}: error {gap.error:.2e}, {gap.error / max(gap.ratio, 1e-300):.0e} allowed"
                f"{mark}; worst {gap.name}{gap.place}, layer {gap.layer}, rank {gap.rank}:"
                f" found {gap.found!r}, wanted {gap.wanted!r}"
            )
        return "\n".join(lines)


class UnevenLabels:
    """The loader with labels dropped by the number of each sample in the run: 0 to all of them.

    The same samples lose the same labels whatever the layout. `silent`: share of the samples of a
    step, from the first, that keep none at all.
    """

    def __init__(self, runtime: Runtime, silent: float = 0.0) -> None:
        self.loader = runtime.batches
        self.micro_batch_size = self.loader.micro_batch_size
        self.of_step = runtime.config.data.global_batch_size
        self.first = runtime.mesh.index("batch") * self.of_step // runtime.mesh.size("batch")
        self.silent = round(silent * self.of_step)

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the next step."""
        number = self.loader.samples_consumed + self.first
        batches = self.loader.next_step()
        for batch in batches:
            missing = math.nan if batch["labels"].is_floating_point() else IGNORED
            for labels in batch["labels"].view(len(batch["labels"]), -1):
                places = torch.arange(len(labels))
                dropped = places < (5 * number + 2) % len(labels)
                dropped |= (3 * places + number) % 4 == 0
                if number % self.of_step < self.silent or number % 8 == 3:
                    dropped |= True
                labels[dropped] = missing
                number += 1
        return batches


def record(
    config: Config, corpus: Corpus | Samples, mesh: Mesh, prepare: Callable | None
) -> Recorded:
    """Train STEPS steps on this rank. `prepare` may change the Runtime before the first."""
    runtime, out = assemble(config, corpus, mesh), Recorded()
    runtime.batches = UnevenLabels(runtime)
    if prepare is not None:
        prepare(runtime)
    holder = {id(p): chunk for chunk in runtime.chunks for p in chunk.parameters()}

    def keep_gradients(*_: Any) -> None:
        if runtime.step:
            return
        for shard in runtime.shards:
            grad = shard.own._replace(tensor=shard.owned.grad.detach().clone())
            parts = saved_parts(holder[id(shard.parameter)], shard.name, grad)
            out.grads += parts.items()

    runtime.optimizer.register_step_pre_hook(keep_gradients)
    for step in range(1, STEPS + 1):
        done = train_step(runtime)
        for name in ("loss", "aux_loss", "z_loss", "tokens", "grad_norm"):
            out.numbers[f"{name} of step {step}"] = float(getattr(done, name))
    unclip(out, config.optim.max_grad_norm)
    for shard in runtime.shards:
        parts = saved_parts(holder[id(shard.parameter)], shard.name, shard.local)
        out.weights += parts.items()
    for chunk in runtime.chunks:
        out.weights += [(name, Part.whole(b.detach())) for name, b in chunk.named_buffers()]
    out.numbers |= evaluate(runtime)
    return out


def unclip(recorded: Recorded, max_norm: float) -> None:
    """Undo clipping, which would hide a factor that all gradients have in common."""
    norm = recorded.numbers["grad_norm of step 1"]
    if max_norm and norm > max_norm:
        for _, part in recorded.grads:
            part.tensor.mul_(norm / max_norm)


def prove(
    overrides: Sequence[str],
    world: int,
    *,
    prepare: Callable[[Runtime], None] | None = None,
    project: Path | None = None,
    corpus: Corpus | Samples | None = None,
    timeout: float = 120.0,
) -> Proof:
    """Compare `world` ranks under these settings (`key=value`) with one process; see Proof.

    Both take the same micro-batches where the balance loss looks at one. prepare: changes a Runtime
    before its first step, on the ranks and in the one process. Raises AssertionError when the
    layout is refused, and as `testing.run_ranks` does.
    """
    words = [*overrides, f"devices={world}", "precision=fp64", "accelerator=cpu"]
    config = load_config(words, project=project)
    refused = problems(config, world)
    assert not refused, f"refused: {' '.join(overrides)}\n" + "\n".join(refused)
    corpus = corpus or open_corpus(config.data, cache_dir=None)
    wanted = reference(one_process(config, world), corpus, prepare)
    began, cpu = time.monotonic(), cpu_seconds()
    answers = run_ranks(_rank, world, config, corpus, wanted, prepare, timeout=timeout)
    gaps: dict[str, Gap] = {}
    boxes: dict[str, set[Box]] = defaultdict(set)
    for found, held in answers:
        for kind, gap in found.items():
            gaps[kind] = max(gaps.get(kind, gap), gap, key=lambda one: one.ratio)
        for name, box in held:
            boxes[name].add(Box(*box))
    norms = [wanted.numbers[f"grad_norm of step {step + 1}"] for step in range(STEPS)]
    return Proof(
        overrides=list(overrides),
        world=world,
        gaps=gaps,
        problems=list(missing(boxes, wanted)),
        clipped=sum(0 < config.optim.max_grad_norm < norm for norm in norms),
        wall=time.monotonic() - began,
        cpu=cpu_seconds() - cpu,
        tensors=len(wanted.grads) + len(wanted.weights),
    )


def one_process(config: Config, world: int) -> Config:
    """Return what one process runs in place of a layout: the same model, the same samples."""
    data = replace(config.data, micro_batch_size="auto")
    if getattr(config.model, "router_aux_loss_scope", "sequence") == "micro_batch":
        batch = ParallelDims.of(config.parallel).resolve(world).batch
        data = replace(config.data, micro_batch_size=resolve_micro_batch(config, batch))
    return replace(config, devices=1, compile=False, data=data, parallel=ParallelConfig())


@dataclass(eq=False)
class Reference:
    """What one process found: whole tensors by their names in files, and numbers."""

    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    numbers: dict[str, float]
    norm: float
    lr: float


_references: dict[tuple, Reference] = {}


def reference(config: Config, corpus: Corpus | Samples, prepare: Callable | None) -> Reference:
    """Train in this process, once: many layouts share the result."""
    key = (config, corpus.hash, prepare)
    if key not in _references:
        _references[key] = _train_alone(config, corpus, prepare)
    return _references[key]


def _train_alone(config: Config, corpus: Corpus | Samples, prepare: Callable | None) -> Reference:
    found = record(config, corpus, Mesh.single(), prepare)
    grads, weights = ({n: p.tensor for n, p in of} for of in (found.grads, found.weights))
    norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
    return Reference(grads, weights, found.numbers, norm, config.optim.lr)


def _rank(
    rank: int, world: int, config: Config, corpus: Corpus | Samples, wanted: Reference, prepare: Any
) -> tuple[dict[str, Gap], list[tuple[str, tuple]]]:
    mesh = build_mesh(
        config.parallel,
        device=torch.device("cpu"),
        local_rank=rank,
        comm_timeout=config.run.comm_timeout,
    )
    found = record(config, corpus, mesh, prepare)
    gaps: dict[str, Gap] = {}
    for gap in compare(found, wanted, rank):
        # not <=, so that a NaN is the worst there is
        if gap.kind not in gaps or not gap.ratio <= gaps[gap.kind].ratio:
            gaps[gap.kind] = gap
    held = [
        (f"{kind} {name}", (part.offset, tuple(part.tensor.shape)))
        for kind, parts in (("gradient", found.grads), ("weight", found.weights))
        for name, part in parts
    ]
    return gaps, held


def compare(found: Recorded, wanted: Reference, rank: int) -> Iterator[Gap]:
    """Yield how far each part and number of a rank is from the one process."""
    floor = 1e-6 * wanted.norm
    for name, part in found.grads:
        scale = max(float(wanted.grads[name].abs().max()), floor)
        yield from _gap("gradient", name, part, wanted.grads[name], scale, GRADIENT, rank)
    for name, part in found.weights:
        grad = wanted.grads.get(name)
        noise = grad is not None and float(grad.abs().max()) <= NO_GRADIENT
        allowed = UPDATE_OF_NOISE if noise else UPDATE
        yield from _gap("update", name, part, wanted.weights[name], wanted.lr, allowed, rank)
    for name, value in wanted.numbers.items():
        kind = "norm" if "norm" in name else "loss"
        at_first = name.endswith("of step 1")
        here = torch.tensor([found.numbers[name]], dtype=torch.float64)
        whole = torch.tensor([value], dtype=torch.float64)
        allowed = LOSS if at_first else UPDATE
        scale = max(abs(value), 1e-12)
        yield from _gap(kind, name, Part.whole(here), whole, scale, allowed, rank)


def _gap(
    kind: str, name: str, part: Part, whole: Tensor, scale: float, allowed: float, rank: int
) -> Iterator[Gap]:
    box = tuple(slice(at, at + n) for at, n in zip(part.offset, part.tensor.shape, strict=True))
    here, there = part.tensor.detach().double(), whole[box].double()
    if not here.numel():
        return
    difference = (here - there).abs()
    at = int(difference.nan_to_num(nan=torch.inf).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), here.shape)]
    error = float(difference.flatten()[at]) / scale
    error = error if error == error else float("inf")
    place = [i + at for i, at in zip(place, part.offset, strict=True)]
    values = float(here.flatten()[at]), float(there.flatten()[at])
    yield Gap(error / allowed, error, kind, name, place, *values, rank)


def missing(boxes: dict[str, set[Box]], wanted: Reference) -> Iterator[str]:
    """Yield a sentence for every tensor that the ranks together do not hold exactly once."""
    whole = {f"gradient {name}": g for name, g in wanted.grads.items()}
    whole |= {f"weight {name}": w for name, w in wanted.weights.items()}
    for name in sorted(boxes.keys() | whole.keys()):
        if name not in whole:
            yield f"{name}: no such tensor in one process"
        elif problem := cover_problem(tuple(whole[name].shape), boxes.get(name, ())):
            yield f"{name}: {problem}"


def cpu_seconds() -> float:
    """Return the CPU time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ranks_named(config: Config) -> int:
    """Return `devices`, or the fewest ranks that hold the axes."""
    dims = ParallelDims.of(config.parallel)
    if isinstance(config.devices, int):
        return config.devices
    fill = dims.ep // math.gcd(dims.ep, dims.cp * dims.tp)
    return replace(dims, dp_shard=fill if dims.dp_shard == -1 else dims.dp_shard).world


def main(argv: list[str]) -> int:
    """Prove the layout of a command line."""
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    world = ranks_named(load_or_exit([word for word in argv if word != "accelerator=cpu"]))
    if world == 1:
        more = "set an axis, such as parallel.tp=2, or devices=2"
        print(f"nothing to compare: these settings make one rank; {more}", file=sys.stderr)
        return 2
    try:
        proof = prove(argv, world)
    except ConfigError as error:
        return refuse(error)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(proof)
    print(f"{proof.tensors} tensors, {proof.cpu:.0f} CPU seconds")
    return 0 if proof.equal else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
