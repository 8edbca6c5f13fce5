"""What real models launch, as the plain data that `aot.py` compiles: by kernel file.

They run the launchers themselves on tensors of the meta device and note the launches down. A
description written by hand would prove nothing: divisibility by 16 alone decides whether copies are
asynchronous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curry_train.kernels.cross_entropy import cross_entropy_rows, cross_entropy_rows_bwd
from curry_train.kernels.launches import UNSPECIALISED, Launch
from curry_train.kernels.moe_permute import moe_combine, moe_sort
from curry_train.kernels.router import router_topk, router_topk_bwd
from curry_train.kernels.tuning import BUCKETS, bank_products, table_tile

EVERYWHERE = ("sm_80", "sm_90", "sm_100", "gfx942")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def aot_case(
    name: str,
    launch: Launch,
    targets: tuple[str, ...] = EVERYWHERE,
    *,
    dot: bool = False,
    copies: bool = False,
) -> dict:
    """Return the launch as the plain data that an ahead-of-time compile needs.

    Follows how Triton specialises a call: None and the int 1 become constants, pointers and ints
    divisible by 16 are marked as such, but for UNSPECIALISED. Shapes: any, tensors may be meta.
    """
    signature, constexprs, divisible = {}, dict(launch.constants), []
    for parameter in launch.kernel.arg_names:
        if parameter in launch.constants:
            signature[parameter] = "constexpr"
            continue
        value = launch.arguments[parameter]
        fixed = parameter in UNSPECIALISED
        if value is None or (isinstance(value, int) and value == 1 and not fixed):
            signature[parameter] = "constexpr"
            constexprs[parameter] = value
        elif isinstance(value, Tensor):
            signature[parameter] = TYPES[value.dtype]
            divisible.append(parameter)
        elif isinstance(value, float):
            signature[parameter] = "fp32"
        else:
            signature[parameter] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not fixed:
                divisible.append(parameter)
    return {
        "name": name,
        "kernel": launch.kernel.__name__,
        "targets": targets,
        "signature": signature,
        "constexprs": constexprs,
        "divisible": tuple(divisible),
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "dot": dot,
        "copies": copies,
    }


def cross_entropy_cases() -> list[dict]:
    """Return what `cross_entropy` launches for real models."""
    cases = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for vocab in (512, 50257, 151936):
            options = {"z": 1e-4}
            if vocab == 50257:
                options = {"z": 1e-4, "smoothing": 0.1, "softcap": 30.0}
            logits = torch.empty(4096, vocab, dtype=dtype, device="meta")
            target = torch.empty(4096, dtype=torch.int64, device="meta")
            noted: list[Launch] = []
            loss, *saved = cross_entropy_rows(logits, target, **options, run=noted.append)
            cross_entropy_rows_bwd(loss, None, logits, target, *saved, **options, run=noted.append)
            for launch in noted:
                name = f"{launch.kernel.__name__}-{vocab}-{str(dtype).removeprefix('torch.')}"
                cases.append(aot_case(name, launch))
    return cases


def moe_permute_cases() -> list[dict]:
    """Return what `moe_permute` launches for real models."""
    launches: dict[str, Launch] = {}
    for experts, k in ((8, 2), (128, 8), (512, 16)):
        ids = torch.empty(4096, k, dtype=torch.int32, device="meta")
        noted: list[Launch] = []
        moe_sort(ids, experts, 128, run=noted.append)
        launches |= {f"sort-{launch.kernel.__name__}-{experts}": launch for launch in noted}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = torch.empty(32768, 2048, dtype=dtype, device="meta")
        inverse = torch.empty(4096, 8, dtype=torch.int32, device="meta")
        weights = torch.empty(4096, 8, device="meta")
        name = str(dtype).removeprefix("torch.")
        for title, extra in (
            ("plain", (None, None)),
            ("weighted", (weights, None)),
            ("weighted-base", (weights.to(dtype), y[:4096])),
        ):
            noted = []
            moe_combine(y, inverse, *extra, run=noted.append)
            launches[f"combine-{title}-{name}"] = noted[0]
    return [aot_case(name, launch) for name, launch in launches.items()]


MODELS = {
    "qwen3-30b-a3b": (128, 8, {}),
    "deepseek-v2-lite": (64, 6, {"norm": False}),
    "deepseek-v2": (160, 6, {"groups": 8, "group_topk": 3, "group_score": "max", "norm": False}),
    "deepseek-v3": (256, 8, {"groups": 8, "group_topk": 4, "score": "sigmoid", "scale": 2.5}),
    "largest": (512, 16, {"score": "sigmoid"}),
}
"""E, K and options of models, which differ in what is compiled."""


def router_cases() -> list[dict]:
    """Return what `router` launches for real models."""
    cases = []
    for name, (experts, k, options) in MODELS.items():
        logits = torch.empty(4096, experts, device="meta")
        bias = logits[0] if options.get("score") == "sigmoid" else None
        pad_mask = torch.empty(4096, dtype=torch.bool, device="meta")
        launches: list[Launch] = []
        weights, ids, lse = router_topk(
            logits, bias, k, pad_mask=pad_mask, **options, run=launches.append
        )
        options = {key: options[key] for key in ("score", "norm", "scale") if key in options}
        router_topk_bwd(weights, lse, logits, ids, lse, **options, run=launches.append)
        cases += [
            aot_case(f"{title}-{name}", launch)
            for title, launch in zip(("router", "router-bwd"), launches, strict=True)
        ]
    return cases


def _bank_cases(label: str, dtype: torch.dtype, block_m: int, precision: str, **bank) -> list[dict]:
    """Return a case for each launch of the bank's products and each architecture."""
    meta = torch.device("meta")
    found = []
    for product in bank_products(dtype=dtype, device=meta, block_m=block_m, **bank):
        for arch in EVERYWHERE:
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
                found.append(aot_case(name, launch, (arch,), dot=matrix, copies=dot))
    return found


def grouped_matmul_cases() -> list[dict]:
    """Return what `grouped_matmul` launches for real models, for each architecture.

    Shapes: T tokens by D, F, E and K of Qwen3-30B-A3B in each dtype and bucket, and of gpt-oss-20b
    with its limit and bias. What two launches have in common is listed once.
    """
    qwen = {"T": 8192, "D": 2048, "F": 768, "E": 128, "K": 8}
    gpt_oss = {"T": 8192, "D": 2880, "F": 2880, "E": 32, "K": 4, "limit": 7.0, "bias": True}
    found = []
    for block_m in reversed(BUCKETS):
        found += _bank_cases(f"bf16-{block_m}", torch.bfloat16, block_m, "ieee", **qwen)
    found += _bank_cases("gpt_oss-bf16-128", torch.bfloat16, 128, "ieee", **gpt_oss)
    found += _bank_cases("fp32-128", torch.float32, 128, "ieee", **qwen)
    found += _bank_cases("tf32-128", torch.float32, 128, "tf32", **qwen)
    other = _bank_cases("fp16-128", torch.float16, 128, "ieee", **qwen)
    # fp16 has the tiles of bf16: one product and one gradient of it.
    found += [case for case in other if case["name"].startswith(("gate_up-", "gate_up_wgrad"))]
    distinct = {repr({**case, "name": ""}): case for case in reversed(found)}
    return list(reversed(distinct.values()))


CASES = {
    "cross_entropy": cross_entropy_cases,
    "grouped_matmul": grouped_matmul_cases,
    "moe_permute": moe_permute_cases,
    "router": router_cases,
}
