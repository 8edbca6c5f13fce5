"""The same model in transformers: its configuration, its module and its names for our tensors.

Parity tests and parameter counts both start from a ModelConfig and go through this file, so a
preset that says one thing and means another cannot pass either.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from curry_train.checkpoint.families import write_config
from curry_train.config import ModelConfig


def family(config: ModelConfig) -> str:
    """Name the model class of transformers that a configuration stands for."""
    return write_config(config, "float32")["architectures"][0].removesuffix("ForCausalLM")


def transformers_config(config: ModelConfig) -> Any:
    """Return the configuration of the same model in transformers."""
    transformers = pytest.importorskip("transformers")
    raw, kind = write_config(config, "float32"), family(config)
    settings = getattr(transformers, f"{kind}Config").from_dict(raw)
    settings._experts_implementation = "eager"  # its grouped_mm takes no float64
    settings._attn_implementation = "eager" if kind == "GptOss" else "sdpa"
    return settings


class Float64Torch:
    """torch, in which float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    """Let transformers take norms, angles and router scores in float64 too.

    Its files ask for float32 there even in a float64 model, so that gradients would agree to 6e-6
    only, as much as a small mistake may cost.
    """
    package = type(transformers_config(config)).__module__.rpartition(".")[0]
    model_file = f"{package}.modeling_{package.rpartition('.')[2]}"
    for name in ("transformers.modeling_rope_utils", model_file):
        monkeypatch.setattr(import_module(name), "torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def transformers_model(config: ModelConfig, device: str = "meta") -> torch.nn.Module:
    """Build the same model in transformers; on "meta" it has shapes and no values."""
    settings = transformers_config(config)
    import transformers

    with torch.device(device):
        return getattr(transformers, f"{family(config)}ForCausalLM")(settings)


def with_our_weights(config: ModelConfig, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Build the same model in transformers, in float64, with the tensors of our canonical names."""
    model = transformers_model(config, "cpu").double()
    theirs = transformers_names(config, state)
    if config.tie_word_embeddings:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    model.load_state_dict(theirs, strict=True)
    return model


def transformers_names(
    config: ModelConfig, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors by the names and in the layout of transformers 5.

    It stacks gate and up of the experts; for gpt-oss they alternate, matrices are transposed, and
    the router stands elsewhere.
    """
    theirs = {}
    for name, tensor in state.items():
        if ".experts.up_proj." in name:
            continue
        if ".experts.gate_proj." in name:
            up = state[name.replace("gate_proj", "up_proj")]
            if config.attention_sinks:
                tensor = torch.stack((tensor, up), 2).flatten(1, 2)
            else:
                tensor = torch.cat((tensor, up), 1)
            name = name.replace("gate_proj", "gate_up_proj")
        if ".experts." in name:
            if config.attention_sinks and name.endswith(".weight"):
                tensor = tensor.transpose(1, 2)
            name = name.removesuffix(".weight").replace(".bias", "_bias")
        elif config.attention_sinks:
            name = name.replace(".mlp.gate.", ".mlp.router.")
        theirs[name] = tensor
    return theirs
