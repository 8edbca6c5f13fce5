"""Other forms of one part of a block, behind one setting each: model.attention, mlp, router, norm.

A variant is a class that takes what the standard class takes and returns what it returns, most
easily a subclass of it. It says beside its mathematics what the rest of the package must know:

    proved: names of AXES under which its tests hold it equal to one process; others are refused
    constants: parameter of the module -> the value that all of it starts with
    deviations: parameter of the module -> the standard deviation it starts with
    refusals(config): yields (key, why) for settings it cannot work with

Without torch at import, so that rules can ask at once; a class is loaded when its setting names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from curry_train.config import Config, ModelConfig
from curry_train.layers import VARIANTS

if TYPE_CHECKING:
    from torch import nn

STANDARD = "standard"
PARTS = ("attention", "mlp", "router", "norm")
AXES = ("dp", "tp", "cp", "pp", "ep")
"""Ways to share the work; dp stands for dp_replicate and dp_shard with every parallel.zero."""


def chosen(model: Any) -> dict[str, str]:
    """Return part -> name of every variant that the settings of a decoder choose."""
    names = {part: getattr(model, part, STANDARD) for part in PARTS}
    return {part: name for part, name in names.items() if name != STANDARD}


def part_class(model: ModelConfig, part: str, standard: type) -> Any:
    """Return the class that makes a part of the model: `standard`, or the chosen variant."""
    name = getattr(model, part)
    return standard if name == STANDARD else load(f"{part}.{name}")


def load(key: str) -> Any:
    """Return the class of an entry of VARIANTS. Raises KeyError, ImportError, AttributeError."""
    module, _, name = VARIANTS[key].partition(":")
    return getattr(import_module(module), name)


def declared(model: nn.Module, name: str, table: str) -> float | None:
    """Return what the module above the parameter `name` says of it in `table`, else None."""
    module, words = model, name.split(".")
    for index, word in enumerate(words[:-1], start=1):
        module = module._modules.get(word)
        if module is None:
            return None
        value = getattr(module, table, {}).get(".".join(words[index:]))
        if value is not None:
            return value
    return None


def refusals(config: Config, world: int | None) -> Iterator[tuple[str, str]]:
    """Yield (key, why) for everything that the chosen variants cannot do."""
    for part, name in chosen(config.model).items():
        key = f"model.{part}"
        if f"{part}.{name}" not in VARIANTS:
            known = [entry.partition(".")[2] for entry in VARIANTS if entry.startswith(f"{part}.")]
            yield key, f"known are {', '.join([STANDARD, *known])}"
            continue
        try:
            variant = load(f"{part}.{name}")
        except (ImportError, AttributeError, SyntaxError) as error:
            yield key, f"{VARIANTS[f'{part}.{name}']} does not load: {error}"
            continue
        yield from _unread(config.model, part)
        yield from _unproved(config, world, f"{key}={name}", variant)
        yield from getattr(variant, "refusals", _none)(config)


def _none(config: Config) -> Iterator[tuple[str, str]]:
    yield from ()


def _unread(model: ModelConfig, part: str) -> Iterator[tuple[str, str]]:
    dense = model.num_experts == 0 or model.first_k_dense_replace
    if part == "mlp" and not dense and not model.shared_expert_intermediate_size:
        yield (
            "model.mlp",
            "read by dense blocks and shared experts, and this model has neither; set model.mlp="
            "standard, model.num_experts=0 or model.shared_expert_intermediate_size",
        )
    if part == "router" and not model.num_experts:
        yield (
            "model.router",
            "read by blocks with experts only; set model.router=standard, or model.num_experts",
        )
    if part == "attention" and model.kv_lora_rank:
        yield (
            "model.attention",
            f"latent attention (model.kv_lora_rank={model.kv_lora_rank}) has no variants; set"
            " model.attention=standard, or model.kv_lora_rank=0",
        )


def _unproved(
    config: Config, world: int | None, setting: str, variant: Any
) -> Iterator[tuple[str, str]]:
    """Yield the axes that a variant is not proved under: what it would compute, nobody knows."""
    proved = getattr(variant, "proved", ())
    where = f"`proved` of {variant.__module__}:{variant.__qualname__}"
    for axis in AXES[1:]:
        if getattr(config.parallel, axis) > 1 and axis not in proved:
            yield (
                f"parallel.{axis}",
                f"{setting} is not proved equal to one process under it; set parallel.{axis}=1,"
                f" or name {axis} in {where} and let its tests prove it",
            )
    if world is not None and world > 1 and "dp" not in proved:
        yield (
            "devices",
            f"{setting} is not proved equal to one process on several ranks; start one process, or"
            f" name dp in {where} and let its tests prove it",
        )
