"""What every test gets: a fixed seed, one thread, and no luck with uninitialised memory."""

from __future__ import annotations

import copy
import functools
import gc
import os

# Read by OpenMP once, so it comes before torch is imported: test ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
from collections import Counter

import numpy as np
import pytest
import torch

from curry_train import compose

pytest.register_assert_rewrite("model_checks", "variant_checks")

FRESH = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker is left alone with one at the end.

    Of a test marked sampled(n) every n-th case runs, all of them with CURRY_TRAIN_FULL=1.
    """
    seen: Counter[str] = Counter()
    skip = pytest.mark.skip(reason="one of many alike cases (--full)")
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None or os.environ.get("CURRY_TRAIN_FULL"):
            continue
        name = item.nodeid.partition("[")[0]
        if seen[name] % marker.args[0]:
            item.add_marker(skip)
        seen[name] += 1
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Spare the collector, here and in forked ranks, what is imported by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random numbers, whatever ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def nan_filled_empty():
    """Fill fresh tensors with NaN, so that a value read before it was written shows."""
    with torch.device("meta"):
        # The first use fixes which functions obey a device context; it must see the originals.
        torch.empty(1)
    patch = pytest.MonkeyPatch()
    for owner, name in FRESH:
        patch.setattr(owner, name, _filled(getattr(owner, name)))
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def composed_once():
    """Let Hydra compose our own files once for each choice of groups: it takes a tenth of a second.

    The caller gets a copy; other folders are composed each time.
    """
    original = compose._compose_groups

    @functools.cache
    def composed(choices: tuple[tuple[str, str], ...]) -> dict:
        return original(compose.PROJECT / "configs", dict(choices))

    def compose_groups(folder, choices):
        if folder != compose.PROJECT / "configs":
            return original(folder, choices)
        return copy.deepcopy(composed(tuple(choices.items())))

    patch = pytest.MonkeyPatch()
    patch.setattr(compose, "_compose_groups", compose_groups)
    yield
    patch.undo()


def _filled(original):
    def empty(*args, **kwargs):
        tensor = original(*args, **kwargs)
        if tensor.is_floating_point() and tensor.device.type != "meta":
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return empty
