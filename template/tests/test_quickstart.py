"""What the quickstart learns needs context: what sees two tokens stays far behind.

At half its steps the quickstart itself is below the bound, at the end far below (1.84 and 1.68);
where the bundle trains it, through `init.py --train`, that is tested.
"""

import os

import numpy as np
import pytest

from curry_train.compose import load_config
from curry_train.config import ModelConfig
from curry_train.data import open_corpus
from curry_train.evaluate import evaluate
from curry_train.runtime import build_runtime
from curry_train.step import train_step

LIMITED_ABOVE = 1.9
STEPS = 1000 if os.environ.get("CURRY_TRAIN_FULL") else 100


def test_no_table_of_two_tokens_reaches_the_bound():
    """Not even the frequencies of what follows, counted with the held-out text in sight."""
    corpus = open_corpus(load_config([]).data, cache_dir=None)
    held_out = corpus.val.window(0, corpus.val.tokens + 1)
    seen = np.concatenate([corpus.train.window(0, corpus.train.tokens + 1), held_out])
    size = int(seen.max()) + 1

    def places(ids: np.ndarray, tokens: int) -> np.ndarray:
        columns = [ids[i : len(ids) - tokens + 1 + i] for i in range(tokens)]
        return np.ravel_multi_index(columns, (size,) * tokens)

    three, two = np.bincount(places(seen, 3)), np.bincount(places(seen[:-1], 2))
    share = three[places(held_out, 3)] / two[places(held_out[:-1], 2)]
    loss = float(-np.log(share).mean())
    assert LIMITED_ABOVE < loss < 2.1, loss


@pytest.mark.slow
def test_the_quickstart_model_limited_to_two_tokens_stays_above_its_bound(monkeypatch):
    monkeypatch.setattr(ModelConfig, "window_of", lambda model, layer: 1 if layer else 2)
    runtime = build_runtime([f"run.max_steps={STEPS}"])
    assert runtime.config.model.num_experts == 4 and runtime.config.model.num_hidden_layers == 4
    for _ in range(runtime.config.run.max_steps):
        out = train_step(runtime)
    assert out.loss < 2.6, "it must have learnt what two tokens tell"
    loss = evaluate(runtime)["val/loss"]
    assert loss > LIMITED_ABOVE, loss
    print(f"limited to two tokens: val/loss {loss:.4f}, training {out.loss:.4f}")
