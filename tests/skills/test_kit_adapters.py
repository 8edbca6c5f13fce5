"""Foreign projects of three kinds become targets; every form that a function may return."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from skills.targets import processes
from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding
from transformers.trainer_pt_utils import LabelSmoother

from kit.errors import UsageError
from kit.hf_trainer import _Smoothing
from kit.joined_optimizer import JoinedOptimizer
from kit.state import preserved
from kit.target import load_target

LOOP = f"{processes.TARGETS / 'plain_loop.py'}:make"
MODULE = f"{processes.TARGETS / 'lightning_project.py'}:make"
TRAINER = f"{processes.TARGETS / 'trainer_project.py'}:language_model"
SMOOTHED = f"{processes.TARGETS / 'trainer_project.py'}:smoothed_classifier"
PAIR = f"{processes.TARGETS / 'trainer_project.py'}:model_and_loader"
HEAD = """
import torch
import pytorch_lightning as pl
from torch import nn
rows = [torch.arange(8.0).view(2, 4) + i for i in range(6)]
"""


def load(spec, folder, **options):
    settings = {"overrides": [], "seed": None, "device": "auto", **options}
    return load_target(folder, str(spec), **settings)


def load_text(folder, body, **options):
    path = folder / f"mine_{abs(hash(body))}.py"
    path.write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
    return load(f"{path}:build", folder, **options)


def loss_and_gradients(target, batch):
    target.model.zero_grad()
    loss = target.loss_fn(target.model, batch)
    loss.backward()
    grads = [p.grad.clone() for p in target.model.parameters() if p.grad is not None]
    target.model.zero_grad()
    return float(loss.detach()), grads


def weights(target):
    return torch.cat([p.detach().flatten() for p in target.model.parameters()])


@pytest.mark.parametrize(
    ("spec", "has"),
    [
        (LOOP, "AdamW OneCycleLR 40 train_step evaluate data"),
        (MODULE, "AdamW CosineAnnealingLR 4 train_step evaluate"),
        (TRAINER, "AdamW LambdaLR 12"),
        (SMOOTHED, "AdamW LambdaLR 12"),
        (PAIR, ""),
    ],
    ids=["loop", "lightning", "trainer", "smoothed", "pair"],
)
def test_a_project_of_each_kind_becomes_a_target_that_can_be_built_anew(spec, has, tmp_path):
    target = load(spec, tmp_path)
    parts = [target.optimizer, target.scheduler]
    found = [type(part).__name__ for part in parts if part is not None]
    found += [str(target.total_steps)] if target.total_steps else []
    found += [n for n in ("train_step", "evaluate", "data") if getattr(target, n) is not None]
    assert " ".join(found) == has and target.kind == "foreign"
    batch, before = next(iter(target.batches)), weights(target)
    loss, gradients = loss_and_gradients(target, batch)
    assert 0.0 < loss < 20.0 and all(g.isfinite().all() for g in gradients)
    other, again = target.rebuild(7), target.rebuild(7)
    assert torch.equal(weights(other), weights(again)) and torch.equal(weights(target), before)
    assert not torch.equal(weights(other), before)
    assert other.config_hash == target.config_hash and other.rebuild(0).model is not target.model
    assert {id(p) for p in other.model.parameters()}.isdisjoint(map(id, target.model.parameters()))


def test_the_loops_own_step_and_validation_are_called(tmp_path):
    target = load(LOOP, tmp_path)
    batch, before = next(iter(target.batches)), weights(target)
    with preserved(target):
        first = target.train_step(target.model, batch, target.optimizer)
        assert target.train_step(target.model, batch, target.optimizer) < first
        assert target.evaluate(target.model, target.batches) > 0
    assert torch.equal(weights(target), before)
    inputs, labels, transform = target.data
    assert torch.equal(transform(inputs, labels)[0][0], batch[0])


def test_the_trainers_loss_is_that_of_its_own_loop(tmp_path):
    """The Trainer itself takes one step on the same batch and logs the same loss."""
    target = load(TRAINER, tmp_path)
    trainer = target.loss_fn.trainer
    batch = next(iter(target.batches))
    expected, gradients = loss_and_gradients(target, batch)
    _, count = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = 1
    reported = trainer.training_step(target.model, dict(batch), num_items_in_batch=count)
    assert float(reported) == expected and int(count) == 6 * 11
    for mine, its in zip(gradients, target.model.parameters(), strict=True):
        assert torch.equal(mine, its.grad)


def test_label_smoothing_of_the_trainer_is_in_the_loss(tmp_path):
    target = load(SMOOTHED, tmp_path)
    batch = next(iter(target.batches))
    with torch.no_grad():
        logits = target.model(input_ids=batch["input_ids"]).logits
    expected = nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.1)
    assert float(target.loss_fn(target.model, batch).detach()) == pytest.approx(
        float(expected), abs=1e-6
    )
    encoded = BatchEncoding(batch)  # whose to() gives itself
    target.loss_fn(target.model, encoded)
    assert "labels" in batch and "labels" in encoded  # compute_loss takes them out of a copy
    trainer = target.loss_fn.trainer
    assert type(trainer.label_smoother) is LabelSmoother
    own = trainer.compute_loss(target.model, dict(batch), num_items_in_batch=torch.tensor(6))
    assert float(own.detach()) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("count", [None, torch.tensor(7)])
@pytest.mark.parametrize("shifted", [False, True])
def test_smoothing_by_cross_entropy_is_that_of_transformers(count, shifted):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(0, 4, (2, 5))
    labels[0, 2:] = -100
    output = {"logits": logits}
    theirs = LabelSmoother(0.2)(output, labels, shifted, count)
    ours = _Smoothing(0.2, -100)(output, labels, shifted, count)
    assert torch.allclose(theirs, ours, atol=1e-6)  # theirs sums in float32


def test_a_plain_dataloader_is_taken_from_the_trainer(tmp_path):
    target = load(TRAINER, tmp_path)
    assert type(target.batches) is DataLoader
    assert target.loss_fn.trainer.accelerator._dataloaders == []
    assert "prepare" not in vars(target.loss_fn.trainer.accelerator)


def test_a_trainer_with_model_init_and_a_step_of_its_own(tmp_path):
    body = """
    from types import SimpleNamespace
    from torch.utils.data import DataLoader
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)
        def forward(self, x):
            return self.linear(x)
    class Mine:
        args = SimpleNamespace(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=4)
        optimizer = None
        def __init__(self):
            torch.manual_seed(42)
            self.model = Net()
        model_init = Net
        def call_model_init(self): return Net()
        def get_train_dataloader(self): return rows
        def compute_loss(self, model, inputs, return_outputs=False): return model(inputs).mean()
        def create_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        def training_step(self, model, inputs):
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss
        def prediction_step(self, model, inputs, prediction_loss_only):
            return self.compute_loss(model, inputs).detach(), None, None
    def build():
        return Mine()
    """
    target = load_text(tmp_path, body)
    assert target.total_steps == 4 and target.scheduler is None
    assert not torch.equal(weights(target), weights(target.rebuild(1)))
    held = {id(p) for group in target.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in target.model.parameters()}
    with preserved(target):
        batch = target.batches[0]
        before = float(target.loss_fn(target.model, batch).detach())
        target.train_step(target.model, batch, target.optimizer)
        assert float(target.loss_fn(target.model, batch).detach()) < before
        assert all(p.grad is None for p in target.model.parameters())
        assert target.evaluate(target.model, target.batches) < before


FORMS = {
    "one": ("return sgd()", 1, None),
    "list": ("return [sgd()]", 1, None),
    "none": ("return None", 0, None),
    "two-lists": ("o = sgd(); return [o], [step(o)]", 1, "StepLR"),
    "list-of-dict": ("o = sgd(); return [o], [{'scheduler': step(o)}]", 1, "StepLR"),
    "list-and-one": ("o = sgd(); return [o], step(o)", 1, "StepLR"),
    "dict": ("o = sgd(); return {'optimizer': o, 'lr_scheduler': step(o)}", 1, "StepLR"),
    "nested": (
        "o = sgd(); return {'optimizer': o, 'lr_scheduler': {'scheduler': step(o)}}",
        1,
        "StepLR",
    ),
    "plateau": ("o = sgd(); return {'optimizer': o, 'lr_scheduler': plateau(o)}", 1, None),
    "dicts": (
        "o = sgd(bias=1); return {'optimizer': sgd()}, {'optimizer': o, 'lr_scheduler': step(o)}",
        2,
        "StepLR",
    ),
    "two": ("return sgd(), sgd(bias=1)", 2, None),
    "same-parameters": ("return sgd(), sgd()", 0, None),
}
CONFIGURED = """
step = lambda o: torch.optim.lr_scheduler.StepLR(o, 2)
plateau = lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def training_step(self, batch):
        return self.linear(batch).mean()
    def configure_optimizers(self):
        own = [self.linear.weight], [self.linear.bias]
        sgd = lambda bias=0: torch.optim.SGD(own[bias], lr=0.1)
        RETURN
def build():
    return Net(), rows
"""


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_configure_optimizers(form, tmp_path):
    text, optimizers, scheduler = FORMS[form]
    target = load_text(tmp_path, CONFIGURED.replace("RETURN", text))
    found = target.optimizer
    count = 0 if found is None else len(getattr(found, "members", [found]))
    assert count == optimizers
    assert (None if target.scheduler is None else type(target.scheduler).__name__) == scheduler


@pytest.mark.parametrize("text", ["return 'sgd'", "return 3", "return [3]", "return {'lr': 1}"])
def test_another_form_is_refused(text, tmp_path):
    with pytest.raises(UsageError, match="configure_optimizers must return an optimizer, a list"):
        load_text(tmp_path, CONFIGURED.replace("RETURN", text))


GAN = """
class Gan(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.judge(self.maker(batch)).mean()
        first.zero_grad(); self.manual_backward(loss); first.step()
        self.untoggle_optimizer(first)
        loss = -self.judge(self.maker(batch).detach()).mean() + self.judge(batch).mean()
        second.zero_grad(); loss.backward()
        self.clip_gradients(second, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        second.step()
        self.lr_schedulers().step()
        self.log("judged", loss)
        self.logger.experiment.add_scalar("judged", loss)
    def configure_optimizers(self):
        adam = [torch.optim.Adam(part.parameters(), lr=0.1) for part in (self.maker, self.judge)]
        return adam, [torch.optim.lr_scheduler.StepLR(adam[0], 2)]
def build():
    return Gan(), rows
"""


def test_manual_optimization_gives_the_sum_of_its_losses_and_its_own_step(tmp_path):
    target = load_text(tmp_path, GAN)
    batch, before = target.batches[0], weights(target)
    maker, judge = target.model.maker, target.model.judge
    total = judge(maker(batch)).mean()
    total = total - judge(maker(batch).detach()).mean() + judge(batch).mean()
    loss, gradients = loss_and_gradients(target, batch)
    assert loss == pytest.approx(float(total.detach()), abs=1e-6) and len(gradients) == 4
    assert torch.equal(weights(target), before) and torch.Tensor.backward.__name__ == "backward"
    with preserved(target):
        target.train_step(target.model, batch, target.optimizer)
        assert not torch.equal(weights(target), before)
        assert len(target.optimizer.state) == 4  # the members' moments are the joined one's
    assert torch.equal(weights(target), before) and not target.optimizer.state
    assert not hasattr(vars(target.model), "log") and target.model._trainer is None


def test_a_module_that_skips_or_never_steps_back_is_named(tmp_path):
    skips = CONFIGURED.replace("return self.linear(batch).mean()", "return None")
    with pytest.raises(UsageError, match="training_step returned None; it must return the loss"):
        load_text(tmp_path, skips.replace("RETURN", "return sgd()"))
    still = GAN.replace("self.manual_backward(loss)", "0").replace("loss.backward()", "0")
    with pytest.raises(UsageError, match="called no backward; with automatic_optimization = False"):
        load_text(tmp_path, still)
    asks = CONFIGURED.replace("return self.linear", "self.trainer.fitting; return self.linear")
    with pytest.raises(UsageError, match="self.trainer.fitting is not known outside of a"):
        load_text(tmp_path, asks.replace("RETURN", "return sgd()"))


def test_the_hooks_of_a_module_take_part_in_its_step(tmp_path):
    """A zero_grad that clears nothing and a transfer that scales both show."""
    hooks = """
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch * 2
    def configure_optimizers(self):"""
    plain = CONFIGURED.replace("RETURN", "return sgd()")
    target = load_text(tmp_path, plain)
    hooked = load_text(tmp_path, plain.replace("\n    def configure_optimizers(self):", hooks))
    batch = target.batches[0]
    for found, times, scale in ((target, 1, 1), (hooked, 2, 2)):
        _, gradients = loss_and_gradients(found, batch)
        for _ in range(2):
            found.train_step(found.model, batch, found.optimizer)
        assert torch.allclose(found.model.linear.weight.grad, gradients[0] * times)
        assert torch.allclose(gradients[0], batch.mean(0, keepdim=True) * scale)


@pytest.mark.parametrize("own", [False, True], ids=["plain", "hook"])
def test_the_gradients_of_a_modules_step_are_there_when_step_is_called(own, tmp_path):
    body = CONFIGURED.replace("RETURN", "return sgd()")
    if own:
        hook = """
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
    def configure_optimizers(self):"""
        body = body.replace("\n    def configure_optimizers(self):", hook)
    target = load_text(tmp_path, body)
    seen, batch = [], target.batches[0]
    weight = target.model.linear.weight
    target.optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))
    before = weight.detach().clone()
    target.train_step(target.model, batch, target.optimizer)
    assert torch.allclose(seen[0], batch.mean(0, keepdim=True))
    assert torch.allclose(weight.detach(), before - 0.1 * seen[0])


def test_an_optimizer_that_asks_again_gets_a_new_loss(tmp_path):
    body = CONFIGURED.replace("RETURN", "return torch.optim.LBFGS(self.parameters(), max_iter=3)")
    body = body.replace("mean()", "square().mean()")
    target = load_text(tmp_path, body)
    batch = target.batches[0]
    first = float(target.loss_fn(target.model, batch).detach())
    target.train_step(target.model, batch, target.optimizer)
    assert float(target.loss_fn(target.model, batch).detach()) < 0.5 * first


def test_a_modules_evaluation_is_its_validation_step_without_gradients(tmp_path):
    target = load(MODULE, tmp_path)
    seen = []
    target.model.body[0].register_forward_hook(
        lambda m, *_: seen.append((m.training, torch.is_grad_enabled()))
    )
    target.evaluate(target.model, list(target.batches))
    assert set(seen) == {(False, False)} and target.model.training


def test_a_copy_of_a_module_is_trained_apart(tmp_path):
    target = load(MODULE, tmp_path)
    twin = copy.deepcopy(target.model)
    before = weights(target)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    target.train_step(twin, next(iter(target.batches)), optimizer)
    assert torch.equal(weights(target), before)


def test_joined_optimizers_step_save_and_load_as_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    twin = copy.deepcopy(model)

    def joined(net):
        return JoinedOptimizer(
            [torch.optim.Adam(net[0].parameters()), torch.optim.SGD(net[1].parameters(), 0.1, 0.9)]
        )

    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    first, second = joined(model), joined(twin)
    step(model, first)
    assert len(first.param_groups) == 2 and len(first.state) == 4
    twin.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.members[0].param_groups[0] is second.param_groups[0]
    for net, optimizer in ((model, first), (twin, second)):
        step(net, optimizer)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert first.members[0].state is first.state


def test_the_same_model_at_every_call_is_read_anew_or_refused(tmp_path):
    at_the_top = """
    model = nn.Linear(4, 1)
    def build():
        return {"model": model, "batches": rows, "loss_fn": lambda m, b: m(b).mean()}
    """
    target = load_text(tmp_path, at_the_top, device="cpu")
    other = target.rebuild(5)
    assert not torch.equal(weights(target), weights(other))
    assert torch.equal(weights(other), weights(target.rebuild(5)))
    assert torch.equal(weights(load_text(tmp_path, at_the_top)), weights(target))
    (tmp_path / "kept.py").write_text("import torch\nmodel = torch.nn.Linear(4, 1)\n")
    elsewhere = at_the_top.replace("model = nn.Linear(4, 1)", "from kept import model")
    with pytest.raises(UsageError, match="returns the same model at every call"):
        load_text(tmp_path, elsewhere).rebuild(1)


WRONG = {
    "unknown": ("{'modle': net, 'batches': rows}", "key 'modle'.*did you mean model?"),
    "missing": ("{'model': net}", "a dict without batches; it must return"),
    "step": ("(net, rows, loss, None), train_step=3", "returned a int as train_step"),
    "evaluate": ("(net, rows, loss, None), evaluate=3", "returned a int as evaluate"),
    "scheduler": ("(net, rows, loss, None), scheduler=3", "as scheduler; it must have step"),
    "steps": ("(net, rows, loss, None), total_steps=0", "total_steps 0; it must be a whole"),
    "data": ("(net, rows, loss, None), data=(1, 2)", "as data; it must be .inputs, labels"),
    "pair": ("(net, rows)", r"a tuple of 2 \(Linear, list\); it must return"),
    "pair-tensor": ("(hf, rows)", "a batch is a Tensor of shape .* it must be a dict"),
    "pair-lossless": ("(hf, [{'x': rows[0]}])", "gave a Tensor.* without a loss"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_form_is_named(case, tmp_path):
    returned, words = WRONG[case]
    parts, _, extra = returned.partition("), ")
    body = f"""
    def join(parts, **extra):
        return {{**dict(zip(["model", "batches", "loss_fn", "optimizer"], parts)), **extra}}
    def build():
        net = nn.Linear(4, 1)
        hf = nn.Linear(4, 1); hf.config = 1; hf.forward = lambda x: x
        loss = lambda m, b: m(b).mean()
        return {f"join({parts}), {extra})" if extra else returned}
    """
    with pytest.raises(UsageError, match=words):
        load_text(tmp_path, body)


def test_without_a_probe_the_data_may_break_the_loss_but_not_its_type(tmp_path):
    body = """
    def build():
        loss = lambda m, b: nn.functional.cross_entropy(m(b), torch.tensor([7, 0]))
        return nn.Linear(4, 3), rows, loss
    """
    with pytest.raises(UsageError, match="Target 7 is out of bounds"):
        load_text(tmp_path, body)
    assert load_text(tmp_path, body, probe=False).kind == "foreign"
    vector = body.replace("nn.functional.cross_entropy(m(b), torch.tensor([7, 0]))", "m(b)")
    with pytest.raises(UsageError, match=r"shape \(2, 3\)"):
        load_text(tmp_path, vector, probe=False)


def test_state_in_lists_and_plain_tensors_of_a_module_is_put_back(tmp_path):
    body = """
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen, self.total = nn.Linear(4, 1), [], torch.zeros(1)
        def forward(self, x):
            self.seen.append(1)
            self.total += 1
            return self.linear(x)
    def build():
        return Counts(), rows, lambda m, b: m(b).mean()
    """
    target = load_text(tmp_path, body)
    assert target.model.seen == [] and float(target.model.total) == 0.0
    with preserved(target):
        target.loss_fn(target.model, target.batches[0])
        assert target.model.seen == [1] and float(target.model.total) == 1.0
    assert target.model.seen == [] and float(target.model.total) == 0.0


def test_a_datamodule_may_stand_for_the_dataloader(tmp_path):
    body = CONFIGURED.replace("RETURN", "return sgd()").replace(
        "return Net(), rows", "return Net(), Data()"
    )
    body += """
class Data(pl.LightningDataModule):
    def setup(self, stage): self.rows = rows
    def train_dataloader(self): return self.rows
"""
    assert load_text(tmp_path, body).batches[0].shape == (2, 4)
    assert pl.__version__ == "2.6.6"


REFERENCES = processes.EXAMPLE_CHECK.parent


def blocks(page):
    text = (REFERENCES / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_adapters_of_the_reference_run_as_they_stand(tmp_path):
    found = dict(blocks("adapters.md"))
    names = ["loop_target.py", "lightning_target.py", "trainer_target.py", "engine_target.py"]
    assert list(found) == names
    for name, source in found.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
        target = load(f"{tmp_path / name}:build", tmp_path)
        batch, before = next(iter(target.batches)), weights(target)
        with preserved(target):
            loss_and_gradients(target, batch)
            if name != "trainer_target.py":
                target.train_step(target.model, batch, target.optimizer)
                assert not torch.equal(weights(target), before)
        assert torch.equal(weights(target), before)
        assert not torch.equal(weights(target.rebuild(1)), before)


def test_the_script_of_the_reference_runs_as_it_stands(tmp_path):
    ((name, source),) = blocks("scripts.md")
    folder = tmp_path / "skills" / "seeds" / "scripts"
    folder.mkdir(parents=True)
    (tmp_path / "skills" / "custom-check").symlink_to(REFERENCES.parent)
    (folder / name).write_text(source, encoding="utf-8")
    done = processes.run(folder / name, "--jobs", 2, cwd=tmp_path)
    assert done.returncode == 0 and "pass     loss-spread" in done.stdout, done.stderr
    again = processes.run(folder / name, "--jobs", 2, cwd=tmp_path)
    assert "all 3 jobs were done before, nothing is run" in again.stderr
    more = processes.run(folder / name, "--jobs", 2, "--seeds", 4, cwd=tmp_path)
    assert "1 jobs on CPU 0, CPU 1; 3 were done before" in more.stderr


@pytest.mark.parametrize("spec", [LOOP, TRAINER], ids=["loop", "trainer"])
def test_a_check_runs_on_a_foreign_project_of_each_kind(spec, tmp_path):
    check = f"{processes.EXAMPLE_CHECK}:check_gradients"
    done = processes.run(
        processes.CUSTOM_CHECK, "--check", check, "--target", spec, "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [check["verdict"] for check in report["checks"]] == ["pass", "pass"]


def test_a_project_of_a_conda_environment_is_checked_from_a_python_without_torch(tmp_path):
    """`python3` first in PATH has no torch; the active environment, no .venv, has it."""
    conda = tmp_path / "miniforge" / "envs" / "vision"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(conda)], check=True)
    (conda / "conda-meta").mkdir()
    (conda / "conda-meta" / "history").touch()
    (site,) = conda.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    bare = tmp_path / "usr"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    work = tmp_path / "work"
    shutil.copytree(processes.TARGETS, work / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (work / "src" / "__init__.py").unlink()
    words = ["--check", f"{processes.EXAMPLE_CHECK}:check_gradients"]
    words += ["--target", "src/lightning_project.py:make", "--json"]
    done = subprocess.run(
        ["/usr/bin/env", "python3", str(processes.CUSTOM_CHECK), *words],
        cwd=work,
        env=processes.environment(
            PATH=f"{bare / 'bin'}:{os.environ['PATH']}",
            CONDA_PREFIX=str(conda),
            CONDA_DEFAULT_ENV="vision",
        ),
        capture_output=True,
        text=True,
        timeout=processes.TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"python: going on with {conda / 'bin' / 'python'}" in done.stderr
    assert f"python: {conda / 'bin' / 'python'}, torch" in done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass" and report["numbers"]["parameters"] == 95


def test_a_module_that_the_python_lacks_is_named_with_the_flag_to_set(tmp_path):
    with pytest.raises(
        UsageError, match=r"No module named 'jaxx'; set --python to the python that"
    ):
        load_text(tmp_path, "import jaxx")


def test_a_stepped_scheduler_is_put_back(tmp_path):
    target = load(LOOP, tmp_path)
    before = copy.deepcopy(target.scheduler.state_dict())
    rate = target.optimizer.param_groups[0]["lr"]
    with preserved(target):
        target.optimizer.step()
        for _ in range(5):
            target.scheduler.step()
        assert target.optimizer.param_groups[0]["lr"] != rate
    assert target.scheduler.state_dict() == before
    assert target.optimizer.param_groups[0]["lr"] == rate
