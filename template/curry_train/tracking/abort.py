"""Rules that stop a run; pure, so that equal inputs give the same answer on every rank."""

from __future__ import annotations

import math

from curry_train.config import RunConfig


class AbortRules:
    """Watch the numbers of every step; feed it values that all ranks share."""

    def __init__(self, run: RunConfig) -> None:
        self._max_nonfinite = run.max_nonfinite
        self._bad_steps: list[int] = []

    def check(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Return why the run must stop now, with the values seen, or None.

        The rule: run.max_nonfinite steps in a row with a non-finite loss or gradient norm.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._bad_steps.clear()
            return None
        self._bad_steps.append(step)
        if not self._max_nonfinite or len(self._bad_steps) < self._max_nonfinite:
            return None
        return (
            f"loss or gradient not finite in {len(self._bad_steps)} steps in a row, "
            f"{self._bad_steps[0]} to {step} (now loss={float(loss)!r}, "
            f"grad_norm={float(grad_norm)!r}); the limit is run.max_nonfinite="
            f"{self._max_nonfinite}"
        )
