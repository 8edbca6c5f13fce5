"""OLMoE passes all gates, each planted fault fails at its gate, a draft claims nothing unknown."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from skills.targets import processes
from skills.targets.processes import ROOT

SCRIPTS = ROOT / "skills" / "add-moe-model" / "scripts"
SCRIPT = SCRIPTS / "add_moe_model.py"
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 50304,
    "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "hidden_act": "silu",
    "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": 8.0, "num_experts": 64,
    "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False, "initializer_range": 0.02, "eos_token_id": 50279,
}  # fmt: skip
NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 320,
    "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "norm_topk_prob": True, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
    "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION = {"q_proj": [32, 16], "k_proj": [8, 16], "v_proj": [8, 16], "o_proj": [16, 16]}
full = pytest.mark.skipif(not os.environ.get("CURRY_TRAIN_FULL"), reason="--full only")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("port") / "project"
    ignored = shutil.ignore_patterns("__pycache__", "runs", ".cache", ".pytest_cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


@pytest.fixture
def project(template, tmp_path):
    shutil.copytree(template, tmp_path / "project")
    return tmp_path / "project"


def run(project, *words):
    """Run the script; returns exit code, report or None, and what it said."""
    done = processes.run(SCRIPT, *words, "--project", project, "--json", cwd=project)
    report = json.loads(done.stdout) if done.returncode in (0, 1, 3) else None
    return done.returncode, report, done.stderr


def verdicts(report):
    return {check["id"]: check["verdict"] for check in report["checks"]}


def published(project, config, **changes):
    folder = project / "published"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def plant(project, file, old, new):
    path = project / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (file, text.count(old))
    path.write_text(text.replace(old, new), encoding="utf-8")


YAML = "configs/model/olmoe_1b_7b.yaml"
CLIPPED = (YAML, "clip_qkv: null", "clip_qkv: 8.0")
ALL = ["port-imports", "port-parameters", "port-parity", "port-layouts", "port-text"]
ALL += ["port-round-trip"]


@pytest.mark.slow
def test_olmoe_passes_every_gate_in_one_command(template):
    pytest.importorskip("transformers")
    meshes = () if os.environ.get("CURRY_TRAIN_FULL") else ("--mesh", "pp2 ep2")
    code, report, said = run(template, "gate", "all", "--name", "olmoe_1b_7b", *meshes)
    assert code == 0, said
    assert list(verdicts(report)) == ALL and set(verdicts(report).values()) == {"pass"}
    numbers, checks = report["numbers"], {check["id"]: check for check in report["checks"]}
    assert numbers["port-parameters"]["parameters"] == 6_919_161_856
    assert 0 < checks["port-parity"]["value"] < 1e-13 and numbers["port-parity"]["tensors"] == 27
    assert 0 < checks["port-layouts"]["value"] < 0.1
    assert len({*map(tuple, numbers["port-text"]["wanted"])}) == 3
    assert numbers["port-round-trip"]["tensors"] == 69
    assert "6 of 6 gates" in report["summary"] and "gate  verdict" in said


OTHERS = ["mixtral_8x7b", "gpt_oss_20b", "deepseek_v3", "deepseek_v2_lite", "qwen3_30b_a3b",
          "llama3_8b", "qwen3_8b"]  # fmt: skip


def test_tied_ends_are_on_one_rank_of_every_mesh(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import port_gates
    import tiny_models

    tied = SimpleNamespace(tie_word_embeddings=True)
    assert port_gates.sizes_of("pp2", tied) == {"pp": 2, "dp_shard": 1, "schedule": "zbv"}
    assert "schedule" not in port_gates.sizes_of("ep2", tied)
    apart = SimpleNamespace(tie_word_embeddings=False)
    assert port_gates.sizes_of("pp2 ep2", apart) == port_gates.MESHES["pp2 ep2"]
    assert tiny_models.tiny({**OLMOE, "tie_word_embeddings": True})["num_hidden_layers"] == 4
    assert tiny_models.tiny(OLMOE)["num_hidden_layers"] == 2


@full
def test_tied_ends_pass_on_every_mesh(project):
    folder = project / "configs" / "model"
    text = (folder / "olmoe_1b_7b.yaml").read_text()
    tied = text.replace("tie_word_embeddings: false", "tie_word_embeddings: true")
    (folder / "tied.yaml").write_text(tied)
    for gate in ("4", "5"):
        code, report, _ = run(project, "gate", gate, "--name", "tied", "--mesh", "pp2")
        assert code == 0 and tied != text, report["checks"]


@full
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_families_pass_every_gate(template, name):
    code, report, said = run(template, "gate", "all", "--name", name)
    assert code == 0 and set(verdicts(report).values()) == {"pass"}, said


FAMILIES = "curry_train/checkpoint/families.py"
ENTRY = '        fixed={"qk_norm": True, "qk_norm_width": "projection"},\n'
PLANTED = {
    "norm of each head": (
        2, "port-parameters",
        ("curry_train/layers/attention.py", 'config.qk_norm_width == "projection"', "False"),
    ),
    "a layer that raises": (
        2, "port-parameters",
        ("curry_train/layers/attention.py", "self.clip = config.clip_qkv",
         "self.clip = config.clip"),
    ),
    "another norm before the split": (
        3, "port-parity",
        ("curry_train/layers/attention.py", "x = norm(x).view(heads) if self.norm_whole",
         "x = norm(x / 2 + 1).view(heads) if self.norm_whole"),
    ),
    "weights of chosen experts divided": (
        3, "port-parity",
        (FAMILIES, '_same("attention_bias clip_qkv norm_topk_prob")',
         '_same("attention_bias clip_qkv")'),
        (FAMILIES, ENTRY, ENTRY.replace("{", '{"norm_topk_prob": True, ')
         + '        writes={"norm_topk_prob": False},\n'),
        (YAML, "norm_topk_prob: false", "norm_topk_prob: true"),
    ),
    "gate and up in each other's place": (
        3, "port-parity",
        (FAMILIES, ENTRY, ENTRY + '        names={".gate_proj.": ".?.", ".up_proj.": '
         '".gate_proj.", ".?.": ".up_proj."},\n'),
    ),
    "nothing is clipped": (
        3, "port-parity",
        ("curry_train/layers/attention.py", "x = x.clamp(-self.clip, self.clip)", "x = x"),
    ),
    "neighbours are turned": (
        3, "port-parity",
        (FAMILIES, ENTRY, ENTRY.replace("{", '{"rope_interleave": True, ')),
        (YAML, "qk_norm: true", "qk_norm: true\nrope_interleave: true"),
    ),
    "a pipeline with half the gradient": (
        4, "port-layouts",
        ("curry_train/parallel/pipeline_parallel.py", "return sums.total * self.scale",
         "return sums.total * self.scale * 0.5"),
    ),
    "a pipeline that reads another token": (
        5, "port-text",
        ("curry_train/generate.py", 'output[0][0], batch["position_ids"][0], last, mesh',
         'output[0][0], batch["position_ids"][0], 0, mesh'),
    ),
    "an export that widens": (
        6, "port-round-trip",
        ("curry_train/checkpoint/huggingface.py",
         'checkpoint: Path,\n    out: Path,\n    dtype: str = "auto"',
         'checkpoint: Path,\n    out: Path,\n    dtype: str = "float32"'),
    ),
}  # fmt: skip
BY_DEFAULT = {
    "norm of each head", "weights of chosen experts divided", "nothing is clipped",
    "gate and up in each other's place", "a pipeline that reads another token",
}  # fmt: skip


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in BY_DEFAULT else full) for name in PLANTED]
)
def test_a_planted_fault_fails_at_its_gate(project, fault):
    pytest.importorskip("transformers")
    number, id, *edits = PLANTED[fault]
    for edit in [CLIPPED, *edits]:
        plant(project, *edit)
    hf = ("--hf", published(project, OLMOE)) if number == 3 else ()
    words = ("gate", number, "--name", "olmoe_1b_7b", *hf, "--mesh", "pp2")
    code, report, said = run(project, *words)
    assert code == 1 and verdicts(report) == {id: "fail"}, (said, report)
    check = report["checks"][0]
    if number == 3:
        assert check["value"] > 1e-6 and "first apart after " in check["message"]
        part = "feed-forward of block 0" if "gate" in fault or "experts" in fault else "self_attn"
        assert part in report["numbers"]["port-parity"]["first"]


def test_the_clipped_model_passes_where_nothing_is_planted(project):
    """The configuration that the faults above are planted into is right without them."""
    pytest.importorskip("transformers")
    plant(project, *CLIPPED)
    words = ("gate", "3", "--name", "olmoe_1b_7b", "--hf", published(project, OLMOE))
    code, report, said = run(project, *words)
    assert code == 0 and verdicts(report) == {"port-parity": "pass"}, said


def test_a_yaml_that_says_otherwise_stops_at_the_first_gate(template):
    hf = published(template, OLMOE, num_experts_per_tok=4)
    code, report, _ = run(template, "gate", "1", "--name", "olmoe_1b_7b", "--hf", hf)
    (check,) = report["checks"]
    assert code == 1 and check["id"] == "port-imports"
    assert "model.num_experts_per_tok: the YAML has 8, config.json 4" in check["message"]
    assert "model.clip_qkv: the YAML has None, config.json 8.0" in check["message"]


def write_weights(folder, tensors):
    """Write an index and one file that has a header and no values."""
    entries = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
               for name, shape in tensors.items()}  # fmt: skip
    text = json.dumps(entries).encode()
    (folder / "model-1.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def next_weights():
    block = "model.layers.1."
    found = {"model.embed_tokens.weight": [320, 16], "lm_head.weight": [320, 16]}
    found |= {"model.layers.0.linear_attn.A_log": [2], "model.norm.weight": [16]}
    found |= {f"{block}self_attn.{name}.weight": shape for name, shape in ATTENTION.items()}
    found |= {f"{block}self_attn.q_norm.weight": [8], f"{block}mlp.gate.weight": [4, 16]}
    found |= {f"{block}mlp.experts.{e}.gate_proj.weight": [8, 16] for e in range(4)}
    return {**found, f"{block}mlp.shared_expert_gate.weight": [1, 16]}


def test_a_draft_of_an_unknown_architecture_claims_no_fit(project):
    hf = published(project, NEXT)
    write_weights(hf, next_weights())
    before = {path for path in project.rglob("*") if path.is_file()}
    code, report, said = run(project, "draft", "--name", "next", "--hf", hf)
    assert code == 1, said
    found = {check["id"]: check for check in report["checks"]}
    assert found["port-wiring"]["verdict"] == "pass"
    for text in ("linear_conv_kernel_dim=4", "partial_rotary_factor=0.25", "linear_attention"):
        assert text in found["port-keys"]["message"]
    assert found["port-tensors"]["value"] == 3, "A_log, q_proj with a gate, shared_expert_gate"
    page, mapping = (Path(path).read_text() for path in report["artifacts"])
    mapping = json.loads(mapping)
    assert mapping["fits"] is False and "It is not shown to fit" in page
    status = {group["pattern"]: group["status"] for group in mapping["tensors"]}
    assert status["model.layers.*.mlp.experts.*.gate_proj.weight"] == "fits"
    assert status["model.layers.*.self_attn.q_proj.weight"] == "unknown"
    assert status["model.layers.*.self_attn.k_proj.weight"] == "fits"
    for place in mapping["wiring"]:
        line = (project / place["file"]).read_text().splitlines()[place["line"] - 1]
        assert line.strip() and place["line"] >= 1, place
    written = {"configs/model/next.yaml", "curry_train/models/next.py", "tests/test_next.py"}
    after = {path for path in project.rglob("*") if path.is_file()}
    added = {str(path.relative_to(project)) for path in after - before}
    assert {path for path in added if not path.startswith("runs/")} == written
    check_skeleton(project)
    code, _, said = run(project, "draft", "--name", "next", "--hf", hf)
    assert code == 2 and "is there already" in said and "nothing was written" in said


def check_skeleton(project):
    """The skeleton imports, runs, and fails for what is still to be written, in that order."""
    words = ("gate", "1", "--name", "next", "--hf", project / "published")
    code, report, _ = run(project, *words)
    (check,) = report["checks"]
    assert code == 1 and "model.architecture=next: no such model" in check["message"]
    line = '    "next": "curry_train.models.next:Next",\n}'
    plant(project, "curry_train/models/__init__.py", "\n}", f"\n{line}")
    code, report, _ = run(project, *words)
    (check,) = report["checks"]
    assert code == 1 and "Qwen3NextForCausalLM" in check["message"]
    assert "no architecture that is known here" in check["message"]
    script = project / "forward.py"
    script.write_text(
        "import torch\nfrom curry_train.compose import load_config\n"
        "from curry_train.models.protocol import build_model\n"
        "model = build_model(load_config(['model=next', 'data.seq_len=16']), 'cpu')\n"
        "out = model(torch.zeros(1, 4, dtype=torch.int64)).logits\n"
        "print(type(model).__name__, type(model.layers['1']).__name__, *out.shape)\n"
    )
    done = processes.run(script, cwd=project)
    assert done.stdout.split() == ["Next", "NextBlock", "1", "4", "320"], done.stderr


def test_a_draft_of_a_known_architecture_passes_its_first_gate(project):
    hf = published(project, OLMOE)
    write_weights(hf, {"model.layers.0.self_attn.q_norm.weight": [2048]})
    code, report, said = run(project, "draft", "--name", "olmoe_again", "--hf", hf)
    assert code == 0 and report["numbers"]["fits"] is True, said
    assert not (project / "curry_train/models/olmoe_again.py").exists()
    code, report, _ = run(project, "gate", "1", "--name", "olmoe_again", "--hf", hf)
    assert code == 0 and verdicts(report) == {"port-imports": "pass"}
    write_weights(hf, {"model.layers.0.self_attn.q_norm.weight": [512]})
    code, report, _ = run(project, "draft", "--name", "olmoe_third", "--hf", hf)
    assert code == 1 and verdicts(report)["port-tensors"] == "fail"


def test_packed_experts_and_further_predictions_are_known():
    spec = importlib.util.spec_from_file_location("tensor_rules", SCRIPTS / "tensor_rules.py")
    rules = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = rules
    spec.loader.exec_module(rules)
    raw = {"num_hidden_layers": 2, "num_local_experts": 4, "num_nextn_predict_layers": 1}
    bank = "model.layers.1.mlp.experts.gate_up_proj"
    names = {f"{bank}_blocks": (4, 64, 2, 16), f"{bank}_scales": (4, 64, 2)}
    names |= {"model.layers.2.eh_proj.weight": (8, 16), f"{bank}_zeros": (4, 64, 2)}
    found = {group.pattern: group.status for group in rules.groups_of(names, raw)}
    bank = bank.replace("1", "*")
    assert found == {f"{bank}_blocks": "fits", f"{bank}_scales": "fits", f"{bank}_zeros": "unknown"}


def test_without_transformers_nothing_is_judged(monkeypatch):
    spec = importlib.util.spec_from_file_location("add_moe_model", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    call = SimpleNamespace(args=SimpleNamespace(number="all", name="olmoe_1b_7b"))
    report = script.run_gates(call)
    assert report.verdict == "unclear"
    assert "pip install transformers" in report.checks[0]["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gate", "7", "--name", "x"), "allowed are 1, 2, 3, 4, 5, 6, all"),
        (("gate", "--name", "x"), "allowed are 1, 2, 3, 4, 5, 6, all"),
        (("gate", "1"), "--name None"),
        (("gate", "1", "--name", "../x"), "small letters, digits and _"),
        (("draft", "--name", "x"), "draft without --hf"),
        (("draft", "--name", "x", "--hf", "absent"), "it takes a config.json or the folder"),
        (("gate", "1", "--name", "tiny_moe", "--hf", "train.py"), "it takes a config.json"),
        (("gate", "2", "--name", "x", "--index", "y"), "read by draft only"),
    ],
)
def test_a_wrong_call_is_one_sentence(template, words, said):
    code, _, stderr = run(template, *words)
    assert code == 2 and said in stderr and "Traceback" not in stderr
