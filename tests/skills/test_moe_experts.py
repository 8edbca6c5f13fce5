"""Sound banks pass, each planted fault is named, in a project and in transformers' models."""

from __future__ import annotations

import json
import shutil

import pytest
from skills.targets import processes
from skills.targets.processes import LANGUAGE_MODEL, ROOT, TARGETS

SCRIPT = ROOT / "skills" / "moe-experts" / "scripts" / "moe_experts.py"
MIXTURE = f"{TARGETS / 'mixture.py'}:"
SMALL = [
    "--set", "model.num_hidden_layers=2", "model.first_k_dense_replace=1", "data.seq_len=32",
    "data.global_batch_size=4", "model.hidden_size=64", "model.moe_intermediate_size=32",
]  # fmt: skip
GPT_OSS = ["model.expert_bias=true", "model.swiglu_limit=1.5", "model.router_bias=true"]


def measure(*words, cwd):
    done = processes.run(SCRIPT, *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1, 3), done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1, "unclear": 3}[report["verdict"]]
    return report, {check["id"]: check for check in report["checks"]}


def failed(checks):
    return {id for id, check in checks.items() if check["verdict"] == "fail"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ([], "grouped_mm"),
        (["precision=bf16"], "grouped_mm"),
        (["precision=fp64"], "sorted"),
        (GPT_OSS, "grouped_mm"),
        (["model.capacity_factor=0.5", "model.drop_policy=position"], "grouped_mm"),
    ],
    ids=["fp32", "bf16", "fp64", "gpt-oss", "dropped"],
)
def test_the_banks_of_a_project_pass(project, tmp_path, settings, backend):
    words = ["--project", project, *SMALL, *settings, "--repeats", 2]
    report, checks = measure(*words, cwd=tmp_path)
    assert report["verdict"] == "pass" and checks["experts-backend"]["value"] == backend
    (bank,) = report["numbers"]["banks"]
    assert (bank["bank"], bank["experts"]) == ("model.layers.1.mlp.experts", 4)
    assert bank["tokens"] == 4 * 32 and bank["forward"] > 0 < bank["backward"]
    loads = bank["rows_per_expert"]
    assert loads["least"] <= loads["median"] <= loads["most"]
    assert loads["mean"] * 4 == bank["rows"]
    assert (bank["rows"] == 4 * 32 * 2) is not any("capacity" in word for word in settings)
    names = {"output", "x", "weights", "gate", "up", "down"}
    biases = {"gate_bias", "up_bias", "down_bias"} if settings is GPT_OSS else set()
    assert set(bank["parity"]) == names | biases


BROKEN = {
    "a weight too large": (
        "            routing.weights,\n",
        "            routing.weights * 1.01,\n",
    ),
    "gate and up in turn": ("interleaved=first.interleaved", "interleaved=not first.interleaved"),
    "no clamp": ("limit=self.limit", "limit=None"),
    "no bias of down": ("if second.bias is None:", "if second.bias is not None:"),
    "no gradient to the router": ("routing.weights,", "routing.weights.detach(),"),
    "a gradient for everyone": ("return out_TD +", "return out_TD + 0.1 * first.weight.mean() +"),
}


def broken_copy(project, folder, sound, planted):
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns("runs"))
    path = folder / "curry_train" / "layers" / "moe.py"
    text = path.read_text()
    assert sound in text
    path.write_text(text.replace(sound, planted))
    return folder


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_bank_is_named(project, tmp_path, fault):
    broken = broken_copy(project, tmp_path / "broken", *BROKEN[fault])
    words = ["--project", broken, *SMALL, *GPT_OSS, "model.initializer_range=0.5"]
    _, checks = measure(*words, "--repeats", 1, cwd=tmp_path)
    assert failed(checks) == {"experts-parity"} and checks["experts-parity"]["value"] > 100


@pytest.mark.parametrize("value", ["0.0", "torch.nan", "30.0"])
@pytest.mark.parametrize("part", ["gate_up_proj.weight[2, 32:]", "down_proj.weight[2]"])
def test_an_expert_of_another_size_is_named(project, tmp_path, part, value):
    sound = "        first, second = self.gate_up_proj, self.down_proj\n"
    planted = f"{sound}        with torch.no_grad():\n            self.{part} = {value}\n"
    broken = broken_copy(project, tmp_path / "broken", sound, planted)
    _, checks = measure("--project", broken, *SMALL, "--repeats", 1, cwd=tmp_path)
    found = checks["experts-weights"]
    name = "up" if "up" in part else "down"
    assert found["verdict"] == "fail" and f"experts {name}, expert 2" in found["message"]


def test_a_gradient_that_is_nan_is_named(project, tmp_path):
    sound, planted = "return out_TD +", "return out_TD + 0 * torch.nan * routing.weights[:, :1] +"
    broken = broken_copy(project, tmp_path / "broken", sound, planted)
    _, checks = measure("--project", broken, *SMALL, *GPT_OSS, "--repeats", 1, cwd=tmp_path)
    assert checks["experts-parity"]["verdict"] == "fail"


def test_a_bank_that_keeps_gathered_tokens_is_named(project, tmp_path):
    more = "out_TD = out_TD + 0 * x_TD.repeat_interleave(8, 0).sin().sum()\n        "
    sound = "if second.bias is None:"
    broken = broken_copy(project, tmp_path / "broken", sound, more + sound)
    report, checks = measure("--project", broken, *SMALL, "--repeats", 1, cwd=tmp_path)
    assert failed(checks) == {"experts-bytes"}
    (bank,) = report["numbers"]["banks"]
    needed = 4 * (4 * 32 * 64 + 256 + 256 * 64) + 8 * 256
    assert bank["kept_bytes"] - needed == pytest.approx(4 * 8 * 4 * 32 * 64, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "ids", "said"),
    [
        (["model.moe_backend=sorted"], {"experts-backend"}, "sorted was asked for"),
        (["model.moe_backend=reference"], {"experts-backend"}, "reference was asked for"),
        (["model.moe_intermediate_size=30"], {"experts-backend"}, "is no multiple of 16"),
    ],
)
def test_a_slow_backend_is_named_with_its_reason(project, tmp_path, settings, ids, said):
    words = ["--project", project, *SMALL, *settings, "--repeats", 1]
    _, checks = measure(*words, cwd=tmp_path)
    assert failed(checks) == ids and said in checks["experts-backend"]["message"]


@pytest.mark.parametrize(("name", "experts"), [("mixtral", 4), ("qwen3_moe", 6)])
def test_the_experts_of_transformers_are_found(name, experts, tmp_path):
    pytest.importorskip("transformers")
    report, checks = measure("--target", MIXTURE + name, "--repeats", 1, cwd=tmp_path)
    banks = report["numbers"]["banks"]
    assert [bank["bank"] for bank in banks] == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    assert {bank["experts"] for bank in banks} == {experts}
    assert {bank["rows"] for bank in banks} == {8 * 24 * 2}
    assert checks["experts-parity"]["verdict"] == "pass"
    assert "experts-backend" not in checks


def test_a_dense_model_is_one_sentence_and_exit_3(project, tmp_path):
    done = processes.run(SCRIPT, "--project", project, "--set", "model=tiny_dense", cwd=tmp_path)
    assert done.returncode == 3 and "this model is dense" in done.stdout
    done = processes.run(SCRIPT, "--target", LANGUAGE_MODEL, cwd=tmp_path)
    assert done.returncode == 3 and "no bank of experts found" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", 0], "--repeats 0; it takes at least 1"),
        (["--sample", -2], "--sample -2; it takes at least 1"),
        (["--set", "model.moe_backend=cuda"], "must be auto, triton, grouped_mm"),
    ],
)
def test_bad_flags_exit_with_2(words, message, project, tmp_path):
    done = processes.run(SCRIPT, "--project", project, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
