"""Named spans of a step: wall seconds per part, and nothing at all when nobody asked."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def no_spans(name: str) -> Any:
    """Stand in for `Spans` when nothing is measured."""
    return nullcontext()


class Spans:
    """Collect the seconds spent in each named part.

    On an accelerator every border waits for the device, so that a part is charged for its own
    kernels; this slows the step a little, which is why training runs without it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.wait()
        start = time.perf_counter()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self.wait()
            self.seconds[name] += time.perf_counter() - start

    def wait(self) -> None:
        """Let the device finish what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def peak_memory(device: torch.device) -> int:
    """Return the largest memory use so far in bytes: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
