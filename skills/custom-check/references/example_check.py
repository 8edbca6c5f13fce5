"""A check of your own: every trainable parameter gets a finite, non-zero gradient.

Run:  custom_check.py --check THIS_FILE.py:check_gradients [--project DIR | --target ...]
Change the measurement and the threshold; the kit restores the target and writes the report.
"""

import torch

LEAST_SHARE = 1.0  # share of parameter tensors that must get a gradient


def check_gradients(target):
    """Run one backward pass and count the parameters that learn from it."""
    target.model.zero_grad(set_to_none=True)
    batch = next(iter(target.batches))
    target.loss_fn(target.model, batch).backward()

    trainable = [(n, p) for n, p in target.model.named_parameters() if p.requires_grad]
    silent = [n for n, p in trainable if p.grad is None or not p.grad.any()]
    broken = [n for n, p in trainable if p.grad is not None and not torch.isfinite(p.grad).all()]
    share = 1 - len(silent) / max(1, len(trainable))
    return {
        "summary": f"{len(trainable)} trainable parameter tensors",
        "checks": [
            {
                "id": "gradient-reaches-all",
                "verdict": "pass" if share >= LEAST_SHARE else "fail",
                "value": share,
                "threshold": LEAST_SHARE,
                "message": f"none reaches {', '.join(silent[:3])}" if silent else "all get one",
            },
            {
                "id": "gradient-finite",
                "verdict": "fail" if broken else "pass",
                "value": len(broken),
                "threshold": 0,
                "message": f"first {broken[0]}" if broken else "no NaN, no infinity",
            },
        ],
        "numbers": {"parameters": sum(p.numel() for _, p in trainable)},
    }
