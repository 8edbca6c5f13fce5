"""Presets of published models have the published sizes, in three ways of counting."""

import re

import pytest
from hugging_face import family, transformers_model

from curry_train import plan, sizes
from curry_train.compose import PROJECT, load_config
from curry_train.models.protocol import build_model, count_parameters

# Billions as their authors publish them (sources in docs/presets.md): all, active, and whether the
# active ones leave out the embedding. Figures that authors cut instead of rounding are marked.
PUBLISHED = {
    "llama3_8b": ("Llama", "8.0", None, False),
    "qwen3_8b": ("Qwen3", "8.2", None, False),
    "mixtral_8x7b": ("Mixtral", "46.7", "12.9", False),
    "qwen3_30b_a3b": ("Qwen3Moe", "30.5", "3.3 cut", False),
    "olmoe_1b_7b": ("Olmoe", "6.9", "1.3", False),
    "deepseek_v2_lite": ("DeepseekV2", "15.7", "2.4 cut", True),
    "deepseek_v3": ("DeepseekV3", "671", "36.6", True),
    "gpt_oss_20b": ("GptOss", "20.9", "3.6", True),
    "gpt_oss_120b": ("GptOss", "116.8", "5.1", True),
}


def rounded(count: int, figure: str) -> str:
    """Write a count in billions with as many places as a figure, cut if the figure is."""
    digits, _, cut = figure.partition(" ")
    places = len(digits.partition(".")[2])
    if cut:
        return f"{count // 10 ** (9 - places) / 10**places:.{places}f} cut"
    return f"{count / 1e9:.{places}f}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_published_size(name):
    kind, total, active, without_embedding = PUBLISHED[name]
    config = load_config([f"model={name}"])
    model = config.model
    counted, counted_active = count_parameters(build_model(config, "meta"))
    assert sizes.parameter_counts(model) == (counted, counted_active)
    assert rounded(counted, total) == total
    lookup = model.vocab_size * model.hidden_size if without_embedding else 0
    if active is None:
        assert counted_active == counted
    else:
        assert rounded(counted_active - lookup, active) == active
    assert family(model) == kind
    theirs = transformers_model(model)
    assert counted == sum(parameter.numel() for parameter in theirs.parameters())
    [row] = re.findall(rf"^\| `{name}` \| \d.*$", page(), re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == [str(counted), f"{counted / 1e9:.2f}"]
    assert cells[4].split()[0] == f"{(counted_active - lookup) / 1e9:.2f}"
    assert ("without embedding" in cells[4]) is without_embedding
    assert [cells[3], cells[5]] == [total, active.removesuffix(" cut") if active else ""]


def page() -> str:
    return (PROJECT / "docs/presets.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_names_its_source(name):
    text = (PROJECT / f"configs/model/{name}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    assert "Source: config.json of" in comment and page().count(f"`{name}`") == 2


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_planned_without_a_device(name, capsys):
    config = load_config([f"model={name}", "devices=1", "precision=bf16", "dry_run=true"])
    assert plan.print_plan(config) == 0
    out = capsys.readouterr().out
    assert "activations" in out and "unknown" not in out and "work per step" in out
