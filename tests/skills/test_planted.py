"""The bank of planted bugs and clean models (tests/planted) before the checks.

By default every check meets its own row and every clean model meets preflight; the whole table
runs with CURRY_TRAIN_FULL=1. `python3 tests/planted/table.py` prints it.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest
from planted import bank
from planted.row import FLOW, INIT, ONE_BATCH, PREFLIGHT, Row
from skills.targets.processes import ROOT

FULL = os.environ.get("CURRY_TRAIN_FULL") == "1"
full = pytest.mark.skipif(not FULL, reason="CURRY_TRAIN_FULL=1 runs the whole table")
PREFLIGHT_HOME = ROOT / "skills" / PREFLIGHT / "scripts"
JUDGING = {
    INIT: {"initial-loss", "logit-scale", "head-prior-bias"},
    ONE_BATCH: {
        *("one-batch-floor", "double-softmax", "input-independent"),
        *("no-learning", "labels-reshuffled", "optimizer-parameters"),
    },
    FLOW: {
        *("vanishing-gradient", "exploding-gradient", "dead-units", "saturated-units"),
        *("update-ratio", "attention-entropy", "attention-logits", "residual-growth"),
        "non-finite",
    },
}


def checks() -> dict[str, set[str]]:
    """Give the ids that each stage judges by; those of preflight as its script lists them."""
    sys.path.insert(0, str(PREFLIGHT_HOME))
    preflight_checks = importlib.import_module("preflight_checks")
    return {PREFLIGHT: {name for name, _ in preflight_checks.CHECKS}, **JUDGING}


def own_rows() -> list[Row]:
    """Take the first row of each check: the fewest with which every check is missed if removed."""
    chosen: list[Row] = []
    for row in bank.ROWS:
        known = {check for other in chosen if other.stage == row.stage for check in other.fails}
        if set(row.fails) - known:
            chosen.append(row)
    return chosen


OWN = own_rows()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return bank.copied_template(tmp_path_factory.mktemp("planted") / "project")


@pytest.mark.parametrize("row", bank.ROWS if FULL else OWN, ids=lambda row: row.name)
def test_bug_is_found_and_nothing_else(row, tmp_path):
    found = bank.judge(row, tmp_path)
    assert not bank.wrong(row, found), found.text


@pytest.mark.parametrize("target", bank.CLEAN_MODELS)
def test_clean_model_is_not_accused(target, tmp_path):
    found = bank.judge_clean(target, tmp_path)
    assert not bank.accused(found), found.text


@pytest.mark.parametrize("settings", bank.PROJECTS if FULL else bank.PROJECTS[-1:])
def test_project_of_the_template_is_not_accused(settings, template, tmp_path):
    for stage in bank.STAGES if FULL else [PREFLIGHT]:
        found = bank.judge_project(template, settings, tmp_path, stage)
        assert not bank.accused(found), found.text


@full
@pytest.mark.parametrize("stage", [INIT, ONE_BATCH, FLOW])
def test_no_clean_model_is_accused_by_the_other_stages(stage, tmp_path):
    problems = {}
    for number, target in enumerate(bank.CLEAN_MODELS):
        found = bank.judge_clean(target, tmp_path / str(number), stage)
        problems[target] = bank.accused(found)
    assert not {target: problem for target, problem in problems.items() if problem}


def test_every_check_has_a_row_that_is_red_without_it():
    """The rows are green with all checks (the tests above); each misses the one that it expects."""
    for stage, ids in checks().items():
        rows = [row for row in OWN if row.stage == stage]
        for check in sorted(ids):
            green = bank.Found(1, frozenset(ids), frozenset(), "")
            owners = [row for row in rows if check in row.fails]
            assert owners, f"no row of the bank expects {check} of {stage}"
            assert all(check in bank.wrong(row, bank.without(green, check)) for row in owners)


@pytest.mark.parametrize("check", ["missing-zero-grad", "future-leakage", "schedule-values"])
def test_row_is_red_when_its_check_is_left_out(check, tmp_path):
    row = next(row for row in OWN if check in row.fails)
    assert f"not found: {check}" in bank.wrong(row, bank.judge(row, tmp_path, "--skip", check))


def test_bank_is_as_large_as_it_says():
    rows = bank.ROWS
    assert len({row.name for row in rows}) == len(rows) >= 50
    assert sum(bool(row.link) for row in rows) >= 15
    assert sum(row.before_check for row in rows) >= 10
    assert len(bank.CLEAN_MODELS) >= 26
    links = [row.link for row in rows if row.link]
    assert len(set(links)) == len(links)
    form = r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+"
    assert all(re.fullmatch(form, link) for link in links)


def test_diffs_are_small():
    for row in bank.ROWS:
        assert 1 <= len(row.diff()) <= 12, row.name
        assert row.on in bank.CLEAN_MODELS, row.name


def test_diff_that_does_not_fit_is_refused():
    row = Row("twice", "mlp.py:build", (("self", "this"),), ("no-gradient",), "a test")
    with pytest.raises(ValueError, match="times in mlp.py"):
        row.source()


def test_table_can_be_read_without_running(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "planted" / "table.py", "--list", "--diff"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "-    optimizer.zero_grad()" in done.stdout
    assert "expected  missing-zero-grad" in done.stdout
    assert done.stdout.rstrip().endswith(f"{len(bank.ROWS)} rows, none of them run")
