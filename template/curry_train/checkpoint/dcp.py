"""Save and load checkpoints of any layout of ranks: complete or absent, and never a pickle.

torch.distributed.checkpoint plans who writes and reads which part of which tensor; storage is
ours, because its stock metadata file is a pickle, which must never be opened. A save goes to a
temporary sibling; every file is flushed to disk; the manifest comes last; one rename commits.
Overwriting in place would lose the old checkpoint to a kill in the middle of the new one.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from curry_train.checkpoint import (
    DTYPES,
    FORMAT,
    MANIFEST,
    CheckpointError,
    commit,
    file_problem,
    folder_name,
    is_file_name,
    latest,
    read_manifest,
)
from curry_train.checkpoint.planners import LoadPlanner, SavePlanner
from curry_train.checkpoint.storage import Reader, Writer, dtype_name, rank_file
from curry_train.parallel.mesh import Mesh

__all__ = [
    "CheckpointError",
    "latest",
    "load",
    "load_rank_tensors",
    "read_file",
    "read_manifest",
    "save",
]

Result = TypeVar("Result")

_META = ("samples_consumed", "data_hash", "config_hash", "model", "mesh")
_OWN_KEYS = ("format", "step", "files", "tensors", "sha256")


def save(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    rank_tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    files: Mapping[str, bytes],
    mesh: Mesh,
    keep: int,
    expert_count: int | None = None,
) -> Path:
    """Write root/step-XXXXXXXX and return it; every rank of the mesh calls this together.

    tensors: the global state under canonical names. A DTensor is written shard by shard, each
    shard once; a plain tensor is a replica, written by one rank, and every rank that names it
    must hold the same bits. Ranks may hold different names (pipeline stages).
    rank_tensors: this rank's own tensors, such as random states. files: rank 0's small files.
    expert_count: experts of the whole model; tensors named `.experts.` must have it as shape[0].
    None takes num_experts of meta["model"].

    keep: newest complete checkpoints that stay, this one included; 0 keeps all.
    A step that is already saved is never overwritten: see commit.claim.

    Group: world; a few object collectives.
    Raises: CheckpointError on every rank; the checkpoints that were there stay valid.
    """
    final = Path(root) / folder_name(step)
    if expert_count is None:
        model = meta.get("model")
        expert_count = model.get("num_experts") if isinstance(model, dict) else None
    problems = _tensor_problems(tensors, expert_count) + _tensor_problems(rank_tensors, None)
    _agree(mesh, problems + _meta_problems(step, meta, files, keep))
    temporary = _on_rank_zero(mesh, lambda: commit.claim(final, meta["samples_consumed"]))
    if temporary is None:
        return final

    def finish(entries: list[dict[str, Any]], placed: dict[str, Any]) -> None:
        manifest = {"format": FORMAT, "step": step, **meta, "files": entries, "tensors": placed}
        commit.commit(temporary, final, manifest)

    writer = Writer(temporary, mesh.rank, rank_tensors=rank_tensors, files=files, commit=finish)
    group = mesh.group("world")
    try:
        with _plain_errors(mesh):
            state_dict_saver.save(
                dict(tensors),
                storage_writer=writer,
                planner=SavePlanner(compare_replicas=group is not None),
                process_group=group,
                no_dist=group is None,
            )
    finally:
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    if mesh.rank == 0:
        commit.prune(final.parent, keep, final)
    return final


def load(
    checkpoint: Path,
    tensors: Mapping[str, Tensor],
    *,
    mesh: Mesh | None = None,
    verify: bool = True,
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """Fill tensors in place from a checkpoint and return its manifest; all ranks call together.

    Strict: the names over all ranks must be those of the checkpoint, with equal shapes and
    dtypes (a cast would not be an exact resume). ignore: prefixes of names that may stay
    unread, such as ("optim.",) to take the weights alone. mesh: None reads in this process only.
    verify: compare every file's sha256 first; the ranks share the files among them.
    Nothing is written to tensors before all of this holds, and nothing on disk is changed.

    Group: world; three object collectives.
    Raises: CheckpointError on every rank with all problems, each with its file or key.
    """
    checkpoint, mesh = Path(checkpoint), mesh or Mesh.single()
    manifest: dict[str, Any] = {"tensors": {}}
    try:
        manifest = read_manifest(checkpoint)
        mine = manifest["files"][mesh.rank :: mesh.world]
        found = [file_problem(checkpoint, entry, verify=verify) for entry in mine]
        problems = [problem for problem in found if problem is not None]
        problems += _mismatches(checkpoint, tensors, manifest)
    except CheckpointError as error:
        problems = error.problems
    wanted = {name for names in _gather(mesh, list(tensors)) for name in names}
    problems += [
        f"{checkpoint / MANIFEST}: tensor {name} is in the checkpoint and unknown to this model"
        for name in manifest["tensors"]
        if name not in wanted and not name.startswith(tuple(ignore))
    ]
    _agree(mesh, problems)
    group = mesh.group("world")
    with _plain_errors(mesh):
        state_dict_loader.load(
            dict(tensors),
            storage_reader=Reader(checkpoint, manifest),
            planner=LoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    return manifest


def load_rank_tensors(checkpoint: Path, rank: int) -> dict[str, Tensor] | None:
    """Return the tensors that this rank saved as its own; None when that rank saved none."""
    name = rank_file(rank)
    if all(entry["name"] != name for entry in read_manifest(checkpoint)["files"]):
        return None
    try:
        return parse_safetensors(read_file(checkpoint, name))
    except SafetensorError as error:
        path = Path(checkpoint) / name
        raise CheckpointError(f"{path} is no valid safetensors file: {error}") from None


def read_file(checkpoint: Path, name: str) -> bytes:
    """Return the bytes of one listed file, compared with the size and sha256 of the manifest."""
    checkpoint = Path(checkpoint)
    entries = {entry["name"]: entry for entry in read_manifest(checkpoint)["files"]}
    if name not in entries:
        known = ", ".join(entries)
        raise CheckpointError(f"{checkpoint / name} is not in the manifest, which lists {known}")
    problem = file_problem(checkpoint, entries[name], verify=True)
    if problem is not None:
        raise CheckpointError(problem)
    return (checkpoint / name).read_bytes()


def _tensor_problems(tensors: Mapping[str, Any], expert_count: int | None) -> list[str]:
    problems = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            problems.append(f"{name} is a {kind}; only tensors are saved, put it into meta")
        elif tensor.is_meta or tensor.layout != torch.strided:
            where = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            problems.append(f"tensor {name} is {where}; only dense tensors with data are saved")
        elif dtype_name(tensor.dtype) not in DTYPES:
            allowed = ", ".join(DTYPES)
            problems.append(f"tensor {name} is {dtype_name(tensor.dtype)}; allowed: {allowed}")
        elif ".experts." in name and tensor.shape[:1] != (expert_count,):
            problems.append(
                f"tensor {name} has shape {list(tensor.shape)}, but expert_count is "
                f"{expert_count}: shape[0] must count the experts of all ranks, so give the "
                "global tensor (a DTensor sharded over ep)"
            )
    return problems


def _meta_problems(
    step: int, meta: Mapping[str, Any], files: Mapping[str, bytes], keep: int
) -> list[str]:
    problems = [f"meta lacks {key}; needed: {', '.join(_META)}" for key in _META if key not in meta]
    problems += [f"meta holds {key}, which save sets itself" for key in _OWN_KEYS if key in meta]
    counts = {"step": step, "keep": keep}.items()
    problems += [f"{key} is {count}; allowed: 0 or more" for key, count in counts if count < 0]
    try:
        json.dumps(dict(meta), allow_nan=False)
    except (TypeError, ValueError) as error:
        problems.append(f"meta is not plain JSON: {error}")
    for name in files:
        if not is_file_name(name) or name == MANIFEST or name.startswith(("tensors-", "rank-")):
            problems.append(f"files holds {name!r}; allowed: a file name that save does not use")
    return problems


def _mismatches(
    checkpoint: Path, tensors: Mapping[str, Tensor], manifest: dict[str, Any]
) -> list[str]:
    problems, path = [], checkpoint / MANIFEST
    for name, tensor in tensors.items():
        saved = manifest["tensors"].get(name)
        if saved is None:
            problems.append(f"{path}: tensor {name} is missing in the checkpoint")
        elif tensor.is_meta:
            problems.append(f"tensor {name} is on the meta device; give it memory before loading")
        elif saved["shape"] != list(tensor.shape):
            problems.append(
                f"{path}: tensor {name} has shape {saved['shape']} in the checkpoint and "
                f"{list(tensor.shape)} here; set model.* to the values under its key model"
            )
        elif saved["dtype"] != dtype_name(tensor.dtype):
            problems.append(
                f"{path}: tensor {name} is {saved['dtype']} in the checkpoint and "
                f"{dtype_name(tensor.dtype)} here; set precision to what it was saved with"
            )
    return problems


def _gather(mesh: Mesh, value: Result) -> list[Result]:
    group = mesh.group("world")
    if group is None:
        return [value]
    values: list[Any] = [None] * mesh.world
    dist.all_gather_object(values, value, group=group)
    return values


def _agree(mesh: Mesh, problems: list[str]) -> None:
    """Raise the problems of all ranks on every rank, each once; none of them raises nothing."""
    _raise_by_rank(dict(enumerate(_gather(mesh, problems))), mesh)


def _on_rank_zero(mesh: Mesh, function: Callable[[], Result]) -> Result:
    """Call function on rank 0 and return its answer, or raise its error, on every rank."""
    answer: list[Any] = [None, []]
    if mesh.rank == 0:
        try:
            answer[0] = function()
        except CheckpointError as error:
            answer[1] = error.problems
        except OSError as error:
            answer[1] = [f"{error.filename} cannot be written: {error.strerror}"]
    group = mesh.group("world")
    if group is not None:
        dist.broadcast_object_list(answer, src=dist.get_global_rank(group, 0), group=group)
    if answer[1]:
        raise CheckpointError(answer[1])
    return answer[0]


@contextmanager
def _plain_errors(mesh: Mesh) -> Iterator[None]:
    """Turn torch's CheckpointException, which is no Exception, into a CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        found = {}
        for rank, (error, _) in failure.failures.items():
            if not isinstance(error, Exception):
                raise error from None
            plain = isinstance(error, CheckpointError)
            found[rank] = error.problems if plain else [f"{type(error).__name__}: {error}"]
        _raise_by_rank(found, mesh)


def _raise_by_rank(found: Mapping[int, list[str]], mesh: Mesh) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, problems in found.items():
        for problem in problems:
            ranks.setdefault(problem, []).append(rank)
    if ranks:
        raise CheckpointError(
            problem if len(where) == mesh.world else f"rank {where[0]}: {problem}"
            for problem, where in ranks.items()
        )
