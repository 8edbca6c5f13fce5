"""Data to batches: the position is one integer, any rank can compute any sample.

Sample i is row perm(e, i - e*n) of n: the full windows of the training text, or the training
samples. Epoch e = i // n is its own permutation, keyed by (seed, e), and visits every row once. The
permutation is computed, not stored. Nothing depends on ranks or batch sizes: a step takes the next
global_batch_size samples, rank r its contiguous part of them. So a run resumes exactly on another
number of ranks, with another batch size, in the middle of an epoch.

There are no worker processes: reading from the mapping is ten times faster than receiving a batch
from a worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from curry_train.data.samples import IGNORED, Samples, count, draw
from curry_train.data.token_file import Corpus, TokenStream, check_windows

if TYPE_CHECKING:
    from curry_train.config import DataConfig

Batch = dict[str, torch.Tensor]
ROUNDS = 6
ORDER_BLOCK = 4096
"""Samples whose rows are computed at once; amortises the calls."""


class Loader:
    """Batches of the training split, without end.

    `samples_consumed` counts the samples of all ranks and is the whole state: read it into a
    checkpoint, set it to resume.
    """

    def __init__(
        self,
        corpus: Corpus | Samples,
        data: DataConfig,
        *,
        seed: int,
        micro_batch_size: int,
        batch_rank: int = 0,
        batch_world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(corpus, Corpus):
            check_windows(corpus.train, data.seq_len, "training")
        if data.global_batch_size % (batch_world * micro_batch_size):
            raise ValueError(
                f"data.global_batch_size={data.global_batch_size} does not divide into "
                f"{batch_world} ranks with micro-batches of {micro_batch_size}; set it to a "
                f"multiple of {batch_world * micro_batch_size}"
            )
        self.samples_consumed = 0
        self.global_batch_size = data.global_batch_size
        self.micro_batch_size = micro_batch_size
        self.samples_per_epoch = (
            corpus.train.tokens // data.seq_len
            if isinstance(corpus, Corpus)
            else count(corpus.train)
        )
        self._split = corpus.train
        self._seq_len = data.seq_len
        self._document_mask = data.document_mask
        self._seed = seed
        self._local = data.global_batch_size // batch_world
        self._offset = batch_rank * self._local
        self._device = torch.device(device)
        self._rows = np.empty(0, dtype=np.int64)
        self._rows_of = 0

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the next optimizer step and advance by one step."""
        rows = self._rows_from(self.samples_consumed + self._offset, self._local)
        self.samples_consumed += self.global_batch_size
        if isinstance(self._split, TokenStream):
            starts = rows * self._seq_len
            windows = self._split.windows(starts, self._seq_len + 1)
            arrays = _text_arrays(self._split, windows, starts, self._document_mask)
        else:
            arrays = draw(self._split, rows)
        batch = _to_device(arrays, self._device)
        if self.micro_batch_size == self._local:
            return [batch]
        split = {name: tensor.split(self.micro_batch_size) for name, tensor in batch.items()}
        return [dict(zip(split, part, strict=True)) for part in zip(*split.values(), strict=True)]

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro-batches without end, advancing by a step before its first one."""
        while True:
            yield from self.next_step()

    def _rows_from(self, first: int, number: int) -> np.ndarray:
        """Return the rows of `number` samples from global sample `first`, int64[number]."""
        at = first - self._rows_of
        if not 0 <= at <= len(self._rows) - number:
            samples = np.arange(first, first + max(number, ORDER_BLOCK))
            epochs, indices = np.divmod(samples, self.samples_per_epoch)
            self._rows = permute(indices, epochs, self.samples_per_epoch, self._seed)
            self._rows_of, at = first, 0
        return self._rows[at : at + number]


def validation_batches(
    corpus: Corpus | Samples,
    data: DataConfig,
    *,
    micro_batch_size: int,
    batch_rank: int = 0,
    batch_world: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Yield this rank's share of the validation split: every target is a label on one rank, once.

    All ranks get the same number of batches of the same shape, so that collectives inside the model
    match. The last ones are padded: text with eos as input, -100 as label and -1 as document,
    samples with the first of them, its labels missing.
    """
    split, length = corpus.val, data.seq_len
    total = -(-split.tokens // length) if isinstance(split, TokenStream) else count(split)
    rounds = -(-total // (batch_world * micro_batch_size))
    for number in range(rounds):
        first = (number * batch_world + batch_rank) * micro_batch_size
        rows = np.arange(first, first + micro_batch_size)
        if isinstance(split, TokenStream):
            arrays = _held_out_text(split, rows * length, length, data.document_mask)
        else:
            arrays = draw(split, np.where(rows < total, rows, 0))
            missing = np.nan if arrays["labels"].dtype.kind == "f" else IGNORED
            arrays["labels"][rows >= total] = missing
        yield _to_device(arrays, torch.device(device))


def permute(indices: np.ndarray, epochs: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Map indices below `size` one-to-one onto range(size), by a key of (seed, epoch).

    Shapes: indices, epochs and the result are int64[any], one epoch an index.
    A Feistel network on the smallest 2**bits >= size; what lands outside goes through it again
    until it lands inside (cycle walking, under one more turn on average).
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002; the round function is
    the finalizer of splitmix64.
    """
    bits = max(1, (size - 1).bit_length())
    low_bits = np.uint64(bits - bits // 2)
    low_mask = np.uint64(2 ** int(low_bits) - 1)
    high_mask = np.uint64(2 ** (bits // 2) - 1)
    key = np.uint64(int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little"))
    keys = _mix(key + epochs.astype(np.uint64))
    out = indices.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        x, key_of = out[walking], keys[walking]
        low, high = x & low_mask, x >> low_bits
        for number in range(0, ROUNDS, 2):
            low = low ^ (_mix(high ^ _mix(key_of + np.uint64(number))) & low_mask)
            high = high ^ (_mix(low ^ _mix(key_of + np.uint64(number + 1))) & high_mask)
        out[walking] = high << low_bits | low
        walking = walking[out[walking] >= np.uint64(size)]
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64, one-to-one; the first addition keeps zero from mapping to zero."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _held_out_text(
    stream: TokenStream, starts: np.ndarray, length: int, document_mask: bool
) -> dict[str, np.ndarray]:
    """Make a batch of windows that may lie beyond the end. Shapes: [B] -> int64[B, S] each."""
    windows = np.full((len(starts), length + 1), stream.eos_id)
    for row, start in enumerate(starts.tolist()):
        found = stream.window(start, length + 1)
        windows[row, : len(found)] = found
    arrays = _text_arrays(stream, windows, starts, document_mask)
    padding = starts[:, None] + np.arange(length) >= stream.tokens
    arrays["labels"][padding] = IGNORED
    if document_mask:
        arrays["doc_ids"][padding] = -1
    return arrays


def _text_arrays(
    stream: TokenStream, windows: np.ndarray, starts: np.ndarray, document_mask: bool
) -> dict[str, np.ndarray]:
    """Make a batch of windows that begin at `starts`. Shapes: [B, S+1], [B] -> int64[B, S] each.

    A document begins with the eos before it, which predicts its first token, so that it never sees
    another one. Positions count from there or from the window's begin.
    """
    inputs, labels = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
    arrays = {"input_ids": inputs, "labels": labels}
    if document_mask:
        begins = inputs == stream.eos_id
        begins[:, 0] = True
        stretches = np.flatnonzero(begins)
        sizes = np.diff(stretches, append=begins.size)
        row, column = np.divmod(stretches, inputs.shape[1])
        document = np.searchsorted(stream.document_ends, starts[row] + column, side="right")
        positions = np.arange(begins.size) - np.repeat(stretches, sizes)
        arrays["doc_ids"] = np.repeat(document, sizes).reshape(inputs.shape)
        arrays["position_ids"] = positions.reshape(inputs.shape)
    return arrays


def _to_device(arrays: dict[str, np.ndarray], device: torch.device) -> Batch:
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cpu":
        return batch
    if device.type == "cuda":  # only a pinned copy can overlap with computation
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
