"""Kernels without a GPU: Triton's interpreter runs them on CPU tensors.

A kernel is interpreted or compiled as decided when its file is imported, and Triton's own functions
when Triton is. So TRITON_INTERPRET is set while this folder is collected and during its tests, and
not during other tests of the same process nor in what those start.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

INTERPRET = "TRITON_INTERPRET"
OUTSIDE = os.environ.get(INTERPRET)
os.environ[INTERPRET] = "1"
HERE = Path(__file__).resolve().parent


def missing() -> str | None:
    """Return why no kernel can be interpreted here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton (Linux only)"
    import triton
    from triton import language
    from triton.runtime import JITFunction

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        return f"the interpreter of triton {triton.__version__} fails with NumPy 2.4; 3.7 does not"

    if isinstance(language.cdiv, JITFunction):
        return f"triton was imported before {HERE.name}/conftest.py could set {INTERPRET}"
    return None


MISSING = missing()


class WithoutTriton(pytest.Module):
    """A test file that is skipped unread."""

    def collect(self) -> None:
        pytest.skip(MISSING)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector):
    """Skip every file here, with the reason, where Triton cannot interpret."""
    return WithoutTriton.from_parent(parent, path=module_path) if MISSING else None


def pytest_collection_finish() -> None:
    """Leave the environment as it was; `interpreted` sets it for each test of this folder."""
    if OUTSIDE is None:
        os.environ.pop(INTERPRET, None)
    else:
        os.environ[INTERPRET] = OUTSIDE


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret kernels, bf16 included; a test with a bf16 parameter is skipped if that fails."""
    import interpreter_bf16

    monkeypatch.setenv(INTERPRET, "1")
    problem = interpreter_bf16.problem()
    if problem is None:
        interpreter_bf16.install(monkeypatch)
    elif torch.bfloat16 in getattr(request.node, "callspec", _NoParameters).params.values():
        pytest.skip(problem)


class _NoParameters:
    params: dict[str, object] = {}  # noqa: RUF012


@pytest.fixture
def poisoned() -> Callable[..., torch.Tensor]:
    """Return a function that gives a tensor's values inside memory that is NaN all around.

    `poisoned(x)` has the shape and values of x, rows further apart than x needs, and NaN (for
    integers the largest value) between and after them. What a kernel reads beside x shows.
    """

    def surround(x: torch.Tensor, *, rows: int = 3, columns: int = 8) -> torch.Tensor:
        shape = list(x.shape)
        shape[0] += rows
        if x.ndim > 1:
            shape[-1] += columns
        poison = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
        memory = torch.full(shape, poison, dtype=x.dtype, device=x.device)
        view = memory[tuple(slice(0, size) for size in x.shape)]
        with torch.no_grad():
            view.copy_(x)
        return view.requires_grad_(x.requires_grad)

    return surround


@pytest.fixture
def dirty_memory() -> Iterator[None]:
    """Leave freed memory full of NaN, so that an allocation that is not written shows.

    `torch.empty` is filled with NaN in every test (tests/conftest.py); this covers allocations
    inside operators, which do not pass through it.
    """
    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
        blocks = [torch.full((size,), float("nan")) for _ in range(4)]
        del blocks
    yield
