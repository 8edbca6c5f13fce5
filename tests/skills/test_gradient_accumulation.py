"""The largest micro-batch is found, right loops pass, each wrong one is named."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
import torch
from skills.targets import accumulating, processes
from skills.targets.processes import ROOT, TARGETS

from kit.errors import UsageError
from kit.report import Report
from kit.state import preserved
from kit.target import load_target

SKILL = ROOT / "skills" / "gradient-accumulation"
SCRIPT = SKILL / "scripts" / "gradient_accumulation.py"
sys.path.insert(0, str(SCRIPT.parent))
import accumulation_proof  # noqa: E402
import gradient_accumulation as script  # noqa: E402
import micro_batches  # noqa: E402

sys.dont_write_bytecode = False
TARGET = f"{TARGETS / 'accumulating.py'}:"
SMALL = ["--set", "model=tiny_moe", "model.num_hidden_layers=2", "data.seq_len=32"]


def target_of(function, folder):
    return load_target(folder, TARGET + function, overrides=[], seed=0, device="auto")


def proved(loop, folder, function="build", count=4):
    report, target = Report("gradient-accumulation"), target_of(function, folder)
    kept = [p.detach().clone() for p in target.model.parameters()]
    with preserved(target):
        script.prove_loop(report, target, count, getattr(accumulating, loop))
    for parameter, before in zip(target.model.parameters(), kept, strict=True):
        assert torch.equal(parameter, before) and parameter.grad is None
    return report, {check["id"].removeprefix("accumulation-"): check for check in report.checks}


@pytest.mark.parametrize("function", ["build", "regression"])
@pytest.mark.parametrize("loop", ["weighted", "clipped", "of_four"])
def test_a_right_loop_passes(loop, function, tmp_path):
    report, checks = proved(loop, tmp_path, function)
    assert report.verdict == "pass", report.checks
    assert checks["equal"]["value"] < 1e-12 and checks["additive"]["value"] < 1e-12
    assert len(set(report.numbers["targets_of_micro_batches"])) > 1, "unequal on purpose"
    errors = report.numbers["errors"]
    assert set(errors) >= {"gradients", "norm"} and ("loss" in errors) is (loop != "of_four")


@pytest.mark.parametrize(
    ("loop", "faults"),
    [
        ("mean_of_means", {"mean-of-means", "equal"}),
        ("sum_of_means", {"not-divided", "equal"}),
        ("sum_of_sums", {"not-divided"}),
        ("zeroes_between", {"zeroes-between", "equal"}),
        ("steps_each", {"steps-each", "equal"}),
        ("clips_sum_each_time", {"clips-each"}),
        ("clips_each_alone", {"clips-each"}),
    ],
)
def test_a_wrong_loop_is_named_and_nothing_else(loop, faults, tmp_path):
    _, checks = proved(loop, tmp_path)
    assert {name for name, check in checks.items() if check["verdict"] == "fail"} == faults


def test_a_loop_without_a_step_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no optimizer step over 3 micro-batches"):
        proved("never_steps", tmp_path, count=3)


def test_a_loss_that_mixes_samples_is_told_apart_from_the_loop(tmp_path):
    _, checks = proved("weighted", tmp_path, "mixing")
    assert checks["additive"]["verdict"] == "fail" and checks["equal"]["verdict"] == "skipped"


def test_coefficients_are_those_of_the_combination():
    torch.manual_seed(0)
    sums = [{"a": torch.randn(5), "b": torch.randn(3)} for _ in range(3)]
    sums = [{name: tensor.double() for name, tensor in s.items()} for s in sums]
    wanted = [0.5, -2.0, 0.0]
    mixed = {n: sum(a * s[n] for a, s in zip(wanted, sums, strict=True)) for n in sums[0]}
    assert accumulation_proof.coefficients(mixed, sums) == pytest.approx(wanted, abs=1e-12)
    mixed["a"] = mixed["a"] + 1
    assert accumulation_proof.coefficients(mixed, sums) is None
    assert accumulation_proof.fault_of([1 / 6, 1 / 6], [2, 4]) is None
    assert accumulation_proof.fault_of([1 / 4, 1 / 8], [2, 4]) == "accumulation-mean-of-means"
    assert accumulation_proof.fault_of([1 / 2, 1 / 4], [2, 4]) == "accumulation-not-divided"
    assert accumulation_proof.fault_of([0.0, 1 / 6], [2, 4]) == "accumulation-zeroes-between"
    assert accumulation_proof.fault_of([0.3, 0.1], [2, 4]) == "unknown"


class Needs(micro_batches.Trials):
    """Bytes by a formula in the place of a measurement."""

    def __init__(self, budget):
        self.budget, self.tried = budget, []

    def fits(self, size):
        self.tried.append(size)
        return 100 * size + 50 <= self.budget


@pytest.mark.parametrize("limit", [1, 7, 64, 100])
def test_doubling_then_bisecting_finds_the_largest_size(limit):
    for budget in (0, 149, 150, 1049, 1050, 3333, 100_000):
        trials = Needs(budget)
        wanted = max(min((budget - 50) // 100, limit), 0)
        assert trials.largest(limit, lambda size: None) == wanted
        assert len(set(trials.tried)) == len(trials.tried) <= 15


def test_the_measured_size_fits_and_the_next_does_not(tmp_path):
    target = target_of("build", tmp_path)
    with preserved(target):
        samples = micro_batches.Samples(target, 16)
        free = micro_batches.Trials(target, samples, None)
        for size in (5, 6):
            free.fits(size)
        need, more = free.needs[5], free.needs[6]
        assert free.always < need < more
        for budget, wanted in ((need, 5), (need - 1, 4), (more - 1, 5), (more, 6)):
            trials = micro_batches.Trials(target, samples, budget)
            assert trials.largest(16, lambda size: None) == wanted
        assert micro_batches.Trials(target, samples, free.always).largest(16, print) == 0


def test_out_of_memory_is_a_size_that_does_not_fit(tmp_path):
    target = target_of("build", tmp_path)
    samples = micro_batches.Samples(target, 16)
    plain = target.loss_fn

    def loss_fn(model, batch):
        if len(batch["labels"]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, batch)

    target.loss_fn = loss_fn
    with preserved(target):
        trials = micro_batches.Trials(target, samples, None)
        assert trials.largest(16, lambda size: None) == 3 and trials.needs[4] is None


def test_samples_are_joined_split_and_masked(tmp_path):
    target = target_of("build", tmp_path)
    samples = micro_batches.Samples(target, 12)
    batch = samples.take(0, 12)
    assert batch["labels"].shape == (12, 12) and samples.count == 16
    masked = micro_batches.unequal(batch)["labels"]
    assert (masked != -100).sum(1).tolist() == list(range(1, 13))
    parts = micro_batches.parts_of(batch, 4)
    assert torch.equal(torch.cat([p["labels"] for p in parts]), batch["labels"])
    rows = torch.arange(24).view(12, 2)
    assert [len(part) for part in micro_batches.parts_of(rows, 4)] == [3, 2, 3, 4]
    assert micro_batches.largest_divisor(12, 5) == 4 and micro_batches.largest_divisor(7, 6) == 1


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accumulation") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def run(project, *words, cwd):
    done = processes.run(SCRIPT, "--project", project, *SMALL, *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    checks = {c["id"].removeprefix("accumulation-"): c for c in report["checks"]}
    return report, checks


def test_a_project_gets_overrides_and_a_proof(project, tmp_path):
    words = ["--memory", "20MiB", "--tokens-per-step", 1600, "--ranks", 2]
    report, checks = run(project, *words, cwd=tmp_path)
    assert report["verdict"] == "pass", report["checks"]
    assert checks["equal"]["value"] < 1e-12 == checks["equal"]["threshold"]
    numbers = report["numbers"]
    assert numbers["samples_per_step"] == 50 and numbers["tokens_per_step"] == 1600
    micro, factor = numbers["micro_batch"], numbers["factor"]
    assert micro * factor * 2 == 50 and micro <= numbers["largest_micro_batch"] < 25
    fitting = numbers["largest_micro_batch"]
    assert (
        numbers["needs_bytes"][str(fitting)]
        <= 20 * 2**20
        < numbers["needs_bytes"][str(fitting + 1)]
    )
    overrides = ["data.global_batch_size=50", f"data.micro_batch_size={micro}"]
    assert numbers["overrides"] == overrides
    again, _ = run(project, *words, cwd=tmp_path)
    assert again["numbers"]["needs_bytes"] == numbers["needs_bytes"], "deterministic"


BACKWARD = "(sums.total * runtime.loss_scale.value).backward()"
COUNT = "token_count=int(count)"
CLIP = "torch.nn.utils.clip_grad_norm_(runtime.model.parameters(), limit)"
PLANTED = {
    "clips-each": {
        BACKWARD: f"{BACKWARD}; limit = runtime.config.optim.max_grad_norm; {CLIP}",
    },
    "mean-of-means": {
        BACKWARD: "(sums.total / sums.count / len(micro_batches)).backward()",
        COUNT: "token_count=1",
    },
    "not-divided": {COUNT: "token_count=1"},
    "steps-each": {BACKWARD: f"{BACKWARD}; runtime.optimizer.step()"},
    "zeroes-between": {BACKWARD: f"runtime.model.zero_grad(); {BACKWARD}"},
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_planted_in_a_project_is_named(fault, project, tmp_path):
    faulty = tmp_path / "faulty"
    shutil.copytree(project, faulty, ignore=shutil.ignore_patterns("runs"))
    path = faulty / "curry_train" / "step.py"
    text = path.read_text(encoding="utf-8")
    for old, new in PLANTED[fault].items():
        assert text.count(old) == 1, "the step was rewritten: plant the fault anew"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    _, checks = run(faulty, cwd=tmp_path)
    failed = {name for name, check in checks.items() if check["verdict"] == "fail"}
    assert fault in failed and failed <= {fault, "equal"}, checks


def test_other_code_without_a_loop_has_its_loss_judged(tmp_path):
    done = processes.run(SCRIPT, "--target", TARGET + "build", "--memory", "1MB", cwd=tmp_path)
    assert done.returncode == 0 and "pass     accumulation-additive" in done.stdout, done.stderr
    assert re.search(r"pass     accumulation-fits \d+ bytes .* 16 samples fit", done.stdout)
    assert "next: set --loop FILE.py:FUNCTION" in done.stdout


def test_nothing_fits(tmp_path):
    words = ["--target", TARGET + "build", "--loop", TARGET + "weighted", "--memory", "1kB"]
    done = processes.run(SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == 1 and "not one sample fits into 1000 B" in done.stdout, done.stdout
    assert "pass     accumulation-equal" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--micro-batches", "1"], "--micro-batches 1; it takes at least 2"),
        (["--ranks", "0"], "--ranks 0; it takes at least 1"),
        (["--tokens-per-step", "0"], "--tokens-per-step 0"),
        (["--memory", "x"], "--memory x; it takes bytes"),
        (["--loop", "a.py:b"], "a project is judged by its own train_step"),
    ],
)
def test_bad_flags_exit_with_2(words, message, tmp_path):
    done = processes.run(SCRIPT, "--project", tmp_path, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""
