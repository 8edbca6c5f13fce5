"""init makes the environment: finished, interrupted, offline, somebody else's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from skills.init_bundle import Bundle, make_bundle, make_stack, make_wheel

from init_environment import Environment  # isort: skip
from init_gpu import CPU_INDEX, Nvidia, size_lines

QUIET_PIP = {
    **{key: value for key, value in os.environ.items() if not key.startswith("PIP_")},
    "PIP_CONFIG_FILE": os.devnull,
}
"""The environment of a pip that knows no index but the one it is given."""


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    bundle = make_bundle(tmp_path / "bundle")
    bundle.write("requirements.lock", "stack==1.0\n")
    return bundle


@pytest.fixture
def wheels(tmp_path: Path) -> str:
    make_stack(tmp_path / "wheels")
    return f"--no-index --find-links {tmp_path / 'wheels'}"


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_from_nothing_to_a_trained_model_and_on_to_another_lock(bundle, tmp_path, wheels):
    project = tmp_path / "a project"
    done = bundle.run(project, "--train", "--json", "--pip-args", wheels, env=QUIET_PIP)
    report = json.loads(done.stdout)
    assert report["venv"] == str(project / ".venv") and report["val_loss"] == 3.25
    assert Path(report["run"]).parent == project / "runs"
    assert "downloads about" in done.stderr and "environment: complete after" in done.stderr
    record = json.loads((project / ".venv" / ".complete").read_text())
    assert record["folder"] == str(project / ".venv")
    assert (project / ".venv" / "bin" / "fabric").exists()

    # A second install, of whatever kind, touches nothing and needs no index.
    before = stamps(project / ".venv")
    for flags in (["--install"], ["--upgrade"], ["--upgrade", "--install"], []):
        done = bundle.run(project, *flags, env=QUIET_PIP)
        assert "nothing to install" in done.stdout
    assert stamps(project / ".venv") == before

    # An upgrade with another lock brings the same environment to it.
    make_wheel(tmp_path / "wheels", "addition", "2.0", {"addition.py": "x = 1\n"})
    bundle.set_version("0.2.0")
    bundle.write("requirements.lock", "stack==1.0\naddition==2.0\n")
    done = bundle.run(project, "--upgrade", "--no-install", env=QUIET_PIP)
    assert not list((project / ".venv").glob("lib/*/*/addition.py"))
    done = bundle.run(project, "--upgrade", "--pip-args", wheels, env=QUIET_PIP)
    assert list((project / ".venv").glob("lib/*/*/addition.py"))
    assert "nothing to install" in bundle.run(project, "--upgrade", env=QUIET_PIP).stdout

    # Another Python than the environment's is refused, and so is training without fabric.
    other = json.loads((project / ".venv" / ".complete").read_text())
    (project / ".venv" / ".complete").write_text(json.dumps({**other, "python": "3.11.0"}))
    done = bundle.run(project, "--install", "--python", sys.executable, code=2, env=QUIET_PIP)
    assert "3.11.0" in done.stderr and "--python" in done.stderr

    # A moved project has a broken environment, which --install knows.
    os.rename(project, tmp_path / "moved")
    done = bundle.run(tmp_path / "moved", "--install", "--pip-args", wheels, env=QUIET_PIP)
    assert "complete after" in done.stdout
    python = tmp_path / "moved" / ".venv" / "bin" / "python"
    subprocess.run([python, "-c", "import addition, lightning_fabric"], check=True)


def test_a_failed_install_keeps_the_project_and_prints_what_finishes_it(bundle, tmp_path, wheels):
    project = tmp_path / "demo"
    (project / ".venv").mkdir(parents=True)
    (project / ".venv" / "pyvenv.cfg").write_text("mine")
    dead = "--retries 0 --index-url http://127.0.0.1:9/simple"
    flags = ["--force", "--train", "--pip-args", dead]
    done = bundle.run(project, *flags, code=2, env=QUIET_PIP)
    (kept,) = (project / ".curry-train.bak").glob("*/.venv/pyvenv.cfg")
    assert kept.read_text() == "mine", "--force keeps an environment that init did not make"
    assert (project / "train.py").exists() and (project / ".curry-train.json").exists()
    assert not (project / ".venv" / ".complete").exists()
    assert "could not reach its package index" in done.stderr
    assert "--pip-args" in done.stderr and "--no-install" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "--install" in line]
    assert str(project) in line and "--train" in line and dead in line

    # Something that was half installed is not trusted: the environment is made anew.
    site = next((project / ".venv").glob("lib/python*/site-packages"))
    (site / "half.py").write_text("broken")
    command = line.strip().replace(dead, wheels)
    done = subprocess.run(command, shell=True, env=QUIET_PIP, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "val/loss: 3.2500" in done.stdout
    assert not (site / "half.py").exists() and (project / ".venv" / ".complete").exists()


def test_an_upgrade_that_is_to_train_makes_the_environment(bundle, tmp_path, wheels):
    project = tmp_path / "demo"
    bundle.run(project, "--no-install")
    flags = ["--upgrade", "--train", "--json", "--pip-args", wheels]
    done = bundle.run(project, *flags, env=QUIET_PIP)
    assert json.loads(done.stdout)["val_loss"] == 3.25
    assert done.stderr.index("downloads about") < done.stderr.index("environment: ")


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("Retrying after connection broken by 'NewConnectionError'", "could not reach"),
        ("ERROR: No matching distribution found for stack==7.0", "pip.log"),
        ("", "see the lines above"),
    ],
)
def test_the_reason_is_read_from_the_log_of_pip(tmp_path, log, word):
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pip.log").write_text(log)
    assert word in Environment(tmp_path, gpu=False)._reason()


def test_the_gpu_extra_is_part_of_what_a_gpu_machine_wants(bundle, tmp_path):
    text = bundle.files()["pyproject.toml"]
    bundle.write("pyproject.toml", text + '[project.optional-dependencies]\ngpu = ["triton>=3"]\n')
    bundle.run(tmp_path / "demo", "--no-install")
    assert Environment(tmp_path / "demo", gpu=True).wanted()["extras"] == ["triton>=3"]
    assert Environment(tmp_path / "demo", gpu=False).wanted()["extras"] == []


def test_ctrl_c_during_the_install_ends_at_once_and_says_how_to_go_on(bundle, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"--index-url http://127.0.0.1:{silent.getsockname()[1]}/simple"
        process = subprocess.Popen(
            bundle.command(tmp_path / "demo", "--pip-args", index),
            env=QUIET_PIP,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        silent.settimeout(60)
        connection, _ = silent.accept()  # pip waits for an answer as long as this stays open
        with connection:
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert time.monotonic() - began < 20
    assert "--install" in out and "stopped by SIGINT" in err
    assert (tmp_path / "demo" / "train.py").exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_an_environment_of_the_user_is_never_touched(bundle, tmp_path, kind):
    project = tmp_path / "mine"
    own = project / ".venv"
    (tmp_path / "elsewhere").mkdir()
    project.mkdir()
    if kind == "folder":
        own.mkdir()
    else:
        own.symlink_to(tmp_path / "elsewhere")
    (own / "pyvenv.cfg").write_text("mine")
    done = bundle.run(project, code=2)
    assert ".venv (not made by init)" in done.stderr
    assert os.listdir(project) == [".venv"]
    bundle.run(project, "--no-install")
    done = bundle.run(project, "--install", code=2)
    assert ".venv (not made by init)" in done.stderr
    assert os.listdir(own) == ["pyvenv.cfg"]


def test_a_missing_lock_is_named(bundle, tmp_path):
    bundle.run(tmp_path / "demo", "--no-install")
    (tmp_path / "demo" / "requirements.lock").unlink()
    done = bundle.run(tmp_path / "demo", "--install", code=2)
    assert "requirements.lock: is missing" in done.stderr


def test_the_cpu_line_is_offered_and_keeps_what_was_asked_for():
    lines = "\n".join(size_lines(None, ["--retries", "1"], "RERUN"))
    if sys.platform == "darwin":
        assert "RERUN" not in lines
        return
    assert "2.8 GB" in lines and "0.4 GB" in lines and "RERUN" in lines
    assert "RERUN" not in "\n".join(size_lines(None, CPU_INDEX.split(), "RERUN"))
    card = Nvidia(("H200",), "570.1", "12.8")
    assert "RERUN" not in "\n".join(size_lines(card, [], "RERUN"))


def test_pip_prefers_the_cpu_build_from_the_further_index(tmp_path):
    """What CPU_INDEX relies on: X+cpu satisfies ==X, and wins over X from the usual index."""
    for index, version in (("usual", "2.0"), ("further", "2.0+cpu")):
        folder = tmp_path / index / "demo-torch"
        make_wheel(folder, "demo_torch", version, {"demo_torch.py": ""})
        (wheel,) = folder.iterdir()
        (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    command += ["--ignore-installed", "--no-cache-dir", "demo_torch==2.0"]
    command += ["--index-url", (tmp_path / "usual").as_uri()]
    flag = CPU_INDEX.split()[0]
    for further, version in (([], "2.0"), ([flag, (tmp_path / "further").as_uri()], "2.0+cpu")):
        done = subprocess.run(
            [*command, *further], env=QUIET_PIP, capture_output=True, text=True, check=True
        )
        (found,) = json.loads(done.stdout)["install"]
        assert found["metadata"]["version"] == version
