"""Claude Code in two pinned versions validates, loads, installs and removes the bundle."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from bundle.tree import commands, files, skills

OLD, NEW = "claude-2.1.197", "claude-2.1.332"
BOTH = pytest.mark.parametrize("version", [OLD, NEW])


def names(bundle: Path) -> tuple[list[str], list[str]]:
    return (
        [f"curry-train:{page.path.parent.name}" for page in skills(bundle)],
        [f"curry-train:{page.path.stem}" for page in commands(bundle)],
    )


def own(listing: str) -> list[dict]:
    """Return the entries of `plugin list --json` that are ours; the client has built-in ones."""
    return [entry for entry in json.loads(listing) if entry["id"].startswith("curry-train@")]


@BOTH
def test_the_client_is_the_pinned_one(version, client, tmp_path):
    assert client(version).ok("--version", cwd=tmp_path).startswith(version.split("-")[1])


@BOTH
@pytest.mark.parametrize("target", [".", ".claude-plugin/plugin.json"])
def test_strict_validation_passes(version, target, client, bundle):
    printed = client(version).ok("plugin", "validate", "--strict", target, cwd=bundle)
    assert "Validation passed" in printed


@BOTH
@pytest.mark.parametrize("key", ["userConfg", "skillz"])
def test_strict_validation_can_fail(version, key, client, bundle, tmp_path):
    folder = tmp_path / "broken" / ".claude-plugin"
    folder.mkdir(parents=True)
    manifest = json.loads((bundle / ".claude-plugin/plugin.json").read_text())
    (folder / "plugin.json").write_text(json.dumps({**manifest, key: {}}))
    done = client(version).run("plugin", "validate", "--strict", str(folder.parent), cwd=bundle)
    assert done.returncode == 1
    assert key in done.stdout + done.stderr


def test_the_directory_would_take_it(client, bundle):
    """The one finding left is the icon, which the directory asks for and does not require."""
    arguments = ["plugin", "validate", "--profile", "directory", "--json", "."]
    report = json.loads(client(NEW).ok(*arguments, cwd=bundle))
    assert report["success"] is True
    assert report["manifest"]["errors"] == report["manifest"]["warnings"] == []
    findings = report["directory"]["findings"]
    assert {finding["code"] for finding in findings} <= {"ICON_MISSING"}
    assert not any(finding["blocking"] for finding in findings)
    assert (report["provides"]["skills"], report["provides"]["commands"]) == names(bundle)
    for kind in ("hooks", "agents", "mcpServers", "lspServers", "monitors", "bin"):
        folder = bundle / kind
        assert bool(report["provides"][kind]) == folder.is_dir(), kind


@BOTH
def test_it_loads_from_its_folder_without_errors(version, client, bundle):
    listing = client(version).ok("--plugin-dir", ".", "plugin", "list", "--json", cwd=bundle)
    (entry,) = own(listing)
    manifest = json.loads((bundle / "plugin.json").read_text())
    assert entry["version"] == manifest["version"]
    assert entry["enabled"] is True
    assert not entry.get("errors")


@BOTH
def test_it_installs_whole_and_goes_again(version, client, bundle, tmp_path):
    claude = client(version)
    claude.ok("plugin", "marketplace", "add", str(bundle), cwd=tmp_path)
    claude.ok("plugin", "install", "curry-train@curry-train", cwd=tmp_path)
    (entry,) = own(claude.ok("plugin", "list", "--json", cwd=tmp_path))
    assert not entry.get("errors")
    details = claude.ok("plugin", "details", "curry-train", cwd=tmp_path)
    for name in [*names(bundle)[0], *names(bundle)[1]]:
        assert name.removeprefix("curry-train:") in details
    installed = Path(entry["installPath"])
    assert claude.home in installed.parents
    assert_same(bundle, installed)
    claude.ok("plugin", "uninstall", "curry-train@curry-train", cwd=tmp_path)
    assert own(claude.ok("plugin", "list", "--json", cwd=tmp_path)) == []
    claude.ok("plugin", "marketplace", "remove", "curry-train", cwd=tmp_path)


def assert_same(bundle: Path, installed: Path) -> None:
    """Every file of the bundle stands in the copy with its bytes and its exec bit."""
    paths = files(bundle)
    assert any("template" in path.parts for path in paths)
    assert any(os.access(path, os.X_OK) for path in paths), "no exec bit to compare"
    for path in paths:
        copy = installed / path.relative_to(bundle)
        assert copy.read_bytes() == path.read_bytes(), copy
        assert copy.stat().st_mode & stat.S_IXUSR == path.stat().st_mode & stat.S_IXUSR, copy
