"""The rules of kernels: kept in this tree, and each lint names a planted fault and nothing else."""

from __future__ import annotations

import pytest
from bundle import lint_kernels
from bundle.tree import ROOT

LINTS = lint_kernels.LINTS
FOLDER = "template/curry_train/kernels"
FILE = f"{FOLDER}/grouped_matmul.py"
KERNEL = '''"""Kernels."""

import triton
import triton.language as tl

UNSPECIALISED = ["R"]


@triton.jit
def _tile(base, row, stride, columns):
    return base + row.to(tl.int64)[:, None] * stride + columns[None, :]


@triton.jit
def _place(number):
    return number // 8, number % 8


@triton.jit(do_not_specialize=UNSPECIALISED)
def product_kernel(
    x, w, out, sums, offsets, R, K, E: tl.constexpr, x_stride, w_expert, w_stride,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(offsets + tile)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    wide = rows.to(tl.int64)
    ks = tl.arange(0, BLOCK_K)
    first = tile // (E * 2) * E
    x_tile = _tile(x, rows, x_stride, ks)
    w_tile = w + expert.to(tl.int64) * w_expert + ks[:, None].to(tl.int64) * w_stride
    acc = tl.zeros((BLOCK_M, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(x_tile + k)
        b = tl.load(w_tile)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        w_tile += BLOCK_K * w_stride
    total = tl.sum(acc, axis=1)
    total += tl.max(tl.load(sums + ks).to(tl.float32), axis=0)
    tl.store(out + wide[:, None] * x_stride + ks[None, :], acc, mask=(rows < R)[:, None])
    tl.store(sums + rows, total + first, mask=rows < R)
'''


@pytest.fixture
def kernel(planted):
    """Return a planted tree with one kernel in which every lint finds nothing."""
    planted.write(f"{FOLDER}/__init__.py", '"""Kernels."""\n')
    planted.write(FILE, KERNEL)
    return planted


def test_the_kernels_are_found():
    """Without kernels every rule is kept."""
    names = {kernel.node.name for kernel in lint_kernels.kernels(ROOT)}
    files = {kernel.path.stem for kernel in lint_kernels.kernels(ROOT)}
    assert {"gmm_kernel", "gmm_wgrad_kernel", "router_topk_kernel"} <= names
    assert files == set(lint_kernels.KERNEL_FILES)


@pytest.mark.parametrize("lint", LINTS, ids=lambda lint: lint.__name__)
def test_the_tree_keeps_the_rule(lint):
    problems = lint(ROOT)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("lint", LINTS, ids=lambda lint: lint.__name__)
def test_the_planted_kernel_keeps_the_rule(lint, kernel):
    problems = lint(kernel.root)
    assert not problems, "\n".join(problems)


TWO_DOTS = """acc = tl.dot(a, b, acc, input_precision="ieee")
        """
ADDED = TWO_DOTS.replace("acc =", "acc +=").replace("b, acc, ", "b, ")
FAULTS = [
    # Offsets: in a helper, through a name, of an expert, by a constexpr, too late, of a loop.
    ("int64_offsets", "row.to(tl.int64)[:, None] * stride", "row[:, None] * stride", "_tile"),
    ("int64_offsets", "wide = rows.to(tl.int64)", "wide = rows", "wide[:, None] * x_stride"),
    ("int64_offsets", "expert.to(tl.int64) * w_expert", "expert * w_expert", "expert * w_expert"),
    ("int64_offsets", "expert.to(tl.int64) * w_expert", "expert * E", "expert * E"),
    (
        "int64_offsets",
        "expert.to(tl.int64) * w_expert",
        "(expert * w_expert).to(tl.int64)",
        "expert * w_expert in int32",
    ),
    ("int64_offsets", "x_tile + k)", "x_tile + k * x_stride)", "k * x_stride"),
    ("int64_offsets", "ks[:, None].to(tl.int64) * w_stride", "ks[:, None] * w_stride", "w_stride"),
    (
        "int64_offsets",
        "    tl.store(out + wide[:, None] * x_stride",
        "    at = rows[:, None] * x_stride\n    tl.store(out + at",
        "rows[:, None] * x_stride",
    ),
    ("int64_offsets", "_tile(x, rows, x_stride, ks)", "x + tile * K + ks[None, :]", "tile * K"),
    ("int64_offsets", "rows = tile * BLOCK_M", "rows = tile * ROW_STRIDE", "tile * ROW_STRIDE"),
    (
        "int64_offsets",
        "_tile(x, rows, x_stride, ks)",
        "x + _place(tile)[1] * K + ks[None, :]",
        "_place(tile)[1] * K",
    ),
    # Two products: three ways to write them.
    ("one_dot", "acc = tl.dot", TWO_DOTS + "acc = tl.dot", "2 tl.dot to acc"),
    ("one_dot", "acc = tl.dot", TWO_DOTS + "acc = acc + tl.dot", "2 tl.dot to acc"),
    ("one_dot", "acc = tl.dot(a, b, acc, ", ADDED + "acc += tl.dot(a, b, ", "2 tl.dot to acc"),
    (
        "one_dot",
        "acc = tl.dot(a, b, acc, ",
        'acc = tl.dot(a, b, acc=tl.dot(b, a, acc, input_precision="ieee"), ',
        "2 tl.dot to acc",
    ),
    ("atomics", "tl.store(sums + rows", "tl.atomic_add(sums + rows", "calls tl.atomic_add"),
    ("upcasts", ".to(tl.float32), axis=0", ", axis=0", "reduces tl.load(sums + ks)"),
    ("upcasts", ".to(tl.float32), axis=0", ".to(tl.bfloat16), axis=0", "reduces"),
    ("upcasts", "total = tl.sum(acc, axis=1)", "total = tl.sum(b, axis=1)", "reduces b "),
    ("upcasts", "total = tl.sum(acc, axis=1)", "total = tl.sum(b * 2 + a, axis=1)", "reduces b *"),
    ("upcasts", "total = tl.sum(acc, axis=1)", "total = b.sum(1)", "reduces b "),
    ("upcasts", "total = tl.sum(acc", "total = tl.sum(tl.where(a > 0, a, 0.0)", "reduces tl.where"),
    ("dot_precision", ', input_precision="ieee"', "", "without input_precision"),
    ("autotune", "@triton.jit(do", "@triton.autotune(configs=[], key=[])\n@triton.jit(do", "auto"),
    ("autotune", "UNSPECIALISED = [", "CONFIG = triton.Config({})\nUNSPECIALISED = [", "Config"),
    ("token_counts", "offsets, R, K, E:", "offsets, R: tl.constexpr, K, E:", "R as constexpr"),
    ("token_counts", "K, E:", "K, NUM_TOKENS: tl.constexpr, E:", "NUM_TOKENS as constexpr"),
    ("token_counts", "K, E:", "K, num_tokens: tl.constexpr, E:", "num_tokens as constexpr"),
    ("token_counts", "offsets, R, K, E:", "offsets, R, T, K, E:", "specialises on T"),
    ("token_counts", "(do_not_specialize=UNSPECIALISED)", "", "specialises on R"),
    ("token_counts", "=UNSPECIALISED)", '=[*OTHERS, "Q"])', "specialises on R"),
    ("token_counts", '["R"]', '["Q"]', "specialises on R"),
]


@pytest.mark.parametrize(
    ("name", "old", "new", "words"), FAULTS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_named(name, old, new, words, kernel):
    kernel.edit(FILE, old, new)
    for lint in LINTS:
        problems = lint(kernel.root)
        if lint.__name__ == name:
            assert any(words in problem for problem in problems), problems
        else:
            assert not problems, f"{lint.__name__}: {problems}"


RUNTIME = "template/curry_train/runtime.py"
IMPORTS = [
    (RUNTIME, "\nimport triton\n", "imports triton; only kernel files may"),
    (RUNTIME, "\n\ndef f() -> None:\n    from triton import language\n", "triton.language"),
    (f"{FOLDER}/launches.py", "import triton\n", "launches.py:1: imports triton"),
    (RUNTIME, "\nfrom curry_train.kernels import router\n", "kernels.router at import"),
    (RUNTIME, "\nfrom curry_train.kernels.router import f\n", "kernels.router at import"),
]


@pytest.mark.parametrize(("file", "text", "words"), IMPORTS, ids=[w for _, _, w in IMPORTS])
def test_a_planted_import_is_named(file, text, words, kernel):
    if (kernel.root / file).exists():
        kernel.append(file, text)
    else:
        kernel.write(file, text)
    problems = lint_kernels.triton_imports(kernel.root)
    assert any(words in problem for problem in problems), problems


def test_an_import_where_it_is_used_is_not_named(kernel):
    kernel.append(RUNTIME, "\n\ndef f() -> None:\n    from curry_train.kernels import router\n")
    assert lint_kernels.triton_imports(kernel.root) == []


HARMLESS = [
    ("=UNSPECIALISED)", '=[*UNSPECIALISED, "K"])'),
    ("=UNSPECIALISED)", '=["K", "R"])'),
    # Two accumulators in one loop, two loops with one each, and products that are no address.
    (
        "acc = tl.dot(a, b, acc,",
        'more = tl.dot(a, b, more, input_precision="ieee")\n        acc = tl.dot(a, b, acc,',
    ),
    (
        "    total = tl.sum(acc, axis=1)",
        "    for k in range(0, K, BLOCK_K):\n"
        '        acc = tl.dot(a, b, acc, input_precision="ieee")\n'
        "    total = tl.sum(acc, axis=1)",
    ),
    ("total = tl.sum(acc, axis=1)", "total = tl.sum(acc * rows[:, None] * x_stride, axis=1)"),
    ("expert.to(tl.int64) * w_expert", "w_expert * tl.cast(expert, tl.int64)"),
    ("expert.to(tl.int64) * w_expert", "expert.to(tl.int64) * w_expert * K"),
    ("total = tl.sum(acc, axis=1)", "total = tl.sum(b.to(tl.float32) * a, axis=1)"),
    ("wide[:, None] * x_stride + ks", "wide[:, None] * x_stride + (ks % E) * (E // 2)"),
]


@pytest.mark.parametrize(("old", "new"), HARMLESS, ids=range(len(HARMLESS)))
def test_harmless_code_is_not_named(old, new, kernel):
    kernel.edit(FILE, old, new)
    assert [problem for lint in LINTS for problem in lint(kernel.root)] == []
