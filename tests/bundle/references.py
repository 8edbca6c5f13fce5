"""What a document names exists: paths, scripts and their flags, modules, functions, settings.

Inline code and code blocks are read token by token. A name that only exists at run time, such as
a file of the run folder, must at least stand in the code that makes it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bundle.tree import PLUGIN, commands, documents, files, python_files, relative, skills

SHELL_BLOCKS = {"", "sh", "bash", "shell", "console"}
GROUPS = ("model", "data", "optim", "parallel", "run", "tracking", "experiment")
FOREIGN = {
    "fabric": ("lightning_fabric", "cli.py"),
    "torchrun": ("torch", "distributed/run.py"),
    "tensorboard": ("tensorboard", "plugins/core/core_plugin.py"),
    "pip": ("pip", "_internal/cli/cmdoptions.py"),
}
"""Where the installed source of a program of others declares its flags."""
SUFFIX = re.compile(r"\.(?:py|md|json|jsonl|yaml|toml|lock|txt|safetensors|pt|diff|sh|png|zst)$")
OUTSIDE = {
    "CLAUDE_SKILL_DIR",
    "CLAUDE_PLUGIN_ROOT",
    "ARGUMENTS",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "HOME",
    "PATH",
    "XDG_CACHE_HOME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
}
"""Variables of clients, launchers and shells."""
PLACEHOLDERS = {"NAME", "FILE", "DIR", "ID", "TIME", "STAMP", "STEP"}
OUTSIDE_FILES = {"tokenizer.json", ".gitignore", "CLAUDE.md", "book.txt", "utils.py"}
"""Files that users bring, or must not."""


@functools.cache
def _sources(root: Path) -> tuple[frozenset[str], str]:
    """Return the identifiers and the joined string constants of the code that users run."""
    identifiers: set[str] = set()
    strings: list[str] = []
    for path in python_files(root, "template", "skills", "hooks", "tests/run.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    identifiers.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    identifiers.add(name)
                case ast.keyword(arg=str(name)):
                    identifiers.add(name)
                case ast.alias(name=name):
                    identifiers.update(name.split("."))
                case ast.Constant(value=str(text)) if id(node) not in docstrings:
                    strings.append(text)
    for path in files(root):
        if path.suffix in {".yaml", ".toml", ".lock"} or path.name in ("Makefile", "MANIFEST"):
            strings.append(path.read_text(encoding="utf-8"))
    return frozenset(identifiers), "\n".join(strings)


@functools.cache
def schema(root: Path) -> dict[str, str]:
    """Return every configuration key, dotted, with its annotation, read from config.py."""
    package = root / "template/curry_train"
    tree = ast.parse((package / "config.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bounded = {}  # Count = Annotated[int, ...] stands for int here
    bounds = [package / "bounds.py"] if (package / "bounds.py").is_file() else []
    bodies = [ast.parse(path.read_text(encoding="utf-8")).body for path in bounds]
    for node in itertools.chain(tree.body, *bodies):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Subscript(
                    value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, _])
                ),
            ):
                bounded[name] = ast.unparse(kind)
    keys: dict[str, str] = {}

    def visit(name: str, prefix: str) -> None:
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                hint = ast.unparse(node.annotation)
                hint = " | ".join(bounded.get(kind, kind) for kind in hint.split(" | "))
                keys[prefix + node.target.id] = hint
                if hint in classes:
                    visit(hint, f"{prefix}{node.target.id}.")

    visit("Config", "")
    return keys


@functools.cache
def _help(root: Path, *command: str) -> str | None:
    """Return what the command prints for --help, None when it fails."""
    env = {**os.environ, "PYTHONPATH": str(root / "template"), "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=root / "template", env=env, capture_output=True, text=True, timeout=60
    )
    return done.stdout if done.returncode == 0 else None


@functools.cache
def _foreign_flags(program: str) -> str:
    """Return the source that declares the flags; asking for --help would import torch."""
    package, module = FOREIGN[program]
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return (Path(spec.origin).parent / module).read_text(encoding="utf-8")


def help_text(root: Path, script: Path, verbs: tuple[str, ...] = ()) -> str | None:
    return _help(root, sys.executable, str(script), *verbs, "--help")


class Document:
    """One document and the judgement of what it names."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root = root
        self.path = path
        self.problems: list[str] = []
        self.helps = ""
        """The help texts of every command that the document calls; its flags are looked up here."""
        self.identifiers, self.strings = _sources(root)
        folder = path.parent.parent if path.parent.name == "references" else path.parent
        self.bases = [folder, root, root / "template"]

    def say(self, text: str) -> None:
        problem = f"{relative(self.root, self.path)}: {text}"
        if problem not in self.problems:
            self.problems.append(problem)

    def check(self) -> list[str]:
        text = self.path.read_text(encoding="utf-8")
        plain = re.sub(r"^```(\w*)\n(.*?)^```", "", text, flags=re.DOTALL | re.MULTILINE)
        spans = [span for span in re.findall(r"`([^`\n]+)`", plain) if span.strip()]
        calls = [*_shell_lines(text), *(span for span in spans if _is_command(span))]
        for line in calls:
            self.command(line)
        for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            self.python(block)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", plain):
            if "://" not in target:
                self.file(target)
        for span in spans:
            words = span.split()
            if (self.bases[0] / "scripts" / words[0]).is_file():
                self.script_call(words[0], words[1:])
            elif not _is_command(span):
                for word in words:
                    self.token(word.strip(",;"))
        return self.problems

    def script(self, word: str) -> Path | None:
        """Return the file that a command runs, or say that there is none."""
        word = word.replace("${CLAUDE_SKILL_DIR}", str(self.bases[0]))
        word = word.replace("${CLAUDE_PLUGIN_ROOT}", str(self.root))
        for base in [*self.bases, self.bases[0] / "scripts"]:
            if (base / word).is_file():
                return base / word
        self.say(f"runs {word}, which does not exist")
        return None

    def command(self, line: str) -> None:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            self.say(f"has a command that no shell can read: {line}")
            return
        while words and re.fullmatch(r"\w+=.*", words[0]):
            self.variable(words.pop(0).split("=")[0])
        if not words:
            return
        program, rest = Path(words[0]).name, words[1:]
        if re.fullmatch(r"python3?", program) and rest[:1] == ["-m"]:
            self.module_call(rest[1], rest[2:])
        elif re.fullmatch(r"python3?", program) and rest and not rest[0].startswith("-"):
            self.script_call(rest[0], rest[1:])
        elif program == "bash" and rest and not rest[0].startswith("-"):
            self.script(rest[0])
        elif program == "make":
            for target in rest:
                self.make_target(target)
        elif program in (*FOREIGN, "srun"):
            self.launch(program, rest)

    def launch(self, program: str, words: list[str]) -> None:
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
        if program in FOREIGN:
            known = _foreign_flags(program)
            self.helps += known
            self.flags(program, [w for w in words[:at] if w.startswith("--")], known)
        if at < len(words):
            self.script_call(words[at], words[at + 1 :])

    def script_call(self, word: str, arguments: list[str]) -> None:
        script = self.script(word)
        if script is None or script.suffix != ".py":
            return
        verbs = tuple(arguments[:1]) if arguments and arguments[0].isalpha() else ()
        known = help_text(self.root, script)
        if known is None:
            self.say(f"{word} --help does not exit with 0")
            return
        if verbs and re.search(rf"[{{,]{verbs[0]}[,}}]", known):
            known += help_text(self.root, script, verbs) or ""
        self.arguments(word, arguments, known)

    def module_call(self, module: str, arguments: list[str]) -> None:
        if module.split(".")[0] != "curry_train":
            return
        base = self.root / "template" / Path(*module.split("."))
        if not base.with_suffix(".py").is_file() and not (base / "__main__.py").is_file():
            self.say(f"runs the module {module}, which does not exist")
            return
        known = _help(self.root, sys.executable, "-m", module, "--help")
        if known is None:
            self.say(f"python -m {module} --help does not exit with 0")
            return
        self.arguments(module, arguments, known)

    def arguments(self, name: str, arguments: list[str], known: str) -> None:
        self.helps += known
        self.flags(name, [word for word in arguments if word.startswith("--")], known)
        for word in arguments:
            if re.match(r"[a-z_.]+=", word):
                self.override(word)

    def flags(self, name: str, words: list[str], known: str) -> None:
        for word in words:
            flag = word.split("=")[0]
            if flag not in ("--", "--help") and not _has_flag(known, flag):
                self.say(f"calls {name} with {flag}, which its --help does not have")

    def override(self, word: str) -> None:
        key, value = word.split("=", 1)
        options = self.root / "template/configs" / key
        if key in GROUPS:
            if not _placeholder(value) and not (options / f"{value}.yaml").is_file():
                self.say(f"chooses {word}, but configs/{key}/{value}.yaml does not exist")
            return
        keys = schema(self.root)
        if key not in keys:
            self.say(f"sets {key}, which is no configuration key")
        elif not _placeholder(value) and not _fits(value, keys[key]):
            self.say(f"sets {word}, but {key} is {keys[key]}")

    def make_target(self, target: str) -> None:
        makefile = self.root / "template/Makefile"
        text = makefile.read_text(encoding="utf-8") if makefile.exists() else ""
        if not target.startswith("-") and not re.search(rf"^{target}:", text, re.MULTILINE):
            self.say(f"names the make target {target}, which template/Makefile lacks")

    def variable(self, name: str) -> None:
        if name not in OUTSIDE and name not in self.strings:
            self.say(f"names the variable {name}, which no code reads")

    def python(self, block: str) -> None:
        try:
            tree = ast.parse(block)
        except SyntaxError as error:
            self.say(f"has a python block with a syntax error: {error}")
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.dotted(alias.name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.dotted(f"{node.module}.{alias.name}")

    def dotted(self, name: str) -> None:
        """A name of curry_train is a module or a module's attribute."""
        parts = name.split(".")
        if parts[0] != "curry_train":
            return
        for end in range(len(parts), 0, -1):
            base = self.root / "template" / Path(*parts[:end])
            module = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            if base.is_dir() and end == len(parts):
                return
            if module.is_file():
                if end < len(parts) and parts[end] not in _definitions(module):
                    self.say(f"names {name}, but {'.'.join(parts[:end])} has no {parts[end]}")
                return
        self.say(f"names the module {name}, which does not exist")

    def file(self, token: str) -> None:
        """A path exists in the tree, or each of its names stands in the code that makes it."""
        token = token.replace("${CLAUDE_SKILL_DIR}/", "").replace("${CLAUDE_PLUGIN_ROOT}/", "")
        path = token.rstrip("/").removeprefix("./")
        if not path or path.startswith(("../", "/", "~")):
            return  # a division sign, or outside the tree
        path = "/".join("*" if _stands_for_many(name) else name for name in path.split("/"))
        if path in OUTSIDE_FILES or any(any(base.glob(path)) for base in self.bases):
            return
        if path in self.strings or self.anywhere(path):
            return
        names = [re.sub(r"\d{4,}$", "", name) for name in path.split("/")]  # step-00000250
        missing = [name for name in names if name.strip("*") not in self.strings]
        if missing:
            self.say(f"names {token}, but {missing[0]} is no file and stands in no code")
        elif set(names) == {"*"}:
            self.say(f"names {token}, which matches no file")

    def anywhere(self, path: str) -> bool:
        """Whether the tree has a file or folder whose path ends so."""
        ending = f"/{path}/"
        return any(ending in f"/{relative(self.root, file)}/" for file in files(self.root))

    def token(self, token: str) -> None:
        token = token.strip("\"'()").removesuffix(":")
        if not token or _placeholder(token) or "://" in token or f"{PLUGIN}:" in token:
            return
        if token.startswith("--"):
            known = self.helps + self.own_helps() + "".join(map(_foreign_flags, FOREIGN))
            if not _has_flag(known, token.split("=")[0]):
                self.say(f"names the flag {token}, which no script that it calls has")
        elif re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+(=.*)?", token):
            self.variable(token.split("=")[0])
        elif re.match(r"[a-z_]+(\.[a-z_]+)*=\S", token):
            key = token.split("=")[0]
            if key in GROUPS or key in schema(self.root) or key.split(".")[0] in GROUPS:
                self.override(token)
            else:
                self.identifier(key)
        elif "/" in token or SUFFIX.search(token):
            self.file(token)
        elif re.fullmatch(r"curry_train(\.\w+)+(\(.*)?", token):
            self.dotted(token.split("(")[0])
        elif token.split(".")[0] in GROUPS and re.fullmatch(r"[a-z_]+\.[a-z_0-9]+", token):
            if token not in schema(self.root) and token not in self.strings:
                self.say(f"names {token}, which is no configuration key")
        else:
            self.identifier(token)

    def identifier(self, token: str) -> None:
        """A word that looks like a name of code stands somewhere in the code."""
        name = token.split("(")[0].split("[")[0].split("=")[0]
        compound = re.fullmatch(r"[A-Za-z]\w*([._-]\w+)+|[A-Z][a-z]+[A-Z]\w*|\w+\(\)", name)
        if not (compound or "(" in token) or not re.fullmatch(r"[\w.-]+", name):
            return
        if name in self.strings or self.anywhere(name) or self.is_named(name):
            return
        parts = name.split(".")
        if not all(part in self.identifiers or part in self.strings for part in parts):
            self.say(f"names {token}, which stands nowhere in the code")

    def is_named(self, name: str) -> bool:
        own = {page.path.parent.name for page in skills(self.root)}
        return name in own | {page.path.stem for page in commands(self.root)}

    def own_helps(self) -> str:
        """Return the help of the scripts beside a SKILL.md, which it may name without a call."""
        scripts = python_files(self.root, relative(self.root, self.bases[0] / "scripts"))
        return "".join(help_text(self.root, path) or "" for path in scripts if _is_script(path))


def _is_script(path: Path) -> bool:
    """Whether a person runs the file; the others beside it are its modules."""
    return '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")


def _shell_lines(text: str) -> Iterator[str]:
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language not in SHELL_BLOCKS:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if _is_command(line):
                yield line


def _is_command(text: str) -> bool:
    words = [word for word in text.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    return len(words) > 1 and bool(
        re.fullmatch(r"(?:\S*/)?(?:python3?|fabric|torchrun|srun|bash|make|tensorboard)", words[0])
    )


def _has_flag(known: str, flag: str) -> bool:
    """A launcher takes - and _ alike."""
    forms = {flag, "--" + flag[2:].replace("_", "-"), "--" + flag[2:].replace("-", "_")}
    return any(re.search(rf"(?<![\w-]){re.escape(form)}(?![\w-])", known) for form in forms)


def _placeholder(text: str) -> bool:
    """Whether the text stands for something the reader puts in its place."""
    return bool(re.search(r"[<>$\u2026]|\.\.\.", text) or re.fullmatch(r"[A-Z][A-Z0-9]*", text))


def _stands_for_many(name: str) -> bool:
    """Whether a part of a path has a placeholder in it, as NAME.yaml or STAMP-ID."""
    return _placeholder(name) or not PLACEHOLDERS.isdisjoint(re.split(r"[-.]", name))


def _fits(value: str, hint: str) -> bool:
    """Whether the text of an override can be a value of the annotated type."""
    kinds = {kind.strip() for kind in hint.split("|")}
    patterns = {
        "int": r"-?\d+",
        "float": r"-?\d+(\.\d*)?(e-?\d+)?",
        "bool": r"true|false",
        "None": r"null",
    }
    choices = {word for kind in kinds for word in re.findall(r"'([^']+)'", kind)}
    choices |= {word for kind in kinds if "Literal" in kind for word in re.findall(r"-?\d+", kind)}
    return bool({"str"} & kinds or {value} & choices) or any(
        re.fullmatch(patterns[kind], value) for kind in kinds if kind in patterns
    )


@functools.cache
def _definitions(module: Path) -> frozenset[str]:
    """Return the names that a module defines or imports at its top level."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name)
    return frozenset(names)


def references(root: Path) -> list[str]:
    """Everything that the documents name exists."""
    return [problem for path in documents(root) for problem in Document(root, path).check()]


def helps(root: Path) -> list[str]:
    """Every script of a skill answers --help with 0, with the standard library alone."""
    problems = []
    for path in python_files(root, "skills"):
        if not _is_script(path):
            continue
        if _help(root, sys.executable, "-S", "-E", str(path), "--help") is None:
            problems.append(f"{relative(root, path)}: --help needs more than the standard library")
    return problems


LINTS = [references, helps]
