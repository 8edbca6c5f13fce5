"""The words of a run's command line, from the flags; both states get the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

from step_comparison import KEYS, MEASURED

from kit.errors import UsageError

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
EXAMPLES = "single, tp=2 or tp=2,dp_shard=2,ep=2"
FIXED = {
    "model": "--model",
    "seed": "--seeds",
    "devices": "--mesh",
    "precision": "--precision",
    "accelerator": "--device",
    "run.max_steps": "--steps",
    **{f"parallel.{axis}": "--mesh" for axis in AXES},
}
"""Settings that a flag of ours decides."""
OURS = {
    "run.dir",
    "run.name",
    "run.resume",
    "run.log_every",
    "run.sample_tokens",
    "data.cache_dir",
    "dry_run",
}
"""Settings that this comparison needs as they are."""


def mesh_of(spec: str) -> dict[str, int]:
    """Read `single` or AXIS=SIZE,...; every axis that is not named is 1."""
    sizes = dict.fromkeys(AXES, 1)
    if spec == "single":
        return sizes
    named = set()
    for part in spec.split(","):
        axis, _, size = part.strip().partition("=")
        if (
            axis not in AXES
            or axis in named
            or not (size.isascii() and size.isdigit() and int(size))
        ):
            raise UsageError(
                f"--mesh {spec}: {part.strip() or 'an empty part'}",
                f"it takes single, or each of {', '.join(AXES)} at most once with a size of 1 or "
                "more; other settings of parallel go to --set",
                f"for example {EXAMPLES}",
            )
        named.add(axis)
        sizes[axis] = int(size)
    return sizes


def ranks_of(axes: dict[str, int]) -> int:
    """Count the processes of a mesh: ep lies over the others and is no factor."""
    return math.prod(size for axis, size in axes.items() if axis != "ep")


def tolerances_of(words: Sequence[str]) -> dict[str, float]:
    """Read REL and KEY=REL; the empty key holds what counts for all others."""
    known = [key for id in MEASURED for key in KEYS[id]]
    found = {}
    for word in words:
        key, equals, text = word.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < 1 or (equals and key not in known):
            raise UsageError(
                f"--tolerance {word}",
                f"it takes a share from 0 to below 1, alone or as KEY=SHARE; KEY is one of "
                f"{', '.join(known)}",
                "for example --tolerance 1e-4",
            )
        found[key] = value
    return found


def check_words(words: Sequence[str]) -> None:
    """Refuse settings that flags decide."""
    for word in words:
        key = word.partition("=")[0]
        if key in FIXED:
            raise UsageError(f"--set {word}", f"{FIXED[key]} decides {key}", f"set {FIXED[key]}")
        if key in OURS:
            raise UsageError(f"--set {word}", f"{key} belongs to this comparison", "leave it out")


def words_of(
    model: str, axes: dict[str, int], steps: int, precision: str | None, device: str
) -> list[str]:
    """Write the settings of a run; it evaluates halfway too, so that what evaluation leaves behind
    shows in the steps that follow."""
    words = [f"devices={ranks_of(axes)}", f"model={model}", f"run.max_steps={steps}"]
    words += [f"parallel.{axis}={size}" for axis, size in axes.items()]
    words += [f"precision={precision}"] if precision else []
    words += [f"accelerator={device}"] if device != "auto" else []
    halfway = f"eval_every={max(2, (steps + 1) // 2)}"
    once = ("log_every=1", halfway, "save_every=0", "sample_tokens=0", "resume=never")
    return [*words, "run.name=validate", "tracking=none", *(f"run.{word}" for word in once)]
