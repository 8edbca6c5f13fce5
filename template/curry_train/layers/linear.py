"""Matrix products whose weights follow the dtype of their input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def local(weight: Tensor) -> Tensor:
    """Return the values of a weight that this rank holds: all [any shape], or its own slice."""
    # Of the class: while torch.compile traces, the instance itself denies having the method.
    return weight.to_local() if hasattr(type(weight), "to_local") else weight


class Linear(nn.Module):
    """Multiply by a weight of shape [out_features, in_features], perhaps add a bias.

    Shapes: x [..., in_features] of any float dtype; returns [..., out_features] in the dtype of x.
    Weight and bias are stored in their own dtype (float32 under bf16) and cast for the product.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias).to(x.dtype)
        return F.linear(x, local(self.weight).to(x.dtype), bias)


class Embedding(nn.Module):
    """Look up rows of a weight of shape [rows, width].

    Shapes: ids int64 [...]; returns [..., width] in the dtype of the weight.
    Rows beyond the vocabulary are padding: no id reaches them and they stay zero.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, local(self.weight))
