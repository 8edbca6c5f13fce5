"""Sound routers pass, each planted fault is named, in a project and in other code."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from skills.targets import processes
from skills.targets.processes import CLASSIFIER, ROOT, TARGETS

SCRIPT = ROOT / "skills" / "topk-router" / "scripts" / "topk_router.py"
MIXTURE = f"{TARGETS / 'mixture.py'}:"
SMALL = [
    "--set", "model.num_hidden_layers=1", "data.seq_len=32", "data.global_batch_size=8",
    "model.hidden_size=64", "optim.warmup_steps=5",
]  # fmt: skip


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
    folder = tmp_path_factory.mktemp("router") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


@pytest.mark.parametrize(
    ("name", "words", "ids"),
    [
        ("build", [], set()),
        ("logits_alone", ["--experts-per-token", 2], set()),
        ("double_softmax", [], {"router-double-softmax"}),
        ("probabilities", [], {"router-double-softmax"}),
        ("dead_expert", [], {"router-dead-experts"}),
        ("collapsed", [], {"router-dead-experts", "router-collapse"}),
        ("large_logits", [], {"router-logit-scale"}),
    ],
)
def test_a_planted_fault_is_named_and_nothing_else(name, words, ids, tmp_path):
    report, checks = measure("--target", MIXTURE + name, *words, cwd=tmp_path)
    assert failed(checks) == ids
    assert report["verdict"] == ("fail" if ids else "pass")
    (row,) = report["numbers"]["routers"]
    assert (row["router"], row["experts"], row["tokens"]) == ("gate", 8, 3 * 8 * 24)
    assert row["experts_per_token"] == 2.0
    assert row["dead_experts"] == {"dead_expert": [5], "collapsed": [2, 3, 4, 5, 6, 7]}.get(
        name, []
    )
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("name", "experts"), [("mixtral", 4), ("qwen3_moe", 6)])
def test_routers_of_transformers_are_found(name, experts, tmp_path):
    pytest.importorskip("transformers")
    report, checks = measure("--target", MIXTURE + name, cwd=tmp_path)
    rows = report["numbers"]["routers"]
    assert [row["router"] for row in rows] == [f"model.layers.{n}.mlp.gate" for n in (0, 1)]
    assert {row["experts"] for row in rows} == {experts} and failed(checks) == set()
    for row in rows:
        assert row["misfit"]["softmax"] < 1e-6 < row["misfit"]["double softmax"]


def test_the_numbers_are_those_of_the_definition(tmp_path):
    """Counted again here, from the same model and batches."""
    report, _ = measure("--target", MIXTURE + "build", cwd=tmp_path)
    (row,) = report["numbers"]["routers"]
    torch.manual_seed(0)
    from skills.targets import mixture

    model, batches, _ = mixture.build()
    counts, dropped = torch.zeros(8), 0
    with torch.no_grad():
        for batch in batches:
            hidden = model.gate_proj(model.embedding(batch["input_ids"]))
            _, _, ids = model.gate(hidden)
            for sequence in ids:
                load = torch.bincount(sequence.flatten(), minlength=8)
                counts += load
                dropped += int((load - 6).clamp(min=0).sum())  # 24 tokens * 2 / 8 experts
    assert row["load_over_mean"] == pytest.approx((counts / counts.mean()).tolist())
    assert row["dropped_at"]["1.00"] == pytest.approx(dropped / (3 * 8 * 24 * 2))
    share = counts / counts.sum()
    used = torch.exp(-(share * share.log()).sum())
    assert row["experts_in_use"] == pytest.approx(float(used), rel=1e-5)
    assert row["evenness"] == pytest.approx((float(used) - 2) / 6, rel=1e-5)


def test_a_project_trains_is_measured_and_put_back(project, tmp_path):
    words = ["--project", project, *SMALL, "--steps", 60, "--batches", 4]
    report, checks = measure(*words, cwd=tmp_path)
    (row,) = report["numbers"]["routers"]
    assert (row["router"], row["tokens"]) == ("model.layers.0.mlp.gate", 4 * 8 * 32)
    assert not failed(checks) - {"router-dead-experts", "router-collapse"}
    assert checks["router-weights"]["verdict"] == "pass" and row["dropped"] == 0.0
    assert "and 60 training steps" in report["evidence"][0]
    fresh, checks = measure(*words[:-4], "--steps", 0, "--batches", 4, cwd=tmp_path)
    assert checks["router-dead-experts"]["verdict"] in ("pass", "unclear"), "fresh weights"
    assert fresh["numbers"]["routers"][0]["load_over_mean"] != row["load_over_mean"]


def test_the_weights_of_a_run_can_be_looked_at(project, tmp_path):
    settings = [*SMALL[1:], "run.max_steps=3", f"run.dir={tmp_path}", "run.sample_tokens=0"]
    done = processes.run(project / "train.py", *settings, "accelerator=cpu", cwd=project)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("quickstart-*")
    words = ["--project", project, *SMALL, "--batches", 4]
    other = ["--set", "model.initializer_range=0.5"]  # what the checkpoint has to overwrite
    reports = [
        measure(*words, *more, cwd=tmp_path)[0]
        for more in (["--checkpoint", folder], ["--checkpoint", folder, *other], ["--steps", 0])
    ]
    loads = [report["numbers"]["routers"][0]["load_over_mean"] for report in reports]
    assert loads[0] == loads[1] != loads[2]
    assert f"weights of {folder}" == reports[0]["evidence"][0]
    assert [report["numbers"]["trained"] for report in reports] == [True, True, False]


@pytest.mark.parametrize(
    ("settings", "id"),
    [
        (["model.capacity_factor=0.5", "model.drop_policy=position"], "router-dropped-tokens"),
        (
            ["model.correction_bias=true", "model.correction_bias_update_rate=0.9"],
            "router-bias-scale",
        ),
    ],
)
def test_a_project_with_a_bad_setting_is_told(project, tmp_path, settings, id):
    words = ["--project", project, *SMALL, *settings, "--steps", 5, "--batches", 2]
    report, checks = measure(*words, cwd=tmp_path)
    assert checks[id]["verdict"] == "fail" and checks[id]["value"] > checks[id]["threshold"]
    assert report["verdict"] == "fail"


BROKEN = {
    "router-double-softmax": ("logits_BSE.softmax(-1)", "logits_BSE.softmax(-1).softmax(-1)"),
    "router-weights": (
        "        if self.normalise:\n",
        "        weights = weights + (ids == 0)\n        if self.normalise:\n",
    ),
}


BROKEN |= {
    "router-weights, not divided": ("        if self.normalise:\n", "        if False:\n"),
    "router-weights, not scaled": ("return ids, weights * self.scale", "return ids, weights"),
    "router-weights, NaN": (
        "return ids, weights * self.scale",
        "return ids, torch.where(ids == 0, torch.nan, weights * self.scale)",
    ),
}


@pytest.mark.parametrize("id", BROKEN)
def test_a_broken_router_of_a_project_is_named(project, tmp_path, id):
    broken = tmp_path / "broken"
    shutil.copytree(project, broken, ignore=shutil.ignore_patterns("runs"))
    path = broken / "curry_train" / "layers" / "routing.py"
    text, (sound, planted) = path.read_text(), BROKEN[id]
    assert sound in text
    path.write_text(text.replace(sound, planted))
    words = ["--project", broken, *SMALL, "model.routed_scaling_factor=2.5"]
    _, checks = measure(*words, "--steps", 0, "--batches", 2, cwd=tmp_path)
    assert failed(checks) == {id.partition(",")[0]}


def test_a_dense_model_is_one_sentence_and_exit_3(project, tmp_path):
    done = processes.run(SCRIPT, "--project", project, "--set", "model=tiny_dense", cwd=tmp_path)
    assert done.returncode == 3 and "this model is dense" in done.stdout
    done = processes.run(SCRIPT, "--target", CLASSIFIER, cwd=tmp_path)
    assert done.returncode == 3 and "set --router NAME" in done.stdout
    assert "steps" not in done.stderr.partition("python:")[2], "nothing was trained"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", 0], "--batches 0; it takes at least 1"),
        (["--steps", -1], "--steps -1; it takes at least 0"),
        (["--router", "gate"], "they describe other code"),
        (["--target", MIXTURE + "build", "--steps", 3], "train or load it there"),
        (["--target", MIXTURE + "build", "--experts-per-token", 0], "it takes at least 1"),
        (["--checkpoint", "nowhere"], "holds no complete checkpoint"),
        (["--set", "compile=true"], "add --set compile=false"),
    ],
)
def test_bad_flags_exit_with_2(words, message, project, tmp_path):
    place = [] if "--target" in words else ["--project", project]
    done = processes.run(SCRIPT, *place, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
