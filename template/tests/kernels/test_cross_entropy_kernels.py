"""Cross entropy: kernels against float64 twins, twins against torch and gradcheck."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from address_probe import addresses
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from curry_train.kernels import cross_entropy as kernels
from curry_train.kernels import reference_loss, routing_ops
from curry_train.kernels.launches import Launch

OPS = torch.ops.curry_train
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
OPTIONS = {
    "plain": {},
    "z": {"z": 1e-2},
    "smoothed": {"smoothing": 0.1},
    "capped": {"softcap": 5.0},
    "all": {"z": 1e-3, "smoothing": 0.2, "softcap": 30.0},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def problem(rows=9, vocab=70, *, dtype=torch.float32, size=3.0):
    """Return logits [N, V] whose ignored row is NaN, and target [N]."""
    logits = (torch.randn(rows, vocab) * size).to(dtype)
    target = torch.randint(0, vocab, (rows,))
    target[1::4] = -100
    logits[1::4] = torch.nan
    return logits, target


def by_hand(logits, target, z=0.0, smoothing=0.0, softcap=None):
    """Return loss and lse of each row by torch alone; rows that are ignored are 0."""
    kept = target != -100
    x = torch.where(kept[:, None], logits, 0)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    plain = F.cross_entropy(x, target, label_smoothing=smoothing, reduction="none")
    lse = torch.where(kept, x.logsumexp(-1), 0)
    return plain + z * lse.square(), lse


def gradients(logits, target, dloss, dlse, function, **options):
    leaf = logits.clone().requires_grad_()
    loss, lse, *_ = function(leaf, target, **options)
    return torch.autograd.grad((loss * dloss).sum() + (lse * dlse).sum(), leaf)[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_twin_equals_torch_in_float64(name):
    logits, target = problem()
    logits, (dloss, dlse) = logits.double(), torch.rand(2, 9).double()
    loss, lse, correction = reference_loss.cross_entropy_rows(logits, target, **OPTIONS[name])
    wanted = by_hand(logits, target, **OPTIONS[name])
    torch.testing.assert_close((loss, lse), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(correction, torch.ones_like(loss))
    found = reference_loss.cross_entropy_rows_bwd(
        dloss, dlse, logits, target, lse, correction, **OPTIONS[name]
    )
    wanted = gradients(logits, target, dloss, dlse, by_hand, **OPTIONS[name])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert not found[1::4].any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_are_as_exact_as_torch(dtype, name, poisoned):
    options = OPTIONS[name]
    logits, target = problem(dtype=dtype)
    dloss, dlse = torch.rand(2, 9)
    rows = kernels.cross_entropy_rows(poisoned(logits), target, **options)
    dlogits = kernels.cross_entropy_rows_bwd(
        dloss, dlse, poisoned(logits), target, *rows[1:], **options
    )
    assert dlogits.dtype == dtype and not dlogits[1::4].any()
    wanted = by_hand(logits.double(), target, **options)
    plain = by_hand(logits.float(), target, **options)
    exact = gradients(logits.double(), target, dloss, dlse, by_hand, **options)
    rough = gradients(logits.float(), target, dloss, dlse, by_hand, **options).to(dtype)
    for found, true, torchs in zip(
        (*rows[:2], dlogits), (*wanted, exact), (*plain, rough), strict=True
    ):
        error, allowed = ((value.double() - true).norm() for value in (found, torchs))
        assert error <= 2 * allowed + 2e-7 * true.norm()


@pytest.mark.parametrize("name", ["z", "smoothed"])
def test_huge_logits_keep_their_digits(name):
    logits, target = problem(rows=8, vocab=50, size=1e4)
    # Half of the labels are the best logit: a loss near 0 that lse - x would round to 1e-3.
    logits[::2, 7], target[::2] = logits[::2].amax(1) + 0.5, 7
    dloss, dlse = torch.rand(2, 8)
    loss, lse, correction = kernels.cross_entropy_rows(logits, target, **OPTIONS[name])
    wanted = by_hand(logits.double(), target, **OPTIONS[name])
    torch.testing.assert_close(loss.double(), wanted[0], rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-7, atol=0)
    found = kernels.cross_entropy_rows_bwd(
        dloss, dlse, logits, target, lse, correction, **OPTIONS[name]
    )
    wanted = gradients(logits.double(), target, dloss, dlse, by_hand, **OPTIONS[name])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_row_of_many_blocks_repeats_and_stands_alone():
    vocab = 2 * kernels.ELEMENTS + 300
    logits, target = problem(rows=3, vocab=vocab)
    # The first block is -inf throughout, and the largest logit is the last.
    logits[0, : kernels.ELEMENTS], logits[0, -1], target[0] = -torch.inf, 20.0, vocab - 2
    options = {"z": 1e-3}
    first, again = (kernels.cross_entropy_rows(logits, target, **options) for _ in range(2))
    alone = kernels.cross_entropy_rows(logits[2:], target[2:], **options)
    wanted = by_hand(logits.double(), target, **options)
    for one, two, row in zip(first, again, alone, strict=True):
        assert torch.equal(one, two) and torch.equal(one[2:], row)
    torch.testing.assert_close([x.double() for x in first[:2]], list(wanted), rtol=1e-6, atol=1e-6)
    arguments = (torch.ones(3), None, logits, target, *first[1:])
    found, again = (kernels.cross_entropy_rows_bwd(*arguments, **options) for _ in range(2))
    assert torch.equal(found, again)
    wanted = gradients(logits.double(), target, 1, 0, by_hand, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


def test_logits_of_minus_infinity_are_impossible_words():
    logits, target = torch.zeros(2, 5), torch.tensor([0, 4])
    logits[:, 3:] = -torch.inf
    for code in (kernels, reference_loss):
        loss, lse, correction = code.cross_entropy_rows(logits, target)
        assert loss.tolist() == pytest.approx([1.0986123, torch.inf])
        dlogits = code.cross_entropy_rows_bwd(loss * 0 + 1, None, logits, target, lse, correction)
        assert dlogits[0].tolist() == pytest.approx([-2 / 3, 1 / 3, 1 / 3, 0, 0], abs=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("function", [reference_loss.cross_entropy, OPS.cross_entropy])
def test_cross_entropy_passes_gradcheck(name, function):
    logits, target = problem(rows=5, vocab=7)
    leaf = logits.nan_to_num().double().requires_grad_()
    assert gradcheck(lambda x: function(x, target, **OPTIONS[name]), leaf)
    assert gradcheck(lambda x: function(x, target, reduction="mean", **OPTIONS[name])[0], leaf)


@pytest.mark.parametrize(
    "function", [kernels.cross_entropy, reference_loss.cross_entropy, OPS.cross_entropy]
)
def test_reductions(function):
    logits, target = problem()
    rows, _ = function(logits, target)
    assert rows.shape == (9,) and rows.dtype == torch.float32
    assert torch.equal(function(logits, target, reduction="sum")[0], rows.sum())
    assert torch.equal(function(logits, target, reduction="mean")[0], rows.sum() / 7)
    wanted = F.cross_entropy(logits.nan_to_num(), target)
    torch.testing.assert_close(function(logits, target, reduction="mean")[0], wanted)
    other, _ = function(logits[2:5], torch.tensor([3, 3, 5]), ignore=3)
    assert other[:2].tolist() == [0, 0] and other[2] > 0


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_all_tokens_masked_and_no_tokens(reduction):
    for rows in (4, 0):
        logits = torch.full((rows, 6), torch.nan, requires_grad=True)
        target = torch.full((rows,), -100)
        loss, lse = OPS.cross_entropy(logits, target, reduction=reduction, z=1e-3)
        assert not loss.any() and loss.isfinite().all() and not lse.any()
        assert not torch.autograd.grad(loss.sum(), logits)[0].any()
        hidden, weight = torch.randn(rows, 3, requires_grad=True), torch.randn(6, 3)
        loss = OPS.linear_cross_entropy(
            hidden, weight.requires_grad_(), target, chunk=2, reduction=reduction
        )
        assert not loss.any() and loss.isfinite().all()
        grads = torch.autograd.grad(loss.sum(), (hidden, weight))
        assert grads[0].shape == (rows, 3) and not any(grad.any() for grad in grads)


CALLS = {
    "kernel": kernels.cross_entropy,
    "twin": reference_loss.cross_entropy,
    "operator": OPS.cross_entropy,
}


@pytest.mark.parametrize("call", CALLS)
def test_bad_arguments_are_named(call):
    function, (logits, target) = CALLS[call], problem()
    logits = logits.nan_to_num()
    with pytest.raises(ValueError, match=r"target holds 70 at row 2; allowed: 0 to 69, or ignore="):
        function(logits, target.index_fill(0, torch.tensor(2), 70))
    with pytest.raises(ValueError, match="target holds -1 at row 8"):
        function(logits, target.index_fill(0, torch.tensor(8), -1))
    with pytest.raises(ValueError, match="target holds -100 at row 1; .*ignore=-1"):
        function(logits, target, ignore=-1)
    with pytest.raises(ValueError, match=r"target is torch.int32 \[9\]; allowed: torch.int64 \[9"):
        function(logits, target.int())
    with pytest.raises(ValueError, match=r"target is torch.int64 \[8\]; allowed: torch.int64 \[9"):
        function(logits, target[:8])
    with pytest.raises(ValueError, match=r"logits is torch.int64 \[9, 70\]; allowed: \[N, V\] of"):
        function(logits.long(), target)
    with pytest.raises(ValueError, match=r"logits is torch.float32 \[9, 0\]"):
        function(logits[:, :0], target)
    with pytest.raises(ValueError, match=r"logits is torch.float32 \[9, 70, 1\].*flatten batch"):
        function(logits[..., None], target)
    with pytest.raises(ValueError, match=r"logits is torch.float8_e4m3fn \[9, 70\]; allowed"):
        function(logits.to(torch.float8_e4m3fn), target)
    with pytest.raises(ValueError, match="z is nan; allowed: 0 or more"):
        function(logits, target, z=float("nan"))
    with pytest.raises(ValueError, match="z is -1.0; allowed: 0 or more"):
        function(logits, target, z=-1.0)
    with pytest.raises(ValueError, match="smoothing is 1.0; allowed: 0 up to"):
        function(logits, target, smoothing=1.0)
    with pytest.raises(ValueError, match=r"softcap is 0.0; allowed: above 0, or None"):
        function(logits, target, softcap=0.0)
    with pytest.raises(ValueError, match="reduction is 'max'; allowed: 'none', 'sum', 'mean'"):
        function(logits, target, reduction="max")
    for bad in (torch.nan, torch.inf):
        logits[4, 3] = bad
        with pytest.raises(ValueError, match=r"logits has 1 rows with NaN.*the first is row 4"):
            function(logits, target)


LINEAR = {
    "kernel": kernels.linear_cross_entropy,
    "twin": reference_loss.linear_cross_entropy,
    "operator": OPS.linear_cross_entropy,
}


@pytest.mark.parametrize("call", LINEAR)
def test_bad_arguments_of_the_linear_form_are_named(call):
    function, target = LINEAR[call], torch.tensor([0, 5, 2])
    hidden, weight = torch.randn(3, 4), torch.randn(6, 4)
    with pytest.raises(ValueError, match="target holds 6 at row 1; allowed: 0 to 5"):
        function(hidden, weight, target + 1, chunk=2)
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16 \[6, 4\]; allowed: torch.floa"):
        function(hidden, weight.bfloat16(), target, chunk=2)
    with pytest.raises(ValueError, match=r"weight is torch.float32 \[6, 3\]; allowed: .*\[V, 4\]"):
        function(hidden, weight[:, :3], target, chunk=2)
    with pytest.raises(ValueError, match="weight has 0 rows; allowed: a vocabulary of 1"):
        function(hidden, weight[:0], target, chunk=2)
    with pytest.raises(ValueError, match=r"hidden is torch.int64 \[3, 4\]"):
        function(hidden.long(), weight, target, chunk=2)
    with pytest.raises(ValueError, match=r"target is torch.int64 \[2\]"):
        function(hidden, weight, target[:2], chunk=2)
    with pytest.raises(ValueError, match="chunk is 0; allowed: 1 or more rows"):
        function(hidden, weight, target, chunk=0)
    hidden[2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"hidden\[2:\] @ weight.T has 1 rows with NaN.*is row 0"):
        function(hidden, weight, target, chunk=2)


@pytest.mark.parametrize("label", [70, -1, 10**12, -(10**12)])
@pytest.mark.parametrize("code", [kernels, reference_loss])
def test_unseen_labels_out_of_range_are_not_followed(code, label):
    # No error in between: 10**12 * 4 bytes further on there is no memory to read.
    logits, target = problem()
    target[2] = label
    loss, lse, correction = code.cross_entropy_rows(logits, target)
    dlogits = code.cross_entropy_rows_bwd(torch.ones(9), None, logits, target, lse, correction)
    bad = torch.arange(9) == 2
    assert torch.equal(loss.isnan(), bad) and lse.isfinite().all()
    assert torch.equal(dlogits.isnan(), bad[:, None].expand(9, 70))


@pytest.mark.parametrize("code", [kernels, reference_loss])
def test_unseen_nan_becomes_a_nan_loss(code):
    logits, target = problem()
    logits[4, 3] = torch.nan
    loss, lse, correction = code.cross_entropy_rows(logits, target)
    assert torch.equal(loss.isnan(), torch.arange(9) == 4) and lse[4].isnan()
    dlogits = code.cross_entropy_rows_bwd(torch.ones(9), None, logits, target, lse, correction)
    assert dlogits[4].isnan().all() and dlogits[:4].isfinite().all()


@pytest.mark.parametrize("code", [kernels, reference_loss])
def test_gradient_may_overwrite_the_logits(code):
    logits, target = problem(dtype=torch.bfloat16)
    saved = code.cross_entropy_rows(logits, target)[1:]
    wanted = code.cross_entropy_rows_bwd(torch.ones(9), None, logits, target, *saved)
    memory = logits.clone()
    found = code.cross_entropy_rows_bwd(torch.ones(9), None, memory, target, *saved, out=memory)
    assert found is memory and torch.equal(memory, wanted)


def linear_problem(dtype, rows=11, width=6, vocab=40):
    hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(vocab, width).to(dtype)
    target = torch.randint(0, vocab, (rows,))
    target[2::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_linear_form_equals_the_whole_in_float64(chunk, name):
    hidden, weight, target = linear_problem(torch.float64)
    scale = torch.rand(11).double()
    wanted, _ = by_hand(hidden @ weight.T, target, **OPTIONS[name])
    grads = torch.autograd.grad((wanted * scale).sum(), (hidden, weight))
    for function in (OPS.linear_cross_entropy, reference_loss.linear_cross_entropy):
        loss = function(hidden, weight, target, chunk=chunk, **OPTIONS[name])
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((loss * scale).sum(), (hidden, weight))
        torch.testing.assert_close(found, grads, rtol=1e-10, atol=1e-12)
    total = OPS.linear_cross_entropy(
        hidden, weight, target, chunk=chunk, reduction="mean", **OPTIONS[name]
    )
    torch.testing.assert_close(total, wanted.sum() / 9)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_form_is_as_exact_as_torch(dtype):
    hidden, weight, target = linear_problem(dtype)

    def run(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        loss = function(*leaves)
        return loss.double(), *(g.double() for g in torch.autograd.grad(loss.sum(), leaves))

    found = run(lambda h, w: OPS.linear_cross_entropy(h, w, target, chunk=4, z=1e-3), dtype)
    plain = run(lambda h, w: by_hand((h @ w.T).float(), target, z=1e-3)[0], dtype)
    exact = run(lambda h, w: by_hand(h @ w.T, target, z=1e-3)[0], torch.float64)
    for value, rough, true in zip(found, plain, exact, strict=True):
        assert (value - true).norm() <= 2 * (rough - true).norm() + 2e-7 * true.norm()


class Largest(TorchDispatchMode):
    """Notes the most bytes of any tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor):
                self.most = max(self.most, one.nbytes)
        return result


@pytest.mark.parametrize("code", [kernels, reference_loss])
def test_logits_are_never_whole(code):
    hidden, weight, target = (x.detach() for x in linear_problem(torch.float32, rows=64, vocab=30))
    with Largest() as held:
        code.linear_cross_entropy(hidden, weight, target, chunk=8, reduction="sum")
        code.linear_cross_entropy_rows_bwd(torch.ones(64), hidden, weight, target, chunk=8)
    assert 4 * 8 * 30 <= held.most <= 4 * 64 * 6 < 4 * 64 * 30
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        OPS.linear_cross_entropy(hidden.requires_grad_(), weight, target, chunk=8)
    assert {x.data_ptr() for x in kept} <= {x.data_ptr() for x in (hidden, weight, target)}


def test_linear_gradient_sums_chunks_in_float32(monkeypatch):
    # One chunk a row, without the interpreter's overhead: in bf16 the sum stops growing at 64.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    hidden = torch.full((600, 1), 1 / 3).bfloat16()
    weight = torch.zeros(2, 1).bfloat16().requires_grad_()
    loss = OPS.linear_cross_entropy(
        hidden, weight, torch.zeros(600).long(), chunk=1, reduction="sum"
    )
    assert torch.autograd.grad(loss, weight)[0][1].item() == pytest.approx(100, rel=4e-3)


LOGITS, TARGET = problem(rows=6, vocab=9)
LEAF = LOGITS.nan_to_num().requires_grad_()
ROWS = reference_loss.cross_entropy_rows(LOGITS, TARGET)
HIDDEN, WEIGHT, LABELS = linear_problem(torch.float32, rows=5, vocab=8)
OPERATORS = {
    "cross_entropy": ((LEAF, TARGET), {"z": 1e-3, "reduction": "mean"}),
    "cross_entropy_rows": ((LEAF, TARGET), {"softcap": 5.0, "smoothing": 0.1}),
    "cross_entropy_rows_bwd": ((ROWS[0], ROWS[1], LOGITS, TARGET, *ROWS[1:]), {"z": 1e-3}),
    "linear_cross_entropy": ((HIDDEN, WEIGHT, LABELS), {"chunk": 2, "reduction": "sum"}),
    "linear_cross_entropy_rows": ((HIDDEN, WEIGHT, LABELS, 2), {"z": 1e-3}),
    "linear_cross_entropy_rows_bwd": (
        (torch.ones(5), HIDDEN.detach(), WEIGHT.detach(), LABELS, 2),
        {},
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("interpret", ["1", "0"], ids=["kernel", "twin"])
def test_operators_pass_opcheck(name, interpret, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert routing_ops.kernels_run(LEAF) == (interpret == "1")
    arguments, options = OPERATORS[name]
    opcheck(getattr(OPS, name).default, arguments, options)


def test_row_offsets_pass_2_to_the_31():
    noted: list[Launch] = []
    logits, step = torch.randn(70, 64), 2**26
    target = torch.zeros(70).long()
    rows = kernels.cross_entropy_rows(logits, target, run=noted.append)
    kernels.cross_entropy_rows_bwd(rows[0], None, logits, target, *rows[1:], run=noted.append)
    for launch in noted:
        found = addresses(launch, "logits_ptr", logits_row=step)
        assert max(found) == logits.data_ptr() + 4 * (69 * step + 63)
        assert min(found) == logits.data_ptr()


def test_operators_need_no_triton():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from curry_train.kernels import routing_ops\n"
        "x = torch.zeros(3, 4, requires_grad=True)\n"
        "loss, _ = routing_ops.cross_entropy(x, torch.tensor([0, 1, -100]), reduction='sum')\n"
        "weights, ids, _ = torch.ops.curry_train.router_topk(x, None, 2)\n"
        "sorted = routing_ops.moe_sort(ids, 4, 16)\n"
        "(loss + weights.sum()).backward()\n"
        "print(round(float(loss), 3), sorted.counts.tolist())\n"
    )
    template = Path(__file__).resolve().parents[2]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=template, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "2.773 [3, 3, 0, 0]"
