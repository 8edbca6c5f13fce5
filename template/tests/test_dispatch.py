"""Which backend is chosen, what is said about the others, and what happens when one is broken."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from curry_train.kernels import backends, dispatch, report, row_products

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """No choice, self-test or variable of another test."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    caches = dispatch._choose, dispatch.self_test
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU; returns a function that sets which."""

    def found(arch, triton=True, problem=None):
        monkeypatch.setattr(dispatch, "_architecture", lambda device: arch)
        installed = dispatch.importlib.util.find_spec
        monkeypatch.setattr(
            dispatch.importlib.util,
            "find_spec",
            lambda name: (object() if triton else None) if name == "triton" else installed(name),
        )
        monkeypatch.setattr(dispatch, "self_test", lambda device, dtype: problem)

    return found


def choose(device, dtype, backend="auto", width=64, hidden=32, strict=False):
    return dispatch.choose(
        device, dtype, width=width, hidden=hidden, backend=backend, strict=strict
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_takes_grouped_mm(dtype):
    assert choose(CPU, dtype) == "grouped_mm"


def test_auto_never_takes_triton_on_a_cpu(gpu, monkeypatch):
    gpu("none")  # kernels that are installed and pass their self-test
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(CPU, torch.float32) == "grouped_mm"
    assert choose(CPU, torch.float32, "triton") == "triton"
    assert dispatch.triton_ready("cpu") == (True, "")


@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "reason"),
    [
        (torch.float64, 64, 32, "found float64; on cpu it takes float32, bfloat16, float16"),
        (torch.float32, 30, 32, "D times 4 bytes is no multiple of 16"),
        (torch.bfloat16, 64, 12, "F times 2 bytes is no multiple of 16"),
        (torch.bfloat16, 30, 12, "D and F times 2 bytes is no multiple of 16"),
    ],
)
def test_what_grouped_mm_does_not_take_goes_to_sorted(dtype, width, hidden, reason):
    assert choose(CPU, dtype, width=width, hidden=hidden) == "sorted"
    site = dispatch.Site(CPU, dtype, dispatch.odd_rows(dtype, width, hidden))
    rule = dispatch.rejections(site)["grouped_mm"]
    assert reason in rule.reason(site)
    with pytest.raises(ValueError, match=f"backend: 'grouped_mm' cannot run here.*{reason}"):
        choose(CPU, dtype, "grouped_mm", width, hidden)


def test_meta_tensors_go_to_sorted():
    assert choose(torch.device("meta"), torch.bfloat16) == "sorted"


def test_triton_on_a_cpu_says_that_the_interpreter_is_off():
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before the start"):
        choose(CPU, torch.float32, "triton")
    ready, reason = dispatch.triton_ready("cpu")
    assert not ready and "TRITON_INTERPRET=1" in reason


def test_the_variable_beats_the_argument(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "sorted")
    assert choose(CPU, torch.float32, "reference") == "sorted"
    monkeypatch.setenv(dispatch.VARIABLE, "fastest")
    with pytest.raises(ValueError, match="found 'fastest'; allowed are auto, triton, grouped_mm"):
        choose(CPU, torch.float32)


@pytest.mark.parametrize("name", ["grouped_mm", "sorted", "reference"])
def test_a_named_backend_is_taken(name):
    assert choose(CPU, torch.float32, name) == name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_a_gpu_takes_triton(gpu, arch):
    gpu(arch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(GPU, torch.bfloat16) == choose(GPU, torch.float32) == "triton"


@pytest.mark.parametrize(
    ("arch", "dtype", "taken"),
    [
        ("sm_75", torch.bfloat16, "sorted"),
        ("gfx90a", torch.bfloat16, "sorted"),
        ("sm_90", torch.float64, "sorted"),
    ],
)
def test_a_gpu_that_the_kernels_are_not_for_is_passed_over_silently(gpu, arch, dtype, taken):
    gpu(arch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(GPU, dtype) == taken


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"triton": False}, "triton is not installed"),
        ({"problem": "dx differs from sorted by 3.0e-01"}, "its self-test failed: dx differs"),
    ],
)
def test_broken_kernels_warn_once_and_fall_back(gpu, setting, reason):
    for arch, dtype, taken in (
        ("sm_90", torch.bfloat16, "grouped_mm"),
        ("sm_80", torch.bfloat16, "sorted"),
        ("sm_90", torch.float32, "sorted"),
    ):
        dispatch._choose.cache_clear()
        gpu(arch, **setting)
        with pytest.warns(UserWarning, match=reason) as told:
            assert choose(GPU, dtype) == choose(GPU, dtype) == taken
        assert len(told) == 1
        with pytest.raises(RuntimeError, match=reason):
            choose(GPU, dtype, strict=True)
        with pytest.raises(ValueError, match=reason):
            choose(GPU, dtype, "triton")


def test_the_self_test_sees_a_wrong_kernel(monkeypatch):
    # The twins in place of the kernels: right first, then each result wrong in turn.
    twins = backends.kernels_of("reference")
    monkeypatch.setattr(backends, "kernels_of", lambda name: twins)
    assert dispatch.self_test(CPU, torch.float32) is None

    def off(function):
        def call(*args, **kwargs):
            found = function(*args, **kwargs)
            if isinstance(found, tuple):
                return (*found[:-1], found[-1] * 1.01)
            return found * 1.01

        return call

    for name in ("gmm", "gmm_swiglu", "gmm_dswiglu", "gmm_wgrad", "moe_combine"):
        dispatch.self_test.cache_clear()
        broken = twins._replace(**{name: off(getattr(twins, name))})
        monkeypatch.setattr(backends, "kernels_of", lambda _, broken=broken: broken)
        assert "differs from sorted by" in dispatch.self_test(CPU, torch.float32), name


def test_the_self_test_sees_an_empty_expert_whose_gradient_was_not_written(monkeypatch):
    twins = backends.kernels_of("reference")

    def unwritten(*args, **kwargs):
        dw = twins.gmm_wgrad(*args, **kwargs)
        dw[1] = float("nan")
        return dw

    broken = twins._replace(gmm_wgrad=unwritten)
    monkeypatch.setattr(backends, "kernels_of", lambda name: broken)
    assert "differs from sorted by nan" in dispatch.self_test(CPU, torch.float32)


@pytest.mark.parametrize("place", [lambda: torch.device("meta"), FakeTensorMode])
def test_the_self_test_computes_wherever_it_is_first_asked_for(place, monkeypatch):
    twins = backends.kernels_of("reference")
    monkeypatch.setattr(backends, "kernels_of", lambda name: twins)
    with place():
        assert dispatch.self_test(CPU, torch.float32) is None


def test_the_self_test_names_what_was_raised(monkeypatch):
    def broken(name):
        raise RuntimeError("PassManager::run failed\nand 300 lines of IR")

    monkeypatch.setattr(backends, "kernels_of", broken)
    assert dispatch.self_test(CPU, torch.float32) == "RuntimeError: PassManager::run failed"


def test_tiles_are_chosen_by_rows_per_expert_only_where_there_are_tiles():
    assert dispatch.tile_rows("grouped_mm", 65536, 128) == 0
    assert dispatch.tile_rows("sorted", 65536, 128) == 0
    assert dispatch.tile_rows("triton", 65536, 128) >= dispatch.tile_rows("triton", 256, 128) > 0


def test_onednn_is_for_float32_with_rows_enough_on_an_amd_cpu(monkeypatch):
    w13 = torch.zeros(4, 8, 8)
    enough = 4 * row_products.ONEDNN_ROWS
    monkeypatch.setattr(row_products, "onednn_is_faster", lambda: True)
    assert row_products.products_of("grouped_mm", w13, enough) is row_products.ONEDNN
    assert row_products.products_of("grouped_mm", w13, enough - 1) is row_products.GROUPED_MM
    assert row_products.products_of("grouped_mm", w13.bfloat16(), enough) is row_products.GROUPED_MM
    assert row_products.products_of("sorted", w13, enough) is row_products.SORTED
    monkeypatch.setattr(row_products, "onednn_is_faster", lambda: False)
    assert row_products.products_of("grouped_mm", w13, enough) is row_products.GROUPED_MM


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_what_kind_of_cpu_onednn_is_for(monkeypatch, vendor, capability, faster):
    if not row_products.onednn_is_known():
        pytest.skip("torch without the oneDNN that the bank uses")
    monkeypatch.setattr(row_products, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert row_products.onednn_is_faster.__wrapped__() == faster


def run_report(*arguments, **variables):
    code = "import runpy; runpy.run_module('curry_train.kernels.report', run_name='__main__')"
    before = variables.pop("before", "pass")
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; {before}; sys.argv[1:] = {list(arguments)}; {code}",
        ],
        cwd=PROJECT,
        env={**dispatch.os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_report_works_without_triton():
    # An import of triton fails as where it is not installed; nothing may try.
    hidden = "sys.modules['triton'] = None; import importlib.util as u; f = u.find_spec; "
    hidden += "u.find_spec = lambda n, *a: None if n == 'triton' else f(n, *a)"
    done = run_report("--shape", "64,64,32,4,2", before=hidden)
    assert done.returncode == 0, done.stderr
    assert "chosen: grouped_mm" in done.stdout
    assert "triton not installed" in done.stdout
    assert "gmm_swiglu" in done.stdout and "from table" in done.stdout


def test_the_report_as_json_names_every_backend_and_why_not(capsys):
    code = report.main(["--shape", "64,30,32,4,2", "--dtype", "bf16", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["chosen"] == "sorted"
    assert [row["name"] for row in found["backends"]] == list(backends.BACKENDS)
    reasons = {row["name"]: row["reason"] for row in found["backends"] if not row["usable"]}
    assert set(reasons) == {"triton", "grouped_mm"} and all(reasons.values())
    assert found["versions"]["torch"] == torch.__version__
    assert {tile["source"] for tile in found["tiles"]} <= {"table", "tuned", "default"}
    assert found["shape"] == {"T": 64, "D": 30, "F": 32, "E": 4, "K": 2}


def test_the_report_says_what_the_variable_did(monkeypatch, capsys):
    monkeypatch.setenv("CURRY_MOE_BACKEND", "reference")
    assert report.main([]) == 0
    told = capsys.readouterr().out
    assert "CURRY_MOE_BACKEND=reference is set and decides" in told
    assert "chosen: reference" in told
    monkeypatch.setenv("CURRY_MOE_BACKEND", "triton")
    assert report.main([]) == 1 and "TRITON_INTERPRET=1" in capsys.readouterr().out


def test_the_report_lists_the_named_backend_as_usable():
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip(f"the interpreter of triton {triton.__version__} fails with NumPy 2.4")
    done = run_report(CURRY_MOE_BACKEND="triton", TRITON_INTERPRET="1")
    assert "chosen: triton" in done.stdout and "* triton      usable" in done.stdout


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--shape", "64,30", "allowed are five positive numbers T,D,F,E,K"),
        ("--shape", "a,1,1,1,1", "allowed are five positive numbers T,D,F,E,K"),
        ("--shape", "0,1,1,1,1", "allowed are five positive numbers T,D,F,E,K"),
        ("--device", "tpu", "found 'tpu'; allowed here are cpu, meta"),
        ("--device", "cpu:3", "found 'cpu:3'; allowed here are cpu, meta"),
    ],
)
def test_the_report_refuses_what_it_cannot_read(flag, value, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        report.main([flag, value])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"tiles": {"gmm": 1}}', None])
def test_the_report_names_a_file_of_tiles_it_cannot_read(content, tmp_path, monkeypatch, capsys):
    path = tmp_path / "tiles.json"
    path.mkdir() if content is None else path.write_text(content)
    monkeypatch.setenv("CURRY_TILES", str(path))
    with pytest.raises(SystemExit):
        report.main([])
    assert f"{path}: " in capsys.readouterr().err


def test_the_report_of_a_gpu_shows_its_tiles(gpu):
    gpu("sm_90")
    found = report.tiles("sm_90", torch.bfloat16, report.SHAPE)
    assert [tile["kernel"] for tile in found].count("gmm_wgrad") == 2
    assert report.tiles("sm_90", torch.float64, report.SHAPE) == []
