"""A classifier of points, with the whole loop of a small project: step, schedule, validation."""

import math

import torch
from torch import nn
from torch.nn import functional as F

FEATURES, CLASSES, STEPS, WARMUP = 12, 5, 100, 10


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.second = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = self.dropout(torch.relu(self.second(x)))
        return self.head(x)


def points():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)
    return x, y


def transform(x, y):
    x = (x - x.mean(0)) / x.std(0)
    return list(zip(x.split(16), y.split(16), strict=True))


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def evaluate(model, batches):
    model.eval()
    with torch.no_grad():
        losses = [loss_fn(model, batch).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def schedule(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = min(1.0, (step - WARMUP) / (STEPS - WARMUP))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def build():
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    x, y = points()
    return {
        "model": model,
        "batches": transform(x, y),
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "total_steps": STEPS,
        "train_step": train_step,
        "evaluate": evaluate,
        "data": (x, y, transform),
    }
