"""The loss as a sum over targets, so that it can be added over micro-batches and ranks.

Nobody averages here: `parallel/grads.py` divides once, by the global count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.data.loader import IGNORED, Batch
from curry_train.kernels.routing_ops import cross_entropy_rows
from curry_train.models.protocol import ModelOutput
from curry_train.parallel.collectives import sum_forward
from curry_train.parallel.tensor_parallel import vocab_parallel_nll


class TokenSums(NamedTuple):
    """Totals of one micro-batch, as scalar tensors in float64 (float32 on mps).

    Adding in float64 makes the reported loss independent of how samples are split over ranks.
    nll: negative log likelihood in nats, or what else a model's own loss adds up; aux, z: auxiliary
    losses of each sequence times its token count, coefficients included; count: non-ignored
    targets, int64. tokens_per_expert: int64 [MoE blocks, E], what the routers chose, as a value of
    this forward pass: a pass that activation checkpointing makes again counts nothing twice. None
    without experts.
    """

    nll: Tensor
    aux: Tensor
    z: Tensor
    count: Tensor
    tokens_per_expert: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """What backward starts from."""
        return self.nll + self.aux + self.z

    def detached(self) -> Tensor:
        """Return [nll, aux, z, count] as one tensor."""
        parts = (self.nll, self.aux, self.z, self.count)
        return torch.stack([part.detach().to(self.nll.dtype) for part in parts])


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def zero_totals(device: torch.device) -> Tensor:
    """Return the empty sum that `TokenSums.detached` is added to."""
    return torch.zeros(4, dtype=wide_dtype(device), device=device)


def token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log likelihood of each row in nats, 0 where the label is -100.

    Shapes: logits [N, V] of any float dtype, labels int64 [N]; returns [N] in float32, float64 of
    float64. On a GPU one kernel reads bf16 logits as they are, without a float32 copy.
    """
    if logits.is_cuda:
        return cross_entropy_rows(logits, labels, ignore=IGNORED)[0]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")


def token_sums(model: nn.Module, batch: Batch) -> TokenSums:
    """Run the model on one micro-batch and return the totals of its targets.

    A model with a `loss_sums` computes them itself. Else it is a language model; shapes: input_ids
    and labels int64 [B, S], labels already shifted, -100 ignored; position_ids and doc_ids int64
    [B, S] when documents are masked.
    """
    if hasattr(model, "loss_sums"):
        return model.loss_sums(batch)
    out = model(batch["input_ids"], batch.get("position_ids"), batch.get("doc_ids"))
    return sums_of_output(model, out, batch["labels"])


def sums_of_output(model: nn.Module, out: ModelOutput, labels: Tensor) -> TokenSums:
    """Return the totals of what the model put out for labels int64 [B, S].

    With tensor or context parallelism (`model.tp`, `model.cp`) nll and count are those of this
    rank's tokens, and aux and z those of the whole sequences, equal on every rank that shares
    them: each owes the gradient of its own tokens alone. Groups: tp, as vocab_parallel_nll; cp, one
    all-reduce of [B].
    """
    tp, cp = getattr(model, "tp", None), getattr(model, "cp", None)
    wide = wide_dtype(labels.device)
    logits = out.logits.flatten(0, -2)
    if tp is None:
        nll = token_nll(logits, labels.flatten()).sum(dtype=wide)
    else:
        nll = vocab_parallel_nll(logits, labels.flatten(), tp).sum(dtype=wide)
    tokens_B = (labels != IGNORED).sum(1)
    count, tokens_B = tokens_B.sum(), sum_forward(tokens_B, cp)
    zero = nll.new_zeros(())
    aux = zero if out.aux_loss is None else (out.aux_loss * tokens_B).sum(dtype=wide)
    z = zero if out.z_loss is None else (out.z_loss * tokens_B).sum(dtype=wide)
    return TokenSums(nll, aux, z, count, out.tokens_per_expert)


def class_sums(logits: Tensor, labels: Tensor) -> TokenSums:
    """Return the totals of a classifier's cross entropy.

    Shapes: logits [..., C] of any float dtype, labels int64 [...], -100 where one is missing.
    Raises ValueError for other shapes.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits have shape {list(logits.shape)}, labels {list(labels.shape)}: logits must have"
            " the shape of the labels and the classes last; change what the model returns"
        )
    nll = token_nll(logits.flatten(0, -2), labels.flatten()).sum(dtype=wide_dtype(labels.device))
    return TokenSums(nll, nll.new_zeros(()), nll.new_zeros(()), (labels != IGNORED).sum())


def value_sums(
    values: Tensor, labels: Tensor, loss: Callable[..., Tensor] = F.mse_loss
) -> TokenSums:
    """Return the totals of a loss between numbers: F.mse_loss, F.l1_loss or another of torch's
    that takes reduction="none", such as F.binary_cross_entropy_with_logits for several labels.

    Shapes: values and labels both [...], NaN where a label is missing. Computed in float32, float64
    of float64. Raises ValueError when the shapes differ: broadcasting would compare every pair.
    """
    if values.shape != labels.shape:
        raise ValueError(
            f"values have shape {list(values.shape)}, labels {list(labels.shape)}: both must be the"
            " same; squeeze or view the one that is wrong"
        )
    there = ~labels.isnan()
    found = values[there].to(torch.promote_types(values.dtype, torch.float32))
    total = loss(found, labels[there].to(found.dtype), reduction="none")
    total = total.sum(dtype=wide_dtype(labels.device))
    return TokenSums(total, total.new_zeros(()), total.new_zeros(()), there.sum())


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over non-ignored targets plus the weighted auxiliary terms, a scalar.

    This is the `loss_fn` that checks call; training divides the same sums by the global count.
    """
    sums = token_sums(model, batch)
    return sums.total / sums.count.clamp(min=1)
