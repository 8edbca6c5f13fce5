"""A sound project goes on in another layout; each planted fault of files and of code is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from skills.targets import processes
from skills.targets.processes import MLP, ROOT

SCRIPT = ROOT / "skills" / "distributed-checkpoint" / "scripts" / "distributed_checkpoint.py"
MOE = "model=tiny_moe"


def run(project, *words, cwd):
    done = processes.run(SCRIPT, "--project", project, *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1}[report["verdict"]]
    checks = {check["id"]: check for check in report["checks"]}
    return report, checks, {id for id, c in checks.items() if c["verdict"] == "fail"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def test_a_sound_project_goes_on_in_another_layout(project, tmp_path):
    layouts = ["--from", "parallel.tp=2,parallel.zero=1", "--to", "parallel.pp=2"]
    aux_free = ["model.scoring_func=sigmoid", "model.correction_bias=true"]
    report, checks, failed = run(project, *layouts, "--set", MOE, *aux_free, cwd=tmp_path)
    assert not failed and set(checks) == {
        "ranks-fail", "checkpoint-damaged", "checkpoint-differs", "random-states-differ",
        "resume-differs", "resume-weights",
    }  # fmt: skip
    assert checks["checkpoint-differs"]["value"] == checks["checkpoint-differs"]["threshold"] == 0.0
    assert "54 of them moments" in checks["checkpoint-differs"]["message"]
    assert report["numbers"]["from"] == "tp2 zero1 on 2 ranks"
    assert report["numbers"]["to"] == "pp2 on 2 ranks"
    steps = report["numbers"]["steps"][0]
    assert steps["lr of step 1"] != steps["lr of step 2"], "a lost schedule would not show"
    assert 0 < checks["resume-weights"]["value"] < 1e-6


PLANTED = {
    "dropped moment": (
        "checkpoint/storage.py", "    for name, part in parts.items():\n        mine, dtype",
        "    for name, part in parts.items():\n        if '.exp_avg_sq.' in name:\n"
        "            continue\n        mine, dtype",
        {"checkpoint-differs", "resume-differs"}, "optim.exp_avg_sq.", "training_tensors",
    ),
    "wrong slice": (
        "checkpoint/storage.py", "target.copy_(block[both.within(stored)])",
        "target.copy_(block[both._replace(offset=stored.offset).within(stored)])",
        {"checkpoint-differs", "resume-differs"}, "worst ", "Parts",
    ),
    "lost position": (
        "checkpoint/training_state.py",
        '    runtime.batches.samples_consumed = manifest["samples_consumed"]\n', "",
        {"checkpoint-differs", "resume-differs"}, "samples_consumed is ", "restore",
    ),
    "fresh random states": (
        "checkpoint/training_state.py", "        set_rng(rank_tensors)\n", "        pass\n",
        {"random-states-differ"}, "rank-00000.safetensors", "set_rng",
    ),
    "a rank dies": (
        "checkpoint/training_state.py", "    fill_tied(runtime)\n    rank_tensors",
        "    assert runtime.mesh.rank != 1, 'planted'\n    fill_tied(runtime)\n    rank_tensors",
        {"ranks-fail"}, "planted", "traceback",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault, project, tmp_path):
    name, old, new, ids, word, hint = PLANTED[fault]
    broken = tmp_path / "broken"
    shutil.copytree(project, broken, ignore=shutil.ignore_patterns("runs"))
    path = broken / "curry_train" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, "the code was rewritten: plant the fault anew"
    path.write_text(text.replace(old, new), encoding="utf-8")
    words = ["--to", "parallel.tp=2", "--set", MOE]  # from one process, as the project is set
    report, checks, failed = run(broken, *words, cwd=tmp_path)
    assert ids <= failed, report["checks"]
    assert any(word in checks[id]["message"] for id in ids), report["checks"]
    assert hint in report["next"][0]
    if "checkpoint-differs" not in ids and "ranks-fail" not in ids:
        assert "checkpoint-differs" not in failed, "tensors are right"


# A checkpoint that is there.


@pytest.fixture(scope="module")
def trained(project):
    """A run folder with the checkpoints of steps 1 and 2."""
    words = [
        MOE, "run.max_steps=2", "run.save_every=1", "run.eval_every=0", "run.sample_tokens=0",
        "data.val_fraction=0.01", "model.num_hidden_layers=2", "accelerator=cpu",
        "data.global_batch_size=2", "run.dir=runs",
    ]  # fmt: skip
    done = processes.run(project / "train.py", *words, cwd=project)
    assert done.returncode == 0, done.stderr
    (folder,) = (project / "runs").glob("quickstart-*")
    return folder


SAME = ["model.num_hidden_layers=2", "data.global_batch_size=2"]


def copy_of(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_whole_run_folder_fits_its_configuration_on_another_mesh(project, trained, tmp_path):
    words = ["--checkpoint", trained, "--set", MOE, *SAME, "parallel.tp=2"]
    report, checks, failed = run(project, *words, cwd=tmp_path)
    assert not failed and set(checks) == {"checkpoint-damaged", "checkpoint-misfit"}
    assert len(report["numbers"]["checkpoints"]) == 2
    assert report["numbers"]["newest_whole"].endswith("step-00000002")


def test_damage_and_misfits_are_named_together(project, trained, tmp_path):
    folder = copy_of(trained, tmp_path)
    shard = folder / "checkpoints" / "step-00000002" / "tensors-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-9] ^= 4
    shard.write_bytes(content)
    (shard.parent / "rank-00000.safetensors").unlink()
    other = ["model.hidden_size=64", "model.num_hidden_layers=2", "data.seq_len=64"]
    words = ["--checkpoint", folder, "--world", 3, "--set", MOE, *other]
    report, checks, failed = run(project, *words, cwd=tmp_path)
    assert failed == {"checkpoint-damaged", "checkpoint-misfit"}
    told = "\n".join(report["numbers"]["problems"])
    assert f"{shard} does not have the sha256" in told and "rank-00000.safetensors is mi" in told
    assert report["numbers"]["newest_whole"].endswith("step-00000001")
    wrong = "\n".join(report["numbers"]["misfits"])
    for words in (
        "has model.hidden_size=128, this run has 64", "has data.seq_len=128",
        "on 3 ranks: data.global_batch_size",
        "tensor model.norm.weight is float32 [128], this model",
        "tensor optim.exp_avg_sq.lm_head.weight is",
    ):  # fmt: skip
        assert words in wrong, wrong
    assert "run.resume=CHECKPOINT" in report["next"][0]


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ([], ["nothing to check", "--from parallel.tp=2"]),
        (["--to", "optim.lr=1"], ["--to optim.lr=1", "settings go to --set"]),
        (["--from", "parallel.tp=3"], ["layout-refused, --from", "num_attention_heads=4"]),
        (["--from", "parallel.tp=2", "--world", 2], ["--world without --checkpoint"]),
        (["--to", "devices=33"], ["--to makes 33 ranks; at most 32"]),
        (["--checkpoint", "nowhere"], ["nowhere is no folder; give a run folder"]),
        (["--to", "parallel.tp=2", "--target", MLP], ["layouts belong to a project"]),
    ],
)  # fmt: skip
def test_what_is_refused_exits_with_2(words, messages, project, tmp_path):
    place = [] if "--target" in words else ["--project", project]
    done = processes.run(SCRIPT, *place, *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert all(message in done.stderr for message in messages), done.stderr
