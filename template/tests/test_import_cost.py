"""The benchmark of imports measures what it says, and ends with 1 when a bound is missed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import import_cost

from curry_train.config import ModelConfig

TINY = ModelConfig(vocab_size=512, hidden_size=256, num_experts=4, moe_intermediate_size=64)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(import_cost, "CASES", {"tiny": (TINY, torch.bfloat16, 1000.0)})
    monkeypatch.setattr(import_cost, "SPEED", 0.0)
    monkeypatch.setattr(import_cost, "LARGEST_FILES", 1e4)


def test_a_row_for_time_and_one_for_the_memory_of_each_world(capsys):
    assert import_cost.main(["--mb", "1", "--rounds", "1", "--json"]) == 0
    speed, one, two = json.loads(capsys.readouterr().out)
    assert speed["value"] == speed["baseline_seconds"] / speed["seconds"] and speed["ok"]
    assert one["name"] == "memory, tiny, 1 rank" and two["name"] == "memory, tiny, 2 ranks"
    assert one["peak_bytes"] > 0 and 0 < two["value"] < 1


@pytest.mark.parametrize("missed", ["speed", "memory"])
def test_a_missed_bound_ends_with_1(missed, monkeypatch, capsys):
    if missed == "speed":
        monkeypatch.setattr(import_cost, "SPEED", 1e9)
    else:
        monkeypatch.setattr(import_cost, "LARGEST_FILES", 0.0)
        monkeypatch.setattr(import_cost, "peak_of_rank", lambda rank, world, *_: [2, 1])
    assert import_cost.main(["--mb", "1", "--rounds", "1"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "MISSED" in line]
    assert lines and all(line.startswith(missed) for line in lines)
