"""Batches are a pure function of one integer, and every token counts exactly once."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

from curry_train.config import DataConfig
from curry_train.data import DataError, token_file
from curry_train.data.loader import IGNORED, Loader, permute, validation_batches
from curry_train.data.prepare import Settings, prepare
from curry_train.data.sources import find_source
from curry_train.data.token_file import read_corpus

SEQ_LEN = 7


def make(folder):
    """Three inputs, weights 1, 2 and 1.5."""
    sources = []
    for name, weight, count in (("a", 1.0, 40), ("b", 2.0, 9), ("c", 1.5, 25)):
        lines = [f'{{"text": "{name}{n} {"xyz" * (n % 5)}"}}\n' for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        sources.append(find_source(folder / f"{name}.jsonl", weight=weight))
    return read_corpus(prepare(sources, folder / "out", Settings(val_fraction=0.2)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of many shards, so that windows cross their borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_file, "SHARD_TOKENS", 100)
        return make(tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="module")
def one_shard(tmp_path_factory):
    return make(tmp_path_factory.mktemp("one"))


def config(**changes):
    return dataclasses.replace(DataConfig(seq_len=SEQ_LEN, global_batch_size=12), **changes)


def whole(stream):
    """The stream by the definition: one eos, then all ids."""
    return stream.window(0, stream.tokens + 1)


def rows(batches):
    return [
        (tuple(x), tuple(y))
        for batch in batches
        for x, y in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    ]


def take(corpus, steps, *, world=1, global_batch_size=12, micro=1, start=0, seed=3):
    """Rows of some steps in global order: ranks in order within a step."""
    loaders = [
        Loader(corpus, config(global_batch_size=global_batch_size), seed=seed,
               micro_batch_size=micro, batch_rank=rank, batch_world=world)
        for rank in range(world)
    ]  # fmt: skip
    for loader in loaders:
        loader.samples_consumed = start
    found = [row for _ in range(steps) for loader in loaders for row in rows(loader.next_step())]
    assert {loader.samples_consumed for loader in loaders} == {start + steps * global_batch_size}
    return found


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000, 4099])
def test_the_permutation_is_one_to_one_in_every_epoch(size):
    seen = set()
    for epoch in range(4):
        order = permute(np.arange(size), np.full(size, epoch), size, seed=5)
        assert sorted(order) == list(range(size))
        seen.add(tuple(order))
    assert size < 8 or len(seen) == 4, "epochs must differ"


def test_the_permutation_is_uniform_over_positions():
    size, epochs = 11, 4000
    order = permute(
        np.tile(np.arange(size), epochs), np.repeat(np.arange(epochs), size), size, seed=1
    ).reshape(epochs, size)
    counts = np.stack([np.bincount(order[:, i], minlength=size) for i in range(size)])
    expected = epochs / size
    assert abs(counts - expected).max() < 6 * expected**0.5, counts
    pairs = np.bincount(order[:, 0] * size + order[:, 1], minlength=size * size)
    assert np.count_nonzero(pairs) == size * (size - 1), "neighbours must be independent"


def test_the_permutation_does_not_change_between_versions():
    order = permute(np.arange(10), np.zeros(10, dtype=int), 10, seed=0)
    assert order.tolist() == PINNED
    other = permute(np.arange(10), np.zeros(10, dtype=int), 10, seed=1)
    assert other.tolist() != PINNED


def test_a_huge_epoch_needs_no_memory():
    indices = np.array([0, 1, 2**40 - 1])
    order = permute(indices, np.zeros(3, dtype=int), 2**40, seed=0)
    assert len(set(order.tolist())) == 3
    assert order.max() < 2**40


@pytest.mark.parametrize(
    ("world", "global_batch_size", "micro"),
    [(1, 12, 12), (1, 12, 1), (2, 12, 3), (3, 12, 4), (4, 12, 1), (2, 4, 2), (1, 1, 1), (5, 30, 2)],
)
def test_ranks_and_batch_sizes_do_not_change_the_sequence(corpus, world, global_batch_size, micro):
    steps = 120 // global_batch_size
    found = take(corpus, steps, world=world, global_batch_size=global_batch_size, micro=micro)
    assert found == take(corpus, 10)


def test_resume_on_another_layout_in_the_middle_of_an_epoch_continues_exactly(corpus):
    straight = take(corpus, 10)
    first = take(corpus, 3)
    second = take(corpus, 7, world=2, global_batch_size=10, micro=5, start=36)
    third = take(corpus, 7, world=1, global_batch_size=2, micro=1, start=106)
    assert first + second + third == straight
    assert take(corpus, 1, seed=4) != straight[:12]


def test_each_epoch_visits_each_window_once_and_changes_mid_batch(corpus):
    ids = whole(corpus.train)
    per_epoch = corpus.train.tokens // SEQ_LEN
    assert per_epoch % 12, "the epoch has to end inside a batch for this test"
    expected = collections.Counter(
        (tuple(ids[s : s + SEQ_LEN]), tuple(ids[s + 1 : s + SEQ_LEN + 1]))
        for s in range(0, per_epoch * SEQ_LEN, SEQ_LEN)
    )
    found = take(corpus, 3 * per_epoch // 12 + 1)
    for epoch in range(3):
        part = found[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert collections.Counter(part) == expected
    assert found[:per_epoch] != found[per_epoch : 2 * per_epoch]


def test_an_epoch_smaller_than_a_batch_repeats_inside_it(corpus):
    length = corpus.train.tokens // 2
    loader = Loader(corpus, config(seq_len=length, global_batch_size=8), seed=0, micro_batch_size=8)
    assert loader.samples_per_epoch == 2
    found = rows(loader.next_step())
    assert all(found[i] != found[i + 1] for i in range(0, 8, 2))
    assert len(set(found)) == 2


def test_micro_batches_have_the_promised_form(corpus):
    loader = Loader(corpus, config(), seed=3, micro_batch_size=3, batch_rank=1, batch_world=2)
    step = loader.next_step()
    assert len(step) == 2
    for batch in step:
        assert set(batch) == {"input_ids", "labels"}
        for tensor in batch.values():
            assert tensor.shape == (3, SEQ_LEN)
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    stream = iter(loader)
    assert rows([next(stream), next(stream)]) == take(corpus, 2, world=2, micro=3)[18:24]


def test_windows_equal_the_stream_over_shard_borders_too(corpus, one_shard):
    assert len(corpus.manifest["splits"]["train"]["shards"]) > 3
    assert len(one_shard.manifest["splits"]["train"]["shards"]) == 1
    ids = whole(one_shard.train)
    assert ids[0] == one_shard.train.eos_id
    for stream in (corpus.train, one_shard.train):
        for length in (1, 2, 9, 300):
            starts = np.arange(stream.tokens + 2 - length)
            expected = np.lib.stride_tricks.sliding_window_view(ids, length)
            np.testing.assert_array_equal(stream.windows(starts, length), expected)
            for start in starts:
                np.testing.assert_array_equal(stream.window(int(start), length), expected[start])
        assert stream.window(stream.tokens - 1, 5).tolist() == ids[-2:].tolist()
        assert stream.window(stream.tokens + 3, 5).tolist() == []
    assert take(one_shard, 10) == take(corpus, 10)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("micro", [1, 4, 64])
def test_validation_counts_every_token_once_on_any_layout(corpus, world, micro):
    ids = whole(corpus.val)
    found, counts = [], []
    for rank in range(world):
        batches = list(
            validation_batches(
                corpus, config(), micro_batch_size=micro, batch_rank=rank, batch_world=world
            )
        )
        counts.append(len(batches))
        for batch in batches:
            assert batch["labels"].shape == (micro, SEQ_LEN)
            used = batch["labels"] != IGNORED
            found += batch["labels"][used].tolist()
            pairs = torch.stack([batch["input_ids"][used], batch["labels"][used]], dim=-1)
            assert {tuple(p) for p in pairs.tolist()} <= set(
                zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)
            )
    assert len(set(counts)) == 1, "collectives would hang"
    assert collections.Counter(found) == collections.Counter(ids[1:].tolist())
    assert len(found) == corpus.val.tokens
    assert sum(found) == int(ids[1:].sum())


def test_validation_bytes_are_the_bytes_of_its_text(corpus):
    ids = whole(corpus.val)[1:]
    text = corpus.tokenizer.decode(ids)
    assert corpus.val.bytes == len(text.encode())
    assert corpus.val.tokens == corpus.val.bytes + corpus.val.documents


def _documents_by_hand(ids, eos, start, length):
    """Count documents from the stream's beginning: an eos opens the next one."""
    documents = np.cumsum(np.asarray(ids) == eos) - 1
    doc_ids = documents[start : start + length]
    positions, at = [], 0
    for i, document in enumerate(doc_ids):
        at = at + 1 if i and document == doc_ids[i - 1] else 0
        positions.append(at)
    return doc_ids.tolist(), positions


@pytest.mark.parametrize("length", [1, 7, 30])
def test_document_mask_numbers_documents_and_restarts_positions(corpus, length):
    data = config(seq_len=length, document_mask=True)
    ids, eos = whole(corpus.train), corpus.train.eos_id
    loader = Loader(corpus, data, seed=0, micro_batch_size=12)
    where = {
        tuple(ids[s : s + length + 1]): s
        for s in range(0, corpus.train.tokens - length + 1, length)
    }
    for _ in range(6):
        (batch,) = loader.next_step()
        for x, y, d, p in zip(*(batch[k].tolist() for k in KEYS), strict=True):
            expected = _documents_by_hand(ids, eos, where[(*x, y[-1])], length)
            assert p == expected[1]
            assert np.diff(d).tolist() == np.diff(expected[0]).tolist()
    ids = whole(corpus.val)
    start = 0
    for batch in validation_batches(corpus, data, micro_batch_size=4):
        for y, d, p in zip(*(batch[k].tolist() for k in KEYS[1:]), strict=True):
            used = min(length, max(0, corpus.val.tokens - start))
            expected = _documents_by_hand(ids, eos, start, used)
            assert d == expected[0] + [-1] * (length - used)
            assert p[:used] == expected[1]
            assert [i for i, label in enumerate(y) if label == IGNORED] == list(range(used, length))
            start += length


def test_a_first_token_never_shares_a_document_with_the_text_before_it(corpus):
    loader = Loader(corpus, config(document_mask=True), seed=0, micro_batch_size=12)
    (batch,) = loader.next_step()
    eos = batch["input_ids"] == corpus.train.eos_id
    assert eos[:, 1:].any()
    assert (batch["position_ids"][eos] == 0).all()
    assert (batch["doc_ids"][:, 1:] != batch["doc_ids"][:, :-1]).equal(eos[:, 1:])


def test_what_does_not_divide_or_fit_is_refused(corpus):
    with pytest.raises(ValueError, match="global_batch_size=12 does not divide into 5 ranks"):
        Loader(corpus, config(), seed=0, micro_batch_size=1, batch_world=5)
    with pytest.raises(ValueError, match="micro-batches of 5"):
        Loader(corpus, config(), seed=0, micro_batch_size=5)
    with pytest.raises(DataError, match="fewer than one window of data.seq_len=100000"):
        Loader(corpus, config(seq_len=100_000), seed=0, micro_batch_size=1)


KEYS = ("input_ids", "labels", "doc_ids", "position_ids")
PINNED = [2, 1, 0, 8, 7, 6, 3, 4, 9, 5]
