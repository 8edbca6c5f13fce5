"""Router and expert bank against a per-token loop in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from curry_train.checkpoint import dcp
from curry_train.config import Config, ModelConfig
from curry_train.layers.moe import Experts, GateUpLinear
from curry_train.layers.routing import Routing, TopKRouter
from curry_train.loss import token_sums
from curry_train.models.protocol import build_model, init_weights, named_state, saved_views
from curry_train.parallel.mesh import Mesh
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


@pytest.mark.parametrize("scope", ["sequence", "micro_batch", "global"])
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


# gpt-oss: clamped activation, biases


GPT_OSS = replace(
    TINY, expert_bias=True, swiglu_limit=1.5, attention_sinks=True, num_experts_per_tok=3
)


def gpt_oss_experts(bank):
    """Return transformers' GptOssExperts with the weights of a bank."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.GptOssConfig(
        hidden_size=6, intermediate_size=7, num_local_experts=5, swiglu_limit=GPT_OSS.swiglu_limit
    )
    theirs = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(settings).double()
    first, second = bank.gate_up_proj, bank.down_proj
    with torch.no_grad():
        for part, offset in (("gate_proj", 0), ("up_proj", 1)):
            theirs.gate_up_proj[..., offset::2] = first.parts(first.weight)[part].transpose(1, 2)
            theirs.gate_up_proj_bias[:, offset::2] = first.parts(first.bias)[part]
        theirs.down_proj.copy_(second.weight.transpose(1, 2))
        theirs.down_proj_bias.copy_(second.bias)
    return theirs


def as_theirs(bank, grads):
    """Return gradients of a bank's parameters under the names and layouts of GptOssExperts."""
    found = {}
    for suffix, leaf in (("", "weight"), ("_bias", "bias")):
        parts = bank.gate_up_proj.parts(grads[f"gate_up_proj.{leaf}"])
        both = torch.stack((parts["gate_proj"], parts["up_proj"]), 2).flatten(1, 2)
        found[f"gate_up_proj{suffix}"] = both.mT if leaf == "weight" else both
        down = grads[f"down_proj.{leaf}"]
        found[f"down_proj{suffix}"] = down.mT if leaf == "weight" else down
    return found


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_clamped_bank_with_biases_equals_gpt_oss_in_every_gradient(interleaved):
    bank = Experts(GPT_OSS)
    bank.gate_up_proj.interleaved = interleaved
    filled(bank)
    theirs = gpt_oss_experts(bank)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(40)])
    x = (3 * torch.randn(40, 6)).requires_grad_()
    weights = torch.rand(40, 3, requires_grad=True)
    h = x @ bank.gate_up_proj.parts(bank.gate_up_proj.weight)["gate_proj"][0].T
    assert (h > 1.5).any() and (h < 1.5).any(), "the clamp must be active in this test"
    got, wanted = run_bank(bank, x, ids, weights), theirs(x, ids, weights)
    assert_same({"out": got}, {"out": wanted}, tolerance=1e-13)
    upstream = torch.randn_like(got)
    sides = []
    for value, module in ((got, bank), (wanted, theirs)):
        inputs = {"x": x, "weights": weights, **dict(module.named_parameters())}
        grads = torch.autograd.grad((value * upstream).sum(), inputs.values())
        sides.append(dict(zip(inputs, grads, strict=True)))
    ours = {name: sides[0][name] for name in ("x", "weights")} | as_theirs(bank, sides[0])
    assert_same(ours, sides[1], tolerance=1e-12)


@pytest.mark.parametrize("config", [TINY, GPT_OSS], ids=["plain", "gpt-oss"])
def test_a_dropped_choice_is_as_if_it_had_never_been(config):
    bank, x = filled(Experts(config)), torch.randn(9, 6)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(9)])
    weights = torch.rand(9, 3)
    dropped = torch.rand(9, 3) < 0.4
    dropped[4] = True
    got = run_bank(bank, x, ids.masked_fill(dropped, -1), weights)
    wanted = run_bank(bank, x, ids, weights.masked_fill(dropped, 0))
    assert_same({"out": got}, {"out": wanted}, tolerance=1e-14)
    assert (got[4] == 0).all(), "a token without an expert gets nothing, not even a bias"


# Memory layouts and the whole model


MODEL = Config(precision="fp64", model=replace(TINY, num_hidden_layers=2, num_experts=4))


def built(interleaved, config=MODEL):
    model = build_model(config, "cpu")
    for module in model.modules():
        if isinstance(module, GateUpLinear):
            module.interleaved = interleaved
    init_weights(model, config.seed)
    return model


@pytest.mark.parametrize("fields", [{}, {"expert_bias": True, "swiglu_limit": 1.5}])
def test_interleaved_rows_are_memory_only(fields, tmp_path):
    config = replace(MODEL, model=replace(MODEL.model, **fields))
    plain, interleaved = built(False, config), built(True, config)
    states = [dict(named_state(model)) for model in (interleaved, plain)]
    assert_same(*states, tolerance=0)
    weights = [
        model.model.layers["0"].mlp.experts.gate_up_proj.weight for model in (plain, interleaved)
    ]
    assert not torch.equal(*weights)
    ids = torch.randint(0, 257, (2, 12))
    batch, grads = {"input_ids": ids, "labels": ids}, []
    for model in (interleaved, plain):
        token_sums(model, batch).total.backward()
        grads.append({})
        for name, parameter in model.named_parameters():
            grads[-1] |= saved_views(model, name, parameter.grad)
    assert_same(*grads, tolerance=1e-13)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    meta = {
        "samples_consumed": 0, "data_hash": "", "config_hash": "", "mesh": {},
        "model": {"num_experts": 4},
    }  # fmt: skip
    path = dcp.save(
        tmp_path, step=1, tensors=dict(named_state(plain)), rank_tensors={}, meta=meta, files={},
        mesh=Mesh.single(), keep=0,
    )  # fmt: skip
    dcp.load(path, dict(named_state(interleaved)))
    assert_same(dict(named_state(interleaved)), dict(named_state(plain)), tolerance=0)


def test_padding_visits_no_expert_and_leaves_the_auxiliary_losses():
    config = replace(MODEL, model=replace(MODEL.model, router_z_loss_coef=0.1))
    model, ids = build_model(config, "cpu"), torch.randint(0, 257, (2, 12))
    doc_ids = torch.zeros(2, 12, dtype=torch.int64)
    whole = model(ids[:, :7], None, doc_ids[:, :7])
    doc_ids[:, 7:] = -1
    padded = model(ids, None, doc_ids)
    assert padded.tokens_per_expert.sum(1).tolist() == [2 * 7 * 2] * 2
    assert torch.equal(padded.tokens_per_expert, whole.tokens_per_expert)
    found = {"aux": padded.aux_loss, "z": padded.z_loss, "logits": padded.logits[:, :7, :257]}
    wanted = {"aux": whole.aux_loss, "z": whole.z_loss, "logits": whole.logits[..., :257]}
    assert_same(found, wanted, tolerance=1e-13)
