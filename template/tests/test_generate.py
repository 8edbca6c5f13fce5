"""Text from a checkpoint: greedy is the argmax, sampling repeats by its seed, paths are checked."""

import json
from types import SimpleNamespace

import pytest
import torch
from projects import SMALL, exit_code, fork_ranks, forked, run_folders

import curry_train.generate
from curry_train.checkpoint import manifest_sha256
from curry_train.checkpoint.training_state import load_for_inference
from curry_train.compose import load_config
from curry_train.config import Config, ModelConfig
from curry_train.data import open_corpus
from curry_train.generate import choose, generate, main, sample_text, write_sample
from curry_train.models.protocol import build_model
from curry_train.parallel.mesh import build_mesh
from curry_train.runtime import assemble
from curry_train.testing import run_ranks


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


LAYOUTS = {
    "tp2": (2, ["parallel.tp=2"]),
    "cp2": (2, ["parallel.cp=2"]),
    "cp2 all_gather": (2, ["parallel.cp=2", "parallel.cp_kind=all_gather"]),
    "ep2": (2, ["parallel.ep=2"]),
    "zero3": (2, ["parallel.zero=3"]),
    "pp2 dense": (2, ["parallel.pp=2", "model.num_experts=0"]),
    "pp2 zbv zero2": (2, ["parallel.pp=2", "parallel.schedule=zbv", "parallel.zero=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "pp2 interleaved": (2, ["parallel.pp=2", "parallel.schedule=interleaved1f1b"]),
    "pp2 cp2 tp2 zero3": (
        8,
        ["parallel.pp=2", "parallel.cp=2", "parallel.tp=2", "parallel.zero=3"],
    ),
    "pp2 ep2 dualpipev": (
        4,
        ["parallel.pp=2", "parallel.ep=2", "parallel.schedule=dualpipev", "parallel.overlap=true"],
    ),
    "cp2 tp2 ep4 zero2": (
        4,
        ["parallel.cp=2", "parallel.tp=2", "parallel.ep=4", "parallel.zero=2"],
    ),
}
TEXT = ("model.num_hidden_layers=4", "model.moe_intermediate_size=16", "data.seq_len=16",
        "precision=fp64", "accelerator=cpu", "model.initializer_range=0.3")  # fmt: skip
PROMPTS = (
    [10, 20, 30],
    [7],
    list(range(40, 61)),
)  # 3 and 1 divide by nothing, 21 exceed the window


def texts(runtime) -> list[list[int]]:
    """Continue every prompt, greedy and sampled."""
    settings = {"max_tokens": 6, "context": 16, "mesh": runtime.mesh}
    settings["pipeline"] = runtime.pipeline
    ways = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5})
    return [generate(runtime.model, ids, **way, **settings) for ids in PROMPTS for way in ways]


def runtime_on(rank, words):
    config = load_config([*TEXT, *words])
    device = torch.device("cpu")
    mesh = build_mesh(config.parallel, device=device, local_rank=rank, comm_timeout=60.0)
    return assemble(config, open_corpus(config.data, cache_dir=None), mesh)


def text_of_rank(rank, world, words):
    runtime = runtime_on(rank, words)
    before = torch.get_rng_state()
    found = texts(runtime)
    assert torch.equal(before, torch.get_rng_state())
    assert all(chunk.training for chunk in runtime.chunks)
    return found


def text_of_one(*words) -> list[list[int]]:
    return texts(runtime_on(0, words))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(2)
def test_ranks_that_share_a_model_write_the_text_of_one_process(layout):
    world, words = LAYOUTS[layout]
    alone = text_of_one(*(word for word in words if word.startswith("model.")))
    assert len({tuple(ids) for ids in alone}) == 6, "no two of the texts are the same"
    assert run_ranks(text_of_rank, world, (f"devices={world}", *words)) == [alone] * world


def tokens_chosen(rank, world, words):
    runtime, seen = runtime_on(rank, (*words, "run.sample_tokens=5")), []

    def watched(*args):
        seen.append(args)
        return choose(*args)

    curry_train.generate.choose = watched
    write_sample(runtime, SimpleNamespace(sample=lambda step, text: None))
    return len(seen)


@pytest.mark.parametrize("words", [(), ("parallel.zero=1",)])
def test_ranks_with_a_whole_model_sample_too_and_wait_a_token_at_most(words):
    """One that samples alone would outlast run.comm_timeout of the others with a long text."""
    (first, second) = run_ranks(tokens_chosen, 2, ("devices=2", *words))
    assert first == second > 0


def capacity_text(rank, world, words):
    return texts(runtime_on(rank, words))


@pytest.mark.filterwarnings("ignore:model.capacity_factor")
def test_padding_of_a_window_takes_no_place_of_an_expert():
    """A capacity counts the tokens of a sequence: what pads it to whole slices must not count."""
    tight = ("model.capacity_factor=0.6", "model.drop_policy=weight")
    alone = texts(runtime_on(0, tight))
    assert alone != text_of_one(), "choices are dropped"
    words = (*tight, "devices=2", "parallel.tp=2")
    assert run_ranks(capacity_text, 2, words) == [alone] * 2


def local_positions(rank, world, words):
    """Mutant: each rank reads its own last logits, not those after the last token."""

    def shared(model, window, mesh, pipeline):
        logits = real(model, window.roll(1, 1), mesh, pipeline)
        return logits

    real, curry_train.generate.shared_logits = curry_train.generate.shared_logits, shared
    return texts(runtime_on(rank, words))


def test_text_of_a_shifted_window_would_be_another():
    found = run_ranks(local_positions, 2, ("devices=2", "parallel.tp=2"))
    assert found[0] == found[1] != text_of_one()


def test_a_pipeline_samples_what_its_checkpoint_does_in_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [w for w in SMALL if not w.startswith("run.sample_tokens")]
    settings += ["run.max_steps=1", "run.sample_tokens=9", "run.name=piped", "parallel.pp=2"]
    settings += ["run.sample_prompt=War", "parallel.schedule=zbv", "model.num_hidden_layers=4"]
    pids = fork_ranks(2, *settings, folder=tmp_path)
    assert [exit_code(pid) for pid in pids] == [0, 0], (tmp_path / "rank-0.txt").read_text()
    out = (tmp_path / "rank-0.txt").read_text() + (tmp_path / "rank-1.txt").read_text()
    (folder,) = run_folders(tmp_path)
    [sample] = [
        note["sample"]
        for line in (folder / "journal.jsonl").read_text().splitlines()
        if "sample" in (note := json.loads(line))
    ]
    assert out.count("sample: War") == 1 and sample.startswith("War") and len(sample) > 4
    model, tokenizer, seq_len = load_for_inference(folder)
    assert sample == sample_text(model, tokenizer, "War", max_tokens=9, context=seq_len, seed=0)
