"""The run folder: one writer, one truth, and what a resumed run may change."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from curry_train.checkpoint import dcp, manifest_sha256
from curry_train.config import Config, ConfigError, ParallelConfig, config_hash, to_dict
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.testing import run_ranks
from curry_train.tracking import provenance
from curry_train.tracking.journal import read_journal, read_lines, read_metrics
from curry_train.tracking.lease import Lease, live_writer
from curry_train.tracking.resume import Resume, find_resume, resume_hash, run_status
from curry_train.tracking.run_folder import Run

TEMPLATE = Path(__file__).resolve().parents[1]
DATA = "d" * 64


def setup(root: Path, **changes: Any) -> Config:
    """Return a configuration; `run__name="x"` sets run.name."""
    changes = {"run__dir": str(root / "runs"), "tracking__tensorboard": False, **changes}
    config = Config()
    for key, value in changes.items():
        group, _, name = key.partition("__")
        if name:
            value = dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{group: value})
    return config


def start(config: Config, data_hash: str = DATA, **options: Any) -> Run:
    options = {"argv": ["optim.lr=1"], "project": Path(config.run.dir).parent, **options}
    return Run.open(config, Mesh.single(), data_hash=data_hash, **options)


def save(run: Run, config: Config, step: int, data_hash: str = DATA) -> Path:
    return dcp.save(
        run.dir / "checkpoints",
        step=step,
        tensors={"w": torch.ones(2), "optim.step": torch.tensor(1.0)},
        rank_tensors={},
        meta={
            "samples_consumed": 8 * step,
            "tokens": 1024 * step,
            "data_hash": data_hash,
            "config_hash": config_hash(config),
            "seq_len": config.data.seq_len,
            "model": to_dict(config)["model"],
            "mesh": Mesh.single().sizes,
        },
        files={},
        mesh=Mesh.single(),
        keep=0,
    )


def stopped_run(config: Config, status: str | None = "preempted", step: int = 5) -> Run:
    """A run that saved once and ended; status None: it was killed."""
    run = start(config)
    if step:
        save(run, config, step)
    if status is None:
        run._out.lease.close()
    else:
        run.finish(status)
    return run


def events(run: Run, ev: str | None = None) -> list[dict[str, Any]]:
    return [e for e in read_journal(run.dir / "journal.jsonl") if ev in (None, e["ev"])]


def refusal(function: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args, **options)
    return str(caught.value)


def ages(folder: Path, stamp: str) -> Path:
    """Rename a run folder to an older stamp."""
    name = re.sub(r"\d{8}T\d{6}Z", stamp, folder.name)
    return folder.rename(folder.with_name(name))


# The folder and its files.


def test_a_fresh_run_has_the_promised_folder_and_files(tmp_path):
    config = setup(tmp_path, run__name="trial.1")
    run = start(config, argv=["optim.lr=0.1", "wandb.api_key=pl4nted"])
    assert re.fullmatch(r"trial\.1-\d{8}T\d{6}Z-[0-9a-f]{6}", run.dir.name)
    assert (run.attempt, run.parent, run.checkpoint, run.message) == (1, None, None, "")
    names = {entry.name for entry in run.dir.iterdir()}
    texts = {"config.yaml", "overrides.txt", "environment.txt"}
    assert names == texts | {"journal.jsonl", "metrics.jsonl", "checkpoints", "lease.json"}
    assert yaml.safe_load((run.dir / "config.yaml").read_text()) == to_dict(config)
    assert (run.dir / "overrides.txt").read_text() == "optim.lr=0.1\nwandb.api_key=***\n"
    assert f"torch=={torch.__version__.split('+')[0]}" in (run.dir / "environment.txt").read_text()
    (event,) = events(run)
    wanted = {
        "argv": ["optim.lr=0.1", "wandb.api_key=***"],
        "config_hash": config_hash(config),
        "resume_hash": resume_hash(config, DATA),
        "data_hash": DATA,
        "git_sha": None,
        "git_dirty": None,
        "world": 1,
        "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1},
        "seeds": {"seed": 0},
        "parent": None,
        "run": run.dir.name,
        "step": 0,
    }
    assert {key: event[key] for key in wanted} == wanted
    assert len(event["hosts"]) == 1 and re.fullmatch("[0-9a-f]{64}", event["packages_hash"])
    run.finish("done")
    assert live_writer(run.dir) is None


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    runs = [start(setup(tmp_path)) for _ in range(3)]
    assert len({run.dir for run in runs}) == 3


def test_a_name_that_leaves_the_folder_is_refused(tmp_path):
    assert "run.name='../x'; allowed" in refusal(start, setup(tmp_path, run__name="../x"))
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "runs").write_text("a file")
    assert "set run.dir elsewhere" in refusal(start, setup(tmp_path))


def test_rows_carry_step_attempt_tokens_and_time(tmp_path):
    run = start(setup(tmp_path))
    row = {"tokens": 1024, "loss": 2.5, "aux_loss": None, "lr": 1e-3, "grad_norm": math.inf}
    run.log(1, row)
    run.log(1, {"val/loss": torch.tensor(2.0), "val/bpb": math.nan, "step": 99})
    train, val = read_lines(run.dir / "metrics.jsonl")
    assert list(train) == ["step", "attempt", "tokens", "time", "loss", "lr", "grad_norm"]
    assert (train["step"], train["attempt"], train["tokens"]) == (1, 1, 1024)
    assert abs(train["time"] - time.time()) < 60 and train["grad_norm"] == "Infinity"
    assert (val["step"], val["val/loss"], val["val/bpb"]) == (1, 2.0, "NaN")
    (joined,) = read_metrics(run.dir / "metrics.jsonl")
    assert joined["loss"] == 2.5 and joined["val/loss"] == 2.0


def test_logging_never_raises_and_counts_what_was_lost(tmp_path):
    run = start(setup(tmp_path))
    os.close(run._out.metrics._descriptor)
    with pytest.warns(UserWarning, match="metrics.jsonl: a line was not written") as seen:
        for step in (1, 2, 3):
            run.log(step, {"loss": 1.0})
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run._out.metrics.close = lambda: None
        run.finish("done")
    assert events(run, "end")[0]["dropped"] == 3


def test_the_end_says_status_reason_and_code_once(tmp_path):
    run = start(setup(tmp_path))
    run.log(7, {"loss": 1.0, "tokens": 700})
    with pytest.raises(ValueError, match="status 'good' is unknown; allowed: done, preempted"):
        run.finish("good")
    run.finish("aborted", "loss not finite", 4)
    run.finish("done")
    run.log(8, {"loss": 1.0})
    run.event("note")
    (end,) = events(run, "end")
    assert (end["status"], end["reason"], end["code"]) == ("aborted", "loss not finite", 4)
    assert (end["step"], end["tokens"]) == (7, 700)
    assert len(read_lines(run.dir / "metrics.jsonl")) == 1


def test_a_sample_is_kept_in_the_journal(tmp_path):
    run = start(setup(tmp_path))
    run.sample(9, "Once \ud800 upon\n")
    note = events(run, "note")[0]
    assert (note["step"], note["sample"]) == (9, "Once \ud800 upon\n")


# Code, packages, secrets.


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_code_that_differs_from_the_commit_is_kept_as_a_bounded_diff(tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    git(project, "init", "-q")
    (project / ".gitignore").write_text("runs/\n")
    config = setup(project)
    run = start(config)
    assert events(run, "start")[0]["git_sha"] is None, "a repository without a commit"
    (project / "model.py").write_text("width = 1\n")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "one")
    run = start(config)
    event = events(run, "start")[0]
    assert event["git_sha"] == git(project, "rev-parse", "HEAD").strip()
    assert event["git_dirty"] is False and (run.dir / "code.diff").read_text() == ""
    (project / "model.py").write_text('width = 2\nurl = "https://me:pl4nted@host"\n')
    (project / "new.py").write_text("")
    run = start(config)
    event = events(run, "start")[0]
    assert event["git_dirty"] is True and event["git_untracked"] == ["new.py"]
    diff = (run.dir / "code.diff").read_text()
    assert "-width = 1\n+width = 2" in diff and "pl4nted" not in diff
    monkeypatch.setattr(provenance, "DIFF_LIMIT", 1000)
    (project / "model.py").write_text("x" * 5000)
    run = start(config)
    diff = (run.dir / "code.diff").read_text()
    assert len(diff) < 1100 and diff.endswith("# cut after 1000 characters\n")


def test_without_git_a_run_starts_and_says_nothing_of_code(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    run = start(setup(tmp_path))
    assert not (run.dir / "code.diff").exists()
    assert events(run, "start")[0]["git_sha"] is None


def test_no_planted_secret_lies_anywhere_in_the_folder(tmp_path, monkeypatch):
    secret = "pl4nted-S3cret"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_VALUE", "DATABASE_URL"):
        monkeypatch.setenv(name, f"postgres://u:{secret}@host" if "URL" in name else secret)
    monkeypatch.setenv("MASTER_ADDR", f"http://u:{secret}@host")
    url = f"https://user:{secret}@host/text?token={secret}"
    config = setup(tmp_path, data__input=url)
    run = start(config, argv=[f"data.input={url}", "--token", secret, f"x.password={secret}"])
    run.fail(rank=0, error=RuntimeError(f"GET {url} failed"), traceback_text=f"key={secret}")
    run.finish("crashed", "x", 1)
    files = [path for path in run.dir.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for path in files:
        assert secret not in path.read_text(), path.name
    assert yaml.safe_load((run.dir / "config.yaml").read_text())["data"]["input"].startswith(
        "https"
    )


# One live writer.


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path):
    config = setup(tmp_path)
    run = start(config)
    save(run, config, 1)
    with pytest.raises(ConfigError, match=f"being written by process {os.getpid()}"):
        Lease(run.dir)
    again = setup(tmp_path, run__resume=str(run.dir))
    assert "being written by process" in refusal(start, again)
    assert "being written by process" in refusal(start, setup(tmp_path, run__resume="auto"))
    assert run_status(run.dir) == "running"
    assert live_writer(run.dir) == f"process {os.getpid()} on host {socket.gethostname()}"
    run.finish("preempted")
    assert start(again).attempt == 2


HOLDER = """
    import sys
    from pathlib import Path
    from curry_train.tracking.lease import Lease
    lease = Lease(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_lease_ends_with_its_process_however_it_dies(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TEMPLATE)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen(command, env=environment, **pipes)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert live_writer(tmp_path) == f"process {holder.pid} on host {socket.gethostname()}"
    assert f"process {holder.pid}" in refusal(Lease, tmp_path)
    holder.send_signal(signal.SIGSTOP)
    assert f"process {holder.pid}" in refusal(Lease, tmp_path), "stopped is not dead"
    holder.kill()
    holder.wait()
    assert live_writer(tmp_path) is None
    lease = Lease(tmp_path)
    assert live_writer(tmp_path) == f"process {os.getpid()} on host {socket.gethostname()}"
    lease.close()
    assert live_writer(tmp_path) is None


def test_looking_for_a_writer_takes_the_lease_from_nobody(tmp_path):
    Lease(tmp_path).close()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            live_writer(tmp_path)
            time.sleep(0.001)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(20):
            Lease(tmp_path).close()
    finally:
        stop.set()
        looker.join()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_damaged_lease_holds_nobody_up_and_the_lock_still_counts(tmp_path, content):
    (tmp_path / "lease.json").write_text(content)
    lease = Lease(tmp_path)
    (tmp_path / "lease.json").write_text(content)
    assert "being written by another process" in refusal(Lease, tmp_path)
    lease.close()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"has no locks \(No locks available\)"):
        Lease(tmp_path).close()


RACE = """
    import sys, time
    from pathlib import Path
    from curry_train.config import ConfigError
    from curry_train.tracking.lease import Lease
    folder, begin = Path(sys.argv[1]), float(sys.argv[2])
    time.sleep(max(begin - time.time(), 0))
    try:
        lease = Lease(folder)
        print("won", flush=True)
    except ConfigError:
        print("lost", flush=True)
    sys.stdin.read()
"""


def test_of_many_starters_exactly_one_takes_a_stale_lease(tmp_path):
    stale = {"host": socket.gethostname(), "pid": os.getpid()}
    (tmp_path / "lease.json").write_text(json.dumps(stale))
    command = [sys.executable, "-c", textwrap.dedent(RACE), str(tmp_path), str(time.time() + 2)]
    environment = {**os.environ, "PYTHONPATH": str(TEMPLATE)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    starters = [subprocess.Popen(command, env=environment, **pipes) for _ in range(6)]
    answers = [s.stdout.readline().strip() for s in starters if s.stdout]
    for starter in starters:
        starter.communicate()
    assert sorted(answers) == ["lost"] * 5 + ["won"]


def test_the_status_tells_how_a_run_ended(tmp_path):
    config = setup(tmp_path)
    for status in ("done", "preempted", "aborted", "crashed"):
        assert run_status(stopped_run(config, status, step=0).dir) == status
    assert run_status(stopped_run(config, None, step=0).dir) == "killed"
    assert run_status(tmp_path / "absent") == "unknown"


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_run_folder import setup, start, save
    config = setup(Path(sys.argv[1]))
    run = start(config)
    save(run, config, 3)
    run.log(1, {"loss": 2.0})
    run.log(4, {"loss": 1.0})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_is_continued_by_auto(tmp_path):
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(KILLED),
        str(tmp_path),
        str(TEMPLATE / "tests"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(TEMPLATE)}
    assert subprocess.run(command, env=environment).returncode == -9
    (folder,) = (tmp_path / "runs").iterdir()
    assert run_status(folder) == "killed"
    with (folder / "journal.jsonl").open("a") as journal, (folder / "metrics.jsonl").open("a") as m:
        journal.write('{"v": 1, "torn')
        m.write('{"step": 5')
    run = start(setup(tmp_path, run__resume="auto"))
    assert run.dir == folder and run.attempt == 2
    assert run.checkpoint == folder / "checkpoints" / "step-00000003"
    run.log(4, {"loss": 0.5})
    torn = [event["torn_tail"] for event in events(run, "note")]
    assert torn == [{"file": "journal.jsonl", "bytes": 14}, {"file": "metrics.jsonl", "bytes": 10}]
    resumed = events(run, "resume")[0]
    assert (resumed["step"], resumed["tokens"], resumed["from_attempt"]) == (3, 3072, 1)
    assert resumed["samples_consumed"] == 24 and resumed["old_mesh"] == resumed["mesh"]
    rows = read_metrics(folder / "metrics.jsonl")
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows] == [
        (1, 1, 2.0),
        (4, 2, 0.5),
    ]


# Where a run continues.


def test_auto_starts_fresh_and_says_why(tmp_path, capsys):
    config = setup(tmp_path, run__resume="auto")
    run = start(config)
    assert "starting fresh (no folder of quickstart" in run.message
    assert run.message in capsys.readouterr().out
    run.finish("crashed")
    assert "has no complete checkpoint" in find_resume(config, DATA).message
    stopped_run(config, "done")
    assert "is done" in find_resume(config, DATA).message


def test_auto_takes_the_newest_folder_that_fits(tmp_path):
    config = setup(tmp_path, run__resume="auto")
    never = setup(tmp_path)
    older = ages(stopped_run(never).dir, "20200101T000000Z")
    newer = ages(stopped_run(never, None, step=6).dir, "20210101T000000Z")
    ages(stopped_run(never, "done").dir, "20220101T000000Z")
    ages(stopped_run(never, step=0).dir, "20230101T000000Z")
    ages(stopped_run(setup(tmp_path, seed=1)).dir, "20240101T000000Z")
    ages(stopped_run(setup(tmp_path, run__name="quickstart-b")).dir, "20240102T000000Z")
    (tmp_path / "runs" / "quickstart-20990101T000000Z-abcdef").mkdir()
    found = find_resume(config, DATA)
    assert found.folder == newer and found.checkpoint == newer / "checkpoints" / "step-00000006"
    assert found.message == f"continuing {newer.name} from step-00000006"
    (newer / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    assert find_resume(config, DATA).folder == older


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 1}, "differs in seed"),
        ({"precision": "bf16"}, "differs in precision"),
        ({"model__hidden_size": 64}, "differs in model.hidden_size"),
        ({"data__seq_len": 64}, "differs in data.seq_len"),
        ({"data__document_mask": True}, "differs in data.document_mask"),
        ({"optim__lr": 1.0}, "differs in optim.lr"),
    ],
)
def test_auto_never_continues_what_differs(tmp_path, change, word):
    stopped_run(setup(tmp_path))
    found = find_resume(setup(tmp_path, run__resume="auto", **change), DATA)
    assert found.folder is None and found.checkpoint is None and word in found.message


def test_auto_never_continues_on_other_data(tmp_path):
    stopped_run(setup(tmp_path))
    found = find_resume(setup(tmp_path, run__resume="auto"), "e" * 64)
    assert (
        found.folder is None and "trained on other data (data_hash dddddddddddd)" in found.message
    )


def test_batch_size_mesh_and_length_may_change_and_are_journaled(tmp_path):
    stopped = stopped_run(setup(tmp_path))
    changed = setup(
        tmp_path,
        run__resume="auto",
        data__global_batch_size=16,
        parallel__tp=2,
        run__max_steps=77,
        devices=2,
    )
    run = start(changed)
    assert run.dir == stopped.dir and run.attempt == 2
    assert events(run, "config_change")[0]["changes"] == {
        "data.global_batch_size": [8, 16],
        "devices": ["auto", 2],
        "parallel.tp": [1, 2],
        "run.max_steps": [1000, 77],
    }
    before = yaml.safe_load((run.dir / "config.attempt-1.yaml").read_text())
    assert before["run"]["max_steps"] == 1000
    assert yaml.safe_load((run.dir / "config.yaml").read_text())["run"]["max_steps"] == 77


def test_a_named_run_folder_is_continued_even_when_it_is_done(tmp_path):
    stopped = stopped_run(setup(tmp_path), "done")
    run = start(setup(tmp_path, run__resume=str(stopped.dir), optim__lr=9.0))
    assert run.dir == stopped.dir and run.attempt == 2 and run.checkpoint is not None
    assert events(run, "config_change")[0]["changes"] == {"optim.lr": [2e-3, 9.0]}
    run.finish("preempted")
    assert start(setup(tmp_path, run__resume=str(stopped.dir))).attempt == 3


def test_a_named_checkpoint_begins_a_new_run_with_a_parent(tmp_path):
    stopped = stopped_run(setup(tmp_path), "done")
    checkpoint = stopped.dir / "checkpoints" / "step-00000005"
    run = start(setup(tmp_path, run__resume=str(checkpoint)))
    assert run.dir != stopped.dir and run.attempt == 1 and run.checkpoint == checkpoint
    assert run.parent == f"{stopped.dir.name}/checkpoints/step-00000005"
    first, resumed = events(run)
    assert first["parent"] == run.parent and first["step"] == 5 and first["tokens"] == 5120
    assert resumed["ev"] == "resume" and resumed["from_attempt"] is None
    save(run, setup(tmp_path), 6)
    run.finish("preempted")
    continued = start(setup(tmp_path, run__resume=str(run.dir)))
    assert continued.parent == run.parent and continued.checkpoint.name == "step-00000006"


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_model_sequence_length_and_data_never_change_and_all_misfits_are_told(tmp_path, kind):
    stopped = stopped_run(setup(tmp_path))
    path = stopped.dir if kind == "folder" else stopped.dir / "checkpoints" / "step-00000005"
    changed = setup(
        tmp_path, run__resume=str(path), data__seq_len=64, model__hidden_size=64, model__head_dim=8
    )
    message = refusal(find_resume, changed, "e" * 64)
    assert "the checkpoint has data.seq_len=128, this run has 64" in message
    assert "the checkpoint has model.hidden_size=128, this run has 64" in message
    assert "the checkpoint has model.head_dim=32, this run has 8" in message
    assert f"the checkpoint has data_hash={DATA}, this run has {'e' * 64}" in message
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_path_that_is_no_run_is_refused_before_anything_is_written(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    message = refusal(start, setup(tmp_path, run__resume=str(empty)))
    assert "neither a run folder nor a checkpoint; allowed: never, auto" in message
    stopped = stopped_run(setup(tmp_path / "b"), step=0)
    message = refusal(start, setup(tmp_path, run__resume=str(stopped.dir)))
    assert "holds no complete checkpoint" in message
    damaged = stopped_run(setup(tmp_path / "c")).dir / "checkpoints" / "step-00000005"
    (damaged / "manifest.json").write_text("{")
    message = refusal(start, setup(tmp_path, run__resume=str(damaged)))
    assert "manifest.json cannot be read as JSON" in message
    assert not (tmp_path / "runs").exists()


# A folder fixed by the launcher.


def test_a_launcher_fixes_the_folder(tmp_path, monkeypatch):
    fixed = tmp_path / "job-17"
    fixed.mkdir()
    (fixed / "slurm.out").write_text("made by the launcher")
    monkeypatch.setenv("CURRY_RUN_DIR", str(fixed))
    run = start(setup(tmp_path))
    assert run.dir == fixed and run.attempt == 1 and events(run, "start")[0]["run"] == "job-17"
    run.finish("preempted")
    assert "set run.resume=auto to continue" in refusal(start, setup(tmp_path))
    auto = setup(tmp_path, run__resume="auto")
    run = start(auto)
    assert run.dir == fixed and run.attempt == 2 and run.checkpoint is None
    assert "no complete checkpoint yet" in run.message
    save(run, auto, 4)
    run.finish("preempted")
    assert "differs in seed" in refusal(start, setup(tmp_path, run__resume="auto", seed=3))
    run = start(auto)
    assert run.attempt == 3 and run.checkpoint == fixed / "checkpoints" / "step-00000004"
    run.finish("done")
    assert "is done" in refusal(start, auto)
    assert not (tmp_path / "runs").exists()


def test_a_fixed_folder_and_another_named_one_contradict(tmp_path, monkeypatch):
    stopped = stopped_run(setup(tmp_path))
    monkeypatch.setenv("CURRY_RUN_DIR", str(tmp_path / "job"))
    assert "set one of them only" in refusal(start, setup(tmp_path, run__resume=str(stopped.dir)))
    checkpoint = stopped.dir / "checkpoints" / "step-00000005"
    run = start(setup(tmp_path, run__resume=str(checkpoint)))
    assert run.dir == tmp_path / "job" and run.parent is not None
    run.finish("preempted")
    message = refusal(start, setup(tmp_path, run__resume=str(checkpoint)))
    assert "already holds a run" in message


# Failures.


def test_the_first_failure_stands_and_a_cause_replaces_a_lost_peer(tmp_path):
    run = start(setup(tmp_path))
    assert run.failure_time() is None
    assert run.fail(rank=1, error=RuntimeError("gone"), lost_peer=True)
    first = run.failure_time()
    assert first is not None
    assert not run.fail(rank=2, error=RuntimeError("gone too"), lost_peer=True)
    assert run.failure_time() == first
    try:
        raise ValueError("the cause")
    except ValueError as error:
        assert run.fail(rank=0, error=error)
    assert not run.fail(rank=3, error=KeyError("later"))
    record = json.loads((run.dir / "failure.json").read_text())
    assert (record["rank"], record["type"], record["message"]) == (0, "ValueError", "the cause")
    assert "raise ValueError" in record["traceback"] and record["lost_peer"] is False
    save(run, setup(tmp_path), 1)
    run.finish("crashed", "x", 1)
    again = start(setup(tmp_path, run__resume=str(run.dir)))
    assert again.failure_time() is None and (run.dir / "failure.attempt-1.json").exists()


# TensorBoard.


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), purge_orphaned_data=True)
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in tags}


def test_tensorboard_holds_the_same_keys_and_a_resume_purges_later_steps(tmp_path):
    config = setup(tmp_path, tracking__tensorboard=True)
    run = start(config)
    for step in range(1, 8):
        run.log(step, {"tokens": 10 * step, "loss": float(step), "val/loss": 0.5, "note": "text"})
        if step == 4:
            save(run, config, step)
    run.sample(7, "hello")
    run.finish("preempted")
    found = scalars(run.dir / "tb")
    assert set(found) == {"tokens", "loss", "val/loss"}
    assert found["loss"] == [(step, float(step)) for step in range(1, 8)]
    run = start(setup(tmp_path, tracking__tensorboard=True, run__resume="auto"))
    run.log(5, {"loss": 50.0})
    run.log(6, {"loss": math.nan})
    run.finish("done")
    loss = scalars(run.dir / "tb")["loss"]
    assert [step for step, _ in loss] == [1, 2, 3, 4, 5, 6] and loss[4] == (5, 50.0)
    assert math.isnan(loss[5][1])


def test_a_failing_tracker_is_dropped_and_the_files_stay_whole(tmp_path, monkeypatch):
    import torch.utils.tensorboard as library

    class Broken:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.calls = 0

        def add_text(self, *args: Any) -> None:
            pass

        def add_scalar(self, *args: Any, **options: Any) -> None:
            raise ConnectionError("tracker down")

    monkeypatch.setattr(library, "SummaryWriter", Broken)
    run = start(setup(tmp_path, tracking__tensorboard=True))
    with pytest.warns(UserWarning, match="TensorBoard.log failed and is dropped"):
        run.log(1, {"loss": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.log(2, {"loss": 1.0})
        run.finish("done")
    assert len(read_lines(run.dir / "metrics.jsonl")) == 2
    assert events(run, "end")[0]["tracker_dropped"] == 3


# Several ranks.


def open_on_ranks(rank: int, world: int, root: Path) -> list[Any]:
    device = torch.device("cpu")
    mesh = build_mesh(ParallelConfig(), device=device, local_rank=rank, comm_timeout=60.0)
    config = setup(root)
    run = Run.open(config, mesh, argv=["x=1"], data_hash=DATA, project=root)
    run.log(1, {"loss": float(rank)})
    run.event("note", rank=rank)
    run.sample(1, f"rank {rank}")
    torch.distributed.barrier()
    first = [run.fail(rank=rank, error=RuntimeError(f"rank {rank}"))] if rank else []
    torch.distributed.barrier()
    known = run.failure_time() is not None
    run.finish("done")
    problem = refusal(
        Run.open, setup(root, run__resume="no/such"), mesh, argv=[], data_hash=DATA, project=root
    )
    return [str(run.dir), run.attempt, first, known, problem]


def test_all_ranks_share_one_folder_that_rank_zero_writes(tmp_path):
    results = run_ranks(open_on_ranks, 2, tmp_path)
    assert results[0][:2] == results[1][:2] and results[0][3] and results[1][3]
    assert results[1][2] == [True] and results[0][4] == results[1][4]
    assert "neither a run folder" in results[0][4]
    (folder,) = (tmp_path / "runs").iterdir()
    assert str(folder) == results[0][0]
    assert [row["loss"] for row in read_lines(folder / "metrics.jsonl")] == [0.0]
    journal = read_journal(folder / "journal.jsonl")
    assert [event["ev"] for event in journal] == ["start", "note", "note", "end"]
    assert journal[0]["world"] == 2 and journal[0]["mesh"]["dp_shard"] == 2
    assert json.loads((folder / "failure.json").read_text())["rank"] == 1


# Imports.


def test_tracking_and_manifests_import_no_torch():
    code = """
        import sys
        import curry_train.checkpoint
        import curry_train.tracking.abort
        import curry_train.tracking.run_folder
        heavy = {"torch", "lightning_fabric", "tensorboard", "yaml"} & sys.modules.keys()
        assert not heavy, heavy
    """
    environment = {**os.environ, "PYTHONPATH": str(TEMPLATE)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)


def test_a_setting_younger_than_a_checkpoint_has_its_default_there(tmp_path):
    config = setup(tmp_path)
    path = save(start(config), config, 5)
    manifest = dcp.read_manifest(path)
    del manifest["model"]["clip_qkv"]
    manifest["sha256"] = manifest_sha256(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=str(path)))
    assert find_resume(config, DATA).checkpoint == path
    model = dataclasses.replace(config.model, clip_qkv=1.0)
    message = refusal(find_resume, dataclasses.replace(config, model=model), DATA)
    assert "the checkpoint has model.clip_qkv=None, this run has 1.0" in message


def test_the_answer_of_find_resume_can_be_handed_to_open(tmp_path):
    folder = tmp_path / "chosen"
    run = start(setup(tmp_path), resume=Resume(folder=folder, message="chosen before"))
    assert run.dir == folder and run.message == "chosen before" and run.attempt == 1


@pytest.mark.parametrize("content", [b"data: [1]\nmodel: 3\n", b"\xff\xfe\x00", b"- 1\n", b""])
def test_description_files_of_any_content_are_set_aside(tmp_path, content, monkeypatch):
    config = setup(tmp_path, run__resume="auto")
    first = start(config)
    first.finish("crashed")
    for name in ("config.yaml", "environment.txt"):
        (first.dir / name).write_bytes(content)
    monkeypatch.setenv("CURRY_RUN_DIR", str(first.dir))
    run = start(config)
    run.finish("done")
    assert (run.dir, run.attempt) == (first.dir, 2)
    assert (run.dir / "config.attempt-1.yaml").read_bytes() == content
    assert yaml.safe_load((run.dir / "config.yaml").read_text()) == to_dict(config)


def test_a_config_that_holds_no_settings_does_not_stop_auto(tmp_path):
    config = setup(tmp_path, run__resume="auto")
    first = start(dataclasses.replace(config, seed=1))
    first.finish("crashed")
    (first.dir / "config.yaml").write_text("data: [1]\nmodel: 3\n")
    run = start(config)
    run.finish("done")
    assert run.dir != first.dir and "starting fresh" in run.message
