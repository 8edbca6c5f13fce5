"""Every place that a port touches, with file and line in this project."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """What to do at a line; 0: the anchor is not in the file. new: draft has made the file."""

    what: str
    file: str
    line: int
    when: str
    new: bool = False


SPLITS = "curry_train/parallel/parallelize.py"
ANCHORS = (
    ("family entry", "curry_train/checkpoint/families.py", "FAMILIES = {", "always"),
    ("weight map", "curry_train/checkpoint/tensor_names.py", "def sources(", "new storage"),
    ("pieces of config.json", "curry_train/checkpoint/config_keys.py", "class Piece(", "new keys"),
    ("field with its sentence", "curry_train/config.py", "class ModelConfig", "new setting"),
    ("rule of attention", "curry_train/model_rules.py", "def _attention(", "new setting"),
    ("rule of routing", "curry_train/model_rules.py", "def _routing(", "new setting"),
    ("attention", "curry_train/layers/attention.py", "class Attention(", "other attention"),
    ("router", "curry_train/layers/routing.py", "class TopKRouter(", "other scores or choices"),
    ("experts", "curry_train/layers/moe.py", "class MoE(", "other experts"),
    ("five-part block", "curry_train/models/decoder.py", "class MoEBlock(", "another block"),
    ("five-part contract", "curry_train/models/protocol.py", "class Block(", "another block"),
    ("MODELS line", "curry_train/models/__init__.py", "MODELS = {", "new class"),
    ("TP, columns", SPLITS, "COLUMN = ", "new matrix"),
    ("TP, rows", SPLITS, "ROW = ", "new matrix"),
    ("TP, vectors of heads", SPLITS, "def split_matrices(", "new tensor of heads"),
    ("EP, banks of experts", SPLITS, "def split_experts(", "new tensor of experts"),
    ("groups of layers", SPLITS, "def set_groups(", "new messages"),
    ("FSDP units", "curry_train/parallel/data_parallel.py", "def fully_shard_chunk(", "new part"),
    ("closed form of sizes", "curry_train/sizes.py", "def block_weights(", "new tensor"),
    ("of activations", "curry_train/activations.py", "def attention_bytes(", "new tensor"),
    (
        "of messages",
        "curry_train/communication.py",
        "def _tensor_parallel(",
        "new layer that sends",
    ),
    ("parity test", "tests/test_decoder.py", "FAMILIES = {", "always"),
    ("names in transformers", "tests/hugging_face.py", "def family(", "always"),
    ("equality test", "tests/equality/test_special.py", "CASES = {", "new setting"),
    ("size test", "tests/test_presets.py", "PUBLISHED = {", "published preset"),
    ("page of presets", "docs/presets.md", "| preset |", "published preset"),
)


def places(project: Path, name: str, new_class: bool) -> list[Place]:
    """Return all places, those of files that draft writes first."""
    found = [Place("YAML", f"configs/model/{name}.yaml", 1, "always", True)]
    if new_class:
        found.append(
            Place("model class", f"curry_train/models/{name}.py", 1, "the decoder lacks it", True)
        )
    found.append(Place("test of the preset", f"tests/test_{name}.py", 1, "always", True))
    for what, file, anchor, when in ANCHORS:
        found.append(Place(what, file, line_of(project / file, anchor), when))
    return found


def line_of(path: Path, anchor: str) -> int:
    """Return the first line that begins with the anchor, 0 for none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((at for at, text in enumerate(lines, 1) if text.lstrip().startswith(anchor)), 0)
