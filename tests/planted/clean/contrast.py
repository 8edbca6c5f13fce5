"""Losses of pairs: in-batch negatives, where examples meet by design, and siamese twins."""

import torch
from torch import nn
from torch.nn import functional as F


def views(number=32):
    generator = torch.Generator().manual_seed(11)
    things = torch.randn(number, 10, generator=generator)
    return [things + 0.1 * torch.randn(number, 10, generator=generator) for _ in range(2)]


def encoder():
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))


def in_batch_negatives():
    """InfoNCE: the other examples of the batch are the wrong answers."""
    model = encoder()

    def loss(model, batch):
        one, other = (F.normalize(model(view), dim=-1) for view in batch)
        scores = one @ other.T / 0.2
        return F.cross_entropy(scores, torch.arange(len(scores)))

    one, other = views()
    batches = list(zip(one.split(8), other.split(8), strict=True))
    return model, batches, loss, torch.optim.Adam(model.parameters(), 1e-3)


def siamese():
    """Pairs that are alike or not; the twins share their weights."""
    model = encoder()
    one, other = views()
    same = (torch.arange(32) % 2).float()
    other = torch.where(same[:, None] > 0, other, other.roll(1, 0))

    def loss(model, batch):
        one, other, same = batch
        distance = (model(one) - model(other)).square().sum(-1).add(1e-6).sqrt()
        return (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()

    batches = list(zip(one.split(8), other.split(8), same.split(8), strict=True))
    return model, batches, loss, torch.optim.Adam(model.parameters(), 1e-3)


def triplets():
    model = encoder()
    one, other = views()
    loss_fn = nn.TripletMarginLoss()

    def loss(model, batch):
        return loss_fn(*(model(part) for part in batch))

    batches = list(zip(one.split(8), other.split(8), one.roll(5, 0).split(8), strict=True))
    return model, batches, loss, torch.optim.Adam(model.parameters(), 1e-3)
