"""Save and load checkpoints of any layout of ranks: complete or absent, and never a pickle.

A save goes to a temporary sibling; every file is flushed to disk; the manifest comes last; one
rename commits. Overwriting in place would lose the old checkpoint to a kill in the middle of the
new one. Pruning renames first, so it never leaves half a checkpoint under a valid name either.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from curry_train.checkpoint import (
    DTYPES,
    FORMAT,
    MANIFEST,
    CheckpointError,
    file_problem,
    folder_name,
    is_complete,
    latest,
    manifest_problems,
    manifest_sha256,
    read_manifest,
)
from curry_train.checkpoint.boxes import outside
from curry_train.checkpoint.retention import prune
from curry_train.checkpoint.storage import (
    Claim,
    as_part,
    box_of,
    claim,
    dtype_name,
    plan_save,
    rank_file,
    read_parts,
    shared_names,
    write_file,
    write_files,
    writing,
)
from curry_train.parallel.mesh import Mesh
from curry_train.parallel.shards import Part

__all__ = [
    "CheckpointError",
    "latest",
    "load",
    "load_rank_tensors",
    "read_file",
    "read_manifest",
    "save",
]


def save(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor | Part],
    rank_tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    files: Mapping[str, bytes],
    mesh: Mesh,
    keep: int,
    keep_every: int = 0,
    keep_best: int = 0,
) -> Path:
    """Write root/step-XXXXXXXX and return it; every rank of the mesh calls this together.

    tensors: the global state under canonical names, a Part for what the rank holds of one; a
    DTensor is the Part of its shard, a plain tensor a Part that is the whole. Every distinct box
    is written once, by one of the ranks that hold it with the same bits; all boxes together must
    hold each element once. Ranks may hold different names (pipeline stages) and empty boxes.
    Tensors named `.experts.` must have num_experts of meta["model"] as shape[0].
    rank_tensors: this rank's own, such as random states. meta: goes into the manifest.
    keep, keep_every, keep_best: which complete checkpoints stay, see retention.kept; keep=0: all.

    Group: world; two or three rounds through rank 0. Raises: CheckpointError on every rank.
    """
    final = Path(root) / folder_name(step)
    listed = [{"name": name, "bytes": 0, "sha256": "0" * 64} for name in files]
    manifest = {**meta, "format": FORMAT, "step": step, "files": listed, "tensors": {}}
    parts: dict[str, Part] = {}

    def look() -> dict[str, Claim]:
        _refuse_to_save(manifest, {**tensors, **rank_tensors})
        parts.update({name: as_part(tensor) for name, tensor in tensors.items()})
        return {name: claim(part, compare=False) for name, part in parts.items()}

    temporary, plan = _plan(final, manifest, look, parts, mesh)
    if temporary is None:
        return final

    def write() -> list[dict[str, Any]]:
        held = {f: {key: parts[n].tensor for n, key in keys.items()} for f, keys in plan.items()}
        own = {rank_file(mesh.rank): rank_tensors} if rank_tensors else {}
        entries = write_files(temporary, {**held, **own})
        for name, content in files.items() if mesh.rank == 0 else ():
            entries.append(write_file(temporary / name, [content]))
        return entries

    def end(written: list[list[dict[str, Any]]]) -> None:
        manifest["files"] = [entry for entries in written for entry in entries]
        _commit(temporary, final, manifest)
        prune(final.parent, keep=keep, keep_every=keep_every, keep_best=keep_best, also=[final])

    try:
        through_rank_zero(mesh, write, end)
    finally:
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def load(
    checkpoint: Path,
    tensors: Mapping[str, Tensor | Part],
    *,
    mesh: Mesh | None = None,
    verify: bool = True,
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> dict[str, Any]:
    """Fill tensors in place from a checkpoint and return its manifest; all ranks call together.

    Strict: the names over all ranks must be those of the checkpoint, with equal shapes and
    dtypes (a cast would not be an exact resume). ignore: prefixes of names that may stay
    unread, such as ("optim.",) to take the weights alone. mesh: None reads in this process only.
    cast: floating-point tensors may have another dtype here, as weights that start a run.
    verify: compare every file's sha256 first; the ranks share the files among them.
    Nothing is written to tensors before all of this holds, and nothing on disk is changed.

    Group: world; two rounds through rank 0.
    Raises: CheckpointError on every rank with all problems, each with its file or key.
    """
    checkpoint, mesh = Path(checkpoint), mesh or Mesh.single()
    path, manifest = checkpoint / MANIFEST, {"tensors": {}}
    parts: dict[str, Part] = {}

    def look() -> tuple[list[str], list[str]]:
        parts.update({name: as_part(tensor) for name, tensor in tensors.items()})
        try:
            manifest.update(read_manifest(checkpoint))
        except CheckpointError as error:
            return error.problems, list(parts)
        mine = manifest["files"][mesh.rank :: mesh.world]
        with ThreadPoolExecutor() as threads:
            looking = partial(file_problem, checkpoint, verify=verify)
            found = [*threads.map(looking, mine)]
        problems = [
            f"{problem}; {_content(manifest, entry['name'])}"
            for entry, problem in zip(mine, found, strict=True)
            if problem is not None
        ]
        return problems + _mismatches(path, parts, manifest["tensors"], cast), list(parts)

    def check(ranks: list[tuple[list[str], list[str]]]) -> None:
        wanted = {name for _, names in ranks for name in names}
        unknown = [
            f"{path}: tensor {name} is in the checkpoint and unknown to this model"
            for name in manifest["tensors"]
            if name not in wanted and not name.startswith(tuple(ignore))
        ]
        _raise_by_rank([problems for problems, _ in ranks], unknown)

    through_rank_zero(mesh, look, check)
    through_rank_zero(
        mesh, lambda: read_parts(checkpoint, parts, manifest["tensors"]), lambda _: None
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


def _plan(
    final: Path,
    manifest: dict[str, Any],
    look: Callable[[], dict[str, Claim]],
    parts: Mapping[str, Part],
    mesh: Mesh,
) -> tuple[Path | None, dict[str, dict[str, str]]]:
    """Return the temporary folder and what this rank writes there, file -> name -> key.

    look: fills parts and describes them. On rank 0 manifest["tensors"] is filled. The bits of
    what several ranks hold are compared in a round of its own: the rest needs none.
    """

    def begin(ranks: list[dict[str, Claim]]) -> list[tuple[Path | None, dict[str, Any]]]:
        manifest["tensors"], plan = plan_save(ranks)
        temporary = _claim(final, manifest["samples_consumed"])
        return [(temporary, mine) for mine in plan]

    def meet(ranks: list[dict[str, Claim]]) -> list[tuple[set[str], Any]]:
        shared = shared_names(ranks)
        return [(shared, mine) for mine in ([None] * mesh.world if shared else begin(ranks))]

    def compare() -> dict[str, Claim]:
        return {name: claim(part, compare=name in shared) for name, part in parts.items()}

    shared, planned = through_rank_zero(mesh, look, meet)
    return planned or through_rank_zero(mesh, compare, begin)


def _claim(final: Path, samples_consumed: int) -> Path | None:
    """Make the temporary folder of a save; None when this very state is already saved.

    Resume is exact, so step and data position decide the state: at another position the save is
    refused. One run writes below root (its lease sees to it): what is temporary here was left by
    a kill and is removed.
    """
    if is_complete(final):
        saved = read_manifest(final)["samples_consumed"]
        if saved == samples_consumed:
            return None
        raise CheckpointError(
            f"{final} already holds this step at samples_consumed={saved}, now it is "
            f"{samples_consumed}: another history. Checkpoints are never overwritten; start a new "
            "run from the checkpoint you want (run.resume=CHECKPOINT)"
        )
    temporary = _temporary(final)
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        for left_by_a_kill in final.parent.glob("step-*.tmp-*"):
            shutil.rmtree(left_by_a_kill, ignore_errors=True)
        if final.exists():  # damaged: somebody may still want to look at it
            os.replace(final, final.with_name(f"{final.name}.incomplete-{secrets.token_hex(3)}"))
        temporary.mkdir()
    return temporary


def _commit(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of what all ranks wrote, name the folder and point `latest` to it.

    Once the folder has its name the checkpoint stands: a pointer that cannot be moved is a warning.
    """
    text = json.dumps({**manifest, "sha256": manifest_sha256(manifest)}, allow_nan=False)
    write_file(temporary / MANIFEST, [text.encode()])
    with writing(final):
        _sync_folder(temporary)
        os.replace(temporary, final)
        _sync_folder(final.parent)  # before older ones may be removed
    pointer = final.with_name(f"latest.tmp-{secrets.token_hex(3)}")
    try:
        write_file(pointer, [f"{final.name}\n".encode()])
        os.replace(pointer, final.with_name("latest"))
    except (CheckpointError, OSError) as error:
        pointer.unlink(missing_ok=True)
        warnings.warn(f"{final.with_name('latest')} could not be moved: {error}", stacklevel=2)


def _temporary(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp-{secrets.token_hex(3)}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_to_save(manifest: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    """Raise CheckpointError with everything that this rank gives and no checkpoint can hold."""
    problems = [f"meta or files: {problem}" for problem in manifest_problems(manifest)]
    experts = (manifest.get("model") or {}).get("num_experts")
    for name, value in tensors.items():
        tensor = value.tensor if isinstance(value, Part) else value
        shape = list(value.shape) if isinstance(value, Tensor | Part) else []
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            problems.append(f"{name} is a {kind}; only tensors are saved, put it into meta")
        elif tensor.is_meta or tensor.layout != torch.strided:
            where = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            problems.append(f"tensor {name} is {where}; only dense tensors with data are saved")
        elif dtype_name(tensor.dtype) not in DTYPES:
            allowed = ", ".join(DTYPES)
            problems.append(f"tensor {name} is {dtype_name(tensor.dtype)}; allowed: {allowed}")
        elif ".experts." in name and shape[:1] != [experts]:
            problems.append(
                f"tensor {name} has shape {shape}, but the model's num_experts is {experts}: "
                "shape[0] must count the experts of all ranks, so give a Part of the global shape"
            )
        else:
            problems += _misplaced(name, as_part(value))
    if problems:
        raise CheckpointError(problems)


def _misplaced(name: str, part: Part) -> list[str]:
    if not outside(box_of(part), part.shape):
        return []
    return [
        f"tensor {name}: a box of shape {list(part.tensor.shape)} at offset {list(part.offset)} "
        f"lies outside the global shape {list(part.shape)}; set the Part's shape and offset"
    ]


def _content(manifest: dict[str, Any], file: str) -> str:
    """Say which tensors a file holds, by the first key."""
    chunks = (chunk for entry in manifest["tensors"].values() for chunk in entry["chunks"])
    keys = [chunk["key"] for chunk in chunks if chunk["file"] == file]
    return f"it holds key {keys[0]} and {len(keys) - 1} more" if keys else "it holds no tensors"


def _mismatches(
    path: Path, parts: Mapping[str, Part], saved: dict[str, Any], cast: bool
) -> list[str]:
    problems = []
    for name, part in parts.items():
        entry, shape, dtype = saved.get(name), list(part.shape), dtype_name(part.tensor.dtype)
        if entry is None:
            problems.append(f"{path}: tensor {name} is missing in the checkpoint")
        elif part.tensor.is_meta:
            problems.append(f"tensor {name} is on the meta device; give it memory before loading")
        elif entry["shape"] != shape:
            problems.append(
                f"{path}: tensor {name} has shape {entry['shape']} in the checkpoint and {shape} "
                "here; set model.* to the values under its key model"
            )
        elif entry["dtype"] != dtype and not (cast and _both_float(entry["dtype"], dtype)):
            problems.append(
                f"{path}: tensor {name} is {entry['dtype']} in the checkpoint and {dtype} here; "
                "set precision to what it was saved with"
            )
        else:
            problems += _misplaced(name, part)
    return problems


def _both_float(*dtypes: str) -> bool:
    return all(getattr(torch, dtype).is_floating_point for dtype in dtypes)


def through_rank_zero(
    mesh: Mesh, work: Callable[[], Any], decide: Callable[[list[Any]], list[Any] | None]
) -> Any:
    """Work on every rank, decide on rank 0 from all results, and return this rank's answer.

    decide returns an answer for each rank, or None. Whatever a rank or rank 0 refuses is raised
    as CheckpointError on every rank. Group: world, two collectives.
    """
    group, result, problems, answers = mesh.group("world"), None, [], None
    try:
        result = work()
    except Exception as error:
        problems = _problems(error)
    results = [(result, problems)] * mesh.world
    root = 0 if group is None else dist.get_global_rank(group, 0)
    if group is not None:
        place = results if mesh.rank == 0 else None
        dist.gather_object((result, problems), place, dst=root, group=group)
    if mesh.rank == 0:
        try:
            _raise_by_rank([problems for _, problems in results])
            decided = decide([result for result, _ in results]) or [None] * mesh.world
            answers = [(answer, []) for answer in decided]
        except Exception as error:
            answers = [(None, _problems(error))] * mesh.world
    mine: list[Any] = answers or [None]
    if group is not None:
        dist.scatter_object_list(mine, answers, src=root, group=group)
    answer, problems = mine[0]
    if problems:
        raise CheckpointError(problems)
    return answer


def _problems(error: Exception) -> list[str]:
    if isinstance(error, CheckpointError):
        return error.problems
    return ["".join(traceback.format_exception(error)).rstrip()]  # a bug: say where


def _raise_by_rank(problems_of_ranks: list[list[str]], more: Sequence[str] = ()) -> None:
    """Raise every problem once, with the first rank that has it unless all have it."""
    ranks: dict[str, list[int]] = {}
    for rank, problems in enumerate(problems_of_ranks):
        for problem in problems:
            ranks.setdefault(problem, []).append(rank)
    told = [
        problem if len(where) == len(problems_of_ranks) else f"rank {where[0]}: {problem}"
        for problem, where in ranks.items()
    ]
    if told or more:
        raise CheckpointError([*told, *more])
