"""Rewrite weights tensor by tensor: folders of Hugging Face to checkpoints and back, and compare.

huggingface.py is the way in; this file holds what needs torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curry_train.checkpoint import (
    MANIFEST,
    CheckpointError,
    file_problem,
    folder_name,
    read_manifest,
    weight_files,
)
from curry_train.checkpoint.boxes import Box
from curry_train.checkpoint.contents import read_box
from curry_train.checkpoint.convert import fresh_folder, seal
from curry_train.checkpoint.families import CONFIG, FAMILIES, read_json, read_model, write_config
from curry_train.checkpoint.storage import dtype_name, write_file, write_streamed
from curry_train.checkpoint.tensor_names import Source, sources
from curry_train.config import Config, model_schema
from curry_train.data import DataError
from curry_train.data.tokenizer import END_OF_TEXT, ByteTokenizer, library_json, load_tokenizer
from curry_train.models.protocol import meta_model, named_state
from curry_train.parallel.shards import Part

BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)
"""Files that go along with weights, in both directions, unread."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = ("float32", "bfloat16", "float16", "float64")
Told = Callable[[int], None]


def import_weights(
    folder: Path, out: Path, precision: str, told: Told
) -> tuple[Path, weight_files.Report]:
    """Write a folder as checkpoint out/step-00000000; see huggingface.import_weights.

    The manifest keeps the dtypes of the files (`weights_dtype`, and `weights_dtypes` of tensors
    with another one), so that an export gives the same bits back.
    """
    file = "tensors-00000.safetensors"
    model = read_model(folder)[0]
    if precision not in ("fp32", "fp64"):
        raise CheckpointError(f"precision {precision}: weights are stored as fp32 or fp64")
    state = dict(named_state(meta_model(replace(Config(model=model), precision=precision))))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found, report = weight_files.plan(folder, model, shapes)
    kinds = {name: (dtype_name(t.dtype), [*t.shape]) for name, t in state.items()}

    def tensor_of(name: str) -> Tensor:
        tensor = torch.empty(state[name].shape, dtype=state[name].dtype)
        weight_files.read(folder, {name: Part.whole(tensor)}, found)
        told(tensor.nbytes)
        return tensor

    chunks = {
        name: {
            "dtype": dtype,
            "shape": shape,
            "chunks": [{"offset": [0] * len(shape), "shape": shape, "file": file, "key": name}],
        }
        for name, (dtype, shape) in sorted(kinds.items())
    }
    raw = read_json(folder / CONFIG)
    with fresh_folder(out / folder_name(0)) as step:
        entries = [write_streamed(step / file, kinds, tensor_of)]
        for name in filter(lambda name: (folder / name).is_file(), BESIDE):
            entries.append(write_file(step / name, [(folder / name).read_bytes()]))
        manifest = {
            **_dtypes_of(found),
            "token_ids": {key: raw[key] for key in TOKEN_IDS if raw.get(key) is not None},
            "format": 1,
            "step": 0,
            "samples_consumed": 0,
            "tokens": 0,
            "data_hash": "",
            "config_hash": "",
            "seed": 0,
            "seq_len": min(model.max_position_embeddings, 2048),
            "loss_scale": [1.0, 0],
            "model": asdict(model),
            "mesh": {},
            "files": entries,
            "tensors": chunks,
        }
        seal(step, manifest)
    return out / folder_name(0), report


def _dtypes_of(found: Mapping[str, list[weight_files.Found]]) -> dict[str, Any]:
    """Return `weights_dtype`, that of most tensors, and `weights_dtypes` of the others."""
    floats = weight_files.FLOATS

    of = {name: floats.get(items[0].stored.dtype, "bfloat16") for name, items in found.items()}
    common = Counter(of.values()).most_common(1)[0][0]
    others = {name: dtype for name, dtype in sorted(of.items()) if dtype != common}
    return {"weights_dtype": common, "weights_dtypes": others}


def export(checkpoint: Path, out: Path, dtype: str, max_shard_bytes: int, told: Told) -> Path:
    """Write a checkpoint as a folder that transformers loads; see huggingface.export."""
    manifest = read_manifest(checkpoint)
    with ThreadPoolExecutor(4) as pool:
        looking = partial(file_problem, checkpoint, verify=True)
        if damaged := [*filter(None, pool.map(looking, manifest["files"]))]:
            raise CheckpointError(damaged)
    weights = _weights(manifest)
    dtypes = _file_dtypes(manifest, weights, dtype)
    common = Counter(dtypes.values()).most_common(1)[0][0]
    raw = write_config(model_of(checkpoint, manifest), common)
    users = _users(raw, weights)
    kinds = {key: (dtypes[of[0][0]], of[0][1].shape) for key, of in users.items()}
    files = _shards(kinds, max_shard_bytes)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()

    def tensor_of(key: str) -> Tensor:
        tensor = _in_file(checkpoint, weights, users[key], *kinds[key])
        told(tensor.numel() * getattr(torch, weights[users[key][0][0]]["dtype"]).itemsize)
        return tensor

    with fresh_folder(out) as folder:
        for file, keys in files.items():
            part = {key: kinds[key] for key in keys}
            write_streamed(folder / file, part, tensor_of, {"format": "pt"})
        if len(files) > 1:
            write_file(folder / weight_files.INDEX, [_index(files, kinds)])
        for name, content in _beside(checkpoint, manifest, raw).items():
            write_file(folder / name, [content])
        write_file(folder / CONFIG, [_json(raw)])
    return out


def model_of(checkpoint: Path, manifest: Mapping[str, Any]) -> Any:
    """Return the `model` group of a manifest as its dataclass. Raises: CheckpointError."""
    try:
        return model_schema(manifest["model"]["architecture"])(**manifest["model"])
    except (KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint / MANIFEST} key model: {told}") from None


def _users(
    raw: Mapping[str, Any], weights: Mapping[str, Any]
) -> dict[str, list[tuple[str, Source]]]:
    """Return key in the files -> which of our tensors it is made of, in the order of the model."""
    family, users = FAMILIES[raw["architectures"][0]], defaultdict(list)

    def place(name: str) -> list[Any]:
        parts = re.split(r"(\d+)", name)
        ends = {"model.embed_tokens.weight": -1, "model.norm.weight": 1, "lm_head.weight": 2}
        return [ends.get(name, 0), *(int(p) if p.isdigit() else p for p in parts)]

    for name in sorted(weights, key=place):
        for source in sources(family, name, tuple(weights[name]["shape"])):
            users[source.key].append((name, source))
    return users


def _weights(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's tensors without those of the optimizer."""
    return {n: e for n, e in manifest["tensors"].items() if not n.startswith("optim.")}


def _file_dtypes(
    manifest: Mapping[str, Any], weights: Mapping[str, Any], dtype: str
) -> dict[str, str]:
    """Return the dtype that each of our tensors gets in the files."""
    if dtype == "auto" and "weights_dtype" in manifest:
        return dict.fromkeys(weights, manifest["weights_dtype"]) | manifest["weights_dtypes"]
    if dtype == "auto":
        return {name: entry["dtype"] for name, entry in weights.items()}
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype}: allowed are auto, {', '.join(DTYPES)}; set --dtype")
    # A correction bias moves by less than a short float resolves; transformers keeps it too.
    wide = "float32" if getattr(torch, dtype).itemsize < 4 else dtype
    return {name: wide if "e_score_correction" in name else dtype for name in weights}


def _in_file(
    checkpoint: Path,
    weights: Mapping[str, Any],
    users: list[tuple[str, Source]],
    dtype: str,
    shape: tuple[int, ...],
) -> Tensor:
    """Return one tensor of the files, made of ours; one expert of a stack is read at a time."""

    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    for name, source in users:
        target, sizes = weight_files.as_ours(tensor, source), tuple(weights[name]["shape"])
        stacked = ".experts." in name
        rows = range(sizes[0]) if source.expert is None else [source.expert]
        for row in rows if stacked else [0]:
            offset = (row if stacked else 0, *(0 for _ in sizes[1:]))
            box = Box(offset, (1, *sizes[1:]) if stacked else sizes)
            values = read_box(checkpoint, weights, name, box)
            whole = not stacked or source.expert is not None
            (target if whole else target[row]).copy_(values[0] if stacked else values)
    return tensor


def _shards(kinds: Mapping[str, tuple[str, Any]], limit: int) -> dict[str, list[str]]:
    """Return file -> keys, in order, no file above `limit` bytes unless one tensor is."""
    groups: list[list[str]] = [[]]
    held = 0
    for key, kind in kinds.items():
        size = _bytes_of(kind)
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(key)
        held += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{at:05d}-of-{count:05d}.safetensors": keys for at, keys in enumerate(groups, 1)}


def _bytes_of(kind: tuple[str, Any]) -> int:

    return torch.Size(kind[1]).numel() * getattr(torch, kind[0]).itemsize


def _index(files: Mapping[str, list[str]], kinds: Mapping[str, tuple[str, Any]]) -> bytes:

    count = sum(torch.Size(shape).numel() for _, shape in kinds.values())
    size = sum(map(_bytes_of, kinds.values()))
    placed = {key: file for file, keys in files.items() for key in keys}
    metadata = {"total_parameters": count, "total_size": size}
    return _json({"metadata": metadata, "weight_map": placed})


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _beside(checkpoint: Path, manifest: Mapping[str, Any], raw: dict[str, Any]) -> dict[str, bytes]:
    """Return the files that go along: tokenizer and generation; ids of tokens go into `raw` too."""

    listed = {entry["name"] for entry in manifest["files"]}
    found = {n: (checkpoint / n).read_bytes() for n in BESIDE if n in listed}
    ids = dict(manifest.get("token_ids", {}))
    if "tokenizer.json" in found:
        try:
            tokenizer = load_tokenizer(checkpoint / "tokenizer.json")
        except DataError:
            tokenizer = None  # kept as it came
        if isinstance(tokenizer, ByteTokenizer):
            found["tokenizer.json"] = library_json().encode()
        if tokenizer is not None and "token_ids" not in manifest:
            ids["eos_token_id"] = tokenizer.eos_id
        try:
            settings = dict(json.loads(found.get("tokenizer_config.json", b"{}")))
        except (TypeError, ValueError):
            settings = {}  # no object of JSON, which nobody could read
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if tokenizer is not None:
            settings.setdefault("eos_token", getattr(tokenizer, "eos_token", END_OF_TEXT))
        found["tokenizer_config.json"] = _json(settings)
    raw |= ids
    if ids:
        found.setdefault("generation_config.json", _json({"_from_model_config": True, **ids}))
    return found


def verify(folder: Path, checkpoint: Path, told: Told) -> list[str]:
    """Compare a folder of Hugging Face with a checkpoint; see huggingface.verify."""
    try:
        manifest = read_manifest(checkpoint)
        model, weights = model_of(checkpoint, manifest), _weights(manifest)
        shapes = {name: tuple(entry["shape"]) for name, entry in weights.items()}
        found, _ = weight_files.plan(folder, model, shapes)
    except CheckpointError as error:
        return error.problems
    problems = []
    for name, shape in shapes.items():
        stored = read_box(checkpoint, weights, name, Box((0,) * len(shape), shape))
        told(stored.nbytes)
        apart = (weight_files.unequal(folder, stored, item) for item in found[name])
        problems += [f"{checkpoint}: {name}: {problem}" for problem in apart if problem][:1]
    return problems
