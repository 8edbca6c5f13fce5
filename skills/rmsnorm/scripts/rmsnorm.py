#!/usr/bin/env python3
"""Measure the RMSNorm layers of a project or of any code through --target.

Each layer is run on what reaches it in a real batch: against the formula in float64, against
torch's rms_norm, and with numbers whose squares half precision cannot hold. Then the whole model
is timed with LayerNorm in its place. A layer is a module whose class name contains "RMSNorm".
"""

from __future__ import annotations

import copy
import importlib.util
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: rmsnorm needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "rmsnorm"
THRESHOLDS = {
    "rmsnorm-parity": 4,  # largest error over the largest output, in roundings of the dtype
    "rmsnorm-torch": 4,  # the same, against torch's rms_norm
    "rmsnorm-statistics": 0.01,  # error with inputs of 300 in float16, whose squares overflow
    "rmsnorm-weights": 100,  # root mean square of a weight, or one over it
    "rmsnorm-eps": 0.1,  # eps over the mean square of an input: outputs shrink by half of it
}
ROWS, PAIRS, LEAST_PAIRS = 4096, 10, 3
LARGE = 300.0


@dataclass
class Norm:
    """One RMSNorm module, what reached it and what was measured."""

    name: str
    module: Any
    x: Any = None
    """Rows of the first call, [at most ROWS, width]."""
    y: Any = None
    """What the module gave for them."""
    form: str = "weight"
    """What multiplies: weight, or 1 + weight as Gemma."""
    eps: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    """What `compare` measured; `statistics` is absent where the layer does not run in float16."""


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--pairs",
        type=int,
        default=PAIRS,
        help=f"timed passes with RMSNorm and LayerNorm in turn (default {PAIRS}; 0 times nothing)",
    )


def check_flags(args: Any) -> None:
    """Refuse numbers that measure nothing."""
    if args.pairs and args.pairs < LEAST_PAIRS:
        raise UsageError(f"--pairs {args.pairs}", f"it takes 0, or at least {LEAST_PAIRS}")


def measure(call: cli.Invocation) -> Report:
    """Find the layers, hold them against formula and torch, time them against LayerNorm."""
    call.expect(None, f"then a forward pass and {call.args.pairs} pairs of passes")
    target = call.load_target()
    report = Report(SKILL)
    with preserved(target), user_code("a pass of the target"):
        batch = next(iter(target.batches))
        norms = find_norms(target, batch)
        if not norms:
            report.summary = f"no RMSNorm in {type(target.model).__name__}"
            report.check(
                "rmsnorm-layers",
                "unclear",
                value=0,
                message='no module that ran has "RMSNorm" in the name of its class',
            )
            report.next.append("rename the class of the norm, or check a project made by init")
            return report
        for norm in norms:
            compare(norm)
        times = time_against_layer_norm(call, target, batch, norms)
    for id, key, what in (
        ("rmsnorm-parity", "parity", "equal the formula"),
        ("rmsnorm-torch", "torch", "equal torch's rms_norm"),
        ("rmsnorm-statistics", "statistics", "take the mean square in float32"),
        ("rmsnorm-weights", "weight", "have weights of a size near 1"),
        ("rmsnorm-eps", "eps", "have an eps far below the mean square"),
    ):
        judge(report, norms, id, key, what)
    report.numbers = {"layers": [numbers_of(norm) for norm in norms], **times}
    forms = sorted({norm.form for norm in norms})
    report.summary = f"{len(norms)} layers, {', '.join(forms)} times x over its root mean square"
    mean_part = statistics.median(norm.numbers["layer_norm"] for norm in norms)
    report.evidence.append(f"LayerNorm with the same weights differs by {mean_part:.1%} (median)")
    if times:
        low, high = times["ratio_95"]
        report.evidence.append(
            f"a pass with RMSNorm takes {times['ratio']:.3f} of one with LayerNorm "
            f"[{low:.3f}, {high:.3f}]; the loss differs by {times['loss_difference']:+.4f}"
        )
    picture = draw(norms, call.out / "rmsnorm_weights.png")
    report.artifacts += [str(picture)] if picture else []
    return report


def find_norms(target: Target, batch: Any) -> list[Norm]:
    """Run the first batch and return the RMSNorm modules that ran, with rows of their input."""
    torch = sys.modules["torch"]
    found = [
        Norm(name, module)
        for name, module in target.model.named_modules()
        if "rmsnorm" in type(module).__name__.lower().replace("_", "")
    ]

    def keep(norm: Norm) -> Any:
        def hook(_: Any, args: tuple, output: Any) -> None:
            if norm.x is None and args and hasattr(output, "shape"):
                norm.x = args[0].detach().flatten(0, -2)[:ROWS].clone()
                norm.y = output.detach().flatten(0, -2)[:ROWS].clone()

        return hook

    hooks = [norm.module.register_forward_hook(keep(norm)) for norm in found]
    with torch.no_grad():
        target.loss_fn(target.model, batch)
    for hook in hooks:
        hook.remove()
    return [norm for norm in found if norm.x is not None and norm.x.numel()]


def eps_of(module: Any, dtype: Any) -> float:
    """Return what is added to the mean square; torch's own default is that of the dtype."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        if isinstance(getattr(module, name, None), float):
            return getattr(module, name)
    return sys.modules["torch"].finfo(dtype).eps


def formula(x: Any, weight: Any, eps: float) -> Any:
    """Return weight * x / root of (mean square + eps), in float64."""
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def roundings(found: Any, wanted: Any, dtype: Any) -> float:
    """Return the largest error over the largest output, in units of the dtype's rounding."""
    error = (found.double() - wanted.double()).abs().max()
    size = wanted.double().abs().max().clamp(min=1e-300)
    return float(error / size / sys.modules["torch"].finfo(dtype).eps)


def compare(norm: Norm) -> None:
    """Measure one layer on the rows that reached it."""
    torch = sys.modules["torch"]
    x, dtype = norm.x, norm.y.dtype
    norm.eps = eps_of(norm.module, x.dtype)
    weight = getattr(norm.module, "weight", None)
    weight = torch.ones(x.shape[-1], device=x.device) if weight is None else weight.detach()
    errors = {
        form: roundings(norm.y, formula(x, factor, norm.eps), dtype)
        for form, factor in (("weight", weight), ("1 + weight", 1 + weight.double()))
    }
    if errors["1 + weight"] < errors["weight"]:
        norm.form = "1 + weight"
    factor = weight if norm.form == "weight" else 1 + weight.double()
    theirs = torch.nn.functional.rms_norm(x, x.shape[-1:], factor.to(x.dtype), norm.eps)
    plain = torch.nn.functional.layer_norm(
        x.double(), x.shape[-1:], factor.double(), None, norm.eps
    )
    size = float(factor.double().square().mean().sqrt())
    mean_square = float(x.double().square().mean(-1).median())
    norm.numbers = {
        "parity": larger(errors[norm.form], error_with_another_weight(norm)),
        "torch": roundings(norm.y, theirs, dtype),
        "weight": max(size, 1 / size) if math.isfinite(size) and size else math.inf,
        "weight_rms": size,
        "weight_lowest": float(weight.min()),
        "weight_highest": float(weight.max()),
        "eps": norm.eps / mean_square if mean_square else math.inf,
        "mean_square": mean_square,
        "layer_norm": float((plain - norm.y.double()).norm() / norm.y.double().norm()),
    }
    in_half = statistics_error(norm, factor)
    if in_half is not None:
        norm.numbers["statistics"] = in_half


def larger(one: float, other: float) -> float:
    """Return the larger error; NaN is the largest."""
    return max(one, other, key=lambda error: (math.isnan(error), error))


def error_with_another_weight(norm: Norm) -> float:
    """Return the parity of a copy whose weight was moved; 0 where none can be.

    At its start, all ones, a weight that the layer does not use would not show.
    """
    torch = sys.modules["torch"]
    module = copy.deepcopy(norm.module)
    weight = getattr(module, "weight", None)
    if weight is None:
        return 0.0
    more = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            weight += more.to(weight)
            found = module(norm.x)
    except (RuntimeError, TypeError):
        return 0.0
    factor = weight.detach() if norm.form == "weight" else 1 + weight.detach().double()
    return roundings(found, formula(norm.x, factor, norm.eps), found.dtype)


def statistics_error(norm: Norm, factor: Any) -> float | None:
    """Return the error for inputs of 300 in float16: their squares exceed 65504.

    Layers that take the mean square in the dtype of their input give 0 or NaN there. None where
    the layer does not run in float16.
    """
    torch = sys.modules["torch"]
    module = copy.deepcopy(norm.module).half()
    x = torch.full((2, norm.x.shape[-1]), LARGE, dtype=torch.float16, device=norm.x.device)
    x[:, ::2] *= -1
    try:
        with torch.no_grad():
            found = module(x).double()
    except (RuntimeError, TypeError):
        return None
    wanted = formula(x, factor, norm.eps)
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))
    return error if math.isfinite(error) else math.inf


def judge(report: Report, norms: list[Norm], id: str, key: str, what: str) -> None:
    """Judge the worst layer by one of its numbers."""
    known = {norm.name: norm.numbers[key] for norm in norms if key in norm.numbers}
    if not known:
        report.check(id, "skipped", message="no layer ran in float16")
        return
    # NaN is the worst of all and no number for max.
    where = max(known, key=lambda name: (math.isnan(known[name]), known[name]))
    limit = THRESHOLDS[id]
    verdict, message = "pass", f"{len(known)} layers {what}"
    if not known[where] <= limit:
        verdict, message = "fail", f"not all {what}, least {where}"
        if id == "rmsnorm-statistics" and not any(runs_in_half(norm) for norm in norms):
            verdict, message = "skipped", f"in half precision not all would {what}, least {where}"
    report.check(id, verdict, value=known[where], threshold=limit, message=message)


def runs_in_half(norm: Norm) -> bool:
    return norm.y.element_size() == 2


# Against LayerNorm


def layer_norm_like(norm: Norm) -> Any:
    """Return a LayerNorm with the weight of an RMSNorm, which takes its input's dtype."""
    torch = sys.modules["torch"]
    weight = getattr(norm.module, "weight", None)
    width = norm.x.shape[-1]

    class LayerNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            start = torch.ones(width, device=norm.x.device) if weight is None else weight.detach()
            self.weight = torch.nn.Parameter(start + 1 if norm.form != "weight" else start.clone())

        def forward(self, x: Any) -> Any:
            weight = self.weight.to(x.dtype)
            return torch.nn.functional.layer_norm(x, (width,), weight, None, norm.eps)

    return LayerNorm()


def time_against_layer_norm(
    call: cli.Invocation, target: Target, batch: Any, norms: list[Norm]
) -> dict[str, Any]:
    """Time forward and backward with either norm in turn; the parts are exchanged in place."""
    if not call.args.pairs:
        return {}
    twins = {norm.name: layer_norm_like(norm) for norm in norms}
    own = {norm.name: norm.module for norm in norms}
    seconds: dict[str, list[float]] = {"rms": [], "layer": []}
    losses = {}
    for turn in range(call.args.pairs + 1):  # the first pair warms up
        for kind, modules in (("rms", own), ("layer", twins)):
            for name, module in modules.items():
                target.model.set_submodule(name, module)
            target.model.zero_grad(set_to_none=True)
            started = now(target)
            loss = target.loss_fn(target.model, batch)
            loss.backward()
            if turn:
                seconds[kind].append(now(target) - started)
            losses[kind] = float(loss.detach())
        call.progress(turn, call.args.pairs, "pairs")
    ratios = [a / b for a, b in zip(seconds["rms"], seconds["layer"], strict=True)]
    return {
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratio_95": median_interval(ratios),
        "loss_difference": losses["layer"] - losses["rms"],
    }


def now(target: Target) -> float:
    """Return the time after the device has finished."""
    torch = sys.modules["torch"]
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median from order statistics (binomial, one half)."""
    ordered, count = sorted(values), len(values)
    below, cut = 0.0, 0
    for index in range(count // 2):
        below += math.comb(count, index) / 2**count
        if below > 0.025:
            break
        cut = index
    return ordered[cut], ordered[count - 1 - cut]


def numbers_of(norm: Norm) -> dict[str, Any]:
    return {
        "name": norm.name,
        "class": type(norm.module).__name__,
        "width": norm.x.shape[-1],
        "dtype": str(norm.y.dtype).removeprefix("torch."),
        "form": norm.form,
        **norm.numbers,
    }


def draw(norms: list[Norm], path: Path) -> Path | None:
    """Draw the range of each layer's weight; None without matplotlib or with weights unfit."""
    ranges = [(norm.numbers["weight_lowest"], norm.numbers["weight_highest"]) for norm in norms]
    finite = all(math.isfinite(end) for ends in ranges for end in ends)
    if importlib.util.find_spec("matplotlib") is None or not finite:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3))
    lowest, highest = zip(*ranges, strict=True)
    axes.fill_between(range(len(norms)), lowest, highest, step="mid", alpha=0.4, label="range")
    sizes = [norm.numbers["weight_rms"] for norm in norms]
    axes.plot(range(len(norms)), sizes, marker="o", linewidth=0.8, label="root mean square")
    axes.set(xlabel="layer, in the order of the model", ylabel="weight", title="RMSNorm weights")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, measure, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
