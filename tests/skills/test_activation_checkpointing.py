"""Sound recomputation passes, each planted fault is named, bytes are what autograd keeps."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from skills.targets import processes
from skills.targets.processes import ROOT, TARGETS

from kit.errors import UsageError
from kit.memory import metered, read_bytes, show_bytes
from kit.report import Report
from kit.target import load_target

SKILL = ROOT / "skills" / "activation-checkpointing"
SCRIPT = SKILL / "scripts" / "activation_checkpointing.py"
sys.path.insert(0, str(SCRIPT.parent))
import activation_checkpointing as script  # noqa: E402

sys.dont_write_bytecode = False
SMALL = ["--set", "model=tiny_dense", "data.seq_len=64", "data.global_batch_size=4"]


class Call:
    """What the work function gets, without a process of its own."""

    def __init__(self, function, folder, **flags):
        settings = {"rounds": 3, "budget": None, "set": [], "seed": None, **flags}
        self.args = argparse.Namespace(target=f"{TARGETS / 'recomputed.py'}:{function}", **settings)
        self.project, self.out = Path(folder), Path(folder)

    def load_target(self):
        return load_target(self.project, self.args.target, overrides=[], seed=0, device="auto")

    def expect(self, *_):
        pass

    def progress(self, *_):
        pass


def verdicts(report):
    return {check["id"]: check["verdict"] for check in report.checks}


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("build", None),
        ("dropout", None),
        ("reentrant", "recompute-gradients-differ"),
        ("stateful", "recompute-gradients-differ"),
        ("forgets_dropout", "recompute-randomness"),
        ("draws_itself", "recompute-randomness"),
        ("batch_norm", "recompute-counted-twice"),
        ("counts", "recompute-counted-twice"),
        ("saves_nothing", "recompute-saves-nothing"),
    ],
)
def test_a_planted_fault_is_named_and_nothing_else(function, fault, tmp_path, recwarn):
    report = script.measure(Call(function, tmp_path))
    failed = {id for id, verdict in verdicts(report).items() if verdict == "fail"}
    assert failed == ({fault} if fault else set())
    plain, written = report.numbers["settings"]
    assert plain["kept_bytes"] > 0 and plain["time_ratio"] == 1.0
    if function == "build":
        # Four inputs of 16 x 32 floats, and the mean's: far below what the layers keep.
        assert written["kept_bytes"] == pytest.approx(4 * 16 * 32 * 4, rel=0.1)
        assert written["needs_bytes"] < plain["needs_bytes"]


def test_a_model_without_checkpoints_is_unclear(tmp_path):
    report = script.measure(Call("plain", tmp_path))
    assert verdicts(report) == {"recompute-found": "unclear"} and report.verdict == "unclear"


def test_everything_is_put_back(tmp_path):
    from torch.utils import checkpoint

    before = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    call = Call("batch_norm", tmp_path)
    target = call.load_target()
    call.load_target = lambda: target
    kept = {name: value.clone() for name, value in target.model.state_dict().items()}
    state = torch.get_rng_state()
    script.measure(call)
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert all(p.grad is None for p in target.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert before == (
        checkpoint._checkpoint_without_reentrant_generator,
        checkpoint.CheckpointFunction,
    )


def test_the_budget_names_the_fastest_that_fits():
    rows = [
        {"setting": "none", "needs_bytes": 100, "time_ratio": 1.0},
        {"setting": "selective", "needs_bytes": 70, "time_ratio": 1.2},
        {"setting": "every 2nd", "needs_bytes": 60, "time_ratio": 1.19},
        {"setting": "full", "needs_bytes": 40, "time_ratio": 1.4},
    ]
    settings = [
        script.Setting(row["setting"], None, asked=asked)
        for row, asked in zip(rows, ("none", "selective", 2, "full"), strict=True)
    ]
    for budget, choice in ((100, "none"), (99, 2), (59, "full"), (39, None)):
        report = Report("activation-checkpointing", numbers={"settings": rows})
        script.choose(report, settings, 0, budget, "project")
        assert report.numbers.get("choice") == (choice and f"parallel.recompute={choice}")
        assert report.verdict == ("pass" if choice else "fail")


def test_the_meter_counts_what_lives_and_the_highest_point():
    device = torch.device("cpu")
    held = torch.ones(100)
    with metered(device) as meter:
        a = held * 2
        view = a.view(10, 10)[1:]
        assert meter.live == 400, "a view is no second storage, and what was there is not counted"
        b = a + 1
        assert meter.live == meter.peak == 800
        del a, b
        assert (meter.live, meter.peak) == (400, 800), "the view holds its storage"
        del view
        assert meter.live == 0


def test_sizes_are_read_and_written():
    assert read_bytes("24GiB", flag="--memory") == 24 * 2**30
    assert read_bytes("1.5 MB", flag="--memory") == 1_500_000
    assert read_bytes("4096", flag="--memory") == 4096
    assert show_bytes(3 * 2**30) == "3 GiB"
    for text in ("0", "-1", "lots", "3 parsec", ""):
        with pytest.raises(UsageError, match="it takes bytes, as 24GiB"):
            read_bytes(text, flag="--memory")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recompute") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def test_a_project_gets_a_table_and_a_setting(project, tmp_path):
    words = ["--project", project, *SMALL, "parallel.recompute=7", "--rounds", 3]
    done = processes.run(SCRIPT, *words, "--memory", "1GiB", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    failed = {c["id"]: c for c in report["checks"] if c["verdict"] == "fail"}
    assert set(failed) == {"recompute-saves-nothing"}, "2 blocks have no 7th"
    assert "every 7th" in failed["recompute-saves-nothing"]["message"]
    rows = {row["setting"]: row for row in report["numbers"]["settings"]}
    assert list(rows) == ["none", "selective", "every 2nd", "full", "every 7th"]
    for name, low, high in (("selective", 0.4, 0.8), ("every 2nd", 0.5, 0.8), ("full", 0.05, 0.5)):
        assert low < rows[name]["kept_share"] < high, rows[name]
    checks = {c["id"]: c for c in report["checks"]}
    assert checks["recompute-gradients-differ"]["value"] == 0
    assert checks["recompute-counted-twice"]["value"] == 0
    assert report["numbers"]["choice"].startswith("parallel.recompute=")
    state = report["numbers"]["state_bytes"]
    assert state["gradients"] == state["weights"]
    assert state["moments"] == pytest.approx(2 * state["weights"], rel=1e-3)
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_a_fault_planted_in_a_project_is_named(project, tmp_path):
    """A block that counts on itself, and one that draws from another generator."""
    faulty = tmp_path / "faulty"
    shutil.copytree(project, faulty, ignore=shutil.ignore_patterns("runs"))
    path = faulty / "curry_train" / "layers" / "mlp.py"
    text = path.read_text(encoding="utf-8")
    old = "    def forward(self, x: Tensor) -> Tensor:\n"
    assert old in text
    new = old + "        self.calls = getattr(self, 'calls', 0) + 1\n"
    new += "        x = x * __import__('random').random()\n"
    path.write_text(text.replace(old, new), encoding="utf-8")
    words = ["--project", faulty, *SMALL, "--rounds", 3, "--json"]
    done = processes.run(SCRIPT, *words, cwd=tmp_path)
    report = json.loads(done.stdout)
    failed = {c["id"] for c in report["checks"] if c["verdict"] == "fail"}
    assert failed == {"recompute-randomness", "recompute-counted-twice"}, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "lots"], "--memory lots; it takes bytes"),
        (["--rounds", "2"], "--rounds 2; it takes at least 3"),
        (["--set", "compile=true"], "what a compiled block keeps cannot be seen"),
    ],
)
def test_bad_flags_exit_with_2(words, message, tmp_path):
    done = processes.run(SCRIPT, "--project", tmp_path, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""
