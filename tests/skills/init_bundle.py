"""A small bundle, wheels and an environment that stand in for the real ones in tests of init."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "skills" / "start-project" / "scripts"
sys.path.insert(0, str(SCRIPTS))

PYPROJECT = '[project]\nname = "my-project"\nversion = "0.1.0"\n\n[tool.x]\nname = "other"\n'

TRAIN = """
import json, os, sys, time
from pathlib import Path
run = Path(os.environ["CURRY_RUN_DIR"])
run.mkdir(parents=True)
journal, metrics = run / "journal.jsonl", run / "metrics.jsonl"
rows = [
    {"step": 1, "attempt": 0, "loss": 5.5, "tokens_per_s": 10.0},
    {"step": 2, "attempt": 0, "loss": 4.0, "tokens_per_s": 100.0},
    {"step": 2, "attempt": 1, "loss": 3.5, "tokens_per_s": 300.0},
    {"step": 3, "attempt": 1, "loss": 3.0, "tokens_per_s": 200.0, "val/loss": 3.25, "val/bpb": 4.5},
]
metrics.write_text("".join(json.dumps(row) + "\\n" for row in rows) + '{"step": 4, "los')
print("fake training on", sys.argv, flush=True)
status = "done"
if os.environ.get("FAKE_WAIT"):
    import signal
    got = []
    signal.signal(signal.SIGINT, lambda *_: got.append(1))
    (run / "waiting").touch()
    began = time.monotonic()
    while not got and time.monotonic() - began < 60:
        time.sleep(0.02)
    time.sleep(0.5)
    (run / "signals").write_text(str(len(got)))
    status = "preempted"
if os.environ.get("FAKE_CRASH"):
    (run / "failure.json").write_text(json.dumps({"rank": 0, "error": "boom at step 3"}))
    status = "crashed"
events = [
    {"ev": "note", "sample": "Love, n. \\x1b[31mA fever\\nof the mind."},
    {"ev": "end", "status": status},
]
journal.write_text("".join(json.dumps(event) + "\\n" for event in events))
sys.exit(1 if status == "crashed" else 0)
"""

FABRIC = """
import runpy, sys
def main():
    arguments = sys.argv[1:]
    assert arguments[0] == "run", arguments
    assert arguments[1] == "--main-port" and 1024 <= int(arguments[2]) < 65536, arguments
    sys.argv = arguments[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""

TORCH = """
__version__ = "2.13.0+cpu"
class version:
    cuda = None
class cuda:
    @staticmethod
    def is_available():
        return False
"""

MODULES = {
    "lightning_fabric/__init__.py": "",
    "lightning_fabric/cli.py": FABRIC,
    "torch/__init__.py": TORCH,
}


@dataclass
class Bundle:
    """A copy of the scripts around a template of a few files."""

    root: Path

    @property
    def template(self) -> Path:
        return self.root / "template"

    @property
    def script(self) -> Path:
        return self.root / "skills" / "start-project" / "scripts" / "init.py"

    def set_version(self, version: str) -> None:
        manifest = self.root / ".claude-plugin" / "plugin.json"
        manifest.write_text(json.dumps({"name": "curry-train", "version": version}))

    def write(self, path: str, text: str, *, executable: bool = False) -> None:
        file = self.template / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if executable else 0o644)
        self.list_files()

    def remove(self, path: str) -> None:
        (self.template / path).unlink()
        self.list_files()

    def list_files(self) -> None:
        files = [path for path in self.template.rglob("*") if not path.is_dir()]
        names = sorted(path.relative_to(self.template).as_posix() for path in files)
        names = [name for name in names if name != "MANIFEST"]
        (self.template / "MANIFEST").write_text("".join(f"{name}\n" for name in names))

    def files(self) -> dict[str, str]:
        names = (self.template / "MANIFEST").read_text().splitlines()
        return {name: (self.template / name).read_text() for name in names}

    def command(self, *arguments: object, python: object = sys.executable) -> list[str]:
        return [str(python), str(self.script), *map(str, arguments)]

    def run(self, *arguments: object, python: object = sys.executable, code: int = 0, **options):
        """Run init; fail with its output when it ends with another code."""
        done = subprocess.run(
            self.command(*arguments, python=python), capture_output=True, text=True, **options
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


def make_bundle(root: Path) -> Bundle:
    bundle = Bundle(root)
    shutil.copytree(
        SCRIPTS, bundle.script.parent, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    (root / ".claude-plugin").mkdir()
    bundle.set_version("0.1.0")
    bundle.template.mkdir()
    for path, text in {
        "README.md": "read me\n",
        ".gitignore": "/runs/\n",
        "pyproject.toml": PYPROJECT,
        "requirements.lock": "",
        "train.py": TRAIN,
        "pkg/__init__.py": "",
        "pkg/deep/code.py": "x = 1\n",
    }.items():
        bundle.write(path, text)
    bundle.write("tool.sh", "#!/bin/sh\necho tool\n", executable=True)
    return bundle


def make_environment(folder: Path) -> Path:
    """Make an environment whose fabric and torch are fakes; return its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for path, text in MODULES.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    script = folder / "bin" / "fabric"
    script.write_text("#!/bin/false\nfrom lightning_fabric.cli import main\nmain()\n")
    return folder / "bin" / "python"


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str], script: str = ""):
    """Write a wheel; `script` is a line of [console_scripts]."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script}\n"
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def make_stack(folder: Path) -> None:
    """Write the wheel of the fake packages."""
    make_wheel(folder, "stack", "1.0", MODULES, "fabric = lightning_fabric.cli:main")


def tree(folder: Path, *, without: tuple[str, ...] = (".git", ".venv")) -> dict[str, str]:
    """Return the text of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in without
    }


def mounted(tmp_path: Path, *options: str) -> Path:
    """Mount something for one test, or skip where that needs rights that are not there."""
    point = tmp_path / "mount point"
    point.mkdir()
    done = subprocess.run(["mount", *options, str(point)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting needs privileges: {done.stderr.strip()}")
    return point


def unmount(point: Path) -> None:
    subprocess.run(["umount", "-l", str(point)], check=True)


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def pyenv(version: str) -> Path:
    """Return an older interpreter of this machine, or skip."""
    python = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions", version, "bin")
    if not (python / "python").exists():
        pytest.skip(f"Python {version} is not installed here")
    return python / "python"
