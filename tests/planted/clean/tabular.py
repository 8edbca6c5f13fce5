"""Rows of numbers: regression in three forms, several labels at once, weighted classes, bags."""

import torch
from torch import nn
from torch.nn import functional as F

FEATURES = 10


def numbers(outputs, number=64):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(number, FEATURES, generator=generator)
    y = x @ torch.randn(FEATURES, outputs, generator=generator) / FEATURES**0.5
    return x, y + 0.1 * torch.randn(number, outputs, generator=generator)


def network(outputs):
    return nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, outputs))


def pairs(x, y, size=16):
    return list(zip(x.split(size), y.split(size), strict=True))


def regression_loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).squeeze(-1), y)


def regression_step(model, batch, optimizer):
    loss = regression_loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def regression():
    """One number a row; labels [N]."""
    model = network(1)
    x, y = numbers(1)
    return {
        "model": model,
        "batches": pairs(x, y[:, 0]),
        "loss_fn": regression_loss,
        "optimizer": torch.optim.Adam(model.parameters(), 1e-3),
        "train_step": regression_step,
    }


def several_outputs():
    model = network(3)
    loss_fn = nn.SmoothL1Loss()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    return model, pairs(*numbers(3)), lambda m, b: loss_fn(m(b[0]), b[1]), optimizer


def heteroscedastic():
    """The model says a mean and a variance."""
    model = network(2)

    def loss(model, batch):
        mean, raw = model(batch[0]).unbind(-1)
        return F.gaussian_nll_loss(mean, batch[1][:, 0], F.softplus(raw) + 1e-4)

    return model, pairs(*numbers(1)), loss, torch.optim.Adam(model.parameters(), 1e-3)


def multi_label_loss(model, batch):
    x, y = batch
    weight = torch.tensor([1.0, 2.0, 1.0, 4.0])
    return F.binary_cross_entropy_with_logits(model(x), y, pos_weight=weight)


def multi_label():
    model = network(4)
    x, y = numbers(4)
    batches = pairs(x, (y > 0.5).float())
    return model, batches, multi_label_loss, torch.optim.AdamW(model.parameters(), 1e-3)


def binary():
    """Probabilities by a sigmoid in the model, with the loss that wants them."""
    model = nn.Sequential(*network(1), nn.Sigmoid(), nn.Flatten(0))
    x, y = numbers(1)
    loss_fn = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return model, pairs(x, (y[:, 0] > 0).float()), lambda m, b: loss_fn(m(b[0]), b[1]), optimizer


def log_probabilities():
    """log_softmax in the model and nll_loss: the two belong together."""
    model = nn.Sequential(*network(5), nn.LogSoftmax(-1))
    x, y = numbers(5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return model, pairs(x, y.argmax(-1)), lambda m, b: F.nll_loss(m(b[0]), b[1]), optimizer


def log_softmax_twice():
    """log_softmax before cross_entropy changes nothing, so it is no mistake of consequence."""
    model = nn.Sequential(*network(5), nn.LogSoftmax(-1))
    x, y = numbers(5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return model, pairs(x, y.argmax(-1)), lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer


def smoothed():
    """Label smoothing and class weights; SGD with momentum."""
    model = network(5)
    x, y = numbers(5)
    weight = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.5])
    loss_fn = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    return model, pairs(x, y.argmax(-1)), lambda m, b: loss_fn(m(b[0]), b[1]), optimizer


def soft_labels():
    """Labels are probabilities, as after mixup or distillation."""
    model = network(5)
    x, y = numbers(5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    batches = pairs(x, (2 * y).softmax(-1))
    return model, batches, lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 16, mode="mean", padding_idx=0)
        self.head = nn.Linear(16, 2)

    def forward(self, words):
        return self.head(self.bag(words))


def bags():
    """Bags of words, the shorter ones filled with word 0."""
    model = Bags()
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(1, 40, (48, 9), generator=generator)
    words[::3, 6:] = 0
    labels = (words.float().mean(-1) > 18).long()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return model, pairs(words, labels), lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer


def uneven():
    """The last batch is shorter than the others, and has one row."""
    model = network(3)
    x, y = numbers(3, number=33)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return model, pairs(x, y), lambda m, b: F.mse_loss(m(b[0]), b[1]), optimizer
