"""Run a loop in one process and in two with half the batch each, and compare what they compute.

Both runs use Fabric's DDP over gloo on the CPU, the single one with a world of one, so that the
sampler draws the same order for both.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from loop_recorder import Enough, Recorder

from kit import cli
from kit.errors import UsageError
from kit.report import Report
from kit.target import seed_everything
from kit.user_code import load_function, user_code

FORM = "--run takes FUNCTION(fabric, batch_size), the loop with the batch size of one process"
GRACE = 5.0


def compare(call: cli.Invocation, report: Report, thresholds: dict[str, float]) -> None:
    """Run both worlds and judge the second by the first."""
    args = call.args
    function = load_function(args.run, flag="--run", project=call.project)
    name = args.run.rpartition(":")[2]
    try:
        inspect.signature(function).bind("fabric", batch_size=1)
    except TypeError as error:
        raise UsageError(f"--run {args.run}: {error}", FORM) from None
    with user_code("importing Fabric"):
        fabric_class = _fabric_class(function)
    call.expect(None, f"{args.steps} steps in one process and in two")
    seed = args.seed or 0
    worlds = [
        run_world(function, fabric_class, world, args.batch_size // world, args.steps, seed,
                  args.timeout)
        for world in (1, 2)
    ]  # fmt: skip
    one, two = worlds
    if isinstance(one, str):
        raise UsageError(f"{name} in one process: {one}", FORM)
    (alone,) = one
    if not alone["steps"]:
        raise UsageError(f"{name} returned before its first optimizer step", FORM)
    report.summary = report.summary or f"{name}: {len(alone['steps'])} steps in 1 and 2 processes"
    if isinstance(two, str):
        report.check("fabric-run-replicas", "fail", message=f"in two processes: {two}")
        return
    if alone["dropout"]:
        report.evidence.append("dropout was switched off in both runs")
    if not judge_inputs(report, alone, two):
        return
    judge_loss(report, alone, two, thresholds["fabric-run-loss"])
    judge_gradients(report, alone, two, thresholds["fabric-run-gradients"])
    judge_replicas(report, two)


def _fabric_class(function: Any) -> Any:
    """Return the Fabric of the package that the user's module imports from."""
    names = vars(sys.modules[function.__module__]).values()
    for value in names:
        if inspect.isclass(value) and value.__name__ == "Fabric":
            return value
    try:
        from lightning_fabric import Fabric
    except ImportError:
        return importlib.import_module("lightning.fabric").Fabric
    return Fabric


def run_world(
    function: Any, fabric_class: Any, world: int, batch_size: int, steps: int, seed: int,
    timeout: float,
) -> list[dict[str, Any]] | str:  # fmt: skip
    """Return what each rank recorded, or one sentence about what went wrong."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, world, os.path.join(folder, "store"), theirs)
            work = (function, fabric_class, batch_size, steps, seed)
            process = context.Process(target=_rank_main, args=(place, work))
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in ranks:
                process.join(timeout=0.2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Any], timeout: float) -> list[dict[str, Any]] | str:
    """Take every rank's answer; the first failure ends the wait for the others."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    failures: list[tuple[float, str]] = []
    while len(answers) < len(pipes) and time.monotonic() < deadline:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready: list[Any] = multiprocessing.connection.wait(waiting, timeout=0.5)
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "failed", (time.time(), "died without a word")
            answers[rank] = value
            if kind == "failed":
                failures.append((value[0], f"rank {rank} {value[1]}"))
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        gone = [f"rank {r} returned after {len(a['steps'])} steps" for r, a in answers.items()
                if isinstance(a, dict)]  # fmt: skip
        return ", ".join([*gone, min(failures)[1]])
    if len(answers) < len(pipes):
        return (
            f"not done after {timeout:g} s: processes wait for each other (a collective call that "
            "not all make, or unequally many batches), or set a longer --timeout"
        )
    return [answers[rank] for rank in range(len(pipes))]


def _rank_main(place: tuple[Any, ...], work: tuple[Any, ...]) -> None:
    rank, world, store, pipe = place
    function, fabric_class, batch_size, steps, seed = work
    sys.stdout.flush()
    os.dup2(2, 1)  # what the loop prints is not part of the report
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        TORCHELASTIC_RUN_ID="fabric-setup", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip
    os.environ.pop("LT_CLI_USED", None)
    try:
        import torch.distributed as dist

        torch = sys.modules["torch"]
        torch.set_num_threads(1)
        shared = torch.distributed.FileStore(store, world)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=world)
        recorder = Recorder(fabric_class, world, steps)
        seed_everything(seed)
        os.chdir(tempfile.mkdtemp(dir=os.path.dirname(store)))  # checkpoints of the loop go here
        with contextlib.suppress(Enough):
            function(recorder.fabric, batch_size=batch_size)
        pipe.send(("ok", recorder.result()))
    except BaseException as error:
        pipe.send(("failed", (time.time(), _sentence(error))))
    finally:
        pipe.close()
        os._exit(0)


def _sentence(error: BaseException) -> str:
    """Say what was raised, and the last line of the user's code that led there."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and Path(frame.filename).parent != Path(__file__).parent
    ]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = next((line for line in str(error).splitlines() if line.strip()), "no message")
    return f"raised {type(error).__name__}{where}: {text.strip()[:200]}"


def judge_inputs(report: Report, alone: dict, two: list[dict]) -> bool:
    """Tell whether the ranks' samples together are the single process's; else nothing compares."""
    id = "fabric-run-inputs"
    counts = [len(alone["steps"]), *(len(rank["steps"]) for rank in two)]
    rows = [[step["rows"] for step in run["steps"]] for run in (alone, *two)]
    if rows[1][0] and rows[1][0] == rows[2][0]:
        report.check(
            id, "fail", value=len(rows[1][0]), unit="samples",
            message="both processes read the same samples: pass the loader through "
            "fabric.setup_dataloaders",
        )  # fmt: skip
        return True
    if not rows[0][0]:
        report.check(id, "skipped", message="the model was given no tensors to tell samples apart")
        return True
    single, both = sorted(rows[0][0]), sorted(rows[1][0] + rows[2][0])
    if len(both) != len(single):
        report.check(
            id, "unclear", value=len(both), threshold=len(single), unit="samples",
            message="the first step of two processes reads more or fewer samples than one "
            "process's: make the loader's batch size the argument batch_size",
        )  # fmt: skip
        return False
    if single != both:
        report.check(
            id, "unclear", message="two processes read other samples than one: draw the order "
            "from a seed that does not depend on their number (setup_dataloaders does)",
        )  # fmt: skip
        return False
    if len(set(counts)) > 1:
        report.check(
            id, "fail", message=f"{counts[0]} steps in one process, {counts[1]} and {counts[2]} in "
            "two: the shards hold unequally many batches",
        )  # fmt: skip
        return True
    report.check(id, "pass", value=len(single), unit="samples", message="each its part")
    return True


def judge_loss(report: Report, alone: dict, two: list[dict], limit: float) -> None:
    """Compare the mean over ranks of what backward was given."""
    errors = [
        abs(sum(losses) / 2 - single) / max(abs(single), 1e-12)
        for single, *losses in zip(*([s["loss"] for s in r["steps"]] for r in (alone, *two)),
                                   strict=False)
    ]  # fmt: skip
    worst = max(errors)
    report.check(
        "fabric-run-loss", "pass" if worst <= limit else "fail", value=worst, threshold=limit,
        message="" if worst <= limit else "the loss given to backward depends on the processes: "
        "its mean over them must be the global batch's",
    )  # fmt: skip


def judge_gradients(report: Report, alone: dict, two: list[dict], limit: float) -> None:
    """Compare every gradient of every step; name the factor if there is one."""
    import numpy as np

    worst, where, absent, first = 0.0, "", "", None
    for number, (single, shared) in enumerate(zip(alone["steps"], two[0]["steps"], strict=False)):
        largest = max((np.abs(g).max(initial=0) for g in single["grads"].values()), default=0.0)
        for name, wanted in single["grads"].items():
            found = shared["grads"].get(name)
            if found is None or found.shape != wanted.shape:
                absent = absent or name
                continue
            # Tensors that hold rounding noise only are held against the largest gradient.
            scale = max(np.abs(wanted).max(initial=0), 1e-3 * largest, 1e-12)
            error = float(np.abs(found - wanted).max(initial=0) / scale)
            if not error <= limit and first is None:
                first = number
            if not error <= worst:
                worst, where = error, name
    message = f"{absent} has no gradient in two processes" if absent else ""
    if first is not None and not absent:
        message = f"{where}: {_reason(alone, two, first)}"
    report.check(
        "fabric-run-gradients", "fail" if message else "pass", value=worst, threshold=limit,
        message=message,
    )  # fmt: skip
    report.numbers["worst_gradient"] = {"name": where, "error": worst}


def _reason(alone: dict, two: list[dict], step: int) -> str:
    """Say why the gradients of the first step that differs may do so, from how they do."""
    import numpy as np

    def flat(run: dict) -> Any:
        grads = run["steps"][step]["grads"] if step < len(run["steps"]) else {}
        return np.concatenate([grads[name].ravel() for name in sorted(grads)] or [np.zeros(1)])

    single, first, second = flat(alone), flat(two[0]), flat(two[1])
    if first.shape != second.shape or np.abs(first - second).max() > 1e-6 * np.abs(first).max():
        return "each process keeps its own gradient: something goes past the strategy"
    if single.shape != first.shape:
        return "the processes hold other parameters than one process does"
    factor = float(single @ first / max(float(single @ single), 1e-30))
    rest = np.abs(first - factor * single).max() / max(np.abs(factor * single).max(), 1e-30)
    if rest < 1e-2 and abs(factor - 0.5) < 0.02:
        return "half of what it should be: divided by the number of processes twice"
    if rest < 1e-2 and abs(factor - 2) < 0.08:
        return "twice what it should be: summed over processes, or multiplied by their number"
    if rest < 1e-2 and abs(factor - 1) > 0.02:
        return f"{factor:.3g} times what it should be"
    if two[0]["batch_norm"]:
        return "batch norm takes its statistics per process: nn.SyncBatchNorm, on a GPU"
    if two[0]["steps"][step]["rows"] == two[1]["steps"][step]["rows"]:
        return "both processes learn from the same samples"
    return "a mean of means: divide the sum by the global count, times fabric.world_size"


def judge_replicas(report: Report, two: list[dict]) -> None:
    """Compare the ranks' weights after the last step, bit for bit."""
    same = two[0]["weights"] == two[1]["weights"]
    report.check(
        "fabric-run-replicas", "pass" if same else "fail",
        message="" if same else "the processes' weights differ after the steps",
    )  # fmt: skip
