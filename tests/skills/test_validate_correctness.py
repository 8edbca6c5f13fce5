"""Base against head: what must be seen is seen and named, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
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
import speed_gate  # noqa: E402
import step_comparison  # noqa: E402
import validate_correctness  # noqa: E402

from kit.report import MAX_LINES, render  # noqa: E402

sys.dont_write_bytecode = False  # the script sets it for itself
full = pytest.mark.skipif(
    not os.environ.get("CURRY_TRAIN_FULL"), reason="one of many alike cases (--full)"
)
STEPS = 25


@pytest.fixture
def no_picture(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(comparison_report, "draw", lambda *_: None)


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
    with_speed = options.pop("speed", False)
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
    probed |= {"batches": ["a", "b"], "second_epoch": "2", "why": ""}
    args = SimpleNamespace(steps=STEPS, max_slowdown=1.05, max_memory=1.05)
    args.no_performance = not with_speed
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


def forget(step, key):
    """Give a change that leaves a quantity out of the rows from a step on."""
    return lambda here, row: row.pop(key, None) if here >= step else None


def without(*steps):
    return [row for row in rows_of() if row["step"] not in steps]


def test_equal_runs_pass_and_the_picture_is_there(tmp_path):
    report, checks = judged(tmp_path, rows_of(), speed=True)
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
        (forget(4, "grad_norm"), {"grad-norm"}, "the head does not log grad_norm from step 4 on"),
        (at(4, tokens=2), {"data"}, "token counts differ from step 4"),
        (at(3, loss="nan"), {"loss", "nonfinite"}, "equal up to step 2"),
        (at(3, loss="inf"), {"loss", "nonfinite"}, "equal up to step 2"),
        (at(5, grad_norm="nan"), {"grad-norm", "nonfinite"}, "equal up to step 4"),
    ],
)
def test_a_changed_quantity_fails_its_own_check_and_is_explained(
    no_picture, change, ids, cause, tmp_path
):
    report, checks = judged(tmp_path, rows_of(change=change))
    assert failed(checks) == ids and report.verdict == "fail"
    assert cause in report.evidence[0]


def test_what_an_evaluation_leaves_behind_is_named(no_picture, tmp_path):
    def change(step, row):
        row |= {"val/loss": 2.5} if step == 13 else {}

    def leaves(step, row):
        change(step, row)
        at(14, loss=1.01)(step, row)

    base = [rows_of(change=change) for _ in range(2)]
    report, checks = judged(tmp_path, rows_of(change=leaves), base=base)
    assert failed(checks) == {"loss"}
    assert report.evidence[0].startswith("equal up to step 13: what evaluation after that step")


def test_nan_from_step_three_is_told_apart_from_a_base_that_has_it_too(no_picture, tmp_path):
    broken = rows_of(change=at(3, loss="nan"))
    _, checks = judged(tmp_path / "head", broken)
    assert checks["validate-nonfinite"]["message"] == "head-1-seed-0: loss from step 3 on"
    _, checks = judged(tmp_path / "both", broken, base=[broken, broken])
    assert failed(checks) == {"nonfinite"} and "the base too" in str(checks["validate-nonfinite"])
    _, checks = judged(tmp_path / "base", rows_of(), base=[broken, broken])
    assert "only the base" in checks["validate-nonfinite"]["message"]


def test_an_overflow_that_fp16_skips_is_no_nan_but_must_be_the_same(no_picture, tmp_path):
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


def test_a_crash_after_step_one_is_quoted_with_its_place(no_picture, tmp_path):
    trace = 'File "/w/head/curry_train/layers/moe.py", line 41, in forward\n  raise\n'
    failure = {"rank": 1, "type": "ValueError", "message": "no expert", "traceback": trace}
    report, checks = judged(
        tmp_path, rows_of(1), code=1, status="crashed", failure=failure, speed=True
    )
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
def test_any_end_but_done_is_a_crash(no_picture, code, status, tmp_path):
    _, checks = judged(tmp_path, rows_of(), code=code, status=status)
    assert failed(checks) == {"crash"}


def test_steps_are_compared_by_their_number(no_picture, tmp_path):
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


def test_rows_under_the_numbers_of_others_are_called_shifted(no_picture, tmp_path):
    late = [{**row, "step": row["step"] - 5} for row in rows_of(first=6)]
    report, checks = judged(tmp_path, late)
    assert "loss" in failed(checks) and "the base's step s+5" in report.evidence[0]


def test_batches_and_corpus_are_compared_directly(no_picture, tmp_path):
    changed = rows_of(change=at(1, loss=1.001))
    report, checks = judged(tmp_path / "order", changed, told={"batches": ["a", "c"]})
    assert failed(checks) == {"data", "loss"}
    assert report.evidence[0] == "changed data: batches differ from step 2 on"
    _, checks = judged(tmp_path / "corpus", rows_of(), told={"data_hash": "2"})
    assert failed(checks) == {"data"} and "corpus" in checks["validate-data"]["message"]
    for later, ids in (("3", {"data"}), ("2", set()), (None, set())):
        told = {"second_epoch": later}
        _, checks = judged(tmp_path / f"epoch-{later}", rows_of(), told=told)
        assert failed(checks) == ids, "an epoch that the steps do not come to"
    unknown = {"batches": [], "why": "TypeError: no such argument"}
    report, checks = judged(tmp_path / "unknown", changed, told=unknown)
    assert "could not be compared (TypeError" in checks["validate-data"]["message"]
    assert "forward pass, data or initial weights" in report.evidence[0]


def test_a_head_that_does_not_repeat_itself_is_named(no_picture, tmp_path):
    heads = [rows_of(change=at(1, loss=factor)) for factor in (1.001, 1.002)]
    report, checks = judged(tmp_path / "random", heads)
    assert failed(checks) == {"loss", "head-repeats"}
    assert "randomness without a seed" in report.evidence[0]
    _, checks = judged(tmp_path / "same", [heads[0], heads[0]])
    assert failed(checks) == {"loss"}


def test_the_tolerance_of_the_user_is_for_measured_numbers_alone(no_picture, tmp_path):
    change = at(1, loss=1 + 5e-5, grad_norm=1.001, lr=1 + 5e-5)
    _, checks = judged(tmp_path / "all", rows_of(change=change), given={"": 1e-4})
    assert failed(checks) == {"grad-norm", "norm-drift", "lr"}
    given = {"": 1e-4, "grad_norm": 3e-3}
    _, checks = judged(tmp_path / "one", rows_of(change=change), given=given)
    assert failed(checks) == {"lr"}
    _, checks = judged(tmp_path / "drift", rows_of(change=change), given={"": 1.5e-3})
    assert failed(checks) == {"norm-drift", "lr"}, "each step is within, but all on one side"


def test_the_tolerance_follows_the_noise_of_the_base(no_picture, tmp_path):
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


def test_the_noise_rule_rarely_blames_a_head_like_the_base_and_sees_a_changed_one():
    """100 times five runs whose difference grows as rounding does: the fifth is judged."""
    wrong = missed = 0
    for trial in range(100):
        runs = []
        for number in range(5):
            draw = random.Random(1000 * trial + number)
            drift, rows = 0.0, {}
            for step in range(1, STEPS + 1):
                drift = 1.15 * drift + draw.gauss(0, 1e-7)
                rows[step] = {"loss": 3 * (1 + drift), "lr": 0.1}
            runs.append(run_folders.FinishedRun(str(number), 0, rows))
        changed = {s: {**r, "loss": r["loss"] * (1 + 1e-4)} for s, r in runs[4].rows.items()}
        for head in (runs[4], run_folders.FinishedRun("changed", 0, changed)):
            group = step_comparison.Group(0, runs[:4], [head])
            found = step_comparison.compare([group], {}, "fp32").beyond("validate-loss")
            wrong += bool(found) and head is runs[4]
            missed += not found and head is not runs[4]
    assert wrong <= 1 and missed == 0, (wrong, missed)


def speed(
    head,
    base=(1.0, 1.0),
    memory=1.0,
    started=(0.0, 200.0),
    slowdown=1.05,
    without="",
    base_without="",
):
    """Judge a head of this step time over base runs of those."""
    group = step_comparison.Group(0, [], [])
    report = comparison_report.Gates("validate-correctness")
    for number, (side, factor) in enumerate([("base", f) for f in base] + [("head", head)]):
        change = at(1, step_time=factor, tokens_per_s=1 / factor)
        rows = {row["step"]: row for row in rows_of(change=change)}
        if side == "head":
            for row in rows.values():
                row["memory_bytes"] *= memory
        for row in rows.values():
            row.pop(without if side == "head" else base_without, None)
        run = run_folders.FinishedRun(side, 0, rows, end={"status": "done"})
        run.started = started[number] if number < len(started) else 300.0
        run.ended = run.started + 100
        getattr(group, side).append(run)
    verdict = speed_gate.judge_speed(report, [group], slowdown, 1.05)
    return verdict, {check["id"]: check for check in report.checks}, report


def test_the_performance_gate_needs_more_than_the_noise_of_the_base():
    verdict, checks, report = speed(1.2)
    assert verdict == "fail" and failed(checks) == {"step-time", "tokens-per-s"}
    assert checks["validate-step-time"]["value"] == pytest.approx(1.2, abs=0.01)
    assert report.verdict == "fail" and report.correctness == "unclear"
    assert speed(1.0)[0] == speed(0.5)[0] == "pass" and speed(1.2, slowdown=1.3)[0] == "pass"
    assert speed(1.1)[0] == "fail" and speed(1.1, base=(1.0, 1.0, 1.15))[0] == "unclear"
    rows = {row["step"]: row for row in rows_of()}
    measured = speed_gate.steps_of(run_folders.FinishedRun("head", 0, rows), "step_time")
    assert measured == [rows[step]["step_time"] for step in range(4, STEPS + 1)]
    verdict, checks, report = speed(1.2, base=(1.0, 1.3))
    assert verdict == "unclear" and failed(checks) == set()
    report.check("validate-loss", "pass")
    assert report.verdict == "pass", "a gate that cannot tell changes nothing"
    assert speed(1.2, base=(1.0, 1.05))[0] == "fail"
    verdict, checks, _ = speed(1.0, memory=1.1)
    assert verdict == "fail" and failed(checks) == {"peak-memory"}
    for key, id in speed_gate.KEYS.items():
        verdict, checks, _ = speed(1.0, without=id)
        assert verdict == "fail" and failed(checks) == {key.removeprefix("validate-")}
        assert checks[key]["message"] == f"the head does not log {id}"
    verdict, checks, _ = speed(1.0, base_without="memory_bytes")
    assert verdict == "pass" and checks["validate-peak-memory"]["verdict"] == "skipped"
    verdict, checks, _ = speed(1.2, started=(0.0, 9000.0))
    assert verdict == "unclear" and "apart" in checks["validate-step-time"]["message"]


def test_every_seed_is_compared_and_named(no_picture, tmp_path):
    groups = []
    for seed in (3, 4):
        changed = rows_of(change=at(9, loss=1.01) if seed == 4 else None)
        runs = []
        for number, rows in enumerate([rows_of(), rows_of(), changed]):
            write_run(tmp_path / f"{seed}-{number}", rows)
            runs.append(run_folders.read_run(tmp_path / f"{seed}-{number}", str(number), 0))
        groups.append(step_comparison.Group(seed, runs[:2], runs[2:]))
    comparison = step_comparison.compare(groups, {}, "fp32")
    report = comparison_report.Gates("validate-correctness")
    step_comparison.judge(report, comparison, groups)
    checks = {check["id"]: check for check in report.checks}
    assert failed(checks) == {"loss"}
    assert "loss at step 9 of seed 4" in checks["validate-loss"]["message"]


def test_flags_become_the_words_of_both_runs():
    axes = run_words.mesh_of("tp=2, dp_shard=2,ep=4")
    words = run_words.words_of("small", axes, 9, "bf16", "cuda")
    assert {"devices=4", "parallel.ep=4", "parallel.pp=1", "precision=bf16"} <= set(words)
    assert {"model=small", "run.max_steps=9", "run.log_every=1", "accelerator=cuda"} <= set(words)
    assert {"run.resume=never", "run.sample_tokens=0", "tracking=none"} <= set(words)
    for steps, halfway in ((2, 2), (3, 2), (9, 5), (25, 13)):
        words = run_words.words_of("small", axes, steps, None, "auto")
        assert f"run.eval_every={halfway}" in words, "evaluation has to be followed by steps"
    assert not [word for word in run_words.words_of("m", axes, 9, None, "auto") if "acc" in word]
    assert run_words.tolerances_of(["1e-4", "val/loss=0.1"]) == {"": 1e-4, "val/loss": 0.1}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with the small project in a folder of it, and a branch for each change."""
    top = tmp_path_factory.mktemp("validate") / "repository"
    project = small_project.make(top / "work" / "small")
    small_project.git(top, "init", "-q", "-b", "main")
    (top / "README").write_text("beside the project\n")
    small_project.commit(top, "main")
    for branch, changes in BRANCHES.items():
        small_project.physics(project, **changes)
        small_project.commit(top, branch)
    return SimpleNamespace(top=top, project=project)


BRANCHES = {
    "refactor": {"UNUSED": 1},
    "rate": {"APPLIED": 1.0001},
    "logged-rate": {"LR": 0.10001},
    "order": {"ORDER": 1},
    "unseeded": {"SEEDED": False},
    "norm": {"NORM": 8.0},
    "router": {"AUX": 0.011},
    "evaluation": {"VAL": 1.01},
    "tokens": {"TOKENS": 9},
    "nan": {"NAN_FROM": 3},
    "crash": {"CRASH_AFTER": 1},
    "shifted": {"FIRST_STEP": 6},
    "slow": {"SLEEP": 0.02},
    "large": {"MEMORY": 1200},
    "refuses": {"REFUSE": "optim.lr=0.1: not any more"},
    "random": {"JITTER": 1e-6},
    "wild": {"JITTER": 0.05},
    "hangs": {"SLEEP": 30.0},
    "private": {"TEXT_FILE": "private.txt"},
}
ASKED = {"--model": "small", "--mesh": "single", "--steps": 10, "--base": "main"}


def validated(where, *words, cwd, json_wanted=True, **flags):
    asked = {**ASKED, **{f"--{k.replace('_', '-')}": v for k, v in flags.items()}}
    given = [word for pair in asked.items() for word in pair if pair[1] is not None]
    given += ["--json"] if json_wanted else []
    done = processes.run(SCRIPT, "--project", where.project, *given, *words, cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    if not done.stdout.startswith("{"):
        return done, None, {}
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1, "unclear": 3}[report["verdict"]]
    return done, report, {check["id"]: check for check in report["checks"]}


def traces(where):
    """Give all of a repository that is its user's, bit for bit."""
    files = [p for p in sorted(where.top.rglob("*")) if p.is_file() and "runs" not in p.parts]
    mine = [p for p in files if ".git" not in p.parts or p.name in ("HEAD", "index", "config")]
    refs = small_project.git(where.top, "for-each-ref")
    trees = small_project.git(where.top, "worktree", "list")
    return {p: p.read_bytes() for p in mine if "__pycache__" not in p.parts}, refs, trees


FAULTS = [
    ("refactor", set(), ""),
    ("rate", {"loss", "grad-norm", "norm-drift", "aux-loss", "val-loss"}, "equal in step 1, not"),
    pytest.param("logged-rate", {"lr", "loss"}, "learning rate differs from step 1 on", marks=full),
    ("order", {"data", "loss"}, "changed data: batches differ from step 1 on"),
    ("unseeded", {"head-repeats"}, "randomness without a seed"),
    ("norm", {"grad-norm", "norm-drift"}, "backward pass or gradient reduction"),
    pytest.param("router", {"aux-loss"}, "only the router", marks=full),
    pytest.param("evaluation", {"val-loss"}, "evaluation, or the last update", marks=full),
    pytest.param("tokens", {"data"}, "token counts differ from step 1 on", marks=full),
    pytest.param("nan", {"nonfinite", "loss"}, "equal up to step 2", marks=full),
    ("crash", {"crash", "steps"}, ""),
    pytest.param("shifted", {"steps"}, "the base's step s-5", marks=full),
    ("slow", {"step-time", "tokens-per-s"}, ""),
    pytest.param("large", {"peak-memory"}, "", marks=full),
    ("refuses", {"crash"}, ""),
]


@pytest.mark.parametrize(("branch", "ids", "cause"), FAULTS)
def test_a_branch_is_checked_out_trained_and_named(branch, ids, cause, repository, tmp_path):
    before = traces(repository)
    done, report, checks = validated(repository, head=branch, cwd=tmp_path)
    assert traces(repository) == before
    assert done.stderr.startswith("expected: a few seconds to load (then 3 runs of 10 steps")
    if ids:
        assert ids <= failed(checks) and report["verdict"] == "fail"
    else:
        assert failed(checks) == set() and report["verdict"] == "pass"
    exact = {"norm", "router", "evaluation", "tokens", "crash", "slow", "large", "refuses"}
    assert branch not in exact or failed(checks) == ids
    assert cause in report["evidence"][0]
    slow = branch in ("slow", "large")
    assert report["numbers"]["correctness"] == ("pass" if slow or not ids else "fail")
    told = checks["validate-crash"]
    if branch == "crash":
        assert "after step 1: rank 0: ValueError: the expert bank is empty" in told["message"]
        assert told["fix"]["file"] == "train.py"
    if branch == "refuses":
        assert "not any more" in told["message"] and "runs" not in report["numbers"]
    if branch == "logged-rate":
        assert "optim.lr 0.1 -> 0.10001" in report["numbers"]["settings"]


def test_a_finished_run_is_used_again_unless_fresh_is_asked(repository, tmp_path):
    def made(*words):
        done, report, _ = validated(repository, *words, head="refactor", seeds=7, cwd=tmp_path)
        runs = sorted(report["numbers"]["runs"], key=lambda run: run["started"])
        assert [run["name"][:6] for run in runs] == ["base-1", "head-1", "base-2"], "interleaved"
        return done.stderr.count("taken from"), {run["folder"] for run in runs}

    none, folders = made()
    assert none == 0 and len(folders) == 3, "another seed is another run"
    assert made() == (3, folders)
    _, report, checks = validated(repository, head="slow", seeds=7, cwd=tmp_path)
    runs = sorted(report["numbers"]["runs"], key=lambda run: run["started"])
    assert [run["name"][:6] for run in runs] == ["base-1", "base-2", "head-1", "base-3"]
    assert {"step-time", "tokens-per-s"} == failed(checks), "a slow head has a base after it"
    assert made("--fresh")[0] == 0


def test_uncommitted_files_are_told_and_taken_when_asked_for(repository, tmp_path):
    new = repository.project / "new.txt"
    try:
        small_project.physics(repository.project, NORM=8.0)
        new.write_text("not added")
        before = traces(repository)
        done, report, checks = validated(repository, head="HEAD", cwd=tmp_path)
        assert failed(checks) == set() and "same files" in report["evidence"][0]
        assert "2 uncommitted files" in done.stderr and "new.txt" in report["evidence"][1]
        _, report, checks = validated(repository, head="WORKTREE", cwd=tmp_path)
        assert failed(checks) == {"grad-norm", "norm-drift"}
        assert set(report["numbers"]["changed_files"]) == {"curry_train/physics.py", "new.txt"}
        assert traces(repository) == before
        ignored = repository.project / ".gitignore"
        ignored.write_text(ignored.read_text().replace("runs/\n", ""))
        commit = ref_worktrees.Repository.of(repository.project).snapshot()
        files = small_project.git(repository.top, "ls-tree", "-r", "--name-only", commit)
        assert "new.txt" in files and "runs/" not in files, "reports are no code"
    finally:
        small_project.git(repository.top, "checkout", "-q", "--", ".")
        new.unlink()


def test_data_that_git_ignores_is_found_in_the_users_folder(repository, tmp_path):
    (repository.project / "private.txt").write_text(small_project.TEXT + " 1.5")
    words = ["--set", "data.input=private.txt"]
    _, report, checks = validated(repository, *words, head="refactor", cwd=tmp_path)
    assert failed(checks) == set() and report["verdict"] == "pass"
    _, report, checks = validated(repository, base="private", head="private", cwd=tmp_path)
    assert failed(checks) == set() and report["verdict"] == "pass", "a path of a file of configs"
    done, _, _ = validated(repository, *words, head="refactor", cwd=tmp_path)
    assert done.stderr.count("taken from") == 3
    (repository.project / "private.txt").write_text(small_project.TEXT + " 2.5")
    done, report, _ = validated(repository, *words, head="refactor", cwd=tmp_path)
    assert "taken from" not in done.stderr and report["verdict"] == "pass", "its text has changed"
    words = ["--set", "data.input=absent.txt"]
    done, report, _ = validated(repository, *words, head="refactor", cwd=tmp_path)
    assert done.returncode == 2 and report is None and "absent.txt: no such file" in done.stderr


BAD_FLAGS = [
    ({"model": None}, "--model missing", "--model one of small, wide"),
    ({"mesh": None, "model": None}, "--model, --mesh missing", "tp=2,dp_shard=2,ep=2"),
    ({"base": None}, "--base missing", "set them"),
    ({"mesh": "tp=0"}, "--mesh tp=0", "it takes single, or each of pp"),
    ({"mesh": "tp=2,tp=2"}, "--mesh tp=2,tp=2: tp=2", "at most once"),
    ({"mesh": "zero=3"}, "--mesh zero=3", "other settings of parallel go to --set"),
    ({"mesh": ""}, "an empty part", "for example single"),
    ({"steps": 1}, "--steps 1", "at least 2"),
    ({"tolerance": "2"}, "--tolerance 2", "below 1"),
    ({"tolerance": "lr=0.1"}, "--tolerance lr=0.1", "KEY is one of loss"),
    ({"set": "parallel.tp=2"}, "--set parallel.tp=2", "set --mesh"),
    ({"set": "run.dir=x"}, "--set run.dir=x", "belongs to this comparison"),
    ({"max-slowdown": 0.5}, "--max-slowdown", "at least 1"),
    ({"max-memory": "nan"}, "--max-memory", "at least 1"),
    ({"seeds": -1}, "--seeds -1", "at least 0"),
    ({"target": "x.py:f"}, "--target", "two commits"),
    ({"base-runs": 2}, "--base-runs 2", "at least 3"),
    ({"patience": 0}, "--patience 0", "above 0"),
    ({"project": "/"}, "is no curry-train project", "set --project"),
]


@pytest.mark.parametrize(
    ("flags", "found", "allowed"), BAD_FLAGS, ids=[str(f) for f, *_ in BAD_FLAGS]
)
def test_a_wrong_flag_is_refused_before_anything_runs(flags, found, allowed, tmp_path, capsys):
    (tmp_path / "curry_train").mkdir()
    (tmp_path / "curry_train" / "runtime.py").touch()
    (tmp_path / "configs" / "model").mkdir(parents=True)
    for name in ("small", "wide"):
        (tmp_path / "configs" / "model" / f"{name}.yaml").touch()
    asked = {**ASKED, "--project": tmp_path, **{f"--{key}": v for key, v in flags.items()}}
    words = [str(word) for pair in asked.items() for word in pair if pair[1] is not None]
    code = validate_correctness.cli.run(
        "validate-correctness",
        lambda call: pytest.fail("it ran"),
        doc=None,
        add_flags=validate_correctness.add_flags,
        check_flags=validate_correctness.check_flags,
        modules=lambda args: (),
        argv=words,
    )
    said = capsys.readouterr().err
    assert code == 2 and found in said and allowed in said, said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "found", "allowed"),
    [
        ({"model": "huge"}, "has no configs/model/huge.yaml", "it has small, wide"),
        ({"base": "absent"}, "--base absent is no commit", "main"),
        pytest.param({"head": "absent"}, "--head absent", "or WORKTREE", marks=full),
        ({"mesh": "tp=3"}, "does not divide 4 heads", "nothing was trained"),
    ],
)
def test_what_the_repository_does_not_have_is_refused(flags, found, allowed, repository, tmp_path):
    before = traces(repository)
    done, report, _ = validated(repository, cwd=tmp_path, **flags)
    assert done.returncode == 2 and report is None, done.stdout
    assert found in done.stderr and allowed in done.stderr
    made = repository.project.glob("runs/checks/*/*/runs/*/finished.json")
    assert not any("tp=3" in path.read_text() for path in made)
    assert traces(repository) == before


def test_a_project_outside_git_is_refused(tmp_path):
    project = small_project.make(tmp_path / "small")
    done, _, _ = validated(SimpleNamespace(project=project), cwd=tmp_path)
    assert done.returncode == 2 and "lies in no git repository" in done.stderr


def test_a_base_that_does_not_repeat_is_run_four_times(repository, tmp_path):
    words = {"base": "random", "head": "random", "steps": 12}
    _, report, checks = validated(repository, "--no-performance", **words, cwd=tmp_path)
    assert [run["name"][:6] for run in report["numbers"]["runs"]].count("base-1") == 1
    assert len(report["numbers"]["runs"]) == 5 and report["numbers"]["base_repeats"] == "noise"
    assert failed(checks) == set() and 0 < checks["validate-loss"]["threshold"] < 0.01
    assert report["verdict"] == "pass" and report["numbers"]["performance"] is None


@full
def test_a_base_that_differs_too_much_cannot_tell(repository, tmp_path):
    words = {"base": "wild", "head": "wild"}
    _, report, checks = validated(repository, "--no-performance", **words, cwd=tmp_path)
    assert report["verdict"] == "unclear" and "loss" in failed(checks, "unclear")


def test_a_crashing_base_is_told_and_nothing_is_compared(repository, tmp_path):
    _, report, checks = validated(repository, base="crash", head="main", cwd=tmp_path)
    assert failed(checks) == {"crash", "steps"} and len(report["numbers"]["runs"]) == 1
    assert checks["validate-crash"]["message"].startswith("base-1-seed-0 ended with exit code 1")


def test_a_run_that_stands_still_is_ended(repository, tmp_path):
    words = ["--patience", 1, "--no-performance"]
    _, report, checks = validated(repository, *words, head="hangs", steps=3, cwd=tmp_path)
    assert "head-1-seed-0 stood still and was ended" in checks["validate-crash"]["message"]
    assert report["verdict"] == "fail" and living(repository, tmp_path) == []


def living(where, tmp_path):
    """List the processes that train something of this repository."""
    found, words = [], []
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            with contextlib.suppress(OSError):
                words = Path("/proc", folder, "cmdline").read_bytes().decode().split("\0")
            if "train.py" in words and any(str(where.top) in word for word in words):
                found.append(words)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=full), signal.SIGTERM, signal.SIGKILL]
)
def test_nothing_stays_after_a_stop_or_a_kill(number, repository, tmp_path):
    before = traces(repository)
    output = [tmp_path / "out", tmp_path / "err"]
    flags = [word for pair in ASKED.items() for word in pair]
    place = ["--project", repository.project, "--head", "hangs"]
    process = processes.start(SCRIPT, *place, *flags, cwd=tmp_path, output=output)
    began = time.monotonic()
    while not any("hangs" in str(w) or "head-1" in str(w) for w in living(repository, tmp_path)):
        assert process.is_alive() and time.monotonic() - began < 60, output[1].read_text()
        time.sleep(0.02)
    assert ref_worktrees.remove_stale(ref_worktrees.Repository.of(repository.project)) == []
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (-9 if number == signal.SIGKILL else 130)
    while living(repository, tmp_path) and time.monotonic() - began < 60:
        time.sleep(0.02)
    assert living(repository, tmp_path) == []
    if number == signal.SIGKILL:
        assert traces(repository) != before, "its worktrees are still there"
        done, report, _ = validated(repository, head="refactor", cwd=tmp_path)
        assert done.stderr.count("which a killed run had left") == 2
    assert traces(repository) == before


def test_worktrees_of_others_are_left_alone(repository, tmp_path):
    """Also one whose folder is away just now: git worktree prune would forget it."""
    mine = tmp_path / "mine"
    small_project.git(repository.top, "worktree", "add", "-q", "--detach", str(mine), "rate")
    mine.rename(tmp_path / "away")
    before = traces(repository)
    validated(repository, head="refactor", cwd=tmp_path)
    assert traces(repository) == before and str(mine) in before[2]
    (tmp_path / "away").rename(mine)
    small_project.git(repository.top, "worktree", "remove", "--force", str(mine))


def test_a_submodule_is_told(repository):
    git, top = small_project.git, repository.top
    main = git(top, "rev-parse", "main").strip()
    git(top, "update-index", "--add", "--cacheinfo", f"160000,{main},vendor/part")
    tree = git(top, "write-tree").strip()
    git(top, "update-index", "--force-remove", "vendor/part")
    commit = git(top, "commit-tree", tree, "-m", "with a submodule").strip()
    found = ref_worktrees.Repository.of(repository.project)
    assert found.submodules(found.state("head", commit)) == ["vendor/part"]
    assert found.submodules(found.state("base", "main")) == []
    states = {role: found.state(role, commit) for role in ("base", "head")}
    told = validate_correctness.notes_on(found, states)
    assert "submodules are empty in worktrees: vendor/part" in told


def test_a_hook_of_git_and_its_variables_change_nothing(repository, tmp_path):
    hook = repository.top / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    given = [word for pair in ASKED.items() for word in pair]
    variables = {"GIT_DIR": str(repository.top / ".git"), "GIT_INDEX_FILE": "/nowhere/index"}
    launched = {"WORLD_SIZE": "8", "RANK": "3", "SLURM_NTASKS": "8", "LT_CLI_USED": "1"}
    place = ["--project", repository.project, "--head", "refactor"]
    done = processes.run(SCRIPT, *place, *given, cwd=tmp_path, **variables, **launched)
    hook.unlink()
    assert done.returncode == 0, done.stderr


def test_it_runs_in_the_background_with_status_and_wait(repository, tmp_path):
    out = ["--out", tmp_path / "out"]
    done, _, _ = validated(
        repository, *out, "--detach", head="norm", cwd=tmp_path, json_wanted=False
    )
    assert done.returncode == 0 and "wait: python3" in done.stdout
    done = processes.run(SCRIPT, "wait", *out, cwd=tmp_path)
    assert done.returncode == 1 and "fail     validate-grad-norm 7" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("verdict: fail (exit 1), report ")
    done = processes.run(SCRIPT, "status", *out, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("done: validate-correctness")


STEP = "curry_train/step.py"
MLP = "curry_train/layers/mlp.py"
PLANTS = {
    "refactor": (STEP, "    start = time.perf_counter()", "    start = float(time.perf_counter())"),
    "rate": (STEP, "set_lr(runtime.optimizer, lr)", "set_lr(runtime.optimizer, 1.0001 * lr)"),
    "order": ("curry_train/data/loader.py", "self._seed)", "self._seed + 1)"),
    "nan": (STEP, "loss=nll /", 'loss=nll * float("nan" if runtime.step > 2 else 1) /'),
    "crash": (STEP, "    runtime.step += 1", "    runtime.step += 1 // (runtime.step < 1)"),
    "norm": (STEP, "grad_norm=report.norm", "grad_norm=8 * report.norm"),
    "slow": (STEP, "    start = time.perf_counter()", "    start = time.perf_counter() - 5"),
    "epoch": ("curry_train/data/loader.py", "indices, epochs, self", "indices, epochs * 2, self"),
    "dropout": (MLP, "self.up_proj(x))", "F.dropout(self.up_proj(x), 0.1, self.training))"),
    "left": ("curry_train/evaluate.py", "    runtime.train()\n    totals", "    totals"),
    "unseeded": (
        MLP,
        "        x = gather",
        "        __import__('torch').seed()\n        x = gather",
    ),
}
SIZES = ["model.num_hidden_layers=1", "data.seq_len=16", "data.val_fraction=0.01"]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A copy of the template in a repository, and a branch for each plant."""
    project = tmp_path_factory.mktemp("validate") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache", "benchmarks", "docs")
    shutil.copytree(ROOT / "template", project, ignore=ignored)
    small_project.git(project, "init", "-q", "-b", "main")
    small_project.commit(project, "main")
    for branch, (file, before, after) in PLANTS.items():
        start = "dropout" if branch in ("unseeded", "left") else "main"
        small_project.git(project, "checkout", "-q", start)
        text = (project / file).read_text()
        assert before in text, (branch, file)
        (project / file).write_text(text.replace(before, after, 1))
        small_project.commit(project, branch, start)
    small_project.git(project, "checkout", "-q", "main")
    return SimpleNamespace(top=project, project=project)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branch", "base", "mesh", "ids", "cause"),
    [
        ("order", "main", "single", {"data", "loss"}, "batches differ from step 1 on"),
        pytest.param("refactor", "main", "single", set(), "", marks=full),
        pytest.param("refactor", "main", "tp=2,dp_shard=2,ep=2", set(), "", marks=full),
        pytest.param("rate", "main", "single", {"loss"}, "equal in step 1, not", marks=full),
        pytest.param("nan", "main", "single", {"nonfinite"}, "equal up to step 2", marks=full),
        pytest.param("crash", "main", "single", {"crash", "steps"}, "", marks=full),
        pytest.param("norm", "main", "single", {"grad-norm"}, "backward pass", marks=full),
        pytest.param("slow", "main", "single", {"step-time", "tokens-per-s"}, "", marks=full),
        pytest.param("dropout", "dropout", "single", set(), "", marks=full),
        pytest.param("left", "dropout", "single", {"loss"}, "what evaluation after", marks=full),
        pytest.param("epoch", "main", "single", {"data"}, "base", marks=full),
        pytest.param("unseeded", "dropout", "single", {"head-repeats"}, "seed", marks=full),
    ],
)
def test_a_real_project_is_compared_by_its_own_training(
    branch, base, mesh, ids, cause, real, tmp_path
):
    model = "tiny_dense" if base == "dropout" else "tiny_moe"
    flags = {"model": model, "mesh": mesh, "base": base, "head": branch, "steps": 8}
    before = traces(real)
    words = ["--set", *SIZES] + ([] if branch == "slow" else ["--no-performance"])
    _, report, checks = validated(real, *words, cwd=tmp_path, **flags)
    assert traces(real) == before
    assert ids <= failed(checks) and report["verdict"] == ("fail" if ids else "pass"), checks
    assert cause in report["evidence"][0] and report["numbers"]["base_repeats"] == "bitwise"
