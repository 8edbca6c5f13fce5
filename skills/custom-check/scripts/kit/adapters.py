"""What FUNCTION of --target may return, turned into one form.

Tuples, a dict, a Trainer of transformers, a LightningModule with its dataloader, and a model of
transformers with its dataloader. Neither library is imported: an object is known by what it has.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .batches import device_of, to_device
from .errors import UsageError
from .user_code import user_code

ALLOWED = (
    "it must return (model, batches, loss_fn) or (model, batches, loss_fn, optimizer), a dict of "
    "those, a transformers Trainer, (LightningModule, dataloader), or (model, dataloader) where "
    "model(**batch).loss is the loss"
)


@dataclass
class Parts:
    """What a target is made of; the fields are the keys that a returned dict may have."""

    model: Any
    batches: Any
    loss_fn: Callable[[Any, Any], Any]
    optimizer: Any = None
    scheduler: Any = None
    total_steps: int | None = None
    train_step: Callable[[Any, Any, Any], Any] | None = None
    evaluate: Callable[[Any, Any], Any] | None = None
    data: Any = None


def describe(value: Any) -> str:
    """Say in a few words what came back."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(part).__name__ for part in value)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"


def parts_of(returned: Any, what: str, seed: int) -> Parts:
    """Turn what the function `what` returned into parts; UsageError says what is wrong with it.

    `seed` seeds the weights of a Trainer that makes its model itself (model_init).
    """
    from . import hf_trainer, lightning_module

    if hf_trainer.is_trainer(returned):
        with user_code(f"the Trainer of {what}"):
            return Parts(**hf_trainer.parts(returned, what, seed))
    found: dict[str, Any]
    if isinstance(returned, Mapping):
        found = _known_keys(returned, what)
    elif isinstance(returned, (tuple, list)) and len(returned) in (2, 3, 4):
        found = dict(zip(("model", "batches", "loss_fn", "optimizer"), returned, strict=False))
    else:
        shown = describe(tuple(returned)) if isinstance(returned, list) else describe(returned)
        raise UsageError(f"{what} returned {shown}", ALLOWED)
    if found.get("loss_fn") is None:
        if lightning_module.is_module(found["model"]):
            with user_code(f"the LightningModule of {what}"):
                found = lightning_module.parts(found, what)
        else:
            found["loss_fn"] = _own_loss(found, what)
    return Parts(**found)


def _known_keys(returned: Mapping[str, Any], what: str) -> dict[str, Any]:
    names = [field.name for field in fields(Parts)]
    shown = f"{what} returned a dict"
    for key in returned:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            raise UsageError(f"{shown} with the key {key!r}", f"it takes {', '.join(names)}", hint)
    missing = [key for key in ("model", "batches") if returned.get(key) is None]
    if missing:
        raise UsageError(f"{shown} without {', '.join(missing)}", ALLOWED)
    return dict(returned)


def _own_loss(found: Mapping[str, Any], what: str) -> Callable[[Any, Any], Any]:
    """Take the loss that a model of transformers makes itself when its batch has labels."""
    import torch

    shown = f"{what} returned a {type(found['model']).__name__} without loss_fn"
    if not isinstance(found["model"], torch.nn.Module) or not hasattr(found["model"], "config"):
        pair = describe((found["model"], found["batches"]))
        raise UsageError(f"{what} returned {pair}", ALLOWED)

    def loss_fn(model: Any, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            raise UsageError(
                f"{shown}, and a batch is {describe(batch)}", "it must be a dict of its arguments"
            )
        output = model(**to_device(batch, device_of(model)))
        first = isinstance(output, (tuple, list))
        loss = output[0] if first and output else getattr(output, "loss", None)
        if loss is None:
            raise UsageError(
                f"{shown}, and model(**batch) gave {describe(output)} without a loss",
                f"the batch has {', '.join(map(str, batch))}",
                "put labels into the batch, or return a loss_fn",
            )
        return loss

    return loss_fn
