"""Statistics of few runs, by scipy, which is imported when the first one is asked for.

What cannot be computed is an error and never a number: too few values, values that are not finite,
no spread at all. Where the checked code's environment has no scipy, `available()` is false and a
check skips its statistic, or the call raises a UsageError that says what to install.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from .errors import UsageError

LEVEL = 0.95


class Interval(NamedTuple):
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """A difference of means, its interval, and the two-sided p of no difference."""

    value: float
    low: float
    high: float
    p: float


def available() -> bool:
    """Tell whether scipy is there."""
    return importlib.util.find_spec("scipy") is not None


def mean(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Student's interval of the mean of two or more values."""
    stats = _scipy_stats()
    numbers = _checked(values, least=2)
    middle, error = _mean(numbers), _standard_error(numbers)
    reach = float(stats.t.ppf(0.5 + level / 2, len(numbers) - 1)) * error
    return Interval(middle, middle - reach, middle + reach)


def welch(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Difference:
    """Welch's test of mean(first) - mean(second); the runs of the two arms are not paired."""
    stats = _scipy_stats()
    a, b = _checked(first, least=2), _checked(second, least=2)
    if not _standard_error(a) and not _standard_error(b):
        raise ValueError("all values of both arms are equal: there is no spread to test against")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one arm without spread is fine
        test = stats.ttest_ind(a, b, equal_var=False)
    return _difference(test, _mean(a) - _mean(b), level)


def paired(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Difference:
    """Test mean(first - second), run by run: same seed, same data order."""
    stats = _scipy_stats()
    a, b = _checked(first, least=2), _checked(second, least=2)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values are no pairs")
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    if not _standard_error(gaps):
        raise ValueError("all differences are equal: there is no spread to test against")
    return _difference(stats.ttest_rel(a, b), _mean(gaps), level)


def binomial(successes: int, trials: int, level: float = LEVEL) -> Interval:
    """Clopper and Pearson's interval of a share; it covers at least `level`."""
    stats = _scipy_stats()
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} of {trials} is no share")
    found = stats.binomtest(successes, trials).proportion_ci(level, method="exact")
    return Interval(successes / trials, float(found.low), float(found.high))


def slope(x: Sequence[float], y: Sequence[float], level: float = LEVEL) -> Interval:
    """Least squares slope of y over x with its t interval; three points or more."""
    stats = _scipy_stats()
    across, up = _checked(x, least=3), _checked(y, least=3)
    if len(across) != len(up):
        raise ValueError(f"{len(across)} x and {len(up)} y are no points")
    if len(set(across)) < 2:
        raise ValueError("all x are equal: there is no slope")
    fit = stats.linregress(across, up)
    reach = float(stats.t.ppf(0.5 + level / 2, len(across) - 2)) * float(fit.stderr)
    return Interval(float(fit.slope), float(fit.slope) - reach, float(fit.slope) + reach)


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise UsageError(
            f"this statistic needs scipy, which {sys.executable} lacks",
            fix=f"{sys.executable} -m pip install scipy, or set --python to one that has it",
        ) from None
    return stats


def _checked(values: Sequence[float], *, least: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) < least:
        raise ValueError(f"{len(numbers)} values are too few; at least {least} are needed")
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a value is not finite")
    return numbers


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _standard_error(numbers: Sequence[float]) -> float:
    """Standard error of the mean; 0 when all values are one."""
    if len(set(numbers)) == 1:
        return 0.0
    middle = _mean(numbers)
    squares = math.fsum((number - middle) ** 2 for number in numbers)
    return math.sqrt(squares / (len(numbers) - 1) / len(numbers))


def _difference(test: Any, value: float, level: float) -> Difference:
    bounds = test.confidence_interval(level)
    return Difference(value, float(bounds.low), float(bounds.high), float(test.pvalue))
