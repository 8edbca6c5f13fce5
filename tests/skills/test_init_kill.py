"""A killed init leaves nothing or everything, and the next call finishes what it began.

Each writing call to the operating system is a moment to die at: one child process is killed at
the first, one at the second, and so on until one comes through. Random moments of the whole
command are tried as well.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from skills.init_bundle import Bundle, make_bundle, tree

import init_cli  # isort: skip
import init_copy
import init_transaction
from init_environment import Python
from init_files import STAMP, File, read_template
from init_session import Session

WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}
FULL = "CURRY_TRAIN_FULL" in os.environ
LITTER = ("*curry-train.init-*", "*.partial", "*.tmp")


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch) -> Bundle:
    bundle = make_bundle(tmp_path / "bundle")
    monkeypatch.setattr(init_copy, "BUNDLE", bundle.root)
    return bundle


def killed_at(moment: int, action: Callable[[], object]) -> bool:
    """Run the action in a child that dies at its moment-th write; return whether it died."""
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, arguments: tuple) -> None:
            nonlocal count
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
            if event in WRITES or writes:
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.addaudithook(watch)
            action()
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def moments(action_at: Callable[[int], bool]) -> int:
    """Kill at every moment in turn; return how many there were."""
    moment = 1
    while action_at(moment):
        moment += 1
        assert moment < 1000
    return moment - 1


def session(project: Path, *flags: str, version: str = "0.1.0") -> Session:
    args = init_cli.parse([str(project), "--no-install", *flags])
    python = Python(sys.executable, (3, 11, 0), Path("bin"), ())
    return Session(args, project, version, [], python, lambda text: None)


def copy(project: Path, *flags: str, version: str = "0.1.0") -> None:
    with init_copy.copied(session(project, *flags, version=version)):
        pass


def litter(folder: Path) -> list[Path]:
    return [path for pattern in LITTER for path in folder.rglob(pattern)]


def test_a_new_project_is_there_whole_or_not_at_all(bundle, tmp_path):
    parent = tmp_path / "parent"
    expected = {}

    def at(moment: int) -> bool:
        shutil.rmtree(parent, ignore_errors=True)
        died = killed_at(moment, lambda: copy(parent / "demo"))
        if (parent / "demo").exists():
            files = tree(parent / "demo")
            assert files.pop(STAMP)
            assert files == bundle.files()
        copy(parent / "demo")
        assert expected.setdefault("tree", tree(parent / "demo")) == tree(parent / "demo")
        assert os.listdir(parent) == ["demo"], "the next call clears what the killed one left"
        return died

    assert moments(at) > 2 * len(bundle.files())


def test_files_of_a_user_survive_a_kill_while_init_copies_among_them(bundle, tmp_path):
    project = tmp_path / "mine"
    mine = {"train.py": "mine\n", "pkg/notes.txt": "notes\n", "other.txt": "other\n"}

    def at(moment: int) -> bool:
        shutil.rmtree(project, ignore_errors=True)
        for name, text in mine.items():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_text(text)
        died = killed_at(moment, lambda: copy(project, "--force"))
        decided = (project / ".curry-train.partial" / "plan.json").exists()
        if died and not decided and not (project / STAMP).exists():
            files = tree(project)
            outside = {n: t for n, t in files.items() if not n.startswith(".curry-train.partial")}
            assert outside == mine, "killed before the decision: nothing has changed"
        copy(project, "--force")
        files = tree(project)
        for name, text in bundle.files().items():
            assert files[name] == text
        assert files["pkg/notes.txt"] == "notes\n" and files["other.txt"] == "other\n"
        backups = [n for n, t in files.items() if n.endswith("/train.py") and t == "mine\n"]
        assert len(backups) == 1 and backups[0].startswith(".curry-train.bak/")
        assert not litter(project)
        return died

    assert moments(at) > 3 * len(bundle.files())


def test_an_upgrade_killed_anywhere_comes_to_the_same_end(bundle, tmp_path):
    old = tmp_path / "old"
    copy(old)
    (old / "pkg" / "deep" / "code.py").write_text("my edit\n")
    (old / "README.md").unlink()
    bundle.write("pkg/deep/code.py", "x = 2\n")
    bundle.write("train.py", "print('newer')\n")
    bundle.write("fresh/new.py", "new\n")
    bundle.remove(".gitignore")
    project = tmp_path / "project"
    expected = {}

    def at(moment: int) -> bool:
        shutil.rmtree(project, ignore_errors=True)
        shutil.copytree(old, project)
        died = killed_at(moment, lambda: copy(project, "--upgrade", version="0.2.0"))
        assert (project / "pkg" / "deep" / "code.py").read_text() == "my edit\n"
        copy(project, "--upgrade", version="0.2.0")
        files = tree(project)
        backup = {n: t for n, t in files.items() if n.startswith(".curry-train.bak/")}
        assert list(backup.values()) == ["/runs/\n"]
        files = {n: t for n, t in files.items() if n not in backup}
        assert expected.setdefault("files", files) == files
        assert not litter(project)
        return died

    assert moments(at) > 20
    assert expected["files"]["pkg/deep/code.py.new"] == "x = 2\n"
    assert "README.md" not in expected["files"]


def test_what_a_user_writes_between_a_kill_and_the_next_call_is_kept(bundle, tmp_path):
    project = tmp_path / "project"
    copy(project)
    bundle.write("train.py", "newer\n")

    def upgrade() -> None:
        copy(project, "--upgrade", version="0.2.0")

    moment = 1
    while not (project / ".curry-train.partial" / "plan.json").exists():
        assert killed_at(moment, upgrade)
        moment += 1
    (project / "train.py").write_text("written in between\n")
    upgrade()
    assert (project / "train.py").read_text() == "newer\n"
    (backup,) = (project / ".curry-train.bak").iterdir()
    assert tree(backup) == {"train.py": "written in between\n"}


def test_any_call_finishes_a_copy_that_was_killed(bundle, tmp_path, monkeypatch):
    project = tmp_path / "mine"
    project.mkdir()
    (project / "own").write_text("own")
    monkeypatch.setattr(init_transaction, "_carry_out", lambda _: os._exit(9))
    child = os.fork()
    if child == 0:
        copy(project)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (project / STAMP).exists()
    done = bundle.run(project, "--upgrade", "--no-install")
    assert "brought a change of files that had been cut off to its end" in done.stdout
    assert tree(project).items() >= bundle.files().items() and (project / "own").exists()


def test_a_plan_that_leads_outside_is_refused(bundle, tmp_path):
    project = tmp_path / "project"
    copy(project)
    (tmp_path / "victim").write_text("safe")
    partial = project / ".curry-train.partial"
    (partial / "new").mkdir(parents=True)
    step = '{"path": "../victim", "before": null, "after": "0"}'
    (partial / "plan.json").write_text(f'{{"backup": ".curry-train.bak/x", "steps": [{step}]}}')
    done = bundle.run(project, "--no-install", code=2)
    assert "../victim" in done.stderr
    assert (tmp_path / "victim").read_text() == "safe"


def test_a_sweep_spares_the_staging_folder_of_a_living_init(tmp_path):
    staging, lock = init_transaction._staging_folder(tmp_path)
    dead = tmp_path / f"{init_transaction.STAGING}dead"
    dead.mkdir()
    init_transaction._sweep(tmp_path)
    assert staging.exists() and not dead.exists()
    os.close(lock.fd)
    init_transaction._sweep(tmp_path)
    assert not staging.exists()


def test_two_inits_at_once_make_one_whole_project(bundle, tmp_path):
    target = tmp_path / "parent" / "demo"
    command = bundle.command(target, "--no-install")
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in started:
        out, err = process.communicate()
        assert process.returncode == 0, out + err
    assert tree(target).items() >= bundle.files().items()
    assert os.listdir(target.parent) == ["demo"] and not litter(target)


def test_one_folder_has_one_init_at_a_time(bundle, tmp_path):
    project = tmp_path / "demo"
    copy(project)
    held = init_transaction.lock_folder(project, lambda text: None)
    command = bundle.command(project, "--no-install")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert "waiting" in process.stdout.readline()
        assert process.poll() is None
        os.close(held.fd)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("seed", range(20 if FULL else 5))
@pytest.mark.parametrize("kind", ["new", "existing"])
def test_sigkill_at_random_moments(bundle, tmp_path, kind, seed):
    for number in range(60):
        bundle.write(f"many/{number}.txt", f"{number}\n" * 100) if number == 59 else (
            bundle.template / "many"
        ).mkdir(exist_ok=True) or (bundle.template / "many" / f"{number}.txt").write_text(
            f"{number}\n" * 100
        )
    target = tmp_path / "parent" / "demo"
    if kind == "existing":
        target.mkdir(parents=True)
        (target / "own.txt").write_text("own\n")
    process = subprocess.Popen(
        bundle.command(target, "--no-install"), stdout=subprocess.DEVNULL, start_new_session=True
    )
    time.sleep(random.Random(seed).uniform(0.05, 0.6))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if kind == "new" and target.exists():
        assert tree(target).items() >= bundle.files().items()
    bundle.run(target, "--no-install")
    files = tree(target)
    assert files.items() >= bundle.files().items()
    assert files.get("own.txt") == ("own\n" if kind == "existing" else None)
    assert os.listdir(target.parent) == ["demo"] and not litter(target)


def test_template_and_stamp_agree_after_all_this(bundle, tmp_path):
    copy(tmp_path / "demo")
    files = read_template(bundle.template)
    assert isinstance(files["train.py"], File)
    assert {name: file.data.decode() for name, file in files.items()} == bundle.files()
