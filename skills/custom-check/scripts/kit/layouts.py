"""A project's configuration for some ranks, and a small model of the same kind that fits a CPU.

Skills that fork ranks on this machine run the user's layout on that model: what decides how ranks
work together (attention, routing, tying, schedule, zero, recomputation) stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .user_code import put_first_on_path, user_code

if TYPE_CHECKING:
    from .cli import Invocation

MOST_RANKS = 32
LAUNCHERS = ("WORLD_SIZE", "SLURM_NTASKS")
MOST_PARAMETERS = 3_000_000
TRAINING = {
    "precision": "fp64", "compile": False, "optim.lr": 0.01, "optim.min_lr": None,
    "optim.warmup_steps": 0, "optim.schedule": "constant", "run.comm_timeout": 60.0,
    "run.resume": "never", "run.init_from": None,
}  # fmt: skip
CLIP = 0.05
"""So small that it always clips, where the project clips at all."""


def check_layout_flags(args: Any) -> None:
    """Refuse what ranks of this machine cannot do; needs a flag --world."""
    if args.target is not None:
        raise UsageError("--target", "layouts belong to a project", "set --project and --set")
    if args.device not in ("auto", "cpu"):
        raise UsageError(f"--device {args.device}", "ranks are forked on the CPU", "leave it out")
    if args.world is not None and not 1 <= args.world <= MOST_RANKS:
        raise UsageError(f"--world {args.world}", f"it takes 1 to {MOST_RANKS} ranks")


def words_of(call: Invocation) -> list[str]:
    """Return the overrides that the flags name."""
    seed = call.args.seed
    return [*call.args.set, *([] if seed is None else [f"seed={seed}"])]


def load(call: Invocation, words: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the project's Config for these overrides, or None, and what its rules refuse."""
    from .target import check_request

    check_request(call.project, None, words, "auto")
    put_first_on_path(call.project)
    with user_code("importing curry_train of the project"):
        from curry_train.compose import load_config
        from curry_train.config import ConfigError
    home = Path(inspect.getfile(load_config)).resolve().parents[1]
    if home != call.project.resolve():
        raise UsageError(
            f"curry_train was imported from {home}, not from {call.project}",
            fix="remove that folder from PYTHONPATH or uninstall that curry_train",
        )
    with user_code("the configuration"), _no_launcher():
        try:
            return load_config(list(words), project=call.project), []
        except ConfigError as error:
            return None, error.problems


@contextlib.contextmanager
def _no_launcher() -> Iterator[None]:
    """Let the rules leave the number of ranks open, wherever this runs."""
    kept = {name: os.environ.pop(name, None) for name in LAUNCHERS}
    os.environ["SLURM_NTASKS"] = "1"
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def ranks_of(config: Any, asked: int | None) -> int:
    """Return the ranks asked for, else what the axes make; dp_shard=-1 takes the fewest."""
    from curry_train.parallel.dims import ParallelDims

    if asked is not None:
        return asked
    dims = ParallelDims.of(config.parallel)
    if dims.dp_shard != -1:
        return dims.world
    if isinstance(config.devices, int):
        return config.devices
    return replace(dims, dp_shard=dims.ep // math.gcd(dims.ep, dims.cp * dims.tp)).world


def refused(config: Any, world: int) -> list[str]:
    """Say what the project's rules refuse of a Config on so many ranks."""
    from curry_train.rules import problems

    with user_code("the rules"):
        return problems(config, world)


def refuse(head: str, sentences: list[str]) -> UsageError:
    """Return the error that tells every sentence on a line of its own."""
    return UsageError("\n".join([f"{head}: {len(sentences)} refused", *sentences]))


def changes(before: Any, after: Any) -> dict[str, list[Any]]:
    """Return key -> [value, value] of what two configurations differ in, training apart."""
    found: dict[str, list[Any]] = {}
    for group in ("model", "data", "parallel"):
        here, there = vars(getattr(before, group)), vars(getattr(after, group))
        for key in here:
            if here[key] != there[key]:
                found[f"{group}.{key}"] = [here[key], there[key]]
    return found


def written(values: dict[str, Any]) -> list[str]:
    """Write settings as overrides."""
    texts = {key: json.dumps(v) if not isinstance(v, str) else v for key, v in values.items()}
    return [f"{key}={text}" for key, text in texts.items()]


def small(
    config: Any, world: int, folder: Path, *, width: int = 16, length: int = 16, vocab: int = 257
) -> dict[str, Any]:
    """Return the settings that make the model small and keep its kind and its layout.

    Every size still divides by the axes. width: the most of hidden_size and of a feed-forward,
    heads are half of it; length, vocab: the least tokens of a sample and ids.
    """
    from curry_train.config import ModelConfig
    from curry_train.parallel.dims import ParallelDims

    dims, values = ParallelDims.of(config.parallel).resolve(world), dict(TRAINING)
    values["parallel.dp_shard"] = dims.dp_shard
    values["optim.max_grad_norm"] = CLIP if config.optim.max_grad_norm else 0.0
    unit = 2 * dims.cp * dims.tp
    values["data.seq_len"] = seq_len = -(-length // unit) * unit
    values |= {"data.input": _documents(folder, seq_len), "data.val_fraction": 0.01}
    values["data.tokenizer"] = "byte"
    values |= _batch(config, dims)
    if not isinstance(config.model, ModelConfig):
        _refuse_large(config)
        return values
    values |= _widths(config.model, dims, width) | _vocabulary(config.model, dims, vocab)
    values |= _blocks(config, seq_len) | _experts(config.model, dims, width)
    return values


def _documents(folder: Path, seq_len: int) -> str:
    """Write a corpus of many short documents, so that a window holds several; held out: a few."""
    luck, path = random.Random(4), folder / "documents.jsonl"
    words = ["of", "a", "rank", "the", "same", "sum", "every", "token", "once", "is"]
    texts = [" ".join(luck.choices(words, k=luck.randint(1, 5))) for _ in range(40 * seq_len)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def _batch(config: Any, dims: Any) -> dict[str, int]:
    from curry_train.config import resolve_micro_batch

    ranks, pp = dims.batch, config.parallel.pp
    size = resolve_micro_batch(config, ranks)
    count = min(config.data.global_batch_size // ranks // size, 2 * pp)
    size = min(size, max(2, 4 // (ranks * count)))
    return {"data.global_batch_size": ranks * count * size, "data.micro_batch_size": size}


def _refuse_large(config: Any) -> None:
    from curry_train.models.protocol import build_model, count_parameters

    total, _ = count_parameters(build_model(config, "meta"))
    if total > MOST_PARAMETERS:
        raise UsageError(
            f"model.architecture={config.model.architecture} has {total:,} parameters",
            f"only a decoder is made small here; others run as they are, up to {MOST_PARAMETERS:,}",
            "set smaller model.* sizes by --set",
        )


def _widths(model: Any, dims: Any, width: int) -> dict[str, Any]:
    """Cut widths and heads; heads keep being multi-, grouped- or single-query."""
    tp, head = dims.tp, width // 2
    groups = tp if tp > 1 else min(model.num_key_value_heads, 2)
    ratio = min(model.num_attention_heads // model.num_key_value_heads, 2)
    values = {
        "hidden_size": min(model.hidden_size, width),
        "num_key_value_heads": groups,
        "num_attention_heads": groups * ratio,
        "head_dim": min(model.head_dim, head),
        "initializer_range": 0.25,
    }
    for name in ("intermediate_size", "shared_expert_intermediate_size"):
        size = getattr(model, name)
        values[name] = max(min(size, width) // tp, 1) * tp if size else 0
    if model.kv_lora_rank:
        values |= {
            name: min(getattr(model, name), width) for name in ("kv_lora_rank", "q_lora_rank")
        }
        parts = ("qk_nope_head_dim", "qk_rope_head_dim")
        values |= {name: min(getattr(model, name), head) for name in parts}
        values["v_head_dim"] = min(model.v_head_dim, head)
    return {f"model.{name}": value for name, value in values.items()}


def _vocabulary(model: Any, dims: Any, vocab: int) -> dict[str, int]:
    """Keep padding in the vocabulary where the model has some."""
    unit = math.lcm(64, dims.tp)
    padded = -(-vocab // unit) * unit
    return {"model.vocab_size": padded - 63 if model.vocab_size % 64 else padded}


def _blocks(config: Any, seq_len: int) -> dict[str, Any]:
    """Cut the number of blocks; every pipeline stage keeps one, and every kind of block stays."""
    from curry_train.parallel.dims import stages_per_rank

    model, parallel, values = config.model, config.parallel, {}
    layers = min(model.num_hidden_layers, max(parallel.pp * stages_per_rank(parallel), 2))
    if isinstance(parallel.pp_split, list):
        split = [1 + (n > min(parallel.pp_split)) for n in parallel.pp_split]
        values["parallel.pp_split"], layers = split, sum(split)
    if isinstance(parallel.recompute, int):
        values["parallel.recompute"] = min(parallel.recompute, 2)
    values["model.num_hidden_layers"] = layers
    dense = model.first_k_dense_replace
    whole = dense == model.num_hidden_layers
    values["model.first_k_dense_replace"] = layers if whole else min(dense, 1, layers)
    if model.sliding_window is not None:
        values["model.sliding_window"] = min(model.sliding_window, max(seq_len // 2 - 1, 1))
        values["model.sliding_window_pattern"] = min(model.sliding_window_pattern, 2)
    return values


def _experts(model: Any, dims: Any, width: int) -> dict[str, Any]:
    """Cut experts, choices and groups; ep still divides them."""
    if not model.num_experts:
        return {}
    chosen, groups = min(model.num_experts_per_tok, 2), min(model.n_group, 2)
    unit = math.lcm(dims.ep, groups * (2 if groups > 1 else 1))
    values = {
        "num_experts": -(-min(model.num_experts, 8) // unit) * unit,
        "num_experts_per_tok": chosen,
        "n_group": groups,
        "topk_group": 1 if model.topk_group < model.n_group else groups,
        "moe_intermediate_size": min(model.moe_intermediate_size, max(width // 2, 1)),
        "moe_backend": "auto",
    }
    return {f"model.{name}": value for name, value in values.items()}
