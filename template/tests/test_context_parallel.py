"""Attention over ranks equals attention in one process: outputs, gradients, work and bytes."""

import warnings
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import curry_train.parallel.context_parallel as cp
from curry_train.layers.attention import attend, visible_keys
from curry_train.testing import assert_same, run_ranks

SCALE = 0.4
LENGTH = 48  # chunks of 12 on two ranks, of 6 on four
PLAIN = {"heads": 4, "groups": 4, "width": 8, "value_width": 8, "batch": 2}
CASES = {
    "plain": {},
    "gqa": {"groups": 2},
    "one_group": {"groups": 1},
    "latent": {"value_width": 5},
    "small_window": {"window": 3},
    "window_of_one": {"window": 1, "sinks": True},
    "window_of_a_chunk": {"window": 12},
    "large_window": {"window": 17},
    "window_beyond_the_sequence": {"window": 100},
    "documents": {"documents": True},
    "padding": {"documents": True, "padding": True},
    "sinks": {"sinks": True},
    "batch_1": {"batch": 1},
    "batch_3": {"batch": 3},
    "gqa_latent_sinks": {"groups": 2, "value_width": 3, "sinks": True},
    "all": {
        "groups": 2,
        "value_width": 5,
        "window": 9,
        "documents": True,
        "padding": True,
        "sinks": True,
        "batch": 3,
    },
}


def documents(batch: int, padding: bool) -> torch.Tensor:
    """Documents of 1, 1, 9, 2, ... tokens that end anywhere; other ones in every sample."""
    lengths = [1, 1, 9, 2, 14, 1, 20]
    rows = []
    for sample in range(batch):
        turned = torch.tensor(lengths[sample:] + lengths[:sample])
        rows.append(torch.arange(len(lengths)).repeat_interleave(turned)[:LENGTH])
    ids = torch.stack(rows)
    if padding:
        ids[:, -7:] = -1
        ids[0, -19:] = -1
    return ids


def inputs(case: dict, dtype: torch.dtype = torch.float64) -> dict:
    """Everything a case needs of the whole sequence, the same on every rank."""
    size = {**PLAIN, **{name: case[name] for name in PLAIN if name in case}}
    batch, heads, groups = size["batch"], size["heads"], size["groups"]
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    tensors = {
        "q": draw(batch, heads, LENGTH, size["width"]),
        "k": draw(batch, groups, LENGTH, size["width"]),
        "v": draw(batch, groups, LENGTH, size["value_width"]),
        "grad": draw(batch, LENGTH, heads * size["value_width"]),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["sinks"] = draw(heads) if case.get("sinks") else None
    ids = documents(batch, case.get("padding", False)) if case.get("documents") else None
    return {**tensors, "doc_ids": ids, "window": case.get("window")}


def whole(case: dict, dtype: torch.dtype = torch.float64) -> dict:
    """Output and gradients of `attend` on the whole sequence, in one process, in float64."""
    given = inputs(case, dtype)
    names = [name for name in ("q", "k", "v", "sinks") if given[name] is not None]
    leaves = {name: given[name].double().requires_grad_() for name in names}
    mask = visible_keys(LENGTH, given["window"], given["doc_ids"], "cpu")
    if mask is not None and given["sinks"] is not None:
        mask = F.pad(mask, (1, 0, 1, 0), value=True)
    out = attend(leaves["q"], leaves["k"], leaves["v"], mask, SCALE, leaves.get("sinks"))
    out.backward(given["grad"].double())
    return {"out": out, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def share(rank, world, case, dtype, kind, mutate=None):
    """The same from one rank's tokens; NumPy, because tensors do not survive their rank."""
    warnings.simplefilter("error")
    own = cp.places(LENGTH, rank, world)
    if mutate is not None:
        mutate()
    given = inputs(case, dtype)
    leaves = {name: given[name][:, :, own].requires_grad_() for name in ("q", "k", "v")}
    if given["sinks"] is not None:
        leaves["sinks"] = given["sinks"].requires_grad_()
    ids = None if given["doc_ids"] is None else given["doc_ids"][:, own]
    out = attend_here(leaves, given["window"], ids, kind, dist.group.WORLD)
    assert out.dtype == dtype and out.shape == given["grad"][:, own].shape
    out.backward(given["grad"][:, own])
    found = {"out": out.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
    assert all(found[f"d{name}"].dtype == leaf.dtype for name, leaf in leaves.items())
    return {name: tensor.double().numpy() for name, tensor in found.items()}


def attend_here(leaves, window, doc_ids, kind, group, mask=None):
    return cp.context_attend(
        *(leaves["q"], leaves["k"], leaves["v"]),
        scale=SCALE,
        window=window,
        doc_ids=doc_ids,
        sinks_H=leaves.get("sinks"),
        group=group,
        kind=kind,
        mask=mask,
    )


def joined(results: list[dict]) -> dict:
    """One sequence of all ranks' shares; the gradient of the sinks is the sum of their parts."""
    world = len(results)
    order = torch.cat([cp.places(LENGTH, rank, world) for rank in range(world)]).argsort()
    found = {}
    for name in results[0]:
        parts = [torch.from_numpy(result[name]) for result in results]
        if name == "dsinks":
            found[name] = torch.stack(parts).sum(0)
        else:
            at = 1 if name == "out" else 2
            found[name] = torch.cat(parts, at).index_select(at, order)
    return found


def check(world, case, kind, tolerance=1e-13, dtype=torch.float64, mutate=None):
    found = run_ranks(share, world, case, dtype, kind, mutate)
    assert_same(joined(found), whole(case, dtype), tolerance=tolerance)


@pytest.mark.parametrize("kind", cp.KINDS)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_it_equals_attention_on_the_whole_sequence(name, world, kind):
    check(world, CASES[name], kind)


@pytest.mark.parametrize("name", ["small_window", "documents", "all"])
def test_tiles_of_any_size_give_the_same(name, monkeypatch):
    monkeypatch.setattr(cp, "TILE", 5)
    check(2, CASES[name], "ring")


def without_kernels():
    cp._can_fuse = lambda q, v: False


def test_plain_blocks_equal_fused_ones():
    check(2, CASES["gqa_latent_sinks"], "ring", mutate=without_kernels)


def alone(tensors):
    raise AssertionError("a ring of one has nobody to pass to")


def test_a_value_wider_than_a_key_needs_no_kernel():
    given = inputs({"value_width": 11})
    q, k, v = given["q"], given["k"], given["v"]
    out = cp.ring_attend(q, k, v, None, None, cp.Ring(0, 1, SCALE, None, alone))
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    shares = (q @ k.transpose(-1, -2) * SCALE).masked_fill(later, -torch.inf).softmax(-1)
    assert_same({"out": out}, {"out": (shares @ v).transpose(1, 2).flatten(2)}, tolerance=1e-13)


@pytest.mark.parametrize("kind", cp.KINDS)
@pytest.mark.parametrize("name", ["gqa_latent_sinks", "all"])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_narrow_floats(dtype, tolerance, name, kind):
    check(2, CASES[name], kind, tolerance, dtype)


@pytest.mark.parametrize("kind", cp.KINDS)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_group_of_none_is_attention_itself(name, kind):
    given = inputs(CASES[name])
    leaves = {x: given[x] for x in ("q", "k", "v", "sinks")}
    out = attend_here(leaves, given["window"], given["doc_ids"], kind, None)
    assert_same({"out": out}, {"out": whole(CASES[name])["out"]}, tolerance=0)


def blocks_share_a_mask(rank, world):
    own, case = cp.places(LENGTH, rank, world), CASES["all"]
    given, group = inputs(case), dist.group.WORLD
    leaves = {name: given[name][:, :, own] for name in ("q", "k", "v")}
    leaves["sinks"], ids = given["sinks"], given["doc_ids"][:, own]
    seen = cp.visible_rows(len(own), case["window"], ids, group, "cpu")
    rows = visible_keys(LENGTH, case["window"], given["doc_ids"], "cpu")[:, :, own]
    assert torch.equal(seen, rows)
    made = attend_here(leaves, case["window"], ids, "all_gather", group)
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    mask = F.pad(mask, (1, 0, 1, 0))
    # Neither the window nor the documents are read again.
    handed = attend_here(leaves, 1, None, "all_gather", group, mask)
    assert torch.equal(made, handed)


def test_a_mask_is_made_once_for_all_blocks():
    run_ranks(blocks_share_a_mask, 4)


@pytest.mark.parametrize("name", ["first", "last"])
def test_the_comparison_finds_a_nan_in_any_tensor(name):
    wanted = {"first": torch.ones(3), "last": torch.ones(2)}
    found = {**wanted, name: torch.full_like(wanted[name], float("nan"))}
    with pytest.raises(AssertionError, match=rf"error nan .* at {name}\["):
        assert_same(found, wanted, tolerance=1.0)


# The tests of the tests: each makes one known mistake on every rank, which must be found.


def local_places():
    real = cp.blocks
    cp.blocks = lambda index, source, *rest: real(0, 0, *rest)
    cp.places = lambda length, index, world, device="cpu": torch.arange(length // world)


def no_correction():
    def merge(out, lse, more, more_lse):
        out.add_(more)
        lse.copy_(torch.logaddexp(lse, more_lse))

    cp._merge = merge


def last_block_alone_in_backward():
    real = cp._merge

    def merge(out, lse, more, more_lse):
        real(out, lse, more, more_lse)
        lse.copy_(torch.where(more_lse.isinf(), lse, more_lse))

    cp._merge = merge


def no_care_for_rows_that_see_nothing():
    cp._finite, cp.TILE = lambda lse: lse, 5


def keys_that_stay_at_home():
    real = cp._visits
    cp._visits = lambda held, ring: ((source, held) for source, _ in real(held, ring))


def gradients_that_stay_at_home():
    real = cp._pass_on

    def pass_on(tensors, group):
        wait = real(tensors, group)
        # Keys and values travel once in forward and once in backward; what else does are sums.
        travels.append(None)
        return (lambda: (wait(), tensors)[1]) if len(travels) > 2 else wait

    travels = []
    cp._pass_on = pass_on


def no_sinks():
    real = cp.context_attend
    cp.context_attend = lambda *qkv, sinks_H, **rest: real(*qkv, sinks_H=sinks_H * 0, **rest)


@pytest.mark.parametrize(
    "mutate, kind, name",
    [
        (local_places, "ring", "plain"),
        (local_places, "all_gather", "plain"),
        (no_correction, "ring", "plain"),
        (no_correction, "ring", "all"),
        (last_block_alone_in_backward, "ring", "plain"),
        (last_block_alone_in_backward, "ring", "documents"),
        (no_care_for_rows_that_see_nothing, "ring", "small_window"),
        (no_care_for_rows_that_see_nothing, "ring", "documents"),
        (keys_that_stay_at_home, "ring", "plain"),
        (gradients_that_stay_at_home, "ring", "plain"),
        (no_sinks, "ring", "sinks"),
    ],
)
def test_a_mistake_is_found(mutate, kind, name):
    with pytest.raises(AssertionError, match="error .* above"):
        check(2, CASES[name], kind, 1e-3, mutate=mutate)


def busy_ranks(rank, world):
    """Attention by pairs while a pipeline, an all-to-all and an all-reduce are under way."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    stages = [dist.new_group([first, first + 2]) for first in range(world - 2)]
    experts = dist.new_group(list(range(world)))
    group, stage, other = pairs[rank // 2], stages[rank % 2], (rank + 2) % world
    sent, came = torch.full((1000,), float(rank)), torch.zeros(1000)
    rows, ones = torch.zeros(world), [torch.ones(1000), torch.ones(1000)]
    works = [
        dist.irecv(came, other, group=stage),
        dist.all_to_all_single(rows, sent[:world].clone(), group=experts, async_op=True),
    ]
    case, results = CASES["all"], []
    own, given = cp.places(LENGTH, rank % 2, 2), inputs(case)
    for recomputed, summed in zip((False, True), ones, strict=True):
        leaves = {name: given[name][:, :, own].requires_grad_() for name in ("q", "k", "v")}
        leaves["sinks"] = given["sinks"].clone().requires_grad_()
        run = partial(checkpoint, attend_here, use_reentrant=False) if recomputed else attend_here
        out = run(leaves, case["window"], given["doc_ids"][:, own], "ring", group)
        works.append(dist.all_reduce(summed, async_op=True))
        out.backward(given["grad"][:, own])
        found = {"out": out.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
        results.append({name: tensor.numpy() for name, tensor in found.items()})
    works.append(dist.isend(sent, other, group=stage))
    for work in works:
        work.wait()
    assert came.eq(other).all() and rows.tolist() == list(range(world))
    assert all(summed.eq(world).all() for summed in ones)
    return results


def test_other_groups_may_be_busy_and_recomputing_is_bitwise_the_same():
    ranks = run_ranks(busy_ranks, 4)
    for pair in (ranks[:2], ranks[2:]):
        assert_same(joined([rank[0] for rank in pair]), whole(CASES["all"]), tolerance=1e-13)
    for once, again in ranks:
        assert all((once[name] == again[name]).all() for name in once)


def twice_differentiated(rank, world, kind):
    own, given = cp.places(LENGTH, rank, world), inputs({})
    leaves = {name: given[name][:, :, own].requires_grad_() for name in ("q", "k", "v")}
    out = attend_here(leaves, None, None, kind, dist.group.WORLD)
    (first,) = torch.autograd.grad(out.square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice|is not implemented"):
        first.sum().backward()


@pytest.mark.parametrize("kind", cp.KINDS)
def test_a_second_derivative_is_refused(kind):
    run_ranks(twice_differentiated, 2, kind)


def counted(rank, world, kernels):
    """How many blocks this rank computes, and how many pairs of a query and a key they show."""
    calls = []

    def counting(real, first, shown):
        def wrapped(*args):
            calls.append((real.__name__, shown(args[first:])))
            return real(*args)

        return wrapped

    def pairs(args):
        q, k, causal = args[0].shape[2], args[1].shape[2], args[-2]
        return q * (q + 1) // 2 if causal else q * k

    if not kernels:
        without_kernels()
        cp.TILE = 4
    cp._fused = counting(cp._fused, 0, pairs)
    cp._fused_backward = counting(cp._fused_backward, 1, pairs)
    cp._plain = counting(cp._plain, 0, lambda args: int(args[3].sum()))
    cp._plain_backward = counting(cp._plain_backward, 1, lambda args: int(args[5].sum()))
    share(rank, world, CASES["plain"], torch.float64, "ring")
    names = sorted({name for name, _ in calls})
    return {n: (sum(m == n for m, _ in calls), sum(p for m, p in calls if m == n)) for n in names}


@pytest.mark.parametrize("kernels", [True, False])
def test_every_rank_has_the_same_work(kernels):
    first, *others = run_ranks(counted, 4, kernels)
    assert others == [first] * 3
    chunk = LENGTH // 8
    # 2 full blocks for each other rank, 1 full and 2 triangles of its own; or tiles of 4 of them.
    expected = (9, 8 * chunk**2 + chunk) if kernels else (7 * 4 + 2 * 3, 8 * chunk**2 + chunk)
    assert set(first.values()) == {expected} and len(first) == 2
    assert 4 * expected[1] == LENGTH * (LENGTH + 1) // 2


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 7, 11, 12, 13, 30, 47, 48, 100])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_blocks_show_every_visible_pair_once(world, window):
    chunk, shown = LENGTH // (2 * world), torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
    if world == 1:
        held = [torch.arange(LENGTH)]
    else:
        held = [cp.places(LENGTH, rank, world) for rank in range(world)]
    for index in range(world):
        for source in range(world):
            found = cp.blocks(index, source, world, chunk, window)
            pieces = [b for b in found if b.form != "masked"]
            pieces += [t for b in found if b.form == "masked" for t in cp._tiles(b, window, 4)]
            for rows, columns, gap, form in pieces:
                own, other = held[index][rows][:, None], held[source][columns]
                assert int(own[0] - other[0]) == gap
                distance = own - other
                seen = (distance >= 0) & (distance < (window or LENGTH))
                assert seen.any()
                if form != "masked":
                    assert torch.equal(
                        seen, torch.ones_like(seen).tril(0 if form == "causal" else 99)
                    )
                shown[own, other] += seen
    wanted = torch.ones(LENGTH, LENGTH).tril().triu(1 - (window or LENGTH))
    assert torch.equal(shown, wanted.long())


def test_the_next_exchange_is_under_way_before_a_block_is_computed(monkeypatch):
    events = []

    def pass_on(tensors):
        events.append("post")
        return lambda: (events.append("wait"), [tensor.clone() for tensor in tensors])[1]

    for name in ("_fused", "_fused_backward"):
        real = getattr(cp, name)
        monkeypatch.setattr(
            cp, name, lambda *args, real=real: (events.append("block"), real(*args))[1]
        )
    given = inputs({})
    leaves = [given[name][:, :, :12].requires_grad_() for name in ("q", "k", "v")]
    out = cp.ring_attend(*leaves, None, None, cp.Ring(1, 3, SCALE, None, pass_on))
    visit = ["post", "block", "block", "wait"]
    assert events == ["post", *["block"] * 3, "wait", *visit, *["block"] * 2]
    events.clear()
    out.sum().backward()
    # The sums of a step are posted after its blocks; those of the step before are waited for then.
    own = ["post", *["block"] * 3, "post", "wait"]
    visit = ["post", *["block"] * 2, "wait", "post", "wait"]
    assert events == [*own, *visit, *["block"] * 2, "wait", "post", "wait"]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that exist at once, those made before apart, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, storage.nbytes())
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def bytes_of_a_rank(world: int, window: int | None = None) -> dict:
    """Forward and backward of one of `world` ranks at 16384 tokens, its neighbours simulated."""
    length, width, saved = 16384 // world, 8, {}
    leaves = [torch.randn(1, 1, length, width).requires_grad_() for _ in range(3)]

    def pass_on(tensors):
        came = [tensor.clone() for tensor in tensors]
        return lambda: came

    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with LiveBytes() as live:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            ring = cp.Ring(0, world, SCALE, window, pass_on)
            out = cp.ring_attend(*leaves, None, None, ring)
        out.sum().backward()
    share = length * width * 4
    return {"saved": sum(saved.values()), "peak": live.peak, "largest": live.largest, "k": share}


@pytest.mark.slow
def test_bytes_of_a_rank_fall_as_the_ranks_rise():
    found = {world: bytes_of_a_rank(world) for world in (1, 2, 4, 8)}
    for world, row in found.items():
        # q, k, v, the output and a log-sum-exp an eighth as wide.
        assert row["saved"] == 4.125 * row["k"]
        assert row["saved"] * world == found[1]["saved"]
        # Whatever the world, a fixed number of shares exists at once, none larger than one.
        assert row["peak"] < 20 * row["k"] and row["largest"] == row["k"]
    assert found[8]["peak"] * 4 < found[1]["peak"]


@pytest.mark.slow
def test_a_mask_is_made_a_tile_at_a_time():
    for world in (2, 8):
        row = bytes_of_a_rank(world, window=256)
        assert row["largest"] <= max(row["k"], 8 * cp.TILE**2)
        assert row["peak"] < 20 * row["k"] + 8 * 4 * cp.TILE**2


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"50 tokens .* = 8 .* multiple of 8.*data.seq_len=56 or"):
        cp.places(50, 1, 4)
    run_ranks(refusals, 2)


def refusals(rank, world):
    batch = {"input_ids": torch.zeros(2, 10, dtype=torch.int64)}
    with pytest.raises(ValueError, match="10 tokens"):
        cp.take(batch, dist.group.WORLD)
    leaves = {name: torch.zeros(1, 1, 5, 8) for name in ("q", "k", "v")}
    for kind in cp.KINDS:
        with pytest.raises(ValueError, match="10 tokens"):
            attend_here(leaves, None, None, kind, dist.group.WORLD)
    with pytest.raises(ValueError, match="'flash' is unknown.*ring.*parallel.cp_kind=ring"):
        attend_here(leaves, None, None, "flash", dist.group.WORLD)


def test_places_are_the_head_and_the_tail():
    assert cp.places(16, 1, 4).tolist() == [2, 3, 12, 13]
    assert cp.places(7, 0, 1).tolist() == list(range(7))
    every = torch.cat([cp.places(48, rank, 4) for rank in range(4)])
    assert every.dtype == torch.int64 and every.sort().values.tolist() == list(range(48))


def taken(rank, world):
    tokens = torch.arange(32).view(2, 16)
    batch = {"input_ids": tokens, "labels": tokens + 1, "doc_ids": tokens // 5, "epoch": 3}
    batch["lengths"] = torch.tensor([16, 9])
    group, own = dist.group.WORLD, cp.places(16, rank, world)
    found = cp.take(batch, group)
    for name in ("input_ids", "labels", "doc_ids"):
        assert torch.equal(found[name], batch[name][:, own]), name
    assert found["position_ids"].tolist() == [own.tolist()]
    assert found["epoch"] == 3 and found["lengths"] is batch["lengths"]
    assert "position_ids" not in batch
    for given in (tokens % 7, tokens[:1]):
        found = cp.take({**batch, "position_ids": given}, group)
        assert torch.equal(found["position_ids"], given[:, own])


def test_a_rank_takes_its_tokens_with_their_places():
    run_ranks(taken, 4)
    batch = {"input_ids": torch.zeros(1, 7)}
    assert cp.take(batch, None) is batch


@pytest.mark.parametrize("groups", [2, 4])
def test_the_kernels_of_a_gpu_are_called_by_their_signature(groups):
    """Shapes and arguments only: nothing is computed."""
    with FakeTensorMode(), torch.no_grad():
        make = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
        q, k, v = make(2, 4, 32, 16), make(2, groups, 32, 16), make(2, groups, 32, 8)
        out, lse = cp._fused(q, k, v, True, SCALE)
        assert out.shape == (2, 4, 32, 8) and lse.shape == (2, 4, 32)
        more = cp._fused_backward(out, q, k, v, out, lse, True, SCALE)
        assert [x.shape for x in more] == [q.shape, k.shape, v.shape]
        assert cp._can_fuse(q, v) and not cp._can_fuse(q, make(2, groups, 32, 24))
        for other in (make(2, 4, 32, 16, dtype=torch.float32), make(2, 4, 32, 12)):
            assert not cp._can_fuse(other, v)
