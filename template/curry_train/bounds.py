"""Numbers with a bound, as types of the fields of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple


class Bound(NamedTuple):
    """What a number must keep, in words and as a test."""

    words: str
    holds: Callable[[float], bool]


Natural = Annotated[int, Bound("of at least 0", lambda n: n >= 0)]
Count = Annotated[int, Bound("of at least 1", lambda n: n >= 1)]
NonNegative = Annotated[float, Bound("of at least 0", lambda x: x >= 0)]
Positive = Annotated[float, Bound("above 0", lambda x: x > 0)]
Decay = Annotated[float, Bound("of at least 0 and below 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, Bound("above 0 and below 1", lambda x: 0 < x < 1)]
# 256 bytes and the end of a document
BpeSize = Annotated[int, Bound("of at least 257", lambda n: n >= 257)]
# What NumPy takes
Seed = Annotated[int, Bound("of at least 0 and below 2**32", lambda n: 0 <= n < 2**32)]
