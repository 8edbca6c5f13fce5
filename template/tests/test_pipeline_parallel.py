"""A pipeline trains as one process does, whatever its schedule, its split and its micro-batches."""

import itertools
import json
import random
import re
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import nn
from torch.distributed.pipelining import schedules

from curry_train.compose import load_config
from curry_train.config import ConfigError, DataConfig
from curry_train.data import open_corpus
from curry_train.equality import prove
from curry_train.evaluate import evaluate
from curry_train.parallel.dims import SPLIT_BACKWARD, pipeline_refusals, stages_of
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.parallel.pipeline_parallel import SCHEDULES, split_blocks
from curry_train.rules import problems
from curry_train.runtime import assemble
from curry_train.stages import split_blocks_in_pairs
from curry_train.step import train_step
from curry_train.testing import run_ranks

dist = pytest.mark.dist
SETTINGS = (
    "model.hidden_size=16 model.num_attention_heads=4 model.num_key_value_heads=2 model.head_dim=4"
    " model.intermediate_size=16 model.moe_intermediate_size=8 model.initializer_range=0.25"
    " data.seq_len=8 optim.lr=0.01 optim.warmup_steps=0 optim.schedule=constant"
    " optim.max_grad_norm=0.05 run.comm_timeout=60 model.num_hidden_layers=4"
)
EXPERTS = (
    " model.num_experts=4 model.router_aux_loss_coef=0.1 model.router_z_loss_coef=0.01"
    " model.correction_bias=true model.correction_bias_update_rate=0.01"
)
SINGLE = ("gpipe", "1f1b")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    luck = random.Random(4)
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    texts = [" ".join(luck.choices("of a rank the same sum".split(), k=9)) for _ in range(90)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return open_corpus(DataConfig(input=str(path), seq_len=8, val_fraction=0.02), cache_dir=None)


def settings(text: str) -> list[str]:
    return f"{SETTINGS} {text}".split()


def config_of(text: str):
    return load_config(settings(text))


def check(corpus, text: str, world: int, **options) -> None:
    proof = prove(settings(text), world, corpus=corpus, **options)
    assert proof.equal, str(proof)


@cache
def deep(schedule: str, pp: int):
    text = f"parallel.pp={pp} parallel.schedule={schedule} model.num_hidden_layers=16"
    return config_of(f"{text} data.global_batch_size=16 data.micro_batch_size=1")


def accepted(schedule: str, pp: int, micro_batches: int) -> bool:
    return not list(pipeline_refusals(deep(schedule, pp), micro_batches))


def table(schedule: str, pp: int, micro_batches: int):
    """Build torch's schedule as one rank would, without ranks."""
    stages = [
        SimpleNamespace(
            num_stages=pp * (1 if schedule in SINGLE else 2),
            group_size=pp,
            group_rank=0,
            stage_index=stage,
            submod=nn.Identity(),
        )
        for stage in stages_of(deep(schedule, pp).parallel, 0)
    ]
    kind = getattr(schedules, SCHEDULES[schedule])
    return kind(stages[0] if schedule in SINGLE else stages, micro_batches)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rules_refuse_what_torch_refuses_and_no_more(schedule, pp):
    for count in range(1, 17):
        try:
            table(schedule, pp, count)
            built = True
        except ValueError:
            built = False
        # What does not fill 1f1b is run in another order.
        assert accepted(schedule, pp, count) == (built or schedule == "1f1b"), count


COUNTS = [(s, 2, n) for s in SCHEDULES for n in range(1, 6) if accepted(s, 2, n)]
COUNTS += [("1f1b", 4, 3), ("1f1b", 4, 9), ("interleaved1f1b", 4, 3), ("interleaved_zb", 4, 6)]
COUNTS += [("zbv", 4, 2), ("zbv", 4, 9), ("dualpipev", 4, 9), ("gpipe", 4, 1)]


@dist
@pytest.mark.parametrize(("schedule", "pp", "count"), COUNTS)
@pytest.mark.sampled(4)
def test_any_number_of_micro_batches(corpus, schedule, pp, count):
    layers = 4 if pp == 2 else 8
    text = f"parallel.pp={pp} parallel.schedule={schedule} data.micro_batch_size=1"
    text += f" data.global_batch_size={count} model.num_hidden_layers={layers}"
    check(corpus, text + EXPERTS, pp)


CASES = {
    "1f1b dense": "parallel.schedule=1f1b parallel.zero=1",
    "interleaved_zb dense": "parallel.schedule=interleaved_zb parallel.zero=2",
    "dualpipev dense": "parallel.schedule=dualpipev parallel.zero=3",
    "uneven split": "parallel.schedule=1f1b parallel.pp_split=[3,1]" + EXPERTS,
    # The first rank has no experts, so the message starts with zeros.
    "dense first": "parallel.schedule=gpipe model.first_k_dense_replace=3" + EXPERTS,
    "dense first, split backward": "parallel.schedule=interleaved_zb parallel.pp_split=[1,1,2,1]"
    " model.num_hidden_layers=5 model.first_k_dense_replace=2" + EXPERTS,
    "dense alone": "parallel.schedule=1f1b model.first_k_dense_replace=4" + EXPERTS,
    "tied zbv": "parallel.schedule=zbv model.tie_word_embeddings=true parallel.zero=2" + EXPERTS,
    "tied dualpipev": "parallel.schedule=dualpipev model.tie_word_embeddings=true parallel.tp=2"
    " parallel.pp_split=[2,1,1,1] model.num_hidden_layers=5" + EXPERTS,
    "tp": "parallel.schedule=interleaved1f1b parallel.tp=2 parallel.recompute=full" + EXPERTS,
    "cp": "parallel.schedule=zbv parallel.cp=2 parallel.recompute=selective" + EXPERTS,
    "ep zero 2": "parallel.schedule=gpipe parallel.ep=2 parallel.zero=2" + EXPERTS,
    "ep zero 3": "parallel.schedule=1f1b parallel.ep=2 parallel.zero=3" + EXPERTS,
    "ep zero 3, two stages": "parallel.schedule=interleaved1f1b parallel.ep=2 parallel.zero=3"
    " parallel.recompute=2" + EXPERTS,
    "ep zero 3, split backward": "parallel.schedule=zbv parallel.ep=2 parallel.zero=3"
    " parallel.recompute=selective" + EXPERTS,
    "documents": "parallel.schedule=dualpipev data.document_mask=true parallel.recompute=full"
    + EXPERTS,
}


@dist
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_pipelines_meet_everything_else(corpus, name):
    text = f"parallel.pp=2 data.micro_batch_size=1 data.global_batch_size=8 {CASES[name]}"
    world = 2 if "dense" in name or name in ("uneven split", "documents") else 4
    check(corpus, text, world)


def scaled(runtime) -> None:
    """Let the schedule divide gradients by the number of micro-batches, as torch's default does."""
    if runtime.pipeline is not None:
        made = runtime.pipeline.schedule

        def make(*args):
            schedule = made(*args)
            schedule.scale_grads = True
            return schedule

        runtime.pipeline.schedule = make


def cut(runtime) -> None:
    """Stop the gradient of the auxiliary losses where it enters a stage."""

    def forward(inner, x, auxiliary=None, **read):
        if auxiliary is not None:
            auxiliary = auxiliary.detach() + 0 * auxiliary
        return inner(x, auxiliary, **read)

    if runtime.pipeline is not None:
        for chunk in runtime.chunks:
            chunk.forward = partial(forward, chunk.forward)


@dist
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("mutant", [scaled, cut])
def test_a_mutant_is_seen(corpus, schedule, mutant):
    text = f"parallel.pp=2 parallel.schedule={schedule} data.micro_batch_size=1" + EXPERTS
    text += " data.global_batch_size=4"
    proof = prove(settings(text), 2, corpus=corpus, prepare=mutant)
    assert proof.gaps["gradient"].error > 1e-3, str(proof)


def losses(rank: int, world: int, config, corpus) -> list[float]:
    """Train and validate in turn, so that micro-batches of two shapes meet."""
    mesh = Mesh.single()
    if world > 1:
        mesh = build_mesh(
            config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60
        )
    runtime, found = assemble(config, corpus, mesh), []
    for _ in range(3):
        step = train_step(runtime)
        found += [step.loss, step.grad_norm, step.aux_loss, evaluate(runtime)["val/loss"]]
    return found


@dist
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "dualpipev"])
@pytest.mark.sampled(3)
def test_validation_between_steps(corpus, schedule, zero):
    text = f"precision=fp64 data.global_batch_size=16 data.micro_batch_size=2{EXPERTS}"
    wanted = losses(0, 1, config_of(text), corpus)
    text += f" parallel.pp=2 parallel.zero={zero} parallel.schedule={schedule}"
    for found in run_ranks(losses, 4, config_of(text), corpus):
        assert found == pytest.approx(wanted, rel=1e-11)


@dist
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["gpipe", "dualpipev"])
def test_half_precision_travels_as_it_is(corpus, schedule, precision):
    text = f"precision={precision} data.global_batch_size=4 data.micro_batch_size=1{EXPERTS}"
    wanted = losses(0, 1, config_of(text), corpus)
    config = config_of(f"{text} parallel.pp=2 parallel.schedule={schedule}")
    for found in run_ranks(losses, 2, config, corpus):
        assert found == pytest.approx(wanted, rel=0.03)
    for dtypes in run_ranks(message_dtypes, 2, config, corpus):
        assert dtypes == [
            f"torch.{'bfloat16' if precision == 'bf16' else 'float16'}",
            "torch.float32",
        ]


def message_dtypes(rank: int, world: int, config, corpus) -> list[str]:
    mesh = build_mesh(config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60)
    pipeline = assemble(config, corpus, mesh).pipeline
    return [str(t.dtype) for t in pipeline.message(torch.zeros(2, 8), "cpu")]


def test_one_stage_needs_no_pipeline(corpus):
    config = config_of("parallel.pp=1 parallel.schedule=zbv")
    assert problems(config, 1) == []
    assert assemble(config, corpus, Mesh.single()).pipeline is None


REFUSED = {
    "parallel.reshard=true parallel.schedule={split} parallel.zero=3": "set parallel.reshard=auto",
    "compile=true parallel.schedule={split}": "set compile=false, or parallel.schedule=1f1b",
    "model.tie_word_embeddings=true parallel.schedule=1f1b": "set parallel.schedule=zbv or",
    "model.tie_word_embeddings=true parallel.schedule=interleaved1f1b": "which have both on one",
    "parallel.schedule=dualpipev data.global_batch_size=3": "at least 2 * parallel.pp = 4 micro",
    "parallel.schedule=interleaved1f1b data.global_batch_size=5": "goes round in 2 rounds",
    "parallel.schedule=zbv model.num_hidden_layers=3": "makes 4 stages, more than",
    "parallel.schedule=1f1b parallel.pp_split=[1,2]": "names 2 stages with 3 blocks, not 2",
}
REFUSED = {
    text.format(split=split): message
    for text, message in REFUSED.items()
    for split in (SPLIT_BACKWARD if "{split}" in text else [""])
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text):
    shared = "parallel.pp=2 data.micro_batch_size=1 data.global_batch_size=8"
    with pytest.raises(ConfigError, match=re.escape(REFUSED[text])):
        config_of(f"{shared} {text}")


def test_blocks_of_stages():
    def blocks(text):
        return [len(stage) for stage in split_blocks(config_of(f"parallel.pp=2 {text}"))]

    config = config_of("parallel.pp=2 parallel.pp_split=[3,1]")
    assert split_blocks(config) == [[0, 1, 2], [3]]
    # The head costs as much as 2.7 blocks, or 10.7.
    assert blocks("model.num_hidden_layers=8") == [5, 3]
    assert blocks("model.num_hidden_layers=8 model.vocab_size=1028") == [7, 1]
    assert blocks("model.num_hidden_layers=12 parallel.schedule=zbv") == [4, 3, 4, 1]
    assert blocks("model.num_hidden_layers=12 parallel.schedule=interleaved1f1b") == [3, 4, 4, 1]


def dearest_of(costs, head, ranks, turned, counts):
    """Return what the dearest rank and the dearest stage cost."""
    ends = [0, *itertools.accumulate(counts)]
    stages = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    stages[-1] += head
    second = stages[ranks:][::-1] if turned else stages[ranks:]
    return max(a + b for a, b in zip(stages[:ranks], second, strict=True)), max(stages)


@pytest.mark.parametrize("turned", [False, True])
def test_no_other_split_has_a_much_cheaper_rank_or_then_a_cheaper_stage(turned):
    luck = random.Random(turned)
    for _ in range(60):
        ranks = luck.choice([2, 3])
        layers = luck.randint(2 * ranks, 11)
        costs = tuple(luck.choice([1.0, 1.0, 2.0, 2.05, 7.0]) for _ in range(layers))
        head = luck.choice([0.0, 1.0, 9.0, 30.0])

        dearest = partial(dearest_of, costs, head, ranks, turned)
        cuts = itertools.combinations(range(1, layers), 2 * ranks - 1)
        every = [[b - a for a, b in itertools.pairwise([0, *cut, layers])] for cut in cuts]
        least = min(map(dearest, every))
        counts = split_blocks_in_pairs(costs, head, ranks, turned)
        rank, stage = dearest(counts)
        assert sum(counts) == layers and min(counts) > 0 and len(counts) == 2 * ranks
        assert rank <= 1.03 * least[0] + 1e-9 and stage <= least[1] + 1e-9, (costs, head, counts)


def test_near_ties_make_no_lopsided_stages():
    costs = (3.1,) * 3 + (2.93,) * 125
    for turned in (False, True):
        assert max(split_blocks_in_pairs(costs, 7.7, 2, turned)) <= 33
