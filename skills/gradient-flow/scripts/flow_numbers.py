"""From what a recorder saw to plain numbers: by module, parameter, stack of blocks, attention."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from flow_recorder import Recorder, norms_of
from torch import Tensor, nn

from kit import statistics as kit_statistics


@dataclass
class Stack:
    """Repeated blocks in the order of execution, and what they show over depth."""

    names: list[str]
    with_gradient: list[str]
    """Those whose output the loss sends a gradient to; blocks below frozen ones get none."""
    gradients: list[float]
    """Norm of that gradient, geometric mean over the looks."""
    rms: list[float]
    """Root mean square of each block's output."""
    residual: bool
    """Whether a block's output resembles its input, so that it adds to a stream."""
    slope: float | None = None
    """Of the log gradient norm over blocks; None where a gradient is zero or not finite."""
    interval: tuple[float, float] | None = None
    """95 % interval of the slope."""


@dataclass
class Flow:
    """The numbers of all looks."""

    modules: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    units: list[dict[str, Any]] = field(default_factory=list)
    squashes: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    over_time: dict[str, list[float]] = field(default_factory=dict)
    """Recurrent layer -> gradient norm by its input at each time step that gets any."""
    not_called: list[str] = field(default_factory=list)
    bad_output: str | None = None
    """First module whose output holds NaN or plus infinity."""
    bad_gradient: str | None = None
    """First module or parameter, in the order of backward, whose gradient is not finite."""


def fetch(values: list[Tensor]) -> list[float]:
    """Bring scalar tensors to the host in one transfer."""
    if not values:
        return []
    wide = torch.float32 if values[0].device.type == "mps" else torch.float64
    return torch.stack([value.detach().to(wide) for value in values]).tolist()


def gather(recorder: Recorder, model: nn.Module, parameters: list[dict[str, Any]]) -> Flow:
    """Turn everything into plain numbers."""
    flow = Flow(parameters=parameters)
    _modules(recorder, flow)
    _units(recorder, flow)
    for name, calls in recorder.attention.items():
        flow.attention.append({"name": name, **_heads(calls)})
    for name, calls in recorder.over_time.items():
        if len({len(norms) for norms in calls}) == 1:
            steps = zip(*(norms.tolist() for norms in calls), strict=True)
            flow.over_time[name] = [found for found in map(middle, map(list, steps)) if found > 0]
    for name, module in model.named_modules():
        held = any(p.requires_grad for p in module.parameters(recurse=False))
        if held and not {name, name.rpartition(".")[0]} & recorder.called:
            flow.not_called.append(name)
    return flow


def _modules(recorder: Recorder, flow: Flow) -> None:
    looks = max(recorder.looks, 1)
    rows: dict[str, dict[str, Any]] = {}
    sizes = fetch([size for _, size, _ in recorder.largest])
    tops = fetch([top for *_, top in recorder.largest])
    for (name, *_), size, top in zip(recorder.largest, sizes, tops, strict=True):
        empty = {"squares": [0.0] * looks, "counts": [0] * looks, "max": 0.0, "gradients": {}}
        row = rows.setdefault(name, empty)
        row["max"] = max(row["max"], size)
        if flow.bad_output is None and (math.isnan(top) or top == math.inf):
            flow.bad_output = name
    masked = {name for name, row in rows.items() if row["max"] == math.inf}
    norms = fetch([norm for *_, norm in recorder.outputs])
    for (look, name, count, _), norm in zip(recorder.outputs, norms, strict=True):
        if name not in rows:
            continue
        rows[name]["squares"][look] += norm * norm
        rows[name]["counts"][look] += count
        # Minus infinity is what masked logits hold: in the first look it was told apart.
        broken = math.isnan(norm) or (norm == math.inf and name not in masked)
        if flow.bad_output is None and broken:
            flow.bad_output = name
    for (look, name, _), norm in zip(
        recorder.gradients, fetch([g for *_, g in recorder.gradients]), strict=True
    ):
        if name in rows:
            found = rows[name]["gradients"]
            found[look] = found.get(look, 0.0) + norm * norm
        if flow.bad_gradient is None and not math.isfinite(norm):
            flow.bad_gradient = name
    for name in recorder.order:
        row = rows[name]
        per_look = [
            math.sqrt(s / c) for s, c in zip(row["squares"], row["counts"], strict=True) if c
        ]
        gradients = [math.sqrt(square) for square in row["gradients"].values()]
        flow.modules.append(
            {
                "name": name,
                "class": recorder.classes[name],
                "rms": statistics.fmean(per_look),
                "max": row["max"],
                "gradient_norm": middle(gradients) if gradients else None,
            }
        )


def middle(values: list[float]) -> float:
    """Return the geometric mean; 0 where a value is 0, NaN where one is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return 0.0 if min(values) <= 0 else math.exp(statistics.fmean(map(math.log, values)))


def _units(recorder: Recorder, flow: Flow) -> None:
    for name, calls in recorder.units.items():
        widths = {len(top) for _, _, top, _ in calls}
        first = [(rows * len(top), on) for rows, _, top, on in calls if on is not None]
        rows = sum(rows for rows, *_ in calls)
        counts = fetch([on for _, on in first])
        zeros = 1 - sum(counts) / sum(n for n, _ in first) if first else None
        row = {"name": name, "rows": rows, "units": max(widths), "zeros": zeros, "dead": None}
        if len(widths) == 1:
            highest = torch.stack([top for _, _, top, _ in calls]).amax(0)
            row["dead"] = float((highest <= calls[0][1]).double().mean())
        flow.units.append(row)
    for name, calls in recorder.squashes.items():
        beyond = fetch([count for _, _, count, _ in calls])
        ends = [min(fetch(pair)) / n for _, n, _, pair in calls if pair]
        flow.squashes.append(
            {
                "name": name,
                "kind": calls[0][0],
                "saturated": min(b / n for b, (_, n, _, _) in zip(beyond, calls, strict=True)),
                "lesser_end": min(ends, default=0.0),
            }
        )


def _heads(calls: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    same = [pair for pair in calls if pair[0].shape == calls[0][0].shape]
    largest = torch.stack([top for top, _ in same]).double().amax(0).tolist()
    entropy = torch.stack([share for _, share in same]).double().nanmean(0).tolist()
    known = [share for share in entropy if not math.isnan(share)]
    return {
        "largest_logit": max(largest),
        "entropy": statistics.fmean(known) if known else None,
        "heads": [
            {"largest_logit": top, "entropy": None if math.isnan(share) else share}
            for top, share in zip(largest, entropy, strict=True)
        ],
    }


def stacks_of(recorder: Recorder, flow: Flow, names: list[list[str]]) -> list[Stack]:
    """Follow gradient and size of the output over the blocks of each stack."""
    modules = {row["name"]: row for row in flow.modules}
    cosines = fetch([cosine for _, cosine in recorder.streams])
    alike: dict[str, list[float]] = {}
    for (name, _), cosine in zip(recorder.streams, cosines, strict=True):
        alike.setdefault(name, []).append(cosine)
    found = []
    for blocks in names:
        known = [n for n in blocks if n in modules and modules[n]["gradient_norm"] is not None]
        resembling = [statistics.fmean(alike[n]) for n in blocks[1:] if n in alike]
        stack = Stack(
            names=[n for n in blocks if n in modules],
            with_gradient=known,
            gradients=[modules[n]["gradient_norm"] for n in known],
            rms=[modules[n]["rms"] for n in blocks if n in modules],
            residual=bool(resembling) and statistics.median(resembling) > RESEMBLES,
        )
        if len(known) >= 3 and all(0 < g < math.inf for g in stack.gradients):
            stack.slope, stack.interval = trend([math.log(g) for g in stack.gradients])
        found.append(stack)
    return found


RESEMBLES = 0.3
"""Cosine between input and output of a block above which it adds to a stream."""


def trend(values: list[float]) -> tuple[float, tuple[float, float] | None]:
    """Fit a line over 0, 1, 2, ...; returns the slope and its 95 % interval, None without scipy."""
    places = range(len(values))
    if kit_statistics.available():
        fit = kit_statistics.slope(places, values)
        known = math.isfinite(fit.low) and math.isfinite(fit.high)  # equal values leave 0 / 0
        return fit.value, (fit.low, fit.high) if known else None
    return statistics.linear_regression(places, values).slope, None


def parameter_gradients(parameters: list[Tensor]) -> list[Tensor | None]:
    """Return the norm of the gradient of each parameter, None where there is none."""
    found = [
        None
        if p.grad is None
        else (p.grad if p.grad.layout == torch.strided else p.grad.coalesce().values())
        for p in parameters
    ]
    norms = iter(norms_of([gradient for gradient in found if gradient is not None]))
    return [None if gradient is None else next(norms) for gradient in found]
