"""model.norm=skeleton_name: what every variant keeps, and its formula."""

from __future__ import annotations

import pytest
import torch
import variant_checks as checks

from curry_train.layers.norm import RMSNorm

PART, NAME = "norm", "skeleton_name"


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


def test_on_rows_of_mean_zero_it_starts_as_the_baseline():
    """Its neutral value: weight 1, bias 0, nothing to centre."""
    norm = checks.build(f"model.{PART}={NAME}", "precision=fp64").model.norm
    x = torch.randn(7, 32, dtype=torch.float64)
    x = x - x.mean(-1, keepdim=True)
    standard = RMSNorm(32, norm.eps).double()
    torch.nn.init.ones_(standard.weight)
    torch.testing.assert_close(norm(x), standard(x), rtol=0, atol=1e-12)


def test_a_constant_does_not_matter_and_bias_and_weight_do():
    norm = checks.build(f"model.{PART}={NAME}", "precision=fp64").model.norm
    x = torch.randn(7, 32, dtype=torch.float64)
    plain = norm(x)
    torch.testing.assert_close(norm(x + 5), plain)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    torch.testing.assert_close(norm(x), plain * norm.weight + norm.bias)
