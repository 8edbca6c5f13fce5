"""What the quickstart learns needs context: the same model that sees two tokens stays far behind.

The quickstart itself is trained by the bundle's test of `init.py --train` (val/loss below 1.75).
"""

import pytest

from curry_train.evaluate import evaluate
from curry_train.runtime import build_runtime
from curry_train.step import train_step

LIMITED_ABOVE = 1.9


@pytest.mark.slow
def test_the_quickstart_model_limited_to_two_tokens_stays_above_its_bound():
    runtime = build_runtime()
    assert runtime.config.model.num_experts == 4 and runtime.config.run.max_steps == 1000
    for index, block in enumerate(runtime.model.layers.values()):
        block.self_attn.window = 2 if index == 0 else 1
    for _ in range(runtime.config.run.max_steps):
        out = train_step(runtime)
    assert out.loss < 2.6, "it must have learnt what two tokens tell"
    loss = evaluate(runtime)["val/loss"]
    assert loss > LIMITED_ABOVE, loss
    print(f"limited to two tokens: val/loss {loss:.4f}")
