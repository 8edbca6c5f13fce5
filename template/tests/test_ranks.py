"""Two ranks as torchrun starts them, forked: stops, crashes and deaths end all of them."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from projects import (
    SMALL,
    exit_code,
    fork_ranks,
    import_everything,
    losses,
    rows,
    run_folders,
    wait_for_step,
)

import curry_train.checkpoint.storage
import curry_train.step


@pytest.fixture(scope="module", autouse=True)
def everything_imported():
    import_everything()


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(project: Path, rank: int) -> str:
    return (project / f"rank-{rank}.txt").read_text()


def ranks(project: Path, *settings: str) -> list[int]:
    return fork_ranks(2, *SMALL, *settings, folder=project)


def ended(pids: list[int], within: float) -> list[int]:
    began = time.monotonic()
    codes = [exit_code(pid) for pid in pids]
    assert time.monotonic() - began < within
    return codes


def test_a_signal_to_one_rank_stops_both_and_they_resume_bitwise(project):
    pids = ranks(project, "run.max_steps=30", "run.name=stopped")
    folder = wait_for_step(project, 3)
    os.kill(pids[1], signal.SIGTERM)
    assert ended(pids, within=25) == [0, 0]
    end = rows(folder, "journal.jsonl")[-1]
    assert (end["status"], end["reason"]) == ("preempted", "SIGTERM")
    stopped_at = max(losses(folder))
    assert 3 <= stopped_at < 30
    pids = ranks(project, "run.max_steps=30", "run.name=stopped", "run.resume=auto")
    assert ended(pids, within=60) == [0, 0], output(project, 0)
    pids = ranks(project, "run.max_steps=30", "run.name=whole")
    assert ended(pids, within=60) == [0, 0], output(project, 0)
    stopped, whole = run_folders(project)
    assert losses(stopped) == losses(whole) and len(losses(whole)) == 30


@pytest.mark.parametrize("failing", [0, 1])
def test_a_crash_is_told_once_by_the_rank_that_failed_first(project, monkeypatch, failing):
    real = curry_train.step.train_step

    def planted(runtime):
        if runtime.step == 2 and runtime.mesh.rank == failing:
            raise ValueError("planted")
        return real(runtime)

    monkeypatch.setattr(curry_train.step, "train_step", planted)
    assert ended(ranks(project, "run.max_steps=1000"), within=30) == [1, 1]
    mine, other = output(project, failing), output(project, 1 - failing)
    assert mine.count("Traceback (most recent call last)") == 1
    assert f"rank {failing} failed first" in mine and "ValueError: planted" in mine
    assert "Traceback" not in other
    told = [line for line in other.splitlines() if line.startswith(f"rank {1 - failing} ")]
    assert len(told) == 1, other
    (folder,) = run_folders(project)
    failure = json.loads((folder / "failure.json").read_text())
    assert (failure["rank"], failure["type"]) == (failing, "ValueError")
    end = rows(folder, "journal.jsonl")[-1]
    assert end["status"] == "crashed" and "ValueError: planted" in end["reason"]


def test_a_bug_while_saving_on_one_rank_shows_where(project, monkeypatch):
    def planted(path, tensors):
        if path.name == "rank-00001.safetensors":
            raise KeyError("planted")
        return real(path, tensors)

    real = curry_train.checkpoint.storage.write_safetensors
    monkeypatch.setattr(curry_train.checkpoint.storage, "write_safetensors", planted)
    assert ended(ranks(project, "run.max_steps=1"), within=30) == [1, 1]
    both = output(project, 0) + output(project, 1)
    assert both.count("Traceback (most recent call last)") == 1 and "rank 1: " in both
    assert "in planted" in both and "KeyError: 'planted'" in both
    (folder,) = run_folders(project)
    assert "in planted" in json.loads((folder / "failure.json").read_text())["message"]
    assert not list((folder / "checkpoints").glob("step-*")), "nothing half written stays"


def test_a_crash_on_every_rank_is_one_traceback(project, monkeypatch):
    def planted(runtime):
        raise ValueError("planted on both")

    monkeypatch.setattr(curry_train.step, "train_step", planted)
    assert ended(ranks(project, "run.max_steps=5"), within=30) == [1, 1]
    both = output(project, 0) + output(project, 1)
    assert both.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_other_with_one_line(project, killed):
    pids = ranks(project, "run.max_steps=100000")
    folder = wait_for_step(project, 2)
    os.kill(pids[killed], signal.SIGKILL)
    codes = ended(pids, within=10)
    assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 1
    text = output(project, 1 - killed)
    assert "Traceback" not in text and text.count("lost another rank") == 1
    assert json.loads((folder / "failure.json").read_text())["lost_peer"] is True


def test_a_stuck_rank_is_ended_when_another_fails(project, monkeypatch):
    """As on a GPU, where a collective does not notice that its peer has gone."""
    real = curry_train.step.train_step

    def planted(runtime):
        if runtime.step == 1:
            if runtime.mesh.rank == 1:
                raise ValueError("planted")
            time.sleep(60)
        return real(runtime)

    monkeypatch.setattr(curry_train.step, "train_step", planted)
    assert ended(ranks(project, "run.max_steps=5"), within=12) == [1, 1]
    assert "rank 0 stops: another rank failed" in output(project, 0)
    end = rows(run_folders(project)[0], "journal.jsonl")[-1]
    assert (end["ev"], end["reason"]) == ("end", "rank 1: ValueError: planted")


def test_a_batch_that_does_not_divide_is_told_once(project):
    codes = ended(ranks(project, "data.global_batch_size=3", "run.max_steps=1"), within=30)
    assert codes == [2, 2]
    both = output(project, 0) + output(project, 1)
    assert both.count("data.global_batch_size=3") == 1
    assert not (project / "runs").exists()
