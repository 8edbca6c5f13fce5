"""Time checkpoints against torch.save and torch.load of the same bytes on the same disk.

    python benchmarks/bench_checkpoint.py [--json [FILE]] [--folder DIR] [--megabytes N] [--pairs N]

save: dcp.save against torch.save and fsync. load: dcp.load into tensors that exist, with and
without hashes, against torch.load. async: how long the second and later saves beside the loop
block it, against a synchronous save of the same. Each on one rank and on two that work at the same
time, N MB a rank, in interleaved pairs; wall time until the slower rank is done; a ratio is that of
medians, above 1 ours is faster. The page cache is warm: what is read was written just before, and
files are flushed, not dropped. --folder: on the disk to measure, by default the temporary folder.
The rows of import_cost.py follow. Exit 1 and a line for each bound that is missed. --json writes
{rows, missed, page_cache, torch, cores, load}, to FILE or to the terminal in place of the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.distributed as dist
from pairs import measure_pairs, ratio_interval

from curry_train.checkpoint import dcp
from curry_train.checkpoint.async_save import AsyncSave
from curry_train.config import ParallelConfig
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.parallel.shards import Part
from curry_train.testing import run_ranks

SAVE, LOAD, LOAD_VERIFIED = 0.8, 0.8, 0.45
"""Least speed of ours over torch's."""
BLOCKED = 0.15
"""Most of a synchronous save that one beside the loop may block it."""
WARMUP = 3
META = {"samples_consumed": 0, "data_hash": "d", "config_hash": "c", "model": {}, "mesh": {}}
WIDTH = 1024


class Bench:
    """One rank of a measurement: float32 matrices of 4 and 16 MB and vectors, as a model has."""

    def __init__(self, rank: int, world: int, folder: Path, megabytes: int) -> None:
        self.mesh = Mesh.single()
        if world > 1:
            device = torch.device("cpu")
            self.mesh = build_mesh(
                ParallelConfig(), device=device, local_rank=rank, comm_timeout=600.0
            )
        self.rank, self.folder, self.step = rank, folder, 0
        generator = torch.Generator().manual_seed(rank)
        self.tensors: dict[str, torch.Tensor] = {}
        self.parts: dict[str, Part] = {}
        left = megabytes * 10**6
        while left > 0:
            at = len(self.tensors)
            rows = min((1, WIDTH, 4 * WIDTH)[at % 3], -(-left // (4 * WIDTH)))
            tensor = torch.randn(rows, WIDTH, generator=generator)
            name = f"model.layers.{at}.weight"
            self.tensors[name] = tensor
            self.parts[name] = Part(tensor, (world * rows, WIDTH), (rank * rows, 0))
            left -= tensor.nbytes
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def clock(self, call: Callable[[], Any]) -> float:
        """Return the seconds until the call has returned on every rank; the file goes after it."""
        group = self.mesh.group("world")
        if group is not None:
            dist.barrier(group)
        start = time.perf_counter()
        call()
        if group is not None:
            dist.barrier(group)
        return time.perf_counter() - start

    def clean_clock(self, call: Callable[[], Any]) -> float:
        """Like clock; what was written is removed from the disk afterwards."""
        seconds = self.clock(call)
        self.file().unlink(missing_ok=True)
        if self.rank == 0:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
            os.sync()
        return seconds

    def file(self) -> Path:
        return self.folder / f"rank-{self.rank}.pt"

    def torch_save(self) -> None:
        with self.file().open("wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def arguments(self) -> dict[str, Any]:
        self.step += 1
        arguments = {"step": self.step, "tensors": self.parts, "rank_tensors": {}}
        return {**arguments, "meta": META, "files": {}, "keep": 0}

    def save(self) -> Path:
        return dcp.save(self.folder / "checkpoints", **self.arguments(), mesh=self.mesh)

    def measure_save(self, pairs: int) -> tuple[np.ndarray, np.ndarray]:
        return self._measure(lambda _: self.save(), lambda _: self.torch_save(), pairs)

    def measure_load(self, pairs: int, verify: bool) -> tuple[np.ndarray, np.ndarray]:
        path = self.save()
        self.torch_save()
        filled = {
            name: part._replace(tensor=torch.zeros_like(part.tensor))
            for name, part in self.parts.items()
        }

        def ours(_: Any) -> None:
            dcp.load(path, filled, mesh=self.mesh, verify=verify)

        times = self._measure(ours, lambda _: torch.load(self.file()), pairs, clock=self.clock)
        for name, part in filled.items():
            assert torch.equal(part.tensor, self.tensors[name]), f"{name} was not loaded"
        self.clean_clock(lambda: None)
        return times

    def measure_async(self, pairs: int) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds that the loop is blocked by a save beside it, and by one within."""
        beside, root = AsyncSave(self.mesh, 600.0), self.folder / "checkpoints"
        blocked: list[float] = []

        def start() -> None:
            beside.start(root, **self.arguments(), committed=lambda path, copied: None)

        def whole(_: Any) -> None:
            blocked.append(self.clock(start))
            beside.wait()

        _, within = self._measure(whole, lambda _: self.save(), pairs)
        return np.array(blocked[-pairs:]), within

    def _measure(self, ours, theirs, pairs: int, clock=None) -> tuple[np.ndarray, np.ndarray]:
        inputs = range(pairs + WARMUP)
        return measure_pairs(ours, theirs, inputs, clock=clock or self.clean_clock, warmup=WARMUP)


def measure(rank: int, world: int, folder: Path, megabytes: int, pairs: int) -> list[dict]:
    """Return the rows of one number of ranks; runs on each of them."""
    torch.set_num_threads(1)
    bench = Bench(rank, world, folder, megabytes)
    rows = []
    for name, least, times in (
        ("save", SAVE, bench.measure_save(pairs)),
        ("load", LOAD, bench.measure_load(pairs, verify=False)),
        ("load and verify", LOAD_VERIFIED, bench.measure_load(pairs, verify=True)),
    ):
        ours, theirs = times
        ratio = float(np.median(theirs) / np.median(ours))
        interval = ratio_interval(ours, theirs)
        more = {"pairs_low": interval["low"], "pairs_high": interval["high"]}
        row = {"name": name, "value": ratio, "bound": least, "unit": "x torch", **more}
        rows.append({**row, "ok": ratio >= least, **_medians(*times)})
    blocked, within = bench.measure_async(pairs)
    share = float(np.median(blocked) / np.median(within))
    row = {"name": "loop blocked by async", "value": share, "bound": BLOCKED, "unit": "of a save"}
    row["worst"] = float(blocked.max() / np.median(within))
    rows.append({**row, "ok": share <= BLOCKED, **_medians(blocked, within)})
    ranks = f"{world} rank{'s' * (world > 1)}"
    same = {"ranks": world, "megabytes": bench.bytes / 1e6, "pairs": pairs}
    return [{**row, "name": f"{row['name']}, {ranks}", **same} for row in rows]


def _medians(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    return {"seconds": float(np.median(ours)), "baseline_seconds": float(np.median(theirs))}


def measure_imports() -> list[dict[str, Any]]:
    """Return the rows of import_cost.py, where it lies beside this file."""
    if importlib.util.find_spec("import_cost") is None:
        return []
    return importlib.import_module("import_cost").rows()


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows of measure and of import_cost.py."""
    print(f"{'what':38} {'baseline':>9} {'ours':>9} {'value':>6}  bound")
    for row in rows:
        times = [row.get(key) for key in ("baseline_seconds", "seconds")]
        told = " ".join(" " * 9 if t is None else f"{1e3 * t:6.0f} ms" for t in times)
        print(f"{row['name']:38} {told} {row['value']:6.2f}  {row['bound']} {row['unit']}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=200, help="a rank")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--no-imports", action="store_true", help="leave out import_cost.py")
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for world in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="checkpoints-") as folder:
            given = (Path(folder), arguments.megabytes, arguments.pairs)
            rows += run_ranks(measure, world, *given, timeout=3000.0)[0]
    rows += [] if arguments.no_imports else measure_imports()
    missed = [row["name"] for row in rows if not row["ok"]]
    report = {"rows": rows, "missed": missed, "page_cache": "warm", "torch": torch.__version__}
    report |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if arguments.json == "-":
        print(json.dumps(report, indent=1))
    else:
        print_table(rows)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
