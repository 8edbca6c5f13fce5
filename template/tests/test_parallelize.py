"""Every layout starts from the values of one process, bitwise, and holds each of them once."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from curry_train.checkpoint.boxes import Box, cover_problem
from curry_train.compose import load_config
from curry_train.models import protocol
from curry_train.models.protocol import build_model, named_state, saved_parts
from curry_train.parallel.mesh import build_mesh
from curry_train.parallel.parallelize import build_chunks
from curry_train.testing import run_ranks

SIZES = (
    "model.hidden_size=24", "model.num_hidden_layers=4", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "model.head_dim=4", "model.intermediate_size=10",
    "model.moe_intermediate_size=3", "data.seq_len=16", "accelerator=cpu",
)  # fmt: skip
# Blocks of experts behind a dense one, every kind of bias, and a vocabulary of 300 in 320 rows.
RICH = (
    "model.num_experts=4", "model.first_k_dense_replace=1", "model.vocab_size=300",
    "model.shared_expert_intermediate_size=6", "model.expert_bias=true", "model.router_bias=true",
    "model.attention_bias=true", "model.attention_sinks=true", "model.correction_bias=true",
    "model.scoring_func=sigmoid", "model.num_hidden_layers=4",
)  # fmt: skip
LATENT = (
    "model.num_experts=4", "model.kv_lora_rank=6", "model.q_lora_rank=5", "model.qk_norm=false",
    "model.qk_nope_head_dim=4", "model.qk_rope_head_dim=4", "model.v_head_dim=4",
    "model.num_key_value_heads=4",
)  # fmt: skip
TIED = ("model.tie_word_embeddings=true", "model.num_experts=4")
SPIKING = ("model=tiny_spiking", "accelerator=cpu", "data.seq_len=16", "model.hidden_size=24",
           "model.intermediate_size=10")  # fmt: skip
CASES = {
    "tp2": (2, RICH, "tp=2"),
    "ep2": (2, RICH, "ep=2"),
    "cp2 tp2 ep4": (4, RICH, "cp=2 tp=2 ep=4"),
    "dp3 zero1": (3, RICH, "zero=1"),
    "dp3 zero2": (3, RICH, "zero=2"),
    "dp5 zero3": (5, RICH, "zero=3"),
    "HSDP ep2 zero3": (4, RICH, "dp_replicate=2 ep=2 zero=3"),
    "dp2 tp2 zero3": (4, RICH, "tp=2 zero=3"),
    "pp2": (2, RICH, "pp=2"),
    "pp2 zbv tp2": (4, RICH, "pp=2 tp=2 schedule=zbv"),
    "interleaved zero3": (4, RICH, "pp=2 schedule=interleaved1f1b zero=3"),
    "latent tp2": (2, LATENT, "tp=2"),
    "tied tp2": (2, TIED, "tp=2"),
    "tied zero3": (3, TIED, "zero=3"),
    "tied zbv": (2, TIED, "pp=2 schedule=zbv"),
    "tied dualpipev zero2": (4, TIED, "pp=2 schedule=dualpipev zero=2"),
    "spiking zero0": (2, SPIKING, "zero=0"),
    "spiking zero1": (3, SPIKING, "zero=1"),
    "spiking zero2": (3, SPIKING, "zero=2"),
    "spiking HSDP zero3": (4, SPIKING, "dp_replicate=2 zero=3"),
}


def config_of(case: str, **changes):
    world, model, layout = CASES[case]
    words = [f"parallel.{word}" for word in layout.split()]
    base = () if model is SPIKING else SIZES
    batch = "data.global_batch_size=120"
    config = load_config([*base, *model, *words, batch, f"devices={world}"])
    return replace(config, **changes)


def held(rank, world, case, changes):
    """Return (name, offset, values, tied) of every box of the rank, and of its padding."""
    config = config_of(case, **changes)
    mesh = build_mesh(
        config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60.0
    )
    torch.manual_seed(rank)  # whatever was drawn before must not matter
    chunks, shards = build_chunks(config, mesh)
    holder = {id(p): chunk for chunk in chunks for p in chunk.parameters()}
    assert len(holder) == len(shards), "a shard for each parameter"
    boxes, padding = [], 0.0
    for shard in shards:
        chunk = holder[id(shard.parameter)]
        for name, (tensor, shape, offset) in saved_parts(chunk, shard.name, shard.local).items():
            boxes.append((name, shape, offset, tensor.detach().numpy().copy(), shard.tied))
        if shard.name in chunk.vocab_parameters:
            first = max(chunk.vocab_size - shard.local.offset[0], 0)
            padding += float(shard.local.tensor[first:].abs().sum())
        own = shard.own.tensor
        assert isinstance(own, torch.nn.Parameter) and not hasattr(own, "to_local")
        assert shard.own.shape == shard.local.shape == tuple(shard.parameter.shape)
    buffers = [(n, b.numpy().copy()) for chunk in chunks for n, b in chunk.named_buffers()]
    return boxes, padding, buffers


def check(case: str, **changes) -> None:
    whole = dict(named_state(build_model(config_of(case, **changes), "cpu")))
    covered: dict[str, set[Box]] = defaultdict(set)
    for boxes, padding, buffers in run_ranks(held, CASES[case][0], case, changes):
        assert padding == 0.0, "rows that no id reaches are zero"
        for name, shape, offset, values, _ in boxes:
            wanted = whole[name].numpy()
            assert shape == wanted.shape, name
            inside = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
            assert np.array_equal(values, wanted[inside]), name
            covered[name].add(Box(tuple(offset), values.shape))
        for name, values in buffers:
            assert np.array_equal(values, whole[name].numpy()), name
            covered[name].add(Box((0,) * values.ndim, values.shape))
    assert covered.keys() == whole.keys()
    for name, found in covered.items():
        assert cover_problem(tuple(whole[name].shape), found) is None, name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(3)
def test_values_at_the_start_are_those_of_one_process(case):
    check(case)


def test_another_seed_gives_other_values_on_every_layout():
    one, other = (build_model(config_of("tp2", seed=seed), "cpu") for seed in (0, 1))
    name = "model.layers.1.mlp.experts.gate_up_proj.weight"
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
    check("tp2", seed=1)


def test_both_copies_of_a_tied_weight_on_a_rank_are_one_parameter_or_equal():
    tied = [
        [(name, values.tobytes(), tied) for name, *_, values, tied in boxes if "embed" in name]
        for boxes, *_ in run_ranks(held, 2, "tied zbv", {})
    ]
    first, second = tied[0]
    assert first[0] == second[0] == "model.embed_tokens.weight" and first[1] == second[1]
    assert (first[2], second[2]) == (False, True) and tied[1] == []


def planted(rank, world, mutant):
    if mutant == "one generator for all":
        generator = torch.Generator().manual_seed(0)
        protocol.generator_for = lambda seed, name: generator
    else:

        def draw(shape, std, generator):
            values = real(shape, std, generator)
            return values.flip(0) if rank else values

        real, protocol._normal = protocol._normal, draw
    boxes = held(rank, world, "tp2", {})[0]
    return [(name, offset, values.tobytes(), values.shape) for name, _, offset, values, _ in boxes]


@pytest.mark.parametrize("mutant", ["one generator for all", "another draw on another rank"])
def test_values_that_depend_on_the_rank_or_the_order_are_found(mutant):
    whole = dict(named_state(build_model(config_of("tp2"), "cpu")))
    wrong = 0
    for boxes in run_ranks(planted, 2, mutant):
        for name, offset, values, shape in boxes:
            inside = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
            wrong += whole[name][inside].contiguous().numpy().tobytes() != values
    assert wrong > 10
