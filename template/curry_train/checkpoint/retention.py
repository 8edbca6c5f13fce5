"""Which checkpoints stay: the newest, every n-th for ever, the best by validation. No torch."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

from curry_train.checkpoint import CheckpointError, complete_checkpoints, read_manifest

SCORE = "val/loss"


def step_of(checkpoint: Path) -> int:
    """Return the step in a folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


def score(checkpoint: Path) -> float | None:
    """Return the val/loss of the step that was saved; None without a finite one."""
    try:
        value = read_manifest(checkpoint).get("metrics", {})[SCORE]
    except (CheckpointError, KeyError, TypeError):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None


def kept(
    checkpoints: Iterable[Path], keep: int, keep_every: int = 0, keep_best: int = 0
) -> set[Path]:
    """Return those of some complete checkpoints that the three rules of run.keep* let stay.

    keep: the newest n, 0 all. keep_every: steps that it divides, 0 none. keep_best: the n of
    smallest val/loss, the newer of equal ones, 0 none. Of one checkpoint or more the newest stays.
    """
    newest_first = sorted(checkpoints, key=step_of, reverse=True)
    if not keep:
        return set(newest_first)
    stay = set(newest_first[:keep])
    if keep_every:
        stay |= {path for path in newest_first if step_of(path) % keep_every == 0}
    if keep_best:
        scores = [(found, path) for path in newest_first if (found := score(path)) is not None]
        stay |= {path for _, path in sorted(scores, key=lambda pair: pair[0])[:keep_best]}
    return stay


def prune(
    root: Path,
    *,
    keep: int,
    keep_every: int = 0,
    keep_best: int = 0,
    also: Iterable[Path] = (),
    dry_run: bool = False,
) -> list[Path]:
    """Remove the complete checkpoints under root that no rule of `kept` lets stay; return them.

    also: more that stay. dry_run: remove nothing. What is incomplete is never touched. A folder
    loses its valid name first, so a kill in between leaves no half checkpoint under one; what
    cannot be removed is a warning and not in the result.
    """
    found = list(complete_checkpoints(root))
    stay = kept(found, keep, keep_every, keep_best) | {*also}
    doomed = [path for path in found if path not in stay]
    return doomed if dry_run else [path for path in doomed if _remove(path)]


def _remove(folder: Path) -> bool:
    aside = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(3)}")
    try:
        os.replace(folder, aside)
        shutil.rmtree(aside)
    except OSError as error:
        warnings.warn(f"{folder} could not be pruned: {error}", stacklevel=3)
        return False
    return True
