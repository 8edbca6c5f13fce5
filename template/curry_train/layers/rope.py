"""Rotary positions.

Positions travel as a tensor and never come from the local sequence index: a rank that holds only
part of a sequence, and a document that starts in the middle of a sample, need their own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(
    position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every rotation angle.

    Shapes: position_ids int64 [B, S] (or [1, S] when all samples agree); returns two tensors
    [B, 1, S, head_dim] in `dtype`. The angles are formed in float32, float64 when dtype is.
    Source: Su et al. 2021, "RoFormer", section 3.2.2; halves rotated as in Hugging Face's files.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=wide) / head_dim
    angles = position_ids[..., None].to(wide) * theta**-exponent
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHSA: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + A/2) of every head by its position's angle.

    Shapes: x [B, heads, S, A]; cos and sin [B or 1, 1, S, A]; returns x's shape and dtype.
    """
    first, second = x_BHSA.chunk(2, dim=-1)
    return x_BHSA * cos + torch.cat((-second, first), dim=-1) * sin
