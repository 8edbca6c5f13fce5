"""Leaky integrate-and-fire neurons over time steps, and the codes that turn numbers into spikes.

The first dim of everything here is time. It is a dim of the data, not of training: a `step` stays
an optimizer step. Shapes are [time, ...], where `...` is whatever a layer carries, say [B, S, D].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def fast_sigmoid(distance: Tensor, slope: float) -> Tensor:
    """Return 1 / (1 + slope*|x|)^2, any shape. Source: Zenke and Ganguli 2018, "SuperSpike"."""
    return (1 + slope * distance.abs()).square().reciprocal()


def atan(distance: Tensor, slope: float) -> Tensor:
    """Return slope/2 / (1 + (pi/2 * slope * x)^2), any shape.

    Source: Fang et al. 2021, "Incorporating Learnable Membrane Time Constant", surrogate of arctan.
    """
    return slope / 2 / (1 + (math.pi / 2 * slope * distance).square())


def triangle(distance: Tensor, slope: float) -> Tensor:
    """Return slope * max(0, 1 - slope*|x|), any shape; its area is 1, its width 2/slope.

    Source: Esser et al. 2016, "Convolutional Networks for Fast, Energy-Efficient Neuromorphic
    Computing"; Bellec et al. 2018, "Long Short-Term Memory and Learning-to-Learn in Networks of
    Spiking Neurons". spikingjelly's PiecewiseQuadratic; snntorch's Triangular is another thing.
    """
    return slope * (1 - slope * distance.abs()).clamp(min=0)


FAST_SIGMOID, ATAN, TRIANGLE = (fast_sigmoid, 25.0), (atan, 2.0), (triangle, 1.0)
SURROGATES = {"fast_sigmoid": FAST_SIGMOID, "atan": ATAN, "triangle": TRIANGLE}
"""Name -> what stands in for the step's derivative, and the slope it has by default."""
RESETS = ("soft", "hard", "delayed")


class _Spike(torch.autograd.Function):
    """Heaviside step forward, a surrogate derivative backward."""

    @staticmethod
    def forward(ctx: Any, distance: Tensor, surrogate: str, slope: float) -> Tensor:
        ctx.save_for_backward(distance)
        ctx.surrogate, ctx.slope = surrogate, slope
        return (distance >= 0).to(distance.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (distance,) = ctx.saved_tensors
        return grad * SURROGATES[ctx.surrogate][0](distance, ctx.slope), None, None


def spike(distance: Tensor, surrogate: str = "atan", slope: float | None = None) -> Tensor:
    """Return 1 where the distance to the threshold is at least 0, else 0; same shape and dtype."""
    return _Spike.apply(distance, surrogate, SURROGATES[surrogate][1] if slope is None else slope)


class LIF(nn.Module):
    """Leaky integrate-and-fire: u_t = leak * v_(t-1) + I_t, s_t = [u_t >= threshold], then a reset.

    Shapes: current [time, ...] of any float dtype and state [...] or None (at rest, 0); returns
    spikes [time, ...] of 0 and 1 in the dtype of current, and the state after the last time step,
    in float32 (float64 for float64). Two halves of a sequence, the state handed on, give what the
    whole gives; `state.detach()` in between cuts the gradient there.
    Resets: soft, v = u - threshold * s; hard, v = u * (1 - s); delayed, v = u and the threshold is
    taken from the next u, after the leak (what snntorch's Leaky does by default).
    A learnable leak is stored as `leak_logit` [width] or [1], leak = sigmoid(leak_logit).
    Raises ValueError for settings and shapes that make no neuron.
    Source: Fang et al. 2023, "SpikingJelly", charge, fire and reset with leak = 1 - 1/tau; delayed:
    Eshraghian et al. 2023, "Training Spiking Neural Networks Using Lessons from Deep Learning"; the
    learnable leak: Fang et al. 2021. At u = threshold spikingjelly fires too, snntorch does not.
    """

    def __init__(
        self,
        *,
        leak: float = 0.5,
        threshold: float = 1.0,
        surrogate: str = "atan",
        slope: float | None = None,
        reset: str = "soft",
        detach_reset: bool = False,
        learn_leak: bool = False,
        width: int = 1,
    ) -> None:
        super().__init__()
        inside = 0 < leak < 1 if learn_leak else 0 <= leak <= 1
        allowed = {
            f"leak={leak}": (inside, "0 (forgets at once) to 1 (never); between them if learnt"),
            f"threshold={threshold}": (0 < threshold < math.inf, "a finite number above 0"),
            f"slope={slope}": (slope is None or 0 < slope < math.inf, "None or a number above 0"),
            f"surrogate={surrogate!r}": (surrogate in SURROGATES, f"one of {[*SURROGATES]}"),
            f"reset={reset!r}": (reset in RESETS, f"one of {[*RESETS]}"),
        }
        for found, (holds, what) in allowed.items():
            if not holds:
                raise ValueError(f"{found}: must be {what}")
        self.initial_leak, self.threshold = leak, threshold
        self.surrogate, self.slope = surrogate, slope
        self.reset, self.detach_reset = reset, detach_reset
        self.leak_logit = None
        if learn_leak:
            self.initial_logit = math.log(leak / (1 - leak))
            self.leak_logit = nn.Parameter(torch.full((width,), self.initial_logit))

    def forward(self, current: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if current.dim() < 1 or current.shape[0] < 1 or not current.is_floating_point():
            raise ValueError(
                f"current has shape {list(current.shape)} and {current.dtype}: it must be floating"
                " point and [time, ...] with at least one time step"
            )
        if state is not None and state.shape != current.shape[1:]:
            raise ValueError(
                f"state has shape {list(state.shape)}: for this current it must be"
                f" {list(current.shape[1:])}, what the last call returned, or None"
            )
        if self.leak_logit is not None and len(self.leak_logit) not in (1, current.shape[-1]):
            width = current.shape[-1]
            raise ValueError(f"width={len(self.leak_logit)}: set {width}, as the current, or 1")
        # bf16 has 8 bits: a sum over time steps would lose small currents.
        wide = torch.promote_types(current.dtype, torch.float32)
        leak = self.initial_leak if self.leak_logit is None else self.leak_logit.to(wide).sigmoid()
        v = torch.zeros_like(current[0], dtype=wide) if state is None else state.to(wide)
        spikes = []
        for now in current.to(wide).unbind():
            charged = leak * v + now
            if self.reset == "delayed":
                charged = charged - self.threshold * self._reset(self._fire(v))
            fired = self._fire(charged)
            if self.reset == "soft":
                v = charged - self.threshold * self._reset(fired)
            elif self.reset == "hard":
                v = charged * (1 - self._reset(fired))
            else:
                v = charged
            spikes.append(fired)
        return torch.stack(spikes).to(current.dtype), v

    def _fire(self, v: Tensor) -> Tensor:
        return spike(v - self.threshold, self.surrogate, self.slope)

    def _reset(self, fired: Tensor) -> Tensor:
        return fired.detach() if self.detach_reset else fired


def _check_code(time_steps: int, least: int, x: Tensor | None = None) -> None:
    if time_steps < least:
        raise ValueError(f"time_steps={time_steps}: this code needs at least {least}")
    # On another device the look at the values would wait for it.
    if x is not None and x.device.type == "cpu" and not ((x >= 0) & (x <= 1)).all():
        raise ValueError("x holds values outside 0 to 1 (or NaN): scale it into that range first")


def encode_direct(x: Tensor, time_steps: int) -> Tensor:
    """Repeat x [...] at every time step, as a constant current: [time, ...], any value."""
    _check_code(time_steps, 1)
    return x.expand(time_steps, *x.shape)


def encode_rate(x: Tensor, time_steps: int, generator: torch.Generator) -> Tensor:
    """Fire at each time step with probability x [...], 0 to 1; returns spikes [time, ...].

    The generator (on the device of x) makes it repeatable. Carries no gradient to x.
    """
    _check_code(time_steps, 1, x)
    draws = torch.rand((time_steps, *x.shape), generator=generator, dtype=x.dtype, device=x.device)
    return (draws < x).to(x.dtype)


def encode_latency(x: Tensor, time_steps: int) -> Tensor:
    """Fire once, the earlier the larger x [...] is: 1 first, 0 last; returns spikes [time, ...].

    The time is round((1 - x) * (time_steps - 1)). Carries no gradient to x.
    """
    _check_code(time_steps, 2, x)
    when = ((1 - x) * (time_steps - 1)).round()
    steps = torch.arange(time_steps, device=x.device).view(-1, *[1] * x.dim())
    return (steps == when).to(x.dtype)


def decode_mean(spikes: Tensor) -> Tensor:
    """Undo the direct code exactly and the rate code up to its noise: [time, ...] to [...]."""
    return spikes.mean(0)


def decode_latency(spikes: Tensor) -> Tensor:
    """Undo the latency code from the first spike: [time, ...] to [...].

    It is off by 0.5/(time-1) at most; an element that never fires reads as 0.
    """
    last = spikes.shape[0] - 1
    return (1 - spikes.argmax(0) / last).to(spikes.dtype) * spikes.amax(0)
