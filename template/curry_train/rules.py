"""What must hold for the values of a Config; `problems` says in sentences what does not.

Each sentence names the setting with its value, what is allowed and what to set. A setting is
always written `key=value`, so that a reader (and compose.py) can tell which ones are meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curry_train.config import Config, ModelConfig

CHOICES = {
    "accelerator": ("auto", "cpu", "cuda", "mps"),
    "precision": ("fp32", "bf16", "fp16", "fp64"),
    "optim.schedule": ("cosine", "wsd", "constant"),
}
AT_LEAST = {
    0: (
        "seed optim.min_lr optim.warmup_steps optim.decay_steps optim.weight_decay optim.beta1"
        " optim.beta2 optim.max_grad_norm run.eval_every run.save_every run.keep run.max_nonfinite"
        " run.sample_tokens model.num_experts model.shared_expert_intermediate_size"
        " model.first_k_dense_replace model.router_aux_loss_coef model.router_z_loss_coef"
    ),
    1: (
        "data.seq_len data.global_batch_size run.max_steps run.log_every parallel.pp"
        " parallel.dp_replicate parallel.cp parallel.tp parallel.ep model.vocab_size"
        " model.hidden_size model.intermediate_size model.num_hidden_layers"
        " model.num_attention_heads model.num_key_value_heads model.head_dim"
        " model.max_position_embeddings model.sliding_window model.num_experts_per_tok"
        " model.moe_intermediate_size"
    ),
    257: "data.bpe_vocab_size",  # 256 bytes and the end of a document
}
ABOVE_ZERO = (
    "optim.lr optim.eps data.val_fraction run.stop_grace run.comm_timeout"
    " model.rope_theta model.rms_norm_eps model.initializer_range"
)
BELOW = {"optim.beta1": 1, "optim.beta2": 1, "data.val_fraction": 1, "seed": 2**32}
NAME = re.compile(r"[^\W_][\w.-]*")
UNAVAILABLE = {
    "pp": "pipeline stages are",
    "cp": "splitting one sequence over ranks is",
    "tp": "splitting matrices over ranks is",
    "ep": "splitting experts over ranks is",
}


def problems(config: Config, world: int | None = None) -> list[str]:
    """Say what is wrong with the values; empty when the run can start.

    world: number of processes; None leaves out what depends on it.
    """
    found = [*_bounds(config), *_choices(config)]
    if config.model.architecture == "decoder":
        found += _decoder(config.model)
    else:
        # The Config of another model class may bring rules of its own.
        found += getattr(config.model, "problems", list)()
    return [*found, *_sequence(config), *_optim(config), *_mesh(config, world), *_places(config)]


def shown(value: object) -> str:
    """Write a value as it is typed on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def named(config: Config, *keys: str) -> str:
    """Write settings with their values: `a.b=1 and a.c=2`."""
    return " and ".join(f"{key}={shown(_value(config, key))}" for key in keys)


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _limited(config: Config, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        if key.startswith("model.") and config.model.architecture != "decoder":
            continue
        if (value := _value(config, key)) is not None:
            yield key, value


def _bounds(config: Config) -> Iterator[str]:
    for low, keys in AT_LEAST.items():
        for key, value in _limited(config, keys.split()):
            if not value >= low:
                yield f"{key}={shown(value)}: must be at least {low}; set {key}={low} or more"
    for key, value in _limited(config, ABOVE_ZERO.split()):
        if not value > 0:
            yield f"{key}={shown(value)}: must be above 0"
    for key, value in _limited(config, BELOW):
        if not value < BELOW[key]:
            yield f"{key}={shown(value)}: must be below {BELOW[key]}"
    for key in ("devices", "data.micro_batch_size"):
        value = _value(config, key)
        if value != "auto" and not (isinstance(value, int) and value >= 1):
            yield f"{key}={shown(value)}: must be auto or an integer of at least 1"
    if not (config.parallel.dp_shard == -1 or config.parallel.dp_shard >= 1):
        yield f"{named(config, 'parallel.dp_shard')}: must be -1 (fill the world) or at least 1"


def _choices(config: Config) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        if (value := _value(config, key)) not in allowed:
            yield f"{key}={value}: allowed are {', '.join(allowed)}"


def _decoder(model: ModelConfig) -> Iterator[str]:
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    if heads >= 1 and groups >= 1 and heads % groups:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        yield (
            f"model.num_key_value_heads={groups}: does not divide"
            f" model.num_attention_heads={heads}; set it to one of {_listed(fitting)}"
        )
    if model.head_dim % 2:
        yield (
            f"model.head_dim={model.head_dim}: rotary positions turn pairs, so it must be even;"
            f" set model.head_dim={model.head_dim + 1}"
        )
    if 1 <= model.num_experts < model.num_experts_per_tok:
        yield (
            f"model.num_experts_per_tok={model.num_experts_per_tok}: a token cannot visit more than"
            f" model.num_experts={model.num_experts}; set model.num_experts_per_tok to at most"
            f" {model.num_experts}"
        )
    if model.first_k_dense_replace > model.num_hidden_layers:
        yield (
            f"model.first_k_dense_replace={model.first_k_dense_replace}: there are only"
            f" model.num_hidden_layers={model.num_hidden_layers}; set at most that many"
        )
    scope = model.router_aux_loss_scope
    if scope == "global":
        yield (
            "model.router_aux_loss_scope=global: a balance loss over the whole step needs a second"
            " pass over its micro-batches, which this version does not make; allowed are sequence,"
            " micro_batch"
        )
    elif scope not in ("sequence", "micro_batch"):
        yield f"model.router_aux_loss_scope={scope}: allowed are sequence, micro_batch"


def _sequence(config: Config) -> Iterator[str]:
    longest = getattr(config.model, "max_position_embeddings", None)
    if longest is not None and config.data.seq_len > longest >= 1:
        yield (
            f"{named(config, 'data.seq_len')}: longer than"
            f" {named(config, 'model.max_position_embeddings')}; set data.seq_len to at most"
            f" {longest}, or a larger model.max_position_embeddings"
        )


def _optim(config: Config) -> Iterator[str]:
    optim = config.optim
    floor = optim.min_lr
    if optim.schedule != "constant" and floor is not None and floor > optim.lr > 0:
        yield (
            f"{named(config, 'optim.min_lr')}: above the peak {named(config, 'optim.lr')};"
            f" set optim.min_lr={optim.lr / 10:g}, say"
        )


def _mesh(config: Config, world: int | None) -> Iterator[str]:
    from curry_train.parallel.dims import AXES, batch_world, resolve

    parallel = config.parallel
    refused = [name for name in UNAVAILABLE if getattr(parallel, name) > 1]
    for name in refused:
        yield (
            f"parallel.{name}={getattr(parallel, name)}: {UNAVAILABLE[name]} not available in this"
            f" version, which accepts only what is proved equal to one process;"
            f" set parallel.{name}=1"
        )
    if parallel.zero != 0:
        reason = "not available in this version" if parallel.zero in (1, 2, 3) else "no such stage"
        yield f"parallel.zero={parallel.zero}: {reason}; set parallel.zero=0"
    sizes = [(axis, getattr(parallel, axis)) for axis in AXES]
    if refused or any(size < 1 and (axis, size) != ("dp_shard", -1) for axis, size in sizes):
        return
    try:
        known = world or parallel.dp_replicate * max(parallel.dp_shard, 1)
        yield from _batch(config, batch_world(resolve(parallel, known)))
    except ValueError as error:
        yield str(error)


def _batch(config: Config, ranks: int) -> Iterator[str]:
    batch, size = config.data.global_batch_size, config.data.micro_batch_size
    if batch < 1:
        return
    if batch % ranks:
        below = f"{batch // ranks * ranks} or " if batch > ranks else ""
        yield (
            f"data.global_batch_size={batch}: {ranks} ranks cannot share it evenly;"
            f" set data.global_batch_size to {below}{-(-batch // ranks) * ranks}"
        )
        return
    local = batch // ranks
    if isinstance(size, int) and size >= 1 and local % size:
        fitting = [n for n in range(1, local + 1) if local % n == 0]
        yield (
            f"data.micro_batch_size={size}: does not divide the {local} samples of one rank"
            f" (data.global_batch_size={batch} over {ranks}); set it to auto or one of"
            f" {_listed(fitting)}"
        )


def _places(config: Config) -> Iterator[str]:
    from curry_train.data import DATASETS, vocab_size_of

    data, run = config.data, config.run
    if data.input is None and data.dataset not in DATASETS:
        yield f"data.dataset={data.dataset}: known are {', '.join(DATASETS)}; or set data.input"
    if data.input is not None and not Path(data.input).exists():
        yield f"data.input={data.input}: no such file or folder"
    if run.resume not in ("never", "auto") and not Path(run.resume).is_dir():
        yield f"run.resume={run.resume}: must be never, auto or a folder that exists"
    if run.init_from is not None and not Path(run.init_from).is_dir():
        yield f"run.init_from={run.init_from}: no such checkpoint folder"
    if not NAME.fullmatch(run.name):
        yield (
            f"run.name={run.name}: begins a folder's name; allowed are letters, digits and . _ -,"
            " a letter or digit first"
        )
    if data.tokenizer not in ("auto", "byte", "bpe") and not Path(data.tokenizer).exists():
        yield (
            f"data.tokenizer={data.tokenizer}: must be auto, byte, bpe or a tokenizer.json that"
            " exists"
        )
    needed = vocab_size_of(data)
    size = getattr(config.model, "vocab_size", None)
    if needed is not None and size is not None and 1 <= size < needed:
        yield (
            f"model.vocab_size={size}: fewer than the {needed} ids of the tokenizer"
            f" (data.tokenizer={data.tokenizer}); set model.vocab_size={needed} or more"
        )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
