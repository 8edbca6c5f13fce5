"""One process of train.py: stops, aborts, bad input, own text, weights of another run."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from projects import (
    SMALL,
    copy_project,
    exit_code,
    fork_train,
    forked,
    import_everything,
    losses,
    rows,
    run,
    run_folders,
    wait_for_step,
)

from curry_train.data.loader import validation_batches


@pytest.fixture(scope="module", autouse=True)
def everything_imported():
    import_everything()


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """An empty working folder: runs and caches are relative to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses of a run of 40 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    settings = (*SMALL, "run.max_steps=40", f"run.dir={folder}", f"data.cache_dir={folder}/cache")
    code, out = forked(*settings, log=folder / "log.txt")
    assert code == 0, out
    return losses(next(path for path in folder.iterdir() if path.name.startswith("quickstart")))


def the_run(project: Path, name: str = "quickstart") -> Path:
    (folder,) = (path for path in run_folders(project) if path.name.startswith(name))
    return folder


def train(project: Path, *settings: str) -> tuple[int, str]:
    return forked(*SMALL, *settings, log=project / "log.txt")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_stopped_run_resumes_with_bitwise_the_losses_of_an_undisturbed_one(project, whole, name):
    log = project / "log.txt"
    pid = fork_train(*SMALL, "run.max_steps=40", log=log)
    folder = wait_for_step(project, 3)
    asked = time.monotonic()
    os.kill(pid, getattr(signal, name))
    assert exit_code(pid) == 0
    assert time.monotonic() - asked < 25, "the save must fit run.stop_grace"
    assert "Traceback" not in log.read_text()
    events = rows(folder, "journal.jsonl")
    assert [event["ev"] for event in events[-5:]] == [
        "signal", "stop_requested", "ckpt_begin", "ckpt_commit", "end",
    ]  # fmt: skip
    assert (events[-1]["status"], events[-1]["reason"]) == ("preempted", name)
    assert 3 <= max(losses(folder)) < 40

    code, out = train(project, "run.max_steps=40", "run.resume=auto")
    assert code == 0, out
    assert the_run(project) == folder, "auto continues in the folder it found"
    assert {row["attempt"] for row in rows(folder)} == {1, 2}
    assert losses(folder) == whole


def test_sigterm_does_not_wait_for_a_long_validation(project, monkeypatch):
    def endless(corpus, data, **settings):
        while True:
            yield from validation_batches(corpus, data, **settings)

    monkeypatch.setattr("curry_train.evaluate.validation_batches", endless)
    log = project / "log.txt"
    pid = fork_train(*SMALL, "run.max_steps=40", "run.eval_every=3", log=log)
    folder = wait_for_step(project, 2)
    time.sleep(0.3)  # into the validation of step 3
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    if not done[0]:
        os.kill(pid, signal.SIGKILL)
    assert done == (pid, 0), log.read_text()
    events = rows(folder, "journal.jsonl")
    assert events[-1]["status"] == "preempted" and events[-2]["ev"] == "ckpt_commit"
    assert not [event for event in events if event["ev"] == "eval"]


def test_a_second_interrupt_stops_at_once(project):
    log = project / "log.txt"
    pid = fork_train(*SMALL, "run.max_steps=100000", log=log)
    folder = wait_for_step(project, 2)
    os.kill(pid, signal.SIGINT)
    # The handler has run once the step in flight has ended and the loop says so; a second one
    # sent earlier would be the same pending signal.
    deadline = time.monotonic() + 5
    while "SIGINT: stopping" not in log.read_text() and time.monotonic() < deadline:
        os.kill(pid, signal.SIGINT)
        time.sleep(0.002)
    assert exit_code(pid) == 0
    assert rows(folder, "journal.jsonl")[-1]["status"] == "preempted"


def test_a_full_disk_under_the_log_file_does_not_end_a_run(project):
    pid = fork_train(*SMALL, "run.max_steps=2", "run.sample_tokens=5", log=Path("/dev/full"))
    assert exit_code(pid) == 0
    assert rows(the_run(project), "journal.jsonl")[-1]["status"] == "done"


def test_overflows_of_fp16_lower_the_loss_scale_and_are_no_reason_to_abort(project, monkeypatch):
    def start_high(self, precision):
        self.active, self.value, self.good_steps = True, 2.0**20, 0

    monkeypatch.setattr("curry_train.optim.LossScale.__init__", start_high)
    code, out = train(project, "run.max_steps=30", "precision=fp16", "data.seq_len=32")
    assert code == 0, out
    events = rows(the_run(project), "journal.jsonl")
    halved = [event["step"] for event in events if event["ev"] == "anomaly"]
    assert len(halved) > 3, "more in a row than run.max_nonfinite"
    found = losses(the_run(project))
    assert found[30] < found[1] - 0.1


def test_a_run_that_only_makes_nan_is_aborted_with_code_4(project):
    code, out = train(
        project, "run.max_steps=50", "optim.lr=1e30", "optim.warmup_steps=0",
        "optim.max_grad_norm=0",
    )  # fmt: skip
    assert code == 4, out
    events = rows(the_run(project), "journal.jsonl")
    assert (events[-1]["status"], events[-1]["code"]) == ("aborted", 4)
    assert "run.max_nonfinite" in events[-1]["reason"]
    assert [event["ev"] for event in events].count("anomaly") == 3
    saved = list((the_run(project) / "checkpoints").glob("step-*"))
    assert not saved, "a ruined state is not saved"


def test_nan_under_fp16_is_still_aborted(project):
    code, out = train(
        project, "run.max_steps=10", "optim.lr=1e30", "optim.warmup_steps=0",
        "optim.max_grad_norm=0", "precision=fp16",
    )  # fmt: skip
    assert code == 4, out


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("empty.txt", b"", "empty"),
        ("absent.txt", None, "absent.txt"),
        ("binary.txt", b"text\x00\x01\xff" * 100, "binary.txt"),
        ("tiny.txt", b"too short to hold out anything", "tiny.txt"),
    ],
)
def test_unusable_text_is_one_clear_line_and_code_2(project, name, content, words):
    if content is not None:
        (project / name).write_bytes(content)
    code, out = train(project, f"data.input={name}")
    assert code == 2 and not (project / "runs").exists()
    told = out.splitlines()
    assert len(told) == 1, out
    assert words in told[0] or name == "tiny.txt"


def test_a_text_with_crlf_bom_and_emoji_trains(project):
    words = "na\u00efve caf\u00e9 \U0001f680\U0001f9d1\u200d\U0001f680 and more words"
    lines = "".join(f"Chapter {n}: {words}\r\n\r\n" for n in range(3000))
    (project / "my book=1.txt").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    code, out = train(
        project, "data.input=my book=1.txt", "data.val_fraction=0.1", "run.max_steps=20"
    )
    assert code == 0, out
    found = losses(the_run(project))
    assert found[20] < found[1] - 1.0


def test_a_tokenizer_trained_on_the_spot_needs_its_vocabulary(project):
    code, out = train(project, "data.tokenizer=bpe", "run.max_steps=2")
    assert code == 2 and "set model.vocab_size=1024" in out
    code, out = train(
        project, "data.tokenizer=bpe", "model.vocab_size=1024", "run.max_steps=2",
        "run.sample_tokens=5",
    )  # fmt: skip
    assert code == 0 and "sample:" in out, out
    scores = rows(the_run(project))[-1]
    assert scores["val/bpb"] < scores["val/loss"], "a token covers several bytes"
    (checkpoint,) = (the_run(project) / "checkpoints").glob("step-*")
    assert (checkpoint / "tokenizer.json").exists()


def test_weights_alone_can_start_a_run(project):
    settings = ("run.max_steps=2", "optim.warmup_steps=0")
    assert train(project, *settings, "run.name=first")[0] == 0
    first = the_run(project, "first")
    checkpoint = first / "checkpoints" / "step-00000002"
    code, out = train(project, *settings, "run.name=second", f"run.init_from={checkpoint}")
    assert code == 0, out
    second = the_run(project, "second")
    assert losses(second)[1] < losses(first)[1] - 0.1
    assert rows(second)[0]["step"] == 1


def test_more_steps_can_be_added_to_a_finished_run(project):
    assert train(project, "run.max_steps=2")[0] == 0
    code, out = train(project, "run.max_steps=4", f"run.resume={the_run(project)}")
    assert code == 0, out
    assert sorted(losses(the_run(project))) == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_named_and_nothing_is_deleted(project):
    assert train(project, "run.max_steps=1")[0] == 0
    (checkpoint,) = (the_run(project) / "checkpoints").glob("step-*")
    victim = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    code, out = train(project, "run.max_steps=2", "run.name=after", f"run.resume={checkpoint}")
    assert code == 1 and victim.name in out and "Traceback" not in out
    assert victim.exists() and "an older checkpoint" not in out
    assert victim.name in (the_run(project, "after") / "failure.json").read_text()


def test_a_damaged_newest_checkpoint_offers_the_older_one_and_auto_stops_there(project):
    settings = ("run.max_steps=4", "run.save_every=1")
    assert train(project, *settings)[0] == 0
    folder = the_run(project)
    newest = folder / "checkpoints" / "step-00000004"
    victim = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    code, out = train(project, "run.max_steps=5", f"run.resume={folder}")
    older = folder / "checkpoints" / "step-00000003"
    assert code == 1 and f"run.resume={older}" in out, out
    code, out = train(project, "run.max_steps=5", f"run.resume={older}", "run.name=again")
    assert code == 0, out
    assert sorted(losses(the_run(project, "again"))) == [4, 5]


def test_a_stop_longer_than_its_grace_is_told(project):
    pid = fork_train(
        *SMALL, "run.max_steps=1000", "run.stop_grace=0.000001", log=project / "log.txt"
    )
    wait_for_step(project, 1)
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 0
    assert "longer than run.stop_grace=1e-06" in (project / "log.txt").read_text()


def test_fp16_starts_its_own_loss_scale_from_a_float32_checkpoint(project):
    assert train(project, "run.max_steps=1", "run.name=first")[0] == 0
    (checkpoint,) = (the_run(project, "first") / "checkpoints").glob("step-*")
    code, out = train(
        project, "run.max_steps=2", "run.name=half", "precision=fp16", f"run.resume={checkpoint}"
    )
    assert code == 0, out
    (saved,) = (the_run(project, "half") / "checkpoints").glob("step-*")
    assert json.loads((saved / "manifest.json").read_text())["loss_scale"][0] == 128.0


@pytest.mark.parametrize("key", ["init_from", "resume"])
def test_what_no_run_can_start_from_is_refused_before_there_is_a_run_folder(project, key):
    assert train(project, "run.max_steps=1")[0] == 0
    (checkpoint,) = (the_run(project) / "checkpoints").glob("step-*")
    wrong = checkpoint.parent if key == "init_from" else checkpoint
    code, out = train(project, "run.name=after", f"run.{key}={wrong}", "precision=fp64")
    assert code == 2 and ("precision" if key == "resume" else "step-00000001") in out
    assert the_run(project)


def test_dry_run_prints_the_plan_and_trains_nothing(project):
    code, out = forked("dry_run=true", "devices=2", log=project / "log.txt")
    assert code == 0, out
    assert out.splitlines()[0] == "parameters: 1347200 (active 806528)"
    assert "mesh of 2 ranks" in out and "dp_shard 2" in out
    assert not (project / "runs").exists()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp64"])
def test_every_precision_trains_close_to_float32(project, whole, precision):
    code, out = train(project, "run.max_steps=3", f"precision={precision}")
    assert code == 0, out
    found = losses(the_run(project))
    assert [found[step] for step in (1, 2, 3)] == pytest.approx(
        [whole[step] for step in (1, 2, 3)], rel=2e-3
    )


@pytest.mark.skipif(not os.environ.get("CURRY_TRAIN_FULL"), reason="compiles for a minute (--full)")
def test_compiled_blocks_give_the_same_losses(project, whole):
    # In a process of its own: the compiler stumbles over the torch.empty of these tests.
    copy = copy_project(project)
    code, out, err = run(copy, "python", *SMALL, "run.max_steps=3", "compile=true", timeout=400)
    assert code == 0, out + err
    found = losses(the_run(copy))
    assert [found[step] for step in (1, 2, 3)] == pytest.approx(
        [whole[step] for step in (1, 2, 3)], rel=1e-5
    )
