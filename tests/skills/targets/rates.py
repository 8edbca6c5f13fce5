"""Models whose best learning rate is known, for the finder."""

from __future__ import annotations

import inspect
import textwrap

import torch
from torch import nn

CURVATURE = 10.0


class Quadratic(nn.Module):
    """loss = h/2 * (x - noise)^2: plain SGD diverges above 2/h."""

    def __init__(self, dtype):
        super().__init__()
        self.x = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, noise):
        return (CURVATURE / 2 * (self.x - noise) ** 2).sum()


def quadratic(noise=0.0, dtype=torch.float32, momentum=0.0):
    generator = torch.Generator().manual_seed(0)
    batches = [noise * torch.randn(1, generator=generator) for _ in range(97)]
    model = Quadratic(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return model, batches, lambda model, batch: model(batch), optimizer


class Bytes(nn.Module):
    """A GPT of bytes."""

    def __init__(self, width, depth, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.blocks(x, mask=self.mask, is_causal=True))


class Text:
    """Random windows of the source of Python's own textwrap and inspect."""

    def __init__(self, length, count, seed):
        text = (inspect.getsource(textwrap) + inspect.getsource(inspect)).encode("ascii", "replace")
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=127)
        self.length, self.count, self.seed = length, count, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            starts = torch.randint(
                0, len(self.ids) - self.length - 1, (self.count,), generator=generator
            )
            yield torch.stack([self.ids[s : s + self.length + 1] for s in starts.tolist()])


def next_byte(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def byte_gpt(width=64, depth=2, length=32, count=4):
    model = Bytes(width, depth, length)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    return model, Text(length, count, seed=5), next_byte, optimizer


def published_size():
    return byte_gpt(length=64, count=16)
