"""MXFP4 as gpt-oss is published: 4-bit values in blocks of 32 that share a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Values that share one scale; 16 bytes hold them, two a byte, the low half first."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of an E2M1 number mean; the fourth is its sign."""
BIAS = 127
"""What E8M0 scales, exponents of two, are stored above."""


def decode(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [..., 32 * G] of blocks uint8 [..., G, 16] and scales uint8 [..., G].

    Exact in float64 and, below 2**127, in float32 and bfloat16; a scale of 255 stands for NaN.
    Source: Open Compute Project 2023, "OCP Microscaling Formats", sections 5.3.3 and 5.4.1; which
    half of a byte comes first: the weights published with gpt-oss.
    """
    signed = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((signed[byte & 15], signed[byte >> 4]), dim=1)
    found = pairs[blocks.int()].flatten(-2)
    exponents = scales.to(torch.int32) - BIAS
    found = torch.ldexp(found, exponents[..., None]).to(dtype)
    return found.masked_fill(scales[..., None] == 255, torch.nan).flatten(-2)
