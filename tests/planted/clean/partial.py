"""Parts that are frozen, shared, averaged or given a gradient of their own, all on purpose."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

FEATURES, CLASSES, WIDTH = 10, 4, 24


def rows():
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(48, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)
    return list(zip(x.split(12), y.split(12), strict=True))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Backbone(nn.Module):
    """A frozen body under a head that learns; the body stays in eval mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)
        )
        self.body.requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def train(self, mode=True):
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.body(x)
        return self.head(features)


def frozen_backbone():
    model = Backbone()
    return model, rows(), loss_fn, torch.optim.AdamW(model.head.parameters(), 1e-2)


class LowRank(nn.Module):
    """A frozen matrix and a product of two small ones beside it; the second begins at zero."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, linear.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(linear.out_features, 2))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


def low_rank():
    model = nn.Sequential(
        LowRank(nn.Linear(FEATURES, WIDTH)), nn.ReLU(), LowRank(nn.Linear(WIDTH, CLASSES))
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, rows(), loss_fn, torch.optim.AdamW(trained, 1e-2)


class Shared(nn.Module):
    """The same layer three times."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x + self.layer(x)
        return self.head(x)


def shared_layers():
    model = Shared()
    return model, rows(), loss_fn, torch.optim.AdamW(model.parameters(), 1e-3)


class Averaged(nn.Module):
    """A teacher that follows the student by a moving average, and is no part of the optimizer."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    slow.lerp_(fast, 0.01)
                self.updates += 1
        return self.student(x), self.teacher(x)


def averaged_teacher():
    model = Averaged()

    def loss(model, batch):
        logits, taught = model(batch[0])
        distance = F.mse_loss(logits, taught.detach())
        return F.cross_entropy(logits, batch[1]) + 0.1 * distance

    return model, rows(), loss, torch.optim.AdamW(model.student.parameters(), 1e-3)


class Round(torch.autograd.Function):
    """Rounds; backward lets the gradient through."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(Round.apply(4 * torch.tanh(self.first(x))) / 4)


def straight_through():
    model = Quantized()
    return model, rows(), loss_fn, torch.optim.AdamW(model.parameters(), 1e-3)


class WithLoss(nn.Module):
    """The model computes its own loss, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x, labels=None):
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def loss_inside():
    model = WithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return model, rows(), lambda m, b: m(b[0], labels=b[1])["loss"], optimizer


def several_groups():
    """Three groups with learning rates of their own, and a warm-up that ends in a constant."""
    model = Shared()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.first.parameters(), "lr": 1e-4},
            {"params": model.layer.parameters(), "lr": 1e-3},
            {"params": model.head.parameters(), "lr": 3e-3, "weight_decay": 0.0},
        ]
    )
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    return {
        "model": model,
        "batches": rows(),
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "scheduler": warmup,
        "total_steps": 200,
    }


def adafactor():
    model = Shared()
    return model, rows(), loss_fn, torch.optim.Adafactor(model.parameters(), lr=1e-2)
