"""The rows of `data.dataset=skeleton_name`: a rule that can be learnt, until you put yours here.

Put your own arrays in the place of `draw_rows`: numbers, one class a row, and what rows must not be
parted (a patient, a device, a document) as their group; write how many features and classes there
are into configs/model/skeleton_name.yaml. Scales come from training rows only, and no group has
rows on both sides.
"""

from __future__ import annotations

import numpy as np

from curry_train.config import DataConfig
from curry_train.data.safe_splits import split_by_group
from curry_train.data.samples import Samples

ROWS, FEATURES, CLASSES, GROUP = 4000, 16, 4, 10


def draw_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs float32 [N, FEATURES], labels int64 [N] below CLASSES, groups int64 [N]."""
    random = np.random.default_rng(0)
    inputs = random.normal(3.0, 2.0, size=(ROWS, FEATURES)).astype(np.float32)
    labels = ((inputs - 3.0) @ random.normal(size=(FEATURES, CLASSES))).argmax(1)
    return inputs, labels, np.arange(ROWS) // GROUP


def skeleton_name(data: DataConfig) -> Samples:
    """Return the rows, those of data.val_fraction of the groups held out."""
    inputs, labels, groups = draw_rows()
    held_out = data.val_fraction
    rows = split_by_group(groups, {"train": 1 - held_out, "val": held_out})
    of_training = inputs[rows["train"]]
    inputs = (inputs - of_training.mean(0)) / of_training.std(0)
    return Samples(
        train={"inputs": inputs[rows["train"]], "labels": labels[rows["train"]]},
        val={"inputs": inputs[rows["val"]], "labels": labels[rows["val"]]},
    )
