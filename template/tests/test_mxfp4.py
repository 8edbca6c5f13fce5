"""MXFP4 is decoded as published, against an independent formula and against transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import problems_of
from weight_folders import edit_config, save

from curry_train.checkpoint import dcp, huggingface, mxfp4, weight_files
from curry_train.checkpoint.families import read_model
from curry_train.config import Config
from curry_train.models.protocol import build_model, named_state
from curry_train.parallel.shards import Part


def reference(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Decode by the definition: sign, two bits of exponent (bias 1), one of fraction; float64."""
    *sizes, groups, half = blocks.shape
    out = np.zeros((*sizes, groups, 2 * half))
    for place in itertools.product(*map(range, blocks.shape)):
        byte, scale = int(blocks[place]), int(scales[place[:-1]])
        for at, nibble in enumerate((byte % 16, byte // 16)):
            sign, exponent, fraction = nibble >> 3, (nibble >> 1) & 3, nibble & 1
            size = fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
            out[(*place[:-1], 2 * place[-1] + at)] = (-1) ** sign * size * 2.0 ** (scale - 127)
    return out.reshape(*sizes, -1)


def random_blocks(
    *sizes: int, low: int = 120, high: int = 132
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8)
    return blocks, torch.randint(low, high, sizes, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_byte_and_scale_is_exact(dtype):
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    scales = torch.tensor([[0, 1, 2, 60, 100, 126, 127, 128, 140, 200, 250, 251, 252, 120, 3, 9]])
    found = mxfp4.decode(blocks, scales.to(torch.uint8), dtype)
    assert found.shape == (1, 512) and found.dtype == dtype
    wanted = reference(blocks, scales)
    assert (found.double().numpy() == wanted).all()
    assert np.signbit(found.double().numpy()).tolist() == np.signbit(wanted).tolist()


def test_a_scale_that_is_no_number_gives_none():
    blocks, scales = random_blocks(2, 1, low=255, high=256)
    assert mxfp4.decode(blocks, scales).isnan().all()


def test_transformers_decodes_the_same():
    theirs = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks, scales = random_blocks(3, 6, 2)
    for dtype in (torch.bfloat16, torch.float32):
        wanted = theirs(blocks, scales, dtype=dtype).transpose(1, 2)
        assert torch.equal(mxfp4.decode(blocks, scales, dtype), wanted)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Return a tiny gpt-oss as its authors publish theirs: experts packed, the rest bfloat16."""
    folder = save("GptOss", tmp_path_factory.mktemp("mxfp4") / "hf", dtype=torch.bfloat16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(key).shape
        tensors |= dict(
            zip(
                (f"{key}_blocks", f"{key}_scales"),
                random_blocks(experts, outputs, inputs // 32, low=122, high=126),
                strict=True,
            )
        )
    save_file(tensors, file, {"format": "pt"})
    edit_config(folder, lambda raw: raw.update(quantization_config={"quant_method": "mxfp4"}))
    return folder


def whole(folder: Path, precision: str = "fp32") -> Any:
    model = build_model(Config(model=read_model(folder)[0], precision=precision), "cpu")
    huggingface.load(folder, dict(named_state(model)), model.config)
    return model


def test_packed_experts_are_read_into_our_layout(packed):
    tensors = load_file(packed / "model.safetensors")
    state = dict(named_state(whole(packed)))
    for layer in range(2):
        bank = f"model.layers.{layer}.mlp.experts"
        of = [
            reference(tensors[f"{bank}.{key}_blocks"], tensors[f"{bank}.{key}_scales"])
            for key in ("gate_up_proj", "down_proj")
        ]
        wanted = {"gate_proj": of[0][:, 0::2], "up_proj": of[0][:, 1::2], "down_proj": of[1]}
        for name, values in wanted.items():
            assert (state[f"{bank}.{name}.weight"].double().numpy() == values).all(), name


@pytest.mark.parametrize("fault", ["nibbles", "rows in halves"])
def test_a_fault_of_the_decoder_shows(packed, fault, monkeypatch):
    if fault == "nibbles":
        plain = weight_files.decode
        monkeypatch.setattr(
            weight_files, "decode", lambda b, s, dtype: plain((b >> 4) | (b << 4), s, dtype)
        )
    else:
        plain_sources = weight_files.sources
        monkeypatch.setattr(
            weight_files, "sources",
            lambda *of: [s._replace(half=s.half and 1 - s.half) for s in plain_sources(*of)],
        )  # fmt: skip
    with pytest.raises(AssertionError, match="proj"):
        test_packed_experts_are_read_into_our_layout(packed)


def test_logits_equal_those_of_transformers_after_its_own_decoding(packed, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from hugging_face import compute_in_float64

    model = whole(packed, "fp64")
    ids = torch.randint(0, 99, (2, 16))
    with monkeypatch.context() as patched, torch.no_grad():
        compute_in_float64(patched, model.config)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            packed, dtype=torch.float64, attn_implementation="eager",
            experts_implementation="eager",
            quantization_config=transformers.Mxfp4Config(dequantize=True),
        )  # fmt: skip
        gap = (model(ids).logits[..., :99] - theirs(ids).logits).abs().max()
    assert gap < 1e-9


def test_any_box_of_packed_experts_is_that_of_the_whole(packed):
    model = read_model(packed)[0]
    state = dict(named_state(whole(packed)))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found, _ = weight_files.plan(packed, model, shapes)
    for name, tensor in state.items():
        if ".experts." in name and name.endswith("weight"):
            for box in ((1, 3, 5, 9, 2, 17), (0, 4, 0, 32, 31, 32), (2, 2, 0, 1, 0, 1)):
                index = tuple(slice(*box[at : at + 2]) for at in (0, 2, 4))
                wanted = tensor[index]
                part = Part(torch.full(wanted.shape, torch.nan), shapes[name], box[0::2])
                weight_files.read(packed, {name: part}, found)
                assert torch.equal(part.tensor, wanted), (name, box)


def test_an_import_of_packed_experts_is_exported_in_bfloat16(packed, tmp_path):
    transformers = pytest.importorskip("transformers")
    checkpoint = huggingface.import_weights(packed, tmp_path / "in")
    assert dcp.read_manifest(checkpoint)["weights_dtype"] == "bfloat16"
    assert huggingface.verify(packed, checkpoint) == []
    out = huggingface.export(checkpoint, tmp_path / "out")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert huggingface.verify(out, checkpoint) == []
    _, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize(
    ("key", "new", "words"),
    [
        ("down_proj_scales", None, "missing in the files: model.layers.0.mlp.experts.down_proj_sc"),
        ("down_proj_blocks", torch.zeros(4, 32, 1, 15, dtype=torch.uint8), "(file [4, 32, 1, 15]"),
        ("down_proj_scales", torch.zeros(4, 32, 1), "down_proj_scales (F32)"),
        ("down_proj_blocks", None, "unknown to this model: model.layers.0.mlp.experts.down_proj_s"),
    ],
)
def test_packed_experts_that_do_not_fit_are_refused(packed, key, new, words):
    model, file = read_model(packed)[0], packed / "model.safetensors"
    content, name = file.read_bytes(), f"model.layers.0.mlp.experts.{key}"
    try:
        tensors = {**load_file(file), name: new}
        save_file({k: t for k, t in tensors.items() if t is not None}, file)
        state = dict(named_state(build_model(Config(model=model), "cpu")))
        assert words in problems_of(huggingface.load, packed, state, model)
    finally:
        file.write_bytes(content)
