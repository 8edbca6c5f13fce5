"""One corpus for all cells, and the table of what was found."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path

import matrix
import pytest

from curry_train.config import DataConfig
from curry_train.data import open_corpus
from curry_train.equality import Proof, prove

PROJECT = Path(__file__).resolve().parents[2]
# What ranks need, imported once before they are forked from this process.
for name in ("tensor", "fsdp", "pipelining"):
    import_module(f"torch.distributed.{name}")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Many short documents, so that windows hold several and a validation is a few batches."""
    luck = random.Random(4)
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    words = ["of", "a", "rank", "the", "same", "sum", "every", "token", "once", "is"]
    texts = [" ".join(luck.choices(words, k=luck.randint(1, 5))) for _ in range(600)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = DataConfig(input=str(path), seq_len=16, val_fraction=0.006)
    return open_corpus(data, cache_dir=None)


@pytest.fixture
def check(corpus):
    """Prove a layout equal to one process and keep the proof for the table."""

    def checked(name: str, overrides: list[str], world: int, **options) -> Proof:
        proof = prove(overrides, world, corpus=corpus, project=PROJECT, **options)
        matrix.keep(name, proof)
        assert proof.equal, f"{name}\n{proof}"
        return proof

    return checked


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table, once: workers of xdist only leave their rows."""
    if not hasattr(session.config, "workerinput"):
        matrix.write_table()
