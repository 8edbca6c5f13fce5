"""Rules of the code: budgets, names, what may be imported where. Pure ast, nothing is imported.

Each lint takes the root of a tree and returns sentences, one for each problem.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bundle.tree import files, python_files, relative

PACKAGE = "template/curry_train"
ENTRY = ["template/train.py", "template/sweep.py"]
SHIPPED = [PACKAGE, *ENTRY, "skills", "hooks"]
"""Code that reaches users; tests are not among it."""

PACKAGE_LINES, REACH_LINES = 10400, 9600
"""Without the kernels, parallelism and checkpoints, which are counted by themselves, below."""
KERNELS = f"{PACKAGE}/kernels"
PARALLEL = f"{PACKAGE}/parallel"
CHECKPOINT = f"{PACKAGE}/checkpoint"
OWN_LINES = {KERNELS: 5000, PARALLEL: 3200, CHECKPOINT: 5700}
FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 450, 60, 120
LAZY = {
    "lightning",
    "lightning_fabric",
    "tensorboard",
    "transformers",
    "rich",
    "scipy",
    "matplotlib",
}
LAZY_SUBMODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "curry_train.checkpoint.dcp",  # subclasses torch.distributed.checkpoint, so it imports it
)
LAZY_EXEMPT = ("train.py", "sweep.py", "checkpoint/")
NO_TORCH_AT_ALL = ["parallel/dims.py"]
NO_TORCH_AT_IMPORT = ["__init__.py", "config.py", "parallel/__init__.py"]
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load"}
SYNONYMS = {
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "dim_model": "hidden_size",
    "ffn_dim": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_query_groups": "num_key_value_heads",
    "num_kv_heads": "num_key_value_heads",
    "block_size": "seq_len",
    "seq_length": "seq_len",
    "sequence_length": "seq_len",
    "max_seq_len": "seq_len",
    "max_seq_length": "seq_len",
    "max_iters": "max_steps",
    "num_iterations": "max_steps",
    "total_steps": "max_steps",
    "num_steps": "max_steps",
    "gradient_accumulation_steps": "micro_batch_size",
    "grad_accum_steps": "micro_batch_size",
    "grad_acc_steps": "micro_batch_size",
    "accumulate_steps": "micro_batch_size",
    "microbatch": "micro_batch",
    "microbatch_size": "micro_batch_size",
    "learning_rate": "lr",
    "max_lr": "lr",
    "warmup_iters": "warmup_steps",
    "grad_clip": "max_grad_norm",
    "clip_grad": "max_grad_norm",
}
SHAPE_FOLDERS = ("layers", "parallel", "kernels")
SHAPE = re.compile(r"\[[A-Z*0-9.][^\]\n]*\]|\b\w+_[A-Z]{1,4}\b|\b(?:scalar|any shape|same shape)\b")
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:home|root|work|Users|opt|mnt)/[\w.]")
REGISTRY = re.compile(r"\b(?:pypi|npmjs|pythonhosted|debian)\.(?:org|com)\b")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX)\b|\bNotImplementedError\b")


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=path.name)


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _shipped(root: Path) -> list[Path]:
    return [path for path in python_files(root, *SHIPPED) if "tests" not in path.parts]


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _imports(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield the dotted name and line of everything that import statements name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def _at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the statements that run when the module is imported."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody", "handlers"):
                yield from _at_import(getattr(node, name, []))


def budgets(root: Path) -> list[str]:
    """The package, its files and its functions stay small enough to be read."""
    problems = []
    own = {part: sum(map(_lines, python_files(root, part))) for part in OWN_LINES}
    rest = sum(map(_lines, python_files(root, PACKAGE))) - sum(own.values())
    for part, lines in {PACKAGE: rest, **own}.items():
        limit = OWN_LINES.get(part, PACKAGE_LINES)
        if lines >= limit:
            problems.append(f"{part}: has {lines} lines; fewer than {limit} are allowed")
    for path in _shipped(root):
        name = relative(root, path)
        if _lines(path) >= FILE_LINES:
            problems.append(
                f"{name}: has {_lines(path)} lines; fewer than {FILE_LINES} are allowed"
            )
        limit = KERNEL_LINES if f"{KERNELS}/" in name else FUNCTION_LINES
        for node in _functions(_parse(path)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= limit:
                problems.append(
                    f"{name}:{node.lineno}: {node.name} has {length} lines; "
                    f"fewer than {limit} are allowed"
                )
    return problems


def _module_file(root: Path, dotted: str) -> Path | None:
    base = root / "template" / Path(*dotted.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def reached(root: Path) -> set[Path]:
    """Return the first-party files that train.py imports, directly or not, at any level.

    "module:function" strings of the literal dicts count as imports of the module.
    """
    found: set[Path] = set()
    todo = [root / ENTRY[0]]
    while todo:
        path = todo.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        names = [name for name, _ in _imports(ast.walk(_parse(path)))]
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names += re.findall(r"^(curry_train(?:\.\w+)+):\w+$", node.value)
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                file = _module_file(root, ".".join(parts[:end]))
                if parts[0] == "curry_train" and file:
                    todo.append(file)
    return found


def reach(root: Path) -> list[str]:
    """What a reader of train.py may have to open stays small."""
    own = [root / part for part in OWN_LINES]
    lines = sum(_lines(path) for path in reached(root) if path.parent not in own)
    if lines < REACH_LINES:
        return []
    return [f"template/train.py: reaches {lines} lines; fewer than {REACH_LINES} are allowed"]


def file_names(root: Path) -> list[str]:
    """No stem stands twice in the package, and no file or class has a name that says nothing."""
    paths = python_files(root, PACKAGE)
    stems = Counter(path.stem for path in paths)
    # A package's folder is a name of its own: data/ and data.py would be two things called data.
    stems.update({path.parent.name for path in paths if path.name == "__init__.py"})
    problems = [
        f"{PACKAGE}: the name {stem} stands twice"
        for stem, count in sorted(stems.items())
        if count > 1 and stem not in ("__init__", "__main__")
    ]
    for path in _shipped(root):
        name = relative(root, path)
        if re.fullmatch(r"(utils?|helpers?|misc|common)", path.stem):
            problems.append(f"{name}: the name says nothing; name the file after what it does")
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Helper|Utils?)$", node.name):
                problems.append(f"{name}:{node.lineno}: class {node.name} says nothing")
    return problems


def imports(root: Path) -> list[str]:
    """Heavy packages are imported where used, Lightning in launch.py only, torch not in dims."""
    problems = []
    for path in python_files(root, PACKAGE, *ENTRY):
        name = relative(root, path)
        inside = name.removeprefix(f"{PACKAGE}/").removeprefix("template/")
        for dotted, line in _imports(ast.walk(_parse(path))):
            top = dotted.split(".")[0]
            if top.startswith("lightning") and inside != "launch.py":
                problems.append(f"{name}:{line}: imports {dotted}; only launch.py may")
            if top == "torch" and inside in NO_TORCH_AT_ALL:
                problems.append(f"{name}:{line}: imports torch; this file must not, at any level")
        for dotted, line in _imports(_at_import(_parse(path).body)):
            top = dotted.split(".")[0]
            submodule = dotted.startswith(LAZY_SUBMODULES) and not inside.startswith(LAZY_EXEMPT)
            if top in LAZY or submodule:
                problems.append(f"{name}:{line}: imports {dotted} at import, not where it is used")
            if top == "torch" and inside in NO_TORCH_AT_IMPORT:
                problems.append(f"{name}:{line}: imports torch at import; it must answer without")
    return sorted(set(problems))


def import_style(root: Path) -> list[str]:
    """Imports are absolute and name what they bring; no module keeps mutable globals."""
    problems = []
    for path in _shipped(root):
        name = relative(root, path)
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.ImportFrom) and node.level and not name.startswith("skills/"):
                problems.append(f"{name}:{node.lineno}: relative import")
            if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
                problems.append(f"{name}:{node.lineno}: star import")
            if isinstance(node, ast.Global):
                problems.append(f"{name}:{node.lineno}: global statement")
    return problems


def _identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.keyword(arg=str(name)):
                yield name, node.value.lineno


def glossary(root: Path) -> list[str]:
    """One word for each thing: the field's synonyms are not used."""
    problems = []
    for path in python_files(root, PACKAGE, *ENTRY):
        for name, line in _identifiers(_parse(path)):
            if name in SYNONYMS:
                problems.append(
                    f"{relative(root, path)}:{line}: {name}; the word is {SYNONYMS[name]}"
                )
    for path in files(root):
        if path.suffix == ".yaml" and (root / "template/configs") in path.parents:
            for key in re.findall(r"^\s*(\w+):", path.read_text(encoding="utf-8"), re.MULTILINE):
                if key in SYNONYMS:
                    problems.append(f"{relative(root, path)}: {key}; the word is {SYNONYMS[key]}")
    return sorted(set(problems))


def _public(
    body: list[ast.stmt], owner: ast.ClassDef | None = None
) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Yield name, node and docstring; a forward without one has its class's."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node.body, node)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            if owner and node.name == "forward" and not text:
                text = ast.get_docstring(owner) or ""
            yield f"{owner.name}.{node.name}" if owner else node.name, node, text


def _takes_tensor(node: ast.FunctionDef) -> bool:
    hints = [arg.annotation for arg in [*node.args.args, *node.args.kwonlyargs]] + [node.returns]
    return any(hint is not None and "Tensor" in ast.unparse(hint) for hint in hints)


def docstrings(root: Path) -> list[str]:
    """Public functions of layers, parallel and kernels say what they do and which shapes move."""
    problems = []
    for folder in SHAPE_FOLDERS:
        for path in python_files(root, f"{PACKAGE}/{folder}"):
            for full, node, text in _public(_parse(path).body):
                where = f"{relative(root, path)}:{node.lineno}: {full}"
                if not text:
                    problems.append(f"{where} has no docstring")
                elif _takes_tensor(node) and not SHAPE.search(text):
                    problems.append(f"{where} names no shape in its docstring")
    return problems


def annotations(root: Path) -> list[str]:
    """Every argument of a public function is annotated, so that shapes and types can be checked.

    Kernels are left out: what Triton hands them, pointers and numbers, are no Python values.
    """
    problems = []
    for path in python_files(root, PACKAGE, *ENTRY):
        for full, node, _ in _public(_parse(path).body):
            if any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None]
            bare = [name for name in bare if name not in ("self", "cls")]
            if bare:
                where = f"{relative(root, path)}:{node.lineno}: {full}"
                problems.append(f"{where} leaves {', '.join(bare)} without a type")
    return problems


def safety(root: Path) -> list[str]:
    """Nothing that users run unpickles, evaluates text or trusts remote code."""
    problems = []
    for path in _shipped(root):
        name = relative(root, path)
        for dotted, line in _imports(ast.walk(_parse(path))):
            if dotted.split(".")[0] in UNSAFE_MODULES:
                problems.append(f"{name}:{line}: imports {dotted}")
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.Call):
                if ast.unparse(node.func) in UNSAFE_CALLS:
                    problems.append(f"{name}:{node.lineno}: calls {ast.unparse(node.func)}")
                for keyword in node.keywords:
                    off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    if keyword.arg in ("allow_pickle", "trust_remote_code") and not off:
                        problems.append(f"{name}:{node.lineno}: passes {keyword.arg}")
    return sorted(set(problems))


def texts(root: Path) -> list[str]:
    """No file names a machine's paths or a registry's host; code is ASCII and finished."""
    problems = []
    for path in files(root):
        data = path.read_bytes()
        if b"\0" in data:
            continue
        name = relative(root, path)
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                problems.append(f"{name}:{number}: names a path of a machine")
            if REGISTRY.search(line):
                problems.append(f"{name}:{number}: names the host of a registry")
            if path.suffix == ".py" and path in _shipped_set(root):
                if not line.isascii():
                    problems.append(f"{name}:{number}: is not ASCII")
                if UNFINISHED.search(line):
                    problems.append(f"{name}:{number}: is unfinished")
    return problems


@functools.cache
def _shipped_set(root: Path) -> frozenset[Path]:
    return frozenset(_shipped(root))


LINTS = [
    budgets,
    reach,
    file_names,
    imports,
    import_style,
    glossary,
    docstrings,
    annotations,
    safety,
    texts,
]
