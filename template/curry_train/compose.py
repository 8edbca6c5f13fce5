"""From the words of a command line to a Config.

Hydra composes the groups. Values are read here, by the type of their field: so every mistake is
told at once and in plain words, and a path may hold `=`, commas and spaces.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from curry_train.config import (
    Config,
    ConfigError,
    ModelConfig,
    model_schema,
    planned_world,
    problems,
)
from curry_train.rules import shown

GROUPS = ("model", "data", "optim", "parallel", "run", "tracking", "experiment")
EXPECTED = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
}
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
SWEEP = (
    "{}: one command is one run, sweeps over values are not read here;"
    " start train.py once for each value"
)


@dataclass(frozen=True)
class Override:
    """One setting of the command line: the words as written, and the key and value they mean."""

    written: str
    key: str
    value: str | None

    @property
    def spelling(self) -> str:
        return f"{self.key}={'VALUE' if self.value is None else self.value}"


@dataclass(frozen=True)
class Schema:
    """The dataclasses of a run, with that of its architecture in the `model` group."""

    model: type

    def sections(self) -> dict[str, type]:
        """Return group -> dataclass."""
        hints = typing.get_type_hints(Config)
        groups = [name for name in hints if name in GROUPS]
        return {**{name: hints[name] for name in groups}, "model": self.model}

    def defaults(self) -> dict[str, Any]:
        """Return dotted key -> default, for the fields that have one."""
        found = {f.name: f.default for f in fields(Config) if f.default is not MISSING}
        for section, cls in self.sections().items():
            for f in fields(cls):
                if f.default is not MISSING:
                    found[f"{section}.{f.name}"] = f.default
                elif f.default_factory is not MISSING:
                    found[f"{section}.{f.name}"] = f.default_factory()
        return found

    def types(self) -> dict[str, Any]:
        """Return dotted key -> annotation, in the order of the schema."""
        root = typing.get_type_hints(Config)
        found = {name: hint for name, hint in root.items() if name not in self.sections()}
        for section, cls in self.sections().items():
            hints = typing.get_type_hints(cls)
            found |= {f"{section}.{field.name}": hints[field.name] for field in fields(cls)}
        return found


def compose(argv: Sequence[str], *, project: Path) -> Config:
    """Return the Config of a command line. Raises ConfigError with every problem."""
    overrides, found = read_overrides(argv)
    choices, no_option = _choose_groups(overrides, project)
    tree, no_tree = _compose_groups(choices, project)
    in_files = dict(_flatten(tree))
    typed = {
        o.key: unquote(o.value) for o in overrides if o.value is not None and o.key not in GROUPS
    }
    schema, no_model = _find_schema({**in_files, **typed}.get("model.architecture", "decoder"))
    known = schema.types()
    found += [problem for o in overrides if (problem := _misspelt(o, known))]
    found += [*no_option, *no_tree, *no_model]
    for key, value in in_files.items():
        if key not in known:
            found.append(_unknown(f"{key}={shown(value)} in a file of configs", key, None, known))
    settings = {key: value for key, value in {**in_files, **typed}.items() if key in known}
    config, wrong = _build(schema, settings)
    found += wrong.values()
    if config is not None and not no_tree:
        judged = problems(config, planned_world(config))
        # What has no usable value stands as its default here; a sentence about it would mislead.
        found += [p for p in judged if not any(f"{key}=" in p for key in wrong)]
    if found or config is None:
        raise ConfigError(list(dict.fromkeys(found)))
    return config


def read_overrides(argv: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Read words as settings, however they are spelt; also return what words can be none."""
    overrides, found = [], []
    words = list(argv)
    while words:
        written = [words.pop(0)]
        if written[0] in ("-m", "--multirun"):
            found.append(SWEEP.format(written[0]))
            continue
        key, equals, value = written[0].partition("=")
        # `key value`, `key = value`, `key =value` and `key= value` are one setting each.
        if not equals and words and words[0].startswith("="):
            written.append(words.pop(0))
            equals, value = "=", written[-1][1:]
        if not value and words and _is_value(words[0]):
            written.append(words.pop(0))
            equals, value = "=", written[-1]
        overrides.append(Override(" ".join(written), key.strip("-+~ "), value if equals else None))
    return overrides, found


def unquote(text: str) -> str | None:
    """Return the text that a value means: quotes are taken off, a bare null is None."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace("\\" + text[0], text[0])
    return None if text.lower() == "null" else text


def options(project: Path, group: str) -> list[str]:
    """List the files of a group, as they are named on the command line."""
    folder = project / "configs" / group
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def convert(value: Any, annotation: Any) -> Any:
    """Return a value as a field of this type holds it. Raises ValueError when it cannot."""
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for member in members:
            with contextlib.suppress(ValueError, OverflowError):
                return convert(value, member)
    elif annotation is types.NoneType and value is None:
        return None
    elif annotation is bool and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    elif annotation is str and isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    elif annotation is int and isinstance(value, str | int) and not isinstance(value, bool):
        return int(value)
    elif annotation is float and isinstance(value, str | int | float):
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    elif origin in (list, tuple):
        items = yaml.safe_load(value) if isinstance(value, str) else value
        if isinstance(items, list | tuple):
            return origin(convert(item, members[0]) for item in items)
    raise ValueError(f"{value!r} is not {expected(annotation)}")


def expected(annotation: Any) -> str:
    """Say in words what a type accepts."""
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) in (list, tuple):
        return f"a list like [1, 2], each item {expected(members[0])}"
    return EXPECTED.get(annotation) or " or ".join(map(expected, members)) or str(annotation)


def _is_value(word: str) -> bool:
    """Tell whether a word cannot be a setting or an option of its own."""
    if re.match(r"[-+~]*[A-Za-z_][\w./-]*=", word) or word in GROUPS:
        return False
    if re.fullmatch(rf"({'|'.join(GROUPS)})\.[\w.]+", word):
        return False
    return not word.startswith("-") or bool(re.fullmatch(r"-[\d.]+(e[-+]?\d+)?", word))


def _misspelt(override: Override, known: dict[str, Any]) -> str | None:
    written, key = override.written, override.key
    if key not in known and key not in GROUPS:
        return _unknown(written, key, override.value, known)
    if override.value is None:
        return f"{written}: has no value; write {override.spelling}"
    if written != override.spelling:
        return (
            f"{written}: settings are written KEY=VALUE, without dashes, + or ~, or spaces;"
            f" write {override.spelling}"
        )
    return None


def _unknown(written: str, key: str, value: str | None, known: dict[str, Any]) -> str:
    if key.partition(".")[0] == "experiment":
        return f"{written}: a file of configs/experiment starts with `# @package _global_`"
    group = key.partition(".")[0]
    if near := _near(key, list(known) if "." in key else [*known, *GROUPS]):
        hint = f"did you mean {' or '.join(n if value is None else f'{n}={value}' for n in near)}?"
    elif group in GROUPS:
        names = [name.partition(".")[2] for name in known if name.startswith(f"{group}.")]
        hint = f"settings of {group} are {', '.join(names)}"
    else:
        hint = "none can be added; `python train.py --help` lists all"
    return f"{written}: no such setting; {hint}"


def _near(key: str, names: list[str]) -> list[str]:
    """Return the names that look most like a key, whole or in their last part."""

    def likeness(name: str) -> float:
        pairs = [(key, name), (key.rpartition(".")[2], name.rpartition(".")[2])]
        whole, last = (difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)
        return max(whole, 0.95 * last)

    key = key.replace("-", "_").replace("/", ".")
    scores = {name: likeness(name) for name in names}
    best = max(scores.values())
    return [n for n in names if best >= 0.65 and scores[n] > best - 0.05][:3]


def _choose_groups(overrides: list[Override], project: Path) -> tuple[dict[str, str], list[str]]:
    choices, found = {}, []
    for override in overrides:
        if override.key not in GROUPS or override.value is None:
            continue
        allowed = options(project, override.key)
        option = shown(unquote(override.value))
        if option in allowed or (override.key == "experiment" and option == "null"):
            choices[override.key] = option
        else:
            found.append(
                f"{override.spelling}: {override.key} has no such option;"
                f" options are {', '.join(allowed) or 'none'}"
            )
    return choices, found


def _compose_groups(choices: dict[str, str], project: Path) -> tuple[dict[str, Any], list[str]]:
    folder = (project / "configs").resolve()
    if not (folder / "config.yaml").is_file():
        return {}, [f"{project}: has no configs/config.yaml; name the folder that holds train.py"]
    words = [f"~{g}" if name == "null" else f"{g}={name!r}" for g, name in choices.items()]
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            tree = hydra_compose("config", words)
        return typing.cast(dict, OmegaConf.to_container(tree, resolve=False)), []
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        allowed = ", ".join(error.options or [])
        return {}, [f"{group}={name} in a file of configs: no such option; options are {allowed}"]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        if "@experiment" in reason:
            reason = "a file of configs/experiment starts with `# @package _global_`"
        return {}, [f"a file of configs cannot be read: {reason}"]


def _flatten(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, node in tree.items():
        if name in GROUPS and isinstance(node, dict):
            yield from ((f"{name}.{key}", value) for key, value in node.items())
        elif name not in GROUPS or node is not None:
            yield name, node


def _find_schema(architecture: str) -> tuple[Schema, list[str]]:
    from curry_train.models import MODELS

    problem = f"model.architecture={architecture}:"
    try:
        model = model_schema(architecture)
    except KeyError:
        return Schema(ModelConfig), [f"{problem} no such model; known are {', '.join(MODELS)}"]
    except (ImportError, AttributeError) as error:
        return Schema(ModelConfig), [f"{problem} {MODELS[architecture]} does not load: {error}"]
    if not is_dataclass(model) or "architecture" not in model.__dataclass_fields__:
        return Schema(ModelConfig), [
            f"{problem} the Config of {MODELS[architecture]} must be a dataclass with a field"
            " `architecture: str`"
        ]
    return Schema(model), []


def _build(schema: Schema, settings: dict[str, Any]) -> tuple[Config | None, dict[str, str]]:
    """Fill the dataclasses; also return key -> problem of what has no usable value.

    Such a field keeps its default; the Config is None where a field without default lacks a value.
    """
    defaults, known = schema.defaults(), schema.types()
    resolved, wrong = _resolve({**defaults, **settings}, known)
    values = dict(defaults)
    for key, value in resolved.items():
        try:
            values[key] = convert(value, known[key])
        except (ValueError, OverflowError, yaml.YAMLError):
            example = f", such as {key}={shown(defaults[key])}" if key in defaults else ""
            wrong[key] = f"{key}={shown(value)}: must be {expected(known[key])}{example}"
    for key in known.keys() - values.keys() - wrong.keys():
        wrong[key] = f"{key}=???: {_missing(key, known)}"
    if known.keys() - values.keys():
        return None, wrong
    sections = {
        group: cls(**{f.name: values[f"{group}.{f.name}"] for f in fields(cls)})
        for group, cls in schema.sections().items()
    }
    root = {key: value for key, value in values.items() if "." not in key}
    return Config(**root, **sections), wrong


def _resolve(
    settings: dict[str, Any], known: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace `${other.key}`; also return key -> problem of what is missing or leads nowhere."""
    tree, resolved, wrong = OmegaConf.create({}), {}, {}
    for key, value in settings.items():
        try:
            OmegaConf.update(tree, key, value, force_add=True)
        except OmegaConfBaseException as error:
            wrong[key] = _unfilled(key, value, error)
    for key, value in settings.items():
        try:
            if key not in wrong:
                node = OmegaConf.select(tree, key, throw_on_missing=True)
                resolved[key] = OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
        except MissingMandatoryValue:
            wrong[key] = f"{key}=???: {_missing(key, known)}"
        except OmegaConfBaseException as error:
            wrong[key] = _unfilled(key, value, error)
    return resolved, wrong


def _unfilled(key: str, value: Any, error: OmegaConfBaseException) -> str:
    reason = "what stands in ${ } cannot be read"
    if isinstance(error, InterpolationResolutionError):
        reason = str(error).splitlines()[0].rpartition("resolving interpolation: ")[2].strip('"')
    return (
        f"{key}={shown(value)}: {reason}; write ${{KEY}} for the value of another setting,"
        " \\${ for the bare characters"
    )


def _missing(key: str, known: dict[str, Any]) -> str:
    return f"has no value yet; set {key} to {expected(known[key])}"
