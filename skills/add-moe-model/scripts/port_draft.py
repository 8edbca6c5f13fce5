"""What of a published architecture fits, what is unknown, where it goes, and a first skeleton."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import port_skeletons
import port_wiring
import tensor_rules

from kit.errors import UsageError
from kit.report import Report, write_json
from kit.user_code import put_first_on_path, user_code

NAMES = ((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."))
NAMES += ((".down_proj.", ".w2."), (".mlp.gate.", ".mlp.router."))
TRAITS = {"qk_norm": ".q_norm.", "attention_sinks": ".sinks"}
TRAITS |= {"correction_bias": "e_score_correction_bias"}


@dataclass
class Keys:
    """Keys of config.json: key -> field, those without effect, unknown ones, other values."""

    known: dict[str, str]
    harmless: list[str]
    unknown: list[str]
    nearest: str
    problems: list[str]
    """Why the nearest family (the architecture's own, when there is one) cannot read it."""
    own: bool


def draft(call: Any, report: Report) -> Report:
    """Write mapping.md, mapping.json, the family entry and the skeleton; judge what is unknown."""
    args, project = call.args, call.project
    put_first_on_path(project)
    with user_code("importing curry_train of the project"):
        from curry_train.checkpoint import families
    hf = Path(args.hf)
    raw = tensor_rules.read_json(hf)
    tensors, source = tensors_of(raw, hf, args.index)
    keys = judge_keys(raw, tensors)
    groups = tensor_rules.groups_of(tensors, raw)
    unknown = [group for group in groups if group.status == "unknown"]
    architecture = (raw.get("architectures") or ["Unknown"])[0]
    new_class = bool(unknown) and not keys.own
    found = port_wiring.places(project, args.name, new_class)
    nearest = families.FAMILIES[keys.nearest]
    names = {ours: theirs for ours, theirs in NAMES if any(theirs in name for name in tensors)}
    files = skeleton(args.name, architecture, raw, keys, new_class)
    write_new(project, files)
    entry = "" if keys.own else port_skeletons.family_text(architecture, raw, nearest, names)
    fits = keys.own and not keys.problems and not unknown and bool(tensors)
    mapping = {
        "name": args.name, "architecture": architecture, "fits": fits, "source": source,
        "keys": asdict(keys), "tensors": [group.as_dict() for group in groups],
        "wiring": [place._asdict() for place in found], "family_entry": entry,
        "written": sorted(files),
    }  # fmt: skip
    write_json(call.out / "mapping.json", mapping)
    (call.out / "mapping.md").write_text(page(mapping, groups, keys, found), encoding="utf-8")
    report.artifacts += [str(call.out / "mapping.md"), str(call.out / "mapping.json")]
    report.numbers = {"fits": fits, "nearest": keys.nearest, "written": sorted(files)}
    judge(report, keys, groups, unknown, found, source)
    kind = "fits" if fits else "does not fit yet" if unknown or keys.unknown else "is not proved"
    report.summary = f"{architecture} {kind}; nearest family {keys.nearest}; see mapping.md"
    report.evidence.append(f"wrote {', '.join(sorted(files))}")
    report.next.append(f"wire it as mapping.md says, then: gate all --name {args.name} --hf {hf}")
    return report


def judge(
    report: Report,
    keys: Keys,
    groups: list[tensor_rules.Group],
    unknown: list[tensor_rules.Group],
    found: list[port_wiring.Place],
    source: str,
) -> None:
    """Report unknown keys, unknown tensors and places that are not found."""
    names = tuple(f"{text.partition('=')[0]}=" for text in keys.unknown)
    refused = [text.rpartition("ForCausalLM: ")[2] for text in keys.problems]
    told = [*keys.unknown, *(text for text in refused if not text.startswith(names))]
    report.check(
        "port-keys",
        "fail" if told else "pass",
        value=len(told),
        threshold=0,
        message=f"unknown: {'; '.join(told)}" if told else f"{len(keys.known)} keys are understood",
    )
    patterns = ", ".join(group.pattern for group in unknown)
    report.check(
        "port-tensors",
        "fail" if unknown else "pass" if groups else "unclear",
        value=len(unknown),
        threshold=0,
        message=f"unknown: {patterns}" if unknown else f"{len(groups)} patterns, {source}",
    )
    lost = [f"{place.what} ({place.file})" for place in found if not place.new and not place.line]
    report.check(
        "port-wiring",
        "unclear" if lost else "pass",
        message=f"not found: {', '.join(lost)}" if lost else f"{len(found)} places with lines",
    )


def judge_keys(raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> Keys:
    """Sort the keys of config.json by what the families of the project make of them.

    The nearest family refuses least, and has the special tensors (TRAITS) that the weights have.
    """
    from curry_train.checkpoint import CheckpointError, config_keys, families

    known: dict[str, str] = {}
    for family in families.FAMILIES.values():
        absent = {**config_keys.ABSENT, **family.absent}
        seen, values = config_keys.Keys(raw), dict(family.fixed)
        for ours, theirs in family.fields.items():
            values[ours] = seen.take(*theirs, absent=absent.get(ours))
            known |= {key: ours for key in theirs if key in raw}
        for piece in family.pieces:
            before = set(seen.seen)
            piece.read(seen, absent, values)
            for key in (seen.seen - before) & raw.keys():
                known.setdefault(key, piece.read.__name__.removeprefix("_read_"))
        known |= {key: "one value only" for key in family.only if key in raw and key not in known}
    set_keys = {key for key, value in raw.items() if value is not None}
    fixed = {
        key: kinds for key, kinds in config_keys.ONLY.items() if key in set_keys - known.keys()
    }
    known |= dict.fromkeys(fixed, "one value only")
    unknown = sorted(set_keys - known.keys() - config_keys.HARMLESS)
    told = [f"{key}={raw[key]!r:.60}" for key in unknown]
    told += [f"{key}={raw[key]!r:.60}" for key, kinds in fixed.items() if raw[key] not in kinds]
    own = next(iter(raw.get("architectures") or [""])) in families.FAMILIES
    problems: dict[str, list[str]] = {}
    for name, family in families.FAMILIES.items():
        changed = {**raw, "architectures": [name], "model_type": family.model_type}
        try:
            families.read_config(changed)
            problems[name] = []
        except CheckpointError as error:
            problems[name] = error.problems
        if tensors and not own:
            problems[name] += [
                f"{name} {'has' if family.fixed.get(field) else 'lacks'} {field}, the weights not"
                for field, word in TRAITS.items()
                if bool(family.fixed.get(field)) != any(word in tensor for tensor in tensors)
            ]
    nearest = min(problems, key=lambda name: len(problems[name]))
    nearest = raw["architectures"][0] if own else nearest
    for ours, theirs in families.FAMILIES[nearest].fields.items():
        known |= {key: ours for key in theirs if key in raw}
    harmless = sorted(set_keys & config_keys.HARMLESS - known.keys())
    return Keys(known, harmless, told, nearest, problems[nearest], own)


def tensors_of(
    raw: Mapping[str, Any], hf: Path, index: str | None
) -> tuple[dict[str, tuple[int, ...] | None], str]:
    """Return name -> shape of the weights, and where that is from."""
    folder = hf if hf.is_dir() else hf.parent
    if index is not None:
        return tensor_rules.read_tensors(Path(index)), f"from {index}"
    if list(folder.glob("*.safetensors*")):
        return tensor_rules.read_tensors(folder), f"from {folder}"
    if (
        importlib.util.find_spec("transformers") is None
        or importlib.util.find_spec("torch") is None
    ):
        return {}, "no --index and no transformers: tensors were not seen"
    import tiny_models
    import torch

    architecture = next(iter(raw.get("architectures") or [""]))
    try:
        with torch.device("meta"):
            model = tiny_models.class_of(architecture)(tiny_models.settings_of(raw))
    except (UsageError, AttributeError, ValueError, KeyError, TypeError, ImportError) as error:
        return {}, f"no --index, and transformers cannot build it ({error})"
    state: dict[str, tuple[int, ...] | None] = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }
    return state, "from transformers' model in memory; published files may name experts otherwise"


def skeleton(
    name: str, architecture: str, raw: Mapping[str, Any], keys: Keys, new_class: bool
) -> dict[str, str]:
    """Return path in the project -> text of the files to begin with."""
    from curry_train.checkpoint.families import read_config
    from curry_train.checkpoint.huggingface import model_yaml

    if keys.own and not keys.problems:
        yaml = model_yaml(read_config(raw), name, architecture)
    else:
        yaml = port_skeletons.yaml_text(
            name, plain_values(name, raw, keys, new_class), keys.unknown
        )
    files = {
        f"configs/model/{name}.yaml": yaml,
        f"tests/test_{name}.py": port_skeletons.test_text(name, architecture, raw),
    }
    if new_class:
        files[f"curry_train/models/{name}.py"] = port_skeletons.class_text(name, architecture)
    return files


def plain_values(name: str, raw: Mapping[str, Any], keys: Keys, new_class: bool) -> dict[str, Any]:
    """Return fields whose keys have plain values, and what the nearest family always has."""
    from curry_train import rules
    from curry_train.checkpoint.families import FAMILIES
    from curry_train.config import ModelConfig, known_settings

    kinds = {key: setting.kind for key, setting in known_settings(ModelConfig).items()}
    values: dict[str, Any] = {"architecture": name if new_class else "decoder"}
    values |= FAMILIES[keys.nearest].fixed
    for key, value in raw.items():
        field = keys.known.get(key, "")
        field = field if f"model.{field}" in kinds else key
        pieces = field.startswith(("rope_", "sliding_", "original_")) and field != "rope_theta"
        if f"model.{field}" not in kinds or pieces:
            continue
        with contextlib.suppress(ValueError, OverflowError):
            values[field] = rules.convert(value, kinds[f"model.{field}"])
    if "head_dim" not in values and values.get("num_attention_heads"):
        values["head_dim"] = values.get("hidden_size", 0) // values["num_attention_heads"]
    return values


def write_new(project: Path, files: Mapping[str, str]) -> None:
    """Write files that are not there yet; none of them when one is. Raises: UsageError."""
    taken = [path for path in files if (project / path).exists()]
    if taken:
        raise UsageError(
            f"{', '.join(taken)} of {project} is there already",
            "nothing is overwritten, and nothing was written",
            "take another --name, or remove the file",
        )
    if not (project / "configs" / "model").is_dir():
        raise UsageError(f"{project} has no configs/model", fix="set --project to a project")
    for path, text in files.items():
        target = project / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)


def page(
    mapping: Mapping[str, Any],
    groups: list[tensor_rules.Group],
    keys: Keys,
    found: list[port_wiring.Place],
) -> str:
    """Return mapping.md."""
    verdict = "Everything fits fields that exist; the gates prove it."
    if not mapping["fits"]:
        verdict = "It is not shown to fit: what is unknown stands below."
    lines = [f"# {mapping['architecture']} as {mapping['name']}", "", verdict, ""]
    own = "its own" if keys.own else "not its own: an entry is needed, below"
    lines += ["## config.json", "", f"Nearest family: {keys.nearest} ({own}).", ""]
    lines += [f"- unknown: `{text}`" for text in keys.unknown]
    lines += [f"- {keys.nearest} refuses: {text}" for text in keys.problems]
    lines += [f"- `{key}` is {field}" for key, field in sorted(keys.known.items())]
    lines += [f"- without effect here: {', '.join(keys.harmless)}", ""]
    lines += ["## Tensors", "", f"{mapping['source']}.", ""]
    lines += ["| tensor | count | shapes | status | here | means |", "|---|---|---|---|---|---|"]
    for group in groups:
        shapes = " ".join(str(list(shape)) for shape in sorted(group.shapes)) or "not seen"
        cells = (f"`{group.pattern}`", group.count, shapes, group.status, group.ours, group.note)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "## Places", "", "| what | where | when |", "|---|---|---|"]
    for place in found:
        where = f"{place.file}:{place.line}" if place.line else f"{place.file}: not found"
        lines.append(f"| {place.what} | `{where}`{' (written)' * place.new} | {place.when} |")
    if mapping["family_entry"]:
        lines += ["", "## Family entry, to be checked key by key", "", "```python"]
        lines += [mapping["family_entry"].rstrip(), "```"]
    return "\n".join(lines) + "\n"
