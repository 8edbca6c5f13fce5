"""Neurons equal a loop over plain numbers, their gradients the closed form; codes decode."""

import json
import math
import os
import subprocess
import sys
import sysconfig
import venv
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from curry_train.layers import lif as lif_module
from curry_train.layers.lif import (
    LIF,
    RESETS,
    SURROGATES,
    decode_latency,
    decode_mean,
    encode_direct,
    encode_latency,
    encode_rate,
    spike,
)

TIME, SHAPE, LEAK, THRESHOLD = 9, (3, 5), 0.7, 0.8
# snntorch has no dependency but torch; of spikingjelly's many only loguru is imported here.
PEERS = ("snntorch==1.0.0", "spikingjelly==2.0.0", "loguru==0.7.3")


def derivative(surrogate, x):
    """The three surrogates at their default slopes, written out again."""
    if surrogate == "fast_sigmoid":
        return 1 / (1 + 25 * np.abs(x)) ** 2
    if surrogate == "atan":
        return 1 / (1 + np.pi**2 * x**2)
    return np.maximum(0, 1 - np.abs(x))


def by_hand(current, spike_weight, state_weight, reset, detach, surrogate, leak=LEAK):
    """Run one set of neurons in NumPy, forward, then backward through time by the chain rule.

    Returns spikes, the last state, and the gradients of sum(spike_weight * spikes) +
    sum(state_weight * state) by current, first state (zero here) and leak.
    """
    potentials, spikes, states = [], [], [np.zeros(current.shape[1:])]
    for now in current:
        u = leak * states[-1] + now
        if reset == "delayed":
            u = u - THRESHOLD * (states[-1] >= THRESHOLD)
        s = (u >= THRESHOLD).astype(float)
        v = {"soft": u - THRESHOLD * s, "hard": u * (1 - s), "delayed": u}[reset]
        potentials.append(u), spikes.append(s), states.append(v)
    grad_current, grad_leak, grad_v = np.zeros_like(current), 0.0, state_weight
    through = 0.0 if detach else 1.0
    for t in reversed(range(len(current))):
        u, s, before = potentials[t], spikes[t], states[t]
        slope = derivative(surrogate, u - THRESHOLD)
        if reset == "soft":
            kept = 1 - through * THRESHOLD * slope
        elif reset == "hard":
            kept = (1 - s) - through * u * slope
        else:
            kept = 1.0
        grad_u = grad_v * kept + spike_weight[t] * slope
        grad_current[t] = grad_u
        grad_leak += (grad_u * before).sum()
        grad_v = grad_u * leak
        if reset == "delayed":
            grad_v -= grad_u * through * THRESHOLD * derivative(surrogate, before - THRESHOLD)
    return np.stack(spikes), states[-1], grad_current, grad_v, grad_leak


def worst_difference(module, reset, detach, surrogate):
    """Return how far a module's LIF is from `by_hand`: spikes, state and every gradient."""
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    current = torch.randn(TIME, *SHAPE, **draw).mul(0.9).requires_grad_()
    start = torch.zeros(SHAPE, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(TIME, *SHAPE, **draw), torch.randn(SHAPE, **draw)
    neurons = module.LIF(
        leak=LEAK,
        threshold=THRESHOLD,
        surrogate=surrogate,
        reset=reset,
        detach_reset=detach,
        learn_leak=True,
    ).double()
    with torch.no_grad():  # float32 at construction
        neurons.leak_logit.fill_(math.log(LEAK / (1 - LEAK)))
    spikes, state = neurons(current, start)
    loss = (spikes * weights[0]).sum() + (state * weights[1]).sum()
    found = torch.autograd.grad(loss, (current, start, neurons.leak_logit))
    numbers = [tensor.detach().numpy() for tensor in (current, *weights)]
    wanted = list(by_hand(*numbers, reset, detach, surrogate))
    wanted[4] = np.array([wanted[4] * LEAK * (1 - LEAK)])  # by the logit
    pairs = zip((spikes.detach(), state.detach(), *found), wanted, strict=True)
    return max(np.abs(a.numpy() - b).max() for a, b in pairs)


CASES = list(product(RESETS, (False, True), SURROGATES))


@pytest.mark.parametrize(("reset", "detach", "surrogate"), CASES)
def test_neurons_equal_the_loop_over_numbers_with_all_gradients(reset, detach, surrogate):
    assert worst_difference(lif_module, reset, detach, surrogate) < 1e-13


MUTANTS = {
    "fires below the threshold": ("return (distance >= 0)", "return (distance >= -0.05)"),
    "adds before it leaks": ("leak * v + now", "leak * (v + now)"),
    "soft reset to zero": ("v = charged - self.threshold * self._reset(fired)", "v = now * 0"),
    "hard reset keeps all": ("charged * (1 - self._reset(fired))", "charged"),
    "delayed reset forgotten": ("charged = charged - self", "charged = charged - 0 * self"),
    "reset always detached": ("fired.detach() if self.detach_reset", "fired.detach() if True"),
    "reset never detached": ("fired.detach() if self.detach_reset", "fired if True"),
    "leak learnt without sigmoid": (".to(wide).sigmoid()", ".to(wide) * 0 + 0.7"),
    "state dropped": ("is None else state.to(wide)", "is None else 0 * state.to(wide)"),
    "atan too steep": ("slope / 2 / (1 +", "slope / (1 +"),
    "fast sigmoid not squared": (".abs()).square().reciprocal()", ".abs()).reciprocal()"),
    "triangle not clamped": (".abs()).clamp(min=0)", ".abs())"),
    "surrogate ignored": ("SURROGATES[ctx.surrogate][0]", "SURROGATES['atan'][0]"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_sees_a_broken_neuron(mutant):
    old, new = MUTANTS[mutant]
    source = Path(lif_module.__file__).read_text()
    assert source.count(old) == 1, "the mutant names no line, or several"
    broken = ModuleType("broken")
    exec(compile(source.replace(old, new), "broken", "exec"), broken.__dict__)
    limit = 1e-9
    assert any(worst_difference(broken, *case) > limit for case in CASES)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_late_spike_reaches_an_early_current_by_the_product_of_leak_and_reset(surrogate):
    # d s_T / d I_t = g(u_T) * prod over t <= k < T of leak * (1 - threshold * g(u_k))
    current = 0.6 * torch.rand(TIME, 7, dtype=torch.float64)
    current.requires_grad_()
    for detach in (False, True):
        neurons = LIF(leak=LEAK, surrogate=surrogate, detach_reset=detach)
        spikes, _ = neurons(current)
        (found,) = torch.autograd.grad(spikes[-1].sum(), current)
        v, slopes = 0.0, []
        for now in current.detach():
            u = LEAK * v + now
            v = u - (u >= 1).double()
            slopes.append(torch.from_numpy(derivative(surrogate, (u - 1).numpy())))
        wanted, factor = [slopes[-1]], slopes[-1]
        for slope in slopes[-2::-1]:
            factor = factor * LEAK * (1 - (0.0 if detach else 1.0) * slope)
            wanted.append(factor)
        torch.testing.assert_close(found, torch.stack(wanted[::-1]), rtol=1e-12, atol=1e-14)
        assert spikes.sum() > 0


@pytest.mark.parametrize(
    ("surrogate", "primitive"),
    [
        ("fast_sigmoid", lambda x, k: x / (1 + k * x.abs())),
        ("atan", lambda x, k: torch.atan(math.pi / 2 * k * x) / math.pi),
        (
            "triangle",
            lambda x, k: (k * x - (k * x).abs() * k * x / 2).where(x.abs() < 1 / k, 0 * x),
        ),
    ],
)
def test_a_surrogate_is_the_derivative_of_a_smooth_step(surrogate, primitive):
    x = torch.linspace(-2, 2, 401, dtype=torch.float64)[1::2].requires_grad_()
    for slope in (1.0, 3.5):
        (wanted,) = torch.autograd.grad(primitive(x, slope).sum(), x)
        (found,) = torch.autograd.grad(spike(x, surrogate, slope).sum(), x)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reset", RESETS)
def test_two_halves_with_the_state_handed_on_give_the_whole(reset):
    neurons, current = LIF(reset=reset, leak=0.9), torch.randn(TIME, *SHAPE)
    current.requires_grad_()
    whole, last = neurons(current)
    (wanted,) = torch.autograd.grad(whole.sum() + last.sum(), current)
    for cut in range(1, TIME):
        first, state = neurons(current[:cut])
        second, end = neurons(current[cut:], state)
        assert torch.equal(torch.cat([first, second]), whole) and torch.equal(end, last)
        (found,) = torch.autograd.grad(first.sum() + second.sum() + end.sum(), current)
        torch.testing.assert_close(found, wanted)
        _, early = neurons(current[:cut])
        late, end = neurons(current[cut:], early.detach())
        (found,) = torch.autograd.grad(late.sum() + end.sum(), current)
        assert (found[:cut] == 0).all() and found[cut:].any()


def test_spikes_are_zero_or_one_and_one_at_the_threshold():
    spikes, state = LIF(threshold=0.5)(torch.tensor([[0.5, 0.49, -3.0, 9.0]]))
    assert spikes.tolist() == [[1, 0, 0, 1]]
    torch.testing.assert_close(state, torch.tensor([0.0, 0.49, -3.0, 8.5]))


def test_small_bf16_currents_add_up_in_a_float32_membrane():
    # 1/512 is lost when added to 0.5 in bf16; the membrane must pass 1 after 512 time steps.
    current = torch.full((520, 1), 1 / 512, dtype=torch.bfloat16)
    spikes, state = LIF(leak=1.0)(current)
    assert spikes.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert spikes.flatten().nonzero().tolist() == [[511]]


def test_a_leak_per_channel_is_learnt_apart():
    neurons = LIF(leak=0.5, learn_leak=True, width=3)
    with torch.no_grad():
        neurons.leak_logit.copy_(torch.tensor([-30.0, 0.0, 30.0]))
    spikes, state = neurons(torch.full((3, 2, 3), 0.4))
    assert spikes[:, 0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    spikes.sum().backward()
    assert neurons.leak_logit.grad.shape == (3,) and neurons.leak_logit.grad[1] != 0
    assert {name for name, _ in LIF().named_parameters()} == set()


def test_neurons_without_a_batch_and_empty_batches_work():
    assert LIF()(torch.ones(4))[0].tolist() == [1, 1, 1, 1]
    spikes, state = LIF()(torch.ones(3, 0, 5))
    assert spikes.shape == (3, 0, 5) and state.shape == (0, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"leak": 1.5}, r"leak=1.5: must be 0 .* to 1"),
        ({"leak": math.nan}, "leak=nan"),
        ({"leak": 1.0, "learn_leak": True}, "leak=1.0: .*between them if learnt"),
        ({"threshold": 0.0}, "threshold=0.0: must be a finite number above 0"),
        ({"threshold": math.inf}, "threshold=inf"),
        ({"slope": -1.0}, "slope=-1.0: must be None or a number above 0"),
        ({"surrogate": "sigmoid"}, "surrogate='sigmoid': must be one of .*atan.*triangle"),
        ({"reset": "zero"}, "reset='zero': must be one of .*soft.*hard.*delayed"),
    ],
)
def test_settings_that_make_no_neuron_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LIF(**settings)


@pytest.mark.parametrize(
    ("current", "state", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int64), None, r"shape \[2, 3\] and torch.int64: it must be"),
        (torch.ones(0, 3), None, "at least one time step"),
        (torch.tensor(1.0), None, r"shape \[\]"),
        (torch.ones(2, 3), torch.ones(2), r"state has shape \[2\].*it must be \[3\]"),
    ],
)
def test_currents_and_states_of_the_wrong_form_are_refused(current, state, message):
    with pytest.raises(ValueError, match=message):
        LIF()(current, state)
    with pytest.raises(ValueError, match="width=4: set 3, as the current, or 1"):
        LIF(learn_leak=True, width=4)(torch.ones(2, 3))


def test_the_direct_code_decodes_exactly_and_carries_the_gradient():
    x = torch.randn(4, 6, requires_grad=True)
    code = encode_direct(x, 8)
    assert code.shape == (8, 4, 6) and torch.equal(decode_mean(code), x)
    (grad,) = torch.autograd.grad(code.sum(), x)
    assert (grad == 8).all()


def test_the_rate_code_decodes_within_its_noise_and_repeats_by_its_seed():
    x = torch.rand(50, 40)
    code = encode_rate(x, 400, torch.Generator().manual_seed(3))
    assert set(code.unique().tolist()) == {0, 1}
    error = (decode_mean(code) - x) / (x * (1 - x) / 400).sqrt()
    assert error.abs().max() < 5.5 and 0.95 < error.std() < 1.05  # standard deviations
    assert torch.equal(code, encode_rate(x, 400, torch.Generator().manual_seed(3)))
    assert not torch.equal(code, encode_rate(x, 400, torch.Generator().manual_seed(4)))
    ends = encode_rate(torch.tensor([0.0, 1.0]), 100, torch.Generator())
    assert decode_mean(ends).tolist() == [0, 1]


@pytest.mark.parametrize("time_steps", [2, 5, 16])
def test_the_latency_code_fires_once_and_decodes_within_half_a_time_step(time_steps):
    x = torch.cat([torch.rand(1000), torch.tensor([0.0, 1.0])]).view(2, -1)
    code = encode_latency(x, time_steps)
    assert (code.sum(0) == 1).all()
    assert (decode_latency(code) - x).abs().max() <= 0.5 / (time_steps - 1) + 1e-6
    on_grid = torch.linspace(0, 1, time_steps)
    assert torch.allclose(decode_latency(encode_latency(on_grid, time_steps)), on_grid)
    assert encode_latency(torch.tensor(1.0), time_steps)[0] == 1  # the largest is the first
    assert decode_latency(torch.zeros(time_steps, 3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("x", [torch.tensor([1.1]), torch.tensor([-0.1]), torch.tensor([math.nan])])
def test_codes_refuse_what_is_outside_zero_to_one(x):
    for encode in (encode_latency, lambda x, t: encode_rate(x, t, torch.Generator())):
        with pytest.raises(ValueError, match="outside 0 to 1"):
            encode(x, 4)


def test_codes_refuse_too_few_time_steps():
    for encode in (encode_direct, lambda x, t: encode_rate(x, t, torch.Generator())):
        with pytest.raises(ValueError, match="time_steps=0: this code needs at least 1"):
            encode(torch.ones(2), 0)
    with pytest.raises(ValueError, match="time_steps=1: this code needs at least 2"):
        encode_latency(torch.ones(2), 1)


def peer_python():
    """Make, once, an environment of the pinned peers beside this one's torch; skip without."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "curry-train-tests"
    key = "-".join(name.replace("==", "-") for name in PEERS)
    folder = cache / f"peers-{key}-py{sys.version_info[0]}{sys.version_info[1]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, clear=True)
        own, inside = sysconfig.get_paths()["purelib"], {"base": str(folder)}
        site = sysconfig.get_path("purelib", "venv", vars={**inside, "platbase": str(folder)})
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        done = subprocess.run([*pip, "--no-deps", *PEERS], capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            pytest.skip(f"the registry gives no {', '.join(PEERS)}: {why}")
        Path(site, "torch_of_the_tests.pth").write_text(own + "\n")
        (folder / "complete").touch()
    return python


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CURRY_TRAIN_FULL"), reason="installs two packages (--full)")
def test_neurons_equal_snntorch_and_spikingjelly_spike_for_spike():
    script = Path(__file__).parent / "spiking_peers.py"
    env = {**os.environ, "PYTHONPATH": str(script.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(peer_python()), str(script)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 12 + 16 + 4
    for case in cases:
        print(case)
        limit = 1e-6 if case["case"].startswith("snntorch") else 1e-11  # float32, float64
        assert case["differ"] == 0 and case["fired"] > 100 and case["worst"] < limit, case
