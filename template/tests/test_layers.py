"""Each layer equals a plain float64 formula, gradients included."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from curry_train.config import ModelConfig
from curry_train.layers.attention import Attention, attend, positions_of, visible_keys
from curry_train.layers.latent_attention import LatentAttention
from curry_train.layers.linear import Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.norm import RMSNorm
from curry_train.layers.rope import rotary_angles, rotary_frequencies, rotate, softmax_scale
from curry_train.testing import assert_same


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


def test_rms_norm_equals_its_formula_with_gradients():
    norm, x = filled(RMSNorm(8, 1e-5)), torch.randn(3, 5, 8, requires_grad=True)
    wanted = norm.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    got = norm(x)
    upstream = torch.randn_like(got)
    found = torch.autograd.grad(got, (x, norm.weight), upstream)
    reference = torch.autograd.grad(wanted, (x, norm.weight), upstream)
    assert_same(
        {"y": got, "dx": found[0], "dw": found[1]},
        {"y": wanted, "dx": reference[0], "dw": reference[1]},
        tolerance=1e-14,
    )


def test_rms_norm_keeps_the_square_in_float32_under_bf16():
    norm = RMSNorm(64, 0.0).float()
    torch.nn.init.ones_(norm.weight)
    x = torch.full((64,), 300.0, dtype=torch.bfloat16)
    assert norm(x).dtype is torch.bfloat16
    assert torch.equal(norm(x).float(), torch.ones(64, dtype=torch.float32))


def test_rotation_keeps_norms_and_depends_on_distance_only():
    positions = torch.arange(16)[None]
    q, k = torch.randn(8), torch.randn(8)
    for interleaved in (False, True):
        cos, sin = rotary_angles(ModelConfig(head_dim=8), positions, torch.float64)
        turned_q = rotate(q.expand(1, 1, 16, 8), cos, sin, interleaved)[0, 0]
        turned_k = rotate(k.expand(1, 1, 16, 8), cos, sin, interleaved)[0, 0]
        assert torch.allclose(turned_q.norm(dim=-1), q.norm(), rtol=1e-14)
        scores = turned_q @ turned_k.T
        for offset in (0, 1, 5):
            diagonal = scores.diagonal(offset)
            assert torch.allclose(diagonal, diagonal[0], rtol=1e-12)


def test_rotation_of_a_late_document_uses_its_positions_not_its_index():
    config = ModelConfig(head_dim=4, rope_theta=100.0)
    whole = rotary_angles(config, torch.arange(10)[None], torch.float64)
    late = rotary_angles(config, torch.arange(6, 10)[None], torch.float64)
    assert torch.equal(whole[0][:, :, 6:], late[0]) and torch.equal(whole[1][:, :, 6:], late[1])


def test_interleaved_pairs_are_neighbours_as_complex_numbers():
    x = torch.randn(1, 2, 5, 8)
    cos, sin = rotary_angles(ModelConfig(head_dim=8), torch.arange(5)[None], torch.float64)
    angles = torch.outer(torch.arange(5.0), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
    turn = torch.polar(torch.ones_like(angles), angles)
    wanted = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn
    wanted = torch.cat((wanted.real, wanted.imag), -1)
    assert_same({"x": rotate(x, cos, sin, True)}, {"x": wanted}, tolerance=1e-14)


LLAMA3 = ModelConfig(
    head_dim=128, rope_theta=500000.0, rope_type="llama3", rope_factor=8.0,
    original_max_position_embeddings=8192, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
)  # fmt: skip
GPT_OSS = ModelConfig(
    head_dim=64, rope_theta=150000.0, rope_type="yarn", rope_factor=32.0, rope_truncate=False,
    original_max_position_embeddings=4096, rope_beta_fast=32.0, rope_beta_slow=1.0,
)  # fmt: skip
DEEPSEEK_V3 = ModelConfig(
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_type="yarn",
    rope_factor=40.0, original_max_position_embeddings=4096, rope_mscale=1.0,
    rope_mscale_all_dim=1.0,
)  # fmt: skip


def test_llama3_scaling_is_a_function_of_the_wavelength():
    found = rotary_frequencies(LLAMA3, torch.float64, "cpu").tolist()
    for pair, frequency in enumerate(found):
        plain = 500000.0 ** -(2 * pair / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            wanted = plain
        elif wavelength > 8192:
            wanted = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            wanted = (1 - smooth) * plain / 8 + smooth * plain
        assert frequency == pytest.approx(wanted, rel=1e-13)
    assert found[0] == 1.0 and found[-1] == pytest.approx(500000.0 ** -(126 / 128) / 8)


def test_yarn_keeps_what_turns_fast_and_divides_what_turns_slowly():
    found = rotary_frequencies(GPT_OSS, torch.float64, "cpu")
    plain = 150000.0 ** -(torch.arange(0, 64, 2) / 64)
    turns = 4096 * plain / (2 * math.pi)
    assert torch.equal(found[turns > 32], plain[turns > 32])
    assert_same({"f": found[turns < 1]}, {"f": plain[turns < 1] / 32}, tolerance=1e-13)
    between = (turns < 32) & (turns > 1)
    assert between.sum() > 5
    assert ((found < plain) & (found > plain / 32))[between].all()
    rounded = rotary_frequencies(replace(GPT_OSS, rope_truncate=True), torch.float64, "cpu")
    changed = (rounded != found) & ~torch.isclose(rounded, found, rtol=1e-12)
    assert changed.sum() > 5 and not changed[turns > 64].any()


def test_yarn_scales_the_rotation_or_as_deepseek_the_softmax():
    cos, _ = rotary_angles(GPT_OSS, torch.zeros(1, 1, dtype=torch.int64), torch.float64)
    assert cos[0, 0, 0].tolist() == pytest.approx([0.1 * math.log(32) + 1] * 64)
    assert softmax_scale(GPT_OSS) == 64**-0.5
    cos, _ = rotary_angles(DEEPSEEK_V3, torch.zeros(1, 1, dtype=torch.int64), torch.float64)
    assert cos.shape[-1] == 64 and cos[0, 0, 0].tolist() == [1.0] * 64
    wanted = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
    assert softmax_scale(DEEPSEEK_V3) == pytest.approx(wanted)


def test_a_blend_of_one_pair_divides_by_no_zero():
    # Both ends stand at pair 0: it turns once in 2 pi positions, 652 times in the original context.
    config = replace(GPT_OSS, rope_beta_fast=1000.0, rope_beta_slow=660.0, rope_truncate=True)
    assert rotary_frequencies(config, torch.float64, "cpu").isfinite().all()


def plain_attention(q, k, v, scale, seen, sinks):
    """Scores, softmax and heads written out; key heads repeated for their query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return (weights @ v).transpose(1, 2).flatten(2)


def written_out(layer, x, positions, seen, eps=1e-6):
    """Attention or LatentAttention by its formula."""
    batch, length, _ = x.shape

    def norm(module, y):
        if isinstance(module, torch.nn.Identity):
            return y
        return module.weight * y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps)

    def linear(module, y):
        return y @ module.weight.T + (0 if module.bias is None else module.bias)

    def turn(y):
        return rotate(y, positions.cos, positions.sin, layer.interleaved)

    if isinstance(layer, Attention):
        split = (batch, length, -1, layer.head_dim)
        q = turn(norm(layer.q_norm, linear(layer.q_proj, x).view(split)).transpose(1, 2))
        k = turn(norm(layer.k_norm, linear(layer.k_proj, x).view(split)).transpose(1, 2))
        v = linear(layer.v_proj, x).view(split).transpose(1, 2)
        sinks = layer.sinks
    else:
        still, turned = layer.query_parts
        if layer.compresses_queries:
            q = linear(layer.q_b_proj, norm(layer.q_a_layernorm, linear(layer.q_a_proj, x)))
        else:
            q = linear(layer.q_proj, x)
        q = q.view(batch, length, layer.heads, -1).transpose(1, 2)
        q = torch.cat((q[..., :still], turn(q[..., still:])), -1)
        joint = linear(layer.kv_a_proj_with_mqa, x)
        shared = turn(joint[..., -turned:][:, None]).expand(-1, layer.heads, -1, -1)
        kv = linear(layer.kv_b_proj, norm(layer.kv_a_layernorm, joint[..., :-turned]))
        kv = kv.view(batch, length, layer.heads, -1).transpose(1, 2)
        k, v, sinks = torch.cat((kv[..., :still], shared), -1), kv[..., still:], None
    return linear(layer.o_proj, plain_attention(q, k, v, layer.scale, seen, sinks))


GROUPED = ModelConfig(
    hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, qk_norm=False
)
LATENT = replace(
    GROUPED, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3,
    rope_interleave=True,
)  # fmt: skip
LAYERS = {
    "plain": GROUPED,
    "q/k norm": replace(GROUPED, qk_norm=True),
    "biases": replace(GROUPED, attention_bias=True),
    "one key head": replace(GROUPED, num_key_value_heads=1),
    "sinks": replace(GROUPED, attention_sinks=True, attention_bias=True),
    "neighbours": replace(GROUPED, rope_interleave=True, head_dim=6),
    "latent": LATENT,
    "latent, compressed queries": replace(LATENT, q_lora_rank=5, attention_bias=True),
    "latent, wide values": replace(LATENT, v_head_dim=6),
}


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_attention_equals_its_formula_with_gradients(window, documents, name):
    config = replace(LAYERS[name], sliding_window=window)
    layer = filled((LatentAttention if config.kv_lora_rank else Attention)(config))
    x = torch.randn(2, 9, 16, requires_grad=True)
    doc_ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 9]) if documents else None
    position_ids = torch.tensor([[*range(4), *range(5)], [*range(3, 12)]])
    positions = positions_of(config, position_ids, doc_ids, torch.float64)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    if window:
        seen = seen & ~torch.ones(9, 9, dtype=torch.bool).tril(-window)
    seen = seen[None, None]
    if documents:
        seen = seen & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    got, wanted = layer(x, positions), written_out(layer, x, positions, seen)
    upstream = torch.randn_like(got)
    inputs = (x, *layer.parameters())
    names = ["x", *(name for name, _ in layer.named_parameters())]
    found = torch.autograd.grad(got, inputs, upstream)
    reference = torch.autograd.grad(wanted, inputs, upstream)
    assert_same({"out": got}, {"out": wanted}, tolerance=1e-13)

    def by_name(grads):
        return dict(zip(names, grads, strict=True))

    assert_same(by_name(found), by_name(reference), tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinks_at_either_end_take_all_or_nothing(dtype):
    q, k, v = (torch.randn(1, heads, 6, 8).to(dtype) for heads in (4, 2, 2))
    plain = attend(q, k, v, None, 8**-0.5)
    ignored = attend(q, k, v, None, 8**-0.5, torch.full((4,), -200.0))
    assert plain.dtype is dtype and torch.allclose(plain, ignored, rtol=0.02, atol=1e-3)
    assert (attend(q, k, v, None, 8**-0.5, torch.full((4,), 200.0)) == 0).all()


def test_every_nth_block_sees_all_keys():
    config = replace(GROUPED, sliding_window=2, sliding_window_pattern=3, num_hidden_layers=7)
    windows = [config.window_of(layer) for layer in range(7)]
    assert windows == [2, 2, None, 2, 2, None, 2]
    assert [Attention(config, layer).window for layer in range(7)] == windows
    positions = positions_of(config, torch.arange(5)[None], None, torch.float64)
    assert set(positions.masks) == {2, None} and positions.masks[None] is None
    assert (positions.masks[2] == 0).sum() == 9


def test_a_window_as_long_as_the_sequence_needs_no_mask():
    assert visible_keys(4, 4, None, "cpu") is None
    assert visible_keys(5, 4, None, "cpu").sum() == 14


def test_every_query_sees_itself():
    doc_ids = torch.tensor([[0, 1, 2, 2]])
    mask = visible_keys(4, 1, doc_ids, "cpu")
    assert mask.diagonal(dim1=-2, dim2=-1).all() and mask.sum() == 4


def test_swiglu_equals_its_formula():
    layer, x = filled(SwiGLU(6, 10)), torch.randn(4, 6)
    gate = x @ layer.gate_proj.weight.T
    wanted = (gate / (1 + torch.exp(-gate)) * (x @ layer.up_proj.weight.T)) @ (
        layer.down_proj.weight.T
    )
    assert_same({"y": layer(x)}, {"y": wanted}, tolerance=1e-14)


def test_a_float32_weight_follows_a_bf16_input():
    layer = filled(Linear(4, 3).float())
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    out = layer(x)
    assert out.dtype is torch.bfloat16 and layer.weight.dtype is torch.float32
    assert torch.equal(out, F.linear(x, layer.weight.bfloat16()))
    out.sum().backward()
    assert layer.weight.grad.dtype is torch.float32
