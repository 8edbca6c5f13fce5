"""Targets: the three foreign projects load; every wrong one is refused in one clear sentence."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest
import torch
from skills.targets import processes
from skills.targets.processes import CLASSIFIER, CUSTOM_CHECK, EXAMPLE_CHECK, LANGUAGE_MODEL, MLP

from kit.batches import count_targets, to_device
from kit.errors import UsageError
from kit.target import check_request, load_target

GOOD = """
import torch
from torch import nn
model = nn.Linear(4, 1)
batches = [torch.randn(2, 4)]
def loss_fn(model, batch):
    return model(batch).mean()
"""


def load(spec, folder, **options):
    settings = {"overrides": [], "seed": None, "device": "auto", **options}
    return load_target(folder, str(spec), **settings)


def write(folder, body, name="mine.py"):
    path = folder / name
    path.write_text(GOOD + textwrap.dedent(body), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("spec", "unit", "count", "optimizer"),
    [
        (MLP, "samples", 16, None),
        (CLASSIFIER, "samples", 12, "SGD"),
        (LANGUAGE_MODEL, "tokens", 40, "AdamW"),
    ],
    ids=["mlp", "cnn", "lm"],
)
def test_a_foreign_project_becomes_a_target(spec, unit, count, optimizer, tmp_path):
    target = load(spec, tmp_path)
    batch = next(iter(target.batches))
    assert target.loss_fn(target.model, batch).dim() == 0
    assert count_targets(batch) == (count, unit)
    assert (target.optimizer and type(target.optimizer).__name__) == optimizer
    assert (target.kind, target.runtime, target.device) == ("foreign", None, torch.device("cpu"))
    assert len(target.config_hash) == 64


def test_the_hash_follows_source_function_and_seed(tmp_path):
    spec = f"{write(tmp_path, 'def build(): return model, batches, loss_fn')}:build"
    first = load(spec, tmp_path).config_hash
    assert load(spec, tmp_path).config_hash == first
    assert load(spec, tmp_path, seed=1).config_hash != first
    write(tmp_path, "def build(): return model, batches, loss_fn  # changed")
    assert load(spec, tmp_path).config_hash != first


def test_the_seed_decides_the_weights_and_the_probe_uses_no_random_number(tmp_path):
    def weights(seed):
        return next(load(MLP, tmp_path, seed=seed).model.parameters())

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))
    load(MLP, tmp_path, seed=1)
    after = torch.rand(1)
    load(MLP, tmp_path, seed=1)
    assert torch.equal(after, torch.rand(1))


BAD_RETURNS = {
    "none": ("return None", "returned None; it must return (model, batches, loss_fn)"),
    "two": ("return model, batches", "returned a tuple of 2 (Linear, list)"),
    "five": ("return model, batches, loss_fn, None, 1", "returned a tuple of 5"),
    "dict": ("return {'model': model}", "returned a dict"),
    "model": (
        "return 'net', batches, loss_fn",
        "returned a str as model; it must be a torch.nn.Module",
    ),
    "class": ("return nn.Linear, batches, loss_fn", "returned a type as model"),
    "lazy": ("return nn.LazyLinear(1), batches, loss_fn", "lazy parameters"),
    "script": ("return torch.jit.script(model), batches, loss_fn", "TorchScript in it"),
    "inference": (
        "with torch.inference_mode(): return nn.Linear(4, 1), batches, loss_fn",
        "made under torch.inference_mode",
    ),
    "number": ("return model, 7, loss_fn", "returned a int as batches"),
    "tensor": ("return model, batches[0], loss_fn", "of shape (2, 4) and torch.float32 as batches"),
    "one-dict": ("return model, {'x': batches[0]}, loss_fn", "wrap it: [batch]"),
    "generator": ("return model, (b for b in batches), loss_fn", "can be read once only"),
    "iterator": ("return model, iter(batches), loss_fn", "can be read once only"),
    "empty": ("return model, [], loss_fn", "empty batches; there must be at least one"),
    "loss": ("return model, batches, 3", "returned a int as loss_fn"),
    "vector": ("return model, batches, lambda m, b: m(b)", "shape (2, 1) and torch.float32"),
    "float": (
        "return model, batches, lambda m, b: 1.5",
        "returned a float; it must return a scalar",
    ),
    "pair": ("return model, batches, lambda m, b: (m(b).mean(), 1)", "a tuple of 2 (Tensor, int)"),
    "integer": (
        "return model, batches, lambda m, b: torch.tensor(3)",
        "torch.int64; it must return",
    ),
    "optimizer": ("return model, batches, loss_fn, 'adam'", "returned a str as optimizer"),
    "raises": ("raise KeyError('lost')", "mine.py:build raised KeyError: 'lost'"),
    "exits": ("raise SystemExit(3)", "guard script code by if __name__"),
    "loss-raises": (
        "return model, batches, lambda m, b: m(b[:, :3]).mean()",
        "loss_fn of mine.py:build raised",
    ),
}


@pytest.mark.parametrize("case", BAD_RETURNS)
def test_a_wrong_return_is_named_with_what_is_allowed(case, tmp_path):
    body, words = BAD_RETURNS[case]
    path = write(tmp_path, f"def build():\n    {body}\n")
    with pytest.raises(UsageError) as caught:
        load(f"{path}:build", tmp_path)
    assert words in str(caught.value) and "mine.py:build" in str(caught.value)


BAD_FILES = {
    "syntax": ("def build(:", "importing mine.py raised SyntaxError", "mine.py:9"),
    "import": (
        "import no_such_module",
        "ModuleNotFoundError: No module named 'no_such_module'",
        "mine.py:9",
    ),
    "module-level": (
        "1 / 0",
        "importing mine.py raised ZeroDivisionError",
        "mine.py:9 in <module>: 1 / 0",
    ),
    "argument": ("def build(path): pass", "needs arguments (path); it is called without any", ""),
    "near": ("def biuld(): pass", "has no function build; did you mean biuld?", ""),
    "none": ("other = 1", "has no function build; it defines loss_fn", ""),
    "no-function": ("build = 3", "build is a int; it must be a function", ""),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_wrong_file_is_named_with_its_line(case, tmp_path):
    body, words, where = BAD_FILES[case]
    path = write(tmp_path, f"\n{body}\n")
    with pytest.raises(UsageError) as caught:
        load(f"{path}:build", tmp_path)
    assert words in str(caught.value) and where in str(caught.value)


def test_the_last_frame_of_user_code_is_shown_not_that_of_a_library(tmp_path):
    path = write(
        tmp_path,
        "def build():\n    return model, batches, wrong\ndef wrong(m, b):\n    return m(b.T)\n",
    )
    with pytest.raises(UsageError) as caught:
        load(f"{path}:build", tmp_path)
    assert caught.value.where.endswith("in wrong: return m(b.T)")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mine.py", "takes FILE.py:FUNCTION; name the function"),
        ("mine.py:", "takes FILE.py:FUNCTION"),
        ("gone.py:build", "there is no file gone.py"),
        (".:build", "is no Python file"),
        ("notes.txt:build", "is no Python file"),
        ("mine.py:a-b", "takes FILE.py:FUNCTION"),
    ],
)
def test_a_wrong_target_is_refused_before_torch_is_needed(spec, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        check_request(tmp_path, spec, [], "auto")


def test_flags_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--set optim.lr=1 with --target; overrides belong to a"):
        check_request(tmp_path, MLP, ["optim.lr=1"], "auto")
    with pytest.raises(
        UsageError, match=r"is no curry-train project .* set --project DIR or --target"
    ):
        check_request(tmp_path, None, [], "auto")
    with pytest.raises(UsageError, match="--device tpu; it takes auto, cpu"):
        check_request(tmp_path, MLP, [], "tpu")
    (tmp_path / "curry_train").mkdir()
    (tmp_path / "curry_train" / "runtime.py").touch()
    with pytest.raises(UsageError, match="--set lr; it takes KEY=VALUE"):
        check_request(tmp_path, None, ["lr"], "auto")
    with pytest.raises(UsageError, match="choose one GPU by CUDA_VISIBLE_DEVICES"):
        check_request(tmp_path, None, [], "cuda:1")


def test_a_file_inside_a_package_may_use_relative_imports(tmp_path):
    package = tmp_path / "somebody" / "net"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text(GOOD, encoding="utf-8")
    (package / "entry.py").write_text(
        "from .parts import batches, loss_fn, model\n"
        "def build():\n    return [model, batches, loss_fn]\n"
    )
    assert load(f"{package / 'entry.py'}:build", tmp_path).kind == "foreign"


def test_a_file_changed_within_the_second_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for size in (3, 5):
        path = write(tmp_path, f"def build(): return nn.Linear(4, {size}), batches, loss_fn")
        os.utime(path, (1e9, 1e9))
        assert load(f"{path}:build", tmp_path).model.out_features == size
        sys.modules.pop("mine")


def test_a_file_named_like_a_known_module_is_still_itself(tmp_path):
    for name in ("random.py", "torch.py"):
        folder = tmp_path / name[:-3]
        folder.mkdir()
        source = (
            "import sys\ndef build():\n    t = sys.modules['torch']\n    m = t.nn.Linear(1, 1)\n"
        )
        source += "    return m, [t.ones(1, 1)], lambda m, b: m(b).sum()\n"
        (folder / name).write_text(source, encoding="utf-8")
        assert load(f"{folder / name}:build", tmp_path).kind == "foreign"


def test_the_script_arguments_are_hidden_from_the_target(tmp_path):
    path = write(
        tmp_path,
        "import sys\nassert len(sys.argv) == 1, sys.argv\n"
        "def build():\n    return model, batches, loss_fn\n",
    )
    assert load(f"{path}:build", tmp_path).kind == "foreign"


def test_the_device_flag_moves_model_and_batches(tmp_path):
    spec = f"{write(tmp_path, 'def build(): return model, batches, loss_fn')}:build"
    target = load(spec, tmp_path, device="cpu")
    assert next(iter(target.batches)).device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--device cuda: this torch sees none"):
            load(spec, tmp_path, device="cuda")


def test_batches_of_any_shape_are_moved():
    batch = {"a": [torch.ones(1)], "b": (torch.ones(2), "text"), "c": None}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["b"][0].is_meta
    assert moved["b"][1] == "text" and moved["c"] is None


@pytest.mark.parametrize("words", [[], ["--target", "gone.py:build"], ["--target", "bad.py:build"]])
def test_bad_input_exits_with_2_and_one_error_and_leaves_no_run(words, tmp_path):
    write(tmp_path, "def build(): raise ValueError('first\\nsecond')", name="bad.py")
    done = processes.run(
        CUSTOM_CHECK, "--check", f"{EXAMPLE_CHECK}:check_gradients", *words, cwd=tmp_path
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/checks/*/*"))
