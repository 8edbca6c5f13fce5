"""What a check acts on: a project through its seam, or the parts FILE.py:FUNCTION returns.

Both become one small object, so that a check is written once.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import UsageError
from .user_code import parse_spec, put_first_on_path, user_code

PROJECT_MODULES = ("torch", "omegaconf", "hydra")
FOREIGN_MODULES = ("torch",)


@dataclass
class Target:
    """The same few things, whoever's code they come from."""

    model: Any
    """The torch.nn.Module."""
    batches: Any
    """Iterable of batches; every iter() starts anew (a project's goes on at samples_consumed)."""
    loss_fn: Callable[[Any, Any], Any]
    """loss_fn(model, batch) -> scalar tensor."""
    optimizer: Any
    """torch optimizer, or None when the function returned none."""
    device: Any
    """torch.device of the parameters."""
    config_hash: str
    """Which configuration was checked: the project's own hash, or that of the target file."""
    kind: str
    """project or foreign."""
    runtime: Any = None
    """The project's Runtime; None for foreign code."""
    scheduler: Any = None
    """torch LR scheduler of foreign code that has one."""
    total_steps: int | None = None
    """How often scheduler.step() is called in the whole run, if known."""
    train_step: Callable[[Any, Any, Any], Any] | None = None
    """train_step(model, batch, optimizer): the user's own optimizer step; a project has its own."""
    evaluate: Callable[[Any, Any], Any] | None = None
    """evaluate(model, batches): the user's own validation; a project has its own."""
    data: tuple[Any, Any, Callable[[Any, Any], Any]] | None = None
    """(inputs, labels, transform), transform(inputs, labels) -> list of batches."""
    build: Callable[[int], Target] | None = field(default=None, repr=False)
    """What rebuild calls."""

    def rebuild(self, seed: int) -> Target:
        """Build the target anew from the same flags: other weights, nothing shared with this one.

        A function that seeds torch itself gives the same weights whatever the seed.
        """
        if self.build is None:
            raise UsageError("this target was made by hand and cannot be built again")
        return self.build(seed)


def is_project(folder: Path) -> bool:
    """Tell whether a folder has the seam."""
    return (folder / "curry_train" / "runtime.py").is_file()


def check_request(project: Path, spec: str | None, overrides: Sequence[str], device: str) -> None:
    """Find what is wrong with the flags before anything is imported."""
    kind = device.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda", "mps"):
        raise UsageError(f"--device {device}", "it takes auto, cpu, cuda, cuda:N or mps")
    if spec is not None:
        parse_spec(spec, flag="--target")
        if overrides:
            raise UsageError(
                f"--set {' '.join(overrides)} with --target",
                "overrides belong to a project's configuration",
                "write the value into the target function",
            )
        return
    if not is_project(project):
        raise UsageError(
            f"{project} is no curry-train project (it has no curry_train/runtime.py)",
            "a check takes a project made by init, or any code through --target FILE.py:FUNCTION",
            "set --project DIR or --target",
        )
    if ":" in device:
        raise UsageError(
            f"--device {device} on a project",
            "a project takes auto, cpu, cuda or mps",
            "choose one GPU by CUDA_VISIBLE_DEVICES",
        )
    for override in overrides:
        if not override.partition("=")[1] or override.startswith(("=", "-")):
            raise UsageError(
                f"--set {override}", "it takes KEY=VALUE ...", "e.g. --set optim.lr=1e-3"
            )


def load_target(
    project: Path,
    spec: str | None,
    *,
    overrides: Sequence[str],
    seed: int | None,
    device: str,
    probe: bool = True,
) -> Target:
    """Build the target that the flags name.

    Foreign code's loss_fn is called once to see that it returns a loss. Without `probe` an
    exception in it passes: a check that judges such faults wants to name them itself.
    """
    if spec is not None:
        from .foreign import load_foreign

        return load_foreign(project, spec, seed=seed, device=device, probe=probe)
    target = _load_project(project, overrides, seed, device)
    target.build = lambda other: load_target(
        project, None, overrides=overrides, seed=other, device=device
    )
    return target


def _load_project(project: Path, overrides: Sequence[str], seed: int | None, device: str) -> Target:
    put_first_on_path(project)
    asked = list(overrides)
    asked += [] if seed is None else [f"seed={seed}"]
    asked += [] if device == "auto" else [f"accelerator={device}"]
    with user_code("importing curry_train of the project"):
        from curry_train.config import config_hash
        from curry_train.runtime import build_runtime
    home = Path(inspect.getfile(build_runtime)).resolve().parents[1]
    if home != project.resolve():
        raise UsageError(
            f"curry_train was imported from {home}, not from {project}",
            fix="remove that folder from PYTHONPATH or uninstall that curry_train",
        )
    with user_code("build_runtime"):
        runtime = build_runtime(asked, project=project)
        digest = config_hash(runtime.config)
    return Target(
        model=runtime.model,
        batches=runtime.batches,
        loss_fn=runtime.loss_fn,
        optimizer=runtime.optimizer,
        device=runtime.device,
        config_hash=digest,
        kind="project",
        runtime=runtime,
    )


def seed_everything(seed: int) -> None:
    """Seed python, numpy (when there is one) and every generator of torch."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
