"""Compile every kernel ahead of time, for GPUs that are not here, and look at what came out.

    python template/tests/kernels/aot.py --target sm_90 --triton DIR

`aot_cases.py` holds a function for each file of curry_train/kernels that holds kernels. It returns
what the launchers of that file really launch, as plain data: a list of dictionaries of these keys.

    name        str, unique in its file: "gmm-gather-bf16"
    kernel      str, the name of the @triton.jit function in that file
    targets     tuple of "sm_80", "sm_90", "sm_100", "gfx942": where this case is launched.
                Tiles that differ between targets are cases of their own (same name, disjoint
                targets), so read them from the same table that the launcher reads.
    signature   dict, parameter -> type, every parameter in the order of the kernel:
                "*bf16" "*fp16" "*fp32" "*i32" "*i64" "i32" "i64" "fp32" "i1" "constexpr",
                "tensordesc<bf16[1,128,64]>" for a descriptor
    constexprs  dict, parameter -> value, for each "constexpr" of the signature. An int that the
                launch passes as 1 (the stride of a last dimension) and an argument passed as None
                are constants to Triton: give them the type "constexpr" and their value here too.
    divisible   tuple of the pointers and ints that a launch finds divisible by 16. Pointers of
                torch tensors are; D, F, 2F and strides of real models are; token counts, R, E are
                not. Without this another, slower kernel is compiled and the check proves nothing.
    num_warps   int
    num_stages  int
    options     dict, optional: further options of the launch, {"maxnreg": 128}
    dot         bool: holds a tl.dot, so matrix instructions are expected
    copies      bool: has a pipelined loop, so asynchronous copies are expected (NVIDIA)

A case is what a real model launches (bf16, D=2048, F=768, E=128, K=8 as the anchor; fp16 and fp32
where the launcher has other tiles for them), not a tile that only tests use.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

TEMPLATE = Path(__file__).resolve().parents[2]
KERNELS = TEMPLATE / "curry_train" / "kernels"
NVIDIA_COPY = r"cp\.async\.c[ag]\.shared|cp\.async\.bulk\.tensor"


@dataclass(frozen=True)
class Target:
    """A GPU to compile for; shared is the most bytes of shared memory that a launch may ask for."""

    backend: str
    arch: int | str
    warp: int
    shared: int
    matrix: str
    copy: str | None = NVIDIA_COPY


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166_912, r"mma\.sync"),
    "sm_90": Target("cuda", 90, 32, 232_448, r"wgmma\.mma_async"),
    "sm_100": Target("cuda", 100, 32, 232_448, r"tcgen05\.mma"),
    "gfx942": Target("hip", "gfx942", 64, 65_536, r"v_mfma_", None),
}


@dataclass
class Compiled:
    """What one case became on one target; `error` is the compiler's last words."""

    file: str
    name: str
    kernel: str
    target: str
    triton: str = ""
    registers: int = -1
    stack: int = -1
    shared: int = -1
    instructions: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def kernel_files() -> list[Path]:
    """Return the files of the package that hold kernels."""
    files = sorted(KERNELS.glob("*.py"))
    return [path for path in files if "@triton.jit" in path.read_text(encoding="utf-8")]


def load(path: Path) -> ModuleType:
    """Import a file by its path; files of the package under their own name."""
    if path.parent == KERNELS:
        return importlib.import_module(f"curry_train.kernels.{path.stem}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def cases_of(path: Path) -> list[dict]:
    """Return the cases of a file with kernels: those of the package stand in `aot_cases.py`."""
    if path.parent == KERNELS:
        from aot_cases import CASES

        return CASES[path.stem]()
    return load(path).aot_cases()


def problems(found: Compiled, case: dict) -> list[str]:
    """Return what is wrong with a compiled case, one sentence each."""
    if found.error:
        return [f"does not compile: {found.error}"]
    target = TARGETS[found.target]
    wrong = []
    if found.stack:
        wrong.append(f"spills: {found.stack} bytes or registers; none are allowed")
    if found.shared > target.shared:
        wrong.append(f"asks for {found.shared} bytes of shared memory; {target.shared} are allowed")
    if case["dot"] and not found.instructions["matrix"]:
        wrong.append(f"has no matrix instruction; expected {target.matrix}")
    if case["copies"] and target.copy and not found.instructions["copy"]:
        wrong.append(f"has no asynchronous copy; expected {target.copy}")
    return wrong


def _attributes(case: dict, target: Target) -> dict[tuple[int], list[list]]:
    """Return the specialisation that a launch finds: alignment, and on AMD small tensors."""
    attributes: dict[tuple[int], list[list]] = {}
    for index, (name, kind) in enumerate(case["signature"].items()):
        found = [["tt.divisibility", 16]] if name in case["divisible"] else []
        if target.backend == "hip" and kind.startswith("*"):
            found.append(["tt.pointer_range", 32])
        if found:
            attributes[(index,)] = found
    return attributes


def _usage(text: str, pattern: str) -> int:
    return sum(int(number) for number in re.findall(pattern, text))


def _measure(found: Compiled, compiled, target: Target) -> None:
    """Read registers, spills, shared memory and instructions of a compiled kernel."""
    import triton

    found.shared = compiled.metadata.shared
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found.registers = _usage(text, r"\.vgpr_count:\s*(\d+)")
        found.stack = _usage(text, r"\.[sv]gpr_spill_count:\s*(\d+)")
    else:
        text = compiled.asm["ptx"]
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(tool), "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found.registers = _usage(usage, r"\bREG:(\d+)")
        found.stack = _usage(usage, r"\bSTACK:(\d+)") + _usage(usage, r"\bLOCAL:(\d+)")
        if found.registers < 1:
            raise RuntimeError(f"cuobjdump names no registers: {usage[-300:]}")
    kinds = {"matrix": target.matrix, "copy": target.copy}
    found.instructions = {
        kind: len(re.findall(pattern, text)) for kind, pattern in kinds.items() if pattern
    }


def _compile(path: Path, case: dict, name: str) -> Compiled:
    """Compile one case for one target in this process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target, kernel = TARGETS[name], getattr(load(path), case["kernel"])
    found = Compiled(path.stem, case["name"], case["kernel"], name, triton.__version__)
    fixed = {p.name for p in kernel.params if p.do_not_specialize and not p.is_constexpr}
    wrong = fixed & {*case["divisible"], *case["constexprs"]}
    if wrong:
        raise ValueError(f"the case specialises {sorted(wrong)}, which the kernel does not")
    source = ASTSource(
        fn=kernel,
        signature=dict(case["signature"]),
        constexprs=dict(case["constexprs"]),
        attrs=_attributes(case, target),
    )
    options = {"num_warps": case["num_warps"], "num_stages": case["num_stages"]}
    compiled = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp),
        options={**options, **case.get("options", {})},
    )
    _measure(found, compiled, target)
    return found


def _prepare() -> None:
    """Do once what each fork would do again: Triton hashes all of itself, 0.5 GB."""
    from triton.runtime.cache import triton_key

    triton_key()


def _forked(path: Path, case: dict, name: str) -> Compiled:
    """Compile in a forked process: a failing pass prints hundreds of lines, some end a process."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        answer, output = Path(scratch) / "answer", Path(scratch) / "output"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                log = os.open(output, os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                with open(output, "a") as text, redirect_stdout(text), redirect_stderr(text):
                    answer.write_text(json.dumps(asdict(_compile(path, case, name))))
                code = 0
            except BaseException as error:
                answer.write_text(f"{type(error).__name__}: {error}")
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            found = Compiled(**json.loads(answer.read_text()))
        else:
            found = Compiled(path.stem, case["name"], case["kernel"], name)
            words = answer.read_text() if answer.exists() else f"the compiler ended with {code}"
            errors = re.findall(r".*\berror: .*", output.read_text(errors="replace"))
            found.error = " | ".join([" ".join(words.split())[:400], *errors[:2]])
    found.seconds = round(time.monotonic() - began, 2)
    return found


def cases(options: argparse.Namespace) -> Iterator[tuple[Path, dict, str]]:
    """Yield (file, case, target) of what the options choose."""
    for path in options.file:
        seen = set()
        for case in cases_of(path):
            for name in options.target:
                again = (case["kernel"], name) in seen and options.first_only
                unwanted = options.case and case["name"] not in options.case
                if name in case["targets"] and not again and not unwanted:
                    seen.add((case["kernel"], name))
                    yield path, case, name


def compile_apart(
    paths: Iterable[Path],
    targets: Iterable[str],
    *,
    triton: Path | None = None,
    cache: Path,
    wanted: Iterable[str] = (),
    first_only: bool = False,
) -> list[tuple[Compiled, list[str]]]:
    """Compile the cases in a process of its own; return each result with its problems.

    triton: a folder that holds another Triton than the installed one; cache: for what is compiled;
    wanted: names of cases; first_only: the first case of each kernel and target.
    """
    command = [sys.executable, __file__, "--child", "--file", *map(str, paths)]
    command += ["--target", *targets, *(["--case", *wanted] if wanted else [])]
    command += ["--first-only"] if first_only else []
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, [triton, TEMPLATE])))
    env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling ended with {done.returncode}:\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [(Compiled(**row["found"]), row["problems"]) for row in rows]


def table(rows: list[tuple[Compiled, list[str]]]) -> str:
    """Return the results as text, a line each."""
    head = f"{'file and case':46s} {'target':7s} {'triton':7s} {'regs':>4s} {'stack':>5s} "
    lines = [head + f"{'shared':>7s} {'matrix':>6s} {'copies':>6s} {'s':>5s}"]
    for found, wrong in rows:
        name = f"{found.file}: {found.name}"
        counts = [found.instructions.get(kind, 0) for kind in ("matrix", "copy")]
        line = f"{name:46s} {found.target:7s} {found.triton:7s} {found.registers:4d} "
        line += f"{found.stack:5d} {found.shared:7d} {counts[0]:6d} {counts[1]:6d} "
        lines.append(line + f"{found.seconds:5.1f}{''.join(f'  {text}' for text in wrong)}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel for GPUs that are not here.")
    parser.add_argument("--target", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument(
        "--triton", nargs="+", type=Path, default=[None], help="folders of other versions"
    )
    parser.add_argument("--case", nargs="+", default=[], help="only cases of these names")
    parser.add_argument("--first-only", action="store_true", help="of each kernel and target")
    parser.add_argument("--file", nargs="+", type=Path, help="files with kernels")
    parser.add_argument("--cache", type=Path, help="folder that keeps what is compiled")
    parser.add_argument("--json", type=Path, help="write the table here too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.file = options.file or kernel_files()
    if options.child:
        _prepare()
        for path, case, name in cases(options):
            found = _forked(path, case, name)
            print(json.dumps({"found": asdict(found), "problems": problems(found, case)}))
            sys.stdout.flush()
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for folder in options.triton:
            cache = options.cache or Path(scratch)
            rows += compile_apart(
                options.file,
                options.target,
                triton=folder,
                cache=cache,
                wanted=options.case,
                first_only=options.first_only,
            )
    print(table(rows))
    if options.json:
        listed = [{**asdict(found), "problems": wrong} for found, wrong in rows]
        options.json.write_text(json.dumps(listed, indent=1) + "\n")
    failed = sum(1 for _, wrong in rows if wrong)
    print(f"{len(rows)} compiled, {failed} with problems")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
