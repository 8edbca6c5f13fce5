"""What is made works, nothing else changes, and undo leaves the project as it was, to the byte."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bundle.tree import read_page
from skills.targets import processes
from skills.targets.processes import ROOT

SCRIPTS = ROOT / "skills" / "scaffold-experiment" / "scripts"
SCRIPT = SCRIPTS / "scaffold_experiment.py"
sys.path.insert(0, str(SCRIPTS))
scaffold_experiment = importlib.import_module("scaffold_experiment")
checks = importlib.import_module("scaffold_checks")
edit = importlib.import_module("scaffold_edit")
plans = importlib.import_module("scaffold_plan")
record = importlib.import_module("scaffold_record")

FULL = pytest.mark.skipif("CURRY_TRAIN_FULL" not in os.environ, reason="minutes (--full)")
VARIANTS = [(block, variant) for block in plans.BLOCKS for variant in plans.variants(block)]
LAYERS = "curry_train/layers/__init__.py"
GATED = ("--block", "attention", "--variant", "gated")
ENTRY = edit.Entry("M", "new", "a.b:C")


def short_names() -> list[tuple[str, str, str]]:
    """Return a name for every variant, that is no module yet, with its block."""
    return [(f"own_{block}" if v == "custom" else v, block, v) for block, v in VARIANTS]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The parts of a project that a scaffold reads or writes."""
    folder = tmp_path_factory.mktemp("scaffold") / "template"
    ignored = shutil.ignore_patterns("__pycache__", "runs", ".cache", "equality", "kernels")
    for part in ("curry_train", "configs"):
        shutil.copytree(ROOT / "template" / part, folder / part, ignore=ignored)
    (folder / "tests").mkdir()
    checked = ("tests/variant_checks.py", "tests/model_checks.py")
    for name in ("train.py", "pyproject.toml", *checked):
        shutil.copy(ROOT / "template" / name, folder / name)
    return folder


@pytest.fixture
def project(template, tmp_path):
    return shutil.copytree(template, tmp_path / "project")


def tree(project: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and bytes of everything but reports; folders too."""
    found = {}
    for path in sorted(project.rglob("*")):
        name = path.relative_to(project).as_posix()
        if name.split("/")[0] not in ("runs", ".git", ".cache"):
            mode = path.lstat().st_mode
            found[name] = (mode, b"" if path.is_dir() else path.read_bytes())
    return found


def call(project: Path, *words: object) -> int:
    return scaffold_experiment.main([*map(str, words), "--project", str(project)])


def new(project: Path, name: str, *words: object) -> int:
    return call(project, "new", "--name", name, "--no-checks", *words)


def test_everything_there_is_is_made_as_planned_and_undone(project, capfd):
    before = tree(project)
    made = {f"my_{kind}": ("--kind", kind) for kind in plans.KINDS}
    made |= {name: ("--block", block, "--variant", v) for name, block, v in short_names()}
    assert len(made) == 5 + 13
    for name, words in made.items():
        now = tree(project)
        assert call(project, "plan", "--name", name, *words) == 0
        planned = capfd.readouterr().out
        assert tree(project) == now, f"plan of {name} wrote"
        assert new(project, name, *words) == 0
        after = tree(project)
        added = {path for path in after.keys() - now.keys() if not path.startswith(".curry-train")}
        changed = {path for path in now if after[path] != now[path]} - {".curry-train"}
        told = set(re.findall(r"^--- new file (\S+)", planned, re.MULTILINE))
        assert added == told
        assert changed == set(re.findall(r"^--- (\S+)$", planned, re.MULTILINE))
        written = capfd.readouterr().err
        assert all(path in written for path in added | changed)
        assert f"model.{words[1]}={name}" in planned or f"model={name}" in planned
    for words in (["check", "-q"], ["format", "--check", "-q"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", "."],
            cwd=project,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
    for name in [*list(made)[::2], *list(made)[1::2]]:
        assert call(project, "--undo", name) == 0
    assert tree(project) == before


def test_git_sees_nothing_after_an_undo(project):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(project)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    assert new(project, "idea", *GATED) == 0
    status = [*git, "status", "--porcelain", "--", ".", ":!runs"]
    assert len(subprocess.run(status, capture_output=True).stdout.splitlines()) == 6
    assert call(project, "--undo", "idea") == 0
    assert subprocess.run(status, capture_output=True).stdout == b""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Idea", "is no such name"),
        ("2fast", "is no such name"),
        ("my-idea", "is no such name"),
        ("a__b", "is no such name"),
        ("../../x", "is no such name"),
        ("", "is no such name"),
        ("a" * 41, "41 characters"),
        ("lambda", "word of Python"),
        ("match", "word of Python"),
        ("standard", "means something else"),
        ("null", "means something else"),
        ("decoder", "has a module decoder already"),
        ("spiking", "has a module spiking already"),
        ("data", "has a module data already"),
        ("tensor", "a second Tensor in curry_train/models/tensor.py"),
        ("find_source", "a second find_source in curry_train/data/find_source_data.py"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name, why, project, capfd):
    before = tree(project)
    assert new(project, name, "--kind", "lm") == 2
    assert why in capfd.readouterr().err
    assert tree(project) == before


def test_a_key_that_is_taken_is_refused(project, capfd):
    assert new(project, "embedded", "--kind", "lm") == 2  # a data set of that name
    assert "DATASETS has 'embedded' already" in capfd.readouterr().err
    assert new(project, "idea", *GATED) == 0
    before = tree(project)
    (project / "curry_train/layers/idea_attention.py").unlink()
    assert new(project, "idea", *GATED) == 2
    assert "VARIANTS has 'attention.idea' already" in capfd.readouterr().err
    assert call(project, "--undo", "idea") == 0
    assert before.keys() - tree(project).keys() >= {f"{record.FOLDER}/scaffold-idea.json"}


def test_a_file_that_exists_stops_everything_before_it_begins(project, capfd):
    for path in plans.plan_block(project, "idea", "attention", "gated", "tiny_moe").create:
        for make in ("file", "link"):
            place = project / path
            place.write_text("mine\n") if make == "file" else place.symlink_to("nowhere")
            before = tree_of_links(project)
            assert new(project, "idea", *GATED) == 2
            said = capfd.readouterr().err
            reason = "has a module idea_attention" if make == "file" and "layers" in path else path
            assert reason in said
            assert tree_of_links(project) == before
            place.unlink()


def tree_of_links(project: Path) -> dict[str, object]:
    paths = (p for p in project.rglob("*") if "runs" not in p.parts)
    return {
        str(p): os.readlink(p) if p.is_symlink() else p.is_file() and p.read_bytes() for p in paths
    }


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("new",), "no --name"),
        (("new", "--name", "x"), "neither --kind nor --block"),
        (("new", "--name", "x", "--kind", "lm", *GATED), "--kind and --block"),
        (("new", "--name", "x", "--block", "mlp"), "there are geglu, relu2, custom"),
        (("new", "--name", "x", "--block", "mlp", "--variant", "gated"), "--variant gated"),
        (("new", "--name", "x", *GATED, "--model", "nonsense"), "there are deepseek_v2_lite"),
        (("new", "--name", "x", *GATED, "--model", "tiny_spiking"), "architecture spiking"),
        (("plan", "--name", "x", *GATED, "--model", "../model/tiny_moe"), "is no file of"),
        (("new", "--name", "x", "--kind", "lm", "--model", "tiny_moe"), "belong to --block"),
        (("--undo", "x"), "no such scaffold; there are: none"),
        (("--undo", "../x"), "no such scaffold"),
        (("new", "--undo", "x"), "one of them"),
        ((), "nothing to do"),
    ],
)
def test_a_wrong_call_says_what_is_allowed(words, why, project, capfd):
    before = tree(project)
    assert call(project, *words) == 2
    assert why in capfd.readouterr().err
    assert tree(project) == before


def test_other_folders_are_refused(tmp_path, capfd):
    assert new(tmp_path, "idea", "--kind", "lm") == 2
    assert "has no train.py" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_older_project_is_told_to_upgrade(project, capfd):
    for words, name in ((GATED, "variant_checks.py"), (("--kind", "lm"), "model_checks.py")):
        (project / "tests" / name).unlink()
        before = tree(project)
        assert new(project, "idea", *words) == 2
        assert f"has no tests/{name}" in capfd.readouterr().err
        assert tree(project) == before


FORMS = {
    "empty": "M = {}\n",
    "empty over lines": "M = {\n}\n",
    "with a space": "M = { }\n",
    "one line": 'M: dict[str, str] = {"a": "x"}\n',
    "one line with a comma": 'M = {"a": "x",}\n',
    "black": 'import os\n\nM = {\n    "b": "y",\n    "a": "x",  # why, so\n    # end\n}\nN = 1\n',
    "no comma": 'M = {\n    "a": "x",\n    "b": "y"\n}\n',
    "no comma, a comment": 'M = {\n    "a": "x"  # c, d\n}\n',
    "carriage returns": 'M = {\r\n  "a": "x",\r\n}\r\n',
    "aligned": 'M = {"a": "x",\n     "b": "y",}\n',
    "spread first": 'M = {**A, "a": "x"}\n',
    "spread only": "M = {**A}\n",
    "spread last": 'M = {"a": "x", **A,\n}\n',
    "mark and tabs": '\ufeffM = {\n\t"a": "x",\n}\n',
    "other letters": 'é = 1; M = {"ä": "ö", }  # ü\n',
    "a comment alone": "M = {\n    # nothing yet\n}\n",
    "parentheses": 'M = N = {\n    "a": (\n        "x"\n    ),\n}\n',
    "no line end": 'M = {  # c\n    "a": "x",\n}',
    "comma below": 'M = {\n    "a": "x"\n    ,\n}\n',
    "comment after the last": 'M = {"a": "x",  # c\n}\n',
    "two in a line": 'M = {\n    "a": "x", "b": "y",\n}\n',
}


@pytest.mark.parametrize("form", FORMS)
def test_one_entry_goes_into_a_dict_of_any_form_and_out_again(form):
    source = FORMS[form].encode()
    found = edit.insert(source, ENTRY, "m.py")
    values: dict = {"A": {"q": "1"}}
    exec(found.decode("utf-8-sig"), values)
    wanted: dict = {"A": {"q": "1"}}
    exec(source.decode("utf-8-sig"), wanted)
    assert values["M"] == {**wanted["M"], "new": "a.b:C"}
    added = len(found) - len(source)
    assert any(found[:at] + found[at + added :] == source for at in range(len(found)))
    left = edit.remove(found, ENTRY, "m.py")
    empty = form in ("empty over lines", "with a space")
    assert left == (b"M = {}\n" if empty else source)
    assert edit.remove(source, ENTRY, "m.py") == source


@pytest.mark.parametrize("form", FORMS)
def test_an_entry_goes_out_of_a_dict_that_was_changed_since(form):
    found = edit.insert(FORMS[form].encode(), ENTRY, "m.py").decode("utf-8-sig")
    more = found.replace('"new": "a.b:C",', '"new": "a.b:C", "late": "z",')
    left = edit.remove(more.encode(), ENTRY, "m.py").decode()
    values: dict = {"A": {"q": "1"}}
    exec(left, values)
    assert "new" not in values["M"]
    assert values["M"]["late"] == "z"
    without = "".join(left.replace('"late": "z",', "").split())
    assert without == "".join(FORMS[form].lstrip("\ufeff").split())


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("M = dict(a=1)\n", "has no literal dict M"),
        ("def f():\n    M = {}\n", "has no literal dict M"),
        ("M = {}\nM = {}\n", "binds M 2 times"),
        ("M = {\n", "is no Python"),
        ('M = {"new": "z"}\n', "has 'new' already"),
    ],
)
def test_a_dict_that_is_not_understood_is_told_with_the_line_to_add(source, why):
    with pytest.raises(edit.EditError, match=re.escape(why)) as caught:
        edit.insert(source.encode(), ENTRY, "m.py")
    assert "already" in why or ENTRY.line in str(caught.value)


def test_a_project_without_the_dict_is_told_the_line(project, capfd):
    layers = project / LAYERS
    layers.write_text(layers.read_text().replace("VARIANTS = {}", "VARIANTS = dict()"))
    before = tree(project)
    assert new(project, "idea", *GATED) == 2
    line = '"attention.idea": "curry_train.layers.idea_attention:IdeaAttention",'
    assert line in capfd.readouterr().err
    assert tree(project) == before


def test_a_dict_of_the_users_own_form_keeps_every_other_byte(project):
    models = project / "curry_train/models/__init__.py"
    own = (
        b'"""Mine."""\r\nMODELS = {\r\n'
        b'  "spiking": "curry_train.models.spiking:SpikingTransformer", # first\r\n'
        b'  "decoder":\r\n     "curry_train.models.decoder:Decoder"\r\n}\r\n'
    )
    models.write_bytes(own)
    models.chmod(0o640)
    before = tree(project)
    assert new(project, "idea", "--kind", "lm") == 0
    line = b'"idea": "curry_train.models.idea:Idea",\r\n  '
    assert models.read_bytes().replace(line, b"") == own
    assert call(project, "--undo", "idea") == 0
    assert tree(project) == before


def test_work_of_the_user_is_kept_until_forced(project, capfd):
    before = tree(project)
    assert new(project, "idea", *GATED) == 0
    mine, layers = project / "curry_train/layers/idea_attention.py", project / LAYERS
    mine.write_text(mine.read_text() + "# my work\n")
    layers.write_text(layers.read_text().replace("VARIANTS = {\n", 'VARIANTS = {\n    "x": "y",\n'))
    assert call(project, "--undo", "idea") == 1
    said = capfd.readouterr().out
    assert "kept     curry_train/layers/idea_attention.py was changed since it was made" in said
    assert mine.read_text().endswith("# my work\n")
    assert 'VARIANTS = {\n    "x": "y",\n}' in layers.read_text()
    assert not (project / "configs/experiment/idea.yaml").exists()
    assert call(project, "--undo", "idea", "--force") == 0
    layers.write_text(layers.read_text().replace('{\n    "x": "y",\n}', "{}"))
    assert tree(project) == before


def test_an_entry_that_the_user_changed_is_kept(project, capfd):
    assert new(project, "idea", *GATED) == 0
    layers = project / LAYERS
    layers.write_text(layers.read_text().replace(":IdeaAttention", ":Better"))
    assert call(project, "--undo", "idea") == 1
    assert "'attention.idea' of VARIANTS was changed; remove it by hand" in capfd.readouterr().out
    assert ":Better" in layers.read_text()


@pytest.mark.parametrize("order", list(itertools.permutations(("one", "two", "three"))))
def test_scaffolds_go_out_in_any_order(order, project):
    before = tree(project)
    assert new(project, "one", *GATED) == 0
    assert new(project, "two", "--kind", "moe") == 0
    assert new(project, "three", "--block", "norm", "--variant", "dyt") == 0
    for name in order:
        assert call(project, "--undo", name) == 0
    assert tree(project) == before


def test_a_name_is_used_once(project, capfd):
    assert new(project, "idea", *GATED) == 0
    now = tree(project)
    assert new(project, "idea", "--kind", "lm") == 2
    assert "take it out first: --undo idea" in capfd.readouterr().err or tree(project) == now
    assert tree(project) == now


def deadly(real, seen, number):
    def die(*args, **words):
        if next(seen) == number:
            os._exit(137)
        return real(*args, **words)

    return die


def killed_at(number: int, work) -> bool:
    """Run work in a fork that dies at its n-th write, without cleaning up; tell if it did."""
    child = os.fork()
    if not child:
        seen = itertools.count(1)
        for name in ("fsync", "replace", "link", "unlink"):
            setattr(os, name, deadly(getattr(os, name), seen, number))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137


def test_a_kill_at_any_moment_leaves_what_undo_cleans(project):
    before, moments = tree(project), 0
    plan = plans.plan_kind(project, "idea", "classifier")

    def write() -> None:
        with record.alone(project):
            record.apply(project, plan, "0")

    while killed_at(moments + 1, write):
        moments += 1
        assert call(project, "--undo", "idea") in (0, 2)  # 2: killed before the record was there
        assert tree(project) == before, f"killed at write {moments}"
    assert moments == 2 + 6 * 3 + 2 * 2 + 2  # record, files, dicts, record again
    assert call(project, "--undo", "idea") == 0
    assert tree(project) == before


def test_a_kill_in_the_middle_of_undo_is_mended_by_another(project):
    before = tree(project)
    for moment in itertools.count(1):
        assert new(project, "idea", "--kind", "classifier") == 0
        died = killed_at(moment, lambda: call(project, "--undo", "idea"))
        if died:
            assert call(project, "--undo", "idea") == 0
        assert tree(project) == before
        if not died:
            break
    assert moment == 1 + 2 * 2 + 6 + 1  # one more than dicts, files, record


def test_two_at_once_both_arrive(project):
    children = []
    for name in ("one", "two", "three", "four"):
        child = os.fork()
        if not child:
            try:
                code = new(project, name, *GATED)
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children] == [0, 0, 0, 0]
    text = (project / LAYERS).read_text()
    assert all(f'"attention.{name}"' in text for name in ("one", "two", "three", "four"))


def test_list_names_what_there_is_and_what_was_made(project, capfd):
    assert new(project, "idea", *GATED) == 0
    capfd.readouterr()
    assert call(project, "list") == 0
    said = capfd.readouterr().out
    for name in (*plans.KINDS, *(variant for _, variant in VARIANTS)):
        assert re.search(rf"^  {name} ", said, re.MULTILINE), name
    assert "in VARIANTS: attention.idea" in said
    assert "made here before: idea" in said
    assert "scoring_func=sigmoid" in said


OUTCOMES = {
    "all well": ({}, {"scaffold-preflight": "skipped"}, 0),
    "train.py fails": ({"experiment=idea": (1, [])}, {"scaffold-smoke": "fail"}, 1),
    "two steps only": ({"experiment=idea": (0, [1.0, 2.0])}, {"scaffold-smoke": "fail"}, 1),
    "the baseline moves": ({"after": (0, [1.0, 2.0, 3.5])}, {"scaffold-baseline": "fail"}, 1),
    "no baseline": ({"before": (1, [])}, {"scaffold-baseline": "unclear"}, 3),
    "tests fail": ({"pytest": (1, "1 failed")}, {"scaffold-tests": "fail"}, 1),
    "no pytest": ({"pytest": (1, "No module named pytest")}, {"scaffold-tests": "unclear"}, 3),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_what_does_not_work_is_told_and_stays(outcome, project, monkeypatch, capfd):
    planned, verdicts, code = OUTCOMES[outcome]

    def run(words, folder, **variables):
        if "pytest" in words:
            return planned.get("pytest", (0, "3 passed"))
        (place,) = (w.partition("=")[2] for w in words if w.startswith("run.dir="))
        key = words[2] if "experiment" in words[2] else place.rpartition("-")[2]
        left, losses = planned.get(key, (0, [1.0, 2.0, 3.0]))
        out = Path(place, "run")
        out.mkdir(parents=True)
        rows = [json.dumps({"step": i, "loss": loss}) for i, loss in enumerate(losses)]
        (out / "metrics.jsonl").write_text("\n".join(rows))
        return left, "it said this"

    monkeypatch.setattr(checks, "_run", run)
    monkeypatch.setattr(checks, "PREFLIGHT", project / "nowhere.py")
    target = project / "report.json"
    words = ["new", "--name", "idea", *GATED, "--json", target]
    assert call(project, *words) == code
    report = json.loads(target.read_text())
    found = {check["id"]: check["verdict"] for check in report["checks"]}
    assert {id: found[id] for id in verdicts} == verdicts
    assert {id for id, verdict in found.items() if verdict == "fail"} == {
        id for id, verdict in verdicts.items() if verdict == "fail"
    }
    assert (project / "curry_train/layers/idea_attention.py").is_file()
    if code:
        assert "--undo idea" in report["next"][0]
    assert set(report["artifacts"]) >= {"tests/test_idea_attention.py", LAYERS}


def test_what_is_made_passes_the_tests_that_are_made(tmp_path):
    """A few; every kind and variant, and what takes several ranks, with --full."""
    project, full = whole_project(tmp_path), "CURRY_TRAIN_FULL" in os.environ
    for kind in plans.KINDS if full else ("moe", "regressor", "spiking"):
        assert new(project, f"my_{kind}", "--kind", kind) == 0
    for name, block, variant in short_names():
        if full or name in ("differential", "own_mlp", "cosine", "dyt"):
            assert new(project, name, "--block", block, "--variant", variant) == 0
    words = [] if full else ["-m", "not dist"]
    tests = sorted(str(path) for path in project.glob("tests/test_*.py"))
    assert len(tests) == (5 + 13 if full else 7)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, *tests]
    done = subprocess.run(
        command, cwd=project, env=processes.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " failed" not in done.stdout and "passed" in done.stdout


def test_a_new_model_trains_by_train_py(tmp_path, monkeypatch):
    """Preflight too with --full."""
    project, target = whole_project(tmp_path), tmp_path / "report.json"
    if "CURRY_TRAIN_FULL" not in os.environ:
        monkeypatch.setattr(checks, "PREFLIGHT", tmp_path / "nowhere.py")
    words = ("new", "--name", "idea", "--kind", "classifier", "--json", target)
    assert call(project, *words, "--python", sys.executable) == 0
    report = json.loads(target.read_text())
    verdicts = {check["id"]: check["verdict"] for check in report["checks"]}
    assert verdicts["scaffold-smoke"] == verdicts["scaffold-tests"] == "pass"
    assert len(report["numbers"]["losses"]) == 3
    assert report["numbers"]["losses"][0] == pytest.approx(1.386, abs=0.1)  # ln 4


@FULL
def test_the_steps_of_the_agent_make_differential_attention(tmp_path):
    """The very commands of agents/scaffolder.md, in a fresh project."""
    page = (ROOT / "agents" / "scaffolder.md").read_text()
    lines = [line.strip() for line in page.splitlines() if "scaffold_experiment.py" in line]
    (command,) = [line for line in lines if "--name differential" in line]
    project = whole_project(tmp_path)
    words = [sys.executable, *command.removeprefix("python3 ").split()]
    words = [w.strip('"').replace("${CLAUDE_PLUGIN_ROOT}", str(ROOT)) for w in words]
    before = tree(project)
    done = subprocess.run(
        [*words, "--json"], cwd=project, env=processes.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {check["verdict"] for check in report["checks"]} == {"pass"}
    assert {check["id"] for check in report["checks"]} == {
        f"scaffold-{name}" for name in ("files", "smoke", "baseline", "tests", "preflight")
    }
    shutil.rmtree(project / ".cache", ignore_errors=True)
    assert call(project, "--undo", "differential") == 0
    assert tree(project) == before


def whole_project(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "runs", ".cache", "equality", "test_*.py")
    return Path(shutil.copytree(ROOT / "template", folder / "project", ignore=ignored))


def test_pages_of_agents_are_whole():
    tools = {"Read", "Write", "Edit", "Glob", "Grep", "Bash"}
    pages = [read_page(path) for path in sorted((ROOT / "agents").glob("*.md"))]
    assert [page.path.stem for page in pages if not page.problems and page.body.strip()] == [
        page.path.stem for page in pages
    ]
    for page in pages:
        assert set(page.keys) <= {"name", "description", "tools", "skills"}
        assert page.keys["name"] == page.path.stem
        assert set(page.keys["tools"].split(", ")) <= tools
        assert ". Use when " in page.keys["description"]
    assert "scaffolder" in {page.path.stem for page in pages}
