"""One corpus for all cells, and the table of what was found."""

from __future__ import annotations

import json
import random
from importlib import import_module

import matrix
import pytest

from curry_train.config import DataConfig
from curry_train.data import open_corpus
from curry_train.data.token_file import Corpus
from curry_train.equality import STEPS, Proof, prove

# What ranks need, imported once before they are forked from this process.
for name in ("tensor", "fsdp", "pipelining"):
    import_module(f"torch.distributed.{name}")
import_module("curry_train.parallel.overlap")


@pytest.fixture(scope="session")
def make_corpus(tmp_path_factory):
    """Prepare many short documents, so that windows hold several."""

    def make(val_fraction: float) -> Corpus:
        luck = random.Random(4)
        path = tmp_path_factory.mktemp("text") / "documents.jsonl"
        words = ["of", "a", "rank", "the", "same", "sum", "every", "token", "once", "is"]
        texts = [" ".join(luck.choices(words, k=luck.randint(1, 5))) for _ in range(600)]
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        data = DataConfig(input=str(path), seq_len=16, val_fraction=val_fraction)
        return open_corpus(data, cache_dir=None)

    return make


@pytest.fixture(scope="session")
def corpus(make_corpus):
    """A corpus whose validation is one batch or two."""
    return make_corpus(val_fraction=0.006)


@pytest.fixture
def check(corpus):
    """Prove a layout equal to one process and keep the proof for the table."""

    def checked(name: str, overrides: list[str], world: int, **options) -> Proof:
        proof = prove(overrides, world, corpus=corpus, project=matrix.PROJECT, **options)
        matrix.keep(name, proof)
        assert proof.equal, f"{name}\n{proof}"
        assert proof.clipped == STEPS, f"{name}: clipped in {proof.clipped} of {STEPS} steps"
        return proof

    return checked


def pytest_sessionfinish() -> None:
    """Write the table; of several workers the last one to end has all rows."""
    matrix.write_table()
