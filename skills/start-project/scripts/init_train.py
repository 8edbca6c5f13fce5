"""Train the quickstart through `fabric run train.py` and tell what came of it."""

from __future__ import annotations

import json
import math
import secrets
import shlex
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from init_files import InitError
from init_gpu import find_nvidia, verdict, visible_devices
from init_process import environment, run_child

TORCH_PROBE = """
import json, sys, torch
seen = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
found = {
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(index) for index in seen],
}
sys.stdout.write("\\n" + json.dumps(found))
"""
SAMPLE_CHARACTERS = 400
WARM_UP_ROWS = 1
"""Logged rows left out of the speed: the first holds the start-up."""


@dataclass(frozen=True)
class Result:
    """What a run folder says. None where it says nothing; non-finite numbers stay strings."""

    run: Path | None
    status: str | None = None
    loss_first: float | str | None = None
    loss_last: float | str | None = None
    val_loss: float | str | None = None
    val_bpb: float | str | None = None
    tokens_per_s: float | str | None = None
    sample: str = ""
    failure: str = ""


def fabric_script(scripts: Path) -> Path:
    """Return the `fabric` program of an environment."""
    script = scripts / "fabric"
    if not script.is_file():
        raise InitError(
            f"{scripts}: has no `fabric` program; --train needs an environment with the packages "
            "of requirements.lock; drop --no-install, or name one with --python"
        )
    return script


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(
    project: Path, python: Path, fabric: Path, *, say: Callable[[str], None], to_stderr: bool
) -> tuple[Result, int, int | None]:
    """Run the quickstart; return its result, the launcher's code and the signal that came."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())  # as train.py names them
    run = project / "runs" / f"quickstart-{stamp}-{secrets.token_hex(3)}"
    # Through the interpreter: a script's first line breaks on long paths and odd characters.
    command = [python, fabric, "run", "--main-port", str(free_port()), "train.py"]
    say(f"training: {shlex.join(['fabric', *map(str, command[2:])])}")
    path = f"{python.parent}:{environment().get('PATH', '')}"
    code, signum = run_child(
        command,
        cwd=project,
        env=environment(CURRY_RUN_DIR=str(run), PATH=path),
        to_stderr=to_stderr,
    )
    return read_result(run), code, signum


def records(path: Path) -> Iterator[dict]:
    """Yield the objects of a JSON-lines file; torn and foreign lines are dropped."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _rows(run: Path) -> list[dict]:
    """Return the rows of metrics.jsonl by step, of each step the one of the highest attempt."""
    best: dict[int, dict] = {}
    for row in records(run / "metrics.jsonl"):
        step, attempt = row.get("step"), row.get("attempt", 0)
        if isinstance(step, int) and attempt >= best.get(step, {}).get("attempt", 0):
            # One step may have a training row and a validation row.
            same = best.get(step, {}).get("attempt", 0) == attempt
            best[step] = {**best.get(step, {}), **row} if same else row
    return [best[step] for step in sorted(best)]


def read_result(run: Path) -> Result:
    """Read what a run left; an absent folder gives an empty result."""
    if not run.is_dir():
        return Result(None)
    rows = _rows(run)

    def values(key: str) -> list:
        return [row[key] for row in rows if row.get(key) is not None]

    losses, events = values("loss"), list(records(run / "journal.jsonl"))
    speeds = [
        float(value)
        for value in values("tokens_per_s")[WARM_UP_ROWS:] or values("tokens_per_s")
        if math.isfinite(float(value))
    ]
    ends = [event.get("status") for event in events if event.get("ev") == "end"]
    return Result(
        run=run,
        status=ends[-1] if ends else None,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        val_loss=(values("val/loss") or [None])[-1],
        val_bpb=(values("val/bpb") or [None])[-1],
        tokens_per_s=statistics.median(speeds) if speeds else None,
        sample=_sample(events),
        failure=_failure(run),
    )


def _sample(events: list[dict]) -> str:
    texts = [str(event["sample"]) for event in events if event.get("sample") is not None]
    # A young model may write anything, terminal control codes too.
    text = texts[-1][:SAMPLE_CHARACTERS] if texts else ""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def _failure(run: Path) -> str:
    """Return the last line of the traceback, or whatever failure.json holds, in one line."""
    try:
        record = json.loads((run / "failure.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    text = record.get("error") or record.get("traceback") if isinstance(record, dict) else record
    lines = str(text or record).strip().splitlines()
    return lines[-1] if lines else ""


def gpu_lines(python: Path) -> list[str]:
    """Say whether the environment's torch sees a GPU."""
    try:
        done = subprocess.run(
            [python, "-c", TORCH_PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(),
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return [f"GPU: cannot tell, {python} could not import torch"]
    return verdict(found, find_nvidia(), visible_devices())


def _number(value: float | str | None, digits: int = 4) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else str(value or "not logged")


def summary(result: Result, project: Path, scripts: Path, gpu: list[str]) -> list[str]:
    """Return the closing lines of --train: the verdict on the GPU, the numbers, what to do next."""
    lines = list(gpu)
    if result.run is None:
        return [*lines, "the training made no run folder; the lines above say why"]
    validation = "not logged"
    if result.val_loss is not None:
        nats, bits = _number(result.val_loss), _number(result.val_bpb)
        validation = f"{nats} nats per token, {bits} bits per byte (val/bpb)"
    lines += [
        f"loss: {_number(result.loss_first)} at first, {_number(result.loss_last)} at last",
        f"val/loss: {validation}",
        f"tokens/s: {_number(result.tokens_per_s, 0)}",
        f"run folder: {result.run}",
    ]
    if result.failure:
        lines.append(f"failure: {result.failure}")
    if result.sample:
        lines += ["text sample:", *(f"  | {line}" for line in result.sample.splitlines())]
    tensorboard = [str(scripts / "tensorboard"), "--logdir", str(project / "runs")]
    lines.append(f"TensorBoard: {shlex.join(tensorboard)}")
    return [*lines, *next_lines(project, scripts, result)]


def next_lines(project: Path, scripts: Path, result: Result | None = None) -> list[str]:
    """Return what to do next in this project."""
    lines = [f"next: cd {shlex.quote(str(project))}"]
    if (scripts / "activate").is_file():
        lines[0] += f" && source {shlex.quote(str(scripts / 'activate'))}"
    lines.append("  fabric run train.py data.input=YOUR_TEXT.txt   # train on your own text")
    if result and result.run and result.status not in ("done", None):
        lines.append(f"  fabric run train.py run.resume=runs/{result.run.name}   # go on")
    lines.append("  python train.py --help                         # every setting; then README.md")
    return lines
