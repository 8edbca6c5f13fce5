"""Every layout trains as one process does: gradients, norm, losses, weights, validation."""

from __future__ import annotations

import os

import cells
import pytest

FULL = bool(os.environ.get("CURRY_TRAIN_FULL"))
SMALL = cells.small_worlds()
COVER = cells.cover_of_eight()
LARGE = list(cells.SIXTEEN)
EXTRA = {cell.name: cell for cell in (*cells.all_of_eight(), *cells.THIRTY_TWO)}
pytestmark = pytest.mark.dist


def named(of: list[cells.Cell]) -> list:
    return [pytest.param(cell, id=cell.name) for cell in of]


@pytest.mark.parametrize("cell", named(SMALL + COVER + LARGE))
def test_cell(cell, check):
    check(cell.name, cell.overrides, cell.world)


@pytest.mark.skipif(not FULL, reason="every layout of 8 ranks, and 32 ranks (--full)")
@pytest.mark.parametrize("cell", named(list(EXTRA.values())))
def test_every_cell(cell, check):
    check(cell.name, cell.overrides, cell.world)


@pytest.mark.skipif(not FULL, reason="compiles blocks for minutes (--full)")
@pytest.mark.parametrize("cell", named(cells.compiled()))
def test_compiled_cell(cell, check):
    check(cell.name, cell.overrides, cell.world)
