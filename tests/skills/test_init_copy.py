"""init copies: what arrives, where it is refused, and that nothing of the user's is lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from skills.init_bundle import ROOT, Bundle, make_bundle, mounted, pyenv, tree, unmount

import init  # isort: skip
import init_cli
import init_copy
import init_session
from init_files import InitError, bundle_version, read_template

KEYS = "project version action files venv run loss_first loss_last val_loss val_bpb tokens_per_s"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path / "bundle")


def stamp_of(project: Path) -> dict:
    return json.loads((project / ".curry-train.json").read_text())


def sums(project: Path, names) -> dict[str, str]:
    return {name: hashlib.sha256((project / name).read_bytes()).hexdigest() for name in names}


def test_a_new_project_holds_the_listed_files_and_a_true_stamp(bundle, tmp_path):
    (bundle.template / "unlisted.txt").write_text("stays behind")
    project = tmp_path / "new" / "demo"
    bundle.run(project, "--no-install")
    files = tree(project)
    stamp = files.pop(".curry-train.json")
    assert files == bundle.files()
    assert json.loads(stamp)["version"] == "0.1.0"
    assert json.loads(stamp)["files"] == sums(project, bundle.files())
    assert (project / ".git").is_dir()
    assert os.listdir(project.parent) == ["demo"]


def test_exec_bits_arrive_and_everything_is_writable_from_a_read_only_cache(bundle, tmp_path):
    for path in bundle.root.rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    before = {path: path.stat().st_mtime_ns for path in bundle.root.rglob("*")}
    bundle.run(tmp_path / "demo", "--no-install")
    assert before == {path: path.stat().st_mtime_ns for path in bundle.root.rglob("*")}
    for name in bundle.files():
        mode = (tmp_path / "demo" / name).stat().st_mode
        assert mode & stat.S_IWUSR, name
        assert bool(mode & stat.S_IXUSR) == (name == "tool.sh"), name
    assert (tmp_path / "demo" / "pkg").stat().st_mode & 0o700 == 0o700


def test_a_strict_umask_is_respected(bundle, tmp_path):
    bundle.run(tmp_path / "demo", "--no-install", umask=0o077)
    for path in (tmp_path / "demo", tmp_path / "demo" / "tool.sh", tmp_path / "demo" / "pkg"):
        assert path.stat().st_mode & 0o777 == 0o700, path


def test_a_bundle_on_a_read_only_mount_works(bundle, tmp_path):
    point = mounted(tmp_path, "--bind", str(bundle.root))
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(point)], check=True)
        Bundle(point).run(tmp_path / "demo", "--no-install")
    finally:
        unmount(point)
    assert (tmp_path / "demo" / "tool.sh").exists()


@pytest.mark.parametrize("name", ["with space", "käse ünd 漢字", "-dash", "it's $HOME `x`"])
def test_odd_names_of_folders_work(bundle, tmp_path, name):
    bundle.run("--no-install", "--", name, cwd=tmp_path)
    assert (tmp_path / name / "train.py").exists()


def test_a_c_locale_does_not_end_the_run(bundle, tmp_path):
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    bundle.run(tmp_path / "käse", "--no-install", env=env)
    assert (tmp_path / "käse" / "train.py").exists()


def test_the_current_folder_keeps_its_identity(bundle, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    before = here.stat().st_ino
    bundle.run(".", "--no-install", cwd=here)
    assert here.stat().st_ino == before
    assert set(tree(here)) == {*bundle.files(), ".curry-train.json"}
    assert not (here / ".curry-train.partial").exists()


def test_an_empty_folder_is_filled_and_keeps_its_mode(bundle, tmp_path):
    (tmp_path / "demo").mkdir(mode=0o750)
    done = bundle.run(tmp_path / "demo", "--no-install", "--json")
    assert json.loads(done.stdout)["action"] == "create"
    assert (tmp_path / "demo").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("parent", ["closed", "sticky"])
def test_an_empty_folder_is_filled_where_its_parent_lets_no_one_rename(
    bundle, tmp_path, monkeypatch, parent
):
    outer, folder = tmp_path / "outer", tmp_path / "outer" / "demo"
    folder.mkdir(parents=True)
    if parent == "closed":
        can = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != outer and can(path, mode))
    else:
        outer.chmod(0o1777)
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setattr(init_copy, "BUNDLE", bundle.root)
    watched = outer.stat().st_mtime_ns
    assert init_cli.main([str(folder), "--no-install"]) == 0
    assert tree(folder).items() >= bundle.files().items()
    assert outer.stat().st_mtime_ns == watched, "nothing was made beside the folder"


@pytest.mark.parametrize("flag", ["-I", "-P"])
def test_an_isolated_python_finds_the_scripts(bundle, tmp_path, flag):
    command = [sys.executable, flag, bundle.script, tmp_path / "demo", "--no-install"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_printed_command_names_a_python_that_can_run_it(bundle, tmp_path):
    (tmp_path / "bin").mkdir()
    wrapper(tmp_path / "bin" / "python3", "exit 9")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = bundle.run(tmp_path / "demo", "--no-install", env={**os.environ, "PATH": path})
    assert f"to make it: {sys.executable} {bundle.script}" in done.stdout
    (tmp_path / "bin" / "python3").unlink()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    done = bundle.run(tmp_path / "more", "--no-install", env={**os.environ, "PATH": path})
    assert f"to make it: python3 {bundle.script}" in done.stdout


def test_what_no_later_call_could_finish_is_refused_before_it_begins(bundle, tmp_path):
    project = tmp_path / "demo"
    bundle.run(project, "--no-install")
    (project / "README.md").write_text("mine\n")
    (project / ".curry-train.bak").write_text("a file of that name\n")
    before = tree(project)
    done = bundle.run(project, "--no-install", "--force", code=2)
    one_line(done, ".curry-train.bak", "nothing was changed")
    assert tree(project) == before and not (project / ".curry-train.partial").exists()


def test_a_folder_on_another_disk_is_refused_before_anything_changes(bundle, tmp_path):
    point = mounted(tmp_path, "-t", "tmpfs", "tmpfs")
    try:
        (point / "pkg").mkdir()
        project = tmp_path / "demo"
        (project / "pkg").mkdir(parents=True)
        subprocess.run(["mount", "--bind", point / "pkg", project / "pkg"], check=True)
        try:
            one_line(bundle.run(project, "--no-install", code=2), "pkg", "another disk")
            assert os.listdir(project) == ["pkg"] and not os.listdir(project / "pkg")
        finally:
            unmount(project / "pkg")
    finally:
        unmount(point)


def test_an_existing_repository_gets_the_files_beside_its_own(bundle, tmp_path):
    repo = tmp_path / "repo"
    (repo / "pkg").mkdir(parents=True)
    (repo / "pkg" / "mine.py").write_text("mine\n")
    (repo / "README.md").write_text("read me\n")  # equal to the template's: no collision
    subprocess.run(["git", "init", "-q", repo], check=True)
    done = bundle.run(repo, "--no-install", "--json")
    report = json.loads(done.stdout)
    assert (report["action"], report["files"]) == ("add", len(bundle.files()) - 1)
    assert (repo / "pkg" / "mine.py").read_text() == "mine\n"
    assert stamp_of(repo)["files"] == sums(repo, bundle.files())


@pytest.mark.parametrize("kind", ["folder", "worktree file"])
def test_no_repository_is_nested(bundle, tmp_path, kind):
    outer = tmp_path / "outer"
    outer.mkdir()
    if kind == "folder":
        subprocess.run(["git", "init", "-q", outer], check=True)
    else:
        (outer / ".git").write_text("gitdir: /elsewhere\n")
    bundle.run(outer / "a" / "demo", "--no-install")
    assert not (outer / "a" / "demo" / ".git").exists()


def test_the_repository_is_made_in_the_project_whatever_git_variables_say(bundle, tmp_path):
    env = {**os.environ, "GIT_DIR": str(tmp_path / "elsewhere.git")}
    bundle.run(tmp_path / "demo", "--no-install", env=env)
    assert (tmp_path / "demo" / ".git").is_dir()
    assert not (tmp_path / "elsewhere.git").exists()


def test_without_git_the_project_is_made_all_the_same(bundle, tmp_path):
    (tmp_path / "empty").mkdir()
    bundle.run(tmp_path / "demo", "--no-install", env={"PATH": str(tmp_path / "empty")})
    assert not (tmp_path / "demo" / ".git").exists()


def occupied(project: Path) -> dict[str, str]:
    """Put files of a user where the template's go."""
    (project / "pkg").mkdir(parents=True)
    for name in ("train.py", "pkg/__init__.py", "notes.txt"):
        (project / name).write_text(f"mine: {name}\n")
    return tree(project)


def test_collisions_are_all_listed_and_nothing_changes(bundle, tmp_path):
    project = tmp_path / "mine"
    before = occupied(project)
    done = bundle.run(project, "--no-install", code=2)
    assert "train.py" in done.stderr and "pkg/__init__.py" in done.stderr
    assert "notes.txt" not in done.stderr and "--force" in done.stderr
    assert tree(project) == before
    assert sorted(os.listdir(project)) == ["notes.txt", "pkg", "train.py"]


def test_force_moves_what_differs_to_the_backup(bundle, tmp_path):
    project = tmp_path / "mine"
    before = occupied(project)
    done = bundle.run(project, "--no-install", "--force")
    (backup,) = (project / ".curry-train.bak").iterdir()
    assert str(backup) in done.stdout
    assert tree(backup) == {n: before[n] for n in ("train.py", "pkg/__init__.py")}
    assert (project / "notes.txt").read_text() == before["notes.txt"]
    for name, text in bundle.files().items():
        assert (project / name).read_text() == text
    assert not (project / ".curry-train.partial").exists()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("obstacle", ["file for folder", "link to folder", "folder for file"])
def test_other_kinds_of_obstacles(bundle, tmp_path, obstacle, force):
    project, outside = tmp_path / "mine", tmp_path / "outside"
    project.mkdir()
    shutil.copytree(bundle.template / "pkg", outside)  # equal files, seen through the link
    if obstacle == "file for folder":
        (project / "pkg").write_text("a file\n")
    elif obstacle == "link to folder":
        (project / "pkg").symlink_to(outside)
    else:
        (project / "train.py").mkdir()
        (project / "train.py" / "inside").write_text("kept\n")
    before = tree(outside)
    done = bundle.run(project, "--no-install", *(["--force"] if force else []), code=2 - 2 * force)
    assert tree(outside) == before
    if not force:
        assert "in the way" in done.stderr
        return
    assert tree(project).items() >= bundle.files().items()
    assert not (project / "pkg").is_symlink()
    (backup,) = (project / ".curry-train.bak").iterdir()
    assert os.listdir(backup) == ["train.py" if obstacle == "folder for file" else "pkg"]


def test_a_link_as_dir_leads_to_the_folder(bundle, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "own.txt").write_text("own\n")
    (tmp_path / "link").symlink_to("real")
    bundle.run(tmp_path / "link", "--no-install")
    assert (tmp_path / "real" / "train.py").exists()


def test_a_second_call_finds_everything_there(bundle, tmp_path):
    bundle.run(tmp_path / "demo", "--no-install")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*")}
    done = bundle.run(tmp_path / "demo", "--no-install", "--json")
    assert json.loads(done.stdout)["files"] == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*")}


def test_a_project_of_another_version_is_told_of_upgrade(bundle, tmp_path):
    bundle.run(tmp_path / "demo", "--no-install")
    bundle.set_version("0.2.0")
    done = bundle.run(tmp_path / "demo", "--no-install", code=2)
    assert "--upgrade" in done.stderr and "0.1.0" in done.stderr and "0.2.0" in done.stderr


def test_the_name_goes_to_the_project_table_only(bundle, tmp_path):
    bundle.run(tmp_path / "demo", "--no-install", "--name", "My.model_2")
    text = (tmp_path / "demo" / "pyproject.toml").read_text()
    expected = bundle.files()["pyproject.toml"].replace('"my-project"', '"My.model_2"')
    assert text == expected and 'name = "other"' in text
    assert stamp_of(tmp_path / "demo")["name"] == "My.model_2"
    assert stamp_of(tmp_path / "demo")["files"] == sums(tmp_path / "demo", bundle.files())
    # The same call without the name keeps it: nothing collides.
    bundle.run(tmp_path / "demo", "--no-install")


@pytest.mark.parametrize("name", ["", "-x", "a b", 'a"', "é", "x\n"])
def test_names_that_pyproject_cannot_hold_are_refused(bundle, tmp_path, name):
    done = bundle.run(tmp_path / "demo", "--no-install", f"--name={name}", code=2)
    assert "--name" in done.stderr and not (tmp_path / "demo").exists()


def test_json_is_one_object_with_exactly_the_promised_keys(bundle, tmp_path):
    done = bundle.run(tmp_path / "demo", "--no-install", "--json")
    report = json.loads(done.stdout)
    assert list(report) == KEYS.split()
    assert done.stdout.count("\n") == 1
    assert report["project"] == str(tmp_path / "demo")
    assert (report["version"], report["action"]) == ("0.1.0", "create")
    assert report["files"] == len(bundle.files())
    assert report["venv"] is None and report["run"] is None
    assert "made" in done.stderr


def one_line(done, *parts: str) -> None:
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("init.py: "), done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr
    assert not done.stdout, done.stdout


def test_a_place_inside_the_bundle_is_refused(bundle, tmp_path):
    one_line(bundle.run(bundle.root / "demo", "--no-install", code=2), "in the bundle")
    one_line(bundle.run(".", "--no-install", cwd=bundle.template, code=2), "in the bundle")
    (tmp_path / "way in").symlink_to(bundle.root)
    one_line(bundle.run(tmp_path / "way in" / "x", "--no-install", code=2), "in the bundle")


def test_a_file_as_dir_is_refused(bundle, tmp_path):
    (tmp_path / "file").write_text("x")
    one_line(bundle.run(tmp_path / "file", "--no-install", code=2), "is a file")
    one_line(bundle.run(tmp_path / "file" / "demo", "--no-install", code=2), "is a file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    bundle.run(tmp_path / "dangling", "--no-install")


@pytest.mark.parametrize("name", ["", "  ", "a:b", "a\nb", "a\x1bb"])
def test_names_that_no_environment_can_have_are_refused(bundle, tmp_path, name):
    one_line(bundle.run(name, "--no-install", cwd=tmp_path, code=2), "DIR: ")
    assert os.listdir(tmp_path) == ["bundle"]


def test_a_read_only_place_is_refused(bundle, tmp_path):
    point = mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs")
    try:
        one_line(bundle.run(point / "demo", "--no-install", code=2), "no write permission")
        one_line(bundle.run(".", "--no-install", cwd=point, code=2), "no write permission")
    finally:
        unmount(point)


def test_a_folder_without_write_bits_is_refused(bundle, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; the read-only mount covers it")
    (tmp_path / "closed").mkdir(mode=0o500)
    one_line(bundle.run(tmp_path / "closed" / "x", "--no-install", code=2), "no write permission")


def test_a_full_disk_is_refused_with_the_need_and_nothing_is_left(bundle, tmp_path):
    bundle.write("big.bin", "x" * 300_000)
    point = mounted(tmp_path, "-t", "tmpfs", "-o", "size=128k", "tmpfs")
    try:
        done = bundle.run(point / "demo", "--no-install", code=2)
        one_line(done, "needs 328 kB", "131 kB are free")
        assert os.listdir(point) == []
    finally:
        unmount(point)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(bundle, tmp_path, monkeypatch):
    bundle.write("big.bin", "x" * 300_000)
    point = mounted(tmp_path, "-t", "tmpfs", "-o", "size=128k", "tmpfs")
    own = point / "own"
    own.mkdir()
    (own / "note").write_text("mine")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9e12, 0, 9e12))
    monkeypatch.setattr(init_session, "BUNDLE", bundle.root)
    monkeypatch.setattr(init_copy, "BUNDLE", bundle.root)
    try:
        for target in (point / "demo", own):
            text = captured_error([str(target), "--no-install"])
            assert "the disk is full" in text
        assert os.listdir(point) == ["own"] and os.listdir(own) == ["note"]
    finally:
        unmount(point)


def captured_error(arguments: list[str]) -> str:
    """Run init in a child process that has this process's patches; return its stderr."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            sys.stderr = os.fdopen(write, "w")
            sys.stdout = sys.stderr
            code = init_cli.main(arguments)
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(write)
    with open(read) as stream:
        text = stream.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2, text
    return text


def test_the_need_of_the_environment_is_named_before_anything_is_made(
    bundle, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9e9, 9e9, 5e8))
    monkeypatch.setattr(init_session, "BUNDLE", bundle.root)
    monkeypatch.setattr(init_copy, "BUNDLE", bundle.root)
    text = captured_error([str(tmp_path / "demo")])
    assert "needs 1.5 GB" in text or "needs 5.5 GB" in text
    assert "500.0 MB are free" in text and "--no-install" in text
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("version", ["2.7.18", "3.6.15", "3.8.18", "3.10.13"])
def test_an_old_python_gets_one_line(bundle, tmp_path, version):
    done = bundle.run(tmp_path / "demo", python=pyenv(version), code=2)
    one_line(done, f"found Python {version}", "3.11, 3.12 or 3.13")
    done = bundle.run(tmp_path / "demo", "--python", pyenv(version), code=2)
    one_line(done, f"is Python {version}")
    assert not (tmp_path / "demo").exists()


def test_the_head_of_init_is_plain_enough_for_old_parsers():
    import ast

    text = Path(init.__file__).read_text()
    ast.parse(text, feature_version=(3, 4))
    assert 'f"' not in text and "from __future__" not in text


@pytest.mark.parametrize(
    ("platform", "release", "version", "word"),
    [
        ("win32", "", (3, 11, 0), "WSL2"),
        ("cygwin", "3.4", (3, 12, 0), "WSL2"),
        ("linux", "4.4.0-19041-Microsoft", (3, 11, 0), "WSL1"),
        ("linux", "6.1.0", (3, 10, 13), "3.10.13"),
        ("darwin", "24.0", (2, 7, 18), "2.7.18"),
        ("linux", "5.15.90.1-microsoft-standard-WSL2", (3, 11, 0), None),
        ("darwin", "24.0", (3, 13, 1), None),
    ],
)
def test_machines_that_are_refused(platform, release, version, word):
    line = init.unsupported(platform, release, version, "/nowhere")
    assert line is None if word is None else word in line


def wrapper(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_python_without_ensurepip_names_the_package(bundle, tmp_path):
    hide = "import sys\nsys.modules['ensurepip'] = None\n"
    python = wrapper(tmp_path / "python", f'shift; exec "{sys.executable}" -c "{hide}$1"')
    done = bundle.run(tmp_path / "demo", "--python", python, code=2)
    package = f"python3.{sys.version_info[1]}-venv"
    one_line(done, "no ensurepip module", package, "--no-install")
    assert not (tmp_path / "demo").exists()
    bundle.run(tmp_path / "demo", "--python", python, "--no-install")


@pytest.mark.parametrize("body", ["exit 3", "echo hello", "echo '{}'", "echo '[1]'"])
def test_a_python_that_is_none_is_refused(bundle, tmp_path, body):
    python = wrapper(tmp_path / "python", body)
    one_line(bundle.run(tmp_path / "x", "--python", python, code=2), "does not run as Python")
    one_line(
        bundle.run(tmp_path / "x", "--python", "no-such", code=2), "found no program 'no-such'"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x", "--no-such"],
        ["x", "--install", "--no-install"],
        ["x", "--install", "--name", "n"],
        ["x", "--no-install", "--pip-args"],
    ],
)
def test_bad_usage_ends_with_code_2(bundle, tmp_path, arguments):
    bundle.run(*arguments, cwd=tmp_path, code=2)
    assert os.listdir(tmp_path) == ["bundle"]


def test_pip_args_must_be_quoted_as_a_shell_would(bundle, tmp_path):
    one_line(bundle.run(tmp_path / "x", "--pip-args", "it's", code=2), "--pip-args")


def test_install_and_upgrade_want_a_project(bundle, tmp_path):
    (tmp_path / "plain").mkdir()
    one_line(bundle.run(tmp_path / "plain", "--install", code=2), "holds no .curry-train.json")
    one_line(bundle.run(tmp_path / "none", "--upgrade", code=2), "holds no .curry-train.json")


@pytest.mark.parametrize(
    "stamp",
    ["", "[]", "{}", '{"version": "1", "files": []}', '{"version":"1","files":{"../x":"0"}}'],
)
def test_a_broken_stamp_is_refused(bundle, tmp_path, stamp):
    bundle.run(tmp_path / "demo", "--no-install")
    (tmp_path / "demo" / ".curry-train.json").write_text(stamp)
    for flags in (["--upgrade"], ["--install"], ["--no-install"]):
        done = bundle.run(tmp_path / "demo", *flags, code=2)
        assert ".curry-train.json" in done.stderr


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ("../escape\n", "'../escape'"),
        ("/etc/passwd\n", "'/etc/passwd'"),
        ("pkg//deep/code.py\n", "paths inside"),
        ("train.py\ntrain.py\n", "twice"),
        (".curry-train.json\n", "belongs to init"),
        (".venv/bin/python\n", "belongs to init"),
        ("no-such-file\n", "No such file"),
        ("pkg\n", "no plain file"),
        ("", "lists no file"),
    ],
)
def test_a_damaged_manifest_is_refused(bundle, tmp_path, lines, word):
    (bundle.template / "MANIFEST").write_text(lines)
    one_line(bundle.run(tmp_path / "demo", "--no-install", code=2), word)
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("link", ["train.py", "pkg"])
def test_links_in_the_template_are_refused(bundle, tmp_path, link):
    target = bundle.template / link
    shutil.move(target, tmp_path / "moved")
    target.symlink_to(tmp_path / "moved")
    one_line(bundle.run(tmp_path / "demo", "--no-install", code=2), "symbolic link")
    assert not (tmp_path / "demo").exists()


def test_a_bundle_without_version_is_refused(bundle, tmp_path):
    (bundle.root / ".claude-plugin" / "plugin.json").write_text("{}")
    one_line(bundle.run(tmp_path / "demo", "--no-install", code=2), "install it again")


def test_help_is_quick_and_complete(bundle):
    text = bundle.run("--help").stdout
    flags = "name train no-install install python pip-args force upgrade json"
    for flag in flags.split():
        assert f"--{flag}" in text


def test_the_real_template_can_be_copied_and_named(tmp_path):
    files = read_template(ROOT / "template", "another-name")
    assert b'name = "another-name"' in files["pyproject.toml"].data
    assert {"train.py", "requirements.lock", "pyproject.toml"} <= set(files)
    assert bundle_version(ROOT)


def test_a_template_without_a_project_name_refuses_the_flag(bundle):
    bundle.write("pyproject.toml", "[tool.x]\nname = 'y'\n")
    with pytest.raises(InitError, match="drop --name"):
        read_template(bundle.template, "n")
