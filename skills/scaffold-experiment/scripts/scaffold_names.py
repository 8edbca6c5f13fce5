"""What a name may be, and where a project keeps what a scaffold touches."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from pathlib import Path

from kit.errors import UsageError

NEEDED = ("train.py", "configs/config.yaml", "curry_train/models/__init__.py")
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LONGEST = 40
# What the configuration or YAML reads as something else than a name.
WORDS = {"standard", "null", "true", "false", "yes", "no", "on", "off", "auto", "none", "default"}


def check_project(project: Path) -> None:
    """Raise UsageError unless the folder is a project that init made."""
    missing = [name for name in NEEDED if not (project / name).is_file()]
    if missing:
        raise UsageError(
            f"--project {project} has no {missing[0]}",
            "a scaffold goes into a project of the training system",
            "set --project, or make one with the skill start-project",
        )


def check_has(project: Path, path: str) -> None:
    """Raise UsageError when the project lacks a file that what is made would import."""
    if not (project / path).is_file():
        raise UsageError(
            f"--project {project} has no {path}, which the test that is made imports",
            "a project of this bundle's version has it",
            "bring it there with --upgrade of the skill start-project",
        )


def check_name(name: str) -> None:
    """Raise UsageError unless `name` can be a module, a key and a file of configs at once."""
    allowed = "lower-case letters, digits and single underscores, a letter first"
    problem = None
    if not NAME.fullmatch(name):
        problem = "is no such name"
    elif len(name) > LONGEST:
        problem, allowed = f"has {len(name)} characters", f"at most {LONGEST}"
    elif keyword.iskeyword(name) or keyword.issoftkeyword(name):
        problem, allowed = "is a word of Python", "any other"
    elif name in WORDS:
        problem, allowed = "means something else in a configuration", "any other"
    if problem:
        raise UsageError(
            f"--name {name!r} {problem}", f"allowed are {allowed}", "set another --name"
        )


def check_module_free(project: Path, stems: list[str]) -> None:
    """Raise UsageError when a module of the package has one of the names already."""
    taken = {path.stem: path for path in (project / "curry_train").rglob("*.py")}
    taken |= {path.name: path for path in (project / "curry_train").iterdir() if path.is_dir()}
    for stem in stems:
        if stem in taken:
            raise UsageError(
                f"the package has a module {stem} already: {taken[stem].relative_to(project)}",
                "no module's name stands twice",
                "set another --name",
            )


def check_distinct(name: str, path: str, text: str) -> None:
    """Raise UsageError when what a file defines would hide what it imports or calls."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)} & set(dir(builtins))
    used |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    defined = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    for own in defined:
        if own in used or defined.count(own) > 1:
            raise UsageError(
                f"--name {name} would make a second {own} in {path}",
                "any name that the file does not use already",
                "set another --name",
            )


def camel(name: str) -> str:
    """Return the name as a class is called."""
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))
