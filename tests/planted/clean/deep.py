"""Deep networks: a plain stack that keeps its scale, and a residual stream with norms."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

FEATURES, CLASSES, WIDTH, DEPTH = 16, 4, 32, 14
GAIN = 1.1


def rows():
    generator = torch.Generator().manual_seed(15)
    x = torch.randn(64, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)
    return list(zip(x.split(16), y.split(16), strict=True))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Stack(nn.Module):
    """tanh after tanh, every matrix drawn so that neither signal nor gradient fades."""

    def __init__(self):
        super().__init__()
        widths = [FEATURES] + [WIDTH] * DEPTH
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(WIDTH, CLASSES)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=GAIN * layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def stack():
    model = Stack()
    return model, rows(), loss_fn, torch.optim.Adam(model.parameters(), 1e-3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def residual():
    model = Residual()
    return model, rows(), loss_fn, torch.optim.AdamW(model.parameters(), 1e-3)
