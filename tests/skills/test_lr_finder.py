"""The finder of learning rates: known answers, what it puts back, models that cannot learn."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys

import pytest
import torch
from skills.targets import processes, rates
from skills.targets.processes import ROOT, TARGETS
from torch import nn

SCRIPT = ROOT / "skills" / "lr-finder" / "scripts" / "lr_finder.py"
sys.path.insert(0, str(SCRIPT.parent))
lr_finder = importlib.import_module("lr_finder")
lr_sweep = importlib.import_module("lr_sweep")
lr_verdicts = importlib.import_module("lr_verdicts")
sys.dont_write_bytecode = False  # the script sets it for itself
Target = importlib.import_module("kit.target").Target
Report = importlib.import_module("kit.report").Report
UsageError = importlib.import_module("kit.errors").UsageError


def target(make, *arguments, build=True, **fields):
    """A target of a function; it can be built anew unless told otherwise."""

    def anew(seed):
        torch.manual_seed(seed)
        made = Target(*make(*arguments), torch.device("cpu"), "hash", "foreign", **fields)
        if build:
            made.build = anew
        return made

    return anew(0)


def judged(one, **settings):
    """Return (report, {id: check}, what was found)."""
    report = Report("lr-finder")
    found = lr_finder.find(one, **settings)
    lr_verdicts.judge(report, one, found, lr_finder.THRESHOLDS)
    return report, {check["id"]: check for check in report.checks}, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("points", [200, 300])
def test_a_quadratic_diverges_at_two_over_its_curvature(dtype, points):
    report, checks, found = judged(target(rates.quadratic, 0.0, dtype), points=points)
    step = (100 / 1e-4) ** (1 / (points - 1))
    for run in report.numbers["sweeps"]:
        assert 0.2 < run["stopped_at"] <= 0.2 * step
        assert run["diverges_at"] == run["stopped_at"] and run["stopped"] == "rise"
        assert run["valley"] < 0.2 and run["steepest"] < 0.2
    assert checks["lr-range"]["verdict"] == "pass" and checks["lr-range"]["value"][1] < 0.2
    assert report.numbers["chosen"] < 0.2 and found.adam is False


def test_momentum_moves_the_end_of_a_quadratic():
    """With momentum b the edge is 2 (1 + b) / h; its oscillations rise before it."""
    report, _, _ = judged(target(rates.quadratic, 0.0, torch.float64, 0.5), points=200)
    assert all(0.0 < run["stopped_at"] <= 0.3 * 1.08 for run in report.numbers["sweeps"])


def test_a_sweep_that_begins_where_the_loss_rises_is_no_model_that_cannot_learn():
    """A fall in the first losses is no noise; of three losses no rate can be read."""
    low = {"low": 0.01, "high": 1e4, "confirm_steps": 0}
    one = target(rates.quadratic, 0.0, torch.float64, 0.9)
    assert judged(one, **low)[1]["lr-range"]["verdict"] == "pass"
    told = judged(target(rates.quadratic), low=0.15, high=15.0, confirm_steps=0)[1]["lr-range"]
    assert told["verdict"] == "unclear" and "--low below 0.15" in told["message"]


def test_noise_does_not_stop_a_sweep_before_it_diverges():
    report, checks, _ = judged(target(rates.quadratic, 0.1), confirm_steps=20)
    for run in report.numbers["sweeps"]:
        assert 0.1 < run["stopped_at"] < 0.5
    assert checks["lr-range"]["value"][1] < 0.2
    assert {check["verdict"] for check in checks.values()} == {"pass"}


def test_the_rate_of_a_tiny_gpt_of_bytes_lies_in_the_accepted_set():
    report, checks, found = judged(target(rates.byte_gpt))
    assert {check["verdict"] for check in checks.values()} == {"pass"}, checks
    assert 8e-4 <= report.numbers["chosen"] <= 8e-3
    low, high = report.numbers["low"], report.numbers["high"]
    assert low < high and low <= report.numbers["chosen"] <= high
    assert len({tuple(run.losses[:5]) for run in found.sweeps}) == 3  # three seeds
    assert (
        report.summary.endswith(("inside", "outside")) and "configured is 0.001" in report.summary
    )
    rates_tried = [run["rate"] for run in report.numbers["confirmed"]]
    assert rates_tried == pytest.approx([rates_tried[0] * m for m in (1, 2, 4)])
    assert all(len(run) == 30 for one in report.numbers["confirmed"] for run in one["losses"])
    winner = min(report.numbers["confirmed"], key=lambda run: sum(run["ends"]))
    assert report.numbers["chosen"] == winner["rate"]


@pytest.mark.skipif("not __import__('os').environ.get('CURRY_TRAIN_FULL')")
def test_the_rate_of_the_gpt_of_the_published_numbers():
    report, checks, _ = judged(target(rates.published_size))
    assert {check["verdict"] for check in checks.values()} == {"pass"}, checks
    assert 8e-4 <= report.numbers["chosen"] <= 8e-3


def test_everything_is_put_back_bit_for_bit():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)
            )

        def forward(self, x):
            return self.layers(x).square().mean()

    model = Dropped()
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": 10.0 ** -(2 + i % 3)} for i, p in enumerate(model.parameters())]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 9))
    loader = torch.utils.data.DataLoader(
        torch.randn(40, 8), 8, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    one = Target(
        model, loader, lambda model, x: model(x), optimizer, torch.device("cpu"), "h", "foreign",
        scheduler=schedule,
    )  # fmt: skip
    model(next(iter(loader))).backward()
    optimizer.step()
    schedule.step()

    def state():
        moments = {i: optimizer.state[p] for i, p in enumerate(model.parameters())}
        kept = {f"{i} {k}": v.clone() for i, s in moments.items() for k, v in s.items()}
        kept |= {f"grad {i}": p.grad.clone() for i, p in enumerate(model.parameters())}
        kept |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
        kept["rng"], kept["loader"] = torch.get_rng_state(), loader.generator.get_state()
        return kept

    def options():
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return groups, schedule.state_dict(), model.training

    before, settings = state(), options()
    assert any(rate for rate in (group["lr"] for group in optimizer.param_groups))
    lr_finder.find(one, points=200, confirm_steps=2)
    after = state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert repr(options()) == repr(settings)


def test_groups_keep_their_rates_relative_to_each_other():
    model = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    optimizer = torch.optim.SGD([{"params": [model[0]], "lr": 1e-2}, {"params": [model[1]]}], 1e-3)
    one = Target(
        model, [torch.ones(1)], lambda model, x: (model[0] + model[1]).sum(), optimizer,
        torch.device("cpu"), "h", "foreign",
    )  # fmt: skip
    lr_sweep.Stepper(one).step(0.5)
    assert [p.item() for p in model] == pytest.approx([-0.5, -0.05])


def test_a_users_own_step_is_taken_and_its_schedule_has_no_say():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    used = []

    def own_step(model, batch, optimizer):
        optimizer.zero_grad()
        model(batch).sum().backward()
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()

    one = Target(
        model, [torch.ones(1, 1)], lambda model, x: model(x).sum(), optimizer,
        torch.device("cpu"), "h", "foreign", scheduler=schedule, train_step=own_step,
    )  # fmt: skip
    stepper = lr_sweep.Stepper(one)
    before = model.weight.item()
    assert stepper.step(0.5) == pytest.approx(before)
    stepper.step(0.25)
    assert used == [0.5, 0.25] and model.weight.item() == pytest.approx(before - 0.75)


def test_a_loss_that_is_never_finite_is_told():
    def make():
        model, batches, _, optimizer = rates.quadratic()
        return model, batches, lambda model, batch: model(batch).sum() * math.nan, optimizer

    report, checks, _ = judged(target(make), points=200)
    assert report.verdict == "fail" and "not finite" in checks["lr-range"]["message"]
    assert checks["lr-range"]["fix"]["file"].endswith("test_lr_finder.py")
    assert checks["lr-confirm"]["verdict"] == checks["lr-spread"]["verdict"] == "skipped"


def test_a_sweep_ends_where_the_loss_becomes_infinite():
    def make():
        model, batches, _, optimizer = rates.quadratic(noise=0.1)
        loss = lambda model, batch: model(batch).where(model.x.abs() < 3, math.inf).sum()  # noqa: E731
        return model, batches, loss, optimizer

    report, checks, _ = judged(target(make), points=200, confirm_steps=5)
    assert {run["stopped"] for run in report.numbers["sweeps"]} <= {"non-finite", "rise"}
    assert checks["lr-range"]["verdict"] == "pass" and report.numbers["high"] < 0.2


@pytest.mark.parametrize("kind", ["cut off", "noise alone"])
def test_a_model_that_cannot_learn_fails(kind):
    def make():
        model, batches, _, optimizer = rates.quadratic()

        def loss_fn(model, batch):
            noise = 1 + torch.rand(()) if kind == "noise alone" else torch.ones(())
            return noise + 0 * model(batch)

        return model, batches, loss_fn, optimizer

    report, checks, _ = judged(target(make), points=200, confirm_steps=5)
    assert report.verdict == "fail" and checks["lr-range"]["verdict"] == "fail"
    assert "does not learn" in checks["lr-range"]["message"]


def test_seeds_that_disagree_are_unclear():
    scales = iter([1.0, 100.0, 1.0] * 9)

    def make():
        model, batches, _, optimizer = rates.quadratic()
        scale = next(scales)
        return model, batches, lambda model, batch: scale * model(batch), optimizer

    report, checks, _ = judged(target(make), points=200, confirm_steps=0)
    assert report.verdict == "unclear" and checks["lr-spread"]["verdict"] == "unclear"
    assert checks["lr-spread"]["value"] > 4 and checks["lr-confirm"]["verdict"] == "skipped"


def test_a_best_rate_at_the_end_of_the_sweep_is_unclear():
    _, checks, _ = judged(target(rates.quadratic), points=200, low=1e-6, high=2e-3)
    assert checks["lr-range"]["verdict"] == "unclear"
    assert "--high" in checks["lr-range"]["message"]
    _, checks, _ = judged(target(rates.quadratic), points=200, low=1e-2)
    assert checks["lr-range"]["verdict"] == "unclear"
    assert "--low" in checks["lr-range"]["message"]


def test_a_target_that_cannot_be_built_anew_moves_its_data():
    report, _, found = judged(
        target(rates.quadratic, 0.1, build=False), points=200, confirm_steps=5
    )
    assert len({tuple(run.losses) for run in found.sweeps}) == 3
    assert any("share their weights" in line for line in report.evidence)


def test_the_valley_is_where_the_fall_is():
    run = lr_sweep.Sweep(0, rates=lr_sweep.grid(1e-4, 1.0, 201))
    # flat to 1e-3, a line in log to 1e-1, then up
    run.smoothed = [2.0] * 50 + [2 - i / 100 for i in range(101)] + [1 + i for i in range(50)]
    lr_sweep.suggest(run)
    # between a quarter and 95 % of the fall, in log: 60 % of the two decades
    assert run.valley == pytest.approx(10 ** (-3 + 0.6 * 2), rel=0.05)
    assert 1e-3 < run.steepest < 1e-1
    assert lr_sweep.longest_fall([3, 5, 2, 4, 1, 6]) in {(0, 4), (1, 4)}
    assert lr_sweep.longest_fall([1, 2, 3])[0] == lr_sweep.longest_fall([1, 2, 3])[1]
    assert lr_sweep.geometric_median([1.0, 100.0]) == pytest.approx(10.0)
    assert lr_sweep.geometric_median([1.0, 7.0, 1000.0]) == pytest.approx(7.0)


@pytest.mark.parametrize(
    "words",
    [["--points", "100"], ["--seeds", "2"], ["--confirm-steps", "-1"], ["--low", "0"]],
)
def test_settings_that_measure_noise_are_refused(words, tmp_path, capsys):
    code = lr_finder.cli.run(
        "lr-finder",
        lr_finder.work,
        doc=None,
        add_flags=lr_finder.add_flags,
        check_flags=lr_finder.check_flags,
        argv=[*words, "--project", str(tmp_path)],
    )
    assert code == 2 and words[0] in capsys.readouterr().err


def test_an_error_of_the_users_step_is_told_in_a_sentence_and_all_is_put_back():
    one, calls = target(rates.quadratic, build=False), []

    def fails_later(model, batch):
        calls.append(batch)
        if len(calls) > 40:
            raise ValueError("no more of this")
        return (model.x * 3).square().sum()

    one.loss_fn = fails_later
    with pytest.raises(UsageError, match="a training step raised ValueError: no more of this"):
        lr_finder.find(one, points=200)
    assert one.model.x.item() == 1.0 and one.optimizer.param_groups[0]["lr"] == 0.1


def test_a_target_without_optimizer_is_refused():
    one = target(rates.quadratic)
    one.optimizer = None
    with pytest.raises(UsageError, match="no optimizer"):
        lr_finder.find(one)
    one = target(rates.quadratic)
    one.optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(UsageError, match="learning rate 0"):
        lr_finder.find(one)


def test_the_script_writes_report_and_picture(tmp_path):
    words = ["--target", f"{TARGETS / 'rates.py'}:quadratic", "--project", tmp_path, "--json"]
    done = processes.run(SCRIPT, *words, "--points", 200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {check["id"] for check in report["checks"]} == {"lr-range", "lr-spread", "lr-confirm"}
    with open(report["artifacts"][0], "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    assert "expected: about" in done.stderr and report["next"][0].startswith("lr=")


@pytest.mark.skipif("not __import__('os').environ.get('CURRY_TRAIN_FULL')")
def test_a_project_is_told_its_override_and_put_back(tmp_path):
    init = ROOT / "skills" / "start-project" / "scripts" / "init.py"
    processes.run_fresh(init, tmp_path / "demo", "--no-install", cwd=tmp_path)
    sets = ["--set", "model=tiny_dense", "data.seq_len=32", "data.global_batch_size=4"]
    done = processes.run(SCRIPT, "--project", tmp_path / "demo", *sets, cwd=tmp_path)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert "--set optim.lr=" in done.stdout
    assert os.listdir(tmp_path / "demo" / "runs") == ["checks"]
