"""A language model: dict batches with ignored labels, tied weights, an auxiliary loss, AdamW."""

import torch
from torch import nn

WIDTH, VOCABULARY, LENGTH = 16, 32, 12


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.zeros(1, WIDTH).expand(LENGTH, WIDTH))

    def forward(self, input_ids):
        hidden = self.embedding(input_ids) + self.positions
        weights = self.router(hidden).softmax(-1)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-1)
        mixed = hidden + (outputs * weights.unsqueeze(-2)).sum(-1)
        balance = weights.mean((0, 1)).square().sum() * 2
        return self.head(mixed), balance


class Corpus:
    """Batches that start anew at every iter()."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(4):
            ids = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[:, -2:] = -100
            yield {"input_ids": ids[:, :-1], "labels": labels}


def loss_fn(model, batch):
    logits, balance = model(batch["input_ids"])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return loss + 0.01 * balance


def build():
    model = LanguageModel()
    return model, Corpus(), loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-3)
