"""Codex installs the bundle, shows every skill with its whole description, and runs no hook."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from bundle.tree import skills
from clients.test_claude_code import assert_same

HOOKS = {
    "hooks": {
        "SessionStart": [
            {"matcher": "startup", "hooks": [{"type": "command", "command": "echo started"}]}
        ]
    }
}


@pytest.fixture
def codex(client):
    return client("codex")


def install(codex, bundle: Path, cwd: Path) -> Path:
    added = codex.ok("plugin", "marketplace", "add", str(bundle), "--json", cwd=cwd)
    assert json.loads(added)["marketplaceName"] == "curry-train"
    installed = codex.ok("plugin", "add", "curry-train@curry-train", "--json", cwd=cwd)
    return Path(json.loads(installed)["installedPath"])


def hooks(codex, cwd: Path) -> list[dict]:
    """Ask the client's own server which hooks it would run in the folder."""
    server = subprocess.Popen(
        [*codex.command, "app-server"],
        cwd=cwd,
        env=codex.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def send(**message) -> None:
        server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()

    def answer(number: int) -> dict:
        for line in server.stdout:
            message = json.loads(line)
            if message.get("id") == number:
                return message["result"]
        raise AssertionError(f"the server ended before it answered request {number}")

    try:
        information = {"clientInfo": {"name": "tests", "version": "0"}}
        send(id=1, method="initialize", params=information)
        answer(1)
        send(method="initialized")
        send(id=2, method="hooks/list", params={"cwds": [str(cwd)]})
        (found,) = answer(2)["data"]
        assert found["errors"] == []
        return found["hooks"]
    finally:
        server.kill()
        server.wait()


def test_it_installs_whole_and_shows_every_skill(codex, bundle, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    installed = install(codex, bundle, project)
    assert codex.home in installed.parents
    assert_same(bundle, installed)
    listing = json.loads(codex.ok("plugin", "list", "--json", cwd=project))["installed"]
    manifest = json.loads((bundle / "plugin.json").read_text())
    assert [(one["name"], one["version"], one["enabled"]) for one in listing] == [
        ("curry-train", manifest["version"], True)
    ]
    prompt = json.loads(codex.ok("debug", "prompt-input", "hello", cwd=project))
    texts = [
        part["text"]
        for message in prompt
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part.get("text", "").startswith("<skills_instructions>")
    ]
    assert len(texts) == 1
    for page in skills(bundle):
        name, description = page.keys["name"], page.keys["description"]
        assert f"\n- curry-train:{name}: {description} (file: " in texts[0]


def test_it_picks_up_no_hooks_of_ours(codex, bundle, tmp_path):
    """Even a bundle that has hooks for another client brings none into this one."""
    planted = tmp_path / "planted"
    for name in (".claude-plugin", "skills", "hooks"):
        (planted / name).mkdir(parents=True)
    for name in ("plugin.json", ".claude-plugin/plugin.json", ".claude-plugin/marketplace.json"):
        (planted / name).write_bytes((bundle / name).read_bytes())
    (planted / "hooks/hooks.json").write_text(json.dumps(HOOKS))
    project = tmp_path / "project"
    project.mkdir()
    install(codex, planted, project)
    assert hooks(codex, project) == []


def test_the_question_about_hooks_can_be_answered_with_one(codex, tmp_path):
    """The check above would see a hook: the client's own file brings one."""
    (codex.home / ".codex").mkdir()
    (codex.home / ".codex/hooks.json").write_text(json.dumps(HOOKS))
    assert len(hooks(codex, tmp_path)) == 1
