"""A small decoder of four blocks and a regressor on rows, written out so that faults can be put in.

`batches` have 6 examples of 10 positions, `rows` 12 examples of 5 numbers.
"""

import math

import numpy as np
import torch
from torch import nn

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 24, 10


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        size = x.square().mean(-1, keepdim=True) + 1e-6
        return self.weight * (x / size.sqrt())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.out(mixed)


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.norm, self.attention = Norm(), Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        hidden = self.up(x).relu()
        return x + self.down(hidden)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(number) for number in range(4))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, rows):
        hidden = self.first(rows).tanh()
        return self.last(hidden).squeeze(-1)


def tokens(model, batch):
    logits = model(batch["ids"])
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return losses


def values(model, batch):
    rows, labels = batch
    predicted = model(rows)
    return (predicted - labels).square().mean()


def decoder():
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (3, 6, LENGTH + 1))
    batches = [{"ids": part[:, :-1], "labels": part[:, 1:]} for part in ids]
    return Decoder(), batches, tokens


def regressor():
    torch.manual_seed(0)
    rows = torch.randn(2, 12, 5)
    return Rows(), [(part, torch.from_numpy(np.asarray(part.sum(-1)))) for part in rows], values
