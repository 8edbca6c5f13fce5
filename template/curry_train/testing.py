"""Run a function on several ranks of this machine, and compare tensors so that a miss is found.

Ranks are forked after torch is imported, which costs a tenth of a second instead of the seconds
of a fresh interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Call `function(rank, world, *args)` on `world` forked ranks over gloo; return their results.

    Results travel through a pipe and must not hold torch tensors (their shared memory dies with
    the rank): return numbers, lists or NumPy arrays. Raises AssertionError with the traceback of
    the first rank that failed, or when `timeout` seconds pass; no rank is left behind.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(function, rank, world, store, theirs, args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.join(timeout=1.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _rank_main(
    function: Callable[..., Any], rank: int, world: int, store: str, pipe: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world
        )
        pipe.send(("ok", function(rank, world, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(("failed", (time.time(), rank, traceback.format_exc(), repr(error))))
    finally:
        pipe.close()
        os._exit(0)


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results, failures = [], []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(deadline - time.monotonic(), 0.0) if not failures else 5.0):
            failures.append((float("inf"), rank, "", "no answer before the timeout"))
            continue
        try:
            kind, value = pipe.recv()
        except EOFError:
            kind, value = "failed", (float("inf"), rank, "", "the rank died without a word")
        if kind == "ok":
            results.append(value)
        else:
            failures.append(value)
    if failures:
        _, rank, text, last = min(failures)
        raise AssertionError(f"rank {rank} failed first: {last}\n{text}")
    return results


def assert_same(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, tolerance: float
) -> None:
    """Compare named tensors and print the worst element of the worst tensor on a miss.

    Error = max|found - wanted| / max(max|wanted|, 1e-6 * norm of all wanted tensors together), so
    that a tensor of pure rounding noise is not held against itself. Both must hold the same names
    and shapes. tolerance 0 asks for bitwise equality.
    """
    missing, extra = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    assert not missing and not extra, f"missing {sorted(missing)}, unexpected {sorted(extra)}"
    norms = [tensor.detach().double().norm() for tensor in wanted.values()]
    floor = max(1e-6 * float(torch.stack(norms).norm()), 1e-300) if norms else 1.0
    worst, where = -1.0, ""
    for name, reference in wanted.items():
        value, reference = found[name].detach(), reference.detach()
        assert value.shape == reference.shape, (
            f"{name}: found {tuple(value.shape)}, wanted {tuple(reference.shape)}"
        )
        if reference.numel() == 0:
            continue
        gap = (value.double() - reference.double()).abs()
        error = float(gap.max() / reference.double().abs().max().clamp(min=floor))
        if worst == worst and not error <= worst:  # the first NaN stays the worst
            place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
            worst = error
            where = f"{name}{list(place)}: found {value[place]}, wanted {reference[place]}"
    assert worst <= tolerance, f"error {worst:.3e} above {tolerance:.0e} at {where}"
