"""A copy of this project in a temporary folder, and runs of it as a user would start them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns("runs", ".cache", "__pycache__", ".venv", ".pytest_cache")
# Two blocks of experts, small enough that starting a process costs more than training it.
SMALL = (
    "model.num_hidden_layers=2",
    "model.moe_intermediate_size=32",
    "run.sample_tokens=0",
    "run.log_every=1",
    "run.eval_every=0",
    "run.save_every=0",
    "data.val_fraction=0.01",
    "accelerator=cpu",
)


def copy_project(folder: Path) -> Path:
    project = folder / "project"
    shutil.copytree(SOURCE, project, ignore=LEFT_OUT)
    return project


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(way: str, *settings: str) -> list[str]:
    """The command line of a launch way: python, python2, fabric, fabric2 or torchrun2."""
    fabric = [str(Path(sys.executable).parent / "fabric"), "run", f"--main-port={free_port()}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    starts = {
        "python": [sys.executable, "train.py"],
        "python2": [sys.executable, "train.py", "devices=2"],
        "fabric": [*fabric, "train.py"],
        "fabric2": [*fabric, "--devices=2", "train.py"],
        "torchrun2": [*torchrun, "--nproc_per_node=2", "train.py"],
    }
    return [*starts[way], *settings]


def environment(**extra: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LT_", "TORCHELASTIC"))}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", "PYTHONPATH"):
        env.pop(name, None)
    return {**env, **extra}


def start(project: Path, way: str, *settings: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(way, *settings), cwd=project, env=environment(**env), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def run(project: Path, way: str, *settings: str, timeout: float = 180, **env: str):
    """Run to the end; returns (exit code, stdout, stderr)."""
    process = start(project, way, *settings, **env)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The objects of a JSON lines file; a torn last line is dropped, as readers do."""
    found = []
    if not (folder / name).exists():
        return found
    for line in (folder / name).read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            found.append(json.loads(line))
    return found


def losses(folder: Path) -> dict[int, float]:
    """Loss by step, of the highest attempt."""
    best: dict[int, tuple[int, float]] = {}
    for row in rows(folder):
        if "loss" in row:
            best[row["step"]] = max(best.get(row["step"], (0, 0.0)), (row["attempt"], row["loss"]))
    return {step: loss for step, (_, loss) in sorted(best.items())}


def run_folders(project: Path) -> list[Path]:
    return sorted(path for path in (project / "runs").iterdir() if path.is_dir())


def wait_for_step(project: Path, step: int, timeout: float = 90) -> Path:
    """Wait until the only run folder has logged `step`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = run_folders(project) if (project / "runs").is_dir() else []
        if found and any(row["step"] >= step for row in rows(found[-1])):
            return found[-1]
        time.sleep(0.05)
    raise AssertionError(f"no run reached step {step} within {timeout} s")


def fork_train(*settings: str, log: Path, env: dict[str, str] | None = None) -> int:
    """Start train.py's main in a fork of this process, its output in `log`; returns the pid.

    The parent has imported everything (`import_everything`), so a run starts in a tenth of the
    time of a fresh interpreter; the code that runs is the same.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        import torch

        import train

        os.environ.update(env or {})
        os.setsid()
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        torch.set_num_threads(1)
        try:
            code = train.main(list(settings))
        except SystemExit as end:
            code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def fork_ranks(world: int, *settings: str, folder: Path) -> list[int]:
    """Start `world` forks in the environment that torchrun gives its ranks; returns the pids.

    What rank N prints is in folder/rank-N.txt.
    """
    job = {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    return [
        fork_train(
            *settings,
            log=folder / f"rank-{rank}.txt",
            env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]


def exit_code(pid: int) -> int:
    """Wait for a fork; a negative code is the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(*settings: str, log: Path) -> tuple[int, str]:
    """Run train.py's main in a fork to its end; returns (exit code, what it printed)."""
    code = exit_code(fork_train(*settings, log=log))
    return code, log.read_text()


def import_everything() -> None:
    """Import what a run needs, so that forks start with it."""
    import lightning_fabric  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import curry_train.checkpoint.training_state
    import curry_train.evaluate
    import curry_train.generate
    import curry_train.step  # noqa: F401
    from curry_train.command_line import load_or_exit

    load_or_exit([])
