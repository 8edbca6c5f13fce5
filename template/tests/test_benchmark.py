"""The benchmark times the training step itself and prints what it promises."""

import json

import pytest
import torch

import curry_train.benchmark as benchmark
from curry_train.benchmark import PARTS, main, quantiles, run_accumulated_step
from curry_train.profiling import no_spans
from curry_train.runtime import build_runtime
from curry_train.step import train_step

SMALL = ("model.num_hidden_layers=1", "accelerator=cpu")
KEYS = {"step_time", "p20", "p80", "tokens_per_s", "memory_bytes", "flops", "mfu", *PARTS}


def test_the_result_has_every_promised_key_and_its_parts_fill_the_step():
    runtime = build_runtime(SMALL)
    result = run_accumulated_step(runtime, steps=4, warmup=1)
    assert KEYS <= result.keys() and result["mfu"] is None
    assert result["p20"] <= result["step_time"] <= result["p80"]
    assert len(result["step_times"]) == 4 and result["memory_bytes"] > 1e7
    inside = sum(result[part] for part in PARTS)
    assert 0.7 * result["step_time"] < inside < 1.3 * result["step_time"]
    assert result["tokens_per_s"] == pytest.approx(1024 / result["step_time"])
    json.dumps(result)
    assert runtime.spans is no_spans and runtime.step == 5


def test_a_timed_step_is_bitwise_a_training_step():
    timed, plain = build_runtime(SMALL), build_runtime(SMALL)
    run_accumulated_step(timed, steps=2, warmup=1)
    for _ in range(3):
        train_step(plain)
    for a, b in zip(timed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_calls_the_train_step_of_training(monkeypatch):
    calls = []

    def counted(runtime):
        calls.append(runtime)
        return train_step(runtime)

    monkeypatch.setattr(benchmark, "train_step", counted)
    run_accumulated_step(build_runtime(SMALL), steps=2, warmup=1)
    assert len(calls) == 3


@pytest.mark.parametrize("steps, warmup", [(0, 1), (1, -1)])
def test_counts_that_measure_nothing_are_refused(steps, warmup):
    with pytest.raises(ValueError, match="steps=.*must be at least 1"):
        run_accumulated_step(None, steps=steps, warmup=warmup)


def test_quantiles_of_one_value_are_that_value():
    assert quantiles([2.0]) == (2.0, 2.0)
    assert quantiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (2.0, 5.0)


def test_the_command_prints_only_json_and_bad_settings_exit_2(capsys, monkeypatch):
    monkeypatch.setattr("curry_train.command_line.signal.signal", lambda *_: None)
    command = ["--json", "--steps=1", "--warmup=0"]
    assert main([SMALL[0], *command, *SMALL[1:]]) == 0
    assert json.loads(capsys.readouterr().out).keys() >= KEYS
    assert main([*command, "optim.lrr=1"]) == 2
    wrong = capsys.readouterr()
    assert "optim.lr" in wrong.err and wrong.out == ""


def test_the_command_without_json_prints_a_table(capsys):
    assert main(["--steps=1", "--warmup=0", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][:3] == ["step_time", "p20", "p80"]
    assert "unknown" in lines[-1]
