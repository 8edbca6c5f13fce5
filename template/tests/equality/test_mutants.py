"""Tests of the tests: each of these mistakes must make the comparison fail, where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cells import overrides_of, world_of
from matrix import PROJECT

import curry_train.layers.routing as routing
import curry_train.loss as loss
import curry_train.parallel.collectives as collectives
import curry_train.parallel.data_parallel as data_parallel
import curry_train.parallel.expert_parallel as expert_parallel
import curry_train.parallel.grads as grads
import curry_train.parallel.parallelize as parallelize
import curry_train.parallel.tensor_parallel as tensor_parallel
import curry_train.step as step
from curry_train import equality
from curry_train.checkpoint import CheckpointError, dcp
from curry_train.checkpoint.training_state import weight_tensors
from curry_train.compose import load_config
from curry_train.parallel.mesh import build_mesh
from curry_train.parallel.shards import Part
from curry_train.runtime import assemble
from curry_train.testing import run_ranks

pytestmark = pytest.mark.dist


def expert_gradients_times_ep(patch):
    real = grads._add_tied

    def scaled(shards):
        for shard in shards:
            if ".experts." in shard.name:
                shard.local_grad().mul_(2)
        real(shards)

    patch.setattr(grads, "_add_tied", scaled)


def expert_gradients_of_one_rank(patch):
    """Those of the other ranks with the same experts are not added."""
    change_shards(patch, lambda shard: {"sums": None} if ".experts." in shard.name else {})


def norm_counts_replicas(patch):
    change_shards(patch, lambda shard: {"copies": 1})


def change_shards(patch, change):
    real = parallelize.build_shard

    def changed(*args, **options):
        shard = real(*args, **options)
        return replace(shard, **change(shard))

    patch.setattr(parallelize, "build_shard", changed)


def resharding_with_dualpipev(patch):
    patch.setattr(data_parallel, "reshards", lambda config: True)


def averaging_of_fully_shard(patch):
    from torch.distributed.fsdp import FSDPModule

    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def local_positions(patch):
    real = step.take

    def counted_from_zero(batch, group):
        taken = real(batch, group)
        length = taken["input_ids"].shape[1]
        return {**taken, "position_ids": torch.arange(length)[None]}

    patch.setattr(step, "take", counted_from_zero)


def partial_gradients_over_tp(patch):
    """Norms and routers see a slice of the tokens, and nobody adds up."""
    whole = ("norm.weight", "layernorm.weight", "gate.weight")
    change_shards(patch, lambda shard: {"sums": None} if shard.name.endswith(whole) else {})


def losses_of_every_tp_rank(patch):
    patch.setattr(step, "count_once", lambda totals, mesh: totals)


def balance_gradients_of_every_rank(patch):
    patch.setattr(routing, "sum_forward", collectives.sum_ranks)


def norm_gradients_of_own_heads(patch):
    """The mean square of a whole projection is summed over ranks, its gradient is not."""
    patch.setattr(tensor_parallel, "sum_ranks", collectives.sum_forward)


def softmax_of_own_columns(patch):
    def local_nll(logits, labels, group):
        first = group.rank() * logits.shape[1]
        own = labels - first
        own = own.masked_fill((own < 0) | (own >= logits.shape[1]), -100)
        return F.cross_entropy(logits.clamp(min=-1e9), own, reduction="none")

    patch.setattr(loss, "vocab_parallel_nll", local_nll)


def rows_are_not_handed_round(patch):
    patch.setattr(step, "hand_round", lambda shards: None)


def division_by_own_tokens(patch):
    real = step.sum_over_world

    def own(totals, loads, mesh):
        count = totals[3].clone()
        totals, loads = real(totals, loads, mesh)
        totals[3] = count * mesh.world
        return totals, loads

    patch.setattr(step, "sum_over_world", own)


def bias_moved_by_own_counts(patch):
    real = step.sum_over_world

    def own(totals, loads, mesh):
        return real(totals, loads, mesh)[0], loads

    patch.setattr(step, "sum_over_world", own)


def weights_stay_home(patch):
    """Router weights travel, their gradients do not come back."""
    real = expert_parallel.exchange_rows

    def one_way(x, *ways):
        return real(x.detach() if x.shape[-1] == 2 else x, *ways)

    patch.setattr(expert_parallel, "exchange_rows", one_way)


def tied_copies_apart(patch):
    patch.setattr(grads, "_add_tied", lambda shards: None)


BIAS = "model.correction_bias=true model.correction_bias_update_rate=0.01"
MUTANTS = {
    expert_gradients_times_ep: ("dp_shard=2 ep=2", "gradient", ".experts."),
    expert_gradients_of_one_rank: ("dp_shard=4 ep=2", "gradient", ".experts."),
    norm_counts_replicas: ("dp_replicate=2 dp_shard=2 zero=2", "norm", ""),
    resharding_with_dualpipev: (
        "pp=2 dp_shard=2 zero=3 schedule=dualpipev", "gradient", "",
    ),
    averaging_of_fully_shard: ("dp_shard=2 zero=2", "gradient", ""),
    local_positions: ("cp=2", "gradient", ""),
    partial_gradients_over_tp: ("tp=2", "gradient", "model."),
    losses_of_every_tp_rank: ("tp=2", "loss", "of step 1"),
    balance_gradients_of_every_rank: ("tp=2", "gradient", ""),
    norm_gradients_of_own_heads: (
        "tp=2 model.qk_norm_width=projection", "gradient", ".self_attn.",
    ),
    softmax_of_own_columns: ("tp=2", "gradient", ""),
    rows_are_not_handed_round: ("dp_shard=2 zero=1", "update", ""),
    division_by_own_tokens: ("dp_shard=2", "gradient", ""),
    bias_moved_by_own_counts: (
        f"{BIAS} dp_shard=2 model.num_hidden_layers=4", "update", "e_score_correction_bias",
    ),
    weights_stay_home: ("dp_shard=2 ep=2", "gradient", ""),
    tied_copies_apart: (
        "model.tie_word_embeddings=true pp=2 schedule=zbv", "gradient", "embed_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_found(mutant, corpus, monkeypatch):
    words, kind, name = MUTANTS[mutant]
    overrides, world = overrides_of(words), world_of(words)
    proof = equality.prove(overrides, world, corpus=corpus, project=PROJECT)  # keeps the reference
    assert proof.equal, str(proof)
    mutant(monkeypatch)
    proof = equality.prove(overrides, world, corpus=corpus, project=PROJECT)
    assert not proof.equal
    assert proof.gaps[kind].ratio > 1e3 and name in proof.gaps[kind].name, str(proof)
    told = str(proof)
    assert "NOT equal" in told and " ".join(overrides) in told and "<-- above" in told


def test_a_tensor_that_nobody_holds_is_found(corpus, monkeypatch):
    """Every rank is right about what it shows, and none shows the last norm."""
    real = equality.record

    def forgetful(*args):
        found = real(*args)
        found.grads = [(name, part) for name, part in found.grads if name != "model.norm.weight"]
        return found

    overrides = overrides_of("dp_shard=2")
    equality.prove(overrides, 2, corpus=corpus, project=PROJECT)
    monkeypatch.setattr(equality, "record", forgetful)
    proof = equality.prove(overrides, 2, corpus=corpus, project=PROJECT)
    assert not proof.equal
    assert "gradient model.norm.weight: boxes hold 0 of its 16 elements" in str(proof)


def test_a_nan_is_no_equality(corpus, monkeypatch):
    overrides = overrides_of("dp_shard=2")
    equality.prove(overrides, 2, corpus=corpus, project=PROJECT)
    real = equality.record

    def poisoned(*args):
        found = real(*args)
        found.weights[5][1].tensor.view(-1)[1] = torch.nan
        return found

    monkeypatch.setattr(equality, "record", poisoned)
    proof = equality.prove(overrides, 2, corpus=corpus, project=PROJECT)
    assert not proof.equal and proof.gaps["update"].error == float("inf")


def one_key(parameter):
    """Describe the share of an expert bank as if it were the whole bank."""
    return Part.whole(getattr(parameter, "to_local", lambda: parameter)().detach())


def first_place(parameter):
    """Describe it as the first rows of the bank, on every rank."""
    part = REAL_BOX(parameter)
    return part._replace(offset=(0,) * len(part.shape))


REAL_BOX = parallelize.box_of


def _save(rank, world, config, corpus, folder, box):
    parallelize.box_of = box
    mesh = build_mesh(config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60)
    runtime = assemble(config, corpus, mesh)
    meta = {
        "samples_consumed": 8, "data_hash": "d" * 64, "config_hash": "c" * 64,
        "model": {"num_experts": 8}, "mesh": mesh.sizes,
    }  # fmt: skip
    try:
        dcp.save(
            folder, step=1, tensors=weight_tensors(runtime), rank_tensors={}, meta=meta, files={},
            mesh=mesh, keep=0,
        )  # fmt: skip
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("zero", [0, 3])
def test_two_ranks_that_save_one_key_are_stopped(corpus, tmp_path, zero):
    words = ["devices=2", "accelerator=cpu", *overrides_of(f"dp_shard=2 ep=2 zero={zero}")]
    config = load_config(words, project=PROJECT)
    saved = run_ranks(_save, 2, config, corpus, tmp_path / "right", REAL_BOX)
    assert saved == ["saved", "saved"]
    name = "model.layers.0.mlp.experts.down_proj.weight"
    for box, told in ((one_key, "num_experts"), (first_place, "boxes")):
        for message in run_ranks(_save, 2, config, corpus, tmp_path / box.__name__, box):
            assert name in message and told in message, message
        assert not list((tmp_path / box.__name__).glob("step-*"))
