"""Damage, full disks and kills: told with file and key, and an older checkpoint always stands."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_checkpoint import assert_bitwise, load, meta, problems_of, save, state
from test_reshard import MODEL, runtime_of, truth_of

from curry_train import checkpoint as disk
from curry_train.checkpoint import CheckpointError, dcp, storage, training_state
from curry_train.checkpoint.async_save import AsyncSave
from curry_train.config import Config, ConfigError, RunConfig
from curry_train.parallel.mesh import Mesh
from curry_train.step import train_step
from curry_train.tracking.resume import find_resume

KILLS = 50 if os.environ.get("CURRY_TRAIN_FULL") else 10
WEIGHTS = "tensors-00000.safetensors"


# Damage of a training run's newest checkpoint.


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    runtime = runtime_of(0, "one process", MODEL)
    for _ in range(2):
        train_step(runtime)
        training_state.save(runtime, SimpleNamespace(dir=folder, event=lambda *a, **k: None))
    return folder / "checkpoints"


def truncate(newest: Path) -> None:
    with (newest / WEIGHTS).open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 100)


def flip(newest: Path) -> None:
    content = bytearray((newest / WEIGHTS).read_bytes())
    content[-9] ^= 16
    (newest / WEIGHTS).write_bytes(content)


def remove(newest: Path) -> None:
    (newest / WEIGHTS).unlink()


def remove_manifest(newest: Path) -> None:
    (newest / disk.MANIFEST).unlink()


def untouched(newest: Path) -> None:
    pass


def listing(root: Path) -> list[tuple[str, int, int]]:
    found = ((p, p.stat()) for p in root.rglob("*"))
    return sorted((str(path), info.st_size, info.st_mtime_ns) for path, info in found)


FAULTS: list[tuple[Callable[[Path], None], dict[str, Any], str, str]] = [
    (truncate, {}, WEIGHTS, "bytes, the manifest says"),
    (flip, {}, WEIGHTS, "does not have the sha256 of the manifest"),
    (remove, {}, WEIGHTS, "is missing"),
    (remove_manifest, {}, disk.MANIFEST, "does not exist: not a checkpoint"),
    (untouched, {"hidden_size": 24}, disk.MANIFEST, "layers.0.input_layernorm.weight has shape"),
    (
        untouched,
        {"num_hidden_layers": MODEL.num_hidden_layers - 1},
        disk.MANIFEST,
        f"layers.{MODEL.num_hidden_layers - 1}.input_layernorm.weight is in the checkpoint",
    ),
    (untouched, {"vocab_size": 60}, disk.MANIFEST, "embed_tokens.weight has shape [50, 16]"),
]


@pytest.mark.parametrize("start", ["run.resume", "run.init_from"])
@pytest.mark.parametrize(("fault", "model", "file", "words"), FAULTS)
def test_a_damaged_or_foreign_checkpoint_is_named_and_an_older_one_offered(
    trained, tmp_path, start, fault, model, file, words
):
    root = shutil.copytree(trained, tmp_path / "checkpoints")
    newest = root / "step-00000002"
    fault(newest)
    before = listing(root)
    runtime = runtime_of(0, "one process", replace(MODEL, **model))
    resume = start == "run.resume"
    chosen = RunConfig(init_from=None if resume else str(newest))
    runtime.config = replace(runtime.config, run=chosen)
    weights = {name: value.clone() for name, value in runtime.model.state_dict().items()}
    run = SimpleNamespace(checkpoint=newest if resume else None)
    message = problems_of(training_state.begin, runtime, run)
    assert str(newest / file) in message and words in message, message
    if file == WEIGHTS:
        assert "it holds key lm_head.weight and " in message, message
    assert message.endswith(f"an older checkpoint is there: {start}={root / 'step-00000001'}")
    assert listing(root) == before, "something on disk was changed"
    assert_bitwise(runtime.model.state_dict(), weights)


def test_resume_of_a_folder_without_manifest_names_it_and_offers_the_older(trained, tmp_path):
    root = shutil.copytree(trained, tmp_path / "checkpoints")
    remove_manifest(root / "step-00000002")
    config = Config(run=RunConfig(resume=str(root / "step-00000002")))
    with pytest.raises(ConfigError) as caught:
        find_resume(config, "d", env={})
    message = str(caught.value)
    assert f"{root / 'step-00000002' / 'manifest.json'} does not exist" in message
    assert f"run.resume={root / 'step-00000001'}" in message


def test_a_checkpoint_of_weights_alone_is_refused_in_one_sentence(tmp_path):
    path = save(tmp_path / "checkpoints", 3, {"model.norm.weight": torch.ones(3)})
    config = Config(run=RunConfig(resume=str(path)))
    with pytest.raises(ConfigError) as caught:
        find_resume(config, "d" * 64, env={})
    sentence = "holds weights only, from which no run can go on; start one with run.init_from="
    assert caught.value.problems == [f"run.resume={path} {sentence}{path}"]
    runtime = runtime_of(0, "one process", MODEL)
    with pytest.raises(CheckpointError) as refused:
        training_state.restore(runtime, path)
    assert refused.value.problems == [f"{path} {sentence}{path}"]


# What lies on disk before the commit.


def lose_the_end(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def rename_a_key(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"half"', b'"hafl"', 1))


def another_shape(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"shape": [7]', b'"shape":[7]]', 1))


@pytest.mark.parametrize("ways", ["sync", "async"])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_the_end, "bytes, the manifest says"),
        (rename_a_key, "key hafl reads back as BF16 [5, 3], it was given None"),
        (another_shape, "is no valid safetensors file"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_seen_before_the_commit(
    tmp_path, monkeypatch, harm, words, ways
):
    first = save(tmp_path, 1)
    real = storage.write_file

    def harmed(path: Path, chunks: Any) -> dict[str, Any]:
        entry = real(path, chunks)
        if path.name == WEIGHTS:
            harm(path)
        return entry

    monkeypatch.setattr(storage, "write_file", harmed)
    message = problems_of(save_by, ways, tmp_path, 2, state(2))
    assert WEIGHTS in message and words in message and "save to another disk (run.dir)" in message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", first.name]
    assert_bitwise(load(first), state(1))


def save_by(way: str, root: Path, step: int, tensors: Any, **changes: Any) -> None:
    if way == "sync":
        save(root, step, tensors, **changes)
        return
    beside = AsyncSave(Mesh.single(), 60.0)
    options = {"meta": meta(8 * step), "files": {}, "keep": 0, **changes}
    beside.start(
        root, step=step, tensors=tensors, rank_tensors={}, committed=lambda *_: None, **options
    )
    beside.wait()


def test_the_manifest_comes_last_and_every_file_is_flushed_before_it(tmp_path, monkeypatch):
    """A power cut keeps what was flushed: a manifest must not be there before its files."""
    order: list[str] = []
    sync, replace_ = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        order.append(f"flush {path.relative_to(tmp_path)}")
        sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        order.append(f"name {Path(target).name}".partition(".tmp-")[0])
        replace_(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    save(tmp_path, 1)
    save(tmp_path, 2, keep=1)
    (temporary,) = {line.split("/")[0] for line in order[len(order) // 2 :] if "/" in line}
    assert temporary.startswith("flush step-00000002.tmp-")
    order = [line.partition(".tmp-")[0] if "/" not in line else line for line in order]
    second = order[order.index("name latest") + 1 :]
    beside = [f"{temporary}/rank-00000.safetensors", f"{temporary}/{WEIGHTS}"]
    assert sorted(second[:2]) == beside
    assert second[2:] == [
        f"{temporary}/tokenizer.json",
        f"{temporary}/manifest.json",
        "flush step-00000002",
        "name step-00000002",
        "flush .",
        "flush latest",
        "name latest",
        "name step-00000001",
    ]


# A full disk.


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A folder that takes about 1 MB: a tmpfs, or where none can be mounted any folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    yield folder
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_full_disk_keeps_the_old_checkpoint_and_says_what_to_free(small_disk, way):
    root = small_disk / "checkpoints"
    first = save(root, 1)
    pid = os.fork()
    if pid == 0:
        message = ""
        try:
            if not os.path.ismount(small_disk):
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
            save_by(way, root, 2, {"w": torch.zeros(600_000)})
        except CheckpointError as error:
            message = str(error)
        finally:  # whatever else is raised, this process must not go on as pytest
            words = (WEIGHTS, "cannot be written", "MB are left on its disk", "run.keep")
            os._exit(0 if all(word in message for word in words) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(entry.name for entry in root.iterdir()) == ["latest", first.name]
    assert dcp.latest(root) == first
    assert_bitwise(load(first), state(1))
    save_by(way, root, 3, state(3))
    assert_bitwise(load(dcp.latest(root)), state(3))


# Kills.


def save_for_ever(root: Path, step: int, way: str, pipe: int) -> None:
    """Save one checkpoint after another and acknowledge each that stands."""
    beside = AsyncSave(Mesh.single(), 60.0)

    def acknowledge(path: Path, _: float = 0.0) -> None:
        os.write(pipe, b"%d\n" % int(path.name.removeprefix("step-")))

    while True:
        step += 1
        tensors = {f"w{i}": torch.full((64, 256), float(step)) for i in range(4)}
        options = {"step": step, "rank_tensors": {"r": torch.ones(9)}, "meta": meta(step)}
        if way == "sync":
            acknowledge(save(root, tensors=tensors, keep=2, **options))
            continue
        beside.wait()
        beside.start(root, tensors=tensors, files={}, keep=2, committed=acknowledge, **options)
        for tensor in tensors.values():
            tensor.fill_(-1.0)


def test_a_kill_at_any_moment_leaves_the_old_checkpoint_or_the_new(tmp_path):
    moments, step, kinds = random.Random(11), 0, {"old": 0, "new": 0}
    for kill in range(KILLS):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                save_for_ever(tmp_path, step, ("sync", "async")[kill % 2], theirs)
            finally:
                os._exit(9)
        os.close(theirs)
        with os.fdopen(ours) as told:
            acknowledged = int(told.readline())
            time.sleep(moments.uniform(0.0, 0.06))
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            acknowledged = max([acknowledged, *map(int, told.read().split())])
        newest = dcp.latest(tmp_path)
        tensors = truth_of(newest)
        step = dcp.read_manifest(newest)["step"]
        kinds["old" if step == acknowledged else "new"] += 1
        assert step in (acknowledged, acknowledged + 1), "an acknowledged checkpoint was lost"
        assert all(bool((tensor == step).all()) for tensor in tensors.values())
        for folder in tmp_path.glob("step-????????"):
            assert disk.is_complete(folder), f"{folder} has a valid name and is not whole"
    assert kinds["old"], "no kill came between two commits"
