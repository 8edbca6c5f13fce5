"""The step benchmark: its keys, its verdicts, its comparison, on foreign code and on a project."""

from __future__ import annotations

import json
import re
import shutil
import statistics

import pytest
import torch
from skills.targets import processes
from skills.targets.processes import (
    BENCHMARK_STEP,
    CLASSIFIER,
    LANGUAGE_MODEL,
    MLP,
    ROOT,
    benchmark_step,
)

from kit.errors import UsageError
from kit.report import Report

SEAM_KEYS = {"step_time", "p20", "p80", "forward", "backward", "optimizer", "data"}
SEAM_KEYS |= {"tokens_per_s", "memory_bytes", "flops", "mfu"}
OWN_KEYS = {"cpu_time", "step_times", "targets_per_step", "targets_unit", "noise"}
QUIET = {
    "step_time": 1.0,
    "p20": 0.99,
    "p80": 1.01,
    "targets_per_step": 8,
    "targets_unit": "tokens",
}


def read_reports(folder):
    paths = sorted(folder.glob("runs/checks/benchmark-step/*/report.json"))
    return [json.loads(path.read_text()) for path in paths]


def measured(step_times, tokens=8):
    """Give the numbers of a run with these step times."""
    p20, _, _, p80 = statistics.quantiles(step_times, n=5, method="inclusive")
    return {
        **QUIET,
        "step_time": statistics.median(step_times),
        "p20": p20,
        "p80": p80,
        "step_times": step_times,
        "targets_per_step": tokens,
    }


def judged(numbers, baseline_numbers, limit=1.05):
    report = Report("benchmark-step", numbers=dict(numbers))
    benchmark_step.judge_ratio(report, {"numbers": baseline_numbers}, limit)
    return report


@pytest.mark.parametrize(
    ("spec", "unit", "targets", "optimizer"),
    [
        (MLP, "samples", 16, False),
        (CLASSIFIER, "samples", 12, True),
        (LANGUAGE_MODEL, "tokens", 40, True),
    ],
    ids=["mlp", "cnn", "lm"],
)
def test_foreign_code_gives_the_keys_of_the_seam(spec, unit, targets, optimizer, tmp_path):
    done = processes.run(BENCHMARK_STEP, "--target", spec, "--steps", 8, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "unclear": 3}[report["verdict"]], done.stderr
    numbers = report["numbers"]
    assert set(numbers) >= SEAM_KEYS | OWN_KEYS
    assert numbers["step_time"] == statistics.median(numbers["step_times"])
    assert (
        len(numbers["step_times"]) == 8 and numbers["p20"] <= numbers["step_time"] <= numbers["p80"]
    )
    low, high = numbers["step_time_95"]
    assert low <= numbers["step_time"] <= high
    assert (numbers["targets_unit"], numbers["targets_per_step"]) == (unit, targets)
    assert numbers["tokens_per_s"] == pytest.approx(targets / numbers["step_time"])
    parts = [numbers[name] or 0 for name in ("data", "forward", "backward", "optimizer")]
    assert (numbers["optimizer"] is not None) is optimizer
    assert sum(parts) <= 2 * numbers["step_time"] and all(part >= 0 for part in parts)
    assert numbers["memory_bytes"] > 2**24 and numbers["flops"] > 0 and numbers["mfu"] is None
    assert report["env"]["threads"] == 1 and report["env"]["device"] == "cpu"
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_the_flops_of_a_linear_layer_are_known(tmp_path):
    (tmp_path / "linear.py").write_text(
        "import torch\ndef build():\n    m = torch.nn.Linear(32, 64, bias=False)\n"
        "    return m, [torch.randn(16, 32)], lambda m, b: m(b).square().mean()\n"
    )
    words = ["--target", "linear.py:build", "--steps", 5, "--peak-tflops", 0.5, "--json"]
    done = processes.run_fresh(BENCHMARK_STEP, *words, cwd=tmp_path)  # it imports what it uses
    numbers = json.loads(done.stdout)["numbers"]
    assert numbers["flops"] == 2 * 16 * 32 * 64 * 2  # forward, and the weight's gradient
    assert numbers["mfu"] == pytest.approx(numbers["flops"] / numbers["step_time"] / 0.5e12)


def test_the_target_is_slow_where_it_says(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time, torch\nclass Slow:\n    def __iter__(self):\n        while True:\n"
        "            time.sleep(0.03)\n            yield torch.ones(2, 4)\n"
        "def build():\n    m = torch.nn.Linear(4, 1)\n"
        "    return m, Slow(), lambda m, b: m(b).mean()\n"
    )
    words = ["--target", "slow.py:build", "--steps", 5, "--json"]
    numbers = json.loads(processes.run(BENCHMARK_STEP, *words, cwd=tmp_path).stdout)["numbers"]
    assert numbers["data"] >= 0.03 > 0.015 > numbers["forward"] + numbers["backward"]
    assert numbers["cpu_time"] < numbers["step_time"]  # it slept, and the process time says so


def test_noise_is_unclear_and_quiet_passes():
    limit = benchmark_step.THRESHOLDS["step-time-noise"]
    for width, verdict in ((1.0, "pass"), (limit - 0.01, "pass"), (limit + 0.01, "unclear")):
        report = Report("benchmark-step", numbers={**QUIET, "p20": 1.0, "p80": width})
        benchmark_step.judge_noise(report)
        (check,) = report.checks
        assert (check["verdict"], check["threshold"]) == (verdict, limit)
        assert bool(report.next) is (verdict == "unclear")


def test_a_restless_target_exits_with_3(tmp_path):
    (tmp_path / "restless.py").write_text(
        "import itertools, time, torch\nturn = itertools.count()\ndef build():\n"
        "    m = torch.nn.Linear(4, 1)\n    def loss_fn(m, b):\n"
        "        time.sleep(0.03 * (next(turn) % 2))\n        return m(b).mean()\n"
        "    return m, [torch.ones(2, 4)], loss_fn\n"
    )
    words = ["--target", "restless.py:build", "--steps", 10]
    done = processes.run(BENCHMARK_STEP, *words, cwd=tmp_path)
    assert done.returncode == 3 and "unclear  step-time-noise" in done.stdout
    assert "next: run again with more --steps" in done.stdout
    assert len(done.stdout.splitlines()) <= 15


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, "pass"), (1.03, "pass"), (0.5, "pass"), (1.2, "fail"), (2.0, "fail")],
)
def test_the_ratio_to_the_baseline_decides(factor, verdict):
    base = [1.0 + 0.001 * (number % 5) for number in range(40)]
    report = judged(measured([factor * t for t in base]), measured(base))
    (check,) = report.checks
    assert check["verdict"] == verdict and check["value"] == pytest.approx(factor)
    low, high = report.numbers["ratio_95"]
    assert low <= check["value"] <= high


def test_an_interval_over_the_limit_is_unclear_and_asks_for_more_steps():
    base = [1.0 + 0.1 * (number % 5) for number in range(10)]
    report = judged(measured([1.05 * t for t in base]), measured(base))
    assert report.checks[0]["verdict"] == "unclear" and "raise --steps" in report.next[0]


def test_twice_the_tokens_in_twice_the_time_is_no_loss():
    base = [1.0 + 0.001 * (number % 5) for number in range(20)]
    twice = measured([2 * t for t in base], tokens=16)
    assert judged(twice, measured(base)).checks[0]["value"] == pytest.approx(1.0)


def test_tolerance_moves_the_limit():
    base = [1.0 + 0.001 * (number % 5) for number in range(20)]
    slower = measured([1.2 * t for t in base])
    assert judged(slower, measured(base), limit=1.5).verdict == "pass"


def test_without_scipy_the_ratio_alone_decides(monkeypatch):
    monkeypatch.setattr(benchmark_step, "bootstrap", lambda *_: None)
    base = [1.0] * 9
    report = judged(measured([1.2] * 9), measured(base))
    assert report.checks[0]["verdict"] == "fail" and report.checks[0]["message"] == "no interval"
    report = Report("benchmark-step", numbers=measured(base))
    assert benchmark_step.add_interval(report, base) is None
    assert report.evidence == ["no interval: this environment has no scipy"]


def test_other_units_and_hardware_are_refused():
    with pytest.raises(UsageError, match="the baseline counts samples, this target tokens"):
        judged(measured([1.0] * 9), {**measured([1.0] * 9), "targets_unit": "samples"})
    target = type("T", (), {"device": torch.device("cpu")})
    baseline = {"env": {"device_name": "another chip", "threads": torch.get_num_threads()}}
    with pytest.raises(UsageError, match="step times compare on one machine only"):
        benchmark_step.refuse_other_hardware(baseline, target)


SLEEPER = (
    "import time, torch\ndef build():\n    m = torch.nn.Linear(4, 1)\n    def loss_fn(m, b):\n"
    "        time.sleep({seconds})\n        return m(b).mean()\n"
    "    return m, [torch.ones(2, 4)], loss_fn\n"
)


def test_a_slower_step_fails_against_its_baseline_and_names_the_check(tmp_path):
    (tmp_path / "mine.py").write_text(SLEEPER.format(seconds=0.02))
    words = ["--target", "mine.py:build", "--steps", 8, "--warmup", 1]
    first = processes.run(BENCHMARK_STEP, *words, "--out", "base", cwd=tmp_path)
    assert first.returncode in (0, 3), first.stderr
    (tmp_path / "mine.py").write_text(SLEEPER.format(seconds=0.06))
    words += ["--baseline", "base/report.json"]
    slower = processes.run(BENCHMARK_STEP, *words, cwd=tmp_path)
    assert slower.returncode == 1, slower.stdout + slower.stderr
    assert "fail     step-time-ratio" in slower.stdout and "(threshold 1.05)" in slower.stdout
    assert "the baseline is of another configuration or source" in slower.stdout
    kinder = processes.run(BENCHMARK_STEP, *words, "--tolerance", 9, cwd=tmp_path)
    assert kinder.returncode in (0, 3) and "pass     step-time-ratio" in kinder.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "4"], "--steps 4; it takes at least 5"),
        (["--warmup", "0"], "--warmup 0; it takes at least 1"),
        (["--tolerance", "0.1"], "--tolerance without --baseline"),
        (["--baseline", "base.json", "--tolerance", "nan"], "--tolerance nan; it takes a share"),
        (["--baseline", "base.json", "--tolerance", "-1"], "--tolerance -1"),
        (["--peak-tflops", "0"], "--peak-tflops 0.0; it must be above 0"),
        (["--baseline", "gone.json"], "--baseline gone.json: No such file"),
        (["--baseline", "text.json"], "--baseline text.json is no JSON"),
        (["--baseline", "list.json"], "is no report of benchmark-step; it takes the report.json"),
        (["--baseline", "nan.json"], "has step_time 'nan'"),
    ],
)
def test_bad_flags_exit_with_2_before_anything_runs(words, message, tmp_path):
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    report = {"skill": "benchmark-step", "schema": 1, "numbers": {"step_time": "nan"}}
    (tmp_path / "nan.json").write_text(json.dumps(report))
    report["numbers"] = QUIET
    (tmp_path / "base.json").write_text(json.dumps(report))
    done = processes.run(BENCHMARK_STEP, "--target", MLP, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stdout == "" and not (tmp_path / "runs").exists()


def test_a_loss_without_a_graph_is_named(tmp_path):
    (tmp_path / "detached.py").write_text(
        "import torch\ndef build():\n    m = torch.nn.Linear(4, 1)\n"
        "    return m, [torch.ones(2, 4)], lambda m, b: m(b).mean().detach()\n"
    )
    done = processes.run(BENCHMARK_STEP, "--target", "detached.py:build", cwd=tmp_path)
    assert done.returncode == 2 and "the loss of the target has no graph" in done.stderr


def test_batches_that_teach_nothing_are_named(tmp_path):
    text = "import torch\ndef build():\n    m = torch.nn.Linear(4, 1)\n"
    text += "    batch = {'x': torch.ones(2, 4), 'labels': torch.full((2, 4), -100)}\n"
    text += "    return m, [batch], lambda m, b: m(b['x']).mean()\n"
    (tmp_path / "mine.py").write_text(text)
    words = ["--target", "mine.py:build", "--steps", 5, "--warmup", 1]
    done = processes.run(BENCHMARK_STEP, *words, cwd=tmp_path)
    assert done.returncode == 2 and "-100 for every label" in done.stderr


def test_an_error_in_a_later_step_shows_the_line_of_the_target(tmp_path):
    (tmp_path / "late.py").write_text(
        "import torch\ndef build():\n    m = torch.nn.Linear(4, 1)\n"
        "    return m, [torch.ones(2, 4), torch.ones(2, 3)], loss_fn\n"
        "def loss_fn(m, b):\n    return m(b).mean()\n"
    )
    done = processes.run(BENCHMARK_STEP, "--target", "late.py:build", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "late.py:6 in loss_fn: return m(b).mean()" in done.stderr


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


SMALL = ["--set", "model=tiny_dense", "data.seq_len=32", "data.global_batch_size=4"]


def test_a_project_is_timed_by_its_own_step(project, tmp_path):
    before = {path for path in project.rglob("*") if "__pycache__" not in path.parts}
    words = ["--project", project, *SMALL, "--seed", 3, "--steps", 6, "--warmup", 1, "--json"]
    done = processes.run(BENCHMARK_STEP, *words, cwd=tmp_path)
    assert done.returncode in (0, 3), done.stderr
    report = json.loads(done.stdout)
    numbers = report["numbers"]
    assert set(numbers) >= SEAM_KEYS | OWN_KEYS and len(numbers["step_times"]) == 6
    assert numbers["targets_unit"] == "tokens"
    assert numbers["targets_per_step"] == pytest.approx(32 * 4, rel=1e-6)
    added = {path for path in project.rglob("*") if "__pycache__" not in path.parts} - before
    assert added and all((project / "runs") in [path, *path.parents] for path in added)
    assert not list(tmp_path.iterdir())
    words[words.index("--steps") + 1] = 5
    other = processes.run(BENCHMARK_STEP, *words, "--set", "optim.lr=0.5", cwd=tmp_path)
    assert json.loads(other.stdout)["target"]["config_hash"] != report["target"]["config_hash"]


def test_every_configuration_error_of_a_project_is_told(project, tmp_path):
    words = ["--project", project, "--set", "optim.lrr=1", "data.seq_len=none"]
    done = processes.run(BENCHMARK_STEP, *words, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "optim.lrr" in done.stderr and "data.seq_len" in done.stderr


def test_the_thresholds_stand_in_the_skill():
    body = (BENCHMARK_STEP.parents[1] / "SKILL.md").read_text(encoding="utf-8")
    for key, value in benchmark_step.THRESHOLDS.items():
        rows = [line for line in body.splitlines() if f"`{key}`" in line]
        assert any(float(value) in map(float, re.findall(r"\d+\.\d+", row)) for row in rows), key
