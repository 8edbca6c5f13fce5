"""train.py as a user starts it: every launch way, stops, crashes, resumes and bad input."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from projects import (
    SMALL,
    copy_project,
    losses,
    rows,
    run,
    run_folders,
    start,
    wait_for_step,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A project for tests that only add run folders."""
    return copy_project(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def project(tmp_path):
    return copy_project(tmp_path)


def last_event(folder):
    return rows(folder, "journal.jsonl")[-1]


def test_every_launch_way_makes_one_run_folder_with_the_same_losses(project):
    for number, way in enumerate(("python", "fabric", "fabric2", "torchrun2", "python2"), 1):
        code, out, err = run(project, way, *SMALL, "run.max_steps=3")
        assert code == 0, f"{way}: {out}\n{err}"
        assert len(run_folders(project)) == number, way
        assert out.count("run folder:") == 1, f"{way} told its folder once per rank"
        assert "Traceback" not in err
    found = [losses(folder) for folder in run_folders(project)]
    assert all(sorted(steps) == [1, 2, 3] for steps in found)
    # One process against one process is bitwise; two ranks add their gradients in another order.
    assert found[0] == found[1] and found[2] == found[3] == found[4]
    assert found[2] == pytest.approx(found[0], rel=1e-6)
    starts = [rows(folder, "journal.jsonl")[0] for folder in run_folders(project)]
    assert [event["world"] for event in starts] == [1, 1, 2, 2, 2]
    assert all(last_event(folder)["status"] == "done" for folder in run_folders(project))


def test_two_runs_at_once_do_not_collide(project):
    pair = [start(project, way, *SMALL, "run.max_steps=3") for way in ("python2", "torchrun2")]
    pair.append(start(project, "python2", *SMALL, "run.max_steps=3"))
    for process in pair:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, out + err
    assert [sorted(losses(folder)) for folder in run_folders(project)] == [[1, 2, 3]] * 3


def test_two_stopped_ranks_resume_with_bitwise_the_losses_of_an_undisturbed_run(project):
    name, way, length = "SIGTERM", "fabric2", "run.max_steps=20"
    process = start(project, way, *SMALL, length, "run.name=stopped")
    folder = wait_for_step(project, 5)
    asked = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)  # torchrun's agent hands it to its ranks
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < 25, "the save must fit run.stop_grace"
    end = last_event(folder)
    assert (end["ev"], end["status"], end["reason"]) == ("end", "preempted", name)
    events = [event["ev"] for event in rows(folder, "journal.jsonl")]
    assert events[-5:] == ["signal", "stop_requested", "ckpt_begin", "ckpt_commit", "end"]
    stopped_at = max(losses(folder))
    assert 5 <= stopped_at < 20

    code, out, err = run(project, way, *SMALL, length, "run.name=stopped", "run.resume=auto")
    assert code == 0, out + err
    assert run_folders(project) == [folder], "auto continues in the folder it found"
    assert rows(folder, "journal.jsonl")[-1]["status"] == "done"
    assert {row["attempt"] for row in rows(folder)} == {1, 2}
    run(project, way, *SMALL, length, "run.name=whole")
    whole = next(found for found in run_folders(project) if found.name.startswith("whole"))
    assert losses(folder) == losses(whole)


def plant(project, module, old, new):
    """Change one place of the project's own code, as a user's mistake would."""
    path = project / "curry_train" / module
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("way", ["python2", "torchrun2"])
def test_a_crash_tells_the_first_failing_rank_once_and_all_ranks_end(project, way):
    plant(
        project, "step.py", "    runtime.step += 1\n",
        "    runtime.step += 1\n    if runtime.step == 3 and runtime.mesh.rank == 1:\n"
        "        raise ValueError('planted on rank one')\n",
    )  # fmt: skip
    began = time.monotonic()
    process = start(project, way, *SMALL, "run.max_steps=1000")
    folder = wait_for_step(project, 2)
    failed = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - failed < 15, f"took {time.monotonic() - began:.0f} s in all"
    assert process.returncode != 0
    ours = err.split("ChildFailedError")[0]
    assert "rank 1 failed first" in ours and ours.count("planted on rank one") >= 1
    tracebacks = [part for part in ours.split("Traceback (most recent call last)")[1:]
                  if "train_step" in part]  # fmt: skip
    assert len(tracebacks) == 1, err
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["rank"] == 1 and failure["type"] == "ValueError"
    assert "planted on rank one" in failure["traceback"]


def test_a_killed_rank_ends_the_others_with_one_line_each(project):
    process = start(project, "python2", *SMALL, "run.max_steps=100000")
    folder = wait_for_step(project, 2)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = listed.read_text().split() if listed.exists() else []
    if not children:
        pytest.skip("this system does not list the children of a process")
    killed = time.monotonic()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - killed < 10
    assert process.returncode != 0
    assert "Traceback" not in err and "rank 0 lost another rank" in err
    assert json.loads((folder / "failure.json").read_text())["lost_peer"] is True


@pytest.mark.parametrize("way", ["python", "torchrun2"])
def test_configuration_errors_come_all_at_once_before_any_run_folder(shared, way):
    before = run_folders(shared) if (shared / "runs").exists() else []
    code, out, err = run(shared, way, "optim.lrr=1", "model=tyni", "data.seq_len=-1")
    assert code == 2 if way == "python" else code != 0
    for words in ("optim.lr", "tiny_moe", "data.seq_len=-1"):
        assert err.count(words) >= 1
    assert err.count("data.seq_len=-1") == 1, "rank 0 alone tells the problems"
    after = run_folders(shared) if (shared / "runs").exists() else []
    assert after == before


def test_a_world_that_does_not_fit_the_batch_is_refused_before_training(shared):
    code, out, err = run(shared, "torchrun2", "data.global_batch_size=3", "run.max_steps=1")
    assert code != 0 and err.count("data.global_batch_size=3") == 1
