"""Rules of the bundle's skills and commands that no client's validator checks.

Each lint takes the root of a tree and returns sentences, one for each problem.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from bundle.tree import (
    PLUGIN,
    Page,
    commands,
    files,
    main_script,
    python_files,
    relative,
    skills,
)

LISTING_BUDGET = 7000
DESCRIPTION_LIMIT = 100
FRONT_DOOR_LIMIT = 150
COMMAND_DESCRIPTION_LIMIT = 80
FRONT_DOORS = {
    "start-project",
    "scaffold-experiment",
    "preflight-checks",
    "diagnose-failure",
    "compare-runs",
    "benchmark-step",
    "choose-parallelism",
    "estimate-memory",
    "hf-weights",
    "run-journal",
}
SKILL_KEYS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
COMMAND_KEYS = {"description", "argument-hint", "disable-model-invocation", "allowed-tools"}
BUILT_IN = {
    "init",
    "status",
    "review",
    "context",
    "memory",
    "config",
    "model",
    "cost",
    "usage",
    "stats",
    "doctor",
    "debug",
    "help",
    "export",
    "plan",
    "tasks",
    "agents",
    "hooks",
    "run",
    "verify",
    "loop",
    "batch",
    "simplify",
}
SECTIONS = [
    "Run",
    "Read the result",
    "If it fails",
    "Change the code",
    "Traps",
    "References",
]
OPTIONAL_SECTIONS = {"Change the code", "References"}
MIN_BODY, MAX_BODY = 60, 200
PLACEHOLDER_SENTENCE = (
    "If `${CLAUDE_SKILL_DIR}` is not expanded, use the folder that holds this SKILL.md."
)


def listing(root: Path) -> list[str]:
    """The listing of all skills fits in the part of the context that clients give it."""
    lines = [
        f"- {PLUGIN}:{page.path.parent.name}: {page.keys.get('description', '')}\n"
        for page in skills(root)
    ]
    size = sum(map(len, lines))
    if size <= LISTING_BUDGET:
        return []
    return [f"skills/: the listing takes {size} characters; at most {LISTING_BUDGET} are allowed"]


def layout(root: Path) -> list[str]:
    """Every folder in skills/ is a skill with its main script, and no SKILL.md hides elsewhere."""
    problems = []
    folders = set()
    for path in files(root):
        name = relative(root, path)
        parts = name.split("/")
        if path.name.lower() == "skill.md":
            if path.name != "SKILL.md":
                problems.append(f"{name}: clients load the exact name SKILL.md only")
            if not (parts[0] == "skills" and len(parts) == 3):
                problems.append(f"{name}: a skill stands in an immediate folder of skills/")
        if parts[0] == "skills":
            if len(parts) == 2:
                problems.append(f"{name}: skills/ holds folders only")
            else:
                folders.add(parts[1])
    for folder in sorted(folders):
        here = root / "skills" / folder
        if not any(path == here / "SKILL.md" for path in files(root)):
            problems.append(f"skills/{folder}: has no SKILL.md")
        if not (here / main_script(folder)).is_file():
            problems.append(f"skills/{folder}: has no main script {main_script(folder)}")
    return problems


def _description(name: str, text: str) -> list[str]:
    limit = FRONT_DOOR_LIMIT if name in FRONT_DOORS else DESCRIPTION_LIMIT
    problems = []
    if len(text) > limit:
        problems.append(f"description has {len(text)} characters; at most {limit} are allowed")
    if not re.fullmatch(r"[A-Z][^.]*\. Use when [^.]+\.", text):
        problems.append("description is not '<Verb phrase>. Use when <symptom or request>.'")
    if ": " in text or "<" in text or ">" in text:
        problems.append("description has a colon with a space or an angle bracket")
    return problems


def frontmatter(root: Path) -> list[str]:
    """A skill's frontmatter has the portable keys only, and its name is its folder's."""
    problems = []
    for page in skills(root):
        folder = page.path.parent.name
        found = list(page.problems)
        found += [f"frontmatter key {key} is not portable" for key in set(page.keys) - SKILL_KEYS]
        if page.keys.get("name") != folder:
            found.append(f"name is {page.keys.get('name')!r}; it must equal the folder")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", folder) or len(folder) > 64:
            found.append("a name has lower-case letters, digits and single hyphens, at most 64")
        if len(page.keys.get("compatibility", "")) > 500:
            found.append("compatibility has more than 500 characters")
        found += _description(folder, page.keys.get("description", ""))
        problems += [f"skills/{folder}/SKILL.md: {text}" for text in found]
    return problems


def names(root: Path) -> list[str]:
    """No skill has the name of a command or of something built into a client."""
    own = {page.path.parent.name for page in skills(root)}
    both = own & {page.path.stem for page in commands(root)}
    problems = [f"skills/{name}: a command has the same name and hides it" for name in sorted(both)]
    taken = sorted(own & BUILT_IN)
    return problems + [f"skills/{name}: is a built-in name of a client" for name in taken]


def _sections(body: str) -> list[str]:
    plain = re.sub(r"^```.*?^```", "", body, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^# (.+)$", plain, re.MULTILINE)
    headings = re.findall(r"^## (.+)$", plain, re.MULTILINE)
    problems = []
    if len(titles) != 1 or not plain.lstrip().startswith("# "):
        problems.append("the body begins with its one title")
    expected = [name for name in SECTIONS if name not in OPTIONAL_SECTIONS or name in headings]
    if headings != expected:
        problems.append(f"sections are {headings}; they must be {expected}")
    purpose = plain.split("\n## ")[0]
    if not re.search(r"\b[Nn]ot for\b", purpose):
        problems.append("says nowhere before ## Run what it is not for")
    if re.search(r"^```\w*\n[A-Z]+\n```$", body, re.MULTILINE):
        problems.append("a block has a word in the place of real output")
    traps = re.search(r"^## Traps\n(.*?)(?=^## |\Z)", plain, re.DOTALL | re.MULTILINE)
    count = len(re.findall(r"^- ", traps.group(1), re.MULTILINE)) if traps else 0
    if traps and not 1 <= count <= 4:
        problems.append(f"## Traps has {count} items; one to four are allowed")
    run = re.search(r"^## Run\n(.*?)(?=^## |\Z)", body, re.DOTALL | re.MULTILINE)
    if run and not re.search(r'```\w*\n(?:.*\n)*?.*python3 "\$\{CLAUDE_SKILL_DIR\}/', run.group(1)):
        problems.append('## Run has no block with python3 "${CLAUDE_SKILL_DIR}/scripts/..."')
    return problems


def bodies(root: Path) -> list[str]:
    """Every body has the same sections in the same order, and the length that gets read."""
    problems = []
    for page in skills(root):
        found = _sections(page.body)
        length = len(page.body.strip().splitlines())
        if not MIN_BODY <= length <= MAX_BODY:
            found.append(f"body has {length} lines; {MIN_BODY} to {MAX_BODY} are allowed")
        if PLACEHOLDER_SENTENCE not in page.body:
            found.append(f"lacks the sentence: {PLACEHOLDER_SENTENCE}")
        problems += [f"skills/{page.path.parent.name}/SKILL.md: {text}" for text in found]
    return problems


def _thresholds(script: Path) -> dict[str, float]:
    """Return the literal numbers of a module's THRESHOLDS."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "THRESHOLDS":
            return ast.literal_eval(node.value)
    return {}


def thresholds(root: Path) -> list[str]:
    """A number that a script judges by (its THRESHOLDS) stands in its SKILL.md, the same."""
    problems = []
    for page in skills(root):
        folder = page.path.parent
        for script in python_files(root, relative(root, folder / "scripts")):
            for key, value in _thresholds(script).items():
                lines = [line for line in page.body.splitlines() if f"`{key}`" in line]
                shown = {float(n) for line in lines for n in re.findall(r"\d+(?:\.\d+)?", line)}
                if float(value) not in shown:
                    problems.append(
                        f"{relative(root, script)}: THRESHOLDS[{key!r}] is {value:g}; no line of "
                        f"SKILL.md has `{key}` and this number"
                    )
    return problems


def _command(page: Page, known: set[str]) -> list[str]:
    found = list(page.problems)
    found += [f"key {key} is not used by commands" for key in set(page.keys) - COMMAND_KEYS]
    description = page.keys.get("description", "")
    if not 0 < len(description) <= COMMAND_DESCRIPTION_LIMIT:
        found.append(f"description has {len(description)} characters; 1 to 80 are allowed")
    if page.keys.get("disable-model-invocation") != "true":
        found.append("disable-model-invocation must be true: commands are for users")
    if not page.keys.get("argument-hint"):
        found.append("argument-hint is missing")
    if len(page.body.strip().splitlines()) >= 15:
        found.append("body has 15 lines or more")
    if not any(f"`{name}`" in page.body or f"/{name}/" in page.body for name in known):
        found.append("names no skill of the bundle")
    return found


def command_pages(root: Path) -> list[str]:
    """Commands are thin, for users only, and lead to a skill."""
    known = {page.path.parent.name for page in skills(root)}
    return [
        f"commands/{page.path.name}: {text}"
        for page in commands(root)
        for text in _command(page, known)
    ]


def cross_references(root: Path) -> list[str]:
    """A skill or command that a document points to exists."""
    known = {page.path.parent.name for page in skills(root)}
    known |= {page.path.stem for page in commands(root)}
    problems = []
    for path in files(root):
        if path.suffix != ".md":
            continue
        text = path.read_text(encoding="utf-8")
        found = re.findall(rf"\b{PLUGIN}:([a-z0-9-]+)", text)
        found += re.findall(r"\bskills? `([a-z0-9-]+)`", text)
        found += re.findall(r"`([a-z0-9-]+)` skills?\b", text)
        problems += [
            f"{relative(root, path)}: points to {name}, which is no skill or command"
            for name in sorted(set(found) - known)
        ]
    return problems


def versions(root: Path) -> list[str]:
    """One version stands in every place that has one."""
    changelog = re.search(r"^## \[?(\d[^\s\]]*)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    found = {
        ".claude-plugin/plugin.json": _json(root / ".claude-plugin/plugin.json").get("version"),
        "plugin.json": _json(root / "plugin.json").get("version"),
        "CHANGELOG.md": changelog.group(1) if changelog else None,
        "template/curry_train/__init__.py": _assigned(root, "template/curry_train/__init__.py"),
    }
    for name in ("pyproject.toml", "template/pyproject.toml"):
        text = (root / name).read_text() if (root / name).exists() else ""
        project = re.search(r"^\[project\]\n(.*?)(?=^\[|\Z)", text, re.DOTALL | re.MULTILINE)
        if project or name.startswith("template"):
            line = re.search(
                r'^version = "(.*)"', project.group(1) if project else "", re.MULTILINE
            )
            found[name] = line.group(1) if line else None
    if len(set(found.values())) == 1 and None not in found.values():
        return []
    return ["versions differ: " + ", ".join(f"{name} {value}" for name, value in found.items())]


def _json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def _assigned(root: Path, name: str) -> str | None:
    match = re.search(r'^__version__ = "(.*)"$', (root / name).read_text(), re.MULTILINE)
    return match.group(1) if match else None


def text_files(root: Path) -> list[str]:
    """Text has line feeds, no byte order mark, and ends with a line feed.

    Fixtures are kept byte for byte as the code wrote them.
    """
    problems = []
    for path in files(root):
        data = path.read_bytes()
        if b"\0" in data or path.suffix in {".safetensors", ".png"}:
            continue
        name = relative(root, path)
        if data.startswith(b"\xef\xbb\xbf"):
            problems.append(f"{name}: begins with a byte order mark")
        if b"\r" in data:
            problems.append(f"{name}: has a carriage return")
        if data and not data.endswith(b"\n") and "fixtures" not in path.parts:
            problems.append(f"{name}: does not end with a line feed")
    return problems


LINTS = [
    listing,
    layout,
    frontmatter,
    names,
    bodies,
    thresholds,
    command_pages,
    cross_references,
    versions,
    text_files,
]
