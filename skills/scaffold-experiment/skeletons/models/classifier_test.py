"""model=skeleton_name: what every model keeps, its formula, and that it learns."""

from __future__ import annotations

import math

import model_checks as checks
import pytest
import torch

from curry_train.step import train_step

SMALL = (
    "experiment=skeleton_name",
    "data.global_batch_size=8",
)


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


def test_it_is_its_formula():
    """Change it with the mathematics."""
    model = checks.build(*SMALL, "precision=fp64")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    p, eps = dict(model.named_parameters()), model.config.rms_norm_eps

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p[f"{name}.weight"]

    inputs = torch.randn(5, model.config.features)
    x = inputs.double() @ p["embed.weight"].T + p["embed.bias"]
    for at in (f"layers.{number}" for number in model.layers):
        hidden = norm(x, f"{at}.norm")
        gate = hidden @ p[f"{at}.mlp.gate_proj.weight"].T
        up = hidden @ p[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ p[f"{at}.mlp.down_proj.weight"].T
    wanted = norm(x, "norm") @ p["head.weight"].T + p["head.bias"]
    torch.testing.assert_close(model(inputs), wanted)


def test_it_starts_at_guessing_and_learns():
    runtime = checks.start("experiment=skeleton_name", "optim.warmup_steps=0", "optim.lr=3e-3")
    losses = [train_step(runtime).loss for _ in range(100)]
    assert losses[0] == pytest.approx(math.log(runtime.config.model.classes), abs=0.1)
    assert sum(losses[-10:]) / 10 < losses[0] / 2
