"""Sound attention over ranks passes, each planted fault is named, bytes fall as 1 / cp."""

from __future__ import annotations

import importlib
import json
import shutil
from argparse import Namespace

import pytest
from skills.targets import processes
from skills.targets.processes import MLP, ROOT

from kit import layouts
from kit.report import Report

SCRIPT = ROOT / "skills" / "context-parallel" / "scripts" / "context_parallel.py"
IDS = {"cp-parity", "cp-bytes", "cp-balance", "cp-local-positions"}


def run(project, *words, cwd):
    done = processes.run(SCRIPT, "--project", project, *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    checks = {check["id"]: check for check in report["checks"]}
    return report, checks, {id for id, c in checks.items() if c["verdict"] == "fail"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cp") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


@pytest.mark.parametrize("preset", ["gpt_oss_20b", "deepseek_v2_lite"])
def test_windows_sinks_and_latent_attention_pass(preset, project, tmp_path):
    ranks = {"gpt_oss_20b": 4}.get(preset, 2)
    words = ["--set", f"model={preset}", "--world", ranks]
    report, checks, failed = run(project, *words, cwd=tmp_path)
    assert not failed and set(checks) == IDS, report["checks"]
    assert 0 < checks["cp-parity"]["value"] < 1e-12
    kept, link = report["numbers"]["bytes"], report["numbers"]["link"]
    heads, width, value = {"gpt_oss_20b": (64, 64, 64), "deepseek_v2_lite": (16, 192, 128)}[preset]
    groups = {"gpt_oss_20b": 8}.get(preset, heads)
    # q, k, v and out in float32 with the log-sum-exp, of the tokens of one rank; sinks besides
    of_token = 4 * (heads * width + groups * (width + value) + heads * value + heads)
    for ranks in (2, 4, 8):
        assert kept[str(ranks)] == pytest.approx(of_token * 32768 / ranks, rel=1e-3)
    assert kept["1"] >= 8 * kept["8"] * 0.999
    assert link["ring"]["link_bytes"] > link["all_gather"]["link_bytes"] > 0
    assert link["ring"]["activation_bytes"] < link["all_gather"]["activation_bytes"]
    exposed = {kind: link[kind]["exposed_seconds"] for kind in ("ring", "all_gather")}
    assert f"parallel.cp_kind={min(exposed, key=exposed.get)} " in report["next"][0] + " "
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_links_and_speed_turn_the_recommendation(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.syspath_prepend(str(ROOT / "template"))
    script = importlib.import_module("context_parallel")
    call = Namespace(project=ROOT / "template", args=None)
    config, _ = layouts.load(call, ["model=gpt_oss_20b"])
    for tflops, kind in ((1.0, "ring"), (1e6, "all_gather")):
        report = Report("context-parallel")
        args = Namespace(length=8192, link_gbps=50.0, tflops=tflops)
        script.recommend(report, config, args)
        assert report.next == [f"set parallel.cp_kind={kind} parallel.cp=8"]


RING = "parallel/context_parallel.py"
PLANTED = {
    "local positions": (
        RING, '        taken["position_ids"] = own[None]\n',
        '        taken["position_ids"] = torch.arange(len(own))[None]\n',
        "cp-local-positions", "they count from each rank's own start",
    ),
    "merged without its weight": (
        RING, "more * (more_lse - safe).exp_()[..., None]", "more",
        "cp-parity", "ring",
    ),
    "last visit forgotten": (
        RING, "        dk, dv = arrive()  # the last", "        arrive()  # the last",
        "cp-parity", "gradient of",
    ),
    "keys of every visit kept": (
        RING, "        ctx.save_for_backward(q, k, v, sinks, doc_ids, out_BSD, lse)\n",
        "        more = [torch.cat((k, k)) for _ in range(ring.world)]\n"
        "        ctx.save_for_backward(q, k, v, sinks, doc_ids, out_BSD, lse, *more)\n",
        "cp-bytes", "cp 8",
    ),
    "chunks in a row": (
        RING, "    for i, mine in enumerate((index, 2 * world - 1 - index)):\n"
        "        for j, theirs in enumerate((source, 2 * world - 1 - source)):\n",
        "    for i, mine in enumerate((2 * index, 2 * index + 1)):\n"
        "        for j, theirs in enumerate((2 * source, 2 * source + 1)):\n",
        "cp-balance", "busiest of 8 ranks",
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
    text = text.replace(old, new)
    text = text.replace("out_BSD, lse = ctx.saved_tensors", "out_BSD, lse, *_ = ctx.saved_tensors")
    path.write_text(text, encoding="utf-8")
    words_of = ["--set", "model=tiny_dense", "--world", 2]
    report, checks, failed = run(broken, *words_of, cwd=tmp_path)
    assert id in failed and words in checks[id]["message"], report["checks"]
    assert failed <= {id, "cp-parity"} and checks[id]["value"] > checks[id]["threshold"]
    assert (id == "cp-local-positions") == ("take()" in report["next"][0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", MLP], "layouts belong to a project"),
        (["--world", 1], "a sequence is shared by at least 2 ranks"),
        (["--length", 1000], "--length 1000; a multiple of 16"),
        (["--tflops", 0], "--tflops 0.0; above 0"),
        (["--set", "model=tiny_spiking"], "is for the decoder family"),
        (["--set", "parallel.cp=3"], "set data.seq_len to a multiple of 6"),
    ],
)
def test_bad_input_exits_with_2(words, message, project, tmp_path):
    place = [] if "--target" in words else ["--project", project]
    done = processes.run(SCRIPT, *place, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, (done.stdout, done.stderr)
