"""What a layout of the plain model does not show: other models, odd batches, empty experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cells
import pytest
import torch
from cells import FULL, overrides_of, world_of
from matrix import PROJECT

from curry_train import equality
from curry_train.checkpoint import dcp
from curry_train.checkpoint.training_state import fill_tied, training_tensors
from curry_train.compose import load_config
from curry_train.config import Config
from curry_train.data.token_file import Corpus
from curry_train.evaluate import evaluate
from curry_train.optim import materialise_state
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.runtime import Runtime, assemble
from curry_train.step import train_step
from curry_train.testing import run_ranks

pytestmark = pytest.mark.dist
TIED = "model.tie_word_embeddings=true"
DOCUMENTS = "data.document_mask=true"
LATENT = (
    "model.kv_lora_rank=8 model.q_lora_rank=12 model.qk_nope_head_dim=4 model.qk_rope_head_dim=4"
    " model.v_head_dim=4 model.qk_norm=false model.rope_interleave=true model.scoring_func=sigmoid"
    " model.n_group=4 model.topk_group=2 model.group_score=top2 model.correction_bias=true"
    " model.shared_expert_intermediate_size=8 model.first_k_dense_replace=1"
    " model.routed_scaling_factor=2.5"
)
GPT_OSS = (
    "model.num_key_value_heads=4 model.attention_bias=true model.attention_sinks=true"
    " model.sliding_window=5 model.sliding_window_pattern=2 model.qk_norm=false"
    " model.expert_bias=true model.swiglu_limit=1.0 model.router_bias=true model.rope_type=yarn"
    " model.rope_factor=4 model.original_max_position_embeddings=8 model.rope_truncate=false"
)
OLMOE = "model.qk_norm_width=projection model.clip_qkv=0.8 model.norm_topk_prob=false"
BIAS = "model.correction_bias=true model.correction_bias_update_rate=0.01"
ACCUMULATE = "data.micro_batch_size=2"
DEALT = "dp_shard=2 cp=2 tp=2 ep=4"

CASES = {
    # One matrix as embedding and head: one tensor, or two copies on the ends of a V.
    "tied-tp": f"{TIED} tp=2 dp_shard=2",
    "tied-zero1": f"{TIED} dp_shard=4 zero=1",
    "tied-zero2": f"{TIED} dp_shard=2 tp=2 zero=2",
    "tied-zero3": f"{TIED} dp_shard=2 cp=2 zero=3",
    "tied-pp-zbv": f"{TIED} pp=2 dp_shard=2 zero=1 schedule=zbv",
    "tied-pp-dualpipev": f"{TIED} pp=2 dp_shard=2 zero=2 schedule=dualpipev",
    "tied-pp-tp-overlap": f"{TIED} pp=2 tp=2 schedule=dualpipev overlap=true",
    # Fewer experts than ranks that share their rows: some hold none.
    "four-experts-on-8-ranks": "model.num_experts=4 dp_shard=8 zero=3",
    "four-experts-on-8-ranks-zero1": "model.num_experts=4 dp_shard=8 zero=1",
    "two-experts-a-rank-on-4": "model.num_experts=4 dp_shard=8 ep=2 zero=3",
    "one-expert-a-rank": "cp=2 dp_shard=2 tp=2 ep=8 zero=2",
    # Balance losses of other scopes.
    "aux-micro-batch-dp": f"model.router_aux_loss_scope=micro_batch dp_shard=2 {ACCUMULATE}",
    "aux-micro-batch-cp-tp": f"model.router_aux_loss_scope=micro_batch cp=2 tp=2 {ACCUMULATE}",
    "aux-micro-batch-pp": "model.router_aux_loss_scope=micro_batch pp=2 dp_shard=2",
    "aux-global-dp": "model.router_aux_loss_scope=global dp_replicate=2 dp_shard=2 ep=2",
    "aux-global-cp-tp": f"model.router_aux_loss_scope=global {DEALT}",
    "aux-sequence-accumulated": f"model.router_aux_loss_scope=sequence dp_shard=2 {ACCUMULATE}",
    # The router's bias moves by the counts of all ranks.
    "bias-dp": f"{BIAS} dp_shard=2 ep=2",
    "bias-cp-tp": f"{BIAS} {DEALT} model.scoring_func=sigmoid",
    "bias-pp": f"{BIAS} pp=2 dp_shard=2 schedule=1f1b",
    "bias-pp-recompute": f"{BIAS} pp=2 dp_shard=2 schedule=dualpipev recompute=full",
    "bias-overlap": f"{BIAS} pp=2 tp=2 ep=2 schedule=dualpipev overlap=true",
    # Choices that look at a whole sequence.
    "capacity-position": "model.capacity_factor=0.8 model.drop_policy=position cp=2 tp=2 ep=2",
    "capacity-weight": "model.capacity_factor=0.8 model.drop_policy=weight cp=2 tp=2 ep=4",
    "capacity-documents": f"model.capacity_factor=0.5 {DOCUMENTS} {DEALT}",
    "expert-choice": "model.routing=expert_choice cp=2 tp=2 ep=2",
    "expert-choice-pp": "model.routing=expert_choice pp=2 cp=2",
    "round-robin": "model.routing=round_robin cp=2 tp=2 ep=4",
    # Attention that sees less.
    "documents-ring": f"{DOCUMENTS} cp=4 cp_kind=ring",
    "documents-all-gather": f"{DOCUMENTS} cp=4 cp_kind=all_gather",
    "documents-pp": f"{DOCUMENTS} pp=2 cp=2 schedule=zbv",
    "window-ring": "model.sliding_window=5 cp=4 cp_kind=ring",
    "window-all-gather": "model.sliding_window=5 cp=2 tp=2 cp_kind=all_gather",
    "sinks-tp": "model.attention_sinks=true tp=4",
    "sinks-cp-tp": "model.attention_sinks=true cp=2 tp=2 cp_kind=ring",
    # Whole families.
    "deepseek-tp-ep": f"{LATENT} tp=2 dp_shard=2 ep=4",
    "deepseek-cp-tp": f"{LATENT} cp=2 tp=2 ep=2 zero=3",
    "deepseek-pp": f"{LATENT} pp=2 tp=2 ep=2 schedule=dualpipev overlap=true",
    "gpt-oss-tp-ep": f"{GPT_OSS} tp=2 dp_shard=2 ep=4",
    "gpt-oss-cp-tp": f"{GPT_OSS} cp=2 tp=2 ep=2 zero=2",
    "gpt-oss-documents": f"{GPT_OSS} {DOCUMENTS} cp=4 ep=2 cp_kind=ring zero=3",
    "gpt-oss-pp": f"{GPT_OSS} pp=2 tp=2 ep=2 schedule=interleaved1f1b",
    "olmoe-tp": f"{OLMOE} tp=2 ep=2 zero=3",
    "shared-experts": f"model.shared_expert_intermediate_size=8 {DEALT}",
    "leading-dense-blocks": "model.first_k_dense_replace=2 pp=2 ep=2 dp_shard=2 zero=1",
    "uneven-stages": "pp=2 dp_shard=2 schedule=1f1b parallel.pp_split=[1,3]",
}  # fmt: skip
if FULL:
    CASES |= {
        "olmoe-cp-tp": f"{OLMOE} cp=2 tp=2 ep=2 zero=1 recompute=selective",
        "olmoe-pp": f"{OLMOE} pp=2 tp=2 ep=2 schedule=dualpipev overlap=true",
    }


@pytest.mark.parametrize("name", CASES)
def test_case(name, check):
    check(name, overrides_of(CASES[name]), world_of(CASES[name]))


def plant_empty_experts(runtime: Runtime) -> None:
    """Bias the routers so that no token ever goes to the second half of the experts."""
    for shard in runtime.shards:
        if shard.name.endswith("gate.bias"):
            first = shard.local.offset[0]
            experts = first + torch.arange(len(shard.local.tensor))
            shard.local.tensor[experts >= 4] = -50.0


def silence_a_rank(runtime: Runtime) -> None:
    """Leave the first half of every step's samples without any label."""
    runtime.batches.silent = runtime.config.data.global_batch_size // 2


@pytest.mark.parametrize("words", ["ep=2 dp_shard=2", "tp=2 cp=2 ep=4", "dp_shard=4 zero=3"])
def test_experts_and_ranks_without_tokens(check, corpus, words):
    overrides = overrides_of(f"model.router_bias=true {words}")
    check(f"empty-experts-{words.replace(' ', '-')}", overrides, world_of(words),
          prepare=plant_empty_experts)  # fmt: skip
    wanted = reference(overrides, world_of(words), corpus, plant_empty_experts)
    banks = [g for n, g in wanted.grads.items() if n.endswith("experts.down_proj.weight")]
    assert len(banks) == 2
    assert all(g[:4].abs().amax() > 0 and g[4:].abs().amax() == 0 for g in banks)


def reference(overrides: list[str], world: int, corpus: Corpus, prepare: Any = None):
    """Return what one process found."""
    config = configured(overrides, world)
    return equality.reference(equality.one_process(config, world), corpus, prepare)


def configured(overrides: list[str], world: int) -> Config:
    words = [f"devices={world}", "precision=fp64", "accelerator=cpu", *overrides]
    return load_config(words, project=PROJECT)


@pytest.mark.parametrize("words", ["dp_shard=2", "dp_replicate=2 tp=2", "pp=2 dp_shard=2 zero=2"])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_a_rank_without_a_single_label(check, words, kind):
    name = f"no-labels-{kind}-{words.replace(' ', '-')}"
    check(name, overrides_of(words, kind), world_of(words), prepare=silence_a_rank)


@pytest.mark.parametrize("words", ["cp=2 zero=3 recompute=full", "tp=2 ep=2", "pp=2 zero=1"])
@pytest.mark.sampled(3)
def test_compiled_blocks(check, monkeypatch, words):
    """Traced and differentiated as torch.compile does, without the minutes of generating code."""
    real, calls = torch.nn.Module.compile, []

    def traced(self):
        calls.append(self)
        return real(self, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    check(
        f"compiled-{words.replace(' ', '-')}",
        overrides_of(f"{words} model.num_hidden_layers=2 compile=true"),
        2,
    )


def test_labels_are_dropped_unevenly(corpus):
    """0 to all labels of a sample, other numbers in each micro-batch, the same for every split."""

    def counts(micro: int, index: int, ranks: int) -> list[int]:
        config = configured(overrides_of(f"data.micro_batch_size={micro}"), 1)
        runtime = assemble(config, corpus, Mesh.single())
        runtime.batches._local //= ranks
        runtime.batches._offset = index * runtime.batches._local
        uneven = equality.UnevenLabels(runtime)
        uneven.first = runtime.batches._offset
        batches = uneven.next_step() + uneven.next_step()
        return [int((row >= 0).sum()) for batch in batches for row in batch["labels"]]

    whole = counts(8, 0, 1)
    halves = [counts(2, index, 2) for index in (0, 1)]
    assert whole == halves[0][:4] + halves[1][:4] + halves[0][4:] + halves[1][4:]
    assert min(whole) == 0 and max(whole) >= 10 and len(set(whole)) >= 8
    assert sum(map(sum, halves)) != 2 * sum(halves[0])
    of_micro_batches = [sum(whole[i : i + 2]) for i in range(0, 8, 2)]
    assert len(set(of_micro_batches)) == 4


def test_no_gradient_of_the_reference_is_drowned(corpus):
    """A tensor below the floor of the error would be compared with nothing."""
    for kind in ("moe", "dense"):
        overrides = [*cells.layouts(2, kind)[0].overrides, "model.num_hidden_layers=16"]
        wanted = reference(overrides, 2, corpus)
        small = {n: float(g.abs().amax() / wanted.norm) for n, g in wanted.grads.items()}
        assert min(small.values()) > 1e-4, sorted(small.items(), key=lambda item: item[1])[:3]
        assert len(small) == {"moe": 16 * 12 + 3, "dense": 16 * 11 + 3}[kind]


VALIDATED = [
    "dp_shard=4 zero=3", "dp_replicate=2 dp_shard=2 zero=2", "dp_replicate=4", "cp=4",
    "cp=4 cp_kind=all_gather", "tp=4 ep=4", "cp=2 tp=2 ep=2", "dp_shard=2 tp=2 ep=2",
    *(f"pp=2 dp_shard=2 schedule={name}" for name in cells.SCHEDULES),
    "pp=2 cp=2 schedule=1f1b", "pp=2 tp=2 ep=2 schedule=dualpipev overlap=true", "pp=4",
]  # fmt: skip


def _losses(rank: int, world: int, configs: list[Config], corpus: Corpus) -> list[float]:
    found = []
    for config in configs:
        mesh = Mesh.single() if world == 1 else mesh_of(config, rank)
        found.append(evaluate(assemble(config, corpus, mesh))["val/loss"])
    return found


def mesh_of(config: Config, rank: int) -> Mesh:
    return build_mesh(config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60)


@pytest.mark.parametrize("documents", ["true", "false"])
@pytest.mark.sampled(2)
def test_the_last_validation_batch_is_uneven(make_corpus, documents):
    """Every mesh gives one process's loss, however many ranks find nothing in the last round."""
    corpus = make_corpus(val_fraction=0.03)
    windows, over = divmod(corpus.val.tokens, 16)
    assert over and windows > 8 and (windows + 1) % 4
    words = [f"data.document_mask={documents}", "model.num_hidden_layers=4"]
    configs = [configured([*overrides_of(case), *words], 4) for case in VALIDATED]
    for config, case in zip(configs, VALIDATED, strict=True):
        assert world_of(case) == 4, case
        assert config.data.document_mask == (documents == "true")
    (wanted,) = _losses(0, 1, [configured([*overrides_of(""), *words], 1)], corpus)
    for rank, found in enumerate(run_ranks(_losses, 4, configs, corpus)):
        for case, loss in zip(VALIDATED, found, strict=True):
            assert abs(loss - wanted) <= 1e-12 * wanted, f"{case}: {loss}, {wanted} (rank {rank})"


def _save(rank: int, world: int, config: Config, corpus: Corpus, folder: Path) -> None:
    runtime = assemble(config, corpus, mesh_of(config, rank))
    train_step(runtime)
    materialise_state(runtime.optimizer)
    meta = {
        "samples_consumed": 8, "data_hash": "d" * 64, "config_hash": "c" * 64,
        "model": {"num_experts": 8}, "mesh": runtime.mesh.sizes,
    }  # fmt: skip
    dcp.save(
        folder, step=1, tensors=training_tensors(runtime), rank_tensors={}, meta=meta, files={},
        mesh=runtime.mesh, keep=0,
    )  # fmt: skip


def _load(rank: int, world: int, config: Config, corpus: Corpus, folder: Path) -> list[str]:
    """Load on this rank and in whole; returns the tensors that differ in any bit."""
    runtimes = [assemble(config, corpus, mesh_of(config, rank))]
    runtimes.append(assemble(equality.one_process(config, world), corpus, Mesh.single()))
    found = []
    for runtime in runtimes:
        materialise_state(runtime.optimizer)
        tensors = training_tensors(runtime)
        dcp.load(dcp.latest(folder), tensors, mesh=runtime.mesh)
        fill_tied(runtime)
        found.append(tensors)
    here, whole = found
    assert here.keys() == whole.keys()
    wrong, rows = [], set()
    for name, part in here.items():
        there = whole[name]
        if hasattr(part, "offset"):
            shape = part.tensor.shape
            if name.endswith("experts.up_proj.weight"):
                rows.add(len(part.tensor))
            box = (slice(a, a + n) for a, n in zip(part.offset, shape, strict=True))
            part, there = part.tensor, there.tensor[tuple(box)]
        if not torch.equal(part, there):
            wrong.append(name)
    assert rows == {2 if rank == 2 else 3}, rows
    return wrong


@pytest.mark.parametrize(
    "words", ["dp_shard=2 tp=2 ep=2 zero=1", "pp=2 dp_shard=2 ep=2 zero=3", "dp_replicate=2 cp=2"]
)
def test_eight_experts_are_loaded_by_three_ranks(corpus, tmp_path, words):
    """3, 3 and 2 experts a rank: bit for bit those that four ranks saved in another layout."""
    blocks = "model.num_hidden_layers=4"
    run_ranks(_save, 4, configured(overrides_of(f"{words} {blocks}"), 4), corpus, tmp_path)
    three = overrides_of(f"dp_shard=3 zero=3 data.global_batch_size=12 {blocks}")
    assert run_ranks(_load, 3, configured(three, 3), corpus, tmp_path) == [[], [], []]
