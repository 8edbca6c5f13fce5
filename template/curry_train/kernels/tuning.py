"""Tiles of the grouped products: a static table, a file of measured entries, a command to measure.

    python -m curry_train.kernels.tuning --width 2048 --hidden 768 --experts 128 --top-k 8

Training never tunes: it looks a tile up, by architecture, dtype, bucket of rows per expert and the
sizes of the weight. The number of tokens is in no key, so a longer batch compiles nothing anew.
A bucket is the height of a tile of rows, block_m: the sort has to cut rows before any product runs.
Measured entries live in tiles.json beside this file, or where CURRY_TILES points.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from curry_train.kernels.reference_routing import moe_sort

FILE_VARIABLE = "CURRY_TILES"
BUCKETS = (16, 32, 64, 128)
KERNELS = ("gmm", "gmm_swiglu", "gmm_dswiglu", "gmm_wgrad")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

SHARED_BYTES = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_103": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}
"""Shared memory that one program may use. Source: CUDA C Programming Guide, table "technical
specifications per compute capability", less 1 KiB kept by the system; AMD CDNA3 and CDNA4 ISA."""


class Tile(NamedTuple):
    """Sizes of one program's work: for gmm_wgrad [block_n, block_m] of dw and block_k rows."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8


def arch_of(device: torch.device) -> str:
    """Return "sm_90", "gfx942" and the like; "interpreter" for a device that is no GPU."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def block_m_for(rows: int, experts: int) -> int:
    """Return the bucket, the height of row tiles, for R rows over E experts.

    The smallest height that holds the mean expert's rows: taller tiles would be mostly empty.
    """
    mean = rows / max(experts, 1)
    return next((height for height in BUCKETS[:-1] if mean <= height), BUCKETS[-1])


LAYOUTS = {
    # (kernel, bytes of an element): {bucket: (block_n, block_k, num_warps)}
    ("gmm", 2): {16: (128, 64, 4), 32: (128, 64, 4), 64: (128, 64, 4), 128: (128, 64, 8)},
    ("gmm_swiglu", 2): {16: (128, 64, 4), 32: (128, 64, 4), 64: (128, 64, 8), 128: (128, 64, 8)},
    ("gmm_dswiglu", 2): {16: (64, 64, 4), 32: (64, 64, 4), 64: (64, 32, 4), 128: (64, 64, 8)},
    ("gmm", 4): {16: (64, 32, 4), 32: (64, 32, 4), 64: (64, 32, 4), 128: (64, 16, 4)},
    ("gmm_swiglu", 4): {16: (64, 32, 4), 32: (64, 32, 4), 64: (64, 32, 4), 128: (64, 16, 8)},
    ("gmm_dswiglu", 4): {16: (32, 32, 4), 32: (32, 32, 4), 64: (32, 32, 4), 128: (32, 32, 8)},
}
WGRAD_LAYOUTS = {
    # bytes of an element: {bucket: (block_m, block_n, block_k, num_warps)}, block_k in rows
    2: {
        16: (128, 128, 16, 8),
        32: (128, 128, 32, 8),
        64: (128, 128, 64, 8),
        128: (128, 128, 64, 8),
    },
    4: {16: (64, 64, 16, 4), 32: (64, 64, 32, 4), 64: (64, 64, 32, 4), 128: (64, 64, 32, 4)},
}
STAGES = {"sm_80": 3, "sm_86": 3, "sm_89": 3, "sm_90": 4, "sm_100": 4, "sm_103": 4, "sm_120": 3}
"""Copies in flight on NVIDIA; AMD keeps its next tile in registers, so 2 there."""


def table_tile(kernel: str, arch: str, dtype: torch.dtype, block_m: int) -> Tile:
    """Return the tile of the static table; fewer stages where shared memory is small."""
    if arch == "interpreter":
        return Tile(32 if kernel == "gmm_wgrad" else block_m, 32, 32, 4, 1, 2)
    bucket = max((height for height in BUCKETS if height <= block_m), default=BUCKETS[0])
    if kernel == "gmm_wgrad":
        rows, block_n, block_k, warps = WGRAD_LAYOUTS[dtype.itemsize][bucket]
    else:
        rows, (block_n, block_k, warps) = block_m, LAYOUTS[kernel, dtype.itemsize][bucket]
    stage = (rows + block_n) * block_k * dtype.itemsize
    room = SHARED_BYTES.get(arch, min(SHARED_BYTES.values())) // stage
    return Tile(rows, block_n, block_k, warps, max(1, min(STAGES.get(arch, 2), room)))


def entry_key(kernel: str, arch: str, dtype: torch.dtype, block_m: int, N: int, K: int) -> str:
    """Return the name of an entry of the file: "gmm/sm_90/bf16/128/2048x768"."""
    return f"{kernel}/{arch}/{DTYPES[dtype]}/{block_m}/{N}x{K}"


def tiles_file() -> Path:
    """Return where measured entries are read from and written to; the file need not exist."""
    return Path(os.environ.get(FILE_VARIABLE) or Path(__file__).with_name("tiles.json"))


@functools.lru_cache(maxsize=8)
def read_tiles(path: Path) -> dict[str, Tile]:
    """Return the measured entries of a file, none if there is no file.

    Raises: ValueError naming the file and the entry that is no tile.
    """
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["tiles"]
        return {key: _checked(key, Tile(**entry["tile"])) for key, entry in entries.items()}
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise ValueError(
            f"{path}: {error}; a file written by `python -m curry_train.kernels.tuning` is allowed;"
            f" write it again, or point {FILE_VARIABLE} elsewhere"
        ) from error


def _checked(key: str, tile: Tile) -> Tile:
    """Return the tile if a kernel can be compiled with it."""
    powers = tile[:4]
    if any(not isinstance(n, int) or n < 1 for n in tile) or any(n & (n - 1) for n in powers):
        raise ValueError(f"{key}: {tile}: sizes and num_warps have to be powers of two")
    kernel, _, _, block_m, _ = key.split("/")
    if kernel != "gmm_wgrad" and tile.block_m != int(block_m):
        raise ValueError(f"{key}: block_m {tile.block_m} is not the bucket {block_m}")
    return tile


def find_tile(
    kernel: str, arch: str, dtype: torch.dtype, block_m: int, N: int, K: int
) -> tuple[Tile, str]:
    """Return the tile for a weight [E, N, K] and where it is from: "tuned", "table" or "default".

    "default" is an architecture that the table does not know: what the smallest one can hold.
    Shapes: N and K of the product, for gmm_wgrad N and M of dw [E, N, M].
    """
    tuned = read_tiles(tiles_file()).get(entry_key(kernel, arch, dtype, block_m, N, K))
    if tuned:
        return tuned, "tuned"
    known = arch in SHARED_BYTES or arch == "interpreter"
    return table_tile(kernel, arch, dtype, block_m), "table" if known else "default"


@functools.lru_cache(maxsize=1024)
def tile_for(
    kernel: str, device: torch.device, dtype: torch.dtype, block_m: int, N: int, K: int
) -> Tile:
    """Return the tile that a launch on the device uses; remembered, so the file is read once.

    Shapes: as find_tile.
    """
    return find_tile(kernel, arch_of(device), dtype, block_m, N, K)[0]


def candidates(kernel: str, arch: str, dtype: torch.dtype, block_m: int) -> Iterator[Tile]:
    """Yield the tiles worth timing, the one of the table first; all of them fit shared memory."""
    first = table_tile(kernel, arch, dtype, block_m)
    yield first
    rows, block_k = first.block_m, first.block_k
    room = SHARED_BYTES.get(arch, min(SHARED_BYTES.values()))
    for block_n, warps, stages in itertools.product((64, 128, 256), (4, 8), (2, 3, 4)):
        tile = Tile(rows, block_n, block_k, warps, stages, first.group_m)
        area = rows * block_n * (2 if kernel == "gmm_dswiglu" else 1)
        fits = (rows + block_n) * block_k * dtype.itemsize * stages <= room
        # Between 8 and 128 float32 sums a thread: fewer idle, more spill.
        if fits and 8 <= area // (32 * warps) <= 128 and tile != first:
            yield tile


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


def measure_seconds(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median time of a call on a GPU, with its L2 cache cold.

    Shapes: any shape; the call takes no argument.
    """
    cold = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    pairs = []
    for _ in range(repeats + 3):
        cold.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    times = sorted(start.elapsed_time(end) for start, end in pairs[3:])
    return times[len(times) // 2] / 1e3


def tune(
    products: Iterable[Product],
    arch: str,
    dtype: torch.dtype,
    block_m: int,
    seconds: Callable[[Callable[[], object]], float],
) -> dict[str, dict]:
    """Time the candidates of each product and return the fastest ones as entries of the file.

    A candidate that does not compile is passed over; one whose values differ from those of the
    table's tile by more than rounding is a compiler's error, named and passed over.
    Shapes: products as `bank_products` returns them; seconds(call) -> float.
    """
    entries = {}
    for product in products:
        expected, best = None, None
        for tile in candidates(product.kernel, arch, dtype, block_m):
            try:
                found = product.call(tile=tile)
            except Exception as error:
                print(f"{product.name}: {tile}: {type(error).__name__}", file=sys.stderr)
                continue
            expected = found if expected is None else expected
            if not _agree(found, expected):
                print(f"{product.name}: {tile}: wrong values, passed over", file=sys.stderr)
                continue
            time = seconds(functools.partial(product.call, tile=tile))
            if best is None or time < best[0]:
                best = (time, tile)
        if best is None:
            raise RuntimeError(f"{product.name}: no tile could be compiled for {arch}")
        key = entry_key(product.kernel, arch, dtype, block_m, product.N, product.K)
        entries[key] = {"tile": best[1]._asdict(), "microseconds": round(best[0] * 1e6, 1)}
        print(f"{key}: {best[1]} {best[0] * 1e6:.1f} us")
    return entries


def _agree(found, expected) -> bool:
    if isinstance(found, torch.Tensor):
        wide, error = expected.double(), (found.double() - expected.double()).norm()
        return bool(error <= 0.01 * wide.norm())
    return all(_agree(one, other) for one, other in zip(found, expected, strict=True))


def write_tiles(path: Path, entries: dict[str, dict]) -> None:
    """Add the entries to the file, replacing those of the same key."""
    read_tiles(path)
    old = json.loads(path.read_text(encoding="utf-8"))["tiles"] if path.exists() else {}
    text = json.dumps({"format": 1, "tiles": dict(sorted((old | entries).items()))}, indent=1)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
    read_tiles.cache_clear()
    tile_for.cache_clear()


def main(argv: list[str] | None = None) -> int:
    """Tune the products of one expert bank on the current GPU and write the file."""
    parser = argparse.ArgumentParser(prog="python -m curry_train.kernels.tuning")
    for name, default in (("width", 2048), ("hidden", 768), ("experts", 128), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=8192, help="decides the bucket only")
    parser.add_argument("--dtype", choices=sorted(DTYPES.values()), default="bf16")
    parser.add_argument("--out", type=Path, default=tiles_file())
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "tuning: found no GPU; tiles are timed on a GPU only; run this on the machine that"
            " trains, or train with the static table, which needs no file",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = next(dtype for dtype, name in DTYPES.items() if name == options.dtype)
    block_m = block_m_for(options.tokens * options.top_k, options.experts)
    sizes = (options.tokens, options.width, options.hidden, options.experts, options.top_k)
    products = bank_products(*sizes, dtype=dtype, device=device, block_m=block_m)
    seconds = functools.partial(measure_seconds, device=device)
    write_tiles(options.out, tune(products, arch_of(device), dtype, block_m, seconds))
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
