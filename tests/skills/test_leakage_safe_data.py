"""Leaks in tables and pipelines: known answers, planted faults, and clean data left alone."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys

import numpy as np
import pytest
from skills.targets.processes import ROOT

SCRIPT = ROOT / "skills" / "leakage-safe-data" / "scripts" / "leakage_safe_data.py"
sys.path.insert(0, str(SCRIPT.parent))
leakage = importlib.import_module("leakage_safe_data")
sys.dont_write_bytecode = False  # the script sets it for itself
reading = importlib.import_module("table_reading")
splits = importlib.import_module("table_split")
pipelines = importlib.import_module("pipeline_checks")
recorder = importlib.import_module("fit_recorder")
columns = importlib.import_module("column_checks")

FLAGS = {"split": None, "group": None, "time": None, "embargo": None, "task": "auto", "seed": 0}
PIPELINES = """
import numpy as np

def centroid(x, y, new):
    kinds = np.unique(y)
    means = np.stack([x[y == kind].mean(0) for kind in kinds])
    return kinds[((new[:, None] - means) ** 2).sum(2).argmin(1)]

class Scaler:
    def fit(self, X):
        self.mean, self.scale = X.mean(0), X.std(0)
        return self
    def transform(self, X):
        return (X - self.mean) / self.scale

class Select:
    def __init__(self, count):
        self.count = count
    def fit(self, X, y):
        strength = np.abs((y - y.mean()) @ (X - X.mean(0))) / X.std(0)
        self.kept = np.argsort(-strength)[: self.count]
        return self
    def transform(self, X):
        return X[:, self.kept]

def clean(X, y, train, test):
    X = Scaler().fit(X[train]).transform(X)
    X = Select(20).fit(X[train], y[train]).transform(X)
    return centroid(X[train], y[train], X[test])

def select_all(X, y, train, test):
    X = Select(20).fit(X, y).transform(X)  # here
    return centroid(X[train], y[train], X[test])

def select_by_hand(X, y, train, test):
    kept = np.argsort(-np.abs((y - y.mean()) @ X))[:20]
    return centroid(X[train][:, kept], y[train], X[test][:, kept])

def scale_all(X, y, train, test):
    X = Scaler().fit(X).transform(X)  # here
    return centroid(X[train], y[train], X[test])

def scale_all_in_vain(X, y, train, test):
    Scaler().fit(X)  # here
    return centroid(X[train], y[train], X[test])

def before_folds(X, y):
    return in_folds(Select(100).fit(X, y).transform(X), y)  # here

def in_folds(X, y, select=False):
    out, fold = np.empty(len(y)), np.arange(len(y)) % 5
    for number in range(5):
        other = fold != number
        x = Select(100).fit(X[other], y[other]).transform(X) if select else X
        out[~other] = centroid(x[other], y[other], x[~other])
    return out

def inside_folds(X, y):
    return in_folds(X, y, select=True)

def unseeded(X, y, train, test):
    return np.random.default_rng().permutation(y[test])

def wrong_length(X, y, train, test):
    return y[train]

def three(X, y, train):
    return y

def raising(X, y, train, test):
    raise RuntimeError("no such model")
"""


def rows_of(table, target="y", split=None, **flags):
    """Give the Rows of a dict of arrays; `split` is a mask of training rows."""
    made = reading.Table([reading._column(name, np.asarray(a)) for name, a in table.items()])
    args = argparse.Namespace(**{**FLAGS, **flags, "column": target})
    parts = None if split is None else (np.flatnonzero(split), np.flatnonzero(~split))
    return splits.assign(made, args, parts)


def judged(rows):
    findings, _, _ = leakage.table_findings(rows)
    return {found.id: found for found in findings}


def failed(rows):
    return {id for id, found in judged(rows).items() if found.verdict == "fail"}


def gaussian(seed, count=400, width=5):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, width))
    table = {f"x{i}": x[:, i] for i in range(width)}
    return draw, table, draw.random(count) < 0.7


# Known answers


def pipeline_of(rows, name):
    scope: dict = {}
    exec(compile(PIPELINES, "pipelines.py", "exec"), scope)
    return pipelines.open_pipeline(scope[name], name, rows)


def checked(rows, name):
    findings, numbers = pipelines.check_pipeline(pipeline_of(rows, name), lambda *_: None)
    return {found.id: found for found in findings}, numbers


@pytest.fixture(scope="module")
def noise():
    """100 rows, 5000 columns and a target that nothing tells."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(100, 5000))
    return rows_of({**{f"x{i}": x[:, i] for i in range(5000)}, "y": draw.integers(0, 2, 100)})


def test_selecting_columns_before_the_folds_makes_noise_look_certain(noise):
    found, numbers = checked(noise, "before_folds")
    leak = found["leak-shuffled-labels"]
    assert leak.verdict == "fail" and leak.value < 1e-20
    assert 1 - np.mean(numbers["shuffled_scores"]) < 0.05  # the error; the truth is .5
    assert leak.inflation > 0.3
    honest, numbers = checked(noise, "inside_folds")
    assert honest["leak-shuffled-labels"].verdict == "pass"
    assert abs(np.mean(numbers["shuffled_scores"]) - 0.5) < 0.12


def test_thirty_percent_copies_with_random_labels_score_as_the_formula_says():
    draw, table, train = gaussian(3, count=4000)
    labels = draw.integers(0, 2, 4000)
    held = np.flatnonzero(~train)
    copies = held[: int(0.3 * len(held))]
    source = draw.choice(np.flatnonzero(train), len(copies))
    for values in [*table.values(), labels]:
        values[copies] = values[source]
    found = judged(rows_of({**table, "y": labels}, split=train))["leak-duplicates"]
    assert found.verdict == "fail" and found.value == pytest.approx(0.3, abs=0.001)
    accuracy = float(re.search(r"by heart (\S+) right", found.message)[1])
    assert accuracy == pytest.approx(0.3 + 0.35, abs=0.03)
    assert found.inflation == pytest.approx(0.15, abs=0.03)


def test_a_random_split_of_a_random_walk_knows_the_answers_between():
    draw = np.random.default_rng(5)
    walk, day = np.cumsum(draw.normal(size=2000)), np.arange(2000)
    table = {"day": day, "z": draw.normal(size=2000), "y": walk}
    found = judged(rows_of(table, split=draw.random(2000) < 0.7, time="day"))["leak-time-order"]
    as_split, in_order = map(
        float, re.search(r"R2 (\S+), in order of time (\S+)", found.message).groups()
    )
    assert found.verdict == "fail" and as_split > 0.98 and in_order < 0
    assert found.inflation > 0.9
    assert failed(rows_of(table, split=day < 1400, time="day")) == set()


@pytest.mark.parametrize("with_id", [True, False])
@pytest.mark.parametrize("kind", ["values", "classes", "smoothed"])
def test_target_means_of_all_rows_tell_half_of_a_random_target(kind, with_id):
    if kind == "smoothed" and not with_id:
        pytest.skip("smoothing by counts needs the column that was encoded")
    draw = np.random.default_rng(2)
    ids = np.repeat(np.arange(1000), 2)
    target = draw.normal(size=2000) if kind != "classes" else draw.integers(0, 2, 2000)
    total, m = np.bincount(ids, target), 3.0 if kind == "smoothed" else 0.0
    coded = ((total + m * target.mean()) / (2 + m))[ids]
    train = draw.random(2000) < 0.7
    table = {**({"id": ids} if with_id else {}), "coded": coded, "y": target}
    found = judged(rows_of(table, split=train))["leak-target-encoding"]
    assert found.verdict == "fail" and "coded is the mean target" in found.message
    seen = float(re.search(r"correlation (\S+) with", found.message)[1])
    assert seen == pytest.approx(0.71, abs=0.04)
    assert found.inflation is None if kind == "classes" and not with_id else found.inflation > 0.5
    means = np.bincount(ids[train], target[train], 1000) / np.maximum(
        np.bincount(ids[train], minlength=1000), 1
    )
    means[np.bincount(ids[train], minlength=1000) == 0] = target[train].mean()
    honest = {**table, "coded": means[ids]}
    assert judged(rows_of(honest, split=train))["leak-target-encoding"].verdict == "pass"


def test_a_scaler_over_all_rows_is_found_and_ranked_last(noise):
    found, _ = checked(noise, "scale_all")
    leak = found["leak-fit-before-split"]
    assert leak.verdict == "fail" and leak.small and "small" in leak.message
    assert found["leak-shuffled-labels"].verdict == "pass"
    report = leakage.Report("leakage-safe-data")
    severities = importlib.import_module("severities")
    worst = judged(rows_of(*leaky_column()))["leak-single-feature"]
    shift = severities.Finding("leak-adversarial", "fail", "no inflation is known")
    severities.deliver(report, [leak, shift, worst])
    ranked = ["leak-single-feature", "leak-adversarial", "leak-fit-before-split"]
    assert report.numbers["ranked"] == ranked == [check["id"] for check in report.checks]


# Pipelines


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("select_all", "Select.fit saw 25 rows outside train"),
        ("select_by_hand", "computed over all rows"),
        ("scale_all", "Scaler.fit saw 25 rows outside train"),
        ("scale_all_in_vain", "Scaler.fit saw 25 rows outside train"),
    ],
)
def test_what_saw_held_out_rows_is_named_with_its_line(noise, tmp_path, name, line):
    file = tmp_path / "pipes.py"
    file.write_text(PIPELINES)
    spec = importlib.util.spec_from_file_location("pipes", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = pipelines.open_pipeline(getattr(module, name), name, noise)
    findings, _ = pipelines.check_pipeline(made, lambda *_: None)
    found = {f.id: f for f in findings}["leak-fit-before-split"]
    assert found.verdict == "fail" and line in found.fix["text"]
    assert ("follow targets" in found.message) == name.startswith("select")
    assert found.fix["file"] == str(file)
    place = PIPELINES.split(f"def {name}")[0].count("\n") + 1
    offset = PIPELINES.split(f"def {name}")[1].split("# here")[0].count("\n")
    assert found.fix["line"] == place + (offset if "hand" not in name else 0)


def test_a_clean_pipeline_passes_and_one_without_a_seed_is_unclear(noise):
    found, numbers = checked(noise, "clean")
    assert {f.verdict for f in found.values()} == {"pass"}
    assert {call["rows"] for call in numbers["fits"]} == {75}
    found, _ = checked(noise, "unseeded")
    assert found["leak-fit-before-split"].verdict == "unclear"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wrong_length", "one prediction for each of the 25 test rows"),
        ("three", "takes 3 arguments"),
        ("raising", "no such model"),
    ],
)
def test_a_pipeline_that_cannot_be_judged_is_refused(noise, name, says):
    with pytest.raises(leakage.UsageError, match=says):
        checked(noise, name)


def recorder_fit(rows):
    def fit(X):
        return X

    return fit(rows)


def test_the_recorder_knows_rows_through_transforms_and_equal_rows_as_train():
    features = np.arange(12.0).reshape(6, 2)
    features[5] = features[0]
    with recorder.recording(features, train=[3, 4, 5]) as seen:
        recorder_fit(features[[0]])
    assert seen.calls[0].rows.tolist() == [5]
    scope: dict = {}
    exec(PIPELINES, scope)
    with recorder.recording(features, train=[0, 1, 2]) as seen:
        scaler = scope["Scaler"]().fit(features[:3])
        scaled = scaler.transform(features)
        scope["Scaler"]().fit(scaled[[1, 4]])
        scope["Scaler"]().fit(features[[5]])
    assert [call.rows.tolist() for call in seen.calls] == [[0, 1, 2], [1, 4], [0]]
    assert sys.getprofile() is None


def test_regression_text_columns_and_class_scores_go_through_a_pipeline():
    draw, table, _ = gaussian(0, count=200)
    table["kind"] = draw.choice(["a", "b"], 200)
    rows = rows_of({**table, "y": table["x0"] + draw.normal(size=200)})

    def slope(X, y, train, test):
        x = X[:, 0].astype(float)
        return np.polyval(np.polyfit(x[train], y[train], 1), x[test])

    made = pipelines.open_pipeline(slope, "slope", rows)
    found, numbers = pipelines.check_pipeline(made, lambda *_: None)
    assert {f.verdict for f in found} == {"pass"} and 0.05 < numbers["score"] < 0.8


# One fault each


def leaky_column():
    draw, table, train = gaussian(7)
    labels = draw.integers(0, 2, 400)
    return {**table, "bad": labels + 0.2 * draw.normal(size=400), "y": labels}, "y", train


def test_a_column_that_knows_the_classes_is_named():
    found = judged(rows_of(*leaky_column()))["leak-single-feature"]
    assert found.verdict == "fail" and found.value > 0.99 and "AUC of bad alone" in found.message


@pytest.mark.parametrize("kind", ["codes", "words", "gaps", "id", "far", "three"])
def test_a_column_tells_the_target_in_many_ways(kind):
    draw, table, train = gaussian(8)
    labels = draw.integers(0, 3 if kind == "three" else 2, 400)
    table["bad"] = {
        "codes": lambda: np.array([4.0, 9.0, 1.0])[labels],
        "words": lambda: np.array(["late", "paid"])[np.minimum(labels, 1)],
        "gaps": lambda: np.where(labels == 1, np.nan, draw.normal(size=400)),
        "id": lambda: [f"{'pos' if y else 'neg'}_{n}" for n, y in enumerate(labels)],
        "far": lambda: np.where(labels == 1, draw.normal(size=400), draw.choice([-9.0, 9.0], 400)),
        "three": lambda: labels * 2.0 + 0.1 * draw.normal(size=400),
    }[kind]()
    found = judged(rows_of({**table, "y": labels}, split=train))["leak-single-feature"]
    assert found.verdict == "fail" and "bad" in found.message


def test_a_column_of_values_is_judged_by_rank_or_by_what_it_explains():
    draw, table, train = gaussian(9)
    target = draw.normal(size=400)
    for bad in (np.exp(target), np.round(target, 2) ** 3):
        found = judged(rows_of({**table, "bad": bad, "y": target}, split=train))
        assert found["leak-single-feature"].verdict == "fail"


def test_a_group_on_both_sides_fails_and_says_what_it_is_worth():
    draw, table, train = gaussian(10)
    group = draw.integers(0, 40, 400)
    labels = (draw.normal(size=40)[group] > 0).astype(int)
    rows = {**table, "who": group, "y": labels}
    found = judged(rows_of(rows, split=train, group="who"))["leak-groups"]
    assert found.verdict == "fail" and found.value == 1.0 and found.inflation > 0.3
    assert "leak-groups" not in failed(rows_of(rows, split=group < 28, group="who"))
    suggested = columns.suggestions(rows_of({**table, "user_id": group, "y": labels}, split=train))
    assert suggested[0].startswith("--group user_id: 100 %")


def test_time_needs_strictly_earlier_rows_and_the_embargo():
    draw, table, _ = gaussian(11)
    day = np.arange(400)
    stamps = (np.datetime64("2024-01-01") + day).astype(str)
    labels = draw.integers(0, 2, 400)
    for time in (day, stamps):
        rows = {**table, "when": time, "y": labels}
        early = day < 300
        assert failed(rows_of(rows, split=early, time="when")) == set()
        gap = judged(rows_of(rows, split=early, time="when", embargo="7"))["leak-time-order"]
        assert gap.verdict == "fail" and gap.value == pytest.approx(7 / 300)
        assert "embargo" in gap.message
        kept = (day < 292) | (day >= 300)
        fits = rows_of(
            {k: np.asarray(v)[kept] for k, v in rows.items()},
            split=early[kept],
            time="when",
            embargo="7",
        )
        assert judged(fits)["leak-time-order"].verdict == "pass"
    tied = {**table, "when": np.minimum(day // 2, 150), "y": labels}
    assert "leak-time-order" in failed(rows_of(tied, split=day < 301, time="when"))
    backwards = judged(rows_of({**table, "when": day, "y": labels}, split=day >= 100, time="when"))
    assert backwards["leak-time-order"].value == 1.0


def test_near_copies_of_rows_are_found_and_crowds_are_not():
    draw, table, train = gaussian(12, count=800)
    held = np.flatnonzero(~train)[:60]
    source = draw.choice(np.flatnonzero(train), 60)
    labels = draw.integers(0, 2, 800)
    for values in table.values():
        values[held] = values[source] + 0.01 * draw.normal(size=60)
    found = judged(rows_of({**table, "y": labels}, split=train))
    assert found["leak-near-duplicates"].verdict == "fail"
    assert found["leak-near-duplicates"].value == pytest.approx(60 / (~train).sum(), abs=0.02)
    assert found["leak-duplicates"].verdict == "pass"
    crowd = np.where(draw.random((800, 1)) < 0.5, 0.001, 1.0) * draw.normal(size=(800, 5))
    clean = {f"x{i}": crowd[:, i] for i in range(5)}
    assert failed(rows_of({**clean, "y": labels}, split=train)) == set()


def test_copies_of_rows_of_few_values_are_found_where_train_does_not_repeat():
    draw = np.random.default_rng(18)
    table = {f"n{i}": draw.integers(0, 10, 600) for i in range(8)}
    train, labels = draw.random(600) < 0.7, draw.integers(0, 2, 600)
    assert failed(rows_of({**table, "y": labels}, split=train)) == set()
    held, source = np.flatnonzero(~train)[:20], np.flatnonzero(train)[:20]
    for values in [*table.values(), labels]:
        values[held] = values[source]
    found = judged(rows_of({**table, "y": labels}, split=train))["leak-duplicates"]
    assert found.verdict == "fail" and "20 of" in found.message


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_copies_made_before_the_split_are_found_though_train_has_them_too(noise):
    draw = np.random.default_rng(17)
    source = np.repeat(np.arange(200), 4)
    x = draw.normal(size=(200, 5))[source] + noise * draw.normal(size=(800, 5))
    table = {f"x{i}": x[:, i] for i in range(5)}
    train = draw.random(800) < 0.7
    labels = draw.integers(0, 2, 200)[source]
    found = judged(rows_of({**table, "y": labels}, split=train))
    id = "leak-near-duplicates" if noise else "leak-duplicates"
    assert found[id].verdict == "fail" and found[id].value > 0.9 and found[id].inflation > 0.4
    if noise:  # crowds without a common target are told, not accused
        found = judged(rows_of({**table, "y": draw.integers(0, 2, 800)}, split=train))[id]
        assert found.verdict == "skipped" and "--group tells" in found.message


def test_copies_with_another_target_are_told_and_row_names_do_not_hide_copies():
    draw, table, train = gaussian(13)
    held, source = np.flatnonzero(~train)[:40], np.flatnonzero(train)[:40]
    labels = draw.integers(0, 2, 400)
    for values in table.values():
        values[held] = values[source]
    labels[held] = 1 - labels[source]
    names = [f"row-{n}" for n in range(400)]
    found = judged(rows_of({"name": names, **table, "y": labels}, split=train))["leak-duplicates"]
    assert found.verdict == "fail" and "% with another target" in found.message
    assert found.inflation == pytest.approx(0.0, abs=0.1)


def test_without_a_split_rows_that_repeat_are_told():
    draw, table, _ = gaussian(14)
    for values in table.values():
        values[:100] = values[100:200]
    labels = draw.integers(0, 2, 400)
    found = judged(rows_of({**table, "y": labels}))
    assert found["leak-duplicates"].verdict == "fail" and found["leak-duplicates"].value == 0.25
    assert found["leak-adversarial"].verdict == "skipped"


@pytest.mark.parametrize("kind", ["mean", "spread", "pair", "words", "gaps"])
def test_held_out_rows_of_another_kind_are_told_apart(kind):
    draw, table, train = gaussian(15, count=800)
    table["word"] = draw.choice(["a", "b", "c"], 800).astype(object)
    table["part"] = draw.normal(size=800)
    held = ~train
    if kind == "mean":
        table["x2"][held] += 1.0
    elif kind == "spread":
        table = {"x2": np.where(held, 3.0, 1.0) * table["x2"]}
    elif kind == "pair":
        table["x3"][held] = 0.9 * table["x2"][held] + 0.4 * table["x3"][held]
        table["x3"][train] = -0.9 * table["x2"][train] + 0.4 * table["x3"][train]
    elif kind == "words":
        table["word"][held & (draw.random(800) < 0.6)] = "c"
    else:
        table["part"][held & (draw.random(800) < 0.5)] = np.nan
    found = judged(rows_of({**table, "y": draw.integers(0, 2, 800)}, split=train))
    assert found["leak-adversarial"].verdict == "fail" and found["leak-adversarial"].value > 0.6
    assert {"mean": "x2", "spread": "x2", "pair": "x3", "words": "word", "gaps": "part"}[
        kind
    ] in found["leak-adversarial"].message


# Clean data


CLEAN = {
    "gaussian": lambda draw, n: {f"x{i}": draw.normal(size=n) for i in range(6)},
    "few values": lambda draw, n: {f"b{i}": draw.integers(0, 2, n) for i in range(4)},
    "words": lambda draw, n: {
        "a": draw.choice(["u", "v", "w"], n),
        "b": draw.choice([f"k{i}" for i in range(60)], n),
        "z": draw.normal(size=n),
    },
    "one hot": lambda draw, n: {
        f"{c}{k}": (codes == k).astype(int)
        for c, codes in (("p", draw.integers(0, 12, n)), ("q", draw.integers(0, 12, n)))
        for k in range(12)
    },
    "gaps": lambda draw, n: {
        f"x{i}": np.where(draw.random(n) < 0.2, np.nan, draw.normal(size=n)) for i in range(5)
    },
    "heavy tails": lambda draw, n: {f"x{i}": draw.standard_t(1.2, n) for i in range(3)},
    "clusters": lambda draw, n: {
        f"x{i}": draw.choice([0.0, 5.0], n) + draw.choice([0.01, 1.0], n) * draw.normal(size=n)
        for i in range(3)
    },
    "counts and ids": lambda draw, n: {
        "row": np.arange(n),
        "name": [f"n{i}" for i in draw.permutation(n)],
        "count": draw.poisson(3, n),
        "cents": draw.integers(100, 99999, n),
    },
    "constant": lambda draw, n: {"c": np.ones(n), "x": draw.normal(size=n)},
    "prices": lambda draw, n: {
        "cents": (cents := draw.integers(100, 99999, n)),
        "taxed": cents * 1.2,
        "kind": draw.choice(["a", "b", "c"], n),
    },
    "many words": lambda draw, n: {
        "z": draw.normal(size=n),
        "town": draw.choice([f"t{i}" for i in range(3 * n)], n),
    },
    "wide": lambda draw, n: {f"x{i}": draw.normal(size=n) for i in range(150)},
}


@pytest.mark.parametrize("kind", CLEAN)
def test_clean_tables_have_no_finding_at_twenty_seeds(kind):
    count = {"wide": 120, "clusters": 800, "prices": 800}.get(kind, 300)
    for seed in range(20):
        draw = np.random.default_rng(1000 + seed)
        table = CLEAN[kind](draw, count)
        first = (
            np.nan_to_num(np.asarray(next(iter(table.values())), float))
            if "word" not in kind
            else table["z"]
        )
        signal = 0.8 * (first - first.mean()) / (first.std() or 1.0) + draw.normal(size=count)
        target = [(signal > 0).astype(int), signal, np.digitize(signal, [-0.5, 0.5])][seed % 3]
        train = draw.random(count) < 0.7
        assert failed(rows_of({**table, "y": target}, split=train)) == set(), (kind, seed)


def test_clean_splits_by_time_and_group_have_no_finding_at_twenty_seeds():
    for seed in range(20):
        draw, table, _ = gaussian(seed)
        day = np.arange(400)
        trend = {**table, "level": day / 50 + draw.normal(size=400), "when": day}
        walk = np.cumsum(draw.normal(size=400))
        lagged = {**trend, "before": np.roll(walk, 1), "y": walk}
        assert failed(rows_of(lagged, split=day < 300, time="when")) == set(), seed
        who = draw.integers(0, 12, 400)
        patient = {**table, "own": draw.normal(size=12)[who], "who": who}
        labels = (draw.normal(size=12)[who] + draw.normal(size=400) > 0).astype(int)
        train = who < 9
        assert failed(rows_of({**patient, "y": labels}, split=train, group="who")) == set(), seed


def test_rows_in_order_with_running_numbers_are_no_shift():
    draw, table, _ = gaussian(4)
    rows = {"id": np.arange(400), **table, "y": draw.integers(0, 2, 400)}
    assert failed(rows_of(rows, split=np.arange(400) < 300)) == set()


def test_small_samples_do_not_accuse():
    for seed in range(20):
        draw, table, _ = gaussian(seed, count=40)
        train = np.arange(40) < 28
        assert failed(rows_of({**table, "y": draw.integers(0, 2, 40)}, split=train)) == set(), seed


def test_means_of_train_alone_are_no_leak_where_most_targets_are_equal():
    draw = np.random.default_rng(0)
    ids, target = np.repeat(np.arange(500), 4), (draw.random(2000) < 0.005).astype(int)
    train = draw.random(2000) < 0.7
    means = np.bincount(ids[train], target[train], 500) / np.maximum(
        np.bincount(ids[train], minlength=500), 1
    )
    rows = {"id": ids, "coded": means[ids], "y": target}
    assert failed(rows_of(rows, split=train)) == set()


def test_the_mean_of_the_other_rows_of_a_category_is_an_encoding_of_all_rows():
    draw = np.random.default_rng(4)
    ids, target = draw.integers(0, 40, 600), draw.normal(size=600)
    train = draw.random(600) < 0.75
    totals, counts = np.bincount(ids, target), np.bincount(ids)
    others = np.round((totals[ids] - target) / (counts[ids] - 1), 6)
    rows = {"id": [f"c{i}" for i in ids], "coded": others, "y": target}
    assert failed(rows_of(rows, split=train)) == {"leak-target-encoding"}
    # Over train alone, as encoders do it, it is honest: held-out rows get the mean of train.
    totals = np.bincount(ids[train], target[train], minlength=40)
    counts = np.bincount(ids[train], minlength=40)
    own = np.where(train, target, 0.0)
    rows["coded"] = (totals[ids] - own) / (counts[ids] - train)
    assert failed(rows_of(rows, split=train)) == set()


# The command


def run(monkeypatch, capfd, folder, *words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    code = leakage.main()
    told = capfd.readouterr()
    return code, told.out, told.err


def write_csv(path, table):
    lines = [
        ",".join(table),
        *(",".join(map(str, row)) for row in zip(*table.values(), strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_header_with_commas_in_quotes_and_an_array_beside_the_table_are_read(tmp_path):
    (tmp_path / "t.csv").write_text('"weight, kg";"height, cm";y\n-1,5;2;0\n3;4;1\n')
    found = reading.read_table("", str(tmp_path / "t.csv")).columns
    assert list(found) == ["weight, kg", "height, cm", "y"]
    assert found["weight, kg"].values.tolist() == [-1.5, 3.0]
    np.savez(tmp_path / "t.npz", x=np.arange(3.0), version=np.array(2))
    assert list(reading.read_table("", str(tmp_path / "t.npz")).columns) == ["x"]


@pytest.mark.parametrize(
    "form", ["csv", "csv.gz", "tsv", "parquet", "npz", "npy", "two files", "semicolon"]
)
def test_every_format_gives_the_same_finding(monkeypatch, capfd, tmp_path, form):
    import gzip

    draw, table, train = gaussian(16, count=120)
    held, source = np.flatnonzero(~train)[:12], np.flatnonzero(train)[:12]
    table = {**table, "y": draw.integers(0, 2, 120)}
    for values in table.values():
        values[held] = values[source]
    words = ["--table", tmp_path / f"t.{form}", "--target", "y", "--split", "is_test"]
    whole = {**table, "is_test": (~train).astype(int)}
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
        parquet.write_table(pyarrow.table(whole), tmp_path / "t.parquet")
    elif form == "npz":
        np.savez(tmp_path / "t.npz", **whole)
    elif form == "npy":
        np.save(tmp_path / "t.npy", np.column_stack(list(table.values())))
        for name, rows in (("a", train), ("b", ~train)):
            np.save(tmp_path / f"{name}.npy", np.column_stack([v[rows] for v in table.values()]))
        words = ["--train", tmp_path / "a.npy", "--test", tmp_path / "b.npy", "--target", "5"]
    elif form == "two files":
        for name, rows in (("a", train), ("b", ~train)):
            write_csv(tmp_path / f"{name}.csv", {k: v[rows] for k, v in table.items()})
        words = ["--train", tmp_path / "a.csv", "--test", tmp_path / "b.csv", "--target", "y"]
    else:
        text = write_csv(tmp_path / "plain.csv", whole).read_text()
        text = text.replace(",", {"tsv": "\t", "semicolon": ";"}.get(form, ","))
        data = gzip.compress(text.encode()) if form == "csv.gz" else b"\xef\xbb\xbf" + text.encode()
        name = "t.csv" if form == "semicolon" else f"t.{form}"
        (tmp_path / name).write_bytes(data)
        words[1] = tmp_path / name
    code, out, err = run(monkeypatch, capfd, tmp_path, *words, "--json")
    assert code == 1, err
    report = json.loads(out)
    (fail,) = [check for check in report["checks"] if check["verdict"] == "fail"]
    assert fail["id"] == "leak-duplicates" and fail["value"] == pytest.approx(12 / (~train).sum())
    assert report["numbers"]["ranked"] == ["leak-duplicates"]
    assert report["artifacts"] and report["artifacts"][0].endswith("leakage.png")
    with open(report["artifacts"][0], "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


BAD = {
    "no file": ("", ["--table", "gone.csv", "--target", "y"], "no such file"),
    "empty": ("", ["--table", "t.csv", "--target", "y"], "is empty"),
    "header alone": ("a,y\n", ["--table", "t.csv", "--target", "y"], "has 0 rows"),
    "one row": ("a,y\n1,2\n", ["--table", "t.csv", "--target", "y"], "has 1 rows"),
    "no column": (
        "a,yes\n1,2\n2,3\n",
        ["--table", "t.csv", "--target", "yess"],
        "did you mean yes",
    ),
    "no target": ("a,y\n1,2\n2,3\n", ["--table", "t.csv"], "a table without --target"),
    "one class": ("a,y\n1,2\n2,2\n", ["--table", "t.csv", "--target", "y"], "y is 2 in every row"),
    "NaN target": (
        "a,y\n1,2\n2,\n3,1\n",
        ["--table", "t.csv", "--target", "y"],
        "1 rows have no value",
    ),
    "short line": ("a,y\n1,2\n2\n", ["--table", "t.csv", "--target", "y"], "t.csv:3 has 1 fields"),
    "twice": ("a,a,y\n1,2,3\n2,3,4\n", ["--table", "t.csv", "--target", "y"], "a column twice"),
    "target alone": ("y\n1\n0\n", ["--table", "t.csv", "--target", "y"], "no column besides"),
    "an id": ("a,y\n1,u\n2,v\n3,w\n4,x\n", ["--table", "t.csv", "--target", "y"], "4 classes in 4"),
    "latin": (b"a,y\n\xe9,1\nb,2\n", ["--table", "t.csv", "--target", "y"], "no UTF-8: byte 0xe9"),
    "wrong end": ("a,y\n1,2\n", ["--table", "t.xlsx", "--target", "y"], "its end names no format"),
    "gz": (b"\x1f\x8b\x08\x00broken", ["--table", "t.csv.gz", "--target", "y"], "broken gzip file"),
    "gz no": (b"a,y\n1,2\n", ["--table", "t.csv.gz", "--target", "y"], "broken gzip file"),
    "npy": (b"nothing", ["--table", "t.npy", "--target", "y"], "cannot be read"),
    "npz": (b"nothing", ["--table", "t.npz", "--target", "y"], "t.npz"),
    "parquet": (b"nothing", ["--table", "t.parquet", "--target", "y"], "no whole parquet file"),
    "split": (
        "a,y,s\n1,2,p\n2,3,q\n",
        ["--table", "t.csv", "--target", "y", "--split", "s"],
        "holds p, q",
    ),
    "no held-out": (
        "a,y,s\n1,2,train\n2,3,train\n",
        ["--table", "t.csv", "--target", "y", "--split", "s"],
        "no held-out row",
    ),
    "time": (
        "a,y,t\n1,2,noon\n2,3,eve\n",
        ["--table", "t.csv", "--target", "y", "--time", "t"],
        "holds 'noon'",
    ),
    "embargo": (
        "a,y,t\n1,2,1\n2,3,2\n",
        ["--table", "t.csv", "--target", "y", "--time", "t", "--embargo", "7d"],
        "--embargo 7d",
    ),
    "embargo alone": (
        "a,y\n1,2\n2,3\n",
        ["--table", "t.csv", "--target", "y", "--embargo", "1"],
        "without --time",
    ),
    "pipeline": (
        "a,y\n1,2\n2,3\n",
        ["--table", "t.csv", "--target", "y", "--pipeline", "gone.py:f"],
        "there is no file",
    ),
    "both": (
        "a,y\n1,2\n2,3\n",
        ["--table", "t.csv", "--train", "t.csv", "--target", "y"],
        "one or the other",
    ),
    "no project": ("", [], "no curry-train project"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_plain_words(monkeypatch, capfd, tmp_path, name):
    content, words, says = BAD[name]
    if "--table" in words and "gone" not in words[1]:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / words[1]).write_bytes(data)
    code, out, err = run(monkeypatch, capfd, tmp_path, *words)
    assert code == 2 and says in err and "Traceback" not in err and out == ""
    assert not list((tmp_path / "runs").rglob("report.json"))


def test_tables_of_other_columns_are_refused(monkeypatch, capfd, tmp_path):
    write_csv(tmp_path / "a.csv", {"u": [1, 2], "y": [0, 1]})
    write_csv(tmp_path / "b.csv", {"v": [1, 2], "y": [0, 1]})
    words = ["--train", "a.csv", "--test", "b.csv", "--target", "y"]
    code, _, err = run(monkeypatch, capfd, tmp_path, *words)
    assert code == 2 and "train alone has u; test alone has v" in err


def test_the_same_seed_gives_the_same_report(monkeypatch, capfd, tmp_path):
    draw, table, train = gaussian(20, count=150)
    write_csv(
        tmp_path / "t.csv",
        {**table, "y": draw.integers(0, 2, 150), "split": np.where(train, "train", "val")},
    )
    words = ["--table", "t.csv", "--target", "y", "--split", "split", "--seed", "3", "--json"]
    reports = [json.loads(run(monkeypatch, capfd, tmp_path, *words)[1]) for _ in range(2)]
    assert reports[0]["checks"] == reports[1]["checks"] and reports[0]["verdict"] == "pass"


# Samples of a project


def images(draw, count):
    inputs = draw.normal(size=(count, 2, 5, 5)).astype(np.float32)
    return {"inputs": inputs, "labels": draw.integers(0, 4, count)}


@pytest.mark.parametrize("fault", [None, "copies", "pixel"])
def test_samples_of_a_project_are_judged_as_rows(fault):
    from types import SimpleNamespace as Space

    samples = importlib.import_module("sample_rows")
    draw = np.random.default_rng(0)
    train, val = images(draw, 300), images(draw, 90)
    if fault == "copies":
        val["inputs"][:9], val["labels"][:9] = train["inputs"][:9], train["labels"][:9]
    if fault == "pixel":
        for side in (train, val):
            side["inputs"][:, 1, 2, 3] = np.array([5.0, 1.0, 9.0, 3.0])[side["labels"]]
    found = judged(samples.rows_of_samples(Space(train=train, val=val), 0))
    wrong = {id for id, finding in found.items() if finding.verdict == "fail"}
    assert (
        wrong
        == {None: set(), "copies": {"leak-duplicates"}, "pixel": {"leak-single-feature"}}[fault]
    )
    if fault == "pixel":
        assert "inputs[38]" in found["leak-single-feature"].message


def test_samples_of_many_or_missing_labels_are_judged_too():
    from types import SimpleNamespace as Space

    samples = importlib.import_module("sample_rows")
    draw = np.random.default_rng(1)
    sides = []
    for count in (200, 60):
        labels = draw.normal(size=(count, 4))
        labels[0], labels[1, 2] = np.nan, np.nan
        sides.append({"input_ids": draw.integers(0, 50, (count, 6)), "labels": labels})
    rows = samples.rows_of_samples(Space(train=sides[0], val=sides[1]), 0)
    assert (len(rows.train), len(rows.test), rows.classes) == (199, 59, [])
    assert failed(rows) == set()
