"""Every preflight check by itself, in this process: passes on sound parts, names planted faults."""

from __future__ import annotations

import importlib
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from skills.targets.processes import ROOT
from torch import nn

SCRIPTS = ROOT / "skills" / "preflight-checks" / "scripts"
sys.path.insert(0, str(SCRIPTS))
preflight_checks = importlib.import_module("preflight_checks")
sys.dont_write_bytecode = False  # the script sets it for itself
from kit.target import Target  # noqa: E402

CLASSES, WIDTH, WORDS, LENGTH = 4, 8, 12, 10


class Net(nn.Module):
    """A classifier of rows whose parts a test exchanges."""

    def __init__(self, between=None, head=None):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.dropout = nn.Dropout(0.2)
        self.between, self.head = between or (lambda x: x), head or (lambda x: x)

    def forward(self, x):
        return self.head(self.second(self.dropout(self.between(torch.relu(self.first(x))))))


class Words(nn.Module):
    """A causal language model: a running mean of embeddings."""

    def __init__(self, mixed=None):
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.mixed = mixed or (lambda x: x.cumsum(1))

    def forward(self, ids):
        return self.out(torch.tanh(self.mixed(self.words(ids))))


def rows(count=4, size=6):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count * size, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (count * size,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


def lines(shift=1):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, WORDS, (16, LENGTH + 3), generator=generator)
    labels = ids[:, shift : shift + LENGTH]
    return [
        {"input_ids": a, "labels": b}
        for a, b in zip(ids[:, :LENGTH].split(4), labels.split(4), strict=True)
    ]


def of_rows(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def of_lines(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def step(model, batch, optimizer, *, zero=True, loss_fn=of_rows, train=True):
    if train:
        model.train()
    if zero:
        optimizer.zero_grad()
    loss_fn(model, batch).backward()
    optimizer.step()


@torch.no_grad()
def evaluation(model, batches):
    model.eval()
    losses = [float(of_rows(model, batch)) for batch in batches]
    model.train()
    return sum(losses)


def target(model=Net, batches=rows, loss_fn=of_rows, optimizer=torch.optim.AdamW, **more):
    """Make a target that can be built again with other weights."""

    def build(seed):
        torch.manual_seed(seed)
        net = model()
        made = None if optimizer is None else optimizer(net.parameters())
        found = Target(net, batches(), loss_fn, made, torch.device("cpu"), "0", "foreign")
        found.build = build
        for name, value in more.items():
            setattr(found, name, value(found) if name == "scheduler" else value)
        return found

    return build(0)


def finding(made, name):
    """Run one check; the target must be as before."""
    before = {key: value.clone() for key, value in made.model.state_dict().items()}
    (found,) = preflight_checks.preflight(made, only=[name])
    after = made.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert set(found) == {"id", "verdict", "value", "threshold", "message", "fix"}
    return found


def linear_warmup(made, *, warmup=2, total=20, floor=0.0):
    def rate(at):
        return min((at + 1) / warmup, max(floor, (total - at) / total))

    return torch.optim.lr_scheduler.LambdaLR(made.optimizer, rate)


def cosine(made, length):
    return torch.optim.lr_scheduler.CosineAnnealingLR(made.optimizer, length)


def stale(parameters):
    return torch.optim.AdamW(Net().parameters())


def half(parameters):
    return torch.optim.AdamW(list(parameters)[:2])


class Listed(Net):
    """Layers that nothing registers."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(16, 16)]
        self.between = lambda x: self.hidden[0](x)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(3, 3)


class Adapter(Net):
    """An adapter that begins at zero, as LoRA does: its first factor has no gradient yet."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(16, 2), nn.Linear(2, 16)
        nn.init.zeros_(self.up.weight)
        self.between = lambda x: x + self.up(self.down(x))


class Unsaved(Net):
    def __init__(self):
        super().__init__()
        mix = torch.randn(16, 16)
        self.between = lambda x: x @ mix


class Leaving(Net):
    """Dropout that eval() does not reach."""

    def __init__(self):
        super().__init__()
        self.between = lambda x: F.dropout(x, 0.3)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.between = self.norm


class Guessing(Net):
    """Draws from a generator that no seed reaches."""

    def __init__(self):
        super().__init__()
        self.draws = torch.Generator()
        self.draws.seed()
        self.between = lambda x: x + torch.rand(1, generator=self.draws)


def bad_label(number):
    def made():
        batches = rows()
        batches[2][1][0] = number
        return batches

    return made


def nan_rows():
    batches = rows()
    batches[1][0][0, 0] = math.nan
    return batches


def label_column():
    batches = rows()
    for x, y in batches:
        x[:, 2] = y
    return batches


class Clock:
    """Another order at every pass, whatever the seed."""

    passes = 0

    def __iter__(self):
        Clock.passes += 1
        return iter(rows()[Clock.passes % 3 :])


def encoded(inputs, labels):
    """Replaces a column by the mean label of its sign: target encoding on the same rows."""
    x = inputs.clone()
    for sign in (True, False):
        chosen = (inputs[:, 0] > 0) == sign
        x[chosen, 0] = labels[chosen].float().mean()
    return list(zip(x.split(6), labels.split(6), strict=True))


def plain(inputs, labels):
    return list(zip(inputs.split(6), labels.split(6), strict=True))


def raw():
    return torch.cat([x for x, _ in rows()]), torch.cat([y for _, y in rows()])


def squeezed(model, batch):
    return ((model(batch[0])[:, :1] - batch[1].float()) ** 2).mean()


def no_zero(model, batch, optimizer):
    step(model, batch, optimizer, zero=False)


def keeps_eval(model, batches):
    with torch.no_grad():
        model.eval()
        return [float(of_rows(model, batch)) for batch in batches]


def with_graph(model, batches):
    model.eval()
    found = [of_rows(model, batch) for batch in batches]
    model.train()
    return found


def swapped(parameters):
    every = list(parameters)
    thin, wide = [p for p in every if p.dim() < 2], [p for p in every if p.dim() > 1]
    groups = [{"params": thin, "weight_decay": 0.1}, {"params": wide, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups)


def halves(model, batch, optimizer, share=None):
    """Two micro-batches of uneven size, averaged as if they were even unless `share` is given."""
    optimizer.zero_grad()
    for part in (slice(0, 1), slice(1, None)):
        piece = (batch[0][part], batch[1][part])
        weight = 0.5 if share is None else len(piece[1]) / len(batch[1])
        (of_rows(model, piece) * weight).backward()
    optimizer.step()


def softmaxed(model, batch):
    return F.cross_entropy(model(batch[0]).softmax(-1), batch[1])


CASES = [
    ("batch-mismatch", {}, "pass"),
    ("batch-mismatch", {"loss_fn": squeezed}, "fail"),
    ("batch-mismatch", {"batches": lambda: [(x[:, :3], y) for x, y in rows()]}, "fail"),
    ("labels-out-of-range", {}, "pass"),
    ("labels-out-of-range", {"batches": bad_label(CLASSES)}, "fail"),
    ("labels-out-of-range", {"loss_fn": lambda m, b: m(b[0]).square().mean()}, "skipped"),
    ("tokens-out-of-range", {"model": Words, "batches": lines, "loss_fn": of_lines}, "pass"),
    (
        "tokens-out-of-range",
        {
            "model": Words,
            "batches": lambda: [{**b, "input_ids": b["input_ids"] + 3} for b in lines()],
            "loss_fn": of_lines,
        },
        "fail",
    ),
    ("tokens-out-of-range", {}, "skipped"),
    ("non-finite", {}, "pass"),
    ("non-finite", {"batches": nan_rows}, "fail"),
    ("non-finite", {"model": lambda: Net(head=lambda x: (x - x).sqrt())}, "fail"),
    ("double-softmax", {}, "pass"),
    ("double-softmax", {"loss_fn": softmaxed}, "fail"),
    ("double-softmax", {"model": lambda: Net(head=lambda x: x.log_softmax(-1))}, "pass"),
    ("missing-log-softmax", {"loss_fn": lambda m, b: F.nll_loss(m(b[0]), b[1])}, "fail"),
    ("missing-log-softmax", {}, "skipped"),
    ("dead-outputs", {}, "pass"),
    ("dead-outputs", {"model": lambda: Net(between=lambda x: x * 0)}, "fail"),
    ("no-gradient", {}, "pass"),
    ("no-gradient", {"model": Adapter}, "pass"),
    ("no-gradient", {"model": lambda: Net(between=lambda x: x.detach())}, "fail"),
    ("unused-parameters", {}, "pass"),
    ("unused-parameters", {"model": Unused}, "fail"),
    ("optimizer-parameters", {}, "pass"),
    ("optimizer-parameters", {"optimizer": stale}, "fail"),
    ("optimizer-parameters", {"optimizer": half}, "fail"),
    ("optimizer-parameters", {"model": Listed}, "fail"),
    ("optimizer-parameters", {"optimizer": None}, "skipped"),
    ("parameters-still", {}, "pass"),
    ("parameters-still", {"optimizer": lambda p: torch.optim.SGD(p, 0.0)}, "fail"),
    ("example-leakage", {}, "pass"),
    ("example-leakage", {"model": Normed}, "pass"),
    ("example-leakage", {"model": lambda: Net(between=lambda x: x - x.mean(0))}, "fail"),
    ("future-leakage", {"model": Words, "batches": lines, "loss_fn": of_lines}, "pass"),
    (
        "future-leakage",
        {
            "model": lambda: Words(lambda x: x + x.mean(1, keepdim=True)),
            "batches": lines,
            "loss_fn": of_lines,
        },
        "fail",
    ),
    ("future-leakage", {}, "skipped"),
    ("label-shift", {"model": Words, "batches": lines, "loss_fn": of_lines}, "pass"),
    ("label-shift", {"model": Words, "batches": lambda: lines(0), "loss_fn": of_lines}, "fail"),
    ("label-shift", {"model": Words, "batches": lambda: lines(2), "loss_fn": of_lines}, "fail"),
    ("label-shift", {}, "skipped"),
    ("batch-size-dependence", {}, "pass"),
    ("batch-size-dependence", {"model": lambda: Net(between=lambda x: x / len(x))}, "fail"),
    ("missing-zero-grad", {"train_step": step}, "pass"),
    ("missing-zero-grad", {"train_step": no_zero}, "fail"),
    ("missing-zero-grad", {}, "skipped"),
    ("train-eval-mode", {"train_step": step, "evaluate": evaluation}, "pass"),
    ("train-eval-mode", {"model": Leaving}, "fail"),
    ("train-eval-mode", {"model": lambda: Net().eval()}, "fail"),
    (
        "train-eval-mode",
        {
            "train_step": lambda m, b, o: step(m, b, o, train=False),
            "evaluate": keeps_eval,
        },
        "fail",
    ),
    ("evaluation-gradients", {"evaluate": evaluation}, "pass"),
    ("evaluation-gradients", {"evaluate": with_graph}, "fail"),
    ("evaluation-gradients", {"evaluate": keeps_eval}, "fail"),
    ("evaluation-gradients", {}, "skipped"),
    ("schedule-values", {"scheduler": linear_warmup, "total_steps": 20}, "pass"),
    ("schedule-values", {"scheduler": linear_warmup, "total_steps": 40}, "fail"),
    (
        "schedule-values",
        {"scheduler": lambda t: linear_warmup(t, warmup=90, total=500), "total_steps": 20},
        "fail",
    ),
    (
        "schedule-values",
        {"scheduler": lambda t: linear_warmup(t, floor=-1, total=10), "total_steps": 20},
        "fail",
    ),
    ("schedule-values", {"scheduler": lambda t: cosine(t, 2), "total_steps": 20}, "fail"),
    ("schedule-values", {"scheduler": lambda t: cosine(t, 20), "total_steps": 20}, "pass"),
    ("schedule-values", {"scheduler": lambda t: cosine(t, 4), "total_steps": 20}, "pass"),
    ("schedule-values", {}, "skipped"),
    ("loss-scale", {}, "pass"),
    ("loss-scale", {"loss_fn": lambda m, b: of_rows(m, b) * len(b[1])}, "fail"),
    (
        "loss-scale",
        {"train_step": lambda m, b, o: step(m, b, o, loss_fn=lambda m, b: 64 * of_rows(m, b))},
        "fail",
    ),
    ("accumulation-mean-of-means", {"train_step": lambda *a: halves(*a, share=True)}, "pass"),
    ("accumulation-mean-of-means", {"train_step": halves}, "fail"),
    ("accumulation-mean-of-means", {}, "skipped"),
    ("label-in-inputs", {"data": (*raw(), plain)}, "pass"),
    ("label-in-inputs", {"data": (*raw(), encoded)}, "fail"),
    ("label-in-inputs", {"batches": label_column}, "fail"),
    ("label-in-inputs", {}, "skipped"),
    ("order-not-repeatable", {}, "pass"),
    ("order-not-repeatable", {"batches": Clock}, "fail"),
    ("not-repeatable", {}, "pass"),
    ("not-repeatable", {"model": Guessing}, "fail"),
    ("checkpoint-round-trip", {}, "pass"),
    ("checkpoint-round-trip", {"model": Unsaved}, "fail"),
    ("weight-decay-groups", {}, "pass"),
    ("weight-decay-groups", {"optimizer": swapped}, "fail"),
]


@pytest.mark.parametrize(
    ("name", "parts", "verdict"), CASES, ids=[f"{n}-{v}-{i}" for i, (n, _, v) in enumerate(CASES)]
)
def test_a_check_gives_its_verdict(name, parts, verdict):
    found = finding(target(**parts), name)
    assert found["verdict"] == verdict, found["message"]
    assert found["message"]


def test_every_check_is_listed_with_a_meaning_and_has_a_row_that_fails_and_one_that_passes():
    from kit.check_ids import CHECK_IDS

    ids = [name for name, _ in preflight_checks.CHECKS]
    assert len(ids) == len(set(ids)) and set(ids) <= set(CHECK_IDS)
    assert set(preflight_checks.THRESHOLDS) <= set(ids)
    rows_of = {name: {v for n, _, v in CASES if n == name} for name in ids}
    assert {name for name, found in rows_of.items() if "fail" not in found} == set()
    assert {n for n, found in rows_of.items() if "pass" not in found} == {"missing-log-softmax"}


@pytest.mark.parametrize("classes", [2, 4, 10, 100])
def test_the_floor_of_a_double_softmax_is_named(classes):
    def loss_fn(model, batch):
        scores = model(batch[0]).repeat(1, -(-classes // CLASSES))[:, :classes]
        return F.cross_entropy(scores.softmax(-1), batch[1] % classes)

    found = finding(target(loss_fn=loss_fn), "double-softmax")
    floor = {2: 0.313, 4: 0.744, 10: 1.461, 100: 3.622}[classes]
    assert found["verdict"] == "fail" and found["value"] == pytest.approx(floor, abs=6e-4)
    assert f"{found['value']:.4f}" in found["message"]
    assert found["fix"]["file"] == __file__ and "softmax(-1)" in line_of(found["fix"])


def line_of(fix):
    with open(fix["file"], encoding="utf-8") as file:
        return file.read().splitlines()[fix["line"] - 1]


def test_what_the_code_raises_is_the_finding_of_its_check_and_the_others_go_on():
    found = {f["id"]: f for f in preflight_checks.preflight(target(batches=bad_label(9)))}
    assert {name for name, f in found.items() if f["verdict"] == "fail"} == {"labels-out-of-range"}
    assert "9" in found["labels-out-of-range"]["message"]
    assert all(f["verdict"] != "unclear" for f in found.values())
    first = preflight_checks.preflight(
        target(batches=lambda: [(x, y + CLASSES) for x, y in rows()]), only=["labels-out-of-range"]
    )
    assert first[0]["verdict"] == "fail" and "out of bounds" in first[0]["message"]


def test_a_mistake_of_a_check_is_not_told_as_one_of_the_code(monkeypatch):
    evidence = importlib.import_module("evidence")
    monkeypatch.setattr(evidence, "relative_change", lambda a, b: {}["absent"])
    (found,) = preflight_checks.preflight(target(), only=["train-eval-mode"])
    assert found["verdict"] == "unclear" and "the check itself failed" in found["message"]


def test_a_sound_target_with_all_its_parts_has_no_finding_and_the_same_report_twice():
    parts = {
        "train_step": step,
        "evaluate": evaluation,
        "scheduler": linear_warmup,
        "total_steps": 20,
        "data": (*raw(), plain),
    }
    first, second = (preflight_checks.preflight(target(**parts)) for _ in range(2))
    assert {f["id"]: f["verdict"] for f in first if f["verdict"] in ("fail", "unclear")} == {}
    assert first == second


def test_only_and_skip_choose():
    chosen = preflight_checks.preflight(
        target(), only=["non-finite", "loss-scale"], skip=["loss-scale"]
    )
    assert [f["id"] for f in chosen] == ["non-finite"]
