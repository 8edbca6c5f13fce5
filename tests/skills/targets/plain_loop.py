"""A raw training loop as people write it: a recurrent forecaster of a noisy wave."""

from __future__ import annotations

import torch
from torch import nn

EPOCHS, BATCH, WINDOW = 4, 16, 12


class Forecaster(nn.Module):
    """Predicts the value after a window."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cell = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Take [B, WINDOW] to [B]."""
        _, last = self.cell(window.unsqueeze(-1))
        return self.head(last[0]).squeeze(-1)


def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Make [N, WINDOW] and the value after each, [N]."""
    time = torch.arange(160.0)
    wave = torch.sin(time / 5) + 0.05 * torch.randn(len(time))
    cut = wave.unfold(0, WINDOW + 1, 1)
    return cut[:, :-1], cut[:, -1]


def in_batches(inputs: torch.Tensor, labels: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Scale the inputs and cut both into batches."""
    return list(zip((inputs / 1.5).split(BATCH), labels.split(BATCH), strict=True))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean squared error."""
    window, after = batch
    return nn.functional.mse_loss(model(window), after)


def one_step(model, batch, optimizer) -> float:
    """Forward, backward, clip, step, and the gradients cleared for the next."""
    model.train()
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def validate(model, batches) -> float:
    """Mean loss over batches."""
    model.eval()
    losses = [loss_of(model, batch).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def make() -> dict:
    """Make everything that a run needs."""
    model = Forecaster()
    inputs, labels = windows()
    batches = in_batches(inputs, labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = EPOCHS * len(batches)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    return {
        "model": model,
        "batches": batches,
        "loss_fn": loss_of,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "total_steps": steps,
        "train_step": one_step,
        "evaluate": validate,
        "data": (inputs, labels, in_batches),
    }


def main() -> None:
    """Train."""
    run = make()
    for epoch in range(EPOCHS):
        for batch in run["batches"]:
            one_step(run["model"], batch, run["optimizer"])
            run["scheduler"].step()
        print(f"epoch {epoch}: {validate(run['model'], run['batches']):.4f}")


if __name__ == "__main__":
    main()
