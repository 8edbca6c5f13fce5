"""A convolutional classifier: BatchNorm, a shuffling DataLoader with a generator, momentum."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 * 6 * 6, 10)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


def build():
    model = Classifier()
    data = TensorDataset(torch.randn(48, 1, 8, 8), torch.randint(0, 10, (48,)))
    batches = DataLoader(data, 12, shuffle=True, generator=torch.Generator().manual_seed(7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, batches, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), optimizer
