"""What there is to choose from: kinds, variants of blocks, and what a project holds already."""

from __future__ import annotations

import ast
from pathlib import Path

import scaffold_edit
import scaffold_record
from scaffold_plan import BLOCKS, DATA, KINDS, LAYERS, MODELS, SKELETONS, variants

ALREADY = {
    "attention": "qk_norm, sliding_window, attention_sinks, clip_qkv",
    "mlp": "intermediate_size, shared_expert_intermediate_size",
    "router": "scoring_func=sigmoid, n_group, correction_bias, capacity_factor, routing",
    "norm": "rms_norm_eps",
}
"""Settings of the template that need no new code."""


def listing(project: Path) -> str:
    """Return the kinds and variants, each with the first line of its skeleton."""
    lines = ["kinds (--kind), each a model, a data set, their configuration and a test:"]
    lines += [f"  {kind:<14} {_sentence(SKELETONS / 'models' / f'{kind}.py')}" for kind in KINDS]
    for block in BLOCKS:
        lines.append(f"variants of {block} (--block {block} --variant ...), behind model.{block}:")
        for variant in variants(block):
            lines.append(f"  {variant:<14} {_sentence(SKELETONS / block / f'{variant}.py')}")
        lines.append(f"  without code: model.* settings {ALREADY[block]}")
    if (project / MODELS).is_file():
        for path, dict_name in ((MODELS, "MODELS"), (DATA, "DATASETS"), (LAYERS, "VARIANTS")):
            found = ", ".join(_keys(project / path, dict_name)) or "nothing"
            lines.append(f"this project has in {dict_name}: {found}")
        lines.append(
            f"made here before: {', '.join(scaffold_record.recorded(project)) or 'nothing'}"
        )
    return "\n".join(lines)


def _keys(path: Path, dict_name: str) -> list[str]:
    try:
        found = scaffold_edit.find_dict(path.read_bytes(), dict_name, str(path), "")
    except (OSError, scaffold_edit.EditError):
        return []
    return scaffold_edit.keys_of(found)


def _sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())
