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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from curry_train.config import Config, ConfigError
from curry_train.tracking import flight_recorder
from curry_train.tracking.crash import (
    end_stuck_launcher,
    first_line,
    is_lost_peer,
    leave,
    report_crash,
    watch,
)
from curry_train.tracking.progress import tell

if TYPE_CHECKING:
    from curry_train.data.samples import Samples
    from curry_train.data.token_file import Corpus
    from curry_train.parallel.mesh import Mesh
    from curry_train.tracking.run_folder import Run

# Rank 0's largest value wins when ranks saw different signals.
STOP_SIGNALS = {"SIGUSR1": 1, "SIGTERM": 2, "SIGINT": 3}
JOIN_SECONDS = 60.0
"""Least time for all ranks to come together: they do not start at the same moment."""
REPORT_SECONDS = 2.0
"""What a failing rank keeps of run.comm_timeout for its report, at most a fifth of it."""
NARROW = 256
FABRIC_PRECISIONS = {"fp32": "32", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp64": "64"}


def prepare_environment(config: Config) -> None:
    """Choose the number of OpenMP threads and switch the flight recorder on, before torch is there.

    One thread for each of several ranks on a machine, and one for a narrow model, whose matrices
    are so small that threads wait for each other longer than they multiply (on a busy machine
    two threads made the quickstart ten times slower). A value that the user set stays; the full
    core count that `fabric run` sets for every rank counts as unset.
    """
    flight_recorder.switch_on(os.environ)
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

    from curry_train.parallel.mesh import Mesh

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
    with bounded_join(join_limit(config)):
        fabric = Fabric(**arguments)
        if "LT_CLI_USED" not in os.environ:
            fabric.launch()
        mesh = _mesh_of(fabric, config)
        bound_groups(mesh, group_limit(config, mesh))
        return mesh


def _mesh_of(fabric: Any, config: Config) -> Mesh:
    from curry_train.parallel.mesh import build_mesh
    from curry_train.rules import problems

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
        comm_timeout=join_limit(config),
    )


def wait_limit(comm_timeout: float) -> float:
    """Return how long a collective waits, so that its rank is gone after run.comm_timeout."""
    return comm_timeout - min(REPORT_SECONDS, comm_timeout / 5)


def group_limit(config: Config, mesh: Mesh) -> float:
    """Return the timeout of the groups. NCCL ends a process at it, so `watch` looks before."""
    seconds = config.run.comm_timeout
    return wait_limit(seconds) if mesh.device.type == "cpu" else seconds


def join_limit(config: Config) -> float:
    """Return how long ranks wait for each other until the run folder is there."""
    return max(config.run.comm_timeout, JOIN_SECONDS)


def bound_groups(mesh: Mesh, seconds: float) -> None:
    """Set how long the groups of this run wait for a peer: the mesh's, Fabric's and its store."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if dist.is_initialized():
        timeout = timedelta(seconds=seconds)
        for group in {None, *mesh.groups.values()}:  # None is the group that Fabric made
            distributed_c10d._set_pg_timeout(timeout, group)
        distributed_c10d._get_default_store().set_timeout(timeout)


@contextmanager
def bounded_join(seconds: float) -> Iterator[None]:
    """End this process when the ranks do not come together; torch's own bounds add up to hours."""

    def give_up() -> None:
        rank, world = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
        tell(
            f"rank {rank} of {world} waited {seconds:g} s for all ranks to join "
            "(run.comm_timeout, at least 60 s); see the output of the others",
            sys.stderr,
        )
        leave(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
    config: Config, corpus: Corpus | Samples, argv: Sequence[str]
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
        bound_groups(mesh, join_limit(config))  # rank 0 may look through many runs first
        run = Run.open(config, mesh, argv=argv, data_hash=corpus.hash)
        bound_groups(mesh, group_limit(config, mesh))
    except ConfigError:
        close_group()
        raise
    except Exception as error:
        if not is_lost_peer(error):
            raise
        name = f"rank {os.environ.get('RANK', '0')}"
        tell(f"{name} lost another rank before the run began: {first_line(error)}", sys.stderr)
        leave(1)
    limit = wait_limit(config.run.comm_timeout)
    watch(run, mesh, signals, limit)
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
        report_crash(error, run, mesh, limit)
        end_stuck_launcher()
        leave(1)
    if signals.seen_at is not None:
        seconds, grace = time.monotonic() - signals.seen_at, config.run.stop_grace
        if seconds > grace:
            tell(f"the stop took {seconds:.0f} s, longer than run.stop_grace={grace:g}", sys.stderr)
    try:
        agreed(0, mesh)  # nobody leaves while another rank may still need it
    except RuntimeError as error:
        tell(f"rank {mesh.rank} ended, but not all others: {first_line(error)}", sys.stderr)
        leave(1)
    close_group()


def close_group() -> None:
    """Close the process group; without this some launchers see an abort after a clean end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
