"""The tracer names what was planted, where it begins, and nothing in clean code."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from skills.targets import processes
from skills.targets.processes import CLASSIFIER, LANGUAGE_MODEL, MLP, ROOT, TARGETS

SCRIPTS = ROOT / "skills" / "model-skeleton" / "scripts"
sys.path.insert(0, str(SCRIPTS))

import model_skeleton  # noqa: E402

from kit.report import Report  # noqa: E402
from kit.target import load_target  # noqa: E402

sys.dont_write_bytecode = False  # the script sets it for itself
SOURCE = (TARGETS / "traced.py").read_text(encoding="utf-8")
NUMBERED = "        x = x + self.attention(self.norm(x))\n"
DECODER, ROWS = "decoder", "regressor"


def third(statement: str) -> tuple[str, str]:
    """A statement in block 3 alone, after its attention."""
    return NUMBERED, f"{NUMBERED}        if self.number == 3:\n            {statement}\n"


AT = re.compile(r" at \S+:\d+")  # the place that a message repeats

# name: (function, right, wrong, id, part of the message, text of the line that is named)
FAULTS = {
    "nan in block 3's attention": (
        DECODER,
        "        scores = q @",
        "        q = q / (q - q if self.number == 3 else 1.0)\n        scores = q @",
        "trace-nonfinite", "in blocks.3.attention", "q = q / (q - q",
    ),
    "log of 0": (
        DECODER,
        "    return losses\n",
        "    return losses + (logits.softmax(-1)[..., 0] * 0).log().mean()\n",
        "trace-nonfinite", "`log` in the loss", "* 0).log().mean()",
    ),
    "division by 0 in a norm": (
        DECODER,
        "        size = x.square().mean(-1, keepdim=True) + 1e-6\n",
        "        size = (x - x).square().mean(-1, keepdim=True)\n",
        "trace-nonfinite", "in blocks.0.norm", "x / size.sqrt()",
    ),
    "a row masked as a whole": (
        DECODER, ".triu(1)", ".triu(0)",
        "trace-nonfinite", "NaN begins with `softmax` in blocks.0.attention", ".softmax(-1)",
    ),
    "overflow": (
        DECODER, "hidden = self.up(x).relu()", "hidden = (self.up(x).relu() * 300).exp()",
        "trace-nonfinite", "`exp` in blocks.", ".exp()",
    ),
    "root of 0 in backward alone": (
        DECODER, *third("x = x + (x - x).abs().sqrt()"),
        "trace-nonfinite", "begins in backward of `sqrt` in blocks.3", ".abs().sqrt()",
    ),
    "where hides a division by 0": (
        DECODER, *third("x = torch.where(x > 1e9, x / (x - x).abs(), x)"),
        "trace-nonfinite", "begins in backward of", "torch.where(x > 1e9",
    ),
    "a parameter holds NaN": (
        DECODER, "self.scale = nn.Parameter(torch.ones(WIDTH))",
        "self.scale = nn.Parameter(torch.ones(WIDTH) * math.nan)",
        "trace-nonfinite", "parameter scale is not finite before", None,
    ),
    "the batch holds NaN": (
        ROWS, "    return Rows(), [", "    rows[0, 2, 1] = math.nan\n    return Rows(), [",
        "trace-nonfinite", "the batch holds it, batch 0", None,
    ),
    "heads split by a view alone": (
        DECODER, "t.view(batch, length, HEADS, -1).transpose(1, 2)",
        "t.reshape(batch, HEADS, length, -1)",
        "trace-shape", "the dim of 10 positions moved", "t.reshape(batch, HEADS, length, -1)",
    ),
    "batch and positions swapped by a view": (
        DECODER, "        hidden = self.up(x).relu()\n",
        "        x = x.reshape(x.shape[1], x.shape[0], -1).cumsum(0).reshape(x.shape)\n"
        "        hidden = self.up(x).relu()\n",
        "trace-shape", "", "x.reshape(x.shape[1]",
    ),
    "attention over the batch": (
        DECODER, "weights @ v).transpose(1, 2)",
        "weights @ v).mean(0, True).expand_as(v).transpose(1, 2)",
        "trace-shape", "an example changes what others get, first in blocks.0.attention",
        ".mean(0, True)",
    ),
    "predictions [N, 1] against labels [N]": (
        ROWS, "self.last(hidden).squeeze(-1)", "self.last(hidden)",
        "trace-shape", "pairs [12, 1] with [12] and gives [12, 12]", "(predicted - labels)",
    ),
    "the same in mse_loss": (
        ROWS, "    return (predicted - labels).square().mean()",
        "    return nn.functional.mse_loss(predicted[:, None], labels)",
        "trace-shape", "mse_loss compares [12, 1] with labels [12]", "mse_loss(",
    ),
    "one prediction for all": (
        ROWS, "    return (predicted - labels).square().mean()",
        "    return nn.functional.mse_loss(predicted.mean(0), labels)",
        "trace-shape", "mse_loss compares [] with labels [12]", "mse_loss(",
    ),
    "[N, 1] and [N] inside the model": (
        ROWS, "        hidden = self.first(rows).tanh()\n",
        "        hidden = self.first(rows).tanh()\n"
        "        gate = hidden.mean(-1, keepdim=True) * hidden.sum(-1)\n"
        "        hidden = hidden * gate.mean(-1, keepdim=True)\n",
        "trace-shape", "`mul` in Rows pairs [12, 1] with [12]", "gate = hidden.mean",
    ),
    "a shape that does not fit": (
        DECODER, ".reshape(batch, length, WIDTH)", ".reshape(batch, length, WIDTH + 1)",
        "trace-shape", "raised RuntimeError in blocks.0.attention (Attention)",
        ".reshape(batch, length",
    ),
    "a detach between blocks": (
        DECODER, *third("x = x.detach()"),
        "trace-detached", "`detach` in blocks.3 cuts the graph", "x = x.detach()",
    ),
    "weights of attention through .data": (
        DECODER, "weights = scores.masked_fill", "weights = scores.data.masked_fill",
        "trace-detached", "`data` in blocks.0.attention", "scores.data",
    ),
    "no_grad in the forward": (
        DECODER, "        for block in self.blocks:\n            x = block(x)\n",
        "        with torch.no_grad():\n"
        "            for block in self.blocks:\n                x = block(x)\n",
        "trace-detached", "runs where gradients are off", None,
    ),
    "a way through NumPy": (
        DECODER, *third("x = torch.from_numpy(np.tanh(x.detach().numpy()))"),
        "trace-detached", "`numpy` in blocks.3", "x.detach().numpy()",
    ),
    "a loss from a number": (
        DECODER, "    return losses\n", "    return torch.tensor(losses.item())\n",
        "trace-detached", "the loss has no graph", "losses.item()",
    ),
    "a choice by argmax": (
        DECODER, "x = self.embed(ids) * self.scale",
        "x = self.embed(ids) * (1 + self.scale.topk(WIDTH).indices)",
        "trace-detached", "no gradient for scale", "self.scale.topk",
    ),
    "written in place": (
        DECODER, "        return x + self.down(hidden)\n",
        "        out = self.down(hidden)\n        hidden.zero_()\n        return x + out\n",
        "trace-detached", "`zero_` in blocks.", "hidden.zero_()",
    ),
    "a float64 array": (
        DECODER, "        x = self.embed(ids) * self.scale\n",
        "        x = self.embed(ids) * self.scale + torch.from_numpy(np.zeros((LENGTH, 1)))\n",
        "trace-dtype", "float64", "np.zeros((LENGTH, 1))",
    ),
    "float32 in a stream of bfloat16": (
        DECODER, "        return x + self.down(hidden)\n",
        "        return x.float() + self.down(hidden)\n",
        "trace-dtype", "blocks.1 gets float32, blocks.0 got bfloat16", "x.float()",
    ),
    "attention with the batch for time": (
        DECODER, "        x = x + self.attention(self.norm(x))\n",
        "        x = x + self.attention(self.norm(x).transpose(0, 1)).transpose(0, 1)\n",
        "trace-shape", "an example changes what others get, first in blocks.0.attention",
        None,
    ),
    "softmax over the batch": (
        ROWS, "hidden = self.first(rows).tanh()", "hidden = self.first(rows).softmax(0)",
        "trace-shape", "an example changes what others get, first in Rows", ".softmax(0)",
    ),
    "a detach behind a function of its own": (
        ROWS, "hidden = self.first(rows).tanh()", "hidden = Spike.apply(self.first(rows)).detach()",
        "trace-detached", "`detach` in Rows cuts the graph", "Spike.apply",
    ),
    "modules in a list": (
        ROWS, "self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)",
        "self.last, self.rows = nn.Linear(8, 1), [nn.Linear(5, 8)]",
        "trace-unused", "that model.parameters() does not hold", "self.rows[0]",
    ),
    "a state that is kept": (
        ROWS, "        hidden = self.first(rows).tanh()\n",
        "        self.kept = hidden = self.first(rows).tanh() + getattr(self, 'kept', 0)\n",
        "trace-detached", "goes into the graph of the first", None,
    ),
    "another device": (
        ROWS, "hidden = self.first(rows).tanh()", "hidden = self.first(rows).tanh().to('meta')",
        "trace-device", "", "self.last(hidden)",
    ),
    "a block that is never called": (
        DECODER, "for block in self.blocks:", "for block in self.blocks[:-1]:",
        "trace-unused", "blocks.3.", "self.blocks",
    ),
    "a parameter that nobody reads": (
        DECODER, "x = self.embed(ids) * self.scale", "x = self.embed(ids)",
        "trace-unused", "scale: is read by no operation", "self.scale",
    ),
    "an output that the loss does not see": (
        DECODER, "        x = self.embed(ids) * self.scale\n",
        "        self.seen = self.embed(ids) * self.scale\n        x = self.embed(ids)\n",
        "trace-unused", "scale: what `mul` in Decoder makes of it does not reach the loss", None,
    ),
    "ids beyond the table": (
        DECODER, "torch.randint(VOCABULARY,", "torch.randint(VOCABULARY, VOCABULARY + 9,",
        "trace-raised", "in embed (Embedding)", None,
    ),
}  # fmt: skip


# What else has to change, so that the fault alone is what breaks.
ALSO = {
    "a detach behind a function of its own": [
        (
            "class Rows(",
            "class Spike(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    def forward(context, x):\n"
            "        return torch.zeros_like(x) + (x > 0).to(x.dtype)\n\n"
            "    @staticmethod\n"
            "    def backward(context, gradient):\n"
            "        return gradient\n\n\n"
            "class Rows(",
        )
    ],
    "modules in a list": [("self.first(rows)", "self.rows[0](rows)")],
    "nan in block 3's attention": [
        (
            "= Norm(), Attention()\n",
            "= Norm(), Attention()\n        self.attention.number = number\n",
        )
    ],
    "a float64 array": [
        ("self.up(x)", "self.up(x.float())"),
        ("self.qkv(x)", "self.qkv(x.float())"),
        ("self.head(self.norm(x))", "self.head(self.norm(x).float())"),
    ],
    "float32 in a stream of bfloat16": [
        ("return Decoder(), batches", "return Decoder().bfloat16(), batches"),
        ("self.up(x)", "self.up(x.bfloat16())"),
        ("self.qkv(x)", "self.qkv(x.bfloat16())"),
        ("self.head(self.norm(x))", "self.head(self.norm(x).bfloat16())"),
    ],
}


def judge(spec, folder=Path("/"), number=0, overrides=(), project=None):
    target = load_target(
        project or folder, spec, overrides=list(overrides), seed=None, device="auto", probe=False
    )
    report = Report("model-skeleton")
    way, found = model_skeleton.judge(target, report, number, None)
    return report, found


def failed(report):
    return [check for check in report.checks if check["verdict"] == "fail"]


def failed_of(report):
    return [check for check in report["checks"] if check["verdict"] == "fail"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_line(fault, tmp_path):
    function, right, wrong, id, said, line = FAULTS[fault]
    assert SOURCE.count(right) == 1, right
    source = SOURCE.replace(right, wrong)
    for old, new in ALSO.get(fault, ()):
        assert old in source, old
        source = source.replace(old, new)
    path = tmp_path / "planted.py"
    path.write_text(source, encoding="utf-8")
    report, _ = judge(f"{path}:{function}", tmp_path)
    found = failed(report)
    assert [check["id"] for check in found][:1] == [id], report.checks
    assert len({check["id"] for check in found}) == 1, found
    assert said in AT.sub("", found[0]["message"]), found
    if line is not None:
        place = found[0]["fix"]
        assert place["file"] == str(path) and place["text"], place
        assert line in source.splitlines()[place["line"] - 1], source.splitlines()[
            place["line"] - 1
        ]


CLEAN = [f"{TARGETS / 'traced.py'}:{name}" for name in (DECODER, ROWS)]
CLEAN += [MLP, CLASSIFIER, LANGUAGE_MODEL, f"{TARGETS / 'mixture.py'}:build"]
ODD = (
    *("pairs_of_views", "ranked", "graph", "stop_gradient", "codebook", "critic", "time_first"),
    *("windows", "policy", "recomputed", "rows_left_out", "logged"),
)
CLEAN += [f"{TARGETS / 'odd_but_clean.py'}:{name}" for name in ODD]


@pytest.mark.parametrize("spec", CLEAN)
def test_clean_code_gives_no_finding(spec):
    report, found = judge(spec)
    assert report.verdict == "pass", failed(report)
    assert found.calls and all(call.outputs for call in found.calls)


MODEL = '''"""Rows to classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from curry_train.config import Count
from curry_train.layers.linear import Linear
from curry_train.loss import class_sums


@dataclass(frozen=True)
class RowsConfig:
    """A classifier of rows."""

    architecture: str = "rows"
    """Key of curry_train.models.MODELS."""
    hidden_size: Count = 8
    """Width."""


class Rows(nn.Module):
    Config = RowsConfig
    vocab_size, vocab_parameters, active_share = 0, (), 1.0

    def __init__(self, config, *, compute_dtype):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.embed = Linear(6, config.hidden_size)
        self.layers = nn.ModuleDict({"0": Linear(config.hidden_size, config.hidden_size)})
        self.head = Linear(config.hidden_size, 3)

    def tie_weights(self):
        """Share nothing."""

    def init_constant(self, name):
        return None

    def init_std(self, name):
        return self.get_parameter(name).shape[-1] ** -0.5

    def forward(self, inputs):
        x = self.embed(inputs.to(self.compute_dtype))
        return self.head(x + self.layers["0"](x).tanh())

    def loss_sums(self, batch):
        return class_sums(self(batch["inputs"]), batch["labels"])
'''
DATA = '''"""Rows of numbers and the largest of the first three."""

import numpy as np

from curry_train.config import DataConfig
from curry_train.data.samples import Samples


def rows(data: DataConfig) -> Samples:
    inputs = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    split = {"inputs": inputs, "labels": inputs[:, :3].argmax(1)}
    return Samples(
        train={name: array[8:] for name, array in split.items()},
        val={name: array[:8] for name, array in split.items()},
    )
'''
MODEL_LINE = '    "rows": "curry_train.models.rows:Rows",\n'
DATA_LINE = '    "rows": "curry_train.data.rows:rows",\n'


@pytest.fixture
def project(tmp_path):
    """A copied project with a classifier that is wired as it should be."""
    ignored = shutil.ignore_patterns("__pycache__", "runs", ".cache", "tests", "docs", "benchmarks")
    shutil.copytree(ROOT / "template", tmp_path / "p", ignore=ignored)
    folder = tmp_path / "p"
    (folder / "curry_train/models/rows.py").write_text(MODEL)
    (folder / "curry_train/data/rows.py").write_text(DATA)
    for table, line, package in (("MODELS", MODEL_LINE, "models"), ("DATASETS", DATA_LINE, "data")):
        path = folder / f"curry_train/{package}/__init__.py"
        text = path.read_text()
        path.write_text(text.replace(f"{table} = {{\n", f"{table} = {{\n{line}"))
        assert path.read_text() != text
    (folder / "configs/model/rows.yaml").write_text("architecture: rows\n")
    (folder / "configs/data/rows.yaml").write_text("dataset: rows\n")
    (folder / "tests").mkdir()
    (folder / "tests/test_rows.py").write_text("from curry_train.models.rows import Rows\n")
    return folder


def skeleton(project, *words):
    done = processes.run(SCRIPTS / "model_skeleton.py", "--project", project, *words, "--json",
                         cwd=project.parent)  # fmt: skip
    assert done.returncode in (0, 1, 3), done.stderr
    report = json.loads(done.stdout)
    return done.returncode, report, {c["id"]: c for c in reversed(report["checks"])}


def edit(path, *pairs):
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def test_a_model_that_is_wired_passes_and_is_traced(project):
    code, report, checks = skeleton(project, "--check", "rows")
    assert code == 0, report["checks"]
    assert {c["verdict"] for c in report["checks"]} == {"pass"} and len(checks) == 8
    code, report, checks = skeleton(project, "--set", "model=rows", "data=rows")
    assert code == 0, report["checks"]
    way = "\n".join(report["numbers"]["way"])
    assert "samples: dataset rows, 32 to train on, 8 held out" in way
    assert "batch labels: [8] int64 cpu" in way
    names = [call["path"] for call in report["numbers"]["modules"]]
    assert names == ["Rows", "embed", "layers.0", "head"]
    (table,) = report["artifacts"]
    assert "layers.0 (Linear)" in Path(table).read_text()


FULL = pytest.mark.skipif(
    not os.environ.get("CURRY_TRAIN_FULL"), reason="one of many alike cases (--full)"
)
MODEL_FILE, DATA_FILE = "curry_train/models/rows.py", "curry_train/data/rows.py"
LOSS = 'class_sums(self(batch["inputs"]), batch["labels"])'
CUTS = {
    "no lines": (
        [("curry_train/models/__init__.py", MODEL_LINE, ""),
         ("curry_train/data/__init__.py", DATA_LINE, "")],
        {"wiring-registered": 'add `"rows": "curry_train.models.rows:Rows",` to MODELS'},
    ),
    "sentence, test and loss": (
        [(MODEL_FILE, '    """Width."""\n', ""), ("tests/test_rows.py", "import Rows",
        "import Other"),
         (MODEL_FILE, LOSS, 'class_sums(self(batch["inputs"]), batch["labels"].clamp(min=0))')],
        {"wiring-config": "write a sentence under it, as a string", "wiring-test": "write a test",
         "wiring-loss": "skip labels of -100"},
    ),
    "files and values": (
        [("configs/model/rows.yaml", "rows", "decoder"), (DATA_FILE, ".argmax(1)",
        ".argmax(1) - 5")],
        {"wiring-yaml": "write it, first line `architecture: rows`",
        "wiring-dataset": "missing label"},
    ),
    "a method": (
        [(MODEL_FILE, "    def tie_weights", "    def other")],
        {"wiring-protocol": "add tie_weights"},
    ),
    "a gradient": (
        [(MODEL_FILE, '["0"](x).tanh())', '["0"](x).detach())')],
        {"wiring-forward": "see the trace"},
    ),
    "a mean": (
        [(MODEL_FILE, f"        return {LOSS}", f"        sums = {LOSS}\n"
          "        return sums._replace(nll=sums.nll / 4)"),
         (MODEL_FILE, "return self.head(x +", "x = x - x.mean(0)\n        return self.head(x +")],
        {"wiring-loss": "return sums over targets"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=[FULL] if cut[:2] == "a " else []) for cut in CUTS]
)
def test_each_missing_wire_is_named_with_what_to_add_where(cut, project):
    edits, expected = CUTS[cut]
    for file, old, new in edits:
        edit(project / file, (old, new))
    code, report, checks = skeleton(project, "--check", "rows")
    failed = {id: c for id, c in checks.items() if c["verdict"] == "fail"}
    assert code == 1 and set(failed) == set(expected), report["checks"]
    for id, text in expected.items():
        assert text in failed[id]["fix"]["text"] and failed[id]["fix"]["line"] >= 1, failed[id]


NORM, ATTENTION = "curry_train/layers/norm.py", "curry_train/layers/attention.py"
IN_PROJECT = {
    "a norm divides by 0": (
        NORM, "scale = torch.rsqrt(self.mean_square(wide) + self.eps)",
        "scale = torch.rsqrt(self.mean_square(wide) * 0)",
        "trace-nonfinite", "begins with `rsqrt` in", "tiny_dense",
    ),
    "queries detached": (
        ATTENTION, "self.heads_of(self.q_proj(x_BSD), self.q_norm)",
        "self.heads_of(self.q_proj(x_BSD), self.q_norm).detach()",
        "trace-detached", "cuts the graph", "tiny_moe",
    ),
    "heads by a view": (
        ATTENTION, "        return x.transpose(1, 2)\n",
        "        return x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3])\n",
        "trace-shape", "the dim of 128 positions moved", "tiny_moe",
    ),
    "a stream of float32": (
        "curry_train/models/decoder.py",
        "        return self.model.embed_tokens(input_ids).to(self.compute_dtype)",
        "        return self.model.embed_tokens(input_ids)",
        "trace-dtype", "the model computes in bfloat16", "tiny_dense",
    ),
    "spikes detached": (
        "curry_train/models/spiking.py", "self.self_attn(self.input_spikes(x_BSD), positions)",
        "self.self_attn(self.input_spikes(x_BSD), positions).detach()",
        "trace-detached", "`detach` in model.layers.0", "tiny_spiking",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[] if f.startswith("heads") else [FULL]) for f in IN_PROJECT]
)
def test_a_fault_in_a_project_is_named(fault, project):
    file, right, wrong, id, said, model = IN_PROJECT[fault]
    edit(project / file, (right, wrong))
    words = ["--set", f"model={model}", "data.global_batch_size=4"]
    words += ["precision=bf16"] if id == "trace-dtype" else []
    code, report, checks = skeleton(project, *words)
    found = failed_of(report)
    assert code == 1 and {c["id"] for c in found} == {id}, report["checks"]
    named = file if id != "trace-dtype" else "curry_train/layers/linear.py"  # where it is made
    assert said in AT.sub("", found[0]["message"]) and found[0]["fix"]["file"].endswith(named), (
        found[0]
    )


@FULL
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("model", ["tiny_moe", "tiny_dense", "tiny_spiking"])
def test_clean_projects_give_no_finding(model, precision, project):
    code, report, checks = skeleton(project, "--set", f"model={model}", f"precision={precision}")
    assert code == 0, failed_of(report)
