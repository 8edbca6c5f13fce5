"""Would a run of a configuration go on from a checkpoint? Every reason why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kit import layouts
from kit.user_code import user_code

MOMENTS = ("optim.exp_avg.", "optim.exp_avg_sq.")


def misfits(config: Any, checkpoint: Path, world: int) -> list[str]:
    """Return a sentence for every setting, tensor and axis that does not fit."""
    from curry_train.checkpoint import read_manifest
    from curry_train.config import ConfigError
    from curry_train.tracking.resume import find_resume

    manifest = read_manifest(checkpoint)
    asked = replace(config, run=replace(config.run, resume=str(checkpoint)))
    problems = []
    with user_code("the rules of resume"):
        try:
            find_resume(asked, manifest["data_hash"], env={})
        except ConfigError as error:
            prefix = f"run.resume={checkpoint}: "
            problems += (problem.removeprefix(prefix) for problem in error.problems)
    problems += [f"on {world} ranks: {problem}" for problem in layouts.refused(config, world)]
    return problems + tensor_misfits(config, manifest["tensors"])


def tensor_misfits(config: Any, saved: dict[str, Any]) -> list[str]:
    """Hold the tensors of a manifest against the model of a configuration, without its values."""
    with user_code("the model"):
        from curry_train.models.protocol import meta_model, named_state, saved_views

        model = meta_model(config)
        wanted = dict(named_state(model))
        trained = [
            saved_name
            for name, parameter in model.named_parameters()
            for saved_name in saved_views(model, name, parameter.detach())
        ]
    kinds = {n: f"{str(t.dtype).removeprefix('torch.')} {[*t.shape]}" for n, t in wanted.items()}
    moments = {prefix + name: kinds[name] for prefix in MOMENTS for name in trained}
    if not any(name.startswith("optim.") for name in saved):
        return [
            "it holds weights only: a run can start from it (run.init_from), none can go on",
            *_unequal(kinds, saved),
        ]
    return _unequal(kinds | moments | {"optim.step": "float32 []"}, saved)


def _unequal(kinds: dict[str, str], saved: dict[str, Any]) -> list[str]:
    found = {name: f"{entry['dtype']} {entry['shape']}" for name, entry in saved.items()}
    return [
        *(
            f"tensor {name} ({kinds[name]}) is missing"
            for name in sorted(kinds.keys() - found.keys())
        ),
        *(
            f"tensor {name} is unknown to this model"
            for name in sorted(found.keys() - kinds.keys())
        ),
        *(
            f"tensor {name} is {found[name]}, this model has {kind}"
            for name, kind in sorted(kinds.items())
            if name in found and found[name] != kind
        ),
    ]
