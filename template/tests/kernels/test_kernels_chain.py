"""The expert bank through every kernel, interpreted, against the float64 loop over experts."""

from __future__ import annotations

import os
import random
from typing import NamedTuple

import interpreter_bf16
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from curry_train.kernels import dispatch
from curry_train.kernels.experts import experts

BF16 = torch.bfloat16
SEEDS = 80 if os.environ.get("CURRY_TRAIN_FULL") else 15
FLOOR = {torch.float32: 1e-6, torch.float16: 1e-3, BF16: 8e-3}
"""A relative error that is the rounding of the result, below which nothing is compared."""


class Problem(NamedTuple):
    """Inputs of the bank: x [T, D], ids and weights [T, K], w13 [E, 2F, D], w2 [E, D, F]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    bias13: torch.Tensor | None
    limit: float | None
    interleaved: bool

    def cast(self, dtype):
        """Return the same values in another dtype, as leaves."""
        values = [
            v.detach().to(dtype).requires_grad_()
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
            for v in self
        ]
        return Problem(*values)


def problem(
    T=40, D=32, F=16, E=4, K=2, dtype=torch.float32, bias=True, limit=None, interleaved=True
):
    bias13 = torch.randn(E, 2 * F, dtype=dtype) if bias else None
    return Problem(
        torch.randn(T, D).to(dtype),
        torch.randint(-1, E, (T, K)),
        torch.rand(T, K).to(dtype),
        (torch.randn(E, 2 * F, D) / D**0.5).to(dtype),
        (torch.randn(E, D, F) / F**0.5).to(dtype),
        bias13,
        limit,
        interleaved,
    )


def run(given, backend, dtype=None, dout=None):
    """Return the output and the gradients by name."""
    p = given.cast(dtype or given.x.dtype)
    out = experts(
        *p[:5], bias13=p.bias13, limit=p.limit, interleaved=p.interleaved, backend=backend
    )
    dout = torch.ones_like(out) if dout is None else dout.to(out.dtype)
    out.backward(dout)
    named = {"out": out.detach()}
    for name in ("x", "weights", "w13", "w2", "bias13"):
        if getattr(p, name) is not None:
            named[f"d{name}"] = getattr(p, name).grad
    return named


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm().clamp(min=1e-12)).item()


def drawn(seed):
    """Return a problem of random sizes: odd widths, empty experts, no expert at all, one token."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    E, K = draw.choice([2, 5, 9]), draw.choice([1, 2, 3])
    E = 1 if seed % 7 == 6 else E
    T = [50, 33, 1, 40, 0, 50, 33][seed % 7]
    D, F = [16, 33, 136, 40][seed // 3 % 4], [72, 8, 17][seed % 3]
    dtype = [torch.float32, BF16, torch.float16][seed // 2 % 3]
    limit = [None, 0.5, 7.0][seed // 3 % 3]
    given = problem(T, D, F, E, K, dtype, draw.random() < 0.5, limit, draw.random() < 0.5)
    kind = ["uniform", "skewed", "half", "uniform", "one", "skewed", "half", "none"][seed % 8]
    ids = given.ids
    if kind == "one":
        ids = torch.full_like(ids, draw.randrange(E))
    elif kind == "skewed":
        ids = (torch.rand(T, K) ** 4 * E).long()
    elif kind == "none":
        ids = torch.full_like(ids, -1)
    elif kind == "half":
        ids = torch.where(torch.arange(T)[:, None] < T // 2, ids, -1)
    return given._replace(ids=ids.to(draw.choice([torch.int32, torch.int64])))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_routing(seed):
    """No further from float64 than twice what plain torch is in the same dtype."""
    given = drawn(seed)
    dout = torch.randn(given.x.shape)
    exact = run(given, "reference", torch.float64, dout)
    plain, found = run(given, "sorted", dout=dout), run(given, "triton", dout=dout)
    assert found.keys() == exact.keys() == plain.keys()
    for name, value in found.items():
        assert value.isfinite().all(), name
        allowed = 2 * error(plain[name], exact[name]) + FLOOR[given.x.dtype]
        assert error(value, exact[name]) <= allowed, name
        assert value.dtype == plain[name].dtype, name


def test_the_routings_reach_the_edges():
    """The seeds of the default run hold empty experts, dropped choices, no tokens, every dtype."""
    all_drawn = [drawn(seed) for seed in range(15)]
    assert {given.x.dtype for given in all_drawn} == set(FLOOR)
    assert any(given.x.shape[0] == 0 for given in all_drawn)
    assert any(given.x.shape[0] == 1 for given in all_drawn)
    assert any((given.ids == -1).all() and given.ids.numel() for given in all_drawn)
    assert any((given.ids == -1).any() and (given.ids >= 0).any() for given in all_drawn)
    assert any(given.limit == 0.5 and given.bias13 is not None for given in all_drawn)
    many = [given for given in all_drawn if given.x.shape[0] > 30 and (given.ids >= 0).sum() > 40]
    assert any(given.limit == 0.5 for given in many), "the clamp is reached"
    # 2F = 144 and D = 136 are two tiles of columns.
    assert any(given.w2.shape[2] == 72 for given in many)
    assert any(given.w2.shape[1] == 136 for given in many)
    assert any(
        0 < len(given.ids[given.ids >= 0].unique()) < given.w2.shape[0] for given in all_drawn
    )
    assert {given.interleaved for given in all_drawn} == {True, False}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_repeated_call_gives_the_same_bits(dtype):
    given = problem(dtype=dtype)
    first, second = run(given, "triton"), run(given, "triton")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.fixture
def ordered_dot(monkeypatch):
    """Every element of a tl.dot has its own sum, as in a GPU's matrix instructions.

    The interpreter multiplies with a BLAS library, in which a row's last bit depends on the place
    of the row. With this, what is left to depend on the batch is the kernels' own doing.
    """

    def create_dot(self, a, b, d, *options):
        total = d.data.copy()
        left, right = (t.data.astype(np.float32) for t in map(interpreter_bf16.widened, (a, b)))
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_token_does_not_depend_on_its_batch(dtype):
    """Forward and the gradients of a token's own: x and the router's weights."""
    given = problem(T=48, dtype=dtype)
    dout = torch.randn(48, 32)
    whole = run(given, "triton", dout=dout)
    for part in (slice(0, 16), slice(5, 6), slice(30, 48)):
        few = given._replace(x=given.x[part], ids=given.ids[part], weights=given.weights[part])
        alone = run(few, "triton", dout=dout[part])
        for name in ("out", "dx", "dweights"):
            assert torch.equal(alone[name], whole[name][part]), f"{name} of {part}"


@pytest.mark.usefixtures("ordered_dot")
def test_tokens_in_another_order():
    given, dout = problem(T=48), torch.randn(48, 32)
    order = torch.randperm(48)
    moved = given._replace(x=given.x[order], ids=given.ids[order], weights=given.weights[order])
    whole, found = run(given, "triton", dout=dout), run(moved, "triton", dout=dout[order])
    for name, value in found.items():
        if name in ("out", "dx", "dweights"):
            assert torch.equal(value, whole[name][order]), name
        else:
            torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-5)


def test_what_is_saved_for_the_backward_pass():
    """x, h, the router's weights and the tables of the sort, to the byte; no y, no gathered x."""
    given = problem(T=40, D=32, F=16, E=4, K=2, dtype=BF16).cast(BF16)
    T, K, F, E = 40, 2, 16, 4
    R = T * K
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor):
        saved[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = experts(*given[:5], bias13=given.bias13, interleaved=True, backend="triton")
    parameters = {t.untyped_storage().data_ptr() for t in (given.w13, given.w2, given.bias13)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in saved.values()}
    kept = sum(s.nbytes() for pointer, s in storages.items() if pointer not in parameters)
    block_m = dispatch.tile_rows("triton", R, E)
    tiles = -(-R // block_m) + E - 1
    tables = 4 * (R + R + E + 1 + E + 2 * tiles + 1)
    assert kept == given.x.nbytes + given.weights.nbytes + 2 * (R * 2 * F) + tables
    out.sum().backward()
    assert given.x.grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    given = problem()
    plain = run(given, "triton")
    p = given.cast(torch.float32)

    def bank(x, weights, w13, w2, bias13):
        return experts(
            x, p.ids, weights, w13, w2, bias13=bias13, interleaved=True, backend="triton"
        )

    out = checkpoint(bank, p.x, p.weights, p.w13, p.w2, p.bias13, use_reentrant=reentrant)
    out.sum().backward()
    assert torch.equal(out, plain["out"])
    for name in ("x", "weights", "w13", "w2", "bias13"):
        assert torch.equal(getattr(p, name).grad, plain[f"d{name}"]), name


@pytest.mark.parametrize(
    ("counts", "graphs"), [((130, 200, 333), 1), ((24, 40, 130), 3)], ids=["one-height", "three"]
)
def test_any_number_of_tokens_is_one_graph(counts, graphs):
    """No graph break, and compiled again only where the height of the tiles changes (64 rows)."""
    torch._dynamo.reset()
    compiled_graphs = []

    def count(graph, inputs):
        compiled_graphs.append(graph)
        return graph

    given = problem(E=4).cast(torch.float32)
    options = {"bias13": given.bias13, "interleaved": True, "backend": "triton"}

    def bank(x, ids, weights):
        return experts(x, ids, weights, given.w13, given.w2, **options) * 2

    compiled = torch.compile(bank, fullgraph=True, backend=count)
    heights = set()
    for tokens in counts:
        some = problem(T=tokens)
        for tensor in (some.x, some.ids, some.weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        heights.add(dispatch.tile_rows("triton", 2 * tokens, 4))
        found = compiled(some.x, some.ids, some.weights)
        torch.testing.assert_close(found, bank(some.x, some.ids, some.weights))
    assert len(compiled_graphs) == len(heights) == graphs


def test_gradients_through_a_compiled_graph():
    torch._dynamo.reset()
    given = problem()
    plain = run(given, "triton")
    p = given.cast(torch.float32)

    def bank(x, weights, w13, w2, bias13):
        return experts(
            x, p.ids, weights, w13, w2, bias13=bias13, interleaved=True, backend="triton"
        )

    out = torch.compile(bank, fullgraph=True, backend="aot_eager")(
        p.x, p.weights, p.w13, p.w2, p.bias13
    )
    out.sum().backward()
    torch.testing.assert_close(out, plain["out"], rtol=0, atol=0)
    for name in ("x", "weights", "w13", "w2", "bias13"):
        assert torch.equal(getattr(p, name).grad, plain[f"d{name}"]), name


def test_deterministic_algorithms_are_kept():
    torch.use_deterministic_algorithms(True)
    try:
        run(problem(), "triton")
    finally:
        torch.use_deterministic_algorithms(False)
