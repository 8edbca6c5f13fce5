"""Measure what it costs to read published weights: time, and memory that is this process's own.

    python benchmarks/import_cost.py [--mb N] [--rounds N] [--json]

Folders as transformers writes them lie in the page cache. Time is compared with load_file and a
copy of every tensor of the same files, in the dtype of the parameters, which is the least that any
reader must do; both in turn, medians over rounds. Memory is the peak of anonymous pages while a
fresh process reads, mapped files not counted, over that of 1.3 largest files + its own parameters.
Ends with 1 when a row misses its bound. Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from curry_train.checkpoint import families, huggingface
from curry_train.checkpoint.tensor_names import sources
from curry_train.checkpoint.training_state import weight_tensors
from curry_train.checkpoint.weight_files import INDEX
from curry_train.config import Config, ModelConfig, ParallelConfig
from curry_train.models.protocol import give_memory, meta_model, named_state
from curry_train.parallel.mesh import build_mesh
from curry_train.parallel.parallelize import build_chunks
from curry_train.testing import run_ranks

SPEED, LARGEST_FILES = 0.7, 1.3
"""Least share of the speed of load_file and copy; largest files of memory beside the model."""
FILES = 4
DENSE = ModelConfig(
    vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_attention_heads=16,
    num_key_value_heads=4, head_dim=64, qk_norm=False,
)  # fmt: skip
MIXTURE = ModelConfig(
    vocab_size=8192, hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
    num_experts=16, moe_intermediate_size=256,
)  # fmt: skip
CASES = {
    "dense float32": (DENSE, torch.float32, 9.3),
    "experts float32": (MIXTURE, torch.float32, 15.3),
    "experts bfloat16": (MIXTURE, torch.bfloat16, 15.3),
}
"""Model of two blocks, dtype of the files, and millions of parameters of a block."""


def make_folder(folder: Path, model: ModelConfig, dtype: torch.dtype) -> None:
    """Write random weights of a model in several files with an index."""
    raw = families.write_config(model, str(dtype).removeprefix("torch."))
    family = families.FAMILIES[raw["architectures"][0]]
    state = dict(named_state(meta_model(Config(model=model))))
    shapes = {s.key: s.shape for n, t in state.items() for s in sources(family, n, tuple(t.shape))}
    keys, placed = list(shapes), {}
    each = -(-len(keys) // FILES)
    for at in range(FILES):
        file = f"model-{at + 1:05d}-of-{FILES:05d}.safetensors"
        part = keys[at * each : (at + 1) * each]
        save_file({key: torch.randn(shapes[key]).to(dtype) for key in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(raw))


def time_rounds(folder: Path, model: ModelConfig, rounds: int) -> dict[str, float]:
    """Return seconds of ours and of load_file and copy, medians of interleaved rounds."""
    times: dict[str, list[float]] = {"seconds": [], "baseline_seconds": []}
    for _ in range(rounds + 1):
        return_memory()
        module = meta_model(Config(model=model))
        give_memory(module, "cpu")
        tensors = dict(named_state(module))
        begin = time.perf_counter()
        huggingface.load(folder, tensors, model)
        times["seconds"].append(time.perf_counter() - begin)
        del module, tensors
        return_memory()
        begin = time.perf_counter()
        copies = [
            tensor.to(torch.float32, copy=True)
            for file in sorted(folder.glob("*.safetensors"))
            for tensor in load_file(file).values()
        ]
        times["baseline_seconds"].append(time.perf_counter() - begin)
        del copies
    return {name: statistics.median(of[1:]) for name, of in times.items()}  # the first is warm-up


def return_memory() -> None:
    """Give freed memory back to the system: reused pages would cost less and count as nothing."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def anonymous() -> int:
    """Return the bytes of this process's own pages that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def peak_of_rank(rank: int, world: int, folder: Path, tp: int) -> list[int]:
    """Return [peak bytes while reading, bytes of the parameters] of a rank."""
    model = families.read_config(json.loads((folder / "config.json").read_text()))
    parallel = ParallelConfig(tp=tp)
    config = Config(model=model, parallel=parallel)
    device = torch.device("cpu")
    mesh = build_mesh(parallel, device=device, local_rank=rank, comm_timeout=60.0)
    return_memory()
    before = anonymous()
    chunks, shards = build_chunks(config, mesh)
    runtime: Any = argparse.Namespace(chunks=chunks, shards=shards)
    tensors = weight_tensors(runtime)
    peak, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    huggingface.load(folder, tensors, model, mesh)
    done.set()
    thread.join()
    own = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    return [max(peak) - before, own]


def rows(mb: int = 160, rounds: int = 5) -> list[dict[str, Any]]:
    """Return a row for each case: name, value, bound, unit, ok and the figures behind them.

    mb: size of the parameters in float32.
    """
    found: list[dict[str, Any]] = []
    for name, (model, dtype, millions) in CASES.items():
        blocks = max(round((mb / 4 - 16.8) / millions), 1)
        model = replace(model, num_hidden_layers=blocks)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            make_folder(folder, model, dtype)
            largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
            times = time_rounds(folder, model, rounds)
            speed = times["baseline_seconds"] / times["seconds"]
            found.append(row(f"speed, {name}", speed, SPEED, "x load_file + copy", times))
            for world in (1, 2):
                ranks = run_ranks(peak_of_rank, world, folder, world)
                share = max(peak / (LARGEST_FILES * largest + own) for peak, own in ranks)
                figures = {"peak_bytes": max(peak for peak, _ in ranks), "largest_file": largest}
                what = f"memory, {name}, {world} rank{'s' * (world > 1)}"
                found.append(row(what, share, 1.0, "of what is allowed", figures, most=True))
    return found


def row(
    name: str, value: float, bound: float, unit: str, figures: dict[str, Any], most: bool = False
) -> dict[str, Any]:
    ok = value <= bound if most else value >= bound
    return {"name": name, "value": value, "bound": bound, "unit": unit, "ok": ok, **figures}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--mb", type=int, default=160, help="megabytes of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = rows(args.mb, args.rounds)
    if args.json:
        print(json.dumps(found))
    else:
        for each in found:
            sign = "at least" if "speed" in each["name"] else "at most"
            verdict = "ok" if each["ok"] else "MISSED"
            bound = f"{sign} {each['bound']:.2f}"
            print(f"{each['name']:38} {each['value']:.2f} {each['unit']} ({bound}) {verdict}")
    return 0 if all(each["ok"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
