"""Matrices and the vocabulary split over ranks equal whole ones in float64, gradients included."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from curry_train.layers.linear import Embedding, Linear, local
from curry_train.parallel import tensor_parallel
from curry_train.parallel.collectives import gather_sequence, scatter_sequence
from curry_train.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_nll,
)
from curry_train.testing import run_ranks

B, S, WIDTH, HIDDEN, VOCAB = 2, 8, 12, 20, 64
TOLERANCE = 1e-13


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def meta(layer: type, *sizes) -> torch.nn.Module:
    with torch.device("meta"):
        return layer(*sizes).double()


def slice_of(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def fill(split: torch.nn.Module, values: dict[str, tuple[torch.Tensor, int | None]]) -> None:
    """Give a split layer memory and its part of whole values; name -> (values, split dim)."""
    split.to_empty(device="cpu")
    parameters = dict(split.named_parameters())
    assert parameters.keys() == values.keys()
    for name, (whole, dim) in values.items():
        parameter = parameters[name]
        assert parameter.shape == whole.shape, "the global shape"
        assert isinstance(parameter.data, DTensor) == (dim is not None)
        part = whole if dim is None else slice_of(whole, dim)
        if dim is not None:
            assert parameter.placements == (Shard(dim),)
        assert local(parameter).shape == part.shape
        with torch.no_grad():
            local(parameter).copy_(part)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300)
    assert error <= TOLERANCE, float(error)


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    return local(parameter.grad)


def two_matrices(rank, world, bias):
    """Column- then row-parallel, between slices of the sequence, as in a feed-forward."""
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (world,))
    first, second = meta(Linear, WIDTH, HIDDEN, bias), meta(Linear, HIDDEN, WIDTH, bias)
    w1, w2 = drawn(HIDDEN, WIDTH, seed=1), drawn(WIDTH, HIDDEN, seed=2)
    b1, b2 = drawn(HIDDEN, seed=3), drawn(WIDTH, seed=4)
    column, row = ColumnParallelLinear(first, mesh), RowParallelLinear(second, mesh, group)
    fill(column, {"weight": (w1, 0)} | ({"bias": (b1, 0)} if bias else {}))
    fill(row, {"weight": (w2, 1)} | ({"bias": (b2, None)} if bias else {}))
    whole = [one.clone().requires_grad_() for one in (drawn(B, S, WIDTH), w1, w2, b1, b2)]
    x, w1, w2, b1, b2 = whole
    wanted = F.linear(F.silu(F.linear(x, w1, b1 if bias else None)), w2, b2 if bias else None)
    loss = drawn(B, S, WIDTH, seed=5)
    wanted.backward(loss)
    own = slice_of(x.detach(), 1).clone().requires_grad_()
    out = row(F.silu(column(gather_sequence(own, group))))
    close(out, slice_of(wanted, 1))
    out.backward(slice_of(loss, 1))
    close(own.grad, slice_of(x.grad, 1))
    close(grad_of(column.weight), slice_of(w1.grad, 0))
    close(grad_of(row.weight), slice_of(w2.grad, 1))
    if bias:
        close(grad_of(column.bias), slice_of(b1.grad, 0))
        # The whole bias saw this rank's tokens only: what it owes is the sum over ranks.
        dist.all_reduce(row.bias.grad)
        close(row.bias.grad, b2.grad)
    return True


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("world", [2, 4])
def test_column_and_row_parallel_linear_equal_whole_ones(world, bias):
    assert run_ranks(two_matrices, world, bias) == [True] * world


def kept_dtype(rank, world):
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (world,))
    row = RowParallelLinear(meta(Linear, HIDDEN, WIDTH, True), mesh, group)
    fill(row, {"weight": (drawn(WIDTH, HIDDEN), 1), "bias": (drawn(WIDTH), None)})
    column = ColumnParallelLinear(meta(Linear, WIDTH, HIDDEN, True), mesh)
    fill(column, {"weight": (drawn(HIDDEN, WIDTH), 0), "bias": (drawn(HIDDEN), 0)})
    for dtype in (torch.bfloat16, torch.float32):
        hidden = column(drawn(B, S, WIDTH).to(dtype))
        assert hidden.dtype == dtype and hidden.shape == (B, S, HIDDEN // world)
        out = row(hidden)
        assert out.dtype == dtype and out.shape == (B, S // world, WIDTH)
    return True


def test_results_have_the_dtype_of_x_and_weights_their_own():
    assert run_ranks(kept_dtype, 2) == [True] * 2


def embedded(rank, world):
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (world,))
    weight = drawn(VOCAB, WIDTH).requires_grad_()
    layer = VocabParallelEmbedding(meta(Embedding, VOCAB, WIDTH), mesh, group)
    fill(layer, {"weight": (weight.detach(), 0)})
    ids = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(0))
    ids[0, :2], ids[1, 0] = torch.tensor([0, VOCAB - 1]), VOCAB // 2
    loss = drawn(B, S, WIDTH, seed=1)
    wanted = F.embedding(ids, weight)
    wanted.backward(loss)
    out = layer(ids)
    assert torch.equal(out, slice_of(wanted, 1))
    out.backward(slice_of(loss, 1))
    close(grad_of(layer.weight), slice_of(weight.grad, 0))
    for wrong in (VOCAB, -1):
        with pytest.raises(ValueError, match=f"input_ids: found {wrong}; allowed are 0 to 63"):
            layer(torch.full((1, S), wrong))
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_vocab_parallel_embedding_equals_a_whole_one(world):
    assert run_ranks(embedded, world) == [True] * world


def logits_of(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [N, V] and labels [N] of a case."""
    rows = 12
    logits, labels = drawn(rows, VOCAB), torch.arange(rows) * 5 % VOCAB
    labels[:4] = torch.tensor([0, VOCAB - 1, VOCAB // 2, VOCAB // 2 - 1])
    if case == "some ignored":
        labels[::3] = -100
    elif case == "all ignored":
        labels[:] = -100
    elif case == "labels of one rank":
        labels = labels % (VOCAB // 4)
    elif case == "huge":
        logits *= 1e4
    elif case == "far apart":
        logits[:, 0], logits[:, -1] = 1e4, -1e4
    elif case == "padding":
        logits[:, 17:], labels = -torch.inf, labels % 17
    return logits, labels


CASES = ("plain", "some ignored", "all ignored", "labels of one rank", "huge", "far apart",
         "padding")  # fmt: skip


def nll_of_ranks(rank, world):
    group = dist.group.WORLD
    for case in CASES:
        logits, labels = logits_of(case)
        whole = logits.requires_grad_()
        wanted = F.cross_entropy(whole, labels, ignore_index=-100, reduction="none")
        loss = drawn(len(labels), seed=7)
        wanted.backward(loss)
        own = slice_of(whole.detach(), 1).clone().requires_grad_()
        found = vocab_parallel_nll(own, labels, group)
        assert found.dtype == torch.float64
        assert torch.equal(found == 0, wanted == 0) and torch.isfinite(found).all(), case
        close(found, wanted)
        found.backward(loss)
        scale = whole.grad.abs().max().clamp(min=1e-300)
        assert (own.grad - slice_of(whole.grad, 1)).abs().max() <= TOLERANCE * scale, case
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_vocab_parallel_nll_equals_cross_entropy_of_whole_logits(world):
    assert run_ranks(nll_of_ranks, world) == [True] * world


def narrow_nll(rank, world, dtype):
    logits, labels = logits_of("some ignored")
    logits = logits.to(dtype).requires_grad_()
    wanted = F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="none")
    wanted.sum().backward()
    own = slice_of(logits.detach(), 1).clone().requires_grad_()
    found = vocab_parallel_nll(own, labels, dist.group.WORLD)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    found.sum().backward()
    assert own.grad.dtype == dtype
    # One rounding to the narrow dtype, of the same float32 values.
    torch.testing.assert_close(own.grad, slice_of(logits.grad, 1), rtol=2**-7, atol=1e-6)
    return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_logits_are_read_in_float32(dtype):
    assert run_ranks(narrow_nll, 2, dtype) == [True] * 2


def not_a_number(rank, world):
    for column in (0, VOCAB - 1):
        logits, labels = logits_of("plain")
        logits[3, column] = torch.nan
        own = slice_of(logits, 1).clone().requires_grad_()
        found = vocab_parallel_nll(own, labels, dist.group.WORLD)
        assert found.isnan().nonzero().flatten().tolist() == [3], "that row, on every rank"
        found.sum().backward()
        assert own.grad.isnan().any(1).nonzero().flatten().tolist() == [3]
    for wrong in (VOCAB, -1):
        labels[5] = wrong
        with pytest.raises(ValueError, match=f"labels: found {wrong}; allowed are 0 to 63"):
            vocab_parallel_nll(own, labels, dist.group.WORLD)
    return True


def test_nan_stays_nan_and_a_label_that_is_none_is_refused():
    assert run_ranks(not_a_number, 2) == [True] * 2


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return out


def memory_of_head(rank, world, whole):
    """Head and loss of 64 tokens over 1024 words; `whole` gathers the logits, as none should."""
    group, mesh, rows, vocab = dist.group.WORLD, init_device_mesh("cpu", (world,)), 64, 1024
    head = ColumnParallelLinear(meta(Linear, WIDTH, vocab), mesh)
    fill(head, {"weight": (drawn(vocab, WIDTH), 0)})
    hidden = slice_of(drawn(1, rows, WIDTH), 1).clone().requires_grad_()
    labels, saved = torch.arange(rows), []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):  # fmt: skip
        logits = head(gather_sequence(hidden, group)).flatten(0, 1)
        if whole:
            logits = gather_sequence(logits.mT.contiguous(), group).mT
            nll = F.cross_entropy(logits, labels)
        else:
            nll = vocab_parallel_nll(logits, labels, group).sum()
        nll.backward()
    assert head.weight.grad is not None and hidden.grad is not None
    return largest.elements, max(saved)


@pytest.mark.parametrize("world", [2, 4])
def test_no_tensor_holds_the_full_logits(world):
    share = 64 * 1024 // world
    for largest, saved in run_ranks(memory_of_head, world, False):
        assert largest == share and saved <= share
    for largest, _ in run_ranks(memory_of_head, world, True):
        assert largest >= 64 * 1024, "the measure sees logits that are whole"


def planted(rank, world, mutant):
    """Return whether a test above fails when one line of the code is wrong."""
    if mutant == "own maximum only":
        reduce = dist.all_reduce
        dist.all_reduce = lambda x, op=dist.ReduceOp.SUM, group=None: (
            None if op == dist.ReduceOp.MAX else reduce(x, op, group)
        )
        run = nll_of_ranks
    elif mutant == "bias added by every rank":

        def forward(self, x):
            return scatter_sequence(F.linear(x, local(self.weight), self.bias), self.group)

        RowParallelLinear.forward = forward
        run = lambda rank, world: two_matrices(rank, world, True)  # noqa: E731
    else:
        tensor_parallel.scatter_sequence = lambda x, group: slice_of(x, x.dim() - 2)
        run = embedded
    try:
        run(rank, world)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "mutant", ["own maximum only", "bias added by every rank", "rows not summed over ranks"]
)
def test_a_planted_fault_is_found(mutant):
    assert any(run_ranks(planted, 2, mutant))
