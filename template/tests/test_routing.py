"""The router against a loop over tokens in float64, with gradients, and against transformers'."""

import math
import shutil
import warnings
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from curry_train.config import Config, ModelConfig
from curry_train.kernels.reference_routing import largest
from curry_train.layers import routing
from curry_train.layers.routing import TopKRouter, move_correction_biases
from curry_train.rules import problems
from curry_train.testing import assert_same

E, D, B, S = 8, 6, 3, 10
COMPILERS = ("g++", "clang++", "c++")
PLAIN = ModelConfig(
    hidden_size=D, num_experts=E, num_experts_per_tok=3, router_z_loss_coef=0.1,
    drop_policy="position",
)  # fmt: skip
SIGMOID = replace(PLAIN, scoring_func="sigmoid", routed_scaling_factor=2.5)
DEEPSEEK_V3 = replace(SIGMOID, correction_bias=True, n_group=4, topk_group=2)
CASES = {
    "softmax": PLAIN,
    "softmax, not normalised, scaled": replace(
        PLAIN, norm_topk_prob=False, routed_scaling_factor=1.5
    ),
    "gpt-oss": replace(PLAIN, router_bias=True),
    "sigmoid": SIGMOID,
    "sigmoid, not normalised": replace(SIGMOID, norm_topk_prob=False),
    "softmax with correction bias": replace(PLAIN, correction_bias=True),
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V2": replace(PLAIN, n_group=2, topk_group=1, group_score="max", norm_topk_prob=False),
    "micro_batch": replace(DEEPSEEK_V3, router_aux_loss_scope="micro_batch"),
    "one of all": replace(PLAIN, num_experts_per_tok=1),
    "all of all": replace(PLAIN, num_experts_per_tok=E),
    "capacity by position": replace(PLAIN, capacity_factor=1.0),
    "capacity by weight": replace(PLAIN, capacity_factor=0.8, drop_policy="weight"),
    "capacity of one": replace(DEEPSEEK_V3, capacity_factor=0.01),
    "expert choice": replace(PLAIN, routing="expert_choice", norm_topk_prob=False),
    "expert choice, normalised sigmoid": replace(SIGMOID, routing="expert_choice"),
    "round robin": replace(PLAIN, routing="round_robin"),
}
PADDING = torch.tensor([[True] * S, [True] * 4 + [False] * 6, [False] * S])


@pytest.fixture(autouse=True)
def float64(recwarn):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def filled(config, seed=1):
    router, generator = TopKRouter(config), torch.Generator().manual_seed(seed)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.7, generator=generator)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.copy_(0.2 * torch.randn(E, generator=generator))
    return router


def best(values, count, among):
    """Return the ids of the largest values, ties to the lowest id."""
    return sorted(among, key=lambda e: (-float(values[e]), e))[:count]


def token_choice(config, logits, scores, bias):
    """Return the experts of one token, by the definition of its model."""
    if bias is None and config.n_group == 1:
        return best(logits, config.num_experts_per_tok, range(E))
    biased = scores if bias is None else scores + bias
    size = E // config.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
    taken = 2 if config.group_score == "top2" else 1
    worth = [
        sum(sorted((float(biased[e]) for e in group), reverse=True)[:taken]) for group in groups
    ]
    chosen = best(worth, config.topk_group, range(config.n_group))
    return best(biased, config.num_experts_per_tok, [e for g in chosen for e in groups[g]])


def limit_of(config, tokens, factor=1):
    share = Fraction(str(factor)) * config.num_experts_per_tok * tokens / E
    return max(math.ceil(share), 1)


def dense_weights(config, router, x, real):
    """Return weights [B, S, E] (0 where not visited), losses and counts, sequence by sequence."""
    weights, before, sequences = torch.zeros(B, S, E), torch.zeros(B, E), []
    for b in range(B):
        tokens = [s for s in range(S) if real[b][s]]
        logits = {
            s: router.weight @ x[b, s] + (0 if router.bias is None else router.bias) for s in tokens
        }
        raw = {
            s: z.sigmoid() if config.scoring_func == "sigmoid" else z.softmax(0)
            for s, z in logits.items()
        }
        places = {}
        if config.routing == "expert_choice":
            limit = limit_of(config, len(tokens))
            for e in range(E):
                takers = sorted(tokens, key=lambda s: (-float(raw[s][e]), s))[:limit]
                for s in takers:
                    places.setdefault(s, []).append(e)
        else:
            for s in tokens:
                if config.routing == "round_robin":
                    k = config.num_experts_per_tok
                    places[s] = [(s * k + j) % E for j in range(k)]
                else:
                    bias = router.e_score_correction_bias
                    places[s] = token_choice(config, logits[s], raw[s], bias)
        queues = {e: [] for e in range(E)}
        for s, experts in places.items():
            total = sum(raw[s][e] for e in experts) if config.norm_topk_prob else 1
            for e in experts:
                before[b, e] += 1
                queues[e].append((s, raw[s][e] / total * config.routed_scaling_factor))
        for e, queue in queues.items():
            if config.capacity_factor:
                if config.drop_policy == "weight":
                    queue = sorted(queue, key=lambda place: -float(place[1]))
                queue = queue[: limit_of(config, len(tokens), config.capacity_factor)]
            for s, weight in queue:
                weights = weights.index_put(tuple(torch.tensor(i) for i in (b, s, e)), weight)
        shares = [score / score.sum() for score in raw.values()]
        sequences.append((logits.values(), shares))
    return weights, *losses(config, before, sequences), before.sum(0).long()


def losses(config, before, sequences):
    aux, z = [], []
    for b, (logits, shares) in enumerate(sequences):
        found, counts = shares, before[b]
        if config.router_aux_loss_scope == "micro_batch":
            found, counts = [s for _, every in sequences for s in every], before.sum(0)
        mean = sum(found) / max(len(found), 1)
        aux.append((E * counts / max(counts.sum(), 1) * mean).sum())
        z.append(
            sum((v.exp().sum().log() ** 2 for v in logits), torch.zeros(())) / max(len(shares), 1)
        )
    return torch.stack(aux), torch.stack(z)


def spread(found):
    """Return the weights of a Routing as [B, S, E], checking that no expert comes twice."""
    ids, weights = found.expert_ids, found.weights
    assert ids.dtype == torch.int64 and ids.shape == weights.shape
    assert ((ids >= -1) & (ids < E)).all() and (weights[ids < 0] == 0).all()
    visits = torch.zeros(len(ids), E + 1).scatter_add(
        1, ids.clamp(min=-1) % (E + 1), torch.ones_like(weights)
    )
    assert (visits[:, :E] <= 1).all()
    dense = torch.zeros(len(ids), E + 1).scatter_add(1, ids % (E + 1), weights)
    return dense[:, :E].view(B, S, E)


def compare(config, router, pad_mask, tolerance=1e-13):
    x = torch.randn(B, S, D, generator=torch.Generator().manual_seed(5), requires_grad=True)
    real = torch.ones(B, S, dtype=torch.bool) if pad_mask is None else pad_mask
    found = router(x, pad_mask)
    weights, aux, z, counts = dense_weights(config, router, x, real.tolist())
    parts = {"weights": spread(found), "aux": found.aux_loss, "z": found.z_loss}
    wanted = {"weights": weights, "aux": aux, "z": z}
    assert torch.equal(found.tokens_per_expert, counts)
    assert_same(parts, wanted, tolerance=tolerance)
    inputs = {"x": x, **dict(router.named_parameters())}
    upstream = {name: torch.randn_like(value) for name, value in wanted.items()}

    def grads(values):
        total = sum((values[name] * upstream[name]).sum() for name in values)
        return dict(zip(inputs, torch.autograd.grad(total, inputs.values()), strict=True))

    assert_same(grads(parts), grads(wanted), tolerance=tolerance)
    return found


@pytest.mark.parametrize("pad_mask", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_the_router_equals_a_loop_over_tokens_with_gradients(config, pad_mask):
    found = compare(config, filled(config), pad_mask)
    if config.capacity_factor:
        real = B * S if pad_mask is None else int(pad_mask.sum())
        kept = int((found.expert_ids >= 0).sum())
        assert 0 < kept < real * config.num_experts_per_tok, "some must have been dropped"


def weight_of_the_biased_score(monkeypatch):
    def choose(self, logits, scores, pad_mask, places=None):
        bias = self.e_score_correction_bias
        return real(self, logits, scores if bias is None else scores + bias, pad_mask, places)

    real = TopKRouter.choose
    monkeypatch.setattr(TopKRouter, "choose", choose)


def best_instead_of_top2(monkeypatch):
    def best_experts(*arguments):
        return real(*arguments[:-1], "max")

    real = routing.best_experts
    monkeypatch.setattr(routing, "best_experts", best_experts)


def capacity_over_the_batch(monkeypatch):
    def within(ids, weights, limit, policy):
        flat = (t.flatten(0, 1)[None] for t in (ids, weights))
        return real(*flat, limit.sum()[None], policy).view_as(ids)

    real = routing.within_capacity
    monkeypatch.setattr(routing, "within_capacity", within)


def capacity_from_the_last(monkeypatch):
    def within(ids, weights, limit, policy):
        return real(ids.flip(1), weights.flip(1), limit, policy).flip(1)

    real = routing.within_capacity
    monkeypatch.setattr(routing, "within_capacity", within)


def rounded_down(monkeypatch):
    def fair_share(self, of, pad_mask):
        exact = self.capacity_factor * self.experts_per_token * of.shape[1] / E
        return torch.full((len(of),), max(int(exact), 1))

    monkeypatch.setattr(TopKRouter, "fair_share", fair_share)


def counts_after_drops(monkeypatch):
    def forward(self, x, pad_mask=None, places=None):
        found = whole(self, x, pad_mask, places)
        ids = found.expert_ids[found.expert_ids >= 0]
        return replace(found, tokens_per_expert=ids.bincount(minlength=E))

    whole = TopKRouter.forward
    monkeypatch.setattr(TopKRouter, "forward", forward)


def padding_counted(monkeypatch):
    def losses(self, probs, lse2, counts, pad_mask):
        return real(self, probs, lse2, counts, None)

    real = TopKRouter.losses
    monkeypatch.setattr(TopKRouter, "losses", losses)


def ids_not_masked(monkeypatch):
    def choose(self, logits, scores, pad_mask, places=None):
        return real(self, logits, scores, None, places)

    real = TopKRouter.choose
    monkeypatch.setattr(TopKRouter, "choose", choose)


def scores_not_made_shares(monkeypatch):
    def balance(self, probs, lse2, counts, pad_mask):
        return real(self, 2 * probs, lse2, counts, pad_mask)

    real = TopKRouter.losses
    monkeypatch.setattr(TopKRouter, "losses", balance)


MUTANTS = [
    (weight_of_the_biased_score, "DeepSeek-V3", None),
    (best_instead_of_top2, "DeepSeek-V3", None),
    (capacity_over_the_batch, "capacity by position", None),
    (capacity_from_the_last, "capacity by position", None),
    (rounded_down, "capacity by position", None),
    (counts_after_drops, "capacity by weight", None),
    (padding_counted, "softmax", PADDING),
    (ids_not_masked, "softmax", PADDING),
    (ids_not_masked, "expert choice", PADDING),
    (scores_not_made_shares, "sigmoid", None),
]


@pytest.mark.parametrize(
    "mutant, case, pad_mask", MUTANTS, ids=[f"{m.__name__}-{c}" for m, c, _ in MUTANTS]
)
def test_a_wrong_router_is_seen(mutant, case, pad_mask, monkeypatch):
    router = filled(CASES[case])
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(CASES[case], router, pad_mask)


def with_trained_values(module):
    generator = torch.Generator().manual_seed(3)
    state = {
        n: 0.7 * torch.randn(t.shape, generator=generator) for n, t in module.state_dict().items()
    }
    module.load_state_dict(state)
    return state


HUGGING_FACE = {
    "DeepseekV3": ("deepseek_v3", "DeepseekV3TopkRouter", DEEPSEEK_V3),
    "DeepseekV2": (
        "deepseek_v2", "DeepseekV2TopkRouter",
        replace(CASES["DeepSeek-V2"], routed_scaling_factor=16.0),
    ),
    "GptOss": ("gpt_oss", "GptOssTopKRouter", CASES["gpt-oss"]),
    "Qwen3Moe": ("qwen3_moe", "Qwen3MoeTopKRouter", PLAIN),
    "Qwen3Moe, not normalised": (
        "qwen3_moe", "Qwen3MoeTopKRouter", replace(PLAIN, norm_topk_prob=False)
    ),
    "Mixtral": ("mixtral", "MixtralTopKRouter", replace(PLAIN, num_experts_per_tok=2)),
}  # fmt: skip


@pytest.mark.parametrize("module, name, config", HUGGING_FACE.values(), ids=HUGGING_FACE)
def test_choice_weights_and_gradients_equal_those_of_transformers(module, name, config):
    transformers = pytest.importorskip("transformers")
    models = getattr(transformers.models, module)
    found = getattr(models, f"modeling_{module}")
    settings = getattr(models, f"configuration_{module}")
    kind = next(
        v for k, v in vars(settings).items() if k.lower() == module.replace("_", "") + "config"
    )
    fields = {"hidden_size": D, "num_experts_per_tok": config.num_experts_per_tok}
    fields["num_local_experts" if module in ("gpt_oss", "mixtral") else "num_experts"] = E
    fields |= {
        "norm_topk_prob": config.norm_topk_prob,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        "routed_scaling_factor": config.routed_scaling_factor,
    }
    if module == "deepseek_v3":
        fields["n_routed_experts"] = E
    if module == "deepseek_v2":
        fields |= {
            "n_routed_experts": E,
            "num_attention_heads": 1,
            "topk_method": "group_limited_greedy",
        }
    torch.set_default_dtype(torch.float32)  # theirs computes in it whatever it is given
    theirs = getattr(found, name)(kind(**fields))
    ours = TopKRouter(config)
    ours.load_state_dict(with_trained_values(theirs), strict=True)
    x = torch.randn(4, 50, D, requires_grad=True)
    routed = ours(x)
    _, weights, ids = theirs(x.flatten(0, 1))
    ids, order = ids.view(200, -1).sort(1)
    mine, same = routed.expert_ids.sort(1)
    assert torch.equal(mine, ids)
    wanted, got = weights.view(200, -1).gather(1, order), routed.weights.gather(1, same)
    assert_same({"weights": got}, {"weights": wanted}, tolerance=1e-6)
    upstream = torch.randn_like(wanted)
    for side, value, router in (("got", got, ours), ("wanted", wanted, theirs)):
        parameters = [p for p in router.parameters() if p.requires_grad]
        grads = torch.autograd.grad((value * upstream).sum(), [x, *parameters])
        if side == "got":
            first = grads
    assert len(first) == len(grads)
    named = [{str(i): g for i, g in enumerate(side)} for side in (first, grads)]
    assert_same(*named, tolerance=2e-5)


TOP_K = [case for case, config in CASES.items() if config.routing == "top_k"]


@pytest.mark.parametrize("pad_mask", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("case", TOP_K)
def test_the_operator_that_a_gpu_uses_chooses_the_same_with_gradients(case, pad_mask):
    router, x = filled(CASES[case]), torch.randn(B, S, D, requires_grad=True)

    logits = router.logits(x)
    scores = logits.sigmoid() if router.scoring == "sigmoid" else logits.softmax(-1)
    ids, weights = router.choose_by_kernel(logits, pad_mask)
    wanted_ids, wanted = router.choose(logits, scores, pad_mask)
    assert ids.dtype == torch.int64 and torch.equal(ids, wanted_ids)
    assert_same({"weights": weights}, {"weights": wanted}, tolerance=1e-14)
    inputs, upstream = {"x": x, **dict(router.named_parameters())}, torch.randn_like(wanted)
    # The z-loss gives the comparison a scale where normalised weights are constant (K = 1).
    totals = [(value * upstream).sum() + logits.logsumexp(-1).sum() for value in (weights, wanted)]
    sides = [torch.autograd.grad(t, inputs.values(), retain_graph=True) for t in totals]
    assert_same(*(dict(zip(inputs, side, strict=True)) for side in sides), tolerance=1e-13)


def test_ties_go_to_the_lowest_id_in_choice_groups_and_capacity():
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert largest(values, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    closed = torch.tensor([False, True, False, False, False])
    assert largest(values, 3, closed).tolist() == [[2, 4, 3], [0, 2, 3]]
    assert largest(values - torch.inf, 3, closed).tolist() == [[0, 2, 3], [0, 2, 3]]
    for config in CASES.values():
        router = TopKRouter(replace(config, correction_bias=False))
        for parameter in router.parameters():
            torch.nn.init.zeros_(parameter)
        ids = router(torch.randn(1, S, D)).expert_ids
        if config.routing == "top_k" and not config.capacity_factor:
            assert (ids == torch.arange(config.num_experts_per_tok)).all()
    full = TopKRouter(replace(PLAIN, capacity_factor=1.0, drop_policy="weight"))
    torch.nn.init.zeros_(full.weight)
    kept = full(torch.randn(1, S, D)).expert_ids >= 0
    assert kept[:4].all() and not kept[4:].any(), "equal weights: the earliest tokens stay"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_that_differ_by_rounding_are_a_tie_that_the_earliest_wins(dtype):
    """Rounding depends on the layout of ranks, so it must not decide who finds a place."""
    exact = torch.tensor([0.3, 0.3, 0.3, 0.5, 0.3001], dtype=dtype)
    noise = torch.tensor([0, 3, 1, 0, 0]) * torch.finfo(dtype).eps
    for scores in (exact, exact + noise, exact - noise):
        of_expert = scores.to(dtype).view(1, 5, 1)
        limit = torch.tensor([3])
        chosen = routing.chosen_tokens(of_expert, limit, None)[0, :, 0]
        ids = torch.zeros(1, 5, 1, dtype=torch.int64)
        kept = routing.within_capacity(ids, of_expert, limit, "weight")[0, :, 0]
        assert chosen.tolist() == kept.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("factor, tokens, limit", [(1.1, 20, 11), (0.7, 20, 7), (1.25, 14, 9)])
def test_capacity_is_rounded_up_exactly(factor, tokens, limit):
    config = replace(PLAIN, num_experts_per_tok=E // 2, capacity_factor=factor)
    share = TopKRouter(config).fair_share(torch.zeros(2, tokens, 1), None)
    assert share.tolist() == [limit, limit], f"{factor * tokens / 2!r} in floats"


@pytest.mark.parametrize("factor", [1e-9, E / 2, 1e30])
def test_any_capacity_has_a_place_and_drops_nothing_once_it_holds_all_tokens(factor):
    router = filled(replace(PLAIN, num_experts_per_tok=2, capacity_factor=factor))
    ids = router(torch.randn(B, S, D)).expert_ids.view(B, -1)
    if factor < 1:
        assert all(row[row >= 0].bincount(minlength=E).amax() == 1 for row in ids)
    else:
        assert (ids >= 0).all()


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_nan_reaches_weights_and_losses_and_ids_stay_valid(config):
    router, x = filled(config), torch.randn(B, S, D)
    x[1, 2, 3] = torch.nan
    found = router(x)
    assert ((found.expert_ids >= -1) & (found.expert_ids < E)).all()
    assert found.z_loss.isnan().tolist() == [False, True, False]
    token = found.weights.view(B, S, -1)[1, 2]
    assert token.isnan().any() or (found.expert_ids.view(B, S, -1)[1, 2] < 0).all()
    padded = router(x, x.isfinite().all(-1))
    assert padded.z_loss.isfinite().all() and padded.weights.isfinite().all()


def test_extreme_logits_stay_finite():
    for config in (PLAIN, SIGMOID, DEEPSEEK_V3):
        router = filled(config).float()
        x = (1e4 * torch.randn(2, 50, D)).float().requires_grad_()
        found = router(x)
        assert found.weights.isfinite().all() and found.aux_loss.isfinite().all()
        (found.weights.sum() + found.aux_loss.sum() + found.z_loss.sum()).backward()
        assert x.grad.isfinite().all() and router.weight.grad.isfinite().all()


@pytest.mark.parametrize("case", ["DeepSeek-V3", "capacity by weight", "expert choice"])
def test_the_router_is_one_graph_for_the_compiler(case):
    router, x = filled(CASES[case]), torch.randn(B, S, D)
    traced = torch.compile(router, fullgraph=True, backend="eager")
    for pad_mask in (None, PADDING):
        found, wanted = traced(x, pad_mask), router(x, pad_mask)
        assert torch.equal(found.expert_ids, wanted.expert_ids)
        assert torch.equal(found.weights, wanted.weights)
        assert torch.equal(found.aux_loss, wanted.aux_loss)


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="needs a C++ compiler")
@pytest.mark.parametrize("case", ["capacity by position", "capacity by weight", "expert choice"])
def test_compiled_code_drops_what_plain_code_drops(case):
    router = filled(replace(CASES[case], num_experts_per_tok=2)).float()

    def ids_and_weights(x):  # with more outputs, inductor orders its reads otherwise
        routing = router(x)
        return routing.expert_ids, routing.weights

    x = torch.randn(2, 64, D, dtype=torch.float32, requires_grad=True)
    (ids, weights), (wanted_ids, wanted) = torch.compile(ids_and_weights)(x), ids_and_weights(x)
    assert (wanted_ids < 0).any() and torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted)


def test_no_tokens_are_routed_to_nobody():
    for config in CASES.values():
        found = filled(config)(torch.zeros(2, 0, D))
        assert found.expert_ids.shape[0] == 0 and found.tokens_per_expert.sum() == 0
        assert found.aux_loss.tolist() == found.z_loss.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("x", "pad_mask", "said"),
    [
        (torch.zeros(S, D), None, rf"x: found torch.float64 \[{S}, {D}\]; allowed is a float"),
        (torch.zeros(B, S, 3), None, rf"x: found .* \[{B}, {S}, 3\]; allowed is .*\[B, S, {D}\]"),
        (torch.zeros(B, S, D).long(), None, "x: found torch.int64"),
        (
            torch.zeros(B, S, D),
            PADDING.long(),
            "pad_mask: found torch.int64 .* allowed is torch.b",
        ),
        (torch.zeros(B, S, D), PADDING[:1], rf"pad_mask: found torch.bool \[1, {S}\]; allowed is"),
    ],
)
def test_what_does_not_fit_is_named(x, pad_mask, said):
    with pytest.raises(ValueError, match=said):
        filled(PLAIN)(x if x.dtype == torch.int64 else x.double(), pad_mask)


@pytest.mark.parametrize("case", ["softmax", "gpt-oss", "DeepSeek-V3", "expert choice"])
def test_autocast_leaves_the_router_in_float32(case):
    router, x = filled(CASES[case]).float(), torch.randn(B, S, D, dtype=torch.float32)
    wanted = router(x, PADDING)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x, PADDING)
    for name in ("expert_ids", "weights", "aux_loss", "z_loss", "tokens_per_expert"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        assert getattr(found, name).dtype == getattr(wanted, name).dtype, name


def test_scores_that_all_underflow_leave_the_losses_finite():
    router = filled(replace(SIGMOID, router_bias=True)).float()
    torch.nn.init.constant_(router.bias, -1e4)
    x = torch.randn(B, S, D, dtype=torch.float32).requires_grad_()
    found = router(x)
    assert found.aux_loss.isfinite().all() and found.z_loss.isfinite().all()
    (found.weights.sum() + found.aux_loss.sum()).backward()
    assert x.grad.isfinite().all()


# The correction bias


def test_the_bias_moves_by_the_sign_of_what_an_expert_lacks_and_keeps_its_mean():
    config = replace(DEEPSEEK_V3, correction_bias_update_rate=0.25)
    router = TopKRouter(config)
    router.e_score_correction_bias.zero_()
    counts = torch.tensor([9, 1, 5, 5, 5, 5, 7, 3])
    router.move_correction_bias(counts)
    moved = 0.25 * torch.tensor([-1.0, 1, 0, 0, 0, 0, -1, 1])
    assert torch.equal(router.e_score_correction_bias, moved)
    router.move_correction_bias(torch.tensor([100, 0, 0, 0, 0, 0, 0, 0]))
    moved = moved + 0.25 * torch.tensor([-1.0, 1, 1, 1, 1, 1, 1, 1])
    wanted = moved - moved.mean()
    assert_same({"bias": router.e_score_correction_bias}, {"bias": wanted}, tolerance=1e-15)
    assert abs(float(router.e_score_correction_bias.mean())) < 1e-16


def test_each_router_moves_by_its_own_counts():
    def chunk(config, count):
        routers = {str(n): TopKRouter(config) for n in range(count)}
        model = torch.nn.Module()
        model.config, model.layers = config, torch.nn.ModuleDict(routers)
        return model

    model = chunk(DEEPSEEK_V3, 2)
    for router in model.layers.values():
        router.e_score_correction_bias.zero_()
    counts = torch.zeros(2, E, dtype=torch.int64)
    counts[0, 0], counts[1, 5] = 8, 8
    move_correction_biases([model], counts)
    biases = [r.e_score_correction_bias for r in model.layers.values()]
    assert [int(bias.argmin()) for bias in biases] == [0, 5]
    move_correction_biases([chunk(PLAIN, 1)], counts[:1])


def test_the_bias_alone_brings_a_collapsed_router_to_balance():
    config = replace(DEEPSEEK_V3, n_group=1, topk_group=1, correction_bias_update_rate=0.002)
    router = filled(config)
    router.e_score_correction_bias.zero_()
    x = torch.randn(4, 64, D) + 2.0

    def unevenness():
        counts = router(x).tokens_per_expert
        return float(counts.max() / counts.double().mean()), counts

    before, _ = unevenness()
    for _ in range(500):
        router.move_correction_bias(unevenness()[1])
    assert before > 2.0 and unevenness()[0] < 1.15


def test_a_cast_of_the_model_leaves_the_bias_wide():
    router = filled(DEEPSEEK_V3).float()
    bias = router.e_score_correction_bias.clone()
    router = torch.nn.Sequential(router).bfloat16()[0]
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.e_score_correction_bias, bias) and bias.dtype == torch.float32
    assert "e_score_correction_bias" in router.state_dict()
    assert router.to("meta").e_score_correction_bias.device.type == "meta"
    assert router.double().e_score_correction_bias.dtype == torch.float64
    torch.set_default_dtype(torch.bfloat16)
    assert TopKRouter(DEEPSEEK_V3).e_score_correction_bias.dtype == torch.float32


def test_the_bias_keeps_its_dtype_beside_bf16():
    torch.set_default_dtype(torch.float32)
    router = TopKRouter(DEEPSEEK_V3)
    torch.nn.init.zeros_(router.weight)
    router.e_score_correction_bias.zero_()
    assert router.e_score_correction_bias.dtype == torch.float32
    assert "e_score_correction_bias" in router.state_dict()
    router.e_score_correction_bias[7] = 1e-4  # bf16 would not see it beside a score of 0.5
    found = router(torch.randn(1, 4, D, dtype=torch.bfloat16))
    assert (found.expert_ids[:, 0] == 7).all() and found.weights.dtype == torch.bfloat16


# What looks at later tokens says so


@pytest.mark.parametrize("case", ["expert choice", "capacity by weight"])
def test_routing_that_sees_later_tokens_warns_once(case):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            TopKRouter(CASES[case])
    (warning,) = caught
    assert "later ones included" in str(warning.message) and "set model." in str(warning.message)


def test_routing_that_sees_no_later_token_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("softmax", "DeepSeek-V3", "capacity by position", "round robin"):
            TopKRouter(CASES[name])


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_later_token_moves_an_earlier_one_only_where_the_warning_says_so(config):
    config = replace(config, router_aux_loss_scope="sequence")
    router, x = filled(config), torch.randn(1, 64, D)
    before = router(x)
    x[:, 32:] = torch.randn(1, 32, D)
    after = router(x)
    same = torch.equal(before.expert_ids[:32], after.expert_ids[:32])
    same = same and torch.equal(before.weights[:32], after.weights[:32])
    assert same is (routing.looks_ahead(config) is None)


# Rules


MOE = Config(model=ModelConfig(num_experts=8, num_experts_per_tok=4))


@pytest.mark.parametrize(
    "fields, key, said",
    [
        (
            {"num_experts_per_tok": 9},
            "num_experts_per_tok",
            "than model.num_experts=8; set at most 8",
        ),
        ({"n_group": 3}, "n_group", "set it to one of 1, 2, 4, 8"),
        (
            {"n_group": 4, "topk_group": 5},
            "topk_group",
            "there are only model.n_group=4; set at most 4",
        ),
        ({"topk_group": 2}, "topk_group", "there are only model.n_group=1; set at most 1"),
        (
            {"n_group": 4, "topk_group": 1},
            "topk_group",
            "holds 2 experts (1 x 2), fewer than model.num_experts_per_tok=4; set",
        ),
        (
            {"n_group": 8, "topk_group": 4},
            "group_score",
            "set model.group_score=max or fewer groups",
        ),
        (
            {"n_group": 2, "routing": "round_robin"},
            "n_group",
            "model.routing=round_robin knows no groups",
        ),
        (
            {"n_group": 2, "routing": "expert_choice"},
            "n_group",
            "model.routing=expert_choice knows no groups",
        ),
        (
            {"correction_bias": True, "routing": "expert_choice"},
            "correction_bias",
            "set model.correction_bias=false or model.routing=top_k",
        ),
        (
            {"correction_bias": True, "routing": "round_robin"},
            "correction_bias",
            "balances the experts by itself",
        ),
        (
            {"capacity_factor": 1.0, "routing": "expert_choice"},
            "capacity_factor",
            "set model.capacity_factor=0 and choose",
        ),
        (
            {"router_aux_loss_scope": "batch"},
            "router_aux_loss_scope",
            "allowed are sequence, micro_batch",
        ),
        ({"capacity_factor": -1.0}, "capacity_factor", "of at least 0"),
        ({"scoring_func": "tanh"}, "scoring_func", "must be softmax or sigmoid"),
        ({"routing": "hash"}, "routing", "must be top_k, expert_choice or round_robin"),
    ],
)
def test_routing_that_cannot_work_is_one_sentence_that_says_what_can(fields, key, said):
    (problem,) = problems(replace(MOE, model=replace(MOE.model, **fields)))
    assert problem.startswith(f"model.{key}=") and said in problem


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts_per_tok": 8},
        {"n_group": 4, "topk_group": 2, "correction_bias": True, "scoring_func": "sigmoid"},
        {"n_group": 8, "topk_group": 4, "group_score": "max"},
        {"capacity_factor": 0.5, "drop_policy": "position", "correction_bias": True},
        {"capacity_factor": 1.25, "routing": "round_robin"},
        {"num_experts": 0, "n_group": 3, "num_experts_per_tok": 2},
    ],
)
def test_routing_at_the_edge_is_accepted(fields):
    assert problems(replace(MOE, model=replace(MOE.model, **fields))) == []
