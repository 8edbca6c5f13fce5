"""Each layer equals a plain float64 formula, gradients included."""

import math

import pytest
import torch
import torch.nn.functional as F

from curry_train.config import ModelConfig
from curry_train.layers.attention import Attention, Positions, visible_keys
from curry_train.layers.linear import Linear
from curry_train.layers.mlp import SwiGLU
from curry_train.layers.norm import RMSNorm
from curry_train.layers.rope import rotary_angles, rotate
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
    cos, sin = rotary_angles(positions, 8, 10000.0, torch.float64)
    q, k = torch.randn(8), torch.randn(8)
    turned_q = rotate(q.expand(1, 1, 16, 8), cos, sin)[0, 0]
    turned_k = rotate(k.expand(1, 1, 16, 8), cos, sin)[0, 0]
    assert torch.allclose(turned_q.norm(dim=-1), q.norm(), rtol=1e-14)
    scores = turned_q @ turned_k.T
    for offset in (0, 1, 5):
        diagonal = scores.diagonal(offset)
        assert torch.allclose(diagonal, diagonal[0], rtol=1e-12)


def test_rotation_of_a_late_document_uses_its_positions_not_its_index():
    whole = rotary_angles(torch.arange(10)[None], 4, 100.0, torch.float64)
    late = rotary_angles(torch.arange(6, 10)[None], 4, 100.0, torch.float64)
    assert torch.equal(whole[0][:, :, 6:], late[0]) and torch.equal(whole[1][:, :, 6:], late[1])


def plain_attention(layer, x, positions, mask):
    """Scores, softmax and heads written out; key heads repeated for their query heads."""
    batch, length, _ = x.shape
    split = (batch, length, -1, layer.head_dim)
    q = layer.q_norm(layer.q_proj(x).view(split)).transpose(1, 2)
    k = layer.k_norm(layer.k_proj(x).view(split)).transpose(1, 2)
    v = layer.v_proj(x).view(split).transpose(1, 2)
    q, k = (rotate(part, positions.cos, positions.sin) for part in (q, k))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(layer.head_dim)
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return layer.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_equals_plain_attention_with_gradients(window, documents, qk_norm):
    config = ModelConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        sliding_window=window, qk_norm=qk_norm,
    )  # fmt: skip
    layer = filled(Attention(config))
    x = torch.randn(2, 9, 16, requires_grad=True)
    doc_ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 9]) if documents else None
    positions = Positions(*rotary_angles(torch.arange(9)[None], 4, 1e4, torch.float64), doc_ids)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    if window:
        mask = mask & ~torch.ones(9, 9, dtype=torch.bool).tril(-window)
    mask = mask[None, None]
    if documents:
        mask = mask & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    got, wanted = layer(x, positions), plain_attention(layer, x, positions, mask)
    upstream = torch.randn_like(got)
    inputs = (x, *layer.parameters())
    names = ["x", *(name for name, _ in layer.named_parameters())]
    found = torch.autograd.grad(got, inputs, upstream)
    reference = torch.autograd.grad(wanted, inputs, upstream)
    assert_same({"out": got}, {"out": wanted}, tolerance=1e-13)

    def by_name(grads):
        return dict(zip(names, grads, strict=True))

    assert_same(by_name(found), by_name(reference), tolerance=1e-10)


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
