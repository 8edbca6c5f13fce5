"""Detached runs: they outlive their parent, can be asked and waited for, and may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from skills.targets import processes
from skills.targets.processes import CUSTOM_CHECK, MLP

from kit import job
from kit.errors import UsageError

CHECKS = """
import os, sys, time
from pathlib import Path
HERE = Path(__file__).parent
def waits(target):
    (HERE / "began").touch()
    while not (HERE / "go").exists():
        time.sleep(0.05)
    return {"id": "waited", "verdict": "fail"}
def raises(target):
    raise RuntimeError("in the check")
"""


@pytest.fixture
def detach(tmp_path):
    (tmp_path / "checks.py").write_text(CHECKS)
    pids = []

    def start(name, *words):
        spec = f"checks.py:{name}"
        done = processes.run(
            CUSTOM_CHECK, "--check", spec, "--target", MLP, "--detach", *words, cwd=tmp_path
        )
        pids.extend(json.loads(path.read_text())["pid"] for path in tmp_path.rglob("state.json"))
        return done

    yield start
    (tmp_path / "go").touch()
    for pid in pids:
        until(lambda pid=pid: not alive(pid))


@pytest.fixture
def waiting(tmp_path):
    """A run in the folder `here`, not detached, whose check waits until it may go on."""
    (tmp_path / "checks.py").write_text(CHECKS)
    process = processes.start(
        CUSTOM_CHECK, "--check", "checks.py:waits", "--target", MLP, "--out", "here",
        cwd=tmp_path, output=[tmp_path / "stdout", tmp_path / "stderr"],
    )  # fmt: skip
    until((tmp_path / "began").exists)
    yield process
    (tmp_path / "go").touch()
    process.join(60)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=60):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "did not happen in time"
        time.sleep(0.05)


def ask(verb, tmp_path, *words):
    return processes.run(CUSTOM_CHECK, verb, *words, cwd=tmp_path)


def test_a_detached_run_is_followed_to_its_end(detach, tmp_path):
    started = detach("waits")
    assert started.returncode == 0, started.stderr
    assert "status: python3 " in started.stdout and "wait: python3 " in started.stdout
    until((tmp_path / "began").exists)
    running = ask("status", tmp_path)
    assert running.returncode == 0 and running.stdout.startswith("running: custom-check")
    state = json.loads(ask("status", tmp_path, "--json").stdout)
    assert state["status"] == "running" and state["exit_code"] is None
    assert os.getsid(state["pid"]) == state["pid"]  # a session of its own: no hang-up reaches it

    timed_out = ask("wait", tmp_path, "--timeout", "0.3")
    assert timed_out.returncode == 3 and timed_out.stdout.startswith("running: ")

    (tmp_path / "go").touch()
    waited = ask("wait", tmp_path)
    assert waited.returncode == 1 and "fail     waited" in waited.stdout
    assert waited.stdout.splitlines()[-1].startswith("verdict: fail (exit 1), report runs/checks/")
    assert json.loads(ask("wait", tmp_path, "--json").stdout)["verdict"] == "fail"
    done = ask("status", tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("done: custom-check, exit 1")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_is_recognised(number, waiting, tmp_path):
    pid = json.loads((tmp_path / "here" / "state.json").read_text())["pid"]
    assert pid == waiting.pid
    os.kill(pid, number)
    waiting.join(60)
    status = ask("status", tmp_path, "--out", "here")
    assert status.returncode == 0 and status.stdout.startswith("killed: custom-check")
    assert f"process {pid} is gone and left no exit code" in status.stdout
    assert ask("wait", tmp_path, "--out", "here").returncode == 3


def test_the_run_survives_the_end_of_the_shell_that_started_it(tmp_path):
    (tmp_path / "checks.py").write_text(CHECKS)
    words = [sys.executable, str(CUSTOM_CHECK), "--check", "checks.py:waits", "--target", MLP]
    with open(tmp_path / "answer.json", "w") as answer:
        shell = subprocess.Popen(
            ["sh", "-c", '"$@" --detach --json --out here; sleep 60', "sh", *words],
            cwd=tmp_path,
            env=processes.environment(),
            stdout=answer,
            start_new_session=True,
        )
    until((tmp_path / "began").exists)
    until(lambda: (tmp_path / "answer.json").read_text().endswith("}\n"))
    os.killpg(shell.pid, signal.SIGKILL)  # what a terminal or an agent does with its process group
    shell.wait()
    state = json.loads((tmp_path / "here" / "state.json").read_text())
    started = {"skill": "custom-check", "status": "running", "pid": state["pid"]}
    answered = json.loads((tmp_path / "answer.json").read_text())
    assert answered == {**started, "out": str(tmp_path / "here")}
    assert ask("status", tmp_path, "--out", "here").stdout.startswith("running: ")
    (tmp_path / "go").touch()
    assert ask("wait", tmp_path, "--out", "here").returncode == 1


def test_a_run_that_fails_leaves_its_reason_and_code(detach, tmp_path):
    detach("raises", "--out", "here")
    waited = ask("wait", tmp_path, "--out", "here")
    assert waited.returncode == 2 and waited.stdout.startswith("failed: custom-check, exit 2")
    assert "checks.py:raises raised RuntimeError: in the check" in waited.stdout
    assert "in raises: raise RuntimeError" in (tmp_path / "here" / "log.txt").read_text()


def test_bad_flags_are_told_at_once_and_nothing_is_started(detach, tmp_path):
    done = detach("waits", "--device", "tpu")
    assert done.returncode == 2 and "--device tpu" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_two_runs_cannot_share_a_folder(waiting, tmp_path):
    second = processes.run(
        CUSTOM_CHECK, "--check", "checks.py:waits", "--target", MLP, "--out", "here", cwd=tmp_path
    )
    assert second.returncode == 2 and "is in use by another run" in second.stderr
    assert waiting.is_alive()


@pytest.mark.parametrize("verb", ["status", "wait"])
def test_asking_where_no_run_is_exits_with_2(verb, tmp_path):
    assert "no run of custom-check" in ask(verb, tmp_path).stderr
    done = ask(verb, tmp_path, "--out", "gone")
    assert done.returncode == 2 and "holds no run" in done.stderr


def test_damaged_folders_of_runs_exit_with_2(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for text in ("{}", "[]", "no json"):
        (folder / "state.json").write_text(text)
        done = ask("status", tmp_path, "--out", "run")
        assert done.returncode == 2 and "holds no run" in done.stderr
    job.Job(folder, "custom-check").finish(0, None)
    done = ask("wait", tmp_path, "--out", "run")
    assert done.returncode == 2 and "report.json is missing or damaged" in done.stderr


def test_a_recycled_process_id_is_not_taken_for_the_run(tmp_path):
    state = job.Job(tmp_path, "custom-check")
    state.state["pid"] = os.getpid()  # lives, but holds no lock
    state.expect(5, "steps")
    (tmp_path / "lock").touch()
    assert job.read_status(tmp_path)["status"] == "killed"


def test_the_time_left_comes_from_the_expectation_or_the_progress(tmp_path):
    work = job.Job(tmp_path, "custom-check")
    with job.locked(tmp_path):
        work.state["started"] = time.time() - 10
        base = {**work.state, "expected_s": 30.0}
        assert job._eta(base, 10.0) == 20.0 and job._eta(base, 40.0) == 0.0
        base = {**work.state, "expected_s": None, "done": 5, "total": 20}
        assert job._eta(base, 10.0) == 30.0
        assert job._eta({**base, "done": 0}, 10.0) is None
    running = {**base, "status": "running", "elapsed_s": 10.0, "eta_s": 30.0}
    wanted = "running: custom-check, 5/20, 10 s so far, about 30 s left (x)"
    assert job.describe_status(running, "x") == wanted


def test_folders_of_one_second_differ_and_sort_by_time(tmp_path):
    folders = [job.new_folder(tmp_path, "custom-check") for _ in range(3)]
    assert len(set(folders)) == 3 and folders == sorted(folders)
    with pytest.raises(UsageError, match="no run of custom-check"):
        job.newest_folder(tmp_path, "custom-check")
    (folders[1] / "state.json").touch()
    assert job.newest_folder(tmp_path, "custom-check") == folders[1]
