"""What every variant of a part of a block must keep; the tests of a variant call these.

They act on the whole model, since that is where a variant must be right: with masks, documents,
dtypes, initial values, and ranks that share the work.
"""

from __future__ import annotations

from pathlib import Path

import model_checks
import pytest
import torch
from model_checks import SEEN, UNSEEN, expects_refusal
from torch import Tensor, nn

from curry_train.compose import load_config
from curry_train.equality import prove
from curry_train.layers.variants import AXES, load
from curry_train.models.protocol import named_state

__all__ = ["expects_refusal"]  # the tests of a variant have all they need from here

SMALL = (
    "model=tiny_moe",
    "model.num_hidden_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "model.head_dim=8",
    "model.moe_intermediate_size=16",
    "model.shared_expert_intermediate_size=16",
    "model.first_k_dense_replace=1",
    "data.seq_len=32",
    "data.global_batch_size=4",
    "accelerator=cpu",
)
"""A dense block and one with experts, so that every part is somewhere."""
LAYOUTS = {
    "dp": ("parallel.zero=3",),
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2",),
    "pp": ("parallel.pp=2", "parallel.schedule=zbv", "model.num_hidden_layers=4"),
    "ep": ("parallel.ep=2",),
}
LENGTH = 16


def build(*words: str) -> nn.Module:
    """Return the small model that words describe, with its first values."""
    return model_checks.build(*SMALL, *words)


def tokens(length: int = LENGTH) -> Tensor:
    """Return input ids int64 [2, length]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, length), generator=generator)


def modules_of(part: str, name: str, model: nn.Module) -> list[nn.Module]:
    """Return the modules of the model that are this variant."""
    return [module for module in model.modules() if type(module) is load(f"{part}.{name}")]


def keeps_shape_and_dtype(part: str, name: str) -> None:
    """Logits are finite, of the baseline's shape, in the compute dtype; and it is really there."""
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = build(f"model.{part}={name}", f"precision={precision}")
        assert modules_of(part, name, model), f"no module of {part}.{name} in the model"
        logits, standard = (m(tokens()).logits for m in (model, build(f"precision={precision}")))
        assert logits.shape == standard.shape
        assert logits.dtype == standard.dtype == dtype
        assert logits[..., : model.vocab_size].isfinite().all()


def sees_nothing_it_should_not(part: str, name: str, *words: str) -> None:
    """Logits do not change with a later token, nor with another document, nor another sample."""
    model, half = build(f"model.{part}={name}", "precision=fp64", *words), LENGTH // 2
    ids = tokens()

    def change(other: Tensor, documents: Tensor | None = None) -> Tensor:
        found, plain = (model(each, None, documents).logits for each in (other, ids))
        return (found - plain)[..., : model.vocab_size].abs().amax(-1)

    for place in (half, LENGTH - 1):
        later = ids.clone()
        later[0, place:] = (later[0, place:] + 1) % 256
        moved = change(later)
        assert moved[0, place] > SEEN, "a token does not see itself"
        assert moved[0, :place].max() < UNSEEN, f"a token before {place} sees it"
        assert moved[1].max() < UNSEEN, "a sample sees another"
    first = ids.clone()
    first[:, :half] = (first[:, :half] + 1) % 256
    documents = (torch.arange(LENGTH) >= half).long().expand(2, -1)
    assert change(first)[:, half].min() > SEEN, "a token sees nothing of what was before"
    assert change(first, documents)[:, half:].max() < UNSEEN, "a document sees another"


def gradient_reaches_every_parameter(part: str, name: str) -> None:
    """After one backward every parameter of the variant has a finite gradient, not zero."""
    runtime = model_checks.start(*SMALL, f"model.{part}={name}", "precision=fp64")
    model_checks.gradient_reaches(runtime, modules_of(part, name, runtime.model))


def leaves_the_rest_alone(part: str, name: str) -> None:
    """The baseline is built without it, and all that both have in common starts the same."""
    standard = build()
    assert not modules_of(part, name, standard)
    assert losses(f"model.{part}=standard") == losses()
    inside = tuple(
        f"{full}." for full, m in build(f"model.{part}={name}").named_modules()
        if type(m) is load(f"{part}.{name}")
    )  # fmt: skip
    ours = dict(named_state(build(f"model.{part}={name}")))
    for full, value in named_state(standard):
        assert full.startswith(inside) or torch.equal(ours[full], value), full


def trains_and_comes_back(part: str, name: str, folder: Path) -> None:
    """Steps are finite, and a checkpoint of the third goes on bit for bit."""
    words = (f"model.{part}={name}", "precision=fp64")
    model_checks.goes_on_from_a_checkpoint(folder, *SMALL, *words)


def losses(*words: str) -> list[float]:
    """Return the losses of the first steps of training, bit for bit."""
    return model_checks.losses(*SMALL, *words)


def proved_axes(part: str, name: str) -> list[str]:
    """Return the axes that the variant names in `proved`, in the order of AXES."""
    return [axis for axis in AXES if axis in load(f"{part}.{name}").proved]


def equals_one_process(part: str, name: str, axis: str) -> None:
    """Two ranks that share the work by this axis train as one process does, in float64."""
    proof = prove([*SMALL, f"model.{part}={name}", *LAYOUTS[axis]], 2)
    assert proof.equal, str(proof)


def other_layouts_are_refused(part: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An axis that `proved` does not name ends with a sentence, not with numbers."""
    variant = load(f"{part}.{name}")
    for axis in AXES:
        monkeypatch.setattr(variant, "proved", variant.proved - {axis})
        with expects_refusal(f"model.{part}={name} is not proved"):
            load_config([*SMALL, f"model.{part}={name}", *LAYOUTS[axis], "devices=2"])
