"""Pictures: a classifier with BatchNorm, segmentation, an autoencoder, a VAE, GroupNorm."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


def pictures(number=48, size=8):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(number, 1, size, size, generator=generator)
    labels = torch.arange(number) % CLASSES
    images[torch.arange(number), 0, labels] += 1.5
    return images, labels


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images):
        x = torch.relu(self.norm1(self.conv1(images)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def evaluate(model, batches):
    model.eval()
    right = count = 0
    with torch.inference_mode():
        for images, labels in batches:
            right += (model(images).argmax(-1) == labels).sum().item()
            count += len(labels)
    model.train()
    return right / count


def build():
    """BatchNorm, a shuffling loader with a generator, an uneven last batch, momentum, StepLR."""
    model = Classifier()
    images, labels = pictures(44)
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(TensorDataset(images, labels), 12, shuffle=True, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    return {
        "model": model,
        "batches": loader,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "total_steps": 90,
        "evaluate": evaluate,
    }


def group_norm():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    images, labels = pictures()
    loader = DataLoader(TensorDataset(images, labels), 16)
    return model, loader, loss_fn, torch.optim.Adam(model.parameters(), 3e-3)


class Flipped(torch.utils.data.Dataset):
    """Every second picture is mirrored, others at every call."""

    def __init__(self):
        self.images, self.labels = pictures()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index] + 0.05 * torch.randn(1, 8, 8)
        return image.flip(-1) if torch.rand(()) < 0.5 else image, self.labels[index]


def augmented():
    """Augmentation and order are drawn from the global generator, which the seed sets."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    loader = DataLoader(Flipped(), 16, shuffle=True, drop_last=True)
    return model, loader, loss_fn, torch.optim.AdamW(model.parameters(), 1e-3)


def segmentation():
    """Logits [N, C, H, W], labels [N, H, W] with the border ignored by 255."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    images, _ = pictures(24)
    labels = (images[:, 0] > 0.3).long() + (images[:, 0] > 1.0).long()
    labels[:, 0], labels[:, -1] = 255, 255
    loader = DataLoader(TensorDataset(images, labels), 8)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=255)

    return model, loader, loss, torch.optim.AdamW(model.parameters(), 3e-3)


def autoencoder():
    """The picture is its own target, and there are no labels."""
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.ReLU(),
        nn.Linear(16, 64),
        nn.Unflatten(1, (1, 8, 8)),
    )
    images, _ = pictures()

    def loss(model, images):
        return F.mse_loss(model(images), images)

    return model, list(images.split(16)), loss, torch.optim.Adam(model.parameters(), 1e-3)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code).view_as(images), mean, log_variance


def vae():
    """Draws random numbers in forward, while training and while evaluating."""
    model = Vae()
    images = torch.sigmoid(2 * pictures()[0])

    def loss(model, batch):
        logits, mean, log_variance = model(batch)
        rebuilt = F.binary_cross_entropy_with_logits(logits, batch, reduction="none").flatten(1)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance)
        return (rebuilt.sum(1) + divergence.sum(1)).mean()

    return model, list(images.split(16)), loss, torch.optim.Adam(model.parameters(), 1e-3)
