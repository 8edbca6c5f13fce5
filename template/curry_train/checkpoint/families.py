"""Published architectures as tables: config.json to ModelConfig and back, names in their files.

A family of FAMILIES says which key of config.json is which field of ModelConfig, what the
architecture always has, and how files name its tensors. Reading refuses what our decoder does not
compute; writing reads the result again and refuses a model that comes back as another. So a new
architecture is one entry, of fields and of the pieces in config_keys.py. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from curry_train import rules
from curry_train.checkpoint import CheckpointError
from curry_train.checkpoint.config_keys import (
    ABSENT,
    HARMLESS,
    HEADS,
    LATENT,
    LATER_WINDOWS,
    LAYER_TYPES,
    ONLY,
    OPTIONAL_WINDOW,
    REQUIRED,
    ROPE,
    ROPE_KEYS,
    SPARSE_BLOCKS,
    TOPK_METHOD,
    WHOLE_HEADS,
    WINDOW,
    Keys,
    Piece,
)
from curry_train.config import ModelConfig, known_settings
from curry_train.model_rules import MIXTURE_ONLY, model_problems, shown

CONFIG = "config.json"


@dataclass(frozen=True)
class Family:
    """One architecture of transformers as a table.

    model_type: its word in config.json. fields: our field -> its spellings there, all are read and
    written. absent: fields that differ from ABSENT when no key gives them. fixed: fields that every
    model of it has. pieces: what is no plain key. only: keys that may have these values alone; the
    first is written. writes: keys that are written and not read. names: parts of our tensor names
    -> of those in files. experts: `each`, a key for every expert, `.experts.0.up_proj.weight`; or
    `alternating` as gpt-oss, one [E, in, out] for all, columns of gate and up in turn. A folder can
    also be `stacked`, as transformers 5 holds them in memory and writes them when told to.
    """

    model_type: str
    fields: Mapping[str, tuple[str, ...]]
    pieces: tuple[Piece, ...]
    absent: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple] = field(default_factory=dict)
    writes: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    experts: str = "each"


def _same(names: str) -> dict[str, tuple[str, ...]]:
    """Return the table of fields that config.json calls as we do."""
    return {name: (name,) for name in names.split()}


BODY = _same(
    "vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings"
    " rms_norm_eps tie_word_embeddings initializer_range"
)
DENSE = BODY | _same("intermediate_size")
MIXTURE = BODY | {
    "num_experts": ("num_local_experts", "num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok",),
    "router_aux_loss_coef": ("router_aux_loss_coef",),
}
DEEPSEEK = DENSE | {
    **_same("attention_bias kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    **_same("num_experts_per_tok moe_intermediate_size first_k_dense_replace"),
    **_same("routed_scaling_factor"),
    "num_experts": ("n_routed_experts",),
    "router_aux_loss_coef": ("router_aux_loss_coef", "aux_loss_alpha"),
}
PLAIN = {"qk_norm": False}

FAMILIES = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        fields=DENSE | _same("attention_bias"),
        pieces=(HEADS, ROPE),
        fixed=PLAIN,
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        fields=DENSE,
        pieces=(HEADS, ROPE, LATER_WINDOWS),
        fixed=PLAIN | {"attention_bias": True, "attention_out_bias": False},
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        fields=DENSE | _same("attention_bias"),
        pieces=(HEADS, ROPE, LATER_WINDOWS),
        absent={"head_dim": 128},
        fixed={"qk_norm": True},
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        fields=MIXTURE | {"moe_intermediate_size": ("intermediate_size",)},
        pieces=(HEADS, ROPE, WINDOW),
        absent={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        fixed=PLAIN | {"norm_topk_prob": True},
        names={
            ".mlp.": ".block_sparse_moe.",
            ".gate_proj.": ".w1.",
            ".up_proj.": ".w3.",
            ".down_proj.": ".w2.",
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        fields=MIXTURE
        | _same("intermediate_size moe_intermediate_size norm_topk_prob attention_bias"),
        pieces=(HEADS, ROPE, OPTIONAL_WINDOW, SPARSE_BLOCKS),
        fixed={"qk_norm": True},
    ),
    "DeepseekV2ForCausalLM": Family(
        model_type="deepseek_v2",
        fields=DEEPSEEK,
        pieces=(LATENT, ROPE, TOPK_METHOD),
        fixed=PLAIN | {"norm_topk_prob": False, "group_score": "max", "rope_interleave": True},
        only={
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
            "rope_interleave": (True,),
            "moe_layer_freq": (1,),
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3",
        fields=DEEPSEEK | _same("norm_topk_prob rope_interleave n_group topk_group"),
        pieces=(LATENT, ROPE),
        absent={
            "norm_topk_prob": True,
            "rope_interleave": True,
            "routed_scaling_factor": 2.5,
        },
        fixed=PLAIN | {"scoring_func": "sigmoid", "correction_bias": True, "group_score": "top2"},
        only={
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        writes={"num_nextn_predict_layers": 0},
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        fields=MIXTURE
        | {
            **_same("attention_bias swiglu_limit"),
            "moe_intermediate_size": ("intermediate_size",),
            "num_experts_per_tok": ("num_experts_per_tok", "experts_per_token"),
        },
        pieces=(HEADS, ROPE, LAYER_TYPES),
        absent={
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        fixed=PLAIN
        | {
            "attention_sinks": True,
            "expert_bias": True,
            "router_bias": True,
            "norm_topk_prob": True,
        },
        only={"swiglu_alpha": (1.702,)},
        names={".mlp.gate.": ".mlp.router."},
        experts="alternating",
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        fields=MIXTURE
        | _same("attention_bias clip_qkv norm_topk_prob")
        | {"moe_intermediate_size": ("intermediate_size",)},
        pieces=(WHOLE_HEADS, ROPE),
        absent={"rms_norm_eps": 1e-5, "clip_qkv": None, "router_aux_loss_coef": 0.01},
        fixed={"qk_norm": True, "qk_norm_width": "projection"},
    ),
}
"""Architecture of config.json -> its table. Of two that express a model, the first is written."""


def family_of(raw: Mapping[str, Any]) -> tuple[str, Family]:
    """Return (architecture, family) of a config.json. Raises: CheckpointError, naming the known."""
    found = raw.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == raw.get("model_type")
    ]
    if isinstance(found, list) and len(found) == 1 and str(found[0]) in FAMILIES:
        return found[0], FAMILIES[found[0]]
    raise CheckpointError(
        f"architectures={found or None}, model_type={raw.get('model_type')}: no architecture that"
        f" is known here; known are {', '.join(FAMILIES)}"
    )


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the model that a config.json describes, in the keys of any version of transformers.

    Raises: CheckpointError with everything that is missing, contradicts itself, or changes the
    computation in a way that the decoder here does not have.
    """
    name, family = family_of(raw)
    keys, values, absent = Keys(raw), dict(family.fixed), {**ABSENT, **family.absent}
    for ours, theirs in family.fields.items():
        values[ours] = keys.take(*theirs, absent=absent.get(ours, REQUIRED))
    for piece in family.pieces:
        piece.read(keys, absent, values)
    allowed = {key: kinds for key, kinds in {**ONLY, **family.only}.items() if key not in keys.seen}
    for key, kinds in allowed.items():
        if keys.take(key, absent=None) not in (None, *kinds):
            told = f"; computed here is {shown(kinds[0])}" if kinds else ""
            keys.problems.append(f"{key}={raw[key]} is nothing that a model here computes{told}")
    unknown = sorted(raw.keys() - keys.seen - HARMLESS - family.writes.keys())
    keys.problems += [
        f"{key}={raw[key]!r:.60} is unknown and may change what the model computes; drop the key"
        " when it does not"
        for key in unknown
        if raw[key] is not None
    ]
    model = _converted(values, keys.problems)
    if not keys.problems:
        keys.problems += model_problems(model)
    if keys.problems:
        raise CheckpointError([f"config.json of {name}: {text}" for text in keys.problems])
    return model


def _converted(values: dict[str, Any], problems: list[str]) -> ModelConfig:
    """Return a ModelConfig of values in the types of its fields, adding those that do not fit."""
    kinds, fitting = known_settings(ModelConfig), {}
    for name, value in values.items():
        kind = kinds[f"model.{name}"].kind
        try:
            # Text stands for a number on a command line only.
            number = not isinstance(value, str) or kind is str or "Literal" in str(kind)
            fitting[name] = rules.convert(value if number else None, kind)
        except ValueError:
            if value is not None:  # else it is told as missing
                problems.append(f"{name}={value!r}: must be {rules.expected(kind)}")
    return ModelConfig(**fitting)


def write_config(model: Any, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5; dtype as `bfloat16`.

    Raises: CheckpointError with every setting that the nearest family cannot express.
    """
    if not isinstance(model, ModelConfig):
        kind = getattr(model, "architecture", type(model).__name__)
        raise CheckpointError(
            f"model.architecture={kind}: no architecture of transformers computes it; only"
            " model.architecture=decoder is written"
        )
    nearest: list[str] | None = None
    for name, family in FAMILIES.items():
        raw = _written(name, family, model, dtype)
        problems = list(_differences(name, raw, model))
        if not problems:
            return raw
        if nearest is None or _distance(problems) < _distance(nearest):
            nearest = problems
    raise CheckpointError(nearest or [])


def _distance(problems: list[str]) -> tuple[int, int]:
    """Rank what keeps a model from an architecture: another kind of block weighs most."""
    kinds = ("model.num_experts=", "model.kv_lora_rank=", "model.attention_sinks=")
    structural = [p for p in problems if p.startswith(kinds) or not p.startswith("model.")]
    return len(structural), len(problems)


def _written(name: str, family: Family, model: ModelConfig, dtype: str) -> dict[str, Any]:
    raw = {"architectures": [name], "model_type": family.model_type, "hidden_act": "silu"}
    raw |= {"attention_dropout": 0.0, "use_cache": True, "dtype": dtype, "torch_dtype": dtype}
    raw |= {key: kinds[0] for key, kinds in family.only.items()} | dict(family.writes)
    for ours, theirs in family.fields.items():
        raw |= dict.fromkeys(theirs, getattr(model, ours))
    for piece in family.pieces:
        raw |= piece.write(model)
    return raw


def _differences(name: str, raw: dict[str, Any], model: ModelConfig) -> Iterable[str]:
    """Say which settings a written config.json does not say, by reading it again."""
    try:
        again = live(read_config(raw))
    except CheckpointError as error:
        yield from error.problems
        return
    for key, value in live(model).items():
        if again.get(key, getattr(ModelConfig, key)) != value:
            other = again.get(key, getattr(ModelConfig, key))
            yield (
                f"model.{key}={shown(value)}: {name}, the nearest architecture of"
                f" transformers, has {shown(other)}; it cannot be exported"
            )


TRAINING = frozenset(
    """architecture moe_backend router_aux_loss_coef router_aux_loss_scope router_z_loss_coef
    correction_bias_update_rate initializer_range""".split()
)
"""Fields that no output of the weights depends on."""


def live(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that the model's outputs depend on."""
    dead = set(TRAINING)
    experts, dense = model.num_experts > 0, model.first_k_dense_replace
    if not experts:
        dead |= {*MIXTURE_ONLY, "num_experts_per_tok", "moe_intermediate_size"}
        dead |= {"scoring_func", "norm_topk_prob", "routed_scaling_factor", "n_group"}
    if experts and not dense:
        dead.add("intermediate_size")
    if model.n_group == 1 or not experts:
        dead |= {"topk_group", "group_score"}
    if not model.capacity_factor:
        dead.add("drop_policy")
    if not model.attention_bias or model.kv_lora_rank:
        dead.add("attention_out_bias")
    if model.kv_lora_rank:
        dead.add("head_dim")
    if model.sliding_window is None:
        dead.add("sliding_window_pattern")
    read = {*ROPE_KEYS[model.rope_type].values()}
    dead |= {name for keys in ROPE_KEYS.values() for name in keys.values()} - read
    return {key: value for key, value in asdict(model).items() if key not in dead}


DELIBERATE = frozenset("max_position_embeddings capacity_factor drop_policy".split())
"""Fields that a run may set otherwise than config.json: they fit the same weights."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises: CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a folder of Hugging Face") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def read_model(folder: Path) -> tuple[ModelConfig, Family, list[str]]:
    """Return the model that a folder's config.json describes, its family, and notes for people.

    Raises: CheckpointError; also for weights that are quantized otherwise than by MXFP4.
    """
    raw = read_json(folder / CONFIG)
    packing = raw.get("quantization_config") or {}
    method = packing.get("quant_method", "unnamed") if isinstance(packing, dict) else packing
    name, family = family_of(raw)
    if packing and (method != "mxfp4" or family.experts != "alternating"):
        raise CheckpointError(
            f"{folder / CONFIG}: weights quantized by {method}; read are plain weights and MXFP4 of"
            " gpt-oss. Give a folder with weights in bfloat16 or float32"
        )
    notes = ["auto_map names code in the folder, which was not run"] * ("auto_map" in raw)
    return read_config(raw), family, notes


def differences(folder: Path, described: ModelConfig, model: Any) -> list[str]:
    """Say which settings of `model` make it another than the one of the folder."""
    if not isinstance(model, ModelConfig):
        kind = getattr(model, "architecture", type(model).__name__)
        told = f"model.architecture={kind}: weights of Hugging Face fit model.architecture=decoder"
        return [f"{told} only; set that"]
    theirs, ours = live(described), live(model)
    found = []
    for key in sorted((theirs.keys() | ours.keys()) - DELIBERATE):
        wanted, given = (shown(getattr(of, key)) for of in (described, model))
        if wanted != given:
            where = f"{folder / CONFIG} has {wanted}"
            found.append(f"model.{key}={given}: {where}; set model.{key}={wanted}")
    return found
