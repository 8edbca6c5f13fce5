"""README sets a project up in two commands, and the pages that everybody reads stay short."""

from __future__ import annotations

import re

import pytest
from bundle.tree import ROOT

SETUP = [
    "python3 skills/start-project/scripts/init.py ../demo --train",
    "python3 tests/run.py",
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def setup_commands(text: str) -> list[str]:
    """Return what README tells to run with the machine's own Python, in its blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(?:python3|pip|bash|git|make|\./)\b", line)]


def test_there_are_exactly_two_setup_commands():
    assert setup_commands(README) == SETUP


@pytest.mark.parametrize("extra", ["python3 x.py", "pip install x", "bash x", "git clone x"])
def test_a_third_command_would_be_seen(extra):
    assert setup_commands(f"{README}\n```\n{extra}\n```\n") != SETUP


def test_installing_the_plugin_has_its_own_section():
    section = re.search(r"^## In a coding agent\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    assert section
    for word in ("/plugin marketplace add", "/plugin install", "codex plugin add"):
        assert word in section.group(1)
        assert word not in README.replace(section.group(1), "")


def test_the_readme_says_first_what_is_copied_and_what_stays():
    top = "\n".join(README.splitlines()[:10])
    assert "copied to you" in top
    assert "stays in the plugin" in top


@pytest.mark.parametrize(
    ("page", "limit"), [("README.md", 150), ("AGENTS.md", 120), ("template/AGENTS.md", 120)]
)
def test_the_page_stays_short(page, limit):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) < limit


def test_contributors_find_the_deviations_from_the_plan():
    assert "\n## Deviations from the plan\n" in (ROOT / "AGENTS.md").read_text(encoding="utf-8")
