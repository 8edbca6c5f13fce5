"""Gradients that grow back through time in recurrent layers."""

from __future__ import annotations

import math
from typing import Any

from flow_numbers import trend

FEW_STEPS = 10
"""Time steps under which growth says little."""


def over_time(judge: Any) -> bool:
    """Add `exploding-gradient` for the steepest recurrent layer; tells whether there was any.

    A fade is none of it: a loss at the last step alone fades towards the first by right.
    """
    seen = {n: g for n, g in judge.flow.over_time.items() if len(g) >= FEW_STEPS}
    growth = {
        n: -trend([math.log(g) for g in norms])[0] * (len(norms) - 1) for n, norms in seen.items()
    }
    if not growth:
        return False
    name = max(growth, key=growth.__getitem__)
    steps, limit = len(seen[name]), math.log(judge.limits["short-stack-exploding"])
    fail = growth[name] > limit
    change = f"{math.exp(growth[name]):.3g}x" if growth[name] > 0 else "no growth"
    text = "smaller or orthogonal recurrent weights, or a cell with gates"
    judge.add(
        "exploding-gradient",
        "fail" if fail else "pass",
        value=-growth[name] / (steps - 1),
        threshold=-limit / (steps - 1),
        unit="per time step",
        message=f"{change} back through {steps} time steps of {name}",
        fix=judge.place(name, text) if fail else None,
    )
    return True
