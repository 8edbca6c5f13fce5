"""Attention over ranks equals attention in one process: outputs, gradients, work and bytes."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import curry_train.parallel.context_parallel as cp
from curry_train.layers.attention import attend, visible_keys
from curry_train.testing import assert_same, run_ranks

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


def inputs(case: dict, dtype: torch.dtype = torch.float64, length: int = LENGTH) -> dict:
    """Everything a case needs of the whole sequence, the same on every rank."""
    size = {**PLAIN, **{name: case[name] for name in PLAIN if name in case}}
    batch, heads, groups = size["batch"], size["heads"], size["groups"]
    random = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, generator=random, dtype=torch.float64)
    tensors = {
        "q": draw(batch, heads, length, size["width"]),
        "k": draw(batch, groups, length, size["width"]),
        "v": draw(batch, groups, length, size["value_width"]),
        "grad": draw(batch, length, heads * size["value_width"]),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["sinks"] = draw(heads) if case.get("sinks") else None
    ids = documents(batch, case.get("padding", False)) if case.get("documents") else None
    return {**tensors, "doc_ids": ids, "window": case.get("window")}


def whole(case: dict, dtype: torch.dtype = torch.float64, length: int = LENGTH) -> dict:
    """Output and gradients of `attend` on the whole sequence, in one process."""
    given = inputs(case, dtype, length)
    leaves = {
        name: given[name].double().requires_grad_()
        for name in ("q", "k", "v", "sinks")
        if given[name] is not None
    }
    mask = visible_keys(length, given["window"], given["doc_ids"], "cpu")
    if mask is not None and given["sinks"] is not None:
        mask = F.pad(mask, (1, 0, 1, 0), value=True)
    out = attend(leaves["q"], leaves["k"], leaves["v"], mask, 0.4, leaves.get("sinks"))
    out.backward(given["grad"].double())
    return {"out": out, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def share(rank, world, case, dtype, kind, length=LENGTH, mutate=None):
    """The same from one rank's tokens; NumPy, because tensors do not survive their rank."""
    if mutate is not None:
        mutate()
    warnings.simplefilter("error")
    group = torch.distributed.group.WORLD
    own = cp.places(length, rank, world)
    given = inputs(case, dtype, length)
    leaves = {name: given[name][:, :, own].requires_grad_() for name in ("q", "k", "v")}
    if given["sinks"] is not None:
        leaves["sinks"] = given["sinks"].clone().requires_grad_()
    ids = None if given["doc_ids"] is None else given["doc_ids"][:, own]
    out = cp.context_attend(
        *(leaves[name] for name in ("q", "k", "v")),
        scale=0.4,
        window=given["window"],
        doc_ids=ids,
        kind=kind,
        sinks_H=leaves.get("sinks"),
        group=group,
    )
    assert out.dtype == dtype and out.shape == given["grad"][:, own].shape
    out.backward(given["grad"][:, own])
    found = {"out": out.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
    assert all(found[f"d{name}"].dtype == leaf.dtype for name, leaf in leaves.items())
    return {name: tensor.double().numpy() for name, tensor in found.items()}


def joined(results: list[dict], length: int = LENGTH) -> dict:
    """One sequence of all ranks' shares; the gradient of the sinks is the sum of their parts."""
    world = len(results)
    order = torch.cat([cp.places(length, rank, world) for rank in range(world)]).argsort()
    found = {}
    for name in results[0]:
        parts = [torch.from_numpy(result[name]) for result in results]
        at = 1 if name == "out" else 2
        if name == "dsinks":
            found[name] = torch.stack(parts).sum(0)
        else:
            found[name] = torch.cat(parts, at).index_select(at, order)
    return found


def check(world, case, kind, tolerance=1e-13, dtype=torch.float64, length=LENGTH, mutate=None):
    found = run_ranks(share, world, case, dtype, kind, length, mutate)
    assert_same(joined(found, length), whole(case, dtype, length), tolerance=tolerance)


@pytest.mark.parametrize("kind", cp.KINDS)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
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


def test_a_value_wider_than_a_key_needs_no_kernel():
    given = inputs({"value_width": 11})
    seat = cp.Seat(0, 1, no_neighbours)
    out = cp.ring_attend(given["q"], given["k"], given["v"], None, None, 0.4, None, seat)
    scores = (given["q"] @ given["k"].transpose(-1, -2)) * 0.4
    scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
    wanted = (scores.softmax(-1) @ given["v"]).transpose(1, 2).flatten(2)
    assert_same({"out": out}, {"out": wanted}, tolerance=1e-13)


@pytest.mark.parametrize("kind", cp.KINDS)
@pytest.mark.parametrize("name", ["gqa_latent_sinks", "all"])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_narrow_floats(dtype, tolerance, name, kind):
    check(2, CASES[name], kind, tolerance, dtype)


def no_neighbours(tensors):
    raise AssertionError("a ring of one has nobody to pass to")


def test_a_group_of_none_is_attention_itself():
    for name, kind in (("all", "ring"), ("all", "all_gather"), ("plain", "ring")):
        given, case = inputs(CASES[name]), CASES[name]
        out = cp.context_attend(
            *(given[x] for x in ("q", "k", "v")),
            scale=0.4,
            window=given["window"],
            doc_ids=given["doc_ids"],
            sinks_H=given["sinks"],
            group=None,
            kind=kind,
        )
        assert_same({"out": out}, {"out": whole(case)["out"]}, tolerance=0)


# What would make the comparison above worthless if it passed.


def local_places():
    real = cp.blocks
    cp.blocks = lambda index, source, *rest: real(0, 0, *rest)
    cp.places = lambda length, index, world, device="cpu": torch.arange(
        length // world, device=device
    )


def no_correction():
    def merge(out, lse, more, more_lse):
        out.add_(more)
        lse.copy_(torch.logaddexp(lse, more_lse))

    cp._merge = merge


def block_lse_in_backward():
    real = cp._merge

    def merge(out, lse, more, more_lse):
        real(out, lse, more, more_lse)
        lse.copy_(more_lse)

    cp._merge = merge


def gradients_one_short():
    cp._add_home, real = None, cp._visits

    def visits(tensors, seat):
        return ((seat.index, held) for _, held in real(tensors, seat))

    cp._visits = visits


def mutated_share(rank, world, case, kind, mutate):
    own, length = cp.places(LENGTH, rank, world), LENGTH
    result = share(rank, world, case, torch.float64, kind, length, partial(swap_back, mutate, own))
    return result


def swap_back(mutate, own):
    mutate()
    if mutate is local_places:
        broken, calls = cp.places, []

        def places(length, index, world, device="cpu"):
            # The test itself cuts its inputs by the first call, rightly.
            calls.append(index)
            return own if len(calls) == 1 else broken(length, index, world, device)

        cp.places = places


@pytest.mark.parametrize(
    "mutate, kind, name",
    [
        (local_places, "ring", "plain"),
        (no_correction, "ring", "plain"),
        (no_correction, "ring", "all"),
        (block_lse_in_backward, "ring", "plain"),
        (gradients_one_short, "ring", "plain"),
    ],
)
def test_a_wrong_ring_is_found(mutate, kind, name):
    found = run_ranks(mutated_share, 2, CASES[name], kind, mutate)
    with pytest.raises(AssertionError, match="error .* above"):
        assert_same(joined(found), whole(CASES[name]), tolerance=1e-3)
