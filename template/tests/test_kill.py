"""SIGKILL at random moments of training and saving: nothing that was saved is ever lost.

Runs are forked from this process, which has imported everything, so that a kill costs a second.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from projects import SMALL, exit_code, fork_train, import_everything, losses, rows

from curry_train.checkpoint import dcp
from curry_train.tracking.journal import read_journal

KILLS = 20 if os.environ.get("CURRY_TRAIN_FULL") else 5
STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def everything_imported(tmp_path_factory):
    import_everything()
    os.chdir(tmp_path_factory.mktemp("work"))  # the corpus cache is relative


def start(folder: Path, *settings: str) -> int:
    """Start a run of STEPS steps whose folder lies in `folder`; returns the pid."""
    settings = (*SMALL, f"run.max_steps={STEPS}", f"run.dir={folder}", *settings)
    return fork_train(*settings, log=Path("log.txt"))


def run_whole(folder: Path, *settings: str) -> Path:
    assert exit_code(start(folder, *settings)) == 0
    return max(folder.iterdir())


def test_a_run_killed_again_and_again_ends_with_the_losses_of_an_undisturbed_one(tmp_path):
    whole = run_whole(tmp_path / "whole", "run.save_every=1", "run.keep=2")
    seconds = rows(whole, "journal.jsonl")
    length = (seconds[-1]["ts"] - seconds[0]["ts"]) / 1e9
    moments = random.Random(7)
    folder = tmp_path / "killed"
    settings = ("run.save_every=1", "run.keep=2", "run.resume=auto")
    kills = 0
    while kills < KILLS:
        pid = start(folder, *settings, f"run.async_save={('false', 'true')[kills % 2]}")
        time.sleep(moments.uniform(0.2, 0.6 * length))
        os.kill(pid, signal.SIGKILL)
        if exit_code(pid) != -signal.SIGKILL:
            break  # it had come to its end before
        kills += 1
        for run in folder.iterdir() if folder.exists() else []:
            check_what_a_kill_left(run)
    final = exit_code(start(folder, *settings))
    assert final == 0 and kills >= min(KILLS, 3)
    # A second one when a kill came after the end: auto does not go on in a run that is done.
    ends = [losses(found) for found in folder.iterdir() if STEPS in losses(found)]
    assert 1 <= len(ends) <= 2
    assert all(end == losses(whole) for end in ends)
    assert set(ends[0]) == set(range(1, STEPS + 1))


def check_what_a_kill_left(run: Path) -> None:
    """The newest complete checkpoint loads whole, and every kept line of the journal reads."""
    if (run / "journal.jsonl").exists():
        events = read_journal(run / "journal.jsonl")
        assert [event["seq"] for event in events] == list(range(len(events)))
        committed = [event for event in events if event["ev"] == "ckpt_commit"]
        checkpoint = dcp.latest(run / "checkpoints")
        if committed:
            assert checkpoint is not None
            step = dcp.read_manifest(checkpoint)["step"]
            assert step >= committed[-1]["step"], "a committed checkpoint was lost"
        if checkpoint is not None:
            manifest = dcp.read_manifest(checkpoint)
            tensors = {
                name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
                for name, entry in manifest["tensors"].items()
            }
            dcp.load(checkpoint, tensors, verify=True)
            assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_the_check_would_see_a_lost_checkpoint(tmp_path):
    run = run_whole(tmp_path, "run.save_every=10")
    check_what_a_kill_left(run)
    newest = dcp.latest(run / "checkpoints")
    (newest / "manifest.json").unlink()
    with pytest.raises(AssertionError, match="was lost"):
        check_what_a_kill_left(run)


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_planted_pickle_is_never_opened_by_a_resuming_run(tmp_path):
    import pickle

    run = run_whole(tmp_path / "runs", "run.save_every=10")
    newest = dcp.latest(run / "checkpoints")
    opened = tmp_path / "opened"
    for name in (".metadata", "meta.pt", "__0_0.distcp", "optimizer.pkl"):
        (newest / name).write_bytes(pickle.dumps(Payload(opened)))
    pickle.loads(pickle.dumps(Payload(opened)))
    assert opened.exists(), "the payload works"
    opened.unlink()
    code = exit_code(start(tmp_path / "more", f"run.resume={newest}"))
    assert code == 0 and not opened.exists()
