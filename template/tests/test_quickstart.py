"""What the quickstart learns needs context: the same model that sees two tokens stays far behind.

At half its steps the quickstart itself is below the bound, at the end far below (1.84 and 1.68);
where the bundle trains it, through `init.py --train`, that is tested.
"""

import os

import pytest

from curry_train.config import ModelConfig
from curry_train.evaluate import evaluate
from curry_train.runtime import build_runtime
from curry_train.step import train_step

LIMITED_ABOVE = 1.9
STEPS = 1000 if os.environ.get("CURRY_TRAIN_FULL") else 500


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
    print(f"limited to two tokens: val/loss {loss:.4f}")
