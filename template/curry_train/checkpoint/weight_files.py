"""Read published weights: which tensor lies where, whether all is there, and into views.

Files are memory-mapped and every rank reads only the boxes that it holds, straight into the memory
of its parameters. Rank 0 compares the names in the files with those of the model first, so nothing
is written before everything is known to fit.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from curry_train.checkpoint import CheckpointError
from curry_train.checkpoint.boxes import Box
from curry_train.checkpoint.dcp import through_rank_zero
from curry_train.checkpoint.families import (
    CONFIG,
    Family,
    differences,
    family_of,
    read_json,
    read_model,
)
from curry_train.checkpoint.mxfp4 import BLOCK, decode
from curry_train.checkpoint.storage import as_part, box_of
from curry_train.checkpoint.tensor_names import Source, sources
from curry_train.config import ModelConfig
from curry_train.parallel.mesh import Mesh
from curry_train.parallel.shards import Part

INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STACKED = ".experts.gate_up_proj"
"""A key that files have whose experts are stacked as in the memory of transformers 5."""
LISTED = 8
"""Names of one kind of problem that are told; of the rest their number."""
IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Buffers in older files that follow from the configuration."""

_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as m; '
    "m.from_pretrained('{folder}', use_safetensors=False).save_pretrained('NEW')\""
)


class Stored(NamedTuple):
    """A tensor in the files: dtype as safetensors write it, F32 or BF16."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Found(NamedTuple):
    """A source of one of our tensors, and where it is; packed: under `_blocks` and `_scales`."""

    source: Source
    stored: Stored
    packed: bool = False


class Report(NamedTuple):
    """What was read: the architecture, tensors of the model, bytes and dtypes of the files."""

    architecture: str
    tensors: int
    bytes: int
    dtypes: list[str]
    notes: list[str]

    def __str__(self) -> str:
        dtypes = " and ".join(self.dtypes)
        return "; ".join([f"{self.architecture}: {self.tensors} tensors of {dtypes}", *self.notes])


def read_index(folder: Path) -> dict[str, Stored]:
    """Return key -> Stored of all weights of a folder, from the headers of its files.

    Raises: CheckpointError with everything that is absent, cut off, doubled or not as indexed.
    """
    index, files, problems = _named_files(folder)
    found: dict[str, Stored] = {}
    doubled: dict[str, list[str]] = defaultdict(list)
    for file in files:
        try:
            with opened(folder / file) as tensors:
                for key in tensors.offset_keys():
                    entry = tensors.get_slice(key)
                    stored = Stored(file, entry.get_dtype(), tuple(entry.get_shape()))
                    if found.setdefault(key, stored) is not stored:
                        doubled[f"{found[key].file} and {file}"].append(key)
        except CheckpointError as error:
            problems += error.problems
    for pair, keys in doubled.items():
        problems += _listed(keys, f"are in both {pair}")
    if index is not None and not problems:
        where = folder / INDEX
        moved = [key for key in index.keys() & found.keys() if found[key].file != index[key]]
        problems += _listed(moved, f"are in another file than {where} says")
        problems += _listed(index.keys() - found.keys(), f"of {where} are not in its files")
        problems += _listed(found.keys() - index.keys(), f"are in files and not in {where}")
    if problems:
        raise CheckpointError(problems)
    return found


def _named_files(folder: Path) -> tuple[dict[str, str] | None, list[str], list[str]]:
    """Return the index (None without one), the names of the weight files, and what is wrong."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{folder / INDEX} has no weight_map of keys to files")
        names = sorted(set(map(str, index.values())))
        outside = [name for name in names if not _SHARD.fullmatch(name)]
        if outside:
            told = f"{folder / INDEX} names {', '.join(outside[:LISTED])}"
            raise CheckpointError(f"{told}: weights are read from *.safetensors beside it only")
        absent = [name for name in names if not (folder / name).is_file()]
        problems = [f"{folder / name} is absent, and {INDEX} names it" for name in absent]
        return index, [name for name in names if name not in absent], problems
    names = sorted(path.name for path in folder.glob("model*.safetensors"))
    if names:
        return None, names, []
    problem = f"{folder} holds no model.safetensors and no {INDEX}"
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        problem += (
            f", only {pickled[0]}: a pickle, which runs code when it is opened and is never read"
            f" here. Where you trust it: {_CONVERT.format(folder=folder)}"
        )
    raise CheckpointError(problem)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file by memory map. Raises: CheckpointError naming it."""
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from None


def _listed(names: Iterable[str], told: str) -> list[str]:
    """Return one sentence about some tensors, none about none."""
    names = sorted(names)
    if not names:
        return []
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return [f"{len(names)} tensors {told}: {', '.join(names[:LISTED])}{rest}"]


def match(
    folder: Path,
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    ignored: Callable[[str], bool],
) -> dict[str, list[Found]]:
    """Return our name -> where it is found. shapes: of every tensor of the whole model.

    ignored: which keys in the files may stay unread.
    Raises: CheckpointError that lists all missing, unused, mis-shaped and mis-typed tensors.
    """
    found: dict[str, list[Found]] = {}
    missing, shaped, typed, used = [], [], [], set()
    for name, shape in shapes.items():
        found[name] = []
        for source in sources(family, name, shape):
            keys, packed = [source.key], False
            if source.key not in stored and f"{source.key}_blocks" in stored:
                keys, packed = [f"{source.key}_blocks", f"{source.key}_scales"], True
            wanted = _packed_shapes(source) if packed else [source.shape]
            for key, sizes in zip(keys, wanted, strict=True):
                used.add(key)
                entry = stored.get(key)
                if entry is None:
                    missing.append(key)
                elif entry.shape != sizes:
                    told = f"{key} (file {list(entry.shape)}, model {list(sizes)})"
                    shaped.append(told)
                elif (entry.dtype == "U8") != packed or not (packed or entry.dtype in FLOATS):
                    typed.append(f"{key} ({entry.dtype})")
                elif key == keys[0]:
                    found[name].append(Found(source, entry, packed))
    unused = [key for key in stored if key not in used and not ignored(key)]
    problems = _listed(set(missing), "are missing in the files")
    problems += _listed(unused, "are in the files and unknown to this model")
    problems += _listed(set(shaped), "have another shape")
    problems += _listed(set(typed), f"are none of {', '.join(FLOATS)}: quantized weights")
    if problems:
        raise CheckpointError([f"{folder}: {problem}" for problem in problems])
    return found


def _packed_shapes(source: Source) -> list[tuple[int, ...]]:
    """Return the shapes of `_blocks` and `_scales` of a matrix [E, in, out]."""
    experts, inputs, outputs = source.shape
    groups = -(-inputs // BLOCK)
    return [(experts, outputs, groups, BLOCK // 2), (experts, outputs, groups)]


def plan(
    folder: Path, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, list[Found]], Report]:
    """Compare a folder with a model and return where everything lies; reads headers only.

    Raises: CheckpointError with every difference between config.json and `model`, or else with
    everything about the files that does not fit.
    """
    described, family, notes = read_model(folder)
    if problems := differences(folder, described, model):
        raise CheckpointError(problems)
    raw, stored = read_json(folder / CONFIG), read_index(folder)
    if family.experts == "each" and any(key.endswith(STACKED) for key in stored):
        family = replace(family, names={}, experts="stacked")
    extra = raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0
    last = model.num_hidden_layers + (extra if type(extra) is int else 0)
    more = tuple(f"model.layers.{at}." for at in range(model.num_hidden_layers, last))
    tied = model.tie_word_embeddings and HEAD not in shapes

    def ignored(key: str) -> bool:
        return bool(IGNORED.search(key)) or key.startswith(more) or (tied and key == HEAD)

    found = match(folder, family, shapes, stored, ignored)
    if tied and HEAD in stored and not _equal(folder, stored[HEAD], HEAD, stored[EMBEDDING]):
        raise CheckpointError(
            f"{folder}: {HEAD} differs from {EMBEDDING}, and tie_word_embeddings is true; set it"
            " to false in config.json if the files are right"
        )
    if more and any(key.startswith(more) for key in stored):
        notes = [*notes, f"left out the multi-token prediction, {', '.join(more)}*"]
    size = sum((folder / file).stat().st_size for file in {item.file for item in stored.values()})
    used = {item.stored.dtype for of in found.values() for item in of}
    dtypes = sorted(FLOATS.get(dtype, "MXFP4") for dtype in used)
    return found, Report(family_of(raw)[0], len(shapes), size, dtypes, notes)


def _equal(folder: Path, one: Stored, key: str, other: Stored) -> bool:
    """Compare a head with the embedding bit by bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with opened(folder / one.file) as here, opened(folder / other.file) as there:
        pair = here.get_tensor(key), there.get_tensor(EMBEDDING)
        return torch.equal(*map(_bits, pair))


def load(
    folder: Path,
    tensors: Mapping[str, Tensor | Part],
    model: ModelConfig,
    mesh: Mesh | None = None,
    told: Callable[[int], None] = lambda _: None,
) -> Report:
    """Fill tensors in place from a folder of Hugging Face; all ranks of a mesh call together.

    tensors: canonical name -> what this rank holds of it, in any floating-point dtype; over all
    ranks the whole model. model: the configuration of that model, which config.json must describe.
    Values are cast to the dtype of the target. told: called with the bytes read so far.
    Nothing is written before names, shapes and dtypes of everything fit; no code is run.

    Group: world; two rounds through rank 0. Raises: CheckpointError on every rank.
    """
    folder, mesh = Path(folder), mesh or Mesh.single()
    parts: dict[str, Part] = {}

    def look() -> dict[str, tuple[int, ...]]:
        parts.update({name: as_part(tensor) for name, tensor in tensors.items()})
        return {name: tuple(part.shape) for name, part in parts.items()}

    def decide(ranks: list[dict[str, tuple[int, ...]]]) -> list[Any]:
        shapes = {name: shape for rank in ranks for name, shape in rank.items()}
        return [plan(folder, model, shapes)] * len(ranks)

    found, report = through_rank_zero(mesh, look, decide)
    through_rank_zero(mesh, lambda: read(folder, parts, found, told), lambda _: None)
    return report


def read(
    folder: Path,
    parts: Mapping[str, Part],
    found: Mapping[str, list[Found]],
    told: Callable[[int], None] = lambda _: None,
) -> None:
    """Fill parts from the places that `plan` found. Raises: CheckpointError naming the file."""
    jobs = [(part, item) for name, part in parts.items() for item in found[name]]
    jobs.sort(key=lambda job: job[1].stored.file)

    def fill(batch: list[tuple[Part, Found]]) -> None:
        tensors, file = None, ""
        for part, item in batch:
            try:
                if file != item.stored.file:
                    file = item.stored.file
                    tensors = safe_open(folder / file, framework="pt")
                told(fill_from(tensors, part, item))
            except (SafetensorError, OSError) as error:
                path = folder / file
                raise CheckpointError(f"{path} is no whole safetensors file: {error}") from None

    threads = max(min(4, (os.cpu_count() or 1) // 2), 1)
    size = max(-(-len(jobs) // (4 * threads)), 1)
    with ThreadPoolExecutor(threads) as pool:
        batches = (jobs[at : at + size] for at in range(0, len(jobs), size))
        deque(pool.map(fill, batches), maxlen=0)


def fill_from(tensors: Any, part: Part, item: Found) -> int:
    """Copy what a source holds of a part into it and return the bytes written, 0 for none.

    tensors: the open file of the source. Slices are views of the memory map, so nothing but the
    values of packed blocks, one expert at a time, takes memory of its own.
    """
    source, mine, target = item.source, box_of(part), part.tensor.detach()
    if source.expert is not None:
        row = source.expert - mine.offset[0]
        if not 0 <= row < mine.size[0]:
            return 0
        mine, target = Box(mine.offset[1:], mine.size[1:]), target[row]
    if not mine.elements:
        return 0
    if item.packed:
        _unpack(tensors, target, mine, source)
    else:
        target.copy_(as_ours(tensors.get_slice(source.key)[_index(source, mine)], source))
    return target.nbytes


def as_ours(tensor: Tensor, source: Source) -> Tensor:
    """Return a view of a tensor of the files, any shape, in the layout of ours."""
    if source.half is not None:
        tensor = tensor[..., source.half :: 2]
    return tensor.transpose(-1, -2) if source.transposed else tensor


def _index(source: Source, mine: Box) -> tuple[slice, ...]:
    """Return what of the tensor in the file holds a box of ours."""
    bounds = [*zip(mine.offset, mine.end, strict=True)]
    if source.transposed:
        bounds[-2:] = bounds[:-3:-1]
    if source.rows:
        first = source.shape[-2] // 2
        bounds[-2] = (bounds[-2][0] + first, bounds[-2][1] + first)
    if source.half is not None:
        bounds[-1] = (2 * bounds[-1][0], 2 * bounds[-1][1])
    return tuple(slice(*bound) for bound in bounds)


def _unpack(tensors: Any, target: Tensor, mine: Box, source: Source) -> None:
    """Decode blocks [E, out, G, 16] and scales [E, out, G] into a box of ours, [E, out, in]."""
    blocks, scales = (tensors.get_slice(f"{source.key}_{part}") for part in ("blocks", "scales"))
    (expert, row, column), (_, row_end, column_end) = mine.offset, mine.end
    step = 1 if source.half is None else 2
    rows = slice(step * row, step * row_end)
    groups = slice(column // BLOCK, -(-column_end // BLOCK))
    wide = target.dtype if target.dtype == torch.float64 else torch.float32
    for at in range(mine.size[0]):
        index = (slice(expert + at, expert + at + 1), rows, groups)
        packed, shared = (part[index][0, (source.half or 0) :: step] for part in (blocks, scales))
        values = decode(packed, shared, wide)
        first = column - BLOCK * groups.start
        target[at].copy_(values[:, first : first + mine.size[2]])


def unequal(folder: Path, stored: Tensor, item: Found) -> str | None:
    """Say how values of ours, a whole tensor of any float dtype, differ from those in the files.

    Bits are compared both ways: the files' cast as a load casts them, and ours cast back.
    """
    source, path = item.source, folder / item.stored.file
    row = 0 if source.expert is None else source.expert
    mine = stored if source.expert is None else stored[row : row + 1]
    again = torch.empty_like(mine)
    with opened(path) as tensors:
        fill_from(tensors, Part(again, stored.shape, (row, *(0 for _ in stored.shape[1:]))), item)
        pairs = [(mine, again)]
        if not item.packed:
            shape = tuple(mine.shape if source.expert is None else mine.shape[1:])
            index = _index(source, Box((0,) * len(shape), shape))
            raw = as_ours(tensors.get_slice(source.key)[index], source).reshape(mine.shape)
            pairs.append((mine.to(raw.dtype), raw))
        apart = [(_bits(ours) != _bits(theirs)).nonzero() for ours, theirs in pairs]
        for (ours, theirs), differ in zip(pairs, apart, strict=True):
            if len(differ):
                at, how = tuple(differ[0].tolist()), " differ from"
                if not len(apart[-1]):
                    dtype = str(pairs[-1][0].dtype).removeprefix("torch.")
                    how = f", once rounded to {dtype}, are those of"
                return (
                    f"{len(differ)} of {ours.numel()} values{how} {source.key} in {path},"
                    f" first at {[*at]}: {ours[at].item()} here, {theirs[at].item()} there"
                )
    return None


def _bits(tensor: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])
