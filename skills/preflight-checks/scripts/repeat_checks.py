"""Checks that need the target twice: equal seeds, and a checkpoint loaded into other weights."""

from __future__ import annotations

import copy
import itertools
import tempfile
from pathlib import Path
from typing import Any

from evidence import SEED, CannotJudge, Evidence, Finding, UserError, failed, passed
from step_run import kept, losses

from kit.errors import UsageError
from kit.fix import fix_in

STEPS = 3


def built(evidence: Evidence, seed: int) -> Any:
    """Build the target once more, or say why not."""
    try:
        return evidence.target.rebuild(seed)
    except UsageError as error:
        raise CannotJudge(f"the target cannot be built again ({error.sentence})") from error


def check_not_repeatable(evidence: Evidence, limit: float) -> Finding:
    """Built twice with one seed, the first losses are the same."""
    evidence.needs_finite()
    if evidence.changed_in_place:
        path = evidence.changed_in_place[0]
        return failed(
            f"loss_fn writes into {path} of the batch: the data change for good, more with every "
            "pass",
            path,
            fix_in(evidence.target.loss_fn, "work on a copy: x = x + ...", r"[-+*/]=|_\("),
        )
    runs = []
    with kept(evidence.target):
        for _ in range(2):
            target = built(evidence, SEED)
            with evidence.user():
                batches = list(itertools.islice(iter(target.batches), STEPS))
                runs.append(losses(target, batches, STEPS))
    error = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(*runs, strict=True))
    shown = ", ".join(f"{loss:.6g}" for loss in runs[0])
    if error <= limit:
        return passed(f"losses {shown} twice", error)
    return failed(
        f"two runs of seed {SEED} have losses {shown} and "
        f"{', '.join(f'{loss:.6g}' for loss in runs[1])}",
        error,
        fix_in(type(evidence.target.model), "draw everything from seeded generators", r"rand|seed"),
    )


def check_checkpoint_round_trip(evidence: Evidence, limit: float) -> Finding:
    """What is saved and loaded into a model of other weights goes on with the same losses."""
    evidence.needs_finite()
    if evidence.changed_in_place:
        raise CannotJudge("loss_fn writes into the batch; see not-repeatable")
    with kept(evidence.target):
        first = built(evidence, SEED)
        second = built(evidence, SEED + int(first.runtime is None))  # a loader's order is seeded
        with evidence.user():
            if first.runtime is not None:
                wanted, found = _project_round_trip(first, second)
            else:
                wanted, found = _foreign_round_trip(evidence, first, second)
    error = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(wanted, found, strict=True))
    shown = ", ".join(f"{loss:.8g}" for loss in wanted)
    if error <= limit:
        return passed(f"the next losses are {shown}, before and after", error)
    return failed(
        f"the next losses were {shown}, after loading {', '.join(f'{x:.8g}' for x in found)}: "
        "something that counts is not in the checkpoint",
        error,
        fix_in(
            type(evidence.target.model), "register parameters and buffers", r"persistent|= *torch"
        ),
    )


def _project_round_trip(first: Any, second: Any) -> tuple[list[float], list[float]]:
    from curry_train.checkpoint import dcp
    from curry_train.checkpoint.training_state import checkpoint_of, restore

    losses(first, [], 2)
    losses(second, [], 3)
    with tempfile.TemporaryDirectory() as folder:
        place = dcp.save(Path(folder), **checkpoint_of(first.runtime, {}), mesh=first.runtime.mesh)
        restore(second.runtime, place)
    return losses(first, [], 2), losses(second, [], 2)


def _foreign_round_trip(evidence: Evidence, first: Any, second: Any) -> tuple[list[float], Any]:
    batches = evidence.batches
    losses(first, batches, 2)
    parts = {"model": first.model}
    if first.optimizer is not None:
        parts["optimizer"] = first.optimizer
    if hasattr(first.loss_fn, "state_dict"):
        parts["loss_fn"] = first.loss_fn
    for name, part in parts.items():
        try:
            getattr(second, name).load_state_dict(copy.deepcopy(part.state_dict()))
        except Exception as error:
            raised = UserError(error)
            raised.id = "checkpoint-round-trip"
            raise raised from error
    later = batches[2:] + batches[:2]
    return losses(first, later, 2, seed=5), losses(second, later, 2, seed=5)
