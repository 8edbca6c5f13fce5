"""Loops and batches of unusual but right form: schedules from and to 0, time first, graphs."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FEATURES, CLASSES = 10, 4


def rows(number=48):
    generator = torch.Generator().manual_seed(16)
    x = torch.randn(number, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)
    return x, y


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def network():
    return nn.Sequential(nn.Linear(FEATURES, 24), nn.GELU(), nn.Linear(24, CLASSES))


def train_step(model, batch, optimizer):
    """Clears the gradients after the step and so leaves none."""
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def linear_to_zero():
    """The rate is 0 at the first step, as that of transformers, and 0 again at the end."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = rows()

    def rate(step):
        return step / 20 if step < 20 else max(0.0, (200 - step) / 180)

    return {
        "model": model,
        "batches": list(zip(x.split(12), y.split(12), strict=True)),
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        "total_steps": 200,
        "train_step": train_step,
    }


def one_cycle():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = rows()
    return {
        "model": model,
        "batches": list(zip(x.split(12), y.split(12), strict=True)),
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=120),
        "total_steps": 120,
    }


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, series):
        hidden, _ = self.gru(series)
        return self.head(hidden[-1]).squeeze(-1)


def time_first():
    """Series [T, N, 3], the form that recurrent layers take by default; labels [N]."""
    model = Recurrent()
    series = torch.randn(9, 32, 3, generator=torch.Generator().manual_seed(17)).cumsum(0) / 3
    parts = zip(series[:8].split(8, 1), series[8, :, 0].split(8), strict=True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return model, list(parts), lambda m, b: F.mse_loss(m(b[0]), b[1]), optimizer


class Checkpointed(nn.Module):
    """Activations of the middle are computed again in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, 24), nn.Linear(24, CLASSES)
        self.middle = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint(self.middle, self.first(x), use_reentrant=False)
        return self.head(x)


def recomputed():
    model = Checkpointed()
    x, y = rows()
    batches = list(zip(x.split(12), y.split(12), strict=True))
    return model, batches, loss_fn, torch.optim.AdamW(model.parameters(), 1e-3)


def divided_by_count():
    """The loss is a sum over what counts, divided by how many count."""
    model = network()
    x, y = rows()
    y[::5] = -100

    def loss(model, batch):
        total = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return total / (batch[1] != -100).sum()

    batches = list(zip(x.split(12), y.split(12), strict=True))
    return model, batches, loss, torch.optim.AdamW(model.parameters(), 1e-3)


def focal():
    """A loss of one's own, from log-probabilities."""
    model = network()
    x, y = rows()

    def loss(model, batch):
        chosen = model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None])[:, 0]
        return -((1 - chosen.exp()) ** 2 * chosen).mean()

    batches = list(zip(x.split(12), y.split(12), strict=True))
    return model, batches, loss, torch.optim.AdamW(model.parameters(), 1e-3)


class Student(nn.Module):
    """Learns from a frozen teacher's scores at temperature 2, and from the labels."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.student = network()

    def forward(self, x):
        return self.student(x), self.teacher(x)


def distilled():
    model = Student()
    x, y = rows()

    def loss(model, batch):
        scores, taught = model(batch[0])
        soft = F.kl_div(
            (scores / 2).log_softmax(-1), (taught / 2).softmax(-1), reduction="batchmean"
        )
        return F.cross_entropy(scores, batch[1]) + 4 * soft

    batches = list(zip(x.split(12), y.split(12), strict=True))
    return model, batches, loss, torch.optim.AdamW(model.student.parameters(), 1e-3)
