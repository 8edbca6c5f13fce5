"""template/MANIFEST lists exactly what git tracks below template/."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import manifest
import pytest
from skills.init_bundle import ROOT

from init_files import read_template  # isort: skip


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "template" / "sub").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("x\n")
    (tmp_path / "template" / "b.py").write_text("x\n")
    (tmp_path / "template" / "sub" / "käse b.txt").write_text("x\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def test_this_repository_has_the_list_of_its_files():
    if not (ROOT / ".git").exists():
        pytest.skip("this copy is no git repository")
    assert manifest.compare(ROOT) == []


def test_every_listed_file_can_be_copied():
    assert len(read_template(ROOT / "template")) > 1


def test_write_then_check(repo, capsys):
    assert manifest.main(["--check"], repo) == 1
    assert "+ b.py (tracked, not listed)" in capsys.readouterr().out
    assert manifest.main([], repo) == 0
    assert (repo / "template" / "MANIFEST").read_text() == "b.py\nsub/käse b.txt\n"
    subprocess.run(["git", "add", "."], cwd=repo, check=True)
    assert manifest.main(["--check"], repo) == 0, "MANIFEST does not list itself"


def test_untracked_and_removed_files_show(repo, capsys):
    manifest.main([], repo)
    (repo / "template" / "new.py").write_text("x\n")
    assert manifest.main(["--check"], repo) == 0, "untracked: not part of the bundle"
    subprocess.run(["git", "add", "template/new.py"], cwd=repo, check=True)
    subprocess.run(["git", "rm", "-q", "--cached", "template/b.py"], cwd=repo, check=True)
    capsys.readouterr()
    assert manifest.main(["--check"], repo) == 1
    text = capsys.readouterr().out
    assert "+ new.py (tracked, not listed)" in text and "- b.py (listed, not tracked)" in text


def test_disorder_is_a_difference(repo):
    (repo / "template" / "MANIFEST").write_text("sub/käse b.txt\nb.py\n")
    assert manifest.main(["--check"], repo) == 1


def test_links_are_refused(repo, capsys):
    os.symlink("b.py", repo / "template" / "link.py")
    subprocess.run(["git", "add", "template/link.py"], cwd=repo, check=True)
    assert manifest.main([], repo) == 2
    assert "template/link.py: is no plain file" in capsys.readouterr().err


def test_bad_usage_and_no_repository(tmp_path, capsys):
    assert manifest.main(["--chek"], tmp_path) == 2
    assert "--check is allowed" in capsys.readouterr().err
    (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    assert manifest.main([], tmp_path) == 2
    assert "git ls-files" in capsys.readouterr().err
