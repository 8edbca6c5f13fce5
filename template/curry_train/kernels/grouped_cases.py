"""The six grouped products of an expert bank, forward and backward, at a given size.

One list for the tuning command, which times them, and for the ahead-of-time check, which compiles
what they launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from curry_train.kernels.launches import Launch, aot_case
from curry_train.kernels.reference_routing import moe_sort
from curry_train.kernels.tuning import BUCKETS, table_tile

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")


class Product(NamedTuple):
    """A call of a launcher on ready inputs; call(tile=..., run=..., precision=...) launches it."""

    name: str
    kernel: str
    N: int
    K: int
    call: Callable[..., Any]


def bank_products(
    T: int,
    D: int,
    F: int,
    E: int,
    K: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_m: int,
    limit: float | None = None,
    bias: bool = False,
) -> list[Product]:
    """Return the products of a bank of E experts for T tokens that choose K of them at random.

    Shapes: T tokens, D width, F hidden width; w13 [E, 2F, D], w2 [E, D, F]. Deterministic for a
    seed of torch; on the meta device nothing is computed.
    """
    from curry_train.kernels import grouped_matmul as triton

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    ids = torch.randint(E, (T, K), device=device, dtype=torch.int32)
    sorted = moe_sort(ids, E, block_m)
    x, dout, weights = random(T, D), random(T, D), random(T, K)
    w13, w2 = random(E, 2 * F, D) / D**0.5, random(E, D, F) / F**0.5
    h, a = random(T * K, 2 * F), random(T * K, F)
    bias13 = random(E, 2 * F) if bias else None
    call = functools.partial
    back = call(triton.gmm_dswiglu, dout, w2, h, weights, sorted, limit=limit)
    wgrad13 = call(triton.gmm_wgrad, h, x, sorted, gather_x=True, bias=bias)
    wgrad2 = call(triton.gmm_wgrad, dout, a, sorted, gather_dy=True)
    forward = call(triton.gmm_swiglu, x, w13, bias13, sorted, limit=limit)
    dgrad = call(triton.gmm, h, w13.transpose(1, 2), sorted, gather=False)
    return [
        Product("gate_up", "gmm_swiglu", 2 * F, D, forward),
        Product("down", "gmm", D, F, call(triton.gmm, a, w2, sorted, gather=False)),
        Product("down_dgrad", "gmm_dswiglu", F, D, back),
        Product("down_wgrad", "gmm_wgrad", D, F, wgrad2),
        Product("gate_up_dgrad", "gmm", D, 2 * F, dgrad),
        Product("gate_up_wgrad", "gmm_wgrad", 2 * F, D, wgrad13),
    ]


def _cases(label: str, dtype: torch.dtype, block_m: int, precision: str, **bank) -> list[dict]:
    """Return a case for each launch of the bank's products and each architecture."""
    meta = torch.device("meta")
    found = []
    for product in bank_products(dtype=dtype, device=meta, block_m=block_m, **bank):
        for arch in ARCHS:
            tile = table_tile(product.kernel, arch, dtype, block_m)
            launches: list[Launch] = []
            product.call(tile=tile, precision=precision, run=launches.append)
            for launch in launches:
                name = f"{product.name}-{launch.kernel.__name__.removesuffix('_kernel')}-{label}"
                dot = launch.kernel.__name__.startswith("gmm")
                # Products in full float32, and of tiles too low for the instructions of sm_90 and
                # sm_100, run without them on NVIDIA.
                plain = dtype == torch.float32 and precision == "ieee"
                matrix = dot and not plain and tile.block_m >= 64
                found.append(aot_case(name, (arch,), launch, dot=matrix, copies=dot))
    return found


def cases() -> list[dict]:
    """Return what `grouped_matmul` launches for real models, for each architecture.

    Shapes: T tokens by D, F, E and K of Qwen3-30B-A3B in each dtype and bucket, and of gpt-oss-20b
    with its limit and bias. What two launches have in common is listed once.
    """
    qwen = {"T": 8192, "D": 2048, "F": 768, "E": 128, "K": 8}
    gpt_oss = {"T": 8192, "D": 2880, "F": 2880, "E": 32, "K": 4, "limit": 7.0, "bias": True}
    found = []
    for block_m in reversed(BUCKETS):
        found += _cases(f"bf16-{block_m}", torch.bfloat16, block_m, "ieee", **qwen)
    found += _cases("gpt_oss-bf16-128", torch.bfloat16, 128, "ieee", **gpt_oss)
    found += _cases("fp32-128", torch.float32, 128, "ieee", **qwen)
    found += _cases("tf32-128", torch.float32, 128, "tf32", **qwen)
    other = _cases("fp16-128", torch.float16, 128, "ieee", **qwen)
    # fp16 has the tiles of bf16: one product and one gradient of it.
    found += [case for case in other if case["name"].startswith(("gate_up-", "gate_up_wgrad"))]
    distinct = {repr({**case, "name": ""}): case for case in reversed(found)}
    return list(reversed(distinct.values()))
