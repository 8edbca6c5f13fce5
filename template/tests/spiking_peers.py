"""Our neurons beside snntorch's and spikingjelly's; runs in an environment that has both.

`python spiking_peers.py` prints one JSON line a case: spikes that differ, spikes fired, and the
largest difference of a gradient over the largest gradient. test_lif.py makes the environment.
"""

import json
from itertools import product

import snntorch
import torch
from snntorch import surrogate as snn_surrogate
from spikingjelly.activation_based import neuron
from spikingjelly.activation_based import surrogate as jelly_surrogate

from curry_train.layers.lif import LIF

TIME, SHAPE = 12, (4, 33)
SNN = {
    "atan": snn_surrogate.atan(alpha=2.0),
    "fast_sigmoid": snn_surrogate.fast_sigmoid(slope=25),
}
JELLY = {"atan": jelly_surrogate.ATan(2.0), "triangle": jelly_surrogate.PiecewiseQuadratic(1.0)}


def currents(dtype):
    generator = torch.Generator().manual_seed(7)
    current = 0.9 * torch.randn(TIME, *SHAPE, generator=generator, dtype=dtype)
    # At a potential of just the threshold snntorch is silent, and above twice the threshold its
    # undelayed soft reset fires a second time: neither may happen here.
    current = current.clamp(max=0.95)
    weights = torch.randn(TIME, *SHAPE, generator=generator, dtype=dtype)
    return current.requires_grad_(), weights


def gradients(run, dtype, *parameters):
    current, weights = currents(dtype)
    spikes, last = run(current)
    loss = (weights * spikes).sum() + (weights[0] * last).sum()
    return spikes.detach(), torch.autograd.grad(loss, (current, *parameters))


def report(case, ours, theirs):
    (spikes, grads), (their_spikes, their_grads) = ours, theirs
    worst = max(
        ((a - b).abs().max() / b.abs().max()).item()
        for a, b in zip(grads, their_grads, strict=True)
    )
    differ = int((spikes != their_spikes.to(spikes.dtype)).sum())
    print(json.dumps({"case": case, "differ": differ, "fired": int(spikes.sum()), "worst": worst}))


def snntorch_leaky():
    for reset, surrogate, learn in product(("soft", "hard", "delayed"), SNN, (False, True)):
        leak = 0.8
        peer = snntorch.Leaky(
            beta=leak,
            spike_grad=SNN[surrogate],
            learn_beta=learn,
            reset_mechanism="zero" if reset == "hard" else "subtract",
            reset_delay=reset == "delayed",
        )

        def theirs(current, peer=peer):
            spikes, state = [], torch.zeros_like(current[0])
            for now in current:
                fired, state = peer(now, state)
                spikes.append(fired)
            return torch.stack(spikes), state

        # snntorch always detaches the reset that is delayed, never the one that is not.
        lif = LIF(
            leak=leak,
            surrogate=surrogate,
            reset=reset,
            detach_reset=reset == "delayed",
            learn_leak=learn,
        )
        ours = gradients(lif, torch.float32, *lif.parameters())
        found = gradients(theirs, torch.float32, *peer.parameters())
        if learn:  # theirs is the leak itself, ours its logit
            scale = leak * (1 - leak)
            found = found[0], (found[1][0], (found[1][1] * scale).view(1))
        report(f"snntorch {reset} {surrogate}{' learnt' if learn else ''}", ours, found)


def spikingjelly_node():
    cases = product(("soft", "hard"), JELLY, (False, True), (False, True))
    for reset, surrogate, detach, decay_input in cases:
        tau = 2.5
        peer = neuron.LIFNode(
            tau=tau,
            decay_input=decay_input,
            v_reset=0.0 if reset == "hard" else None,
            surrogate_function=JELLY[surrogate],
            detach_reset=detach,
            step_mode="m",
        )
        lif = LIF(leak=1 - 1 / tau, surrogate=surrogate, reset=reset, detach_reset=detach)
        scale = 1 / tau if decay_input else 1.0
        gain = 3.0 if decay_input else 1.0  # enough current to fire

        def theirs(current, peer=peer, gain=gain):
            return peer(gain * current), peer.v

        def ours(current, lif=lif, scale=scale * gain):
            return lif(scale * current)

        case = f"spikingjelly {reset} {surrogate} detach={detach} decay_input={decay_input}"
        report(case, gradients(ours, torch.float64), gradients(theirs, torch.float64))


def spikingjelly_parametric():
    for reset, surrogate in product(("soft", "hard"), JELLY):
        peer = neuron.ParametricLIFNode(
            init_tau=2.5,
            decay_input=False,
            v_reset=0.0 if reset == "hard" else None,
            surrogate_function=JELLY[surrogate],
            step_mode="m",
        ).double()
        lif = LIF(leak=1 - 1 / 2.5, surrogate=surrogate, reset=reset, learn_leak=True).double()

        def theirs(current, peer=peer):
            return peer(current), peer.v

        found = gradients(theirs, torch.float64, *peer.parameters())
        # theirs is the logit of 1/tau, ours of 1 - 1/tau
        found = found[0], (found[1][0], -found[1][1].view(1))
        ours = gradients(lif, torch.float64, *lif.parameters())
        report(f"spikingjelly parametric {reset} {surrogate}", ours, found)


if __name__ == "__main__":
    snntorch_leaky()
    spikingjelly_node()
    spikingjelly_parametric()
