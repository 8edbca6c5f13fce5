"""Inputs are made once, repaired in place, continued after a kill, and labelled by their origin."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from skills.targets import processes
from skills.targets.processes import ROOT, TARGETS

SCRIPT = ROOT / "skills" / "setup-benchmark-inputs" / "scripts" / "setup_benchmark_inputs.py"
CORPUS = Path("workspace/datasets/dclm-baseline/toktxt")
SHARD = "global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst"
KILLS = 6 if os.environ.get("CURRY_TRAIN_FULL") else 1


def checkpoint_of(model):
    return Path("workspace/checkpoints") / model / "torch-dcp" / "step-00000000"


def copy_of(source, folder):
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache", "workspace")
    return Path(shutil.copytree(source, folder, ignore=ignored))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copy_of(ROOT / "template", tmp_path_factory.mktemp("inputs") / "project")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "Pairs"
    env = processes.environment() | {"PYTHONPATH": str(ROOT / "template")}
    done = subprocess.run(
        [sys.executable, TARGETS / "published.py", folder],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def call(project, verb, model, *words, code=0, **changes):
    changes.setdefault("HF_HUB_OFFLINE", "1")
    done = processes.run(
        SCRIPT, verb, "--model", model, *words, "--project", project, "--json", cwd=project,
        **changes,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code == 2 else (json.loads(done.stdout), done.stderr)


def tree(*folders):
    """Path -> (time of change, hash) of every file."""
    return {
        path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def hashes(found):
    return {path: sha256 for path, (_, sha256) in found.items() if path.name != "inputs.json"}


@pytest.fixture(scope="module")
def prepared(project):
    before, _ = call(project, "status", "tiny_moe", code=1)
    assert {c["id"]: c["verdict"] for c in before["checks"]} == {
        "inputs-checkpoint": "fail", "inputs-corpus": "fail",
    }  # fmt: skip
    assert not (project / "workspace").exists(), "status only looks"
    report, _ = call(project, "prepare", "tiny_moe")
    return report


def test_the_offline_default_is_labelled_and_trains(prepared, project):
    assert prepared["numbers"]["made"] == ["checkpoint", "corpus"]
    assert "STAND-IN checkpoint and corpus" in prepared["summary"]
    for part, folder in (
        ("checkpoint", checkpoint_of("tiny_moe").parent), ("corpus", CORPUS / "tiny_moe"),
    ):  # fmt: skip
        record = json.loads((project / folder / "inputs.json").read_text())
        assert record["origin"] == "stand-in" and record["part"] == part
        assert record["model"] == "tiny_moe" and record["date"].startswith("20")
        place = project / (checkpoint_of("tiny_moe") if part == "checkpoint" else folder)
        for name, sha256 in record["sha256"].items():
            assert hashlib.sha256((place / name).read_bytes()).hexdigest() == sha256
        assert record["bytes"] == sum((place / n).stat().st_size for n in record["sha256"])
    words = prepared["numbers"]["words"]
    assert words == [
        "model=tiny_moe",
        f"run.init_from={project / checkpoint_of('tiny_moe')}",
        f"data.input={project / CORPUS / 'tiny_moe'}",
    ]
    more = ["run.max_steps=2", "run.sample_tokens=0", "accelerator=cpu", "tracking=none"]
    done = processes.run(project / "train.py", *words, *more, cwd=project)
    assert done.returncode == 0 and "done at step 2" in done.stdout + done.stderr, done.stderr


def test_a_second_call_changes_nothing(prepared, project):
    before = tree(project / "workspace")
    report, _ = call(project, "prepare", "tiny_moe")
    assert report["numbers"]["made"] == [] and tree(project / "workspace") == before
    report, _ = call(project, "status", "tiny_moe")
    assert report["verdict"] == "pass" and tree(project / "workspace") == before
    assert report["numbers"]["checkpoint"]["origin"] == "stand-in"


def test_damage_is_named_and_repaired_without_touching_other_files(prepared, project):
    checkpoint, corpus = project / checkpoint_of("tiny_moe"), project / CORPUS / "tiny_moe"
    right = hashes(tree(checkpoint, corpus))
    for folder in (checkpoint, corpus):
        (folder / "notes.txt").write_text("mine")
    tensors = checkpoint / "tensors-00000.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-5] ^= 1
    tensors.write_bytes(data)
    (corpus / "train-00000.bin").unlink()
    report, _ = call(project, "status", "tiny_moe", code=1)
    told = {check["id"]: check["message"] for check in report["checks"]}
    assert "tensors-00000.safetensors does not have the sha256" in told["inputs-checkpoint"]
    assert "train-00000.bin is missing" in told["inputs-corpus"]
    report, text = call(project, "prepare", "tiny_moe")
    assert report["numbers"]["made"] == ["checkpoint", "corpus"] and "damaged, repaired now" in text
    for folder in (checkpoint, corpus):
        assert (folder / "notes.txt").read_text() == "mine"
        (folder / "notes.txt").unlink()
    assert hashes(tree(checkpoint, corpus)) == right
    assert not list(project.glob("workspace/**/.*new*"))


def test_an_origin_that_no_record_tells_is_not_called_the_models_own(prepared, project):
    record = project / CORPUS / "tiny_moe" / "inputs.json"
    text = record.read_text()
    told = json.loads(text) | {"origin": "released"}
    told["sha256"] = dict.fromkeys(told["sha256"], "0" * 64)  # of what lay there before
    record.write_text(json.dumps(told))
    report, _ = call(project, "status", "tiny_moe")
    record.write_text(text)
    assert "corpus of unknown origin" in report["summary"]
    assert report["numbers"]["corpus"]["origin"] == "unknown"
    verdicts = {check["id"]: check["verdict"] for check in report["checks"]}
    assert verdicts["inputs-origin"] == "skipped" and verdicts["inputs-corpus"] == "pass"


def test_a_killed_call_is_continued_and_two_calls_at_once_agree(prepared, project, tmp_path):
    model, root = "tiny_dense", project / "workspace"
    words = ["prepare", "--model", model, "--project", project, "--json"]
    for kill in range(KILLS):
        files = [tmp_path / f"{kill}-{name}" for name in ("out", "err")]
        process = processes.start(SCRIPT, *words, cwd=project, output=files, HF_HUB_OFFLINE="1")
        end = time.monotonic() + 60
        signs = (root / "checkpoints" / model, project / CORPUS / f".{model}.new")
        while not signs[kill % 2].exists() and process.is_alive() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.01 * (kill // 2))
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    # what a kill leaves between two renames of the last step: files, and no manifest
    half = project / CORPUS / model
    shutil.copytree(project / CORPUS / "tiny_moe", half, dirs_exist_ok=True)
    (half / "manifest.json").unlink()
    both = []
    for number in range(2):
        files = [tmp_path / f"both-{number}-{name}" for name in ("out", "err")]
        both.append(processes.start(SCRIPT, *words, cwd=project, output=files, HF_HUB_OFFLINE="1"))
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    reports = [json.loads((tmp_path / f"both-{number}-out").read_text()) for number in range(2)]
    made = [report["numbers"]["made"] for report in reports]
    assert sum("corpus" in parts for parts in made) == 1, "one works, the other finds it done"
    report, _ = call(project, "status", model)
    assert report["numbers"]["corpus"]["ready"] and not list(root.glob("**/.*new*"))


def test_local_weights_and_text_with_the_models_own_tokenizer(project, published, tmp_path):
    (tmp_path / "own.txt").write_text("To be or not to be, that is the question.\n\n" * 200)
    words = ["--weights", published, "--text", tmp_path / "own.txt"]
    report, _ = call(project, "prepare", "qwen3_8b", *words)
    assert report["verdict"] == "pass" and "STAND-IN" not in report["summary"]
    numbers = report["numbers"]
    assert numbers["checkpoint"]["origin"] == numbers["corpus"]["origin"] == "local"
    assert numbers["checkpoint"]["source"] == str(published)
    assert "model.hidden_size=260" in numbers["words"] and numbers["tokens"] > 200
    own, corpus = project / checkpoint_of("qwen3_8b"), project / CORPUS / "qwen3_8b"
    assert (own / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert manifest["tokenizer"]["vocab_size"] == 257
    # whole inputs are not passed over for others without a word, and repairs keep their source
    text = call(project, "prepare", "qwen3_8b", "--text", published / "config.json", code=2)
    assert "set --replace" in text
    (corpus / "val-00000.bin").write_bytes(b"")
    (tmp_path / "own.txt").unlink()
    assert "own.txt, which is gone" in call(project, "prepare", "qwen3_8b", code=2)
    report, _ = call(project, "prepare", "qwen3_8b", "--stand-in")
    assert report["numbers"]["made"] == ["corpus"] and "STAND-IN corpus" in report["summary"]


def fake_hub():
    spec = importlib.util.spec_from_file_location(
        "fake_hub", ROOT / "template" / "tests" / "fake_hub.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_hub"] = module
    spec.loader.exec_module(module)
    return module


def test_released_inputs_come_from_the_hub_and_a_broken_download_continues(
    project, published, tmp_path
):
    pyarrow = pytest.importorskip("pyarrow")
    lines = "".join(json.dumps({"text": f"Page {n}. " + "lorem ipsum " * 20}) + "\n"
                    for n in range(300))  # fmt: skip
    shard = tmp_path / "dclm" / SHARD
    shard.parent.mkdir(parents=True)
    with pyarrow.output_stream(shard, compression="zstd") as file:
        file.write(lines.encode())
    folders = {
        "owner/pairs": published,
        "datasets/mlfoundations/dclm-baseline-1.0": shard.parents[2],
    }
    with fake_hub().FakeHub(folders) as server:
        hub = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        # the released model is large: nothing of it is fetched without a word
        server.folders["Qwen/Qwen3-8B"] = published
        large = copy_of(project, tmp_path / "large")
        assert "GB to write" in call(large, "prepare", "qwen3_8b", code=2, **hub)
        assert server.bodies() == []
        # a small one of the same kind
        server.faults.cut = 100_000
        words = ["--weights", "owner/pairs"]
        text = call(project, "prepare", "tiny_spiking", *words, code=2, **hub)
        assert "broke off at 100 kB" in text and "what was begun is kept" in text
        call(project, "status", "tiny_spiking", code=1, **hub)
        server.faults.cut, server.faults.status = 0, 200
        report, text = call(project, "prepare", "tiny_spiking", *words, **hub)
        assert ("model.safetensors", "bytes=100000-") in server.bodies()
        assert "(file 1 of 1): 100 kB of" in text
        origins = [report["numbers"][part]["origin"] for part in ("checkpoint", "corpus")]
        assert origins == ["released", "released"] and report["numbers"]["tokens"] > 50_000
        server.requests.clear()
        report, _ = call(project, "prepare", "tiny_spiking", *words, **hub)
        assert report["numbers"]["made"] == [] and server.requests == []
    # a repair is not made of something else: nothing released becomes a stand-in without a word
    (project / CORPUS / "tiny_spiking" / "val-00000.bin").unlink()
    away = {"HF_HOME": str(tmp_path / "empty")}
    assert "cannot be had now" in call(project, "prepare", "tiny_spiking", code=2, **away)


def test_a_text_too_short_to_train_on_and_a_place_that_is_no_folder_are_refused(
    prepared, project, tmp_path
):
    (tmp_path / "short.txt").write_text("hello")
    words = ["--text", tmp_path / "short.txt", "--replace"]
    text = call(project, "prepare", "tiny_moe", *words, code=2)
    assert "gives 6 tokens to train on" in text and "data.seq_len=128" in text
    call(project, "status", "tiny_moe")
    assert not list(project.glob("workspace/**/.*new*")), "what was there stays, and no more"
    (other := copy_of(project, tmp_path / "other")).joinpath("workspace").write_text("")
    text = call(other, "prepare", "tiny_moe", code=2)
    assert "workspace cannot be written: File exists" in text and "raised" not in text


def test_names_and_flags_that_cannot_be_are_refused(project):
    assert "did you mean tiny_moe" in call(project, "status", "tiny-moe", code=2)
    assert "known are" in call(project, "status", "zzz", code=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status"], "--model"),
        (["status", "--model", "tiny_moe", "--yes"], "status with --yes; status only looks"),
        (["prepare", "--model", "tiny_moe", "--text", "/not/there"], "--text /not/there does not"),
        (
            ["prepare", "--model", "tiny_moe", "--stand-in", "--weights", "x"],
            "--stand-in with --weights",
        ),
    ],
)
def test_bad_flags_are_refused_before_anything_runs(words, message, tmp_path):
    done = processes.run(SCRIPT, *words, "--project", tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert not list(tmp_path.iterdir())
