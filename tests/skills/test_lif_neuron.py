"""The measure of spiking neurons: its numbers, its verdicts, faults planted in small networks."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys

import pytest
from skills.targets import processes
from skills.targets.processes import MLP, ROOT

SCRIPT = ROOT / "skills" / "lif-neuron" / "scripts" / "lif_neuron.py"
sys.path.insert(0, str(SCRIPT.parent))
lif_neuron = importlib.import_module("lif_neuron")
sys.dont_write_bytecode = False  # the script sets it for itself

NETWORK = """
import torch
from torch import nn


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * GAIN / (1 + (WIDTH * x) ** 2)


class Neurons(nn.Module):
    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def forward(self, current):
        v, spikes = 0.0, []
        for now in current:
            v = LEAK * v + now
            spikes.append(Spike.apply(v - self.threshold))
            v = v - self.threshold * (spikes[-1].detach() if DETACH else spikes[-1])
        return torch.stack(spikes)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 1)
        self.neurons = Neurons(THRESHOLD)

    def forward(self, x):
        current = SCALE * torch.stack([self.up(x)] * TIME)
        return self.down(self.neurons(current.detach() if CUT else current)).mean(0)


def build():
    torch.manual_seed(0)
    model = Network()
    batches = [torch.randn(64, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    return model, batches, lambda m, b: (m(b) - b.sum(1, keepdim=True)).square().mean(), optimizer
"""
HEALTHY = {
    "LEAK": 0.5,
    "THRESHOLD": 1.0,
    "SCALE": 1.5,
    "TIME": 6,
    "GAIN": 1.0,
    "WIDTH": 3.0,
    "DETACH": True,
    "CUT": False,
}


def measured(folder, *words, source=NETWORK, **changes):
    """Run the script on the network with some constants changed; returns (code, report)."""
    values = "".join(f"{name} = {value!r}\n" for name, value in {**HEALTHY, **changes}.items())
    (folder / "network.py").write_text(values + source)
    words = ["--target", "network.py:build", *words, "--json"]
    done = processes.run(SCRIPT, *words, cwd=folder)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def verdicts(report):
    return {check["id"]: check["verdict"] for check in report["checks"]}


CHECKS = list(lif_neuron.THRESHOLDS)


def test_a_healthy_network_passes_and_its_numbers_are_those_of_a_loop(tmp_path):
    import torch

    code, report = measured(tmp_path)
    assert code == 0 and verdicts(report) == dict.fromkeys(CHECKS, "pass")
    (layer,) = report["numbers"]["layers"]
    assert (layer["name"], layer["time_steps"], layer["neurons"]) == ("neurons", 6, 32)
    scope = dict(HEALTHY)
    exec(NETWORK, scope)
    model, batches, loss_fn, _ = scope["build"]()
    fired, seen = 0.0, []
    hook = model.neurons.register_forward_hook(lambda m, i, o: seen.append((i[0], o)))
    loss = loss_fn(model, batches[0])
    current, spikes = seen[0]
    for batch in batches[1:]:
        model(batch)
    hook.remove()
    fired = torch.stack([o for _, o in seen]).double().mean()
    assert layer["firing_rate"] == pytest.approx(fired.item())
    upstream = torch.autograd.grad(loss, spikes, retain_graph=True)[0][-1]
    (whole,) = torch.autograd.grad(loss, current, retain_graph=True)
    # With the reset detached the last spike reaches time step t by leak^(5 - t).
    v = torch.zeros_like(current[0])
    for now in current.detach():
        before = 0.5 * v + now
        v = before - (before >= 1).float()
    slope = 1 / (1 + (3 * (before - 1)) ** 2)
    wanted = [(upstream * slope).norm().item() * 0.5 ** (5 - t) for t in range(6)]
    assert layer["gradient_over_time"] == pytest.approx(wanted, rel=1e-5)
    assert layer["gradient_of_loss"] == pytest.approx(whole.flatten(1).norm(dim=1).tolist())
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


FAULTS = {
    "threshold out of reach": ({"THRESHOLD": 50.0}, "lif-dead-neurons"),
    "currents too small": ({"SCALE": 0.01}, "lif-dead-neurons"),
    "threshold next to nothing": (
        {"THRESHOLD": 1e-4, "SCALE": 0.0, "BIAS": 1.0},
        "lif-saturated",
    ),
    "leak near 0": ({"LEAK": 0.01}, "lif-gradient-over-time"),
    "too many time steps for the leak": ({"TIME": 40}, "lif-gradient-over-time"),
    "surrogate gives nothing": ({"GAIN": 0.0}, "lif-gradient-over-time"),
    "currents detached": ({"CUT": True}, None),
    "reset with a steep surrogate": (
        {"GAIN": 40.0, "DETACH": False, "WIDTH": 0.1, "LEAK": 0.9},
        "lif-gradient-exploding",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, tmp_path):
    changes, name = FAULTS[fault]
    source = NETWORK
    if "BIAS" in changes:  # a constant current for all
        source = source.replace("SCALE * torch", "BIAS + SCALE * torch")
    code, report = measured(tmp_path, source=source, **changes)
    found = verdicts(report)
    if name is None:  # the script itself asks for the gradient where the graph is cut
        assert code == 0 and found == dict.fromkeys(CHECKS, "pass")
        return
    assert code == 1 and found[name] == "fail", found
    (check,) = [check for check in report["checks"] if check["id"] == name]
    assert check["threshold"] == lif_neuron.THRESHOLDS[name] and report["next"]
    assert "neurons" in check["message"]


def test_neurons_called_once_per_time_step_give_the_same_numbers(tmp_path):
    stepwise = NETWORK.replace(
        "return self.down(self.neurons(current.detach() if CUT else current)).mean(0)",
        "outs = []\n        for now in current:\n            outs.append(self.neurons(now))\n"
        "        self.neurons.v = 0.0\n        return self.down(torch.stack(outs)).mean(0)",
    ).replace(
        "        v, spikes = 0.0, []\n        for now in current:\n            v = LEAK * v + now\n"
        "            spikes.append(Spike.apply(v - self.threshold))\n"
        "            v = v - self.threshold * (spikes[-1].detach() if DETACH else spikes[-1])\n"
        "        return torch.stack(spikes)\n",
        "        u = LEAK * getattr(self, 'v', 0.0) + current\n"
        "        s = Spike.apply(u - self.threshold)\n"
        "        self.v = u - self.threshold * s.detach()\n        return s\n",
    )
    assert stepwise.count("self.v = u") == 1 and stepwise.count("self.neurons(now)") == 1
    _, whole = measured(tmp_path)
    code, report = measured(tmp_path, source=stepwise)
    assert code == 0
    (one,), (other,) = whole["numbers"]["layers"], report["numbers"]["layers"]
    for key, value in one.items():
        assert other[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5))


def test_one_time_step_skips_the_gradient_checks(tmp_path):
    code, report = measured(tmp_path, TIME=1)
    assert code == 0
    assert verdicts(report) == {
        "lif-dead-neurons": "pass",
        "lif-saturated": "pass",
        "lif-gradient-over-time": "skipped",
        "lif-gradient-exploding": "skipped",
    }


def test_a_loss_that_skips_the_last_time_step_is_unclear(tmp_path):
    source = NETWORK.replace(").mean(0)", ")[:-1].mean(0)")
    code, report = measured(tmp_path, source=source)
    assert code == 3 and verdicts(report)["lif-gradient-over-time"] == "unclear"


def test_training_first_changes_what_is_measured_and_nothing_else(tmp_path):
    source = NETWORK.replace("model.parameters(), 0.0", "model.parameters(), 0.05")
    _, fresh = measured(tmp_path, source=source)
    code, trained = measured(tmp_path, "--steps", 30, source=source)
    assert code in (0, 1)
    assert trained["numbers"]["layers"][0]["firing_rate"] != pytest.approx(
        fresh["numbers"]["layers"][0]["firing_rate"], rel=1e-6
    )


def test_a_model_without_spikes_is_unclear_and_says_so(tmp_path):
    done = processes.run(SCRIPT, "--target", MLP, cwd=tmp_path)
    assert done.returncode == 3 and "no spiking neurons in Sequential" in done.stdout
    assert "unclear  lif-layers 0: no module with" in done.stdout
    source = NETWORK.replace("return torch.stack(spikes)", "return torch.stack(spikes) * 0.5")
    code, report = measured(tmp_path, source=source)
    assert code == 3 and verdicts(report) == {"lif-layers": "unclear"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "0"], "--batches 0; it takes at least 1"),
        (["--steps", "-1"], "--steps -1; it takes 0 or more"),
    ],
)
def test_bad_flags_exit_with_2_before_anything_runs(words, message, tmp_path):
    done = processes.run(SCRIPT, "--target", MLP, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "runs").exists()


def test_training_without_an_optimizer_is_refused(tmp_path):
    done = processes.run(SCRIPT, "--target", MLP, "--steps", 3, cwd=tmp_path)
    assert done.returncode == 2 and "returned no optimizer" in done.stderr, done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lif") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


SMALL = ["data.seq_len=32", "data.global_batch_size=4"]


def on_project(project, *settings):
    words = ["--project", project, "--set", *SMALL, *settings, "--json"]
    done = processes.run(SCRIPT, *words, cwd=project)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_spiking_project_passes_and_the_quickstart_has_no_neurons(project):
    code, report = on_project(project, "model=tiny_spiking")
    assert code == 0 and verdicts(report) == dict.fromkeys(CHECKS, "pass"), report["checks"]
    assert len(report["numbers"]["layers"]) == 14
    code, report = on_project(project)
    assert code == 3 and verdicts(report) == {"lif-layers": "unclear"}


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("model.threshold=30", "lif-dead-neurons"),
        ("model.leak=0.02", "lif-gradient-over-time"),
        ("model.rms_norm_eps=1000", "lif-dead-neurons"),
    ],
)
def test_a_setting_that_breaks_the_project_is_named(setting, name, project):
    code, report = on_project(project, "model=tiny_spiking", setting)
    assert code == 1 and verdicts(report)[name] == "fail", report["checks"]


def test_a_compiled_project_is_refused(project):
    words = ["--project", project, "--set", "model=tiny_spiking", "compile=true"]
    done = processes.run(SCRIPT, *words, cwd=project)
    assert done.returncode == 2 and "add --set compile=false" in done.stderr


def test_the_thresholds_stand_in_the_skill():
    body = (SCRIPT.parents[1] / "SKILL.md").read_text(encoding="utf-8")
    for key, value in lif_neuron.THRESHOLDS.items():
        rows = [line for line in body.splitlines() if f"`{key}`" in line]
        assert any(str(value) in re.findall(r"\d+(?:\.\d+)?", row) for row in rows), key
