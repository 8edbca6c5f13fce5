"""Router, sort and combine: kernels against float64 twins, twins against loops and autograd."""

from __future__ import annotations

import random

import pytest
import torch
from address_probe import addresses
from torch.autograd import gradcheck
from torch.library import opcheck

from curry_train.kernels import moe_permute, reference_routing, router, routing_ops
from curry_train.kernels.launches import Launch, run_on_gpu

OPS = torch.ops.curry_train
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DEEPSEEK = {"groups": 4, "group_topk": 2, "score": "sigmoid", "scale": 2.5}
ROUTERS = {
    "qwen3": (37, 16, 4, {}),
    "unnormalised": (33, 12, 6, {"norm": False, "scale": 0.5}),
    "deepseek-v3": (40, 32, 6, DEEPSEEK),
    "deepseek-v2": (20, 40, 6, {"groups": 8, "group_topk": 3, "group_score": "max"}),
    "largest": (5, 512, 16, {"score": "sigmoid"}),
    "prime": (3, 7, 7, {"norm": False}),
    "one": (1, 1, 1, {}),
}


def draw(name: str, *, biased: bool, padded: bool):
    """Return logits [T, E], k and options of a router."""
    tokens, experts, k, options = ROUTERS[name]
    logits = torch.randn(tokens, experts) * 3
    bias = torch.randn(experts) / 8 if biased else None
    pad_mask = torch.rand(tokens) > 0.3 if padded else None
    if padded:
        logits[~pad_mask] = torch.nan
    return logits, bias, k, {**options, "pad_mask": pad_mask}


def wide(*tensors):
    return [tensor.double() if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]


def gradient_options(options: dict) -> dict:
    return {name: options[name] for name in ("score", "norm", "scale") if name in options}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("biased, padded", [(False, False), (True, True)], ids=["bare", "full"])
def test_router_equals_its_twin_in_float64(name, biased, padded, poisoned):
    logits, bias, k, options = draw(name, biased=biased, padded=padded)
    found = router.router_topk(poisoned(logits), bias, k, **options)
    wanted = reference_routing.router_topk(*wide(logits, bias), k, **options)
    for value, twin in zip(found, wanted, strict=True):
        assert value.dtype == (torch.int32 if twin.dtype == torch.int32 else torch.float32)
        torch.testing.assert_close(value.to(twin.dtype), twin, rtol=1e-6, atol=1e-7)
    if padded:
        assert not found[0][~options["pad_mask"]].any()
        assert (found[1][~options["pad_mask"]] == -1).all()


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
def test_router_backward_equals_autograd_of_the_twin(name, padded, poisoned):
    logits, _, k, options = draw(name, biased=False, padded=padded)
    weights, ids, lse = router.router_topk(logits, None, k, **options)
    dweights, dlse = torch.randn_like(weights), torch.randn_like(lse)
    if padded:
        dweights[~options["pad_mask"]] = torch.nan
    found = router.router_topk_bwd(
        dweights, dlse, poisoned(logits), ids, lse, **gradient_options(options)
    )
    leaf = logits.double().requires_grad_()
    twin = reference_routing.router_topk(leaf, None, k, **options)
    real = slice(None) if options["pad_mask"] is None else options["pad_mask"]
    total = (twin[0] * dweights)[real].sum() + (twin[2] * dlse)[real].sum()
    (wanted,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    written = reference_routing.router_topk_bwd(
        *wide(dweights, dlse, logits), ids, lse.double(), **gradient_options(options)
    )
    torch.testing.assert_close(written, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3", "unnormalised", "deepseek-v3", "prime"])
def test_router_passes_gradcheck(name):
    logits, bias, k, options = draw(name, biased=True, padded=False)
    logits = logits[:3]
    leaf, options["pad_mask"] = logits.double().requires_grad_(), torch.arange(3) != 1

    def twin(x):
        return reference_routing.router_topk(x, bias.double(), k, **options)[::2]

    def operator(x):
        return OPS.router_topk(x, bias.double(), k, **options)[::2]

    assert gradcheck(twin, leaf) and gradcheck(operator, leaf)


def chosen_by_hand(logits, bias, k, options):
    """Return the ids of one token by loops over Python floats."""
    experts, groups = len(logits), options.get("groups", 1)
    scores = [float(s) for s in logits.sigmoid()]
    biased = [s + float(b) for s, b in zip(scores, bias, strict=True)]
    size = experts // groups
    count = 1 if options.get("group_score") == "max" else 2
    worth = [sum(sorted(biased[g * size : (g + 1) * size])[-count:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: (-worth[g], g))[: options.get("group_topk", 1)]
    allowed = [e for e in range(experts) if e // size in best]
    return sorted(allowed, key=lambda e: (-biased[e], e))[:k]


@pytest.mark.parametrize("group_score", ["top2", "max"])
def test_groups_and_bias_choose_as_by_hand(group_score):
    options = {**DEEPSEEK, "group_score": group_score}
    # Quarters and one bias for all: many ties, and a bias below zero closes no open group.
    logits, bias = (torch.randn(60, 24).double() * 2).round() / 4, torch.randn(24).double() - 3
    bias[::2] = bias[0]
    wanted = [chosen_by_hand(row, bias, 5, options) for row in logits]
    _, ids, _ = reference_routing.router_topk(logits, bias, 5, **options)
    assert ids.tolist() == wanted
    _, ids, _ = router.router_topk(logits.float(), bias.float(), 5, **options)
    assert ids.tolist() == [chosen_by_hand(row, bias.float(), 5, options) for row in logits.float()]


@pytest.mark.parametrize("choose", [router.router_topk, reference_routing.router_topk])
@pytest.mark.parametrize("bias", [None, torch.zeros(8)], ids=["logits", "scores"])
def test_ties_go_to_the_lowest_id(choose, bias):
    logits = torch.zeros(3, 8)
    logits[1, [2, 5, 7]] = 1.0
    logits[2] = -torch.inf
    logits[2, 6] = 0.0
    weights, ids, _ = choose(logits, bias, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [2, 5, 7, 0], [6, 0, 1, 2]]
    assert weights[2].tolist() == [1.0, 0.0, 0.0, 0.0]
    _, ids, _ = choose(logits[:1], bias, 4, groups=4, group_topk=2)
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_huge_logits_keep_their_digits(score):
    logits = (torch.rand(9, 12) * 2 - 1) * 1e4
    logits[0], logits[1], logits[2, 1:3] = 1e4, -1e4, logits[2].max() + 1
    weights, ids, lse = router.router_topk(logits, None, 3, score=score)
    twin = reference_routing.router_topk(logits.double(), None, 3, score=score)
    assert torch.equal(ids, twin[1])
    torch.testing.assert_close(weights.double(), twin[0], rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(lse.double(), twin[2], rtol=1e-7, atol=0)
    # The z-loss of each token, lse**2, and a gradient of the weights.
    dweights, dlse = torch.ones_like(weights) * torch.arange(3.0), 2 * lse
    found = router.router_topk_bwd(dweights, dlse, logits, ids, lse, score=score)
    wanted = reference_routing.router_topk_bwd(
        *wide(dweights, 2 * twin[2], logits), ids, twin[2], score=score
    )
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "choose", [router.router_topk, reference_routing.router_topk, OPS.router_topk]
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_named(choose, bad):
    logits = torch.randn(5, 4)
    logits[3, 1] = bad
    with pytest.raises(ValueError, match=r"logits has 1 rows with NaN.*row 3; allowed: numbers"):
        choose(logits, None, 2)
    pad_mask = torch.tensor([True, True, True, False, True])
    assert choose(logits, None, 2, pad_mask=pad_mask)[0].isfinite().all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("code", [router, reference_routing])
def test_unseen_nan_becomes_nan_weights_and_valid_ids(code, score, monkeypatch):
    # A GPU is not asked for its values: the loss must show what happened.
    monkeypatch.setattr(code, "check_lse", lambda *_: None)
    logits = torch.randn(4, 6)
    logits[1, 2], logits[2] = torch.nan, torch.nan
    weights, ids, lse = code.router_topk(logits, torch.zeros(6), 2, score=score)
    assert (
        weights[1:3].isnan().all() and lse[1:3].isnan().all() and weights[[0, 3]].isfinite().all()
    )
    assert ((ids >= 0) & (ids < 6)).all() and (ids[:, 0] != ids[:, 1]).all()


LOGITS = torch.randn(4, 8)
BAD_ROUTER = {
    "logits is torch.bfloat16": ((LOGITS.bfloat16(), None, 2), {}),
    "logits is torch.int64": ((LOGITS.long(), None, 2), {}),
    r"logits is torch.float32 \[4\]": ((LOGITS[:, 0], None, 2), {}),
    "k is 9; allowed: 1 to 8": ((LOGITS, None, 9), {}),
    "k is 0; allowed: 1 to 8": ((LOGITS, None, 0), {}),
    "score is 'relu'; allowed: 'softmax'": ((LOGITS, None, 2), {"score": "relu"}),
    r"bias is torch.float32 \[7\]; allowed: torch.float32 \[8\]": ((LOGITS, torch.ones(7), 2), {}),
    r"bias is torch.float16 \[8\]": ((LOGITS, torch.ones(8).half(), 2), {}),
    r"pad_mask is torch.int64 \[4\]": ((LOGITS, None, 2), {"pad_mask": torch.ones(4).long()}),
    "groups is 3; allowed: a divisor of the 8": ((LOGITS, None, 2), {"groups": 3}),
    "group_topk is 5; allowed: 1 to groups=4": ((LOGITS, None, 2), {"groups": 4, "group_topk": 5}),
    "group_topk is 1; .*at least k=3 experts": ((LOGITS, None, 3), {"groups": 4, "group_topk": 1}),
    "group_score is 'sum'; allowed: 'top2'": ((LOGITS, None, 2), {"group_score": "sum"}),
    "group_score is 'top2' with 1 expert": ((LOGITS, None, 2), {"groups": 8, "group_topk": 2}),
}


@pytest.mark.parametrize("text", BAD_ROUTER)
def test_bad_arguments_of_the_router_are_named(text):
    arguments, options = BAD_ROUTER[text]
    for choose in (router.router_topk, reference_routing.router_topk, OPS.router_topk):
        with pytest.raises(ValueError, match=text):
            choose(*arguments, **options)


def test_bad_arguments_of_the_backward_pass_are_named():
    weights, ids, lse = router.router_topk(LOGITS, None, 2)
    for code in (router.router_topk_bwd, reference_routing.router_topk_bwd):
        with pytest.raises(ValueError, match=r"dweights is torch.float32 \[4, 1\]; allowed"):
            code(weights[:, :1], None, LOGITS, ids, lse)
        with pytest.raises(ValueError, match="ids is torch.int64"):
            code(weights, None, LOGITS, ids.long(), lse)
    with pytest.raises(ValueError, match="allowed on this backend: torch.float32"):
        router.router_topk(LOGITS.double(), None, 2)


def test_a_tensor_on_another_device_is_not_read():
    with pytest.raises(ValueError, match="bias is on meta; allowed: cpu, the device of logits"):
        router.router_topk(LOGITS, LOGITS[0].to("meta"), 2)


@pytest.mark.parametrize("code", [router, reference_routing])
def test_no_tokens_and_only_padding(code):
    weights, ids, lse = code.router_topk(LOGITS[:0], None, 2)
    assert weights.shape == ids.shape == (0, 2) and lse.shape == (0,)
    assert code.router_topk_bwd(weights, lse, LOGITS[:0], ids, lse).shape == (0, 8)
    weights, ids, lse = code.router_topk(LOGITS, None, 2, pad_mask=torch.zeros(4).bool())
    assert not weights.any() and (ids == -1).all() and not lse.any()
    assert not code.router_topk_bwd(weights + torch.nan, lse, LOGITS, ids, lse).any()


def test_router_repeats_and_does_not_depend_on_the_batch():
    logits, bias, k, options = draw("deepseek-v3", biased=True, padded=True)
    logits = logits.nan_to_num()
    first, again = (router.router_topk(logits, bias, k, **options) for _ in range(2))
    part = router.router_topk(
        logits[7:19], bias, k, **options | {"pad_mask": options["pad_mask"][7:19]}
    )
    for one, two, some in zip(first, again, part, strict=True):
        assert torch.equal(one, two) and torch.equal(one[7:19], some)


def test_columns_may_lie_apart():
    logits = torch.randn(12, 9).T
    for one, two in zip(
        router.router_topk(logits, None, 3),
        router.router_topk(logits.contiguous(), None, 3),
        strict=True,
    ):
        assert torch.equal(one, two)


def check_sorted(ids: torch.Tensor, experts: int, block_m: int, found) -> None:
    """Assert what every sort must fulfil, from its definition alone."""
    flat = ids.flatten().tolist()
    order, offsets = found.order.tolist(), found.offsets.tolist()
    assert {tensor.dtype for tensor in found[:-1]} == {torch.int32} and found.block_m == block_m
    assert sorted(order) == list(range(len(flat)))
    key = [experts if flat[choice] < 0 else flat[choice] for choice in order]
    assert key == sorted(key), "not in the order of experts, or -1 is not last"
    assert all(
        a < b for a, b, x, y in zip(order, order[1:], key, key[1:], strict=False) if x == y
    ), "not stable"
    assert offsets == [sum(k < e for k in key) for e in range(experts + 1)]
    assert found.counts.tolist() == [flat.count(e) for e in range(experts)]
    inverse = found.inverse.flatten().tolist()
    assert found.inverse.shape == ids.shape
    for choice, (expert, row) in enumerate(zip(flat, inverse, strict=True)):
        assert row == -1 if expert < 0 else order[row] == choice
    tiles = list(zip(found.tile_expert.tolist(), found.tile_row.tolist(), strict=True))
    assert len(tiles) == -(-len(flat) // block_m) + experts - 1
    used = int(found.num_tiles)
    assert tiles[used:] == [(-1, -1)] * (len(tiles) - used)
    covered = []
    for expert, first in tiles[:used]:
        end = min(first + block_m, offsets[expert + 1])
        assert offsets[expert] <= first < end and (first - offsets[expert]) % block_m == 0
        covered += range(first, end)
    assert covered == list(range(offsets[-1])), "rows are not covered exactly once"


def test_sort_of_200_random_routings():
    for seed in range(200):
        random.seed(seed)
        torch.manual_seed(seed)
        experts, k = random.choice([1, 2, 3, 7, 8, 13, 31]), random.choice([1, 2, 3, 8])
        tokens, block_m = random.randrange(0, 64 // k + 1), random.choice([1, 3, 4, 16, 128])
        ids = torch.randint(-1, experts, (tokens, k)).to(random.choice([torch.int32, torch.int64]))
        if seed % 5 == 0:
            ids = ids.clamp(max=random.randrange(-1, experts))
        check_sorted(ids, experts, block_m, moe_permute.moe_sort(ids, experts, block_m))
        check_sorted(ids, experts, block_m, reference_routing.moe_sort(ids, experts, block_m))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 511, 512, 513, 1100])
def test_sort_across_parts_and_blocks(rows):
    ids = torch.randint(-1, 40, (rows, 1), dtype=torch.int32)
    check_sorted(ids, 40, 16, moe_permute.moe_sort(ids, 40, 16))


def test_sort_of_many_experts_and_of_few():
    ids = torch.randint(0, 512, (40, 16), dtype=torch.int32)
    check_sorted(ids, 512, 64, moe_permute.moe_sort(ids, 512, 64))
    for ids in (torch.full((70, 2), 3), torch.full((70, 2), -1), torch.zeros(0, 2).int()):
        for code in (moe_permute, reference_routing):
            check_sorted(ids, 5, 16, code.moe_sort(ids, 5, 16))


def test_sort_repeats_and_takes_any_strides():
    ids = torch.randint(0, 9, (8, 60)).T
    found, again = (moe_permute.moe_sort(ids, 9, 16) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(found[:-1], again[:-1], strict=True))
    check_sorted(ids, 9, 16, found)


def test_scan_goes_on_after_its_first_rows():
    blocks, experts = moe_permute.SCAN_ROWS * 2 + 5, 3
    table = torch.randint(0, 9, (blocks, experts + 1), dtype=torch.int32)
    sums, counts = table.cumsum(0).int(), torch.empty(experts, dtype=torch.int32)
    wanted = sums - table
    sizes = {"BLOCK": 8, "ROWS": moe_permute.SCAN_ROWS, "COLUMNS": moe_permute.SCAN_COLUMNS}
    moe_permute.scan_kernel[(1,)](table, counts, 8 * blocks - 7, E=experts, **sizes)
    assert torch.equal(counts, sums[-1, :experts]) and torch.equal(table, wanted)


SORTS = [moe_permute.moe_sort, reference_routing.moe_sort, routing_ops.moe_sort, OPS.moe_sort]


@pytest.mark.parametrize("sort", SORTS)
def test_bad_arguments_of_the_sort_are_named(sort):
    ids = torch.tensor([[0, 1], [2, 4]])
    with pytest.raises(ValueError, match=r"ids holds 4 at token 1, choice 1; allowed: 0 to 3, or"):
        sort(ids, 4, 16)
    with pytest.raises(ValueError, match="ids holds -2 at token 0, choice 0"):
        sort(ids - 2, 4, 16)
    with pytest.raises(ValueError, match=r"ids is torch.float32 \[2, 2\]; allowed: int32 or int64"):
        sort(ids.float(), 4, 16)
    with pytest.raises(ValueError, match=r"ids is torch.int64 \[4\]"):
        sort(ids.flatten(), 5, 16)
    with pytest.raises(ValueError, match="num_experts is 0; allowed: 1 or more"):
        sort(ids, 0, 16)
    with pytest.raises(ValueError, match="block_m is 0; allowed: 1 or more"):
        sort(ids, 5, 0)
    with pytest.raises(ValueError, match=r"ids has 2147483648 choices; allowed: fewer"):
        reference_routing.check_sort(torch.empty(2**30, 2, dtype=torch.int32, device="meta"), 4, 16)


@pytest.mark.parametrize("code", [moe_permute, reference_routing])
def test_unseen_ids_out_of_range_are_no_expert(code, monkeypatch):
    monkeypatch.setattr(code, "check_ids", lambda *_: None)
    ids = torch.tensor([[0, 7], [2**31 - 1, -(2**31)], [3, 4]])
    none = torch.where((ids < 0) | (ids > 3), -1, ids)
    found, wanted = code.moe_sort(ids, 4, 16), reference_routing.moe_sort(none, 4, 16)
    assert all(torch.equal(one, two) for one, two in zip(found[:-1], wanted[:-1], strict=True))


def rows_of(dtype, tokens=21, k=3, width=40):
    """Return y, inverse, weights and base, with rows and weights that must not be read as NaN."""
    ids = torch.randint(-1, 6, (tokens, k))
    inverse = reference_routing.moe_sort(ids, 6, 16).inverse
    y = torch.randn(tokens * k, width).to(dtype)
    y[int((ids >= 0).sum()) :] = torch.nan
    weights = torch.rand(tokens, k).masked_fill(ids < 0, torch.nan)
    return y, inverse, weights, torch.randn(tokens, width).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weighted, based", [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)])
def test_combine_is_as_exact_as_torch(dtype, weighted, based, poisoned):
    y, inverse, weights, base = rows_of(dtype)
    weights = (None, weights, weights.to(dtype))[weighted]
    base = base if based else None
    found = moe_permute.moe_combine(
        poisoned(y), inverse, weights, None if base is None else poisoned(base)
    )
    wanted = reference_routing.moe_combine(*wide(y), inverse, *wide(weights, base))
    plain = torch.where(inverse[..., None] >= 0, y[inverse.clamp(min=0).long()], 0)
    if weights is not None:
        plain = plain * torch.where(inverse >= 0, weights, 0)[..., None].to(dtype)
    plain = plain.sum(1) if base is None else base + plain.sum(1)
    assert found.dtype == dtype and found.isfinite().all()
    # One rounding, at the end: the same sums in the same order as the twin's.
    assert torch.equal(found, reference_routing.moe_combine(y, inverse, weights, base))
    error, allowed = ((value.double() - wanted).norm() for value in (found, plain))
    assert error <= 2 * allowed + 1e-7 * wanted.norm()


def test_combine_of_wide_rows_and_of_nothing():
    y, inverse, weights, base = rows_of(torch.float32, tokens=6, width=700)
    found = moe_permute.moe_combine(y, inverse, weights, base)
    torch.testing.assert_close(found, reference_routing.moe_combine(y, inverse, weights, base))
    assert torch.equal(found, moe_permute.moe_combine(y, inverse, weights, base))
    assert torch.equal(
        found[2:4], moe_permute.moe_combine(y, inverse[2:4], weights[2:4], base[2:4])
    )
    none = torch.full_like(inverse, -1)
    for code in (moe_permute, reference_routing):
        assert torch.equal(code.moe_combine(y, none, weights, base), base)
        assert not code.moe_combine(y[:0], none, weights).any()
        assert code.moe_combine(y, inverse[:0], weights[:0]).shape == (0, 700)


@pytest.mark.parametrize(
    "combine", [moe_permute.moe_combine, reference_routing.moe_combine, OPS.moe_combine]
)
def test_bad_arguments_of_combine_are_named(combine):
    y, inverse, weights, base = rows_of(torch.bfloat16)
    with pytest.raises(ValueError, match=r"y is torch.int64 \[63, 40\]; allowed: rows \[R, D\]"):
        combine(y.nan_to_num().long(), inverse)
    with pytest.raises(ValueError, match=r"inverse is torch.int64 \[21, 3\]; allowed: int32"):
        combine(y, inverse.long())
    with pytest.raises(ValueError, match="weights is torch.float16 .*torch.bfloat16 or torch.floa"):
        combine(y, inverse, weights.half())
    with pytest.raises(ValueError, match=r"weights is torch.float32 \[21, 2\]"):
        combine(y, inverse, weights[:, :2])
    with pytest.raises(ValueError, match=r"base is torch.float32 \[21, 40\]; allowed: torch.bfloa"):
        combine(y, inverse, weights, base.float())


@pytest.mark.parametrize("weighted, based", [(False, False), (True, True)])
def test_combine_passes_gradcheck(weighted, based):
    y, inverse, weights, base = rows_of(torch.float64, tokens=5, width=3)
    y, weights = y.nan_to_num().requires_grad_(), weights.double().nan_to_num().requires_grad_()
    inputs = [y, *([weights] if weighted else []), *([base.requires_grad_()] if based else [])]

    def call(combine):
        return lambda y, *rest: combine(
            y, inverse, rest[0] if weighted else None, rest[-1] if based else None
        )

    assert gradcheck(call(reference_routing.moe_combine), inputs)
    assert gradcheck(call(OPS.moe_combine), inputs)


def test_combine_backward_leaves_unnamed_rows_at_zero(dirty_memory):
    y, inverse, weights, base = rows_of(torch.bfloat16)
    leaves = [y.requires_grad_(), weights.requires_grad_(), base.requires_grad_()]
    dy, dweights, dbase = torch.autograd.grad(
        OPS.moe_combine(y, inverse, weights, base).sum(), leaves
    )
    assert not dy[int((inverse >= 0).sum()) :].any() and dy.isfinite().all()
    assert not dweights[inverse < 0].any() and dweights.isfinite().all()
    assert (dbase == 1).all()


WEIGHTS, IDS, LSE = reference_routing.router_topk(LOGITS, None, 3)
INVERSE = reference_routing.moe_sort(IDS, 8, 4).inverse
MASK = torch.tensor([True, False, True, True])
Y = torch.randn(12, 5, requires_grad=True)
OPERATORS = {
    "router_topk": ((LOGITS.clone().requires_grad_(), torch.randn(8), 3), {"pad_mask": MASK}),
    "router_topk_bwd": ((WEIGHTS, LSE, LOGITS, IDS, LSE), {"score": "sigmoid"}),
    "moe_sort": ((IDS, 8, 4), {}),
    "moe_combine": ((Y, INVERSE, WEIGHTS.clone().requires_grad_(), Y.detach()[:4]), {}),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("interpret", ["1", "0"], ids=["kernel", "twin"])
def test_operators_pass_opcheck(name, interpret, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert routing_ops.kernels_run(Y) == (interpret == "1")
    arguments, options = OPERATORS[name]
    opcheck(getattr(OPS, name).default, arguments, options)


def test_operators_run_the_kernels_and_float64_the_twins(monkeypatch):
    called = []
    kernel = router.router_topk
    monkeypatch.setattr(router, "router_topk", lambda *a, **k: called.append(1) or kernel(*a, **k))
    OPS.router_topk(LOGITS.double(), None, 2)
    assert not called
    OPS.router_topk(LOGITS, None, 2)
    assert called


@pytest.mark.parametrize("step", [2**28, 2**30])
def test_row_offsets_pass_2_to_the_31(step):
    noted: list[Launch] = []

    def run(launch: Launch) -> None:
        noted.append(launch)
        run_on_gpu(launch)

    y, inverse = torch.randn(12, 16), torch.tensor([[11, 3]], dtype=torch.int32)
    moe_permute.moe_combine(y, inverse, run=run)
    rows = addresses(noted[0], "y_ptr", y_row=step)
    assert rows == {y.data_ptr() + 4 * (row * step + d) for row in (11, 3) for d in range(16)}
    logits, last = torch.randn(12, 8), 11
    weights, ids, lse = router.router_topk(logits, None, 2, run=run)
    router.router_topk_bwd(weights, None, logits, ids, lse, run=run)
    for launch in noted[1:]:
        found = addresses(launch, "logits_ptr", logits_row=step)
        assert max(found) == logits.data_ptr() + 4 * (last * step + 7)
        assert min(found) == logits.data_ptr()
