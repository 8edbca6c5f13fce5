"""Attention by its formula, in float64 and one head at a time; shares no line with a project.

`weights` are the float64 parameters of one attention module by their names, `c` is the
configuration of its model. Rotation is a product of complex numbers, the softmax is written out.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def angles_of(c: Any, position_ids: Any) -> Any:
    """Return the rotation angles [B, S, pairs] of positions [B, S]."""
    width = c.qk_rope_head_dim if c.kv_lora_rank else c.head_dim
    found = [frequency(c, pair, width) for pair in range(width // 2)]
    return position_ids.double()[..., None] * torch.tensor(found, dtype=torch.float64)


def frequency(c: Any, pair: int, width: int) -> float:
    """Return radians per position of one pair: plain, linear, llama3 or yarn."""
    plain = c.rope_theta ** (-2 * pair / width)
    if c.rope_type == "default":
        return plain
    if c.rope_type == "linear":
        return plain / c.rope_factor
    original = c.original_max_position_embeddings
    if c.rope_type == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < original / c.rope_high_freq_factor:
            return plain
        if wavelength > original / c.rope_low_freq_factor:
            return plain / c.rope_factor
        share = original / wavelength - c.rope_low_freq_factor
        share /= c.rope_high_freq_factor - c.rope_low_freq_factor
        return share * plain + (1 - share) * plain / c.rope_factor
    ends = [
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))
        for turns in (c.rope_beta_fast, c.rope_beta_slow)
    ]
    if c.rope_truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], width - 1)
    scaled = min(max((pair - first) / ((last - first) or 0.001), 0.0), 1.0)
    return scaled * plain / c.rope_factor + (1 - scaled) * plain


def yarn_temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def scales_of(c: Any) -> tuple[float, float]:
    """Return what the rotation and what the logits are multiplied by."""
    query = c.qk_nope_head_dim + c.qk_rope_head_dim if c.kv_lora_rank else c.head_dim
    if c.rope_type != "yarn":
        return 1.0, query**-0.5
    whole = yarn_temperature(c.rope_factor, c.rope_mscale_all_dim)
    return yarn_temperature(c.rope_factor, c.rope_mscale or 1.0) / whole, query**-0.5 * whole**2


def window_of(c: Any, index: int) -> int | None:
    """Return the keys that a query of block `index` sees; None: all earlier ones."""
    spared = c.sliding_window_pattern and (index + 1) % c.sliding_window_pattern == 0
    return None if spared else c.sliding_window


def turn(x: Any, angles: Any, scale: float, neighbours: bool) -> Any:
    """Turn the pairs of x [B, S, heads, A], neighbours or halves, by angles [B, S, A/2]."""
    pairs = x.unflatten(-1, (-1, 2)) if neighbours else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.full_like(angles, scale), angles
    ).unsqueeze(2)
    turned = torch.view_as_real(turned)
    return turned.flatten(-2) if neighbours else turned.transpose(-1, -2).flatten(-2)


def norm(x: Any, weight: Any, eps: float) -> Any:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def linear(weights: dict[str, Any], name: str, x: Any) -> Any:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def queries_keys_values(
    c: Any, weights: dict[str, Any], x: Any, angles: Any, *, qk_norm: bool
) -> tuple[Any, Any, Any]:
    """Return q, k and v [B, S, heads, width] as they meet; keys of every query head."""
    heads, (rotation, _) = c.num_attention_heads, scales_of(c)

    def turned(part: Any) -> Any:
        return turn(part, angles, rotation, c.rope_interleave)

    def split(part: Any, count: int) -> Any:
        return part.unflatten(-1, (count, -1))

    if c.kv_lora_rank == 0:
        groups = c.num_key_value_heads
        q, k, v = (linear(weights, f"{name}_proj", x) for name in "qkv")
        whole = getattr(c, "qk_norm_width", "head") == "projection"
        if not whole:
            q, k = split(q, heads), split(k, groups)
        if qk_norm and "q_norm.weight" in weights:
            q = norm(q, weights["q_norm.weight"], c.rms_norm_eps)
            k = norm(k, weights["k_norm.weight"], c.rms_norm_eps)
        if whole:
            q, k = split(q, heads), split(k, groups)
        v = split(v, groups)
        limit = getattr(c, "clip_qkv", None)
        if limit is not None:
            q, k, v = (part.clamp(-limit, limit) for part in (q, k, v))
        k, v = (part.repeat_interleave(heads // groups, 2) for part in (turned(k), v))
        return turned(q), k, v
    still, rope = c.qk_nope_head_dim, c.qk_rope_head_dim
    if c.q_lora_rank:
        small = norm(
            linear(weights, "q_a_proj", x), weights["q_a_layernorm.weight"], c.rms_norm_eps
        )
        q = split(linear(weights, "q_b_proj", small), heads)
    else:
        q = split(linear(weights, "q_proj", x), heads)
    q = torch.cat((q[..., :still], turned(q[..., still:])), -1)
    joint = linear(weights, "kv_a_proj_with_mqa", x)
    latent = norm(joint[..., :-rope], weights["kv_a_layernorm.weight"], c.rms_norm_eps)
    expanded = split(linear(weights, "kv_b_proj", latent), heads)
    shared = turned(joint[..., -rope:].unsqueeze(2)).expand(-1, -1, heads, -1)
    return q, torch.cat((expanded[..., :still], shared), -1), expanded[..., still:]


def attention(
    c: Any,
    weights: dict[str, Any],
    x: Any,
    position_ids: Any,
    doc_ids: Any,
    window: int | None,
    *,
    qk_norm: bool = True,
) -> tuple[Any, float, float]:
    """Return (output [B, S, D], largest logit in size, mean entropy of a query in nats)."""
    angles = angles_of(c, position_ids)
    q, k, v = queries_keys_values(c, weights, x, angles, qk_norm=qk_norm)
    length = x.shape[1]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (key <= query) & (query - key < (window or length))
    if doc_ids is not None:
        seen = seen & (doc_ids[:, :, None] == doc_ids[:, None])
    outputs, largest, entropy = [], 0.0, 0.0
    for head in range(c.num_attention_heads):
        logits = q[:, :, head] @ k[:, :, head].transpose(1, 2) * scales_of(c)[1]
        largest = max(largest, float(logits.masked_fill(~seen, 0).abs().max()))
        logits = logits.masked_fill(~seen, -torch.inf)
        total = logits.logsumexp(-1, keepdim=True)
        if "sinks" in weights:
            total = torch.logaddexp(total, weights["sinks"][head])
        share = (logits - total).exp()
        entropy -= float((share * (share + 1e-300).log()).sum(-1).mean())
        outputs.append(share @ v[:, :, head])
    joined = torch.cat(outputs, -1)
    return linear(weights, "o_proj", joined), largest, entropy / c.num_attention_heads


def stir(module: Any) -> None:
    """Move biases, sinks and weights of norms in place: at their start, 0 or 1, none of them shows
    when it is left out.
    """
    generator = torch.Generator().manual_seed(0)
    for vector in (p for p in module.parameters() if p.dim() == 1):
        vector += 0.5 * torch.rand(vector.shape, generator=generator, dtype=vector.dtype)
