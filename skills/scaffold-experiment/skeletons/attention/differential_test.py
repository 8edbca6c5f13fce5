"""model.attention=skeleton_name: what every variant keeps, and the formula of the paper."""

from __future__ import annotations

import pytest
import torch
import variant_checks as checks

from curry_train.layers.rope import rotate

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


def by_the_formula(layer, x, positions):
    """Return the output for x [1, S, D], pair by pair and query by query."""
    width, out = layer.head_dim, []
    q, k = (
        layer.heads_of(layer.q_proj(x), layer.q_norm),
        layer.heads_of(layer.k_proj(x), layer.k_norm),
    )
    q, k = (rotate(t, positions.cos, positions.sin)[0] for t in (q, k))
    v = layer.v_proj(x)[0].unflatten(1, (-1, 2 * width))
    shared = len(q) // len(k)
    dots = [
        (a @ b).exp()
        for a, b in ((layer.lambda_q1, layer.lambda_k1), (layer.lambda_q2, layer.lambda_k2))
    ]
    mix = dots[0] - dots[1] + layer.lambda_init
    for pair in range(len(k) // 2):
        for turn in range(shared):
            maps = []
            for half in (2 * pair, 2 * pair + 1):
                scores = q[half * shared + turn] @ k[half].T / width**0.5
                future = torch.ones_like(scores, dtype=torch.bool).triu(1)
                maps.append(scores.masked_fill(future, -torch.inf).softmax(-1))
            head = (maps[0] - mix * maps[1]) @ v[:, pair]
            head = head / (head.square().mean(-1, keepdim=True) + layer.head_norm.eps).sqrt()
            out.append((1 - layer.lambda_init) * layer.head_norm.weight * head)
    return layer.o_proj(torch.cat(out, -1))[None]


@pytest.mark.parametrize("key_heads", [2, 4])
def test_it_is_the_formula_of_the_paper(key_heads):
    words = ("precision=fp64", f"model.num_key_value_heads={key_heads}")
    model = checks.build(f"model.{PART}={NAME}", *words)
    for number, block in model.layers.items():
        layer, x = block.self_attn, torch.randn(1, 9, 32, dtype=torch.float64)
        torch.nn.init.normal_(layer.head_norm.weight)
        positions = model.positions(x, None, None)
        wanted = by_the_formula(layer, x, positions)
        torch.testing.assert_close(layer(x, positions), wanted, rtol=0, atol=1e-12)
        assert layer.lambda_init == pytest.approx((0.2, 0.35550906759096)[int(number)])


def test_both_maps_and_lambda_start_as_published():
    layer = checks.build(f"model.{PART}={NAME}", "model.head_dim=128").layers["0"].self_attn
    vectors = torch.stack([layer.lambda_q1, layer.lambda_k1, layer.lambda_q2, layer.lambda_k2])
    assert vectors.std().item() == pytest.approx(0.1, rel=0.15)
    assert set(layer.head_norm.weight.tolist()) == {1.0}


def test_half_a_pair_is_refused():
    with checks.expects_refusal("pairs the key heads"):
        checks.build(f"model.{PART}={NAME}", "model.num_key_value_heads=1")
    with checks.expects_refusal("whole pairs of key heads on every rank"):
        words = (f"model.{PART}={NAME}", "model.num_key_value_heads=2")
        checks.build(*words, "parallel.tp=2", "devices=2")
