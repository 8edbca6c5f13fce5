"""check.py: four stages in one table, its exit codes, what a hook finds afterwards."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from skills.targets import processes
from skills.targets.processes import CLASSIFIER, ROOT

SCRIPTS = ROOT / "skills" / "preflight-checks" / "scripts"
CHECK, PREFLIGHT = SCRIPTS / "check.py", SCRIPTS / "preflight_checks.py"
sys.path.insert(0, str(SCRIPTS))
check = importlib.import_module("check")
sys.dont_write_bytecode = False  # the script sets it for itself
from kit.tree_hash import tree_hash  # noqa: E402

full = pytest.mark.skipif(not os.environ.get("CURRY_TRAIN_FULL"), reason="--full only")
STAGE = """
import json, sys
words = sys.argv[1:]
verdict = {verdict!r}
checks = [{{"id": "double-softmax", "verdict": verdict, "value": 1.46, "threshold": None,
            "unit": None, "message": " ".join(words), "fix": None}}]
found = {{"verdict": verdict, "summary": "a sentence", "checks": checks,
          "target": {{"config_hash": "abc"}}}}
if verdict == "broken":
    print("error: build_runtime raised ConfigError: optim.lrr is no key", file=sys.stderr)
    sys.exit(2)
place = words[words.index("--json") + 1]
open(place, "w").write(json.dumps(found))
open(words[words.index("--out") + 1] + "/report.json", "w").write(json.dumps(found))
sys.exit({{"pass": 0, "fail": 1, "unclear": 3}}[verdict])
"""


def run_with(monkeypatch, folder, capsys, words=(), **verdicts):
    """Run check.py on stages that say what they are told to; None leaves a stage out."""
    for stage in check.STAGES:
        script = folder / "skills" / stage / "scripts" / f"{stage.replace('-', '_')}.py"
        script.parent.mkdir(parents=True)
        verdict = verdicts.get(stage.partition("-")[0], "pass")
        if verdict is not None:
            script.write_text(textwrap.dedent(STAGE.format(verdict=verdict)))
    monkeypatch.setattr(check, "SKILLS", folder / "skills")
    project = folder / "project"
    project.mkdir()
    code = check.cli.run(
        check.SKILL, check.run_stages, doc=check.__doc__, add_flags=check.add_flags,
        modules=check.no_modules, argv=["--project", str(project), "--target", CLASSIFIER,
                                        "--out", str(folder / "out"), *words],
    )  # fmt: skip
    report = json.loads((folder / "out" / "report.json").read_text())
    return code, report, capsys.readouterr().out


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ({}, 0),
        ({"init": "fail"}, 1),
        ({"init": "fail", "overfit": "broken"}, 1),
        ({"overfit": "broken", "gradient": "unclear"}, 2),
        ({"gradient": None}, 2),
        ({"preflight": "unclear"}, 3),
    ],
)
def test_the_exit_code_is_that_of_the_worst_stage(monkeypatch, tmp_path, capsys, verdicts, code):
    found, report, text = run_with(monkeypatch, tmp_path, capsys, **verdicts)
    assert found == code
    stages = [c["id"] for c in report["checks"] if c["id"] in check.STAGES]
    assert stages == list(check.STAGES)  # a stage that fails stops none
    assert f"(exit {code})" in text and all(stage in text for stage in stages)
    written = len(check.STAGES) - sum(v in ("broken", None) for v in verdicts.values())
    assert len(report["artifacts"]) == written
    assert all(json.loads(Path(path).read_text())["checks"] for path in report["artifacts"])


def test_failed_checks_of_a_stage_stand_under_their_own_id(monkeypatch, tmp_path, capsys):
    words = ["--seed", "3", "--device", "cpu"]
    _, report, text = run_with(monkeypatch, tmp_path, capsys, words, preflight="fail")
    (named,) = [c for c in report["checks"] if c["id"] == "double-softmax"]
    assert named["verdict"] == "fail" and "double-softmax 1.46" in text
    told = named["message"]  # the stage's own words: what it was called with
    assert f"--target {CLASSIFIER}" in told and "--seed 3" in told and "--device cpu" in told
    ledger = (tmp_path / "project" / "runs" / "checks" / "ledger.jsonl").read_text()
    assert json.loads(ledger)["config_hash"] == "abc"


def test_a_stage_that_cannot_start_is_told_by_its_first_line(monkeypatch, tmp_path, capsys):
    _, report, text = run_with(monkeypatch, tmp_path, capsys, init="broken", gradient=None)
    assert "optim.lrr is no key" in text and "there is no gradient_flow.py" in text
    assert report["verdict"] == "unclear"


def test_only_runs_the_named_stages(monkeypatch, tmp_path, capsys):
    words = ["--only", "init-loss"]
    code, report, _ = run_with(monkeypatch, tmp_path, capsys, words, gradient="fail")
    assert code == 0 and [c["id"] for c in report["checks"]] == ["init-loss"]


# A project ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def changed(project, folder, file, old, new):
    """Copy a project with one line changed."""
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    text = (folder / file).read_text()
    assert text.count(old) == 1
    (folder / file).write_text(text.replace(old, new))
    return folder


def preflight(project, *words):
    done = processes.run(PREFLIGHT, *words, "--json", cwd=project)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def failing(report):
    return {c["id"] for c in report["checks"] if c["verdict"] == "fail"}


def test_a_fresh_project_passes_and_a_hook_finds_it(fresh):
    code, report = preflight(fresh)
    assert (code, failing(report)) == (0, set())
    line = json.loads((fresh / "runs" / "checks" / "preflight.jsonl").read_text())
    assert set(line) == {"overrides", "tree_hash", "verdict", "config_hash", "time", "report"}
    assert (line["overrides"], line["verdict"]) == ([], "pass")
    assert line["tree_hash"] == tree_hash(fresh)
    assert line["config_hash"] == report["target"]["config_hash"]
    assert json.loads(Path(line["report"]).read_text())["verdict"] == "pass"


@pytest.mark.parametrize(
    ("file", "old", "new", "only", "named"),
    [
        (
            "curry_train/loss.py",
            "wide = logits.to(torch.promote_types(logits.dtype, torch.float32))",
            "wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)",
            "double-softmax",
            "double-softmax",
        ),
        pytest.param(
            "curry_train/models/decoder.py",
            "logits = self.lm_head(hidden)",
            "logits = self.lm_head(hidden).softmax(-1).clone()",
            "double-softmax",
            "double-softmax",
            marks=full,
        ),
        pytest.param(
            "curry_train/step.py",
            "        forget_gradients(runtime)\n",
            "",
            "missing-zero-grad",
            "missing-zero-grad",
            marks=full,
        ),
    ],
)
def test_a_fault_planted_in_a_project_is_named(fresh, tmp_path, file, old, new, only, named):
    project = changed(fresh, tmp_path / "project", file, old, new)
    code, report = preflight(project, "--only", only)
    assert (code, failing(report)) == (1, {named})
    (found,) = report["checks"]
    assert found["fix"]["file"].startswith(str(project)) and found["fix"]["line"] > 0
    assert not (project / "runs" / "checks" / "preflight.jsonl").exists()  # only a whole one counts


def test_the_hash_follows_code_and_configuration_and_nothing_else(tmp_path):
    for name in ("train.py", "configs/run/x.yaml", "curry_train/a/b.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    first = tree_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("other")
    (tmp_path / "curry_train" / "a" / "b.pyc").write_text("cache")
    assert tree_hash(tmp_path) == first
    (tmp_path / "curry_train" / "a" / "b.py").rename(tmp_path / "curry_train" / "a" / "c.py")
    assert tree_hash(tmp_path) != first
    (tmp_path / "curry_train" / "a" / "c.py").rename(tmp_path / "curry_train" / "a" / "b.py")
    assert tree_hash(tmp_path) == first
    (tmp_path / "configs" / "run" / "x.yaml").write_text("other")
    assert tree_hash(tmp_path) != first


@full
def test_check_on_a_fresh_project_prints_four_passes(fresh):
    done = processes.run_fresh(CHECK, "--json", cwd=fresh)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {c["id"]: c["verdict"] for c in report["checks"]} == dict.fromkeys(check.STAGES, "pass")
    skills = [json.loads(Path(path).read_text())["skill"] for path in report["artifacts"]]
    assert skills == list(check.STAGES)
