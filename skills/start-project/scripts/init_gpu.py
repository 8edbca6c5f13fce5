"""What NVIDIA hardware is here, what torch makes of it, and which torch build to take."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
"""torch==X in the lock admits X+cpu too, which pip prefers; the rest comes from its usual index."""
GB = 10**9
SIZES = {"cuda": (2.8, 5.5), "cpu": (0.4, 1.5), "macos": (0.3, 1.3)}
"""GB to download and GB on disk of an environment, by the build of torch."""
ASK = ["--query-gpu=name,driver_version", "--format=csv,noheader"]


@dataclass(frozen=True)
class Nvidia:
    """The NVIDIA side of this machine: cards, driver, newest CUDA the driver runs."""

    names: tuple[str, ...] = ()
    driver: str = ""
    cuda: str = ""
    problem: str = ""


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr


def find_nvidia(root: Path = Path("/")) -> Nvidia | None:
    """Return what the driver says, or None where there is no NVIDIA card at all."""
    if sys.platform != "linux":
        return None
    tool = shutil.which("nvidia-smi") or _file(root / "usr/lib/wsl/lib/nvidia-smi")
    if tool:
        code, text = _run([tool, *ASK])
        rows = [line.split(", ") for line in text.splitlines() if ", " in line]
        if code == 0 and rows:
            cuda = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", _run([tool])[1])
            names = tuple(row[0] for row in rows)
            return Nvidia(names, rows[0][1], cuda[1] if cuda else "")
    version = root / "proc/driver/nvidia/version"
    driver = _driver_version(version)
    if not driver and not _card_on_bus(root):
        return None
    problem = "the driver does not answer" if tool or driver else "no NVIDIA driver is installed"
    return Nvidia(driver=driver, problem=problem)


def _driver_version(path: Path) -> str:
    found = re.search(r"Module\s.*?(\d+\.[\d.]+)", path.read_text()) if path.is_file() else None
    return found[1] if found else ""


def _file(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def _card_on_bus(root: Path) -> bool:
    """Return whether a display or 3D controller of NVIDIA sits on the PCI bus."""
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            kind = (vendor.parent / "class").read_text()
            if vendor.read_text().strip() == "0x10de" and kind.startswith("0x03"):
                return True
        except OSError:
            continue
    return False


def torch_build(nvidia: Nvidia | None, pip_args: list[str]) -> str:
    """Return which build of torch these arguments get, as far as can be told: a key of SIZES.

    Without an NVIDIA card pip's own settings decide; the smaller is what is surely needed.
    """
    if sys.platform == "darwin":
        return "macos"
    return "cuda" if nvidia and CPU_INDEX.split()[-1] not in pip_args else "cpu"


def size_lines(nvidia: Nvidia | None, pip_args: list[str], rerun: str) -> list[str]:
    """Say what will be downloaded; offer the CPU build where only it makes sense."""
    build = torch_build(nvidia, pip_args)
    download, disk = SIZES[build]
    if build != "cpu" or CPU_INDEX.split()[-1] in pip_args:
        return [f"downloads about {download} GB; the environment takes {disk} GB"]
    big, big_disk = SIZES["cuda"]
    return [
        f"downloads about {big} GB and the environment takes {big_disk} GB: torch for Linux comes "
        "with CUDA, unless pip is set up otherwise",
        f"no NVIDIA GPU here: with torch's CPU build it is {download} GB and {disk} GB; for that, "
        f"stop this and run:\n  {rerun}",
    ]


def verdict(torch: dict, nvidia: Nvidia | None, hidden: str | None) -> list[str]:
    """Say whether torch sees the GPU; where it does not, why not and what to do.

    torch: {version, cuda (its build, or None), devices (names)}; hidden: CUDA_VISIBLE_DEVICES.
    """
    build = f"torch {torch['version']}, " + (
        f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
    )
    if torch["devices"]:
        driver = f", driver {nvidia.driver}" if nvidia and nvidia.driver else ""
        return [f"GPU: {', '.join(torch['devices'])}{driver}; {build}"]
    if nvidia is None:
        return [f"GPU: none here; {build}; trained on the CPU"]
    driver = f"driver {nvidia.driver}" if nvidia.driver else "no driver"
    runs = f" (runs CUDA up to {nvidia.cuda})" if nvidia.cuda else ""
    cards = ", ".join(nvidia.names) or "an NVIDIA card"
    return [
        f"GPU: not seen by torch: {cards}, {driver}{runs}; {build}",
        _fix(torch, nvidia, hidden),
    ]


def _fix(torch: dict, nvidia: Nvidia, hidden: str | None) -> str:
    if nvidia.problem:
        return f"  fix: {nvidia.problem}; install the driver, restart, see that nvidia-smi answers"
    if not torch["cuda"]:
        return (
            "  fix: torch is the CPU build; remove .venv and run init.py with --install and "
            "without the CPU index"
        )
    if hidden is not None:
        return f"  fix: CUDA_VISIBLE_DEVICES={hidden!r} hides the card; unset it"
    if nvidia.cuda and _numbers(nvidia.cuda) < _numbers(torch["cuda"]):
        wheel = "cu" + "".join(nvidia.cuda.split(".")[:2])
        return (
            f"  fix: the driver is too old for CUDA {torch['cuda']}; update it, or remove .venv "
            "and run init.py with --install --pip-args "
            f"'--extra-index-url https://download.pytorch.org/whl/{wheel}' (or one that "
            "pytorch.org/get-started lists for this driver)"
        )
    return "  fix: see what .venv/bin/python -c 'import torch; torch.cuda.init()' says"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def visible_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")
