"""Rows and experts whose offsets pass 2**31 elements: the kernels themselves, on sparse memory.

A file without contents is mapped as the memory of a tensor of gigabytes, of which only the touched
pages exist. Its values lie 2**33 bytes into the file, so that an offset that wrapped around reads
zeros or writes beside, instead of ending the process.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from curry_train.kernels import cross_entropy, grouped_matmul, moe_permute, router
from curry_train.kernels.launches import run_on_gpu
from curry_train.kernels.reference import Sorted
from curry_train.kernels.tuning import Tile

BEFORE = 2**33
TILE = Tile(16, 64, 32, 1, 4, 2)
R, D = 3 * 2**20, 2048
BF16 = torch.bfloat16


@triton.jit
def offset_kernel(out_ptr, row, stride, WIDE: tl.constexpr):
    row += tl.program_id(0)
    offset = row.to(tl.int64) * stride if WIDE else row * stride
    tl.store(out_ptr + tl.program_id(0), offset.to(tl.int64))


@pytest.mark.parametrize(
    ("row", "stride"), [(2**21 - 1, 2048), (2**31 - 2, 2**20), (511, 2**23)], ids=str
)
def test_an_offset_in_int32_wraps_here_as_on_a_gpu(row, stride):
    """So the tests below would see it."""
    wide, narrow = torch.zeros(2, 2, dtype=torch.int64)
    offset_kernel[(2,)](wide, row, stride, WIDE=True)
    offset_kernel[(2,)](narrow, row, stride, WIDE=False)
    assert wide.tolist() == [row * stride, (row + 1) * stride]
    assert narrow.tolist() != wide.tolist()
    assert (narrow - wide).remainder(2**32).tolist() == [0, 0]


@pytest.fixture
def sparse(tmp_path):
    """Return a function that gives a tensor of zeros of any size that takes no memory."""

    def zeros(*shape, dtype=BF16, strides=None):
        strides = strides or [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        extent = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
        before = BEFORE // dtype.itemsize
        path = tmp_path / "memory"
        path.touch()
        os.truncate(path, (before + extent) * dtype.itemsize)
        memory = torch.from_file(str(path), shared=True, size=before + extent, dtype=dtype)
        path.unlink()
        return memory.as_strided(shape, strides, before)

    return zeros


@pytest.fixture
def allocated_sparse(sparse, monkeypatch):
    """What a launcher allocates is sparse too."""
    new_empty = torch.Tensor.new_empty

    def allocate(self, *shape, dtype=None, device=None):
        if shape == (0,):  # Triton's own, of its view of an argument
            return new_empty(self, *shape, dtype=dtype, device=device)
        return sparse(*shape, dtype=dtype or self.dtype)

    def empty(*shape, dtype=torch.float32, device=None):
        return sparse(*shape, dtype=dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", allocate)
    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def last_program(monkeypatch):
    """Return how to run the last program of a launch only."""
    original = InterpreterBuilder.set_grid_idx
    numbers = []

    def set_grid_idx(self, x, y, z):
        original(self, x, y, z)
        if numbers:
            self.grid_idx = (numbers[-1], y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_grid_idx)

    def run(launch):
        numbers.append(launch.grid - 1)
        run_on_gpu(launch._replace(grid=1))
        numbers.clear()

    return run


def last_rows(experts, rows=16, total=R, tokens=None):
    """Return a sort whose only tile is the last rows, of the last expert."""
    order = torch.zeros(total, dtype=torch.int32)
    order[-rows:] = torch.arange(total - rows, total) if tokens is None else tokens
    offsets = torch.full((experts + 1,), total - rows, dtype=torch.int32)
    offsets[-1] = total
    counts = torch.zeros(experts, dtype=torch.int32)
    counts[-1] = rows
    one = torch.ones(1, dtype=torch.int32)
    return Sorted(
        order, torch.zeros(1, 1, dtype=torch.int32), offsets, counts, one * (experts - 1),
        one * (total - rows), one, 16,
    )  # fmt: skip


def close(found, expected):
    assert found.abs().max() > 0
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-2, atol=1e-2)


def test_gathered_rows_and_experts(sparse):
    experts = 513
    x, w = sparse(R, 64, strides=(D, 1)), sparse(experts, 64, 64, strides=(2**22, 64, 1))
    tokens = torch.arange(R - 16, R).flip(0).to(torch.int32)
    x[R - 16 :], w[-1] = torch.randn(16, 64), torch.randn(64, 64)
    sorted = last_rows(experts, total=16, tokens=tokens)
    y = grouped_matmul.gmm(x, w, sorted, gather=True, tile=TILE)
    close(y, x[R - 16 :].flip(0).double() @ w[-1].T.double())


def test_a_transposed_weight(sparse):
    experts = 513
    x, w = torch.randn(16, 64).to(BF16), sparse(experts, 64, 64, strides=(2**22, 1, 2**25))
    w[-1] = torch.randn(64, 64)
    y = grouped_matmul.gmm(x, w, last_rows(experts, total=16), gather=False, tile=TILE)
    close(y, x.double() @ w[-1].T.double())


def test_rows_of_results(sparse, allocated_sparse):
    x, w = sparse(R, 32, strides=(D, 1)), torch.randn(2, D, 32).to(BF16)
    x[R - 16 :] = torch.randn(16, 32)
    y = grouped_matmul.gmm(x, w, last_rows(2), gather=False, tile=TILE)
    assert y.shape == (R, D)
    close(y[R - 16 :], x[R - 16 :].double() @ w[1].T.double())
    assert not y[R - 17].any()


def test_swiglu_and_its_gradient(sparse, allocated_sparse, monkeypatch):
    sorted = last_rows(2, tokens=torch.arange(16, dtype=torch.int32))
    x, w13 = torch.randn(16, 32).to(BF16), torch.randn(2, D, 32).to(BF16)
    h, a = grouped_matmul.gmm_swiglu(x, w13, None, sorted, limit=None, tile=TILE)
    expected = x.double() @ w13[1].T.double()
    close(h[R - 16 :], expected)
    gate, up = expected[:, ::2], expected[:, 1::2]
    activated = torch.nn.functional.silu(gate) * up
    close(a[R - 16 :] / 10, activated / 10)

    # K = 1: the choice of a row is its token, and its weight stands there.
    dout, w2 = torch.randn(16, 32).to(BF16), torch.randn(2, 32, D // 2).to(BF16)
    weights = torch.rand(16, 1)

    def first_only(launch):
        if launch.kernel is grouped_matmul.gmm_dswiglu_kernel:
            partials.append(launch.arguments["partials"])
            run_on_gpu(launch)

    partials = []
    dh, aw, _ = grouped_matmul.gmm_dswiglu(
        dout, w2, h, weights, sorted, limit=None, tile=TILE, run=first_only
    )
    da = dout.double() @ w2[1].double()
    gate, up = h[R - 16 :, ::2].double(), h[R - 16 :, 1::2].double()
    activated = torch.nn.functional.silu(gate) * up
    close(aw[R - 16 :] / 10, activated * weights / 10)
    ds = (da * activated).sum(1)
    close(partials[0][:, R - 16 :].sum(0) / ds.abs().max(), ds / ds.abs().max())
    dup = da * weights * torch.nn.functional.silu(gate)
    close(dh[R - 16 :, 1::2] / 10, dup / 10)


@pytest.mark.parametrize("gather", [False, True])
def test_weight_gradients(sparse, gather):
    sorted = last_rows(2)
    dy, x = sparse(R, 64, strides=(D, 1)), sparse(R, 64, strides=(D, 1))
    out = sparse(2, 64, 64, strides=(2**32, 2**26, 1))
    dy[R - 16 :], x[R - 16 :] = torch.randn(16, 64), torch.randn(16, 64)
    dw, db = grouped_matmul.gmm_wgrad(
        dy, x, sorted, gather_dy=gather, gather_x=gather, out=out, bias=True, tile=TILE
    )
    close(dw[1], dy[R - 16 :].T.double() @ x[R - 16 :].double())
    close(db[1], dy[R - 16 :].double().sum(0))
    assert not dw[0].any()


def test_combine(sparse, allocated_sparse, last_program):
    T, K = 2**20 + 2**19, 2
    y = sparse(R, 2048)
    inverse = sparse(T, K, dtype=torch.int32)
    base = sparse(T, 2048)
    inverse[T - 1] = torch.tensor([R - 1, R - 2])
    y[R - 2 :], base[T - 1] = torch.randn(2, 2048), torch.randn(2048)
    weights = sparse(T, K, dtype=torch.float32)
    weights[T - 1] = torch.tensor([0.25, 0.5])
    out = moe_permute.moe_combine(y, inverse, weights, base, run=last_program)
    width = moe_permute.moe_combine(y[:1], inverse[:1], run=lambda launch: None).shape[1]
    assert width == 2048
    tail = slice(-512, None)
    expected = y[R - 1].double() * 0.25 + y[R - 2].double() * 0.5 + base[T - 1].double()
    close(out[T - 1, tail], expected[tail])


def test_router(sparse, allocated_sparse, last_program):
    T, E, K = 2**22 + 64, 512, 8
    logits = sparse(T, E, dtype=torch.float32)
    logits[T - 4 :] = torch.randn(4, E)
    weights, ids, lse = router.router_topk(
        logits, None, K, score="softmax", norm=False, scale=1.0, run=last_program
    )
    expected = logits[T - 4 :].softmax(1).topk(K)
    assert torch.equal(ids[T - 4 :].long(), expected.indices)
    close(weights[T - 4 :], expected.values)
    close(lse[T - 4 :], logits[T - 4 :].logsumexp(1))


def test_cross_entropy(sparse, allocated_sparse, last_program):
    N, V = 2**16, 50257
    logits, target = sparse(N, V), sparse(N, dtype=torch.int64)
    logits[N - 1], target[N - 1] = torch.randn(V), V - 1
    rows = cross_entropy.cross_entropy_rows(logits, target, run=last_program)
    exact = logits[N - 1].double()
    loss, lse, _ = (row[N - 1] for row in rows)
    close(loss[None], (exact.logsumexp(0) - exact[V - 1])[None])
    close(lse[None], exact.logsumexp(0)[None])
    dloss = sparse(N, dtype=torch.float32)
    dloss[N - 1] = 8.0
    out = sparse(N, V)
    cross_entropy.cross_entropy_rows_bwd(
        dloss, None, logits, target, *rows[1:], out=out, run=last_program
    )
    expected = 8 * exact.softmax(0)
    expected[V - 1] -= 8
    close(out[N - 1, V - 8 :], expected[V - 8 :])
    assert not out[N - 2].any()
