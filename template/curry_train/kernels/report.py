"""Say which backend computes the expert bank here, why not another, and with which tiles.

    python -m curry_train.kernels.report [--shape T,D,F,E,K] [--dtype bf16] [--device cuda] [--json]

T tokens, D width, F hidden width of an expert, E experts, K experts per token. Nothing is trained;
on a GPU the self-test of the kernels runs, which compiles them once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import warnings
from importlib import metadata
from typing import Any

import torch

from curry_train.kernels import dispatch, row_products, tuning

SHAPE = (8192, 2048, 768, 128, 8)
"""T, D, F, E, K of a block of Qwen3-30B-A3B on 8192 tokens."""
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def versions() -> dict[str, str | None]:
    """Return the versions of what decides; None for what is not installed. Shapes: none."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        installed = importlib.util.find_spec(name) is not None
        found[name] = metadata.version(name) if installed else None
    return found


def tiles(arch: str, dtype: torch.dtype, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return tile and source of each product of a shape (T, D, F, E, K); none for float64."""
    if dtype not in tuning.DTYPES:
        return []
    tokens, width, hidden, experts, choices = shape
    block_m = tuning.block_m_for(tokens * choices, experts)
    products = {
        "forward, gate and up": ("gmm_swiglu", 2 * hidden, width),
        "forward, down": ("gmm", width, hidden),
        "backward, down": ("gmm_dswiglu", hidden, width),
        "backward, gate and up": ("gmm", width, 2 * hidden),
        "weights of gate and up": ("gmm_wgrad", 2 * hidden, width),
        "weights of down": ("gmm_wgrad", width, hidden),
    }
    found = []
    for product, (kernel, rows, columns) in products.items():
        tile, source = tuning.find_tile(kernel, arch, dtype, block_m, rows, columns)
        found.append({"product": product, "kernel": kernel, "source": source, **tile._asdict()})
    return found


def describe(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...] = SHAPE,
    arch: str | None = None,
) -> dict[str, Any]:
    """Return all that the report says about a shape (T, D, F, E, K) on a device, as plain data."""
    tokens, width, hidden, experts, choices = shape
    odd = dispatch.odd_rows(dtype, width, hidden)
    named = os.environ.get(dispatch.VARIABLE) or "auto"
    site = dispatch.Site(device, dtype, odd, asked=named != "auto")
    rejected = dispatch.rejections(site)
    rows = [
        {"name": name, "usable": rule is None, "reason": rule.reason(site) if rule else ""}
        for name, rule in rejected.items()
    ]
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            chosen = dispatch.choose(device, dtype, width=width, hidden=hidden)
        except ValueError as refused:
            chosen, error = None, str(refused)
    few = row_products.ONEDNN_ROWS * experts > tokens * choices
    onednn = device.type == "cpu" and dtype == torch.float32 and row_products.onednn_is_faster()
    arch = arch or (tuning.arch_of(device) if device.type == "cuda" else "sm_90")
    return {
        "schema": 1,
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "dtype": str(dtype).removeprefix("torch."),
        "shape": dict(zip("TDFEK", shape, strict=True)),
        "chosen": chosen,
        "error": error,
        "override": os.environ.get(dispatch.VARIABLE),
        "backends": rows,
        "grouped_mm_multiplies_by": "oneDNN" if onednn and not few else "F.grouped_mm",
        "tiles_for": arch,
        "tiles": tiles(arch, dtype, shape),
        "tiles_file": str(tuning.tiles_file()) if tuning.tiles_file().exists() else None,
        "versions": versions(),
    }


def render(found: dict[str, Any]) -> str:
    """Return the report as lines for a person. Shapes: none, it takes what `describe` returns."""
    shape = " ".join(f"{letter}={size}" for letter, size in found["shape"].items())
    lines = [f"expert bank on {found['device']} ({found['name']}), {found['dtype']}, {shape}"]
    if found["override"]:
        lines.append(f"{dispatch.VARIABLE}={found['override']} is set and decides")
    lines.append(f"chosen: {found['chosen'] or 'none: ' + found['error']}")
    for row in found["backends"]:
        later = "" if row["name"] == found["chosen"] else ", comes later"
        said = f"usable{later}" if row["usable"] else f"rejected: {row['reason']}"
        mark = "*" if row["name"] == found["chosen"] else " "
        lines.append(f"{mark} {row['name']:<11} {said}")
    if found["chosen"] == "grouped_mm":
        lines.append(f"grouped_mm multiplies by {found['grouped_mm_multiplies_by']}")
    here = "" if found["chosen"] == "triton" else " (not used here)"
    lines.append(f"tiles for {found['tiles_for']}{here}:")
    for tile in found["tiles"]:
        sizes = f"{tile['block_m']}x{tile['block_n']}x{tile['block_k']}"
        lines.append(
            f"  {tile['product']:<22} {tile['kernel']:<11} {sizes:<11} {tile['num_warps']} warps, "
            f"{tile['num_stages']} stages, from {tile['source']}"
        )
    if not found["tiles"]:
        lines.append(f"  none: the kernels do not take {found['dtype']}")
    known = [f"{name} {version or 'not installed'}" for name, version in found["versions"].items()]
    return "\n".join([*lines, "versions: " + ", ".join(known)])


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    sizes = tuple(int(part) for part in parts if part.isdecimal())
    if len(parts) != len(SHAPE) or len(sizes) != len(SHAPE) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed are five positive numbers T,D,F,E,K; set 8192,2048,768,128,8"
        )
    return sizes


def _device(text: str) -> torch.device:
    gpu = torch.accelerator.current_accelerator(check_available=True)
    counts = {"cpu": 1, "meta": 1} | ({gpu.type: torch.accelerator.device_count()} if gpu else {})
    name, _, index = text.partition(":")
    if name not in counts or (index and index not in map(str, range(counts[name]))):
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed here are {', '.join(counts)} and their indices; set cpu"
        )
    return torch.device(text)


def main(argv: list[str] | None = None) -> int:
    """Print the report of one shape [T, D, F, E, K]."""
    parser = argparse.ArgumentParser(
        prog="python -m curry_train.kernels.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--shape", type=_shape, default=SHAPE, metavar="T,D,F,E,K")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: bf16 on a GPU, else fp32")
    parser.add_argument("--device", type=_device, help="default: cuda if there is one, else cpu")
    parser.add_argument("--arch", choices=sorted(tuning.SHARED_BYTES), help="tiles of another GPU")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    try:
        found = describe(device, dtype, options.shape, options.arch)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(found) if options.json else render(found))
    return 0 if found["chosen"] else 1


if __name__ == "__main__":
    sys.exit(main())
