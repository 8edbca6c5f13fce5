#!/usr/bin/env python3
"""Measure the spiking neurons of a project or of any code through --target.

Firing rate of every layer on real batches, neurons that never or always fire, and how much of the
last time step's gradient reaches the currents of earlier ones. A layer is a module with an
attribute `threshold` or `v_threshold` whose output holds zeros and ones: this bundle's LIF,
snntorch's Leaky, spikingjelly's LIFNode. A module that is called once per forward has time as its
first dim; the calls of one that is called several times are its time steps.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: lif-neuron needs skills/custom-check/scripts/kit, which is missing; "
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

SKILL = "lif-neuron"
THRESHOLDS = {
    "lif-dead-neurons": 0.2,  # share of a layer's neurons that never fire; above it fails
    "lif-saturated": 0.2,  # share that fires in 99 % of all chances or more; above it fails
    "lif-gradient-over-time": 0.001,  # gradient at the first time step over the last; below fails
    "lif-gradient-exploding": 1000,  # the same ratio, the largest of any step; above it fails
}
ALWAYS = 0.99
BATCHES = 4


@dataclass
class Layer:
    """What one layer of neurons did: counts over all batches, gradients of one."""

    name: str
    time_steps: int = 0
    fired: Any = None
    """Spikes of each neuron, float64 [width]."""
    chances: int = 0
    """Time steps, samples and places at which each neuron could fire."""
    over_time: list[float] = field(default_factory=list)
    """Norm of the last time step's gradient by the currents of each time step."""
    total: list[float] = field(default_factory=list)
    """Norm of the loss's gradient by the currents of each time step."""

    @property
    def rates(self) -> Any:
        return self.fired / max(self.chances, 1)

    @property
    def ratios(self) -> list[float]:
        """Gradient at each time step over that at the last; empty where the last has none."""
        last = self.over_time[-1] if self.over_time else 0.0
        return [norm / last for norm in self.over_time] if last else []


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help=f"batches to count on (default {BATCHES})"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="optimizer steps to train first (default 0)"
    )


def check_flags(args: Any) -> None:
    """Refuse numbers that measure nothing."""
    if args.batches < 1:
        raise UsageError(f"--batches {args.batches}", "it takes at least 1")
    if args.steps < 0:
        raise UsageError(f"--steps {args.steps}", "it takes 0 or more")


def measure(call: cli.Invocation) -> Report:
    """Train if asked, count spikes, follow gradients, judge, draw."""
    args = call.args
    call.expect(None, f"then {args.steps} steps of training and {args.batches} batches")
    target = call.load_target()
    if target.kind == "project" and target.runtime.config.compile:
        raise UsageError(
            "compile=true: a compiled block does not show its neurons' gradients",
            "they are measured in plain blocks",
            "add --set compile=false",
        )
    report = Report(SKILL)
    with preserved(target), user_code("a forward or backward pass of the target"):
        train(target, args.steps, call)
        layers = observe(target, args.batches)
    if not layers:
        report.summary = f"no spiking neurons in {type(target.model).__name__}"
        report.check(
            "lif-layers",
            "unclear",
            value=0,
            message="no module with `threshold` or `v_threshold` gave zeros and ones",
        )
        report.next.append(
            "a project made by init has spiking neurons with --set model=tiny_spiking"
        )
        return report
    judge(report, layers)
    rates = [float(layer.rates.mean()) for layer in layers]
    report.summary = (
        f"{len(layers)} layers, {sum(len(layer.rates) for layer in layers)} neurons, "
        f"{max(layer.time_steps for layer in layers)} time steps, "
        f"firing rate {min(rates):.3f} to {max(rates):.3f}"
    )
    report.numbers = {
        "layers": [
            {
                "name": layer.name,
                "time_steps": layer.time_steps,
                "neurons": len(layer.rates),
                "firing_rate": float(layer.rates.mean()),
                "dead": float((layer.fired == 0).double().mean()),
                "saturated": float((layer.rates >= ALWAYS).double().mean()),
                "gradient_over_time": layer.over_time,
                "gradient_of_loss": layer.total,
            }
            for layer in layers
        ]
    }
    picture = draw(layers, call.out / "lif_neuron.png")
    report.artifacts += [str(picture)] if picture else []
    return report


def train(target: Target, steps: int, call: cli.Invocation) -> None:
    """Take optimizer steps first: a project's own, or plain ones of other code."""
    if steps and target.kind == "project":
        from curry_train.step import train_step

        for step in range(steps):
            train_step(target.runtime)
            call.progress(step + 1, steps, "steps")
        return
    if steps and target.optimizer is None:
        raise UsageError(f"--steps {steps}", "the target returned no optimizer to train with")
    batches = itertools.chain.from_iterable(itertools.repeat(target.batches))
    for step, batch in zip(range(steps), batches, strict=False):
        target.optimizer.zero_grad()
        target.loss_fn(target.model, batch).backward()
        target.optimizer.step()
        call.progress(step + 1, steps, "steps")
    target.model.zero_grad(set_to_none=True)


def observe(target: Target, count: int) -> list[Layer]:
    """Count the spikes of `count` batches and follow the gradients of the first."""
    torch = sys.modules["torch"]
    calls: dict[str, list[tuple[Any, Any]]] = {}
    hooks = []
    for name, module in target.model.named_modules():
        known = hasattr(module, "threshold") or hasattr(module, "v_threshold")
        if known and not type(module).__module__.startswith("torch.nn"):
            hooks += watch(name or type(module).__name__, module, calls)
    layers: dict[str, Layer] = {}
    others: set[str] = set()  # a threshold, but what comes out is no spikes
    batches = itertools.chain.from_iterable(itertools.repeat(target.batches))
    for index, batch in zip(range(count), batches, strict=False):
        calls.clear()
        with torch.set_grad_enabled(index == 0):
            loss = target.loss_fn(target.model, batch)
        for name, made in calls.items():
            spikes = over_time([spikes for _, spikes in made])
            if not ((spikes == 0) | (spikes == 1)).all():
                others.add(name)
            elif name not in others:
                count_spikes(layers.setdefault(name, Layer(name)), spikes)
        if index == 0:
            follow(loss, {name: calls[name] for name in layers}, layers)
    for hook in hooks:
        hook.remove()
    return [layer for name, layer in layers.items() if name not in others]


def watch(name: str, module: Any, calls: dict[str, list[tuple[Any, Any]]]) -> list[Any]:
    """Keep the current and the spikes of every call; a current gets a gradient if it has none."""
    torch = sys.modules["torch"]
    arrived: list[Any] = []

    def before(_: Any, inputs: tuple) -> tuple | None:
        current: Any = inputs[0] if inputs else None
        grows = isinstance(current, torch.Tensor) and current.is_floating_point()
        if grows and torch.is_grad_enabled() and not current.requires_grad:
            current = current.detach().requires_grad_()
            inputs = (current, *inputs[1:])
        arrived.append(current if grows else None)
        return inputs

    def after(_: Any, __: tuple, output: Any) -> None:
        spikes = output[0] if isinstance(output, (tuple, list)) else output
        current = arrived.pop()
        if isinstance(spikes, torch.Tensor) and current is not None:
            calls.setdefault(name, []).append((current, spikes))

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def over_time(parts: list[Any]) -> Any:
    """Give one tensor with time first: the one call's own, or the calls in their order."""
    return parts[0] if len(parts) == 1 else sys.modules["torch"].stack(parts)


def count_spikes(layer: Layer, spikes: Any) -> None:
    """Add what each neuron did: the last dim counts neurons, the third of five (images) too."""
    spikes = spikes.detach()
    width = 2 if spikes.dim() == 5 else spikes.dim() - 1
    others = [dim for dim in range(spikes.dim()) if dim != width]
    fired = spikes.double().sum(others).cpu()
    layer.time_steps = spikes.shape[0]
    layer.fired = fired if layer.fired is None else layer.fired + fired
    layer.chances += spikes.numel() // max(spikes.shape[width], 1)


def follow(loss: Any, calls: dict[str, list[tuple[Any, Any]]], layers: dict[str, Layer]) -> None:
    """Ask autograd what the loss, and the last time step alone, give to each time step."""
    torch = sys.modules["torch"]
    settings = {"retain_graph": True, "allow_unused": True}
    for name, made in calls.items():
        layer, currents = layers[name], [current for current, _ in made]
        if not (loss.requires_grad and all(spikes.requires_grad for _, spikes in made)):
            layer.total = layer.over_time = [0.0] * layer.time_steps
            continue
        layer.total = norms(torch.autograd.grad(loss, currents, **settings), currents)
        last = made[-1][1]
        (upstream,) = torch.autograd.grad(loss, [last], **settings)
        upstream = torch.zeros_like(last) if upstream is None else upstream
        if len(made) == 1:
            last, upstream = last[-1], upstream[-1]
        found = torch.autograd.grad(last, currents, upstream, **settings)
        layer.over_time = norms(found, currents)


def norms(grads: Any, currents: list[Any]) -> list[float]:
    """Give the norm at each time step; a gradient that is None is zero."""
    torch = sys.modules["torch"]
    grads = [torch.zeros_like(c) if g is None else g for g, c in zip(grads, currents, strict=True)]
    return over_time(grads).double().flatten(1).norm(dim=1).tolist()


def judge(report: Report, layers: list[Layer]) -> None:
    """Hold the worst layer of each kind against its threshold."""
    dead = max(layers, key=lambda layer: float((layer.fired == 0).double().mean()))
    share(report, "lif-dead-neurons", dead, dead.fired == 0, "never fire")
    full = max(layers, key=lambda layer: float((layer.rates >= ALWAYS).double().mean()))
    share(report, "lif-saturated", full, full.rates >= ALWAYS, "fire nearly always")
    if all(layer.time_steps < 2 for layer in layers):
        for name in ("lif-gradient-over-time", "lif-gradient-exploding"):
            report.check(name, "skipped", message="one time step only: nothing lies between")
        return
    silent = [layer for layer in layers if not any(layer.total)]
    judged = [layer for layer in layers if layer.time_steps > 1 and layer.ratios]
    low = THRESHOLDS["lif-gradient-over-time"]
    if silent:
        message = f"no gradient at all in {len(silent)} of {len(layers)}, first {silent[0].name}"
        report.check("lif-gradient-over-time", "fail", value=0.0, threshold=low, message=message)
        report.next.append("no gradient at all: a detach, or a surrogate too narrow to reach")
    if not judged:
        if not silent:
            message = "the loss reads no layer's last time step"
            report.check("lif-gradient-over-time", "unclear", threshold=low, message=message)
        return
    worst = min(judged, key=lambda layer: layer.ratios[0])
    value = worst.ratios[0]
    if not silent:
        verdict = "pass" if value >= low else "fail"
        message = f"of the last step's gradient reaches the first, least in {worst.name}"
        report.check("lif-gradient-over-time", verdict, value=value, threshold=low, message=message)
        if verdict == "fail":
            steps = worst.time_steps - 1
            report.next.append(
                f"over {steps} steps a leak under {low ** (1 / steps):.2f} forgets this much by "
                "itself: raise it, or take fewer time steps; resets forget too"
            )
    high, top = THRESHOLDS["lif-gradient-exploding"], max(judged, key=lambda x: max(x.ratios))
    value = max(top.ratios)
    report.check(
        "lif-gradient-exploding",
        "pass" if value <= high else "fail",
        value=value,
        threshold=high,
        message=f"largest over the last step's, in {top.name}",
    )
    if value > high:
        report.next.append("exploding: detach the reset, widen the surrogate (lower its slope)")


def share(report: Report, name: str, layer: Layer, hit: Any, what: str) -> None:
    """Judge the share of a layer's neurons."""
    value, limit = float(hit.double().mean()), THRESHOLDS[name]
    report.check(
        name,
        "fail" if value > limit else "pass",
        value=value,
        threshold=limit,
        message=f"of {len(hit)} neurons {what} in {layer.name}",
    )
    if value > limit:
        less = "lower the threshold or raise the currents before it (norm, initial weights)"
        more = "raise the threshold, lower the leak, or normalise the currents before it"
        report.next.append(less if name == "lif-dead-neurons" else more)


def draw(layers: list[Layer], path: Path) -> Path | None:
    """Draw firing rates by layer and gradients by time step; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.25 * len(layers) + 3))
    names = [layer.name for layer in layers]
    left.boxplot([layer.rates.tolist() for layer in layers], orientation="horizontal")
    left.set_yticks(range(1, len(names) + 1), names, fontsize=7)
    left.set(xlabel="firing rate of each neuron", xlim=(-0.02, 1.02), title="Firing rates")
    left.invert_yaxis()
    for layer in layers:
        if layer.ratios:
            right.plot(range(layer.time_steps), layer.ratios, marker="o", label=layer.name)
    right.axhline(THRESHOLDS["lif-gradient-over-time"], linestyle="--", color="black")
    right.set(xlabel="time step", ylabel="over the last step's", title="Gradient over time")
    right.set_yscale("log")
    right.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, measure, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
