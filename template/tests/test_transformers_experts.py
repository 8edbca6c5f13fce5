"""Our bank inside transformers' models: the same logits and gradients, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from curry_train.kernels import transformers_experts
from curry_train.testing import assert_same

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}


def qwen3():
    config = transformers.Qwen3MoeConfig(
        **SMALL, intermediate_size=64, moe_intermediate_size=16, num_experts=6, norm_topk_prob=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral():
    config = transformers.MixtralConfig(**SMALL, intermediate_size=16, num_local_experts=6)
    return transformers.MixtralForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(**SMALL, intermediate_size=16, num_local_experts=6)
    model = transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        # Wide enough that the clamp of the activation is reached.
        if "proj" in name or "sinks" in name:
            nn.init.normal_(parameter, std=1.0)
    return model


@pytest.fixture(autouse=True)
def registered():
    assert transformers_experts.register() == "curry"


def logits_and_gradients(model, implementation, ids):
    model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    model.zero_grad()
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"logits": found.logits.detach(), **grads}


@pytest.mark.parametrize("build", [qwen3, mixtral, gpt_oss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_logits_and_gradients_as_transformers(build, dtype, monkeypatch):
    seen = []
    ours = transformers_experts.experts
    monkeypatch.setattr(
        transformers_experts, "experts", lambda *a, **k: (seen.append(1), ours(*a, **k))[1]
    )
    model = build().to(dtype)
    ids = torch.randint(0, 64, (2, 19))
    wanted = logits_and_gradients(model, "eager", ids)
    assert not seen
    found = logits_and_gradients(model, "curry", ids)
    assert len(seen) == 2
    assert_same(found, wanted, tolerance=1e-4 if dtype == torch.float32 else 1e-11)


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="torch.compile of older torch takes no module as a constant",
)
@pytest.mark.parametrize("build", [qwen3, gpt_oss])
def test_the_compiler_sees_one_graph_from_the_first_call_on(build):
    experts = build().model.layers[0].mlp.experts
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x, ids, weights = torch.randn(5, 32), torch.randint(0, 6, (5, 2)), torch.rand(5, 2)
    forward = transformers_experts.curry_experts_forward
    torch._dynamo.reset()
    found = torch.compile(forward, backend="aot_eager", fullgraph=True)(experts, x, ids, weights)
    assert_same({"out": found}, {"out": forward(experts, x, ids, weights)}, tolerance=1e-6)


def test_ids_of_another_rank_are_left_out():
    experts = qwen3().model.layers[0].mlp.experts
    nn.init.normal_(experts.gate_up_proj)
    nn.init.normal_(experts.down_proj)
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.tensor([[0, 6], [6, 6], [1, 2], [6, 3], [5, 4]])
    found = transformers_experts.curry_experts_forward(experts, x, ids, weights)
    masked = weights.masked_fill(ids >= 6, 0)
    wanted = transformers_experts.curry_experts_forward(experts, x, ids.clamp(max=5), masked)
    assert_same({"out": found}, {"out": wanted}, tolerance=1e-6)
    assert found[1].abs().max() == 0


def test_another_activation_is_refused():
    config = transformers.Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=16, num_experts=6, hidden_act="gelu"
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("curry")
    with pytest.raises(ValueError, match="another activation in Qwen3MoeExperts; allowed are silu"):
        model(input_ids=torch.randint(0, 64, (1, 4)))


def test_experts_without_gate_are_refused():
    experts = qwen3().model.layers[0].mlp.experts
    experts.has_gate = False
    with pytest.raises(ValueError, match="found no gate in Qwen3MoeExperts"):
        transformers_experts.curry_experts_forward(
            experts, torch.randn(1, 32), torch.zeros(1, 2, dtype=torch.int64), torch.rand(1, 2)
        )


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5.24'"):
        transformers_experts.register()
