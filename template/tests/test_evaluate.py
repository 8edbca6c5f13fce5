"""Validation is the whole split, whatever the batches, in nats per token and bits per byte."""

import math

import pytest
import torch

from curry_train.compose import load_config
from curry_train.config import DataConfig
from curry_train.data import open_corpus
from curry_train.data.loader import validation_batches
from curry_train.evaluate import evaluate
from curry_train.parallel.mesh import agreed, build_mesh
from curry_train.runtime import assemble, build_runtime
from curry_train.testing import run_ranks

SMALL = ("model.num_hidden_layers=1", "model.num_experts=0", "data.val_fraction=0.01",
         "precision=fp64", "accelerator=cpu")  # fmt: skip


def test_val_loss_is_the_mean_over_every_held_out_token_and_bpb_counts_bytes():
    runtime = build_runtime(SMALL)
    scores = evaluate(runtime)
    nll, tokens = 0.0, 0
    for batch in validation_batches(runtime.corpus, runtime.config.data, micro_batch_size=3):
        with torch.no_grad():
            logits = runtime.model(batch["input_ids"]).logits[..., :257]
        picked = batch["labels"] != -100
        log_probs = logits.log_softmax(-1)[picked]
        nll -= log_probs.gather(-1, batch["labels"][picked][:, None]).sum().item()
        tokens += int(picked.sum())
    assert tokens == runtime.corpus.val.tokens
    assert scores["val/loss"] == pytest.approx(nll / tokens, rel=1e-12)
    text = runtime.corpus.val.bytes
    assert scores["val/bpb"] == pytest.approx(nll / math.log(2) / text, rel=1e-12)
    assert text < tokens, "document ends are tokens and no bytes"


@pytest.mark.parametrize("micro", [1, 5, 64])
def test_val_loss_does_not_depend_on_the_micro_batch(micro):
    base = evaluate(build_runtime(SMALL))
    sizes = (f"data.global_batch_size={micro}", f"data.micro_batch_size={micro}")
    other = evaluate(build_runtime((*SMALL, *sizes)))
    assert other["val/loss"] == pytest.approx(base["val/loss"], rel=1e-12)


def test_evaluation_leaves_training_as_it_was():
    runtime = build_runtime(SMALL)
    runtime.batches.next_step()
    before = runtime.batches.samples_consumed
    evaluate(runtime)
    assert runtime.batches.samples_consumed == before and runtime.model.training
    assert all(p.grad is None for p in runtime.model.parameters())


def test_build_runtime_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_runtime(SMALL)
    assert list(tmp_path.iterdir()) == []
    assert open_corpus(DataConfig(), cache_dir=None).train.tokens > 300_000


def scores_on_rank(rank, world):
    runtime = build_runtime(SMALL)
    parallel = runtime.config.parallel
    runtime.mesh = build_mesh(parallel, device=runtime.device, local_rank=rank, comm_timeout=60.0)
    return evaluate(runtime)


def test_ranks_share_the_split_and_agree_on_the_whole():
    whole = evaluate(build_runtime(SMALL))
    for scores in run_ranks(scores_on_rank, 2):
        assert scores == pytest.approx(whole, rel=1e-12)


def test_evaluation_that_is_given_up_tells_nothing_and_leaves_the_model_training():
    runtime, asked = build_runtime(SMALL), []
    assert evaluate(runtime, lambda: asked.append(runtime.model.training) or len(asked) == 2) == {}
    assert asked == [False, False] and runtime.model.training


SPLIT = ("model.num_hidden_layers=2", "model.num_experts=4", "model.moe_intermediate_size=8",
         "model.hidden_size=16", "model.head_dim=4", "data.seq_len=28", "data.val_fraction=0.0072",
         "data.global_batch_size=6", "data.micro_batch_size=1", "precision=fp64",
         "accelerator=cpu")  # fmt: skip
LAYOUTS = {
    "tp2": (2, ["parallel.tp=2"]),
    "cp2": (2, ["parallel.cp=2"]),
    "ep2": (2, ["parallel.ep=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "zbv": (2, ["parallel.pp=2", "parallel.schedule=zbv", "model.num_hidden_layers=4"]),
    "dp3": (3, []),
    "dp3 by two": (3, ["data.micro_batch_size=2"]),
    "zero3": (3, ["parallel.zero=3"]),
    "pp2 tp2": (4, ["parallel.pp=2", "parallel.tp=2"]),
}


def runtime_on(rank, words):
    config = load_config([*SPLIT, *words])
    device = torch.device("cpu")
    mesh = build_mesh(config.parallel, device=device, local_rank=rank, comm_timeout=60.0)
    return assemble(config, open_corpus(config.data, cache_dir=None), mesh)


def scored(rank, world, words):
    runtime = runtime_on(rank, words)
    found = evaluate(runtime)
    assert all(chunk.training for chunk in runtime.chunks)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(3)
def test_every_layout_scores_as_one_process(layout):
    world, words = LAYOUTS[layout]
    model = [word for word in words if word.startswith("model.")]
    alone = runtime_on(0, model)
    windows = -(-alone.corpus.val.tokens // 28)
    assert windows % 2 and windows % 3 and alone.corpus.val.tokens % 28, "uneven in every way"
    wanted = evaluate(alone)
    for found in run_ranks(scored, world, (f"devices={world}", *words)):
        assert found == pytest.approx(wanted, rel=1e-12)


def given_up(rank, world, words):
    """One rank alone sees a signal, after its second batch."""
    runtime, asked = runtime_on(rank, words), []

    def stop():
        asked.append(rank)
        return agreed(int(rank == world - 1 and len(asked) == 2), runtime.mesh)

    found = evaluate(runtime, stop)
    trains = all(chunk.training for chunk in runtime.chunks)
    return found, len(asked), trains, evaluate(runtime)


@pytest.mark.parametrize("layout", ["pp2", "dp3", "zero3"])
def test_all_ranks_give_up_after_the_same_batch(layout):
    world, words = LAYOUTS[layout]
    wanted = evaluate(runtime_on(0, []))
    for found, asked, trains, again in run_ranks(given_up, world, (f"devices={world}", *words)):
        assert (found, asked, trains) == ({}, 2, True)
        assert again == pytest.approx(wanted, rel=1e-12)
