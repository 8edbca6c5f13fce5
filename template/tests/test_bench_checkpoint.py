"""The benchmark of checkpoints: what it times is what it says, and its bounds decide."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_checkpoint
from bench_checkpoint import Bench

NAMES = ["save", "load", "load and verify", "loop blocked by async"]


def test_both_write_all_bytes_and_leave_nothing(tmp_path):
    bench = Bench(0, 1, tmp_path, 3)
    assert 3e6 <= bench.bytes < 3.1e6
    path = bench.save()
    bench.torch_save()
    ours = load_file(path / "tensors-00000.safetensors")
    theirs = torch.load(bench.file())
    for found in (ours, theirs):
        assert found.keys() == bench.tensors.keys()
        assert all(torch.equal(found[name], bench.tensors[name]) for name in found)
    assert bench.clean_clock(lambda: None) < 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bounds", ["met", "missed"])
def test_the_bounds_decide_the_exit_code(tmp_path, monkeypatch, capsys, bounds):
    met = bounds == "met"
    for name in ("SAVE", "LOAD", "LOAD_VERIFIED"):
        monkeypatch.setattr(bench_checkpoint, name, 0.0 if met else 1e9)
    monkeypatch.setattr(bench_checkpoint, "BLOCKED", 1e9 if met else 0.0)
    words = ["--megabytes", "1", "--pairs", "2", "--folder", str(tmp_path), "--no-imports"]
    words += ["--ranks", "2", "--json"]
    file = tmp_path / "out.json"
    assert bench_checkpoint.main(words if met else [*words, str(file)]) == (0 if met else 1)
    out = capsys.readouterr()
    report = json.loads(out.out if met else file.read_text())
    names = [f"{name}, 2 ranks" for name in NAMES]
    assert [row["name"] for row in report["rows"]] == names
    assert report["missed"] == ([] if met else names)
    assert out.err == "".join(f"missed: {name}\n" for name in report["missed"])
    for row in report["rows"]:
        ratio = row["baseline_seconds"] / row["seconds"]
        value = 1 / ratio if "async" in row["name"] else ratio
        assert row["value"] == pytest.approx(value)
    assert [path.name for path in tmp_path.iterdir()] == ([] if met else ["out.json"])
