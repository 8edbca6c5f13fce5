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
    "fabric-accumulation": "micro-batches before the last reduce nothing and none is lost",
    "fabric-autocast": "no autocast by hand beside the precision flag",
    "fabric-backward": "every backward call is Fabric's",
    "fabric-cli-conflict": "the code sets nothing that fabric run always sets",
    "fabric-clip": "gradients are clipped by Fabric",
    "fabric-collectives": "calls that wait for all processes are made by all of them",
    "fabric-dataloaders": "every loader is set up, or shards and moves by itself",
    "fabric-device-moves": "no device is chosen by hand",
    "fabric-forward-methods": "methods that run layers go through forward",
    "fabric-grad-scaling": "gradients are averaged and scaled once",
    "fabric-launch": "launch is called before setup, and not under fabric run",
    "fabric-loop": "the files hold a raw training loop",
    "fabric-metrics": "counts and sums are added over processes, then divided",
    "fabric-model-setup": "every trained model is set up, and called as such",
    "fabric-optimizer-order": "the optimizer holds the parameters that setup made",
    "fabric-optimizer-setup": "every optimizer that steps is set up",
    "fabric-rank-zero": "one process prints and writes",
    "fabric-run-gradients": "two processes give one process's gradients",
    "fabric-run-inputs": "two processes read the same samples as one, each its part",
    "fabric-run-loss": "the mean loss of two processes is one process's",
    "fabric-run-replicas": "all processes hold the same weights after the steps",
    "fabric-sampler": "each process reads its part, in a new order each epoch",
    "fabric-seed": "weights are drawn alike in all processes, noise is not",
    "fabric-zero-grad": "gradients are cleared once for each step",
    "accumulation-additive": "the loss of a batch is the mean over its targets, aux terms too",
    "accumulation-clips-each": "gradients are clipped once, after the last micro-batch",
    "accumulation-equal": "k micro-batches give the gradient, norm and loss of one batch",
    "accumulation-fits": "the largest micro-batch that fits into the memory",
    "accumulation-mean-of-means": "micro-batches are weighted by their targets",
    "accumulation-not-divided": "the sum over micro-batches is divided, once",
    "accumulation-steps-each": "the optimizer steps once, after the last micro-batch",
    "accumulation-zeroes-between": "gradients are cleared once for each step",
    "recompute-budget": "what the fastest setting that fits into the memory needs",
    "recompute-counted-twice": "buffers and counters move as without recomputation",
    "recompute-found": "the target calls torch.utils.checkpoint",
    "recompute-gradients-differ": "gradients equal those without recomputation",
    "recompute-randomness": "what is made again draws the same random numbers",
    "recompute-saves-nothing": "bytes kept for backward over those without recomputation",
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
    "parallelism-accepted": "the project's rules accept the present layout",
    "parallelism-measured": "a measured step over the estimate of its layout",
    "parallelism-memory": "share of a GPU's memory that the present layout fills",
    "parallelism-nodes": "share of a step that a tp or ep group across nodes costs",
    "parallelism-speed": "estimated step over that of the best layout that fits",
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
