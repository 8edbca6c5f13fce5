"""Checkpoints: bitwise, complete or absent, readable by any layout, and never a pickle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from curry_train import checkpoint as disk
from curry_train.checkpoint import CheckpointError, dcp, storage
from curry_train.checkpoint.boxes import Box
from curry_train.checkpoint.storage import Claim, _into_files
from curry_train.config import ParallelConfig
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.testing import run_ranks

FIXTURE = Path(__file__).parent / "fixtures" / "checkpoint_format1"
TEMPLATE = Path(__file__).resolve().parents[1]


def meta(samples_consumed: int = 8, experts: int = 4) -> dict[str, Any]:
    return {
        "samples_consumed": samples_consumed,
        "data_hash": "d" * 64,
        "config_hash": "c" * 64,
        "model": {"num_experts": experts},
        "mesh": {"dp_shard": 1},
    }


def state(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.norm.weight": torch.randn(7, generator=generator),
        "model.layers.0.mlp.experts.up_proj.weight": torch.randn(4, 6, 3, generator=generator),
        "optim.exp_avg.model.norm.weight": torch.randn(7, generator=generator).double(),
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "transposed": torch.randn(5, 3, generator=generator).t(),
        "optim.step": torch.tensor(12.0),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
    }


def save(root: Path, step: int, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "step": step,
        "tensors": state(step) if tensors is None else tensors,
        "rank_tensors": {"rng.torch": torch.get_rng_state()},
        "meta": meta(8 * step),
        "files": {"tokenizer.json": b"{}"},
        "mesh": Mesh.single(),
        "keep": 0,
    }
    return dcp.save(root, **{**arguments, **changes})


def load(checkpoint: Path, like: dict[str, Tensor] | None = None, **options: Any) -> dict[str, Any]:
    loaded = {name: torch.zeros_like(t) for name, t in (like or state()).items()}
    dcp.load(checkpoint, loaded, **options)
    return loaded


def assert_bitwise(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def problems_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def edit_manifest(checkpoint: Path, **changes: Any) -> None:
    """Rewrite keys of a manifest and seal it again, as an attacker or another writer would."""
    manifest = json.loads((checkpoint / disk.MANIFEST).read_text())
    manifest.update(changes)
    manifest["sha256"] = disk.manifest_sha256(manifest)
    (checkpoint / disk.MANIFEST).write_text(json.dumps(manifest))


# One process.


def test_a_save_loads_bitwise_and_the_files_are_plain_safetensors(tmp_path):
    wanted = {**state(), "nan": torch.tensor([math.nan, math.inf, -0.0])}
    path = save(tmp_path / "checkpoints", 123, wanted)
    assert path == tmp_path / "checkpoints" / "step-00000123"
    assert (path.parent / "latest").read_text().strip() == "step-00000123"
    loaded = load(path, wanted)
    del wanted["nan"]
    assert_bitwise(loaded, wanted)
    assert loaded["nan"][0].isnan() and loaded["nan"][1:].tolist() == [math.inf, 0.0]
    assert torch.signbit(loaded["nan"][2])
    assert_bitwise(load_file(path / "tensors-00000.safetensors"), wanted)
    assert torch.equal(dcp.load_rank_tensors(path, 0)["rng.torch"], torch.get_rng_state())
    assert dcp.load_rank_tensors(path, 1) is None
    assert dcp.read_file(path, "tokenizer.json") == b"{}"


def test_the_manifest_lists_every_file_with_bytes_and_sha256(tmp_path):
    path = save(tmp_path, 3)
    manifest = dcp.read_manifest(path)
    fields = {"format", "step", "files", "tensors", "sha256", *meta()}
    assert set(manifest) == fields and manifest["format"] == 1 and manifest["step"] == 3
    listed = {entry["name"] for entry in manifest["files"]}
    assert listed == {entry.name for entry in path.iterdir()} - {"manifest.json"}
    for entry in manifest["files"]:
        content = (path / entry["name"]).read_bytes()
        assert entry["bytes"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest["tensors"]["half"] == {
        "dtype": "bfloat16",
        "shape": [5, 3],
        "chunks": [
            {
                "offset": [0, 0],
                "shape": [5, 3],
                "file": "tensors-00000.safetensors",
                "key": "half",
            }
        ],
    }


def test_what_is_large_is_shared_among_files_of_even_size(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FILE_BYTES", 1000)
    wanted = {**state(), **{f"w{i}": torch.full((10 * i, 3), float(i)) for i in range(9)}}
    path = save(tmp_path, 1, wanted)
    names = ["tensors-00000.safetensors", *(f"tensors-00000-{i}.safetensors" for i in (1, 2, 3))]
    stored = [load_file(path / name) for name in names]
    assert sum(map(len, stored)) == len(wanted) and all(stored)
    assert {key for file in stored for key in file} == set(wanted)
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in stored]
    assert max(sizes) - min(sizes) <= max(tensor.nbytes for tensor in wanted.values())
    assert_bitwise(load(path, wanted), wanted)
    two = [*_into_files(1, [("w", Claim("int8", (2000,), Box((0,), (2000,)), 2000, None))])]
    assert [file for _, _, file in two] == ["tensors-00001.safetensors"]


def test_loading_fills_parameters_in_place(tmp_path):
    path = save(tmp_path, 1, {"weight": torch.arange(6.0).reshape(2, 3)})
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    address = parameter.data_ptr()
    dcp.load(path, {"weight": parameter})
    assert parameter.requires_grad and parameter.data_ptr() == address
    assert parameter.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_weights_load_alone_when_the_rest_is_ignored_by_prefix(tmp_path):
    path = save(tmp_path, 1)
    names = ("model.norm.weight", "model.layers.0.mlp.experts.up_proj.weight")
    weights = {name: torch.zeros_like(state()[name]) for name in names}
    message = problems_of(dcp.load, path, weights, ignore=("optim.",))
    assert "optim." not in message and "half" in message
    dcp.load(path, weights, ignore=("optim.", "half", "transposed", "flags", "empty"))
    assert_bitwise(weights, {name: state(1)[name] for name in names})


def test_all_load_problems_are_told_at_once_and_nothing_is_changed(tmp_path):
    path = save(tmp_path, 1)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in path.iterdir())
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    del tensors["flags"]
    tensors["new"] = torch.zeros(2)
    tensors["half"] = torch.zeros(5, 4, dtype=torch.bfloat16)
    tensors["transposed"] = torch.zeros(3, 5, dtype=torch.float64)
    tensors["empty"] = torch.empty(0, 3, device="meta")
    message = problems_of(dcp.load, path, tensors)
    assert "tensor flags is in the checkpoint and unknown" in message
    assert "tensor new is missing in the checkpoint" in message
    assert "tensor half has shape [5, 3] in the checkpoint and [5, 4] here" in message
    assert "tensor transposed is float32 in the checkpoint and float64 here" in message
    assert "precision" in message and "tensor empty is on the meta device" in message
    assert str(path / "manifest.json") in message
    assert not tensors["model.norm.weight"].any()
    assert sorted((p.name, p.stat().st_mtime_ns) for p in path.iterdir()) == before


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "rank-00000.safetensors"])
def test_a_flipped_byte_anywhere_is_named_before_anything_is_loaded(tmp_path, name):
    path = save(tmp_path, 1)
    file = path / name
    content = file.read_bytes()
    for at in (3, 9, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        target = {key: torch.zeros_like(tensor) for key, tensor in state().items()}
        message = problems_of(dcp.load, path, target)
        assert str(file) in message and "sha256" in message
        assert not target["model.norm.weight"].any()
        if name.startswith("rank"):
            assert "sha256" in problems_of(dcp.load_rank_tensors, path, 0)
    file.write_bytes(content)
    assert_bitwise(load(path), state(1))


def test_a_flipped_byte_in_the_manifest_never_loads_other_numbers(tmp_path):
    path = save(tmp_path, 1)
    file = path / "manifest.json"
    content = file.read_bytes()
    for at in range(0, len(content), 7):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            assert_bitwise(load(path), state(1))
        except CheckpointError as error:
            assert "manifest.json" in str(error)
    digits = content.replace(b'"samples_consumed": 8', b'"samples_consumed": 9')
    assert digits != content
    file.write_bytes(digits)
    assert "damaged or edited" in problems_of(dcp.read_manifest, path)


def test_truncated_and_missing_files_are_named_without_reading_them(tmp_path):
    path = save(tmp_path, 1)
    with (path / "tensors-00000.safetensors").open("r+b") as file:
        file.truncate(100)
    (path / "tokenizer.json").unlink()
    for verify in (True, False):
        message = problems_of(load, path, verify=verify)
        assert "tensors-00000.safetensors has 100 bytes, the manifest says" in message
        assert f"{path / 'tokenizer.json'} is missing" in message
    assert dcp.latest(tmp_path) is None and path.exists()


def test_without_verification_a_damaged_header_is_still_an_error(tmp_path):
    path = save(tmp_path, 1)
    file = path / "tensors-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(b"\xff" * 8 + content[8:])
    assert str(file) in problems_of(load, path, verify=False)
    file.write_bytes(content.replace(b'"half"', b'"hafl"'))
    message = problems_of(load, path, verify=False)
    assert str(file) in message and "File does not contain tensor half" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "made by a newer version"),
        ({"format": "1"}, "key format is '1'"),
        ({"format": True}, "key format is True"),
        ({"format": 0}, "key format is 0"),
        ({"step": -1}, "key step is -1"),
        ({"samples_consumed": 1.5}, "key samples_consumed is 1.5"),
        ({"data_hash": None}, "key data_hash is None, expected str"),
        ({"files": [{"name": "../up", "bytes": 1, "sha256": "0" * 64}]}, "key files holds"),
        ({"files": [{"name": "a", "bytes": 1, "sha256": "xyz"}]}, "key files holds"),
        ({"files": [{"name": 7, "bytes": 1, "sha256": "0" * 64}]}, "key files holds"),
        ({"tensors": {"w": {"dtype": [], "shape": [1], "chunks": []}}}, "expected dtype, shape"),
        ({"tensors": {"w": {"dtype": "object", "shape": [1], "chunks": []}}}, "dtype 'object'"),
        ({"tensors": {"w": {"dtype": "int8", "shape": [-1], "chunks": []}}}, "shape [-1]"),
        ({"tensors": {"w": {"dtype": "int8", "shape": [2], "chunks": []}}}, "no chunks hold"),
        ({"tensors": []}, "key tensors is []"),
        ({"tokens": "9"}, "key tokens is '9', expected 0 or more"),
        ({"metrics": [1.0]}, "key metrics is [1.0], expected dict"),
    ],
)
def test_an_invalid_manifest_names_the_file_and_the_key(tmp_path, changes, words):
    path = save(tmp_path, 1)
    edit_manifest(path, **changes)
    for message in (problems_of(dcp.read_manifest, path), problems_of(load, path)):
        assert words in message and str(path / "manifest.json") in message
    assert dcp.latest(tmp_path) is None


@pytest.mark.parametrize("hash_", [{}, {"sha256": ""}, {"sha257": "0" * 64}])
def test_a_manifest_without_its_own_hash_is_refused(tmp_path, hash_):
    path = save(tmp_path, 1)
    manifest = dcp.read_manifest(path)
    del manifest["sha256"]
    (path / disk.MANIFEST).write_text(json.dumps({**manifest, **hash_}))
    assert "key sha256 is missing" in problems_of(dcp.read_manifest, path)
    assert dcp.latest(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", "{", "null", "[" * 100_000, '{"format": 1}', "\xff"])
def test_garbage_in_place_of_a_manifest_is_one_clear_error(tmp_path, content):
    path = save(tmp_path, 1)
    (path / "manifest.json").write_bytes(content.encode("latin-1"))
    assert str(path / "manifest.json") in problems_of(dcp.read_manifest, path)
    assert dcp.latest(tmp_path) is None


def test_chunks_outside_the_tensor_or_in_unlisted_files_are_refused(tmp_path):
    path = save(tmp_path, 1)
    tensors = dcp.read_manifest(path)["tensors"]
    chunk = tensors["model.norm.weight"]["chunks"][0]
    for change, words in [
        ({"offset": [1]}, "reaches outside shape [7]"),
        ({"offset": [0, 0]}, "do not fit shape [7]"),
        ({"file": "/etc/hostname"}, "none of the listed files"),
        ({"key": 3}, "chunk 3 of file"),
        ({"key": "transposed"}, "key 'transposed', that of this place is 'model.norm.weight'"),
        ({"offset": None}, "chunk offset None"),
    ]:
        tensors["model.norm.weight"]["chunks"] = [{**chunk, **change}]
        edit_manifest(path, tensors=tensors)
        message = problems_of(dcp.read_manifest, path)
        assert words in message and "model.norm.weight" in message


def test_a_key_that_holds_another_shape_than_the_manifest_is_refused(tmp_path):
    path = save(tmp_path, 1)
    file = path / "tensors-00000.safetensors"
    file.unlink()
    entry = storage.write_safetensors(file, {**state(1), "half": torch.zeros(3, 5)})
    files = [entry if e["name"] == file.name else e for e in dcp.read_manifest(path)["files"]]
    edit_manifest(path, files=files)
    message = problems_of(load, path)
    assert "tensors-00000.safetensors key half is F32 [3, 5]" in message


def test_parts_whose_places_were_exchanged_are_refused(tmp_path):
    path = save(tmp_path, 1)
    tensors = dcp.read_manifest(path)["tensors"]
    (chunk,) = tensors["half"]["chunks"]
    parts = [{**chunk, "offset": [at, 0], "shape": [n, 3]} for at, n in ((0, 2), (2, 3))]
    for exchanged in (False, True):
        for part, at in zip(parts, (2, 0) if exchanged else (0, 2), strict=True):
            part["key"] = f"half@{at},0"
        tensors["half"]["chunks"] = parts
        edit_manifest(path, tensors=tensors)
        if not exchanged:
            assert dcp.read_manifest(path)["tensors"] == tensors
    message = problems_of(dcp.read_manifest, path)
    assert "half: chunk at [0, 0] has key 'half@2,0', that of this place is 'half@0,0'" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensors": {"lr": 3.0}}, "lr is a float; only tensors are saved"),
        ({"tensors": {"w": torch.empty(2, device="meta")}}, "tensor w is on the meta device"),
        ({"tensors": {"w": torch.zeros(2, dtype=torch.complex64)}}, "tensor w is complex64"),
        ({"tensors": {"w": torch.eye(2).to_sparse()}}, "tensor w is of layout"),
        ({"meta": {"model": {}}}, "key samples_consumed is None, expected 0 or more"),
        ({"meta": {**meta(), "note": math.nan}}, "meta or files: is not plain JSON"),
        ({"files": {"../x": b""}}, "key files holds {'name': '../x'"),
        ({"step": -1}, "key step is -1, expected 0 or more"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_a_folder_is_made(tmp_path, change, words):
    root = tmp_path / "checkpoints"
    assert words in problems_of(save, root, **{"step": 1, **change})
    assert not root.exists()


@pytest.mark.parametrize("prefix", ["", "optim.exp_avg."])
def test_experts_of_one_rank_alone_are_refused_at_save(tmp_path, prefix):
    name = f"{prefix}model.layers.0.mlp.experts.up_proj.weight"
    message = problems_of(save, tmp_path / "c", 1, {name: torch.zeros(2, 6, 3)})
    assert name in message and "[2, 6, 3]" in message and "num_experts is 4" in message
    message = problems_of(save, tmp_path / "c", 1, {name: torch.zeros(4, 6, 3)}, meta=meta(8, 8))
    assert "num_experts is 8" in message
    save(tmp_path / "c", 1, {name: torch.zeros(4, 6, 3)})


def test_a_saved_step_is_kept_as_it_is(tmp_path):
    path = save(tmp_path, 4)
    before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    assert save(tmp_path, 4, state(99)) == path
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
    message = problems_of(save, tmp_path, 4, state(99), meta=meta(1000))
    assert "samples_consumed=32" in message and "run.resume" in message
    assert {entry.name: entry.read_bytes() for entry in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir() if "tmp" in entry.name] == []


def test_an_incomplete_folder_of_that_name_is_moved_aside_and_kept(tmp_path):
    path = save(tmp_path, 4)
    (path / "manifest.json").unlink()
    assert dcp.latest(tmp_path) is None
    assert save(tmp_path, 4, state(5)) == path
    assert_bitwise(load(path), state(5))
    (aside,) = tmp_path.glob("step-00000004.incomplete-*")
    assert_bitwise(load_file(aside / "tensors-00000.safetensors"), state(4))


def test_latest_is_the_newest_complete_checkpoint_whatever_lies_around(tmp_path):
    assert dcp.latest(tmp_path / "absent") is None
    one, two = save(tmp_path, 1), save(tmp_path, 2)
    (tmp_path / "step-00000009.tmp-host-1-abcdef").mkdir()
    (tmp_path / "step-00000010").mkdir()
    (tmp_path / "step-00000011").write_text("a file")
    (tmp_path / "step-00000012").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step-x").mkdir()
    assert dcp.latest(tmp_path) == two
    for content in ("step-00000001", "step-00000010", "../..", "\0", ""):
        (tmp_path / "latest").write_text(content)
        assert dcp.latest(tmp_path) == two
    shutil.copytree(one, tmp_path / "step-00000013")
    assert dcp.latest(tmp_path) == two, "a folder whose name is not its step was taken"
    (two / "tokenizer.json").write_bytes(b"longer than before")
    assert dcp.latest(tmp_path) == one


def test_keep_removes_the_oldest_complete_ones_only(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    save(tmp_path, 4, keep=2)
    left = sorted(entry.name for entry in tmp_path.glob("step-*"))
    assert left == ["step-00000001", "step-00000003", "step-00000004"]
    assert_bitwise(load(tmp_path / "step-00000003"), state(3))


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / "step-00000001.tmp-abcdef"
    left.mkdir()
    (left / "tensors-00000.safetensors").write_text("half")
    aside = tmp_path / "step-00000001.incomplete-abcdef"
    aside.mkdir()
    save(tmp_path, 3)
    assert not left.exists() and aside.exists()


def test_a_file_that_the_checkpoint_itself_uses_cannot_be_given(tmp_path):
    first = save(tmp_path, 1)
    for name in ("manifest.json", "tensors-00000.safetensors"):
        message = problems_of(save, tmp_path, 2, files={name: b""})
        assert f"{name} cannot be written: File exists" in message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", first.name]


# Full disks, planted pickles; kills are in test_checkpoint_faults.py.


class Bomb:
    """Unpickling this creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_planted_pickle_is_never_unpickled(tmp_path):
    mark = tmp_path / "unpickled"
    payload = pickle.dumps(Bomb(mark))
    pickle.loads(payload)
    assert mark.exists(), "the payload does not work, so its absence would prove nothing"
    mark.unlink()
    torch.save(Bomb(mark), tmp_path / "bomb.pt")
    archive = (tmp_path / "bomb.pt").read_bytes()
    path = save(tmp_path / "checkpoints", 1)
    for name in (".metadata", "extra.pkl", "pytorch_model.bin", "optimizer.pt", "data.pickle"):
        (path / name).write_bytes(payload)
    (path.parent / ".metadata").write_bytes(payload)
    assert_bitwise(load(dcp.latest(path.parent)), state(1))
    for content in (payload, archive):
        for name in ("tensors-00000.safetensors", "rank-00000.safetensors"):
            (path / name).write_bytes(content)
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        listed = [
            {**file, **entry} if file["name"].endswith(".safetensors") else file
            for file in dcp.read_manifest(path)["files"]
        ]
        edit_manifest(path, files=listed)
        for verify in (True, False):
            assert "no valid safetensors file" in problems_of(load, path, verify=verify)
        assert "no valid safetensors file" in problems_of(dcp.load_rank_tensors, path, 0)
        (path / "manifest.json").write_bytes(content)
        assert "manifest.json cannot be read as JSON" in problems_of(load, path)
        edit = state(1)
        shutil.rmtree(path)
        path = save(tmp_path / "checkpoints", 1, edit)
    assert not mark.exists()


def test_a_full_disk_drops_the_new_checkpoint_and_keeps_the_old(tmp_path):
    first = save(tmp_path, 1)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            save(tmp_path, 2, {"w": torch.zeros(100_000)})
        except CheckpointError as error:
            good = "cannot be written" in str(error) and "run.keep" in str(error)
            os._exit(0 if good else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", first.name]
    assert dcp.latest(tmp_path) == first
    assert_bitwise(load(first), state(1))


def test_a_manifest_that_finds_no_room_drops_the_save(tmp_path):
    first = save(tmp_path, 1)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        try:
            save(tmp_path, 2, {f"w{i}": torch.zeros(1) for i in range(30)}, rank_tensors={})
        except CheckpointError as error:
            os._exit(0 if "manifest.json cannot be written" in str(error) else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", first.name]


def test_a_pointer_that_cannot_be_moved_does_not_undo_the_checkpoint(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.warns(UserWarning, match="latest could not be moved"):
        path = save(tmp_path, 2)
    assert dcp.latest(tmp_path) == path


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in problems_of(save, tmp_path / "file" / "checkpoints", 1)


# Several ranks.


def world_mesh() -> Mesh:
    device = torch.device("cpu")
    return build_mesh(ParallelConfig(), device=device, local_rank=0, comm_timeout=60.0)


def full_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(5, 4, generator=generator),
        "columns": torch.randn(3, 6, generator=generator),
        "one": torch.randn(1, 4, generator=generator),
        "m.experts.w": torch.randn(4, 2, 3, generator=generator),
        "copy": torch.randn(6, generator=generator),
        "replica": torch.randn(4, generator=generator),
    }


PLACEMENTS = {"rows": 0, "columns": 1, "one": 0, "m.experts.w": 0}


def sharded_state(world: int, source: dict[str, Tensor]) -> dict[str, Tensor]:
    ranks = init_device_mesh("cpu", (world,))
    tensors = {
        name: distribute_tensor(source[name], ranks, [Shard(dim)])
        for name, dim in PLACEMENTS.items()
    }
    tensors["replica"] = distribute_tensor(source["replica"], ranks, [Replicate()])
    tensors["copy"] = source["copy"].clone()
    return tensors


def assert_shards_equal(tensors: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, wanted[name]), name


def save_on_ranks(rank: int, world: int, root: Path) -> str:
    tensors = sharded_state(world, full_state())
    own = {"rng": torch.full((3,), rank, dtype=torch.uint8)}
    path = save(root, 7, tensors, rank_tensors=own, mesh=world_mesh())
    return str(path)


def load_on_ranks(rank: int, world: int, path: Path) -> list[int] | None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in full_state().items()}
    tensors = sharded_state(world, zeros)
    dcp.load(path, tensors, mesh=world_mesh())
    assert_shards_equal(tensors, full_state())
    own = dcp.load_rank_tensors(path, rank)
    return None if own is None else own["rng"].tolist()


def test_two_ranks_save_their_shards_and_one_process_loads_the_whole(tmp_path):
    paths = run_ranks(save_on_ranks, 2, tmp_path)
    assert set(paths) == {str(tmp_path / "step-00000007")}
    path = Path(paths[0])
    assert_bitwise(load(path, full_state()), full_state())
    manifest = dcp.read_manifest(path)
    chunks = {name: entry["chunks"] for name, entry in manifest["tensors"].items()}
    assert [c["offset"] for c in chunks["rows"]] == [[0, 0], [3, 0]]
    assert [c["offset"] for c in chunks["columns"]] == [[0, 0], [0, 3]]
    assert len(chunks["one"]) == len(chunks["copy"]) == len(chunks["replica"]) == 1
    writers = {c["file"] for parts in chunks.values() for c in parts}
    assert writers == {"tensors-00000.safetensors", "tensors-00001.safetensors"}
    stored = [load_file(path / name) for name in sorted(writers)]
    assert not stored[0].keys() & stored[1].keys()
    assert run_ranks(load_on_ranks, 2, path) == [[0, 0, 0], [1, 1, 1]]


def test_one_process_saves_and_other_worlds_load_their_shards(tmp_path):
    own = {"rng": torch.zeros(3, dtype=torch.uint8)}
    path = save(tmp_path, 7, full_state(), rank_tensors=own)
    for world in (2, 3):
        assert run_ranks(load_on_ranks, world, path) == [[0, 0, 0], *[None] * (world - 1)]


def mixed_axes(rank: int, world: int, root: Path) -> None:
    """FSDP over tensor parallel shards one dimension twice, in strided order."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wanted = torch.arange(8.0 * 3).reshape(8, 3)
    layer = torch.nn.Linear(3, 8, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(wanted, mesh["tp"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["dp"])
    path = save(root, 1, dict(layer.named_parameters()), mesh=world_mesh())
    loaded = {"weight": torch.zeros(8, 3)}
    dcp.load(path, loaded)
    assert torch.equal(loaded["weight"], wanted)
    with torch.no_grad():
        layer.weight.zero_()
    dcp.load(path, dict(layer.named_parameters()), mesh=world_mesh())
    assert torch.equal(layer.weight.full_tensor(), wanted)


def test_fsdp_over_tensor_parallel_saves_and_loads(tmp_path):
    run_ranks(mixed_axes, 4, tmp_path)


def stages(rank: int, world: int, root: Path) -> str:
    """Each rank holds its own names, as pipeline stages do."""
    mesh, name = world_mesh(), f"model.layers.{rank}.w"
    path = save(root, 1, {name: torch.full((2,), float(rank))}, mesh=mesh)
    mine = {name: torch.zeros(2)}
    dcp.load(path, mine, mesh=mesh)
    assert mine[name].tolist() == [rank, rank]
    return problems_of(dcp.load, path, {"model.layers.0.w": torch.zeros(2)}, mesh=mesh)


def test_pipeline_stages_hold_different_names(tmp_path):
    messages = run_ranks(stages, 2, tmp_path)
    assert messages[0] == messages[1] and "model.layers.1.w is in the checkpoint" in messages[0]


def refused(rank: int, world: int, root: Path, kind: str) -> str:
    ranks = init_device_mesh("cpu", (world,))
    local = torch.full((2, 2), float(rank))
    mesh, size, stride = world_mesh(), torch.Size((4, 2)), (2, 1)
    if kind == "experts":
        tensor = DTensor.from_local(local, ranks, [Replicate()], run_check=False)
        return problems_of(save, root, 1, {"a.experts.w": tensor}, mesh=mesh)
    if kind == "replicas":
        return problems_of(save, root, 1, {"w": local, "equal": torch.ones(2)}, mesh=mesh)
    if kind.startswith("swapped"):
        dim = ["swapped rows", "swapped columns"].index(kind)
        rows = torch.arange(4.0).reshape(2, 2)
        return problems_of(save, root, 1, {"w": rows.flip(dim) if rank else rows}, mesh=mesh)
    if kind == "shapes":
        return problems_of(save, root, 1, {"w": torch.zeros(2 + rank)}, mesh=mesh)
    if kind == "dtypes":
        value = torch.zeros(2, dtype=torch.float64 if rank else torch.float32)
        return problems_of(save, root, 1, {"w": value}, mesh=mesh)
    if kind == "hole":
        part = DTensor.from_local(local, ranks, [Shard(0)], shape=size, stride=stride)
        return problems_of(save, root, 1, {"w": part} if rank == 0 else {}, mesh=mesh)
    if kind == "overlap":
        rows = DTensor.from_local(local, ranks, [Shard(0)], shape=size, stride=stride)
        columns = DTensor.from_local(
            local.t().reshape(4, 1), ranks, [Shard(1)], shape=size, stride=stride
        )
        return problems_of(save, root, 1, {"w": columns if rank else rows}, mesh=mesh)
    if kind == "mixed":
        part = DTensor.from_local(local, ranks, [Shard(0)], shape=size, stride=stride)
        return problems_of(save, root, 1, {"w": part if rank else torch.zeros(4, 2)}, mesh=mesh)
    assert kind == "one rank"
    return problems_of(save, root, 1, {"w": 3 if rank else torch.zeros(2)}, mesh=mesh)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("experts", ["a.experts.w has shape [2, 2]", "num_experts is 4"]),
        ("replicas", ["tensor w: ranks 0 and 1 write the same part", "different content"]),
        ("swapped rows", ["tensor w: ranks 0 and 1 write the same part", "different content"]),
        ("swapped columns", ["tensor w: ranks 0 and 1 write the same part", "different content"]),
        ("shapes", ["tensor w: rank 0 holds float32 [2], rank 1 float32 [3]"]),
        ("dtypes", ["tensor w: rank 0 holds float32 [2], rank 1 float64 [2]"]),
        ("hole", ["tensor w (float32 [4, 2]): boxes hold 4 of its 8 elements, not the one at [2"]),
        ("mixed", ["[0:4, 0:2] and [2:4, 0:2] overlap in 4 elements; ranks [0, 1] hold it"]),
        ("overlap", ["tensor w (float32 [4, 2])", "[0:2, 0:2] and [0:4, 1:2] overlap in 2"]),
        ("one rank", ["rank 1: w is a int; only tensors are saved"]),
    ],
)
def test_ranks_that_clash_are_refused_and_named_on_every_rank(tmp_path, kind, words):
    root = tmp_path / "checkpoints"
    messages = run_ranks(refused, 2, root, kind)
    assert messages[0] == messages[1]
    assert all(word in messages[0] for word in words), messages[0]
    assert "equal" not in messages[0].split("make the replicas")[0]
    assert not root.exists() or list(root.iterdir()) == []


def damaged_for_all(rank: int, world: int, path: Path) -> str:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in full_state().items()}
    return problems_of(dcp.load, path, sharded_state(world, zeros), mesh=world_mesh())


def test_damage_that_one_rank_finds_is_told_on_every_rank(tmp_path):
    path = Path(run_ranks(save_on_ranks, 2, tmp_path)[0])
    file = path / "tensors-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    messages = run_ranks(damaged_for_all, 2, path)
    assert messages[0] == messages[1] and str(file) in messages[0]


def full_disk_on_one_rank(rank: int, world: int, root: Path) -> str:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    big = distribute_tensor(torch.zeros(2, 100_000), init_device_mesh("cpu", (world,)), [Shard(0)])
    message = problems_of(save, root, 2, {"w": big}, mesh=world_mesh())
    assert not dist.get_rank() or "rank 1" in message
    return message


def test_one_rank_with_a_full_disk_ends_the_save_on_all(tmp_path):
    first = save(tmp_path, 1)
    messages = run_ranks(full_disk_on_one_rank, 2, tmp_path)
    assert (
        messages[0] == messages[1] and "tensors-00001.safetensors cannot be written" in messages[0]
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", first.name]


# Format 1 stays loadable for ever.


def fixture_tensors() -> dict[str, Tensor]:
    """The numbers of the fixture, by formula: what a loaded checkpoint is compared with."""
    weight = torch.arange(20, dtype=torch.float32).reshape(5, 4) / 8 - 1
    experts = torch.arange(12, dtype=torch.float32).reshape(2, 3, 2) * 0.5
    return {
        "model.embed_tokens.weight": weight,
        "model.layers.0.mlp.experts.up_proj.weight": experts,
        "model.norm.weight": torch.linspace(0, 1, 4, dtype=torch.bfloat16),
        "optim.exp_avg.model.embed_tokens.weight": (weight * 3).double(),
        "optim.step": torch.tensor(5.0),
    }


def write_fixture(rank: int, world: int, root: Path) -> None:
    """How the fixture was made: `python tests/test_checkpoint.py` writes it where none lies."""
    ranks, tensors = init_device_mesh("cpu", (world,)), fixture_tensors()
    for name in [name for name in tensors if tensors[name].ndim > 1]:
        tensors[name] = distribute_tensor(tensors[name], ranks, [Shard(0)])
    save(
        root,
        5,
        tensors,
        rank_tensors={"rng.torch": torch.arange(rank, rank + 4, dtype=torch.uint8)},
        meta={
            "samples_consumed": 40,
            "data_hash": "0" * 64,
            "config_hash": "1" * 64,
            "model": {"hidden_size": 4, "num_experts": 2},
            "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1},
            "tokens": 5120,
        },
        mesh=world_mesh(),
    )


def test_the_format_1_fixture_loads_to_known_numbers():
    path = dcp.latest(FIXTURE)
    assert path == FIXTURE / "step-00000005"
    assert sum(file.stat().st_size for file in path.iterdir()) < 8_000
    tensors = {name: torch.zeros_like(tensor) for name, tensor in fixture_tensors().items()}
    manifest = dcp.load(path, tensors)
    assert_bitwise(tensors, fixture_tensors())
    assert tensors["model.embed_tokens.weight"][4].tolist() == [1.0, 1.125, 1.25, 1.375]
    assert (manifest["format"], manifest["step"], manifest["samples_consumed"]) == (1, 5, 40)
    assert manifest["mesh"]["dp_shard"] == 2 and manifest["tokens"] == 5120
    assert dcp.load_rank_tensors(path, 1)["rng.torch"].tolist() == [1, 2, 3, 4]


if __name__ == "__main__":
    run_ranks(write_fixture, 2, FIXTURE)
