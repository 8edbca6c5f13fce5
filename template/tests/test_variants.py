"""Variants of a part of a block: chosen by one setting, refused where they are not proved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import variant_checks as checks
from torch import nn

from curry_train.checkpoint import CheckpointError
from curry_train.checkpoint.families import write_config
from curry_train.compose import load_config
from curry_train.config import ConfigError
from curry_train.layers import VARIANTS
from curry_train.layers.attention import Attention
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.norm import RMSNorm
from curry_train.layers.routing import TopKRouter
from curry_train.layers.variants import PARTS
from curry_train.models.protocol import build_model, count_parameters
from curry_train.plan import estimate, estimate_ranks
from curry_train.sizes import flops_per_token

HERE = __name__


class Scaled(Attention):
    """Attention times a learned number per head entry."""

    proved = frozenset({"dp", "tp", "ep"})

    def __init__(self, config, layer=0):
        super().__init__(config, layer)
        self.gain = RMSNorm(config.head_dim, 1e-6)
        self.constants = {"gain.weight": 0.5}
        self.deviations = {"extra": 3.0, "q_proj.weight": 0.5}
        self.extra = nn.Parameter(torch.empty(200, 30))

    @staticmethod
    def refusals(config):
        if config.model.num_attention_heads == 2:
            yield "model.num_attention_heads", "two are too few; set 4"


class Peeking(Attention):
    """Sees the mean of the whole sequence."""

    proved = frozenset({"dp"})

    def forward(self, x_BSD, positions):
        return super().forward(x_BSD + x_BSD.mean(1, keepdim=True), positions)


class Idle(Attention):
    """Has a parameter that nothing reads."""

    proved = frozenset({"dp"})

    def __init__(self, config, layer=0):
        super().__init__(config, layer)
        self.idle = nn.Parameter(torch.empty(3))


class Local(Attention):
    """Normalises over the heads of its own rank, and claims to be right under tp."""

    proved = frozenset({"dp", "tp"})

    def heads_of(self, x, norm):
        return super().heads_of(x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt(), norm)


class Wide(RMSNorm):
    """Answers in float32."""

    proved = frozenset({"dp"})

    def forward(self, x):
        return super().forward(x).float()


class Narrow(SwiGLU):
    proved = frozenset()


class Half(RMSNorm):
    proved = frozenset({"dp"})


class Other(TopKRouter):
    pass


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for part, name in zip(PARTS, ("Scaled", "Narrow", "Other", "Half"), strict=True):
        monkeypatch.setitem(VARIANTS, f"{part}.{name.lower()}", f"{HERE}:{name}")
    for name in ("Peeking", "Idle", "Local"):
        monkeypatch.setitem(VARIANTS, f"attention.{name.lower()}", f"{HERE}:{name}")
    monkeypatch.setitem(VARIANTS, "norm.wide", f"{HERE}:Wide")
    monkeypatch.setitem(VARIANTS, "norm.gone", "curry_train.layers.nowhere:Gone")


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([*words, "accelerator=cpu"])
    return "\n".join(caught.value.problems)


def test_the_default_builds_the_standard_classes():
    model = build_model(load_config(["accelerator=cpu"]), "meta")
    block = model.layers["0"]
    built = [type(part) for part in (block.self_attn, block.mlp.gate, block.input_layernorm)]
    assert built == [Attention, TopKRouter, RMSNorm]


def test_every_part_is_built_by_its_setting():
    words = ["model.attention=scaled", "model.norm=half", "model.router=other", "model.mlp=narrow"]
    words += ["model.first_k_dense_replace=1", "model.shared_expert_intermediate_size=64"]
    model = build_model(load_config([*words, "accelerator=cpu"]), "meta")
    dense, sparse = model.layers["0"], model.layers["1"]
    assert type(dense.mlp) is type(sparse.mlp.shared_experts) is Narrow
    assert type(sparse.mlp.gate) is Other
    norms = (dense.input_layernorm, sparse.post_attention_layernorm, model.model.norm)
    assert {type(norm) for norm in norms} == {Half}
    assert type(sparse.self_attn.q_norm) is RMSNorm
    assert {type(block.self_attn) for block in model.layers.values()} == {Scaled}


def test_a_variant_says_how_its_parameters_start():
    config = load_config(["model.attention=scaled", "accelerator=cpu"])
    built = build_model(config, "cpu")
    attention = built.layers["3"].self_attn
    assert set(attention.gain.weight.tolist()) == {0.5}
    assert attention.extra.std().item() == pytest.approx(3.0, rel=0.05)
    assert attention.q_proj.weight.std().item() == pytest.approx(0.5, rel=0.05)
    baseline = build_model(load_config(["accelerator=cpu"]), "cpu")
    assert torch.equal(attention.k_proj.weight, baseline.layers["3"].self_attn.k_proj.weight)
    assert torch.equal(built.lm_head.weight, baseline.lm_head.weight)


def test_a_name_that_is_not_registered_is_told_with_those_that_are():
    assert "model.norm=nonsense: known are standard, half, wide, gone" in refused(
        "model.norm=nonsense"
    )


def test_a_class_that_does_not_load_is_told():
    assert "model.norm=gone: curry_train.layers.nowhere:Gone does not load" in refused(
        "model.norm=gone"
    )


@pytest.mark.parametrize(
    ("axis", "variant", "allowed"),
    [
        ("tp", "attention=scaled", True),
        ("cp", "attention=scaled", False),
        ("pp", "attention=scaled", False),
        ("ep", "attention=scaled", True),
        ("tp", "norm=half", False),
        ("ep", "router=other", False),
    ],
)
def test_what_a_variant_does_not_prove_is_refused(axis, variant, allowed):
    words = [f"model.{variant}", f"parallel.{axis}=2", "devices=2", "accelerator=cpu"]
    if allowed:
        assert getattr(load_config(words).parallel, axis) == 2
    else:
        assert f"parallel.{axis}=2: model.{variant} is not proved equal" in refused(*words)


def test_a_variant_that_proves_nothing_stays_in_one_process():
    words = ["model.mlp=narrow", "model.num_experts=0", "accelerator=cpu"]
    assert load_config(words).model.mlp == "narrow"
    assert "devices=2: model.mlp=narrow is not proved" in refused(*words[:2], "devices=2")


def test_settings_that_nothing_would_read_are_refused():
    assert "model.mlp=narrow: read by dense blocks" in refused("model.mlp=narrow")
    assert "model.router=other: read by blocks with experts" in refused(
        "model=tiny_dense", "model.router=other"
    )
    assert "model.attention=scaled: latent attention" in refused(
        "model=deepseek_v2_lite", "model.attention=scaled"
    )


def test_a_variant_refuses_what_it_cannot_work_with():
    assert "model.num_attention_heads=2: two are too few" in refused(
        "model.attention=scaled", "model.num_attention_heads=2"
    )


def test_no_published_architecture_has_it():
    model = load_config(["model.attention=scaled", "accelerator=cpu"]).model
    with pytest.raises(CheckpointError, match="model.attention=scaled: .*cannot be exported"):
        write_config(model, "float32")
    assert write_config(replace(model, attention="standard"), "float32")


def test_a_plan_counts_the_parameters_that_are_there():
    words = ["model.attention=scaled", "accelerator=cpu", "optim.lr=1e-3"]
    config, baseline = load_config(words), load_config(words[1:])
    assert flops_per_token(config.model, 128) is None
    built = build_model(config, "meta")
    memory = sum(parameter.numel() for parameter in built.parameters())
    assert estimate(config, 1)["parameters"] == 4 * memory
    extra = 4 * (200 * 30 + 32)
    assert count_parameters(built)[0] - count_parameters(build_model(baseline, "meta"))[0] == extra
    assert estimate(config, 1)["activations"] is None


@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.ep=2", "parallel.pp=2"])
def test_a_plan_splits_what_ranks_split(layout, monkeypatch):
    """The names tell it as the closed forms do, which the tests of the plan hold against ranks."""
    words = [layout, "devices=2", "accelerator=cpu"]
    baseline = load_config(words)
    wanted = [parts["parameters"] for parts in estimate_ranks(baseline, 2)]
    monkeypatch.setattr("curry_train.layout.chosen", lambda model: {"attention": "any"})
    assert [parts["parameters"] for parts in estimate_ranks(baseline, 2)] == wanted


@pytest.mark.parametrize(
    ("check", "part", "name", "said"),
    [
        (checks.sees_nothing_it_should_not, "attention", "peeking", "sees"),
        (checks.gradient_reaches_every_parameter, "attention", "idle", "idle gets no gradient"),
        (checks.keeps_shape_and_dtype, "norm", "wide", "bfloat16"),
        (checks.keeps_shape_and_dtype, "norm", "gone", "nowhere"),
    ],
)
def test_what_variants_are_checked_for_is_seen(check, part, name, said):
    """The checks that the tests of every variant call fail on a variant with this fault."""
    with pytest.raises((AssertionError, RuntimeError, ConfigError), match=said):
        check(part, name)


@pytest.mark.dist
def test_a_variant_that_claims_too_much_is_seen():
    with pytest.raises(AssertionError, match="NOT equal"):
        checks.equals_one_process("attention", "local", "tp")
