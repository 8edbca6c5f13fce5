"""The attention layer of transformers with a project's weights; needs transformers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from reference_attention import angles_of, scales_of

LATENT = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()


def kind_of(c: Any) -> str:
    """Name the family whose layer a configuration has."""
    if c.kv_lora_rank:
        return "DeepseekV3"
    if c.attention_sinks:
        return "GptOss"
    if getattr(c, "qk_norm_width", "head") == "projection":
        return "Olmoe"
    return "Qwen3" if c.qk_norm else "Llama"


def file_of(kind: str) -> str:
    return {"DeepseekV3": "deepseek_v3", "GptOss": "gpt_oss"}.get(kind, kind.lower())


def settings_of(c: Any, kind: str) -> Any:
    """Return a configuration with what the layer reads."""
    package = importlib.import_module(f"transformers.models.{file_of(kind)}")
    names = ["hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"]
    names += LATENT if c.kv_lora_rank else ["head_dim"]
    names += ["attention_bias", "max_position_embeddings"]
    values = {name: getattr(c, name) for name in names}
    values |= {"clip_qkv": c.clip_qkv} if kind == "Olmoe" else {}
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.kv_lora_rank:
        values |= {"q_lora_rank": c.q_lora_rank or None, "rope_interleave": c.rope_interleave}
        if c.rope_type == "yarn":  # the layer itself scales the softmax
            rope = {
                "rope_type": "yarn",
                "rope_theta": c.rope_theta,
                "factor": c.rope_factor,
                "original_max_position_embeddings": c.original_max_position_embeddings,
                "mscale": c.rope_mscale,
                "mscale_all_dim": c.rope_mscale_all_dim,
            }
    settings = getattr(package, f"{kind}Config")(
        num_hidden_layers=1, rope_parameters=rope, **values
    )
    settings._attn_implementation = "eager" if kind == "GptOss" else "sdpa"
    return settings


def attention(
    c: Any, weights: dict[str, Any], x: Any, position_ids: Any, doc_ids: Any, window: int | None
) -> Any:
    """Return the output [B, S, D] of transformers' layer in float64 (its norms are float32)."""
    kind = kind_of(c)
    modeling = importlib.import_module(
        f"transformers.models.{file_of(kind)}.modeling_{file_of(kind)}"
    )
    layer = getattr(modeling, f"{kind}Attention")(settings_of(c, kind), 0).double().eval()
    layer.load_state_dict(weights, strict=True)
    length = x.shape[1]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (key <= query) & (query - key < (window or length))
    seen = seen[None] if doc_ids is None else seen & (doc_ids[:, :, None] == doc_ids[:, None])
    mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
    angles = angles_of(c, position_ids)
    if kind != "GptOss":
        angles = torch.cat((angles, angles), -1)
    rotation, _ = scales_of(c)
    turns = (angles.cos() * rotation, angles.sin() * rotation)
    with torch.no_grad():
        return layer(x, position_embeddings=turns, attention_mask=mask[:, None])[0]
