"""Which addresses a kernel would read, without memory behind them.

A buffer whose offsets pass int32 has 2**31 elements and more. A launch is data, so it can be given
the strides of such a buffer; loads from it are noted down and give zeros.
"""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

from curry_train.kernels.launches import Launch, run_on_gpu


def addresses(launch: Launch, buffer: str, **strides: int) -> set[int]:
    """Return the addresses of all masked loads that are not from a tensor beside the buffer."""
    others = [
        (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for name, tensor in launch.arguments.items()
        if isinstance(tensor, Tensor) and name != buffer
    ]
    seen: set[int] = set()
    load = InterpreterBuilder.create_masked_load

    def noting(self, ptrs, mask, other, *options):
        active = set(map(int, ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]))
        if all(any(start <= one < start + size for start, size in others) for one in active):
            return load(self, ptrs, mask, other, *options)
        seen.update(active)
        kind = ptrs.get_element_ty()
        return TensorHandle(np.zeros(ptrs.data.shape, _get_np_dtype(kind)), kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", noting)
        run_on_gpu(launch._replace(arguments=launch.arguments | strides))
    return seen
