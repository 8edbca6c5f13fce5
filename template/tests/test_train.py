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


@pytest.mark.parametrize("name, way", [("SIGTERM", "fabric2"), ("SIGINT", "python")])
def test_a_stopped_run_resumes_with_bitwise_the_losses_of_an_undisturbed_one(project, name, way):
    length = "run.max_steps=40"
    process = start(project, way, *SMALL, length, "run.name=stopped")
    folder = wait_for_step(project, 5)
    asked = time.monotonic()
    # torchrun's agent hands SIGTERM to its ranks; SIGINT goes to the one process.
    os.kill(process.pid, getattr(signal, name))
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < 25, "the save must fit run.stop_grace"
    assert "Traceback (most recent call last)" not in err or way == "fabric2"
    end = last_event(folder)
    assert (end["ev"], end["status"], end["reason"]) == ("end", "preempted", name)
    events = [event["ev"] for event in rows(folder, "journal.jsonl")]
    assert events[-5:] == ["signal", "stop_requested", "ckpt_begin", "ckpt_commit", "end"]
    stopped_at = max(losses(folder))
    assert 5 <= stopped_at < 40

    code, out, err = run(project, way, *SMALL, length, "run.name=stopped", "run.resume=auto")
    assert code == 0, out + err
    assert run_folders(project) == [folder], "auto continues in the folder it found"
    assert rows(folder, "journal.jsonl")[-1]["status"] == "done"
    assert {row["attempt"] for row in rows(folder)} == {1, 2}
    run(project, way, *SMALL, length, "run.name=whole")
    whole = next(found for found in run_folders(project) if found.name.startswith("whole"))
    assert losses(folder) == losses(whole)


def test_a_second_interrupt_stops_at_once(project):
    process = start(project, "python", *SMALL, "run.max_steps=100000")
    folder = wait_for_step(project, 2)
    os.kill(process.pid, signal.SIGSTOP)  # both signals wait until it goes on: none is lost
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert last_event(folder)["status"] == "preempted"


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


def test_a_run_that_only_makes_nan_is_aborted_with_code_4(shared):
    code, out, err = run(
        shared, "python", *SMALL, "run.name=nan", "run.max_steps=50", "optim.lr=1e30",
        "optim.min_lr=0", "optim.warmup_steps=0", "optim.max_grad_norm=0",
    )  # fmt: skip
    assert code == 4, out + err
    folder = next(found for found in run_folders(shared) if found.name.startswith("nan"))
    end = last_event(folder)
    assert end["status"] == "aborted" and end["code"] == 4
    assert "run.max_nonfinite" in end["reason"]
    anomalies = [e for e in rows(folder, "journal.jsonl") if e["ev"] == "anomaly"]
    assert len(anomalies) == 3
    assert not list((folder / "checkpoints").glob("step-*")), "a ruined state is not saved"


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


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("empty.txt", b"", "empty"),
        ("absent.txt", None, "absent.txt"),
        ("binary.txt", b"text\x00\x01\xff" * 100, "binary.txt"),
    ],
)
def test_unusable_text_is_one_clear_line_and_code_2(shared, tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(shared, "python", f"data.input={path}", *SMALL)
    assert code == 2 and words in err
    assert len(err.strip().splitlines()) == 1, err


def test_a_text_with_crlf_bom_and_emoji_trains(shared, tmp_path):
    path = tmp_path / "my book.txt"
    words = "na\u00efve caf\u00e9 \U0001f680\U0001f9d1\u200d\U0001f680 and more words"
    lines = "".join(f"Chapter {n}: {words}\r\n\r\n" for n in range(3000))
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    settings = [s for s in SMALL if not s.startswith("data.val_fraction")]
    code, out, err = run(
        shared, "python", f"data.input={path}", *settings, "run.max_steps=20", "run.name=book"
    )
    assert code == 0, out + err
    folder = next(found for found in run_folders(shared) if found.name.startswith("book"))
    found = losses(folder)
    assert found[20] < found[1] - 1.0


def test_weights_alone_can_start_a_run(shared):
    settings = (*SMALL, "run.max_steps=2", "optim.warmup_steps=0")
    code, out, err = run(shared, "python", *settings, "run.name=first")
    assert code == 0, out + err
    first = next(found for found in run_folders(shared) if found.name.startswith("first"))
    checkpoint = first / "checkpoints" / "step-00000002"
    code, out, err = run(
        shared, "python", *settings, "run.name=second", f"run.init_from={checkpoint}"
    )
    assert code == 0, out + err
    second = next(found for found in run_folders(shared) if found.name.startswith("second"))
    assert losses(second)[1] < losses(first)[1] - 0.1
    assert rows(second)[0]["step"] == 1


def test_dry_run_prints_the_plan_and_trains_nothing(shared):
    before = run_folders(shared)
    code, out, err = run(shared, "python", "dry_run=true", "devices=2")
    assert code == 0, err
    assert out.splitlines()[0] == "parameters: 1347200 (active 806528)"
    assert "mesh of 2 ranks" in out and "dp_shard 2" in out
    assert run_folders(shared) == before


def test_a_damaged_checkpoint_is_named_and_nothing_is_deleted(shared):
    code, out, err = run(shared, "python", *SMALL, "run.max_steps=1", "run.name=damaged")
    assert code == 0, out + err
    folder = next(found for found in run_folders(shared) if found.name.startswith("damaged"))
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    victim = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    code, out, err = run(
        shared, "python", *SMALL, "run.max_steps=2", "run.name=after", f"run.resume={checkpoint}"
    )
    assert code == 1 and victim.name in err and "Traceback" not in err
    assert victim.exists()
