"""What a published tensor can be: its name and shape against what the decoder's blocks have."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import UsageError

HEADER_LIMIT = 200 * 2**20
BLOCK = r"(?:model\.)?layers\.\*\."
ATTENTION, SPARSE = BLOCK + r"self_attn\.", BLOCK + r"(?:mlp|block_sparse_moe)\."
EXPERT = SPARSE + r"experts\.\*\."
SHARED = SPARSE + r"shared_experts?\."

RULES: list[tuple[str, str, dict[tuple[str, ...], str]]] = [
    (r"(?:model\.)?embed_tokens\.weight", "model.embed_tokens.weight", {("V", "D"): ""}),
    (r"lm_head\.weight", "lm_head.weight", {("V", "D"): "tie_word_embeddings=false"}),
    (r"(?:model\.)?norm\.weight", "model.norm.weight", {("D",): ""}),
    (BLOCK + r"(input|post_attention)_layernorm\.weight", "*_layernorm.weight", {("D",): ""}),
    (ATTENTION + r"q_proj\.weight", "q_proj", {("HA", "D"): "", ("HX", "D"): "kv_lora_rank"}),
    (ATTENTION + r"[kv]_proj\.weight", "k_proj, v_proj", {("GA", "D"): ""}),
    (ATTENTION + r"o_proj\.weight", "o_proj", {("D", "HA"): "", ("D", "HW"): "kv_lora_rank"}),
    (ATTENTION + r"q_proj\.bias", "q_proj.bias", {("HA",): "attention_bias=true"}),
    (ATTENTION + r"[kv]_proj\.bias", "k_proj.bias, v_proj.bias", {("GA",): "attention_bias=true"}),
    (ATTENTION + r"o_proj\.bias", "o_proj.bias", {("D",): "attention_out_bias=true"}),
    (
        ATTENTION + r"q_norm\.weight", "q_norm",
        {("A",): "qk_norm=true", ("HA",): "qk_norm=true, qk_norm_width=projection"},
    ),
    (
        ATTENTION + r"k_norm\.weight", "k_norm",
        {("A",): "qk_norm=true", ("GA",): "qk_norm=true, qk_norm_width=projection"},
    ),
    (ATTENTION + r"sinks", "sinks", {("H",): "attention_sinks=true"}),
    (ATTENTION + r"q_a_proj\.weight", "q_a_proj", {("Q", "D"): "q_lora_rank"}),
    (ATTENTION + r"q_a_layernorm\.weight", "q_a_layernorm", {("Q",): "q_lora_rank"}),
    (ATTENTION + r"q_b_proj\.weight", "q_b_proj", {("HX", "Q"): "q_lora_rank"}),
    (ATTENTION + r"kv_a_proj_with_mqa\.weight", "kv_a_proj_with_mqa", {("K+R", "D"): ""}),
    (ATTENTION + r"kv_a_layernorm\.weight", "kv_a_layernorm", {("K",): "kv_lora_rank"}),
    (ATTENTION + r"kv_b_proj\.weight", "kv_b_proj", {("HY", "K"): "kv_lora_rank"}),
    (BLOCK + r"mlp\.(gate|up)_proj\.weight", "mlp.gate_proj, mlp.up_proj", {("F", "D"): ""}),
    (BLOCK + r"mlp\.down_proj\.weight", "mlp.down_proj", {("D", "F"): ""}),
    (SPARSE + r"(gate|router)\.weight", "mlp.gate.weight", {("E", "D"): "num_experts"}),
    (SPARSE + r"(gate|router)\.bias", "mlp.gate.bias", {("E",): "router_bias=true"}),
    (
        SPARSE + r"(gate\.)?e_score_correction_bias", "mlp.gate.e_score_correction_bias",
        {("E",): "correction_bias=true, scoring_func=sigmoid"},
    ),
    (EXPERT + r"(gate_proj|up_proj|w1|w3)\.weight", "experts gate and up", {("M", "D"): "each"}),
    (EXPERT + r"(down_proj|w2)\.weight", "experts down", {("D", "M"): "each"}),
    (
        SPARSE + r"experts\.gate_up_proj", "experts gate and up",
        {
            ("E", "D", "2M"): "experts=alternating, if gate and up take turns as in gpt-oss",
            ("E", "2M", "D"): "as transformers stacks them; published files have one each",
        },
    ),
    (
        SPARSE + r"experts\.down_proj", "experts down",
        {
            ("E", "M", "D"): "experts=alternating",
            ("E", "D", "M"): "as transformers stacks them; published files have one each",
        },
    ),
    (SPARSE + r"experts\.gate_up_proj_bias", "experts bias", {("E", "2M"): "expert_bias=true"}),
    (SPARSE + r"experts\.down_proj_bias", "experts bias", {("E", "D"): "expert_bias=true"}),
    (
        SPARSE + r"experts\.(gate_up|down)_proj_(blocks|scales)", "experts",
        {("E", "*", "*", "*"): "MXFP4, decoded by an import", ("E", "*", "*"): "MXFP4"},
    ),
    (r".*rotary_emb\.inv_freq", "left out", {("*",): "follows from config.json"}),
    (SHARED + r"(gate|up)_proj\.weight", "shared_experts gate and up", {("S", "D"): ""}),
    (SHARED + r"down_proj\.weight", "shared_experts down", {("D", "S"): ""}),
]  # fmt: skip
"""Pattern of a name -> what it is here -> shapes in sizes of config.json -> settings they mean."""


@dataclass
class Group:
    """Tensors that differ in the numbers of their names only."""

    pattern: str
    count: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    example: str = ""
    status: str = "unknown"
    ours: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what mapping.json holds of it."""
        return {**vars(self), "shapes": sorted(map(list, self.shapes))}


def groups_of(tensors: Mapping[str, tuple[int, ...] | None], raw: Mapping[str, Any]) -> list[Group]:
    """Return the tensors grouped by pattern, each held against RULES."""
    found: dict[str, Group] = {}
    layers = raw.get("num_hidden_layers") or 0
    for name, shape in tensors.items():
        block = re.match(r"model\.layers\.(\d+)\.", name)
        if block and int(block[1]) >= layers and raw.get("num_nextn_predict_layers"):
            continue  # multi-token prediction, which an import leaves out
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        group = found.setdefault(pattern, Group(pattern, example=name))
        group.count += 1
        if shape is not None:
            group.shapes.add(tuple(shape))
    sizes = sizes_of(raw)
    for group in found.values():
        judge(group, sizes)
    return sorted(found.values(), key=lambda group: (group.status != "unknown", group.pattern))


def judge(group: Group, sizes: Mapping[str, set[int]]) -> None:
    """Say whether a group's name is known, and whether its shape follows from config.json."""
    for pattern, ours, shapes in RULES:
        if not re.fullmatch(pattern, group.pattern):
            continue
        group.ours = ours
        if not group.shapes:
            group.status, group.note = "name only", "its shape was not seen"
            return
        fits = [
            [
                note
                for symbols, note in shapes.items()
                if len(symbols) == len(shape)
                and all(
                    s == "*" or size in sizes[s] for s, size in zip(symbols, shape, strict=True)
                )
            ]
            for shape in group.shapes
        ]
        if all(fits):
            notes = {note for of in fits for note in of if note}
            group.status, group.note = "fits", " or ".join(sorted(notes))
        else:
            wanted = " or ".join("[" + ", ".join(symbols) + "]" for symbols in shapes)
            group.status, group.note = "unknown", f"the name is known, the shape is not {wanted}"
        return
    group.note = "no block here has such a tensor"


def sizes_of(raw: Mapping[str, Any]) -> dict[str, set[int]]:
    """Return symbol -> values that it can have by config.json."""

    def of(*keys: str) -> set[int]:
        return {raw[key] for key in keys if type(raw.get(key)) is int}

    def times(one: set[int], other: set[int]) -> set[int]:
        return {a * b for a in one for b in other}

    heads, width = of("num_attention_heads"), of("hidden_size")
    groups = of("num_key_value_heads") or heads
    head = of("head_dim") or {w // h for w in width for h in heads if h}
    nope, rope, value = of("qk_nope_head_dim"), of("qk_rope_head_dim"), of("v_head_dim")
    latent = of("kv_lora_rank")
    moe = of("moe_intermediate_size") or of("intermediate_size")
    shared = of("shared_expert_intermediate_size") | times(of("n_shared_experts"), moe)
    return {
        "V": of("vocab_size"), "D": width, "H": heads, "A": head, "HA": times(heads, head),
        "GA": times(groups, head), "F": of("intermediate_size"), "M": moe, "2M": times({2}, moe),
        "E": of("num_experts", "num_local_experts", "n_routed_experts"), "S": shared,
        "Q": of("q_lora_rank"), "K": latent, "K+R": {a + b for a in latent for b in rope},
        "HX": times(heads, {a + b for a in nope for b in rope}),
        "HY": times(heads, {a + b for a in nope for b in value}), "HW": times(heads, value),
    }  # fmt: skip


def read_tensors(path: Path) -> dict[str, tuple[int, ...] | None]:
    """Return name -> shape of published weights, from an index, a file or their folder.

    Only headers are read. The shape is None where an index names a file that is not there.
    Raises: UsageError.
    """
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.is_file():
            return read_tensors(index)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UsageError(f"--index {path}", "no model.safetensors.index.json and no file there")
        return {name: shape for file in files for name, shape in header(file).items()}
    if path.suffix == ".safetensors":
        return dict(header(path))
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        found: dict[str, tuple[int, ...] | None] = dict.fromkeys(names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"--index {path}: {told}",
            "it takes model.safetensors.index.json or a .safetensors file",
        ) from None
    for file in sorted({str(name) for name in names.values()}):
        if Path(file).name == file and (path.parent / file).is_file():
            found |= {k: v for k, v in header(path.parent / file).items() if k in found}
    return found


def header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape from the header of a safetensors file. Raises: UsageError."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_LIMIT:
                raise ValueError(f"its header would take {length} bytes")
            entries = json.loads(file.read(length))
        return {n: tuple(e["shape"]) for n, e in entries.items() if n != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no safetensors file: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a config.json, or that of a folder. Raises: UsageError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--hf {path}: {error}", "it takes a config.json or the folder that holds one"
        ) from None
    if not isinstance(raw, dict):
        raise UsageError(f"--hf {path} holds no JSON object", "it takes a config.json")
    return raw
