"""Mixtures of experts: top-k with a balance loss, and one expert a token with a capacity."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, EXPERTS, TOP = 20, 16, 4, 2


class TopK(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 32) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 32, WIDTH) * 32**-0.5)

    def forward(self, x):
        """Tokens [T, D]; gives the mixed tokens and the balance loss of Switch."""
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.topk(TOP, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        share = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        hidden = torch.einsum("td,edh->teh", x, self.up)
        outputs = torch.einsum("teh,ehd->ted", F.silu(hidden), self.down)
        mixed = outputs.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return (mixed * weights[..., None]).sum(1), EXPERTS * (share * scores.mean(0)).sum()


class Switch(nn.Module):
    """One expert a token; tokens beyond an expert's capacity pass by it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.max(-1)
        capacity = 2 * len(x) // EXPERTS
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()[:capacity]
            mixed = mixed.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        share = F.one_hot(chosen, EXPERTS).float().mean(0)
        return mixed, EXPERTS * (share * scores.mean(0)).sum()


class Skipping(nn.Module):
    """Many small experts in a loop that passes over those without tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 12, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(12)
        )

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.topk(1, -1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, column = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(x[rows]) * weights[rows, column, None])
        share = F.one_hot(chosen, 12).float().mean((0, 1))
        return mixed, 12 * (share * scores.mean(0)).sum()


class Mixture(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = layer
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids):
        x = self.words(input_ids)
        mixed, balance = self.experts(self.norm(x).flatten(0, 1))
        return self.head(self.norm(x + mixed.view_as(x))), balance


def loss_fn(model, batch):
    logits, balance = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0.01 * balance


def build_with(layer):
    model = Mixture(layer)
    ids = torch.randint(0, WORDS, (32, 9), generator=torch.Generator().manual_seed(10))
    ids[:, 1::2] = (ids[:, 0:-1:2] + 7) % WORDS
    batches = [{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in ids.split(8)]
    return model, batches, loss_fn, torch.optim.AdamW(model.parameters(), 1e-3)


def top_k():
    return build_with(TopK())


def skipping():
    model, batches, loss, _ = build_with(Skipping())
    parts = [{key: value[:2, :6] for key, value in batch.items()} for batch in batches]
    return model, parts, loss, torch.optim.AdamW(model.parameters(), 1e-3)


def switch():
    return build_with(Switch())
