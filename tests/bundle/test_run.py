"""The test runner counts right, never passes by accident, and installs whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run
from bundle.tree import ROOT
from clients.install import InstallError, building, cache_root, install_clients

MIXED = """
import os
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("fixture")

def test_good(): pass
def test_environment(): assert os.environ["OMP_NUM_THREADS"] == "1"
def test_bad(): assert False
def test_error(broken): pass
@pytest.mark.skip(reason="no such machine")
def test_skipped(): pass
"""
FULL = """
import os
def test_full(): assert os.environ.get("CURRY_TRAIN_FULL") == "1"
"""
HANGING = """
import time
def test_hangs(): time.sleep(100)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Return a function that runs one test file as the suite `bundle` of a small repository."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "WORKERS", 0)
    folder = tmp_path / "tests" / "bundle"

    def start(text: str, *arguments: str) -> run.Outcome:
        folder.mkdir(parents=True)
        (folder / "test_inner.py").write_text(text)
        return run.run_suite("bundle", Path(sys.executable), run.parse([*arguments]))

    return start


def test_every_kind_of_result_is_counted(suite, capsys):
    outcome = suite(MIXED)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (2, 2, 1)
    assert run.summarize([outcome, run.Outcome("skills", passed=3)], 60.0) == 1
    printed = capsys.readouterr().out
    assert printed.endswith("\n5 passed, 2 failed, 1 skipped\n")
    assert "no such machine" in printed
    assert "FAILED: bundle: tests.bundle.test_inner::test_bad" in printed
    assert "install: 1.00 minutes apart" in printed


def test_a_pass_needs_a_test(capsys):
    assert run.summarize([run.Outcome("bundle", passed=1, skipped=1)], 0.0) == 0
    assert run.summarize([run.Outcome("bundle", skipped=1)], 0.0) == 1
    assert run.summarize([], 0.0) == 1
    assert "no test ran" in capsys.readouterr().out


def test_an_empty_suite_fails_unless_tests_were_chosen(suite):
    assert suite("x = 1\n").failed == 1


def test_a_suite_without_the_chosen_test_is_no_failure(suite):
    outcome = suite(MIXED, "-k", "nothing_of_this_name")
    assert (outcome.passed, outcome.failed) == (0, 0)


def test_a_file_that_cannot_be_imported_fails(suite):
    assert suite("import no_such_module\n").failed == 1


def test_full_reaches_the_tests(suite):
    assert suite(FULL, "--full").passed == 1


def test_a_hanging_suite_is_ended(suite, monkeypatch):
    monkeypatch.setattr(run, "SUITE_SECONDS", 3)
    began = time.monotonic()
    assert suite(HANGING).failures == ["ended after 3 seconds"]
    assert time.monotonic() - began < 20


def test_a_missing_suite_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    outcome = run.run_suite("template", Path(sys.executable), run.parse([]))
    assert outcome.failures == ["template/tests does not exist"]


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0), (2, 7, 18)])
def test_another_python_is_refused_in_one_line(version, monkeypatch):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"3\.11, 3\.12 or 3\.13"):
        run.require_python()


def test_a_python_without_venv_is_refused_with_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit, match="python3-venv"):
        run.require_python()


def test_a_killed_install_counts_for_nothing(tmp_path):
    folder = tmp_path / "thing"
    with pytest.raises(RuntimeError), building(folder) as needed:
        assert needed
        (folder / "half").touch()
        raise RuntimeError("killed")
    with building(folder) as needed:
        assert needed
        assert not (folder / "half").exists()
    with building(folder) as needed:
        assert not needed


def test_the_cache_lies_outside_the_repository(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root().parent == tmp_path
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "curry-train-tests"


def test_without_npm_the_reason_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallError, match="npm and node are not on PATH"):
        install_clients()


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_without_npm_the_client_tests_skip_but_never_in_ci(ci, code, tmp_path):
    command = [sys.executable, "-m", "pytest", "tests/clients", "-q", "-k", "pinned_one"]
    env = {**os.environ, "PATH": str(tmp_path), "CI": ci}
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={tmp_path}/tmp"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "npm and node are not on PATH" in done.stdout
    assert ("2 skipped" in done.stdout) == (code == 0)


def test_help_answers_at_once_without_an_environment(tmp_path):
    command = [sys.executable, "-S", "-E", str(ROOT / "tests/run.py"), "--help"]
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--full" in done.stdout
    assert list(tmp_path.iterdir()) == []
