#!/usr/bin/env python3
"""Measure the attention of a project or of any code through --target.

A project's layers are run in float64 on what reaches them in a real batch, and compared with the
formula written out in reference_attention.py and, where it is installed, with transformers' layer.
Of every model: does attention look at later tokens, how large are the logits, what q/k norm
changes, and how many bytes a key-value cache takes. In foreign code a layer is a module whose class
name contains "attention".
"""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: gqa-attention needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli  # noqa: E402
from kit.batches import tensors  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "gqa-attention"
THRESHOLDS = {
    "attention-parity": 1e-9,  # largest difference over the largest output, in float64
    "attention-transformers": 1e-5,  # the same; transformers' norms stay in float32
    "attention-causal": 0.001,  # change of earlier outputs over the largest output
    "attention-logits": 1000,  # largest logit in size; far beyond it training diverges
}
TOKENS = 256
OURS = ("curry_train.layers.attention", "curry_train.layers.latent_attention")
WITHOUT_CACHE = ("curry_train.layers.spiking_attention",)  # a sum of one size takes its place


@dataclass
class Layer:
    """One attention module and what reached it."""

    name: str
    module: Any
    x: Any = None
    """Input of the first call, [B, S, D]."""
    ours: bool = False
    parity: float | None = None
    peers: float | None = None
    logits: float | None = None
    logits_without_norm: float | None = None
    entropy: float | None = None


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        help=f"tokens of the first sample to compare on (default {TOKENS})",
    )
    parser.add_argument(
        "--context", type=int, help="tokens of the key-value cache (default: the model's longest)"
    )


def check_flags(args: Any) -> None:
    """Refuse numbers that measure nothing."""
    if args.tokens < 2:
        raise UsageError(f"--tokens {args.tokens}", "it takes at least 2: one to look at another")
    if args.context is not None and args.context < 1:
        raise UsageError(f"--context {args.context}", "it takes at least 1")


def measure(call: cli.Invocation) -> Report:
    """Find the layers, compare them, probe causality, size the cache, draw."""
    call.expect(None, "then four forward passes and each layer in float64")
    target = call.load_target()
    report = Report(SKILL)
    with preserved(target), user_code("a forward pass of the target"):
        target.model.eval()
        batch = next(iter(target.batches))
        layers = find_layers(target, batch)
        if not layers:
            return nothing_found(report, target)
        causal = probe_causality(target, batch, layers)
        if any(layer.ours for layer in layers):
            compare(call, target, batch, layers)
    judge_parity(report, layers)
    judge_causality(report, causal)
    judge_logits(report, layers)
    report.numbers = {"layers": [numbers_of(layer) for layer in layers]}
    report.numbers["causality"] = {"earlier": causal[0], "later": causal[1], "layer": causal[2]}
    size = size_cache(call, target, layers, report)
    shared = {type(layer.module).__name__ for layer in layers}
    report.summary = f"{len(layers)} layers of {', '.join(sorted(shared))}{size}"
    picture = draw(layers, call.out / "attention_logits.png")
    report.artifacts += [str(picture)] if picture else []
    return report


def nothing_found(report: Report, target: Target) -> Report:
    """Say what was looked for."""
    report.summary = f"no attention in {type(target.model).__name__}"
    report.check(
        "attention-layers",
        "unclear",
        value=0,
        message='no module that ran has "attention" in the name of its class',
    )
    report.next.append("rename the class of the layer, or check a project made by init")
    return report


def find_layers(target: Target, batch: Any) -> list[Layer]:
    """Run the first batch and return the attention modules that ran, with their input."""
    torch = sys.modules["torch"]
    found = {
        name: Layer(name, module, ours=type(module).__module__ in OURS)
        for name, module in target.model.named_modules()
        if "attention" in type(module).__name__.lower()
    }
    hooks = [
        layer.module.register_forward_pre_hook(keep_input(layer), with_kwargs=True)
        for layer in found.values()
    ]
    with torch.no_grad():
        target.loss_fn(target.model, batch)
    for hook in hooks:
        hook.remove()
    return [layer for layer in found.values() if layer.x is not None]


def keep_input(layer: Layer) -> Any:
    """Return a hook that keeps the first floating-point input of the first call."""

    def hook(_: Any, args: tuple, kwargs: dict) -> None:
        inputs = [t for t in tensors([*args, *kwargs.values()]) if t.is_floating_point()]
        if layer.x is None and inputs:
            layer.x = inputs[0].detach()

    return hook


# Causality


def probe_causality(target: Target, batch: Any, layers: list[Layer]) -> tuple[float, float, str]:
    """Change all tokens from the middle on and compare what attention gives; again one token on.

    Two places, because code that works in chunks hides a look-ahead that ends with the chunk.
    Returns the largest change of an earlier output over the largest output, that of a later one,
    and the layer that has the first; NaN when no input could be changed.
    """
    tokens = token_tensor(batch)
    if tokens is None or tokens.shape[1] < 2:
        return float("nan"), float("nan"), ""
    length = tokens.shape[1]
    before, kept = outputs_of(target, batch, layers), tokens.clone()
    worst, reached, where = 0.0, 0.0, layers[0].name
    for cut in range(length // 2, min(length // 2 + 2, length)):
        try:
            tokens[:, cut:] = other_values(tokens[:, cut:], kept)
            after = outputs_of(target, batch, layers)
        finally:
            tokens.copy_(kept)
        for name, old in before.items():
            if length not in old.shape[:2]:
                continue
            dim = 1 if old.shape[1] == length else 0
            old, new = old.double(), after[name].double()
            moved = (new - old).abs() / old.abs().max().clamp(min=1e-300)
            earlier = float(moved.narrow(dim, 0, cut).max())
            reached = max(reached, float(moved.narrow(dim, cut, length - cut).max()))
            if not earlier <= worst and not math.isnan(worst):
                worst, where = earlier, name
    return worst, reached, where


def token_tensor(batch: Any) -> Any:
    """Return the tensor of a batch that the model reads along a sequence, [B, S] or [B, S, D]."""
    if isinstance(batch, dict) and hasattr(batch.get("input_ids"), "dim"):
        return batch["input_ids"]
    parts = {k: v for k, v in batch.items() if k != "labels"} if isinstance(batch, dict) else batch
    sequences = (t for t in tensors(parts) if t.dim() == (3 if t.is_floating_point() else 2))
    return next((t for t in sequences if t.shape[1] >= 2), None)


def other_values(part: Any, all_values: Any) -> Any:
    """Return values unlike `part` that the model can read: other ids of the batch, or noise."""
    torch = sys.modules["torch"]
    if part.is_floating_point():
        return part + torch.randn_like(part) * all_values.std()
    known = all_values.unique()
    return known[(torch.searchsorted(known, part.contiguous()) + 1) % len(known)]


def outputs_of(target: Target, batch: Any, layers: list[Layer]) -> dict[str, Any]:
    """Return the first tensor that each layer gives."""
    torch = sys.modules["torch"]
    found: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, args: tuple, output: Any) -> None:
            first = next(tensors(output), None)
            if first is not None and first.dim() >= 2:
                found.setdefault(name, first.detach().clone())

        return hook

    hooks = [layer.module.register_forward_hook(keep(layer.name)) for layer in layers]
    with torch.no_grad():
        target.loss_fn(target.model, batch)
    for hook in hooks:
        hook.remove()
    return found


def judge_causality(report: Report, causal: tuple[float, float, str]) -> None:
    """Earlier outputs may not move; later ones must, or the probe saw nothing."""
    earlier, later, where = causal
    limit = THRESHOLDS["attention-causal"]
    if not later > limit:
        verdict, message = "unclear", "changed tokens reached no output of attention"
    elif earlier <= limit:
        verdict, message = "pass", "changed later tokens move no earlier output"
    else:
        verdict, message = "fail", f"{where} looks at later tokens (right in an encoder only)"
    report.check("attention-causal", verdict, value=earlier, threshold=limit, message=message)


# Parity


def compare(call: cli.Invocation, target: Target, batch: Any, layers: list[Layer]) -> None:
    """Run each of the project's layers in float64 against the formula and transformers' layer."""
    torch = sys.modules["torch"]
    import reference_attention

    from curry_train.layers.attention import positions_of

    c = target.runtime.config.model
    length = min(call.args.tokens, batch["input_ids"].shape[1])
    default = torch.arange(length)[None]
    position_ids = batch.get("position_ids", default)[:1, :length].cpu()
    doc_ids = batch.get("doc_ids")
    doc_ids = None if doc_ids is None else doc_ids[:1, :length].cpu()
    positions = positions_of(c, position_ids, doc_ids, torch.float64)
    peers = importlib.util.find_spec("transformers") is not None and has_peer(c)
    compared = [layer for layer in layers if layer.ours]
    for done, layer in enumerate(compared):
        x = layer.x[:1, :length].cpu().double()
        index = int(layer.name.split("layers.")[1].split(".")[0])
        window = reference_attention.window_of(c, index)
        module = copy.deepcopy(layer.module).cpu().double()
        weights = {name: p.detach() for name, p in module.named_parameters()}
        inputs = (x, position_ids, doc_ids, window)
        with torch.no_grad():
            found = module(x, positions)
            wanted, layer.logits, layer.entropy = reference_attention.attention(c, weights, *inputs)
            layer.parity = difference(found, wanted)
            if "q_norm.weight" in weights:
                _, layer.logits_without_norm, _ = reference_attention.attention(
                    c, weights, *inputs, qk_norm=False
                )
            reference_attention.stir(module)
            found = module(x, positions)
            wanted = reference_attention.attention(c, weights, *inputs)[0]
            layer.parity = larger(layer.parity, difference(found, wanted))
            if peers:
                import transformers_attention

                layer.peers = difference(
                    found, transformers_attention.attention(c, weights, *inputs)
                )
        call.progress(done + 1, len(compared), "layers")


def larger(one: float, other: float) -> float:
    """Return the larger error; NaN is the largest."""
    return max(one, other, key=lambda error: (math.isnan(error), error))


def has_peer(c: Any) -> bool:
    """Tell whether a layer of transformers knows all that a configuration asks for."""
    if c.kv_lora_rank:
        return True
    whole = getattr(c, "qk_norm_width", "head") == "projection"
    if whole and c.num_attention_heads * c.head_dim != c.hidden_size:
        return False
    if getattr(c, "clip_qkv", None) is not None and not whole:
        return False
    return not c.rope_interleave and not (c.attention_sinks and c.qk_norm)


def difference(found: Any, wanted: Any) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))


def judge_parity(report: Report, layers: list[Layer]) -> None:
    """Judge the worst layer against the formula and against transformers."""
    for id, key, what, absent in (
        ("attention-parity", "parity", "the formula", "no layer of curry_train.layers"),
        (
            "attention-transformers",
            "peers",
            "transformers' layer",
            "transformers is not installed, or has no layer with these settings",
        ),
    ):
        known = [layer for layer in layers if getattr(layer, key) is not None]
        if not known:
            report.check(id, "skipped", message=absent)
            continue
        sizes = {layer.name: getattr(layer, key) for layer in known}
        # NaN is the worst of all and no number for max.
        where = max(sizes, key=lambda name: (math.isnan(sizes[name]), sizes[name]))
        value, limit = sizes[where], THRESHOLDS[id]
        verdict = "pass" if value <= limit else "fail"
        message = f"{len(known)} layers equal {what}"
        if verdict == "fail":
            message = f"{where} differs from {what}"
        report.check(id, verdict, value=value, threshold=limit, message=message)


def judge_logits(report: Report, layers: list[Layer]) -> None:
    """Judge the largest logit; say what q/k norm does to it."""
    known = [layer for layer in layers if layer.logits is not None]
    if not known:
        report.check("attention-logits", "skipped", message="seen in curry_train.layers only")
        return
    worst = max(known, key=lambda layer: layer.logits or 0.0)
    limit = THRESHOLDS["attention-logits"]
    without = worst.logits_without_norm
    message = f"{worst.name} has the largest; entropy {worst.entropy:.2f} nats"
    if without is not None:
        message += f"; {without:.3g} without q/k norm"
    report.check(
        "attention-logits",
        "pass" if (worst.logits or 0.0) <= limit else "fail",
        value=worst.logits,
        threshold=limit,
        message=message,
    )
    if not (worst.logits or 0.0) <= limit and without is None:
        report.next.append("set model.qk_norm=true, or lower the learning rate")


# Key-value cache


def size_cache(call: cli.Invocation, target: Target, layers: list[Layer], report: Report) -> str:
    """Put the bytes of a key-value cache into the report; return a part of the summary."""
    entries = [cached_entries(layer.module) for layer in layers]
    if 0 in entries:
        return ""
    item = layers[0].x.element_size() if layers[0].x is not None else 4
    c = target.runtime.config.model if target.kind == "project" else None
    context = call.args.context or getattr(c, "max_position_embeddings", 4096)
    windows = [getattr(layer.module, "window", None) or context for layer in layers]
    per_token = sum(entries) * item
    whole = item * sum(n * min(w, context) for n, w in zip(entries, windows, strict=True))
    report.numbers["kv_cache"] = {
        "bytes_per_token": per_token,
        "context": context,
        "bytes_of_context": whole,
        "bytes_per_element": item,
    }
    if c is not None and layers[0].ours:
        wide = 2 * c.num_attention_heads * (c.value_dim if c.kv_lora_rank else c.head_dim)
        report.numbers["kv_cache"]["share_of_multi_head"] = sum(entries) / (wide * len(layers))
    report.evidence.append(
        f"key-value cache: {per_token:,} bytes a token, {whole / 2**20:,.1f} MiB for one sequence "
        f"of {context:,} tokens at {item} bytes an element"
    )
    return f", {per_token:,} bytes of cache a token"


def cached_entries(module: Any) -> int:
    """Return how many numbers a cache must keep of a token in this layer; 0 if unknown."""
    if type(module).__module__ in WITHOUT_CACHE:
        return 0
    latent = getattr(module, "kv_a_proj_with_mqa", None)
    if latent is not None:
        return latent.weight.shape[0]
    weights = [
        getattr(getattr(module, name, None), "weight", None) for name in ("k_proj", "v_proj")
    ]
    rows = [weight.shape[0] for weight in weights if weight is not None]
    return sum(rows) if len(rows) == 2 else 0


def numbers_of(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "class": type(layer.module).__name__,
        "parity": layer.parity,
        "transformers": layer.peers,
        "largest_logit": layer.logits,
        "largest_logit_without_qk_norm": layer.logits_without_norm,
        "entropy": layer.entropy,
    }


def draw(layers: list[Layer], path: Path) -> Path | None:
    """Draw the largest logit of each layer; None without matplotlib or without logits."""
    known = [layer.logits for layer in layers if layer.logits is not None]
    if not known or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3))
    places = range(len(known))
    axes.plot(places, known, marker="o", label="as trained")
    bare = [layer.logits_without_norm for layer in layers]
    bare = [size for size in bare if size is not None]
    if len(bare) == len(known):
        axes.plot(places, bare, marker="x", linestyle="--", label="without q/k norm")
    axes.set(xlabel="layer", ylabel="largest logit", title="Attention logits", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, measure, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
