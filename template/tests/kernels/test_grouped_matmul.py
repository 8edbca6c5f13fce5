"""The grouped products against float64 sums over single rows, interpreted on the CPU."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from curry_train.kernels import grouped_matmul, ops, reference
from curry_train.kernels.reference import Sorted, split_gate_up
from curry_train.kernels.reference_routing import moe_sort
from curry_train.kernels.tuning import Tile

TEMPLATE = Path(__file__).resolve().parents[2]
BLOCK = 16


def uniform(T, E, K):
    return torch.stack([torch.randperm(E)[:K] for _ in range(T)]) if T else torch.empty(0, K).long()


def without(T, E, K, *missing):
    kept = [e for e in range(E) if e not in missing]
    return torch.tensor(kept)[uniform(T, len(kept), K)]


def blocks(*counts):
    """K=1 with exactly these counts per expert, in mixed order."""
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])
    return ids[torch.randperm(len(ids))][:, None]


CASES = {
    # name: (E, D, F, ids[T, K])
    "plain": lambda: (5, 32, 16, uniform(20, 5, 2)),
    "odd_widths": lambda: (3, 33, 21, uniform(12, 3, 2)),
    "one_wide": lambda: (2, 1, 1, uniform(5, 2, 1)),
    "empty_first": lambda: (4, 20, 9, without(11, 4, 2, 0)),
    "empty_middle": lambda: (5, 20, 9, without(11, 5, 2, 2, 3)),
    "empty_last": lambda: (4, 20, 9, without(11, 4, 2, 3)),
    "one_expert_takes_all": lambda: (6, 20, 9, torch.full((19, 1), 4)),
    "no_tokens": lambda: (3, 20, 9, uniform(0, 3, 2)),
    "one_token": lambda: (5, 20, 9, uniform(1, 5, 2)),
    "every_expert": lambda: (4, 20, 9, uniform(9, 4, 4)),
    "one_expert": lambda: (1, 20, 9, uniform(18, 1, 1)),
    "prime_experts": lambda: (7, 20, 9, uniform(13, 7, 3)),
    "on_a_tile_edge": lambda: (3, 20, 9, blocks(16, 32, 16)),
    "one_off_a_tile_edge": lambda: (4, 20, 9, blocks(15, 17, 31, 1)),
    "duplicate_ids": lambda: (3, 20, 9, torch.tensor([[1, 1], [2, 1], [0, 0], [1, 1]])),
    "some_absent": lambda: (4, 20, 9, torch.where(torch.rand(23, 2) < 0.5, -1, uniform(23, 4, 2))),
    "absent_even_widths": lambda: (
        (2, 32, 32, torch.where(torch.rand(9, 2) < 0.5, -1, uniform(9, 2, 2)))
    ),
    "all_absent": lambda: (3, 20, 9, torch.full((9, 2), -1)),
}
WIDE = ("odd_widths", "some_absent", "one_off_a_tile_edge")


class Bank(NamedTuple):
    """Inputs of all products, random in one dtype, and the sort they belong to."""

    ids: torch.Tensor
    sorted: Sorted
    x: torch.Tensor
    w13: torch.Tensor
    bias13: torch.Tensor
    w2: torch.Tensor
    dout: torch.Tensor
    weights: torch.Tensor
    h: torch.Tensor
    a: torch.Tensor


def bank(case: str, dtype: torch.dtype = torch.float32) -> Bank:
    E, D, F, ids = CASES[case]()
    (T, K), R = ids.shape, ids.numel()
    sorted = moe_sort(ids, E, BLOCK)
    shapes = ((T, D), (E, 2 * F, D), (E, 2 * F), (E, D, F), (T, D))
    x, w13, bias13, w2, dout = (torch.randn(shape).to(dtype) for shape in shapes)
    h, a = torch.randn(R, 2 * F).to(dtype), torch.randn(R, F).to(dtype)
    # What belongs to no expert is poison: it may be read by nobody.
    used = int(sorted.offsets[-1])
    h[used:], a[used:] = float("nan"), float("nan")
    return Bank(ids, sorted, x, w13, bias13, w2, dout, torch.rand(T, K), h, a)


def rows_of(b: Bank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return choice, token and expert of each row that has an expert."""
    choice = b.sorted.order[: b.sorted.offsets[-1]].long()
    return choice, choice // b.ids.shape[1], b.ids.flatten()[choice]


def whole(y: torch.Tensor, b: Bank) -> torch.Tensor:
    return torch.cat([y, y.new_zeros(b.ids.numel() - y.shape[0], *y.shape[1:])])


def exact_gmm(b: Bank, x: torch.Tensor, w: torch.Tensor, gather: bool) -> torch.Tensor:
    _, token, expert = rows_of(b)
    rows = x.double()[token] if gather else x.double()[: len(token)]
    return whole(torch.einsum("rk,rnk->rn", rows, w.double()[expert]), b)


def exact_activation(h: torch.Tensor, limit: float | None) -> torch.Tensor:
    gate, up = h[..., 0::2], h[..., 1::2]
    if limit is None:
        return gate / (1 + (-gate).exp()) * up
    # where, not clamp: at the limit itself clamp has the gradient 1 or 0 by the version of torch.
    gate = torch.where(gate > limit, limit, gate)
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate / (1 + (-1.702 * gate).exp()) * (up + 1)


def exact_swiglu(b: Bank, bias: bool, limit: float | None):
    _, _, expert = rows_of(b)
    h = exact_gmm(b, b.x, b.w13, True)
    h = h + whole(b.bias13.double()[expert], b) if bias else h
    return h, whole(exact_activation(h[: len(expert)], limit), b)


def exact_dswiglu(b: Bank, limit: float | None):
    choice, token, expert = rows_of(b)
    h = b.h.double()[: len(token)].requires_grad_()
    a = exact_activation(h, limit)
    da = torch.einsum("rd,rdf->rf", b.dout.double()[token], b.w2.double()[expert])
    weight = b.weights.double().flatten()[choice, None]
    (dh,) = torch.autograd.grad(a, h, da * weight)
    a = a.detach()
    return whole(dh, b), whole(a * weight, b), whole((da * a).sum(-1), b)


def exact_wgrad(b: Bank, dy, x, gather_dy: bool, gather_x: bool):
    _, token, expert = rows_of(b)
    dy, x = (
        y.double()[token] if gather else y.double()[: len(token)]
        for y, gather in ((dy, gather_dy), (x, gather_x))
    )
    E = b.w13.shape[0]
    dw = torch.zeros(E, dy.shape[1], x.shape[1], dtype=torch.double)
    dw.index_add_(0, expert, dy[:, :, None] * x[:, None, :])
    return dw, torch.zeros(E, dy.shape[1], dtype=torch.double).index_add_(0, expert, dy)


def check(found, plain, exact) -> None:
    """Hold a kernel's error to twice that of plain torch in the same dtype.

    The floor is half the distance between two numbers, what rounding the exact result may leave:
    plain torch can hit a result of a few elements by luck.
    """
    found, plain, exact = (
        [y] if isinstance(y, torch.Tensor) else list(y) for y in (found, plain, exact)
    )
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape == truth.shape
        assert torch.isfinite(ours).all()
        error, allowed = (ours.double() - truth).norm(), (theirs.double() - truth).norm()
        floor = torch.finfo(ours.dtype).eps / 2 * truth.norm()
        assert error <= 2 * max(allowed, floor), (error, allowed, floor)


def run_all(b: Bank, kernels, limit: float | None = None, bias: bool = False, **options) -> dict:
    """Return the results of the bank's six products."""
    s, bias13 = b.sorted, b.bias13 if bias else None
    backward = (b.dout, b.w2, b.h, b.weights, s)
    wgrad13 = kernels.gmm_wgrad(b.h, b.x, s, gather_x=True, bias=True, **options)
    return {
        "gate_up": kernels.gmm_swiglu(b.x, b.w13, bias13, s, limit=limit, **options),
        "down": kernels.gmm(b.a, b.w2, s, gather=False, **options),
        "gathered": kernels.gmm(b.x, b.w13, s, gather=True, **options),
        "dgrad": kernels.gmm(b.h, b.w13.transpose(1, 2), s, gather=False, **options),
        "down_dgrad": kernels.gmm_dswiglu(*backward, limit=limit, **options),
        "down_wgrad": kernels.gmm_wgrad(b.dout, b.a, s, gather_dy=True, **options),
        "gate_up_wgrad": wgrad13,
    }


def exact_all(b: Bank, limit: float | None = None, bias: bool = False) -> dict:
    return {
        "gate_up": exact_swiglu(b, bias, limit),
        "down": exact_gmm(b, b.a, b.w2, False),
        "gathered": exact_gmm(b, b.x, b.w13, True),
        "dgrad": exact_gmm(b, b.h, b.w13.transpose(1, 2), False),
        "down_dgrad": exact_dswiglu(b, limit),
        "down_wgrad": exact_wgrad(b, b.dout, b.a, True, False)[0],
        "gate_up_wgrad": exact_wgrad(b, b.h, b.x, False, True),
    }


@pytest.mark.parametrize("case", CASES)
def test_every_product_on_every_routing(case):
    b = bank(case)
    found, plain, exact = run_all(b, grouped_matmul), run_all(b, reference), exact_all(b)
    for name in exact:
        check(found[name], plain[name], exact[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", WIDE)
def test_every_product_in_half_precision(case, dtype):
    b = bank(case, dtype)
    found, plain, exact = run_all(b, grouped_matmul), run_all(b, reference), exact_all(b)
    for name in exact:
        check(found[name], plain[name], exact[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [None, 0.7], ids=["silu", "clamped"])
def test_activation_with_bias(dtype, limit):
    b = bank("odd_widths", dtype)
    found, plain = (run_all(b, kernels, limit, True) for kernels in (grouped_matmul, reference))
    exact = exact_all(b, limit, True)
    for name in ("gate_up", "down_dgrad"):
        check(found[name], plain[name], exact[name])


def test_a_value_at_the_limit_passes_its_gradient():
    b = bank("plain")
    b.h[:] = torch.tensor([0.5, -0.5]).repeat(b.h.shape[1] // 2)
    found = grouped_matmul.gmm_dswiglu(b.dout, b.w2, b.h, b.weights, b.sorted, limit=0.5)
    exact = exact_dswiglu(b, 0.5)
    assert exact[0].abs().min() > 0
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-4, atol=1e-5)


def test_a_nan_reaches_the_rows_of_its_token_and_no_others():
    b = bank("plain")
    b.x[3, 5], b.h[7, 4] = float("nan"), float("nan")
    _, token, _ = rows_of(b)
    for limit in (None, 0.7):
        h, a = grouped_matmul.gmm_swiglu(b.x, b.w13, None, b.sorted, limit=limit)
        for rows in (h, a):
            assert torch.equal(rows.isnan().all(1), token == 3)
            assert torch.equal(rows.isnan().any(1), token == 3)
        dh, _, ds = grouped_matmul.gmm_dswiglu(b.dout, b.w2, b.h, b.weights, b.sorted, limit=limit)
        assert ds.isnan().nonzero().tolist() == [[7]]
        assert dh.isnan().any(1).nonzero().tolist() == [[7]]


def test_rows_of_no_expert_are_zero():
    b = bank("some_absent")
    used = int(b.sorted.offsets[-1])
    assert 0 < used < b.ids.numel()
    found = run_all(b, grouped_matmul)
    outputs = [*found["gate_up"], found["down"], found["dgrad"], *found["down_dgrad"]]
    assert all((y[used:] == 0).all() and (y[:used] != 0).any() for y in outputs)


def test_the_spare_tiles_cover_all_rows_of_no_expert():
    # One row each for all experts but one leaves the fewest spare tiles.
    ids = torch.cat([torch.arange(4), torch.full((60,), -1)])[:, None]
    sorted = moe_sort(ids, 4, BLOCK)
    y = grouped_matmul.gmm(torch.ones(64, 8), torch.ones(4, 8, 8), sorted, gather=True)
    assert torch.equal(y[:4], torch.full((4, 8), 8.0)) and not y[4:].any()


def test_strides(poisoned):
    b = bank("odd_widths")
    twisted = b._replace(
        x=poisoned(b.x.T.contiguous()).T,
        w13=poisoned(b.w13.transpose(1, 2).contiguous()).transpose(1, 2),
        w2=poisoned(b.w2.permute(2, 0, 1).contiguous()).permute(1, 2, 0),
        bias13=poisoned(b.bias13),
        dout=poisoned(b.dout),
        weights=b.weights.T.contiguous().T,
        h=poisoned(b.h),
        a=poisoned(b.a.T.contiguous()).T,
    )
    assert not any(y.is_contiguous() for y in (twisted.x, twisted.w13, twisted.w2, twisted.h))
    straight, found = (run_all(y, grouped_matmul, None, True) for y in (b, twisted))
    for name in straight:
        torch.testing.assert_close(found[name], straight[name], rtol=0, atol=0)


def test_an_expanded_gradient():
    b = bank("plain")
    dy = torch.ones(1, 1).expand(b.ids.numel(), 6)
    dw, db = grouped_matmul.gmm_wgrad(dy, b.a, b.sorted, bias=True)
    exact = exact_wgrad(b, dy, b.a, False, False)
    torch.testing.assert_close(dw.double(), exact[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(db.double(), exact[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradients_accumulate_in_float32(dtype, poisoned):
    b = bank("empty_middle", dtype)
    start = torch.randn(5, 18, 20)
    out = poisoned(start.clone())
    found = grouped_matmul.gmm_wgrad(b.h, b.x, b.sorted, gather_x=True, out=out, accumulate=True)
    exact = exact_wgrad(b, b.h, b.x, False, True)[0]
    assert found is out and torch.equal(out[2:4], start[2:4])
    # One rounding to float32, none to the dtype of the rows.
    torch.testing.assert_close(out.double(), start.double() + exact, rtol=1e-5, atol=1e-5)
    grouped_matmul.gmm_wgrad(b.h, b.x, b.sorted, gather_x=True, out=out)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert not out[2:4].any()


def test_repeated_calls_give_the_same_bits_in_any_tile_order():
    b = bank("prime_experts", torch.float16)
    first, again = run_all(b, grouped_matmul), run_all(b, grouped_matmul)
    other = Tile(BLOCK, 32, 32, 4, 1, 1)
    reordered = run_all(b, grouped_matmul, tile=other)
    for name in ("gate_up", "down", "dgrad", "down_dgrad"):
        torch.testing.assert_close(first[name], reordered[name], rtol=0, atol=0)
    for name in first:
        torch.testing.assert_close(first[name], again[name], rtol=0, atol=0)


@pytest.mark.parametrize("case", ["prime_experts", "some_absent"])
def test_no_tile_writes_into_another(case):
    """The interpreter runs tiles in turn, so a tile that writes too much is overwritten; here not.

    The tiles are turned around: the last one of the table comes first.
    """
    b = bank(case)
    experts, rows = b.sorted.tile_expert.clone(), b.sorted.tile_row.clone()
    used = int(b.sorted.num_tiles)
    experts[:used], rows[:used] = experts[:used].flip(0), rows[:used].flip(0)
    turned = b._replace(sorted=b.sorted._replace(tile_expert=experts, tile_row=rows))
    first, other = run_all(b, grouped_matmul), run_all(turned, grouped_matmul)
    for name in first:
        torch.testing.assert_close(first[name], other[name], rtol=0, atol=0)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    b = bank("prime_experts", torch.float16)
    kept = torch.tensor([12, 3, 7, 0])
    ids = b.ids[kept]
    fewer = moe_sort(ids, 7, BLOCK)
    _, a = grouped_matmul.gmm_swiglu(b.x, b.w13, None, b.sorted)
    _, few = grouped_matmul.gmm_swiglu(b.x[kept], b.w13, None, fewer)
    assert torch.equal(a[b.sorted.inverse[kept].long()], few[fewer.inverse.long()])


@pytest.mark.parametrize("block_m", [32, 64])
def test_tiles_that_tests_do_not_use_by_default(block_m):
    b = bank("odd_widths")
    b = b._replace(sorted=moe_sort(b.ids, 3, block_m))
    tile = Tile(block_m, 64, 16, 4, 1, 3)
    found, plain = run_all(b, grouped_matmul, tile=tile), run_all(b, reference)
    for name, exact in exact_all(b).items():
        check(found[name], plain[name], exact)


def far_apart(values: torch.Tensor, step: int) -> torch.Tensor:
    """Return the values with the first axis `step` elements apart, in memory mostly untouched.

    There is as much memory before it, so that an offset that wrapped around reads zeros.
    """
    size = values.shape[0] * step
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, 2 * size * values.element_size(), flags=flags)
    flat = torch.frombuffer(memory, dtype=values.dtype)
    strides = (step, *torch.empty(values.shape[1:], device="meta").stride())
    return flat.as_strided(values.shape, strides, size).copy_(values)


def test_offsets_beyond_32_bits():
    b = bank("plain")
    step = 2**30 + 16
    token = b.ids[:3, :1] % 3
    sorted = moe_sort(token, 3, BLOCK)
    x, w13, w2 = b.x[:3].half(), b.w13[:3].half(), b.w2[:3].half()
    h, dout, weights = b.h[:3].half(), b.dout[:3].half(), b.weights[:3, :1]
    near_out, far_out = (
        torch.zeros(3, 32, 32).half(),
        far_apart(torch.zeros(3, 32, 32).half(), step),
    )

    def products(x, w13, w2, h, dout, out):
        grouped_matmul.gmm_wgrad(h, x, sorted, gather_x=True, out=out)
        return [
            *grouped_matmul.gmm_swiglu(x, w13, None, sorted),
            grouped_matmul.gmm(h, w13.transpose(1, 2), sorted, gather=False),
            *grouped_matmul.gmm_dswiglu(dout, w2, h, weights, sorted),
            *grouped_matmul.gmm_wgrad(dout, h, sorted, gather_dy=True, bias=True),
            out,
        ]

    near = (x, w13, w2, h, dout)
    far = [far_apart(y, step) for y in near]
    for one, other in zip(products(*near, near_out), products(*far, far_out), strict=True):
        assert one.abs().sum() > 0 and torch.equal(one, other)


def as_op(b: Bank) -> tuple[list[torch.Tensor], int]:
    return list(b.sorted[:7]), b.sorted.block_m


@pytest.mark.parametrize("case", ["odd_widths", "some_absent", "no_tokens"])
def test_opcheck(case):
    b = bank(case)
    x, w13, bias13 = (y.clone().requires_grad_() for y in (b.x, b.w13, b.bias13))
    a, w2 = b.a.nan_to_num().requires_grad_(), b.w2.clone().requires_grad_()
    h, table = b.h.nan_to_num(), as_op(b)
    calls = {
        "gmm": [(x, w13, *table, True), (a, w2, *table, False)],
        "gmm_swiglu": [(x, w13, bias13, *table, 0.7), (x, w13, None, *table, None)],
        "gmm_dswiglu": [(b.dout, b.w2, h, b.weights, *table, None)],
        "gmm_wgrad": [(h, b.x, *table, False, True, True), (b.dout, h, *table, True, False, False)],
        "gmm_wgrad_into": [(torch.zeros_like(b.w13), h, b.x, *table, False, True, True, True)],
    }
    for name, arguments in calls.items():
        for call in arguments:
            torch.library.opcheck(getattr(torch.ops.curry_train, name).default, call)


@pytest.mark.parametrize("case", ["some_absent", "every_expert", "all_absent"])
def test_gradients_of_the_ops(case):
    """In float64, where the twins run: the formulas of the backward pass."""
    E, _, _, ids = CASES[case]()
    ids, (D, F) = ids[:4], (3, 2)
    sorted = moe_sort(ids, E, BLOCK)

    def random(*shape):
        return torch.randn(shape, dtype=torch.double, requires_grad=True)

    x, w13, bias13, rows = (
        random(4, D),
        random(E, 2 * F, D),
        random(E, 2 * F),
        random(ids.numel(), D),
    )
    check = torch.autograd.gradcheck
    assert check(lambda x, w: ops.gmm(x, w, sorted, gather=True), (x, w13))
    assert check(lambda x, w: ops.gmm(x, w, sorted, gather=False), (rows, w13))
    for limit in (None, 0.7):
        assert check(
            lambda x, w, b, limit=limit: ops.gmm_swiglu(x, w, b, sorted, limit=limit),
            (x, w13, bias13),
        )


def test_gradients_of_the_kernels():
    b = bank("some_absent")
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaves = [y.to(dtype).requires_grad_() for y in (b.x, b.w13, b.bias13, b.w2)]
        x, w13, bias13, w2 = leaves
        _, a = ops.gmm_swiglu(x, w13, bias13, b.sorted, limit=0.7)
        y = ops.gmm(a, w2, b.sorted, gather=False)
        grads.append(torch.autograd.grad(y.sin().sum(), leaves))
    for found, exact in zip(*grads, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


def test_ops_run_the_kernels_here(monkeypatch):
    b, seen = bank("plain"), []
    monkeypatch.setattr(grouped_matmul, "gmm", lambda *a, **k: seen.append(k) or b.x.new_zeros(2))
    ops.gmm(b.x, b.w13, b.sorted, gather=True)
    assert len(seen) == 1
    ops.gmm(b.x.double(), b.w13.double(), b.sorted, gather=True)
    assert len(seen) == 1


@pytest.mark.parametrize(("asked", "wanted"), [("highest", "ieee"), ("high", "tf32")])
def test_float32_products_follow_the_setting_of_torch(asked, wanted):
    b, launches = bank("plain"), []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(asked)
    try:
        grouped_matmul.gmm(b.x, b.w13, b.sorted, gather=True, run=launches.append)
    finally:
        torch.set_float32_matmul_precision(before)
    assert [launch.constants["PRECISION"] for launch in launches] == [wanted]


def test_ops_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch
from curry_train.kernels import ops
from curry_train.kernels.reference_routing import moe_sort
s = moe_sort(torch.tensor([[0, 1], [1, -1]]), 2, 16)
y = ops.gmm(torch.ones(2, 3), torch.ones(2, 4, 3), s, gather=True)
assert torch.equal(y, torch.tensor([3.0, 3, 3, 0])[:, None].expand(4, 4)), y
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TEMPLATE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def refuse(call, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_bad_input_is_named():
    b = bank("plain")
    s, T = b.sorted, b.x.shape[0]
    refuse(lambda: ops.gmm(b.x[1:], b.w13, s, gather=True), "x has", f"[{T - 1}, 32]", f"[{T}, w")
    refuse(lambda: ops.gmm(b.x, b.w13, s, gather=False), "x has", f"[{2 * T}, width]", "R")
    refuse(lambda: ops.gmm(b.x.int(), b.w13, s, gather=True), "x is torch.int32", "bfloat16")
    refuse(lambda: ops.gmm(b.x, b.w13[:, :, 1:], s, gather=True), "w has", "[5, any, 32]")
    refuse(lambda: ops.gmm(b.x, b.w13[1:], s, gather=True), "w has", "[4, 32, 32]", "[5, any, 32]")
    refuse(lambda: ops.gmm(b.x, b.w13.half(), s, gather=True), "w is torch.float16", "float32")
    refuse(lambda: ops.gmm(b.x, b.w13[0], s, gather=True), "w has", "[32, 32]")
    refuse(lambda: ops.gmm_swiglu(b.x, b.w13[:, 1:], None, s), "w13 has 31 columns", "even")
    refuse(lambda: ops.gmm_swiglu(b.x, b.w13, b.bias13[1:], s), "bias13", "[4, 32]", "[5, 32]")
    refuse(lambda: ops.gmm_swiglu(b.x, b.w13, b.bias13.int(), s), "bias13 is torch.int32", "float")
    eight = (b.x.to(torch.float8_e4m3fn), b.w13.to(torch.float8_e4m3fn))
    refuse(lambda: ops.gmm(*eight, s, gather=True), "x is torch.float8_e4m3fn", "bfloat16")
    call = ops.gmm_dswiglu
    refuse(lambda: call(b.dout, b.w2, b.h, b.weights[1:], s), "weights", f"[{T}, 2]")
    refuse(lambda: call(b.dout, b.w2, b.h.half(), b.weights, s), "h is torch.float16", "dout")
    refuse(lambda: call(b.dout, b.w2[..., 1:], b.h, b.weights, s), "w2", "[5, 32, 16]")
    refuse(lambda: call(b.dout, b.w2, b.h[:, 1:], b.weights, s), "h has 31", "even")
    wgrad = ops.gmm_wgrad
    refuse(lambda: wgrad(b.h, b.x.half(), s, gather_x=True), "dy is", "float16, the dtype of x")
    refuse(lambda: wgrad(b.h, b.x, s, gather_x=True, accumulate=True), "accumulate", "out")
    refuse(
        lambda: wgrad(b.h, b.x, s, gather_x=True, out=torch.empty(5, 32, 31)), "out", "[5, 32, 32]"
    )


@pytest.mark.parametrize("code", [grouped_matmul, reference])
def test_a_bias_of_another_dtype_leaves_that_of_h(code):
    b = bank("plain")
    half, bias = (b.x.half(), b.w13.half()), b.bias13
    for found in code.gmm_swiglu(*half, bias, b.sorted, limit=None):
        assert found.dtype == torch.float16


def test_the_interpreter_was_not_bypassed():
    """The files of this folder mean nothing when a kernel was compiled for a GPU instead."""
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(grouped_matmul.gmm_kernel, InterpretedFunction)


def test_gate_and_up_split_both_ways():
    h = torch.arange(12.0).view(2, 6)
    for interleaved in (True, False):
        gate, up = split_gate_up(h, interleaved)
        assert torch.equal(reference.join_gate_up(gate, up, interleaved), h)
    assert split_gate_up(h)[0].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert split_gate_up(h, False)[0].tolist() == [[0, 1, 2], [6, 7, 8]]
