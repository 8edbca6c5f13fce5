"""Whatever a check does to a target, it is put back bit for bit, also when the check raises."""

from __future__ import annotations

import random
import shutil

import numpy
import pytest
import torch
from skills.targets import processes
from skills.targets.fingerprint import fingerprint
from skills.targets.processes import CLASSIFIER, LANGUAGE_MODEL, MLP, ROOT

from kit import state
from kit.target import load_target


def load(spec, tmp_path):
    return load_target(tmp_path, spec, overrides=[], seed=None, device="auto")


def train(target, steps=3):
    for batch, _ in zip(target.batches, range(steps), strict=False):
        target.loss_fn(target.model, batch).backward()
        if target.optimizer is not None:
            target.optimizer.step()


def disturb(target):
    """Change every part that a check can change."""
    train(target)
    random.random()
    numpy.random.rand()
    torch.rand(1)
    target.model.eval()
    target.model.register_forward_hook(lambda *_: None)
    parameters = list(target.model.parameters())
    parameters[0].requires_grad_(False)
    parameters[0].grad = None
    parameters[1].data = parameters[1].data.double()
    parameters[-1].data = torch.full_like(parameters[-1], float("nan"))
    name = next(name for name, _ in target.model.named_children())
    setattr(target.model, name, torch.nn.Identity())
    target.model.register_buffer("extra", torch.zeros(1))
    if target.optimizer is not None:
        target.optimizer.param_groups[0]["lr"] = 1.0
        target.optimizer.param_groups[0]["params"].pop()
        target.optimizer.state.clear()


@pytest.mark.parametrize("spec", [MLP, CLASSIFIER, LANGUAGE_MODEL], ids=["mlp", "cnn", "lm"])
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_a_disturbed_target_is_restored_bit_for_bit(spec, raises, tmp_path):
    target = load(spec, tmp_path)
    train(target)  # moments, gradients and running statistics exist before
    before = fingerprint(target)
    try:
        with state.preserved(target):
            disturb(target)
            assert sum(a != before.get(k) for k, a in fingerprint(target).items()) >= 8
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert fingerprint(target) == before


@pytest.mark.parametrize("spec", [CLASSIFIER, LANGUAGE_MODEL], ids=["cnn", "lm"])
def test_training_goes_on_as_if_nothing_had_happened(spec, tmp_path):
    undisturbed = load(spec, tmp_path)
    train(undisturbed)
    train(undisturbed)
    disturbed = load(spec, tmp_path)
    train(disturbed)
    with state.preserved(disturbed):
        disturb(disturbed)
    train(disturbed)
    wanted, found = undisturbed.model.state_dict(), disturbed.model.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize(
    ("forgotten", "part"),
    [
        ("_keep_generators", "torch"),
        ("_keep_generators", "numpy"),
        ("_keep_generators", "python"),
        ("_keep_loader", "loader"),
        ("_keep_optimizer", "moments"),
        ("_keep_optimizer", "groups"),
        ("_keep_modules", "parameters"),
        ("_keep_modules", "buffers"),
        ("_keep_modules", "gradients"),
        ("_keep_modules", "modes"),
        ("_keep_modules", "requires_grad"),
    ],
)
def test_a_restore_that_forgets_a_part_is_caught(forgotten, part, tmp_path, monkeypatch):
    target = load(CLASSIFIER, tmp_path)
    train(target)
    before = fingerprint(target)
    monkeypatch.setattr(state, forgotten, lambda *_: lambda: None)
    with state.preserved(target):
        disturb(target)
    assert fingerprint(target)[part] != before[part]


def test_tensor_objects_and_storage_stay_the_same(tmp_path):
    target = load(LANGUAGE_MODEL, tmp_path)
    model = target.model
    tied, place = model.head.weight, model.head.weight.data_ptr()
    with state.preserved(target):
        model.head.weight = torch.nn.Parameter(torch.zeros_like(tied))
        model.embedding.weight.data = torch.ones_like(tied)
    assert model.head.weight is tied and model.embedding.weight is tied
    assert tied.data_ptr() == place
    assert model.positions.stride()[0] == 0  # the expanded buffer is still expanded


def test_patched_methods_and_parametrizations_are_taken_back(tmp_path):
    target = load(MLP, tmp_path)
    target.model.eval()  # its dropout draws anew at every call
    linear = next(m for m in target.model.modules() if isinstance(m, torch.nn.Linear))
    linear.calls = {"count": 1}
    kept, keys, batch = type(linear), set(vars(linear)), next(iter(target.batches))
    loss = target.loss_fn(target.model, batch)
    with state.preserved(target):
        torch.nn.utils.parametrizations.weight_norm(linear)
        linear.forward = lambda x: torch.zeros(len(x), linear.out_features)
        linear.calls["count"] += 1
        assert target.loss_fn(target.model, batch) != loss
    assert type(linear) is kept and set(vars(linear)) == keys and linear.calls == {"count": 1}
    assert torch.equal(target.loss_fn(target.model, batch), loss)


def test_moments_of_another_dtype_are_not_cast(tmp_path):
    target = load(LANGUAGE_MODEL, tmp_path)
    train(target)
    weight = target.model.router.weight
    moment = torch.rand(weight.shape, dtype=torch.float64)
    target.optimizer.state[weight]["exp_avg"] = moment
    kept = moment.clone()
    with state.preserved(target):
        moment.zero_()
        target.optimizer.state[weight]["exp_avg"] = moment.float()
    assert torch.equal(target.optimizer.state[weight]["exp_avg"], kept)


PROJECT_SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {kit!r}]
from skills.targets.fingerprint import fingerprint
from kit.state import preserved
from kit.target import load_target
target = load_target(Path({project!r}), None, overrides=["model=tiny_dense", "data.seq_len=16"],
                     seed=3, device="cpu")
from curry_train.step import train_step
assert target.runtime.config.seed == 3 and target.kind == "project"
train_step(target.runtime)
before = fingerprint(target)
with preserved(target):
    for _ in range(2):
        train_step(target.runtime)
    assert fingerprint(target)["position"] != before["position"]
    assert fingerprint(target)["counters"] != before["counters"]
after = fingerprint(target)
print({{name for name in before if before[name] != after[name]}} or "restored")
one = train_step(target.runtime).loss
print(target.batches.samples_consumed)
"""


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def test_a_project_is_restored_with_its_position_and_counters(project, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROJECT_SCRIPT.format(
        tests=str(ROOT / "tests"), kit=str(processes.KIT_HOME), project=str(project)
    ))  # fmt: skip
    folder = tmp_path / "empty"
    folder.mkdir()
    done = processes.run(script, cwd=folder)
    assert done.stdout.split() == ["restored", "16"], done.stdout + done.stderr
    assert not (project / "runs").exists() and not list(folder.iterdir())
