"""The rules of the code: kept in this tree, and each lint names a planted fault."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bundle import lint_house
from bundle.tree import ROOT

LINTS = lint_house.LINTS
PACKAGE = "template/curry_train"
NORM = f"{PACKAGE}/layers/norm.py"
DIMS = f"{PACKAGE}/parallel/dims.py"
CONFIG = f"{PACKAGE}/config.py"
RUNTIME = f"{PACKAGE}/runtime.py"
SCRIPT = "skills/measure-step/scripts/measure_step.py"


@pytest.mark.parametrize("lint", LINTS, ids=lambda lint: lint.__name__)
def test_the_tree_keeps_the_rule(lint):
    problems = lint(ROOT)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("lint", LINTS, ids=lambda lint: lint.__name__)
def test_the_planted_tree_keeps_the_rule(lint, planted):
    problems = lint(planted.root)
    assert not problems, "\n".join(problems)


def test_train_reaches_the_parts_of_the_loop():
    """An empty reach would keep its budget too."""
    names = {path.name for path in lint_house.reached(ROOT)}
    assert {"train.py", "config.py", "launch.py", "step.py", "decoder.py", "dcp.py"} <= names


@pytest.mark.parametrize(
    "module", ["curry_train", "curry_train.config", "curry_train.parallel.dims"]
)
def test_the_module_imports_no_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "template", capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def append(name, text):
    return lambda planted: planted.append(name, text)


def inside(name, statement):
    return append(name, f"\n\ndef f() -> None:\n    {statement}\n")


def edit(name, old, new):
    return lambda planted: planted.edit(name, old, new)


def write(name, text):
    return lambda planted: planted.write(name, text)


def long_package(planted):
    for number in range(26):
        planted.write(f"{PACKAGE}/part{number}.py", "x = 1\n" * 440)


def long_kernels(planted):
    for number in range(12):
        planted.write(f"{PACKAGE}/kernels/part{number}.py", "x = 1\n" * 440)


def long_parallel(planted):
    for number in range(8):
        planted.write(f"{PACKAGE}/parallel/part{number}.py", "x = 1\n" * 440)


def long_reach(planted):
    for number in range(25):
        planted.write(f"{PACKAGE}/part{number}.py", "x = 1\n" * 440)
        planted.append(
            RUNTIME, f"\n\ndef use{number}() -> None:\n    import curry_train.part{number}\n"
        )


def function(lines):
    return "\n\ndef long() -> None:\n" + "    x = 1\n" * (lines - 1)


FAULTS = [
    ("budgets", append(NORM, "x = 1\n" * 450), "norm.py: has"),
    ("budgets", append(SCRIPT, "x = 1\n" * 450), "measure_step.py: has"),
    ("budgets", append(NORM, function(60)), "long has 60 lines; fewer than 60"),
    ("budgets", write(f"{PACKAGE}/kernels/k.py", function(120)), "fewer than 120"),
    ("budgets", long_package, "fewer than 10400"),
    ("budgets", long_kernels, "fewer than 5000"),
    ("budgets", long_parallel, "fewer than 3200"),
    ("reach", long_reach, "fewer than 9600"),
    ("file_names", write(f"{PACKAGE}/models/norm.py", "x = 1\n"), "norm stands twice"),
    ("file_names", write(f"{PACKAGE}/layers.py", "x = 1\n"), "layers stands twice"),
    ("file_names", write(f"{PACKAGE}/utils.py", "x = 1\n"), "utils.py: the name says nothing"),
    ("file_names", append(NORM, "\n\nclass NormHelper:\n    pass\n"), "NormHelper"),
    ("file_names", append(SCRIPT, "\n\nclass RunManager:\n    pass\n"), "RunManager"),
    (
        "imports",
        inside(RUNTIME, "import lightning_fabric"),
        "launch.py",
    ),
    ("imports", write(f"{PACKAGE}/launch.py", "import lightning_fabric\n"), "at import"),
    ("imports", inside(DIMS, "import torch"), "at any level"),
    ("imports", inside(DIMS, "from torch import nn"), "at any level"),
    (
        "imports",
        append(CONFIG, "\ntry:\n    import torch\nexcept ImportError:\n    pass\n"),
        "torch",
    ),
    ("imports", append(RUNTIME, "\nimport scipy.stats\n"), "scipy"),
    ("imports", append(RUNTIME, "\nfrom torch.distributed import checkpoint\n"), "checkpoint"),
    ("imports", append(RUNTIME, "\nfrom curry_train.checkpoint import dcp\n"), "checkpoint.dcp"),
    ("import_style", append(RUNTIME, "\nfrom . import config\n"), "relative"),
    ("import_style", append(SCRIPT, "\nfrom math import *\n"), "star"),
    ("import_style", append(NORM, "\n\ndef f() -> None:\n    global x\n    x = 1\n"), "global"),
    ("glossary", append(NORM, "\n\ndef f(n_embd: int) -> None:\n    pass\n"), "hidden_size"),
    ("glossary", edit(CONFIG, "max_steps", "max_iters"), "the word is max_steps"),
    ("glossary", append(RUNTIME, "\nblock_size = 1\n"), "the word is seq_len"),
    ("glossary", append(RUNTIME, "\nprint(dict(learning_rate=1))\n"), "the word is lr"),
    ("glossary", write("template/configs/model/b.yaml", "n_layer: 1\n"), "num_hidden_layers"),
    ("docstrings", edit(NORM, "; x is [B, S, D]", ""), "scale names no shape"),
    ("docstrings", edit(NORM, ": [..., D] in, the same out", ""), "Norm.forward names no shape"),
    ("docstrings", append(DIMS, "\n\ndef sizes() -> None:\n    pass\n"), "sizes has no docstring"),
    ("annotations", edit(NORM, "factor: float", "factor"), "leaves factor without a type"),
    ("safety", append(RUNTIME, "\nimport pickle\n"), "imports pickle"),
    ("safety", inside(RUNTIME, "from pickle import load"), "pickle"),
    ("safety", append(RUNTIME, '\neval("1")\n'), "calls eval"),
    ("safety", append(SCRIPT, '\nexec("1")\n'), "calls exec"),
    ("safety", append(RUNTIME, '\nimport torch\n\ntorch.load("x")\n'), "calls torch.load"),
    ("safety", append(RUNTIME, "\nf(allow_pickle=True)\n"), "allow_pickle"),
    ("safety", append(RUNTIME, "\nf(trust_remote_code=flag)\n"), "trust_remote_code"),
    ("texts", append("README.md", "\n/ho" + "me/me/data\n"), "path of a machine"),
    ("texts", append(NORM, '\nX = "/ro' + 'ot/x"\n'), "path of a machine"),
    ("texts", append("README.md", "\nhttps://py" + "pi.org/x\n"), "host of a registry"),
    ("texts", append(NORM, "\n# caf\u00e9\n"), "not ASCII"),
    ("texts", append(NORM, "\n# TO" + "DO later\n"), "unfinished"),
]


@pytest.mark.parametrize(("name", "fault", "words"), FAULTS, ids=[f"{n}-{w}" for n, _, w in FAULTS])
def test_a_planted_fault_is_named(name, fault, words, planted):
    lint = next(lint for lint in LINTS if lint.__name__ == name)
    fault(planted)
    problems = lint(planted.root)
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize(
    "text", ["x: Tensor = model.eval()", "torch.utils.checkpoint.checkpoint(f)"]
)
def test_harmless_calls_are_not_named(text, planted):
    planted.append(RUNTIME, f"\n{text}\n")
    assert lint_house.safety(planted.root) == []
