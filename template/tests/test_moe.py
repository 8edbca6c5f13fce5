"""Router and expert bank against a per-token loop in float64."""

import pytest
import torch
import torch.nn.functional as F

from curry_train.config import ModelConfig
from curry_train.layers.moe import Experts
from curry_train.layers.routing import Routing, TopKRouter
from curry_train.testing import assert_same

TINY = ModelConfig(hidden_size=6, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=7)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def filled(module):
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def one_token_at_a_time(experts, x_TD, expert_ids, weights):
    out, parts = [], experts.gate_up_proj.parts(experts.gate_up_proj.weight)
    for token, ids, scale in zip(x_TD, expert_ids, weights, strict=True):
        total = 0
        for expert, weight in zip(ids.tolist(), scale, strict=True):
            gate = parts["gate_proj"][expert] @ token
            up = parts["up_proj"][expert] @ token
            total = total + weight * (experts.down_proj.weight[expert] @ (F.silu(gate) * up))
        out.append(total)
    return torch.stack(out)


def run_bank(experts, x_TD, expert_ids, weights):
    zero = torch.zeros(1)
    return experts(x_TD, Routing(expert_ids, weights, zero, zero, zero))


@pytest.mark.parametrize("case", ["random", "all tokens to one expert", "an empty expert"])
def test_the_bank_equals_a_loop_over_tokens_with_gradients(case):
    torch.manual_seed(0)
    experts = filled(Experts(TINY))
    x = torch.randn(11, 6, requires_grad=True)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(11)])
    if case == "all tokens to one expert":
        ids = torch.tensor([[3, 0]]).expand(11, 2)
    if case == "an empty expert":
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(11)])
    weights = torch.rand(11, 2, requires_grad=True)
    got, wanted = run_bank(experts, x, ids, weights), one_token_at_a_time(experts, x, ids, weights)
    inputs = (x, weights, *experts.parameters())
    names = ["x", "weights", *(name for name, _ in experts.named_parameters())]
    upstream = torch.randn_like(got)
    found = torch.autograd.grad(got, inputs, upstream)
    reference = torch.autograd.grad(wanted, inputs, upstream)
    assert_same({"out": got}, {"out": wanted}, tolerance=1e-13)

    def by_name(grads):
        return dict(zip(names, grads, strict=True))

    assert_same(by_name(found), by_name(reference), tolerance=1e-13)
    if case == "an empty expert":
        assert found[names.index("gate_up_proj.weight")][4].abs().max() == 0


def test_router_weights_are_the_top_softmax_values_divided_by_their_sum():
    router, x = filled(TopKRouter(TINY)), torch.randn(2, 8, 6)
    routing = router(x)
    probs = torch.softmax(x.flatten(0, 1) @ router.weight.T, -1)
    top, ids = probs.topk(2)
    assert torch.equal(routing.expert_ids, ids)
    assert_same({"w": routing.weights}, {"w": top / top.sum(-1, keepdim=True)}, tolerance=1e-14)


def test_ties_go_to_the_lowest_expert():
    router = TopKRouter(TINY)
    torch.nn.init.zeros_(router.weight)
    routing = router(torch.randn(1, 50, 6))
    assert torch.equal(routing.expert_ids, torch.tensor([[0, 1]]).expand(50, 2))


def test_balance_loss_is_one_when_balanced_and_the_expert_count_when_collapsed():
    config = ModelConfig(hidden_size=4, num_experts=4, num_experts_per_tok=1)
    router = TopKRouter(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    balanced = 60 * torch.eye(4).repeat(2, 1)[None]
    assert router(balanced).aux_loss.item() == pytest.approx(1.0, rel=1e-12)
    collapsed = 60 * torch.eye(4)[:1].repeat(8, 1)[None]
    assert router(collapsed).aux_loss.item() == pytest.approx(4.0, rel=1e-12)


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_balance_loss_equals_its_formula_in_each_scope(scope):
    config = ModelConfig(
        hidden_size=6, num_experts=5, num_experts_per_tok=2, router_aux_loss_scope=scope
    )
    router, x = filled(TopKRouter(config)), torch.randn(3, 7, 6)
    routing = router(x)
    probs = torch.softmax(x @ router.weight.T, -1)
    ids = routing.expert_ids.view(3, 7, 2)

    def formula(sequences):
        counts = torch.bincount(ids[sequences].flatten(), minlength=5).double()
        return 5 * (counts / counts.sum() * probs[sequences].flatten(0, 1).mean(0)).sum()

    groups = [[0], [1], [2]] if scope == "sequence" else [[0, 1, 2]] * 3
    wanted = torch.stack([formula(group) for group in groups])
    assert_same({"aux": routing.aux_loss}, {"aux": wanted}, tolerance=1e-13)
    z = torch.logsumexp(x @ router.weight.T, -1).square().mean(-1)
    assert_same({"z": routing.z_loss}, {"z": z}, tolerance=1e-13)


def test_the_bank_repeats_bit_for_bit():
    torch.manual_seed(0)
    experts = filled(Experts(TINY))
    x, ids = torch.randn(64, 6), torch.randint(0, 5, (64, 2))
    weights = torch.rand(64, 2)
    first = run_bank(experts, x, ids, weights)
    assert all(torch.equal(first, run_bank(experts, x, ids, weights)) for _ in range(3))


def test_ties_among_many_experts_keep_the_order_of_their_ids():
    config = ModelConfig(hidden_size=6, num_experts=128, num_experts_per_tok=8)
    router = TopKRouter(config)
    router.weight.data.zero_()
    routing = router(torch.ones(4, 16, 6))
    assert (routing.expert_ids == torch.arange(8)).all()


def test_half_precision_inputs_are_routed_in_float32():
    router = filled(TopKRouter(TINY)).float()
    x = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    half, full = router(x.bfloat16()), router(x.bfloat16().float())
    assert torch.equal(half.expert_ids, full.expert_ids)
    assert half.weights.dtype == torch.bfloat16
    assert torch.equal(half.z_loss, full.z_loss) and torch.equal(half.aux_loss, full.aux_loss)
