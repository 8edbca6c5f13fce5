"""bf16 for Triton's interpreter, which computes with the raw bits of bf16 as if they were integers.

Without this `tl.dot` and arithmetic on bf16 give numbers that mean nothing, and fp32 -> bf16 cuts
off where a GPU rounds to the nearest even value. The methods below are replaced; their
names and arguments are checked first, since they belong to Triton and may move.
A sum over bf16 stays wrong: kernels convert to fp32 before they reduce, and
tests/bundle/lint_kernels.py holds them to it.
"""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

EXPECTED = {
    "create_dot": ["self", "a", "b", "d", "input_precision", "max_num_imprecise_acc"],
    "binary_op": ["self", "lhs", "rhs", "op"],
    "unary_op": ["self", "arg", "op"],
    "cast_impl": ["self", "src", "dst_type"],
}


def problem() -> str | None:
    """Return why bf16 cannot be had with this Triton, or None."""
    for name, wanted in EXPECTED.items():
        method = getattr(InterpreterBuilder, name, None)
        found = list(inspect.signature(method).parameters) if method else "nothing"
        if found != wanted:
            return f"the interpreter's {name} has the arguments {found}; the shim knows {wanted}"
    stored = interpreter._get_np_dtype(tl.bfloat16)
    return None if stored == np.uint16 else f"the interpreter stores bf16 as {stored}, not uint16"


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the fp32 values of bf16 bits; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return the bf16 bits nearest to the values in fp32, ties to even, as a GPU rounds."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def widened(handle: TensorHandle) -> TensorHandle:
    """Return a value of the interpreter, in fp32 if it is bf16."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(widen(handle.data), tl.float32)


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace the methods until the patch is undone."""
    dot, binary, unary, cast = (getattr(InterpreterBuilder, name) for name in EXPECTED)

    def create_dot(self, a, b, d, *options):
        return dot(self, widened(a), widened(b), d, *options)

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        result = op(widened(lhs).data, widened(rhs).data)
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        return TensorHandle(narrow(result), tl.bfloat16)

    def unary_op(self, arg, op):
        if arg.dtype.scalar != tl.bfloat16:
            return unary(self, arg, op)
        return TensorHandle(narrow(op(widened(arg).data)), tl.bfloat16)

    def cast_impl(self, src, dst_type):
        if dst_type.scalar != tl.bfloat16:
            return cast(self, widened(src), dst_type)
        return TensorHandle(narrow(widened(src).data), tl.bfloat16)

    for method in (create_dot, binary_op, unary_op, cast_impl):
        original = getattr(InterpreterBuilder, method.__name__)
        patch.setattr(InterpreterBuilder, method.__name__, functools.wraps(original)(method))
    # A Python number beside a bf16 tensor; Triton 3.7 has no method for it.
    constant = lambda self, value: TensorHandle(narrow(np.array([value])), tl.bfloat16)  # noqa: E731
    patch.setattr(InterpreterBuilder, "get_bf16", constant, raising=False)
