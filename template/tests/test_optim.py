"""Schedules are pure functions of the step; decay is chosen by name."""

import math
from dataclasses import replace

import pytest

from curry_train.config import Config, ModelConfig, OptimConfig
from curry_train.models.protocol import build_model
from curry_train.optim import build_optimizer, lr_at

COSINE = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=10)


def test_warm_up_is_linear_and_the_decay_ends_at_the_last_step():
    assert [lr_at(s, COSINE, 110) for s in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert lr_at(60, COSINE, 110) == pytest.approx(0.55)
    assert lr_at(110, COSINE, 110) == pytest.approx(0.1)
    falling = [lr_at(s, COSINE, 110) for s in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def test_wsd_stays_then_falls_linearly_to_the_end():
    wsd = replace(COSINE, schedule="wsd", decay_steps=20)
    assert lr_at(11, wsd, 110) == lr_at(90, wsd, 110) == 1.0
    assert lr_at(100, wsd, 110) == pytest.approx(0.55)
    assert lr_at(110, wsd, 110) == pytest.approx(0.1)
    fifth = replace(wsd, decay_steps=0)
    assert lr_at(88, fifth, 110) == 1.0 and lr_at(89, fifth, 110) < 1.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_warm_up_longer_than_the_run_is_cut_off(schedule):
    optim = replace(COSINE, schedule=schedule, warmup_steps=100)
    assert [lr_at(s, optim, 3) for s in (1, 2, 3)] == [0.01, 0.02, 0.03]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_no_warm_up_starts_at_the_peak_or_just_below(schedule):
    optim = replace(COSINE, schedule=schedule, warmup_steps=0)
    assert 0.9 < lr_at(1, optim, 100) <= 1.0
    assert all(math.isfinite(lr_at(s, optim, 1)) for s in (1, 2))


def test_matrices_decay_and_norms_and_the_embedding_do_not():
    model = build_model(Config(model=ModelConfig(num_experts=4)), "cpu")
    optimizer = build_optimizer(model.named_parameters(), OptimConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups
             for p in group["params"]}  # fmt: skip
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        free = "norm" in name or "embed_tokens" in name
        assert decay[id(parameter)] == (0.0 if free else 0.3), name


def test_without_min_lr_the_end_is_a_tenth_of_the_peak():
    assert lr_at(110, replace(COSINE, min_lr=None), 110) == pytest.approx(0.1)
    assert lr_at(110, replace(COSINE, min_lr=0.0), 110) == pytest.approx(0.0)


def test_a_wsd_decay_longer_than_what_follows_the_warm_up_starts_at_the_peak():
    wsd = replace(COSINE, schedule="wsd", decay_steps=1000)
    assert lr_at(10, wsd, 110) == 1.0
    assert lr_at(60, wsd, 110) == pytest.approx(0.55)
    assert lr_at(110, wsd, 110) == pytest.approx(0.1)
