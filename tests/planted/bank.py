"""The rows, the clean models, and how one of them is put before the checks.

A target becomes a file of its own; the script of a skill runs on it in a fork of the warm server,
as a user would start it, so that nothing is shared between two rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planted.described import DESCRIBED
from planted.reported import REPORTED
from planted.row import CLEAN, PREFLIGHT, Row
from planted.variants import VARIANTS
from skills.targets import processes

ROWS = [*DESCRIBED, *REPORTED, *VARIANTS]
CLEAN_MODELS = {
    "mlp.py:build": "perceptron with dropout, step, schedule, validation and raw data",
    "lm.py:build": "transformer with LayerNorm, tied weights, padding, accumulation",
    "vision.py:build": "convolutions with BatchNorm, shuffled loader, uneven last batch",
    "vision.py:group_norm": "convolutions with GroupNorm",
    "vision.py:augmented": "augmentation and order from the global generator",
    "vision.py:segmentation": "segmentation, [N, C, H, W] scores and an ignored class",
    "vision.py:autoencoder": "autoencoder, whose target is its input",
    "vision.py:vae": "variational autoencoder, random in forward",
    "tabular.py:regression": "regression, one number a row",
    "tabular.py:several_outputs": "regression, three numbers a row",
    "tabular.py:heteroscedastic": "regression, mean and variance",
    "tabular.py:multi_label": "several labels a row, with pos_weight",
    "tabular.py:binary": "sigmoid in the model with BCELoss",
    "tabular.py:log_probabilities": "log_softmax in the model with nll_loss",
    "tabular.py:log_softmax_twice": "log_softmax twice, which changes nothing",
    "tabular.py:smoothed": "label smoothing and class weights",
    "tabular.py:soft_labels": "labels that are probabilities",
    "tabular.py:bags": "embedding bags with padding",
    "tabular.py:uneven": "a last batch of one row",
    "sequence.py:forecast": "LSTM regression",
    "sequence.py:packed": "GRU on packed sequences",
    "sequence.py:translator": "encoder and decoder with masks",
    "sequence.py:masked_words": "masked language model, seen from both sides",
    "experts.py:top_k": "mixture of experts, top-2, balance loss",
    "experts.py:switch": "mixture of experts, top-1, tokens dropped at capacity",
    "experts.py:skipping": "mixture whose loop passes over experts without tokens",
    "tokens.py:tagger": "tags of words, seen from both sides",
    "tokens.py:denoising": "denoising, every word asked for",
    "tokens.py:prefix": "prefix language model, only the answer counts",
    "tokens.py:fused": "fused attention, the loss shifts the ids",
    "tokens.py:two_tasks": "two heads, batches with strings, numbers and None",
    "contrast.py:in_batch_negatives": "InfoNCE, where examples meet by design",
    "contrast.py:siamese": "siamese twins",
    "contrast.py:triplets": "triplets",
    "partial.py:frozen_backbone": "frozen body in eval mode under a head",
    "partial.py:low_rank": "low-rank adapters that begin at 0",
    "partial.py:shared_layers": "one layer used three times",
    "partial.py:averaged_teacher": "teacher that follows by a moving average",
    "partial.py:straight_through": "autograd function of its own",
    "partial.py:loss_inside": "loss computed in the model",
    "partial.py:several_groups": "three parameter groups, constant after warm-up",
    "partial.py:adafactor": "Adafactor",
    "forms.py:named_tuples": "batches are named tuples",
    "forms.py:dataclasses": "batches are dataclasses",
    "forms.py:nested": "batches are nested dicts, lists and tuples",
    "forms.py:double": "float64",
    "forms.py:bfloat16": "weights in bfloat16",
    "forms.py:autocast": "autocast to bfloat16",
    "forms.py:spiking": "spiking neurons over six steps",
    "loops.py:linear_to_zero": "learning rate 0 at the first and the last step",
    "loops.py:one_cycle": "OneCycleLR with momentum",
    "loops.py:time_first": "series [T, N, F], examples in the second dimension",
    "loops.py:recomputed": "activation checkpointing",
    "loops.py:divided_by_count": "sum of losses over the number of labels that count",
    "loops.py:focal": "focal loss written by hand",
    "loops.py:distilled": "student of a frozen teacher",
    "deep.py:stack": "14 layers of tanh",
    "deep.py:residual": "14 residual layers with norms",
    "huggingface.py:llama": "Llama of transformers with padding",
    "huggingface.py:gpt2": "GPT-2 of transformers",
    "huggingface.py:bert": "masked BERT of transformers with padding",
}
PROJECTS = (
    "model=tiny_moe",
    "model=tiny_dense",
    "model=tiny_spiking",
    "model=tiny_dense precision=bf16",
)
"""Clean projects of the template by their settings; each is made small by SMALL."""
SMALL = "data.seq_len=32 data.global_batch_size=4"
STAGES = ("preflight-checks", "init-loss", "overfit-one-batch", "gradient-flow")


@dataclass(frozen=True)
class Found:
    """What a stage said: its exit code and the ids by verdict; `text` is all that it printed."""

    code: int
    fail: frozenset[str]
    unclear: frozenset[str]
    text: str


def judge(row: Row, folder: Path, *flags: object) -> Found:
    """Put a planted bug before the check of its stage."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{row.name.replace('-', '_')}.py"
    path.write_text(row.source(), encoding="utf-8")
    spec = f"{path}:{row.on.partition(':')[2]}"
    return examine(["--target", spec], row.stage, folder, *flags)


def judge_clean(target: str, folder: Path, stage: str = PREFLIGHT) -> Found:
    """Put a clean model before a check."""
    return examine(["--target", CLEAN / target], stage, folder)


def copied_template(folder: Path) -> Path:
    """Copy the template, as init does, so that runs leave nothing in the repository."""
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(processes.ROOT / "template", folder, ignore=ignored)
    return folder


def judge_project(project: Path, settings: str, folder: Path, stage: str = PREFLIGHT) -> Found:
    """Put a project of the template before a check; `settings` are KEY=VALUE words."""
    return examine(
        ["--project", project, "--set", *settings.split(), *SMALL.split()], stage, folder
    )


def examine(target: Sequence[object], stage: str, folder: Path, *flags: object) -> Found:
    """Run a skill's script on what the words of `target` name and read its report."""
    script = processes.ROOT / "skills" / stage / "scripts" / f"{stage.replace('-', '_')}.py"
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / f"{stage}.json"
    words = [*target, "--seed", 0, "--out", folder / "out", "--json", report, *flags]
    done = processes.run(script, *words, cwd=folder)
    checks = json.loads(report.read_text(encoding="utf-8"))["checks"] if report.exists() else []
    return Found(
        done.returncode,
        frozenset(check["id"] for check in checks if check["verdict"] == "fail"),
        frozenset(check["id"] for check in checks if check["verdict"] == "unclear"),
        done.stdout + done.stderr,
    )


def wrong(row: Row, found: Found) -> str:
    """Say what a row got other than it expects; empty when it is green."""
    missed = sorted(set(row.fails) - found.fail)
    accused = sorted(found.fail - set(row.fails) - set(row.may))
    said = [f"not found: {', '.join(missed)}"] if missed else []
    said += [f"accused besides: {', '.join(accused)}"] if accused else []
    return "; ".join(said)


def without(found: Found, check: str) -> Found:
    """Give what would have been found had one check not been there."""
    return Found(found.code, found.fail - {check}, found.unclear - {check}, found.text)


def accused(found: Found) -> str:
    """Say what a clean model was accused of; empty when nothing is wrong with the answer."""
    if found.code == 2 or not found.text:
        return "not judged"
    said = [f"fails {', '.join(sorted(found.fail))}"] if found.fail else []
    said += [f"unclear {', '.join(sorted(found.unclear))}"] if found.unclear else []
    return "; ".join(said)
