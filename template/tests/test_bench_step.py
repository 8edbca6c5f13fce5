"""The benchmark of a whole training step, in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_step


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"VOCAB": 128, "WIDTH": 32, "BLOCKS": 1, "HIDDEN": 16, "LENGTH": 12}.items():
        monkeypatch.setattr(bench_step, name, value)


def test_a_small_run_writes_its_rows(tmp_path, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "out.json"
    assert bench_step.main(["--pairs", "2", "--baseline", "hf", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row["baseline"] == "hf" and 0 < row["low"] <= row["ratio"] <= row["high"]
    assert found["parameters"] > 0 and found["left_out"] == []
    assert "against hf" in capsys.readouterr().out


def test_what_is_not_installed_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setitem(bench_step.PACKAGES, "litgpt", "a-package-that-is-not-there")
    assert bench_step.main(["--pairs", "2", "--baseline", "litgpt"]) == 1
    assert "litgpt: left out" in capsys.readouterr().out


def test_models_of_other_sizes_or_losses_are_not_measured(monkeypatch):
    pytest.importorskip("transformers")
    ids = torch.randint(0, 128, (2, 12))
    mine, theirs = bench_step.ours(), bench_step.hf()
    bench_step.check("hf", mine, theirs, ids)
    with pytest.raises(SystemExit, match=r"the loss of ours is .*nothing was measured"):
        bench_step.check("hf", (mine[0], lambda ids: mine[1](ids) + 0.01), theirs, ids)
    monkeypatch.setattr(bench_step, "HIDDEN", 24)
    with pytest.raises(SystemExit, match="they have to be equal; nothing was measured"):
        bench_step.check("hf", bench_step.ours(), theirs, ids)


def test_a_step_trains():
    torch.manual_seed(0)
    model, loss = bench_step.ours()
    bench_step.fill(model)
    step = bench_step.trained_by(model, loss)
    ids = torch.randint(0, 128, (2, 12))
    losses = [step(ids) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.1


def test_bad_arguments_are_named(capsys):
    for arguments, said in ((["--pairs", "1"], "found 1"), (["--baseline", "x"], "found 'x'")):
        with pytest.raises(SystemExit):
            bench_step.main(arguments)
        assert said in capsys.readouterr().err
