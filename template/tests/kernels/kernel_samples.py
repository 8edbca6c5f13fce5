"""A product of matrices, compiled well and badly: what test_kernels_aot.py must tell apart."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    K,
    a_stride,
    b_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of out[M,N] = a[M,K] @ b[N,K]^T; M, N and K are multiples of the tile."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + m[:, None] * a_stride + k[None, :]
    b_tile = b_ptr + n[None, :] * b_stride + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_tile + start)
        b = tl.load(b_tile + start)
        total = tl.dot(a, b, total, input_precision="ieee")
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m[:, None] * out_stride + n[None, :], result)


def _case(name: str, tile: tuple[int, int, int], warps: int, stages: int, **changes) -> dict:
    kind = changes.pop("dtype", "bf16")
    pointers = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), f"*{kind}")
    sizes = dict.fromkeys(("K", "a_stride", "b_stride", "out_stride"), "i32")
    blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    return {
        "name": name,
        "kernel": "product_kernel",
        "targets": ("sm_80", "sm_90", "sm_100", "gfx942"),
        "signature": {**pointers, **sizes, **dict.fromkeys(blocks, "constexpr")},
        "constexprs": blocks,
        "divisible": (*pointers, *sizes),
        "num_warps": warps,
        "num_stages": stages,
        "dot": True,
        "copies": True,
        **changes,
    }


def aot_cases() -> list[dict]:
    """Return one good case, and one for each thing that can go wrong."""
    return [
        _case("good", (128, 128, 64), 8, 2),
        _case("spills", (256, 256, 64), 4, 2),
        _case("unaligned", (128, 128, 64), 8, 2, divisible=()),
        _case("too-many-stages", (128, 128, 64), 8, 8),
        _case("no-matrix-instruction", (64, 64, 32), 8, 2, dtype="fp32"),
        _case("no-such-type", (64, 64, 32), 8, 2, dtype="fp8e4nv", targets=("sm_80",)),
    ]
