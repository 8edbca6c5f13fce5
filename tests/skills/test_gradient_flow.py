"""Gradient flow: known answers, faults planted in small models, sound models that look odd."""

from __future__ import annotations

import importlib
import json
import math
import sys

import pytest
import torch
from skills.targets import flows, processes
from skills.targets.processes import ROOT, TARGETS
from torch import nn

SCRIPT = ROOT / "skills" / "gradient-flow" / "scripts" / "gradient_flow.py"
sys.path.insert(0, str(SCRIPT.parent))
gradient_flow = importlib.import_module("gradient_flow")
flow_attention = importlib.import_module("flow_attention")
flow_numbers = importlib.import_module("flow_numbers")
flow_look = importlib.import_module("flow_look")
sys.dont_write_bytecode = False  # the script sets it for itself
Target = importlib.import_module("kit.target").Target


def target(model, batches, loss_fn, optimizer=None, **fields):
    return Target(
        model, batches, loss_fn, optimizer, torch.device("cpu"), "hash", "foreign", **fields
    )


def judged(parts, **settings):
    """Return {id: check} of a model."""
    checks = gradient_flow.judge_target(target(*parts), **settings)
    assert len({check["id"] for check in checks}) == len(checks)
    return {check["id"]: check for check in checks}


def failed(checks):
    return {id for id, check in checks.items() if check["verdict"] == "fail"}


SOUND = {
    "gpt": flows.gpt,
    "attention by softmax": lambda: flows.gpt(kind="softmax"),
    "recomputed blocks": lambda: flows.gpt(again=False),
    "recomputed blocks, reentrant": lambda: flows.gpt(again=True),
    "torch's encoder": flows.encoder,
    "a small deep network as torch makes it": lambda: flows.tower(5, nn.ReLU),
    "20 tanh layers at their gain": lambda: flows.tower(std=5 / 3 / 8),
    "an LSTM over time": flows.recurrent,
    "frozen layer, adapter at zero": flows.adapter,
    "convolutions, ReLU in place": flows.images,
    "an expert without tokens": flows.mixture,
    "gates at zero, a block called twice": flows.gates,
    "activations as functions": flows.functions,
    "no optimizer": lambda: flows.gates()[:3],
    "learning rate of 1e-2": lambda: flows.gpt(lr=1e-2),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_models_pass(name):
    checks = judged(SOUND[name]())
    assert {check["verdict"] for check in checks.values()} <= {"pass", "skipped"}, checks
    assert checks["vanishing-gradient"]["verdict"] == "pass"


FAULTS = {
    "20 layers, std .01": (lambda: flows.tower(std=0.01), {"vanishing-gradient"}),
    "20 ReLU layers, 1.5 x the gain": (
        lambda: flows.tower(act=nn.ReLU, std=1.5 * math.sqrt(2 / 64)),
        {"exploding-gradient"},
    ),
    "20 tanh layers, 1.5 x the gain of ReLU": (
        lambda: flows.tower(std=1.5 * math.sqrt(2 / 64)),
        {"exploding-gradient"},
    ),
    "20 tanh layers, 1.5 x their gain": (
        lambda: flows.tower(std=1.5 * 5 / 3 / 8),
        {"exploding-gradient"},
    ),
    "recurrent weights of 4 x their size": (
        lambda: flows.recurrent(nn.RNN, 4.0, nonlinearity="relu"),
        {"exploding-gradient"},
    ),
    "ReLU with a bias of -10": (
        lambda: flows.tower(3, nn.ReLU, std=0.1, bias=-10.0),
        {"dead-units", "vanishing-gradient"},
    ),
    "tanh of large numbers": (
        lambda: flows.tower(3, std=30.0),
        {"saturated-units"},
    ),
    "one of two relu() is off": (
        lambda: flows.functions(bias=-10.0),
        {"dead-units", "vanishing-gradient"},
    ),
    "one of two x.tanh() is on its ends": (
        lambda: flows.functions(torch.Tensor.tanh, weight=1000.0),
        {"saturated-units"},
    ),
    "images with a bias of -10": (
        lambda: flows.images(bias=-10.0),
        {"dead-units", "vanishing-gradient"},
    ),
    "the stream is scaled by each block": (
        lambda: flows.gpt(depth=8, stream=1.5),
        {"residual-growth", "exploding-gradient"},
    ),
    "queries x 100": (lambda: flows.gpt(q_scale=100.0), {"attention-entropy", "attention-logits"}),
    "queries x 100, softmax": (
        lambda: flows.gpt(q_scale=100.0, kind="softmax"),
        {"attention-entropy", "attention-logits"},
    ),
    "queries x 100, torch's encoder": (
        lambda: flows.encoder(100.0),
        {"attention-entropy", "attention-logits"},
    ),
    "cut off before the head": (lambda: flows.gpt(cut=True), {"vanishing-gradient"}),
    "learning rate 1": (
        lambda: flows.gpt(lr=1.0),
        {"update-ratio", "attention-entropy", "attention-logits"},
    ),
    "learning rate 1e-9": (lambda: flows.gpt(lr=1e-9), {"update-ratio"}),
    "bfloat16 weights, 1e-5": (
        lambda: flows.gpt(lr=1e-5, dtype=torch.bfloat16),
        {"update-ratio"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_fails_by_its_name_alone(name):
    make, wanted = FAULTS[name]
    checks = judged(make())
    assert failed(checks) == wanted, checks
    for id in wanted:
        assert checks[id]["fix"]["file"].endswith("flows.py"), checks[id]


def test_vanishing_is_measured_as_the_slope_that_it_has():
    """Width 64 and std .01: each layer multiplies the gradient by .01 * 8."""
    check = judged(flows.tower(depth=10, std=0.01), steps=0)["vanishing-gradient"]
    assert check["verdict"] == "fail" and check["threshold"] == pytest.approx(math.log(10) / 10)
    assert check["value"] == pytest.approx(math.log(1 / 0.08), rel=0.05)


def test_a_shorter_change_passes_and_a_decade_in_ten_layers_fails():
    """A chain of scaled identities has an exact slope."""

    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor, self.weight = factor, nn.Parameter(torch.eye(16))

        def forward(self, x):
            return self.factor * x @ self.weight

    def chain(factor, depth=16):
        model = nn.Sequential(*(Scaled(factor) for _ in range(depth)))
        return flows.parts(model, [flows.random(8, 16)], lambda m, x: m(x).sum(), lr=0.0)

    limit = math.exp(-math.log(10) / 10)
    assert "vanishing-gradient" in failed(judged(chain(limit * 0.99)))
    assert not failed(judged(chain(limit * 1.01))) & {"vanishing-gradient", "exploding-gradient"}
    check = judged(chain(1 / (limit * 0.99)))["exploding-gradient"]
    assert check["verdict"] == "fail"
    assert check["value"] == pytest.approx(-math.log(10) / 10 + math.log(0.99), rel=1e-4)


def test_the_first_module_that_is_not_finite_is_named():
    parts = flows.gpt()
    with torch.no_grad():
        parts[0].blocks[2].mlp[0].weight[0] = math.nan
    check = judged(parts)["non-finite"]
    assert check["verdict"] == "fail" and "blocks.2.mlp.0 is the first" in check["message"]
    assert check["fix"]["file"].endswith("flows.py")

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last((self.first(x) * 0).abs().sqrt())  # its slope at 0 is infinite

    parts = flows.parts(Broken(), [flows.random(8, 4)], lambda m, x: m(x).sum())
    check = judged(parts)["non-finite"]
    assert check["verdict"] == "fail" and "first" in check["message"]
    assert "gradient is not finite" in check["message"]


def test_masked_logits_are_not_taken_for_a_fault():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 6)
            self.out = Mask()

        def forward(self, x):
            logits = self.head(x)
            logits[:, 5] = -torch.inf  # in place, after the hook has seen them
            return self.out(logits)

    class Mask(nn.Module):
        def forward(self, logits):
            return logits.masked_fill(torch.arange(6) > 3, -torch.inf)

    labels = torch.arange(64) % 4
    parts = flows.parts(Padded(), [(flows.random(64, 8), labels)] * 2, flows.classes)
    assert not failed(judged(parts))


def logits_by_loop(q, k, mask, causal, scale):
    """Attention's logits, written out; [B, H, L, S] with minus infinity where hidden."""
    groups = q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:3], k.shape[2])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            out[b, h] = q[b, h] @ k[b, h // groups].T * scale
    if causal:
        out.masked_fill_(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        out += (
            mask
            if mask.is_floating_point()
            else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        )
    return out


@pytest.mark.parametrize("case", ["causal", "grouped", "bool mask", "float mask", "scale"])
def test_logits_of_sampled_rows_are_those_of_attention(case):
    q, k = flows.random(3, 4, 40, 8, seed=2), flows.random(3, 4, 40, 8, seed=3)
    mask, causal, scale = None, case == "causal", None
    if case == "grouped":
        k = k[:, :2]
    if "mask" in case:
        mask = torch.rand(3, 1, 40, 40, generator=torch.Generator().manual_seed(4)) > 0.3
        mask |= torch.eye(40, dtype=torch.bool)
        mask = mask if case == "bool mask" else torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    if case == "scale":
        scale = 0.5
    found = flow_attention.attention_logits(q, k, mask, causal=causal, scale=scale)
    whole = logits_by_loop(q, k, mask, causal, scale or 8**-0.5)
    rows = flow_attention.rows_of(40, "cpu")
    torch.testing.assert_close(found, whole[:2, :, rows], atol=1e-5, rtol=1e-5)
    largest, entropy = flow_attention.logit_statistics(found)
    seen = whole[:2, :, rows] > -1e8
    few = seen.sum(-1) < 4
    p = whole[:2, :, rows].double().softmax(-1)
    share = -(p * p.clamp(min=1e-300).log()).sum(-1) / seen.sum(-1).clamp(min=2).log()
    for head in range(4):
        kept = ~few[:, head]
        assert entropy[head].item() == pytest.approx(share[:, head][kept].mean().item(), rel=1e-4)
        visible = whole[:2, head][:, rows][kept][seen[:, head][kept]]
        assert largest[head].item() == pytest.approx(visible.abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_models_of_transformers_show_their_attention(attention):
    parts = flows.hugging_face("Llama", attention)
    assert not failed(judged(parts, steps=2, batches=2))
    with torch.no_grad():
        for layer in parts[0].model.layers:
            layer.self_attn.q_proj.weight.mul_(1e5)
    checks = judged(parts, steps=0, batches=1)
    assert {"attention-entropy", "attention-logits"} <= failed(checks)


def test_sinks_of_gpt_oss_are_keys_of_the_softmax():
    parts = flows.hugging_face("GptOss", "eager", num_local_experts=4, num_experts_per_tok=2)
    checks = judged(parts, steps=1, batches=1)
    assert not failed(checks) and checks["attention-entropy"]["value"] > 0.9


def test_statistics_are_those_of_the_tensors():
    """Norms by hooks equal what the model gives when asked by hand."""
    model, batches, loss_fn, _ = flows.images()
    look = flow_look.Look(target(model, batches, loss_fn))
    look.take(batches[0])
    rows = {row["name"]: row for row in look.flow().modules}
    model, batches, loss_fn, _ = flows.images()
    x, kept = batches[0][0], {}
    for number, layer in enumerate(model.layers):
        x = layer(x)
        kept[number] = x.detach().clone()  # the next layer writes into it
        if isinstance(layer, nn.Conv2d):
            x.retain_grad()
            kept[f"gradient {number}"] = x
    logits = model.head(x.mean((2, 3)))
    nn.functional.cross_entropy(logits, batches[0][1]).backward()
    for number, layer in enumerate(model.layers):
        row = rows[f"layers.{number}"]
        assert row["rms"] == pytest.approx(kept[number].square().mean().sqrt().item(), rel=1e-5)
        assert row["max"] == pytest.approx(kept[number].abs().max().item(), rel=1e-5)
        if isinstance(layer, nn.Conv2d):
            gradient = kept[f"gradient {number}"].grad.norm().item()
            assert row["gradient_norm"] == pytest.approx(gradient, rel=1e-4)


def test_update_ratios_are_scaled_from_warm_up_to_the_peak():
    model, batches, loss_fn, _ = flows.adapter()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50))
    before = schedule.state_dict()["last_epoch"], optimizer.param_groups[0]["lr"]
    one = target(model, batches, loss_fn, optimizer, scheduler=schedule)
    seen = gradient_flow.measure(one, batches=1, steps=3)
    assert seen.steps.scaled_by == pytest.approx(50 / 3)
    assert (schedule.state_dict()["last_epoch"], optimizer.param_groups[0]["lr"]) == before
    loss_fn(model, batches[0]).backward()
    size = model.down.weight.norm()
    first = (model.up.weight.grad * 0.1).norm()  # |W| is 0: no ratio
    assert len(seen.steps.ratios["up.weight"]) == 2 and first > 0
    assert seen.steps.ratios["down.weight"][0] == 0.0 and size > 0


def test_everything_is_put_back_bit_for_bit():
    model, batches, loss_fn, optimizer = flows.images()
    model.train()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    judged((model, batches, loss_fn, optimizer))
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state) and not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_compiled_models_are_looked_at_eagerly():
    model, *rest = flows.gpt()
    checks = judged((torch.compile(model), *rest), steps=1, batches=1)
    assert not failed(checks) and checks["attention-entropy"]["verdict"] == "pass"


def test_two_looks_give_one_report():
    one, other = judged(flows.gpt()), judged(flows.gpt())
    assert one == other


def test_hooks_cost_less_than_a_step():
    """Measured here on the smallest of models, where hooks weigh most."""
    ratios = [
        gradient_flow.measure(target(*flows.gpt()), batches=8, steps=4).overhead for _ in range(2)
    ]
    assert 0.8 < min(ratios) < 2.0


def test_the_script_writes_its_report_picture_and_events(tmp_path):
    words = ["--target", f"{TARGETS / 'flows.py'}:scaled_queries", "--project", tmp_path]
    done = processes.run(SCRIPT, *words, "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert {c["id"] for c in report["checks"] if c["verdict"] == "fail"} == {
        "attention-entropy",
        "attention-logits",
    }
    picture, events = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(events)
    found.Reload()
    tags = found.Tags()
    assert "gradients/blocks.0.mlp.0" in tags["histograms"]
    assert "activations/head" in tags["histograms"]
    assert {"activation_rms/head", "update_ratio/head.weight"} <= set(tags["scalars"])
    assert 0 < report["numbers"]["overhead"]
    names = {row["name"] for row in report["numbers"]["modules"]}
    assert {"blocks.0", "blocks.5.mlp.2", "head"} <= names


def test_bad_numbers_are_refused(tmp_path):
    for words in (["--batches", "0"], ["--steps", "-1"]):
        code = gradient_flow.cli.run(
            "gradient-flow",
            gradient_flow.work,
            doc=None,
            add_flags=gradient_flow.add_flags,
            check_flags=gradient_flow.check_flags,
            argv=[*words, "--project", str(tmp_path)],
        )
        assert code == 2


@pytest.mark.parametrize("model", ["tiny_moe", "tiny_dense", "tiny_spiking"])
@pytest.mark.skipif("not __import__('os').environ.get('CURRY_TRAIN_FULL')")
def test_the_models_of_a_new_project_pass(model, tmp_path):
    init = ROOT / "skills" / "start-project" / "scripts" / "init.py"
    processes.run_fresh(init, tmp_path / "demo", "--no-install", cwd=tmp_path)
    words = ["--project", tmp_path / "demo", "--set", f"model={model}"]
    done = processes.run(SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_equal_gradients_have_no_interval_to_tell():
    assert flow_numbers.trend([1.5] * 6) == (0.0, None)
