"""A small residual network that checkpoints its layers, sound and broken in one way each."""

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS, LAYERS = 32, 16, 4


class Layer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(self.up(x).tanh().sin()))


class Normed(Layer):
    """Running statistics move whenever it runs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(super().forward(x))


class Counting(Layer):
    seen = 0

    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x)


class Mine(Layer):
    """Draws from a generator that no checkpoint keeps."""

    def forward(self, x):
        return super().forward(x * random.random())


class Stateful(Layer):
    """The second run of a batch finds another factor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        out = super().forward(x * self.factor.clone())
        self.factor *= 2
        return out


class Net(nn.Module):
    def __init__(self, layer, **options):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)
        self.options = {"use_reentrant": False, **options}

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options)
        return self.head(x)


class Nothing(Net):
    """Checkpoints what keeps nothing anyway."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return checkpoint(self.head, x, use_reentrant=False)


class Plain(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parts(model):
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return model, [batch], lambda model, x: model(x).square().mean()


def build():
    return parts(Net(Layer))


def dropout():
    return parts(Net(lambda: Layer(0.3)))


def reentrant():
    """Nothing that goes in requires a gradient, so the layers get none."""
    return parts(Net(Layer, use_reentrant=True))


def forgets_dropout():
    return parts(Net(lambda: Layer(0.3), preserve_rng_state=False))


def draws_itself():
    return parts(Net(Mine))


def batch_norm():
    return parts(Net(Normed))


def counts():
    return parts(Net(Counting))


def stateful():
    return parts(Net(Stateful))


def saves_nothing():
    return parts(Nothing(Layer))


def plain():
    return parts(Plain(Layer))
