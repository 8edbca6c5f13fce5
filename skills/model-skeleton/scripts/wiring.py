"""Whether a project's models and datasets are wired: what is missing, and what to add where."""

from __future__ import annotations

import ast
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from wiring_pass import run_model

from kit import cli
from kit.errors import UsageError
from kit.fix import fix_at, fix_in
from kit.report import Report
from kit.target import put_first_on_path
from kit.user_code import user_code

IDS = {
    "wiring-registered": "each has its line in MODELS or DATASETS",
    "wiring-yaml": "a file of configs chooses each",
    "wiring-config": "every setting has its sentence",
    "wiring-protocol": "the trainer finds what it asks for",
    "wiring-forward": "each gives a finite loss and all gradients",
    "wiring-loss": "missing targets count nothing, parts add up to the whole",
    "wiring-dataset": "each loads, is annotated and gives batches",
    "wiring-test": "a test names each model",
}
ATTRIBUTES = (
    *("layers", "vocab_size", "vocab_parameters", "compute_dtype", "active_share"),
    *("init_constant", "init_std", "tie_weights"),
)
UNEQUAL = ("Dropout", "BatchNorm", "SyncBatchNorm", "InstanceNorm")
"""Modules whose result depends on luck or on the other samples of a rank."""
MOST_PARAMETERS = 30_000_000
"""A preset above this is not built."""


@dataclass
class Findings:
    """What is missing: (id, message, fix) in the order of finding, and what was looked at."""

    project: Path
    missing: list[tuple[str, str, dict[str, Any] | None]] = field(default_factory=list)
    judged: dict[str, int] = field(default_factory=dict)

    def add(self, id: str, message: str, fix: dict[str, Any] | None) -> None:
        self.missing.append((id, message, fix))

    def look(self, id: str) -> None:
        self.judged[id] = self.judged.get(id, 0) + 1


def check_wiring(call: cli.Invocation, report: Report) -> Report:
    """Check the models and datasets that --check names, or all of them."""
    put_first_on_path(call.project)
    with user_code("importing curry_train of the project"):
        models = importlib.import_module("curry_train.models").MODELS
        datasets = importlib.import_module("curry_train.data").DATASETS
    found = Findings(call.project)
    asked = call.args.check
    strangers = set(asked) - set(models) - set(datasets) - {n for n, _ in written(found.project)}
    if strangers:
        raise UsageError(
            f"--check {' '.join(sorted(strangers))}: no model or dataset of this project",
            f"registered are {', '.join([*models, *datasets])}",
            "write the file first, or name one of those",
        )
    names = [name for name in models if not asked or name in asked]
    for number, name in enumerate(names):
        call.progress(number, len(names), name)
        check_model(found, name, models[name])
    for name in datasets:
        if not asked or name in asked:
            check_dataset(found, name)
    unregistered(found, models, datasets, asked)
    for id, message, fix in found.missing:
        report.check(id, "fail", message=message, fix=fix)
    failed = {id for id, _, _ in found.missing}
    for id, words in IDS.items():
        if id not in failed:
            judged = found.judged.get(id, 0)
            verdict = "pass" if judged else "skipped"
            report.check(id, verdict, message=words if judged else "nothing of this kind")
    report.summary = f"{len(names)} models: {', '.join(names)}; {len(found.missing)} things missing"
    return report


def check_model(found: Findings, name: str, spec: str) -> None:
    """Check one line of MODELS."""
    found.look("wiring-registered")
    line = line_of(found.project / "curry_train/models/__init__.py", f'"{name}"')
    module_name, _, class_name = spec.partition(":")
    try:
        model_class = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        what = f"{name}: {spec} does not load: {type(error).__name__}: {error}"
        found.add(
            "wiring-registered", what, fix_at(*line, "name module:Class as it is in the file")
        )
        return
    chosen = check_yaml(found, name)
    check_config(found, name, model_class)
    check_test(found, name, model_class)
    if chosen is None or not hasattr(model_class, "Config"):
        return
    if not check_protocol(found, name, model_class, chosen):
        return
    found.look("wiring-forward")
    if hasattr(model_class, "loss_sums"):
        found.look("wiring-loss")
    for id, message, text in run_model(found.project, chosen, model_class):
        place = model_class.loss_sums if id == "wiring-loss" else model_class
        found.add(id, f"{name}: {message}", fix_in(place, text))


def check_yaml(found: Findings, name: str) -> str | None:
    """Return the smallest file of configs/model that chooses an architecture."""
    import yaml

    found.look("wiring-yaml")
    fitting: list[tuple[int, str]] = []
    for path in sorted((found.project / "configs/model").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if values.get("architecture", "decoder") == name:
            size = values.get("hidden_size", 1) ** 2 * values.get("num_hidden_layers", 1)
            fitting.append((size, path.stem))
    if fitting:
        return min(fitting)[1]
    place = str(found.project / f"configs/model/{name}.yaml")
    found.add(
        "wiring-yaml",
        f"{name}: no file of configs/model says architecture: {name}",
        fix_at(place, 1, f"write it, first line `architecture: {name}`"),
    )
    return None


def check_config(found: Findings, name: str, model_class: type) -> None:
    """Look at the dataclass of the settings and the sentences under its fields."""
    found.look("wiring-config")
    config: Any = getattr(model_class, "Config", None)
    if not (isinstance(config, type) and is_dataclass(config)):
        text = "add a frozen dataclass and `Config = ...` in the class"
        found.add("wiring-config", f"{name}: has no dataclass Config", fix_in(model_class, text))
        return
    if not vars(config)["__dataclass_params__"].frozen:
        text = "write @dataclass(frozen=True)"
        found.add("wiring-config", f"{name}: {config.__name__} is not frozen", fix_in(config, text))
    defaults = {f.name: f.default for f in fields(config)}
    if defaults.get("architecture") != name and name != "decoder":
        text = f'write `architecture: str = "{name}"`'
        shown = defaults.get("architecture")
        what = f"{name}: {config.__name__}.architecture is {shown!r}"
        found.add("wiring-config", what, fix_in(config, text, "architecture"))
    for field_name in bare_fields(config):
        text = "write a sentence under it, as a string"
        what = f"{name}: {config.__name__}.{field_name} has no sentence"
        found.add("wiring-config", what, fix_in(config, text, rf"^\s+{field_name}\s*:"))


def bare_fields(config: type) -> list[str]:
    """Return the fields of a dataclass that no string follows."""
    import inspect
    import textwrap

    tree = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(tree, ast.ClassDef)
    bare = []
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            after = tree.body[at + 1] if at + 1 < len(tree.body) else None
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not said:
                bare.append(node.target.id)
    return bare


def check_test(found: Findings, name: str, model_class: type) -> None:
    """Look for a test that names the model."""
    found.look("wiring-test")
    tests = (found.project / "tests").glob("test_*.py")
    words = (model_class.__name__, f'"{name}"', f"model={name}")
    if any(word in path.read_text(encoding="utf-8") for path in tests for word in words):
        return
    place = str(found.project / f"tests/test_{name}.py")
    text = "write a test that an independent formula gives the same numbers"
    found.add("wiring-test", f"{name}: no file of tests names it", fix_at(place, 1, text))


def check_protocol(found: Findings, name: str, model_class: type, chosen: str) -> bool:
    """Build the model without values and look for what the trainer asks; False when it cannot."""
    from curry_train.compose import load_config
    from curry_train.models.protocol import meta_model

    found.look("wiring-protocol")
    try:
        words = [f"model={chosen}", "accelerator=cpu", *data_for(found.project, model_class)]
        config = load_config(words, project=found.project)
        model = meta_model(config)
    except Exception as error:
        said = " ".join(str(error).split())
        text = "make configs and __init__(config, *, compute_dtype) fit"
        what = f"{name}: model={chosen} cannot be built: {type(error).__name__}: {said}"
        found.add("wiring-protocol", what, fix_in(model_class, text))
        return False
    absent = [one for one in ATTRIBUTES if not hasattr(model, one)]
    for one in absent:
        text = f"add {one}, as curry_train/models/protocol.py says"
        found.add("wiring-protocol", f"{name}: has no {one}", fix_in(model_class, text))
    if absent:
        return False
    wrong = list(_wrong_parts(model))
    for message, text, pattern in wrong:
        place = fix_in(model_class, text, pattern) or fix_in(model_class, text)
        found.add("wiring-protocol", f"{name}: {message}", place)
    small = sum(p.numel() for p in model.parameters()) <= MOST_PARAMETERS
    return small and not wrong


def _wrong_parts(model: Any) -> Iterator[tuple[str, str, str]]:
    keys = list(model.layers) if hasattr(model.layers, "keys") else ["no ModuleDict"]
    if any(not key.isdigit() for key in keys):
        text = 'write nn.ModuleDict({"0": ..., "1": ...})'
        yield f"layers has the keys {keys[:3]}, they are block numbers", text, "layers"
    names = dict(model.named_parameters())
    for one in model.vocab_parameters:
        if one not in names:
            yield f"vocab_parameters names {one}, no parameter", "name it right", "vocab_parameters"
    for one in names:
        constant = model.init_constant(one)
        std = model.init_std(one) if constant is None else 1.0
        if not isinstance(std, (int, float)) or not math.isfinite(std) or std < 0:
            text = "return a constant in init_constant or a positive number here"
            yield f"init_std({one!r}) is {std!r}", text, "def init_std"
    for path, module in model.named_modules():
        if type(module).__name__.startswith(UNEQUAL):
            text = "ranks would not equal one process: use RMSNorm, and no dropout"
            yield f"{path} is a {type(module).__name__}", text, type(module).__name__


def check_dataset(found: Findings, name: str) -> None:
    """Check one line of DATASETS: loads, annotated, YAML; samples are drawn."""
    import yaml

    from curry_train.config import DataConfig
    from curry_train.data import DataError, dataset_function, open_corpus
    from curry_train.data.loader import Loader

    found.look("wiring-dataset")
    line = line_of(found.project / "curry_train/data/__init__.py", f'"{name}"')
    chosen = False
    for path in (found.project / "configs/data").glob("*.yaml"):
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        chosen |= values.get("dataset", "embedded") == name
    if not chosen:
        text = f"write it, one line `dataset: {name}`"
        place = fix_at(str(found.project / f"configs/data/{name}.yaml"), 1, text)
        found.add("wiring-dataset", f"{name}: no file of configs/data says dataset: {name}", place)
    try:
        function, kind = dataset_function(name)
        if kind == "Samples":
            data = DataConfig(dataset=name, global_batch_size=2)
            Loader(open_corpus(data, cache_dir=None), data, seed=0, micro_batch_size=2).next_step()
    except DataError as error:
        text = str(error).partition("; ")[2] or "make what the message asks for"
        found.add("wiring-dataset", f"{name}: {error}", fix_at(*line, text))
    except Exception as error:
        what = f"{name}: raised {type(error).__name__}: {error}"
        found.add("wiring-dataset", what, fix_in(function, "return Samples or Source"))


def unregistered(
    found: Findings, models: dict[str, str], datasets: dict[str, str], asked: list[str]
) -> None:
    """Name classes with a Config and functions `-> Samples` that no line leads to."""
    known = {spec.rpartition(":")[2] for spec in (*models.values(), *datasets.values())}
    for name, (path, node) in written(found.project):
        if node.name in known or (asked and name not in asked):
            continue
        package = "models" if isinstance(node, ast.ClassDef) else "data"
        table = "MODELS" if package == "models" else "DATASETS"
        place = found.project / f"curry_train/{package}/__init__.py"
        file, start = line_of(place, f"{table} = {{")
        spec = f"curry_train.{package}.{path.stem}:{node.name}"
        text = f'add `"{name}": "{spec}",` to {table}'
        what = f"{node.name} of {path.name} has no line in {table}"
        found.add("wiring-registered", what, fix_at(file, start + 1, text))


def written(project: Path) -> Iterator[tuple[str, tuple[Path, Any]]]:
    """Yield (name, (file, node)) of model classes and sample functions as the files have them."""
    for path in sorted((project / "curry_train/models").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            targets = [t for n in node.body if isinstance(n, ast.Assign) for t in n.targets]
            if any(isinstance(t, ast.Name) and t.id == "Config" for t in targets):
                yield path.stem, (path, node)
    for path in sorted((project / "curry_train/data").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                returns = ast.unparse(node.returns).strip("'\"").rpartition(".")[2]
                if returns == "Samples" and path.stem not in ("samples", "tasks", "__init__"):
                    yield node.name, (path, node)


def data_for(project: Path, model_class: type) -> list[str]:
    """Return `data=NAME` of samples for a model of samples; text is the default."""
    from wiring_pass import sample_files

    if not hasattr(model_class, "loss_sums"):
        return []
    names = sample_files(project)
    return [f"data={names[0]}"] if names else []


def line_of(path: Path, text: str) -> tuple[str, int]:
    """Return (file, line) of the first line that holds a text; line 1 when none does."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((at for at, line in enumerate(lines, start=1) if text in line), 1)
    return str(path), number
