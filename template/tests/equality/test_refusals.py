"""What is refused, each with its reason, and that nothing else is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import cells
import pytest
from matrix import PROJECT, REFUSALS

from curry_train.compose import load_config
from curry_train.config import Config, ConfigError, ParallelConfig
from curry_train.parallel.dims import refusals
from curry_train.rules import problems

WORLDS = (2, 4, 8)


@cache
def base(kind: str, world: int) -> Config:
    words = [f"devices={world}", "accelerator=cpu", "precision=fp64"]
    words += [*cells.layouts(world, kind)[0].overrides, "model.num_hidden_layers=16"]
    return load_config(words, project=PROJECT)


def with_layout(cell: cells.Cell, **options) -> Config:
    """Return the configuration of a cell without composing files again."""
    values = {"true": True, "false": False, "0": 0, "1": 1, "2": 2, "3": 3}
    given = {
        name: values.get(value, value) for name, value in (dict(cell.options) | options).items()
    }
    whole, documents = base(cell.kind, min(cell.world, 8)), given.pop("documents", False)
    return replace(
        whole,
        compile=given.pop("compile", False),
        data=replace(whole.data, document_mask=documents),
        parallel=ParallelConfig(**dict(cell.layout), **given),
    )


def all_cells() -> list[cells.Cell]:
    return [c for world in WORLDS for kind in ("moe", "dense") for c in cells.layouts(world, kind)]


def test_every_layout_of_every_world_is_accepted():
    """By `problems`, of every world and with the options that the matrix runs it with."""
    found = all_cells()
    for cell in found:
        assert problems(with_layout(cell), cell.world) == [], cell.name
    run = [*cells.small_worlds(), *cells.cover_of_eight(), *cells.all_of_eight()]
    run += [*cells.compiled(), *cells.SIXTEEN, *cells.THIRTY_TWO]
    for cell in run:
        assert problems(with_layout(cell), cell.world) == [], cell.name
    moe = [len(cells.layouts(world, "moe")) for world in WORLDS]
    print(f"\naccepted layouts of {WORLDS} ranks: MoE {moe}, dense and MoE {len(found)}")
    assert moe == [8, 33, 98] and len(found) == 204


def test_default_run_holds_what_it_must():
    small, eight = cells.small_worlds(), cells.cover_of_eight()
    layouts = {(c.world, c.kind, c.layout) for c in all_cells()}
    assert {(c.world, c.kind, c.layout) for c in small} == {
        layout for layout in layouts if layout[0] < 8
    }
    assert {(c.world, c.kind, c.layout) for c in cells.all_of_eight()} == {
        layout for layout in layouts if layout[0] == 8
    }
    assert len(eight) >= 30
    assert len(cells.SIXTEEN) == 5 and len(cells.THIRTY_TWO) == 5
    for cell in cells.SIXTEEN:
        sizes = dict(cell.layout)
        assert all(sizes[axis] > 1 for axis in ("pp", "dp_shard", "cp", "tp", "ep")), cell.name
    names = [c.name for c in (*small, *eight, *cells.SIXTEEN)]
    assert len(set(names)) == len(names)


def test_cover_is_pairwise_and_the_same_every_time():
    """Against a plain list of all layouts with all options, without the cover's own shortcuts."""
    layouts = cells.layouts(8, "moe") + cells.layouts(8, "dense")
    possible, of_options = set(), {}
    for cell in layouts:
        own = cell.values
        split = tuple(sorted(own.items()))
        if split not in of_options:
            of_options[split] = set()
            for options in cells.options_of(cell):
                assert not [*refusals(with_layout(cell, **options), 8)], (cell, options)
                of_options[split] |= cells.pairs({**own, **options})
        possible |= of_options[split] | set(cell.layout)
    cover = cells.cover_of_eight()
    met = set().union(*(cell.meetings for cell in cover))
    assert met == possible and len(possible) > 500
    assert cells.pairwise_cover(layouts, seed=4) == cover
    assert cells.cover_of_eight.__wrapped__() == cover


def expected(cell: cells.Cell, options: dict, compiled: bool) -> set[str]:
    """Return the keys that must be refused, by the table alone."""
    pipelined = dict(cell.layout)["pp"] > 1
    splits = options["schedule"] in cells.SPLIT_BACKWARD
    found = set()
    if options["overlap"] and options["schedule"] != "dualpipev":
        found.add("parallel.overlap")
    if pipelined and splits and options["reshard"] is True:
        found.add("parallel.reshard")
    if pipelined and splits and compiled:
        found.add("compile")
    return found


def test_nothing_else_is_refused():
    """Every layout with every schedule, zero, reshard, overlap and compile."""
    tried = accepted = 0
    names = ("schedule", "zero", "reshard", "overlap")
    values = (cells.SCHEDULES, (0, 1, 2, 3), ("auto", True, False), (False, True))
    for cell in all_cells():
        for choice in product(*values):
            options = dict(zip(names, choice, strict=True))
            config = with_layout(cell, **options)
            for compiled in (False, True):
                found = {key for key, _ in refusals(replace(config, compile=compiled), cell.world)}
                assert found == expected(cell, options, compiled), (cell.name, options, compiled)
                tried, accepted = tried + 1, accepted + (not found)
    print(f"\n{accepted} of {tried} combinations accepted")
    assert tried == 204 * 144 * 2 and accepted > tried / 3


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_refused_with_its_reason(case):
    words = cells.overrides_of(case.words)
    start = [f"devices={case.world}", "accelerator=cpu", "precision=fp64"]
    with pytest.raises(ConfigError) as caught:
        load_config([*start, *words, *case.more], project=PROJECT)
    text = " ".join(str(caught.value).split())
    assert len(caught.value.problems) == 1, text
    assert case.says in text and "set " in text, text
    for changed in case.accepted:
        kept = [w for w in (*words, *case.more) if not w.startswith(changed.partition("=")[0])]
        load_config([*start, *kept, changed], project=PROJECT)
