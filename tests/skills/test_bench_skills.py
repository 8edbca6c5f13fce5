"""The bench of the skills: what counts as missed, and what it measures."""

from __future__ import annotations

import json
import sys

import bench_skills
import pytest
from bench_skills import Figure


def figure(value=1.0, limit=2.0, code=0):
    return Figure("init-loss", value, "s", limit, 1.0, 0.5, code, "python3 x.py")


@pytest.mark.parametrize(
    ("made", "ok", "ratio"),
    [
        (figure(), True, 0.5),
        (figure(value=2.0), False, 1.0),
        (figure(code=1), False, 0.5),
        (figure(value=None), False, None),
        (figure(limit=None), True, None),
        (figure(limit=None, code=3), False, None),
    ],
)
def test_a_figure_is_kept_or_missed(made, ok, ratio):
    assert (made.ok, made.ratio) == (ok, ratio)


def test_the_exit_code_and_both_outputs_say_what_was_missed(monkeypatch, capsys):
    found = [figure(), figure(value=9.0)]
    monkeypatch.setattr(bench_skills, "measure", lambda only: found)
    assert bench_skills.main([]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["figure", "value", "limit", "ratio", "wall", "s", "CPU", "s"]
    assert out[1].split()[-1] == "ok" and out[2].split()[-1] == "missed"
    assert out[3].startswith("machine: ")
    found.pop()
    assert bench_skills.main(["--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["figures"][0]["ratio"] == 0.5 and written["machine"]["cores"] >= 1


def test_a_commands_own_and_its_childrens_cpu_time_is_counted(tmp_path):
    busy = "import time\nwhile time.process_time() < 0.2: pass\n"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    done = bench_skills.run([sys.executable, "-c", nested], tmp_path)
    assert done.exit_code == 0 and 0.2 <= done.cpu_s < 2.0


def test_the_hooks_figure_is_the_reports(tmp_path):
    report = tmp_path / "gradient-flow.json"
    missing = bench_skills.hooks(figure(), report)
    assert missing.value is None and missing.ok and missing.note == "the report does not say"
    report.write_text(json.dumps({"numbers": {"overhead": 2.5}}), encoding="utf-8")
    assert not bench_skills.hooks(figure(), report).ok
