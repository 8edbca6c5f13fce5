"""Splits are disjoint and complete, stay when rows are appended, and let no copy, group or time
straddle; the order is a permutation of each epoch at any position."""

import datetime
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from curry_train.data import DataError, safe_splits
from curry_train.data.safe_splits import (
    fit_on_train,
    group_duplicates,
    ordered,
    split_by_group,
    split_by_time,
)

THREE = {"train": 0.8, "val": 0.1, "test": 0.1}
TWO = {"train": 0.75, "val": 0.25}


def part_of(split, count):
    """The part of each row; every row is in one part at most."""
    rows = np.concatenate(list(split.values()))
    assert len(np.unique(rows)) == len(rows) and all(np.all(np.diff(r) > 0) for r in split.values())
    parts = np.full(count, "none", dtype=object)
    for name, numbers in split.items():
        assert numbers.dtype == np.int64
        parts[numbers] = name
    return parts


@pytest.mark.parametrize("seed", [0, 1])
def test_whole_groups_go_to_one_part_and_every_row_to_some(seed):
    groups = np.random.default_rng(seed).integers(0, 400, 3000)
    parts = part_of(split_by_group(groups, THREE, seed=seed), 3000)
    assert set(parts) == set(THREE)
    assert all(len(set(parts[groups == group])) == 1 for group in np.unique(groups))


def test_shares_of_groups_are_the_fractions_and_another_seed_moves_them():
    groups = np.arange(20000)
    split = split_by_group(groups, THREE)
    for name, share in THREE.items():
        assert len(split[name]) / 20000 == pytest.approx(share, abs=0.01)
    other = split_by_group(groups, THREE, seed=1)
    both = np.intersect1d(split["val"], other["val"])
    assert len(both) / len(split["val"]) == pytest.approx(0.1, abs=0.05)


def test_appended_rows_move_no_earlier_group_and_the_kind_of_number_does_not_matter():
    groups = [f"user{n % 97}" for n in range(500)]
    before = part_of(split_by_group(groups, THREE), 500)
    more = part_of(split_by_group([*groups, *(f"new{n}" for n in range(300))], THREE), 800)
    assert list(before) == list(more[:500])
    plain = split_by_group(list(range(300)), TWO)
    typed = split_by_group(np.arange(300, dtype=np.int32), TWO)
    assert all(np.array_equal(plain[name], typed[name]) for name in TWO)


@pytest.mark.parametrize("kind", ["int", "uint", "float", "datetime"])
@pytest.mark.parametrize("embargo", [0, 5])
def test_train_is_before_val_less_the_embargo_and_ties_stay_together(kind, embargo):
    days = np.random.default_rng(3).integers(0, 200, 1000)
    times = {
        "int": days,
        "uint": days.astype(np.uint16),
        "float": days.astype(float),
        "datetime": np.datetime64("2024-01-01") + days,
    }[kind]
    gap = np.timedelta64(embargo, "D") if kind == "datetime" else embargo
    split = split_by_time(times, THREE, embargo=gap)
    parts = part_of(split, 1000)
    names = list(THREE)
    for early, late in itertools.pairwise(names):
        assert days[split[early]].max() < days[split[late]].min() - embargo
    dropped = days[parts == "none"]
    assert (len(dropped) == 0) == (embargo == 0)
    starts = [days[split[name]].min() for name in names[1:]]
    near = [np.any([(s - embargo <= day) & (day < s) for s in starts]) for day in dropped]
    assert all(near)
    for day in np.unique(days):
        assert len(set(parts[days == day])) == 1
    if not embargo:
        assert len(split["train"]) == pytest.approx(800, abs=10)


def test_a_python_timedelta_is_an_embargo():
    times = np.datetime64("2024-01-01T00", "s") + np.arange(100) * 3600
    split = split_by_time(times, TWO, embargo=datetime.timedelta(hours=5))
    assert split["train"].max() == split["val"].min() - 6


class Recording:
    """A transform that remembers what fit got."""

    def fit(self, rows, labels=None):
        self.rows, self.labels, self.mean = rows, labels, rows.mean(0)

    def transform(self, rows):
        return rows - self.mean


def test_fit_sees_the_training_rows_only_and_all_rows_come_back():
    rows = np.random.default_rng(0).normal(size=(50, 3))
    labels, train = np.arange(50), split_by_group(range(50), TWO)["train"]
    transform = Recording()
    result = fit_on_train(transform, rows, train, labels)
    assert np.array_equal(transform.rows, rows[train])
    assert np.array_equal(transform.labels, labels[train])
    assert np.array_equal(result, rows - rows[train].mean(0))
    changed = rows.copy()
    unseen = np.setdiff1d(np.arange(50), train)
    changed[unseen] += 100.0
    assert np.array_equal(fit_on_train(Recording(), changed, train)[train], result[train])


@pytest.mark.parametrize(
    "train",
    [
        np.arange(50),
        np.arange(50, 60),
        np.array([-1, 2]),
        np.array([1, 1, 2]),
        np.array([], int),
        np.ones(50, bool),
        np.array([[1, 2]]),
        np.array([0.0, 1.0]),
    ],
    ids=["all", "beyond", "negative", "twice", "none", "mask", "matrix", "floats"],
)
def test_what_is_no_choice_of_training_rows_is_refused(train):
    with pytest.raises(DataError, match="for 50 rows; it takes numbers of rows"):
        fit_on_train(Recording(), np.zeros((50, 2)), train)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_each_epoch_is_a_permutation_of_its_own_at_any_position(size):
    stream = ordered(np.arange(3 * size), size, seed=5)
    epochs = stream.reshape(3, size)
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs.tolist())
    for position in (0, size // 2, size, 2 * size):
        assert np.array_equal(ordered(range(position, 3 * size), size, seed=5), stream[position:])
    if size > 9:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(ordered(np.arange(size), size, seed=6), epochs[0])


TEXT = "the quick brown fox jumps over the lazy dog while seven wise owls watch from a tall old oak"


def test_texts_that_are_nearly_equal_are_one_group_through_a_chain():
    words = [
        f"{TEXT} {n} and then some words that were added so that it is long".split() for n in (1,)
    ]
    first = words[0]
    second = [*first[:-1], "longer"]
    third = ["Now", *second[1:-1], "longest"]
    texts = [" ".join(first), "Nothing of it at all.", " ".join(second), " ".join(third)]
    groups = group_duplicates([*texts, texts[0].upper() + "!"])
    assert groups.dtype == np.uint64
    assert groups[0] == groups[2] == groups[3] == groups[4] != groups[1]
    assert group_duplicates(texts, threshold=1.0)[0] != group_duplicates(texts, threshold=1.0)[2]


def test_short_texts_and_texts_of_signs_are_told_apart():
    groups = group_duplicates(["yes", "no", "Yes!", "?!", "...", "", "one two", "two one"])
    assert len(set(groups.tolist())) == 7 and groups[0] == groups[2]


def test_near_pairs_are_found_as_by_comparing_all_with_all():
    draw = np.random.default_rng(0)
    words = [f"w{n}" for n in range(300)]
    texts = [" ".join(draw.choice(words, 40)) for _ in range(60)]
    for text in texts[:40]:
        own = text.split()
        for place in draw.choice(40, draw.integers(0, 5), replace=False):
            own[place] = "changed"
        texts.append(" ".join(own))

    def shingles(text):
        own = text.split()
        return {tuple(own[at : at + 3]) for at in range(len(own) - 2)}

    sets = [shingles(text) for text in texts]
    groups = group_duplicates(texts)
    for one in range(100):
        for other in range(one):
            jaccard = len(sets[one] & sets[other]) / len(sets[one] | sets[other])
            assert (groups[one] == groups[other]) == (jaccard >= 0.8)


def test_equal_rows_of_arrays_are_one_group_and_appended_rows_rename_none():
    rows = np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32)
    rows[7] = rows[31]
    groups = group_duplicates(rows)
    assert groups[7] == groups[31] and len(set(groups.tolist())) == 39
    again = group_duplicates(np.concatenate([rows, rows[:3], rows[:9] + 1]))
    assert np.array_equal(again[:40], groups) and np.array_equal(again[40:43], groups[:3])
    split = split_by_group(groups, TWO)
    assert part_of(split, 40)[7] == part_of(split, 40)[31]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: split_by_group([1, 1, 1], TWO), "nothing is left for"),
        (lambda: split_by_group([], TWO), "nothing is left for train, val"),
        (lambda: split_by_group([1, None], TWO), "a row has no group"),
        (lambda: split_by_group([1.0, float("nan")], TWO), "a row has no group"),
        (lambda: split_by_group([1, 2], {"train": 1.0}), "two or more shares"),
        (lambda: split_by_group([1, 2], {"train": 0.9, "val": 0.2}), "with sum 1"),
        (lambda: split_by_group([1, 2], {"train": 1.0, "val": 0.0}), "above 0"),
        (lambda: split_by_time([3, 3, 3], TWO), "nothing is left for train"),
        (lambda: split_by_time([], TWO), "nothing is left for"),
        (lambda: split_by_time([1, 2, 3, 4], TWO, embargo=9), "smaller embargo"),
        (lambda: split_by_time([1, 2], TWO, embargo=-1), "negative"),
        (lambda: split_by_time([1.0, float("nan")], TWO), "one is missing"),
        (lambda: split_by_time(np.array(["2024-01-01", "NaT"], "M8[D]"), TWO), "one is missing"),
        (lambda: split_by_time(["2024-01-01", "2024-01-02"], TWO), "datetime64"),
        (lambda: group_duplicates(["a b", None, "a b"]), "1 of 3 rows are no text"),
        (lambda: split_by_time(np.zeros((2, 2)), TWO), "a number or datetime64"),
    ],
)
def test_what_cannot_be_split_is_refused_in_three_parts(call, says):
    with pytest.raises(DataError, match=says) as caught:
        call()
    assert str(caught.value).count(";") >= 1


def mutated(monkeypatch, old, new):
    """The module with one piece of its source changed."""
    source = Path(safe_splits.__file__).read_text()
    assert source.count(old) == 1
    scope = {"__name__": "mutant"}
    exec(source.replace(old, new), scope)
    for name in ("split_by_group", "split_by_time", "fit_on_train", "ordered", "group_duplicates"):
        monkeypatch.setitem(globals(), name, scope[name])


MUTANTS = {
    "embargo kept": ("early &= times < cut - embargo", "early &= times <= cut", "time"),
    "tie cut": ("rest & (times < cut), rest & (times >= cut)", "rest, rest", "time"),
    "by row": (
        '_hash(f"{seed}:{kind}".encode())',
        '_hash(f"{seed}:{len(kinds)}".encode())',
        "group",
    ),
    "seed unused": ('f"{seed}:{kind}"', 'f"{kind}"', "shares"),
    "fit on all": ("transform.fit(rows[train],", "transform.fit(rows,", "fit"),
    "same epoch": (
        "permute(places, epochs, size, seed)",
        "permute(places, 0 * epochs, size, seed)",
        "order",
    ),
    "no verification": (">= threshold * len(", ">= 0 * len(", "near"),
    "few bands": (
        "for bucket in near for other in bucket[:8]",
        "for bucket in near[:1] for other in bucket[:8]",
        "near",
    ),
    "last names": (
        "low, high = sorted((root[one], root[other]))",
        "high, low = sorted((root[one], root[other]))",
        "append",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_seen(monkeypatch, name):
    old, new, area = MUTANTS[name]
    mutated(monkeypatch, old, new)
    tests = {
        "time": lambda: test_train_is_before_val_less_the_embargo_and_ties_stay_together("int", 5),
        "group": lambda: test_whole_groups_go_to_one_part_and_every_row_to_some(0),
        "shares": test_shares_of_groups_are_the_fractions_and_another_seed_moves_them,
        "fit": test_fit_sees_the_training_rows_only_and_all_rows_come_back,
        "order": lambda: test_each_epoch_is_a_permutation_of_its_own_at_any_position(1000),
        "near": test_near_pairs_are_found_as_by_comparing_all_with_all,
        "append": test_a_group_keeps_its_name_when_a_copy_is_appended,
    }
    with pytest.raises((AssertionError, DataError)):
        tests[area]()


def test_a_group_keeps_its_name_when_a_copy_is_appended():
    near = " ".join([*TEXT.split()[:-1], "elm"])
    alone, both = group_duplicates([TEXT]), group_duplicates([TEXT, near])
    assert both[0] == both[1] == alone[0]


def test_the_example_of_the_page_runs_as_it_stands():
    page = (Path(safe_splits.__file__).parents[2] / "docs" / "safe-splits.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    draw = np.random.default_rng(0)
    scope = {
        "patients": draw.integers(0, 90, 500),
        "texts": [f"{n} words of text {n % 50} and {n}" for n in range(500)],
        "days": np.datetime64("2024-01-01") + draw.integers(0, 300, 500),
        "scaler": Recording(),
        "table": draw.normal(size=(500, 3)),
        "position": 90,
    }
    exec(code, scope)
    assert scope["scaled"].shape == (500, 3) and len(scope["scaler"].rows) < 500
    assert len(set(scope["batch"].tolist())) == 32
    assert set(scope["batch"].tolist()) <= set(scope["rows"]["train"].tolist())
