"""The expert bank on a GPU: ours, three styles of computing it, and the roofline.

Started by `bench_moe.py --device cuda`. Every way is checked against float64 first. Times are CUDA
events, 20 warm runs and 50 counted ones with a cold L2, median and 20th and 80th percentile; FLOPs
count true rows only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from moe_baselines import BASELINES, float64_loop
from torch import Tensor

from curry_train.kernels.backends import interleave
from curry_train.kernels.experts import experts

SHAPES = {
    # D, F, E, K
    "qwen3_30b": (2048, 768, 128, 8),
    "dsv2_lite": (2048, 1408, 64, 6),
    "mixtral": (4096, 14336, 8, 2),
}
PEAK_FLOPS, PEAK_BYTES = 790e12, 4.3e12
"""Of one H200 in bf16, FLOP/s and byte/s that a product and a copy reach."""
WARM, COUNTED, L2_BYTES = 20, 50, 256 * 2**20
PASSES = ("fwd", "bwd", "full")
ROUTINGS = ("uniform", "zipf", "one_hot")
TWICE = 2.0
CHECKED = 1024
"""Tokens on which the ways are compared with float64 before any is timed."""


class Floor(NamedTuple):
    """FLOPs and bytes of one kernel; it cannot be faster than either allows."""

    flops: float
    bytes: float

    @property
    def seconds(self) -> float:
        return max(self.flops / PEAK_FLOPS, self.bytes / PEAK_BYTES)


def floors(T: int, D: int, F: int, E: int, K: int, size: int = 2) -> dict[str, dict[str, Floor]]:
    """Return the kernels of a fused bank with what each has to do; `size` is bytes of an element.

    A weight is read once, x and dout once as [T, D] (the L2 holds what a gather repeats).
    """
    R = T * K
    x, y, h, a = T * D * size, R * D * size, R * 2 * F * size, R * F * size
    w13, w2 = E * 2 * F * D * size, E * D * F * size
    wide, narrow = 4 * R * D * F, 2 * R * D * F
    return {
        "fwd": {
            "gate and up": Floor(wide, x + w13 + h + a),
            "down": Floor(narrow, a + w2 + y),
            "combine": Floor(2 * R * D, y + x),
        },
        "bwd": {
            "down": Floor(narrow, x + w2 + 2 * h + a),
            "weights of down": Floor(narrow, x + a + w2),
            "gate and up": Floor(wide, h + w13 + y),
            "weights of gate and up": Floor(wide, h + x + w13),
            "sum of dx": Floor(R * D, y + x),
        },
    }


def floor_of(passed: str, sizes: tuple[int, ...]) -> tuple[float, float]:
    """Return seconds and FLOPs of a pass (fwd, bwd or full) of T, D, F, E, K at the roofline."""
    kernels = floors(*sizes)
    parts = [kernels["fwd"], kernels["bwd"]] if passed == "full" else [kernels[passed]]
    found = [floor for part in parts for floor in part.values()]
    return sum(floor.seconds for floor in found), sum(floor.flops for floor in found)


def route(kind: str, T: int, E: int, K: int, device: str = "cpu") -> Tensor:
    """Return ids [T, K], distinct in a token: uniform, by Zipf's law, or all to the first K."""
    if kind == "one_hot":
        return torch.arange(K, device=device).expand(T, K).contiguous()
    share = torch.ones(E) if kind == "uniform" else 1 / torch.arange(1, E + 1)
    draw = torch.Generator().manual_seed(0)
    return torch.multinomial(share.expand(T, E), K, generator=draw).to(device)


def ways(w13: Tensor, w2: Tensor) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, Tensor]]]:
    """Return for each name the function and the weights it takes; ours keeps w13 interleaved."""
    woven = interleave(w13.detach()).requires_grad_()

    def ours(x: Tensor, ids: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return experts(x, ids, weights, first, second, interleaved=True)

    found = {name: (function, (w13, w2)) for name, function in BASELINES.items()}
    return {"ours": (ours, (woven, w2)), **found}


def saved_bytes(call: Callable[[], Tensor], parameters: tuple[Tensor, ...]) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, parameters aside."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    for parameter in parameters:
        seen.pop(parameter.untyped_storage().data_ptr(), None)
    del out
    return sum(seen.values())


def results(function, leaves: tuple[Tensor, ...], ids: Tensor, upstream: Tensor) -> list[Tensor]:
    """Return the output, dx and dweights of a way to compute x, weights and a bank."""
    x, weights, *bank = leaves
    out = function(x, ids, weights, *bank)
    return [out.detach(), *torch.autograd.grad(out, (x, weights), upstream.to(out.dtype))]


def check(names, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> None:
    """Stop when a way errs twice as much as plain grouped_mm does, by float64 on some tokens."""
    few = slice(0, CHECKED)
    x, weights = (t.detach()[few].requires_grad_() for t in (x, weights))
    ids, upstream = ids[few], torch.randn_like(x)
    wide = tuple(t.detach().double().requires_grad_() for t in (x, weights, w13, w2))
    exact = results(float64_loop, wide, ids, upstream)

    def off(function, bank) -> list[float]:
        found = results(function, (x, weights, *bank), ids, upstream)
        pairs = zip(found, exact, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    plain = off(BASELINES["torch_grouped"], (w13, w2))
    for name in names:
        found = off(*ways(w13, w2)[name])
        if not all(e <= TWICE * p + 1e-3 for e, p in zip(found, plain, strict=True)):
            raise SystemExit(
                f"bench_moe: {name}: output, dx and dweights are off by "
                f"{', '.join(f'{e:.1e}' for e in found)} from float64, torch_grouped by "
                f"{', '.join(f'{p:.1e}' for p in plain)}; nothing was measured"
            )


def event_seconds(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> list[float]:
    """Return the counted times of a call on the current GPU, sorted; `before` is not timed."""
    cold = torch.empty(L2_BYTES, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(WARM + COUNTED):
        value = before()
        cold.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(value) if value is not None else call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) / 1e3 for start, end in events[WARM:])


def summary(times: list[float], passed: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Return median, percentiles, TFLOP/s and the share of the roofline of sorted times."""
    median = statistics.median(times)
    floor, flops = floor_of(passed, sizes)
    return {
        "ms": 1e3 * median,
        "p20": 1e3 * times[len(times) // 5],
        "p80": 1e3 * times[len(times) * 4 // 5],
        "tflops": flops / median / 1e12,
        "roofline": floor / median,
    }


def _time_pass(passed: str, forward: Callable[[], Tensor], upstream: Tensor) -> list[float]:
    if passed == "fwd":
        return event_seconds(forward)
    if passed == "bwd":
        return event_seconds(lambda out: out.backward(upstream), before=forward)
    return event_seconds(lambda: forward().backward(upstream))


def _listed(text: str, allowed, flag: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in allowed:
            raise SystemExit(f"bench_moe: {flag}: found {name!r}; allowed are {', '.join(allowed)}")
    return names


def measure_gpu(options) -> dict[str, Any]:
    """Measure what the options of bench_moe name; print and return the rows."""
    shapes = _listed(options.shape or ",".join(SHAPES), SHAPES, "--shape")
    names = _listed(options.impl, ("ours", *BASELINES), "--impl")
    routings = _listed(options.routing, ROUTINGS, "--routing")
    passes = _listed(options.passes, PASSES, "--pass")
    if not torch.cuda.is_available():
        raise SystemExit("bench_moe: --device cuda: torch sees no GPU here; allowed is cpu")
    rows = []
    for shape in shapes:
        D, F, E, K = SHAPES[shape]
        w13 = (torch.randn(E, 2 * F, D, device="cuda") * D**-0.5).bfloat16().requires_grad_()
        w2 = (torch.randn(E, D, F, device="cuda") * F**-0.5).bfloat16().requires_grad_()
        for tokens in map(int, options.tokens.split(",")):
            for routing in routings:
                ids = route(routing, tokens, E, K, "cuda")
                rows += _rows(names, passes, ids, w13, w2, {"shape": shape, "routing": routing})
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}


def _rows(names, passes, ids: Tensor, w13: Tensor, w2: Tensor, about) -> list[dict[str, Any]]:
    (tokens, choices), (E, D, F) = ids.shape, w2.shape
    x = torch.randn(tokens, D, device="cuda").bfloat16().requires_grad_()
    weights = torch.rand(tokens, choices, device="cuda").bfloat16().requires_grad_()
    upstream = torch.randn_like(x)
    check(names, x, ids, weights, w13, w2)
    rows = []
    for name in names:
        function, bank = ways(w13, w2)[name]

        def forward(function=function, bank=bank) -> Tensor:
            return function(x, ids, weights, *bank)

        kept = saved_bytes(forward, bank)
        for passed in passes:
            torch.cuda.reset_peak_memory_stats()
            times = _time_pass(passed, forward, upstream)
            row = {**about, "tokens": tokens, "impl": name, "pass": passed}
            row |= summary(times, passed, (tokens, D, F, E, choices))
            row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "saved_bytes": kept}
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row for a person to read."""
    return (
        f"{row['shape']:<10} {row['tokens']:>6} {row['routing']:<8} {row['impl']:<17} "
        f"{row['pass']:<5} {row['ms']:8.3f} ms [{row['p20']:.3f}, {row['p80']:.3f}] "
        f"{row['tflops']:6.0f} TFLOP/s {100 * row['roofline']:5.1f} % of the roofline, saved "
        f"{row['saved_bytes'] / row['tokens'] / 1024:.1f} KiB a token"
    )
