"""Planted models, machines, reports and traces whose bottleneck and cure are known."""

from __future__ import annotations

import gzip
import json
import shutil
import sys

import pytest
from skills.targets import processes
from skills.targets.processes import ROOT

from kit.errors import UsageError

SCRIPT = ROOT / "skills" / "choose-parallelism" / "scripts" / "choose_parallelism.py"
sys.path.insert(0, str(SCRIPT.parent))
import kernel_sums  # noqa: E402

LLAMA = ["--preset", "llama3_8b", "--node", "h100"]
BF16 = ["--set", "precision=bf16", "data.seq_len=8192"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


@pytest.fixture
def choose(project, tmp_path):
    def call(*words):
        out = tmp_path / "out"
        done = processes.run(SCRIPT, *words, "--project", project, "--out", out, cwd=tmp_path)
        assert done.returncode in (0, 1, 3), done.stderr
        report = json.loads((out / "report.json").read_text())
        assert done.returncode == {"pass": 0, "fail": 1, "unclear": 3}[report["verdict"]]
        checks = {check["id"]: check for check in report["checks"]}
        return report, checks, done.stdout

    return call


def settings(report):
    """The settings that the report proposes, as a dictionary."""
    return dict(word.split("=") for word in report["numbers"]["next"]["overrides"])


def test_8b_on_one_gpu_needs_more_gpus_and_zero(choose):
    report, checks, text = choose(*LLAMA, "--gpus", 1, *BF16, "data.micro_batch_size=1")
    assert report["verdict"] == "fail" and checks["parallelism-memory"]["value"] > 1.4
    assert "parameters, gradients and moments take 119.7 GiB" in report["summary"]  # 16 x 8.03e9
    needs = report["numbers"]["next"]["needs"]
    assert needs.startswith("4 GPUs: ") and "parallel.zero=" in needs.split(";")[0]
    assert "parallel.tp" not in needs and "or 2 GPUs: recompute + tensor parallel" in needs
    assert "present: " in text and report["numbers"]["fitting"] == 0
    assert report["numbers"]["rejected"]["cheaper"][0].startswith("micro-batch 1")


def test_8b_on_eight_gpus_needs_zero_alone(choose):
    report, _, text = choose(*LLAMA, "--gpus", 8, *BF16, "data.global_batch_size=64")
    found = settings(report)
    assert report["verdict"] == "fail" and found["parallel.zero"] in ("2", "3")
    assert found["parallel.dp_shard"] == "8"
    assert not {"parallel.pp", "parallel.tp", "parallel.cp"} & set(found)
    rejected = report["numbers"]["rejected"]
    assert any(row.startswith("zero 1 ") and "GiB" in row for row in rejected["cheaper"])
    assert any(row.startswith("pipeline parallel ") for row in rejected["dearer"])
    assert len(report["numbers"]["candidates"]) == 5
    assert len(text.splitlines()) <= 7 + 15
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_the_layout_that_is_proposed_passes(choose):
    words = ["data.global_batch_size=64", "parallel.zero=3", "data.micro_batch_size=1"]
    words += ["parallel.recompute=selective"]
    report, checks, _ = choose(*LLAMA, "--gpus", 8, *BF16, *words)
    assert report["verdict"] == "pass", report
    assert checks["parallelism-speed"]["value"] <= 1.1 and "next" not in report["numbers"]


def test_671b_needs_experts_and_stages_spread(choose):
    """DeepSeek-V3 was trained with 16 pipeline stages and experts over 64 ranks (its report)."""
    words = ["precision=bf16", "data.seq_len=4096", "data.global_batch_size=8192"]
    report, _, _ = choose(
        "--preset", "deepseek_v3", "--node", "h100", "--gpus", 1024, "--set", *words,
        "parallel.zero=3", "data.micro_batch_size=1",
    )  # fmt: skip
    found = settings(report)
    assert int(found["parallel.ep"]) >= 8 and int(found["parallel.pp"]) >= 2
    rejected = report["numbers"]["rejected"]["cheaper"]
    assert any(row.startswith("recompute") and "GiB" in row for row in rejected)


def test_a_long_context_needs_context_parallelism(choose):
    report, _, _ = choose(
        *LLAMA, "--gpus", 8, "--set", "precision=bf16", "data.seq_len=131072",
        "model.max_position_embeddings=131072", "data.global_batch_size=8",
    )  # fmt: skip
    found = settings(report)
    assert int(found["parallel.cp"]) > 1 and not {"parallel.tp", "parallel.pp"} & set(found)
    assert "activations" in report["summary"]


def test_tensor_parallelism_across_slow_nodes_is_named(choose):
    report, checks, _ = choose(
        "--preset", "llama3_8b", "--node", "l40s", "--gpus-per-node", 4, "--gpus", 16, "--set",
        "precision=bf16", "data.seq_len=4096", "data.global_batch_size=64", "parallel.tp=8",
        "parallel.zero=3", "parallel.recompute=full", "data.micro_batch_size=1",
    )  # fmt: skip
    assert report["verdict"] == "unclear"
    assert checks["parallelism-nodes"]["value"] > 0.2
    assert "parallel.tp=8 crosses nodes of 4 GPUs" in checks["parallelism-nodes"]["message"]
    assert report["numbers"]["bottleneck"]["name"] == "tp messages between nodes"
    assert int(settings(report).get("parallel.tp", 1)) <= 4
    assert checks["parallelism-speed"]["value"] > 1.5


SMALL = ["--gpus", 1, *BF16[:2], "data.seq_len=1024", "model.num_hidden_layers=4"]
SMALL += ["data.global_batch_size=64"]


def benchmark(folder, step_time, mfu):
    numbers = {"step_time": step_time, "mfu": mfu, "tokens_per_s": 1.0}
    report = {"schema": 1, "skill": "benchmark-step", "numbers": numbers}
    (folder / "measured.json").write_text(json.dumps(report))
    return folder / "measured.json"


def test_a_slow_measured_step_of_small_micro_batches_is_named(choose, tmp_path):
    report, _, _ = choose(*LLAMA, *SMALL, "data.micro_batch_size=1")
    estimate = report["numbers"]["present"]["step_time"]
    slow = benchmark(tmp_path, 3 * estimate, 0.12)
    report, checks, _ = choose(*LLAMA, *SMALL, "data.micro_batch_size=1", "--report", slow)
    assert report["verdict"] == "unclear" and "MFU 12.0%" in report["summary"]
    assert report["numbers"]["bottleneck"]["name"] == "small micro-batch"
    assert int(settings(report)["data.micro_batch_size"]) > 1
    assert checks["parallelism-measured"]["value"] == pytest.approx(3)
    quick = benchmark(tmp_path, 1.2 * estimate, 0.4)
    _, checks, _ = choose(*LLAMA, *SMALL, "data.micro_batch_size=1", "--report", quick)
    assert checks["parallelism-measured"]["verdict"] == "pass"


def test_without_figures_of_the_links_speed_is_unclear(choose):
    words = ["--preset", "llama3_8b", "--memory-gb", 80, "--gpus", 8, *BF16]
    words += ["data.global_batch_size=64", "parallel.zero=3", "data.micro_batch_size=1"]
    words += ["parallel.recompute=selective"]
    report, checks, _ = choose(*words)
    assert report["verdict"] == "unclear" and checks["parallelism-memory"]["verdict"] == "pass"
    assert "--peak-tflops" in report["next"][0] and report["numbers"]["present"]["time"] is None


def test_a_layout_that_the_rules_refuse_fails_with_their_reason(choose):
    report, checks, _ = choose(*LLAMA, "--gpus", 16, *BF16, "data.global_batch_size=8")
    assert report["verdict"] == "fail" and set(checks) == {"parallelism-accepted"}
    assert "16 ranks cannot share it evenly" in checks["parallelism-accepted"]["message"]
    assert 8 % int(settings(report)["parallel.dp_shard"]) == 0


def test_what_is_proposed_takes_back_what_was_refused(choose):
    words = ["--preset", "llama3_8b", "--gpus", 8, "--node", "h100", *BF16]
    words += ["parallel.pp=3", "parallel.recompute=full", "data.global_batch_size=64"]
    report, _, _ = choose(*words)
    found = settings(report)
    assert found["parallel.pp"] == "1" and "parallel.recompute" in found


def kernel(name, start, length, stream=7):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "tid": stream}


TRACE = [
    kernel("sm90_xmma_gemm_bf16", 0, 100),
    kernel("flash_fwd_kernel", 100, 50),
    kernel("ncclDevKernel_AllGather_RING", 120, 80, stream=9),  # 50 of it alone
    kernel("vectorized_elementwise_kernel", 300, 100),
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9999, "tid": 1},
    {"ph": "M", "name": "process_name"},
]


def test_a_trace_is_summed_by_kind(tmp_path, choose):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
    found = kernel_sums.sums(path)
    seconds = {name: 1e6 * s for name, s in found["kinds"].items()}
    wanted = {"products": 100, "attention": 50, "all-gather": 80, "rest": 100}
    assert seconds == pytest.approx(wanted) and found["device"] == "gpu"
    assert 1e6 * found["window"] == pytest.approx(400)
    assert 1e6 * found["idle"] == pytest.approx(100) and 1e6 * found["exposed"] == pytest.approx(50)
    report, _, text = choose(*LLAMA, *SMALL, "--trace", path)
    assert report["numbers"]["bottleneck_of_trace"] == "idle"
    assert "the GPU waits for the host" in text and "idle 25%" in text


def test_operators_of_a_cpu_trace_count_their_own_time(tmp_path):
    def operator(name, start, length):
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": 1}

    events = [operator("aten::linear", 0, 100), operator("aten::addmm", 10, 80)]
    events += [operator("aten::silu", 120, 30), operator("gloo:all_reduce", 150, 50)]
    (tmp_path / "t.json").write_text(json.dumps(events))
    found = kernel_sums.sums(tmp_path / "t.json")
    seconds = {name: 1e6 * s for name, s in found["kinds"].items()}
    assert seconds == pytest.approx({"products": 100, "rest": 30, "all-reduce": 50})
    assert 1e6 * found["idle"] == pytest.approx(20) and 1e6 * found["exposed"] == pytest.approx(50)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32", "reduce-scatter"),
        ("ncclDevKernel_SendRecv", "send-receive"),
        ("nccl:_all_to_all_single", "all-to-all"),
        ("ncclKernel_Broadcast", "other messages"),
        ("nvjet_tst_128x256", "products"),
        ("fmha_cutlassB_bf16", "attention"),
        ("aten::_grouped_mm", "products"),
        ("triton_poi_fused_mul", "rest"),
    ],
)
def test_kernels_are_known_by_name(name, kind):
    assert kernel_sums.kind_of(name) == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("{}", "has no traceEvents"),
        ('{"traceEvents": []}', "has no kernel and no operator"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1}]}', "has no kernel"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": -1}, 3]}', "no kernel"),
    ],
)
def test_a_trace_without_events_is_refused(text, message, tmp_path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        kernel_sums.sums(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0", "--node", "h100"], "--gpus 0; it takes 1 to 4096"),
        (["--gpus", "8"], "no memory is known; --node takes a100, h100"),
        (["--gpus", "8", "--node", "h100", "--preset", "lama"], "--preset lama is unknown; known"),
        (["--gpus", "8", "--node", "h100", "--memory-gb", "-1"], "--memory-gb -1.0; it must be"),
        (["--gpus", "8", "--node", "h100", "--report", "gone"], "--report gone: No such file"),
        (["--gpus", "8", "--node", "h100", "--report", "x.json"], "is a report of topk-router"),
        (["--gpus", "8", "--node", "h100", "--report", "y.json"], "has step_time None"),
        (["--gpus", "8", "--node", "h100", "--trace", "gone"], "--trace gone: No such file"),
        (["--gpus", "8", "--node", "h100", "--set", "model=tiny_spiking"], "has no closed forms"),
        (["--gpus", "8", "--node", "h100", "--set", "data.seq_len=0"], "data.seq_len=0"),
    ],
)
def test_wrong_calls_exit_with_2_and_one_line(words, message, project, tmp_path):
    for name, skill in (("x.json", "topk-router"), ("y.json", "benchmark-step")):
        (tmp_path / name).write_text(json.dumps({"schema": 1, "skill": skill, "numbers": {}}))
    out = tmp_path / "out"
    done = processes.run(SCRIPT, *words, "--project", project, "--out", out, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (out / "report.json").exists()
