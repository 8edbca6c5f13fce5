"""The same small network with batches of every form, in other precisions, and spiking."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

FEATURES, CLASSES = 10, 4


def rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(48, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)
    return list(zip(x.to(dtype).split(12), y.split(12), strict=True))


def network():
    return nn.Sequential(nn.Linear(FEATURES, 24), nn.ReLU(), nn.Linear(24, CLASSES))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    name: str


def named_tuples():
    model = network()
    batches = [Pair(*row) for row in rows()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return model, batches, lambda m, b: F.cross_entropy(m(b.x), b.y), optimizer


def dataclasses():
    model = network()
    batches = [Record(x, y, f"part {number}") for number, (x, y) in enumerate(rows())]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return model, batches, lambda m, b: F.cross_entropy(m(b.x), b.y), optimizer


def nested():
    model = network()
    batches = [
        {"features": [{"left": x[:, :4], "right": x[:, 4:]}], "answer": (y, {"id": i})}
        for i, (x, y) in enumerate(rows())
    ]

    def loss(model, batch):
        parts = batch["features"][0]
        logits = model(torch.cat([parts["left"], parts["right"]], -1))
        return F.cross_entropy(logits, batch["answer"][0])

    return model, batches, loss, torch.optim.AdamW(model.parameters(), 1e-3)


def double():
    model = network().double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = rows(torch.float64)
    return model, batches, lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer


def bfloat16():
    """Weights in bfloat16, the loss in float32; SGD, since a small Adam step would be rounded."""
    model = network().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = rows(torch.bfloat16)
    return model, batches, lambda m, b: F.cross_entropy(m(b[0]).float(), b[1]), optimizer


def autocast():
    """Weights in float32, products in bfloat16."""
    model = network()

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    return model, rows(), loss, torch.optim.AdamW(model.parameters(), 1e-3)


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + (3 * x) ** 2)


class Spiking(nn.Module):
    """Leaky neurons over six time steps."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)

    def forward(self, x):
        current, v, total = 1.5 * self.up(x), 0.0, 0.0
        for _ in range(6):
            v = 0.5 * v + current
            spikes = Spike.apply(v - 1.0)
            v = v - spikes.detach()
            total = total + self.down(spikes)
        return total / 6


def spiking():
    model = Spiking()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return model, rows(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer
