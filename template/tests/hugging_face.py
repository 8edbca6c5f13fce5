"""The same model in transformers: its configuration, its module and its names for our tensors.

Parity tests and parameter counts both start from a ModelConfig and go through this file, so a
preset that says one thing and means another cannot pass either.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from curry_train.config import ModelConfig

SAME = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps"
    " tie_word_embeddings max_position_embeddings attention_bias"
).split()
LATENT = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim first_k_dense_replace".split()


def family(config: ModelConfig) -> str:
    """Name the model class of transformers that a configuration stands for."""
    if config.kv_lora_rank:
        return "DeepseekV3" if config.scoring_func == "sigmoid" else "DeepseekV2"
    if config.attention_sinks:
        return "GptOss"
    if config.num_experts and config.qk_norm_width == "projection":
        return "Olmoe"
    if config.num_experts:
        return "Qwen3Moe" if config.qk_norm else "Mixtral"
    if config.qk_norm:
        return "Qwen3"
    return "Llama" if config.attention_out_bias else "Qwen2"


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return transformers' dict of what turns queries and keys."""
    found = {"rope_type": config.rope_type, "rope_theta": config.rope_theta}
    if config.rope_type == "default":
        return found
    found["factor"] = config.rope_factor
    if config.rope_type == "linear":
        return found
    found["original_max_position_embeddings"] = config.original_max_position_embeddings
    if config.rope_type == "llama3":
        found["low_freq_factor"] = config.rope_low_freq_factor
        found["high_freq_factor"] = config.rope_high_freq_factor
        return found
    found["beta_fast"], found["beta_slow"] = config.rope_beta_fast, config.rope_beta_slow
    found["truncate"] = config.rope_truncate
    if config.rope_mscale_all_dim:
        found["mscale"] = config.rope_mscale
        found["mscale_all_dim"] = config.rope_mscale_all_dim
    return found


def transformers_config(config: ModelConfig) -> Any:
    """Return the configuration of the same model in transformers."""
    transformers = pytest.importorskip("transformers")
    kind = family(config)
    fields = {name: getattr(config, name) for name in SAME}
    fields |= {"rope_parameters": rope_parameters(config), "head_dim": config.head_dim}
    fields["intermediate_size"] = config.intermediate_size
    if config.num_experts:
        fields["num_experts_per_tok"] = config.num_experts_per_tok
        fields["moe_intermediate_size"] = config.moe_intermediate_size
        fields["norm_topk_prob"] = config.norm_topk_prob
    if kind == "Qwen3Moe":
        fields["num_experts"] = config.num_experts
    elif kind == "Olmoe":
        fields |= {"num_experts": config.num_experts, "clip_qkv": config.clip_qkv}
        fields["intermediate_size"] = fields.pop("moe_intermediate_size")
    elif kind in ("Mixtral", "GptOss"):
        fields["num_local_experts"] = config.num_experts
        fields["intermediate_size"] = fields.pop("moe_intermediate_size")
        del fields["norm_topk_prob"]
    if kind == "Mixtral":
        fields["sliding_window"] = config.sliding_window
    elif kind == "GptOss":
        fields |= {"sliding_window": config.sliding_window, "swiglu_limit": config.swiglu_limit}
        fields["layer_types"] = [
            "full_attention" if config.window_of(layer) is None else "sliding_attention"
            for layer in range(config.num_hidden_layers)
        ]
    elif kind.startswith("Deepseek"):
        del fields["head_dim"]  # there it is the rotated part
        fields |= _deepseek(config, kind)
    settings = getattr(transformers, f"{kind}Config")(**fields)
    settings._experts_implementation = "eager"  # its grouped_mm takes no float64
    settings._attn_implementation = "eager" if kind == "GptOss" else "sdpa"
    return settings


def _deepseek(config: ModelConfig, kind: str) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(config, name) for name in LATENT}
    shared = config.shared_expert_intermediate_size
    fields |= {
        "q_lora_rank": config.q_lora_rank or None,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": shared // config.moe_intermediate_size,
        "routed_scaling_factor": config.routed_scaling_factor,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
    }
    if kind == "DeepseekV3":
        fields["rope_interleave"] = config.rope_interleave
    else:
        fields["topk_method"] = "greedy" if config.n_group == 1 else "group_limited_greedy"
    return fields


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
