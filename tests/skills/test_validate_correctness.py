"""Base against head: what must be seen is seen and named, and nothing is left behind."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from skills.targets import processes, small_project
from skills.targets.processes import ROOT

SCRIPT = ROOT / "skills" / "validate-correctness" / "scripts" / "validate_correctness.py"
sys.path.insert(0, str(SCRIPT.parent))
import comparison_report  # noqa: E402
import ref_worktrees  # noqa: E402
import run_folders  # noqa: E402
import run_words  # noqa: E402
import step_comparison  # noqa: E402
import validate_correctness  # noqa: E402

from kit.errors import UsageError  # noqa: E402
from kit.report import MAX_LINES, render  # noqa: E402

sys.dont_write_bytecode = False  # the script sets it for itself
FULL = bool(os.environ.get("CURRY_TRAIN_FULL"))
STEPS = 25


def rows_of(steps=STEPS, first=1, change=None, noise=0.0, **factors):
    """Give rows as train.py logs them; `change(step, row)` plants a fault, noise is relative."""
    draw, generator, rows = random.Random(1), random.SystemRandom(), []
    for step in range(1, first + steps):
        row = {
            "step": step,
            "attempt": 1,
            "tokens": 1024 * step,
            "loss": 2 + 3 * math.exp(-step / 10) + 0.1 * draw.random(),
            "aux_loss": 0.02 + 0.001 * draw.random(),
            "z_loss": 0.001 + 0.0001 * draw.random(),
            "lr": 1e-4 * step,
            "grad_norm": 1 + draw.random(),
            "step_time": 0.1 + 0.002 * draw.random(),
            "moe/load_max_over_mean": 1.5 + draw.random(),
            "memory_bytes": 10**9,
        }
        row["tokens_per_s"] = 1024 / row["step_time"]
        if step == first + steps - 1:
            row |= {"val/loss": 2.5, "val/bpb": 3.6}
        for key in ("loss", "aux_loss", "grad_norm", "val/loss"):
            if key in row:
                row[key] *= 1 + noise * step * generator.gauss(0, 1)
        for key, factor in factors.items():
            row[key] *= factor
        if change:
            change(step, row)
        if step >= first:
            rows.append(row)
    return rows


def write_run(folder, rows, status="done", failure=None, resumed=False):
    """Write a run folder as train.py leaves one."""
    folder.mkdir(parents=True)
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    rows = [
        {k: "NaN" if isinstance(v, float) and v != v else names.get(v, v) for k, v in row.items()}
        for row in rows
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"ev": "start"}, *([{"ev": "resume"}] if resumed else [])]
    events += [{"ev": "end", "status": status, "reason": None}]
    (folder / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if failure:
        (folder / "failure.json").write_text(json.dumps(failure))


def judged(tmp_path, head, base=None, **options):
    """Compare run folders with these rows; give the report and its checks."""
    bases = base or [rows_of(), rows_of()]
    heads = head if isinstance(head[0], list) else [head]
    precision, told = options.pop("precision", "fp32"), options.pop("told", {})
    given, code = options.pop("given", {}), options.pop("code", 0)
    groups = [step_comparison.Group(0, [], [])]
    for side, several in (("base", bases), ("head", heads)):
        for number, rows in enumerate(several, 1):
            name = f"{side}-{number}-seed-0"
            ending = options if side == "head" else {}
            write_run(tmp_path / name / "validate-x", rows, **ending)
            run = run_folders.read_run(tmp_path / name, name, code if side == "head" else 0)
            run.started, run.ended = 100.0 * number, 100.0 * number + 50
            getattr(groups[0], side).append(run)
    comparison = step_comparison.compare(groups, given, precision)
    probed = {"config": {"precision": precision}, "config_hash": "0", "data_hash": "1"}
    probed |= {"batches": ["a", "b"], "why": ""}
    args = SimpleNamespace(steps=STEPS, no_performance=False, max_slowdown=1.05, max_memory=1.05)
    args.model, args.mesh = "small", "single"
    report = comparison_report.Gates("validate-correctness")
    call = SimpleNamespace(args=args, out=tmp_path)
    both = {"base": probed, "head": probed | told}
    comparison_report.report_on(call, report, groups, comparison, both, ["curry_train/optim.py"])
    assert len(render(report.to_dict(config_hash=None, git_sha=None, env={}), tmp_path)) < 4000
    return report, {check["id"]: check for check in report.checks}


def failed(checks, verdict="fail"):
    return {id.removeprefix("validate-") for id, c in checks.items() if c["verdict"] == verdict}


def at(step, **values):
    """Give a change of the rows from a step on; numbers are factors, strings are set."""

    def change(here, row):
        if here >= step:
            for key, value in values.items():
                if key in row:
                    row[key] = float(value) if isinstance(value, str) else row[key] * value

    return change


def without(*steps):
    return [row for row in rows_of() if row["step"] not in steps]


def test_equal_runs_pass_and_the_picture_is_there(tmp_path):
    report, checks = judged(tmp_path, rows_of())
    assert report.verdict == "pass" and failed(checks, "unclear") == set(), report.checks
    assert {c["verdict"] for c in report.checks} == {"pass"} and len(report.checks) == 14
    assert report.numbers["base_repeats"] == "bitwise" and "first_difference" not in report.numbers
    assert report.numbers["correctness"] == report.numbers["performance"] == "pass"
    with open(report.artifacts[0], "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    written = report.to_dict(config_hash=None, git_sha=None, env={})
    assert len(render(written, tmp_path).splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("change", "ids", "cause"),
    [
        (at(1, loss=1 + 1e-15), {"loss"}, "loss of step 1 differs on equal batches"),
        (at(1, aux_loss=1.001), {"aux-loss"}, "only the router"),
        (at(1, z_loss=1.001), {"aux-loss"}, "only the router"),
        (at(1, **{"moe/load_max_over_mean": 1.01}), {"router-load"}, "only the router"),
        (at(1, grad_norm=8.0), {"grad-norm", "norm-drift"}, "backward pass or gradient reduction"),
        (at(1, lr=1.0001), {"lr"}, "learning rate differs from step 1 on, 1.0001"),
        (at(9, lr=1.0001), {"lr"}, "learning rate differs from step 9 on"),
        (at(2, loss=1.01, grad_norm=1.01), {"loss", "grad-norm", "norm-drift"}, "optimizer"),
        (at(7, loss=1.01), {"loss"}, "equal up to step 6"),
        (at(25, **{"val/loss": 1.001}), {"val-loss"}, "evaluation, or the last update"),
        (at(25, **{"val/bpb": 1.001}), {"val-loss"}, "evaluation, or the last update"),
        (at(4, tokens=2), {"data"}, "token counts differ from step 4"),
        (at(3, loss="nan"), {"loss", "nonfinite"}, "equal up to step 2"),
        (at(3, loss="inf"), {"loss", "nonfinite"}, "equal up to step 2"),
        (at(5, grad_norm="nan"), {"grad-norm", "nonfinite"}, "equal up to step 4"),
    ],
)
def test_a_changed_quantity_fails_its_own_check_and_is_explained(change, ids, cause, tmp_path):
    report, checks = judged(tmp_path, rows_of(change=change))
    assert failed(checks) == ids and report.verdict == "fail"
    assert cause in report.evidence[0]


def test_nan_from_step_three_is_told_apart_from_a_base_that_has_it_too(tmp_path):
    broken = rows_of(change=at(3, loss="nan"))
    _, checks = judged(tmp_path / "head", broken)
    assert checks["validate-nonfinite"]["message"] == "head-1-seed-0: loss from step 3 on"
    _, checks = judged(tmp_path / "both", broken, base=[broken, broken])
    assert failed(checks) == {"nonfinite"} and "the base too" in str(checks["validate-nonfinite"])
    _, checks = judged(tmp_path / "base", rows_of(), base=[broken, broken])
    assert "only the base" in checks["validate-nonfinite"]["message"]


def test_an_overflow_that_fp16_skips_is_no_nan_but_must_be_the_same(tmp_path):
    first = at(1, grad_norm="inf")
    rows = [
        rows_of(change=lambda step, row: first(step, row) if step == 1 else None) for _ in range(3)
    ]
    _, checks = judged(tmp_path / "fp16", rows[0], base=rows[1:], precision="fp16")
    assert failed(checks) == set()
    _, checks = judged(tmp_path / "fp32", rows[0], base=rows[1:])
    assert failed(checks) == {"nonfinite"}
    _, checks = judged(tmp_path / "other", rows_of(), base=rows[1:], precision="fp16")
    assert failed(checks) == {"grad-norm"}


def test_a_crash_after_step_one_is_quoted_with_its_place(tmp_path):
    trace = 'File "/w/head/curry_train/layers/moe.py", line 41, in forward\n  raise\n'
    failure = {"rank": 1, "type": "ValueError", "message": "no expert", "traceback": trace}
    report, checks = judged(tmp_path, rows_of(1), code=1, status="crashed", failure=failure)
    assert failed(checks) == {"crash", "steps"} and report.verdict == "fail"
    told = checks["validate-crash"]
    assert "after step 1: rank 1: ValueError: no expert" in told["message"]
    assert told["fix"] == {
        "file": "curry_train/layers/moe.py",
        "line": 41,
        "text": "it failed here",
    }
    assert checks["validate-steps"]["message"] == "head-1-seed-0: step 2-25 missing"
    assert checks["validate-step-time"]["verdict"] == "unclear"


@pytest.mark.parametrize(("code", "status"), [(0, "preempted"), (4, "aborted"), (None, "done")])
def test_any_end_but_done_is_a_crash(code, status, tmp_path):
    _, checks = judged(tmp_path, rows_of(), code=code, status=status)
    assert failed(checks) == {"crash"}


def test_steps_are_compared_by_their_number(tmp_path):
    report, checks = judged(tmp_path / "shifted", rows_of(first=6))
    assert "steps 6-30 in the place of 1-25: shifted by 5" in checks["validate-steps"]["message"]
    assert report.verdict == "fail" and checks["validate-loss"]["verdict"] == "pass"
    _, checks = judged(tmp_path / "missing", without(7, 8, 11))
    assert failed(checks) == {"steps"}
    assert checks["validate-steps"]["message"] == "head-1-seed-0: step 7-8, 11 missing"
    _, checks = judged(tmp_path / "extra", rows_of(), base=[rows_of(), rows_of()])
    assert failed(checks) == set()
    _, checks = judged(tmp_path / "more", [*rows_of(), {**rows_of()[0], "step": 26}])
    assert checks["validate-steps"]["message"] == "head-1-seed-0: step 26 extra"
    _, checks = judged(tmp_path / "twice", [*rows_of(), {**rows_of()[3], "loss": 1.0}])
    assert "step 4 logged twice" in checks["validate-steps"]["message"]
    _, checks = judged(tmp_path / "resumed", rows_of(), resumed=True)
    assert failed(checks) == {"steps"}


def test_rows_under_the_numbers_of_others_are_called_shifted(tmp_path):
    late = [{**row, "step": row["step"] - 5} for row in rows_of(first=6)]
    report, checks = judged(tmp_path, late)
    assert "loss" in failed(checks) and "the base's step s+5" in report.evidence[0]


def test_batches_and_corpus_are_compared_directly(tmp_path):
    changed = rows_of(change=at(1, loss=1.001))
    report, checks = judged(tmp_path / "order", changed, told={"batches": ["a", "c"]})
    assert failed(checks) == {"data", "loss"}
    assert report.evidence[0] == "changed data: batches differ from step 2 on"
    _, checks = judged(tmp_path / "corpus", rows_of(), told={"data_hash": "2"})
    assert failed(checks) == {"data"} and "corpus" in checks["validate-data"]["message"]
    unknown = {"batches": [], "why": "TypeError: no such argument"}
    report, checks = judged(tmp_path / "unknown", changed, told=unknown)
    assert "could not be compared (TypeError" in checks["validate-data"]["message"]
    assert "forward pass, data or initial weights" in report.evidence[0]


def test_a_head_that_does_not_repeat_itself_is_named(tmp_path):
    heads = [rows_of(change=at(1, loss=factor)) for factor in (1.001, 1.002)]
    report, checks = judged(tmp_path / "random", heads)
    assert failed(checks) == {"loss", "head-repeats"}
    assert "randomness without a seed" in report.evidence[0]
    _, checks = judged(tmp_path / "same", [heads[0], heads[0]])
    assert failed(checks) == {"loss"}


def test_the_tolerance_of_the_user_is_for_measured_numbers_alone(tmp_path):
    change = at(1, loss=1 + 5e-5, grad_norm=1.001, lr=1 + 5e-5)
    _, checks = judged(tmp_path / "all", rows_of(change=change), given={"": 1e-4})
    assert failed(checks) == {"grad-norm", "norm-drift", "lr"}
    given = {"": 1e-4, "grad_norm": 3e-3}
    _, checks = judged(tmp_path / "one", rows_of(change=change), given=given)
    assert failed(checks) == {"lr"}
    _, checks = judged(tmp_path / "drift", rows_of(change=change), given={"": 1.5e-3})
    assert failed(checks) == {"norm-drift", "lr"}, "each step is within, but all on one side"


def test_the_tolerance_follows_the_noise_of_the_base(tmp_path):
    bases = [rows_of(noise=1e-5) for _ in range(4)]
    report, checks = judged(tmp_path / "same", rows_of(noise=1e-5), base=bases)
    assert report.verdict == "pass", report.checks
    assert report.numbers["base_repeats"] == "noise"
    assert 1e-5 < checks["validate-loss"]["threshold"] < 1e-2
    other = rows_of(noise=1e-5, change=at(3, loss=1.02))
    report, checks = judged(tmp_path / "other", other, base=bases)
    assert failed(checks) == {"loss"} and "equal up to step 2" in report.evidence[0]
    wild = [rows_of(noise=1e-3) for _ in range(4)]
    report, checks = judged(tmp_path / "wild", rows_of(noise=1e-3), base=wild)
    assert report.verdict == "unclear" and "loss" in failed(checks, "unclear")
    broken = rows_of(noise=1e-3, change=at(1, loss=3.0))
    report, _ = judged(tmp_path / "broken", broken, base=wild)
    assert report.verdict == "fail"
    _, checks = judged(tmp_path / "rate", rows_of(change=at(1, lr=1 + 1e-9)), base=wild)
    assert failed(checks) == {"lr"}, "a schedule has no noise"
