"""train.py under its real launchers: one run folder, the same losses, one message when it fails."""

import json
import os
import time

import pytest
from projects import SMALL, copy_project, losses, rows, run, run_folders, start, wait_for_step


@pytest.fixture
def project(tmp_path):
    return copy_project(tmp_path)


def test_every_launch_way_makes_one_run_folder_with_the_same_losses(project):
    for number, way in enumerate(("python", "fabric", "fabric2"), 1):
        code, out, err = run(project, way, *SMALL, "run.max_steps=3")
        assert code == 0, f"{way}: {out}\n{err}"
        assert len(run_folders(project)) == number, way
        assert out.count("run folder:") == 1, f"{way} told its folder once per rank"
        assert "Traceback" not in err
    # The last two at the same time: they must not collide on a port or a folder.
    pair = [start(project, way, *SMALL, "run.max_steps=3") for way in ("torchrun2", "python2")]
    for process in pair:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, out + err
        assert out.count("run folder:") == 1
    folders = run_folders(project)
    assert len(folders) == 5
    found = [losses(folder) for folder in folders]
    assert all(sorted(steps) == [1, 2, 3] for steps in found)
    # One process against one process is bitwise; two ranks add their gradients in another order.
    assert found[0] == found[1] and found[2] == found[3] == found[4]
    assert found[2] == pytest.approx(found[0], rel=1e-6)
    journals = [rows(folder, "journal.jsonl") for folder in folders]
    assert [events[0]["world"] for events in journals] == [1, 1, 2, 2, 2]
    assert all(events[-1]["status"] == "done" for events in journals)


@pytest.mark.skipif(not os.environ.get("CURRY_TRAIN_FULL"), reason="as test_ranks.py, by torchrun")
def test_a_crash_under_torchrun_tells_the_first_failing_rank_once(project):
    path = project / "curry_train" / "step.py"
    text = path.read_text()
    place = "    runtime.step += 1\n"
    assert place in text
    path.write_text(
        text.replace(
            place,
            f"{place}    if runtime.step == 3 and runtime.mesh.rank == 1:\n"
            "        raise ValueError('planted on rank one')\n",
        )
    )
    process = start(project, "torchrun2", *SMALL, "run.max_steps=1000")
    folder = wait_for_step(project, 2)
    failed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - failed < 15
    assert process.returncode != 0
    # torchrun ends with a traceback of its own, about the ranks it watched; ours comes before.
    ours = err.split("Traceback (most recent call last)")
    assert sum("in train_step" in part for part in ours) == 1, err
    assert err.count("rank 1 failed first") == 1
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["rank"] == 1 and failure["type"] == "ValueError"


def test_configuration_errors_come_all_at_once_before_any_run_folder(project):
    code, _, err = run(
        project, "python", "optim.lrr=1", "model=tyni", "data.seq_len=-1", "run.max_step=4"
    )
    assert code == 2
    for words in ("optim.lr", "tiny_moe", "data.seq_len=-1", "run.max_steps"):
        assert words in err
    assert not (project / "runs").exists()
