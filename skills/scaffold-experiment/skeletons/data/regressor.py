"""The sequences of `data.dataset=skeleton_name`: sine waves, until you put yours here.

Put your own arrays in the place of `draw_waves`: a value to predict for each place of a sequence,
NaN where there is none; how many numbers an input has at a place is `channels` of
configs/model/skeleton_name.yaml. Whole sequences are held out; where yours overlap or share a
source, split them by that with curry_train.data.safe_splits.
"""

from __future__ import annotations

import numpy as np

from curry_train.config import DataConfig
from curry_train.data.safe_splits import split_by_group
from curry_train.data.samples import Samples

SEQUENCES = 2000


def draw_waves(length: int) -> np.ndarray:
    """Return waves of their own phase and speed, float32 [SEQUENCES, length]."""
    random = np.random.default_rng(0)
    phase = random.uniform(0, 2 * np.pi, size=(SEQUENCES, 1))
    speed = random.uniform(0.1, 0.4, size=(SEQUENCES, 1))
    return np.sin(phase + speed * np.arange(length)).astype(np.float32)


def skeleton_name(data: DataConfig) -> Samples:
    """Return inputs [N, data.seq_len, 1] and labels [N, data.seq_len], the next value of each."""
    waves = draw_waves(data.seq_len + 1)
    held_out = data.val_fraction
    rows = split_by_group(np.arange(SEQUENCES), {"train": 1 - held_out, "val": held_out})
    parts = {name: waves[of] for name, of in rows.items()}
    train, val = (
        {"inputs": parts[name][:, :-1, None], "labels": parts[name][:, 1:]}
        for name in ("train", "val")
    )
    return Samples(train=train, val=val)
