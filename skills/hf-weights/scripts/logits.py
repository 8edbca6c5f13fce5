"""Our logits against those of transformers, on the same folder of Hugging Face."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENS = 48
MOST_PARAMETERS = {"float32": 3_000_000_000, "float64": 500_000_000}
"""Both models stand in memory at once."""
CHECKS = {"logits-differ": "float32", "logits-differ-fp64": "float64"}


def compare_logits(
    report: Any, folder: Path, thresholds: Mapping[str, float], *, checkpoint: Path | None = None
) -> None:
    """Judge the largest difference in both precisions, over the largest logit (1 at least).

    checkpoint: our weights come from it; None reads the folder too. Skipped without transformers.
    """
    if importlib.util.find_spec("transformers") is None:
        for id in CHECKS:
            report.check(id, "skipped", message="transformers is not installed")
        return
    from curry_train.checkpoint import families
    from curry_train.config import Config
    from curry_train.models.protocol import count_parameters, meta_model

    model = families.read_model(folder)[0]
    total, _ = count_parameters(meta_model(Config(model=model)))
    for id, precision in CHECKS.items():
        if total > MOST_PARAMETERS[precision]:
            report.check(id, "skipped", message=f"{total:,} parameters twice are too many")
            continue
        try:
            ids, theirs = transformers_logits(folder, precision, model.vocab_size)
        except Exception as error:  # whatever transformers cannot do
            text = f"transformers cannot load {folder}: {type(error).__name__}: {error}"
            verdict = "fail" if checkpoint is None else "skipped"
            report.check(id, verdict, message=text.partition("\n")[0])
            continue
        told = difference(theirs, our_logits(model, precision, folder, checkpoint, ids))
        report.numbers["logits" if precision == "float32" else "logits_fp64"] = told
        value = told["largest"] / max(1.0, told["logit"])
        report.check(
            id,
            "pass" if value <= thresholds[id] else "fail",
            value=value,
            threshold=thresholds[id],
            message=f"largest difference {told['largest']:.3g} at token {told['token']}, "
            f"logits up to {told['logit']:.3g}, {TOKENS} tokens in {precision}",
        )
        if not value <= thresholds[id]:
            hint = "the model differs, not its files: read rope, norms and routing of both"
            report.next += [] if hint in report.next else [hint]


def transformers_logits(folder: Path, precision: str, vocab_size: int) -> tuple[Any, Any]:
    """Return random ids [1, TOKENS] and transformers' logits [TOKENS, vocab_size] of a folder.

    No network, no code of the folder; in float64 transformers' float32 parts are float64 as well.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    from kit.transformers_float64 import in_float64

    transformers.utils.logging.set_verbosity_error()
    with contextlib.suppress(AttributeError):
        transformers.utils.logging.disable_progress_bar()
    settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    double = precision == "float64"
    # transformers' grouped product of experts takes no float64.
    options = {"experts_implementation": "eager"} if double else {}
    ids = torch.randint(0, vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with in_float64(model_class) if double else contextlib.nullcontext(), torch.no_grad():
        model = model_class.from_pretrained(
            folder, dtype=getattr(torch, precision), use_safetensors=True, **options
        ).eval()
        return ids, model(ids).logits[0]


def our_logits(model: Any, precision: str, folder: Path, checkpoint: Path | None, ids: Any) -> Any:
    """Return our logits [TOKENS, vocab_size] of the checkpoint, or of the folder without one."""
    import torch

    from curry_train.checkpoint import huggingface
    from curry_train.checkpoint.training_state import load_weights
    from curry_train.config import Config
    from curry_train.models.protocol import build_model, named_state

    config = Config(model=model, precision="fp64" if precision == "float64" else "fp32")
    ours = build_model(config, "cpu").eval()
    if checkpoint is None:
        huggingface.load(folder, dict(named_state(ours)), model)
    else:
        load_weights(ours, checkpoint)
    with torch.no_grad():
        return ours(ids).logits[0, :, : model.vocab_size]


def difference(theirs: Any, ours: Any) -> dict[str, Any]:
    """Return the largest difference, the token it is at, and the largest logit."""
    apart = (theirs - ours).abs()
    return {
        "largest": float(apart.max()),
        "logit": float(theirs.abs().max()),
        "token": int(apart.max(-1).values.argmax()),
        "tokens": TOKENS,
    }
