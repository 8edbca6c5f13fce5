"""init --train: the launcher it starts, what it tells, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from skills.init_bundle import Bundle, make_bundle, make_environment

import init_gpu  # isort: skip
from init_gpu import Nvidia, find_nvidia, verdict
from init_train import Result, next_lines, read_result, summary

RUN = ["--no-install", "--train", "--python"]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment") / "with space")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path / "bundle")


def test_the_numbers_come_from_the_run_folder(bundle, tmp_path, python):
    done = bundle.run(tmp_path / "demo", *RUN, python)
    (run,) = (tmp_path / "demo" / "runs").iterdir()
    assert run.name.startswith("quickstart-")
    lines = done.stdout.splitlines()
    assert "loss: 5.5000 at first, 3.0000 at last" in lines
    assert "val/loss: 3.2500 nats per token, 4.5000 bits per byte (val/bpb)" in lines
    assert "tokens/s: 250" in lines, "the median of the rows after the first, newest attempt"
    assert f"run folder: {run}" in lines
    assert "  | of the mind." in lines and "\x1b" not in done.stdout
    assert any(line.startswith("GPU: ") and "2.13.0+cpu" in line for line in lines)
    assert any(line.startswith("TensorBoard: ") and "/runs" in line for line in lines)
    assert any(line.startswith("next: cd ") for line in lines)
    assert "fake training on ['train.py']" in done.stdout


def test_json_keeps_stdout_to_one_object(bundle, tmp_path, python):
    done = bundle.run(tmp_path / "demo", *RUN, python, "--json")
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    (run,) = (tmp_path / "demo" / "runs").iterdir()
    assert report == {
        "project": str(tmp_path / "demo"),
        "version": "0.1.0",
        "action": "create",
        "files": len(bundle.files()),
        "venv": None,
        "run": str(run),
        "loss_first": 5.5,
        "loss_last": 3.0,
        "val_loss": 3.25,
        "val_bpb": 4.5,
        "tokens_per_s": 250.0,
    }
    assert "fake training" in done.stderr and "val/loss" in done.stderr


def test_two_trainings_at_once_do_not_collide(bundle, tmp_path, python):
    bundle.run(tmp_path / "demo", "--no-install")
    command = bundle.command(tmp_path / "demo", *RUN, python, "--json")
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outs = [process.communicate(timeout=60) for process in started]
    assert all(process.returncode == 0 for process in started), outs
    assert len({json.loads(out)["run"] for out, _ in outs}) == 3


def test_a_crash_ends_with_code_1_and_its_reason(bundle, tmp_path, python, monkeypatch):
    monkeypatch.setenv("FAKE_CRASH", "1")
    done = bundle.run(tmp_path / "demo", *RUN, python, "--json", code=1)
    assert json.loads(done.stdout)["loss_last"] == 3.0
    assert "failure: boom at step 3" in done.stderr
    assert "training failed with code 1, status crashed" in done.stderr


def test_a_training_that_never_began_says_so(bundle, tmp_path, python):
    bundle.write("train.py", "import sys\nsys.exit(2)\n")
    done = bundle.run(tmp_path / "demo", *RUN, python, "--json", code=1)
    assert json.loads(done.stdout)["run"] is None
    assert "made no run folder" in done.stderr


@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c_reaches_the_training_once_and_the_result_is_told(
    bundle, tmp_path, python, monkeypatch, whole_group
):
    monkeypatch.setenv("FAKE_WAIT", "1")
    process = subprocess.Popen(
        bundle.command(tmp_path / "demo", *RUN, python),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    began = time.monotonic()
    while not list(tmp_path.glob("demo/runs/*/waiting")):
        assert time.monotonic() - began < 60 and process.poll() is None
        time.sleep(0.02)
    if whole_group:  # as a terminal does it
        import os

        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    (signals,) = tmp_path.glob("demo/runs/*/signals")
    assert signals.read_text() == "1"
    assert "loss: 5.5000 at first" in out and "run.resume=" in out
    assert "stopped by SIGINT" in err


def test_training_without_a_fitting_environment_is_refused_before_anything_is_made(
    bundle, tmp_path, python
):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    done = bundle.run(tmp_path / "demo", *RUN, bare / "bin" / "python", code=2)
    assert "no torch and no lightning_fabric" in done.stderr
    assert not (tmp_path / "demo").exists()
    script = python.with_name("fabric")
    script.rename(script.with_name("hidden"))
    try:
        done = bundle.run(tmp_path / "demo", *RUN, python, code=2)
    finally:
        script.with_name("hidden").rename(script)
    assert "no `fabric` program" in done.stderr


def write_run(folder: Path, metrics: str, journal: str = "") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "journal.jsonl").write_text(journal)
    return folder


def test_torn_foreign_and_non_finite_rows(tmp_path):
    text = (
        '{"step": 0, "val/loss": 5.6}\n[1]\nnot json\n'
        '{"step": 1, "loss": "NaN", "tokens_per_s": "Infinity"}\n{"step": 2, "lo'
    )
    result = read_result(write_run(tmp_path / "run", text))
    assert (result.loss_first, result.loss_last, result.val_loss) == ("NaN", "NaN", 5.6)
    assert result.tokens_per_s is None and result.sample == ""


def test_a_run_without_folder_or_sample_is_told_without(tmp_path):
    run = write_run(tmp_path / "run", '{"step": 1, "loss": 2.0}\n')
    text = "\n".join(summary(read_result(run), tmp_path, tmp_path / "bin", []))
    assert "val/loss: not logged" in text.splitlines() and "text sample" not in text
    assert read_result(tmp_path / "absent") == Result(None)


def test_what_is_next_names_commands_that_exist(tmp_path):
    text = "\n".join(next_lines(tmp_path / "a b", tmp_path / "bin"))
    assert f"cd '{tmp_path}/a b'" in text and "train.py --help" in text


CARD = Nvidia(("NVIDIA H200",), "550.54", "12.4")
SEEN = {"version": "2.13.0+cu130", "cuda": "13.0", "devices": ["NVIDIA H200"]}
BLIND = {**SEEN, "devices": []}
CPU = {"version": "2.13.0+cpu", "cuda": None, "devices": []}


@pytest.mark.parametrize(
    ("torch", "nvidia", "hidden", "words"),
    [
        (SEEN, CARD, None, ["GPU: NVIDIA H200", "550.54", "CUDA 13.0"]),
        (CPU, None, None, ["none here", "trained on the CPU"]),
        (CPU, CARD, None, ["not seen", "fix: torch is the CPU build", "--install"]),
        (BLIND, CARD, None, ["driver is too old for CUDA 13.0", "whl/cu124", "up to 12.4"]),
        (BLIND, Nvidia(("A",), "580.1", "13.0"), "", ["CUDA_VISIBLE_DEVICES='' hides"]),
        (BLIND, Nvidia(("A",), "580.1", "13.0"), None, ["fix: see what"]),
        (BLIND, Nvidia(problem="no NVIDIA driver is installed"), None, ["install the driver"]),
    ],
)
def test_the_verdict_on_the_gpu(torch, nvidia, hidden, words):
    text = "\n".join(verdict(torch, nvidia, hidden))
    for word in words:
        assert word in text, text
    assert ("fix:" in text) == ("not seen" in text)


def fake_smi(folder: Path, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)


HEADER = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |"


def test_what_the_driver_says_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(init_gpu.sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    row = "NVIDIA H200, 550.54.15"
    fake_smi(tmp_path / "bin", f'[ -n "$1" ] && echo "{row}" || echo "{HEADER}"')
    assert find_nvidia(tmp_path) == Nvidia(("NVIDIA H200",), "550.54.15", "12.4")
    fake_smi(tmp_path / "bin", "echo 'could not communicate with the driver'; exit 9")
    assert find_nvidia(tmp_path) is None, "a CUDA image on a machine without a card"
    (tmp_path / "bin" / "nvidia-smi").unlink()
    assert find_nvidia(tmp_path) is None
    bus = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:01:00.0"
    bus.mkdir(parents=True)
    (bus / "vendor").write_text("0x10de\n")
    (bus / "class").write_text("0x040300\n")  # its sound device alone is no GPU
    assert find_nvidia(tmp_path) is None
    (bus / "class").write_text("0x030200\n")
    assert find_nvidia(tmp_path) == Nvidia(problem="no NVIDIA driver is installed")
    version = tmp_path / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    version.write_text(text)
    assert find_nvidia(tmp_path) == Nvidia((), "570.86.15", "", "the driver does not answer")
    monkeypatch.setattr(init_gpu.sys, "platform", "darwin")
    assert find_nvidia(tmp_path) is None
