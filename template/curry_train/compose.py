"""From the words of a command line to a Config.

Hydra composes the groups. Values are read here, by the type of their field: so every mistake is
told at once and in plain words, and a path may hold `=`, commas and spaces.
Functions that take `found` add a sentence to it for each mistake they meet.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from curry_train.config import (
    Config,
    ConfigError,
    ModelConfig,
    Setting,
    build_config,
    known_settings,
    model_schema,
    planned_world,
    sections,
)
from curry_train.models import MODELS
from curry_train.rules import convert, problems, shown, unusable, without

PROJECT = Path(__file__).resolve().parents[1]
GROUPS = (*sections(ModelConfig), "experiment")
# What cannot be the value of the word before it: a setting, a group or an option.
OWN_WORD = re.compile(rf"[-+~]*[A-Za-z_][\w./-]*=|({'|'.join(GROUPS)})(\.[\w.]+)?$|-(?![\d.])")
NO_PACKAGE = "a file of configs/experiment starts with `# @package _global_`"

Known = dict[str, Setting]


class Override(NamedTuple):
    """One setting of the command line: the words as written, and the key and value they mean."""

    written: str
    key: str
    value: str | None


def load_config(argv: Sequence[str], *, project: Path | None = None) -> Config:
    """Compose the files of `<project>/configs` with the words of a command line.

    project: a folder with a train.py; by default the one this package lies in.
    Raises: ConfigError with every problem found, never only the first.
    """
    project, found = project or PROJECT, []
    overrides = _read_words(argv, found)
    choices = _choose_groups(overrides, project, found)
    in_files = _read_files(project, choices, found)
    typed = {
        o.key: unquote(o.value) for o in overrides if o.value is not None and o.key not in GROUPS
    }
    values = {**in_files, **typed}
    model = _find_model(values.get("model.architecture", "decoder"), found)
    known = known_settings(model)
    found += [problem for o in overrides if (problem := _misspelt(o, known))]
    strangers = [key for key in in_files if key not in known]
    if "model.architecture" in typed and any(key.startswith("model.") for key in strangers):
        name = typed["model.architecture"]
        found.append(
            f"model.architecture={name}: the chosen file of configs/model holds settings of another"
            " architecture; leave it out, and choose by model=NAME a file that says"
            f" architecture: {name}"
        )
        strangers = [key for key in strangers if not key.startswith("model.")]
    for key, value in in_files.items():
        if key in strangers:
            found.append(_unknown(f"{key}={shown(value)} in a file of configs", key, None, known))
    defaults = {key: setting.default for key, setting in known.items()}
    values, unfilled = _resolve(defaults | {key: values[key] for key in known if key in values})
    for key, (kind, _) in known.items():
        with contextlib.suppress(ValueError, OverflowError, yaml.YAMLError):
            values[key] = convert(values[key], kind)  # problems tells what cannot be
    config = build_config(model, values)
    found += unfilled.values()
    # Without the values of the files, rules between settings would judge what nobody chose.
    judged = problems(config, planned_world(config)) if in_files else unusable(config).values()
    found += without(judged, unfilled)
    if found:
        raise ConfigError(list(dict.fromkeys(found)))
    return config


def unquote(text: str) -> str | None:
    """Return the text that a value means: quotes are taken off, a bare null is None."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace("\\" + text[0], text[0])
    return None if text.lower() == "null" else text


def options(project: Path, group: str) -> list[str]:
    """List the files of a group, as they are named on the command line."""
    folder = project / "configs" / group
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def _read_words(argv: Sequence[str], found: list[str]) -> list[Override]:
    """Read words as settings, however they are spelt."""
    overrides, words = [], list(argv)
    while words:
        written = [words.pop(0)]
        if written[0] in ("-m", "--multirun"):
            found.append(
                f"{written[0]}: one command is one run, sweeps over values are not read here;"
                " start train.py once for each value"
            )
            continue
        key, equals, value = written[0].partition("=")
        # `key value`, `key = value`, `key =value` and `key= value` are one setting each.
        if not equals and words and words[0].startswith("="):
            written.append(words.pop(0))
            equals, value = "=", written[-1][1:]
        if not value and words and not OWN_WORD.match(words[0]):
            written.append(words.pop(0))
            equals, value = "=", written[-1]
        overrides.append(Override(" ".join(written), key.strip("-+~ "), value if equals else None))
    return overrides


def _misspelt(override: Override, known: Known) -> str | None:
    written, key, value = override
    if key not in known and key not in GROUPS:
        return _unknown(written, key, value, known)
    if value is None:
        return f"{written}: has no value; write {key}=VALUE"
    if written != f"{key}={value}":
        return (
            f"{written}: settings are written KEY=VALUE, without dashes, + or ~, or spaces;"
            f" write {key}={value}"
        )
    return None


def _unknown(written: str, key: str, value: str | None, known: Known) -> str:
    group = key.partition(".")[0]
    if group == "experiment":
        return f"{written}: {NO_PACKAGE}"
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
    key = key.replace("checkpoint", "save").replace("ckpt", "save")  # as others call it
    scores = {name: likeness(name) for name in names}
    best = max(scores.values())
    return [n for n in names if best >= 0.65 and scores[n] > best - 0.05][:3]


def _choose_groups(overrides: list[Override], project: Path, found: list[str]) -> dict[str, str]:
    """Return group -> option of the command line."""
    choices = {}
    for _, key, value in overrides:
        if key not in GROUPS or value is None:
            continue
        allowed, option = options(project, key), shown(unquote(value))
        if option in allowed or (key, option) == ("experiment", "null"):
            choices[key] = option
        else:
            found.append(
                f"{key}={value}: {key} has no such option;"
                f" options are {', '.join(allowed) or 'none'}"
            )
    return choices


def _read_files(project: Path, choices: dict[str, str], found: list[str]) -> dict[str, Any]:
    """Return dotted key -> value as the files have it; nothing after a mistake."""
    folder = (project / "configs").resolve()
    if not (folder / "config.yaml").is_file():
        found.append(f"{project}: has no configs/config.yaml; name the folder that holds train.py")
        return {}
    try:
        tree = _compose_groups(folder, choices)
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        allowed = ", ".join(error.options or [])
        found.append(f"{group}={name} in a file of configs: no such option; options are {allowed}")
        return {}
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        reason = NO_PACKAGE if "@experiment" in reason else reason
        found.append(f"a file of configs cannot be read: {reason}")
        return {}
    flat = {}
    for name, node in tree.items():
        if isinstance(node, dict):
            flat |= {f"{name}.{key}": value for key, value in node.items()}
        elif node is not None or name not in GROUPS:  # an empty file is a group of null
            flat[name] = node
    return flat


def _compose_groups(folder: Path, choices: dict[str, str]) -> dict[str, Any]:
    words = [f"~{g}" if name == "null" else f"{g}={name!r}" for g, name in choices.items()]
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        tree = hydra_compose("config", words)
    return typing.cast(dict, OmegaConf.to_container(tree, resolve=False))


def _find_model(architecture: Any, found: list[str]) -> type:
    """Return the dataclass of the `model` group; ModelConfig after a mistake."""
    try:
        return model_schema(architecture)
    except KeyError:
        reason = f"no such model; known are {', '.join(MODELS)}"
    except (ImportError, AttributeError) as error:
        reason = f"{MODELS[architecture]} does not load: {error}"
    found.append(f"model.architecture={architecture}: {reason}")
    return ModelConfig


def _resolve(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace `${other.key}`; also return key -> problem of what leads nowhere."""
    resolved, unfilled = dict(settings), {}
    linked = [key for key, value in settings.items() if "${" in str(value)]
    tree = OmegaConf.create({})
    for key in settings if linked else ():
        try:
            OmegaConf.update(tree, key, settings[key], force_add=True)
        except OmegaConfBaseException:
            unfilled[key] = "what stands in ${ } cannot be read"
    for key in [key for key in linked if key not in unfilled]:
        try:
            node = OmegaConf.select(tree, key)
            resolved[key] = OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            unfilled[key] = reason.rpartition("resolving interpolation: ")[2].strip('"')
    return resolved, {
        key: f"{key}={shown(settings[key])}: {reason}; write ${{KEY}} for the value of another"
        " setting, \\${ for the bare characters"
        for key, reason in unfilled.items()
    }
