"""The tracer names what was planted, where it begins, and nothing in clean code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
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


# name: (function, right, wrong, id, part of the message, text of the line that is named)
FAULTS = {
    "nan in block 3's attention": (
        DECODER,
        "        scores = q @",
        "        q = q / (0.0 if q is None else q - q) if x.std() > self.limit else q\n        scores = q @",
        "trace-nonfinite", "in blocks.3.attention", "q = q / (0.0",
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
        "trace-nonfinite", "NaN begins at `softmax` in blocks.0.attention", ".softmax(-1)",
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
        DECODER, "t.view(batch, length, HEADS, -1).transpose(1, 2)", "t.view(batch, HEADS, length, -1)",
        "trace-shape", "the dim of 10 positions moved", "t.view(batch, HEADS, length, -1)",
    ),
    "batch and positions swapped by a view": (
        DECODER, "        hidden = self.up(x).relu()\n",
        "        x = x.reshape(x.shape[1], x.shape[0], -1).cumsum(0).reshape(x.shape)\n"
        "        hidden = self.up(x).relu()\n",
        "trace-shape", "", "x.reshape(x.shape[1]",
    ),
    "attention over the batch": (
        DECODER, "weights @ v).transpose(1, 2)", "weights @ v).mean(0, True).expand_as(v).transpose(1, 2)",
        "trace-shape", "an example changes what others get, first in blocks.0.attention", ".mean(0, True)",
    ),
    "predictions [N, 1] against labels [N]": (
        ROWS, "self.last(hidden).squeeze(-1)", "self.last(hidden)",
        "trace-shape", "pairs [12, 1] with [12] and gives [12, 12]", "(predicted - labels)",
    ),
    "the same in mse_loss": (
        ROWS, "    return (predicted - labels).square().mean()",
        "    return nn.functional.mse_loss(predicted[:, None], labels)",
        "trace-shape", "mse_loss takes [12, 1] and labels [12]", "mse_loss(",
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
        "trace-shape", "raised RuntimeError in blocks.0.attention (Attention)", ".reshape(batch, length",
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
        "        with torch.no_grad():\n            for block in self.blocks:\n                x = block(x)\n",
        "trace-detached", "runs where gradients are off", None,
    ),
    "a way through NumPy": (
        DECODER, *third("x = torch.from_numpy(np.tanh(x.detach().numpy()))"),
        "trace-detached", "`detach` in blocks.3", "x.detach().numpy()",
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
        "        x = self.embed(ids) * self.scale + torch.from_numpy(np.zeros((LENGTH, 1)))\n"
        "        self.double()\n",
        "trace-dtype", "float64", "np.zeros((LENGTH, 1))",
    ),
    "float32 in a stream of bfloat16": (
        DECODER, "        return x + self.down(hidden)\n",
        "        return x.float() + self.down(hidden)\n",
        "trace-dtype", "blocks.1 gets float32, blocks.0 got bfloat16", "x.float()",
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


def judge(spec, folder=Path("/"), number=0, overrides=(), project=None):
    target = load_target(
        project or folder, spec, overrides=list(overrides), seed=None, device="auto", probe=False
    )
    report = Report("model-skeleton")
    way, found = model_skeleton.judge(target, report, number, None)
    return report, found


def failed(report):
    return [check for check in report.checks if check["verdict"] == "fail"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_line(fault, tmp_path):
    function, right, wrong, id, said, line = FAULTS[fault]
    assert SOURCE.count(right) == 1, right
    source = SOURCE.replace(right, wrong)
    if "self.limit" in wrong:
        source = source.replace(
            "        self.number = number\n", "        self.number = number\n" * 1
        )
        source = source.replace(
            "self.norm, self.attention = Norm(), Attention()",
            "self.norm, self.attention = Norm(), Attention()\n"
            "        self.attention.limit = 0.0 if number == 3 else math.inf",
        )
    if "self.double()" in wrong:
        source = source.replace("        self.double()\n", "")
        source = source.replace(
            "return x + self.down(hidden)", "return x + self.down(hidden.float())"
        )
        source = (
            source.replace("self.up(x)", "self.up(x.float())")
            .replace("self.qkv(x)", "self.qkv(x.float())")
            .replace("self.norm(x))\n", "self.norm(x).float())\n")
        )
    if "x.float() + self" in wrong:
        source = source.replace("return Decoder(), batches", "return Decoder().bfloat16(), batches")
        source = (
            source.replace("self.up(x)", "self.up(x.bfloat16())")
            .replace("self.qkv(x)", "self.qkv(x.bfloat16())")
            .replace("self.head(self.norm(x))", "self.head(self.norm(x).bfloat16())")
        )
    path = tmp_path / "planted.py"
    path.write_text(source, encoding="utf-8")
    report, _ = judge(f"{path}:{function}", tmp_path)
    found = failed(report)
    assert [check["id"] for check in found][:1] == [id], report.checks
    assert len({check["id"] for check in found}) == 1, found
    assert said in found[0]["message"], found
    if line is not None:
        place = found[0]["fix"]
        assert place["file"] == str(path) and place["text"], place
        assert line in source.splitlines()[place["line"] - 1], source.splitlines()[
            place["line"] - 1
        ]


CLEAN = [f"{TARGETS / 'traced.py'}:{name}" for name in (DECODER, ROWS)]
CLEAN += [MLP, CLASSIFIER, LANGUAGE_MODEL, f"{TARGETS / 'mixture.py'}:build"]


@pytest.mark.parametrize("spec", CLEAN)
def test_clean_code_gives_no_finding(spec):
    report, found = judge(spec)
    assert report.verdict == "pass", failed(report)
    assert found.calls and all(call.outputs for call in found.calls)
