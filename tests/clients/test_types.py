"""Pyright accepts the files that pyproject.toml names, and no comment silences it there."""

from __future__ import annotations

import json
import re
import sys
import tomllib

from bundle.tree import ROOT, python_files

SILENCE = re.compile(r"#\s*(?:type:\s*ignore|pyright:)")


def checked() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    return settings["include"]


def test_every_named_place_exists():
    assert [name for name in checked() if not (ROOT / name).exists()] == []


def test_no_comment_silences_the_checker():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files(ROOT, *checked())
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if SILENCE.search(line)
    ]
    assert found == []


def test_the_types_hold(client):
    pyright = client("pyright")
    arguments = ["--project", str(ROOT), "--pythonpath", sys.executable, "--outputjson"]
    report = json.loads(pyright.run(*arguments, cwd=ROOT).stdout)
    assert report["summary"]["filesAnalyzed"] > 20
    problems = [
        f"{one['file']}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in report["generalDiagnostics"]
    ]
    assert not problems, "\n".join(problems)


def test_the_checker_finds_a_wrong_type(client, tmp_path):
    (tmp_path / "wrong.py").write_text('number: int = "text"\n')
    (tmp_path / "pyrightconfig.json").write_text("{}")  # none of a folder above
    done = client("pyright").run("--outputjson", "wrong.py", cwd=tmp_path)
    assert json.loads(done.stdout)["summary"]["errorCount"] == 1
