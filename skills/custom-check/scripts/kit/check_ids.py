"""Every check id that the bundle's own scripts report, with its meaning. Ids are never renamed.

A user's check (custom_check.py) may report any other kebab-case word.
"""

from __future__ import annotations

import re

CHECK_IDS = {
    "attention-causal": "attention sees no later token",
    "attention-layers": "the model has attention to measure",
    "attention-logits": "largest query-key logit in size",
    "attention-parity": "the layer equals its formula in float64",
    "attention-transformers": "the layer equals that of transformers",
    "rmsnorm-eps": "what eps adds, over the mean square of real inputs",
    "rmsnorm-layers": "the model has RMSNorm to measure",
    "rmsnorm-parity": "the norm equals its formula in float64",
    "rmsnorm-statistics": "the mean square is taken in float32 in a half-precision model",
    "rmsnorm-torch": "the norm equals that of torch",
    "rmsnorm-weights": "the weights are finite and of a size near 1",
    "step-time-noise": "the step times agree well enough to trust their median",
    "step-time-ratio": "time per token or sample against a baseline report",
    "lif-dead-neurons": "share of a layer's spiking neurons that never fire",
    "lif-gradient-exploding": "gradient at any time step over that at the last one",
    "lif-gradient-over-time": "share of the last time step's gradient that reaches the first",
    "lif-layers": "the model has spiking neurons to measure",
    "lif-saturated": "share of a layer's spiking neurons that fire nearly always",
    "experts-backend": "the bank runs on the fastest backend of its device",
    "experts-bytes": "bytes that the bank keeps for backward over what it needs",
    "experts-parity": "error of the bank against a float64 loop over tokens",
    "experts-weights": "size of each expert's weights against the median expert's",
    "router-bias-scale": "spread of the correction bias against the range of scores",
    "router-collapse": "how evenly a router uses its experts",
    "router-dead-experts": "experts that get next to no tokens",
    "router-double-softmax": "a softmax is taken of a softmax",
    "router-dropped-tokens": "share of choices that find their expert full",
    "router-logit-scale": "largest router logit",
    "router-weights": "router weights are the scores of the router's logits",
}

KEBAB_CASE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def is_check_id(word: object) -> bool:
    """Tell whether a word has the form of a check id."""
    return isinstance(word, str) and KEBAB_CASE.fullmatch(word) is not None
