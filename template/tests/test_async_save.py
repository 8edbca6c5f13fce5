"""A save beside the loop writes what was there when it began, tells its errors, loses nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from projects import SMALL, exit_code, fork_ranks, forked, import_everything, rows
from test_checkpoint import assert_bitwise, load, meta, state, world_mesh
from test_reshard import MODEL, runtime_of, truth_of

from curry_train.checkpoint import CheckpointError, dcp, training_state
from curry_train.checkpoint.async_save import AsyncSave, Staging
from curry_train.checkpoint.training_state import Saver, rng_tensors, set_rng, training_tensors
from curry_train.parallel.mesh import Mesh, agreed
from curry_train.parallel.shards import Part
from curry_train.step import train_step
from curry_train.testing import run_ranks
from curry_train.tracking.journal import Journal, read_journal


def start(beside: AsyncSave, root: Path, step: int, tensors: Any, **changes: Any) -> None:
    arguments = {
        "committed": lambda path, copied: None,
        "rank_tensors": {"rng.torch": torch.get_rng_state()},
        "meta": meta(8 * step),
        "files": {"tokenizer.json": b"{}"},
        "keep": 0,
    }
    beside.start(root, step=step, tensors=tensors, **{**arguments, **changes})


class Gate:
    """Holds every save of dcp back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.threads = threading.Event(), []
        real = dcp.save

        def held(*args: Any, **kwargs: Any) -> Path:
            self.threads.append(threading.current_thread())
            assert self.open.wait(30)
            return real(*args, **kwargs)

        monkeypatch.setattr(dcp, "save", held)


# One process.


def test_what_changes_after_the_copy_does_not_reach_the_file(tmp_path, monkeypatch):
    gate, beside = Gate(monkeypatch), AsyncSave(Mesh.single(), 60.0)
    tensors = {**state(5), "part": Part(torch.arange(6.0).view(2, 3)[:, 1:], (2, 2), (0, 0))}
    rng = torch.get_rng_state()
    own = {"rng.torch": rng.clone(), "half": torch.full((2,), 3.0)}  # a name of both kinds
    start(beside, tmp_path, 5, tensors, rank_tensors=own)
    for tensor in own.values():
        tensor.zero_()
    assert not list(tmp_path.iterdir()) and beside.busy
    for tensor in tensors.values():
        (tensor.tensor if isinstance(tensor, Part) else tensor).fill_(1)
    torch.rand(3)
    gate.open.set()
    beside.wait()
    assert not beside.busy and gate.threads != [threading.main_thread()]
    path = dcp.latest(tmp_path)
    wanted = {**state(5), "part": torch.tensor([[1.0, 2.0], [4.0, 5.0]])}
    assert_bitwise(load(path, wanted), wanted)
    found = dcp.load_rank_tensors(path, 0)
    assert torch.equal(found["rng.torch"], rng) and found["half"].tolist() == [3.0, 3.0]


def test_buffers_are_allocated_once_and_hold_copies():
    staging, first = Staging(), state(1)
    one = staging.copy(first)
    assert_bitwise(one, first)
    addresses = {name: tensor.data_ptr() for name, tensor in one.items()}
    assert not {*addresses.values()} & {t.data_ptr() for t in first.values() if t.numel()}
    two = staging.copy(state(2))
    assert {name: tensor.data_ptr() for name, tensor in two.items()} == addresses
    assert_bitwise(two, state(2))
    grown = staging.copy({"half": torch.ones(6, 3, dtype=torch.bfloat16)})
    assert grown["half"].shape == (6, 3)


def test_the_next_save_begins_when_the_one_before_has_ended(tmp_path, monkeypatch):
    gate, beside = Gate(monkeypatch), AsyncSave(Mesh.single(), 60.0)
    assert beside.wait() == 0.0
    start(beside, tmp_path, 1, state(1))
    with pytest.raises(ValueError, match=r"still pending; call wait\(\)"):
        start(beside, tmp_path, 2, state(2))
    threading.Timer(0.2, gate.open.set).start()
    assert 0.1 < beside.wait() < 30
    start(beside, tmp_path, 2, state(2))
    beside.wait()
    for step in (1, 2):
        assert_bitwise(load(tmp_path / f"step-0000000{step}"), state(step))


def test_an_error_beside_the_loop_is_raised_by_the_next_wait(tmp_path):
    beside = AsyncSave(Mesh.single(), 60.0)
    start(beside, tmp_path, 1, {"w": torch.empty(2, device="meta"), "lr": 3.0})
    with pytest.raises(CheckpointError) as caught:
        beside.wait()
    assert len(caught.value.problems) == 2
    assert "the save of step 1 failed: tensor w is on the meta" in str(caught.value)
    assert "lr is a float" in str(caught.value) and not list(tmp_path.iterdir())
    start(beside, tmp_path, 2, state(2), committed=lambda path, copied: 1 / 0)
    with pytest.raises(CheckpointError, match="step 2 failed: ZeroDivisionError"):
        beside.wait()
    start(beside, tmp_path, 3, state(3))
    beside.wait()
    assert_bitwise(load(dcp.latest(tmp_path)), state(3))


# A run.


def run_of(folder: Path) -> Any:
    """A run that keeps the events; told by step."""
    events: list[tuple[str, dict[str, Any]]] = []
    return SimpleNamespace(
        dir=folder, events=events, event=lambda name, **fields: events.append((name, fields))
    )


def runtime(async_save: bool, rank: int = 0, layout: str = "one process") -> Any:
    found = runtime_of(rank, layout, MODEL)
    config = found.config
    found.config = replace(config, run=replace(config.run, async_save=async_save))
    return found


def test_a_save_beside_training_resumes_as_an_undisturbed_run(tmp_path, monkeypatch, capsys):
    gate, trained, run = Gate(monkeypatch), runtime(True), run_of(tmp_path)
    saver = Saver(trained, run)
    for _ in range(2):
        train_step(trained)
    held = {name: value.clone() for name, value in tensors_of(trained).items()}
    assert any("correction_bias" in name for name in held) and "optim.step" in held
    random_states = {name: value.clone() for name, value in rng_tensors().items()}
    saver.save({"loss": 1.0, "val/loss": 2.5, "val/bpb": float("nan")}, last=False)
    undisturbed = [train_step(trained) for _ in range(3)]
    assert not (tmp_path / "checkpoints").exists()
    threading.Timer(0.3, gate.open.set).start()
    saver.save({"loss": 1.0}, last=False)
    assert not saver.close()
    assert "step 5 waited 0." in capsys.readouterr().out

    first = tmp_path / "checkpoints" / "step-00000002"
    assert_bitwise(truth_of(first), held)
    manifest = dcp.read_manifest(first)
    assert (manifest["samples_consumed"], manifest["metrics"]) == (24, {"val/loss": 2.5})
    torch.rand(9)
    fresh = runtime(False)
    training_state.restore(fresh, first)
    assert_bitwise(rng_tensors(), random_states)
    again = [train_step(fresh) for _ in range(3)]
    assert [(o.loss, o.grad_norm) for o in again] == [(o.loss, o.grad_norm) for o in undisturbed]
    assert_bitwise(truth_of(tmp_path / "checkpoints" / "step-00000005"), tensors_of(fresh))

    names = [(name, fields["step"]) for name, fields in run.events]
    assert names == [(n, s) for s in (2, 5) for n in ("ckpt_begin", "ckpt_commit")]
    begins, commits = [[f for _, f in run.events][at::2] for at in (0, 1)]
    assert begins[0]["waited"] == 0.0 and 0.1 < begins[1]["waited"] <= commits[1]["blocked"]
    assert commits[0]["seconds"] > 0.3 > commits[0]["blocked"] > 0.0
    assert commits[0]["bytes"] == sum(e["bytes"] for e in manifest["files"])
    set_rng(random_states)


def tensors_of(trained: Any) -> dict[str, torch.Tensor]:
    held = training_tensors(trained).items()
    return {n: value.tensor if isinstance(value, Part) else value for n, value in held}


def test_a_run_that_ends_by_a_failed_save_saves_its_last_step_all_the_same(
    tmp_path, monkeypatch, capsys
):
    trained, run = runtime(True), run_of(tmp_path)
    saver, real = Saver(trained, run), dcp.save
    train_step(trained)

    def full(*args: Any, **kwargs: Any) -> Path:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError("the disk is full")
        return real(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", full)
    saver.save({}, last=False)
    assert saver.close() == "the save of step 1 failed: the disk is full"
    told = {"step": 1, "what": "checkpoint failed", "error": "the disk is full"}
    assert run.events[-1] == ("anomaly", told), "told at once, not at the next save"
    assert "step 1 failed, the run ends at its next save" in capsys.readouterr().out
    for last in (False, True):
        step = trained.step
        saver.save({}, last=False)
        train_step(trained)
        with pytest.raises(CheckpointError, match=f"step {step} failed: the disk is full"):
            saver.save({}, last=last)
        assert dcp.latest(tmp_path / "checkpoints").name == f"step-{trained.step:08d}"
    assert [name for name, _ in run.events][-2:] == ["ckpt_begin", "ckpt_commit"]
    assert run.events[-1][1]["blocked"] == run.events[-1][1]["seconds"]


def test_events_of_two_threads_are_whole_and_counted(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", run="r")

    def write() -> None:
        for step in range(60):
            journal.event("note", step=step)

    threads = [threading.Thread(target=write) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [event["seq"] for event in read_journal(journal.path)] == list(range(240))


# Several ranks.


def beside_collectives(rank: int, world: int, root: Path) -> int:
    """Reduce on the loop's group, again and again, while saves use their own."""
    mesh, rounds = world_mesh(), 0
    beside = AsyncSave(mesh, 60.0)
    for step in (1, 2, 3):
        rows, working = torch.full((2, 200_000), float(step + rank)), 1
        start(beside, root, step, {"w": Part(rows, (2 * world, 200_000), (2 * rank, 0))})
        while working:
            box = torch.ones(())
            dist.all_reduce(box, group=mesh.group("world"))
            assert box == world
            working, rounds = agreed(int(beside.busy), mesh), rounds + 1
        beside.wait()
    return rounds


def test_collectives_of_the_loop_and_of_a_save_do_not_meet(tmp_path):
    assert min(run_ranks(beside_collectives, 2, tmp_path)) > 3
    for step in (1, 2, 3):
        tensors = truth_of(tmp_path / f"step-0000000{step}")
        assert [int(row[0]) for row in tensors["w"]] == [step, step, step + 1, step + 1]


def failing(rank: int, world: int, root: Path, where: str) -> list[str]:
    mesh, messages = world_mesh(), []
    beside = AsyncSave(mesh, 60.0)
    tensors = {"w": Part(torch.full((1, 3), float(rank)), (world, 3), (rank, 0))}
    changes: dict[str, Any] = {}
    if where == "content":
        tensors["twice"] = Part(torch.full((3,), float(rank)), (3,), (0,))
    elif where == "one rank" and rank:
        changes["rank_tensors"] = {"rng": torch.empty(2, device="meta")}
    elif where == "after the commit" and rank:
        changes["committed"] = lambda path, copied: 1 / 0
    start(beside, root, 1, tensors, **changes)
    try:
        beside.wait()
    except CheckpointError as error:
        messages.append(str(error))
    start(beside, root, 2, {"w": tensors["w"]})
    beside.wait()
    return messages


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("content", "tensor twice: ranks 0 and 1 write the same part"),
        ("one rank", "rank 1: tensor rng is on the meta device"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path, where, words):
    first, second = run_ranks(failing, 2, tmp_path, where)
    assert first == second and words in first[0]
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000002"]


def test_an_error_after_the_commit_is_raised_on_all_as_well(tmp_path):
    first, second = run_ranks(failing, 2, tmp_path, "after the commit")
    assert "another rank failed" in first[0] and "ZeroDivisionError" in second[0]
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [
        "step-00000001",
        "step-00000002",
    ]


def silent(rank: int, world: int, root: Path) -> tuple[float, str]:
    """Save with a peer that does not answer; return how long the wait took and its error."""
    beside, ended = AsyncSave(world_mesh(), 1.0), root / "ended"
    begin, text = time.monotonic(), ""
    if rank == 0:
        start(beside, root, 1, {"w": torch.ones(2)})
        try:
            beside.wait()
        except RuntimeError as error:
            text = str(error)
        ended.touch()
    while not ended.exists() and time.monotonic() < begin + 20:
        time.sleep(0.02)
    return time.monotonic() - begin, text


def test_a_silent_peer_is_waited_for_once(tmp_path):
    seconds, text = run_ranks(silent, 2, tmp_path)[0]
    assert "Timed out" in text and 0.9 < seconds < 10
    assert not any(tmp_path.glob("step-*"))


def both_ways(rank: int, world: int, root: Path, layout: str) -> None:
    for way in ("sync", "async"):
        torch.manual_seed(rank)
        trained = runtime(way == "async", rank, layout)
        saver = Saver(trained, run_of(root / way))
        for _ in range(3):
            train_step(trained)
            saver.save({}, last=False)
        assert not saver.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["dp2 tp2 ep2 zero 3", "pp2 zbv", "dp2 cp2 ep4 zero 1"])
def test_both_ways_write_the_same_bytes_in_every_layout(tmp_path, layout):
    world = {"pp2 zbv": 2}.get(layout, 4)
    run_ranks(both_ways, world, tmp_path, layout)
    for step in (1, 2, 3):
        one, two = (
            dcp.read_manifest(tmp_path / way / "checkpoints" / f"step-0000000{step}")
            for way in ("sync", "async")
        )
        assert len(one["files"]) == 2 * world + 1
        assert one == two


@pytest.fixture(scope="module")
def everything_imported():
    import_everything()


def test_a_signal_ends_a_run_when_its_last_checkpoint_stands(
    tmp_path, everything_imported, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    settings = (*SMALL, "run.save_every=1", "run.async_save=true", "run.keep=2")
    settings += ("run.max_steps=100000", "run.stop_grace=60")
    pids = fork_ranks(2, *settings, folder=tmp_path)
    journal: list[dict] = []
    end = time.monotonic() + 90
    while time.monotonic() < end and not any(e["ev"] == "ckpt_commit" for e in journal):
        time.sleep(0.05)
        found = list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").is_dir() else []
        journal = rows(found[0], "journal.jsonl") if found else []
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert [exit_code(pid) for pid in pids] == [0, 0]
    events = read_journal(found[0] / "journal.jsonl")
    assert [event["seq"] for event in events] == list(range(len(events)))
    begun, committed = (
        [event["step"] for event in events if event["ev"] == name]
        for name in ("ckpt_begin", "ckpt_commit")
    )
    assert begun == committed and events[-1]["status"] == "preempted"
    newest = dcp.latest(found[0] / "checkpoints")
    assert dcp.read_manifest(newest)["step"] == committed[-1] == events[-1]["step"]
    truth_of(newest)


@pytest.mark.parametrize("broken", [False, True])
def test_an_aborted_run_ends_when_the_save_before_it_stands_or_failed(
    broken, tmp_path, everything_imported, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    real = dcp.save

    def slow(*args: Any, **kwargs: Any) -> Path:
        time.sleep(3.0)
        if broken:
            raise dcp.CheckpointError("the disk is full")
        return real(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", slow)  # the run is a fork of this process
    settings = (*SMALL, "run.save_every=1", "run.async_save=true", "run.max_nonfinite=1")
    settings += ("optim.lr=1e30", "optim.warmup_steps=0", "optim.max_grad_norm=0")
    code, out = forked(*settings, log=tmp_path / "log.txt")
    assert code == 4, out
    (folder,) = (tmp_path / "runs").iterdir()
    events = read_journal(folder / "journal.jsonl")
    assert [event["ev"] for event in events][-1] == "end" and events[-1]["status"] == "aborted"
    assert ("the save of step 1 failed: the disk is full" in events[-1]["reason"]) == broken
    assert "run.max_nonfinite" in events[-1]["reason"]
    committed = [event["step"] for event in events if event["ev"] == "ckpt_commit"]
    if broken:
        assert committed == [] and dcp.latest(folder / "checkpoints") is None
        return
    assert committed == [1]
    assert dcp.latest(folder / "checkpoints").name == "step-00000001"
