"""One pass of a model of a project: finite loss, all gradients, sums that add up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLOSE = 1e-6
"""Relative difference of sums that are equal in float64."""


def sample_files(project: Path) -> list[str]:
    """Return the files of configs/data whose dataset is samples."""
    import yaml

    from curry_train.data import DATASETS, DataError, dataset_function

    found = []
    for path in sorted((project / "configs/data").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        name = values.get("dataset", "embedded")
        try:
            if name in DATASETS and dataset_function(name)[1] == "Samples":
                found.append(path.stem)
        except DataError:
            continue
    return found


def run_model(project: Path, chosen: str, model_class: type) -> Iterator[tuple[str, str, str]]:
    """Yield (id, message, what to do) for what a pass in float64 shows."""
    own_loss = hasattr(model_class, "loss_sums")
    names = sample_files(project) if own_loss else [""]
    if not names:
        text = "register a function `-> Samples` in curry_train/data/__init__.py"
        yield "wiring-forward", "needs samples, and no dataset of this project has any", text
        return
    errors = []
    for name in names:
        runtime, error = _build(project, chosen, name)
        if error is None:
            batch = runtime.batches.next_step()[0]
            error = _raises(runtime, batch)
        if error is None:
            yield from _judge(runtime, batch, own_loss)
            return
        errors.append(f"{f'data={name}: ' if name else ''}{error}")
    yield "wiring-forward", errors[0][:200], "make forward and loss fit the batch"


def _build(project: Path, chosen: str, data: str) -> tuple[Any, str | None]:
    from curry_train.runtime import build_runtime

    words = [f"model={chosen}", "precision=fp64", "accelerator=cpu", "devices=1"]
    words += ["data.global_batch_size=4", *([f"data={data}"] if data else ["data.seq_len=16"])]
    try:
        return build_runtime(words, project=project), None
    except Exception as error:
        return None, f"build_runtime raised {type(error).__name__}: {' '.join(str(error).split())}"


def _raises(runtime: Any, batch: Any) -> str | None:
    try:
        runtime.loss_fn(runtime.model, batch)
    except Exception as error:
        return f"the loss raised {type(error).__name__}: {' '.join(str(error).split())}"
    return None


def _judge(runtime: Any, batch: Any, own_loss: bool) -> Iterator[tuple[str, str, str]]:
    model = runtime.model
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    loss = runtime.loss_fn(model, batch)
    handle.remove()
    if not calls:
        text = "call self(...) in loss_sums: fully_shard gathers parameters in its hooks"
        yield "wiring-forward", "the loss does not run the model itself", text
    if not math.isfinite(float(loss.detach())):
        yield (
            "wiring-forward",
            f"the loss is {float(loss.detach())}",
            "see the trace without --check",
        )
        return
    if loss.requires_grad:
        loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None]
    if silent:
        text = "see the trace without --check"
        yield "wiring-forward", f"no gradient for {', '.join(silent[:3])}", text
    if own_loss:
        yield from _sums(model, batch)


def _sums(model: Any, batch: Any) -> Iterator[tuple[str, str, str]]:
    """Hold the sums of a batch against those of its halves, and of labels that are missing."""
    import torch

    rows = len(batch["labels"])
    halves = [{k: t[part] for k, t in batch.items()} for part in (slice(0, 1), slice(1, rows))]
    with torch.no_grad():
        whole, *parts = (model.loss_sums(one) for one in (batch, *halves))
        emptied = {**batch, "labels": _emptied(batch["labels"])}
        nothing, first = model.loss_sums(emptied), parts[0]
        masked = model.loss_sums({**batch, "labels": _emptied(batch["labels"], first=1)})
    total, added = float(whole.total), sum(float(part.total) for part in parts)
    if abs(total - added) > CLOSE * max(abs(total), 1e-12):
        text = "return sums over targets (class_sums, value_sums), and divide nothing"
        yield "wiring-loss", f"a batch sums to {total:.6g}, its parts to {added:.6g}", text
    if int(whole.count) != sum(int(part.count) for part in parts):
        yield "wiring-loss", "count of a batch is not that of its parts", "count the targets"
    if int(nothing.count) or float(nothing.total):
        found = f"count {int(nothing.count)}, sum {float(nothing.total):.6g}"
        text = "skip labels of -100 (classes) or NaN (values), as class_sums and value_sums do"
        yield "wiring-loss", f"a batch without any target has {found}", text
    left = float(whole.total) - float(first.total)
    if abs(float(masked.total) - left) > CLOSE * max(abs(total), 1e-12):
        text = "skip labels of -100 (classes) or NaN (values), as class_sums and value_sums do"
        yield "wiring-loss", "a sample without a target still changes the sum", text


def _emptied(labels: Any, first: int | None = None) -> Any:
    """Copy labels with those of the first samples, or of all, missing."""
    copy = labels.clone()
    copy[:first] = math.nan if labels.is_floating_point() else -100
    return copy
