"""The recipe gives one process's gradients, and every fault of a loop is named, nothing else."""

from __future__ import annotations

import difflib
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from skills.targets import fabric_loops, processes
from skills.targets.processes import ROOT

FOLDER = ROOT / "skills" / "fabric-setup"
SCRIPT = FOLDER / "scripts" / "fabric_setup.py"
RECIPE = FOLDER / "references" / "recipe.md"
TEMPLATE = ROOT / "template"
FULL = "CURRY_TRAIN_FULL" in os.environ


def block(name):
    """Return a python block of the recipe by its first line."""
    blocks = re.findall(r"^```python\n(.*?)^```", RECIPE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [text for text in blocks if text.startswith(f"# {name}\n")]
    return found


BEFORE, AFTER = block("before.py"), block("after.py")


# The recipe


def gradients_of_one_step(batch_size, call):
    """Run a loop up to its first optimizer step and return the clipped gradients."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    found = []

    class Stop(BaseException):
        pass

    def keep(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                found.append(grad.detach().double().numpy().copy())
        raise Stop

    torch.set_num_threads(1)
    handle = register_optimizer_step_pre_hook(keep)
    try:
        call(batch_size)
    except Stop:
        pass
    finally:
        handle.remove()
    return found


def run_recipe(rank, world, path, strategy, precision):
    """Run after.py on this rank; returns the first step's gradients or the error's text."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        TORCHELASTIC_RUN_ID="recipe", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip
    from lightning_fabric import Fabric

    script = runpy.run_path(path)
    chosen = script["sharded"]() if strategy == "sharded" else strategy
    try:
        fabric = Fabric(accelerator="cpu", devices=world, strategy=chosen, precision=precision)
        fabric.launch()
        batch_size = script["BATCH_SIZE"] // world
        return gradients_of_one_step(batch_size, lambda size: script["train"](fabric, size))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Run one world of after.py; without arguments, before.py."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(TEMPLATE)
    from curry_train.testing import run_ranks

    folder = tmp_path_factory.mktemp("recipe")
    for name, text in (("before.py", BEFORE), ("after.py", AFTER)):
        (folder / name).write_text(text)

    def run(world=None, strategy="auto", precision="32-true"):
        if world is None:
            train = runpy.run_path(str(folder / "before.py"))["train"]
            return gradients_of_one_step(8, train)
        path = str(folder / "after.py")
        ranks = run_ranks(run_recipe, world, path, strategy, precision, timeout=100)
        assert all(type(rank) is type(ranks[0]) for rank in ranks), ranks
        return ranks[0]

    yield run
    monkeypatch.undo()


@pytest.fixture(scope="module")
def reference(recipe):
    return recipe()


def largest_error(found, wanted):
    assert isinstance(found, list), found
    assert [g.shape for g in found] == [g.shape for g in wanted]
    return max(abs(f - w).max() / abs(w).max() for f, w in zip(found, wanted, strict=True))


BOUNDS = {"32-true": 1e-6, "bf16-mixed": 2e-2}
WORLDS = [(1, "auto"), (2, "ddp"), (2, "sharded"), (4, "ddp")]


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(("world", "strategy"), WORLDS)
def test_the_recipe_gives_the_gradients_of_the_script_before(
    world, strategy, precision, recipe, reference
):
    error = largest_error(recipe(world, strategy, precision), reference)
    assert error <= BOUNDS[precision]
    if precision == "bf16-mixed":
        assert error > 1e-5, "bf16 was not used"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("* (fabric.world_size / count)", "/ count"),
        ('count = fabric.all_reduce(count, reduce_op="sum")', "count = count * fabric.world_size"),
        ("DistributedSampler(data, drop_last=True, **share)", "None"),
    ],
)
def test_a_recipe_without_one_of_its_lines_is_seen(right, wrong, recipe, reference, tmp_path):
    from curry_train.testing import run_ranks

    assert right in AFTER
    (tmp_path / "wrong.py").write_text(AFTER.replace(right, wrong))
    path = str(tmp_path / "wrong.py")
    found = run_ranks(run_recipe, 2, path, "ddp", "32-true", timeout=100)[0]
    if wrong == "None":
        assert largest_error(found, reference) < 2, "Fabric's own sampler keeps the loader's order"
    assert largest_error(found, reference) > 1e-3


def test_fsdp1_is_refused_on_the_cpu_with_the_words_of_the_recipe(recipe):
    said = recipe(2, "fsdp")
    assert said.startswith("ValueError: You selected the FSDP strategy but FSDP is only available")
    plain = " ".join(RECIPE.read_text().split())
    assert "You selected the FSDP strategy but FSDP is only available on GPU" in plain


def test_exactly_the_marked_lines_of_the_recipe_changed():
    plain = [re.sub(r"  # <- \d+$", "", line) for line in AFTER.splitlines()]
    marked = {n for n, line in enumerate(AFTER.splitlines()) if re.search(r"  # <- \d+$", line)}
    matcher = difflib.SequenceMatcher(None, BEFORE.splitlines(), plain, autojunk=False)
    changed = {
        n
        for kind, _, _, start, end in matcher.get_opcodes()
        if kind != "equal"
        for n in range(start, end)
        if plain[n].strip() and n > 0
    }
    assert changed == marked
    numbers = {int(n) for n in re.findall(r"# <- (\d+)$", AFTER, re.MULTILINE)}
    explained = {int(n) for n in re.findall(r"^(\d+)\. ", RECIPE.read_text(), re.MULTILINE)}
    assert numbers == explained


@pytest.mark.skipif(not FULL, reason="starts seven interpreters (--full)")
def test_the_commands_of_the_recipe_print_the_same_losses(tmp_path):
    (tmp_path / "after.py").write_text(AFTER)
    (tmp_path / "before.py").write_text(BEFORE)
    (shell,) = re.findall(r"^```text\n(.*?)^```", RECIPE.read_text(), re.DOTALL | re.MULTILINE)
    said = []
    for number, line in enumerate(["python before.py", *shell.splitlines()]):
        words = line.split()
        port = [f"--main-port={29500 + os.getpid() % 1000 + number}"] if number > 1 else []
        program = [sys.executable]
        if words[0] == "fabric":
            program = [str(Path(sys.executable).parent / "fabric"), "run", *port]
        done = subprocess.run(
            [*program, *words[1 if words[0] == "python" else 2 :]],
            cwd=tmp_path, env=processes.environment(), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append([float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)])
    before, one, two, half, sharded = said
    assert len(one) == 5 and two == pytest.approx(one, abs=2e-4)
    assert sharded == pytest.approx(one, abs=2e-4) and half == pytest.approx(one, abs=0.02)
    assert before[:2] == pytest.approx(one[:2], abs=2e-4)


# The checker


def check(*paths, cwd):
    done = processes.run(SCRIPT, "--check", *paths, "--json", cwd=cwd)
    assert done.returncode in (0, 1, 3), done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1, "unclear": 3}[report["verdict"]]
    return report


CLEAN = {
    "recipe": AFTER,
    "class": fabric_loops.CLASS,
    "functional": fabric_loops.FUNCTIONAL,
    "gan": fabric_loops.GAN,
    "mnist": fabric_loops.MNIST,
    "pretrain": fabric_loops.PRETRAIN,
    "finetune": fabric_loops.FINETUNE,
    "inherited": fabric_loops.INHERITED,
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_sound_loop_has_no_finding(name, tmp_path):
    (tmp_path / f"{name}.py").write_text(CLEAN[name])
    report = check(f"{name}.py", cwd=tmp_path)
    assert [c for c in report["checks"] if c["verdict"] != "pass"] == []
    assert report["verdict"] == "pass"


FILES = ["train.py", "curry_train/launch.py", "curry_train/step.py"]


@pytest.mark.parametrize("names", [FILES, FILES[2:]], ids=["three", "step"])
def test_the_template_sums_its_own_gradients_and_has_no_finding(names, tmp_path):
    report = check(*(TEMPLATE / name for name in names), cwd=tmp_path)
    assert report["verdict"] == "pass"
    assert [c["id"] for c in report["checks"] if c["verdict"] == "fail"] == []
    assert "sums its own gradients (step.py:" in report["evidence"][0]


@pytest.mark.parametrize("name", FILES[:2])
def test_a_part_of_the_template_holds_no_loop(name, tmp_path):
    report = check(TEMPLATE / name, cwd=tmp_path)
    assert report["verdict"] == "unclear" and "no training loop found" in report["summary"]


FAULTS = [
    # ids, the clean loop, (old, new) pairs, words of the message
    ("fabric-model-setup", "class", [
        ("self.fabric.setup_module(Net())", "Net()"),
    ], "never set up"),
    ("fabric-model-setup fabric-optimizer-setup", "functional", [
        ("model, optimizer = fabric.setup(model, optimizer)", "fabric.setup(model, optimizer)"),
    ], "thrown away"),
    ("fabric-model-setup", "gan", [
        (
            "generator, opt_g = fabric.setup(generator, opt_g)",
            "opt_g = fabric.setup_optimizers(opt_g)",
        ),
    ], "generator is trained but never set up"),
    ("fabric-optimizer-setup", "class", [
        ("        self.optimizer = self.fabric.setup_optimizers(self.optimizer)\n", ""),
    ], "steps without being set up"),
    ("fabric-optimizer-setup", "functional", [
        ("model, optimizer = fabric.setup(model, optimizer)", "model = fabric.setup(model)"),
    ], "steps without being set up"),
    ("fabric-optimizer-order", "recipe", [
        ("model = fabric.setup_module(build_model())  # <- 4", "model = build_model()"),
        (
            "optimizer = "
            "fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))",
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
            "    model, optimizer = fabric.setup(model, optimizer)",
        ),
    ], "replaces the parameters"),
    ("fabric-optimizer-order", "recipe", [
        ("model = fabric.setup_module(build_model())  # <- 4", "model = build_model()"),
        (
            "optimizer = "
            "fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))",
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
            "    model = fabric.setup_module(model)\n"
            "    optimizer = fabric.setup_optimizers(optimizer)",
        ),
    ], "built before setup_module"),
    ("fabric-dataloaders", "class", [
        (
            "self.fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True))",
            "DataLoader(data, 4, shuffle=True)",
        ),
    ], "is not set up"),
    ("fabric-dataloaders", "functional", [
        (
            "train_loader, test_loader = fabric.setup_dataloaders(train_loader, "
            "test_loader)",
            "train_loader = fabric.setup_dataloaders(train_loader)",
        ),
    ], "all read all of it"),
    ("fabric-sampler", "gan", [
        ("        sampler.set_epoch(epoch)\n", ""),
    ], "set_epoch"),
    ("fabric-sampler", "class", [
        ("shuffle=True))", "shuffle=True), use_distributed_sampler=False)"),
    ], "use_distributed_sampler=False"),
    ("fabric-sampler", "gan", [
        (
            "from my_data import Faces",
            "from torch.utils.data import IterableDataset\n"
            "class Faces(IterableDataset):\n"
            "    def __iter__(self):\n"
            "        yield from range(9)",
        ),
        (
            "loader = DataLoader(faces, batch_size=16, sampler=sampler)",
            "loader = fabric.setup_dataloaders(DataLoader(faces, batch_size=16))",
        ),
    ], "same items in every process"),
    ("fabric-backward", "class", [
        ("self.fabric.backward(loss)", "loss.backward()"),
    ], "goes past"),
    ("fabric-backward", "functional", [
        ("fabric.backward(loss / every)", "(loss / every).backward()"),
    ], "goes past"),
    ("fabric-accumulation", "functional", [
        ("with fabric.no_backward_sync(model, enabled=is_accumulating):", "if True:"),
    ], "every micro-batch reduces"),
    ("fabric-accumulation", "recipe", [
        ("with fabric.no_backward_sync(model, enabled=number < ACCUMULATE):", "if True:"),
    ], "every micro-batch reduces"),
    ("fabric-accumulation", "functional", [
        (
            "        is_accumulating = (i + 1)",
            "        optimizer.zero_grad()\n"
            "        is_accumulating = (i + 1)",
        ),
    ], "throws away"),
    ("fabric-clip", "class", [
        (
            "self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)",
            "torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)",
        ),
    ], "no loss scale"),
    ("fabric-zero-grad", "class", [
        ("        self.optimizer.zero_grad()\n", ""),
    ], "is missing"),
    ("fabric-zero-grad", "class", [
        (
            "        self.optimizer.step()\n"
            "        self.optimizer.zero_grad()",
            "        self.optimizer.zero_grad()\n"
            "        self.optimizer.step()",
        ),
    ], "between backward and step"),
    ("fabric-zero-grad", "recipe", [
        ("            optimizer.zero_grad()\n", ""),
        (
            "    torch.manual_seed(SEED + 1",
            "    optimizer.zero_grad()\n"
            "    torch.manual_seed(SEED + 1",
        ),
    ], "outside of the loop"),
    ("fabric-grad-scaling", "class", [
        (
            "import torch\n",
            "import torch\n"
            "from torch.amp import GradScaler\n"
            "scaler = GradScaler()\n",
        ),
    ], "beside Fabric's"),
    ("fabric-grad-scaling", "functional", [
        ("loss / every", "loss / every / fabric.world_size"),
    ], "number of processes"),
    ("fabric-grad-scaling", "class", [
        (
            "        self.fabric.clip",
            "        for p in self.model.parameters():\n"
            "            torch.distributed.all_reduce(p.grad)\n"
            "        self.fabric.clip",
        ),
    ], "by hand"),
    ("fabric-forward-methods", "class", [
        ("self.model(x), y)", "self.model.features(x), y)"),
    ], "outside of forward"),
    ("fabric-forward-methods", "functional", [
        (
            "F.cross_entropy(model(x), y)\n"
            "\n",
            "F.cross_entropy(model.module(x), y)\n"
            "\n",
        ),
    ], "past DDP"),
    ("fabric-device-moves", "class", [
        ("loss = self.step(x, y)", "loss = self.step(x.cuda(), y)"),
    ], "by hand"),
    ("fabric-device-moves", "functional", [
        (
            "    x, y = batch\n"
            "    return",
            "    x, y = batch\n"
            '    x = x.to(torch.device("cuda" if torch.cuda.is_available() else '
            '"cpu"))\n'
            "    return",
        ),
    ], "by hand"),
    ("fabric-device-moves", "gan", [
        ("device=fabric.device", 'device="cuda:0"'),
    ], "by hand"),
    ("fabric-autocast", "functional", [
        (
            "            loss = compute_loss(model, batch)",
            '            with torch.autocast("cuda", dtype=torch.bfloat16):\n'
            "                loss = compute_loss(model, batch)",
        ),
    ], "beside precision='bf16-mixed'"),
    ("fabric-launch", "class", [
        (
            '        if "LT_CLI_USED" not in os.environ:\n'
            "            self.fabric.launch()\n",
            "",
        ),
    ], "launch is missing"),
    ("fabric-launch", "class", [
        (
            '        if "LT_CLI_USED" not in os.environ:\n'
            "            self.fabric.launch()\n",
            "        self.fabric.launch()\n",
        ),
    ], "under fabric run"),
    ("fabric-cli-conflict", "class", [
        ("Fabric()", "Fabric(devices=2)"),
    ], "devices=2"),
    ("fabric-seed", "functional", [
        ("    L.seed_everything(7)\n", ""),
    ], "no seed"),
    ("fabric-seed", "functional", [
        ("seed_everything(7)", "seed_everything(7 + fabric.global_rank)"),
    ], "differs by rank"),
    ("fabric-seed", "class", [
        ("        torch.manual_seed(2 + self.fabric.global_rank)\n", ""),
    ], "equal noise"),
    ("fabric-seed", "gan", [
        ("    torch.manual_seed(4 + fabric.global_rank)\n", ""),
    ], "equal noise"),
    ("fabric-rank-zero", "class", [
        ("self.fabric.print(epoch", "print(epoch"),
    ], "calls print"),
    ("fabric-rank-zero", "functional", [
        (
            "    if fabric.global_rank == 0:\n"
            "        save_weights",
            "    save_weights",
        ),
    ], "calls torch.save"),
    ("fabric-collectives", "class", [
        (
            "            self.fabric.save(",
            "            if self.fabric.is_global_zero:\n"
            "                self.fabric.save(",
        ),
    ], "waits for all"),
    ("fabric-metrics", "class", [
        ('all_reduce(correct, reduce_op="sum")', "all_reduce(correct)"),
    ], "takes the mean"),
    ("fabric-metrics", "functional", [
        ('    total_loss = fabric.all_reduce(total_loss, reduce_op="sum")\n', ""),
        (
            'return total_loss / fabric.all_reduce(total, reduce_op="sum")',
            "return fabric.all_reduce(total_loss / total)",
        ),
    ], "mean of means"),
    ("fabric-backward", "mnist", [
        (
            "fabric.backward(loss)",
            "loss.backward()",
        ),
    ], ""),
    ("fabric-optimizer-setup", "mnist", [
        (
            "model, optimizer = fabric.setup(model, optimizer)",
            "model = fabric.setup_module(model)",
        ),
    ], ""),
    ("fabric-dataloaders", "mnist", [
        (
            "    train_loader, test_loader = "
            "fabric.setup_dataloaders(train_loader, test_loader)\n",
            "",
        ),
    ], ""),
    ("fabric-model-setup", "mnist", [
        (
            "model, optimizer = fabric.setup(model, optimizer)",
            "fmodel, optimizer = fabric.setup(model, optimizer)",
        ),
    ], ""),
    ("fabric-zero-grad", "mnist", [
        (
            "            optimizer.zero_grad()\n",
            "",
        ),
    ], ""),
    ("fabric-rank-zero", "mnist", [
        (
            "fabric.save(",
            "torch.save(",
        ),
    ], ""),
    ("fabric-metrics", "mnist", [
        (
            'test_loss = fabric.all_reduce(torch.tensor(test_loss), reduce_op="sum")\n'
            "        test_loss = test_loss / len(test_loader.dataset)",
            "test_loss = fabric.all_reduce(test_loss / len(test_loader))",
        ),
    ], ""),
    ("fabric-seed", "mnist", [
        (
            "seed_everything(hparams.seed)",
            "pass",
        ),
    ], ""),
    ("fabric-device-moves", "mnist", [
        (
            "output = model(data)\n"
            "            loss",
            "output = model(data.to('cuda'))\n"
            "            loss",
        ),
    ], ""),
    ("fabric-cli-conflict", "mnist", [
        (
            "Fabric()",
            "Fabric(accelerator='cuda', devices=4, strategy='ddp')",
        ),
    ], ""),
    ("fabric-accumulation", "pretrain", [
        (
            "with fabric.no_backward_sync(model, enabled=is_accumulating):",
            "if 1:",
        ),
    ], ""),
    ("fabric-clip", "pretrain", [
        (
            "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        ),
    ], ""),
    ("fabric-collectives", "pretrain", [
        (
            "            fabric.barrier()\n"
            "            fabric.save",
            "            if fabric.global_rank == 0:\n"
            "              fabric.save",
        ),
    ], ""),
    ("fabric-grad-scaling", "pretrain", [
        (
            "loss / accumulate)",
            "loss / (accumulate * fabric.world_size))",
        ),
    ], ""),
    ("fabric-device-moves fabric-model-setup", "pretrain", [
        (
            "model = fabric.setup(model)",
            "model = model.cuda()",
        ),
    ], ""),
    ("fabric-zero-grad", "pretrain", [
        (
            "            optimizer.zero_grad()\n",
            "",
        ),
    ], ""),
    ("fabric-rank-zero", "pretrain", [
        (
            "fabric.print(",
            "print(",
        ),
    ], ""),
    ("fabric-autocast", "pretrain", [
        (
            "logits = model(inputs)",
            "with torch.autocast('cuda', dtype=torch.bfloat16): logits = "
            "model(inputs)",
        ),
    ], ""),
    ("fabric-seed", "pretrain", [
        (
            "    fabric.seed_everything(args.seed)\n",
            "    fabric.seed_everything(args.seed + fabric.global_rank)\n",
        ),
    ], ""),
    ("fabric-optimizer-setup", "finetune", [
        (
            "    model, optimizer = fabric.setup(model, optimizer)\n",
            "    model = fabric.setup(model)\n",
        ),
    ], ""),
    ("fabric-model-setup fabric-optimizer-setup", "finetune", [
        (
            "    model, optimizer = fabric.setup(model, optimizer)\n",
            "",
        ),
    ], ""),
    ("fabric-dataloaders", "finetune", [
        ("    dl = fabric.setup_dataloaders(dl)\n", ""),
    ], ""),
    ("fabric-metrics", "finetune", [
        (
            'token_count, reduce_op="sum"',
            "token_count",
        ),
    ], ""),
    ("fabric-forward-methods", "finetune", [
        (
            "out = model(**batch",
            "out = model.module(**batch",
        ),
    ], ""),
    ("fabric-grad-scaling", "finetune", [
        (
            "            loss = out.loss\n",
            "            loss = out.loss\n"
            "            scaler = torch.cuda.amp.GradScaler()\n",
        ),
    ], ""),
    ("fabric-collectives", "finetune", [
        (
            "                tokens = fabric",
            "                if fabric.is_global_zero: tokens = fabric",
        ),
    ], ""),
    ("fabric-launch", "finetune", [
        (
            "fabric.launch()",
            "pass",
        ),
    ], ""),
    ("fabric-launch", "finetune", [
        (
            '    if os.environ.get("LT_CLI_USED") is None:\n'
            "        fabric.launch()",
            "    fabric.launch()",
        ),
    ], ""),
    ("fabric-forward-methods", "inherited", [
        (
            '        self.model.mark_forward_method("predict")\n',
            "",
        ),
    ], ""),
    ("fabric-backward", "inherited", [
        (
            "                self.fabric.backward(loss)",
            "                loss.backward()",
        ),
    ], ""),
    ("fabric-zero-grad", "inherited", [
        (
            "                self.optimizer.zero_grad()\n",
            "",
        ),
    ], ""),
    ("fabric-rank-zero", "inherited", [
        (
            "self.fabric.save(",
            "torch.save(",
        ),
    ], ""),
    ("fabric-model-setup fabric-optimizer-setup", "inherited", [
        (
            "return self.fabric.setup(model, opt)",
            "return model, opt",
        ),
    ], ""),
    ("fabric-dataloaders", "inherited", [
        (
            "self.fabric.setup_dataloaders(DataLoader(tr, 8, shuffle=True), "
            "DataLoader(va, 8))",
            "DataLoader(tr, 8, shuffle=True), DataLoader(va, 8)",
        ),
    ], ""),
    ("fabric-metrics", "inherited", [
        (
            "return (se / n).item()",
            "return self.fabric.all_reduce(torch.tensor(se / n)).item()",
        ),
    ], ""),
    ("fabric-seed", "inherited", [
        (
            "nn.ReLU()",
            "nn.Dropout(0.1)",
        ),
    ], ""),
]  # fmt: skip


def planted(clean, edits):
    text = CLEAN[clean]
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Judge code in this process, which saves forty starts."""
    sys.path.insert(0, str(SCRIPT.parent))
    import fabric_setup

    from kit.report import Report

    folder = tmp_path_factory.mktemp("judged")

    def judge(text, name="loop.py"):
        (folder / name).write_text(text)
        report = Report("fabric-setup")
        fabric_setup.check_files(report, [fabric_setup.read(folder / name)])
        return report

    yield judge
    sys.path.remove(str(SCRIPT.parent))


@pytest.mark.parametrize(
    ("id", "clean", "edits", "words"), FAULTS, ids=[f"{f[0]}-{n}" for n, f in enumerate(FAULTS)]
)
def test_a_planted_fault_is_named_and_nothing_else(id, clean, edits, words, judged):
    report = judged(planted(clean, edits))
    failed = [c for c in report.checks if c["verdict"] == "fail"]
    assert {c["id"] for c in failed} == set(id.split()), [(c["id"], c["message"]) for c in failed]
    assert any(words in c["message"] for c in failed), [c["message"] for c in failed]
    for found in failed:
        assert found["fix"]["file"].endswith("loop.py") and found["fix"]["text"]
        assert 1 < found["fix"]["line"] <= planted(clean, edits).count("\n")


def test_every_rule_has_a_planted_fault():
    sys.path.insert(0, str(SCRIPT.parent))
    import fabric_setup

    assert {id for fault in FAULTS for id in fault[0].split()} == set(fabric_setup.RULES)


def test_what_cannot_be_followed_is_not_judged(judged):
    text = textwrap.dedent("""
        def fit(fabric, model, loader, optimizer, device):
            for x, y in loader:
                loss = model.loss(x.to(device), y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    """)
    assert judged(text).verdict == "pass"


def test_several_files_are_one_program(tmp_path):
    head, tail = fabric_loops.FUNCTIONAL.split("def main():")
    (tmp_path / "loop.py").write_text(head)
    (tmp_path / "main.py").write_text(
        "import os, argparse, torch\nimport lightning as L\n"
        "from loop import make_loaders, train_epoch, test, save_weights\n"
        "from my_models import build\n\ndef main():" + tail
    )
    assert check("main.py", "loop.py", cwd=tmp_path)["verdict"] == "pass"
    broken = (
        (tmp_path / "main.py").read_text().replace("fabric.setup(model, optimizer)", "model, 0")
    )
    (tmp_path / "main.py").write_text(broken)
    report = check("main.py", "loop.py", cwd=tmp_path)
    assert "fabric-model-setup" in {c["id"] for c in report["checks"] if c["verdict"] == "fail"}


def test_the_script_before_is_told_line_by_line(judged):
    report = judged(BEFORE)
    failed = {c["id"] for c in report.checks if c["verdict"] == "fail"}
    assert failed == {
        "fabric-model-setup", "fabric-optimizer-setup", "fabric-backward", "fabric-accumulation",
        "fabric-clip", "fabric-device-moves", "fabric-rank-zero", "fabric-dataloaders",
    }  # fmt: skip
    lines = BEFORE.splitlines()
    for found in report.checks:
        if found["id"] == "fabric-backward":
            assert lines[found["fix"]["line"] - 1].strip() == "loss.backward()"
            assert found["fix"]["text"] == "fabric.backward(loss)"


def test_a_loop_by_hand_is_told_what_to_remove(judged):
    report = judged(fabric_loops.BY_HAND)
    said = {(c["id"], c["message"]) for c in report.checks if c["verdict"] == "fail"}
    assert ("fabric-model-setup", "DDP by hand wraps what setup wraps") in said
    assert ("fabric-launch", "opens the process group by hand") in said
    assert (
        "fabric-dataloaders",
        "this DataLoader is not set up: nothing moves its batches",
    ) in said
    (backward,) = [c for c in report.checks if c["id"] == "fabric-backward"]
    assert backward["fix"]["text"] == "fabric.backward(loss)"
    ids = {id for id, _ in said}
    assert {"fabric-clip", "fabric-grad-scaling", "fabric-device-moves", "fabric-autocast"} <= ids
    assert "fabric-rank-zero" not in ids and "fabric-zero-grad" not in ids


def test_a_ratio_of_two_means_and_a_reduced_loss_are_right(judged):
    text = planted("inherited", [(', reduce_op="sum"', "")])
    assert judged(text).verdict == "pass"
    text = planted("mnist", [("loss.item())", "fabric.all_reduce(loss.detach()))")])
    assert judged(text).verdict == "pass"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import lightning as L\ntrainer = L.Trainer(max_epochs=1)\ntrainer.fit(1)\n",
            "is no raw loop: lightning.Trainer in line 2",
        ),
        (
            "from pytorch_lightning import LightningModule\n\n\nclass Net(LightningModule):\n"
            "    def training_step(self, batch):\n        return 1\n",
            "is no raw loop: Net(LightningModule) in line 4",
        ),
        ("from transformers import Trainer\nTrainer(model=1).train()\n", "transformers.Trainer"),
        ("x = 1\n", "no training loop found in loop.py"),
        ("", "no training loop found in loop.py"),
        ("loss.backward()\n", "no training loop found in loop.py"),
    ],
)
def test_a_file_without_a_raw_loop_is_unclear(text, words, judged):
    report = judged(text)
    assert report.verdict == "unclear" and words in report.summary


def test_files_that_are_no_python_and_bad_flags_exit_with_2(tmp_path):
    (tmp_path / "broken.py").write_text("import torch\nfor x in :\n    pass\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\nx = 1\n")
    (tmp_path / "null.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "notes.txt").write_text("x = 1\n")
    (tmp_path / "loop.py").write_text(AFTER)
    for words, message in [
        (["--check", "broken.py"], "syntax error in line 2"),
        (["--check", "latin.py"], "save it as UTF-8"),
        (["--check", "null.py"], "syntax error in line 1"),
        (["--check", "missing.py"], "there is no such file"),
        (["--check", "notes.txt"], "it takes files ending in .py"),
        ([], "set --check FILE.py ... or --run FILE.py:FUNCTION"),
        (["--run", "loop.py"], "--run takes FILE.py:FUNCTION"),
        (["--run", "loop.py:train", "--batch-size", 3], "it takes an even number"),
        (["--check", "loop.py", "--steps", 0], "both must be positive"),
        (["--check", "loop.py", "--target", "loop.py:train"], "reads a loop"),
    ]:
        done = processes.run(SCRIPT, *words, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr, (words, done.stderr)
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\nx = 1\n")
    assert check("latin.py", cwd=tmp_path)["verdict"] == "unclear", "a coding line is obeyed"


def test_a_check_needs_neither_torch_nor_a_project_and_imports_nothing(tmp_path):
    (tmp_path / "loop.py").write_text("raise SystemExit('imported')\n" + AFTER)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch')\n")
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(SCRIPT), "--check", "loop.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= 15 and "verdict: pass" in done.stdout


# Two processes against one

LOOPS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loop(fabric, batch_size, *, wrap=True, scale=1.0, raw=False, norm=False, ignore=False,
         reduce=False, shuffle=True):
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(40, 4, generator=draw), torch.randint(0, 3, (40,), generator=draw)
    if ignore:
        y[x[:, 0] > 0] = -100
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Dropout(0.5), nn.Linear(8, 3)]
    model = fabric.setup_module(nn.Sequential(*layers))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = DataLoader(TensorDataset(x, y), batch_size, shuffle=shuffle)
    loader = fabric.setup_dataloaders(loader) if wrap else loader
    net = model.module if raw else model
    for epoch in range(9):
        for x, y in loader:
            print("a loop may print")
            loss = nn.functional.cross_entropy(net(x), y) * scale
            fabric.backward(loss)
            if reduce:
                for p in net.parameters():
                    torch.distributed.all_reduce(p.grad)
            fabric.clip_gradients(model, optimizer, max_norm=1e-3)
            optimizer.step()
            optimizer.zero_grad()


def sound(fabric, batch_size):
    loop(fabric, batch_size)


def unsharded(fabric, batch_size):
    loop(fabric, batch_size, wrap=False)


def halved(fabric, batch_size):
    loop(fabric, batch_size, scale=1 / fabric.world_size)


def summed(fabric, batch_size):
    loop(fabric, batch_size, reduce=True)


def bypassed(fabric, batch_size):
    loop(fabric, batch_size, raw=True)


def normed(fabric, batch_size):
    loop(fabric, batch_size, norm=True)


def uneven(fabric, batch_size):
    loop(fabric, batch_size, ignore=True)


def fixed(fabric, batch_size):
    loop(fabric, 4)


def alone(fabric, batch_size):
    if fabric.global_rank:
        raise ValueError("only here")
    loop(fabric, batch_size)


def leaves(fabric, batch_size):
    if fabric.global_rank == 0:
        loop(fabric, batch_size)


def waits(fabric, batch_size):
    import time
    if fabric.world_size > 1:
        time.sleep(60)
    loop(fabric, batch_size)


def idle(fabric, batch_size):
    pass


def other(model):
    pass
"""
RUNS = [
    ("sound", set(), ""),
    ("unsharded", {"inputs", "loss", "gradients"}, "both processes read the same samples"),
    ("halved", {"loss", "gradients"}, "half of what it should be"),
    ("summed", {"gradients"}, "twice what it should be"),
    ("bypassed", {"loss", "gradients", "replicas"}, "each process keeps its own gradient"),
    ("normed", {"loss", "gradients"}, "batch norm takes its statistics per process"),
    ("uneven", {"loss", "gradients"}, "a mean of means"),
    ("alone", {"replicas"}, "rank 1 raised ValueError at loops.py:"),
    ("leaves", {"replicas"}, "rank 1 returned after 0 steps"),
    ("waits", {"replicas"}, "not done after 2 s"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, judged):
    """Run a function of LOOPS from this process."""
    import fabric_setup
    from loop_run import compare

    from kit import cli, job
    from kit.report import Report

    folder = tmp_path_factory.mktemp("measured")
    (folder / "loops.py").write_text(LOOPS)

    def run(name, timeout=60):
        parser = cli.build_parser("fabric-setup", None, fabric_setup.add_flags)
        words = ["--run", f"{folder / 'loops.py'}:{name}", "--timeout", str(timeout)]
        args = parser.parse_args(words)
        call = cli.Invocation("fabric-setup", args, folder, folder, job.Job(folder, "fabric-setup"))
        report = Report("fabric-setup")
        compare(call, report, fabric_setup.THRESHOLDS)
        return report

    return run


@pytest.mark.parametrize(("name", "ids", "words"), RUNS, ids=[run[0] for run in RUNS])
def test_two_processes_must_equal_one(name, ids, words, measured):
    report = measured(name, timeout=2 if name == "waits" else 60)
    failed = [c for c in report.checks if c["verdict"] == "fail"]
    assert {c["id"] for c in failed} == {f"fabric-run-{id}" for id in ids}
    assert words in " ".join(c["message"] for c in failed)
    if name == "sound":
        values = {c["id"]: c["value"] for c in report.checks}
        assert values["fabric-run-gradients"] < 1e-6 and values["fabric-run-inputs"] == 8
        assert report.evidence == ["dropout was switched off in both runs"]


def test_runs_that_cannot_be_compared(measured):
    from kit.errors import UsageError

    report = measured("fixed")
    assert report.verdict == "unclear" and "argument batch_size" in report.checks[0]["message"]
    for name, words in [("idle", "before its first optimizer step"), ("other", "takes FUNCTION(f")]:
        with pytest.raises(UsageError, match=re.escape(words)):
            measured(name)


def test_the_recipe_passes_its_own_run(tmp_path):
    (tmp_path / "after.py").write_text(AFTER)
    words = ["--check", "after.py", "--run", "after.py:train", "--json"]
    done = processes.run(SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    ids = [c["id"] for c in report["checks"]]
    assert {"fabric-loop", "fabric-run-gradients"} <= set(ids) and report["verdict"] == "pass"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after.py", "runs"]
