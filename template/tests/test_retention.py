"""Which checkpoints stay: newest, every n-th, best by validation; and never half of one."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_checkpoint import load, meta, save, state

from curry_train import checkpoint as disk
from curry_train.checkpoint import dcp, retention
from curry_train.checkpoint.convert import seal
from curry_train.config import Config, RunConfig
from curry_train.rules import problems


def saved(root: Path, step: int, loss: object = None, **options: object) -> Path:
    extra = {} if loss is None else {"metrics": {"val/loss": loss}}
    return save(root, step, meta={**meta(8 * step), **extra}, **options)


def names(root: Path) -> list[int]:
    return sorted(retention.step_of(path) for path in root.glob("step-????????"))


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        ((0, 0, 0), [1, 2, 3, 4, 5, 6]),
        ((1, 0, 0), [6]),
        ((2, 0, 0), [5, 6]),
        ((9, 0, 0), [1, 2, 3, 4, 5, 6]),
        ((1, 2, 0), [2, 4, 6]),
        ((1, 5, 0), [5, 6]),
        ((1, 0, 1), [3, 6]),
        ((1, 0, 2), [3, 5, 6]),  # 2 and 5 are equal: the newer
        ((1, 0, 3), [2, 3, 5, 6]),
        ((1, 0, 9), [1, 2, 3, 5, 6]),  # 4 and 6 have no finite score
        ((2, 4, 1), [3, 4, 5, 6]),
    ],
)
def test_each_rule_adds_what_it_keeps(tmp_path, rules, stay):
    for step, loss in enumerate((3.0, 1.5, 1.0, None, 1.5, None), start=1):
        folder = tmp_path / disk.folder_name(step)
        folder.mkdir()
        scores = {} if loss is None else {"metrics": {"val/loss": loss}}
        manifest = {**meta(step), "format": 1, "step": step, "files": [], "tensors": {}, **scores}
        seal(folder, manifest)
    found = list(disk.complete_checkpoints(tmp_path))
    keep, keep_every, keep_best = rules
    kept = retention.kept(reversed(found), keep, keep_every, keep_best)
    assert sorted(map(retention.step_of, kept)) == stay
    options = {"keep": keep, "keep_every": keep_every, "keep_best": keep_best}
    doomed = retention.prune(tmp_path, **options, dry_run=True)
    assert names(tmp_path) == [1, 2, 3, 4, 5, 6], "a dry run removed something"
    assert retention.prune(tmp_path, **options) == doomed
    assert names(tmp_path) == stay
    assert {*map(retention.step_of, doomed)} == {1, 2, 3, 4, 5, 6} - {*stay}


@pytest.mark.parametrize("loss", ["NaN", True, [1.0], {"a": 1}, -float("inf"), float("nan")])
def test_a_score_that_is_no_finite_number_is_never_best(tmp_path, monkeypatch, loss):
    manifests = {1: {"metrics": {"val/loss": loss}}, 2: {"metrics": {"val/loss": 9.0}}}
    manifests |= {3: {}, 4: {"metrics": loss}}
    monkeypatch.setattr(retention, "read_manifest", lambda path: manifests[retention.step_of(path)])
    paths = [tmp_path / disk.folder_name(step) for step in manifests]
    assert retention.kept(paths, 1, 0, 1) == {paths[1], paths[3]}


def test_disk_use_stays_bounded_while_and_after_every_save(tmp_path, monkeypatch):
    """newest 2, every 10th, best 1: never more than that and the one being written."""
    most, bytes_of_one = [], 0
    real = os.replace

    def watched(source, target):
        most.append(len([p for p in tmp_path.iterdir() if p.is_dir()]))
        real(source, target)

    monkeypatch.setattr(os, "replace", watched)
    losses = {step: abs(step - 13) + 1.0 for step in range(1, 31)}
    for step, loss in losses.items():
        path = saved(tmp_path, step, loss, keep=2, keep_every=10, keep_best=1)
        bytes_of_one = sum(file.stat().st_size for file in path.iterdir())
        expected = {step, step - 1, min(step, 13), *range(10, step + 1, 10)} - {0}
        assert names(tmp_path) == sorted(expected)
        everything = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
        assert everything < (len(expected) + 0.5) * bytes_of_one
    assert max(most) <= len({29, 30, 13, 10, 20}) + 1
    assert {p.name for p in tmp_path.iterdir() if not p.name.startswith("step-")} == {"latest"}


def test_the_checkpoint_just_saved_stays_and_loads(tmp_path):
    for step, loss in ((1, 1.0), (2, 5.0), (3, 9.0)):
        path = saved(tmp_path, step, loss, keep=1, keep_best=1)
        assert dcp.latest(tmp_path) == path
        load(path)
    assert names(tmp_path) == [1, 3]
    assert dcp.read_manifest(path)["metrics"] == {"val/loss": 9.0}


def test_a_folder_loses_its_name_before_its_files(tmp_path, monkeypatch):
    for step in (1, 2):
        saved(tmp_path, step)

    def stuck(path, *_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(retention.shutil, "rmtree", stuck)
    with pytest.warns(UserWarning, match="step-00000001 could not be pruned"):
        assert retention.prune(tmp_path, keep=1) == []
    monkeypatch.undo()
    assert names(tmp_path) == [2]
    (aside,) = tmp_path.glob("step-00000001.tmp-*")
    assert aside.is_dir(), "what a kill leaves here is found by its name"
    saved(tmp_path, 3, keep=2)
    assert not aside.exists() and names(tmp_path) == [2, 3]


def test_what_is_incomplete_neither_counts_nor_goes(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, float(step))
    (tmp_path / "step-00000003" / "tokenizer.json").unlink()
    (tmp_path / "step-00000009").mkdir()
    assert retention.prune(tmp_path, keep=1, keep_best=1) == []
    assert retention.prune(tmp_path / "absent", keep=1) == []
    assert names(tmp_path) == [1, 2, 3, 9]
    shutil.rmtree(tmp_path / "step-00000001")
    assert retention.prune(tmp_path, keep=1) == []
    load(tmp_path / "step-00000002", state())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keep": 0, "keep_every": 500}, "run.keep_every=500: run.keep=0 keeps every checkpoint"),
        ({"keep": 0, "keep_best": 1}, "run.keep_best=1: run.keep=0 keeps every checkpoint"),
        ({"keep_every": 100}, "run.keep_every=100: run.save_every=250 does not save at those"),
        ({"keep_every": 500, "save_every": 0}, "run.save_every=0 does not save at those"),
        ({"keep_best": 1, "eval_every": 0}, "run.keep_best=1: a checkpoint is judged by"),
        ({"keep_best": 1, "save_every": 0}, "run.eval_every=250 do not meet"),
        ({"keep_best": 1, "save_every": 40, "eval_every": 60}, "do not meet"),
    ],
)
def test_rules_that_could_keep_nothing_are_refused(changes, words):
    (found,) = problems(replace(Config(), run=RunConfig(**changes)))
    assert words in found and "set" in found


@pytest.mark.parametrize(
    "changes",
    [
        {"keep_every": 1000, "keep_best": 2},
        {"keep_best": 1, "save_every": 50, "eval_every": 250},
        {"keep_best": 1, "save_every": 500, "eval_every": 250},
    ],
)
def test_rules_that_keep_something_are_taken(changes):
    assert problems(replace(Config(), run=RunConfig(**changes))) == []
