"""Statistics of activations and gradients by hooks: forward hooks and tensor hooks, nothing else.

Full backward hooks wrap inputs and outputs in a function of autograd, which breaks models that
work in place or return views. A tensor hook on what a module returned changes nothing. Numbers stay
on the device and are fetched once, at the end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from flow_attention import FLAT, Watch, no_torch_function
from torch import Tensor, nn

MIN_BLOCKS = 4
"""Fewer repeated blocks show no trend over depth."""
SMALL = 65536
"""Elements of a tensor that may wait for a common call; larger ones are not kept alive."""
SAMPLED = 2048
"""Elements of a tensor that histograms are made of."""
NOT_SHOWN = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Dropout, nn.Identity, nn.Flatten)


class Recorder:
    """Everything that one or several looks (a forward and a backward pass each) have seen.

    Used as `with recorder.look(model): loss = ...; recorder.forward_done(); loss.backward()`.
    """

    def __init__(self, model: nn.Module, blocks: set[str]) -> None:
        self.active = False
        self.here = ""
        """Name of the module that runs; the class of the whole model, or empty outside of it."""
        self.looks = 0
        self.classes: dict[str, str] = {}
        self.called: set[str] = set()
        self.order: list[str] = []
        """Modules in the order in which they first returned."""
        self.outputs: list[tuple[int, str, int, Tensor]] = []
        """(look, module, elements, norm) of every call."""
        self.largest: list[tuple[str, Tensor, Tensor]] = []
        """(module, largest in size, largest) of the calls of the first look."""
        self.gradients: list[tuple[int, str, Tensor]] = []
        """(look, module, norm of the gradient by the output), in the order of backward."""
        self.streams: list[tuple[str, Tensor]] = []
        """(block, cosine between its input and its output)."""
        self.units: dict[str, list[tuple[int, float, Tensor, Tensor | None]]] = {}
        """Activation -> (rows, cutoff, largest input of each unit [C], how many are above it, first
        look)."""
        self.squashes: dict[str, list[tuple[str, int, Tensor, list[Tensor]]]] = {}
        """Activation -> (kind, elements, how many are beyond both ends, at each end in the first
        look)."""
        self.attention: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Module -> (largest logit [H], entropy share [H]) of every call."""
        self.over_time: dict[str, list[Tensor]] = {}
        """Recurrent layer -> gradient norm by the input of each time step [T], of every look."""
        self.samples: dict[str, Tensor] = {}
        self.gradient_samples: dict[str, Tensor] = {}
        self.stream_tensors: dict[str, Tensor] | None = None
        self._blocks = blocks
        self._model = model
        self._stack: list[str] = []
        self._before = ""
        """Module that returned last: tells activations in one forward apart."""
        self._waiting: list[tuple[str, Tensor]] = []
        self._first_outputs: list[tuple[str, Tensor, int]] = []
        self._waiting_gradients: list[tuple[str, Tensor]] = []
        self._leaves: set[str] = set()
        self._written: set[str] = set()
        """Modules whose output was changed in place after they returned it."""
        self._without_gradient: set[str] = set()
        self._backward = False
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        channels = [m for m in model.modules() if isinstance(m, kinds)]
        self._channels = {
            m.num_features if isinstance(m, nn.modules.batchnorm._BatchNorm) else m.out_channels
            for m in channels
        }
        spiking = [
            m for m in model.modules() if hasattr(m, "threshold") or hasattr(m, "v_threshold")
        ]
        self.spiking = any(not type(m).__module__.startswith("torch.nn") for m in spiking)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hold the hooks; between looks they do nothing."""
        hooks: list[Any] = []
        try:
            for name, module in self._model.named_modules():
                hooks += self._listen(name, module)
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def look(self, *, keep_streams: bool = False) -> Iterator[None]:
        """Look at one forward and backward pass."""
        self._stack, self._backward, self._without_gradient = [], False, set()
        self.here = self._before = ""
        self.stream_tensors = {} if keep_streams else None
        self.active = True
        try:
            with Watch(self):
                yield
            self._settle()
        finally:
            self.active = False
            self.looks += 1
            self._waiting.clear()
            self._waiting_gradients.clear()

    def forward_done(self) -> None:
        """Say that what runs from now on is backward, or a block that it makes again."""
        self.active, self._backward, self.here = False, True, ""
        with torch.no_grad():
            self._settle()
        self._written |= {name for name, t, before in self._first_outputs if t._version != before}
        self._first_outputs.clear()

    def _listen(self, name: str, module: nn.Module) -> list[Any]:
        shown = bool(name) and not isinstance(module, NOT_SHOWN)
        is_block = name in self._blocks
        label = name or type(module).__name__
        if not any(True for _ in module.children()):
            self._leaves.add(label)
        if name not in self.classes:
            self.classes[name] = type(module).__name__

        def before(_: nn.Module, __: Any) -> None:
            if self.active:
                self.called.add(name)
                self._stack.append(label)
                self.here = label

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.active and isinstance(module, nn.RNNBase) and not module.bidirectional:
                self._follow_time(label, module, first_float(args))
            if not self.active:
                if self._backward and name in self._without_gradient:
                    self._follow(name, first_float(output))
                return
            if self._stack:
                self._stack.pop()
            self.here, self._before = self._stack[-1] if self._stack else "", label
            if shown or is_block:
                with no_torch_function():  # or the mode would meet every attribute that we read
                    self._returned(name, output, (args, kwargs) if is_block else None)

        return [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def _returned(self, name: str, output: Any, inputs: Any) -> None:
        x = first_float(output)
        if x is None or not x.numel():
            return
        values = x.detach()
        if name not in self.samples:
            self.order.append(name)
            self.samples[name] = sample(x)
        with torch.no_grad():
            if inputs is not None:
                self._compare(name, first_float(inputs), values)
            self._waiting.append((name, values))
            if self.looks == 0 and values.numel() <= SMALL:
                self._first_outputs.append((name, values, values._version))
            # What is written to later, and what is large, is looked at now: nobody knows before
            # the first look.
            if self.looks == 0 or name in self._written or values.numel() > SMALL:
                self._settle()
        if self.stream_tensors is not None and inputs is not None:
            self.stream_tensors[name] = x
        if x.requires_grad:
            self._follow(name, x)
        else:
            self._without_gradient.add(name)

    def _settle(self) -> None:
        """Take the norms of all that waits, in one call for each device and dtype.

        Largest values are taken in the first look only: later ones are told by their norms.
        """
        waiting = self._waiting
        found = norms_of([values for _, values in waiting])
        if self.looks == 0 and waiting:
            sizes = [torch.linalg.vector_norm(values, math.inf) for _, values in waiting]
            tops = [values.amax() for _, values in waiting]
            self.largest += [
                (name, size, top) for (name, _), size, top in zip(waiting, sizes, tops, strict=True)
            ]
        for (name, values), norm in zip(waiting, found, strict=True):
            self.outputs.append((self.looks, name, values.numel(), norm))
        waiting.clear()
        found = norms_of([gradient for _, gradient in self._waiting_gradients])
        for (name, _), norm in zip(self._waiting_gradients, found, strict=True):
            self.gradients.append((self.looks, name, norm))
        self._waiting_gradients.clear()

    def _compare(self, name: str, before: Tensor | None, values: Tensor) -> None:
        if self.looks or before is None or before.shape != values.shape:
            return
        wide = torch.promote_types(values.dtype, torch.float32)
        one, other = before.detach().reshape(-1).to(wide), values.reshape(-1).to(wide)
        size = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
        self.streams.append((name, torch.dot(one, other) / size.clamp(min=1e-30)))

    def _follow(self, name: str, x: Tensor | None) -> None:
        if x is None or not x.requires_grad:
            return

        def arrived(gradient: Tensor) -> None:
            if not self._backward:
                return  # the question which blocks follow each other is no gradient of the loss
            with torch.no_grad():
                if name not in self.gradient_samples:
                    self.gradient_samples[name] = sample(gradient)
                self._waiting_gradients.append((name, gradient.detach()))
                if gradient.numel() > SMALL:
                    self._settle()

        with contextlib.suppress(RuntimeError):  # a leaf view that was changed in place
            x.register_hook(arrived)

    def _follow_time(self, name: str, module: nn.RNNBase, x: Tensor | None) -> None:
        if x is None or x.dim() != 3 or not x.requires_grad:
            return
        others = (0, 2) if module.batch_first else (1, 2)

        def arrived(gradient: Tensor) -> None:
            if self._backward:
                norms = torch.linalg.vector_norm(gradient.detach().float(), dim=others)
                self.over_time.setdefault(name, []).append(norms)

        x.register_hook(arrived)

    def rectified(self, x: Tensor, cutoff: float) -> None:
        """Take the input of a ReLU or of its kin. Shapes: x [..., C], or [B, C, ...] of images."""
        if not self.here:
            return  # the loss function's own
        dim = 1 if x.dim() > 2 and x.shape[1] in self._channels else x.dim() - 1
        others = [d for d in range(x.dim()) if d != dim]
        rows = x.numel() // max(x.shape[dim], 1)
        on = (x > cutoff).sum() if self.looks == 0 else None
        self.units.setdefault(self._activation(), []).append((rows, cutoff, x.amax(others), on))

    def squashed(self, kind: str, x: Tensor) -> None:
        """Take the input of a tanh or sigmoid, any shape."""
        if self.here and x.numel() > 1:
            ends = [] if self.looks else [(x < -FLAT[kind]).sum(), (x > FLAT[kind]).sum()]
            calls = self.squashes.setdefault(self._activation(), [])
            calls.append((kind, x.numel(), (x.abs() > FLAT[kind]).sum(), ends))

    def _activation(self) -> str:
        """Name an activation: its own module, or what returned before it in a larger one."""
        own = self.here in self._leaves or not self._before
        return self.here if own else f"{self._before} (activation after it)"

    def attended(self, largest: Tensor, entropy: Tensor) -> None:
        """Take what logit_statistics says of one call, [H] each."""
        if self.here:
            self.attention.setdefault(self.here, []).append((largest, entropy))


def first_float(value: Any) -> Tensor | None:
    """Find the first floating-point tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if hasattr(value, "values") and hasattr(value, "keys"):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            found = first_float(item)
            if found is not None:
                return found
    return None


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each, in float32 or wider; one call for each device and dtype."""
    groups: dict[tuple[Any, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    found: dict[int, Tensor] = {}
    for (_, dtype), members in groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.ops.aten._foreach_norm.Scalar([tensors[i] for i in members], 2, dtype=wide)
        found.update(zip(members, norms, strict=True))
    return [found[index] for index in range(len(tensors))]


def sample(x: Tensor) -> Tensor:
    """Take up to SAMPLED elements, evenly spread, as float32 [N]; a copy."""
    flat = x.detach().reshape(-1)
    if flat.numel() <= SAMPLED:
        return flat.float().clone()
    # Steps that are no whole number: those of a power of two would meet the same columns only.
    step = (flat.numel() - 1) / (SAMPLED - 0.5)
    return flat[(torch.arange(SAMPLED, device=flat.device) * step).long()].float()


def find_stacks(model: nn.Module) -> list[list[str]]:
    """Name the repeated blocks: in every container the children of the most frequent class.

    Containers are ModuleList, ModuleDict, Sequential, and modules with numbered children of one
    class (fc1, fc2, ...). Children hold a matrix each; what lies inside another stack is left out.
    Longest first.
    """
    found: list[list[str]] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        groups: dict[Any, list[str]] = {}
        listed = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for child_name, child in module.named_children():
            stem = "" if listed else child_name.rstrip("0123456789")
            if (listed or stem != child_name) and any(p.dim() >= 2 for p in child.parameters()):
                groups.setdefault((type(child), stem), []).append(prefix + child_name)
        found += [names for names in groups.values() if len(names) >= MIN_BLOCKS]
    members = [(names, f"{member}.") for names in found for member in names]
    outer = [
        names
        for names in found
        if not any(names[0].startswith(member) for other, member in members if other is not names)
    ]
    return sorted(outer, key=len, reverse=True)


def in_sequence(names: list[str], tensors: dict[str, Tensor]) -> list[str]:
    """Keep the blocks that lead to the last one: experts side by side, or unused ones, do not."""
    ran = [name for name in tensors if name in set(names)]
    last = next((n for n in reversed(ran) if tensors[n].requires_grad), None)
    if last is None:
        return []
    others = [n for n in ran if n != last and tensors[n].requires_grad]
    if not others:
        return [last]
    try:
        found = torch.autograd.grad(
            tensors[last].float().sum(),
            [tensors[n] for n in others],
            retain_graph=True,
            allow_unused=True,
        )
    except RuntimeError:  # reentrant checkpoints know no gradient by a tensor
        return ran
    kept = {n for n, g in zip(others, found, strict=True) if g is not None} | {last}
    return [n for n in ran if n in kept]
