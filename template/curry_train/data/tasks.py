"""Synthetic tasks, made from a seed in a moment: what a model must be able to learn at all."""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

SYMBOLS, CLASSES = 5, 10


class Samples(NamedTuple):
    """Events and what they mean.

    Shapes: frames float32 [N, time, S, C] of 0 and 1; labels int64 [N], 0 to 9.
    """

    frames: Tensor
    labels: Tensor


def cyclic_orders() -> list[tuple[int, ...]]:
    """Return ten cyclic orders of five symbols: five of them, each with its reverse."""
    orders: list[tuple[int, ...]] = []
    for rest in permutations(range(1, SYMBOLS)):
        if rest < rest[::-1]:
            orders += [(0, *rest), (0, *rest[::-1])]
    return orders[:CLASSES]


def order_of_events(
    count: int, *, seed: int, places: int = 4, channels: int = 8, noise: float = 0.02
) -> Samples:
    """Draw `count` samples whose label is the order in which five patterns follow each other.

    One pattern of events over [S, C] at each of five time steps, every pattern once; the label is
    their cyclic order, and where it begins is drawn. So a single time step shows each pattern with
    the same probability whatever the label, and the sum over time is the same for all labels: who
    sees one time step, or all of them at once, knows nothing (10 %). Each value flips with
    probability `noise`. The patterns depend on places and channels only, not on the seed.
    """
    fixed = torch.Generator().manual_seed(0)
    patterns = torch.rand(SYMBOLS, places, channels, generator=fixed) < 0.3
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    begin = torch.randint(SYMBOLS, (count, 1), generator=generator)
    when = (torch.arange(SYMBOLS) + begin) % SYMBOLS
    shown = patterns[torch.tensor(cyclic_orders())[labels].gather(1, when)]
    flips = torch.rand(shown.shape, generator=generator) < noise
    return Samples((shown ^ flips).float(), labels)


def at_one_time_step(samples: Samples) -> Samples:
    """Return the same samples, all events at once: frames [N, 1, S, C] are the sum over time."""
    return Samples(samples.frames.sum(1, keepdim=True), samples.labels)
