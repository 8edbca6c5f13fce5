"""Which backend computes the expert bank, and why not the others.

The rules are data: for each backend the conditions it needs, with the sentence that is shown when
one does not hold. `auto` takes the first backend of BACKENDS whose conditions all hold. Being
passed over is normal (a CPU has no Triton, float64 no grouped_mm) and silent; only a backend that
should have run here and is broken warns, once, or raises with strict.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from curry_train.kernels import backends
from curry_train.kernels.backends import BACKENDS, Bank, Needs

VARIABLE = "CURRY_MOE_BACKEND"
"""Environment variable that overrides whatever the configuration or the caller says."""
AMD = ("gfx942", "gfx950")
ROW_BYTES = 16
"""F.grouped_mm wants every row to start on a multiple of this."""
TEST_SIZES = (32, 2, 64, 32, 4)
"""T, K, D, F, E of the self-test: 64 rows, of which expert 1 gets none."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest relative error (norms) of the self-test; a wrong kernel is off by 0.1 and more."""


class Site(NamedTuple):
    """What the choice depends on: plain values, so that torch.compile can take it as a constant.

    odd names those of D and F whose rows do not start on a multiple of 16 bytes; asked says that
    the backend was named, not found by auto.
    """

    device: torch.device
    dtype: torch.dtype
    odd: str = ""
    asked: bool = False


class Rule(NamedTuple):
    """One condition of a backend. `fault`: where it fails, something is broken, not just absent."""

    holds: Callable[[Site], bool]
    reason: Callable[[Site], str]
    fault: bool = False


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _architecture(device: torch.device) -> str:
    """Return "sm_90" and the like, or "gfx942" and the like."""
    from curry_train.kernels import tuning

    return tuning.arch_of(device)


def _generation(site: Site) -> int:
    """Return 90 for sm_90, 0 for what is no NVIDIA GPU."""
    name = _architecture(site.device) if site.device.type == "cuda" else ""
    return int(name[3:]) if name.startswith("sm_") else 0


def _triton_device(site: Site) -> bool:
    if site.device.type == "cpu":
        return site.asked and _interpreted()
    if site.device.type != "cuda":
        return False
    return _generation(site) >= 80 or _architecture(site.device) in AMD


def _triton_device_reason(site: Site) -> str:
    if site.device.type == "cpu":
        return (
            "on the CPU the kernels run in Triton's interpreter only, which is for tests: set "
            'TRITON_INTERPRET=1 before the start and name the backend "triton"'
        )
    found = _architecture(site.device) if site.device.type == "cuda" else str(site.device)
    return f"found {found}; the kernels are for sm_80 and later, {' and '.join(AMD)}"


def _grouped_device(site: Site) -> bool:
    return site.device.type == "cpu" or _generation(site) >= 90


def _grouped_dtypes(site: Site) -> tuple[torch.dtype, ...]:
    if site.device.type == "cpu":
        return (torch.float32, torch.bfloat16, torch.float16)
    return (torch.bfloat16,)


RULES: dict[str, tuple[Rule, ...]] = {
    "triton": (
        Rule(_triton_device, _triton_device_reason),
        Rule(
            lambda site: site.dtype in TOLERANCE,
            lambda site: f"found {_names([site.dtype])}; the kernels take {_names(TOLERANCE)}",
        ),
        Rule(
            lambda site: importlib.util.find_spec("triton") is not None,
            lambda site: "triton is not installed; install the extra curry-train[gpu]",
            fault=True,
        ),
        Rule(
            lambda site: self_test(site.device, site.dtype) is None,
            lambda site: f"its self-test failed: {self_test(site.device, site.dtype)}",
            fault=True,
        ),
    ),
    "grouped_mm": (
        Rule(
            lambda site: hasattr(torch.nn.functional, "grouped_mm"),
            lambda site: f"torch {torch.__version__} has no torch.nn.functional.grouped_mm",
        ),
        Rule(
            _grouped_device,
            lambda site: f"found {site.device}; it is for the CPU and for sm_90 and later",
        ),
        Rule(
            lambda site: site.dtype in _grouped_dtypes(site),
            lambda site: (
                f"found {_names([site.dtype])}; on {site.device.type} it takes "
                f"{_names(_grouped_dtypes(site))}"
            ),
        ),
        Rule(
            lambda site: not site.odd,
            lambda site: (
                f"{' and '.join(site.odd)} times {site.dtype.itemsize} bytes is no multiple of "
                f"{ROW_BYTES}, where its rows have to start"
            ),
        ),
    ),
    "sorted": (),
    "reference": (),
}


def rejections(site: Site) -> dict[str, Rule | None]:
    """Return for each backend the first rule that does not hold, None where it can run.

    Shapes: none, a Site holds sizes.
    """
    return {
        name: next((rule for rule in RULES[name] if not rule.holds(site)), None)
        for name in BACKENDS
    }


def triton_ready(
    device: torch.device | str, dtype: torch.dtype = torch.float32
) -> tuple[bool, str]:
    """Return whether the kernels run on a device when asked to, and if not, why.

    Shapes: none. The first call on a device compiles and runs the self-test [64 rows].
    """
    site = Site(torch.device(device), dtype, asked=True)
    for rule in RULES["triton"]:
        if not rule.holds(site):
            return False, rule.reason(site)
    return True, ""


def odd_rows(dtype: torch.dtype, width: int, hidden: int) -> str:
    """Return "", "D", "F" or "DF": whose rows [width] and [hidden] break the 16-byte rule."""
    sizes = {"D": width, "F": hidden}
    return "".join(name for name, size in sizes.items() if size * dtype.itemsize % ROW_BYTES)


def choose(
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int,
    hidden: int,
    backend: str = "auto",
    strict: bool = False,
) -> str:
    """Return the name of the backend for x [T, width] and w2 [E, width, hidden].

    CURRY_MOE_BACKEND beats `backend`. Raises: ValueError when a named backend is unknown or cannot
    run here; RuntimeError with strict when one that should have run is broken.
    """
    named = os.environ.get(VARIABLE) or backend
    site = Site(device, dtype, odd_rows(dtype, width, hidden), asked=named != "auto")
    return _chosen(*site, named, strict, _interpreted())


@torch.compiler.assume_constant_result
def _chosen(*key) -> str:
    return _choose(*key)


@functools.lru_cache(maxsize=1024)
def _choose(device, dtype, odd, asked, named, strict, interpreted) -> str:
    site = Site(device, dtype, odd, asked)
    if named not in ("auto", *BACKENDS):
        raise ValueError(
            f"backend: found {named!r}; allowed are auto, {', '.join(BACKENDS)}; set "
            f"model.moe_backend or {VARIABLE}"
        )
    if named != "auto":
        rule = next((rule for rule in RULES[named] if not rule.holds(site)), None)
        if rule is not None:
            raise ValueError(
                f"backend: {named!r} cannot run here: {rule.reason(site)}; allowed are the "
                f"backends that `python -m curry_train.kernels.report` lists as usable; set "
                f"model.moe_backend or {VARIABLE} to one of them or to auto"
            )
        return named
    for name in BACKENDS:
        rule = next((rule for rule in RULES[name] if not rule.holds(site)), None)
        if rule is None:
            return name
        if rule.fault:
            told = f"the {name} backend of the expert bank should run here but cannot: "
            if strict:
                raise RuntimeError(told + rule.reason(site))
            warnings.warn(f"{told}{rule.reason(site)}; using the next one", stacklevel=4)
    raise AssertionError("the last backend has no conditions")


def tile_rows(name: str, rows: int, experts: int) -> int:
    """Return block_m, the height of a tile, for R rows over E experts; 0 where there are no tiles.

    Shapes: none. A number of the batch, not of the device: under torch.compile it is a guard.
    """
    if name in backends.ROWS:
        return 0
    from curry_train.kernels import tuning

    return tuning.block_m_for(rows, experts)


def _names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@functools.cache
def self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare triton with sorted on 64 rows, an expert without rows among them; None is well.

    Shapes: TEST_SIZES. Runs once a process for each device and dtype, on real tensors wherever the
    first call happens: while shapes are planned with fake ones, or under a default device.
    """
    with _disable_current_modes(), torch.device("cpu"):
        return _self_test(device, dtype)


def _self_test(device: torch.device, dtype: torch.dtype) -> str | None:
    tokens, choices, width, hidden, count = TEST_SIZES
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(device, dtype)

    ids = torch.randint(2, count, (tokens, choices), generator=draw, dtype=torch.int32)
    ids[::3, 0] = 0
    bank = Bank(
        normal(tokens, width),
        normal(tokens, choices),
        normal(count, 2 * hidden, width, scale=width**-0.5),
        normal(count, width, hidden, scale=hidden**-0.5),
        None,
        None,
        True,
    )
    ids, dout = ids.to(device), normal(tokens, width)
    try:
        found, wanted = (_both(name, bank, ids, dout) for name in ("triton", "sorted"))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    for name, value in found.items():
        error = float((value - wanted[name]).norm() / wanted[name].norm())
        # tf32, if torch was told to use it, has the mantissa of fp16.
        fast = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        allowed = TOLERANCE[torch.float16 if fast else dtype]
        if not error <= allowed:
            return f"{name} differs from sorted by {error:.1e} (allowed {allowed:.0e})"
    return None


def _both(name: str, bank: Bank, ids: Tensor, dout: Tensor) -> dict[str, Tensor]:
    block_m = tile_rows(name, ids.numel(), bank.w2.shape[0])
    out, h, sorted = backends.forward(name, bank, ids, block_m)
    grads = backends.backward(name, bank, dout, h, sorted, Needs(bias13=False))
    named = {"out": out, **{f"d{key}": value for key, value in grads._asdict().items()}}
    return {key: value.double() for key, value in named.items() if value is not None}
