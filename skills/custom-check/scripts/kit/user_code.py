"""Import and call code that is not ours; its errors become one line and its last frame."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .errors import UsageError

SKILLS = Path(__file__).resolve().parents[3]


def parse_spec(spec: str, *, flag: str) -> tuple[Path, str]:
    """Split FILE.py:FUNCTION and check that the file is there; nothing is imported."""
    file, colon, function = spec.rpartition(":")
    form = f"{flag} takes FILE.py:FUNCTION"
    if not colon or not file or not function.isidentifier():
        raise UsageError(f"{flag} {spec}", form, "name the function after a colon")
    path = Path(os.path.abspath(os.path.expanduser(file)))
    if path.is_dir() or path.suffix != ".py":
        raise UsageError(f"{flag} {spec}: {file} is no Python file", form)
    if not path.is_file():
        raise UsageError(
            f"{flag} {spec}: there is no file {file}", f"{form}, seen from {Path.cwd()}"
        )
    if (path.parent / "kit.py").exists() or (path.parent / "kit" / "__init__.py").exists():
        raise UsageError(
            f"{flag} {spec}: its folder holds a module named kit, the name of the bundle's own",
            fix="put the function into a file of another folder",
        )
    return path, function


def load_function(spec: str, *, flag: str, project: Path, anew: bool = False) -> Callable[..., Any]:
    """Import FILE.py (its folder and the project on the path) and return FUNCTION.

    With `anew` the file runs again when it was imported before, which stays the module of its name.
    """
    path, name = parse_spec(spec, flag=flag)
    known = {n: m for n, m in sys.modules.items() if getattr(m, "__file__", None) == str(path)}
    for module_name in known if anew else ():
        del sys.modules[module_name]
    try:
        with user_code(f"importing {path.name}"):
            module = _import_file(path, project)
    finally:
        sys.modules.update(known)
    function = getattr(module, name, None)
    if function is None:
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it defines {', '.join(names) or 'none'}"
        raise UsageError(f"{flag} {spec}: {path.name} has no function {name}", hint)
    if not callable(function):
        raise UsageError(
            f"{flag} {spec}: {name} is a {type(function).__name__}", "it must be a function"
        )
    return function


class _FromSource(importlib.machinery.SourceFileLoader):
    """Never takes cached bytecode: it is stale when a file changes within the second it was read.

    Python compares the size and the whole seconds of the time of change only.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import_file(path: Path, project: Path) -> ModuleType:
    """Import a file as `python FILE` or, inside a package, as the package's module would be."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    for folder in (project, root):
        put_first_on_path(folder)
    argv, sys.argv = sys.argv, [str(path)]
    try:
        if len(parts) > 1:
            return importlib.import_module(".".join(parts))
        taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
        name = f"target_{path.stem}" if taken else path.stem
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
        loader = _FromSource(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        loader.exec_module(module)
        return module
    finally:
        sys.argv = argv


class _LeavesNoBytecode(importlib.machinery.SourceFileLoader):
    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Write nothing: this is what importing a file would cache."""


def keep_bundle_clean() -> None:
    """Let the bundle's own files be imported at any time without leaving bytecode beside them.

    sys.dont_write_bytecode would hold for the checked code too, which then compiles at every start.
    """
    suffixes = importlib.machinery.SOURCE_SUFFIXES
    ours = [path for path in sys.path if SKILLS in Path(path).parents]
    for folder in [*ours, str(Path(__file__).resolve().parent)]:
        finder = importlib.machinery.FileFinder(folder, (_LeavesNoBytecode, suffixes))
        sys.path_importer_cache[folder] = finder


def put_first_on_path(folder: Path) -> None:
    """Let imports look in a folder before anywhere else."""
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))


@contextlib.contextmanager
def user_code(what: str, allowed: str = "") -> Iterator[None]:
    """Turn an exception of foreign code into a UsageError; an exception of the kit passes."""
    try:
        yield
    except (UsageError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not isinstance(error, (Exception, SystemExit)) or _raised_by_kit(error):
            raise
        problems = getattr(error, "problems", None)
        text = "; ".join(map(str, problems)) if isinstance(problems, list) else str(error)
        if isinstance(error, SystemExit):
            text = f"{text} (guard script code by if __name__ == '__main__')"
        if isinstance(error, ModuleNotFoundError) and not allowed:
            allowed = f"set --python to the python that has it; this is {sys.executable}"
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        raise UsageError(
            f"{what} raised {type(error).__name__}: {lines[0]}", allowed, where=_last_frame(error)
        ) from error


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return SKILLS in path.parents and path.parent.name in ("scripts", "kit")


def _raised_by_kit(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_ours(frames[-1].filename)


def _last_frame(error: BaseException) -> str:
    """Name the last frame that is neither ours nor a library's: FILE:LINE in FUNCTION: source."""
    if isinstance(error, SyntaxError) and error.filename:
        line = linecache.getline(error.filename, error.lineno or 0).strip()
        return f"{error.filename}:{error.lineno}: {line}"
    paths = sysconfig.get_paths()
    libraries = (paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        library = frame.filename.startswith(("<", *libraries)) or "site-packages" in frame.filename
        if not library and not _is_ours(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""
