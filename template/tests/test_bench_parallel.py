"""The benchmark of parallelism: clocks by hand, figures that are the same anywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_parallel
import pipeline_clock
import tensor_cost
from pipeline_clock import Case, measure_steps, order_of, simulate

from curry_train.testing import run_ranks

pytestmark = pytest.mark.dist
TINY = tensor_cost.Sizes(batch=2, sequence=8, width=16, heads=2, hidden=24)


def test_orders_of_schedules_that_have_no_table_are_those_torch_runs():
    first, last = order_of("1f1b", 2, 3).values()
    assert "".join(kind for kind, _, _ in first) == "FFBFBB"
    assert "".join(kind for kind, _, _ in last) == "FBFBFB"
    assert [number for _, _, number in first] == [0, 1, 0, 2, 1, 2]
    assert {stage for _, stage, _ in last} == {1}
    (passes, _) = order_of("gpipe", 2, 3).values()
    assert "".join(kind for kind, _, _ in passes) == "FFFBBB"


@pytest.mark.parametrize("schedule", bench_parallel.SCHEDULES)
def test_an_order_holds_every_pass_once(schedule):
    passes = [one for rank in order_of(schedule, 4, 8).values() for one in rank]
    stages = 4 if schedule in ("gpipe", "1f1b") else 8
    work = [(stage, number) for kind, stage, number in passes if kind == "F"]
    assert sorted(work) == [(stage, number) for stage in range(stages) for number in range(8)]
    for kinds in ("IB", "WB"):
        assert sorted(one[1:] for one in passes if one[0] in kinds) == sorted(work)
    split = {kind for kind, _, _ in passes}
    assert ("W" in split) == (schedule in ("interleaved_zb", "zbv", "dualpipev"))


def test_the_clock_by_hand():
    order = {0: [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)]}
    order[1] = [("F", 1, 0), ("I", 1, 0), ("W", 1, 0), ("F", 1, 1), ("B", 1, 1)]
    # Rank 0: F 1, 2; waits for I at 4, B 4 to 9; waits for B at 13, B 13 to 18.
    # Rank 1: F 2, I 4, W 7, F 8, B 13.
    assert simulate(order, 1.0, 2.0, 3.0) == (18.0, 6.0)
    order[1][0] = ("F", 1, 5)
    with pytest.raises(AssertionError, match="does not come to an end"):
        simulate(order, 1.0, 2.0, 3.0)


def test_every_bubble_is_within_a_tenth_of_its_formula(monkeypatch):
    rows = bench_parallel.measure_bubbles()
    assert len(rows) == 6 * 8 * 3
    assert not list(bench_parallel.missed({"bubble": rows}))
    even = [row for row in rows if len(set(row["times"])) == 1]
    assert len(even) == 48
    assert all(row["bubble"] == pytest.approx(row["formula"]) for row in even)
    assert all(row["bubble"] > 0 and row["step"] > row["bubble"] for row in rows)
    real = bench_parallel.bubble
    monkeypatch.setattr(bench_parallel, "bubble", lambda *a: 1.15 * real(*a))
    wrong = list(bench_parallel.missed({"bubble": bench_parallel.measure_bubbles()}))
    assert len(wrong) > 100
    assert wrong[0].startswith("bubble of gpipe, pp 2, 4 micro-batches") and "13%" in wrong[0]


STEPS = [
    # case; hidden in pairs; hidden in the step; step
    (Case(4, 1.0), 1.0, 0.375, 78.0),
    (Case(8, 0.5), 1.0, 0.6875, 115.0),
    (Case(8, 1.0), 1.0, 0.6875, 126.0),
    (Case(8, 2.0), 0.75, 0.515625, 172.0),
    (Case(8, 4.0), 0.625, 0.4296875, 264.0),
    (Case(8, 1.0, overlap=False), 0.0, 0.0, 174.0),
    (Case(16, 1.0), 1.0, 0.84375, 222.0),
]


def test_the_executor_hides_what_its_clock_says():
    rows = measure_steps(2, [case for case, *_ in STEPS])
    for row, (case, pairs, whole, step) in zip(rows, STEPS, strict=True):
        assert row["even"] and (row["pp"], row["micro_batches"]) == (2, case.micro_batches)
        found = row["hidden_pairs"], row["hidden_step"], row["step"]
        assert found == pytest.approx((pairs, whole, step)), case
        assert 0 < row["idle"] < 0.2
    kept = [row for row in rows if row["delay"] in bench_parallel.IN_PAIRS][1:]
    assert not list(bench_parallel.missed({"overlap": kept}))
    assert rows[:2] == measure_steps(2, [case for case, *_ in STEPS[:2]]), "other figures"


def test_a_forward_that_starts_first_hides_less(monkeypatch):
    turn = pipeline_clock.OverlappedPipeline.act.__globals__
    real = turn["run_all"]
    monkeypatch.setitem(turn, "run_all", lambda *passes: real(*passes[::-1]))
    (row,) = measure_steps(2, [Case(8, 1.0)])
    assert row["hidden_pairs"] == 0.5
    pairs, whole = bench_parallel.missed({"overlap": [row]})
    assert pairs == "pp 2, 8 micro-batches, delay 1: hides 0.500 in pairs; 0.95 is wanted"
    assert "of a step; 0.65 is wanted" in whole


def test_the_virtual_clock_and_the_wall_clock():
    clock = pipeline_clock.VirtualClock()
    clock.spend(2.0)
    clock.until(1.0)
    assert clock.now() == 2.0
    clock.until(5.0)
    assert clock.now() == 5.0
    wall = pipeline_clock.WallClock()
    start = wall.now()
    wall.spend(2.0)
    wall.until(start)
    assert 2.0 <= wall.now() - start
    wall.until(start + 6.0)
    assert 6.0 <= wall.now() - start


def step_row(**changes):
    row = {"pp": 2, "micro_batches": 8, "delay": 1.0, "overlap": True}
    return {**row, "hidden_pairs": 1.0, "hidden_step": 0.7, **changes}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"overlap": [step_row(hidden_pairs=0.94)]}, "hides 0.940 in pairs; 0.95 is wanted"),
        ({"overlap": [step_row(hidden_step=0.64)]}, "hides 0.640 of a step; 0.65 is wanted"),
        (
            {"overlap": [step_row(micro_batches=16, hidden_step=0.79)]},
            "16 micro-batches, delay 1: hides 0.790 of a step; 0.80 is wanted",
        ),
        (
            {"overlap": [step_row(delay=2.0, hidden_pairs=0.69)]},
            "delay 2: hides 0.690 in pairs; 0.70 is wanted",
        ),
        ({"overlap": [step_row(overlap=False, hidden_step=0.1)]}, "plain order, pp 2"),
        ({"tensor": {"added_to_halves": 0.15}}, "adds 15.0% to halves; under 15% is wanted"),
        ({"tensor": {"added_to_unsplit": 0.2}}, "adds 20.0% to unsplit"),
        ({"overlap": [step_row(hidden_pairs=float("nan"))]}, "hides nan in pairs"),
        (
            {"wall": [step_row(hidden_pairs=0.4), step_row(hidden_pairs=0.0)]},
            "60% of the messages in pairs is exposed, 100% in the plain order",
        ),
    ],
)
def test_a_missed_target_is_named(found, said):
    (line,) = bench_parallel.missed(found)
    assert said in line


def test_reached_targets_are_silent():
    tensor = {"added_to_halves": 0.149, "added_to_unsplit": -0.1}
    wall = [step_row(hidden_pairs=0.6), step_row(hidden_pairs=0.0)]
    found = {"overlap": [step_row()], "tensor": tensor, "wall": wall}
    assert not list(bench_parallel.missed(found))


KEYS = {
    "bubble": ["schedule", "pp", "micro_batches", "times", "step", "bubble", "formula"],
    "overlap": ["pp", "micro_batches", "delay", "overlap", "hidden_pairs", "hidden_step"],
    "tensor": ["batch", "sequence", "width", "heads", "hidden", "rounds", "rank_ms"],
}
KEYS["overlap"] += ["step", "idle", "even"]
KEYS["tensor"] += ["halves_ms", "unsplit_ms", "added_to_halves", "added_to_unsplit"]


def test_a_small_run_writes_its_figures_and_fails_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_parallel, "PIPELINES", {2: (4,)})
    monkeypatch.setattr(bench_parallel, "STEPS", {2: (Case(4, 1.0), Case(4, 1.0, False))})
    monkeypatch.setattr(bench_parallel, "Sizes", lambda: TINY)
    monkeypatch.setattr(bench_parallel, "ADDED", 0.0)  # nothing is free at this size
    out = tmp_path / "out.json"
    assert bench_parallel.main(["--json", str(out), "--rounds", "2"]) == 1
    found = json.loads(out.read_text())
    assert list(found) == ["bubble", "overlap", "tensor", "wall", "missed"]
    assert [list(found[part][0]) for part in ("bubble", "overlap")] == [
        KEYS["bubble"],
        KEYS["overlap"],
    ]
    assert list(found["tensor"]) == KEYS["tensor"] and found["wall"] is None
    said = capsys.readouterr()
    assert "bubble of dualpipev" in said.out and "hides 1.000 in pairs" in said.out
    missed = [f"bench_parallel: missed: {line}" for line in found["missed"]]
    assert said.err.splitlines() == missed and "tensor parallelism adds" in missed[0]


def test_figures_go_to_the_terminal_and_parts_can_be_left_out(monkeypatch, capsys):
    monkeypatch.setattr(bench_parallel, "PIPELINES", {2: (4,)})
    assert bench_parallel.main(["--json", "--only", "bubble"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["overlap"] is None and found["tensor"] is None and found["missed"] == []
    assert len(found["bubble"]) == 18


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "bubbles"], "--only: found 'bubbles'; allowed are bubble, overlap, tensor"),
        (["--rounds", "1"], "--rounds: found 1; at least 2 are allowed"),
    ],
)
def test_bad_arguments_are_named(arguments, said, capsys):
    with pytest.raises(SystemExit):
        bench_parallel.main(arguments)
    assert said in capsys.readouterr().err


def test_the_ratios_are_medians_of_the_worse_rank(monkeypatch):
    slow = ([2.0, 3.0, 9.0], [1.0, 2.0, 2.0], [4.0, 4.0, 4.0])
    fast = ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    monkeypatch.setattr(tensor_cost, "run_ranks", lambda *_, **__: [fast, slow])
    found = tensor_cost.measure_cost(3, TINY)
    assert found["added_to_halves"] == pytest.approx(1.0)  # 2, 1.5 and 4.5: the median is 2
    assert found["added_to_unsplit"] == pytest.approx(0.5)  # 1, 1.5 and 4.5
    assert found["rounds"] == 3 and found["width"] == 16


def test_split_layers_that_err_are_not_measured(monkeypatch):
    gather = sys.modules["curry_train.layers.mlp"].gather_sequence

    def wrong(x, group):
        return gather(x, group) * (1.001 if group is not None else 1.0)

    monkeypatch.setattr("curry_train.layers.mlp.gather_sequence", wrong)
    with pytest.raises(AssertionError, match="the split layers are off by .*nothing was measured"):
        tensor_cost.measure_cost(2, TINY)


def flops_of_rank(rank, world):
    from torch.utils.flop_counter import FlopCounterMode

    parallel = tensor_cost.ParallelConfig(tp=2)
    mesh = tensor_cost.build_mesh(
        parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60
    )
    found = {}
    for name, run in tensor_cost.ways_of(mesh, TINY).items():
        with FlopCounterMode(display=False) as counter:
            run()
        found[name] = counter.get_total_flops()
    return found


def test_a_rank_multiplies_as_much_as_its_halves_and_half_of_the_whole():
    for found in run_ranks(flops_of_rank, 2):
        assert found["rank"] == found["halves"] == found["unsplit"] / 2 > 0
