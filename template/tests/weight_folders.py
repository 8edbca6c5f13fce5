"""Tiny random models of transformers as folders, all architectures and their variants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = SIZES | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SCALED = YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
EXPERTS = SIZES | {"num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"rope_parameters": LLAMA3, "attention_bias": True},
    "Llama tied": SIZES | {"tie_word_embeddings": True, "head_dim": 16, "num_hidden_layers": 4},
    "Qwen2": SIZES,
    "Qwen2 windows": SIZES | {
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4,
        "max_window_layers": 0,
    },
    "Qwen3": SIZES | {"head_dim": 8, "rope_parameters": YARN},
    "Mixtral": EXPERTS | {"num_local_experts": 4, "sliding_window": 5},
    "Qwen3Moe": EXPERTS | {
        "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 16,
        "mlp_only_layers": [0], "num_hidden_layers": 3,
    },
    "Olmoe": EXPERTS | {"num_experts": 4, "intermediate_size": 16, "clip_qkv": 1.5},
    "DeepseekV2 lite": LATENT | {"q_lora_rank": None, "rope_parameters": SCALED},
    "DeepseekV2 groups": LATENT | {
        "n_routed_experts": 8, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5,
    },
    "DeepseekV3": LATENT | {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_parameters": SCALED,
    },
    "GptOss": EXPERTS | {
        "num_local_experts": 4, "head_dim": 8, "intermediate_size": 32, "sliding_window": 5,
        "rope_parameters": YARN | {"truncate": False},
    },
}  # fmt: skip
"""Keyed by the class of transformers and a word; gpt-oss has square experts, so that a matrix that
was not transposed has a right shape."""


def save(name: str, folder: Path, **options: Any) -> Path:
    """Write the model `name` as transformers does; its values are large, and none is a default."""
    transformers = pytest.importorskip("transformers")
    kind = name.split()[0]
    settings = getattr(transformers, f"{kind}Config")(**MODELS[name])
    model = getattr(transformers, f"{kind}ForCausalLM")(settings)
    generator = torch.Generator().manual_seed(7)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for key, tensor in tensors:
            if "inv_freq" in key:
                continue
            tensor.normal_(0, 0.3, generator=generator)
            if key.endswith(("norm.weight", "layernorm.weight")):
                tensor.add_(1.0)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite config.json after `change` has altered it."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def as_version_4(raw: dict[str, Any]) -> None:
    """Turn the keys of a config.json into those that transformers 4 wrote."""
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    raw["torch_dtype"] = raw.pop("dtype")
    if raw["model_type"] == "qwen3_moe":
        raw["num_experts"] = raw.pop("num_local_experts")
    if raw["model_type"] != "gpt_oss":
        raw.pop("layer_types", None)
