"""Which python runs a check, what happens when none can, and what a lone skill folder says."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest
from skills.init_bundle import pyenv
from skills.targets import processes
from skills.targets.processes import BENCHMARK_STEP, CUSTOM_CHECK, EXAMPLE_CHECK, MLP, ROOT

from kit import interpreter
from kit.errors import UsageError

GRADIENTS = ["--check", f"{EXAMPLE_CHECK}:check_gradients", "--target", MLP]


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """A python without torch."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def environment_with_torch(root):
    """Give a folder a bin/python that is this one."""
    return write_python(root, f'exec "{sys.executable}" "$@"')


def environment_with_sign(root, bare):
    """Give a folder a bin/python whose torch raises with the folder's name: it was chosen."""
    module = root / "site" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"raise ImportError('the torch of {root}')\n")
    return write_python(root, f'PYTHONPATH="{root / "site"}" exec "{bare}" "$@"')


def write_python(root, line):
    python = root / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{line}\n")
    python.chmod(0o755)
    return python


def went_on_with(done, python):
    """Tell whether a run said that it goes on with a python of environment_with_sign and did."""
    said = done.stderr.splitlines()[0] == f"python: going on with {python}"
    return said and f"raised ImportError: the torch of {python.parents[1]}" in done.stderr


def test_a_python_without_torch_goes_on_with_one_that_has_it(bare, tmp_path):
    found = environment_with_torch(tmp_path / ".venv")
    done = processes.run_fresh(CUSTOM_CHECK, *GRADIENTS, cwd=tmp_path, python=bare)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"python: going on with {found}"
    assert f"python: {sys.executable}, torch " in done.stderr


@pytest.mark.parametrize("place", [".venv", "VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_project_and_the_active_environments_are_looked_at(place, bare, tmp_path):
    root = tmp_path / (".venv" if place == ".venv" else "somewhere")
    found = environment_with_sign(root, bare)
    changes = {} if place == ".venv" else {place: str(root)}
    done = processes.run_fresh(CUSTOM_CHECK, *GRADIENTS, cwd=tmp_path, python=bare, **changes)
    assert went_on_with(done, found), done.stderr


def test_an_environment_without_torch_is_passed_over(bare, tmp_path):
    (tmp_path / ".venv").symlink_to(bare.parent.parent)
    found = environment_with_sign(tmp_path / "conda", bare)
    words = {"CONDA_PREFIX": str(tmp_path / "conda")}
    done = processes.run_fresh(CUSTOM_CHECK, *GRADIENTS, cwd=tmp_path, python=bare, **words)
    assert went_on_with(done, found), done.stderr


def test_the_target_folders_environment_counts_too(bare, tmp_path):
    folder = tmp_path / "theirs"
    found = environment_with_sign(folder / ".venv", bare)
    shutil.copy(processes.TARGETS / "mlp_regression.py", folder / "mlp.py")
    words = ["--check", f"{EXAMPLE_CHECK}:check_gradients", "--target", "theirs/mlp.py:build"]
    done = processes.run_fresh(CUSTOM_CHECK, *words, cwd=tmp_path, python=bare)
    assert went_on_with(done, found), done.stderr


def test_no_python_with_torch_is_one_line_and_exit_2(bare, tmp_path):
    done = processes.run_fresh(CUSTOM_CHECK, *GRADIENTS, cwd=tmp_path, python=bare)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no python with torch (tried ") and "set --python PY" in line
    assert not (tmp_path / "runs").exists()


def test_a_python_that_only_pretends_ends_after_one_try(bare, tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec "{bare}" "$@"\n')
    python.chmod(0o755)
    done = processes.run_fresh(CUSTOM_CHECK, *GRADIENTS, cwd=tmp_path, python=bare)
    assert done.returncode == 2 and done.stderr.count("going on with") == 1
    assert "no python with torch" in done.stderr


def test_the_python_flag_decides(bare, tmp_path):
    wanted = environment_with_sign(tmp_path / "chosen", bare)
    environment_with_torch(tmp_path / ".venv")
    words = [*GRADIENTS, "--python", wanted]
    done = processes.run_fresh(CUSTOM_CHECK, *words, cwd=tmp_path, python=bare)
    assert went_on_with(done, wanted), done.stderr
    done = processes.run_fresh(CUSTOM_CHECK, *GRADIENTS, "--python", bare, cwd=tmp_path)
    assert done.returncode == 2 and f"--python {bare} lacks one of torch" in done.stderr
    done = processes.run(CUSTOM_CHECK, *GRADIENTS, "--python", "no-such", cwd=tmp_path)
    assert done.returncode == 2 and "--python no-such is no executable" in done.stderr


def test_a_folder_named_torch_is_not_torch(bare, tmp_path):
    (tmp_path / "torch").mkdir()
    assert not interpreter.has_modules(bare, ["torch"])
    assert interpreter.has_modules(bare, ["json"])
    assert not interpreter.has_modules(tmp_path / "gone", ["json"])
    done = processes.run_fresh(
        CUSTOM_CHECK, *GRADIENTS, cwd=tmp_path, python=bare, PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 2 and "no python with torch" in done.stderr


def test_missing_modules_are_named():
    assert interpreter.missing_modules(["json", "no_such_module"]) == ["no_such_module"]
    with pytest.raises(UsageError, match="no python with no_such_module"):
        interpreter.ensure_modules(["no_such_module"], folders=[])


HELP_AND_LIST = """
import runpy, sys
sys.argv[:] = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    pass
print("LOADED", [m for m in ("torch", "numpy", "scipy", "matplotlib") if m in sys.modules])
"""


@pytest.mark.parametrize("script", [CUSTOM_CHECK, BENCHMARK_STEP], ids=lambda path: path.stem)
def test_help_answers_at_once_without_torch(script, bare, tmp_path):
    started = time.time()
    done = processes.run_fresh(script, "--help", cwd=tmp_path, python=bare)
    assert done.returncode == 0 and time.time() - started < 10
    flags = ["project", "target", "set", "seed", "device", "out", "json", "detach", "python"]
    assert all(f"--{flag} " in done.stdout for flag in flags)
    done = subprocess.run(
        [sys.executable, "-c", HELP_AND_LIST, str(script)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "LOADED []" in done.stdout


@pytest.mark.parametrize("skill", ["benchmark-step", "custom-check"])
def test_a_skill_folder_copied_alone_says_what_is_missing(skill, tmp_path):
    folder = tmp_path / "skills" / skill
    shutil.copytree(ROOT / "skills" / skill, folder)
    if skill == "custom-check":
        shutil.rmtree(folder / "scripts" / "kit")
    script = folder / "scripts" / f"{skill.replace('-', '_')}.py"
    for words in ([], ["--help"], ["status"]):
        done = processes.run_fresh(script, *words, cwd=tmp_path)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and "kit, which is missing; install the whole" in line


def test_custom_check_copied_alone_still_works(tmp_path):
    folder = tmp_path / "custom-check"
    shutil.copytree(ROOT / "skills" / "custom-check", folder)
    done = processes.run(folder / "scripts" / "custom_check.py", *GRADIENTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_nothing_is_written_into_the_bundle(tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(ROOT / "skills" / "custom-check", bundle / "skills" / "custom-check")
    shutil.copy(ROOT / "plugin.json", bundle)
    caches = list(bundle.rglob("__pycache__"))
    for path in caches:
        shutil.rmtree(path)
    before = sorted(bundle.rglob("*"))
    script = bundle / "skills" / "custom-check" / "scripts" / "custom_check.py"
    project = tmp_path / "project"
    project.mkdir()
    done = processes.run(script, *GRADIENTS, cwd=project)
    assert done.returncode == 0, done.stderr
    done = processes.run(script, *GRADIENTS, cwd=bundle)
    assert done.returncode == 2 and "lies inside the bundle" in done.stderr
    done = processes.run(script, *GRADIENTS, "--out", bundle / "out", cwd=project)
    assert done.returncode == 2 and "lies inside the bundle" in done.stderr
    assert sorted(bundle.rglob("*")) == before


def test_folders_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").touch()
    done = processes.run(CUSTOM_CHECK, *GRADIENTS, "--out", "file", cwd=tmp_path)
    assert done.returncode == 2 and "cannot write into" in done.stderr
    done = processes.run(CUSTOM_CHECK, *GRADIENTS, "--project", "gone", cwd=tmp_path)
    assert done.returncode == 2 and "--project gone is no folder" in done.stderr
    for words in (GRADIENTS, ["status"], ["wait"]):
        for place in ("no/such.json", "."):
            done = processes.run(CUSTOM_CHECK, *words, "--json", place, cwd=tmp_path)
            assert done.returncode == 2 and f"--json {place} cannot be written" in done.stderr
            assert "Traceback" not in done.stderr


def test_a_report_outlives_a_ledger_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("a file where a folder belongs")
    done = processes.run(CUSTOM_CHECK, *GRADIENTS, "--out", "here", cwd=tmp_path)
    assert done.returncode == 0 and "no line in the ledger" in done.stderr
    assert "Traceback" not in done.stderr and (tmp_path / "here" / "report.json").is_file()


def test_an_older_python_hands_over_too(bare, tmp_path):
    found = environment_with_sign(tmp_path / ".venv", bare)
    done = processes.run_fresh(CUSTOM_CHECK, *GRADIENTS, cwd=tmp_path, python=pyenv("3.8.18"))
    assert went_on_with(done, found), done.stderr


def test_a_project_whose_runs_cannot_be_made_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file where a folder belongs")
    done = processes.run(CUSTOM_CHECK, *GRADIENTS, cwd=tmp_path)
    assert done.returncode == 2 and f"cannot write into {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr
