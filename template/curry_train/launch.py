"""Processes, device, signals and the end of a run: all of Lightning, and only here.

Fabric starts or joins the processes and opens the process group; everything else is our own, so
no strategy object, sampler or clip hook of Lightning is in the way of the training loop.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from curry_train.config import Config, ConfigError
from curry_train.tracking.progress import tell

if TYPE_CHECKING:
    from curry_train.data.token_file import Corpus
    from curry_train.parallel.mesh import Mesh
    from curry_train.tracking.run_folder import Run

# Rank 0's largest value wins when ranks saw different signals.
STOP_SIGNALS = {"SIGUSR1": 1, "SIGTERM": 2, "SIGINT": 3}
PEER_GRACE = 5.0
NARROW = 256
FABRIC_PRECISIONS = {"fp32": "32", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp64": "64"}
LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "timed out waiting",
    "connectfull",
)


def prepare_environment(config: Config) -> None:
    """Choose the number of OpenMP threads, before torch is imported.

    One thread for each of several ranks on a machine, and one for a narrow model, whose matrices
    are so small that threads wait for each other longer than they multiply (on a busy machine
    two threads made the quickstart ten times slower). A value that the user set stays; the full
    core count that `fabric run` sets for every rank counts as unset.
    """
    ranks_here = str(os.environ.get("LOCAL_WORLD_SIZE") or config.devices)
    narrow = getattr(config.model, "hidden_size", NARROW) < NARROW
    if ranks_here in ("auto", "1") and not narrow:
        return
    usable = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if usable else os.cpu_count()
    given = os.environ.get("OMP_NUM_THREADS")
    set_by_fabric = "LT_CLI_USED" in os.environ and given == str(cores)
    if set_by_fabric or given is None:
        os.environ["OMP_NUM_THREADS"] = "1"


def is_launched(env: Mapping[str, str]) -> bool:
    """Tell whether a launcher made this process: fabric run, torchrun, srun, or a parent rank."""
    return "LT_CLI_USED" in env or "WORLD_SIZE" in env or int(env.get("SLURM_NTASKS", "1")) > 1


def fabric_arguments(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of Fabric for the launcher that `env` shows.

    `fabric run` has decided devices already, and an argument that differs from its flag is an
    error there; its other flags must not contradict the configuration. Under torchrun Fabric
    would take one device per process for the whole world and train every rank apart, so the local
    world size is passed on. Raises ConfigError when the configuration contradicts the launcher.
    """
    accelerator = "auto" if config.accelerator == "auto" else config.accelerator
    arguments: dict[str, Any] = {}
    if "LT_ACCELERATOR" not in env:
        arguments["accelerator"] = accelerator
    if "LT_CLI_USED" in env:
        _check_flags(config, env)
        local = env.get("LOCAL_WORLD_SIZE", env["LT_DEVICES"])
        _check_devices(config, local, f"fabric run --devices={env['LT_DEVICES']}")
    elif "LOCAL_WORLD_SIZE" in env:
        local = env["LOCAL_WORLD_SIZE"]
        _check_devices(config, local, f"torchrun --nproc_per_node={local}")
        arguments["devices"] = int(local)
        arguments["num_nodes"] = int(env["WORLD_SIZE"]) // int(local)
    elif "WORLD_SIZE" not in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        arguments["devices"] = int(env.get("SLURM_NTASKS_PER_NODE", "1"))
        arguments["num_nodes"] = int(env.get("SLURM_NNODES", "1"))
    else:
        arguments["devices"] = config.devices
        if config.devices == "auto" and accelerator in ("cpu", "mps"):
            arguments["devices"] = 1
    return arguments


def _check_flags(config: Config, env: Mapping[str, str]) -> None:
    """Refuse flags of `fabric run` that would be ignored or change more than they say."""
    named = env.get("LT_ACCELERATOR", "auto").replace("gpu", "cuda")
    precision, strategy = env.get("LT_PRECISION", ""), env.get("LT_STRATEGY", "auto")
    found = []
    if "auto" not in (config.accelerator, named) and config.accelerator != named:
        found.append(f"accelerator={config.accelerator}, but fabric run has --accelerator={named}")
    if precision.removesuffix("-true") not in ("", FABRIC_PRECISIONS[config.precision]):
        found.append(f"precision={config.precision}, but fabric run has --precision={precision}")
    if strategy not in ("auto", "ddp"):
        found.append(f"fabric run --strategy={strategy}, but parallel.* lays out the ranks")
    if found:
        raise ConfigError([f"{text}; leave the flag out" for text in found])


def _check_devices(config: Config, local: str, command: str) -> None:
    if config.devices != "auto" and str(config.devices) != local:
        raise ConfigError(
            [
                f"devices={config.devices}, but {command} started {local} processes; "
                "leave devices out and let the launcher decide"
            ]
        )


def join_processes(config: Config, *, spawn: bool) -> Mesh:
    """Return the mesh of this process: the launcher's world, or one process without a launcher.

    With `spawn`, `devices=N` without a launcher starts the other ranks as child processes.
    Raises ConfigError when the mesh does not fit the world or the device is not there.
    """
    import torch

    from curry_train.parallel.mesh import Mesh, build_mesh
    from curry_train.rules import problems

    if not spawn and not is_launched(os.environ):
        device = pick_device(config.accelerator)
        check_backend(config, device)
        return Mesh.single(device)
    from lightning_fabric import Fabric

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # banners of every launch
    arguments = fabric_arguments(config, os.environ)
    if arguments.get("devices") == "auto" and not torch.cuda.is_available():
        arguments["devices"] = 1
    if arguments.get("accelerator") == "auto":
        arguments["accelerator"] = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.get("accelerator") in ("cuda", "mps"):
        pick_device(arguments["accelerator"])
    fabric = Fabric(**arguments)
    if "LT_CLI_USED" not in os.environ:
        fabric.launch()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if fabric.world_size != world and is_launched(os.environ):
        raise ConfigError(
            [f"the launcher started {world} ranks, but Fabric joined {fabric.world_size} of them"]
        )
    found = problems(config, fabric.world_size)
    if found:
        raise ConfigError(found)
    check_backend(config, fabric.device)
    return build_mesh(
        config.parallel,
        device=fabric.device,
        local_rank=fabric.local_rank,
        comm_timeout=config.run.comm_timeout,
    )


def check_backend(config: Config, device: Any) -> None:
    """Refuse a backend of the experts that was named and cannot run here: raises ConfigError."""
    from curry_train.kernels import dispatch
    from curry_train.models.protocol import COMPUTE_DTYPES

    model = config.model
    named = os.environ.get(dispatch.VARIABLE) or getattr(model, "moe_backend", "auto")
    if not getattr(model, "num_experts", 0) or named == "auto":
        return
    dtype, width = COMPUTE_DTYPES[config.precision], model.hidden_size
    try:
        dispatch.choose(
            device, dtype, width=width, hidden=model.moe_intermediate_size, backend=named
        )
    except ValueError as error:
        raise ConfigError([str(error)]) from None


def pick_device(accelerator: str) -> Any:
    """Return the torch device for one process; mps only by name. Raises ConfigError if absent."""
    import torch

    if accelerator == "cuda" or (accelerator == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise ConfigError(
                ["accelerator=cuda, but torch sees no CUDA device; set accelerator=cpu or auto"]
            )
        return torch.device("cuda", torch.cuda.current_device())
    if accelerator == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(["accelerator=mps, but torch sees none; set accelerator=cpu or auto"])
        return torch.device("mps")
    return torch.device("cpu")


class StopSignals:
    """Remembers that somebody asked this process to stop; the loop looks once a step.

    SIGTERM, SIGUSR1 and the first SIGINT ask for a checkpoint and an orderly end; a second SIGINT
    raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.code = 0
        self.seen_at: float | None = None
        for name in STOP_SIGNALS:
            signal.signal(getattr(signal, name), self.handle)

    def handle(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and self.code == STOP_SIGNALS["SIGINT"]:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third must not tear the journal's end
            raise KeyboardInterrupt
        self.code = max(self.code, STOP_SIGNALS[name])
        self.seen_at = self.seen_at or time.monotonic()


def signal_name(code: int) -> str:
    """Return the name of the signal that `agreed` chose."""
    return next(name for name, value in STOP_SIGNALS.items() if value == code)


@contextmanager
def launch(
    config: Config, corpus: Corpus, argv: Sequence[str]
) -> Iterator[tuple[Mesh, Run, StopSignals]]:
    """Join the processes and open the run folder; on the way out, leave no rank hanging.

    A crash is told once, by the rank that failed first, with its whole traceback; ranks that only
    lost a peer print one line. All of them end with code 1 within PEER_GRACE seconds.
    """
    from curry_train.checkpoint import CheckpointError
    from curry_train.parallel.mesh import agreed
    from curry_train.tracking.run_folder import Run

    signals = StopSignals()
    try:
        mesh = join_processes(config, spawn=True)
        run = Run.open(config, mesh, argv=argv, data_hash=corpus.hash)
    except ConfigError:
        close_group()
        raise
    watch_peers(run, mesh)
    try:
        yield mesh, run, signals
    except KeyboardInterrupt:
        tell("stopped by a second SIGINT; the last checkpoint stands", sys.stderr)
        run.finish("preempted", "second SIGINT", 0)
        leave(0)
    except CheckpointError as error:
        # Every rank raises it with the same text, and no traceback says more than it does.
        if mesh.rank == 0:
            run.fail(rank=0, error=error)
            tell(str(error), sys.stderr)
        run.finish("crashed", str(error), 1)
        leave(1)
    except Exception as error:
        report_crash(error, run, mesh)
        leave(1)
    if signals.seen_at is not None:
        seconds, grace = time.monotonic() - signals.seen_at, config.run.stop_grace
        if seconds > grace:
            tell(f"the stop took {seconds:.0f} s, longer than run.stop_grace={grace:g}", sys.stderr)
    agreed(0, mesh)  # nobody leaves while another rank may still need it
    close_group()


def close_group() -> None:
    """Close the process group; without this some launchers see an abort after a clean end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def leave(code: int) -> None:
    """End this process now: a clean shutdown would wait for ranks that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_crash(error: BaseException, run: Run, mesh: Mesh) -> None:
    """Write failure.json if this rank is the first to fail, and print what its place allows."""
    text = "".join(traceback.format_exception(error))
    lost_peer = any(words in str(error).lower() for words in LOST_PEER_WORDS)
    if lost_peer and mesh.world > 1:
        # The rank that broke the connection may still be writing why.
        time.sleep(1.0)
    first = run.fail(rank=mesh.rank, error=error, traceback_text=text, lost_peer=lost_peer)
    last_line = traceback.format_exception_only(error)[-1].strip()
    if not first:
        tell(f"rank {mesh.rank} stops after another rank failed: {last_line}", sys.stderr)
    elif lost_peer and mesh.world > 1:
        tell(
            f"rank {mesh.rank} lost another rank, which left no word of why (killed?): {last_line}",
            sys.stderr,
        )
    else:
        tell(f"rank {mesh.rank} failed first:\n{text.rstrip()}", sys.stderr)
    run.finish("crashed", last_line if first else run.failure(), 1)


def watch_peers(run: Run, mesh: Mesh) -> None:
    """Start a thread that ends this rank when another one has reported a failure.

    A collective on a GPU does not notice a dead peer before its timeout; the failure file does.
    """
    if mesh.world == 1:
        return
    known = run.failure_time()

    def watch() -> None:
        while True:
            time.sleep(1.0)
            if run.failure_time() == known:
                continue
            time.sleep(PEER_GRACE)
            tell(f"rank {mesh.rank} stops: another rank failed", sys.stderr)
            run.finish("crashed", run.failure(), 1)
            leave(1)

    threading.Thread(target=watch, name="watch-peers", daemon=True).start()
