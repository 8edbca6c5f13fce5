"""One optimizer step is the same for every split of its samples, and equals plain PyTorch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from curry_train.checkpoint import dcp
from curry_train.checkpoint.training_state import training_tensors
from curry_train.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from curry_train.layers.routing import TopKRouter
from curry_train.loss import mean_loss, token_sums
from curry_train.models.protocol import build_model, named_state
from curry_train.optim import LossScale, build_optimizer, lr_at, materialise_state
from curry_train.parallel import grads
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.parallel.parallelize import build_chunks
from curry_train.parallel.shards import whole_shards
from curry_train.runtime import Runtime
from curry_train.step import train_step
from curry_train.testing import assert_same, run_ranks

CONFIG = Config(
    precision="fp64",
    model=ModelConfig(
        vocab_size=50, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=4, moe_intermediate_size=8, router_z_loss_coef=0.01,
    ),
    data=DataConfig(seq_len=12, global_batch_size=8),
    optim=OptimConfig(lr=1e-2, warmup_steps=2, max_grad_norm=0.5),
    run=RunConfig(max_steps=10),
)  # fmt: skip


class Samples:
    """Eight fixed samples a step with unequal token counts, split over ranks and micro-batches."""

    def __init__(self, *, rank=0, world=1, micro=8):
        self.rank, self.world, self.micro, self.samples_consumed = rank, world, micro, 0

    def next_step(self):
        generator = torch.Generator().manual_seed(self.samples_consumed)
        ids = torch.randint(0, 50, (8, 13), generator=generator)
        labels = ids[:, 1:].clone()
        for sample in range(8):
            labels[sample, : (5 * sample) % 12] = -100
        self.samples_consumed += 8
        local = 8 // self.world
        mine = slice(self.rank * local, (self.rank + 1) * local)
        ids, labels = ids[mine, :-1], labels[mine]
        return [
            {"input_ids": ids[i : i + self.micro], "labels": labels[i : i + self.micro]}
            for i in range(0, local, self.micro)
        ]


def runtime_for(batches, mesh=None, config=CONFIG):
    mesh = mesh or Mesh.single()
    (model,), shards = build_chunks(config, mesh)
    optimizer = build_optimizer([(s.name, s.owned) for s in shards], config.optim)
    return Runtime(
        model, optimizer, mean_loss, batches, mesh.device, mesh, config, corpus=None,
        loss_scale=LossScale(config.precision), shards=shards,
    )  # fmt: skip


def data_parallel_mesh(rank):
    return build_mesh(
        CONFIG.parallel, device=torch.device("cpu"), local_rank=rank, comm_timeout=60.0
    )


def three_steps(runtime):
    outs = [train_step(runtime) for _ in range(3)]
    losses = [[out.loss, out.aux_loss, out.z_loss, out.grad_norm] for out in outs]
    weights = {n: p.detach().numpy().copy() for n, p in runtime.model.named_parameters()}
    return losses, weights


def compare(found, wanted, tolerance=1e-11):
    assert np.allclose(found[0], wanted[0], rtol=1e-12, atol=0)
    as_tensors = [{n: torch.from_numpy(w) for n, w in side[1].items()} for side in (found, wanted)]
    assert_same(*as_tensors, tolerance=tolerance)


@pytest.fixture(scope="module")
def reference():
    return three_steps(runtime_for(Samples()))


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_changes_nothing(micro, reference):
    compare(three_steps(runtime_for(Samples(micro=micro))), reference)


def steps_on_rank(rank, world, micro):
    mesh = data_parallel_mesh(rank)
    return three_steps(runtime_for(Samples(rank=rank, world=world, micro=micro), mesh))


@pytest.mark.parametrize("world, micro", [(2, 4), (2, 1), (4, 2)])
def test_ranks_with_unequal_token_counts_equal_one_process(world, micro, reference):
    for found in run_ranks(steps_on_rank, world, micro):
        compare(found, reference)


V3 = replace(
    CONFIG.model, scoring_func="sigmoid", correction_bias=True, correction_bias_update_rate=0.05,
    n_group=2, topk_group=1, num_hidden_layers=3, first_k_dense_replace=1,
)  # fmt: skip
ROUTINGS = {
    "DeepSeek-V3": V3,
    "capacity by position": replace(V3, capacity_factor=0.75, drop_policy="position"),
    "capacity by weight": replace(CONFIG.model, capacity_factor=0.75),
    "expert choice": replace(CONFIG.model, routing="expert_choice"),
}


def routed_steps(config, batches, mesh=None):
    """Three steps; also every load that was measured, and every correction bias at the end."""
    runtime = runtime_for(batches, mesh, config)
    outs = [train_step(runtime) for _ in range(3)]
    losses = [[o.loss, o.aux_loss, o.z_loss, o.grad_norm, o.load_max_over_mean] for o in outs]
    state = {n: t.detach().numpy().copy() for n, t in named_state(runtime.model)}
    return losses, state


def routed_steps_on_rank(rank, world, micro, config):
    mesh = data_parallel_mesh(rank)
    return routed_steps(config, Samples(rank=rank, world=world, micro=micro), mesh)


@pytest.mark.filterwarnings("ignore:.*later ones included")
@pytest.mark.parametrize("model", ROUTINGS.values(), ids=ROUTINGS)
def test_no_split_of_a_batch_changes_a_routing(model):
    config = replace(CONFIG, model=model)
    reference = routed_steps(config, Samples())
    assert all(row[-1] > 1.0 for row in reference[0]) or model.routing == "expert_choice"
    biases = [v for n, v in reference[1].items() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 2 * model.correction_bias and all(abs(b).max() > 0.01 for b in biases)
    splits = [routed_steps(config, Samples(micro=micro)) for micro in (1, 2)]
    splits += run_ranks(routed_steps_on_rank, 2, 4, config)
    splits += run_ranks(routed_steps_on_rank, 4, 1, config)
    for found in splits:
        compare(found, reference)
        for name, value in reference[1].items():
            if name.endswith("e_score_correction_bias"):
                assert np.array_equal(found[1][name], value), "bitwise, on every rank"


def test_the_load_is_that_of_all_samples_of_the_step():
    config, counts = replace(CONFIG, model=V3), torch.zeros(2, 4).double()
    runtime = runtime_for(Samples(micro=2), config=config)
    model = build_model(config, "cpu")
    for batch in Samples(micro=2).next_step():
        counts += model(batch["input_ids"]).tokens_per_expert
    out = train_step(runtime)
    assert counts.sum(1).tolist() == [8 * 12 * 2] * 2
    wanted = (counts.max(1).values / counts.mean(1)).max()
    assert out.load_max_over_mean == pytest.approx(float(wanted), rel=1e-6)
    assert out.row()["moe/load_max_over_mean"] == out.load_max_over_mean
    bias = runtime.model.model.layers["1"].mlp.gate.e_score_correction_bias
    moved = 0.05 * torch.sign(counts[0].mean() - counts[0])
    assert_same({"bias": bias}, {"bias": moved - moved.mean()}, tolerance=1e-14)
    dense = replace(CONFIG, model=replace(CONFIG.model, num_experts=0))
    assert "moe/load_max_over_mean" not in train_step(runtime_for(Samples(), config=dense)).row()


def biases_of(runtime):
    return {n: t.clone() for n, t in runtime.model.named_buffers()}


def test_the_bias_rests_in_validation_and_in_a_skipped_step():
    runtime = runtime_for(Samples(), config=replace(CONFIG, model=V3))
    train_step(runtime)
    before = biases_of(runtime)
    runtime.model.eval()
    for batch in Samples().next_step():
        token_sums(runtime.model, batch)
        mean_loss(runtime.model, batch).backward()
    runtime.model.train()
    runtime.optimizer.zero_grad()
    assert_same(biases_of(runtime), before, tolerance=0)
    hook = runtime.model.lm_head.weight.register_hook(lambda grad: grad * float("nan"))
    assert not train_step(runtime).finite
    assert_same(biases_of(runtime), before, tolerance=0)
    hook.remove()
    train_step(runtime)
    assert any(not torch.equal(b, before[n]) for n, b in biases_of(runtime).items())


def test_a_checkpoint_takes_the_bias_along_and_the_run_goes_on_bitwise(tmp_path):
    config = replace(CONFIG, model=V3, precision="fp32")
    whole, resumed = (runtime_for(Samples(), config=config) for _ in range(2))
    for _ in range(2):
        train_step(whole)
    meta = {
        "samples_consumed": 16, "data_hash": "", "config_hash": "", "mesh": {},
        "model": {"num_experts": 4},
    }  # fmt: skip
    path = dcp.save(
        tmp_path, step=2, tensors=training_tensors(whole), rank_tensors={},
        meta=meta, files={}, mesh=Mesh.single(), keep=0,
    )  # fmt: skip
    materialise_state(resumed.optimizer)
    tensors = training_tensors(resumed)
    dcp.load(path, tensors)
    for state in resumed.optimizer.state.values():
        state["step"].copy_(tensors["optim.step"])
    resumed.step, resumed.batches.samples_consumed = 2, 16
    assert_same(biases_of(resumed), biases_of(whole), tolerance=0)
    assert {b.dtype for b in biases_of(whole).values()} == {torch.float32}
    outs = [train_step(runtime)._replace(step_time=0.0) for runtime in (resumed, whole)]
    assert outs[0] == outs[1]
    assert_same(*(dict(named_state(r.model)) for r in (resumed, whole)), tolerance=0)


def test_a_forward_pass_made_again_for_backward_counts_nothing_twice():
    config = replace(CONFIG, model=V3)
    plain, again = (runtime_for(Samples(micro=4), config=config) for _ in range(2))
    passes = []

    def recomputed(block):
        def forward(x, positions):
            passes.append(block)
            return real(x, positions)

        real = block.forward
        block.forward = lambda x, positions: checkpoint(forward, x, positions, use_reentrant=False)

    for block in again.model.layers.values():
        recomputed(block)
    outs = [[train_step(runtime) for _ in range(3)] for runtime in (plain, again)]
    assert len(passes) == 3 * 2 * 3 * 2, "steps, micro-batches, blocks, forward and again"
    loads = [[out.load_max_over_mean for out in side] for side in outs]
    assert loads[0] == loads[1]
    assert_same(biases_of(again), biases_of(plain), tolerance=0)
    weights = [dict(runtime.model.named_parameters()) for runtime in (again, plain)]
    assert_same(*weights, tolerance=1e-12)


def test_a_count_taken_in_forward_would_be_seen_under_recomputation(monkeypatch):
    """The usual mistake: the router adds to a buffer of its own, so recomputation adds again."""
    config, taken = replace(CONFIG, model=V3), []
    real = TopKRouter.forward

    def counting(self, x, pad_mask=None, places=None):
        found = real(self, x, pad_mask, places)
        taken.append(int(found.tokens_per_expert.sum()))
        return found

    monkeypatch.setattr(TopKRouter, "forward", counting)
    runtime = runtime_for(Samples(), config=config)
    for block in runtime.model.layers.values():
        forward = block.forward
        block.forward = lambda x, p, f=forward: checkpoint(f, x, p, use_reentrant=False)
    train_step(runtime)
    assert sum(taken) == 2 * (2 * 8 * 12 * 2), "twice what the step counts"


def test_a_mean_of_means_would_be_seen(reference):
    def mean_of_means(model, batch):
        sums = token_sums(model, batch)
        scale = 32.0 / sums.count
        return sums._replace(nll=sums.nll * scale, aux=sums.aux * scale, z=sums.z * scale)

    import curry_train.step as step

    token_sums, step.token_sums = step.token_sums, mean_of_means
    try:
        with pytest.raises(AssertionError):
            compare(three_steps(runtime_for(Samples(micro=4))), reference)
    finally:
        step.token_sums = token_sums


def test_a_step_equals_plain_pytorch(reference):
    model = build_model(CONFIG, "cpu")
    decay = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.dim() > 1 and "embed" not in n)]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.99), eps=1e-8, fused=False, foreach=False,
    )  # fmt: skip
    samples, losses = Samples(), []
    for step in (1, 2, 3):
        (batch,) = samples.next_step()
        optimizer.zero_grad()
        out = model(batch["input_ids"])
        count = (batch["labels"] != -100).sum(1)
        nll = torch.nn.functional.cross_entropy(
            out.logits[..., :50].flatten(0, 1), batch["labels"].flatten()
        )
        aux = (out.aux_loss * count).sum() / count.sum()
        z = (out.z_loss * count).sum() / count.sum()
        (nll + aux + z).backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, 0.5 / norm.item()))
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, CONFIG.optim, 10)
        optimizer.step()
        losses.append([nll.item(), aux.item(), z.item(), norm.item()])
    assert min(row[3] for row in losses) > 0.5, "the clip must be active in this test"
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    compare((losses, weights), reference)


def test_a_step_whose_gradient_is_not_finite_changes_no_weight():
    runtime = runtime_for(Samples())
    before = [p.detach().clone() for p in runtime.model.parameters()]
    hook = runtime.model.lm_head.weight.register_hook(lambda grad: grad * float("nan"))
    out = train_step(runtime)
    assert not out.finite
    assert all(torch.equal(a, b) for a, b in zip(before, runtime.model.parameters(), strict=True))
    hook.remove()
    assert train_step(runtime).finite


def test_all_labels_ignored_is_a_step_of_zero_gradient():
    class Ignored(Samples):
        def next_step(self):
            batches = super().next_step()
            for batch in batches:
                batch["labels"] = torch.full_like(batch["labels"], -100)
            return batches

    out = train_step(runtime_for(Ignored()))
    assert out.tokens == 0 and out.loss == 0.0 and out.grad_norm == 0.0


def test_tokens_count_the_targets_that_are_not_ignored():
    runtime, wanted = runtime_for(Samples(micro=2)), 0
    for _ in range(2):
        (batch,) = Samples.next_step(samples := Samples())
        assert train_step(runtime).tokens == int((batch["labels"] != -100).sum())
        wanted += int((batch["labels"] != -100).sum())
        assert runtime.tokens == wanted < samples.samples_consumed * 12 * runtime.step
        runtime.batches.samples_consumed = 0


def test_fp16_scales_the_loss_and_not_the_update():
    config = replace(CONFIG, precision="fp32", optim=replace(CONFIG.optim, max_grad_norm=0.0))
    plain, scaled = runtime_for(Samples(), config=config), runtime_for(Samples(), config=config)
    scaled.loss_scale = LossScale("fp16")
    assert scaled.loss_scale.value == 128.0
    compare(three_steps(scaled), three_steps(plain), tolerance=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_keep_float32_parameters_and_learn(precision):
    config = replace(CONFIG, precision=precision)
    runtime = runtime_for(Samples(), config=config)
    assert {p.dtype for p in runtime.model.parameters()} == {torch.float32}
    first = train_step(runtime).loss
    for _ in range(9):
        out = train_step(runtime)
        runtime.batches.samples_consumed = 0
    assert out.finite and out.loss < first - 0.1
    moments = [s["exp_avg"].dtype for s in runtime.optimizer.state.values()]
    assert set(moments) == {torch.float32}


def test_the_loss_scale_halves_on_overflow_and_grows_after_good_steps():
    scale = LossScale("fp16")
    assert scale.update(False) and scale.value == 64.0
    for _ in range(LossScale.growth_interval - 1):
        assert not scale.update(True)
    assert scale.value == 64.0
    scale.update(True)
    assert scale.value == 128.0
    fixed = LossScale("bf16")
    assert not fixed.update(False) and fixed.value == 1.0
    for _ in range(LossScale.growth_interval):
        fixed.update(True)
    assert fixed.value == 1.0


def test_good_steps_before_an_overflow_do_not_count_and_the_scale_has_a_floor():
    scale = LossScale("fp16")
    for finite in [*[True] * (LossScale.growth_interval - 1), False, True]:
        scale.update(finite)
    assert scale.value == 64.0
    halvings = 0
    while scale.update(False) and halvings < 99:
        halvings += 1
    assert halvings == 20 and scale.value == 2.0**-14, "then the step itself is to blame"


def test_finish_clips_to_the_norm_and_reports_it_before_clipping():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64) * 10
    report = grads.finish(whole_shards([("parameter", parameter)]), token_count=10, max_norm=1.0)
    assert report.norm == pytest.approx(5.0, rel=1e-15) and report.finite
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-15)


def test_a_norm_of_zero_clips_nothing_and_a_parameter_without_gradient_gets_zeros():
    used, unused = (torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    used.grad = torch.tensor([30.0, 40.0], dtype=torch.float64)
    report = grads.finish(
        whole_shards([("unused", unused), ("used", used)]), token_count=10, max_norm=0.0
    )
    assert report.norm == pytest.approx(5.0, rel=1e-15)
    assert used.grad.tolist() == pytest.approx([3.0, 4.0])
    assert unused.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_reported_and_left_as_it_is(bad):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, bad])
    report = grads.finish(whole_shards([("parameter", parameter)]), token_count=2, max_norm=1.0)
    assert not report.finite and not abs(report.norm) < float("inf")
    assert parameter.grad[0] == 1.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_added_in_float64_whatever_the_precision(precision):
    model = build_model(replace(CONFIG, precision=precision), "cpu")
    (batch,) = Samples().next_step()
    sums = token_sums(model, batch)
    assert {sums.nll.dtype, sums.aux.dtype, sums.z.dtype} == {torch.float64}
    logits = model(batch["input_ids"]).logits.float()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="none"
    )
    assert sums.nll.item() == each.double().sum().item()


def sum_in_small_buckets(rank, world):
    grads.BUCKET_ELEMENTS = 5
    messages, send = [], dist.all_reduce

    def counted(flat, **options):
        messages.append(flat.numel())
        send(flat, **options)

    grads.dist.all_reduce = counted
    tensors = [torch.full((size,), float(rank + 1)) for size in (3, 1, 4, 1, 5, 9)]
    grads.sum_over_ranks(tensors, dist.group.WORLD)
    return messages, [tensor.tolist() for tensor in tensors]


def test_buckets_lose_no_gradient():
    for messages, found in run_ranks(sum_in_small_buckets, 2):
        assert found == [[3.0] * size for size in (3, 1, 4, 1, 5, 9)]
        assert messages == [8, 6, 9]
