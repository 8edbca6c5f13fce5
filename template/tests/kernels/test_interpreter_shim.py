"""bf16 in the interpreter equals bf16 in torch, and does not without the shim."""

from __future__ import annotations

import interpreter_bf16
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

BF16 = torch.bfloat16


@triton.jit
def multiply_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    product = tl.dot(a, b, input_precision="ieee")
    tl.store(out_ptr + m[:, None] * N + n[None, :], product.to(out_ptr.dtype.element_ty))


@triton.jit
def elementwise_kernel(a_ptr, b_ptr, sum_ptr, product_ptr, mixed_ptr, less_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    a, b = tl.load(a_ptr + n), tl.load(b_ptr + n)
    tl.store(sum_ptr + n, a + b)
    tl.store(product_ptr + n, a * b)
    tl.store(mixed_ptr + n, a * 0.1 + b.to(tl.float32))
    tl.store(less_ptr + n, tl.where(a < b, -a, b))


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, tl.load(a_ptr + n) * tl.load(b_ptr + n))


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, tl.load(x_ptr + n).to(out_ptr.dtype.element_ty))


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + m, tl.sum(x.to(tl.float32), 1))


def cast(x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, out, N=x.numel())
    return out


def multiply(dtype):
    a, b = torch.randn(32, 64).to(dtype), torch.randn(64, 16).to(dtype)
    out = torch.empty(32, 16, dtype=torch.float32)
    multiply_kernel[(1,)](a, b, out, M=32, N=16, K=64)
    exact = a.double() @ b.double()
    return ((out - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_dot(dtype):
    assert multiply(dtype) < 1e-6


def test_elementwise():
    a, b = torch.randn(2, 128).to(BF16)
    results = [torch.empty(128, dtype=BF16) for _ in range(2)]
    results += [torch.empty(128), torch.empty(128, dtype=BF16)]
    elementwise_kernel[(1,)](a, b, *results, N=128)
    total, product, mixed, less = results
    assert torch.equal(total, a + b)
    assert torch.equal(product, a * b)
    # A Python number takes the type of the tensor: a bf16 product, then an fp32 sum.
    assert torch.equal(mixed, (a * torch.tensor(0.1, dtype=BF16)).float() + b.float())
    assert torch.equal(less, torch.where(a < b, -a, b))


def test_rounding_is_to_the_nearest_even_value():
    random = torch.randn(4096) * torch.logspace(-38, 38, 4096)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, 1e-40, 0.0, -0.0])
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    x = torch.cat([random, ties.repeat(18), special.repeat(42)])[:4096].contiguous()
    x[-10:] = torch.cat([ties, special])
    found = cast(x, BF16)
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.nan_to_num(nan=0), x.to(BF16).nan_to_num(nan=0))


@pytest.mark.parametrize("other", [torch.float32, torch.float16, torch.int32], ids=str)
def test_casts(other):
    values = torch.tensor([0.0, -1.0, 2.5, 1024.0, -3.75, 255.0, 0.125, -65000.0] * 8)
    assert torch.equal(cast(values.to(BF16), other), values.to(BF16).to(other))
    back = values.to(other)
    assert torch.equal(cast(back, BF16), back.to(BF16))


def test_a_sum_that_converts_first():
    x = torch.randn(8, 64).to(BF16)
    out = torch.empty(8)
    row_sum_kernel[(1,)](x, out, M=8, N=64)
    torch.testing.assert_close(out, x.float().sum(1), rtol=1e-6, atol=1e-6)


def test_without_the_shim_bf16_is_garbage(monkeypatch):
    """So the tests above see the shim, and it is still needed."""
    monkeypatch.undo()
    assert multiply(BF16) > 1
    x = torch.tensor([1 + 3 * 2**-8] * 16)
    assert not torch.equal(cast(x, BF16), x.to(BF16))
    a, b, out = torch.randn(3, 128).to(BF16)
    product_kernel[(1,)](a, b, out, N=128)
    assert not torch.equal(out, a * b)


def test_moved_methods_are_named(monkeypatch):
    assert interpreter_bf16.problem() is None
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda self, a, b: None)
    assert "create_dot has the arguments ['self', 'a', 'b']" in interpreter_bf16.problem()
    monkeypatch.delattr(InterpreterBuilder, "create_dot")
    assert "create_dot has the arguments nothing" in interpreter_bf16.problem()
