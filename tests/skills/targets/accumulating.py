"""Loops that take one optimizer step over micro-batches, right and wrong in one way each."""

import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH = 24, 12, 16


def build():
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY))
    ids = torch.randint(0, VOCABULARY, (16, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    batches = [{"input_ids": half[:, :-1], "labels": half[:, 1:]} for half in ids.split(8)]
    return model, batches, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_fn(model, batch):
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def regression():
    """No labels: every sample counts alike."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    rows = torch.randn(24, 5, generator=torch.Generator().manual_seed(3))
    return model, [rows], lambda m, b: (m(b[:, :4]) - b[:, 4:]).square().mean()


def mixing():
    """Batch statistics: samples of one micro-batch change each other."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    return model, [rows], lambda m, b: m(b).square().mean()


def targets(batch):
    if isinstance(batch, dict):
        return int((batch["labels"] != -100).sum())
    return len(batch)


def weighted(model, micro_batches, loss_fn, optimizer, clip=None):
    total, loss = sum(map(targets, micro_batches)), 0.0
    for batch in micro_batches:
        part = loss_fn(model, batch) * targets(batch) / total
        part.backward()
        loss += part.item()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped(model, micro_batches, loss_fn, optimizer):
    return weighted(model, micro_batches, loss_fn, optimizer, clip=1.0)


def of_four(model, micro_batches, loss_fn, optimizer):
    """Steps after every fourth micro-batch, however many come."""
    for number, batch in enumerate(micro_batches):
        (loss_fn(model, batch) * targets(batch) / sum(map(targets, micro_batches))).backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


def mean_of_means(model, micro_batches, loss_fn, optimizer):
    for batch in micro_batches:
        (loss_fn(model, batch) / len(micro_batches)).backward()
    optimizer.step()


def sum_of_means(model, micro_batches, loss_fn, optimizer):
    for batch in micro_batches:
        loss_fn(model, batch).backward()
    optimizer.step()


def sum_of_sums(model, micro_batches, loss_fn, optimizer):
    for batch in micro_batches:
        (loss_fn(model, batch) * targets(batch)).backward()
    optimizer.step()


def zeroes_between(model, micro_batches, loss_fn, optimizer):
    total = sum(map(targets, micro_batches))
    for batch in micro_batches:
        optimizer.zero_grad()
        (loss_fn(model, batch) * targets(batch) / total).backward()
    optimizer.step()


def steps_each(model, micro_batches, loss_fn, optimizer):
    for batch in micro_batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def clips_sum_each_time(model, micro_batches, loss_fn, optimizer):
    total = sum(map(targets, micro_batches))
    for batch in micro_batches:
        (loss_fn(model, batch) * targets(batch) / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def clips_each_alone(model, micro_batches, loss_fn, optimizer):
    total, kept = sum(map(targets, micro_batches)), None
    for batch in micro_batches:
        model.zero_grad()
        (loss_fn(model, batch) * targets(batch) / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grads = [p.grad.clone() for p in model.parameters()]
        kept = grads if kept is None else [a + b for a, b in zip(kept, grads, strict=True)]
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        parameter.grad = grad
    optimizer.step()


def never_steps(model, micro_batches, loss_fn, optimizer):
    for batch in micro_batches:
        loss_fn(model, batch).backward()
