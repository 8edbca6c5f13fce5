"""model=skeleton_name: what every model keeps, and that it starts as the decoder with experts."""

from __future__ import annotations

from dataclasses import replace

import model_checks as checks
import pytest
import torch

from curry_train.compose import load_config
from curry_train.models.protocol import build_model

SMALL = (
    "experiment=skeleton_name",
    "model.num_hidden_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.head_dim=8",
    "data.seq_len=32",
    "data.global_batch_size=4",
    "model.moe_intermediate_size=24",
)


@pytest.mark.parametrize("words", [(), ("data.document_mask=true",)])
def test_no_token_sees_a_later_one(words):
    checks.sees_no_later_place(*SMALL, *words)


def test_samples_do_not_meet():
    checks.samples_do_not_meet(*SMALL)


def test_gradient_reaches_every_parameter():
    runtime = checks.start(*SMALL, "precision=fp64")
    checks.gradient_reaches(runtime, [runtime.model])


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    checks.goes_on_from_a_checkpoint(tmp_path, *SMALL)


@pytest.mark.dist
def test_two_ranks_train_as_one_process():
    checks.ranks_train_as_one_process(*SMALL)


def test_other_layouts_are_refused():
    checks.other_layouts_are_refused(*SMALL)


def test_it_is_the_decoder():
    """Until you change the mathematics: then put an independent formula of it here."""
    config = load_config([*SMALL, "accelerator=cpu", "precision=fp64"])
    model = build_model(config, "cpu")
    decoder = build_model(replace(config, model=config.model.of_layers()), "cpu")
    state = {
        name if name.startswith("lm_head.") else f"model.{name}": value
        for name, value in model.state_dict().items()
    }
    decoder.load_state_dict(state)
    ids = torch.randint(0, 256, (2, 24))
    documents = torch.arange(24).div(10, rounding_mode="floor").expand(2, -1)
    for words in ((ids,), (ids, None, documents)):
        for found, wanted in zip(model(*words), decoder(*words), strict=True):
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted)


def test_the_first_loss_is_that_of_guessing():
    # ln 257 is 5.549
    assert checks.losses(*SMALL, steps=1)[0] == pytest.approx(5.55, abs=0.15)
