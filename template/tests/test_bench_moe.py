"""Parts of the MoE benchmark: its baselines, its statistics, its roofline and a small run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_moe
import moe_baselines
import moe_gpu
import pairs

SMALL = bench_moe.Sizes(T=24, D=16, F=8, E=4, K=2)


def leaves(dtype=torch.float32):
    T, D, F, E, K = SMALL
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)
    weights = torch.rand(T, K, dtype=dtype, requires_grad=True)
    w13 = torch.randn(E, 2 * F, D, dtype=dtype, requires_grad=True)
    w2 = torch.randn(E, D, F, dtype=dtype, requires_grad=True)
    return x, weights, w13, w2


@pytest.mark.parametrize("name", ["ours", *moe_baselines.BASELINES])
@pytest.mark.parametrize("routing", moe_gpu.ROUTINGS)
def test_every_way_equals_the_float64_loop(name, routing):
    x, weights, w13, w2 = leaves()
    ids = moe_gpu.route(routing, SMALL.T, SMALL.E, SMALL.K)
    function, bank = moe_gpu.ways(w13, w2)[name]
    out = function(x, ids, weights, *bank)
    upstream = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, (x, weights, *bank), upstream))
    exact = [t.detach().double().requires_grad_() for t in (x, weights, w13, w2)]
    wide = moe_baselines.float64_loop(exact[0], ids, exact[1], *exact[2:])
    wanted = [wide, *torch.autograd.grad(wide, exact, upstream.double())]
    if name == "ours":
        wanted[3] = moe_gpu.interleave(wanted[3])
    for mine, theirs in zip(found, wanted, strict=True):
        assert bench_moe.distance(mine, theirs) < 1e-6


def test_a_way_that_errs_is_not_measured(monkeypatch):
    x, weights, w13, w2 = (t.detach().bfloat16().requires_grad_() for t in leaves())
    ids = moe_gpu.route("uniform", SMALL.T, SMALL.E, SMALL.K)
    moe_gpu.check(["ours", *moe_baselines.BASELINES], x, ids, weights, w13, w2)
    scatter = moe_baselines.scatter_style
    monkeypatch.setitem(moe_gpu.BASELINES, "scatter_style", lambda *a: 1.05 * scatter(*a))
    with pytest.raises(SystemExit, match="scatter_style.*nothing was measured"):
        moe_gpu.check(["ours", "scatter_style"], x, ids, weights, w13, w2)


def test_megablocks_style_fills_every_expert_up_to_128_rows(monkeypatch):
    seen = []
    product = moe_baselines._grouped
    monkeypatch.setattr(
        moe_baselines, "_grouped", lambda x, w, ends: (seen.append(ends), product(x, w, ends))[1]
    )
    x, weights, w13, w2 = leaves()
    ids = moe_gpu.route("zipf", SMALL.T, SMALL.E, SMALL.K)
    moe_baselines.megablocks_style(x, ids, weights, w13, w2)
    assert all((ends.diff() % moe_baselines.PAD == 0).all() for ends in seen)


@pytest.mark.parametrize(
    ("shape", "tokens", "microseconds"),
    [
        ("qwen3_30b", 8192, {"fwd": 853, "bwd": 1636}),
        ("dsv2_lite", 8192, {"fwd": 1135, "bwd": 2212}),
    ],
)
def test_the_roofline_of_known_shapes(shape, tokens, microseconds):
    sizes = (tokens, *moe_gpu.SHAPES[shape])
    for passed, wanted in microseconds.items():
        seconds, flops = moe_gpu.floor_of(passed, sizes)
        assert seconds * 1e6 == pytest.approx(wanted, rel=0.01)
    T, D, F, E, K = sizes
    total = moe_gpu.floor_of("full", sizes)[1]
    assert total == pytest.approx(18 * T * K * D * F, rel=0.01)


def test_a_memory_bound_kernel_is_bound_by_memory():
    combine = moe_gpu.floors(8192, *moe_gpu.SHAPES["qwen3_30b"])["fwd"]["combine"]
    assert combine.seconds == combine.bytes / moe_gpu.PEAK_BYTES > combine.flops / 790e12
    assert combine.seconds * 1e6 == pytest.approx(70, abs=1)


def test_times_become_tflops_and_a_share_of_the_roofline():
    sizes = (8192, *moe_gpu.SHAPES["qwen3_30b"])
    floor, flops = moe_gpu.floor_of("fwd", sizes)
    found = moe_gpu.summary(sorted([2 * floor] * 40 + [3 * floor] * 10), "fwd", sizes)
    assert found["roofline"] == pytest.approx(0.5)
    assert found["tflops"] == pytest.approx(flops / floor / 2e12)
    assert found["p20"] == pytest.approx(found["ms"]) and found["p80"] == pytest.approx(3e3 * floor)


@pytest.mark.parametrize("kind", moe_gpu.ROUTINGS)
def test_routings_are_distinct_in_a_token(kind):
    ids = moe_gpu.route(kind, 200, 16, 4)
    assert ids.shape == (200, 4) and ids.min() >= 0 and ids.max() < 16
    assert all(len(set(row)) == 4 for row in ids.tolist())
    share = torch.bincount(ids.flatten(), minlength=16) / ids.numel()
    most = {"uniform": 0.1, "zipf": 0.25, "one_hot": 0.25}[kind]
    assert share.max() <= most + 0.01 and (kind == "uniform") == bool(share.max() < 0.15)


def test_ours_keeps_less_than_the_others():
    x, weights, w13, w2 = leaves()
    ids = moe_gpu.route("uniform", SMALL.T, SMALL.E, SMALL.K)
    kept = {
        name: moe_gpu.saved_bytes(lambda f=f, b=b: f(x, ids, weights, *b), b)
        for name, (f, b) in moe_gpu.ways(w13, w2).items()
    }
    R = SMALL.T * SMALL.K
    values = SMALL.T * SMALL.D + R * 2 * SMALL.F + R
    tables = 2 * R + 2 * SMALL.E + 2
    assert kept["ours"] == 4 * (values + tables)
    assert all(kept[name] > 1.5 * kept["ours"] for name in moe_baselines.BASELINES)


def test_pairs_run_in_turn_first_and_second_on_the_same_input():
    seen = []
    clock = iter(range(1, 1000))

    def tick(call):
        call()
        return float(next(clock))

    a, b = pairs.measure_pairs(
        lambda x: seen.append(("a", x)),
        lambda x: seen.append(("b", x)),
        range(4),
        clock=tick,
        warmup=1,
    )
    assert seen == [(n, x) for x in range(4) for n in ("ab" if x % 2 == 0 else "ba")]
    assert len(a) == len(b) == 3 and a.tolist() == [4.0, 5.0, 8.0]


def test_the_interval_holds_the_ratio_and_narrows_with_the_noise():
    draw = np.random.default_rng(0)
    ours = np.ones(30)
    wide = pairs.ratio_interval(ours, 1.2 + 0.2 * draw.standard_normal(30))
    narrow = pairs.ratio_interval(ours, 1.2 + 0.02 * draw.standard_normal(30))
    for found in (wide, narrow):
        assert found["low"] <= found["ratio"] <= found["high"]
        assert found["low"] < 1.2 < found["high"]
    assert narrow["high"] - narrow["low"] < 0.3 * (wide["high"] - wide["low"])
    same = pairs.ratio_interval(ours, 2 * ours)
    assert same["low"] == same["ratio"] == same["high"] == 2.0


def test_the_geometric_mean():
    assert pairs.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert np.isnan(pairs.geometric_mean([]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_small_run_writes_rows_and_their_mean(dtype, tmp_path, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "out.json"
    arguments = ["--shape", "24,16,8,4,2", "--dtype", dtype, "--pairs", "3", "--json", str(out)]
    assert bench_moe.main(arguments) == 0
    found = json.loads(out.read_text())
    assert [row["baseline"] for row in found["rows"]] == ["hf_grouped_mm", "hf_eager"]
    for row in found["rows"]:
        assert row["shape"] == [24, 16, 8, 4, 2] and row["dtype"] == dtype
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
    assert found["geomean"] == pytest.approx(found["rows"][0]["ratio"])
    assert "geometric mean against hf_grouped_mm" in capsys.readouterr().out


def test_a_wrong_block_is_not_measured():
    pytest.importorskip("transformers")
    theirs = bench_moe.hf_block(SMALL, torch.float32, "grouped_mm")
    ours = bench_moe.our_block(theirs, SMALL)
    bench_moe.check(ours, theirs, SMALL, torch.float32)
    with torch.no_grad():
        ours.moe.experts.down_proj.weight.mul_(1.001)
    with pytest.raises(SystemExit, match="nothing was measured"):
        bench_moe.check(ours, theirs, SMALL, torch.float32)


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"pip install transformers==5.24.0"):
        bench_moe.main(["--pairs", "2"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pairs", "1"], "--pairs: found 1"),
        (["--baseline", "hf"], "--baseline: found 'hf'; allowed are hf_grouped_mm, hf_eager"),
        (["--shape", "1,2"], "five numbers T,D,F,E,K are allowed"),
        (["--device", "cuda", "--shape", "qwen"], "--shape: found 'qwen'; allowed are qwen3_30b"),
        (["--device", "cuda", "--impl", "best"], "--impl: found 'best'"),
        (["--device", "cuda", "--pass", "up"], "--pass: found 'up'; allowed are fwd, bwd, full"),
    ],
)
def test_bad_arguments_are_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_moe.main(arguments)
    assert said in f"{stopped.value} {capsys.readouterr().err}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    options = Namespace(
        shape=None, impl="ours", routing="uniform", passes="fwd", tokens="4096", device="cuda"
    )
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        moe_gpu.measure_gpu(options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_small_run_on_a_gpu(monkeypatch):
    monkeypatch.setitem(moe_gpu.SHAPES, "small", (256, 128, 8, 2))
    monkeypatch.setattr(moe_gpu, "COUNTED", 5)
    arguments = ["--device", "cuda", "--shape", "small", "--tokens", "512"]
    assert bench_moe.main(arguments) == 0
