"""What a training step needs, built one way for train.py, for checks and for benchmarks."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from curry_train.compose import load_config
from curry_train.config import Config, resolve_micro_batch
from curry_train.data import open_corpus
from curry_train.data.loader import Loader
from curry_train.data.samples import Samples
from curry_train.data.token_file import Corpus
from curry_train.loss import mean_loss
from curry_train.optim import LossScale, build_optimizer
from curry_train.parallel.mesh import Mesh
from curry_train.parallel.parallelize import build_chunks
from curry_train.parallel.shards import Shard, whole_shards
from curry_train.profiling import no_spans

if TYPE_CHECKING:
    from curry_train.parallel.pipeline_parallel import Pipeline


@dataclass
class Runtime:
    """Everything that one optimizer step reads or changes.

    `model` is the whole model, or with parallelism this rank's (first) part of it; `chunks` are all
    its parts, one for each pipeline stage on this rank, and `shards` describes their parameters.
    `loss_fn(model, batch)` returns the mean loss of a micro-batch; `batches` yields micro-batches
    for ever and keeps the data position. `step` and `tokens` count what was finished.
    """

    model: nn.Module
    optimizer: torch.optim.AdamW
    loss_fn: Callable[[nn.Module, dict], torch.Tensor]
    batches: Loader
    device: torch.device
    mesh: Mesh
    config: Config
    corpus: Corpus | Samples
    step: int = 0
    tokens: int = 0
    loss_scale: LossScale = field(default_factory=lambda: LossScale("fp32"))
    spans: Callable[[str], Any] = no_spans
    chunks: list[nn.Module] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        self.chunks = self.chunks or [self.model]
        self.shards = self.shards or whole_shards(self.model.named_parameters())

    def train(self, mode: bool = True) -> None:
        """Put every chunk into training or evaluation mode."""
        for chunk in self.chunks:
            chunk.train(mode)


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch; ranks differ, so that no two draw the same noise."""
    random.seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    torch.manual_seed(seed * 1_000_003 + rank)


def assemble(config: Config, corpus: Corpus | Samples, mesh: Mesh) -> Runtime:
    """Build model, optimizer and loader for this rank of `mesh`."""
    seed_everything(config.seed, mesh.rank)
    with warnings.catch_warnings():
        if mesh.rank:
            warnings.simplefilter("ignore")  # all ranks build the same model; one tells about it
        chunks, shards = build_chunks(config, mesh)
    ranks = mesh.dims.batch
    loader = Loader(
        corpus,
        config.data,
        seed=config.seed,
        micro_batch_size=resolve_micro_batch(config, ranks),
        batch_rank=mesh.index("batch"),
        batch_world=ranks,
        device=mesh.device,
    )
    pipeline = None
    if config.parallel.pp > 1:
        from curry_train.parallel.pipeline_parallel import build_pipeline

        pipeline = build_pipeline(config, chunks, mesh)
    return Runtime(
        model=chunks[0],
        optimizer=build_optimizer([(s.name, s.owned) for s in shards], config.optim),
        loss_fn=mean_loss,
        batches=loader,
        device=mesh.device,
        mesh=mesh,
        config=config,
        corpus=corpus,
        loss_scale=LossScale(config.precision),
        chunks=chunks,
        shards=shards,
        pipeline=pipeline,
    )


def build_runtime(overrides: Sequence[str] = (), project: str | Path | None = None) -> Runtime:
    """Build the project's runtime in this process: seeds, writes nothing, makes no run folder.

    `overrides` are command-line settings (`key=value`); `project` is the folder of train.py.
    A process group is used only when a launcher started this process. Raises ConfigError and
    DataError with every problem in plain words.
    """
    from curry_train.launch import join_processes, prepare_environment

    root = Path(project) if project is not None else None
    config = load_config(list(overrides), project=root)
    prepare_environment(config)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch is imported already
    corpus = open_corpus(config.data, cache_dir=None)
    return assemble(config, corpus, join_processes(config, spawn=False))
