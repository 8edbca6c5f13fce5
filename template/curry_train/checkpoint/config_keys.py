"""What of a config.json is no plain key: rotary positions, windows, which blocks have experts.

A `Piece` reads such a part into fields of ModelConfig and writes it back; families.py puts pieces
and plain keys of an architecture together. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from curry_train.config import ModelConfig

HARMLESS = frozenset(
    """architectures model_type transformers_version torch_dtype dtype auto_map use_cache
    quantization_config bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id
    decoder_start_token_id tokenizer_class _name_or_path _attn_implementation attn_implementation
    _attn_implementation_autoset output_router_logits output_attentions output_hidden_states
    return_dict use_return_dict torchscript use_bfloat16 tf_legacy_loss pretraining_tp ep_size
    seq_aux num_nextn_predict_layers num_mtp_layers initial_context_length max_sequence_length
    is_llama_config transformers.js_config unsloth_version is_decoder pruned_heads id2label label2id
    num_labels problem_type task_specific_params prefix finetuning_task max_length min_length
    do_sample early_stopping num_beams num_beam_groups temperature top_k top_p typical_p
    repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size bad_words_ids
    encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    exponential_decay_length_penalty begin_suppress_tokens""".split()
)
"""Keys that change no output of the weights."""

ONLY: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "router_jitter_noise": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
}
"""Keys of any family that may have these values (or null) alone: all that the decoder computes."""

ABSENT: dict[str, Any] = {
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "router_aux_loss_coef": 0.001,
    "rope_theta": 10000.0,
}
"""What a field of any family is when config.json does not say it, as in transformers."""

_LLAMA3 = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_YARN = {
    "factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "mscale": "rope_mscale",
    "mscale_all_dim": "rope_mscale_all_dim",
    "truncate": "rope_truncate",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
ROPE_KEYS = {"default": {}, "linear": {"factor": "rope_factor"}, "llama3": _LLAMA3, "yarn": _YARN}
"""rope_type -> key of the rotary dictionary -> field."""

REQUIRED = object()


class Keys:
    """A config.json that remembers which keys were asked for and what is wrong with them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.seen: set[str] = set()
        self.problems: list[str] = []

    def take(self, *keys: str, absent: Any = REQUIRED, kind: type = object) -> Any:
        """Return the value under any of these spellings, `absent` for null and what is no kind."""
        self.seen.update(keys)
        found = {key: self.raw[key] for key in keys if self.raw.get(key) is not None}
        if len({repr(value) for value in found.values()}) > 1:
            told = " and ".join(f"{key}={value}" for key, value in found.items())
            self.problems.append(f"{told} contradict each other: they mean the same; keep one")
        if not found and absent is REQUIRED:
            self.problems.append(f"key {' or '.join(keys)} is missing; set it")
            return None
        key, value = next(iter(found.items()), ("", absent))
        if found and (not isinstance(value, kind) or (kind is int and value is True)):
            self.problems.append(f"{key}={value!r:.60}: must be a value of type {kind.__name__}")
            return absent
        return value


class Piece(NamedTuple):
    """A part of config.json: read fills fields in, write returns keys.

    read gets the keys, what absent fields are, and the fields so far, plain ones already there.
    """

    read: Callable[[Keys, Mapping[str, Any], dict[str, Any]], None]
    write: Callable[[ModelConfig], dict[str, Any]]


def _count(value: Any) -> int:
    """Return a size that other sizes follow from; 0 for what is told as no size elsewhere."""
    return value if type(value) is int and 0 < value < 10**6 else 0


def _read_heads(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    heads, width = _count(values["num_attention_heads"]), _count(values["hidden_size"])
    values["num_key_value_heads"] = keys.take("num_key_value_heads", absent=heads or None)
    values["head_dim"] = keys.take(
        "head_dim", absent=absent.get("head_dim", width // heads if heads else None)
    )


def _read_whole_heads(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Read heads that together are as wide as the model, which norms of projections rely on."""
    _read_heads(keys, absent, values)
    heads, width = _count(values["num_attention_heads"]), _count(values["hidden_size"])
    if heads * _count(values["head_dim"]) != width:
        keys.problems.append(
            f"head_dim={values['head_dim']}: {heads} heads must be as wide as hidden_size={width}"
        )


def _write_heads(model: ModelConfig) -> dict[str, Any]:
    return {"num_key_value_heads": model.num_key_value_heads, "head_dim": model.head_dim}


def _read_rope(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Read what turns queries and keys: rope_parameters, or rope_scaling and rope_theta."""
    rope = _rope_dictionary(keys)
    if not rope.keys() - {"rope_theta"}:
        rope = {**absent.get("rope", {}), **rope}
    values["rope_theta"] = rope.pop("rope_theta", absent["rope_theta"])
    kind, longest = rope.pop("rope_type", "default"), values["max_position_embeddings"]
    original = keys.take("original_max_position_embeddings", absent=None)
    original = original or rope.pop("original_max_position_embeddings", longest)
    rope.pop("original_max_position_embeddings", None)
    rope.pop("finetuned", None)  # a remark in older yarn files
    temperature, share = rope.pop("attention_factor", None), rope.pop("partial_rotary_factor", 1)
    if share != 1:
        keys.problems.append(f"partial_rotary_factor={share}: here heads are turned as a whole")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        keys.problems.append(f"rope_type={kind} is unknown; known are {', '.join(ROPE_KEYS)}")
        return
    values["rope_type"], known = kind, ROPE_KEYS[kind]
    if "original_max_position_embeddings" in known:
        values["original_max_position_embeddings"] = original
    for key, value in rope.items():
        if key in known:
            values[known[key]] = value
        else:
            keys.problems.append(f"rotary {key}={value} is unknown under rope_type={kind}")
    if temperature is not None:
        _check_temperature(keys, temperature, values)


def _rope_dictionary(keys: Keys) -> dict[str, Any]:
    """Return the rotary keys of all spellings together; what contradicts is told."""
    theta, rope = keys.take("rope_theta", absent=None), {}
    for spelling in ("rope_scaling", "rope_parameters"):
        found = keys.take(spelling, absent={}, kind=dict)
        if any(isinstance(part, dict) for part in found.values()):
            keys.problems.append(f"{spelling}={found}: one dictionary for all blocks is known")
            continue
        given = {"rope_theta": theta, **found}
        given = {key: value for key, value in given.items() if value is not None}
        kind = given.pop("type", None)
        if kind is not None:
            given.setdefault("rope_type", kind)
        for key in sorted(rope.keys() & given.keys()):
            if rope[key] != given[key]:
                keys.problems.append(f"{spelling} {key}={given[key]}: elsewhere {rope[key]}")
        rope |= given
    return rope


def _check_temperature(keys: Keys, given: Any, values: Mapping[str, Any]) -> None:
    """Refuse an attention_factor other than that of the formula, which alone is computed."""
    names = ("rope_factor", "rope_mscale", "rope_mscale_all_dim")
    told = [values[name] for name in names if isinstance(values.get(name), int | float)]
    if len(told) != sum(name in values for name in names):
        return  # what is no number is told elsewhere
    factor, mscale, of = (values.get(name) or 0.0 for name in names)
    wanted = 1.0
    if values["rope_type"] == "yarn" and factor > 1:
        root = 0.1 * math.log(factor)
        wanted = (root * (mscale or 1.0) + 1) / (root * of + 1)
    if not isinstance(given, int | float) or not math.isclose(given, wanted, rel_tol=1e-6):
        told = f"rotary attention_factor={given}: the formula gives {wanted:.6g}, computed here"
        keys.problems.append(f"{told}; drop the key if that is meant")


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    """Write both spellings: rope_parameters is version 5's, the others are older."""
    known = {key: getattr(model, name) for key, name in ROPE_KEYS[model.rope_type].items()}
    known = {key: value for key, value in known.items() if "mscale" not in key or value}
    theta, rope = {"rope_theta": model.rope_theta}, {"rope_type": model.rope_type, **known}
    written = {**theta, "rope_parameters": {**theta, **rope}}
    return written | ({"rope_scaling": {"type": model.rope_type, **rope}} if known else {})


def _set_window(keys: Keys, values: dict[str, Any], window: Any, slides: list[bool]) -> None:
    """Say by sliding_window and sliding_window_pattern which blocks see a window only."""
    if window is None or not any(slides):
        return
    for every in (0, *range(2, len(slides) + 1)):
        if slides == [not every or (at + 1) % every != 0 for at in range(len(slides))]:
            values["sliding_window"], values["sliding_window_pattern"] = window, every
            return
    which = [at for at, slide in enumerate(slides) if slide]
    keys.problems.append(
        f"sliding_window={window} holds in the blocks {which}; here a window holds in every block,"
        " or in all but every n-th"
    )


def _read_window(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    values["sliding_window"] = keys.take("sliding_window", absent=None)


def _write_window(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.sliding_window}


def _read_optional_window(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Read a window that holds in every block or, by a key of its own, in none."""
    use = keys.take("use_sliding_window", absent=False, kind=bool)
    window = keys.take("sliding_window", absent=4096 if use else None)
    first = keys.take("max_window_layers", absent=0)
    if use and first:
        keys.problems.append(
            f"max_window_layers={first}: versions of transformers differ about which blocks slide"
        )
    values["sliding_window"] = window if use else None


def _write_optional_window(model: ModelConfig) -> dict[str, Any]:
    use = model.sliding_window is not None
    return {"sliding_window": model.sliding_window, "use_sliding_window": use}


def _slides(keys: Keys, layers: int, otherwise: list[bool]) -> list[bool]:
    types = keys.take("layer_types", absent=None, kind=list)
    if types is None:
        return otherwise
    kinds = ("full_attention", "sliding_attention")
    if len(types) != layers or any(kind not in kinds for kind in types):
        told = f"layer_types={types}: must be {' or '.join(kinds)} for each of {layers} blocks"
        keys.problems.append(told)
        return otherwise
    return [kind == "sliding_attention" for kind in types]


def _read_later_windows(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Read a window that holds from block max_window_layers on, unless layer_types says where."""
    layers = _count(values["num_hidden_layers"])
    use = keys.take("use_sliding_window", absent=False, kind=bool)
    window = keys.take("sliding_window", absent=4096 if use else None)
    first = keys.take("max_window_layers", absent=28, kind=int)
    slides = _slides(keys, layers, [use and at >= first for at in range(layers)])
    if not use and any(slides):
        keys.problems.append("layer_types has sliding blocks, and use_sliding_window is false")
    _set_window(keys, values, window if use else None, slides)


def _write_later_windows(model: ModelConfig) -> dict[str, Any]:
    use = model.sliding_window is not None
    first = 0 if use else model.num_hidden_layers
    written = {"use_sliding_window": use, "max_window_layers": first}
    return _write_layer_types(model) | written | {"sliding_window": model.sliding_window}


def _read_layer_types(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Read windows as gpt-oss has them: every second block sees all keys."""
    layers = _count(values["num_hidden_layers"])
    window = keys.take("sliding_window", absent=None if "sliding_window" in keys.raw else 128)
    _set_window(keys, values, window, _slides(keys, layers, [at % 2 == 0 for at in range(layers)]))


def _write_layer_types(model: ModelConfig) -> dict[str, Any]:
    slides = [model.window_of(at) is not None for at in range(model.num_hidden_layers)]
    types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    # gpt-oss in transformers computes nothing without a size, even where no block slides.
    return {"sliding_window": model.sliding_window or 128, "layer_types": types}


def _read_sparse_blocks(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    layers = _count(values["num_hidden_layers"])
    step = keys.take("decoder_sparse_step", absent=1, kind=int) or 1
    named = keys.take("mlp_only_layers", absent=[], kind=list)
    dense = {at for at in named if type(at) is int and 0 <= at < layers}
    if len(dense) != len(named):
        keys.problems.append(f"mlp_only_layers={named}: each a different one of {layers} blocks")
    dense |= {at for at in range(layers) if (at + 1) % step}
    if dense != set(range(len(dense))):
        keys.problems.append(
            f"mlp_only_layers and decoder_sparse_step leave the blocks {sorted(dense)} without"
            " experts; here the first blocks can be dense, no others"
        )
    values["first_k_dense_replace"] = len(dense)


def _write_sparse_blocks(model: ModelConfig) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [*range(model.first_k_dense_replace)]}


def _read_latent(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    heads = _count(values["num_attention_heads"]) or None
    values["num_key_value_heads"] = keys.take("num_key_value_heads", absent=heads)
    values["q_lora_rank"] = keys.take("q_lora_rank", absent=0)
    shared = keys.take("n_shared_experts", absent=0, kind=int)
    values["shared_expert_intermediate_size"] = shared * _count(values["moe_intermediate_size"])
    keys.seen |= {"head_dim", "qk_head_dim"}  # follow from the parts of a head
    if values["rms_norm_eps"] != 1e-6:
        keys.problems.append(
            f"rms_norm_eps={values['rms_norm_eps']}: the norms of the latents have 1e-6 in this"
            " family whatever the others have, and here all norms have one value"
        )


def _write_latent(model: ModelConfig) -> dict[str, Any]:
    shared = model.shared_expert_intermediate_size // model.moe_intermediate_size
    return {
        "num_key_value_heads": model.num_key_value_heads,
        "q_lora_rank": model.q_lora_rank or None,
        "n_shared_experts": max(shared, 1),  # transformers builds no such block without one
        "head_dim": model.qk_rope_head_dim,
        "qk_head_dim": model.query_dim,
    }


def _read_topk_method(keys: Keys, absent: Mapping[str, Any], values: dict[str, Any]) -> None:
    method = keys.take("topk_method", absent="greedy")
    groups, chosen = (keys.take(key, absent=1) for key in ("n_group", "topk_group"))
    if method == "group_limited_greedy":
        values["n_group"], values["topk_group"] = groups, chosen
    elif method != "greedy":
        keys.problems.append(f"topk_method={method}: known are greedy and group_limited_greedy")


def _write_topk_method(model: ModelConfig) -> dict[str, Any]:
    method = "greedy" if model.n_group == 1 else "group_limited_greedy"
    return {"topk_method": method, "n_group": model.n_group, "topk_group": model.topk_group}


HEADS = Piece(_read_heads, _write_heads)
WHOLE_HEADS = Piece(_read_whole_heads, _write_heads)
ROPE = Piece(_read_rope, _write_rope)
WINDOW = Piece(_read_window, _write_window)
OPTIONAL_WINDOW = Piece(_read_optional_window, _write_optional_window)
LATER_WINDOWS = Piece(_read_later_windows, _write_later_windows)
LAYER_TYPES = Piece(_read_layer_types, _write_layer_types)
SPARSE_BLOCKS = Piece(_read_sparse_blocks, _write_sparse_blocks)
LATENT = Piece(_read_latent, _write_latent)
TOPK_METHOD = Piece(_read_topk_method, _write_topk_method)
