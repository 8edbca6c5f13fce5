"""The manifests, against the facts that no client checks for us."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
from bundle.tree import ROOT, skills

SCHEMA = json.loads((Path(__file__).parent / "agent_plugins_1_0_0.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def read(name: str) -> dict:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def test_the_portable_manifest_fits_the_closed_schema():
    assert [error.message for error in VALIDATOR.iter_errors(read("plugin.json"))] == []


@pytest.mark.parametrize(
    "change",
    [
        {"skills": "./skills"},
        {"displayName": "Curry"},
        {"$schema": "https://agent-plugins.org/schemas/1.1.0/plugin.schema.json"},
        {"name": "Curry"},
        {"name": "curry--train"},
        {"name": "curry..train"},
        {"name": "-curry"},
        {"name": "x" * 65},
        {"author": "curry-train contributors"},
        {"author": {"name": "x", "github": "x"}},
        {"keywords": "training"},
        {"version": 1},
        {"extensions": {"codex": {}}},
        {"extensions": {"com.example": []}},
    ],
    ids=json.dumps,
)
def test_the_schema_refuses(change):
    assert not VALIDATOR.is_valid({**read("plugin.json"), **change})


def test_both_manifests_say_the_same():
    claude, portable = read(".claude-plugin/plugin.json"), read("plugin.json")
    shared = ["name", "version", "description", "author", "license", "keywords"]
    assert {key: claude[key] for key in shared} == {key: portable[key] for key in shared}
    assert claude["license"] == "Apache-2.0"


def test_the_marketplace_lists_this_folder_once_without_a_version():
    marketplace = read(".claude-plugin/marketplace.json")
    assert marketplace["name"] == "curry-train"
    assert [entry["name"] for entry in marketplace["plugins"]] == ["curry-train"]
    entry = marketplace["plugins"][0]
    assert entry["source"] == "./"
    assert "version" not in entry
    assert entry["description"] == read("plugin.json")["description"]


def test_the_licence_is_the_whole_apache_text():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) > 190


def test_no_file_at_the_root_is_read_by_mistake():
    """CLAUDE.md fails strict validation; mcp.json would start servers."""
    assert not [name for name in ("CLAUDE.md", "mcp.json", ".mcp.json") if (ROOT / name).exists()]


def test_the_reference_validator_accepts_every_skill(skills_ref):
    folders = [page.path.parent for page in skills(ROOT)]
    assert folders
    for folder in folders:
        done = subprocess.run([skills_ref, "validate", folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_validator_refuses_a_key_of_one_client(skills_ref, tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "SKILL.md").write_text("---\nname: demo\ndescription: D.\nargument-hint: x\n---\n")
    assert subprocess.run([skills_ref, "validate", folder], capture_output=True).returncode != 0
