"""What the inputs are made of: released weights and text, local ones, or labelled stand-ins."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from kit import layouts
from kit.errors import UsageError

RELEASED = {
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "mixtral_8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "olmoe_1b_7b": "allenai/OLMoE-1B-7B-0924",
    "deepseek_v2_lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "gpt_oss_20b": "openai/gpt-oss-20b",
    "gpt_oss_120b": "openai/gpt-oss-120b",
}
"""Preset -> its weights on the hub; with them goes a shard of DCLM-baseline."""
DATASET = "mlfoundations/dclm-baseline-1.0"
SHARD = "global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst"
RELEASED_TEXT = f"{DATASET}/{SHARD}"
SMALL_PARAMETERS = 5_000_000
"""A preset of at most so many stands in for itself, with random weights."""
STAND_IN_WIDTH = 64
ASK_BYTES = 4 * 10**9
"""More than this is fetched or written with --yes only."""


class Choice(NamedTuple):
    """Where one part comes from: its origin, in words, and a folder, file or listing of the hub."""

    origin: str
    source: str
    place: Any = None


def choose_weights(model: str, weights: str | None, stand_in: bool) -> Choice:
    """Say where the checkpoint comes from; asks the hub at most once."""
    from curry_train.checkpoint import CheckpointError, hub

    if stand_in:
        return Choice("stand-in", "random weights")
    if weights is not None:
        if Path(weights).is_dir():
            return Choice("local", str(Path(weights).resolve()), Path(weights))
        name = weights
    elif model in RELEASED:
        name = RELEASED[model]
    else:
        return Choice("stand-in", f"random weights: no released checkpoint of {model} is known")
    cached = hub.cached_folder(name)
    if cached is not None and not hub.missing_files(cached):
        return Choice("released", name, cached)
    try:
        return Choice("released", name, hub.list_files(name))
    except hub.HubUnreachable as error:
        if weights is not None:
            raise
        print(error, file=sys.stderr)
        return Choice("stand-in", f"random weights: {name} is not cached and the hub is silent")
    except CheckpointError as error:
        raise UsageError(str(error), fix="set --weights DIR or --stand-in") from None


def choose_text(model: str, text: str | None, stand_in: bool) -> Choice:
    """Say where the corpus's text comes from; asks the hub at most once.

    text: a path, or RELEASED_TEXT.
    """
    from curry_train.checkpoint import CheckpointError, hub

    if text is not None and text != RELEASED_TEXT:
        return Choice("local", str(Path(text).resolve()), Path(text))
    if stand_in or (text is None and model not in RELEASED):
        return Choice("stand-in", "the embedded text")
    try:
        choice = Choice("released", RELEASED_TEXT, hub.find_file(DATASET, SHARD))
    except hub.HubUnreachable:
        return Choice("stand-in", f"the embedded text: {DATASET} is not cached, the hub is silent")
    except CheckpointError as error:
        raise UsageError(str(error), fix="set --text PATH or --stand-in") from None
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError(
            f"{SHARD} is compressed by zstd, and pyarrow is not installed",
            "pip install pyarrow",
            "or set --text PATH or --stand-in",
        )
    return choice


def size_of(choice: Choice) -> int:
    """Return the bytes that a choice has to fetch."""
    return 0 if choice.place is None or isinstance(choice.place, Path) else choice.place.bytes


def fetched(choice: Choice) -> Path:
    """Return the folder or file of a choice, downloaded where it has to be."""
    from curry_train.checkpoint import CheckpointError, hub

    if isinstance(choice.place, Path):
        return choice.place
    folder = hub.download(choice.place)
    if choice.place.kind == "dataset":
        return folder / choice.place.files[0].name
    if problems := hub.missing_files(folder):
        raise CheckpointError(f"{choice.source}: {problem}" for problem in problems)
    return folder


def stand_in_model(config: Any) -> Any:
    """Return a Config whose model is small and of the same family; a small one is itself."""
    from curry_train.models.protocol import count_parameters, meta_model

    if count_parameters(meta_model(config))[0] <= SMALL_PARAMETERS:
        return config
    with tempfile.TemporaryDirectory() as folder:
        values = layouts.small(config, 1, Path(folder), width=STAND_IN_WIDTH)
    keys = {k.removeprefix("model."): v for k, v in values.items() if k.startswith("model.")}
    keys["initializer_range"] = config.model.initializer_range
    return replace(config, model=replace(config.model, **keys))


def write_stand_in(config: Any, root: Path) -> Path:
    """Write a checkpoint of random weights with the byte tokenizer below `root`."""
    from curry_train.checkpoint import dcp
    from curry_train.checkpoint.training_state import tokenizer_files
    from curry_train.data.tokenizer import ByteTokenizer
    from curry_train.models.protocol import build_model, named_state
    from curry_train.parallel.mesh import Mesh

    meta = {"samples_consumed": 0, "tokens": 0, "data_hash": "", "config_hash": "", "mesh": {}}
    meta |= {"seed": config.seed, "loss_scale": [1.0, 0], "model": asdict(config.model)}
    meta["seq_len"] = min(getattr(config.model, "max_position_embeddings", 2048), 2048)
    return dcp.save(
        root,
        step=0,
        tensors=dict(named_state(build_model(config, "cpu"))),
        rank_tensors={},
        meta=meta,
        files=tokenizer_files(ByteTokenizer()),
        mesh=Mesh.single(),
        keep=0,
    )


def write_checkpoint(choice: Choice, config: Any, root: Path, told: Callable[[int], None]) -> Path:
    """Write the checkpoint of a choice below `root`, which is emptied first."""
    from curry_train.checkpoint import huggingface

    shutil.rmtree(root, ignore_errors=True)  # half of an earlier call; downloads are elsewhere
    if choice.origin == "stand-in":
        return write_stand_in(stand_in_model(config), root)
    return huggingface.import_weights(fetched(choice), root, told=told)


def write_corpus(choice: Choice, tokenizer: str, out: Path) -> Path:
    """Write the corpus of a choice to `out`; continues what an earlier call began."""
    from curry_train.data import prepare, sources

    if choice.place is None:
        source = sources.embedded()
    else:
        source = sources.find_source(fetched(choice))
    settings = prepare.Settings(tokenizer=tokenizer)
    if out.exists() and not is_whole(out, prepare.corpus_key([source], settings)):
        shutil.rmtree(out)  # of another source, or half moved by a call that was killed
    return prepare.prepare([source], out, settings, quiet=False)


def is_whole(folder: Path, key: str) -> bool:
    """Say whether a folder is the corpus of this key, every byte of it."""
    from curry_train.data import DataError, token_file

    try:
        return token_file.read_corpus(folder, verify=True).manifest.get("key") == key
    except DataError:
        return False
