"""The three products over rows in the order of their experts, for the backends without kernels.

`sorted` multiplies expert by expert and takes whatever dtype and device torch.mm takes.
`grouped_mm` hands all experts to torch at once; but in float32 on an AMD CPU, where torch calls
MKL and MKL leaves half of the CPU's width unused, experts with rows enough go through oneDNN.
"""

from __future__ import annotations

import functools
import itertools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN_ROWS = 48
"""Mean rows per expert from which oneDNN's products win over its calls: at 32 they lost by a tenth
to F.grouped_mm, at 64 they took two thirds of its time (AMD EPYC with AVX-512, torch 2.13)."""


class Products(NamedTuple):
    """The three grouped products over rows in expert order.

    Shapes: forward(x [R, M], w [E, N, M]) -> [R, N]; dgrad(dy [R, N], w) -> [R, M];
    wgrad(dy, x) -> [E, N, M], zero for experts without rows.
    """

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    dgrad: Callable[[Tensor, Tensor, Tensor], Tensor]
    wgrad: Callable[[Tensor, Tensor, Tensor], Tensor]


# grouped_mm: torch's product. It reads int32 offsets, wants rows on 16 bytes and dense gradients.


def _grouped_forward(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(x, w.transpose(1, 2), offs=offsets[1:])


def _grouped_dgrad(dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(dy, w, offs=offsets[1:])


def _grouped_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(dy.t(), x, offs=offsets[1:])


GROUPED_MM = Products(_grouped_forward, _grouped_dgrad, _grouped_wgrad)


# sorted: one mm for each expert that has rows, written into its place.


def _slices(offsets: Tensor) -> list[tuple[int, slice]]:
    bounds = itertools.pairwise(offsets.tolist())
    return [(e, slice(first, last)) for e, (first, last) in enumerate(bounds) if last > first]


def _sorted_forward(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], w.shape[1])
    for expert, rows in _slices(offsets):
        torch.mm(x[rows], w[expert].t(), out=y[rows])
    return y


def _sorted_dgrad(dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    dx = dy.new_empty(dy.shape[0], w.shape[2])
    for expert, rows in _slices(offsets):
        torch.mm(dy[rows], w[expert], out=dx[rows])
    return dx


def _sorted_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dw = x.new_zeros(offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    for expert, rows in _slices(offsets):
        torch.mm(dy[rows].t(), x[rows], out=dw[expert])
    return dw


SORTED = Products(_sorted_forward, _sorted_dgrad, _sorted_wgrad)


# grouped_mm in float32 on an AMD CPU: oneDNN, by the op torch.compile emits for a linear layer.


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether float32 products of shape [R, M] x [N, M] should go through oneDNN here.

    On an AMD CPU with AVX-512 MKL runs its AVX2 code, at half the speed. Elsewhere it is even.
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (
        onednn_is_known()
        and wide
        and torch.backends.mkl.is_available()
        and _vendor() == "AuthenticAMD"
    )


def onednn_is_known() -> bool:
    """Return whether this torch has the op below, on a oneDNN whose sums are known.

    Before torch 2.13 a row was summed differently in products of other heights.
    """
    new = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
    available = torch.backends.mkldnn.is_available()
    return new and available and hasattr(torch.ops.mkldnn, ONEDNN_LINEAR)


ONEDNN_LINEAR = "_linear_pointwise"


def _vendor() -> str:
    if platform.system() != "Linux":
        return ""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, "")


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "")


def _step(count: int) -> int:
    """Return the step of sizes near count: those of five significant bits.

    oneDNN keeps what it generates for 1024 shapes; with every count of rows a shape of its own, a
    step of training would throw out the kernels of the last and spend more on new ones than on
    multiplying.
    """
    return 1 << max(count.bit_length() - 5, 0)


def _onednn_rows(x: Tensor, weights: tuple[Tensor, ...], offsets: Tensor) -> Tensor:
    """Return x[rows of e] @ weights[e].T for every e. Shapes: x [R, M], weights E of [N, M].

    The number of rows of a product is rounded up, and the rows of a neighbour that come with it are
    dropped: a row's result does not depend on the others, but with two rows at least, since one
    alone is summed in another order.
    """
    parts, total = [x.new_empty(0, weights[0].shape[0])], x.shape[0]
    if total == 1:
        x, total = x.expand(2, -1).contiguous(), 2
    for weight, (first, last) in zip(weights, itertools.pairwise(offsets.tolist()), strict=True):
        if first == last:
            continue
        step = _step(last - first)
        whole_steps = (last - first + step - 1) // step * step
        size = min(max(whole_steps, 2), total)
        start = min(first, total - size)
        parts.append(_linear(x[start : start + size], weight)[first - start : last - start])
    return torch.cat(parts)


def _onednn_forward(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return _onednn_rows(x, w.unbind(), offsets)


def _onednn_dgrad(dy: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return _onednn_rows(dy, w.transpose(1, 2).unbind(), offsets)


def _onednn_wgrad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dw = x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    for out, (first, last) in zip(dw.unbind(), itertools.pairwise(offsets.tolist()), strict=True):
        if first == last:
            out.zero_()
            continue
        # Here the rows are summed over, so their number is rounded down and the rest added.
        middle = last - (last - first) % _step(last - first)
        out.copy_(_linear(dy[first:middle].t(), x[first:middle].t()))
        if middle < last:
            out.addmm_(dy[middle:last].t(), x[middle:last])
    return dw


ONEDNN = Products(_onednn_forward, _onednn_dgrad, _onednn_wgrad)


def products_of(backend: str, w13: Tensor, rows: int) -> Products:
    """Return the products of a backend for w13 [E, 2F, D] and that many rows.

    Which one is decided here, inside the op: the number of rows is in no compiled graph.
    """
    if backend == "sorted":
        return SORTED
    many = rows >= ONEDNN_ROWS * w13.shape[0]
    float32_on_cpu = w13.device.type == "cpu" and w13.dtype == torch.float32
    return ONEDNN if many and float32_on_cpu and onednn_is_faster() else GROUPED_MM
