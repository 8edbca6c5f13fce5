"""One batch by heart: floors with known answers, the signatures of plateaus, clean models."""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from skills.targets import image_classifier, language_model, mixture, mlp_regression, processes
from skills.targets.processes import ROOT
from torch import nn
from torch.nn import functional as F

SCRIPT = ROOT / "skills" / "overfit-one-batch" / "scripts" / "overfit_one_batch.py"
sys.path.insert(0, str(SCRIPT.parent))
overfit = importlib.import_module("overfit_one_batch")
batch_floor = importlib.import_module("batch_floor")
curve_picture = importlib.import_module("curve_picture")
Target = importlib.import_module("kit.target").Target
loss_terms = importlib.import_module("kit.loss_terms")
observation = importlib.import_module("kit.observation")
fixed_batch = importlib.import_module("fixed_batch")
sys.dont_write_bytecode = False  # the script sets it for itself

FULL = bool(os.environ.get("CURRY_TRAIN_FULL"))


def made(model, batches, loss_fn, optimizer=None, **parts):
    return Target(
        model=model, batches=batches, loss_fn=loss_fn, optimizer=optimizer,
        device=torch.device("cpu"), config_hash="", kind="foreign", **parts,
    )  # fmt: skip


def points(classes=4, count=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 12, generator=generator), torch.arange(count) % classes


def network(outputs=4, hidden=32, bias=True):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, outputs, bias))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def classifier(loss_fn=cross_entropy, model=None, optimizer=None, batches=None, classes=4, **parts):
    model = model or network(classes)
    optimizer = optimizer and optimizer(model)
    return made(model, batches or [points(classes)], loss_fn, optimizer, **parts)


def examined(target, **settings):
    report, case = overfit.examine(target, **settings)
    return report, {check["id"]: check for check in report.checks}, case


def failed(checks):
    return {name for name, check in checks.items() if check["verdict"] == "fail"}


def softmax_first(model, batch):
    return F.cross_entropy(model(batch[0]).softmax(-1), batch[1])


@pytest.mark.parametrize(("classes", "floor"), [(2, 0.313), (4, 0.744), (10, 1.461), (100, 3.622)])
def test_the_floor_of_a_double_softmax_is_reached_and_named(classes, floor):
    target = classifier(softmax_first, network(classes, hidden=64), classes=classes)
    _, checks, case = examined(target, lr=1e-2)
    check = checks["double-softmax"]
    assert check["verdict"] == "fail" and check["threshold"] == pytest.approx(floor, abs=6e-4)
    assert case.best.last.loss == pytest.approx(check["threshold"], rel=0.01)
    assert check["fix"]["file"] == __file__ and "softmax" in check["message"]
    assert len(case.attempts) == 1  # no rate changes that floor


def test_the_plateau_alone_names_a_double_softmax():
    def by_hand(model, batch):
        chances = model(batch[0]).exp()
        chances = chances / chances.sum(-1, keepdim=True)
        wrong = chances.exp() / chances.exp().sum(-1, keepdim=True)
        return -wrong[torch.arange(len(wrong)), batch[1]].log().mean()

    _, checks, case = examined(classifier(by_hand), lr=1e-2)
    assert not case.terms and "double-softmax" in failed(checks)
    sigmoid = classifier(lambda m, b: F.cross_entropy(m(b[0]).sigmoid(), b[1]))
    _, checks, _ = examined(sigmoid, lr=1e-2)
    assert "cross_entropy gets a sigmoid" in checks["double-softmax"]["message"]

    def twice(model, batch):
        return F.binary_cross_entropy_with_logits(
            model(batch[0]).sigmoid(), F.one_hot(batch[1], 4).float()
        )

    _, checks, _ = examined(classifier(twice), lr=1e-2)
    ups = 0.25 * math.log1p(math.exp(-1)) + 0.75 * math.log(2)
    assert checks["double-softmax"]["threshold"] == pytest.approx(ups)
    assert "double-softmax" in failed(checks)


def floor_of(target):
    """Return floor and best accuracy as the skill computes them from the batch."""
    target.model.train()
    fixed = fixed_batch.choose(target, 64)
    seen = observation.observe(target, fixed.copy())
    (term,) = loss_terms.terms(seen)
    names, _, _ = batch_floor.visible(
        target, fixed, term, seen.calls, lambda batch: observation.observe(target, batch)
    )
    return batch_floor.floor_of(term, names)


class Causal(nn.Module):
    """A recurrent language model."""

    def __init__(self, words=20):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(words, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, words)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0])


def next_token(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def test_known_floors():
    x, y = points(10, 20)
    smooth = classifier(
        lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1), classes=10
    )
    assert floor_of(smooth).loss == pytest.approx(0.5003, abs=1e-4)

    ids = torch.randint(0, 20, (1, 65), generator=torch.Generator().manual_seed(0))
    ids = ids.repeat(2, 1)
    ids[1, 64] = (ids[0, 64] + 1) % 20  # one ambiguous place in each of two sequences of 64
    target = made(Causal(), [(ids[:, :-1], ids[:, 1:])], next_token)
    floor = floor_of(target)
    assert floor.loss == pytest.approx(math.log(2) / 64, abs=1e-6)
    assert floor.accuracy == pytest.approx(1 - 1 / 128)

    def around(model, batch):  # the same batch seen from both sides is not ambiguous but there
        scores = model(batch[0]) + model(batch[0].flip(1)).flip(1)
        return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    ids[1, 30:] = torch.randint(0, 20, (35,), generator=torch.Generator().manual_seed(5))
    one_way = floor_of(made(Causal(), [(ids[:, :-1], ids[:, 1:])], next_token))
    both_ways = floor_of(made(Causal(), [(ids[:, :-1], ids[:, 1:])], around))
    assert one_way.loss == pytest.approx(math.log(2) / 64) and both_ways.loss == 0

    x[1] = x[0]
    twice = [(x, y)]  # labels 0 and 1 for equal inputs
    assert floor_of(classifier(batches=twice, classes=10)).loss == pytest.approx(math.log(4) / 20)
    weight = torch.tensor([3.0] + [1.0] * 9)
    weighted = classifier(
        lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weight), batches=twice, classes=10
    )
    entropy = -(3 * math.log(0.75) + math.log(0.25)) / 24
    assert floor_of(weighted).loss == pytest.approx(entropy)
    soft = torch.full((20, 10), 0.1)
    even = classifier(batches=[(x, soft)], classes=10)
    assert floor_of(even).loss == pytest.approx(math.log(10))
    numbers = torch.arange(20.0)
    values = classifier(
        lambda m, b: F.mse_loss(m(b[0])[:, 0], b[1]), batches=[(x, numbers)], classes=1
    )
    assert floor_of(values).loss == pytest.approx(2 * 0.25 / 20)


def test_a_smoothed_ambiguous_and_masked_batch_passes_at_its_floor():
    x, y = points(4, 8)
    x[1] = x[0]

    def loss(model, batch):
        costs = F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1, reduction="none")
        kept = (torch.arange(len(costs)) < 6).float()
        return (costs * kept).sum() / kept.sum() + 3.0  # and a constant beside it

    report, checks, case = examined(classifier(loss, batches=[(x, y)]), lr=3e-3)
    assert report.verdict == "pass", report.checks
    assert case.best.last.floor == pytest.approx(case.best.last.loss, abs=0.02)
    assert (
        case.best_accuracy == pytest.approx(5 / 6)
        and "83.3% right of at most" in (checks["one-batch-floor"]["message"])
    )


FAULTS = {
    "no gradient": (lambda m, b: cross_entropy(m, b).detach().requires_grad_(), {"no-learning"}),
    "flat": (lambda m, b: cross_entropy(m, b) * 0 + m[2].bias.sum() * 0 + 2.0, {"no-learning"}),
    "sign": (lambda m, b: -cross_entropy(m, b), {"no-learning"}),
    "inputs zeroed": (
        lambda m, b: F.cross_entropy(m(b[0] * 0), b[1]),
        {"input-independent"},
    ),
    "first input for all": (
        lambda m, b: F.cross_entropy(m(b[0][:1].expand_as(b[0])), b[1]),
        {"input-independent"},
    ),
    "labels shuffled": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1][torch.randperm(len(b[1]))]),
        {"labels-reshuffled"},
    ),
    "inputs shuffled": (
        lambda m, b: F.cross_entropy(m(b[0][torch.randperm(len(b[0]))]), b[1]),
        {"labels-reshuffled"},
    ),
    "bounded": (lambda m, b: F.cross_entropy(m(b[0]).tanh(), b[1]), {"one-batch-floor"}),
    "broadcast": (
        lambda m, b: ((m(b[0])[:, :1] - b[0][:, 0]) ** 2).mean(),
        {"one-batch-floor"},
    ),
    "not finite": (lambda m, b: cross_entropy(m, b) / 0, {"one-batch-floor"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_its_signature(fault):
    loss_fn, names = FAULTS[fault]
    _, checks, _ = examined(classifier(loss_fn), lr=3e-3)
    assert names <= failed(checks) <= names | {"one-batch-floor"}, checks
    for name in names:
        assert checks[name]["fix"]["file"] == __file__


def test_noise_in_the_place_of_inputs_is_found_and_random_losses_are_not_accused():
    noise = classifier(lambda m, b: F.cross_entropy(m(torch.randn(b[0].shape)), b[1]))
    assert failed(examined(noise, lr=3e-3)[1]) == {"input-independent"}

    def mixed(model, batch):
        share, order = torch.rand(()), torch.randperm(len(batch[0]))
        scores = model(share * batch[0] + (1 - share) * batch[0][order])
        one, other = F.cross_entropy(scores, batch[1]), F.cross_entropy(scores, batch[1][order])
        return share * one + (1 - share) * other

    def dropped(model, batch):
        hidden = F.dropout(model[1](model[0](batch[0])), 0.5)
        return F.cross_entropy(model[2](hidden), batch[1])

    for loss in (mixed, dropped):
        report, checks, case = examined(classifier(loss), lr=3e-3)
        assert report.verdict == "pass", checks
        assert case.random == (loss is mixed) and case.quiet_calls == (loss is dropped)


def test_labels_that_change_between_two_reads_are_found():
    x, y = points(4, 32)

    class Drawn:
        def __init__(self, share):
            self.share = share

        def __iter__(self):
            other = torch.where(torch.rand(32) < self.share, torch.randint(0, 4, (32,)), y)
            return iter(zip(x.split(8), other.split(8), strict=True))

    checks = examined(classifier(batches=Drawn(1.0)), lr=3e-3)[1]
    assert failed(checks) == {"labels-reshuffled"}
    checks = examined(classifier(batches=Drawn(0.1)), lr=3e-3)[1]  # noise on some labels
    assert not failed(checks) and "32 examples read twice" in checks["labels-reshuffled"]["message"]


def adam(model, **settings):
    return torch.optim.Adam(model.parameters(), 1e-2, **settings)


def test_the_users_own_steps_are_judged_apart():
    stale = examined(classifier(optimizer=lambda m: adam(copy.deepcopy(m))), lr=3e-3)[1]
    assert failed(stale) == {"optimizer-parameters"}
    assert "the same to the last bit" in stale["optimizer-parameters"]["message"]

    def cleared(model, batch, optimizer):
        cross_entropy(model, batch).backward()
        optimizer.zero_grad()
        optimizer.step()

    checks = examined(classifier(optimizer=adam, train_step=cleared), lr=3e-3)[1]
    assert (
        failed(checks) == {"no-learning"}
        and "moves no parameter" in checks["no-learning"]["message"]
    )
    assert checks["no-learning"]["fix"]["line"] == cleared.__code__.co_firstlineno + 3

    def at_rate_0(model, batch, optimizer):
        optimizer.param_groups[0]["lr"] = 0.0
        cross_entropy(model, batch).backward()
        optimizer.step()

    def without_a_step(model, batch, optimizer):
        cross_entropy(model, batch).backward()

    for step, why in ((at_rate_0, "rate is 0"), (without_a_step, "no call of optimizer.step")):
        checks = examined(classifier(optimizer=adam, train_step=step), lr=3e-3)[1]
        assert failed(checks) == {"no-learning"} and why in checks["no-learning"]["message"]
    uphill = examined(classifier(optimizer=lambda m: adam(m, maximize=True)), lr=3e-3)[1]
    assert failed(uphill) == {"no-learning"} and "maximize" in uphill["no-learning"]["message"]

    def warm(model):
        optimizer = adam(model)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        return optimizer

    assert not failed(examined(classifier(optimizer=warm), lr=3e-3)[1])


@pytest.mark.parametrize(("mean", "spread"), [(10.0, 1.0), (0.0, 0.01)])
def test_a_regression_is_held_against_the_best_constant(mean, spread):
    """Labels far from 0, or tiny ones, make 1 % of the first loss or 0.02 easy to reach."""
    inputs, _ = points()
    labels = mean + spread * torch.randn(8, 1, generator=torch.Generator().manual_seed(3))
    for scale, wanted in ((1.0, set()), (0.0, {"one-batch-floor", "input-independent"})):

        def squared(model, batch, scale=scale):
            return F.mse_loss(model(scale * batch[0]), batch[1])

        checks = examined(classifier(squared, network(1), batches=[(inputs, labels)]))[1]
        assert failed(checks) == wanted, checks


def test_a_model_that_sees_its_own_token_only_is_a_fault_when_it_has_attention():
    model, batches, loss = mixture.build()
    report, checks, case = examined(made(model, batches, loss), lr=1e-2)
    assert report.verdict == "pass" and case.best.last.floor > 1, checks
    assert "its own token alone" in checks["one-batch-floor"]["message"]
    model.attention = type("Attention", (nn.Identity,), {})()
    _, checks, _ = examined(made(model, batches, loss), lr=1e-2, steps=60, seconds=2)
    assert "in spite of Attention" in checks["one-batch-floor"]["message"]
    assert checks["one-batch-floor"]["verdict"] in ("fail", "unclear")


@pytest.mark.parametrize("module", [image_classifier, language_model, mlp_regression])
def test_clean_targets_pass(module):
    torch.manual_seed(0)
    report, checks, _ = examined(made(*module.build()), lr=3e-3)
    assert report.verdict == "pass", checks


def test_half_precision_head_of_zeros_and_frozen_parts_pass():
    half = classifier(lambda m, b: F.cross_entropy(m(b[0].bfloat16()).float(), b[1]))
    half.model.bfloat16()
    zeros = classifier()
    nn.init.zeros_(zeros.model[2].weight)
    frozen = classifier(model=network(4, hidden=256))
    frozen.model[0].requires_grad_(False)
    for target in (half, zeros, frozen):
        report, checks, case = examined(target, lr=1e-2)
        assert report.verdict == "pass" and case.baseline is not None, checks


def test_terms_that_hold_the_loss_up_are_left_out():
    def pulled(model, batch):
        return cross_entropy(model, batch) + 0.5 * model(batch[0]).square().mean()

    report, checks, case = examined(classifier(pulled), lr=1e-2)
    assert report.verdict == "pass" and case.alone is not None, checks
    assert "the known terms alone" in checks["one-batch-floor"]["message"]


def test_losses_without_a_floor_and_time_that_is_up_are_said():
    def likelihood(model, batch):
        mean, spread = model(batch[0]).unbind(-1)
        return F.gaussian_nll_loss(mean, batch[1].float(), F.softplus(spread) + 1e-3)

    _, checks, _ = examined(classifier(likelihood, classes=2), steps=60)
    assert checks["one-batch-floor"]["verdict"] == "skipped" and not failed(checks)
    assert "its bound is not known" in checks["one-batch-floor"]["message"]

    def slow(model, batch):
        time.sleep(0.01)
        return cross_entropy(model, batch)

    report, checks, _ = examined(classifier(slow), seconds=0.3)
    assert checks["one-batch-floor"]["verdict"] == "unclear", checks
    assert "--seconds" in checks["one-batch-floor"]["message"] and report.verdict == "unclear"


def test_the_batch_is_cut_as_far_as_the_loss_allows():
    ids = torch.randint(0, 20, (16, 129), generator=torch.Generator().manual_seed(0))
    whole = {"ids": ids[:, :-1], "labels": ids[:, 1:], "name": "text"}

    def loss(model, batch):
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    target = made(Causal(), [whole], loss)
    fixed = fixed_batch.choose(target)
    assert fixed.batch["ids"].shape == (4, 64) and fixed.batch["name"] == "text"
    assert fixed.cut == "4 of 16 examples, 64 of 128 tokens"
    assert fixed.roles == {"ids": "input", "labels": "label"}

    def fussy(model, batch):
        assert batch["ids"].shape[1] == 128
        return loss(model, batch)

    assert fixed_batch.choose(made(Causal(), [whole], fussy)).cut == "4 of 16 examples"


def test_everything_is_put_back_and_the_same_seed_gives_the_same_checks(tmp_path):
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    target = classifier(model=model.eval(), optimizer=adam)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    checks = overfit.judge_target(target, lr=1e-2)
    assert checks == overfit.judge_target(target, lr=1e-2) and model[2].p == 0.5
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and not model.training
    assert not target.optimizer.state and all(p.grad is None for p in model.parameters())
    _, _, case = examined(target, lr=1e-2)
    (picture,) = curve_picture.draw(case, tmp_path / "curve.png")
    assert Path(picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def project(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("overfit") / name
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


SMALL = [
    "model=tiny_dense", "model.hidden_size=64", "model.intermediate_size=128",
    "model.num_hidden_layers=1", "data.seq_len=32", "data.global_batch_size=4",
]  # fmt: skip


def test_a_project_passes_and_its_double_softmax_is_named(tmp_path_factory):
    folder = project(tmp_path_factory, "project")
    words = ["--project", folder, "--tokens", 16, "--lr", 0.003, "--json", "--set", *SMALL]
    done = processes.run(SCRIPT, *words, cwd=folder)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["verdict"] == "pass", report["checks"]
    assert report["numbers"]["accuracy"] == pytest.approx(report["numbers"]["best_accuracy"])
    assert [path.rpartition("/")[2] for path in report["artifacts"]] == ["overfit_one_batch.png"]
    loss = folder / "curry_train" / "loss.py"
    plain = "return F.cross_entropy(wide, labels"
    assert loss.read_text().count(plain) == 1
    loss.write_text(loss.read_text().replace(plain, plain.replace("wide", "wide.softmax(-1)")))
    done = processes.run(SCRIPT, *words[:-1], *SMALL[-1:], "--steps", 30, cwd=folder)
    found = {check["id"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1 and found["double-softmax"]["verdict"] == "fail"
    assert found["double-softmax"]["fix"]["file"].endswith("curry_train/loss.py")


@pytest.mark.skipif(not FULL, reason="set CURRY_TRAIN_FULL=1: a minute of training")
@pytest.mark.parametrize("model", ["tiny_moe", "tiny_dense", "tiny_spiking"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_every_model_of_the_template_passes(model, precision, tmp_path_factory):
    folder = project(tmp_path_factory, model)
    words = ["--project", folder, "--json", "--set", f"model={model}", f"precision={precision}"]
    done = processes.run(SCRIPT, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "3"], "--steps 3; it takes 20 or more"),
        (["--lr", "0"], "--lr 0.0; it takes a number above 0"),
        (["--examples", "0"], "--examples 0; it takes 1 or more"),
    ],
)
def test_bad_flags_exit_with_2(words, message, tmp_path):
    done = processes.run(SCRIPT, "--target", processes.MLP, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "runs").exists()


def test_the_thresholds_stand_in_the_skill():
    body = (SCRIPT.parents[1] / "SKILL.md").read_text(encoding="utf-8")
    for key, value in overfit.THRESHOLDS.items():
        lines = [line for line in body.splitlines() if f"`{key}`" in line]
        assert any(str(value) in re.findall(r"\d+(?:\.\d+)?", line) for line in lines), key
