"""The expert bank: every backend of a CPU against a float64 loop, and what the op promises."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from curry_train.kernels import backends, dispatch, expert_rows, reference_routing, row_products
from curry_train.kernels.experts import experts
from curry_train.kernels.reference_routing import moe_combine, moe_sort
from curry_train.testing import assert_same

NAMES = ("out", "x", "weights", "w13", "w2", "bias13")
RUNS = [
    ("grouped_mm", torch.float32),
    ("grouped_mm", torch.bfloat16),
    ("grouped_mm", torch.float16),
    ("sorted", torch.float64),
    ("sorted", torch.float32),
    ("sorted", torch.bfloat16),
    ("sorted", torch.float16),
    ("reference", torch.float64),
    ("reference", torch.float32),
]
IDS = {
    "random": lambda T, K, E: torch.rand(T, E).argsort(1)[:, :K],
    "first, a middle and the last expert empty": lambda T, K, E: torch.randint(1, 3, (T, K)),
    "all to one expert": lambda T, K, E: torch.full((T, K), E - 1),
    "repeats": lambda T, K, E: torch.randint(0, E, (T, 1)).expand(T, K),
    "padding": lambda T, K, E: torch.randint(-1, E, (T, K)),
    "all padding": lambda T, K, E: torch.full((T, K), -1),
}
SHAPES = {
    # T, D, F, E, K
    "plain": (40, 16, 24, 5, 2),
    "no token": (0, 16, 8, 4, 2),
    "one token": (1, 16, 8, 4, 2),
    "one choice": (33, 16, 8, 7, 1),
    "every expert": (9, 8, 16, 3, 3),
    "one expert": (17, 8, 8, 1, 1),
    "prime number of experts": (64, 8, 8, 13, 4),
    "more choices than experts": (6, 8, 8, 2, 5),
}


def problem(T, D, F, E, K, case="random", seed=0):
    """Return float64 leaves x, weights, w13, w2, bias13, and ids."""
    torch.manual_seed(seed)
    if case == "random" and K > E:
        case = "repeats"
    ids = IDS[case](T, K, E)
    tensors = {
        "x": torch.randn(T, D, dtype=torch.float64),
        "weights": torch.rand(T, K, dtype=torch.float64),
        "w13": torch.randn(E, 2 * F, D, dtype=torch.float64) * D**-0.5,
        "w2": torch.randn(E, D, F, dtype=torch.float64) * F**-0.5,
        "bias13": torch.randn(E, 2 * F, dtype=torch.float64),
    }
    return tensors, ids


def loop(x, ids, weights, w13, w2, bias13=None, limit=None, interleaved=False):
    """One token and one choice at a time."""
    rows = []
    for token, chosen, scales in zip(x, ids.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, scale in zip(chosen, scales, strict=True):
            if expert < 0:
                continue
            h = w13[expert] @ token
            if bias13 is not None:
                h = h + bias13[expert]
            gate, up = (h[0::2], h[1::2]) if interleaved else h.chunk(2)
            if limit is None:
                a = F.silu(gate) * up
            else:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            total = total + scale * (w2[expert] @ a)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def plain(x, ids, weights, w13, w2, bias13=None, limit=None, interleaved=False):
    """What one would write in plain PyTorch: a mask for each expert."""
    out = torch.zeros_like(x)
    for expert in range(w13.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        h = F.linear(x[token], w13[expert], None if bias13 is None else bias13[expert])
        gate, up = (h[:, 0::2], h[:, 1::2]) if interleaved else h.chunk(2, -1)
        if limit is None:
            a = F.silu(gate) * up
        else:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        scale = weights[token, choice, None]
        out = out.index_add(0, token, (F.linear(a, w2[expert]) * scale).to(out.dtype))
    return out


def run(function, tensors, ids, dtype, upstream, **options):
    """Return output and gradients by name, computed in dtype from the same values."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in tensors.items()}
    bias13 = leaves.get("bias13")
    order = (leaves["x"], ids, leaves["weights"], leaves["w13"], leaves["w2"])
    out = function(*order, bias13=bias13, **options)
    grads = (
        torch.autograd.grad(
            out,
            list(leaves.values()),
            upstream.to(dtype),
            allow_unused=True,
            materialize_grads=True,
        )
        if out.requires_grad
        else [torch.zeros_like(t) for t in leaves.values()]
    )
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def held_against_float64(backend, dtype, tensors, ids, **options):
    """Our error may be twice that of plain torch in the same dtype, plus a rounding."""
    rounded = {name: t.to(dtype).double() for name, t in tensors.items()}
    upstream = torch.randn_like(rounded["x"]).to(dtype).double()
    exact = run(loop, rounded, ids, torch.float64, upstream, **options)
    theirs = run(plain, rounded, ids, dtype, upstream, **options)
    ours = run(experts, rounded, ids, dtype, upstream, backend=backend, **options)
    for name in exact:
        wanted = exact[name]
        assert ours[name].shape == wanted.shape and ours[name].dtype == dtype, name
        assert ours[name].isfinite().all(), name
        error = float((ours[name].double() - wanted).norm())
        allowed = 2 * float((theirs[name].double() - wanted).norm())
        allowed += 2 * torch.finfo(dtype).eps * float(wanted.norm())
        assert error <= allowed, f"{name}: {error:.2e} from float64, {allowed:.2e} allowed"


@pytest.mark.parametrize(("backend", "dtype"), RUNS)
@pytest.mark.parametrize("case", IDS)
def test_every_backend_equals_a_loop_in_float64(backend, dtype, case):
    tensors, ids = problem(*SHAPES["plain"], case)
    held_against_float64(backend, dtype, tensors, ids)


@pytest.mark.parametrize("backend", ["grouped_mm", "sorted", "reference"])
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_layouts_activations_and_edges(backend, limit, interleaved, bias, shape):
    tensors, ids = problem(*SHAPES[shape])
    if not bias:
        del tensors["bias13"]
    held_against_float64(backend, torch.float32, tensors, ids, limit=limit, interleaved=interleaved)


@pytest.mark.parametrize("case", ["random", "padding", "first, a middle and the last expert empty"])
@pytest.mark.parametrize("tokens", [1, 2, 31, 40, 333])
def test_the_products_of_onednn_equal_those_of_mm(case, tokens, monkeypatch):
    if not row_products.onednn_is_known():
        pytest.skip("torch without the oneDNN that the bank uses")
    monkeypatch.setattr(row_products, "ONEDNN_ROWS", 0)
    monkeypatch.setattr(row_products, "onednn_is_faster", lambda: True)
    tensors, ids = problem(tokens, 16, 24, 5, 2, case)
    assert row_products.products_of("grouped_mm", tensors["w13"].float(), 9) is row_products.ONEDNN
    held_against_float64("grouped_mm", torch.float32, tensors, ids)


@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("backend", ["grouped_mm", "sorted"])
def test_the_path_of_a_gpu_knows_no_number_of_rows(backend, case, monkeypatch):
    # On a GPU nothing is read back: all R rows are handled, and those of no expert hold anything.
    monkeypatch.setattr(backends, "sort_choices", functools.partial(moe_sort, block_m=16))
    monkeypatch.setattr(backends, "used_rows", lambda sorted: sorted.order.shape[0])
    monkeypatch.setattr(backends, "combine_rows", moe_combine)
    tensors, ids = problem(*SHAPES["plain"], case)
    held_against_float64(backend, torch.float32, tensors, ids)


@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("num_experts", [5, 70_000])
def test_the_sort_of_a_cpu_gives_what_the_twin_gives(case, num_experts):
    ids = IDS[case](40, 2, 5)
    wanted = moe_sort(ids, num_experts, 16)[:4]
    assert all(map(torch.equal, expert_rows.sort_choices(ids, num_experts)[:4], wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 7])
def test_the_path_of_a_gpu_reads_nothing_back(tokens, dtype):
    """A meta tensor has no values: what asks for one raises. Shapes are those of a CPU."""
    found = []
    for device in ("meta", "cpu"):
        ids = torch.zeros(tokens, 2, dtype=torch.int64, device=device)
        y = torch.zeros(2 * tokens, 8, dtype=dtype, device=device)
        sorted = expert_rows.sort_choices(ids, 5)
        out = expert_rows.combine_rows(y, sorted.inverse, y[:tokens, :2])
        assert all(t.device.type == device for t in (*sorted[:7], out))
        found.append([(t.shape, t.dtype) for t in (*sorted[:7], out)])
    assert found[0] == found[1]


def test_sizes_of_onednn_products_are_few():
    sizes = {row_products._step(n) * (n // row_products._step(n)) for n in range(1, 100_000)}
    assert len(sizes) < 250
    assert all(n - n % row_products._step(n) > 0.93 * n for n in range(1, 10_000))


def test_odd_widths_are_for_sorted():
    tensors, ids = problem(20, 15, 7, 3, 2)
    device = torch.device("cpu")
    assert dispatch.choose(device, torch.float32, width=15, hidden=7) == "sorted"
    held_against_float64("auto", torch.float32, tensors, ids)


@pytest.mark.parametrize("limit", [None, 0.7])
def test_gradcheck(limit):
    tensors, ids = problem(5, 3, 4, 3, 2, "padding")
    leaves = [t.requires_grad_() for t in tensors.values()]

    def bank(x, weights, w13, w2, bias13):
        return experts(x, ids, weights, w13, w2, bias13=bias13, limit=limit, backend="sorted")

    assert torch.autograd.gradcheck(bank, leaves, eps=1e-7, atol=1e-6)


def test_an_expert_without_tokens_gets_a_zero_gradient():
    tensors, ids = problem(*SHAPES["plain"], "first, a middle and the last expert empty")
    for backend in ("grouped_mm", "sorted", "reference"):
        found = run(experts, tensors, ids, torch.float32, torch.ones(40, 16), backend=backend)
        for name in ("w13", "w2", "bias13"):
            assert found[name][[0, 3, 4]].abs().max() == 0
            assert found[name][[1, 2]].abs().amin() > 0 or found[name][1].abs().max() > 0


@pytest.mark.parametrize("backend", ["grouped_mm", "sorted", "reference"])
def test_values_of_tokens_without_expert_are_not_looked_at(backend):
    tensors, ids = problem(*SHAPES["plain"], "padding")
    ids[::3] = -1
    upstream = torch.randn(40, 16)
    clean = run(experts, tensors, ids, torch.float32, upstream, backend=backend)
    tensors["x"][::3] = float("nan")
    tensors["weights"][ids < 0] = float("nan")
    upstream[::3] = float("nan")
    found = run(experts, tensors, ids, torch.float32, upstream, backend=backend)
    assert_same(found, clean, tolerance=0.0)
    assert clean["x"][::3].abs().max() == 0 and clean["weights"][ids < 0].abs().max() == 0


@pytest.mark.parametrize("backend", ["grouped_mm", "sorted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_repeat_bit_for_bit(backend, dtype):
    tensors, ids = problem(300, 32, 16, 6, 3)
    upstream = torch.randn(300, 32)
    first, second = (run(experts, tensors, ids, dtype, upstream, backend=backend) for _ in range(2))
    assert_same(first, second, tolerance=0.0)


@pytest.mark.parametrize("products", ["torch", "oneDNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_batch_or_its_place(products, dtype, monkeypatch):
    if products == "oneDNN":
        if dtype != torch.float32 or not row_products.onednn_is_known():
            pytest.skip("oneDNN's products are for float32")
        monkeypatch.setattr(row_products, "ONEDNN_ROWS", 0)
    monkeypatch.setattr(row_products, "onednn_is_faster", lambda: products == "oneDNN")
    tensors, ids = problem(512, 64, 32, 8, 2)
    upstream = torch.randn(512, 64)
    whole = run(experts, tensors, ids, dtype, upstream, backend="grouped_mm")

    def taken(rows):
        part = {k: v[rows] if k in ("x", "weights") else v for k, v in tensors.items()}
        return run(experts, part, ids[rows], dtype, upstream[rows], backend="grouped_mm")

    for rows in (torch.arange(64), torch.randperm(512)):
        found = taken(rows)
        for name in ("out", "x", "weights"):
            assert torch.equal(found[name], whole[name][rows]), name


def test_one_row_of_onednn_is_summed_like_many(monkeypatch):
    if not row_products.onednn_is_known():
        pytest.skip("torch without the oneDNN that the bank uses")
    x, w = torch.randn(50, 256), torch.randn(3, 64, 256)
    many = row_products.ONEDNN.forward(x, w, torch.tensor([0, 20, 20, 50], dtype=torch.int32))
    for first in (0, 19, 49):
        one = x[first : first + 1]
        offsets = torch.tensor([0, 1, 1, 1] if first < 20 else [0, 0, 0, 1], dtype=torch.int32)
        assert torch.equal(row_products.ONEDNN.forward(one, w, offsets)[0], many[first])


def saved_bytes(function):
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    return sum(seen.values()), out


@pytest.mark.parametrize("backend", ["grouped_mm", "sorted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_the_inputs_and_h_and_the_order(backend, dtype):
    T, D, hidden, E, K = 64, 32, 16, 4, 2
    tensors, ids = problem(T, D, hidden, E, K)
    x, weights, w13, w2, _ = (t.to(dtype).requires_grad_() for t in tensors.values())
    found, _ = saved_bytes(lambda: experts(x, ids, weights, w13, w2, backend=backend))
    R, size = T * K, dtype.itemsize
    inputs = sum(t.numel() for t in (x, weights, w13, w2)) * size
    # order and inverse, offsets and counts, num_tiles
    assert found == inputs + R * 2 * hidden * size + 4 * (2 * R + 2 * E + 1 + 1)


@pytest.mark.parametrize("frozen", ["x", "weights", "w13", "w2"])
def test_a_frozen_input_costs_no_gradient_and_changes_none(frozen):
    tensors, ids = problem(*SHAPES["plain"])
    upstream = torch.randn(40, 16)
    whole = run(experts, tensors, ids, torch.float32, upstream, backend="sorted")
    leaves = {n: t.float().requires_grad_(n != frozen) for n, t in tensors.items()}
    out = experts(
        leaves["x"],
        ids,
        leaves["weights"],
        leaves["w13"],
        leaves["w2"],
        bias13=leaves["bias13"],
        backend="sorted",
    )
    out.backward(upstream)
    assert leaves[frozen].grad is None
    for name, leaf in leaves.items():
        if name != frozen:
            assert torch.equal(leaf.grad, whole[name])


def test_router_weights_may_be_float32_beside_bf16():
    tensors, ids = problem(*SHAPES["plain"])
    x, _, w13, w2, _ = (t.bfloat16() for t in tensors.values())
    weights = tensors["weights"].float().requires_grad_()
    for backend in ("grouped_mm", "sorted", "reference"):
        out = experts(x, ids, weights, w13, w2, backend=backend)
        (grad,) = torch.autograd.grad(out.float().sum(), weights)
        assert out.dtype == torch.bfloat16 and grad.dtype == torch.float32
        exact = loop(x.double(), ids, weights.detach().double(), w13.double(), w2.double())
        assert float((out.detach().double() - exact).norm() / exact.norm()) < 0.01


def test_int32_and_int64_ids_and_strided_inputs_give_the_same():
    tensors, ids = problem(*SHAPES["plain"])
    x, weights, w13, w2, _ = (t.float() for t in tensors.values())
    wanted = experts(x, ids, weights, w13, w2)
    assert torch.equal(experts(x, ids.int(), weights, w13, w2), wanted)
    strided = (
        x.t().contiguous().t(),
        ids.t().contiguous().t(),
        weights.t().contiguous().t(),
        w13.transpose(1, 2).contiguous().transpose(1, 2),
        w2.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert torch.equal(experts(*strided), wanted)


def test_an_expanded_gradient_is_taken():
    tensors, ids = problem(*SHAPES["plain"])
    leaves = [t.float().requires_grad_() for t in tensors.values()]
    x, weights, w13, w2, _ = leaves
    for tokens in (40, 0):
        out = experts(x[:tokens], ids[:tokens], weights[:tokens], w13, w2, backend="grouped_mm")
        out.sum().backward()
    assert all(leaf.grad is not None for leaf in (x, weights, w13, w2))


def test_autocast_casts_inputs_and_result():
    tensors, ids = problem(*SHAPES["plain"])
    x, weights, w13, w2, _ = (t.float().requires_grad_() for t in tensors.values())
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(x, ids, weights, w13, w2)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == w13.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone():
    tensors, ids = problem(*SHAPES["plain"])
    x, weights, w13, w2, _ = tensors.values()
    with torch.autocast("cpu", torch.bfloat16):
        found = experts(x, ids, weights, w13, w2)
    assert torch.equal(found, experts(x, ids, weights, w13, w2))


@pytest.mark.parametrize("backend", ["grouped_mm", "sorted", "reference"])
def test_a_gradient_of_the_gradient_is_refused(backend):
    tensors, ids = problem(6, 8, 4, 3, 2)
    x, weights, w13, w2, _ = (t.float().requires_grad_() for t in tensors.values())
    out = experts(x, ids, weights, w13, w2, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="allowed are first derivatives"):
        (grad.square().sum() + x.sum()).backward()


@pytest.mark.parametrize("backend", ["sorted", "reference"])
def test_float64_takes_weights_in_float32(backend):
    tensors, ids = problem(6, 8, 4, 3, 2, "padding")
    x, weights, w13, w2, _ = tensors.values()
    weights = weights.float().requires_grad_()
    out = experts(x, ids, weights, w13, w2, backend=backend)
    wanted = loop(x, ids, weights.double(), w13, w2)
    (found_grad,) = torch.autograd.grad(out.sum(), weights)
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), weights)
    assert_same({"out": out, "w": found_grad}, {"out": wanted, "w": wanted_grad}, tolerance=1e-7)


def test_an_id_out_of_range_is_no_expert_where_the_host_does_not_look(monkeypatch):
    monkeypatch.setattr(reference_routing, "looks", lambda tensor, validate: False)
    ids = torch.tensor([[0, 5], [-3, 1], [3, 4]])
    found = moe_sort(ids, 4, 16)
    wanted = expert_rows.sort_choices(ids.where((ids >= 0) & (ids < 4), -1), 4)
    for name in ("order", "inverse", "offsets", "counts"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("backend", ["grouped_mm", "sorted", "reference"])
@pytest.mark.parametrize("case", ["random", "padding"])
def test_opcheck(backend, case):
    tensors, ids = problem(6, 8, 4, 3, 2, case)
    x, weights, w13, w2, bias13 = (t.float().requires_grad_() for t in tensors.values())
    block_m = dispatch.tile_rows(backend, ids.numel(), 3)
    for bias, limit, interleaved in ((None, None, False), (bias13, 0.5, True)):
        inputs = (x, ids, weights, w13, w2, bias, limit, interleaved, backend, block_m)
        torch.library.opcheck(torch.ops.curry_train.moe_experts.default, inputs)
        with torch.no_grad():
            out, h, *tables = torch.ops.curry_train.moe_experts(*inputs)
        values = [t if t is None else t.detach() for t in (x, weights, w13, w2, bias)]
        backward = (out, h, *values, *tables, limit, interleaved, backend, block_m, [True] * 5)
        torch.library.opcheck(torch.ops.curry_train.moe_experts_bwd.default, backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_token_counts_are_one_compiled_graph(dtype):
    tensors, _ = problem(40, 16, 24, 5, 2)
    _, _, w13, w2, _ = (t.to(dtype).requires_grad_() for t in tensors.values())
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.utils.counters.clear()
    for tokens in (6, 9, 700):
        x, weights = torch.randn(tokens, 16, dtype=dtype), torch.rand(tokens, 2, dtype=dtype)
        ids = torch.randint(0, 5, (tokens, 2))
        x.requires_grad_()
        found, wanted = compiled(x, ids, weights, w13, w2), experts(x, ids, weights, w13, w2)
        assert torch.equal(found, wanted)
        grads = [torch.autograd.grad(out.sum(), (x, w13, w2)) for out in (found, wanted)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_meta_and_fake_tensors_are_planned():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors, ids = problem(*SHAPES["plain"])
    x, weights, w13, w2, _ = (t.float().requires_grad_() for t in tensors.values())
    meta = experts(*(t.to("meta") for t in (x, ids, weights, w13, w2)))
    assert meta.shape == x.shape and meta.device.type == "meta"
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(t) for t in (x, ids, weights, w13, w2)]
        out = experts(*leaves)
        assert out.shape == x.shape
        out.sum().backward()


X, IDS_, WEIGHTS, W13, W2 = (
    torch.randn(4, 8),
    torch.zeros(4, 2, dtype=torch.int64),
    torch.rand(4, 2),
    torch.randn(3, 8, 8),
    torch.randn(3, 8, 4),
)
BAD = {
    "x: found dtype torch.int64": {"x": X.long()},
    r"x: found shape \[2, 2, 8\]; allowed is \[T, D\]": {"x": X.view(2, 2, 8)},
    "ids: found dtype torch.float32": {"ids": WEIGHTS},
    r"ids: found shape \[3, 2\]; allowed is \[T, K\] with the T = 4": {"ids": IDS_[:3]},
    "ids: found 3 among the expert ids; allowed are 0 to 2": {"ids": IDS_ + 3},
    "ids: found -2 among the expert ids": {"ids": IDS_ - 2},
    r"weights: found shape \[4, 1\]": {"weights": WEIGHTS[:, :1]},
    "weights: found dtype torch.bfloat16": {"weights": WEIGHTS.bfloat16()},
    r"w13: found shape \[3, 8, 4\].*here \[3, 8, 8\]": {"w13": W13[..., :4]},
    r"w13: found shape \[2, 8, 8\]": {"w13": W13[:2]},
    r"w2: found shape \[3, 4, 8\].*width D = 8": {"w2": W2.transpose(1, 2)},
    "w2: found dtype torch.bfloat16; allowed is that of x, torch.float32": {"w2": W2.bfloat16()},
    r"bias13: found shape \[3, 4\]": {"bias13": torch.zeros(3, 4)},
    "bias13: found dtype torch.float64": {"bias13": torch.zeros(3, 8, dtype=torch.float64)},
    "w13: found on meta; allowed is the device of x, cpu": {"w13": W13.to("meta")},
    "bias13: found on meta; allowed is the device of x, cpu": {
        "bias13": torch.zeros(3, 8, device="meta")
    },
    r"w2: found shape \[0, 8, 4\]; allowed is .* none of them 0": {"w13": W13[:0], "w2": W2[:0]},
    r"w2: found shape \[3, 8, 0\]": {"w13": W13[:, :0], "w2": W2[..., :0]},
    r"ids: found shape \[4, 0\]; .* K at least 1": {"ids": IDS_[:, :0], "weights": WEIGHTS[:, :0]},
    "limit: found -1.0; allowed is a number above 0, or None": {"limit": -1.0},
    "limit: found nan": {"limit": float("nan")},
    "backend: found 'fast'; allowed are auto, triton, grouped_mm": {"backend": "fast"},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_named(message):
    good = {"x": X, "ids": IDS_, "weights": WEIGHTS, "w13": W13, "w2": W2}
    with pytest.raises(ValueError, match=message):
        experts(**{**good, **BAD[message]})
