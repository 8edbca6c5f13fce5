"""The rule that stops a run whose numbers are gone."""

from __future__ import annotations

import math

import pytest

from curry_train.config import RunConfig
from curry_train.tracking.abort import AbortRules


def reasons(limit: int, values: list[tuple[float, float]]) -> list[str | None]:
    rules = AbortRules(RunConfig(max_nonfinite=limit))
    return [rules.check(step, *pair) for step, pair in enumerate(values, start=1)]


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_the_limit_counts_steps_in_a_row(bad):
    found = reasons(3, [(2.0, 1.0), bad, bad, bad])
    assert found[:3] == [None, None, None]
    assert found[3] is not None and "3 steps in a row, 2 to 4" in found[3]
    assert f"loss={bad[0]!r}" in found[3] and f"grad_norm={bad[1]!r}" in found[3]
    assert "run.max_nonfinite=3" in found[3]


def test_one_finite_step_starts_the_count_again():
    nan = (math.nan, math.nan)
    assert reasons(3, [nan, nan, (1.0, 1.0), nan, nan]) == [None] * 5


def test_a_limit_of_one_stops_at_once_and_zero_never():
    nan = (math.nan, 1.0)
    assert reasons(1, [nan])[0] is not None
    assert reasons(0, [nan] * 50) == [None] * 50


def test_equal_inputs_give_the_same_answer_on_every_rank():
    values = [(1.0, 1.0), (math.nan, 2.0), (3.0, math.inf), (math.nan, math.nan)]
    assert reasons(2, values) == reasons(2, values)
