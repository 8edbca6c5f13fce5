"""The files that a port begins with: YAML, family entry, test, and a class where one is needed."""

from __future__ import annotations

import json
import pprint
from collections.abc import Mapping
from typing import Any

CLASS = '''"""{title}: what of {architecture} the decoder family has no field for.

It computes what Decoder does until its block differs. Change the five parts of {title}Block, then
the closed forms; `gate all` of the skill add-moe-model says when it equals transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from curry_train.config import ModelConfig
from curry_train.models.decoder import Decoder, MoEBlock


@dataclass(frozen=True)
class {title}Config(ModelConfig):
    """The decoder's settings, and those that only {architecture} has; a sentence under each."""

    architecture: str = "{name}"
    """Key of curry_train.models.MODELS."""


class {title}Block(MoEBlock):
    """A block of {architecture}: attention, dispatch, experts, combine, aggregate."""


class {title}(Decoder):
    """A causal language model; shapes as Decoder."""

    Config = {title}Config

    def __init__(self, config: {title}Config, *, compute_dtype: torch.dtype) -> None:
        super().__init__(config, compute_dtype=compute_dtype)
        for name, block in list(self.layers.items()):
            if isinstance(block, MoEBlock):
                self.layers[name] = {title}Block(config, int(name))
'''

TEST = '''"""The preset {name} is what its config.json says, and as large as transformers' model."""

import json

import pytest

from curry_train.checkpoint.families import live, read_config
from curry_train.compose import load_config
from curry_train.models.protocol import build_model, count_parameters

CONFIG = json.loads("""
{config}
""")


def test_the_yaml_says_what_config_json_says():
    read, composed = live(read_config(CONFIG)), live(load_config(["model={name}"]).model)
    assert read == {{key: value for key, value in composed.items() if key in read}}


def test_parameters_are_as_many_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    import torch

    values = {{key: value for key, value in CONFIG.items() if key != "model_type"}}
    settings = transformers.AutoConfig.for_model(CONFIG["model_type"], **values)
    with torch.device("meta"):
        theirs = getattr(transformers, "{architecture}")(settings)
    ours, _ = count_parameters(build_model(load_config(["model={name}"]), "meta"))
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())
'''


def title_of(name: str) -> str:
    """Return the class name of a model."""
    return "".join(part.capitalize() for part in name.split("_"))


def class_text(name: str, architecture: str) -> str:
    """Return a module with a model class that computes what the decoder does."""
    return CLASS.format(name=name, title=title_of(name), architecture=architecture)


def test_text(name: str, architecture: str, raw: Mapping[str, Any]) -> str:
    """Return a test of the preset against its config.json."""
    config = json.dumps(raw, indent=1).replace("\\", "\\\\").replace('"""', "'''")
    return TEST.format(name=name, architecture=architecture, config=config)


def yaml_text(name: str, values: Mapping[str, Any], unknown: list[str]) -> str:
    """Return an unfinished configs/model/NAME.yaml of the keys that are understood."""
    import yaml

    told = [f"# {name}: unfinished. Of config.json nothing says yet what these keys mean here:"]
    told += [f"#   {key}" for key in unknown]
    return "\n".join(told) + "\n" + yaml.safe_dump(dict(values), sort_keys=False)


def family_text(
    architecture: str, raw: Mapping[str, Any], nearest: Any, names: Mapping[str, str]
) -> str:
    """Return a family entry for FAMILIES, after the nearest family, of the keys that are there."""
    from curry_train.checkpoint import config_keys

    words = {id(piece): word for word, piece in vars(config_keys).items() if word.isupper()}
    fields = {ours: keys for ours, keys in nearest.fields.items() if any(k in raw for k in keys)}
    pieces = ", ".join(words.get(id(piece), "Piece(...)") for piece in nearest.pieces)
    lines = [
        f'"{architecture}": Family(',
        f"    model_type={raw.get('model_type')!r},",
        f"    fields={_indented(fields)},",
        f"    pieces=({pieces},),",
        f"    fixed={_indented(dict(nearest.fixed))},",
        f"    names={_indented(dict(names))},",
        "),",
    ]
    return "\n".join(lines) + "\n"


def _indented(value: dict) -> str:
    return pprint.pformat(value, width=88, sort_dicts=False).replace("\n", "\n    ")
