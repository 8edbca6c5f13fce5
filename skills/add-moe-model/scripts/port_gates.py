"""The gates that a port has to pass, each a function that returns a Finding with its numbers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import tiny_models
import torch
from tensor_rules import read_json

from kit import layouts
from kit.transformers_float64 import in_float64

MESHES = {
    "pp1 ep1": {"dp_shard": 2},
    "pp2": {"pp": 2, "dp_shard": 1},
    "ep2": {"ep": 2, "dp_shard": 2},
    "pp2 ep2": {"pp": 2, "ep": 2, "dp_shard": 2},
}
"""Gate 5 runs the first in one process."""
TOKENS, CONTEXT = 12, 32
PROMPTS = ([5, 77, 141], [200], [*range(30, 45)])
TIMEOUT = 300.0


def sizes_of(mesh: str, model: Any) -> dict[str, Any]:
    """Return the settings of a mesh; tied ends need a schedule that has both on one rank."""
    tied = {"schedule": "zbv"} if model.tie_word_embeddings and "pp" in MESHES[mesh] else {}
    return MESHES[mesh] | tied


class Finding(NamedTuple):
    """What a gate says: the check id, its value, what it was and where to look."""

    id: str
    passed: bool
    value: Any = None
    threshold: Any = None
    message: str = ""
    numbers: Any = None
    next: str = ""


@dataclass
class Port:
    """A port: its name, config.json, the project's Config of it and the model that it describes."""

    name: str
    raw: dict[str, Any]
    config: Any
    model: Any
    folder: Path

    @property
    def architecture(self) -> str:
        from curry_train.checkpoint.families import family_of

        return family_of(self.raw)[0]

    def tiny(self) -> tuple[dict[str, Any], Any]:
        """Return a tiny config.json and the model that the project reads from it."""
        from curry_train.checkpoint.families import read_config

        raw = tiny_models.tiny(self.raw)
        read = read_config(raw)
        kind = type(self.config.model)
        own = {key: value for key, value in asdict(read).items() if key != "architecture"}
        return raw, replace(self.config.model, **own) if kind is not type(read) else read

    def published(self, dtype: str = "float64") -> Path:
        """Return a folder with a tiny random model as transformers writes it, made once."""
        folder = self.folder / f"published-{dtype}"
        if not folder.exists():
            model = tiny_models.random_model(self.tiny()[0], self.architecture)
            tiny_models.save(model.to(getattr(torch, dtype)), folder)
        return folder


def load_port(call: Any, name: str, hf: Path | None, folder: Path) -> tuple[Port | None, str]:
    """Compose the YAML, read the config.json; returns the port, or what stands in its way."""
    yaml = call.project / "configs" / "model" / f"{name}.yaml"
    if not yaml.is_file():
        known = ", ".join(sorted(path.stem for path in yaml.parent.glob("*.yaml")))
        return None, f"there is no {yaml}; `draft` writes it; there are {known}"
    config, problems = layouts.load(call, [f"model={name}", *layouts.words_of(call)])
    if config is None:
        return None, f"model={name} does not compose: {'; '.join(problems)}"
    from curry_train.checkpoint import CheckpointError
    from curry_train.checkpoint.families import live, read_config, write_config
    from curry_train.models import MODELS

    module, _, cls = MODELS[config.model.architecture].partition(":")
    try:
        getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        return None, f"{module}:{cls} of MODELS does not import: {error}"
    try:
        raw = read_json(hf) if hf is not None else write_config(config.model, "float32")
        model = read_config(raw)
    except CheckpointError as error:
        source = str(hf) if hf is not None else f"config.json of model={name}"
        return None, f"{source}: {'; '.join(error.problems)}"
    here, there = live(config.model), live(model)
    gaps = [
        f"model.{key}: the YAML has {here.get(key)}, config.json {there.get(key)}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]
    if gaps:
        return None, f"configs/model/{name}.yaml differs from {hf}: {'; '.join(gaps)}"
    return Port(name, raw, config, model, folder), ""


# Gate 2


def parameters(port: Port, thresholds: dict[str, float]) -> Finding:
    """Build both models without values and compare how many parameters they have."""
    from curry_train.models.protocol import build_model, count_parameters

    ours, _ = count_parameters(build_model(port.config, "meta"))
    theirs = tiny_models.meta_parameters(port.raw, port.architecture)
    message = f"{ours:,} here, {theirs:,} in transformers' {port.architecture}"
    numbers = {"parameters": ours, "transformers": theirs}
    passed = abs(ours - theirs) <= thresholds["port-parameters"]
    hint = "run gate 3: a missing or mis-shaped tensor is named there"
    gap = ours - theirs
    return Finding(
        "port-parameters", passed, gap, thresholds["port-parameters"], message, numbers,
        "" if passed else hint,
    )  # fmt: skip


# Gate 3


def parity(port: Port, thresholds: dict[str, float]) -> Finding:
    """Compare logits and every gradient of a tiny random model with transformers, in float64."""
    from curry_train.checkpoint import CheckpointError

    try:
        found = compare(port)
    except CheckpointError as error:
        hint = "the weight map of the family, or a field of the model, is not right"
        problems = "; ".join(error.problems)
        return Finding("port-parity", False, None, None, problems, {}, hint)
    id, limit = "port-parity", thresholds["port-parity"]
    passed = found["logits"] <= limit and found["worst"] <= limit
    value = max(found["logits"], found["worst"])
    message = (
        f"logits {found['logits']:.2e}, gradients of {found['tensors']} tensors"
        f" {found['worst']:.2e} (worst {found['name']})"
    )
    if not passed:
        message += f"; first apart after {found['first']}"
    hint = "" if passed else f"look up {found['first']} in the table of SKILL.md"
    return Finding(id, passed, value, limit, message, found, hint)


def compare(port: Port) -> dict[str, Any]:
    """Return the errors of logits and gradients, the worst tensor and where they first part."""
    from curry_train.checkpoint.huggingface import load
    from curry_train.config import Config
    from curry_train.models.protocol import build_model, named_state, saved_views

    raw, model = port.tiny()
    folder = port.published()
    ours = build_model(Config(model=model, precision="fp64"), "cpu")
    load(folder, dict(named_state(ours)), model)
    theirs = tiny_models.random_model(raw, port.architecture)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, raw["vocab_size"], (2, tiny_models.LENGTH), generator=generator)
    seen: dict[str, dict[str, Any]] = {"ours": {}, "theirs": {}}
    watch(ours, seen["ours"])
    watch(theirs, seen["theirs"])
    with in_float64(type(theirs)):
        wanted = theirs(input_ids=ids, use_cache=False).logits
        upstream = torch.randn(wanted.shape, generator=generator, dtype=wanted.dtype)
        (wanted * upstream).sum().backward()
    logits = ours(ids).logits[..., : wanted.shape[-1]]
    (logits * upstream).sum().backward()
    found: dict[str, Any] = {}
    for name, parameter in ours.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found |= saved_views(ours, name, grad)
    gradients = {name: torch.zeros_like(tensor) for name, tensor in named_state(ours)}
    load(gradients_of(theirs, port.folder / "gradients"), gradients, model)
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    errors = {name: error_of(found[name], gradients[name], 1e-6 * norm) for name in found}
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return {
        "logits": error_of(logits, wanted),
        "worst": errors[worst],
        "name": worst,
        "tensors": len(errors),
        "first": first_apart(seen),
    }


def gradients_of(model: Any, folder: Path) -> Path:
    """Write the gradients of a model of transformers as if they were its weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.data = torch.zeros_like(parameter) if grad is None else grad.clone()
    return tiny_models.save(model, folder)


def error_of(found: torch.Tensor, wanted: torch.Tensor, floor: float = 1e-300) -> float:
    """Return the largest difference over the largest value; infinite for NaN."""
    gap = float((found - wanted).detach().abs().max()) if wanted.numel() else 0.0
    error = gap / max(float(wanted.detach().abs().max()) if wanted.numel() else 1.0, floor)
    return error if error == error else float("inf")


def watch(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    """Keep what each attention and each block of a model gives, by its name from `layers.` on."""
    for name, module in model.named_modules():
        at = re.search(r"(?:^|\.)(layers\.\d+(?:\.self_attn)?|embed_tokens)$", name)
        if at:
            module.register_forward_hook(_keeper(at[1], seen))


def _keeper(name: str, seen: dict[str, Any]) -> Callable[..., None]:
    def keep(_: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        seen.setdefault(name, first.detach())

    return keep


def first_apart(seen: dict[str, dict[str, Any]], tolerance: float = 1e-9) -> str:
    """Name the first part whose output differs: embedding, attention or feed-forward of a block."""
    for name in sorted(seen["theirs"].keys() & seen["ours"].keys(), key=_order):
        here, there = seen["ours"][name], seen["theirs"][name]
        if here.shape != there.shape or error_of(here, there) > tolerance:
            block = re.fullmatch(r"layers\.(\d+)", name)
            return (
                f"feed-forward of block {block[1]}" if block else name.replace("layers.", "block ")
            )
    return "the last norm or the head (or nothing forward)"


def _order(name: str) -> tuple[int, int]:
    number = re.search(r"\d+", name)
    return (int(number[0]), name.endswith("self_attn") is False) if number else (-1, 0)


# Gate 4


def equal_layouts(port: Port, thresholds: dict[str, float], call: Any, names: list[str]) -> Finding:
    """Prove that the meshes train as one process does, on a small model of the port's kind."""
    from curry_train import equality

    rows, worst = {}, (0.0, "")
    for mesh in names:
        axes = [f"parallel.{axis}={size}" for axis, size in sizes_of(mesh, port.model).items()]
        words = [f"model={port.name}", *axes]
        config, problems = layouts.load(call, words)
        if config is None:
            return Finding("port-layouts", False, None, None, f"{mesh}: {'; '.join(problems)}")
        world = layouts.ranks_of(config, None)
        folder = port.folder / mesh.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        small = layouts.written(layouts.small(config, world, folder))
        try:
            proof = equality.prove([*words, *small], world, project=call.project, timeout=TIMEOUT)
        except AssertionError as error:
            first = str(error).splitlines()
            return Finding("port-layouts", False, None, None, f"{mesh}: {' '.join(first[:2])}")
        ratio = max((gap.ratio, f"{mesh}: {kind} {gap.name}") for kind, gap in proof.gaps.items())
        worst = max(worst, ratio)
        rows[mesh] = {"equal": proof.equal, "worst": ratio[0], "problems": proof.problems}
    failed = [mesh for mesh, row in rows.items() if not row["equal"]]
    message = f"{', '.join(rows)} equal one process; nearest to its tolerance {worst[1]}"
    if failed:
        message = f"{', '.join(failed)} differ from one process; {worst[1]}"
    limit = thresholds["port-layouts"]
    hint = "run the parallel-state skill on that mesh: it names tensor, layer and rank"
    return Finding(
        "port-layouts", not failed and worst[0] <= limit, worst[0], limit, message,
        {"meshes": rows}, hint if failed else "",
    )  # fmt: skip


# Gate 5


def same_text(port: Port, thresholds: dict[str, float], names: list[str]) -> Finding:
    """Continue prompts greedily in transformers, in one process and on every mesh."""
    from curry_train.compose import load_config
    from curry_train.config import ParallelConfig
    from curry_train.data import open_corpus
    from curry_train.testing import run_ranks

    raw, model = port.tiny()
    folder = port.published()
    wanted = greedy(tiny_models.random_model(raw, port.architecture))
    words = [f"data.seq_len={CONTEXT}", "precision=fp64", "accelerator=cpu", "devices=1"]
    base = replace(load_config([*words, "model=tiny_dense"]), model=model)
    corpus = open_corpus(base.data, cache_dir=None)
    texts = {"one process": text_of_rank(0, 1, base, corpus, folder)}
    for mesh in names:
        if mesh == "pp1 ep1":
            continue
        config = replace(base, parallel=replace(ParallelConfig(), **sizes_of(mesh, model)))
        world = config.parallel.pp * config.parallel.dp_shard
        ranks = run_ranks(text_of_rank, world, config, corpus, folder, timeout=TIMEOUT)
        texts |= {f"{mesh}, rank {rank}": text for rank, text in enumerate(ranks)}
    wrong = [where for where, text in texts.items() if text != wanted]
    tokens = sum(map(len, wanted))
    varied = len({token for text in wanted for token in text})
    numbers = {"wanted": wanted, "differ": {where: texts[where] for where in wrong}}
    where = [mesh for mesh in names if mesh != "pp1 ep1"]
    message = (
        f"{tokens} greedy tokens, {varied} of them different: {', '.join(['one process', *where])}"
    )
    if wrong:
        message = f"another text than transformers on {', '.join(wrong)}"
    limit = thresholds["port-text"]
    hint = "pass gate 3 and gate 4 first" if wrong else ""
    return Finding("port-text", len(wrong) <= limit, len(wrong), limit, message, numbers, hint)


def greedy(model: Any) -> list[list[int]]:
    """Return what a model of transformers continues each of PROMPTS with."""
    out = []
    with in_float64(type(model)), torch.no_grad():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(TOKENS):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                ids.append(int(logits.to(torch.float32).argmax()))
            out.append(ids[len(prompt) :])
    return out


def text_of_rank(rank: int, world: int, config: Any, corpus: Any, folder: Path) -> list[list[int]]:
    """Load the published weights on one rank of a mesh and continue each of PROMPTS."""
    from curry_train.checkpoint.huggingface import load
    from curry_train.checkpoint.training_state import fill_tied, weight_tensors
    from curry_train.generate import generate
    from curry_train.parallel.mesh import Mesh, build_mesh
    from curry_train.runtime import assemble

    mesh = Mesh.single()
    if world > 1:
        mesh = build_mesh(
            config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60.0
        )
    runtime = assemble(config, corpus, mesh)
    load(folder, weight_tensors(runtime), config.model, mesh)
    fill_tied(runtime)
    return [
        generate(
            runtime.model, prompt, max_tokens=TOKENS, context=CONTEXT, temperature=0.0, mesh=mesh,
            pipeline=runtime.pipeline,
        )
        for prompt in PROMPTS
    ]  # fmt: skip


# Gate 6


def round_trip(port: Port, thresholds: dict[str, float]) -> Finding:
    """Import a tiny random model of bfloat16 and export it: every key and bit comes back."""
    from curry_train.checkpoint import CheckpointError
    from curry_train.checkpoint.huggingface import export, import_weights

    source = port.published("bfloat16")
    try:
        checkpoint = import_weights(source, port.folder / "imported")
        back = export(checkpoint, port.folder / "exported")
    except CheckpointError as error:
        return Finding("port-round-trip", False, None, None, "; ".join(error.problems))
    before, after = tensors_of(source), tensors_of(back)
    problems = [f"{key} is missing" for key in sorted(before.keys() - after.keys())]
    problems += [f"{key} is new" for key in sorted(after.keys() - before.keys())]
    for key in sorted(before.keys() & after.keys()):
        one, other = before[key], after[key]
        if one.dtype != other.dtype or one.shape != other.shape:
            problems.append(f"{key}: {one.dtype} {list(one.shape)} became another")
        elif not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            problems.append(f"{key} has other bits")
    limit = thresholds["port-round-trip"]
    message = f"{len(before)} tensors of bfloat16 come back bit for bit"
    if problems:
        message = f"{problems[0]}" + (f" and {len(problems) - 1} more" if problems[1:] else "")
    passed = len(problems) <= limit
    numbers = {"tensors": len(before), "problems": problems[:50]}
    hint = "" if passed else "Family.names and Family.experts in checkpoint/families.py"
    return Finding("port-round-trip", passed, len(problems), limit, message, numbers, hint)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder's safetensors files."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found
