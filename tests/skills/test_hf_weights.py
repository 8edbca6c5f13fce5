"""Weights go in and out exactly, every misfit is listed, and a wrong tokenizer shows."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import struct
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from skills.targets import processes
from skills.targets.processes import ROOT, TARGETS

from kit.errors import UsageError

SCRIPT = ROOT / "skills" / "hf-weights" / "scripts" / "hf_weights.py"
full = pytest.mark.skipif(not os.environ.get("CURRY_TRAIN_FULL"), reason="alike (--full)")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache", "workspace")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as publishers write it, of a model that knows something."""
    folder = tmp_path_factory.mktemp("published") / "Pairs-0.1B"
    env = processes.environment() | {"PYTHONPATH": str(ROOT / "template")}
    done = subprocess.run(
        [sys.executable, TARGETS / "published.py", folder],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(published, tmp_path):
    return Path(shutil.copytree(published, tmp_path / "published"))


def run(project, *words, cwd, **changes):
    done = processes.run(SCRIPT, *words, "--project", project, "--json", cwd=cwd, **changes)
    assert done.returncode in (0, 1, 3), done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1, "unclear": 3}[report["verdict"]]
    return report, {check["id"]: check for check in report["checks"]}


@pytest.fixture(scope="module")
def imported(project, published, tmp_path_factory):
    report, checks = run(
        project, "import", published, "--no-logits", cwd=tmp_path_factory.mktemp("import")
    )
    return report, checks, Path(report["artifacts"][0])


def test_an_import_gives_checkpoint_yaml_and_sanity_number(imported, project, published):
    report, checks, checkpoint = imported
    assert report["verdict"] == "pass" and set(checks) == {
        "weights-missing", "weights-unused", "weights-misshaped", "roundtrip-differs",
        "sanity-loss",
    }  # fmt: skip
    assert checkpoint == project / "workspace/checkpoints/pairs_0_1b/torch-dcp/step-00000000"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    text = (project / "configs" / "model" / "pairs_0_1b.yaml").read_text()
    assert "hidden_size: 260" in text and manifest["model"]["hidden_size"] == 260
    sanity = report["numbers"]["sanity"]
    assert sanity["verdict"] == "pass" and 2.0 < sanity["loss"] < 0.9 * sanity["unigram"]
    assert checks["sanity-loss"]["value"] == pytest.approx(
        sanity["loss"] / sanity["unigram"], abs=1e-4
    )
    assert report["numbers"]["parameters"] == sum(_sizes(published / "model.safetensors"))
    assert report["numbers"]["words"] == [
        "model=pairs_0_1b",
        f"run.init_from={checkpoint}",
        f"data.tokenizer={checkpoint / 'tokenizer.json'}",
    ]


def _header(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return data, length, header


def _sizes(path):
    for entry in _header(path)[2].values():
        begin, end = entry["data_offsets"]
        yield (end - begin) // 4


def _rewrite(path, change):
    """Change the header of a safetensors file, and nothing of its values."""
    data, length, header = _header(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_a_second_import_changes_nothing_and_another_model_is_not_overwritten(
    imported, project, published, copied, tmp_path
):
    _, _, checkpoint = imported
    before = {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    report, _ = run(project, "import", published, "--no-logits", cwd=tmp_path)
    assert report["verdict"] == "pass" and " is " in report["summary"]
    assert {path: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before
    # of a checkpoint that was there nothing is told but what was compared
    tensors = bytearray((copied / "model.safetensors").read_bytes())
    tensors[-1] ^= 1
    (copied / "model.safetensors").write_bytes(tensors)
    words = [copied, checkpoint.parent, "--name", "pairs_0_1b", "--no-logits"]
    report, checks = run(project, "import", *words, cwd=tmp_path)
    assert report["verdict"] == checks["roundtrip-differs"]["verdict"] == "fail"
    assert checks["weights-missing"]["verdict"] == "skipped"
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    words = ["import", copied, tmp_path / "other", "--name", "pairs_0_1b", "--project", project]
    done = processes.run(SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == 2 and "describes another model" in done.stderr
    assert not (tmp_path / "other").exists()


def test_every_misfit_is_listed_and_nothing_is_written(project, copied, tmp_path):
    def change(header):
        header["model.extra.weight"] = header.pop("model.norm.weight")
        header["lm_head.weight"]["shape"] = [260, 257]

    _rewrite(copied / "model.safetensors", change)
    words = ["import", copied, tmp_path / "out", "--name", "misfit"]
    report, checks = run(project, *words, cwd=tmp_path)
    assert {id for id, c in checks.items() if c["verdict"] == "fail"} == {
        "weights-missing", "weights-unused", "weights-misshaped",
    }  # fmt: skip
    for id, name in (("missing", "norm"), ("unused", "extra"), ("misshaped", "lm_head")):
        assert name in checks[f"weights-{id}"]["message"]
    assert not (tmp_path / "out").exists()
    assert not (project / "configs" / "model" / "misfit.yaml").exists()


def test_the_tokenizer_of_another_model_shows(project, copied, tmp_path):
    path = copied / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    letters = "etaoinshrdlu"
    vocab |= {one: vocab[other] for one, other in zip(letters, letters[::-1], strict=True)}
    path.write_text(json.dumps(tokenizer))
    report, checks = run(
        project, "import", copied, tmp_path / "out", "--name", "mixed", "--no-logits", cwd=tmp_path
    )
    assert checks["roundtrip-differs"]["verdict"] == "pass"
    assert checks["sanity-loss"]["verdict"] == "fail" and checks["sanity-loss"]["value"] > 1
    assert "another tokenizer" in checks["sanity-loss"]["message"]


def test_an_export_gives_the_published_bits_back_and_transformers_computes_the_same(
    imported, project, published, tmp_path
):
    pytest.importorskip("transformers")
    report, checks = run(project, "export", imported[2], tmp_path / "out", cwd=tmp_path)
    assert checks["roundtrip-differs"]["verdict"] == checks["logits-differ"]["verdict"] == "pass"
    assert 0 <= checks["logits-differ"]["value"] < 1e-5
    assert checks["logits-differ-fp64"]["verdict"] == "pass"
    assert 0 <= checks["logits-differ-fp64"]["value"] < 1e-12
    assert report["numbers"]["logits"]["logit"] > 1.0
    theirs, ours = (_header(f / "model.safetensors") for f in (published, tmp_path / "out"))
    assert theirs[2].keys() == ours[2].keys()


@full
def test_a_model_that_computes_something_else_shows_in_the_logits(imported, project, tmp_path):
    pytest.importorskip("transformers")
    other = Path(shutil.copytree(project, tmp_path / "project"))
    layer = other / "curry_train" / "layers" / "norm.py"
    text = layer.read_text()
    assert "rsqrt" in text
    layer.write_text(
        text.replace("rsqrt()", "rsqrt().mul(1.01)").replace("rsqrt(", "rsqrt(1.01 * ")
    )
    report, checks = run(other, "export", imported[2], tmp_path / "out", cwd=tmp_path)
    assert checks["logits-differ"]["verdict"] == "fail", report
    assert checks["logits-differ-fp64"]["verdict"] == "fail", report
    assert checks["roundtrip-differs"]["verdict"] == "pass"


def test_one_changed_bit_is_found_and_its_tensor_named(imported, project, copied, tmp_path):
    path = copied / "model.safetensors"
    data, length, header = _header(path)
    at = 8 + length + header["model.layers.0.self_attn.k_proj.weight"]["data_offsets"][0]
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    report, checks = run(project, "verify", copied, imported[2], cwd=tmp_path)
    assert checks["roundtrip-differs"]["value"] == 1
    assert "model.layers.0.self_attn.k_proj.weight: 1 of" in checks["roundtrip-differs"]["message"]
    assert "NOT the same" in report["summary"]


def test_a_hub_that_must_not_be_asked(project, tmp_path):
    report, checks = run(
        project, "import", "owner/name", cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)
    )
    assert report["verdict"] == "fail" and set(checks) == {"hub-unreachable"}
    assert "Three ways out" in report["numbers"]["problems"][0]


def flags(**changes):
    found = Namespace(
        verb="import", places=["weights"], target=None, set=[], name=None, text=None, revision=None
    )
    vars(found).update(changes)
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verb": "export"}, "export with 1 places"),
        ({"places": ["a", "b", "c"]}, "import with 3 places"),
        ({"set": ["seed=1"]}, "weights belong to a project"),
        ({"name": "../x"}, "--name ../x"),
        ({"text": "/not/there"}, "--text /not/there does not exist"),
    ],
)
def test_bad_flags_are_refused_before_anything_runs(changes, message):
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        hf_weights = importlib.import_module("hf_weights")
    finally:
        sys.path.remove(str(SCRIPT.parent))
        sys.dont_write_bytecode = False
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        hf_weights.check_flags(flags(**changes))
