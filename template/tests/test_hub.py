"""Weights are found in a folder, the cache or the hub; whatever the hub does is told in words."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from fake_hub import COMMIT, FakeHub, sha256
from huggingface_hub import constants
from projects import SOURCE

from curry_train.checkpoint import CheckpointError, hub
from curry_train.checkpoint.fetch import HubUnreachable, stored_at
from curry_train.checkpoint.hub import cached_folder, find_file, find_weights, missing_files
from curry_train.config import ParallelConfig
from curry_train.parallel.mesh import build_mesh
from curry_train.testing import run_ranks

NAME = "owner/model"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no hub that answers."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return folder


@pytest.fixture
def published(tmp_path):
    """What a publisher has: shards and their index beside pickles, code and other formats."""
    folder = tmp_path / "published"
    (folder / "original").mkdir(parents=True)
    weight_map = dict(zip("ab", SHARDS, strict=True))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    luck = np.random.default_rng(0)
    whole = ("model.safetensors", "consolidated.safetensors", "original/model.safetensors")
    for name in (*SHARDS, *whole):
        (folder / name).write_bytes(luck.bytes(200_000))
    for name in ("pytorch_model.bin", "modeling_own.py", "README.md", "original/params.json"):
        (folder / name).write_text("never fetched")
    return folder


@pytest.fixture
def served(published, monkeypatch):
    with FakeHub({NAME: published}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server


def refusal(*args, **kwargs) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        find_weights(*args, **kwargs)
    return caught.value


def test_a_folder_is_taken_as_it_is_and_what_it_lacks_is_named(published, monkeypatch):
    monkeypatch.setattr(hub, "_probe", lambda *_: pytest.fail("nobody was to be asked"))
    assert find_weights(published) == published == find_weights(str(published))
    (published / SHARDS[1]).unlink()
    (published / "config.json").unlink()
    text = str(refusal(published))
    assert "config.json is absent" in text
    assert f"1 of 2 weight files are absent: {SHARDS[1]}" in text
    (published / "model.safetensors.index.json").unlink()  # the names still say how many
    assert f"absent: {SHARDS[1]}" in str(refusal(published))
    (published / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert "index.json cannot be read" in str(refusal(published))


def test_a_checkpoint_of_ours_is_a_folder_too(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    assert find_weights(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["weights", "/not/there", "a/b/c", "../up/model", "a/.."])
def test_what_is_no_folder_and_no_name_asks_nobody(name, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_probe", lambda *_: pytest.fail("nobody was to be asked"))
    monkeypatch.chdir(tmp_path)
    assert "give a folder" in str(refusal(name))


def test_only_safetensors_json_and_the_tokenizer_are_fetched_once(served, published, cache):
    folder = find_weights(NAME)
    assert folder == cache / "models--owner--model" / "snapshots" / COMMIT
    fetched = {"config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS}
    assert {path.name for path in folder.iterdir()} == fetched
    assert all(sha256(folder / name) == sha256(published / name) for name in fetched)
    assert [name for name, _ in served.bodies()][-2:] == SHARDS, "small files come first"
    served.requests.clear()
    assert find_weights(NAME) == folder == find_weights(NAME, revision=COMMIT)
    assert served.requests == [], "what is cached is taken without asking"


def test_the_library_reads_our_cache_and_we_read_its(served, cache, monkeypatch):
    folder = find_weights(NAME)
    found = huggingface_hub.try_to_load_from_cache(NAME, "config.json")
    assert found == str(folder / "config.json")
    shutil.rmtree(cache)
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    for name in ("config.json", "model.safetensors.index.json", *SHARDS):
        huggingface_hub.hf_hub_download(NAME, name)
    served.requests.clear()
    assert find_weights(NAME) == folder and served.requests == []


def test_a_cached_snapshot_that_lacks_a_shard_is_completed(served, cache):
    folder = find_weights(NAME)
    (folder / SHARDS[0]).resolve().unlink()
    assert missing_files(folder) == [f"1 of 2 weight files are absent: {SHARDS[0]}"]
    served.requests.clear()
    assert find_weights(NAME) == folder and missing_files(folder) == []
    assert served.bodies() == [(SHARDS[0], "")]


def test_a_server_that_dies_in_the_middle_is_continued_at_the_next_call(served, published, capsys):
    served.faults.cut = 123_456
    error = refusal(NAME)
    assert isinstance(error, HubUnreachable)
    assert "broke off at 123 kB of 200 kB; that is kept" in str(error)
    assert cached_folder(NAME) is None, "a name that stands for less than the whole"
    served.faults.cut, served.faults.status = 0, 200
    served.requests.clear()
    folder = find_weights(NAME)
    assert served.bodies() == [(SHARDS[0], "bytes=123456-"), (SHARDS[1], "")]
    assert sha256(folder / SHARDS[0]) == sha256(published / SHARDS[0])
    told = capsys.readouterr().err
    assert "model-00001-of-00002.safetensors (file 1 of 2): 123 kB of 200 kB" in told


def test_a_file_that_arrives_wrong_is_removed_and_named(served, cache):
    served.faults.garbled = True
    text = str(refusal(NAME))
    assert "config.json (file 1 of 5) does not have the hash that the hub names" in text
    assert not list(cache.rglob("*.incomplete")) and not list(cache.rglob("config.json"))
    served.faults.garbled = False
    assert missing_files(find_weights(NAME)) == []


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "", "answers 401 for owner/model: there is no such name, or it is private"),
        (404, "RepoNotFound", "answers 404 for owner/model: there is no such name"),
        (403, "GatedRepo", "is gated: accept its terms at http://127.0.0.1"),
        (404, "RevisionNotFound", "no such revision"),
        (503, "", "answered 503. Three ways out"),
    ],
)
def test_a_refusal_is_told_in_plain_words(status, code, words, served, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretverysecret")
    served.faults.status, served.faults.code = status, code
    error = refusal(NAME)
    assert words in str(error) and "hf_very" not in str(error) and "Traceback" not in str(error)
    assert isinstance(error, HubUnreachable) == (status == 503)


def test_a_gated_model_whose_listing_is_public_is_refused_at_its_first_file(served):
    served.faults.file_status, served.faults.code = 403, "GatedRepo"
    error = refusal(NAME)
    assert "is gated" in str(error) and not isinstance(error, HubUnreachable)
    assert len(served.bodies()) == 1, "a refusal is not asked again"


def test_a_model_of_pickles_alone_is_refused(served, published):
    for name in (*SHARDS, "model.safetensors"):
        (published / name).unlink()
    assert "pytorch_model.bin are pickles, which are never read" in str(refusal(NAME))


def test_one_file_of_a_data_set(tmp_path, monkeypatch):
    (tmp_path / "data" / "part").mkdir(parents=True)
    (tmp_path / "data" / "part" / "text.jsonl.zst").write_bytes(b"text" * 99)
    with FakeHub({"datasets/owner/text": tmp_path / "data"}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        listing = find_file("owner/text", "part/text.jsonl.zst")
        assert listing.bytes == 396 and listing.commit == COMMIT
        path = hub.download(listing) / "part" / "text.jsonl.zst"
        assert path.read_bytes() == b"text" * 99
        assert find_file("owner/text", "part/text.jsonl.zst") == path
        with pytest.raises(CheckpointError, match="404"):
            find_file("owner/other", "x.txt")


def test_a_full_disk_is_told_before_anything_is_fetched(served, monkeypatch):
    free = shutil._ntuple_diskusage(10**6, 10**6, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert "needs 400 kB" in str(refusal(NAME)) and served.bodies() == []


def test_no_socket_is_opened_when_the_hub_is_switched_off(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was opened"))
    monkeypatch.setattr(threading, "Thread", lambda *_, **__: pytest.fail("a thread was started"))
    error = refusal(NAME)
    assert isinstance(error, HubUnreachable)
    assert "HF_HUB_OFFLINE is set" in str(error) and "Three ways out" in str(error)


@pytest.mark.parametrize("kind", ["refused", "silent", "name service hangs"])
def test_an_unreachable_hub_takes_less_than_five_seconds(kind, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretverysecret")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if kind == "silent":
            listener.listen(5)  # accepts and never answers
        elif kind != "refused":
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: threading.Event().wait(20))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://user:secret@127.0.0.1:{port}")
        start = time.monotonic()
        error = refusal(NAME)
        assert time.monotonic() - start < 5.0
    assert isinstance(error, HubUnreachable)
    for way in ("give a folder", "set HF_HOME", f"python -m curry_train.checkpoint.hub {NAME}"):
        assert way in str(error)
    assert "secret" not in str(error)


def by_ranks(rank, world, name):
    mesh = build_mesh(
        ParallelConfig(), device=torch.device("cpu"), local_rank=rank, comm_timeout=60.0
    )
    asked = []
    real = hub._probe
    hub._probe = lambda *args: asked.append(args[0]) or real(*args)
    try:
        return str(find_weights(name, mesh=mesh)), asked
    except CheckpointError as error:
        return str(error), asked


def test_only_rank_zero_asks_and_every_rank_gets_the_answer(served, cache):
    answers = run_ranks(by_ranks, 3, NAME, timeout=60)
    folder = str(cache / "models--owner--model" / "snapshots" / COMMIT)
    assert answers == [(folder, [NAME]), (folder, []), (folder, [])]
    told = run_ranks(by_ranks, 2, "owner/other", timeout=60)
    assert told[0][0] == told[1][0] and "answers 404 for owner/other" in told[0][0]
    assert told[1][1] == []


def out_of_sight(rank, world, folder):
    if rank == 1:
        Path.is_dir = lambda self: False
    return by_ranks(rank, world, folder)[0]


def test_a_folder_that_another_node_does_not_see_is_refused_everywhere(published):
    told = run_ranks(out_of_sight, 2, str(published), timeout=60)
    assert told[0] == told[1] and "is not visible to ranks [1]" in told[0]


def slow(rank, world, folder):
    hub.HEARTBEAT_SECONDS = 0.02
    end = threading.Event()
    hub.missing_files = lambda _: end.wait(0.3) or []
    return by_ranks(rank, world, folder)[0]


def test_ranks_hear_of_a_slow_download_meanwhile(published):
    assert run_ranks(slow, 2, str(published), timeout=60) == [str(published)] * 2


def test_the_command_prints_the_folder_and_needs_no_torch(published, tmp_path):
    command = [sys.executable, "-c", "import runpy, sys; sys.modules['torch'] = None; "
               "runpy.run_module('curry_train.checkpoint.hub', run_name='__main__')"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    done = [
        subprocess.run(
            [*command, name], env=environment, capture_output=True, text=True, timeout=60,
        )
        for name in (str(published), NAME)
    ]  # fmt: skip
    assert (done[0].returncode, done[0].stdout) == (0, f"{published}\n"), done[0].stderr
    assert done[1].returncode == 1 and "HF_HUB_OFFLINE is set" in done[1].stderr
    assert done[1].stdout == ""


def test_the_place_of_a_name_in_the_cache(cache):
    assert stored_at("owner/text", "dataset") == cache / "datasets--owner--text"
