"""The RMSNorm check names planted faults, on foreign code and on a project."""

from __future__ import annotations

import json
import shutil

import pytest
from skills.targets import processes
from skills.targets.processes import MLP, ROOT

RMSNORM = ROOT / "skills" / "rmsnorm" / "scripts" / "rmsnorm.py"
TARGET = """
import torch
from torch import nn

class TinyRMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), TinyRMSNorm(16), nn.Linear(16, 4), TinyRMSNorm(4))
    return model, [torch.randn(6, 5, 8) + 0.5], lambda m, b: m(b).square().mean() * m(b).mean()
"""
GOOD = "        return self.weight * (wide * scale).to(x.dtype)\n"
SQUARE = "wide.square().mean(-1, keepdim=True)"
HALF = "    model = model.bfloat16()\n    return model, [torch.randn(6, 5, 8).bfloat16()]"
FAULTS = {
    "the mean is subtracted": (
        "wide = x.float()",
        "wide = x.float() - x.float().mean(-1, True)",
        "rmsnorm-parity",
    ),
    "the root is missing": ("torch.rsqrt(", "1 / (", "rmsnorm-parity"),
    "the mean goes over positions": (
        SQUARE,
        "wide.square().mean(-2, keepdim=True)",
        "rmsnorm-parity",
    ),
    "eps stands outside the root": (" + self.eps)", ") + self.eps * 1000", "rmsnorm-parity"),
    "the weight is left out": (
        GOOD,
        "        return (wide * scale).to(x.dtype)\n",
        "rmsnorm-parity",
    ),
    "a weight is not finite": (
        "torch.ones(width))",
        "torch.full((width,), float('nan')))",
        "rmsnorm-weights",
    ),
    "weights decayed to nothing": (
        "torch.ones(width))",
        "torch.full((width,), 1e-4))",
        "rmsnorm-weights",
    ),
    "eps drowns the input": ("eps=1e-6", "eps=0.5", "rmsnorm-eps"),
}


def check(tmp_path, source, *words):
    (tmp_path / "model.py").write_text(source)
    done = processes.run(RMSNORM, "--target", "model.py:build", *words, "--json", cwd=tmp_path)
    assert done.returncode in (0, 1, 3), done.stderr
    report = json.loads(done.stdout)
    return done.returncode, report, {c["id"]: c["verdict"] for c in report["checks"]}


def test_a_sound_norm_passes_and_is_timed_against_layer_norm(tmp_path):
    code, report, verdicts = check(tmp_path, TARGET, "--pairs", 3)
    assert code == 0 and set(verdicts.values()) == {"pass"} and len(verdicts) == 5
    numbers = report["numbers"]
    assert [layer["width"] for layer in numbers["layers"]] == [16, 4]
    assert all(layer["layer_norm"] > 0.05 for layer in numbers["layers"])
    low, high = numbers["ratio_95"]
    assert 0 < low <= numbers["ratio"] <= high and abs(numbers["loss_difference"]) > 1e-6
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, tmp_path):
    right, wrong, id = FAULTS[fault]
    assert right in TARGET
    if right.startswith("torch.ones"):
        source = TARGET.replace(right, wrong)
    else:
        source = TARGET.replace(right, wrong, 1)
    code, report, verdicts = check(tmp_path, source, "--pairs", 0)
    assert code == 1 and verdicts[id] == "fail", report["checks"]
    assert "ratio" not in report["numbers"]


def test_statistics_in_half_precision_are_named_where_they_are_used(tmp_path):
    source = TARGET.replace("wide = x.float()", "wide = x")
    code, report, verdicts = check(tmp_path, source, "--pairs", 0)
    assert code == 0 and verdicts["rmsnorm-statistics"] == "skipped"
    half = source.replace("    return model, [torch.randn(6, 5, 8) + 0.5]", HALF)
    code, report, verdicts = check(tmp_path, half, "--pairs", 0)
    assert code == 1 and verdicts["rmsnorm-statistics"] == "fail"
    sound = TARGET.replace("    return model, [torch.randn(6, 5, 8) + 0.5]", HALF)
    code, report, verdicts = check(tmp_path, sound, "--pairs", 3)
    assert code == 0 and verdicts["rmsnorm-statistics"] == "pass"


def test_torchs_own_norm_and_gemmas_form_are_known(tmp_path):
    source = TARGET.replace("TinyRMSNorm(16)", "nn.RMSNorm(16)")
    source = source.replace("self.weight * (wide", "(1 + self.weight) * (wide")
    source = source.replace("nn.Parameter(torch.ones(width))", "nn.Parameter(torch.rand(width))")
    code, report, verdicts = check(tmp_path, source, "--pairs", 3)
    assert code == 0, report["checks"]
    assert [layer["form"] for layer in report["numbers"]["layers"]] == ["weight", "1 + weight"]
    assert report["summary"].startswith("2 layers, 1 + weight, weight times x")


def test_a_model_without_rmsnorm_is_unclear(tmp_path):
    done = processes.run(RMSNORM, "--target", MLP, cwd=tmp_path)
    assert done.returncode == 3 and "unclear  rmsnorm-layers 0: no module that ran" in done.stdout


def test_a_project_passes_and_a_broken_one_is_named(tmp_path):
    project = tmp_path / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", project, ignore=ignored)
    words = ["--project", project, "--pairs", 3]
    words += ["--set", "model=tiny_dense", "data.seq_len=32", "precision=bf16", "--json"]
    done = processes.run(RMSNORM, *words, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["checks"]
    assert len(report["numbers"]["layers"]) == 9 and report["numbers"]["ratio"] > 0
    assert {layer["dtype"] for layer in report["numbers"]["layers"]} == {"bfloat16"}
    norm = project / "curry_train/layers/norm.py"
    text = norm.read_text()
    right = "x.to(torch.promote_types(x.dtype, torch.float32))"
    assert right in text
    norm.write_text(text.replace(right, "x"))
    done = processes.run(RMSNORM, *words, cwd=tmp_path)
    failed = [c["id"] for c in json.loads(done.stdout)["checks"] if c["verdict"] == "fail"]
    assert done.returncode == 1 and "rmsnorm-statistics" in failed


@pytest.mark.parametrize("pairs", [-1, 1])
def test_too_few_pairs_are_refused(pairs, tmp_path):
    done = processes.run(RMSNORM, "--target", MLP, "--pairs", pairs, cwd=tmp_path)
    assert done.returncode == 2 and "it takes 0, or at least 3" in done.stderr
