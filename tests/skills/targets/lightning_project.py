"""A LightningModule as people write it: an image classifier with BatchNorm and dropout."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Stripes(pl.LightningModule):
    """Tells horizontal from vertical and diagonal stripes."""

    def __init__(self, width: int = 4, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, 3),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Take [B, 1, 8, 8] to logits [B, 3]."""
        return self.body(images)

    def training_step(self, batch, batch_idx):
        """Loss of a batch, logged as Lightning's users do."""
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"train_accuracy": accuracy, "step": float(self.global_step)})
        return {"loss": loss, "accuracy": accuracy}

    def validation_step(self, batch, batch_idx):
        """Loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("val_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        """AdamW with a cosine over the whole run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def images() -> TensorDataset:
    """48 images [1, 8, 8] of three kinds of stripes."""
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    kinds = torch.stack([rows % 2, columns % 2, (rows + columns) % 2]).float()
    labels = torch.arange(48) % 3
    noisy = kinds[labels] + 0.2 * torch.randn(48, 8, 8)
    return TensorDataset(noisy.unsqueeze(1), labels)


def make():
    """Give what Trainer.fit would get."""
    return Stripes(), DataLoader(images(), batch_size=12, shuffle=True)


if __name__ == "__main__":
    pl.Trainer(max_epochs=2, enable_checkpointing=False, logger=False).fit(*make())
