"""Sound layouts pass, each planted fault is named, refusals start no rank."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from math import prod

import pytest
from skills.targets import processes
from skills.targets.processes import MLP, ROOT

from kit import layouts
from kit.errors import UsageError

SCRIPT = ROOT / "skills" / "parallel-state" / "scripts" / "parallel_state.py"
MOE = "model=tiny_moe"


def run(project, *words, cwd):
    done = processes.run(SCRIPT, "--project", project, "--set", *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1}[report["verdict"]]
    checks = {check["id"]: check for check in report["checks"]}
    return report, checks, {id for id, c in checks.items() if c["verdict"] == "fail"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def test_a_sound_layout_passes_and_is_explained(project, tmp_path):
    words = [MOE, "parallel.tp=2", "parallel.dp_shard=2", "parallel.ep=4", "parallel.zero=3"]
    report, checks, failed = run(project, *words, "model.tie_word_embeddings=true", cwd=tmp_path)
    assert not failed and set(checks) == {
        "layout-refused", "ranks-fail", "tensor-missing", "gradients-differ", "norm-differs",
        "losses-differ", "validation-differs", "parameters-differ",
    }  # fmt: skip
    numbers = report["numbers"]
    assert numbers["world"] == 4 and numbers["axes"]["ep"] == 4
    assert numbers["groups"]["tp"] == [[0, 1], [2, 3]] and numbers["groups"]["ep"] == [[0, 1, 2, 3]]
    assert numbers["changed"]["model.hidden_size"] == [128, 16]
    assert "model.tie_word_embeddings" not in numbers["changed"]
    assert numbers["clipped_steps"] == 3 and 0 < checks["gradients-differ"]["value"] < 1e-12
    assert checks["validation-differs"]["message"].startswith("worst val/")
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


PLANTED = {
    "divide factor": (
        "data_parallel.py", "    module.set_gradient_divide_factor(1.0)\n", "",
        ["parallel.dp_shard=2", "parallel.zero=2"], "gradients-differ", "layer 0", "grads.py",
    ),
    "rows stay at home": (
        "../step.py", "            hand_round(runtime.shards)\n", "",
        ["parallel.dp_shard=2", "parallel.zero=1"], "parameters-differ", "", "optimizer's step",
    ),
    "experts times ep": (
        "grads.py", "        grad = shard.local_grad()\n        if shard.sums",
        "        grad = shard.local_grad()\n        if '.experts.' in shard.name:\n"
        "            grad *= mesh.size('ep')\n        if shard.sums",
        ["parallel.dp_shard=2", "parallel.ep=2"], "gradients-differ", ".mlp.experts.", "grads.py",
    ),
    "a rank dies": (
        "grads.py", "    owned = [_hand_over", "    assert mesh.rank != 1, 'planted'\n"
        "    owned = [_hand_over", ["parallel.dp_shard=2"], "ranks-fail", "planted", "traceback",
    ),
    "validation counts twice": (
        "../evaluate.py", "    totals = count_once(totals, mesh)\n",
        "    totals = count_once(totals, mesh)\n    totals[3] *= 1 + mesh.index('batch')\n",
        ["parallel.dp_shard=2"], "validation-differs", "val/loss", "evaluate.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault, project, tmp_path):
    name, old, new, layout, id, word, hint = PLANTED[fault]
    broken = tmp_path / "broken"
    shutil.copytree(project, broken, ignore=shutil.ignore_patterns("runs"))
    path = (broken / "curry_train" / "parallel" / name).resolve()
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, "the code was rewritten: plant the fault anew"
    path.write_text(text.replace(old, new), encoding="utf-8")
    report, checks, failed = run(broken, MOE, *layout, cwd=tmp_path)
    assert id in failed and word in checks[id]["message"], report["checks"]
    assert hint in report["next"][0]
    if id in ("parameters-differ", "validation-differs"):
        assert "gradients-differ" not in failed, "the first step is right"


def test_explain_starts_nothing(project, tmp_path):
    words = ["--set", "model=llama3_8b", "parallel.tp=2", "parallel.pp=2", "--world", 8]
    done = processes.run(SCRIPT, "--project", project, "--explain", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 ranks: pp 2  dp_replicate 1  dp_shard 2" in done.stdout
    assert "tp           share every dense matrix" in done.stdout
    assert "nothing was run" in done.stdout and "ranks-fail" not in done.stdout


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["--set", "parallel.tp=3", "parallel.cp=2", "data.seq_len=128"],
            ["layout-refused: 4 refused", "does not divide model.num_attention_heads=4",
             "does not divide model.num_key_value_heads=2", "set data.seq_len to a multiple of 12"],
        ),
        (["--set", "parallel.tp=2", "parallel.dp_shard=1", "--world", 8], ["make 2 ranks, but 8"]),
        (["--world", 33], ["--world 33; it takes 1 to 32"]),
        (["--world", 0], ["--world 0; it takes 1 to 32"]),
        (["--device", "cuda"], ["ranks are forked on the CPU"]),
        (["--target", MLP], ["layouts belong to a project"]),
        (["--set", "parallel.tq=2"], ["parallel.tq"]),
    ],
)  # fmt: skip
def test_what_is_refused_exits_with_2_and_starts_no_rank(words, messages, project, tmp_path):
    place = [] if "--target" in words else ["--project", project]
    done = processes.run(SCRIPT, *place, *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert all(message in done.stderr for message in messages), done.stderr


LAYOUTS = {
    "llama3_8b": "tp=4 pp=2 cp=2 dp_shard=2 schedule=zbv",
    "deepseek_v3": "tp=2 pp=2 dp_shard=2 ep=4 schedule=dualpipev overlap=true",
    "deepseek_v2_lite": "tp=8 dp_shard=1",
    "gpt_oss_20b": "cp=4 dp_shard=2 ep=8 recompute=3",
    "qwen3_30b_a3b": "pp=2 pp_split=[20,28] dp_shard=2 zero=3",
    "mixtral_8x7b": "ep=8 dp_shard=8",
    "tiny_spiking": "dp_shard=2",
}


@pytest.mark.parametrize("preset", LAYOUTS)
def test_the_small_model_keeps_the_kind_and_the_layout(preset, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")  # of whoever started this
    words = [f"parallel.{word}" for word in LAYOUTS[preset].split()]
    words += [f"model={preset}", "data.global_batch_size=32", "data.document_mask=true"]
    call = Namespace(project=ROOT / "template", args=Namespace(set=words, seed=3))
    path = sys.path.copy()
    config, sentences = layouts.load(call, layouts.words_of(call))
    assert not sentences and config.seed == 3
    world = layouts.ranks_of(config, None)
    values = layouts.small(config, world, tmp_path)
    tiny, sentences = layouts.load(call, [*words, *layouts.written(values)])
    sys.path[:] = path
    assert not sentences and not layouts.refused(tiny, world)
    here, there = vars(config.parallel), vars(tiny.parallel)
    sizes = {"dp_shard", "pp_split", "recompute"}
    assert all(here[key] == there[key] for key in here.keys() - sizes)
    assert tiny.data.document_mask and tiny.precision == "fp64"
    if preset == "tiny_spiking":
        return
    switches = {
        "kv_lora_rank", "q_lora_rank", "num_experts", "sliding_window", "first_k_dense_replace",
        "shared_expert_intermediate_size",
    }  # fmt: skip
    for name, value in vars(config.model).items():
        same = getattr(tiny.model, name)
        if name in switches:
            assert bool(value) == bool(same), name
        elif isinstance(value, str | bool) and name != "moe_backend":
            assert value == same, name
    ratio = config.model.num_attention_heads > config.model.num_key_value_heads
    assert (tiny.model.num_attention_heads > tiny.model.num_key_value_heads) == ratio
    assert prod((tiny.model.hidden_size, tiny.model.num_hidden_layers)) <= 16 * 4
    assert (config.model.n_group > 1) == (tiny.model.n_group > 1)


def test_a_large_model_that_cannot_shrink_is_refused(tmp_path):
    words = ["model=tiny_spiking", "model.hidden_size=2048"]
    call = Namespace(project=ROOT / "template", args=Namespace(set=words, seed=None))
    path = sys.path.copy()
    config, _ = layouts.load(call, words)
    sys.path[:] = path
    with pytest.raises(UsageError, match="set smaller model"):
        layouts.small(config, 2, tmp_path)
