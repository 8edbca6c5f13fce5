"""Trains a target's own model on shuffled labels: held-out ones must stay at chance."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from severities import THRESHOLDS, Finding

from kit.observation import observe
from kit.target import Target

STEPS = 200
LR = 1e-3
PERMUTATIONS = 300
ID = "leak-shuffled-labels"


def check_shuffled_labels(target: Target, told: Callable[[int, int, str], None]) -> Finding:
    """Shuffle the labels before the target's transform, train on two thirds, test on the rest.

    The target's function returns `data`: (inputs, labels, transform) with transform(inputs, labels)
    -> list of batches.
    """
    if target.data is None:
        return Finding(ID, "skipped", "the target returns no data: (inputs, labels, transform)")
    torch = sys.modules["torch"]
    inputs, labels, transform = target.data
    generator = np.random.default_rng(0)
    order = generator.permutation(len(labels))
    mixed = labels[torch.from_numpy(order)] if isinstance(labels, torch.Tensor) else None
    if mixed is None:
        mixed = labels[order] if hasattr(labels, "shape") else [labels[i] for i in order.tolist()]
    batches = list(transform(copy.deepcopy(inputs), mixed))
    if len(batches) < 3:
        return Finding(ID, "skipped", f"the transform makes {len(batches)} batches, 3 are needed")
    held_out, train = batches[: len(batches) // 3], batches[len(batches) // 3 :]
    optimizer = target.optimizer or torch.optim.AdamW(target.model.parameters(), LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        target.loss_fn(target.model, train[step % len(train)]).backward()
        optimizer.step()
        told(step + 1, STEPS, "steps on shuffled labels")
    target.model.eval()
    predicted, wanted = [], []
    for batch in held_out:
        call = observe(target, batch).main
        if call is None or call.kind != "classes" or call.labels.dim() != 1:
            return Finding(ID, "skipped", "the loss is over no classes")
        predicted.append(call.scores.argmax(-1).cpu().numpy())
        wanted.append(call.labels.cpu().numpy())
    return _judge(np.concatenate(predicted), np.concatenate(wanted), generator)


def _judge(predicted: Any, wanted: Any, generator: np.random.Generator) -> Finding:
    from scipy import stats

    found = float((predicted == wanted).mean())
    chance = [
        float((predicted == generator.permutation(wanted)).mean()) for _ in range(PERMUTATIONS)
    ]
    deviation = max(float(np.std(chance)), 1e-12)
    by_chance = float(stats.norm.sf((found - float(np.mean(chance))) / deviation))
    fails = by_chance < THRESHOLDS[ID]
    message = f"by chance; {found:.3f} of {len(wanted)} shuffled held-out labels are right"
    gain = found - float(np.mean(chance)) if fails else None
    return Finding(ID, "fail" if fails else "pass", message, value=by_chance, inflation=gain)
