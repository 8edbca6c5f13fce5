"""Collectives over ranks give the values and the gradients of one process."""

import pytest
import torch
import torch.distributed as dist

from curry_train.parallel import collectives
from curry_train.parallel.collectives import (
    exchange_rows,
    gather_sequence,
    own_slice,
    scatter_sequence,
    stack_ranks,
    sum_forward,
    sum_own_slice,
    sum_ranks,
    swap_rows,
)
from curry_train.testing import run_ranks

WORLD = 3
SHAPES = ((2, 6, 4), (6, 4), (2, 2, 6, 1), (1, 6, 4))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def crooked(x: torch.Tensor) -> torch.Tensor:
    """Return the same values in memory that is not in order."""
    return x.mT.contiguous().mT


def slice_of(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(WORLD, x.dim() - 2)[rank]


def gathered(rank, world, shape, dtype):
    group = dist.group.WORLD
    whole, loss = drawn(*shape, dtype=dtype), [drawn(*shape, seed=r + 1) for r in range(world)]
    x = crooked(slice_of(whole, rank)).requires_grad_()
    out = gather_sequence(x, group)
    assert out.is_contiguous() and out.dtype == dtype
    assert torch.equal(out, whole), "values"
    # Each rank's loss reads all of it: the gradient is the sum of all ranks' losses, own slice.
    out.backward(crooked(loss[rank]).to(dtype))
    wanted = slice_of(sum(one.to(dtype) for one in loss), rank)
    torch.testing.assert_close(
        x.grad, wanted, rtol=0, atol=0.05 if dtype != torch.float64 else 1e-14
    )
    return True


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_sequence(shape, dtype):
    assert run_ranks(gathered, WORLD, shape, dtype) == [True] * WORLD


def scattered(rank, world, shape, dtype):
    group = dist.group.WORLD
    parts = [drawn(*shape, seed=r, dtype=dtype) for r in range(world)]
    loss = drawn(*shape, seed=9, dtype=dtype)
    x = crooked(parts[rank]).requires_grad_()
    out = scatter_sequence(x, group)
    assert out.is_contiguous() and out.dtype == dtype
    atol = 0.05 if dtype != torch.float64 else 1e-14
    torch.testing.assert_close(out, slice_of(sum(parts), rank), rtol=0, atol=atol)
    # The loss of a rank reads its slice; x of every rank owes the gradients of all slices.
    out.backward(crooked(slice_of(loss, rank)))
    assert torch.equal(x.grad, loss)
    return True


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scatter_sequence(shape, dtype):
    assert run_ranks(scattered, WORLD, shape, dtype) == [True] * WORLD


def summed(rank, world):
    group, parts = dist.group.WORLD, [drawn(4, 3, seed=r) for r in range(world)]
    losses = [drawn(4, 3, seed=10 + r) for r in range(world)]
    for function, wanted in ((sum_forward, losses[rank]), (sum_ranks, sum(losses))):
        x = crooked(parts[rank]).requires_grad_()
        out = function(x, group)
        torch.testing.assert_close(out, sum(parts), rtol=0, atol=1e-14)
        assert torch.equal(x.detach(), parts[rank]), "the argument stays as it is"
        grad = crooked(losses[rank])
        out.backward(grad)
        torch.testing.assert_close(x.grad, wanted, rtol=0, atol=1e-14)
        assert torch.equal(grad, losses[rank]), "the gradient stays as it is"
    counts = sum_forward(torch.tensor([rank, 1]), group)
    assert counts.tolist() == [3, world] and counts.dtype == torch.int64
    return True


def test_sums_with_the_gradient_of_the_own_part_and_of_all():
    assert run_ranks(summed, WORLD) == [True] * WORLD


# Rows from rank (row) to rank (column): uneven, none at all from 0, none at all to 2.
SPLITS = {
    "uneven": [[1, 2, 0], [3, 0, 1], [0, 2, 2]],
    "rank 0 sends nothing": [[0, 0, 0], [1, 0, 2], [0, 0, 1]],
    "rank 2 receives nothing": [[1, 2, 0], [0, 3, 0], [2, 1, 0]],
    "nothing at all": [[0] * 3] * 3,
    "all to one": [[4, 0, 0], [5, 0, 0], [1, 0, 0]],
}


def exchanged(rank, world, splits, width):
    group = dist.group.WORLD
    send, receive = splits[rank], [row[rank] for row in splits]
    sent = [drawn(sum(row), *width, seed=r) for r, row in enumerate(splits)]
    wanted = torch.cat([s.split(row)[rank] for s, row in zip(sent, splits, strict=True)])
    x = sent[rank]
    x = (crooked(x) if width else x).requires_grad_()
    assert torch.equal(swap_rows(x.detach(), send, receive, group), wanted)
    out = exchange_rows(x, send, receive, group)
    assert torch.equal(out, wanted) and out.shape == (sum(receive), *width)
    # Gradients go back to the row they came from: weight every received row by who got it.
    (out * (rank + 1.0)).sum().backward()
    back = torch.cat([torch.full((n, *width), r + 1.0) for r, n in enumerate(send)])
    assert torch.equal(x.grad, back.double())
    return True


@pytest.mark.parametrize("width", [(), (3,), (2, 2)], ids=str)
def test_exchange_rows_with_uneven_and_empty_splits(width):
    for splits in SPLITS.values():
        assert run_ranks(exchanged, WORLD, splits, width) == [True] * WORLD


def slices(rank, world):
    group, x = dist.group.WORLD, drawn(6, 4, 9)
    for dim, size in ((0, 2), (2, 3), (-1, 3)):
        own = own_slice(x, dim, group)
        assert torch.equal(own, x.narrow(dim, rank * size, size))
        assert own.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "a view"
    stacked = stack_ranks(crooked(x[0]) + rank, group)
    assert torch.equal(stacked, torch.stack([x[0] + r for r in range(world)]))
    flags = stack_ranks(torch.tensor([rank == 1, True]), group)
    assert flags.tolist() == [[r == 1, True] for r in range(world)]
    torch.testing.assert_close(
        sum_own_slice(x[:world].movedim(2, 1), group), x[:world].movedim(2, 1)[rank] * world
    )
    return True


def test_slices_and_stacks():
    assert run_ranks(slices, WORLD) == [True] * WORLD


def group_of_one(rank, world):
    group, x = dist.group.WORLD, drawn(2, 4, 3).requires_grad_()
    grad = drawn(2, 4, 3, seed=1)
    for function in (gather_sequence, scatter_sequence, sum_forward, sum_ranks):
        x.grad = None
        out = function(x, group)
        assert torch.equal(out, x)
        out.backward(grad)
        assert torch.equal(x.grad, grad)
    rows = x.detach()[0].requires_grad_()
    out = exchange_rows(rows, [4], [4], group)
    out.sum().backward()
    assert torch.equal(out, rows) and torch.equal(rows.grad, torch.ones_like(rows))
    assert torch.equal(own_slice(x, 1, group), x)
    return True


def test_a_group_of_one_and_no_group_change_nothing():
    assert run_ranks(group_of_one, 1) == [True]
    x = drawn(2, 4, 3)
    for function in (gather_sequence, scatter_sequence, sum_forward, sum_ranks):
        assert function(x, None) is x
    assert own_slice(x, 1, None) is x


def wrong_gradient(rank, world, function, instead):
    """Plant the other way to treat a gradient; the tests above must tell the two apart."""
    name = function.__name__
    setattr(collectives, name, instead)
    globals()[name] = instead
    try:
        summed(rank, world) if "sum" in name else gathered(rank, world, (6, 4), torch.float64)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    ("function", "instead"),
    [(sum_forward, sum_ranks), (sum_ranks, sum_forward)],
    ids=["sum_forward sums", "sum_ranks does not"],
)
def test_a_gradient_treated_the_other_way_is_found(function, instead):
    assert run_ranks(wrong_gradient, WORLD, function, instead) == [True] * WORLD
