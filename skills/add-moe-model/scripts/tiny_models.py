"""A tiny random model of a config.json, in transformers and in float64 throughout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kit.errors import UsageError
from kit.transformers_float64 import in_float64

LENGTH, VOCAB, LAYERS, EXPERTS = 24, 257, 2, 8
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "head_dim": 8, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_head_dim": 24, "v_head_dim": 12, "sliding_window": 5,
}  # fmt: skip
AT_MOST = {
    "num_experts_per_tok": 3, "experts_per_token": 3, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "max_position_embeddings": 4096, "num_nextn_predict_layers": 0,
}  # fmt: skip
BITING = {"clip_qkv": 1.0, "swiglu_limit": 0.7}
"""Limits so small that a tiny model reaches them, where the config has any."""
DROPPED = ("quantization_config", "auto_map", "dtype", "torch_dtype")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ORIGINAL = 64
"""Context before scaling, so short that 24 tokens and 4 pairs of a head see the scaling."""
TIED_LAYERS = 4
"""Blocks of a model with tied ends, which two stages run as four chunks."""


def tiny(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of the same kind in tiny sizes; only keys that are there change."""
    out = {key: copy.deepcopy(value) for key, value in raw.items() if key not in DROPPED}
    known = {key for key, value in out.items() if value is not None}
    out |= {key: size for key, size in SIZES.items() if key in known}
    layers = TIED_LAYERS if raw.get("tie_word_embeddings") else LAYERS
    out["num_hidden_layers"] = layers
    out |= {key: min(out[key], most) for key, most in AT_MOST.items() if key in known}
    out |= {key: limit for key, limit in BITING.items() if key in known}
    out |= {key: None for key in IDS if key in out}
    if "qk_rope_head_dim" in known and "head_dim" in known:
        out["head_dim"] = SIZES["qk_rope_head_dim"]
    keys, heads = raw.get("num_key_value_heads"), raw.get("num_attention_heads")
    if keys is not None:
        out["num_key_value_heads"] = 4 if keys == heads else min(keys, 2)
    if (raw.get("n_group") or 1) > 1:
        out |= {"n_group": 4, "topk_group": 2 if raw["topk_group"] < raw["n_group"] else 4}
    if raw.get("max_window_layers") is not None:
        every = raw["max_window_layers"] >= (raw.get("num_hidden_layers") or 0)
        out["max_window_layers"] = layers if every else min(raw["max_window_layers"], 1)
    for key in ("layer_types", "mlp_only_layers"):
        if out.get(key):
            out[key] = out[key][:layers] if key == "layer_types" else [
                at for at in out[key] if at < layers
            ]  # fmt: skip
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(out.get(name), dict):
            _shorten(out, out[name])
    return out


def _shorten(out: dict[str, Any], rope: dict[str, Any]) -> None:
    """Let a scaled rotation begin at a context of ORIGINAL tokens."""
    if rope.get("original_max_position_embeddings") or rope.get("factor"):
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = ORIGINAL
        out["max_position_embeddings"] = round(ORIGINAL * (rope.get("factor") or 1))
        if out.get("original_max_position_embeddings"):
            out["original_max_position_embeddings"] = ORIGINAL


def settings_of(raw: Mapping[str, Any]) -> Any:
    """Return the transformers configuration of a config.json, with its plain code paths."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    values = {key: value for key, value in raw.items() if key != "model_type"}
    settings = transformers.AutoConfig.for_model(raw["model_type"], **values)
    settings._experts_implementation = "eager"  # its grouped product takes no float64
    settings._attn_implementation = "eager"
    return settings


def class_of(architecture: str) -> type:
    """Return the class of transformers for an architecture. Raises: UsageError."""
    import transformers

    if not hasattr(transformers, architecture):
        raise UsageError(
            f"transformers {transformers.__version__} has no {architecture}",
            "gates compare with its own model",
            "install a newer transformers",
        )
    return getattr(transformers, architecture)


def meta_parameters(raw: Mapping[str, Any], architecture: str) -> int:
    """Count the parameters of transformers' own model, built without values."""
    with torch.device("meta"):
        model = class_of(architecture)(settings_of(raw))
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(raw: Mapping[str, Any], architecture: str, seed: int = 0) -> Any:
    """Return transformers' model in float64 with values that make every path matter."""
    model_class = class_of(architecture)
    with in_float64(model_class):
        model = model_class(settings_of(raw)).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
            if "inv_freq" in name:
                continue
            noise = torch.empty(tensor.shape, dtype=torch.float64).normal_(generator=generator)
            vector = tensor.dim() == 1 or name.endswith("bias")
            base = 1.0 if name.endswith("norm.weight") else 0.0
            tensor.copy_(base + 0.5 * noise if vector else 0.16 * noise)
    return model


def save(model: Any, folder: Path) -> Path:
    """Write a model as transformers publishes it: config.json and safetensors."""
    model.save_pretrained(folder)
    return folder
