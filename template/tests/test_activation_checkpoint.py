"""Recomputation changes what is kept and how often an op runs, and not one bit of a gradient."""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from curry_train.config import Config, ModelConfig
from curry_train.layers.attention import positions_of
from curry_train.loss import token_sums
from curry_train.models.protocol import build_model
from curry_train.models.spiking import SpikingConfig
from curry_train.parallel import activation_checkpoint
from curry_train.parallel.activation_checkpoint import (
    kind_of,
    message,
    recompute_blocks,
    recompute_part,
)
from curry_train.testing import assert_same, run_ranks

SETTINGS = ("selective", 2, "full")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 65}
MOE = ModelConfig(
    num_hidden_layers=3, num_experts=4, moe_intermediate_size=24, router_z_loss_coef=0.01, **SMALL
)
FAMILIES = {
    "dense": ModelConfig(num_hidden_layers=3, **SMALL),
    "moe": MOE,
    "latent": replace(
        MOE, qk_norm=False, kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4, first_k_dense_replace=1,
        shared_expert_intermediate_size=64, scoring_func="sigmoid", correction_bias=True,
        rope_interleave=True,
    ),
    "gpt_oss": replace(
        MOE, qk_norm=False, attention_bias=True, attention_sinks=True, sliding_window=6,
        sliding_window_pattern=2, expert_bias=True, router_bias=True, swiglu_limit=0.7,
    ),
    "spiking": SpikingConfig(
        num_hidden_layers=3, time_steps=3, hidden_size=32, intermediate_size=48, vocab_size=65
    ),
}  # fmt: skip


class Watch(TorchDispatchMode):
    """Count ops, and the bytes that they made and that are still there."""

    def __init__(self):
        super().__init__()
        self.ops, self.seen = Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.note((args, kwargs), made_here=False)
        out = func(*args, **(kwargs or {}))
        self.note(out, made_here=True)
        self.ops[func.name().partition(".")[0]] += 1
        return out

    def note(self, tree, made_here):
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                size = storage.nbytes() if made_here else 0
                self.seen.setdefault(reference.cdata, (reference, size))

    def alive(self):
        return sum(size for reference, size in self.seen.values() if not reference.expired())


@torch.no_grad()
def model_of(family, precision="fp64"):
    model = build_model(Config(precision=precision, model=FAMILIES[family]), "cpu")
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter) / max(parameter.dim(), 1)
    return model


def batch_of(length=16, batch=2, vocab=65):
    ids = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    labels[0, : length // 2] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def step(model, batch=None):
    """Return what one forward and backward pass gives, and what the watch saw of it."""
    model.zero_grad(set_to_none=True)
    watch = Watch()
    with watch:
        sums = token_sums(model, batch or batch_of())
        kept = watch.alive()
        sums.total.backward()
    return sums, {name: p.grad for name, p in model.named_parameters()}, kept, watch.ops


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_equal_bit_for_bit(family, precision):
    model = model_of(family, precision)
    names = [name for name, _ in model.named_parameters()]
    plain, wanted, _, _ = step(model)
    for recompute in SETTINGS:
        recompute_blocks(model.layers, recompute)
        sums, found, _, _ = step(model)
        assert_same(found, wanted, tolerance=0)
        for field in ("nll", "aux", "z", "count", "tokens_per_expert"):
            value = getattr(plain, field)
            assert value is None or torch.equal(getattr(sums, field), value)
    assert [name for name, _ in model.named_parameters()] == names


def block_bytes(family, recompute, precision):
    """Return the bytes that the blocks alone keep of 128 tokens."""
    config = FAMILIES[family]
    model = build_model(
        Config(precision=precision, model=replace(config, num_hidden_layers=4)), "cpu"
    )
    recompute_blocks(model.layers, recompute)
    positions = positions_of(config, torch.arange(64)[None], None, model.compute_dtype)
    x = torch.randn(2, 64, config.hidden_size, dtype=model.compute_dtype, requires_grad=True)
    watch, routings = Watch(), []
    with watch:
        for block in model.layers.values():
            x, routing = block(x, positions)
            routings.append(routing)
    return watch.alive()


@pytest.mark.parametrize(
    ("family", "precision", "shares"),
    [
        ("moe", "fp32", (0.60, 0.54, 0.07)),
        ("dense", "fp32", (0.50, 0.53, 0.05)),
        ("moe", "bf16", (0.39, 0.53, 0.05)),
        ("dense", "bf16", (0.38, 0.53, 0.04)),
    ],
)
def test_the_bytes_kept_fall_to_a_known_share(family, precision, shares):
    plain = block_bytes(family, "none", precision)
    found = [block_bytes(family, recompute, precision) / plain for recompute in SETTINGS]
    assert found == pytest.approx(shares, abs=0.01)
    assert 1 > max(found[:2]) and min(found[:2]) > found[2]


def test_full_runs_dear_ops_twice_and_selective_once():
    model = model_of("moe")
    counts = {}
    for recompute in ("none", *SETTINGS):
        recompute_blocks(model.layers, recompute)
        counts[recompute] = step(model)[3]
    experts = {key: ops["curry_train::moe_experts"] for key, ops in counts.items()}
    assert experts == {"none": 3, "selective": 3, 2: 4, "full": 6}
    for op in ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"):
        assert counts["selective"][op] == counts["none"][op] < counts["full"][op]
    dense = model_of("dense")
    products = step(dense)[3]["aten::mm"]
    recompute_blocks(dense.layers, "full")
    again = step(dense)[3]["aten::mm"] - products
    assert again == 3 * 6, "q, k, v, o, gate and up; nothing waits for what down returned"
    assert counts["selective"]["aten::rsqrt"] == 2 * counts["none"]["aten::rsqrt"] - 1


def test_every_nth_block_goes_by_the_global_index():
    assert [kind_of(2, index) for index in range(4)] == ["none", "full", "none", "full"]
    assert [kind_of(1, index) for index in range(2)] == ["full", "full"]
    assert [kind_of("selective", index) for index in range(2)] == ["selective"] * 2
    assert {kind_of(9, index) for index in range(8)} == {"none"}, "more than there are blocks: none"
    model = model_of("moe")
    second_stage = nn.ModuleDict({key: model.layers[key] for key in ("1", "2")})
    recompute_blocks(second_stage, 2)
    assert ["forward" in vars(block) for block in second_stage.values()] == [True, False]


def test_the_last_call_counts_and_evaluation_keeps_nothing(monkeypatch):
    model = model_of("dense")
    for recompute in ("full", "selective", "full"):
        recompute_blocks(model.layers, recompute)
    assert step(model)[3]["aten::rsqrt"] == step(copy.deepcopy(model))[3]["aten::rsqrt"]
    ops = step(model)[3]["aten::rsqrt"]
    recompute_blocks(model.layers, "none")
    assert step(model)[3]["aten::rsqrt"] < ops
    recompute_blocks(model.layers, "full")
    watch = Watch()
    monkeypatch.setattr(activation_checkpoint, "_Region", None)
    with torch.no_grad(), watch:
        logits = model(batch_of()["input_ids"]).logits
    assert watch.alive() == logits.untyped_storage().nbytes()


def test_a_copy_of_a_model_runs_its_own_blocks():
    model = model_of("dense")
    recompute_blocks(model.layers, "full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert step(twin)[1]["model.layers.0.mlp.up_proj.weight"].abs().max() > 0


class Noisy(nn.Module):
    """A block with dropout that also counts what it sees, in a buffer and in its result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, positions):
        self.seen += x.shape[0]
        dropped = nn.functional.dropout(self.linear(x).relu(), 0.5)
        return x + dropped, torch.tensor(x.shape[0])


def noisy_step(recompute):
    torch.manual_seed(3)
    layers = nn.ModuleDict({str(index): Noisy() for index in range(3)})
    recompute_blocks(layers, recompute)
    x, seen = torch.randn(5, 8, dtype=torch.float64), 0
    for block in layers.values():
        x, rows = block(x, None)
        seen += int(rows)
    x.square().sum().backward()
    grads = {name: p.grad for name, p in layers.named_parameters()}
    return grads, torch.get_rng_state(), seen, [int(block.seen) for block in layers.values()]


@pytest.mark.parametrize("recompute", SETTINGS)
def test_dropout_is_drawn_again_and_the_random_state_is_untouched(recompute):
    wanted, state, _, _ = noisy_step("none")
    grads, after, seen, _ = noisy_step(recompute)
    assert_same(grads, wanted, tolerance=0)
    assert torch.equal(after, state)
    assert seen == 15, "the value of the first run stands"


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_autocast_of_the_first_run_holds_in_the_second(kind):
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def through(x):
        return second(first(x).relu())

    found = []
    for run in (through, partial(recompute_part, kind, through)):
        first.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = run(torch.linspace(-1, 1, 32).view(4, 8).requires_grad_())
        out.float().square().sum().backward()
        found.append(first.weight.grad.clone())
    assert torch.equal(*found)


def test_mutant_a_count_kept_on_the_module_is_doubled():
    """Why tokens_per_expert is a value that the forward pass returns."""
    assert noisy_step("none")[3] == [5, 5, 5]
    assert noisy_step("full")[3] == [10, 10, 10]


def test_mutant_a_fresh_draw_gives_other_gradients():
    def forgetful(function, *args):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    layer = Noisy()
    x = torch.randn(5, 8, dtype=torch.float64)
    found = []
    for run in (partial(recompute_part, "full"), forgetful):
        torch.manual_seed(0)
        layer.zero_grad()
        run(layer, x, None)[0].sum().backward()
        found.append(layer.linear.weight.grad.clone())
    assert not torch.equal(*found)


def test_mutant_a_late_bound_closure_computes_with_another_value():
    """Equal shapes, no message, wrong gradients; arguments are right."""
    scales = [torch.full((4,), value, dtype=torch.float64) for value in (1.0, 2.0, 3.0)]
    start = torch.linspace(1, 2, 4, dtype=torch.float64)

    def gradient(run):
        x = leaf = start.clone().requires_grad_()
        for scale in scales:
            x = run(x, scale)
        (grad,) = torch.autograd.grad(x.sum(), leaf)
        return grad

    def late(x, scale):
        held["scale"] = scale
        return recompute_part("full", lambda y: (y * held["scale"]).sin(), x)

    held = {}
    right = gradient(lambda x, scale: (x * scale).sin())
    passed = gradient(partial(recompute_part, "full", lambda x, scale: (x * scale).sin()))
    assert torch.equal(passed, right)
    assert (gradient(late) - right).abs().max() > 0.1


def test_mutant_reentrant_loses_what_a_dataclass_carries():
    """The gradient of the balance loss vanishes without a word, and frozen inputs stop it all."""
    config = replace(FAMILIES["moe"], router_aux_loss_coef=10.0)
    model = build_model(Config(precision="fp64", model=config), "cpu")
    _, wanted, _, _ = step(model)
    recompute_blocks(model.layers, "full")
    assert_same(step(model)[1], wanted, tolerance=0)
    for block in model.layers.values():
        plain = type(block).forward.__get__(block)
        block.forward = partial(checkpoint, plain, use_reentrant=True)
    with pytest.raises(AssertionError, match="error"):
        assert_same(step(model)[1], wanted, tolerance=1e-3)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        token_sums(model, batch_of()).total.backward()
    assert all(p.grad is None for p in model.layers.parameters())
    recompute_blocks(model.layers, "full")
    token_sums(model, batch_of()).total.backward()
    assert all(p.grad is not None for p in model.layers.parameters())


def test_what_differs_the_second_time_is_an_error_that_names_the_function():
    def growing(x):
        calls.append(1)
        return (torch.cat([x] * len(calls)).sin()).sum()

    def forgetting(x):
        calls.append(1)
        return x.sin().sum() if len(calls) == 1 else x.sum()

    for function, words in ((growing, r"\[8\], not \[4\]"), (forgetting, "fewer tensors")):
        calls = []
        out = recompute_part("full", function, torch.ones(4, requires_grad=True))
        with pytest.raises(
            RuntimeError, match=rf"{function.__name__} made {words}.*recompute=none"
        ):
            out.backward()


def test_selective_refuses_a_kept_result_that_was_written_over():
    def overwrites(x, weight):
        out = x @ weight
        out.add_(1)
        return out.sin()

    x, weight = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="mutated"):
        recompute_part("selective", overwrites, x, weight).sum().backward()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", SETTINGS)
@pytest.mark.sampled(3)
def test_a_split_backward_makes_each_block_again_once(family, recompute):
    """As zero-bubble schedules do: one call for the input, one for each group of weights."""
    model = model_of(family)
    config = FAMILIES[family]
    positions = model_positions(model, config)
    start = torch.randn(2, 8, 32, dtype=torch.float64)
    if family == "spiking":
        start = start.repeat(config.time_steps, 1, 1)

    def split_step():
        model.zero_grad(set_to_none=True)
        x = leaf = start.clone().requires_grad_()
        aux = 0
        for block in model.layers.values():
            x, routing = block(x, positions)
            aux = aux + (0 if routing is None else routing.aux_loss.sum())
        watch = Watch()
        out = x.square().sum() + aux
        weights = [p for p in model.layers.parameters() if p.requires_grad]
        with watch:
            (grad,), groups = stage_backward_input([out], None, [leaf], iter(weights))
            stage_backward_weight(iter(weights), groups)
        return {"input": grad} | {n: p.grad for n, p in model.layers.named_parameters()}, watch.ops

    wanted, _ = split_step()
    recompute_blocks(model.layers, recompute)
    found, ops = split_step()
    assert_same(found, wanted, tolerance=0)
    again = sum(kind_of(recompute, index) == "full" for index in range(3))
    sparse = again - (family == "latent" and recompute == "full")
    if family not in ("dense", "spiking"):
        assert ops["curry_train::moe_experts"] == sparse


def model_positions(model, config):
    from curry_train.layers.attention import Positions

    if isinstance(config, SpikingConfig):
        nothing = torch.empty(0)
        return Positions(nothing, nothing, None)
    return positions_of(config, torch.arange(8)[None], None, model.compute_dtype)


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_the_five_parts_can_be_wrapped_one_by_one(family):
    """As the overlapped pipeline runs them, each part a graph of its own."""
    model = model_of(family)
    block = model.layers["2"]
    positions = model_positions(model, FAMILIES[family])
    start = torch.randn(2, 8, 32, dtype=torch.float64)

    def by_parts(kind):
        model.zero_grad(set_to_none=True)
        x = start.clone().requires_grad_()
        part = partial(recompute_part, kind)
        residual, tokens, routing = part(block.attention, x, positions)
        rows, here = part(block.dispatch, tokens, routing)
        out = part(block.experts, rows, here)
        out = block.combine(out, here) if takes_two(block.combine) else block.combine(out)
        part(block.aggregate, residual, out).square().sum().backward()
        return {"x": x.grad} | {n: p.grad for n, p in block.named_parameters()}

    wanted = by_parts("none")
    for kind in ("full", "selective"):
        assert_same(by_parts(kind), wanted, tolerance=0)


def takes_two(function):
    return function.__code__.co_argcount == 3


@pytest.mark.parametrize("family", ["dense", "moe", "spiking"])
@pytest.mark.sampled(3)
def test_compiled_blocks_give_the_same_gradients(family):
    torch._dynamo.reset()
    batch = batch_of()
    model = model_of(family)
    _, wanted, _, _ = step(model, batch)
    for recompute in ("selective", "full"):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        recompute_blocks(twin.layers, recompute)
        for block in twin.layers.values():
            block.compile(backend="aot_eager")
        twin.zero_grad(set_to_none=True)
        token_sums(twin, batch).total.backward()
        found = {name: p.grad for name, p in twin.named_parameters()}
        assert_same(found, wanted, tolerance=1e-12)
    torch._dynamo.reset()


SENT = Counter()


@message
def swap(x, group):
    SENT["all_to_all"] += 1
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


class Swap(torch.autograd.Function):
    """Exchange halves with the other rank, as dispatch and combine do."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return swap(x, group)

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


class Exchanging(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.second = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x, group):
        there = Swap.apply(self.first(x).tanh(), group)
        back = Swap.apply(self.second(there).tanh() * there, group)
        return x + back.sin(), None


def _exchange(rank, world, recompute, shard):
    group = dist.group.WORLD
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(index): Exchanging() for index in range(2)})
    recompute_blocks(layers, recompute)
    if shard:
        from torch.distributed.fsdp import fully_shard

        for block in layers.values():
            fully_shard(block, reshard_after_forward=True)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    for block in layers.values():
        x, _ = block(x, group)
    sent = SENT["all_to_all"]
    x.square().sum().backward()
    grads = {}
    for name, parameter in layers.named_parameters():
        grad = parameter.grad.full_tensor() if shard else parameter.grad
        grads[name] = grad.numpy()
    return sent, SENT["all_to_all"] - sent, grads


@pytest.mark.parametrize("shard", [False, True])
def test_messages_are_repeated_under_full_and_kept_under_selective(shard):
    plain = run_ranks(_exchange, 2, "none", shard)
    for recompute, again in (("full", 4), ("selective", 0), (2, 2)):
        found = run_ranks(_exchange, 2, recompute, shard)
        for (sent, repeated, grads), (_, _, wanted) in zip(found, plain, strict=True):
            assert (sent, repeated) == (4, again)
            assert all((grads[name] == wanted[name]).all() for name in wanted)
