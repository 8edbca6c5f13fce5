"""model.router=skeleton_name: what every variant keeps, and its formula."""

from __future__ import annotations

import pytest
import torch
import variant_checks as checks

PART, NAME = "router", "skeleton_name"


def test_logits_keep_their_shape_and_dtype():
    checks.keeps_shape_and_dtype(PART, NAME)


def test_no_token_sees_a_later_one_or_another_document():
    checks.sees_nothing_it_should_not(PART, NAME)


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


def test_logits_are_cosines_over_the_temperature():
    gate = checks.build(f"model.{PART}={NAME}", "precision=fp64").layers["1"].mlp.gate
    assert gate.temperature.tolist() == [pytest.approx(0.3)]
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    wanted = torch.cosine_similarity(x[:, :, None], gate.weight, dim=-1) / gate.temperature
    torch.testing.assert_close(gate.logits(x), wanted)
    torch.testing.assert_close(gate.logits(1000 * x), wanted)


def test_the_temperature_stays_above_its_floor():
    gate = checks.build(f"model.{PART}={NAME}").layers["1"].mlp.gate
    gate.temperature.data.fill_(-1.0)
    assert gate.logits(torch.randn(1, 3, 32)).abs().max() <= 100.01
