"""Bytes of parameters, gradients and moments on every rank for zero 0 to 3, and who scales what."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from curry_train import parallel
from curry_train.compose import load_config
from curry_train.data import open_corpus
from curry_train.loss import token_sums
from curry_train.models.protocol import meta_model
from curry_train.parallel.data_parallel import fsdp_modules
from curry_train.parallel.dims import ParallelDims
from curry_train.parallel.mesh import build_mesh
from curry_train.runtime import Runtime, assemble
from curry_train.step import accumulate, forget_gradients, train_step
from curry_train.testing import run_ranks

# No size divides by three, and few by two.
SIZES = (
    "model.hidden_size=10", "model.num_hidden_layers=2", "model.num_attention_heads=2",
    "model.num_key_value_heads=2", "model.head_dim=4", "model.num_experts=4",
    "model.moe_intermediate_size=3", "model.shared_expert_intermediate_size=7",
    "data.seq_len=16", "data.global_batch_size=12", "data.micro_batch_size=1", "accelerator=cpu",
)  # fmt: skip
LAYOUTS = {
    "three": (3, {"dp_shard": 3}),
    "HSDP": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "efsdp": (4, {"dp_shard": 4, "ep": 2}),
    "HSDP ep": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
}


def config_of(*words: str):
    return load_config([*SIZES, *words])


def words_of(layout: str, zero: int, *more: str) -> tuple[str, ...]:
    world, axes = LAYOUTS[layout]
    axes = [f"parallel.{axis}={size}" for axis, size in axes.items()]
    return (f"devices={world}", *axes, f"parallel.zero={zero}", *more)


def runtime_of(rank: int, words: tuple[str, ...]) -> Runtime:
    config = config_of(*words)
    mesh = build_mesh(
        config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60.0
    )
    return assemble(config, open_corpus(config.data, cache_dir=None), mesh)


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in meta_model(config_of()).named_parameters()}


def expected(dims: ParallelDims, rank: int) -> tuple[int, int, int]:
    """Return elements that a rank has of whole tensors, of its rows of them, and of a first rank's.

    fully_shard keeps memory for as many rows as the first rank has, on every rank.
    """
    whole = rows = padded = 0
    for name, (first, *rest) in shapes().items():
        axis = "efsdp" if ".experts." in name else "fsdp"
        if axis == "efsdp":
            first //= dims.ep
        members = dims.members(axis, rank)
        own = torch.arange(first).chunk(len(members))
        index = members.index(rank)
        width = int(torch.tensor(rest).prod()) if rest else 1
        whole += first * width
        rows += (len(own[index]) if index < len(own) else 0) * width
        padded += len(own[0]) * width
    return whole, rows, padded


def size_of(tensors) -> int:
    """Return the bytes of the memory behind tensors, each piece of memory once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr() if storage.size() else 0] = storage.size()
    return sum(storages.values())


def gathered_bytes(model) -> int:
    """Return the bytes of the gathered parameters that fully_shard holds now."""
    groups = [module._get_fsdp_state()._fsdp_param_group for module in fsdp_modules(model)]
    params = [p for group in groups if group is not None for p in group.fsdp_params]
    return size_of(out for p in params for out in getattr(p, "all_gather_outputs", []))


def measured(rank, world, words):
    runtime = runtime_of(rank, words)
    parameters = [shard.parameter for shard in runtime.shards]
    before = size_of(parameters)
    grads = []
    for batch in runtime.batches.next_step()[:2]:
        token_sums(runtime.model, batch).total.backward()
        found = [p.grad for p in parameters if p.grad is not None]
        assert len(found) == len(parameters)
        grads.append(size_of(found))
    forget_gradients(runtime)
    train_step(runtime)
    moments = [
        size_of(state[name] for state in runtime.optimizer.state.values())
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return before, size_of(parameters), grads, moments, gathered_bytes(runtime.model)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(3)
def test_bytes_of_every_rank(layout, zero):
    world, axes = LAYOUTS[layout]
    dims = ParallelDims(**axes).resolve(world)
    found = run_ranks(measured, world, words_of(layout, zero))
    for rank, (before, after, grads, moments, gathered) in enumerate(found):
        whole, rows, padded = (4 * elements for elements in expected(dims, rank))
        kept = padded if zero >= 2 else whole
        assert (before, after) == (kept, kept), "parameters"
        assert grads == [kept, kept], "gradients after each micro-batch"
        assert moments == [rows if zero else whole] * 2, "moments"
        assert gathered == 0, "nothing stays gathered between steps"
    if zero:
        # All ranks that share a tensor hold it once; ranks of HSDP hold it as often as replicas.
        total = sum(4 * expected(dims, rank)[1] for rank in range(world))
        of_model = sum(4 * int(torch.tensor(s).prod()) for s in shapes().values())
        assert total == of_model * dims.dp_replicate
        assert sum(moments[0] for _, _, _, moments, _ in found) == total


def gathered_over_time(rank, world, words):
    runtime = runtime_of(rank, words)
    sums = token_sums(runtime.model, runtime.batches.next_step()[0])
    after_forward = gathered_bytes(runtime.model)
    sums.total.backward()
    return after_forward, gathered_bytes(runtime.model)


@pytest.mark.parametrize(
    ("zero", "more", "dropped"),
    [
        (2, (), False),
        (3, (), True),
        (3, ("parallel.reshard=false",), False),
        (2, ("parallel.reshard=true",), True),
    ],
    ids=["2", "3", "3 kept", "2 dropped"],
)
def test_gathered_parameters_are_dropped_after_forward(zero, more, dropped):
    # Gathered rows are padded to the same number on each rank: three of 320 are 321.
    of_blocks = of_rest = 0
    for name, (first, *rest) in shapes().items():
        elements = -(-first // 3) * 3 * (int(torch.tensor(rest).prod()) if rest else 1)
        if ".layers." in name:
            of_blocks += 4 * elements
        else:
            of_rest += 4 * elements
    for after_forward, after_backward in run_ranks(
        gathered_over_time, 3, words_of("three", zero, *more)
    ):
        # Embedding, last norm and head are used again at once, so the rest is never dropped.
        assert after_forward == of_rest + (0 if dropped else of_blocks)
        assert after_backward == 0


def handed_round(rank, world, words):
    runtime = runtime_of(rank, words)
    for _ in range(2):
        train_step(runtime)
    return {s.name: s.parameter.detach().numpy().tobytes() for s in runtime.shards}


def test_ranks_of_zero_1_end_a_step_with_bitwise_equal_weights():
    found = run_ranks(handed_round, 3, words_of("three", 1))
    assert found[0] == found[1] == found[2]
    start = run_ranks(lambda rank, world, words: {
        s.name: s.parameter.detach().numpy().tobytes() for s in runtime_of(rank, words).shards
    }, 3, words_of("three", 1))  # fmt: skip
    assert all(found[0][name] != start[0][name] for name in found[0]), "every weight moved"


class Reductions(TorchDispatchMode):
    """The dtypes in which gradients travel."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "reduce" in str(func):
            flat = torch.utils._pytree.tree_leaves(args)
            self.dtypes += [one.dtype for one in flat if isinstance(one, torch.Tensor)]
            self.operations.add(str(func))
        return func(*args, **(kwargs or {}))


def mixed(rank, world, words):
    runtime = runtime_of(rank, words)
    used = {}
    for name, module in runtime.model.named_modules():
        if name.endswith(("mlp.gate", "q_proj", "experts.down_proj", "embed_tokens", "lm_head")):

            def note(module, args, out, name=name):
                used[name] = module.weight.dtype

            module.register_forward_hook(note)
        elif name.endswith("mlp.experts"):

            def note_bank(module, args, name=name):
                used[name] = module.down_proj.weight.dtype

            module.register_forward_pre_hook(note_bank)
    batch = runtime.batches.next_step()[0]
    sums = token_sums(runtime.model, batch)
    with Reductions() as reductions:
        sums.total.backward()
    stored = {s.parameter.dtype for s in runtime.shards} | {
        s.parameter.grad.dtype for s in runtime.shards
    }
    forget_gradients(runtime)
    train_step(runtime)
    moments = {
        t.dtype for state in runtime.optimizer.state.values() for t in state.values() if t.dim()
    }
    return (
        used,
        stored,
        moments,
        set(reductions.dtypes) - {torch.int64},
        sorted(reductions.operations),
    )


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("layout", ["three", "HSDP"])
def test_bf16_computes_in_bf16_and_keeps_reduces_and_routes_in_float32(layout, zero):
    world = LAYOUTS[layout][0]
    for used, stored, moments, reduced, operations in run_ranks(
        mixed, world, words_of(layout, zero, "precision=bf16")
    ):
        gates = {name for name in used if name.endswith("gate")}
        assert len(gates) == 2 and {used[name] for name in gates} == {torch.float32}
        rest = {used[name] for name in used.keys() - gates}
        assert len(used) == 10 and rest == {torch.bfloat16}, used
        assert stored == {torch.float32} and moments == {torch.float32}
        assert reduced == {torch.float32}, operations
        assert any("reduce_scatter" in name for name in operations)


def factors(rank, world, words):
    model = runtime_of(rank, words).model
    found = []
    for module in fsdp_modules(model):
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            found.append((group.gradient_divide_factor, group.force_sum_reduction_for_comms))
    return found, len(fsdp_modules(model))


def test_no_fully_sharded_module_divides_a_gradient():
    """Blocks, experts and the model under fp32; under bf16 routers, too."""
    for precision, modules in (("fp32", 5), ("bf16", 7)):
        words = words_of("HSDP ep", 3, f"precision={precision}")
        for found, count in run_ranks(factors, 4, words):
            assert count == modules
            assert set(found) == {(1.0, True)} and len(found) == count


SCALES = re.compile(
    r"ReduceOp\.(AVG|PREMUL)|\.grad\b.*[*/]|grad\w*\s*[*/]=|grads?\w*\.(div|mul)_?\(|"
    r"_foreach_(div|mul)|set_gradient_divide_factor"
)


def test_nothing_but_grads_finish_scales_a_gradient():
    """In all of parallel/: the one product of `finish`, and fully_shard's division switched off.

    The derivative of the vocabulary's loss is multiplied by the loss's, as any chain rule does.
    """
    found = []
    for path in sorted(Path(parallel.__path__[0]).glob("*.py")):
        for line in path.read_text().splitlines():
            if SCALES.search(line):
                found.append(f"{path.name}: {line.strip()}")
    assert found == [
        "data_parallel.py: module.set_gradient_divide_factor(1.0)",
        "grads.py: torch._foreach_mul_(owned, scale)",
        "tensor_parallel.py: grad *= grad_N.masked_fill(ignored, 0)[:, None]",
    ]
    pipeline = (Path(parallel.__path__[0]) / "pipeline_parallel.py").read_text()
    assert "scale_grads=False" in pipeline and "scale_grads=True" not in pipeline
    for planted in ("grad /= world", "p.grad.div_(mesh.size('tp'))", "op=dist.ReduceOp.AVG"):
        assert SCALES.search(planted), planted


def step_bytes(rank, world, words, mutant):
    if mutant == "full moments":
        import curry_train.runtime as module

        real = module.build_chunks

        def build(config, mesh):
            chunks, shards = real(config, mesh)
            for shard in shards:
                shard.own, shard.gathers = shard.local._replace(tensor=shard.parameter), None
            return chunks, shards

        module.build_chunks = build
    return measured(rank, world, words)


def test_the_measure_sees_moments_that_are_not_shared_out():
    whole, rows, _ = expected(ParallelDims(dp_shard=3).resolve(3), 0)
    assert whole > 2.7 * rows
    found = run_ranks(step_bytes, 3, words_of("three", 1), "full moments")
    assert found[0][3] == [4 * whole] * 2


def accumulated(rank, world, words):
    runtime = runtime_of(rank, words)
    accumulate(runtime, runtime.batches.next_step())
    return {s.name: tuple(s.parameter.grad.to_local().shape) for s in runtime.shards}


def test_gradients_stay_rows_over_all_micro_batches():
    for found in run_ranks(accumulated, 3, words_of("three", 3)):
        for name, shape in found.items():
            assert shape[0] <= -(-shapes()[name][0] // 3)
