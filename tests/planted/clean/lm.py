"""A causal language model: LayerNorm, own attention, tied weights, padding, accumulation."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS, PAD = 29, 32, 4, 12, 2, 0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, x, padding):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        seen = self.causal[:length, :length] & ~padding[:, None, None, :]
        weights = scores.masked_fill(~seen, -1e9).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.out(mixed)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, padding):
        x = x + self.dropout(self.attention(self.norm1(x), padding))
        return x + self.dropout(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.05)
        nn.init.normal_(self.positions.weight, std=0.05)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids):
        padding = input_ids == PAD
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            x = block(x, padding)
        return self.head(self.norm(x))


def sentences():
    """Every token follows from the one before, but for one in five; two rows end early."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (32, LENGTH + 1), generator=generator)
    for place in range(1, LENGTH + 1):
        follow = torch.rand(32, generator=generator) < 0.8
        ids[follow, place] = (ids[follow, place - 1] * 3) % (VOCABULARY - 1) + 1
    ids[1::8, 9:] = PAD
    return ids


def batches_of(ids, size):
    labels = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)
    parts = zip(ids[:, :-1].split(size), labels.split(size), strict=True)
    return [{"input_ids": x, "labels": y} for x, y in parts]


def loss_fn(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def halves(batch):
    parts = zip(batch["input_ids"].chunk(2), batch["labels"].chunk(2), strict=True)
    return [{"input_ids": x, "labels": y} for x, y in parts]


def count(batch):
    return (batch["labels"] != -100).sum()


def train_step(model, batch, optimizer):
    optimizer.zero_grad(set_to_none=True)
    for half in halves(batch):
        loss = loss_fn(model, half) * count(half) / count(batch)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def evaluate(model, batches):
    was_training = model.training
    model.eval()
    total = sum(loss_fn(model, batch) * count(batch) for batch in batches)
    model.train(was_training)
    return float(total / sum(count(batch) for batch in batches))


def build():
    model = LanguageModel()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    return {
        "model": model,
        "batches": batches_of(sentences(), 8),
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "train_step": train_step,
        "evaluate": evaluate,
    }
