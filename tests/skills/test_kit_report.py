"""Reports: the schema, the short text, strict JSON, the ledger, verdict and exit code."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import threading

import jsonschema
import pytest
import torch
from skills.targets import processes
from skills.targets.processes import CUSTOM_CHECK, LANGUAGE_MODEL, MLP, custom_check

from kit import report as kit_report
from kit.check_ids import CHECK_IDS, is_check_id
from kit.errors import UsageError
from kit.report import EXIT_CODES, MAX_LINES, Report, append_ledger, plain, render, write_json

TEXT, NULLABLE = {"type": "string"}, {"type": ["string", "null"]}
KEYS = ["schema", "skill", "version", "verdict", "summary", "checks", "numbers", "evidence"]
KEYS += ["next", "artifacts", "target", "env"]
CHECK = {
    "type": "object",
    "required": ["id", "verdict", "value", "threshold", "unit", "message", "fix"],
    "additionalProperties": False,
    "properties": {
        "id": {"pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
        "verdict": {"enum": ["pass", "fail", "unclear", "skipped"]},
        "value": {},
        "threshold": {},
        "unit": NULLABLE,
        "message": TEXT,
        "fix": {"type": ["object", "null"], "required": ["file", "line", "text"]},
    },
}
SCHEMA = {
    "type": "object",
    "required": KEYS,
    "additionalProperties": False,
    "properties": {
        "schema": {"const": 1},
        "skill": TEXT,
        "version": TEXT,
        "verdict": {"enum": ["pass", "fail", "unclear"]},
        "summary": TEXT,
        "checks": {"type": "array", "items": CHECK},
        "numbers": {"type": "object"},
        "evidence": {"type": "array", "items": TEXT},
        "next": {"type": "array", "items": TEXT},
        "artifacts": {"type": "array", "items": TEXT},
        "target": {
            "type": "object",
            "required": ["config_hash", "git_sha"],
            "additionalProperties": False,
            "properties": {"config_hash": NULLABLE, "git_sha": NULLABLE},
        },
        "env": {"type": "object"},
    },
}


def refuse_constant(word):
    raise AssertionError(f"{word} is no JSON")


def read(text):
    return json.loads(text, parse_constant=refuse_constant)


def written(report):
    return report.to_dict(config_hash="ab", git_sha=None, env={"torch": "2"})


def with_checks(*verdicts):
    report = Report("custom-check", summary="a summary")
    for number, verdict in enumerate(verdicts):
        report.check(f"check-{number}", verdict)
    return report


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (["pass", "pass"], "pass"),
        (["pass", "skipped"], "pass"),
        (["pass", "unclear"], "unclear"),
        (["unclear", "fail", "pass"], "fail"),
        (["skipped"], "unclear"),
        ([], "unclear"),
    ],
)
def test_the_verdict_follows_from_the_checks(verdicts, verdict):
    assert with_checks(*verdicts).verdict == verdict


def test_the_report_has_exactly_the_keys_of_the_schema():
    report = with_checks("pass")
    report.check("other", "fail", value=2.0, threshold=1, unit="ms", message="slow",
                 fix={"file": "train.py", "line": 3, "text": "x"})  # fmt: skip
    value = written(report)
    jsonschema.validate(value, SCHEMA)
    assert list(value) == KEYS


def test_numbers_that_json_lacks_become_strings_and_tensors_numbers(tmp_path):
    report = with_checks()
    report.numbers = {
        "nan": math.nan,
        "inf": [math.inf, -math.inf],
        "tensor": torch.tensor(1.5, requires_grad=True),
        "vector": torch.tensor([1, 2]),
        "path": tmp_path,
        3: (True, None),
    }
    write_json(tmp_path / "report.json", written(report))
    numbers = read((tmp_path / "report.json").read_text())["numbers"]
    assert numbers["nan"] == "nan" and numbers["inf"] == ["inf", "-inf"]
    assert numbers["tensor"] == 1.5 and numbers["vector"] == [1, 2] and numbers["3"] == [True, None]
    assert plain(torch.tensor(math.nan)) == "nan"


def test_a_reader_sees_the_old_report_or_the_new_one(tmp_path):
    path, done = tmp_path / "report.json", threading.Event()
    write_json(path, {"payload": [0] * 5000})
    seen = []

    def reader():
        while not done.is_set():
            seen.append(len(read(path.read_text())["payload"]))

    thread = threading.Thread(target=reader)
    thread.start()
    for number in range(30):
        write_json(path, {"payload": [number] * 5000})
    done.set()
    thread.join()
    assert seen and set(seen) == {5000} and os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize("count", [1, 9, 40])
def test_the_text_has_at_most_15_lines_and_names_every_failed_check(count, tmp_path):
    report = with_checks(*["pass"] * count, *["fail"] * count)
    report.checks[-1]["message"] = "two\nlines " + "x" * 500
    report.evidence, report.next = ["e"] * 9, ["n"] * 9
    text = render(written(report), tmp_path / "report.json")
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES == 15
    for number in range(count, 2 * count):
        assert f"check-{number}" in text
    assert lines[0] == "custom-check: a summary"
    assert lines[-1] == f"verdict: fail (exit 1), report {tmp_path / 'report.json'}"


def test_a_failed_check_shows_value_threshold_and_the_line_to_change():
    report = Report("custom-check")
    report.check("step-time-ratio", "fail", value=1.25, threshold=1.05, unit="x", message="slower",
                 fix={"file": "train.py", "line": 7, "text": "call zero_grad"})  # fmt: skip
    wanted = (
        "  fail     step-time-ratio 1.25 x (threshold 1.05): slower -> train.py:7: call zero_grad"
    )
    assert wanted in render(written(report), "r").splitlines()


def test_a_long_message_leaves_the_line_to_change_whole():
    place = {"file": "project/source/of/someone/train.py", "line": 7, "text": "call zero_grad"}
    for verdict, width in (("fail", 320), ("pass", 160)):
        report = Report("custom-check")
        report.check("own", verdict, message="why " * 200, fix=place)
        line = render(written(report), "r").splitlines()[1]
        assert line.endswith("... -> project/source/of/someone/train.py:7: call zero_grad")
        assert len(line) == width


@pytest.mark.parametrize(
    ("value", "shown"), [(2.0, " 2 (threshold 1)"), (math.inf, " inf (threshold 1)"), (None, "")]
)
def test_a_threshold_is_shown_beside_a_number_only(value, shown):
    report = Report("custom-check")
    report.check("own", "fail", value=value, threshold=1)
    report.check("other", "fail", value="a word", threshold=1)
    lines = render(written(report), "r").splitlines()
    assert lines[1:3] == [f"  fail     own{shown}", "  fail     other a word"]


def test_ids_stand_in_one_table_and_are_kebab_case():
    assert CHECK_IDS and all(is_check_id(word) and text for word, text in CHECK_IDS.items())
    with pytest.raises(ValueError, match="is not in kit"):
        Report("benchmark-step").check("no-such-id", "pass")
    for word in ("Upper", "two--hyphens", "under_score", "", 3):
        with pytest.raises(ValueError, match="kebab-case"):
            Report("custom-check").check(word, "pass")
    with pytest.raises(ValueError, match="allowed: pass, fail, unclear, skipped"):
        Report("custom-check").check("a", "warn")


def test_every_id_that_a_script_reports_is_in_the_table():
    scripts = (processes.ROOT / "skills").glob("*/scripts/*.py")
    sources = [path.read_text() for path in scripts if path.name != "custom_check.py"]
    for word in CHECK_IDS:
        assert any(f'"{word}"' in source for source in sources), f"no script reports {word}"


def test_the_ledger_gets_one_line_a_report_from_many_writers(tmp_path):
    value = written(with_checks("pass"))
    threads = [
        threading.Thread(target=lambda: [append_ledger(tmp_path, value) for _ in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "runs" / "checks" / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert len(entries) == 80
    assert all(set(entry) == {"skill", "verdict", "config_hash", "time"} for entry in entries)
    assert entries[0]["config_hash"] == "ab" and entries[0]["time"] > 1e9


def test_a_folder_outside_git_has_no_sha_and_one_inside_has(tmp_path):
    assert kit_report.git_sha(tmp_path) is None
    sha = kit_report.git_sha(processes.ROOT)
    assert sha is None or len(sha) == 40


CHECKS = """
import torch
def wanders(target):
    import os
    os.chdir("/")
    return {"id": "fine", "verdict": "pass"}
def passes(target):
    return {"id": "fine", "verdict": "pass"}
def fails(target):
    broken = {"id": "broken", "verdict": "fail", "value": float("nan")}
    return [{"id": "fine", "verdict": "pass"}, broken]
def unclear(target, out):
    (out / "picture.txt").write_text("x")
    return {"checks": [{"id": "fine", "verdict": "unclear"}], "summary": "noisy",
            "next": ["more data"], "artifacts": [out / "picture.txt"],
            "numbers": {"x": torch.tensor(2.0)}}
def prints(target):
    import os
    print("printed by the check")
    os.write(1, b"raw bytes\\n")
    os.system("echo from a child process")
    return {"id": "fine", "verdict": "pass"}
def raises(target):
    raise RuntimeError("in the check")
"""


@pytest.fixture
def checks(tmp_path):
    path = tmp_path / "checks.py"
    path.write_text(CHECKS, encoding="utf-8")
    return lambda name, *words: processes.run(
        CUSTOM_CHECK, "--check", f"{path}:{name}", "--target", MLP, *words, cwd=tmp_path
    )


@pytest.mark.parametrize(
    ("name", "verdict"), [("passes", "pass"), ("fails", "fail"), ("unclear", "unclear")]
)
def test_a_check_gives_text_report_ledger_and_exit_code(name, verdict, checks, tmp_path):
    done = checks(name)
    assert done.returncode == EXIT_CODES[verdict], done.stderr
    (folder,) = (tmp_path / "runs" / "checks" / "custom-check").iterdir()
    value = read((folder / "report.json").read_text())
    jsonschema.validate(value, SCHEMA)
    assert value["verdict"] == verdict and value["skill"] == "custom-check"
    assert len(value["target"]["config_hash"]) == 64 and value["env"]["torch"]
    last = done.stdout.splitlines()[-1]
    code = done.returncode
    assert (
        last
        == f"verdict: {verdict} (exit {code}), report {folder.relative_to(tmp_path)}/report.json"
    )
    (line,) = (tmp_path / "runs" / "checks" / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line)["config_hash"] == value["target"]["config_hash"]
    assert done.stderr.splitlines()[0].startswith("expected: ")
    assert len(done.stderr.splitlines()) <= 4
    if name == "fails":
        assert "broken" in done.stdout and value["checks"][1]["value"] == "nan"


def test_json_alone_goes_to_stdout_whatever_the_check_prints(checks):
    done = checks("prints", "--json")
    jsonschema.validate(read(done.stdout), SCHEMA)
    for words in ("printed by the check", "raw bytes", "from a child process"):
        assert words in done.stderr


def test_json_into_a_file_leaves_the_text_on_stdout(checks, tmp_path):
    done = checks("passes", "--json", "found.json", "--out", "here")
    assert done.returncode == 0 and done.stdout.startswith("custom-check: ")
    value = read((tmp_path / "found.json").read_text())
    assert value == read((tmp_path / "here" / "report.json").read_text())


def test_code_that_changes_the_folder_changes_no_path(checks, tmp_path):
    target = "import os\nfrom mlp_regression import build as made\n"
    target += "def build():\n    os.chdir('/')\n    return made()\n"
    shutil.copy(processes.TARGETS / "mlp_regression.py", tmp_path)
    (tmp_path / "roams.py").write_text(target)
    words = ["--check", "checks.py:wanders", "--target", "roams.py:build", "--json", "found.json"]
    done = processes.run(CUSTOM_CHECK, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read((tmp_path / "found.json").read_text())["verdict"] == "pass"


def test_a_check_that_raises_exits_with_2_and_writes_no_ledger(checks, tmp_path):
    done = checks("raises")
    assert done.returncode == 2 and done.stdout == ""
    assert "checks.py:raises raised RuntimeError: in the check" in done.stderr
    assert "in raises: raise RuntimeError" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "checks" / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "f.py:f returned None as a check; it must return a check {id, verdict, ...}"),
        (True, "returned True as a check"),
        ([{"id": "a", "verdict": "pass"}, 3], "returned 3 as a check"),
        ({"id": "a"}, "returned keys ['id'] as a check"),
        ({"id": "a", "verdict": "ok"}, "verdict 'ok' of a; allowed: pass, fail, unclear, skipped"),
        ({"id": "A b", "verdict": "pass"}, "check id 'A b'; it must be a kebab-case word"),
        ({"id": "a", "verdict": "pass", "colour": 1}, "'colour'"),
        ({"id": "a", "verdict": "fail", "fix": {"file": "x"}}, "allowed: file, line, text"),
        ({"id": "a", "verdict": "fail", "fix": 5}, "fix 5 of a; allowed: file, line, text"),
        ({"checks": [], "colour": 1}, "returned unknown keys ['colour']"),
        ({"checks": [], "numbers": [1]}, "numbers"),
        ({"checks": [], "next": "one line"}, "next"),
    ],
)
def test_what_a_check_may_return_is_said(found, words):
    with pytest.raises(UsageError) as caught:
        custom_check.take_in(found, "f.py:f")
    assert words in str(caught.value)


def test_a_check_takes_the_target_and_perhaps_a_folder():
    wanted = custom_check._wanted_arguments
    assert wanted(lambda target: 0, "f") == 1 and wanted(lambda target, out: 0, "f") == 2
    assert wanted(lambda target, out=None, more=3: 0, "f") == 2
    for function in (lambda: 0, lambda a, b, c: 0):
        with pytest.raises(UsageError, match="a check is called with"):
            wanted(function, "f")


def test_new_writes_a_working_check_and_overwrites_nothing(tmp_path):
    done = processes.run(CUSTOM_CHECK, "--new", "mine.py", cwd=tmp_path)
    assert done.returncode == 0 and "--check mine.py:check_gradients" in done.stdout
    assert (tmp_path / "mine.py").read_bytes() == processes.EXAMPLE_CHECK.read_bytes()
    (tmp_path / "mine.py").write_text("mine")
    done = processes.run(CUSTOM_CHECK, "--new", "mine.py", cwd=tmp_path)
    assert done.returncode == 2 and "--new mine.py exists; nothing is overwritten" in done.stderr
    assert (tmp_path / "mine.py").read_text() == "mine"
    for words in (
        ["--new", "no/folder.py"],
        ["--new", "x.txt"],
        [],
        ["--new", "a.py", "--check", "b"],
    ):
        assert processes.run(CUSTOM_CHECK, *words, cwd=tmp_path).returncode == 2


FROZEN = """
import torch
def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    def loss_fn(model, batch):
        return model[1](model[0](batch).detach()).mean()
    return model, [torch.randn(2, 4)], loss_fn
"""


def test_the_example_passes_on_a_clean_model_and_fails_on_a_detached_one(tmp_path):
    (tmp_path / "frozen.py").write_text(FROZEN)
    for spec, code in ((LANGUAGE_MODEL, 0), ("frozen.py:build", 1)):
        done = processes.run(
            CUSTOM_CHECK, "--check", f"{processes.EXAMPLE_CHECK}:check_gradients", "--target", spec,
            cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
    assert "fail     gradient-reaches-all 0.5 (threshold 1): none reaches 0.weight" in done.stdout


def test_the_blocks_of_the_reference_run_as_they_stand(tmp_path):
    page = processes.EXAMPLE_CHECK.with_name("targets-and-checks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [n for n, _ in blocks] == ["target.py", "padding_check.py", "start_of_seeds.py"]
    for name, source in blocks:
        (tmp_path / name).write_text(source, encoding="utf-8")
    done = processes.run(
        CUSTOM_CHECK, "--check", "padding_check.py:check_padding", "--target", "target.py:build",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    done = processes.run(
        CUSTOM_CHECK, "--check", "start_of_seeds.py:check_start", "--target", "target.py:build",
        "--out", "seeds", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0 and "pass     start-of-seeds" in done.stdout, done.stderr
    assert (tmp_path / "seeds" / "start-of-seeds.png").stat().st_size > 5000
    source = (tmp_path / "target.py").read_text()
    broken = source.replace('batch["labels"].flatten()', 'batch["labels"].flatten().clamp(min=0)')
    assert broken != source
    (tmp_path / "target.py").write_text(broken)
    done = processes.run(
        CUSTOM_CHECK, "--check", "padding_check.py:check_padding", "--target", "target.py:build",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1 and "padding-ignored" in done.stdout
