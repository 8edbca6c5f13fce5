"""Experts spread over ranks equal the bank of one process, and tokens travel no more than once."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from curry_train.kernels.experts import experts
from curry_train.layers.routing import Routing
from curry_train.parallel import expert_parallel
from curry_train.parallel.expert_parallel import combine, dispatch, local_ids, pack, plan, unpack
from curry_train.testing import run_ranks

E, D, F = 8, 6, 5
TOLERANCE = 1e-13


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ids_of(case: str, rank: int, world: int, choices: int) -> torch.Tensor:
    """Return the ids int64 [T, K] that a rank's tokens chose: any number of tokens."""
    generator = torch.Generator().manual_seed(rank)
    tokens = 5 + 2 * rank
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :choices]
    if case == "all to one rank":
        ids = ids % (E // world) + (world - 1) * (E // world)
    elif case == "all to one expert":
        ids = torch.full_like(ids, 3)
    elif (case == "a rank without tokens" and rank == 1) or case == "nobody has a token":
        ids = ids[:0]
    elif case == "dropped and padding":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1)
        ids[0] = -1
    elif case == "all dropped":
        ids = torch.full_like(ids, -1)
    return ids


CASES = ("uneven", "all to one rank", "all to one expert", "a rank without tokens",
         "nobody has a token", "dropped and padding", "all dropped")  # fmt: skip


def bank(rank: int = 0, ranks: int = 1) -> list[torch.Tensor]:
    """Return w13 [E', 2F, D] and w2 [E', D, F] of a rank's share of the experts."""
    whole = drawn(E, 2 * F, D, seed=50), drawn(E, D, F, seed=51)
    return [w.chunk(ranks)[rank].clone().requires_grad_() for w in whole]


def routed(ids: torch.Tensor, weights: torch.Tensor) -> Routing:
    nothing = torch.zeros(0)
    return Routing(ids, weights, nothing, nothing, nothing)


def inputs(rank: int, tokens: int, choices: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [T, D], router weights [T, K] and the gradient [T, D] of a rank."""
    seeds = (100 + rank, 200 + rank, 300 + rank)
    x, weights, loss = (
        drawn(tokens, n, seed=s) for n, s in zip((D, choices, D), seeds, strict=True)
    )
    return x.requires_grad_(), weights.sigmoid().requires_grad_(), loss


def close(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    assert found.shape == wanted.shape, name
    if found.numel():
        scale = wanted.abs().max().clamp(min=1e-3)
        assert (found - wanted).abs().max() <= TOLERANCE * scale, name


def through_ranks(rank: int, world: int, ids: torch.Tensor):
    """Dispatch, experts, combine and backward; returns out and the gradients."""
    group, (w13, w2) = dist.group.WORLD, bank(rank, world)
    x, weights, loss = inputs(rank, *ids.shape)
    rows, there = dispatch(x, routed(ids, weights), E // world, group)
    out = combine(experts(rows, there.expert_ids, there.weights, w13, w2), there.exchange)
    out.backward(loss)
    return out, x.grad, weights.grad, w13.grad, w2.grad, there.exchange


def equals_one_bank(rank, world, case, choices):
    ids = [ids_of(case, r, world, choices) for r in range(world)]
    out, *grads, exchange = through_ranks(rank, world, ids[rank])
    # One process has all tokens and all experts.
    w13, w2 = bank()
    parts = [inputs(r, *ids[r].shape) for r in range(world)]
    wholes = [experts(x, i, w, w13, w2) for (x, w, _), i in zip(parts, ids, strict=True)]
    torch.cat(wholes).backward(torch.cat([loss for _, _, loss in parts]))
    close(out, wholes[rank], f"{case}: out")
    share = slice(rank * E // world, (rank + 1) * E // world)
    wanted = parts[rank][0].grad, parts[rank][1].grad, w13.grad[share], w2.grad[share]
    for name, found, one in zip(("x", "weights", "w13", "w2"), grads, wanted, strict=True):
        close(found, one, f"{case}: gradient of {name}")
    # A token visits a rank once, however many of its experts are there; -1 visits nobody.
    owners = torch.where(ids[rank] < 0, -1, ids[rank] // (E // world))
    visits = [{int(o) for o in row if o >= 0} for row in owners]
    assert exchange.send == [sum(r in v for v in visits) for r in range(world)], case
    assert sum(exchange.send) == len(exchange.tokens) == sum(map(len, visits))
    return exchange.send, exchange.receive


@pytest.mark.parametrize("choices", [1, 2, 3, 4])
@pytest.mark.parametrize("world", [2, 4])
def test_experts_of_ranks_equal_one_bank(world, choices):
    for case in CASES if choices in (1, 3) else ("uneven", "dropped and padding"):
        traffic = run_ranks(equals_one_bank, world, case, choices)
        for rank, (_, receive) in enumerate(traffic):
            assert receive == [send[rank] for send, _ in traffic], case
        rows = sum(sum(send) for send, _ in traffic)
        if case == "all to one rank" and choices > 1:
            assert rows == sum(5 + 2 * rank for rank in range(world)), "one row a token"
        if case in ("nobody has a token", "all dropped"):
            assert rows == 0


def planned(rank, world):
    """What is planned for three tokens a rank, worked out by hand for eight experts on two."""
    ids = torch.tensor([[0, 3], [5, 1], [-1, 7]]) if rank == 0 else torch.tensor([[4, 6], [2, -1]])
    exchange = plan(ids, 4, dist.group.WORLD)
    here = local_ids(ids, 4, exchange)
    x = torch.arange(len(ids))[:, None].double()
    back = unpack(pack(x, exchange), exchange)
    return (
        exchange.tokens.tolist(), exchange.inverse.tolist(), exchange.send, exchange.receive,
        here.tolist(), back.flatten().tolist(),
    )  # fmt: skip


def test_the_plan_of_a_small_case_by_hand():
    first, second = run_ranks(planned, 2)
    # Tokens 0 and 1 go to rank 0; 1 and 2 to rank 1: four rows, token 1 travels to both.
    assert first[:4] == ([0, 1, 1, 2], [[0, -1], [1, 2], [-1, 3]], [2, 2], [2, 1])
    assert first[4] == [[0, 3], [-1, 1], [2, -1]]
    assert first[5] == [0.0, 2.0, 2.0]
    assert second[:4] == ([1, 0], [[-1, 1], [0, -1]], [1, 1], [2, 1])
    assert second[4] == [[1, -1], [-1, 3], [0, 2]]


def large_plan(rank, world):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(-1, E, (3000, 2), generator=generator)
    exchange = plan(ids, E // world, dist.group.WORLD)
    owners = torch.where(ids < 0, -1, ids // (E // world))
    wanted = [(owners == r).any(1).nonzero().flatten() for r in range(world)]
    assert torch.equal(exchange.tokens, torch.cat(wanted)), "tokens in order, rank by rank"
    row = torch.full((3000, world), -1, dtype=torch.int32)
    for r, tokens in enumerate(wanted):
        row[tokens, r] = torch.arange(len(tokens)).int() + sum(exchange.send[:r])
    assert torch.equal(exchange.inverse, row) and exchange.inverse.is_contiguous()
    return True


def test_tokens_keep_their_order_in_a_large_plan():
    """So large that a sort which is not stable shows."""
    assert run_ranks(large_plan, 2) == [True] * 2


@contextmanager
def counted_syncs():
    """Count the calls that make the host wait for values of a device."""
    calls, kept = [], {}
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
        real = kept[name] = getattr(torch.Tensor, name)

        def counting(self, *args, _real=real, _name=name, **kwargs):
            calls.append(_name)
            return _real(self, *args, **kwargs)

        setattr(torch.Tensor, name, counting)
    try:
        yield calls
    finally:
        for name, real in kept.items():
            setattr(torch.Tensor, name, real)


def syncs(rank, world):
    ids = ids_of("dropped and padding", rank, world, 3)
    x, weights, loss = inputs(rank, *ids.shape)
    with counted_syncs() as calls:
        rows, there = dispatch(x, routed(ids, weights), E // world, dist.group.WORLD)
        combine(rows * 1.0, there.exchange).backward(loss)
    assert x.grad is not None
    return calls


def test_the_host_waits_once_for_the_device():
    assert run_ranks(syncs, 2) == [["tolist"]] * 2


def repeated(rank, world):
    runs = [
        through_ranks(rank, world, ids_of("dropped and padding", rank, world, 4))[:5]
        for _ in range(3)
    ]
    for run in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], run, strict=True))
    return True


def test_repeats_are_bitwise_equal():
    assert run_ranks(repeated, 4) == [True] * 4


def narrow(rank, world):
    """In bf16 the rows of a token's ranks are added in float32 and rounded once."""
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    ids = torch.tensor([[0, 2, 4]])
    exchange = plan(ids, 2, dist.group.WORLD)
    assert exchange.send == [1, 1, 1, 0]
    out = unpack(rows, exchange)
    assert out.dtype == torch.bfloat16
    return out.item()


def test_rows_of_a_token_are_summed_in_float32():
    assert run_ranks(narrow, 4) == [258.0] * 4


def planted(rank, world, mutant):
    if mutant == "ids stay global":
        expert_parallel.number_own = lambda ids, per_rank, group: ids.clamp(max=per_rank - 1)
    elif mutant == "rows are not summed":
        expert_parallel._sum_rows = lambda rows, exchange: rows.new_zeros(
            len(exchange.inverse), *rows.shape[1:]
        ).index_copy_(0, exchange.tokens, rows)
    elif mutant == "weights travel without their gradient":
        real = expert_parallel.dispatch

        def detached(x, routing, per_rank, group):
            weights = routing.weights.detach() + 0 * routing.weights
            return real(x, routed(routing.expert_ids, weights), per_rank, group)

        globals()["dispatch"] = detached
    try:
        equals_one_bank(rank, world, "uneven", 3)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "mutant",
    ["ids stay global", "rows are not summed", "weights travel without their gradient"],
)
def test_a_planted_fault_is_found(mutant):
    assert all(run_ranks(planted, 2, mutant))
