"""What a scaffold will make and change, worked out before anything is written."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import scaffold_edit
import scaffold_names as names
from scaffold_edit import EditError, Entry

from kit.errors import UsageError

SKELETONS = Path(__file__).resolve().parents[1] / "skeletons"
BLOCKS = ("attention", "mlp", "router", "norm")
CLASS_OF = {"attention": "Attention", "mlp": "MLP", "router": "Router", "norm": "Norm"}
KINDS = ("lm", "moe", "classifier", "regressor", "spiking")
BASE_OF = {"mlp": "tiny_dense"}
"""The model that a variant goes into when none is named; elsewhere tiny_moe, whose feed-forwards
are all experts, so that model.mlp would be read nowhere."""
LAYERS, MODELS, DATA = (f"curry_train/{name}/__init__.py" for name in ("layers", "models", "data"))


@dataclass(frozen=True)
class Edit:
    """One file with entries put into its dicts."""

    path: str
    entry: Entry
    before: bytes
    after: bytes


@dataclass
class Plan:
    """Files to make and to change. smoke: the words of train.py that try the idea; baseline: the
    words whose losses must stay, none for a new model; tests: what pytest runs."""

    name: str
    what: str
    create: dict[str, str] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    smoke: list[str] = field(default_factory=list)
    baseline: list[str] | None = None
    tests: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)

    def show(self) -> str:
        """Return every file and every difference as text."""
        lines = [f"plan of {self.name}: {self.what}"]
        for path, text in self.create.items():
            lines += [f"--- new file {path}", text.rstrip("\n")]
        for edit in self.edits:
            before, after = (
                data.decode("utf-8-sig").splitlines() for data in (edit.before, edit.after)
            )
            lines += difflib.unified_diff(before, after, edit.path, edit.path, lineterm="", n=2)
        return "\n".join([*lines, "nothing was written"])

    def files(self) -> list[str]:
        """Return a line for each file that is made or changed."""
        made = [f"made     {path}" for path in self.create]
        return made + [f"changed  {e.path}: {e.entry.dict_name} {e.entry.line}" for e in self.edits]

    def summary(self) -> list[str]:
        """Return at most three lines that name every file."""
        paths = list(self.create)
        lines = [f"made     {' '.join(paths[at : at + 3])}" for at in range(0, len(paths), 3)]
        return [*lines, f"changed  {' '.join(edit.path for edit in self.edits)}"]


def variants(block: str) -> list[str]:
    """Return the ready variants of a part of a block, `custom` last."""
    found = sorted(p.stem for p in (SKELETONS / block).glob("*.py") if not p.stem.endswith("_test"))
    return [name for name in found if name != "custom"] + ["custom"]


def plan_block(project: Path, name: str, block: str, variant: str, base: str) -> Plan:
    """Plan a variant of one part of a block behind model.BLOCK=NAME, in the model `base`."""
    stem, model = f"{name}_{block}", f"{base}_{name}"
    names.check_has(project, "tests/variant_checks.py")
    names.check_module_free(project, [stem])
    plan = Plan(name, f"model.{block}={name}, {variant} in {base}")
    plan.create[f"curry_train/layers/{stem}.py"] = _skeleton(block, variant, name)
    plan.create[f"configs/model/{model}.yaml"] = _model_yaml(project, base, block, name)
    plan.create[f"configs/experiment/{name}.yaml"] = _experiment(
        f"model.{block}={name} in {base}; the baseline is model={base}", {"model": model}
    )
    plan.create[f"tests/test_{stem}.py"] = _skeleton(block, f"{variant}_test", name)
    target = f"curry_train.layers.{stem}:{names.camel(name)}{CLASS_OF[block]}"
    _edit(project, plan, LAYERS, Entry("VARIANTS", f"{block}.{name}", target))
    _refuse_overwriting(project, plan)
    plan.smoke, plan.baseline = [f"experiment={name}"], [f"model={base}"]
    plan.tests = [f"tests/test_{stem}.py"]
    plan.next = [
        f"python train.py model={base} model.{block}={name}   (the baseline: without the last word)"
    ]
    return plan


def plan_kind(project: Path, name: str, kind: str) -> Plan:
    """Plan a model, its data set, their configuration and a test from the skeleton of a kind."""
    data = f"{name}_data"
    names.check_has(project, "tests/model_checks.py")
    names.check_module_free(project, [name, data])
    plan = Plan(name, f"a new {kind}: model={name} data={name}")
    plan.create[f"curry_train/models/{name}.py"] = _skeleton("models", kind, name)
    plan.create[f"curry_train/data/{data}.py"] = _skeleton("data", kind, name)
    plan.create[f"configs/model/{name}.yaml"] = _skeleton("models", kind, name, ".yaml")
    plan.create[f"configs/data/{name}.yaml"] = _skeleton("data", kind, name, ".yaml")
    plan.create[f"configs/experiment/{name}.yaml"] = _experiment(
        f"The model {name} on the data set {name}", {"model": name, "data": name}
    )
    plan.create[f"tests/test_{name}.py"] = _skeleton("models", f"{kind}_test", name)
    model_class = f"curry_train.models.{name}:{names.camel(name)}"
    for path, text in plan.create.items():
        if path.endswith(".py"):
            names.check_distinct(name, path, text)
    _edit(project, plan, MODELS, Entry("MODELS", name, model_class))
    _edit(project, plan, DATA, Entry("DATASETS", name, f"curry_train.data.{data}:{name}"))
    _refuse_overwriting(project, plan)
    plan.smoke, plan.tests = [f"experiment={name}"], [f"tests/test_{name}.py"]
    plan.next = [f"python train.py experiment={name}"]
    return plan


def _skeleton(folder: str, stem: str, name: str, suffix: str = ".py") -> str:
    """Return a skeleton with the name in the place of its placeholder."""
    text = (SKELETONS / folder / f"{stem}{suffix}").read_text(encoding="utf-8")
    return text.replace("skeleton_name", name).replace("SkeletonName", names.camel(name))


def _model_yaml(project: Path, base: str, block: str, name: str) -> str:
    """Return the base's file with one line more."""
    path = project / "configs" / "model" / f"{base}.yaml"
    options = sorted(p.stem for p in path.parent.glob("*.yaml"))
    if base not in options:
        raise UsageError(
            f"--model {base} is no file of configs/model", f"there are {', '.join(options)}"
        )
    text = path.read_text(encoding="utf-8")
    architecture = re.search(r"^architecture:\s*(\S+)", text, re.MULTILINE)
    if architecture and architecture[1] != "decoder":
        raise UsageError(
            f"--model {base} is of the architecture {architecture[1]}",
            "blocks with variants are those of the decoder",
            "set --model to a file that says architecture: decoder",
        )
    if re.search(rf"^{block}:", text, re.MULTILINE):
        raise UsageError(
            f"--model {base} chooses its {block} already", fix="set --model to a baseline"
        )
    kept = [line for line in text.splitlines() if not line.startswith("#")]
    head = f"# {base} with model.{block}={name}; all else is its own."
    return "\n".join([head, *kept, f"{block}: {name}"]) + "\n"


def _experiment(sentence: str, groups: dict[str, str]) -> str:
    lines = [f"  - override /{group}: {option}" for group, option in groups.items()]
    return "\n".join(["# @package _global_", f"# {sentence}.", "defaults:", *lines]) + "\n"


def _edit(project: Path, plan: Plan, path: str, entry: Entry) -> None:
    file = project / path
    try:
        before = file.read_bytes()
        plan.edits.append(Edit(path, entry, before, scaffold_edit.insert(before, entry, path)))
    except EditError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}", f"it needs the line {entry.line}"
        ) from None


def _refuse_overwriting(project: Path, plan: Plan) -> None:
    """Raise UsageError when a file to be made is there already, or would lie elsewhere."""
    there = [path for path in plan.create if os.path.lexists(project / path)]
    if there:
        raise UsageError(
            f"{', '.join(there)} {'exists' if len(there) == 1 else 'exist'} already",
            "nothing is overwritten, and nothing was written",
            "set another --name, or move it away",
        )
    root = project.resolve()
    for path in plan.create:
        parent = (project / path).parent
        if not parent.is_dir():
            raise UsageError(f"{Path(path).parent} is no folder of the project", fix="make it")
        if root not in [parent.resolve(), *parent.resolve().parents]:
            raise UsageError(
                f"{Path(path).parent} leads out of the project", fix="make it a folder"
            )
