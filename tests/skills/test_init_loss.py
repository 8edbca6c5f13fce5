"""The first loss: known answers by head, label frequencies and seed, faults, and clean models."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys

import pytest
import torch
from skills.targets import processes
from skills.targets.processes import CLASSIFIER, ROOT
from torch import nn
from torch.nn import functional as F

SCRIPT = ROOT / "skills" / "init-loss" / "scripts" / "init_loss.py"
sys.path.insert(0, str(SCRIPT.parent))
init_loss = importlib.import_module("init_loss")
Target = importlib.import_module("kit.target").Target
sys.dont_write_bytecode = False  # the script sets it for itself

EVEN = torch.ones(10) / 10
ZIPF = (1 / torch.arange(1, 11.0)) / (1 / torch.arange(1, 11.0)).sum()
RARE = torch.tensor([0.99, 0.01])
WIDTH = 64


def rows(chances, count=1000):
    """One batch whose labels come exactly as often as `chances` say."""
    generator = torch.Generator().manual_seed(0)
    inputs = 1.04 * torch.randn(count, WIDTH, generator=generator)
    ends = (chances.cumsum(0) * count).round()
    labels = torch.searchsorted(ends, torch.arange(count) + 0.5)
    return [(inputs, labels[torch.randperm(count, generator=generator)])]


def target(batches, loss_fn, head=lambda layer: None, outputs=10, optimizer=None):
    """An MLP whose last layer `head` changes; seeds give other weights."""

    def build(seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))
        with torch.no_grad():
            head(model[2])
        return Target(
            model=model, batches=batches, loss_fn=loss_fn, optimizer=None,
            device=torch.device("cpu"), config_hash="", kind="foreign", build=build,
        )  # fmt: skip

    return build()


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def double_softmax(model, batch):
    return F.cross_entropy(model(batch[0]).softmax(-1), batch[1])


def bias_of(chances):
    return lambda layer: layer.bias.copy_(chances.log())


def times(factor):
    return lambda layer: layer.weight.mul_(factor)


def examined(built, **settings):
    report = init_loss.examine(built, **settings)
    return report, {check["id"]: check for check in report.checks}


def verdicts(checks):
    return {name: check["verdict"] for name, check in checks.items()}


KNOWN = {  # chances, head, loss_fn, first loss, entropy of the labels, verdict
    "default": (EVEN, None, cross_entropy, 2.328, 2.303, "pass"),
    "zipf": (ZIPF, None, cross_entropy, 2.314, 1.994, "pass"),
    "zipf, prior bias": (ZIPF, bias_of(ZIPF), cross_entropy, 2.003, 1.994, "pass"),
    "99 to 1": (RARE, None, cross_entropy, 0.716, 0.0560, "pass"),
    "99 to 1, prior bias": (RARE, bias_of(RARE), cross_entropy, 0.0594, 0.0560, "pass"),
    "head times 10": (EVEN, times(10), cross_entropy, 4.19, 2.303, "fail"),
    "double softmax": (EVEN, None, double_softmax, 2.3029, 2.303, "pass"),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_answers(case):
    chances, head, loss_fn, loss, entropy, verdict = KNOWN[case]
    built = target(rows(chances), loss_fn, head or (lambda layer: None), len(chances))
    report, checks = examined(built, seeds=12)
    (main,) = report.numbers["terms"]
    assert report.numbers["seeds"] == 12
    assert main["loss"] == pytest.approx(loss, abs=0.002 if "double" in case else 0.05)
    assert main["prior"] == pytest.approx(entropy, abs=0.01)
    assert checks["initial-loss"]["verdict"] == verdict == report.verdict, report.checks
    if "prior bias" in case:
        assert main["expectation"] == "label entropy" and not report.next
    if case in ("zipf", "99 to 1"):
        (advice,) = report.next
        bias = float(re.findall(r"log prior, \[([-.0-9]+),", advice)[0])
        assert bias == pytest.approx(float(chances[0].log()), abs=0.05)
        assert advice.startswith(f"start the bias of 2 ({__file__}:")


def test_every_target_of_weights_and_labels_has_its_own_expectation():
    """Weights, smoothing, masks and pos_weight change the loss of guessing, or do not."""
    weights = 1 / ZIPF

    def of(loss, chances=ZIPF, outputs=10):
        built = target(rows(chances, 1024), lambda m, b: loss(m(b[0]), b[1]), outputs=outputs)
        report, checks = examined(built, seeds=1)
        assert checks["initial-loss"]["verdict"] == "pass", report.checks
        return report.numbers["terms"][0]["expected"], report

    def masked(scores, labels):
        kept = (torch.arange(len(labels)) % 3 > 0).float()
        return (F.cross_entropy(scores, labels, reduction="none") * kept).sum() / kept.sum()

    def ignored(scores, labels):
        return F.cross_entropy(scores, torch.where(labels > 2, labels, -100))

    def padded(scores, labels):
        wide = torch.cat([scores, torch.full((len(scores), 6), -torch.inf)], 1)
        return F.cross_entropy(wide, labels)

    def binary(scores, labels):
        weight = torch.tensor(9.0)
        return F.binary_cross_entropy_with_logits(scores[:, 0], labels.float(), pos_weight=weight)

    def several(scores, labels):
        return F.binary_cross_entropy(scores.sigmoid(), F.one_hot(labels, 10).float())

    def soft(scores, labels):
        return F.cross_entropy(scores, F.one_hot(labels, 10) * 0.8 + 0.02)

    log10, log2 = torch.tensor([10.0, 2.0]).log().tolist()
    for loss in (masked, ignored, padded, soft):
        assert of(loss)[0] == pytest.approx(log10), loss
    assert of(lambda s, y: F.cross_entropy(s, y, weight=weights))[0] == pytest.approx(log10)
    assert of(lambda s, y: F.cross_entropy(s, y, label_smoothing=0.1))[0] == pytest.approx(log10)
    expected, report = of(binary, torch.tensor([0.9, 0.1]), 1)
    assert expected == pytest.approx(log2) and not report.next  # the weight makes it even
    expected, report = of(several, EVEN)
    assert expected == pytest.approx(log2) and "log(p / (1 - p)), [-2." in report.next[0]


FAULTS = {
    "sum": (lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), None, "initial-loss"),
    "divided twice": (lambda m, b: cross_entropy(m, b) / len(b[0]), None, "initial-loss"),
    "sign": (lambda m, b: -cross_entropy(m, b), None, "initial-loss"),
    "raw likelihood": (lambda m, b: F.nll_loss(m(b[0]), b[1]), None, "initial-loss"),
    "not finite": (lambda m, b: cross_entropy(m, b) * torch.nan, None, "initial-loss"),
    "masked, divided by all": (
        lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none") * (b[1] > 2)).mean(),
        None,
        "initial-loss",
    ),
    "leak": (
        lambda m, b: F.cross_entropy(m(b[0]) + 2 * F.one_hot(b[1], 10), b[1]),
        None,
        "initial-loss",
    ),
    "wrong bias": (cross_entropy, lambda head: head.bias.copy_(-2 * ZIPF.log()), "head-prior-bias"),
    "wide head": (cross_entropy, lambda head: head.weight.normal_(std=10.0), "logit-scale"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    loss_fn, head, name = FAULTS[fault]
    built = target(rows(ZIPF, 512), loss_fn, head or (lambda layer: None))
    _, checks = examined(built, seeds=2)
    assert checks[name]["verdict"] == "fail" and checks["initial-loss"]["verdict"] == "fail"
    others = {"logit-scale", "head-prior-bias"} - {name}
    assert all(checks[other]["verdict"] != "fail" for other in others if other in checks), checks
    if fault not in ("not finite",):
        fix = checks[name]["fix"]
        assert fix["file"] == __file__ and fix["line"] > 1 and fix["text"]


def test_a_trained_model_is_a_leak_unless_it_is_said():
    built = target(rows(EVEN, 512), FAULTS["leak"][0])
    assert verdicts(examined(built, seeds=1)[1])["initial-loss"] == "fail"
    report, checks = examined(built, trained=True)
    assert report.verdict == "pass" and "--trained" in checks["initial-loss"]["message"]
    assert (
        "or a checkpoint was loaded (then say --trained)"
        in examined(built, seeds=1)[1]["initial-loss"]["message"]
    )

    class Known(nn.Linear):
        config = type("Config", (), {"_name_or_path": "someone/model"})()
        from_pretrained = None

    built.model[0].__class__ = Known
    report, checks = examined(built)
    assert checks["initial-loss"]["verdict"] == "pass" and report.numbers["seeds"] == 1
    assert "from_pretrained('someone/model') in 0" in checks["initial-loss"]["message"]


def regression(labels_of, loss=F.mse_loss, head=None):
    batches = [(x, labels_of(x)) for x, _ in rows(EVEN, 512)]
    built = target(batches, lambda m, b: loss(m(b[0])[:, 0], b[1]), head or (lambda _: None), 1)
    return examined(built, seeds=2)


def test_a_regression_is_compared_with_the_best_constant():
    report, checks = regression(lambda x: x.sum(1))
    labels = torch.cat([x.sum(1) for x, _ in rows(EVEN, 512)])
    (main,) = report.numbers["terms"]
    assert main["expected"] == pytest.approx(float(labels.var(correction=0)), rel=1e-4)
    assert report.verdict == "pass" and verdicts(checks)["logit-scale"] == "pass"
    by_hand, _ = regression(lambda x: x.sum(1), lambda p, y: ((p - y) ** 2).mean())
    assert by_hand.numbers["terms"][0]["loss"] == pytest.approx(main["loss"])
    report, _ = regression(lambda x: x.sum(1), F.l1_loss)
    median = (labels - labels.median()).abs().mean()
    assert report.numbers["terms"][0]["expected"] == pytest.approx(float(median), rel=1e-3)
    for loss in (F.huber_loss, F.smooth_l1_loss):
        assert regression(lambda x: x.sum(1), loss)[0].verdict == "pass"
    report, checks = regression(lambda x: 20 + x.sum(1))
    assert report.verdict == "pass" and "at the mean label, [19." in report.next[0]
    _, checks = regression(lambda x: 1000 + x.sum(1))
    assert verdicts(checks)["head-prior-bias"] == "fail"
    _, checks = regression(lambda x: x.sum(1), head=times(1000))
    assert verdicts(checks) | {"logit-scale": "fail"} == verdicts(checks)


def test_losses_without_a_known_start_are_skipped_with_the_reason():
    pairs = [(x, x.roll(1, 0)) for x, _ in rows(EVEN, 128)]
    built = target(pairs, lambda m, b: F.triplet_margin_loss(m(b[0]), m(b[1]), m(b[0] + 1)))
    report, checks = examined(built)
    assert report.verdict == "unclear" and checks["initial-loss"]["verdict"] == "skipped"
    assert "it is made by triplet_margin_loss" in checks["initial-loss"]["message"]

    def in_batch(model, batch):
        one, other = (F.normalize(model(part), dim=-1) for part in batch)
        return F.cross_entropy(14 * one @ other.T, torch.arange(len(one)))

    close = [(x, x + 0.1) for x, _ in pairs]
    for views in (close, pairs):  # far below and far above ln C, both by design
        report, checks = examined(target(views, in_batch))
        assert report.verdict == "pass", report.checks


def test_the_target_is_put_back_and_the_list_is_that_of_the_report():
    built = target(rows(EVEN, 512), cross_entropy)
    before = {name: t.clone() for name, t in built.model.state_dict().items()}
    state, mode = torch.get_rng_state(), built.model.eval().training
    checks = init_loss.judge_target(built)
    assert checks == init_loss.judge_target(built)  # the same report of the same seed
    assert {"id", "verdict", "value", "threshold", "unit", "message", "fix"} == set(checks[0])
    assert all(torch.equal(before[n], t) for n, t in built.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and built.model.training == mode


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init_loss") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def test_a_project_with_experts_takes_its_auxiliary_terms_out(project):
    words = ["data.seq_len=32", "data.global_batch_size=4", "model.router_z_loss_coef=0.001"]
    done = processes.run(
        SCRIPT, "--project", project, "--seeds", 1, "--json", "--set", *words, cwd=project
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    found = report["numbers"]["auxiliary"]
    assert found["aux_balanced"] == pytest.approx(0.04)
    assert found["z_balanced"] == pytest.approx(4 * 0.001 * torch.tensor(4.0).log() ** 2)
    assert 0.9 < found["aux"] / found["aux_balanced"] < 1.4
    (main,) = report["numbers"]["terms"]
    assert main["classes"] == 257  # the padded ones count nowhere
    assert report["numbers"]["other_terms"] == pytest.approx(found["aux"] + found["z"], rel=0.2)


def test_the_command_line(tmp_path):
    done = processes.run(SCRIPT, "--target", CLASSIFIER, cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) <= 15, done.stderr
    assert "not seen here: double softmax, wrong labels, missing zero_grad" in done.stdout
    assert done.stderr.startswith("expected: ")
    done = processes.run(SCRIPT, "--target", CLASSIFIER, "--seeds", "0", cwd=tmp_path)
    assert done.returncode == 2 and "--seeds 0; it takes at least 1" in done.stderr


def test_the_thresholds_stand_in_the_skill():
    body = (SCRIPT.parents[1] / "SKILL.md").read_text(encoding="utf-8")
    for key, value in init_loss.THRESHOLDS.items():
        lines = [line for line in body.splitlines() if f"`{key}`" in line]
        assert any(str(value) in re.findall(r"-?\d+(?:\.\d+)?", line) for line in lines), key
