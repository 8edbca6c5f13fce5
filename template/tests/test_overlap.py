"""Overlapped DualPipeV equals one process, and the plain order of its own passes bit for bit."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from curry_train.compose import load_config
from curry_train.config import DataConfig
from curry_train.data import open_corpus
from curry_train.equality import prove
from curry_train.layers.routing import TopKRouter
from curry_train.loss import token_sums
from curry_train.parallel.context_parallel import take
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.parallel.overlap import OverlappedPipeline, Part, run_all
from curry_train.rules import problems
from curry_train.runtime import assemble
from curry_train.step import accumulate, forget_gradients
from curry_train.testing import run_ranks

pytestmark = pytest.mark.dist

# What ranks need, imported once before they are forked from this process.
for module in ("tensor", "fsdp", "pipelining"):
    import_module(f"torch.distributed.{module}")

MODEL = (
    "model.hidden_size=16 model.num_hidden_layers=4 model.num_attention_heads=4"
    " model.num_key_value_heads=4 model.head_dim=4 model.intermediate_size=16"
    " model.initializer_range=0.25 data.seq_len=16 data.global_batch_size=8 optim.lr=0.01"
    " optim.warmup_steps=0 optim.schedule=constant optim.max_grad_norm=0.05 run.comm_timeout=60"
    " parallel.schedule=dualpipev parallel.overlap=true"
)
EXPERTS = (
    "model.num_experts=8 model.moe_intermediate_size=8 model.router_aux_loss_coef=0.1"
    " model.router_z_loss_coef=0.01 model.correction_bias=true"
    " model.correction_bias_update_rate=0.01"
)
"""The bias moves by the counts of the experts, so that a wrong count is a wrong weight."""
DENSE = "model.num_experts=0"
DOCUMENTS = "data.document_mask=true"
CASES = {
    "dense": (2, DENSE),
    "dense-cp": (4, f"{DENSE} cp=2"),
    "dense-tp-documents": (4, f"{DENSE} tp=2 {DOCUMENTS}"),
    "moe": (2, EXPERTS),
    "ep-dp": (4, f"{EXPERTS} dp_shard=2 ep=2"),
    "ep-dp-replicate": (4, f"{EXPERTS} dp_replicate=2"),
    "ep-tp": (4, f"{EXPERTS} tp=2 ep=2 {DOCUMENTS}"),
    "ep-cp-ring": (4, f"{EXPERTS} cp=2 ep=2 {DOCUMENTS}"),
    "ep-cp-all-gather": (4, f"{EXPERTS} cp=2 ep=2 cp_kind=all_gather"),
    "tp-of-experts-kept-whole": (4, f"{EXPERTS} tp=2"),
    "zero-1": (4, f"{EXPERTS} dp_shard=2 ep=2 zero=1"),
    "zero-2": (4, f"{EXPERTS} dp_shard=2 ep=2 zero=2"),
    "zero-2-without-ep": (4, f"{EXPERTS} dp_shard=2 zero=2"),
    "zero-3": (4, f"{EXPERTS} dp_shard=2 ep=2 zero=3"),
    "zero-3-full": (4, f"{EXPERTS} dp_shard=2 ep=2 zero=3 recompute=full {DOCUMENTS}"),
    "zero-2-tp-selective": (4, f"{EXPERTS} tp=2 ep=2 zero=2 recompute=selective"),
    "full": (4, f"{EXPERTS} dp_shard=2 ep=2 recompute=full"),
    "selective": (4, f"{EXPERTS} dp_shard=2 ep=2 recompute=selective"),
    "every-second-block": (4, f"{EXPERTS} cp=2 ep=2 recompute=2"),
    "dense-zero-3": (4, f"{DENSE} dp_shard=2 zero=3 recompute=selective"),
    "dense-full": (2, f"{DENSE} recompute=full"),
    "dense-first": (4, f"{EXPERTS} dp_shard=2 ep=2 model.first_k_dense_replace=1"),
    "stage-without-experts": (4, f"{EXPERTS} tp=2 ep=2 model.first_k_dense_replace=3"),
    "shared-experts": (4, f"{EXPERTS} tp=2 ep=2 model.shared_expert_intermediate_size=8"),
    "tied": (4, f"{EXPERTS} dp_shard=2 ep=2 model.tie_word_embeddings=true"),
    "tied-zero-2": (4, f"{EXPERTS} dp_shard=2 ep=2 zero=2 model.tie_word_embeddings=true"),
    "uneven-stages": (4, f"{EXPERTS} dp_shard=2 ep=2 model.num_hidden_layers=7"),
    "many-micro-batches": (4, f"{EXPERTS} dp_shard=2 ep=2 data.global_batch_size=22"),
    "loss-of-a-micro-batch": (4, f"{EXPERTS} cp=2 ep=2 model.router_aux_loss_scope=micro_batch"),
    "eight-ranks": (8, f"{EXPERTS} cp=2 tp=2 ep=4 zero=2 recompute=2 {DOCUMENTS}"),
}
EP = f"{EXPERTS} dp_shard=2 ep=2"


def overrides_of(words):
    """Return `ep=2 zero=3 model.num_experts=4` as settings of the model here on two stages."""
    out = [*MODEL.split(), "parallel.pp=2"]
    for word in words.split():
        out.append(word if "." in word.partition("=")[0] else f"parallel.{word}")
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Many short documents, so that a sequence holds several."""
    luck = random.Random(4)
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    texts = [
        " ".join(luck.choices(["a", "pair", "of", "two"], k=luck.randint(1, 4))) for _ in range(600)
    ]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = DataConfig(input=str(path), seq_len=16, val_fraction=0.02)
    return open_corpus(data, cache_dir=None)


@pytest.fixture
def check(corpus):
    def proof_of(words, world=4, **options):
        return prove(overrides_of(words), world, corpus=corpus, **options)

    return proof_of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(4)
def test_equals_one_process(name, check):
    world, words = CASES[name]
    proof = check(words, world)
    assert proof.equal, f"{proof}"
    assert {"gradient", "update", "norm", "loss"} <= proof.gaps.keys()


def favour_the_first_rank(runtime):
    for chunk in runtime.chunks:
        for router in chunk.modules():
            if isinstance(router, TopKRouter):
                router.e_score_correction_bias[:4] += 100.0


@pytest.mark.parametrize("options", ["", "zero=2 recompute=full"])
def test_a_rank_whose_experts_get_no_rows(options, check):
    proof = check(f"{EP} {options}", prepare=favour_the_first_rank)
    assert proof.equal, f"{proof}"


def test_no_rows_really_come(corpus):
    for seen in run_ranks(rows_of_rank, 4, load_config(overrides_of(EP), project=None), corpus):
        rank, rows = seen
        assert rows and (max(rows) == 0) == (rank % 2 == 1)


def rows_of_rank(rank, world, config, corpus):
    runtime, micro_batches = prepared(rank, config, corpus)
    favour_the_first_rank(runtime)
    seen, wait = [], runtime.pipeline.wait

    def counting(message):
        out = wait(message)
        if len(out) == 3:  # rows, weights and ids, on their way to the experts
            seen.append(len(out[0]))
        return out

    runtime.pipeline.wait = counting
    accumulate(runtime, micro_batches)
    return rank, seen


# The order of passes changes the time, not a bit of the result


def prepared(rank, config, corpus):
    """Return a Runtime of this rank and the micro-batches of its first step."""
    mesh = Mesh.single()
    if config.parallel.pp > 1:
        mesh = build_mesh(
            config.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60
        )
    runtime = assemble(config, corpus, mesh)
    return runtime, [take(batch, mesh.group("cp")) for batch in runtime.batches.next_step()]


class Plain(OverlappedPipeline):
    """The same passes, never two at a time."""

    def act(self, action):
        if action.sub_actions is None:
            return super().act(action)
        for part in action.sub_actions:
            super().act(part)


class ForwardFirst(OverlappedPipeline):
    """Pairs in which forward starts before backward."""

    def act(self, action):
        if action.sub_actions is None:
            return super().act(action)
        forward, backward = ((a.stage_index, a.microbatch_index) for a in action.sub_actions)
        run_all(self.forward_pass(*forward), self.backward(*backward))


def differences(rank, world, config, corpus):
    """Return what is not the same bits in other orders, and how many pairs and messages met."""
    runtime, micro_batches = prepared(rank, config, corpus)
    met = [0, 0]

    def left(order):
        runtime.pipeline.__class__ = order
        totals, loads = accumulate(runtime, micro_batches)
        out = {f"{i} {s.name}": s.parameter.grad for i, s in enumerate(runtime.shards)}
        out |= {"totals": totals, "loads": loads}
        forget_gradients(runtime)
        return {k: getattr(v, "_local_tensor", v) for k, v in out.items() if v is not None}

    class Counted(OverlappedPipeline):
        def act(self, action):
            met[0] += action.sub_actions is not None
            super().act(action)

        def wait(self, message):
            met[1] += 1
            return super().wait(message)

    wanted, wrong = left(Counted), []
    for order in (Plain, ForwardFirst, OverlappedPipeline):
        found = left(order)
        assert found.keys() == wanted.keys()
        wrong += [
            f"{order.__name__}: {name}"
            for name, value in wanted.items()
            if not torch.equal(value, found[name]) or not value.double().isfinite().all()
        ]
    return wrong, met, len(wanted)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize(
    ("world", "words"),
    [
        (4, EP),
        (4, f"{EXPERTS} tp=2 ep=2 recompute=full {DOCUMENTS}"),
        (4, f"{EP} zero=3 recompute=selective"),
        (2, DENSE),
    ],
    ids=["ep", "tp-full", "zero-3-selective", "dense"],
)
@pytest.mark.sampled(3)
def test_every_order_gives_the_same_bits(world, words, precision, corpus):
    words = [f"devices={world}", f"precision={precision}", *overrides_of(words)]
    config = load_config(words, project=None)
    assert not problems(config, world)
    for wrong, (pairs, messages), tensors in run_ranks(differences, world, config, corpus):
        assert not wrong
        assert pairs > 0 and tensors > 10 and (messages > 0) == (config.parallel.ep > 1)


def losses_and_norms(rank, world, config, corpus):
    runtime, micro_batches = prepared(rank, config, corpus)
    if runtime.pipeline is not None:
        totals, _ = accumulate(runtime, micro_batches)
    else:
        sums = [token_sums(runtime.model, batch) for batch in micro_batches]
        sum(one.total for one in sums).backward()
        totals = sum(one.detached() for one in sums)
    squares = {
        shard.name: float(shard.parameter.grad.double().square().sum()) for shard in runtime.shards
    }
    return totals.tolist(), squares


def test_bf16_stays_near_one_process_in_bf16(corpus):
    words = ["precision=bf16", *overrides_of(EXPERTS)]
    config = load_config(["devices=2", *words], project=None)
    alone = replace(config, devices=1, parallel=load_config([], project=None).parallel)
    answers = run_ranks(losses_and_norms, 2, config, corpus)
    ((totals, squares),) = run_ranks(losses_and_norms, 1, alone, corpus)
    found = [sum(values) for values in zip(*(t for t, _ in answers), strict=True)]
    assert found == pytest.approx(totals, rel=5e-3)
    there = answers[0][1] | answers[1][1]
    assert there.keys() == squares.keys()
    assert sum(there.values()) ** 0.5 == pytest.approx(sum(squares.values()) ** 0.5, rel=5e-2)


# Faults are seen


def lose_a_gradient(runtime):
    """Replace the third gradient of rows by zeros on one rank of the pipeline."""
    if runtime.pipeline is None or runtime.mesh.index("pp"):
        return
    wait, seen = runtime.pipeline.wait, []

    def losing(message):
        out = wait(message)
        if len(out) == 2:  # gradients of rows and weights
            seen.append(0)
            if len(seen) == 3:
                out = [torch.zeros_like(out[0]), out[1]]
        return out

    runtime.pipeline.wait = losing


def lose_between_stages(runtime):
    """Do not take in the gradient that another stage sends for one micro-batch."""
    if runtime.pipeline is None or runtime.mesh.index("pp"):
        return
    arrived = runtime.pipeline.arrived

    def losing(what, stage, number):
        out = arrived(what, stage, number)
        if what == "grad" and number == 1:
            out = tuple(torch.zeros_like(x) for x in out)
        return out

    runtime.pipeline.arrived = losing


def miscount(runtime):
    """Count a hundred tokens that nobody sent to the first expert of one block."""
    if runtime.pipeline is None:
        return
    count = runtime.pipeline.count

    def wrong(chunk, block, routing):
        count(chunk, block, routing)
        if "1" in chunk.layers:
            runtime.pipeline.loads[1, 0] += 100

    runtime.pipeline.count = wrong


def read_late(runtime):
    """Let attention read the documents of whichever micro-batch ran last."""
    if runtime.pipeline is None:
        return
    latest = {}

    def part(kind, function, *inputs):
        if function.__name__ == "until_router":
            latest["positions"] = inputs[-1]
            function = partial(late, function)
        return Part(kind, function, *inputs)

    def late(until_router, chunk, block, x, _):
        return until_router(chunk, block, x, latest["positions"])

    runtime.pipeline.part = part


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(lose_a_gradient, "gradient"), (lose_between_stages, "gradient"), (miscount, "update")],
)
def test_what_is_lost_or_counted_wrong_is_seen(fault, kind, check):
    proof = check(EP, prepare=fault)
    assert not proof.equal and proof.gaps[kind].ratio > 1e3


def test_what_a_part_reads_late_is_seen_when_it_runs_again(check):
    plain = check(f"{EP} {DOCUMENTS}", prepare=read_late)
    assert plain.equal, f"nothing runs again, so nothing is late\n{plain}"
    again = check(f"{EP} {DOCUMENTS} recompute=full", prepare=read_late)
    assert again.gaps["loss"].ratio > 1, "a step of wrong gradients is another second step"
    assert not again.equal and again.gaps["gradient"].ratio > 1e3


def fail_on_one_rank(runtime):
    if runtime.mesh.index("pp") != 1 or runtime.mesh.index("dp_shard") != 0:
        return
    pipeline, seen = runtime.pipeline, []

    def failing(block, rows, weights, routing):
        seen.append(0)
        if len(seen) == 5:
            raise ZeroDivisionError("the fifth block")
        return OverlappedPipeline.bank(pipeline, block, rows, weights, routing)

    pipeline.bank = failing


def test_an_exception_in_a_part_ends_with_its_own_traceback(check):
    start = time.monotonic()
    with pytest.raises(AssertionError) as error:
        check(f"{EP} run.comm_timeout=10", prepare=fail_on_one_rank, timeout=100.0)
    assert "failed first: ZeroDivisionError('the fifth block')" in str(error.value)
    for where in ("in failing", "in forward_block", "in run_all"):
        assert where in str(error.value)
    assert time.monotonic() - start < 90


# Pieces


def counting(name, steps, seen):
    for step in range(steps):
        seen.append((name, step))
        yield
    return name


def test_passes_are_resumed_in_turn_and_the_first_one_starts():
    seen = []
    assert run_all(counting("b", 2, seen), counting("f", 3, seen)) == ["b", "f"]
    assert seen == [("b", 0), ("f", 0), ("b", 1), ("f", 1), ("f", 2)]
    assert run_all() == [] and run_all(counting("f", 0, seen)) == ["f"]


def test_a_part_is_a_graph_of_its_own():
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    start = torch.ones(2, requires_grad=True)

    def function(x, ids, nothing):
        return x * weight, None, ids + 1, x.sum()

    part = Part("none", function, start * 5, torch.tensor([1]), None)
    product, none, ids, total = part.detached()
    assert not product.requires_grad and none is None and ids.tolist() == [2]
    assert float(total) == 10.0
    grads = part.back(torch.tensor([1.0, 10.0]), None, None, torch.tensor(100.0))
    assert grads[0].tolist() == [102.0, 130.0] and grads[1:] == [None, None]
    assert weight.grad.tolist() == [5.0, 50.0] and start.grad is None
    assert part.outputs == () and part.inputs == []


def test_a_part_without_anything_to_learn_has_a_backward():
    part = Part("none", lambda ids: (torch.ones(2)[ids],), torch.tensor([0, 1]))
    assert part.back(torch.ones(2)) == [None]
    unread = Part("none", lambda x, y: (x * 2,), torch.ones(1), torch.ones(1))
    assert [g.tolist() for g in unread.back(torch.ones(1))] == [[2.0], [0.0]]


def test_every_message_between_stages_has_a_tag_of_its_own():
    place = SimpleNamespace(last=7)
    tags = {
        OverlappedPipeline.tag(place, what, stage, number, index)
        for what in ("out", "grad")
        for stage in range(8)
        for number in range(20)
        for index in range(2)
    }
    assert len(tags) == 2 * 8 * 20 * 2
