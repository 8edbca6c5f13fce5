"""Text from a checkpoint: greedy is the argmax, sampling repeats by its seed, paths are checked."""

import json

import pytest
import torch
from projects import SMALL, forked, run_folders

from curry_train.checkpoint import manifest_sha256
from curry_train.config import Config, ModelConfig
from curry_train.generate import choose, generate, main
from curry_train.models.protocol import build_model


@pytest.fixture(scope="module")
def model():
    return build_model(Config(model=ModelConfig(num_hidden_layers=1)), "cpu")


def test_greedy_takes_the_most_likely_token_of_the_last_context(model):
    ids = generate(model, [10, 20, 30], max_tokens=5, context=4, temperature=0)
    so_far = [10, 20, 30]
    for token in ids:
        logits = model(torch.tensor([so_far[-4:]])).logits[0, -1]
        assert token == int(logits.argmax()) and token < 257
        so_far.append(token)
    assert len(ids) == 5


def test_sampling_repeats_by_its_seed_and_leaves_the_training_randomness_alone(model):
    before = torch.get_rng_state()
    first = generate(model, [1], max_tokens=20, context=16, seed=3)
    assert first == generate(model, [1], max_tokens=20, context=16, seed=3)
    assert first != generate(model, [1], max_tokens=20, context=16, seed=4)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training


def test_generation_ends_before_the_stop_token(model):
    ids = generate(model, [1], max_tokens=50, context=8, seed=0)
    stopped = generate(model, [1], max_tokens=50, context=8, seed=0, stop_id=ids[4])
    assert stopped == ids[: ids.index(ids[4])]


def test_padding_is_never_chosen():
    logits = torch.full((320,), 0.0)
    logits[257:] = -torch.inf
    generator = torch.Generator().manual_seed(0)
    assert all(choose(logits, 1.0, generator) < 257 for _ in range(300))


def test_a_run_folder_gives_text_and_a_wrong_path_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = (*SMALL, "run.max_steps=2", "run.sample_tokens=7")
    code, out = forked(*settings, log=tmp_path / "log.txt")
    assert code == 0 and "sample:" in out, out
    (folder,) = run_folders(tmp_path)
    assert main([str(folder), "--max-tokens", "9", "--prompt", "War is", "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("War is")
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    assert main([str(checkpoint), "--max-tokens=9", "--prompt=War is", "--temperature=0"]) == 0
    assert capsys.readouterr().out == first
    assert main([str(tmp_path / "absent")]) == 2
    message = capsys.readouterr().err
    assert "no complete checkpoint" in message and len(message.splitlines()) == 1
    assert main([str(folder), "--max-tokens=0"]) == 2
    capsys.readouterr()
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    unknown = ({"architecture": "os:system"}, {"made_by_a_newer_version": 1}, {"head_dim": "wide"})
    for changes in unknown:
        changed = {**manifest, "model": {**manifest["model"], **changes}}
        path.write_text(json.dumps({**changed, "sha256": manifest_sha256(changed)}))
        assert main([str(checkpoint)]) == 2
        message = capsys.readouterr().err
        assert "manifest.json describes no model" in message and len(message.splitlines()) == 1
