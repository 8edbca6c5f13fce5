"""The loss of the held-out data, whole and always the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from curry_train.data.loader import validation_batches
from curry_train.data.token_file import Corpus
from curry_train.loss import token_sums, zero_totals
from curry_train.parallel import grads
from curry_train.parallel.context_parallel import take
from curry_train.runtime import Runtime
from curry_train.step import count_once


@torch.no_grad()
def evaluate(runtime: Runtime, stop: Callable[[], int] | None = None) -> dict[str, float]:
    """Return `val/loss`, per target of the whole split, and of text `val/bpb`, bits per byte.

    Every held-out target counts exactly once, whatever the ranks and batch sizes. Auxiliary
    losses do not count. Empty when `stop`, asked after every batch, says on all ranks to give up.
    Group: world; one all-reduce at the end.
    """
    mesh = runtime.mesh
    runtime.train(False)
    totals = zero_totals(runtime.device)
    batches = validation_batches(
        runtime.corpus,
        runtime.config.data,
        micro_batch_size=runtime.batches.micro_batch_size,
        batch_rank=mesh.index("batch"),
        batch_world=mesh.size("batch"),
        device=runtime.device,
    )
    for whole in batches:
        batch = take(whole, mesh.group("cp"))
        if runtime.pipeline is None:
            totals += token_sums(runtime.model, batch).detached()
        else:
            totals += runtime.pipeline.forward_sums(runtime, batch)
        if stop is not None and stop():
            runtime.train()
            return {}
    runtime.train()
    totals = count_once(totals, mesh)
    nll, _, _, count = grads.sum_counts(totals, mesh.group("world")).tolist()
    scores = {"val/loss": nll / count}
    if isinstance(runtime.corpus, Corpus):
        scores["val/bpb"] = nll / math.log(2.0) / runtime.corpus.val.bytes
    return scores
