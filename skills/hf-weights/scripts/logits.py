"""Our logits against those of transformers, on the same folder of Hugging Face."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

TOKENS = 48
MOST_PARAMETERS = 3_000_000_000
"""Both models stand in memory at once, in float32."""


def compare_logits(
    report: Any, folder: Path, threshold: float, *, checkpoint: Path | None = None
) -> None:
    """Judge the largest difference in float32, over the largest logit (1 at least).

    checkpoint: our weights come from it; None reads the folder too. Skipped without transformers.
    """
    id, missing = "logits-differ", importlib.util.find_spec("transformers") is None
    if missing:
        report.check(id, "skipped", message="transformers is not installed")
        return
    from curry_train.checkpoint import families
    from curry_train.config import Config
    from curry_train.models.protocol import count_parameters, meta_model

    config = Config(model=families.read_model(folder)[0])
    total, _ = count_parameters(meta_model(config))
    if total > MOST_PARAMETERS:
        report.check(id, "skipped", message=f"{total:,} parameters twice are too many")
        return
    try:
        theirs = transformers_model(folder)
    except Exception as error:  # whatever transformers cannot do
        text = f"transformers cannot load {folder}: {type(error).__name__}: {error}"
        verdict = "fail" if checkpoint is None else "skipped"
        report.check(id, verdict, message=text.partition("\n")[0])
        return
    value, told = difference(config, folder, checkpoint, theirs)
    report.numbers["logits"] = told
    report.check(
        id,
        "pass" if value <= threshold else "fail",
        value=value,
        threshold=threshold,
        message=f"largest difference {told['largest']:.3g} at token {told['token']}, "
        f"logits up to {told['logit']:.3g}, {told['tokens']} tokens in float32",
    )
    if value > threshold:
        report.next.append("the model differs, not its files: read rope, norms and routing of both")


def transformers_model(folder: Path) -> Any:
    """Load a folder in transformers as float32; no network, no code of the folder."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    with contextlib.suppress(AttributeError):
        transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()


def difference(
    config: Any, folder: Path, checkpoint: Path | None, theirs: Any
) -> tuple[float, dict[str, Any]]:
    """Return the relative difference and where it is; the same random ids for both."""
    import torch

    from curry_train.checkpoint import huggingface, read_manifest
    from curry_train.checkpoint.training_state import load_weights
    from curry_train.models.protocol import build_model, named_state

    if checkpoint is not None:
        tensors = read_manifest(checkpoint)["tensors"].values()
        double = any(entry["dtype"] == "float64" for entry in tensors)
        config = replace(config, precision="fp64" if double else "fp32")
    ours = build_model(config, "cpu").eval()
    if checkpoint is None:
        huggingface.load(folder, dict(named_state(ours)), config.model)
    else:
        load_weights(ours, checkpoint)
    ids = torch.randint(
        0, config.model.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        left = ours(ids).logits[0, :, : config.model.vocab_size].float()
        right = theirs(ids).logits[0].float()
    apart = (left - right).abs()
    largest, logit = float(apart.max()), float(right.abs().max())
    return largest / max(1.0, logit), {
        "largest": largest,
        "logit": logit,
        "token": int(apart.max(-1).values.argmax()),
        "tokens": TOKENS,
    }
