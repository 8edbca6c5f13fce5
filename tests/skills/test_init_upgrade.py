"""init --upgrade: three sides of every file, and nothing of the user's is ever lost."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from skills.init_bundle import Bundle, make_bundle, tree

from init_files import version_key  # isort: skip


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path / "bundle")


@pytest.fixture
def project(bundle, tmp_path: Path) -> Path:
    bundle.run(tmp_path / "project", "--no-install")
    bundle.set_version("0.2.0")
    return tmp_path / "project"


def upgrade(bundle: Bundle, project: Path, *flags: str, code: int = 0):
    return bundle.run(project, "--upgrade", "--no-install", *flags, code=code)


def no_op(bundle: Bundle, project: Path) -> None:
    """A second upgrade writes nothing at all."""
    before = {path: path.lstat().st_mtime_ns for path in project.rglob("*")}
    report = json.loads(upgrade(bundle, project, "--json").stdout)
    assert report["files"] == 0 and report["action"] == "upgrade"
    assert before == {path: path.lstat().st_mtime_ns for path in project.rglob("*")}


def backups(project: Path) -> dict[str, str]:
    """Return what lies in the backups, without the folder of the run."""
    return {
        name.split("/", 2)[2]: text
        for name, text in tree(project).items()
        if name.startswith(".curry-train.bak/")
    }


def row(done, word: str, path: str) -> bool:
    return any(line.split(maxsplit=1) == [word, path] for line in done.stdout.splitlines())


# What the user did to a file, what the bundle did to it, what has to lie there after an upgrade
# (None: nothing), what beside it, and the word in the table.
OLD, MINE, NEW = "x = 1\n", "mine\n", "x = 2\n"
MATRIX = [
    ("keep", "keep", OLD, None, None),
    ("keep", "change", NEW, None, "updated"),
    ("keep", "remove", None, None, "removed"),
    ("edit", "keep", MINE, None, "kept"),
    ("edit", "change", MINE, NEW, "beside"),
    ("edit", "remove", MINE, None, "left"),
    ("same edit", "change", NEW, None, None),
    ("delete", "keep", None, None, "deleted"),
    ("delete", "change", None, None, "deleted"),
    ("delete", "remove", None, None, None),
]


@pytest.mark.parametrize(("user", "maker", "there", "beside", "word"), MATRIX)
def test_three_way(bundle, project, user, maker, there, beside, word):
    path = "pkg/deep/code.py"
    file = project / path
    if user == "delete":
        file.unlink()
    elif user != "keep":
        file.write_text(MINE if user == "edit" else NEW)
    if maker == "change":
        bundle.write(path, NEW)
    elif maker == "remove":
        bundle.remove(path)
    done = upgrade(bundle, project)
    assert (file.read_text() if file.exists() else None) == there
    new = file.with_name("code.py.new")
    assert (new.read_text() if new.exists() else None) == beside
    for other in ("updated", "removed", "kept", "beside", "left", "deleted", "added", "renamed"):
        assert row(done, other, path) == (other == word), done.stdout
    assert backups(project) == ({path: OLD} if word == "removed" else {})
    assert (project / "pkg" / "deep").exists() or word == "removed" or user == "delete"
    no_op(bundle, project)


def test_new_files_are_added_with_their_exec_bits(bundle, project):
    bundle.write("bin/fresh.sh", "#!/bin/sh\n", executable=True)
    done = upgrade(bundle, project)
    assert row(done, "added", "bin/fresh.sh")
    assert os.access(project / "bin" / "fresh.sh", os.X_OK)
    no_op(bundle, project)


def test_a_new_file_never_replaces_one_of_the_users_own(bundle, project):
    (project / "fresh.py").write_text(MINE)
    bundle.write("fresh.py", NEW)
    done = upgrade(bundle, project)
    assert row(done, "beside", "fresh.py")
    assert (project / "fresh.py").read_text() == MINE
    assert (project / "fresh.py.new").read_text() == NEW
    no_op(bundle, project)
    # From now on it is a file of the bundle that the user changed.
    bundle.write("fresh.py", "x = 3\n")
    bundle.set_version("0.3.0")
    upgrade(bundle, project)
    assert (project / "fresh.py").read_text() == MINE
    assert (project / "fresh.py.new").read_text() == "x = 3\n"
    assert backups(project) == {"fresh.py.new": NEW}


def test_an_edited_file_beside_is_moved_and_not_overwritten(bundle, project):
    (project / "train.py").write_text(MINE)
    (project / "train.py.new").write_text("notes of mine\n")
    bundle.write("train.py", NEW)
    upgrade(bundle, project)
    assert (project / "train.py.new").read_text() == NEW
    assert backups(project) == {"train.py.new": "notes of mine\n"}


def test_taking_the_file_beside_makes_it_untouched_again(bundle, project):
    (project / "train.py").write_text(MINE)
    bundle.write("train.py", NEW)
    upgrade(bundle, project)
    os.replace(project / "train.py.new", project / "train.py")
    bundle.write("train.py", "x = 3\n")
    bundle.set_version("0.3.0")
    assert row(upgrade(bundle, project), "updated", "train.py")
    assert (project / "train.py").read_text() == "x = 3\n"


def test_a_file_beside_that_was_thrown_away_does_not_come_back(bundle, project):
    (project / "train.py").write_text(MINE)
    bundle.write("train.py", NEW)
    upgrade(bundle, project)
    (project / "train.py.new").unlink()
    no_op(bundle, project)


@pytest.mark.parametrize("edited", [False, True])
def test_a_renamed_file(bundle, project, edited):
    text = (project / "pkg" / "deep" / "code.py").read_text()
    if edited:
        (project / "pkg" / "deep" / "code.py").write_text(MINE)
    bundle.remove("pkg/deep/code.py")
    bundle.write("pkg/moved.py", text)
    done = upgrade(bundle, project)
    assert (project / "pkg" / "moved.py").read_text() == text
    if edited:
        assert (project / "pkg" / "deep" / "code.py").read_text() == MINE
        assert "pkg/deep/code.py (the bundle has it as pkg/moved.py)" in done.stdout
    else:
        assert not (project / "pkg" / "deep").exists()
        assert row(done, "renamed", "pkg/deep/code.py -> pkg/moved.py")
        assert backups(project) == {"pkg/deep/code.py": text}
    no_op(bundle, project)


def test_a_file_that_becomes_a_folder_and_back(bundle, project):
    bundle.remove("tool.sh")
    bundle.write("tool.sh/inner.py", NEW)
    upgrade(bundle, project)
    assert (project / "tool.sh" / "inner.py").read_text() == NEW
    no_op(bundle, project)
    bundle.remove("tool.sh/inner.py")
    (bundle.template / "tool.sh").rmdir()
    bundle.write("tool.sh", OLD)
    bundle.set_version("0.3.0")
    upgrade(bundle, project)
    assert (project / "tool.sh").read_text() == OLD
    no_op(bundle, project)


def test_a_folder_behind_a_link_is_not_written_through(bundle, project, tmp_path):
    os.rename(project / "pkg", tmp_path / "shared")
    (project / "pkg").symlink_to(tmp_path / "shared")
    before = tree(tmp_path / "shared")
    bundle.write("pkg/deep/code.py", NEW)
    done = upgrade(bundle, project, code=2)
    assert "symbolic link" in done.stderr and tree(tmp_path / "shared") == before
    assert json.loads((project / ".curry-train.json").read_text())["version"] == "0.1.0"


def test_a_file_that_the_bundle_dropped_is_not_taken_from_behind_a_link(bundle, project, tmp_path):
    os.rename(project / "pkg", tmp_path / "shared")
    (project / "pkg").symlink_to(tmp_path / "shared")
    before = tree(tmp_path / "shared")
    bundle.remove("pkg/deep/code.py")
    assert row(upgrade(bundle, project), "left", "pkg/deep/code.py")
    assert tree(tmp_path / "shared") == before and not backups(project)
    no_op(bundle, project)


def test_the_name_lives_on_and_a_renamed_project_counts_as_untouched(bundle, tmp_path):
    project = tmp_path / "named"
    bundle.run(project, "--no-install", "--name", "mine")
    bundle.set_version("0.2.0")
    no_change = upgrade(bundle, project)
    assert "1 updated" not in no_change.stdout and "kept" not in no_change.stdout
    text = bundle.files()["pyproject.toml"] + "# newer\n"
    bundle.write("pyproject.toml", text)
    done = upgrade(bundle, project)
    assert row(done, "updated", "pyproject.toml")
    assert (project / "pyproject.toml").read_text() == text.replace('"my-project"', '"mine"')
    no_op(bundle, project)
    upgrade(bundle, project, "--name", "other")
    assert 'name = "other"\nversion' in (project / "pyproject.toml").read_text()


def test_the_stamp_says_what_the_bundle_has_now(bundle, project):
    (project / "train.py").write_text(MINE)
    bundle.write("train.py", NEW)
    bundle.write("fresh.py", NEW)
    upgrade(bundle, project)
    stamp = json.loads((project / ".curry-train.json").read_text())
    assert stamp["version"] == "0.2.0"
    assert stamp["files"] == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in bundle.files().items()
    }


def test_an_older_bundle_is_refused_unless_forced(bundle, project):
    upgrade(bundle, project)
    (project / "train.py").write_text(MINE)
    bundle.set_version("0.1.9")
    bundle.write("train.py", OLD)
    done = upgrade(bundle, project, code=2)
    assert "0.2.0" in done.stderr and "0.1.9" in done.stderr and "--force" in done.stderr
    upgrade(bundle, project, "--force")
    assert (project / "train.py").read_text() == MINE, "force goes back, and takes no edits"
    assert (project / "train.py.new").read_text() == OLD


def test_versions_are_ordered_by_their_numbers():
    ordered = ["0.9.0", "0.10.0rc1", "0.10.0", "1.0", "1.0.1", "2"]
    assert sorted(ordered, key=version_key) == ordered


def test_everything_at_once_loses_no_byte_of_the_user(bundle, project):
    mine = {
        "train.py": "edited\n",
        "README.md": "edited too\n",
        "own.py": "own\n",
        "fresh.py": "own, and new in the bundle\n",
        "README.md.new": "own notes\n",
    }
    for name, text in mine.items():
        (project / name).write_text(text)
    bundle.write("train.py", NEW)
    bundle.write("README.md", "new readme\n")
    bundle.write("fresh.py", NEW)
    bundle.remove("tool.sh")
    upgrade(bundle, project)
    everything = list(tree(project).values())
    for text in mine.values():
        assert text in everything
    no_op(bundle, project)


def test_no_environment_is_made_by_an_upgrade(bundle, project):
    bundle.write("requirements.lock", "# other\n")
    bundle.run(project, "--upgrade")
    assert not (project / ".venv").exists()
    (project / ".venv").mkdir()
    (project / ".venv" / "own").write_text("x")
    bundle.run(project, "--upgrade")
    assert os.listdir(project / ".venv") == ["own"]
