"""model.attention=skeleton_name: what every variant keeps, and what its gate does."""

from __future__ import annotations

import pytest
import torch
import variant_checks as checks

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


def test_a_gate_that_is_half_open_halves_the_baseline():
    """Its neutral value: with a zero matrix the gate is 1/2 everywhere, exactly."""
    model, standard = checks.build(f"model.{PART}={NAME}"), checks.build()
    x = torch.randn(2, 9, 32)
    positions = standard.positions(x, None, None)
    for number, block in model.layers.items():
        layer = block.self_attn
        torch.nn.init.zeros_(layer.gate_proj.weight)
        wanted = standard.layers[number].self_attn(x, positions) / 2
        assert torch.equal(layer(x, positions), wanted)


def test_a_token_closes_its_own_gate_only():
    layer = checks.build(f"model.{PART}={NAME}", "precision=fp64").layers["0"].self_attn
    torch.nn.init.zeros_(layer.gate_proj.weight)
    layer.gate_proj.weight.data[:, 0] = -1e4
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    x[..., 0] = 0.0
    x[0, 4, 0] = 1.0
    positions = checks.build("precision=fp64").positions(x, None, None)
    closed = layer(x, positions).abs().sum(-1)[0] == 0
    assert closed.tolist() == [place == 4 for place in range(9)]
