"""The training step, timed: the very `train_step` of training, never a copy of it.

`python -m curry_train.benchmark --json key=value ...`
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from curry_train.command_line import refuse
from curry_train.config import ConfigError
from curry_train.data import DataError
from curry_train.profiling import Spans, no_spans, peak_memory
from curry_train.runtime import Runtime, build_runtime
from curry_train.sizes import flops_per_token
from curry_train.step import train_step

# Dense bf16 peak in FLOP/s by device name, from the vendors' data sheets (without sparsity).
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
PARTS = ("forward", "backward", "optimizer", "data")


def run_accumulated_step(runtime: Runtime, *, steps: int = 10, warmup: int = 3) -> dict[str, Any]:
    """Time `steps` optimizer steps after `warmup` untimed ones; the runtime trains on meanwhile.

    Returns seconds (step_time is the median; p20 and p80 around it; forward, backward, optimizer
    and data are medians of the parts), tokens_per_s (global), memory_bytes (peak), flops (of one
    step, all ranks), mfu (share of the device's bf16 peak, None where the peak is unknown),
    cpu_time (process seconds per step) and step_times (every measured step).
    Raises ValueError when steps is below 1 or warmup below 0.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps={steps} must be at least 1 and warmup={warmup} at least 0")
    for _ in range(warmup):
        train_step(runtime)
    times, parts, tokens = [], [], []
    cpu_start = time.process_time()
    try:
        for _ in range(steps):
            runtime.spans = spans = Spans(runtime.device)
            spans.wait()
            start = time.perf_counter()
            out = train_step(runtime)
            spans.wait()
            times.append(time.perf_counter() - start)
            parts.append(spans.seconds)
            tokens.append(out.tokens)
    finally:
        runtime.spans = no_spans
    cpu_time = (time.process_time() - cpu_start) / steps
    step_time = statistics.median(times)
    config, flops = runtime.config, None
    per_token = flops_per_token(config.model, config.data.seq_len)
    if per_token is not None:
        flops = per_token * config.data.global_batch_size * config.data.seq_len
    peak = device_peak(runtime.device)
    low, high = quantiles(times)
    return {
        "step_time": step_time,
        "p20": low,
        "p80": high,
        **{part: statistics.median(p[part] for p in parts) for part in PARTS},
        "tokens_per_s": statistics.median(tokens) / step_time,
        "memory_bytes": peak_memory(runtime.device),
        "flops": flops,
        "mfu": flops / (peak * runtime.mesh.world * step_time) if peak and flops else None,
        "cpu_time": cpu_time,
        "step_times": times,
    }


def quantiles(times: list[float]) -> tuple[float, float]:
    """Return the 20th and 80th percentile; of a single value, twice that value."""
    if len(times) == 1:
        return times[0], times[0]
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    return cuts[0], cuts[3]


def device_peak(device: torch.device) -> float | None:
    """Return the bf16 peak of the device in FLOP/s, None when it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m curry_train.benchmark", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings as of train.py")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps first (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    args = parser.parse_intermixed_args(argv)
    try:
        runtime = build_runtime(args.overrides)
        result = run_accumulated_step(runtime, steps=args.steps, warmup=args.warmup)
    except (ConfigError, DataError, ValueError) as error:
        return refuse(error)
    if runtime.mesh.rank != 0:
        return 0
    if args.json:
        print(json.dumps(result))
        return 0
    for key in ("step_time", "p20", "p80", *PARTS, "cpu_time"):
        print(f"{key:>13}  {result[key] * 1e3:10.2f} ms")
    print(f"{'tokens_per_s':>13}  {result['tokens_per_s']:10,.0f}")
    print(f"{'memory':>13}  {result['memory_bytes'] / 2**20:10,.0f} MiB")
    mfu = result["mfu"]
    shown = "unknown: no peak is known for this device" if mfu is None else f"{mfu:.1%}"
    print(f"{'mfu':>13}  {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
