"""model.attention=skeleton_name: what every variant keeps, and what its cap does."""

from __future__ import annotations

import sys

import pytest
import torch
import variant_checks as checks

from curry_train.layers.variants import load

PART, NAME = "attention", "skeleton_name"


def test_logits_keep_their_shape_and_dtype():
    checks.keeps_shape_and_dtype(PART, NAME)


@pytest.mark.parametrize("words", [(), ("model.sliding_window=5",)])
def test_no_token_sees_a_later_one_or_another_document(words):
    checks.sees_nothing_it_should_not(PART, NAME, *words)


def test_gradient_reaches_every_parameter():
    checks.gradient_reaches_every_parameter(PART, NAME)


def test_the_baseline_is_what_it_was():
    checks.leaves_the_rest_alone(PART, NAME)


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    checks.trains_and_comes_back(PART, NAME, tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize("axis", checks.proved_axes(PART, NAME))
def test_two_ranks_train_as_one_process(axis):
    checks.equals_one_process(PART, NAME, axis)


def test_other_layouts_are_refused(monkeypatch):
    checks.other_layouts_are_refused(PART, NAME, monkeypatch)


def test_without_a_cap_it_is_the_baseline(monkeypatch):
    """Its neutral value: a cap that no score comes near."""
    module = sys.modules[load(f"{PART}.{NAME}").__module__]
    monkeypatch.setattr(module, "CAP", 1e8)
    model, standard = (
        checks.build(*words, "precision=fp64") for words in ((f"model.{PART}={NAME}",), ())
    )
    for words in ((), (torch.arange(checks.LENGTH).expand(2, -1), torch.ones(2, 16).long())):
        found, wanted = (m(checks.tokens(), *words).logits[..., :257] for m in (model, standard))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_no_score_is_above_the_cap(monkeypatch):
    """With a tiny cap all scores are alike, and every token takes the mean of what it sees."""
    module = sys.modules[load(f"{PART}.{NAME}").__module__]
    monkeypatch.setattr(module, "CAP", 1e-9)
    layer = checks.build(f"model.{PART}={NAME}", "precision=fp64").layers["0"].self_attn
    x = 100 * torch.randn(1, 6, 32, dtype=torch.float64)
    positions = checks.build("precision=fp64").positions(x, None, None)
    seen = torch.arange(1, 7, dtype=torch.float64)[:, None]
    wanted = layer.o_proj(layer.v_proj(x).cumsum(1) / seen)
    torch.testing.assert_close(layer(x, positions), wanted, rtol=1e-6, atol=1e-9)
