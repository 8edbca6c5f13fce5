"""Any layout of ranks loads what any other saved, bit for bit; what is no layout is refused."""

from __future__ import annotations

import math
import random
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_checkpoint import edit_manifest, meta, problems_of, save, world_mesh
from torch import Tensor

from curry_train.checkpoint import dcp, storage, training_state
from curry_train.checkpoint.boxes import Box, cover_problem, outside
from curry_train.checkpoint.convert import convert
from curry_train.checkpoint.storage import as_part
from curry_train.checkpoint.training_state import MOMENTS, training_tensors
from curry_train.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from curry_train.data.tokenizer import ByteTokenizer
from curry_train.loss import mean_loss
from curry_train.models.protocol import named_state
from curry_train.optim import build_optimizer
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.parallel.parallelize import build_chunks
from curry_train.parallel.shards import Part
from curry_train.runtime import Runtime, seed_everything
from curry_train.step import train_step
from curry_train.testing import assert_same, run_ranks

SHAPES = {
    "model.embed_tokens.weight": (10, 6),
    "model.layers.0.self_attn.q_proj.weight": (8, 12),
    "model.layers.0.norm.weight": (6,),
    "model.layers.1.mlp.experts.up_proj.weight": (8, 4, 3),
    "model.layers.2.self_attn.q_proj.weight": (5, 7),
    "model.layers.3.mlp.experts.up_proj.weight": (8, 2, 5),
    "model.norm.weight": (3,),
    "optim.step": (),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
NAN = 0x7FC0_1234  # a NaN with a payload: only a copy of bits keeps it


def whole(few_experts: bool = False) -> dict[str, Tensor]:
    """Return the global state: weights, and moments of another precision beside them."""
    generator, state = torch.Generator().manual_seed(5), {}
    for at, (name, shape) in enumerate(SHAPES.items()):
        size = (4, *shape[1:]) if few_experts and ".experts." in name else shape
        value = torch.randn(size, generator=generator) * 100
        state[name] = value.to(DTYPES[at % len(DTYPES)])
        if shape:
            state[f"optim.exp_avg.{name}"] = value.double().square()
    state["model.embed_tokens.weight"].view(torch.int32)[3, 2] = NAN
    return state


def cut(box: Box, dim: int, count: int, index: int) -> Box:
    """Take piece `index` of `count` along a dimension, as torch.chunk does: the last are small."""
    if dim >= len(box.size):
        return box
    piece = math.ceil(box.size[dim] / count)
    start, end = (min(i * piece, box.size[dim]) for i in (index, index + 1))
    offset, size = list(box.offset), list(box.size)
    offset[dim], size[dim] = offset[dim] + start, end - start
    return Box(tuple(offset), tuple(size))


def rows(box: Box, rank: int, world: int, name: str) -> Box | None:
    return cut(box, 0, world, rank)


def ragged(box: Box, rank: int, world: int, name: str) -> Box | None:
    """Rank 0 has one row, rank 1 none, rank 2 the rest; a scalar is everybody's."""
    if not box.size:
        return box
    start, end = (min(at, box.size[0]) for at in ((0, 1), (1, 1), (1, 99))[rank])
    return Box((start, *box.offset[1:]), (end - start, *box.size[1:]))


def columns_and_rows(box: Box, rank: int, world: int, name: str) -> Box | None:
    """tp on dim 1, fsdp on dim 0; a vector is replicated over tp."""
    return cut(cut(box, 1, 2, rank % 2), 0, world // 2, rank // 2)


def rows_and_columns(box: Box, rank: int, world: int, name: str) -> Box | None:
    return cut(cut(box, 0, 2, rank % 2), 1, 2, rank // 2)


def nested(box: Box, rank: int, world: int, name: str) -> Box | None:
    """tp and then fsdp on dim 0: neighbours in memory are no neighbours in the tensor."""
    return cut(cut(box, 0, 2, rank % 2), 0, world // 2, rank // 2)


def stages(box: Box, rank: int, world: int, name: str) -> Box | None:
    """Two stages in a V (the outer layers on the first) of two fsdp ranks each."""
    inner = any(f"layers.{layer}." in name for layer in (1, 2))
    return cut(box, 0, 2, rank % 2) if name == "optim.step" or inner == (rank // 2) else None


def replicas(box: Box, rank: int, world: int, name: str) -> Box | None:
    return cut(box, 0, 2, rank % 2)


def everywhere(box: Box, rank: int, world: int, name: str) -> Box | None:
    return box


LAYOUTS = {
    "one process": (1, everywhere),
    "rows of 2": (2, rows),
    "rows of 3": (3, rows),
    "rows of 4": (4, rows),
    "rows of 8": (8, rows),
    "ragged rows": (3, ragged),
    "columns and rows": (4, columns_and_rows),
    "rows and columns": (4, rows_and_columns),
    "nested rows": (4, nested),
    "stages": (4, stages),
    "replicas of rows": (4, replicas),
    "full replicas": (2, everywhere),
}


def parts_of(state: dict[str, Tensor], layout: str, rank: int, fill: bool) -> dict[str, Any]:
    """Return what a rank holds, values or ones; ranks 1, 3 ... hold views of stride two."""
    world, place = LAYOUTS[layout]
    parts: dict[str, Any] = {}
    for name, tensor in state.items():
        box = place(Box((0,) * tensor.dim(), tuple(tensor.shape)), rank, world, name)
        if box is None:
            continue
        memory = torch.ones((*box.size, 2), dtype=tensor.dtype)
        local = memory[..., 1] if rank % 2 else memory[..., 0].contiguous()
        if fill:
            local.copy_(tensor[box.within(Box((0,) * tensor.dim(), tuple(tensor.shape)))])
        parts[name] = Part(local, tuple(tensor.shape), box.offset)
    return parts


def mesh_of(world: int) -> Mesh:
    return world_mesh() if world > 1 else Mesh.single()


def save_layout(rank: int, world: int, root: Path, layout: str, few: bool) -> str:
    parts = parts_of(whole(few), layout, rank, fill=True)
    experts = 4 if few else 8
    return str(save(root, 1, parts, mesh=mesh_of(world), meta=meta(8, experts)))


def load_layout(rank: int, world: int, paths: list[Path], layout: str, few: bool) -> int:
    state, compared = whole(few), 0
    wanted = parts_of(state, layout, rank, fill=True)
    for path in paths:
        parts = parts_of(state, layout, rank, fill=False)
        dcp.load(path, parts, mesh=mesh_of(world))
        for name, part in parts.items():
            pair = [
                p.tensor.clone(memory_format=torch.contiguous_format) for p in (part, wanted[name])
            ]
            found, truth = (tensor.reshape(-1).view(torch.uint8) for tensor in pair)
            assert torch.equal(found, truth), f"{layout} from {path.parent.name}: {name}"
            compared += part.tensor.numel()
            beside = part.tensor._base  # what lies between the strides belongs to others
            assert beside is None or not rank % 2 or bool((beside[..., 0] == 1).all()), name
    return compared


def on_ranks(function: Any, layout: str, *args: Any) -> list[Any]:
    world = LAYOUTS[layout][0]
    return run_ranks(function, world, *args) if world > 1 else [function(0, 1, *args)]


@pytest.fixture(scope="module", params=[False, True], ids=["8 experts", "4 experts"])
def sources(request, tmp_path_factory) -> tuple[bool, list[Path]]:
    """Save the state once from every layout."""
    few, paths = request.param, []
    for layout in LAYOUTS:
        root = tmp_path_factory.mktemp(layout.replace(" ", "_"))
        paths.append(Path(on_ranks(save_layout, layout, root, layout, few)[0]))
    return few, paths


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(2)
def test_a_layout_loads_what_every_layout_saved_bit_for_bit(sources, layout):
    few, paths = sources
    compared = on_ranks(load_layout, layout, paths, layout, few)
    held = sum(tensor.numel() for tensor in whole(few).values()) * len(paths)
    assert sum(compared) >= held, "some element was compared on no rank"


def test_every_box_is_written_once_and_replicas_share_the_writing(sources):
    few, paths = sources
    for layout, path in zip(LAYOUTS, paths, strict=True):
        tensors = dcp.read_manifest(path)["tensors"]
        assert {name: tuple(entry["shape"]) for name, entry in tensors.items()} == {
            name: tuple(tensor.shape) for name, tensor in whole(few).items()
        }
        written: dict[str, int] = {}
        for entry in tensors.values():
            size = getattr(torch, entry["dtype"]).itemsize
            for chunk in entry["chunks"]:
                assert math.prod(chunk["shape"]) > 0
                bytes_ = size * math.prod(chunk["shape"])
                written[chunk["file"]] = written.get(chunk["file"], 0) + bytes_
        assert sum(written.values()) == sum(tensor.nbytes for tensor in whole(few).values())
        if "replicas" in layout:
            assert len(written) == LAYOUTS[layout][0]
            assert max(written.values()) - min(written.values()) <= 400, (layout, written)


def test_the_same_layout_writes_the_same_files_every_time(tmp_path):
    layout = "replicas of rows"
    one, two = (
        Path(on_ranks(save_layout, layout, tmp_path / name, layout, False)[0]) for name in "ab"
    )
    assert dcp.read_manifest(one)["tensors"] == dcp.read_manifest(two)["tensors"]
    for file in one.glob("tensors-*"):
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_only_the_files_that_hold_a_box_are_opened(sources):
    few, paths = sources
    path = paths[list(LAYOUTS).index("rows of 2")]
    name = "model.embed_tokens.weight"
    second, state = path / "tensors-00001.safetensors", whole(few)
    content = second.read_bytes()
    ignored = [other for other in state if other != name]
    try:
        second.write_bytes(b"\xff" * len(content))
        for rows_, opened in ((5, False), (6, True)):
            part = Part(torch.zeros(rows_, 2), (10, 6), (0, 3))
            if opened:
                message = problems_of(dcp.load, path, {name: part}, verify=False, ignore=ignored)
                assert f"{second} is no valid safetensors file" in message
            else:
                dcp.load(path, {name: part}, verify=False, ignore=ignored)
                assert torch.equal(part.tensor, state[name][:5, 3:5])
    finally:
        second.write_bytes(content)


# What is no layout.

EXPERTS = "model.layers.1.mlp.experts.up_proj.weight"


def wrong_parts(kind: str, rank: int) -> dict[str, Any]:
    """Return what rank 0 or 1 claims of tensors whose halves would be [0:4] and [4:8]."""
    local = torch.full((4, 2), float(rank))
    claims = {
        "local experts": {EXPERTS: local},
        "local experts, equal bits": {EXPERTS: torch.ones(4, 2)},
        "forgotten offset": {EXPERTS: Part(local, (8, 2), (0, 0))},
        "forgotten offset, equal bits": {EXPERTS: Part(torch.ones(4, 2), (8, 2), (0, 0))},
        "one bit": {"w": Part(torch.tensor([0.0 if rank else -0.0] * 4), (4,), (0,))},
        "hole": {"w": Part(torch.ones(4 - rank, 2), (8, 2), (4 * rank, 0))},
        "hole between": {"w": Part(torch.ones(4 - rank, 2), (8, 2), (5 * rank, 0))},
        "overlap": {"w": Part(torch.ones(5 - rank, 2), (8, 2), (4 * rank, 0))},
        "overlap and hole": {"w": Part(torch.ones(4, 2), (8, 2), (3 * rank, 0))},
        "inside": {"w": Part(torch.ones(8 - 6 * rank, 2), (8, 2), (2 * rank, 0))},
        "outside": {"w": Part(torch.ones(4, 2), (8, 2), (5 * rank, 0))},
        "negative": {"w": Part(torch.ones(4, 2), (8, 2), (4 * rank - 4, 0))},
        "dimensions": {"w": Part(torch.ones(8), (8, 2), (0, rank))},
        "global shape": {"w": Part(torch.ones(4, 2), (8 + rank, 2), (4 * rank, 0))},
        "nothing": {"w": Part(torch.ones(0, 2), (8, 2), (8 * rank, 0))},
        "no tensor": {"w": Part([1.0], (1,), (0,))},  # type: ignore[arg-type]
    }
    return claims[kind]


WRONG = {
    "local experts": [EXPERTS, "has shape [4, 2]", "num_experts is 8"],
    "local experts, equal bits": [EXPERTS, "has shape [4, 2]", "num_experts is 8"],
    "forgotten offset": [f"tensor {EXPERTS}: ranks 0 and 1", "offset [0, 0]", "different content"],
    "forgotten offset, equal bits": [EXPERTS, "hold 8 of its 16 elements, not the one at [4, 0]"],
    "one bit": ["tensor w: ranks 0 and 1 write the same part, offset [0]", "different content"],
    "hole": ["tensor w (float32 [8, 2])", "hold 14 of its 16 elements, not the one at [7, 0]"],
    "hole between": ["tensor w (float32", "hold 14 of its 16 elements, not the one at [4, 0]"],
    "overlap": ["tensor w", "boxes [0:5, 0:2] and [4:8, 0:2] overlap in 2 elements"],
    "overlap and hole": ["tensor w", "boxes [0:4, 0:2] and [3:7, 0:2] overlap in 2 elements"],
    "inside": ["tensor w", "boxes [0:8, 0:2] and [2:4, 0:2] overlap in 4 elements"],
    "outside": ["rank 1: tensor w: a box of shape [4, 2] at offset [5, 0] lies outside", "[8, 2]"],
    "negative": ["rank 0: tensor w: a box of shape [4, 2] at offset [-4, 0] lies outside"],
    "dimensions": ["tensor w: a box of shape [8] at offset [0, 0] lies outside", "[8, 2]"],
    "global shape": ["tensor w: rank 0 holds float32 [8, 2], rank 1 float32 [9, 2]"],
    "nothing": ["tensor w (float32 [8, 2]): boxes hold 0 of its 16 elements"],
    "no tensor": ["w is a list; only tensors are saved"],
}


def save_wrong(rank: int, world: int, root: Path) -> dict[str, str]:
    mesh = world_mesh()
    return {
        kind: problems_of(save, root, 1, wrong_parts(kind, rank), mesh=mesh, meta=meta(8, 8))
        for kind in WRONG
    }


def test_what_is_no_layout_is_refused_on_every_rank_with_name_and_numbers(tmp_path):
    root = tmp_path / "checkpoints"
    first, second = run_ranks(save_wrong, 2, root)
    assert first == second
    for kind, words in WRONG.items():
        assert all(word in first[kind] for word in words), (kind, first[kind])
    assert not root.exists()


def test_a_part_outside_its_tensor_is_refused_at_load_and_nothing_is_changed(tmp_path):
    path = save(tmp_path, 1, {"w": torch.arange(16.0).reshape(8, 2), "v": torch.ones(2)})
    for part, words in [
        (
            Part(torch.zeros(4, 2), (8, 2), (5, 0)),
            "a box of shape [4, 2] at offset [5, 0] lies out",
        ),
        (Part(torch.zeros(4, 2), (4, 2), (0, 0)), "has shape [8, 2] in the checkpoint and [4, 2]"),
        (Part(torch.zeros(4, 2).double(), (8, 2), (0, 0)), "is float32 in the checkpoint"),
        (Part(torch.zeros(4, 2, device="meta"), (8, 2), (0, 0)), "on the meta device"),
    ]:
        other = torch.zeros(2)
        assert words in problems_of(dcp.load, path, {"w": part, "v": other})
        assert not other.any()


def test_chunks_of_a_manifest_that_overlap_or_leave_a_hole_are_refused(tmp_path):
    path = save(tmp_path, 1, {"w": torch.ones(4)})
    tensors = dcp.read_manifest(path)["tensors"]
    chunk = tensors["w"]["chunks"][0]
    for places, words in [
        (((0, 3), (2, 1)), "boxes [0:3] and [2:3] overlap in 1 elements"),
        (((0, 2), (3, 1)), "boxes hold 3 of its 4 elements, not the one at [2]"),
    ]:
        tensors["w"]["chunks"] = [{**chunk, "offset": [at], "shape": [n]} for at, n in places]
        edit_manifest(path, tensors=tensors)
        assert words in problems_of(dcp.read_manifest, path)


# Boxes against a count of every element.


def random_boxes(draw: random.Random) -> tuple[tuple[int, ...], list[Box]]:
    """Return a shape and boxes that often cover it: cuts of cuts, some dropped, some added."""
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw.randint(0, 4) if shape else 0):
        box = boxes.pop(draw.randrange(len(boxes)))
        dim, count = draw.randrange(len(shape)), draw.randint(1, 3)
        boxes += [cut(box, dim, count, index) for index in range(count)]
    if draw.random() < 0.3:
        boxes.pop(draw.randrange(len(boxes)))
    if shape and draw.random() < 0.4:
        offset = tuple(draw.randrange(size) for size in shape)
        ends = (draw.randint(at, n) for at, n in zip(offset, shape, strict=True))
        boxes.append(Box(offset, tuple(end - at for at, end in zip(offset, ends, strict=True))))
    draw.shuffle(boxes)
    return shape, boxes


def test_cover_problem_agrees_with_a_count_of_every_element():
    draw, seen = random.Random(3), {"covered": 0, "overlap": 0, "hole": 0}
    for _ in range(600):
        shape, boxes = random_boxes(draw)
        count = np.zeros(shape, dtype=int)
        for box in boxes:
            assert not outside(box, shape)
            count[box.within(Box((0,) * len(shape), shape))] += 1
        problem, case = cover_problem(shape, boxes), (shape, [*map(str, boxes)])
        if (count > 1).any():
            seen["overlap"] += 1
            assert problem is not None and "overlap" in problem, case
        elif (count == 0).any():
            seen["hole"] += 1
            first = [int(at) for at in np.argwhere(count == 0)[0]]
            assert problem == (
                f"boxes hold {count.sum()} of its {count.size} elements, not the one at {first}"
            ), case
        else:
            seen["covered"] += 1
            assert problem is None, case
    assert min(seen.values()) > 50, seen


# Whole training runs.

MODEL = ModelConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=4, num_experts=4, moe_intermediate_size=8,
    scoring_func="sigmoid", correction_bias=True, correction_bias_update_rate=0.05,
)  # fmt: skip
DEEP = replace(MODEL, num_hidden_layers=4)
TIED = replace(DEEP, tie_word_embeddings=True)
RUNS = {
    "tp2 dp2": (4, ParallelConfig(tp=2, dp_shard=2)),
    "pp2 ep2": (4, ParallelConfig(pp=2, dp_shard=2, ep=2)),
    "cp2": (2, ParallelConfig(cp=2)),
    "one process": (1, ParallelConfig()),
    "tp1 dp4": (4, ParallelConfig(dp_shard=4)),
    "tp4": (4, ParallelConfig(tp=4)),
    "dp4 zero 3": (4, ParallelConfig(dp_shard=4, zero=3)),
    "pp2 tp2": (4, ParallelConfig(pp=2, tp=2)),
    "ep4 zero 1": (4, ParallelConfig(dp_shard=4, ep=4, zero=1)),
    "dp3 zero 2": (3, ParallelConfig(dp_shard=3, zero=2)),
    "dp2 tp2 ep2 zero 3": (4, ParallelConfig(dp_shard=2, tp=2, ep=2, zero=3)),
    "rep2 dp2 zero 2": (4, ParallelConfig(dp_replicate=2, dp_shard=2, zero=2)),
    "dp2 cp2 ep4 zero 1": (4, ParallelConfig(dp_shard=2, cp=2, ep=4, zero=1)),
    "pp2 zero 1": (4, ParallelConfig(pp=2, dp_shard=2, zero=1)),
    "pp2 zbv": (2, ParallelConfig(pp=2, schedule="zbv")),
}
SOURCES, TARGETS = [*RUNS][:3], [*RUNS][3:10]
FURTHER = 2
"""Steps after the save; those of the run that went on are what a resumed run must give."""


class Samples:
    """Twelve samples a step, with unequal token counts, for one rank of `batch`."""

    def __init__(self, mesh: Mesh, micro: int) -> None:
        self.mesh, self.micro, self.samples_consumed = mesh, micro, 0

    def next_step(self) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.samples_consumed)
        ids = torch.randint(0, 50, (12, 17), generator=generator)
        labels = ids[:, 1:].clone()
        for sample in range(12):
            labels[sample, : (5 * sample) % 16] = -100
        self.samples_consumed += 12
        own = [t.chunk(self.mesh.size("batch"))[self.mesh.index("batch")] for t in (ids, labels)]
        pieces = zip(own[0][:, :-1].split(self.micro), own[1].split(self.micro), strict=True)
        return [{"input_ids": ids, "labels": labels} for ids, labels in pieces]


def runtime_of(rank: int, layout: str, model: ModelConfig) -> Runtime:
    parallel = RUNS[layout][1]
    config = Config(
        precision="fp64", model=model, parallel=parallel,
        data=DataConfig(seq_len=16, global_batch_size=12),
        optim=OptimConfig(lr=1e-2, warmup_steps=6, max_grad_norm=0.5), run=RunConfig(max_steps=10),
    )  # fmt: skip
    device = torch.device("cpu")
    mesh = build_mesh(parallel, device=device, local_rank=rank, comm_timeout=60.0)
    chunks, shards = build_chunks(config, mesh)
    pipeline = None
    if parallel.pp > 1:
        from curry_train.parallel.pipeline_parallel import build_pipeline

        pipeline = build_pipeline(config, chunks, mesh)
    optimizer = build_optimizer([(s.name, s.owned) for s in shards], config.optim)
    corpus = SimpleNamespace(hash="d", tokenizer=ByteTokenizer())
    return Runtime(
        chunks[0], optimizer, mean_loss, Samples(mesh, 1 if parallel.pp > 1 else 2), device, mesh,
        config, corpus, chunks=chunks, shards=shards, pipeline=pipeline,
    )  # fmt: skip


def truth_of(path: Path) -> dict[str, Tensor]:
    """Put all of a checkpoint together without the code that loads one."""
    manifest, tensors = dcp.read_manifest(path), {}
    files = {
        f["name"]: load_file(path / f["name"]) for f in manifest["files"] if "tens" in f["name"]
    }
    for name, entry in manifest["tensors"].items():
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for chunk in entry["chunks"]:
            box = Box(tuple(chunk["offset"]), tuple(chunk["shape"]))
            index = box.within(Box((0,) * whole.dim(), tuple(whole.shape)))
            whole[index] = files[chunk["file"]][chunk["key"]]
        tensors[name] = whole
    return tensors


def gaps(held: dict[str, Any], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return how far this rank's part of each tensor is from the whole one; NaN is infinite."""
    found = {}
    for name, value in held.items():
        part = as_part(value)
        box = Box(tuple(part.offset), tuple(part.tensor.shape))
        wanted = truth[name][box.within(Box((0,) * len(part.shape), tuple(part.shape)))]
        gap = (part.tensor - wanted).abs().nan_to_num(nan=math.inf)
        found[name] = float(gap.max()) if gap.numel() else 0.0
    return found


def assert_holds(runtime: Runtime, truth: dict[str, Tensor]) -> int:
    """Compare every part of a rank, and second copies of tied weights, with whole tensors."""
    assert not {
        name: gap for name, gap in gaps(training_tensors(runtime), truth).items() if gap != 0.0
    }
    tied = [shard for shard in runtime.shards if shard.tied]
    first, states = {s.name: s for s in runtime.shards if not s.tied}, runtime.optimizer.state
    for copy in tied:
        source = first[copy.name]
        assert torch.equal(copy.local.tensor, source.local.tensor)
        assert all(torch.equal(states[copy.owned][k], states[source.owned][k]) for k in MOMENTS)
    return len(tied)


def further(runtime: Runtime) -> list[float]:
    """Take some steps; return loss, gradient norm and learning rate of each."""
    outs = [train_step(runtime) for _ in range(FURTHER)]
    return [number for out in outs for number in (out.loss, out.grad_norm, out.lr)]


def draws() -> list[float]:
    """Draw from every generator of this rank."""
    return [float(torch.rand(1)), random.random(), float(np.random.random())]


def save_run(rank: int, world: int, folder: Path, layout: str, model: ModelConfig) -> Any:
    """Take two steps, save, and say what the next give; save the end as well."""
    seed_everything(11, rank)
    runtime = runtime_of(rank, layout, model)
    train_step(runtime), train_step(runtime)
    draws()
    run = SimpleNamespace(dir=folder, event=lambda *args, **fields: None)
    path = training_state.save(runtime, run)
    if runtime.mesh.group("world") is not None:
        dist.barrier()
    assert_holds(runtime, truth_of(path))
    numbers, drawn = further(runtime), draws()
    training_state.save(runtime, run)
    return str(path), numbers, drawn


def load_run(
    rank: int, world: int, saved: list[tuple[Path, Any]], layout: str, model: ModelConfig
) -> Any:
    """Restore every checkpoint, the first into a fresh runtime, and go on as its run did."""
    runtime, all_numbers = runtime_of(rank, layout, model), []
    for path, drawn in saved:
        seed_everything(7, rank)
        training_state.restore(runtime, path)
        assert (runtime.step, runtime.batches.samples_consumed) == (2, 24)
        assert {float(state["step"]) for state in runtime.optimizer.state.values()} == {2.0}
        tied = assert_holds(runtime, truth_of(path))
        assert tied == (layout == "pp2 zbv" and model is TIED and rank == 0)
        all_numbers.append(further(runtime))
        if rank < len(drawn):
            assert draws() == drawn[rank], "the random states are not those of the save"
        off = gaps(training_tensors(runtime), truth_of(path.with_name("step-00000004")))
        worst = max((name for name in off if not name.startswith("optim.")), key=off.__getitem__)
        # AdamW moves a weight without gradient by the sign of rounding errors, of a share of lr.
        assert off[worst] <= 1e-9, (worst, off[worst])
        biases = [name for name in off if name.endswith("e_score_correction_bias")]
        assert not any(off[name] for name in biases), "the correction bias moved otherwise"
    return all_numbers


def on_run(function: Any, layout: str, *args: Any) -> list[Any]:
    world = RUNS[layout][0]
    return run_ranks(function, world, *args) if world > 1 else [function(0, 1, *args)]


class Saved(NamedTuple):
    """Checkpoints of a model from several layouts. numbers: of the steps after each save."""

    model: ModelConfig
    layouts: list[str]
    paths: list[Path]
    numbers: list[list[float]]
    drawn: list[list[list[float]]]


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory) -> Saved:
    """Save once from every layout of a group; all targets load the same files."""
    model, sources, targets = GROUPS[request.param]
    paths, numbers, drawn = [], [], []
    for layout in sources:
        folder = tmp_path_factory.mktemp("run")
        answers = on_run(save_run, layout, folder, layout, model)
        assert all(answer[:2] == answers[0][:2] for answer in answers)
        paths.append(Path(answers[0][0]))
        numbers.append(answers[0][1])
        drawn.append([answer[2] for answer in answers])
    return Saved(model, targets, paths, numbers, drawn)


GROUPS = {
    "named": (MODEL, SOURCES, TARGETS),
    "deep": (DEEP, *[["one process", *[*RUNS][10:]]] * 2),
    # Tied ends of a pipeline must be on one rank, as in a V; two more show the rest.
    "tied": (TIED, *[["one process", "dp2 tp2 ep2 zero 3", "pp2 zbv"]] * 2),
}
every_group = pytest.mark.parametrize("saved", GROUPS, indirect=True)


@every_group
@pytest.mark.sampled(3)
def test_a_run_goes_on_in_another_layout_with_every_bit_and_the_same_steps(saved):
    assert np.allclose(saved.numbers, saved.numbers[0], rtol=1e-9, atol=0)
    loaded = [*zip(saved.paths, saved.drawn, strict=True)]
    for layout in saved.layouts:
        for found in on_run(load_run, layout, loaded, layout, saved.model):
            assert np.allclose(found, saved.numbers, rtol=1e-10, atol=0), layout


@every_group
@pytest.mark.sampled(3)
def test_every_layout_saves_the_names_and_numbers_of_one_process(saved):
    wanted, *others = (truth_of(path) for path in saved.paths)
    assert any(name.endswith("e_score_correction_bias") for name in wanted)
    assert wanted["model.embed_tokens.weight"].shape == (50, 16)
    for found in others:
        assert_same(found, wanted, tolerance=1e-9)


@every_group
@pytest.mark.sampled(3)
def test_one_process_reads_the_model_of_any_layout(saved):
    for path in saved.paths:
        model, _, seq_len = training_state.load_for_inference(path)
        assert seq_len == 16
        truth = truth_of(path)
        state = dict(named_state(model))
        assert all(torch.equal(tensor, truth[name]) for name, tensor in state.items())


def test_weights_of_another_dtype_start_a_run_in_any_layout(tmp_path):
    (path, *_), *_ = [save_run(0, 1, tmp_path, "one process", MODEL)]
    half = convert(Path(path), tmp_path / "half", weights_only=True, dtype="bfloat16")
    truth = {name: tensor.double() for name, tensor in truth_of(half).items()}
    model, _, _ = training_state.load_for_inference(half)
    assert all(torch.equal(t.double(), truth[name]) for name, t in named_state(model))
    assert on_run(begin_run, "pp2 tp2", half, "pp2 tp2") == [True] * 4


def begin_run(rank: int, world: int, half: Path, layout: str) -> bool:
    """Start from weights alone, in float64, and compare what this rank holds with the file."""
    runtime = runtime_of(rank, layout, MODEL)
    run = replace(runtime.config.run, init_from=str(half))
    runtime.config = replace(runtime.config, run=run)
    training_state.begin(runtime, SimpleNamespace(checkpoint=None))
    truth = {name: tensor.double() for name, tensor in truth_of(half).items()}
    return not any(gaps(training_state.weight_tensors(runtime), truth).values())


# Mutants: a load that loses or mixes something is seen by the tensors and by the next steps.

ROUTER = "e_score_correction_bias"


def without(word: str) -> Any:
    """Return a reader that leaves tensors as they are whose names hold a word."""

    def read(folder: Path, parts: dict[str, Part], tensors: dict[str, Any]) -> None:
        storage.read_parts(folder, {n: p for n, p in parts.items() if word not in n}, tensors)

    return read


def swapped(folder: Path, parts: dict[str, Part], tensors: dict[str, Any]) -> None:
    """Read the two halves of a projection each in the other's place."""
    tensors = deepcopy(tensors)
    first, *_, last = tensors["model.layers.1.self_attn.q_proj.weight"]["chunks"]
    first["file"], last["file"] = last["file"], first["file"]
    first["key"], last["key"] = last["key"], first["key"]
    storage.read_parts(folder, parts, tensors)


def forgetting(**values: Any) -> Any:
    """Return a restore after which some counter is as in a fresh run."""
    restore = training_state.restore

    def forget(runtime: Runtime, checkpoint: Path) -> None:
        restore(runtime, checkpoint)
        for name, value in values.items():
            setattr(runtime.batches if name == "samples_consumed" else runtime, name, value)

    return forget


MUTANTS = {
    "a dropped moment": (dcp, "read_parts", without("optim.exp_avg_sq."), "tensors"),
    "a dropped first moment": (dcp, "read_parts", without("optim.exp_avg."), "tensors"),
    "a stale correction bias": (dcp, "read_parts", without(ROUTER), "tensors"),
    "swapped slices": (dcp, "read_parts", swapped, "tensors"),
    "a schedule from its begin": (training_state, "restore", forgetting(step=0), "position"),
    "data from its begin": (training_state, "restore", forgetting(samples_consumed=0), "position"),
    "random states of its own": (training_state, "set_rng", lambda tensors: None, "random"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("saved", ["named"], indirect=True)
def test_a_load_that_loses_something_is_seen(mutant, saved, monkeypatch):
    owner, name, wrong, seen = MUTANTS[mutant]
    path, drawn, numbers = saved.paths[0], saved.drawn[0], saved.numbers[0]
    load_run(0, 1, [(path, drawn)], "one process", saved.model)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        load_run(0, 1, [(path, drawn)], "one process", saved.model)
    runtime = runtime_of(0, "one process", saved.model)
    training_state.restore(runtime, path)
    same = np.allclose(further(runtime), numbers, rtol=1e-10, atol=0)
    assert same == (seen == "random"), "the next steps must tell as well"
