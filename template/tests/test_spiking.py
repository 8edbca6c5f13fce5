"""The spiking transformer equals its equations, is causal, learns text and the order of events."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from projects import SMALL, forked, import_everything, run_folders

from curry_train import plan
from curry_train.config import Config
from curry_train.data.tasks import at_one_time_step, cyclic_orders, order_of_events
from curry_train.layers import spiking_attention
from curry_train.layers.attention import Positions
from curry_train.layers.lif import LIF
from curry_train.layers.linear import Linear
from curry_train.layers.spiking_attention import linear_attention
from curry_train.loss import mean_loss
from curry_train.models.protocol import build_model, count_parameters, init_weights, run_block
from curry_train.models.spiking import SpikingConfig
from curry_train.models.spiking_classifier import SpikingClassifier
from curry_train.rules import problems
from curry_train.runtime import build_runtime
from curry_train.step import train_step
from curry_train.testing import assert_same

TINY = SpikingConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, time_steps=3)


def tiny(precision="fp64", **changes):
    """Build a small model whose head is no smaller than the rest."""
    model = replace(TINY, initializer_range=0.3, **changes)
    return build_model(Config(model=model, precision=precision), "cpu")


def tokens(length=11, batch=2):
    return torch.randint(0, 257, (batch, length), generator=torch.Generator().manual_seed(5))


def by_recurrence(q, k, v, decay, doc_ids=None):
    """The running sum, one token after the other."""
    batch, heads, length, width = q.shape
    state, outs = q.new_zeros(batch, heads, width, width), []
    for i in range(length):
        if i and doc_ids is not None:
            state = state * (doc_ids[:, i] == doc_ids[:, i - 1])[:, None, None, None]
        state = decay[:, None, None] * state + k[:, :, i, :, None] * v[:, :, i, None, :]
        outs.append((q[:, :, i, None] @ state)[:, :, 0])
    return torch.stack(outs, 2)


@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_in_chunks_equals_the_running_sum_with_gradients(chunk, packed):
    q, k, v = (torch.randn(2, 3, 10, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    decay = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [4] * 9 + [5]]) if packed else None
    got = linear_attention(q, k, v, decay, doc_ids, chunk)
    wanted = by_recurrence(q, k, v, decay, doc_ids)
    upstream = torch.randn_like(got)
    found = torch.autograd.grad(got, (q, k, v), upstream)
    reference = torch.autograd.grad(wanted, (q, k, v), upstream)
    assert_same(
        {"out": got, **dict(zip("qkv", found, strict=True))},
        {"out": wanted, **dict(zip("qkv", reference, strict=True))},
        tolerance=1e-12,
    )


def plain_forward(model, ids, doc_ids=None):
    """The equations at the head of models/spiking.py, from the state dict alone."""
    config, state = model.config, model.state_dict()
    decay = torch.tensor([0.5, 0.75]).double()
    assert len(decay) == config.num_attention_heads

    def norm(x, name):
        scale = (x * x).mean(-1, keepdim=True) + config.rms_norm_eps
        return x / scale.sqrt() * state[f"{name}.weight"]

    def fire(x, name):
        leak, v, spikes = state[f"{name}.lif.leak_logit"].sigmoid(), 0.0, []
        for now in norm(x, f"{name}.norm"):
            u = leak * v + now
            spikes.append((u >= config.threshold).double())
            v = u - config.threshold * spikes[-1]
        return torch.stack(spikes)

    x = torch.stack([state["embed_tokens.weight"][ids]] * config.time_steps)  # [time, B, S, D]
    for index in range(config.num_hidden_layers):
        block = f"model.layers.{index}"
        attn, mlp = f"{block}.self_attn", f"{block}.mlp"
        spikes = fire(x, f"{block}.input_spikes")
        q, k, v = (
            fire(spikes @ state[f"{attn}.{c}_proj.weight"].T, f"{attn}.{c}_spikes") for c in "qkv"
        )
        heads = [
            y.unflatten(-1, (config.num_attention_heads, -1)).transpose(2, 3) for y in (q, k, v)
        ]
        mixed = [by_recurrence(*parts, decay, doc_ids) for parts in zip(*heads, strict=True)]
        mixed = torch.stack(mixed).transpose(2, 3).flatten(-2)
        x = x + fire(mixed, f"{attn}.out_spikes") @ state[f"{attn}.o_proj.weight"].T
        spikes = fire(x, f"{block}.post_attention_spikes")
        spikes = fire(spikes @ state[f"{mlp}.up_proj.weight"].T, f"{mlp}.up_spikes")
        x = x + spikes @ state[f"{mlp}.down_proj.weight"].T
    return norm(x, "model.norm").mean(0) @ state["lm_head.weight"].T


@pytest.mark.parametrize("packed", [False, True])
def test_the_model_equals_its_equations(packed):
    model, ids = tiny(), tokens()
    doc_ids = torch.tensor([[0] * 4 + [1] * 7, [0] * 10 + [1]]) if packed else None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        got, wanted = model(ids, doc_ids=doc_ids).logits, plain_forward(model, ids, doc_ids)
    assert_same({"x": got[..., :257]}, {"x": wanted[..., :257]}, tolerance=1e-11)
    assert (got[..., 257:] == -torch.inf).all() and got.shape[-1] == 320


def earlier_logits_that_changed(model):
    """Change each token in turn; return the positions before it whose logits move."""
    ids = tokens(length=70, batch=1)  # more than one chunk of attention
    with torch.no_grad():
        before = model(ids).logits
        moved = []
        for position in (0, 1, 17, 63, 64, 69):
            other = ids.clone()
            other[0, position] = (other[0, position] + 1) % 257
            changed = (model(other).logits[..., :257] != before[..., :257]).any(-1)[0]
            assert changed[position], "the token itself must count"
            moved += changed[:position].nonzero().flatten().tolist()
    return moved


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_token_never_changes_an_earlier_logit(precision):
    assert earlier_logits_that_changed(tiny(precision)) == []


def test_the_causality_test_sees_a_planted_look_ahead(monkeypatch):
    def looks_ahead(q, k, v, decay, docs):
        return linear_attention(q, k.roll(-1, 2), v.roll(-1, 2), decay, docs)

    monkeypatch.setattr(spiking_attention, "linear_attention", looks_ahead)
    assert earlier_logits_that_changed(tiny())


def test_a_prefix_alone_gives_the_same_logits():
    model, ids = tiny(), tokens(length=70)
    whole, prefix = model(ids).logits, model(ids[:, :40]).logits
    assert_same({"x": whole[:, :40, :257]}, {"x": prefix[..., :257]}, tolerance=1e-12)


def test_a_later_token_reads_earlier_ones_and_time_steps_matter():
    model, ids = tiny(), tokens()
    other = ids.clone()
    other[:, -2] = (other[:, -2] + 1) % 257
    last, last_other = model(ids).logits[:, -1, :257], model(other).logits[:, -1, :257]
    assert (last != last_other).any()
    fewer = tiny(time_steps=1)
    fewer.load_state_dict(model.state_dict())
    assert (fewer(ids).logits[..., :257] != model(ids).logits[..., :257]).any()


def test_packed_documents_give_what_they_give_alone():
    model, ids = tiny(), tokens()
    doc_ids = torch.tensor([[0] * 4 + [1] * 7] * 2)
    packed = model(ids, doc_ids=doc_ids).logits
    alone = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], 1)
    assert_same({"x": packed[..., :257]}, {"x": alone[..., :257]}, tolerance=1e-12)


def test_matrices_inside_blocks_meet_spikes_only():
    model, seen = tiny(), []

    def spikes_only(module, inputs):
        seen.append(bool(((inputs[0] == 0) | (inputs[0] == 1)).all() and inputs[0].any()))

    for module in model.model.layers.modules():
        if isinstance(module, Linear):
            module.register_forward_pre_hook(spikes_only)
    model(tokens())
    assert seen == [True] * 6 * TINY.num_hidden_layers


def test_every_parameter_gets_a_finite_gradient():
    for precision in ("fp64", "fp32", "bf16"):
        model, ids = tiny(precision), tokens()
        mean_loss(model, {"input_ids": ids, "labels": ids}).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all() and parameter.grad.any(), (precision, name)


def test_a_block_is_the_five_parts_of_the_protocol():
    model, x = tiny(), torch.randn(3 * 2, 7, 16, dtype=torch.float64)
    block, positions = model.layers["0"], Positions(x.new_empty(0), x.new_empty(0))
    residual, rows, routing = block.attention(x, positions)
    assert residual.shape == x.shape and rows.shape == (3 * 2 * 7, 16) and routing is None
    rows, local = block.dispatch(rows, routing)
    out = block.aggregate(residual, block.combine(block.experts(rows, local), local))
    assert torch.equal(out, run_block(block, x, positions)[0])
    assert torch.equal(out, block(x, positions)[0])


def test_the_start_holds_the_leak_and_unit_norms():
    model = build_model(Config(model=replace(TINY, leak=0.9)), "cpu")
    leaks = [p.sigmoid() for n, p in model.named_parameters() if n.endswith("leak_logit")]
    assert len(leaks) == 7 * 2 and all(leak.item() == pytest.approx(0.9) for leak in leaks)
    assert all((p == 1).all() for n, p in model.named_parameters() if n.endswith("norm.weight"))
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    assert stds["embed_tokens.weight"] == pytest.approx(1.0, rel=0.15)
    assert stds["model.layers.0.mlp.up_proj.weight"] == pytest.approx(16**-0.5, rel=0.15)
    assert stds["model.layers.1.mlp.down_proj.weight"] == pytest.approx(24**-0.5, rel=0.15)
    assert stds["lm_head.weight"] == pytest.approx(0.02, rel=0.15)
    fixed = build_model(Config(model=replace(TINY, learn_leak=False)), "cpu")
    assert count_parameters(model)[0] - count_parameters(fixed)[0] == 14


def test_a_dry_run_counts_it(capsys):
    assert plan.print_plan(Config(model=SpikingConfig(), devices=1)) == 0
    total = count_parameters(build_model(Config(model=SpikingConfig()), "meta"))[0]
    out = capsys.readouterr().out
    assert f"parameters: {total} (active {total})" in out and "unknown for architecture" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "model.num_attention_heads=3: does not divide"),
        ({"leak": 1.0}, "model.leak=1.0: must be 0 to 1, and between them"),
        ({"leak": -0.1, "learn_leak": False}, "model.leak=-0.1: must be 0 to 1"),
        ({"time_steps": 0}, "model.time_steps=0: must be an integer of at least 1"),
        ({"surrogate": "relu"}, "model.surrogate=relu: must be fast_sigmoid, atan or triangle"),
        ({"reset": "none"}, "model.reset=none: must be soft, hard or delayed"),
        ({"threshold": 0.0}, "model.threshold=0.0: must be a finite number above 0"),
    ],
)
def test_values_that_make_no_model_are_told(changes, message):
    (problem,) = problems(Config(model=replace(SpikingConfig(), **changes)))
    assert problem.startswith(message)
    assert problems(Config(model=SpikingConfig(leak=1.0, learn_leak=False))) == []


def test_it_learns_text():
    runtime = build_runtime(
        [
            "model=tiny_spiking",
            "data.seq_len=64",
            "data.global_batch_size=4",
            "optim.warmup_steps=5",
        ]
    )
    losses = [train_step(runtime).loss for _ in range(60)]
    first, last = losses[0], sum(losses[-10:]) / 10
    # 3.2 nats is what the frequencies of single bytes give.
    assert first == pytest.approx(5.55, abs=0.1) and last < 3.2, (first, last)


def test_train_py_trains_it_and_its_checkpoint_holds_the_leaks(tmp_path, monkeypatch):
    import_everything()
    monkeypatch.chdir(tmp_path)
    overrides = ["model=tiny_spiking", *(word for word in SMALL if "moe" not in word)]
    code, told = forked("run.max_steps=2", *overrides, log=tmp_path / "log.txt")
    assert code == 0, told
    (folder,) = run_folders(tmp_path)
    (manifest,) = folder.glob("checkpoints/*/manifest.json")
    assert "model.layers.0.mlp.up_spikes.lif.leak_logit" in manifest.read_text()


def test_the_ten_orders_differ_and_one_time_step_tells_nothing():
    orders = cyclic_orders()
    turns = {order[i:] + order[:i] for order in orders for i in range(5)}
    assert len(orders) == 10 and len(turns) == 50  # no order is a rotation of another
    assert all((order[0], *order[:0:-1]) in orders for order in orders)  # its reverse too
    samples = order_of_events(4000, seed=0, noise=0.0)
    assert samples.frames.shape == (4000, 5, 4, 8)
    assert torch.bincount(samples.labels).tolist() == pytest.approx([400] * 10, rel=0.2)
    together = at_one_time_step(samples).frames
    assert (together == together[0]).all()
    for time in range(5):
        kinds, which = samples.frames[:, time].flatten(1).unique(dim=0, return_inverse=True)
        table = torch.bincount(which * 10 + samples.labels, minlength=50).view(5, 10)
        assert len(kinds) == 5
        expected = table.sum(1, keepdim=True) * table.sum(0) / 4000
        chi_square = ((table - expected) ** 2 / expected).sum()
        assert chi_square < 72  # 36 degrees of freedom, p = 0.0003


def test_the_task_repeats_by_its_seed_and_noise_flips_events():
    one, again, other = (order_of_events(300, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.frames, again.frames) and torch.equal(one.labels, again.labels)
    assert not torch.equal(one.labels, other.labels)
    clean = order_of_events(300, seed=1, noise=0.0)
    assert (one.frames != clean.frames).float().mean().item() == pytest.approx(0.02, rel=0.2)


def test_frames_with_other_time_steps_are_refused():
    model = SpikingClassifier(TINY, channels=8, classes=10, compute_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"shape \[2, 5, 4, 8\].*time 3; set time_steps"):
        model(order_of_events(2, seed=0).frames)


def learnt(samples, held_out, *, steps, seed=0):
    """Train a one-block classifier; return its held-out accuracy."""
    time_steps, channels = samples.frames.shape[1], samples.frames.shape[3]
    config = SpikingConfig(
        time_steps=time_steps, hidden_size=64, intermediate_size=128, num_hidden_layers=1
    )
    model = SpikingClassifier(config, channels=channels, classes=10, compute_dtype=torch.float32)
    init_weights(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(samples.labels), (64,), generator=generator)
        loss = F.cross_entropy(model(samples.frames[chosen]), samples.labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return (model(held_out.frames).argmax(-1) == held_out.labels).float().mean().item()


@pytest.mark.slow
def test_the_order_of_events_is_learnt_over_time_steps_and_not_in_one():
    samples, held_out = order_of_events(2048, seed=0), order_of_events(1000, seed=1)
    over_time = learnt(samples, held_out, steps=200)
    at_once = learnt(at_one_time_step(samples), at_one_time_step(held_out), steps=200)
    last = [type(s)(s.frames[:, -1:], s.labels) for s in (samples, held_out)]
    last_only = learnt(*last, steps=200)
    print(f"held out: {over_time:.3f} over time, {at_once:.3f} at once, {last_only:.3f} last only")
    assert over_time >= 0.9 and at_once < 0.4 and last_only < 0.4


def test_neurons_of_a_model_follow_its_configuration():
    changed = {"leak": 0.3, "threshold": 0.7, "surrogate": "triangle", "surrogate_slope": 2.0}
    model = tiny(**changed, reset="hard", detach_reset=True)
    found = [m for m in model.modules() if isinstance(m, LIF)]
    assert len(found) == 14 and all(a.threshold == b.threshold for a, b in pairwise(found))
    one = found[0]
    assert (one.initial_leak, one.threshold, one.surrogate, one.slope) == (
        0.3,
        0.7,
        "triangle",
        2.0,
    )
    assert (one.reset, one.detach_reset) == ("hard", True)
