"""What must hold for the values of a Config; `problems` says in sentences what does not.

A rule yields the key it refuses and the rest of the sentence: what is allowed and what to set.
Settings are always written `key=value`, so that a reader (and compose) can tell which are meant.
"""

from __future__ import annotations

import contextlib
import math
import types
import typing
from collections.abc import Iterable
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from curry_train.config import (
    RUN_NAME,
    Config,
    ModelConfig,
    RunConfig,
    build_config,
    known_settings,
    model_class,
)
from curry_train.data import DATASETS, DataError, holds_samples, vocab_size_of
from curry_train.layers import variants
from curry_train.model_rules import MODEL_RULES, Refusals, shown
from curry_train.parallel import dims as layout

EXPECTED = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
}
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def problems(config: Config, world: int | None = None) -> list[str]:
    """Say what is wrong with the values; empty when the run can start.

    world: number of processes; None leaves out what depends on it.
    """
    model = type(config.model)
    known, wrong = known_settings(model), unusable(config)
    # The other rules see a default in its place, and say nothing that would mislead.
    usable = {
        key: default if key in wrong else value_of(config, key)
        for key, (_, default) in known.items()
    }
    config = build_config(model, usable)
    rules = [_lengths(config), layout.refusals(config, world), _places(config)]
    rules += [_retention(config.run), _task(config)]
    if model is ModelConfig:
        rules += [rule(config.model) for rule in MODEL_RULES]
        rules.append(variants.refusals(config, world))
    refused = [f"{key}={shown(value_of(config, key))}: {why}" for key, why in chain(*rules)]
    if model is not ModelConfig and not any(key.startswith("model.") for key in wrong):
        # The Config of another model class may bring rules of its own.
        refused += getattr(config.model, "problems", list)()
    return [*wrong.values(), *without(refused, wrong)]


def unusable(config: Config) -> dict[str, str]:
    """Return key -> problem of each value that its field cannot hold, whatever the others are."""
    found = {}
    for key, (kind, default) in known_settings(type(config.model)).items():
        value = value_of(config, key)
        if value == "???":
            found[key] = f"{key}=???: has no value yet; set {key} to {expected(kind)}"
            continue
        try:
            convert(value, kind)
        except (ValueError, OverflowError, yaml.YAMLError):
            example = "" if default == "???" else f", such as {key}={shown(default)}"
            found[key] = f"{key}={shown(value)}: must be {expected(kind)}{example}"
    return found


def without(sentences: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Return the sentences that speak of none of the settings."""
    keys = [f"{key}=" for key in keys]
    return [text for text in sentences if not any(key in text for key in keys)]


def convert(value: Any, kind: Any) -> Any:
    """Return a value, or what its text means, as a field of this type holds it.

    Raises: ValueError when it cannot; OverflowError and YAMLError of texts that are none.
    """
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in members:
            with contextlib.suppress(ValueError, OverflowError):
                return convert(value, member)
    elif origin is typing.Annotated:
        number = convert(value, members[0])
        if members[1].holds(number):
            return number
    elif origin is typing.Literal:
        for member in members:
            if str(value) == str(member):
                return member
    elif kind is types.NoneType and value is None:
        return None
    elif kind is bool and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    elif kind in (str, int) and isinstance(value, str | int) and not isinstance(value, bool):
        return kind(value)
    elif kind is float and isinstance(value, str | int | float) and not isinstance(value, bool):
        if math.isfinite(number := float(value)):
            return number
    elif origin in (list, tuple):
        items = yaml.safe_load(value) if isinstance(value, str) else value
        if isinstance(items, list | tuple):
            return origin(convert(item, members[0]) for item in items)
    raise ValueError(f"{value!r} is not {expected(kind)}")


def expected(kind: Any) -> str:
    """Say in words what a type accepts."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return f"{EXPECTED[members[0]]} {members[1].words}"
    if origin in (list, tuple):
        return f"a list like [1, 2], each item {expected(members[0])}"
    if origin is typing.Literal:
        *others, last = map(str, members)
        return f"{', '.join(others)} or {last}" if others else last
    return EXPECTED.get(kind) or " or ".join(map(expected, members)) or str(kind)


def value_of(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def _lengths(config: Config) -> Refusals:
    longest = getattr(config.model, "max_position_embeddings", None)
    if isinstance(longest, int) and config.data.seq_len > longest:
        yield (
            "data.seq_len",
            f"longer than model.max_position_embeddings={longest}; set data.seq_len to at most"
            f" {longest}, or a larger model.max_position_embeddings",
        )
    lr, floor = config.optim.lr, config.optim.min_lr
    if config.optim.schedule != "constant" and floor is not None and floor > lr:
        yield "optim.min_lr", f"above the peak optim.lr={lr}; set optim.min_lr={lr / 10:g}, say"


def _retention(run: RunConfig) -> Refusals:
    for name in ("keep_every", "keep_best"):
        if getattr(run, name) and not run.keep:
            yield (
                f"run.{name}",
                f"run.keep=0 keeps every checkpoint already; set run.keep to 1 or more, or"
                f" run.{name}=0",
            )
    save, validate = run.save_every, run.eval_every
    if run.keep_every and (not save or run.keep_every % save):
        yield (
            "run.keep_every",
            f"run.save_every={save} does not save at those steps; set run.keep_every to a multiple"
            " of a run.save_every above 0, or to 0",
        )
    if run.keep_best and (not save or not validate or (save % validate and validate % save)):
        yield (
            "run.keep_best",
            f"a checkpoint is judged by the validation of its step, and run.save_every={save} and"
            f" run.eval_every={validate} do not meet; make one a multiple of the other, both above"
            " 0, or set run.keep_best=0",
        )


def _task(config: Config) -> Refusals:
    """Text and a language model, or samples and a model with a loss of its own."""
    data, name, own_loss = config.data, config.model.architecture, False
    try:
        samples = holds_samples(data)
    except DataError as error:
        if data.dataset in DATASETS:  # _places tells of others
            yield "data.dataset", str(error).partition(": ")[2]
        return
    if name != "decoder":
        with contextlib.suppress(KeyError, ImportError, AttributeError):  # compose tells
            own_loss = hasattr(model_class(name), "loss_sums")
    if own_loss and not samples:
        text = "data.input" if data.input else f"data.dataset={data.dataset}"
        yield (
            "model.architecture",
            f"learns from samples, and {text} is text; set data=NAME of a function in"
            " curry_train.data.DATASETS that returns Samples",
        )
    if not samples:
        return
    if not own_loss:
        yield (
            "data.dataset",
            f"holds samples, and model.architecture={name} learns from text; set model=NAME of a"
            " model with loss_sums, or data=embedded",
        )
    for key, off in (("tokenizer", "auto"), ("document_mask", "false")):
        if shown(getattr(data, key)) != off:
            why = f"read of text only, and data.dataset={data.dataset} holds none"
            yield f"data.{key}", f"{why}; set data.{key}={off}"


def _places(config: Config) -> Refusals:
    data, run = config.data, config.run
    if data.input is None and data.dataset not in DATASETS:
        yield "data.dataset", f"known are {', '.join(DATASETS)}; or set data.input"
    if data.input is not None and not Path(data.input).exists():
        yield "data.input", "no such file or folder"
    if data.tokenizer not in ("auto", "byte", "bpe") and not Path(data.tokenizer).exists():
        yield "data.tokenizer", "must be auto, byte, bpe or a tokenizer.json that exists"
    if run.resume not in ("never", "auto") and not Path(run.resume).is_dir():
        yield "run.resume", "must be never, auto or a folder that exists"
    if run.init_from is not None:
        from curry_train.checkpoint.huggingface import initial_problems

        for problem in initial_problems(Path(run.init_from), config.model):
            yield "run.init_from", problem
    if not RUN_NAME.fullmatch(run.name):
        allowed = "letters, digits (ASCII) and . _ -, a letter or digit first"
        yield "run.name", f"begins a folder's name; allowed are {allowed}"
    needed, size = vocab_size_of(data), getattr(config.model, "vocab_size", None)
    if needed is not None and isinstance(size, int) and size < needed:
        yield (
            "model.vocab_size",
            f"fewer than the {needed} ids of the tokenizer (data.tokenizer={data.tokenizer});"
            f" set model.vocab_size={needed} or more",
        )
