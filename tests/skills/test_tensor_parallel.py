"""Split layers pass, each planted fault is named with its layer, bytes are those of the plan."""

from __future__ import annotations

import json
import shutil

import pytest
from skills.targets import processes
from skills.targets.processes import MLP, ROOT

SCRIPT = ROOT / "skills" / "tensor-parallel" / "scripts" / "tensor_parallel.py"
IDS = {"tp-indivisible", "tp-parity", "tp-full-logits", "tp-volume"}
DENSE = ["model=tiny_dense", "model.attention_bias=true", "parallel.tp=2"]


def run(project, *words, cwd):
    done = processes.run(SCRIPT, "--project", project, "--set", *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    checks = {check["id"]: check for check in report["checks"]}
    return report, checks, {id for id, c in checks.items() if c["verdict"] == "fail"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tp") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def test_every_split_layer_is_checked_and_bytes_are_counted(project, tmp_path):
    """Latent attention, a shared expert, experts over the tp ranks, two pipeline stages."""
    words = ["model=deepseek_v2_lite", "parallel.tp=2", "parallel.ep=2", "parallel.pp=2"]
    report, checks, failed = run(project, *words, cwd=tmp_path)
    assert not failed and set(checks) == IDS, report["checks"]
    assert 0 < checks["tp-parity"]["value"] < 1e-12
    assert checks["tp-full-logits"]["value"] == pytest.approx(0.5)
    numbers = report["numbers"]
    # q_proj, kv_b_proj and o_proj of two blocks, 3 of the dense one, 3 of the shared expert,
    # embedding, head and cross entropy
    assert numbers["layers"] == 2 * 3 + 3 + 3 + 3
    assert numbers["world"] == 4 and numbers["sizes_that_divide"] == [2, 4, 8, 16]
    groups = numbers["groups"]
    assert groups["pp"]["sent"] == pytest.approx(groups["pp"]["planned"], rel=0.01)
    assert 0 < groups["ep"]["gap"] < 0.5, "told, not judged"
    (cpu,) = numbers["cpu"]
    assert cpu["tp"] == 2 and 0 < cpu["cpu_split"]
    sent = sum(size for group, _, size, _ in numbers["bytes_of_the_project"] if group == "tp")
    assert f"{sent / 2**20:,.1f} MiB a step over tp" in report["summary"]


PLANTED = {
    "the bias of every rank": (
        "parallel/tensor_parallel.py",
        "        out = scatter_sequence(F.linear(x, local(self.weight).to(x.dtype)), self.group)\n"
        "        return out if self.bias is None else out + self.bias.to(x.dtype)\n",
        "        return scatter_sequence(\n"
        "            F.linear(x, local(self.weight).to(x.dtype), self.bias), self.group)\n",
        "tp-parity", "self_attn.o_proj: gradient of the bias",
    ),
    "own columns as if they were all": (
        "parallel/tensor_parallel.py", "        dist.all_reduce(sums, group=group)\n", "",
        "tp-parity", "cross entropy: loss",
    ),
    "ids of other ranks": (
        "parallel/tensor_parallel.py", "rows.masked_fill(absent[..., None], 0)", "rows",
        "tp-parity", "worst model.embed_tokens: ",
    ),
    "full logits": (
        "parallel/tensor_parallel.py", "        largest = wide.amax(1)\n",
        "        from curry_train.parallel.collectives import stack_ranks\n"
        "        stack_ranks(wide, group)\n        largest = wide.amax(1)\n",
        "tp-full-logits", "largest tensor of a forward pass, tp 2",
    ),
    "gathered twice": (
        "parallel/collectives.py", "    at = x.dim() - 2\n    return stack_ranks",
        "    at = x.dim() - 2\n    stack_ranks(x, group)\n    return stack_ranks",
        "tp-volume", "group tp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault, project, tmp_path):
    name, old, new, id, words = PLANTED[fault]
    broken = tmp_path / "broken"
    shutil.copytree(project, broken, ignore=shutil.ignore_patterns("runs"))
    path = broken / "curry_train" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, "the code was rewritten: plant the fault anew"
    path.write_text(text.replace(old, new), encoding="utf-8")
    report, checks, failed = run(broken, *DENSE, cwd=tmp_path)
    assert id in failed and words in checks[id]["message"], report["checks"]
    assert failed <= {id, "tp-volume"} and checks[id]["value"] >= checks[id]["threshold"]


def test_sizes_that_do_not_divide_are_named(project, tmp_path):
    words = ["model=tiny_dense", "parallel.tp=3", "data.seq_len=129"]
    report, checks, failed = run(project, *words, cwd=tmp_path)
    assert failed == {"tp-indivisible"} == set(checks)
    assert "does not divide model.num_attention_heads=4" in checks["tp-indivisible"]["message"]
    assert any("num_key_value_heads=2" in text for text in report["evidence"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", MLP], "layouts belong to a project"),
        (["--device", "cuda"], "ranks are forked on the CPU"),
        (["--set", "parallel.cp=5", "parallel.tp=2"], "does not divide into the slices"),
        (["--set", "parallel.tp=2", "model=tiny_spiking"], "can share samples and parameters only"),
    ],
)
def test_bad_input_exits_with_2(words, message, project, tmp_path):
    place = [] if "--target" in words else ["--project", project]
    done = processes.run(SCRIPT, *place, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, (done.stdout, done.stderr)
