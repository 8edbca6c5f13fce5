"""Preflight checks on forms of training that are easily taken for faults, and faults in them."""

from __future__ import annotations

import importlib
import subprocess

import pytest
import torch
import torch.nn.functional as F
from skills.test_preflight_checks import (
    CLASSES,
    WIDTH,
    Net,
    Words,
    evaluation,
    finding,
    lines,
    of_lines,
    of_rows,
    preflight_checks,
    rows,
    step,
    target,
)
from torch import nn

from kit.joined_optimizer import JoinedOptimizer

check = importlib.import_module("check")
data_checks = importlib.import_module("data_checks")


class Zero(nn.Module):
    """A regressor whose last layer begins at 0, as that of many diffusion models."""

    def __init__(self, mixed=lambda h: h):
        super().__init__()
        self.first, self.last, self.mixed = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), mixed
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x):
        return self.last(self.mixed(torch.tanh(self.first(x))))


def denoised(model, batch):
    noise = torch.randn_like(batch[0])
    return F.mse_loss(model(batch[0] + noise), noise)


def zero_words(mixed):
    def made():
        model = Words(mixed)
        nn.init.zeros_(model.out.weight)
        return model

    return made


@pytest.mark.parametrize(
    ("mixed", "verdict"), [(lambda h: h, "pass"), (lambda h: h - h.mean(0), "fail")]
)
def test_a_leak_behind_a_layer_that_begins_at_0_is_found(mixed, verdict):
    made = target(lambda: Zero(mixed), loss_fn=denoised)
    assert finding(made, "example-leakage")["verdict"] == verdict


@pytest.mark.parametrize(
    ("mixed", "verdict"), [(None, "pass"), (lambda x: x + x.mean(1, keepdim=True), "fail")]
)
def test_the_future_behind_a_layer_that_begins_at_0_is_found(mixed, verdict):
    made = target(zero_words(mixed), lines, of_lines)
    assert finding(made, "future-leakage")["verdict"] == verdict


def test_mixup_is_no_leak_and_statistics_of_the_batch_are():
    def mixed_up(model, batch):
        x, y = batch
        if model.training:
            x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        return F.cross_entropy(model(x), y)

    assert finding(target(loss_fn=mixed_up), "example-leakage")["verdict"] == "pass"

    def centred():
        net = Net()
        net.between = lambda h: h - h.mean(0) if net.training else h
        return net

    assert finding(target(centred), "example-leakage")["verdict"] == "fail"


def test_as_many_features_as_examples_are_no_graph():
    made = target(batches=lambda: rows(size=WIDTH))
    assert finding(made, "example-leakage")["verdict"] == "pass"
    mixing = target(lambda: Net(head=lambda x: x - x.mean(0)), batches=lambda: rows(size=WIDTH))
    assert finding(mixing, "example-leakage")["verdict"] == "fail"


class Pair(nn.Module):
    """Generator and discriminator; the loss runs the parts, not the model."""

    def __init__(self):
        super().__init__()
        self.make, self.judge = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)


def adversarial(model, batch):
    fake = model.make(torch.randn(len(batch[0]), 3))
    one, zero = torch.ones(len(fake), 1), torch.zeros(len(fake), 1)
    of = F.binary_cross_entropy_with_logits
    generator = of(model.judge(fake), one)
    return generator + (of(model.judge(batch[0]), one) + of(model.judge(fake.detach()), zero)) / 2


def two_optimizers(parameters):
    parameters = list(parameters)
    return JoinedOptimizer([torch.optim.Adam(parameters[:2]), torch.optim.Adam(parameters[2:])])


def in_turns(model, batch, optimizer, clear=True):
    for member in optimizer.members:
        if clear:
            member.zero_grad()
        adversarial(model, batch).backward()
        member.step()


def test_two_optimizers_in_turns_are_sound_and_their_missing_zero_grad_is_found():
    made = target(Pair, loss_fn=adversarial, optimizer=two_optimizers, train_step=in_turns)
    found = {f["id"]: f for f in preflight_checks.preflight(made)}
    assert {f["verdict"] for f in found.values()} <= {"pass", "skipped"}
    for name in ("dead-outputs", "parameters-still", "missing-zero-grad", "loss-scale"):
        assert found[name]["verdict"] == "pass", name
    made.train_step = lambda *given: in_turns(*given, clear=False)
    assert finding(made, "missing-zero-grad")["verdict"] == "fail"


def test_what_only_a_second_optimizer_trains_is_not_called_used_in_some_batches():
    def of_judge(model, batch):
        fake = model.make(torch.randn(len(batch[0]), 3)).detach()
        return model.judge(fake).mean() - model.judge(batch[0]).mean()

    made = target(Pair, loss_fn=of_judge, optimizer=lambda p: torch.optim.Adam(list(p)[2:]))
    assert finding(made, "unused-parameters")["verdict"] == "pass"


def slope(model, batch):
    x = batch[0].clone().requires_grad_()
    (by_x,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (by_x + 1).square().mean()


def test_inputs_that_the_loss_differentiates_at_are_no_lost_parameters():
    made = target(lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)),
                  loss_fn=slope, optimizer=torch.optim.LBFGS)  # fmt: skip
    for name in ("optimizer-parameters", "not-repeatable", "checkpoint-round-trip"):
        assert finding(made, name)["verdict"] == "pass", name


def test_two_passes_over_a_whole_batch_are_no_micro_batches():
    def sharpness_aware(model, batch, optimizer):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05)
        optimizer.zero_grad()
        of_rows(model, batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.05)
            of_rows(model, batch)
        optimizer.step()

    made = target(optimizer=lambda p: torch.optim.SGD(p, 0.1), train_step=sharpness_aware)
    assert finding(made, "accumulation-mean-of-means")["verdict"] == "skipped"


def accumulating(share=1.0, clear_each=False):
    calls = [0]

    def in_fours(model, batch, optimizer):
        model.train()
        if clear_each:
            optimizer.zero_grad()
        (of_rows(model, batch) * share).backward()
        calls[0] += 1
        if calls[0] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return in_fours


@pytest.mark.parametrize(
    ("made", "check", "verdict"),
    [
        (accumulating(0.25), "loss-scale", "pass"),
        (accumulating(1.0), "loss-scale", "fail"),
        (accumulating(0.25), "accumulation-mean-of-means", "skipped"),
        (accumulating(0.25, clear_each=True), "accumulation-mean-of-means", "fail"),
    ],
)
def test_micro_batches_of_several_calls_are_averaged_and_none_is_lost(made, check, verdict):
    assert finding(target(train_step=made), check)["verdict"] == verdict


def test_a_scheduler_before_the_optimizer_is_found_after_other_checks_too():
    def early(model, batch, optimizer):
        optimizer.zero_grad()
        of_rows(model, batch).backward()
        schedule.step()
        optimizer.step()

    made = target(train_step=early, total_steps=10)
    schedule = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda s: 1 / (1 + s))
    made.scheduler = schedule
    step(made.model, made.batches[0], made.optimizer)
    assert "before" in finding(made, "schedule-values")["message"]


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        (lambda x: x.log_softmax(-1), "pass"),
        (lambda x: x, "fail"),
        (lambda x: x.softmax(-1), "fail"),
    ],
)
def test_ctc_and_kl_get_log_probabilities(last, verdict):
    def ctc(model, batch):
        scores = model(batch[0]).unsqueeze(1).expand(-1, 2, -1)
        return F.ctc_loss(scores, torch.ones(2, 2).long(), torch.tensor([6, 6]),
                          torch.tensor([2, 2]))  # fmt: skip

    def kl(model, batch):
        wanted = F.one_hot(batch[1], CLASSES).float()
        return F.kl_div(model(batch[0]), wanted, reduction="batchmean")

    for loss_fn in (ctc, kl):
        made = target(lambda: Net(head=last), loss_fn=loss_fn)
        assert finding(made, "missing-log-softmax")["verdict"] == verdict


def test_no_line_of_a_library_is_named():
    def cut(model, batch):
        return F.cross_entropy(model(batch[0] * 0), batch[1])

    made = target(lambda: nn.Sequential(nn.Linear(WIDTH, CLASSES)), loss_fn=cut)
    found = finding(made, "dead-outputs")
    assert (found["verdict"], found["fix"]) == ("fail", None)
    assert finding(target(evaluate=evaluation), "evaluation-gradients")["verdict"] == "pass"


def test_code_that_ends_the_process_is_no_pass():
    def leaving(model, batch):
        raise SystemExit(0)

    found = {f["id"]: f for f in preflight_checks.preflight(target(loss_fn=leaving))}
    assert found["batch-mismatch"]["verdict"] == "fail"
    assert "exit(0)" in found["batch-mismatch"]["message"]


@pytest.mark.parametrize(
    ("values", "share"),
    [([3.0, 2.0, 1.0, 1.0], 0.25), ([1.0, 1.0], 0.0), ([1.0, 3.0, 2.0, 1.5], 0.0)],
)
def test_the_steps_after_the_end_of_a_fall_are_counted(values, share):
    assert data_checks._still_at_end(values) == share


def test_a_stage_that_was_killed_is_told_by_its_signal():
    done = subprocess.CompletedProcess([], -9, stdout="", stderr="expected: about 3 s\n")
    assert check._first_error(done).startswith("ended by SIGKILL")
