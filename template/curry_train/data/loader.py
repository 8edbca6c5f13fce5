"""Tokens to batches: the position is one integer, any rank can compute any sample.

Sample i is window perm(e, i - e*n) of the n full windows of the training split, with e = i // n:
each epoch is its own permutation, keyed by (seed, e), and visits every window once. The permutation
is computed, not stored. Nothing depends on ranks or batch sizes: a step takes the next
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

from curry_train.data.token_file import Corpus, TokenStream, check_windows

if TYPE_CHECKING:
    from curry_train.config import DataConfig

Batch = dict[str, torch.Tensor]
IGNORED = -100
ROUNDS = 6
ORDER_BLOCK = 4096
"""Samples whose windows are computed at once; bounds the memory and amortises the calls."""


class Loader:
    """Batches of the training split, without end.

    `samples_consumed` counts the samples of all ranks and is the whole state: read it into a
    checkpoint, set it to resume.
    """

    def __init__(
        self,
        corpus: Corpus,
        data: DataConfig,
        *,
        seed: int,
        micro_batch_size: int,
        batch_rank: int = 0,
        batch_world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
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
        self.windows_per_epoch = corpus.train.tokens // data.seq_len
        self._stream = corpus.train
        self._seq_len = data.seq_len
        self._document_mask = data.document_mask
        self._seed = seed
        self._local = data.global_batch_size // batch_world
        self._offset = batch_rank * self._local
        self._device = torch.device(device)
        self._block = -1
        self._order = np.empty(0, dtype=np.int64)

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the next optimizer step and advance by one step."""
        first = self.samples_consumed + self._offset
        starts = self._windows(first, self._local) * self._seq_len
        self.samples_consumed += self.global_batch_size
        batch = _batch(self._stream, starts, self._seq_len, self._document_mask)
        batch = _to_device(batch, self._device)
        size = self.micro_batch_size
        return [
            {name: tensor[at : at + size] for name, tensor in batch.items()}
            for at in range(0, self._local, size)
        ]

    def __iter__(self) -> Iterator[Batch]:
        """Yield micro-batches without end, advancing by a step before its first one."""
        while True:
            yield from self.next_step()

    def _windows(self, first: int, count: int) -> np.ndarray:
        """Window of each of `count` samples from global sample `first`."""
        found = []
        while count:
            block, at = divmod(first, ORDER_BLOCK)
            if block != self._block:
                samples = np.arange(block * ORDER_BLOCK, (block + 1) * ORDER_BLOCK)
                epochs, indices = np.divmod(samples, self.windows_per_epoch)
                self._order = permute(indices, epochs, self.windows_per_epoch, self._seed)
                self._block = block
            found.append(self._order[at : at + count])
            first += len(found[-1])
            count -= len(found[-1])
        return np.concatenate(found)


def validation_batches(
    corpus: Corpus,
    data: DataConfig,
    *,
    micro_batch_size: int,
    batch_rank: int = 0,
    batch_world: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Yield this rank's share of the validation split: every token is a label on one rank, once.

    All ranks get the same number of batches of the same shape, the last ones padded with labels
    -100, so that collectives inside the model match.
    """
    stream, length = corpus.val, data.seq_len
    windows = -(-stream.tokens // length)
    rounds = -(-windows // (batch_world * micro_batch_size))
    for number in range(rounds):
        first = (number * batch_world + batch_rank) * micro_batch_size
        starts = np.arange(first, first + micro_batch_size) * length
        batch = _batch(stream, starts, length, data.document_mask)
        yield _to_device(batch, torch.device(device))


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


def _batch(stream: TokenStream, starts: np.ndarray, length: int, document_mask: bool) -> Batch:
    """Cut windows out of a stream; what lies behind its end is padded with eos and IGNORED."""
    full = int(np.count_nonzero(starts + length <= stream.tokens))
    if full == len(starts):
        windows = stream.windows(starts, length + 1)
        inputs, labels = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
    else:
        inputs = np.full((len(starts), length), stream.eos_id, dtype=np.int64)
        labels = np.full((len(starts), length), IGNORED, dtype=np.int64)
        for row, start in enumerate(starts):
            window = stream.window(int(start), length + 1)
            found = max(0, len(window) - 1)
            inputs[row, :found] = window[:found]
            labels[row, :found] = window[1:]
    batch = {"input_ids": inputs, "labels": labels}
    if document_mask:
        batch["doc_ids"], batch["position_ids"] = _documents(stream, starts, length)
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def _documents(
    stream: TokenStream, starts: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Document of each input position, and its distance from where the document enters the window.

    The eos before a document is its first input (it predicts the first token), so a document never
    sees another one. Padding has document -1.
    """
    ends = stream.document_ends
    first = np.searchsorted(ends, starts, side="right")
    stretches = np.searchsorted(ends, starts + length, side="left") - first + 1
    row = np.repeat(np.arange(len(starts)), stretches)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(stretches) - stretches, stretches)
    document = first[row] + offset
    begin = row * length  # in the flattened batch
    inner = offset > 0
    begin[inner] += ends[document[inner] - 1] - starts[row[inner]]
    sizes = np.diff(begin, append=len(starts) * length)
    doc_ids = np.repeat(document, sizes).reshape(len(starts), length)
    positions = np.arange(len(starts) * length) - np.repeat(begin, sizes)
    for late in np.flatnonzero(starts + length > stream.tokens):
        doc_ids[late, max(0, stream.tokens - int(starts[late])) :] = -1
    return doc_ids, positions.reshape(len(starts), length)


def _to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    if device.type == "cuda":  # only a pinned copy can overlap with computation
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
