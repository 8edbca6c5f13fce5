"""The attention check names planted faults, on foreign code and on a project."""

from __future__ import annotations

import json
import shutil

import pytest
from skills.targets import processes
from skills.targets.processes import MLP, ROOT

GQA_ATTENTION = ROOT / "skills" / "gqa-attention" / "scripts" / "gqa_attention.py"
TARGET = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k_proj, self.v_proj = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        parts = [p(x).unflatten(-1, (-1, 4)) for p in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(9, 16), nn.Dropout(0.5)
        self.first, self.second = SelfAttention(), SelfAttention()

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.dropout(self.first(x))
        return x + self.second(x)

def build():
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (3, 10))
    batches = [{"input_ids": ids, "labels": ids}]
    return Model(), batches, lambda m, b: m(b["input_ids"]).square().mean()
"""


def check(tmp_path, source, *words):
    (tmp_path / "model.py").write_text(source)
    words = ["--target", "model.py:build", *words, "--json"]
    done = processes.run(GQA_ATTENTION, *words, cwd=tmp_path)
    assert done.returncode in (0, 1, 3), done.stderr
    report = json.loads(done.stdout)
    return done.returncode, report, {c["id"]: c["verdict"] for c in report["checks"]}


def test_sound_foreign_attention_passes_and_its_cache_is_counted(tmp_path):
    code, report, verdicts = check(tmp_path, TARGET, "--context", 100)
    assert code == 0 and verdicts["attention-causal"] == "pass"
    assert verdicts["attention-parity"] == verdicts["attention-logits"] == "skipped"
    cache = report["numbers"]["kv_cache"]
    assert (cache["bytes_per_token"], cache["bytes_of_context"]) == (2 * 16 * 4, 2 * 16 * 4 * 100)


@pytest.mark.parametrize(
    ("right", "wrong", "where"),
    [
        ("is_causal=True", "is_causal=False", "first"),
        ("is_causal=True", "attn_mask=torch.ones(10, 10, dtype=torch.bool).tril(1)", "first"),
        ("return x + self.second(x)", "return x + self.second(x - x.mean(1, True))", "second"),
    ],
    ids=["no mask", "a mask off by one", "a mean over positions"],
)
def test_a_look_ahead_is_named(right, wrong, where, tmp_path):
    assert right in TARGET
    code, report, verdicts = check(tmp_path, TARGET.replace(right, wrong))
    assert code == 1 and verdicts["attention-causal"] == "fail"
    assert report["numbers"]["causality"]["layer"] in ("first", "second")
    if where == "second":
        assert report["numbers"]["causality"]["layer"] == "second"


@pytest.mark.parametrize("size", [2, 5])
def test_a_look_ahead_inside_chunks_is_named_wherever_they_end(size, tmp_path):
    tril = "torch.ones(10, 10, dtype=torch.bool).tril()"
    chunks = f"(torch.arange(10)[:, None] // {size} == torch.arange(10) // {size})"
    code, _, verdicts = check(
        tmp_path, TARGET.replace("is_causal=True", f"attn_mask={tril} | {chunks}")
    )
    assert code == 1 and verdicts["attention-causal"] == "fail"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("x = self.embedding(ids)", "x = self.embedding(ids * 0)"),
        ("randint(0, 9, (3, 10))", "zeros(3, 10, dtype=torch.int64)"),
        ("randint(0, 9, (3, 10))", "randint(0, 9, (3, 1))"),
    ],
    ids=["tokens are not read", "one token only", "sequences of one token"],
)
def test_a_probe_that_reaches_nothing_is_unclear(right, wrong, tmp_path):
    assert right in TARGET
    code, _, verdicts = check(tmp_path, TARGET.replace(right, wrong))
    assert code == 3 and verdicts["attention-causal"] == "unclear"


def test_a_batch_of_vectors_is_probed_too(tmp_path):
    source = TARGET.replace("x = self.embedding(ids)", "x = ids")
    source = source.replace('[{"input_ids": ids, "labels": ids}]', "[(torch.randn(3, 10, 16),)]")
    source = source.replace('b["input_ids"]', "b[0]")
    assert check(tmp_path, source)[0] == 0
    broken = source.replace("is_causal=True", "is_causal=False")
    assert check(tmp_path, broken)[2]["attention-causal"] == "fail"


def test_a_model_without_attention_is_unclear(tmp_path):
    done = processes.run(GQA_ATTENTION, "--target", MLP, cwd=tmp_path)
    assert done.returncode == 3 and "unclear  attention-layers 0: no module" in done.stdout


def test_one_token_is_refused(tmp_path):
    done = processes.run(GQA_ATTENTION, "--target", MLP, "--tokens", 1, cwd=tmp_path)
    assert done.returncode == 2 and "it takes at least 2" in done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


YARN = (
    "model.rope_type=yarn model.rope_factor=4 model.original_max_position_embeddings=64"
    " model.rope_beta_fast=8"
)
SETTINGS = {
    "dense": "",
    "windows and documents": "model.sliding_window=9 model.sliding_window_pattern=2"
    " data.document_mask=true precision=bf16",
    "sinks": f"model.attention_sinks=true model.qk_norm=false model.attention_bias=true {YARN}",
    "olmoe": "model.qk_norm_width=projection model.clip_qkv=0.3",
    "llama3": YARN.replace("yarn", "llama3").rpartition(" ")[0] + " model.qk_norm=false",
    "latent": "model.kv_lora_rank=24 model.qk_nope_head_dim=16 model.qk_rope_head_dim=8"
    " model.v_head_dim=12 model.q_lora_rank=20 model.num_key_value_heads=4 model.qk_norm=false"
    f" model.rope_interleave=true {YARN} model.rope_mscale=1 model.rope_mscale_all_dim=0.5",
}


def check_project(project, settings):
    words = ["--project", project, "--set", "model=tiny_dense", "data.seq_len=64"]
    words += ["data.global_batch_size=2", *settings.split(), "--json"]
    done = processes.run(GQA_ATTENTION, *words, cwd=project)
    assert done.returncode in (0, 1, 3), done.stderr
    report = json.loads(done.stdout)
    return report, {c["id"]: c["verdict"] for c in report["checks"]}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_project_equals_formula_and_transformers(name, project):
    report, verdicts = check_project(project, SETTINGS[name])
    assert report["verdict"] == "pass", report["checks"]
    has_transformers = verdicts["attention-transformers"] == "pass"
    pytest.importorskip("transformers")
    assert has_transformers
    heads = 24 + 8 if name == "latent" else 2 * 2 * 32
    item = 2 if "bf16" in SETTINGS[name] else 4
    assert report["numbers"]["kv_cache"]["bytes_per_token"] == 2 * heads * item


def test_spiking_attention_is_probed_and_keeps_no_keys(project, tmp_path):
    words = ["--set", "model=tiny_spiking", "data.seq_len=128", "data.global_batch_size=1"]
    for planted, verdict in (("distance >= 0", "pass"), ("distance >= -1", "fail")):
        copy = tmp_path / verdict
        shutil.copytree(project, copy, ignore=shutil.ignore_patterns("runs", ".cache"))
        path = copy / "curry_train/layers/spiking_attention.py"
        assert "distance >= 0" in path.read_text()
        path.write_text(path.read_text().replace("distance >= 0", planted))
        done = processes.run(GQA_ATTENTION, "--project", copy, *words, "--json", cwd=copy)
        report = json.loads(done.stdout)
        assert {c["id"]: c["verdict"] for c in report["checks"]}["attention-causal"] == verdict
        assert "kv_cache" not in report["numbers"]


def test_q_k_norm_and_its_effect_are_in_the_numbers(project):
    report, _ = check_project(project, "")
    for layer in report["numbers"]["layers"]:
        assert layer["largest_logit"] > 3 * layer["largest_logit_without_qk_norm"] > 0
        assert 0 < layer["entropy"] < 4.2
    assert report["artifacts"][0].endswith("attention_logits.png")


ATTENTION, ROPE, LATENT = (
    f"curry_train/layers/{name}.py" for name in ("attention", "rope", "latent_attention")
)
FAULTS = {
    "no mask": (
        ATTENTION,
        "is_causal=mask is None",
        "is_causal=False",
        "dense",
        "attention-causal",
    ),
    "a window of one more": (
        ATTENTION,
        "distance < window",
        "distance <= window",
        "windows and documents",
        "attention-parity",
    ),
    "documents see each other": (
        ATTENTION,
        "mask = mask & (doc_ids",
        "mask = mask | (doc_ids",
        "windows and documents",
        "attention-parity",
    ),
    "another scale": (
        ROPE,
        "config.query_dim**-0.5",
        "config.query_dim**-1.0",
        "dense",
        "attention-parity",
    ),
    "turned the other way": (
        ROPE,
        "torch.cat((-second, first)",
        "torch.cat((second, -first)",
        "dense",
        "attention-parity",
    ),
    "keys are not turned": (ATTENTION, "k = rotate(k,", "rotate(k,", "dense", "attention-parity"),
    "halves taken for neighbours": (
        ROPE,
        "if interleaved:",
        "if not interleaved:",
        "dense",
        "attention-parity",
    ),
    "yarn without temperature": (ROPE, "0.1 * mscale", "0.0 * mscale", "sinks", "attention-parity"),
    "llama3 without blend": (
        ROPE,
        "(turns - low) / (high - low)",
        "(turns - low) * 1e9",
        "llama3",
        "attention-parity",
    ),
    "a sink that is not cut": (
        ATTENTION,
        "out_BHSA[:, :, 1:]",
        "out_BHSA[:, :, :-1]",
        "sinks",
        "attention-parity",
    ),
    "a sink without its value": (
        ATTENTION,
        "(sinks_H / scale)",
        "(0 * sinks_H / scale)",
        "sinks",
        "attention-parity",
    ),
    "a norm without its weight": (
        "curry_train/layers/norm.py",
        "local(self.weight).to(x.dtype) * (wide",
        "(wide",
        "dense",
        "attention-parity",
    ),
    "a bias that is left out": (
        "curry_train/layers/linear.py",
        "F.linear(x, local(self.weight).to(x.dtype), bias)",
        "F.linear(x, local(self.weight).to(x.dtype))",
        "sinks",
        "attention-parity",
    ),
    "a latent without norm": (
        LATENT,
        "self.kv_a_layernorm(latent)",
        "2 * latent",
        "latent",
        "attention-parity",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_a_project_is_named(fault, project, tmp_path):
    file, right, wrong, settings, id = FAULTS[fault]
    broken = tmp_path / "project"
    shutil.copytree(project, broken, ignore=shutil.ignore_patterns("runs", ".cache"))
    text = (broken / file).read_text()
    assert right in text
    (broken / file).write_text(text.replace(right, wrong, 1))
    report, verdicts = check_project(broken, SETTINGS[settings])
    assert verdicts[id] == "fail", report["checks"]


def test_logits_that_grew_are_named(project, tmp_path):
    broken = tmp_path / "project"
    shutil.copytree(project, broken, ignore=shutil.ignore_patterns("runs", ".cache"))
    model = broken / "curry_train/models/decoder.py"
    text = model.read_text()
    right = "        return self.config.initializer_range if deviation is None else deviation\n"
    assert right in text
    grown = "        return 20.0 if 'q_proj' in name else self.config.initializer_range\n"
    model.write_text(text.replace(right, grown))
    report, verdicts = check_project(broken, "model.qk_norm=false")
    assert verdicts["attention-logits"] == "pass"  # keys are still small
    grown = grown.replace("'q_proj' in name", "'q_proj' in name or 'k_proj' in name")
    model.write_text(text.replace(right, grown))
    report, verdicts = check_project(broken, "model.qk_norm=false")
    assert verdicts["attention-logits"] == "fail" and "model.qk_norm=true" in report["next"][0]
    report, verdicts = check_project(broken, "model.qk_norm=true")
    assert verdicts["attention-logits"] == "pass"
