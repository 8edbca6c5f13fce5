"""model.mlp=skeleton_name: what every variant keeps, and its formula."""

from __future__ import annotations

import pytest
import torch
import variant_checks as checks

PART, NAME = "mlp", "skeleton_name"


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


def test_it_is_the_formula_of_the_paper():
    mlp = checks.build(f"model.{PART}={NAME}", "precision=fp64").layers["0"].mlp
    x = torch.randn(5, 32, dtype=torch.float64)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    gelu = gate * (1 + torch.erf(gate / 2**0.5)) / 2
    torch.testing.assert_close(mlp(x), (gelu * up) @ mlp.down_proj.weight.T)
