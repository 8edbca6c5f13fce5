"""Rotary positions, plain and scaled to longer contexts.

Positions travel as a tensor and never come from the local sequence index: a rank that holds only
part of a sequence, and a document that starts in the middle of a sample, need their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curry_train.config import ModelConfig


def rotary_frequencies(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return the angle between two neighbouring positions for each pair of dimensions, in radians.

    Shapes: returns [A/2] in `dtype`, A = config.rotary_dim; the fastest pair comes first.
    linear divides all by rope_factor. llama3 and yarn leave fast pairs alone, divide slow ones by
    rope_factor and blend between: llama3 linearly in the turns a pair makes in the original
    context, yarn linearly in the index of the pair.
    Source: Su et al. 2021, "RoFormer", section 3.2.2; Chen et al. 2023, "Position Interpolation";
    Peng et al. 2023, "YaRN", section 3.2; for llama3 the code published with Llama 3.1.
    """
    width, factor = config.rotary_dim, config.rope_factor
    exponents = torch.arange(0, width, 2, device=device, dtype=dtype) / width
    frequencies = config.rope_theta**-exponents
    if config.rope_type == "default":
        return frequencies
    if config.rope_type == "linear":
        return frequencies / factor
    original = config.original_max_position_embeddings
    assert original is not None, "rules refuses scaling without the original context"
    if config.rope_type == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = frequencies * (original / (2 * math.pi))
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        first, last = correction_range(config, original)
        pairs = torch.arange(width // 2, device=device, dtype=dtype)
        kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies * kept + frequencies / factor * (1 - kept)


def correction_range(config: ModelConfig, original: int) -> tuple[float, float]:
    """Return the pairs between which yarn goes from unscaled to scaled frequencies.

    They are those that turn rope_beta_fast and rope_beta_slow times in the original context, kept
    inside the head and rounded outwards by rope_truncate; never equal, so that a blend exists.
    """
    width = config.rotary_dim

    def pair_of(turns: float) -> float:
        spread = math.log(original / (turns * 2 * math.pi))
        return width * spread / (2 * math.log(config.rope_theta))

    first, last = pair_of(config.rope_beta_fast), pair_of(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last if last != first else last + 0.001


def temperature(factor: float, mscale: float) -> float:
    """Return yarn's factor on attention logits' root; 1 for contexts that were not stretched.

    Source: Peng et al. 2023, "YaRN", equation 22, with DeepSeek's coefficient `mscale`.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotation_scale(config: ModelConfig) -> float:
    """Return what cosine and sine are multiplied by: 1 unless rope_type is yarn."""
    if config.rope_type != "yarn":
        return 1.0
    whole = temperature(config.rope_factor, config.rope_mscale_all_dim)
    return temperature(config.rope_factor, config.rope_mscale or 1.0) / whole


def softmax_scale(config: ModelConfig) -> float:
    """Return what query-key products are multiplied by before the softmax.

    One over the root of the query's width, and under DeepSeek's yarn the square of the
    temperature of rope_mscale_all_dim, which its rotation leaves out.
    """
    scale = config.query_dim**-0.5
    if config.rope_type == "yarn":
        scale *= temperature(config.rope_factor, config.rope_mscale_all_dim) ** 2
    return scale


def rotary_angles(
    config: ModelConfig, position_ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every rotation angle.

    Shapes: position_ids int64 [B, S] (or [1, S] when all samples agree); returns two tensors
    [B, 1, S, A] in `dtype`, the angles of the A/2 pairs twice. The angles are formed in float32,
    float64 when dtype is.
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = rotary_frequencies(config, wide, position_ids.device)
    angles = position_ids[..., None].to(wide) * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    scale = rotation_scale(config)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x_BHSA: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn each pair of every head by its position's angle.

    Shapes: x [B, heads, S, A]; cos and sin [B or 1, 1, S, A]; returns x's shape and dtype.
    Pairs are (i, i + A/2), as in Llama's files; `interleaved` pairs are (2i, 2i+1), as in
    DeepSeek's, and come out as halves: queries and keys are reordered alike, no score changes.
    """
    if interleaved:
        x_BHSA = torch.cat((x_BHSA[..., 0::2], x_BHSA[..., 1::2]), dim=-1)
    first, second = x_BHSA.chunk(2, dim=-1)
    return x_BHSA * cos + torch.cat((-second, first), dim=-1) * sin
