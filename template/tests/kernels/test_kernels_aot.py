"""Every kernel compiles for GPUs that are not here: no spills, memory that fits, fast instructions.

Without --full: the installed Triton and the first case of each kernel and target. With --full also
all cases and the three versions of triton_versions.lock. `aot.py` prints the table.
"""

from __future__ import annotations

import ast
import os
import signal
from pathlib import Path

import aot
import kernel_samples
import pytest
import triton
from aot import TARGETS, Compiled
from triton_versions import NotInstallableError, cache_folder, install, versions

HERE = Path(__file__).resolve().parent
SAMPLES = HERE / "kernel_samples.py"
FULL = bool(os.environ.get("CURRY_TRAIN_FULL"))
KEYS = {
    "name": str,
    "kernel": str,
    "targets": tuple,
    "signature": dict,
    "constexprs": dict,
    "divisible": tuple,
    "num_warps": int,
    "num_stages": int,
    "dot": bool,
    "copies": bool,
}
FILES = aot.kernel_files()
by_file = pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])


def compiled(paths, targets, folder=None, wanted=(), version=triton.__version__, first=False):
    cache = cache_folder() / f"compiled-{version}"
    return aot.compile_apart(
        paths, targets, triton=folder, cache=cache, wanted=wanted, first_only=first
    )


def complaints(rows):
    return [
        f"{found.file}: {found.name} for {found.target} by triton {found.triton}: {text}"
        for found, wrong in rows
        for text in wrong
    ]


def test_the_kernel_files_are_found():
    """An empty list would pass every test below."""
    assert {path.stem for path in FILES} == {
        "cross_entropy",
        "grouped_matmul",
        "moe_permute",
        "router",
    }


@by_file
def test_cases_have_the_form(path):
    module = aot.load(path)
    seen = set()
    for case in aot.cases_of(path):
        name = case["name"]
        assert not set(case) - {*KEYS, "options"}, name
        for key, kind in KEYS.items():
            assert isinstance(case[key], kind), f"{name}: {key}"
        parameters = list(getattr(module, case["kernel"]).arg_names)
        assert list(case["signature"]) == parameters, name
        constants = {key for key, kind in case["signature"].items() if kind == "constexpr"}
        assert constants == set(case["constexprs"]), name
        assert set(case["divisible"]) <= set(parameters) - constants, name
        assert case["targets"], name
        for target in case["targets"]:
            assert target in TARGETS, name
            assert (name, target) not in seen, f"{name} stands twice for {target}"
            seen.add((name, target))


@by_file
def test_every_launched_kernel_has_a_case(path):
    """A kernel that no other kernel calls is launched; each has to be compiled for each target."""
    tree = ast.parse(path.read_text())
    decorated = [node for node in tree.body if getattr(node, "decorator_list", None)]
    kernels = [node for node in decorated if "triton.jit" in ast.unparse(node.decorator_list[0])]
    called = {
        ast.unparse(node.func)
        for kernel in kernels
        for node in ast.walk(kernel)
        if isinstance(node, ast.Call)
    }
    launched = {kernel.name for kernel in kernels} - called
    cases = aot.cases_of(path)
    assert launched
    for target in TARGETS:
        covered = {case["kernel"] for case in cases if target in case["targets"]}
        assert launched <= covered, f"no case for {launched - covered} on {target}"


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
def test_kernels_compile_as_expected(target):
    rows = compiled(FILES, [target], first=True)
    assert {found.file for found, _ in rows} == {path.stem for path in FILES}
    assert not complaints(rows), "\n" + aot.table(rows)


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="every case with three Tritons takes minutes (--full)")
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("version", versions())
def test_kernels_compile_with_every_triton(version, target):
    try:
        folder = install(version)
    except NotInstallableError as error:
        pytest.skip(str(error))
    rows = compiled(FILES, [target], folder, version=version)
    assert {found.triton for found, _ in rows} == {version}
    assert not complaints(rows), "\n" + aot.table(rows)


BAD = [
    ("spills", "sm_90", "spills"),
    ("spills", "gfx942", "spills"),
    ("unaligned", "sm_90", "no asynchronous copy"),
    ("too-many-stages", "sm_90", "bytes of shared memory; 232448 are allowed"),
    ("too-many-stages", "gfx942", "bytes of shared memory; 65536 are allowed"),
    ("no-matrix-instruction", "sm_90", "no matrix instruction; expected wgmma"),
    ("no-such-type", "sm_80", "does not compile: CompilationError"),
]


@pytest.fixture(scope="module")
def samples():
    wanted = ["good", *{name for name, _, _ in BAD}]
    targets = list(TARGETS) if FULL else ["sm_90", "gfx942"]
    return compiled([SAMPLES], targets, wanted=wanted)


def test_a_good_kernel_passes(samples):
    rows = [row for row in samples if row[0].name == "good"]
    assert len(rows) >= 2
    assert not complaints(rows)
    for found, _ in rows:
        assert 32 <= found.registers <= 160
        assert found.instructions["matrix"] > 0


@pytest.mark.parametrize(("name", "target", "words"), BAD, ids=[f"{n}-{t}" for n, t, _ in BAD])
def test_a_bad_kernel_is_seen(samples, name, target, words):
    rows = [row for row in samples if (row[0].name, row[0].target) == (name, target)]
    if not rows and not FULL:
        rows = compiled([SAMPLES], [target], wanted=[name])
    assert len(rows) == 1
    assert any(words in text for text in complaints(rows)), aot.table(rows)


def test_a_compiler_that_ends_the_process_is_one_line(monkeypatch):
    case = kernel_samples.aot_cases()[0]
    monkeypatch.setattr(aot, "_compile", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    found = aot._forked(SAMPLES, case, "sm_90")
    assert "the compiler ended with -9" in found.error
    assert aot.problems(found, case)[0].startswith("does not compile")


def test_alignment_is_that_of_a_launch():
    case = kernel_samples.aot_cases()[0]
    nvidia = aot._attributes({**case, "divisible": ("a_ptr", "K")}, TARGETS["sm_90"])
    assert nvidia == {(0,): [["tt.divisibility", 16]], (3,): [["tt.divisibility", 16]]}
    amd = aot._attributes({**case, "divisible": ("a_ptr",)}, TARGETS["gfx942"])
    assert amd[(0,)] == [["tt.divisibility", 16], ["tt.pointer_range", 32]]
    assert amd[(1,)] == [["tt.pointer_range", 32]]
    assert (3,) not in amd


def test_the_table_names_what_is_wrong(capsys, monkeypatch, tmp_path):
    found = Compiled("f", "case", "kernel", "sm_90", "3.7.1", 255, 16, 99, {"matrix": 1, "copy": 0})
    monkeypatch.setattr(aot, "compile_apart", lambda *_, **__: [(found, ["spills: 16"])])
    written = tmp_path / "table.json"
    assert aot.main(["--json", str(written)]) == 1
    printed = capsys.readouterr().out
    assert "f: case" in printed
    assert "spills: 16" in printed
    assert printed.endswith("1 compiled, 1 with problems\n")
    assert '"registers": 255' in written.read_text()
    monkeypatch.setattr(aot, "compile_apart", lambda *_, **__: [])
    assert aot.main([]) == 1, "nothing compiled is no success"


def test_a_version_that_cannot_be_had_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(NotInstallableError, match="pip cannot install triton==0.0.0: ERROR"):
        install("0.0.0")
    assert not list(tmp_path.rglob("triton-0.0.0-py*/"))
