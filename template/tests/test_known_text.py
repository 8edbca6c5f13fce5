"""The loss of a known text tells right weights from mixed-up ones, and untrained from both."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
import torch.nn.functional as F

from curry_train.checkpoint import CheckpointError, dcp, huggingface, known_text
from curry_train.checkpoint.known_text import (
    check_weights,
    documents,
    judge,
    main,
    measure,
    tokenizer_of,
)
from curry_train.config import Config, ModelConfig, to_dict
from curry_train.data.tokenizer import ByteTokenizer, train_bpe
from curry_train.models.protocol import build_model, named_state
from curry_train.parallel.mesh import Mesh

MODEL = ModelConfig(
    vocab_size=512, hidden_size=64, intermediate_size=160, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
STEPS, PART = 160, 1536


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(documents(), MODEL.vocab_size)


@pytest.fixture(scope="module")
def trained(tokenizer):
    """A small dense model that has learned something of the embedded text."""
    torch.manual_seed(0)
    model = build_model(Config(model=MODEL), "cpu")
    texts = list(documents())
    ids = torch.tensor([i for text in texts for i in [*tokenizer.encode(text), tokenizer.eos_id]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        rows = [ids[at : at + 129] for at in torch.randint(0, len(ids) - 129, (8,)).tolist()]
        batch = torch.stack(rows)
        logits = model(batch[:, :-1]).logits[..., : MODEL.vocab_size]
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture
def tensors(trained):
    """The model's tensors by name; whatever a test does to them is undone."""
    found = dict(named_state(trained))
    kept = {name: tensor.clone() for name, tensor in found.items()}
    yield found
    for name, tensor in found.items():
        tensor.copy_(kept[name])


class Permuted:
    """The tokenizer of a model with the same vocabulary in another order."""

    def __init__(self, tokenizer):
        self.tokenizer, self.eos_id = tokenizer, tokenizer.eos_id
        self.order = list(range(tokenizer.vocab_size))
        random.Random(0).shuffle(self.order)
        self.back = {there: here for here, there in enumerate(self.order)}

    def encode(self, text):
        return [self.order[i] for i in self.tokenizer.encode(text)]

    def decode(self, ids):
        return self.tokenizer.decode(self.back[i] for i in ids)


def test_right_weights_pass_and_the_numbers_are_those_of_the_text(trained, tokenizer):
    before = {name: tensor.clone() for name, tensor in named_state(trained)}
    found = measure(trained, tokenizer)
    assert found.verdict == "pass" and found.loss < 0.8 * found.unigram, found
    assert found.tokens == known_text.TOKENS and found.uniform == math.log(512)
    text, ids = "", [tokenizer.eos_id]
    for document in documents():
        text += document
        ids += [*tokenizer.encode(document), tokenizer.eos_id]
        if len(ids) > 9000:
            break
    ids = torch.tensor(ids[:4097])
    counts = ids[1:].bincount().double()
    shares = counts[counts > 0] / 4096
    assert found.unigram == pytest.approx(-(shares * shares.log()).sum().item(), rel=1e-9)
    with torch.no_grad():
        losses = [
            F.cross_entropy(
                trained(ids[None, at : at + 512]).logits[0, :, :512], ids[at + 1 : at + 513]
            ).item()
            for at in range(0, 4096, 512)
        ]
    assert found.loss == pytest.approx(sum(losses) / 8, rel=1e-5)
    read = len(tokenizer.decode(ids[1:].tolist()).encode())
    assert found.bpb == pytest.approx(found.loss * 4096 / read / math.log(2), rel=0.01)
    after = dict(named_state(trained))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert trained.training, "the mode is put back"


def test_another_order_of_the_same_vocabulary_fails(trained, tokenizer):
    found = measure(trained, Permuted(tokenizer), tokens=PART)
    assert found.verdict == "fail" and "another tokenizer" in found.reason
    assert found.loss > found.unigram


def test_a_vocabulary_that_is_too_large_is_refused(trained, tokenizer):
    larger = Permuted(tokenizer)
    larger.order = [i + 300 for i in larger.order]
    larger.back = {there: here for here, there in enumerate(larger.order)}
    with pytest.raises(
        CheckpointError, match="the model knows 512: it is the tokenizer of another"
    ):
        measure(trained, larger)


def test_exchanged_gate_and_up_are_named(trained, tokenizer, tensors):
    right = measure(trained, tokenizer, tokens=PART).loss
    for name, gate in tensors.items():
        if ".gate_proj." in name:
            up = tensors[name.replace(".gate_proj.", ".up_proj.")]
            kept = gate.clone()
            gate.copy_(up)
            up.copy_(kept)
    found = measure(trained, tokenizer, tokens=PART)
    assert found.verdict == "fail" and "gate_proj and up_proj exchanged" in found.reason
    assert found.loss > right and f"falls to {right:.3f}" in found.reason


def test_a_norm_that_was_dropped_is_named(trained, tokenizer, tensors):
    right = measure(trained, tokenizer, tokens=PART).loss
    tensors["model.norm.weight"].fill_(1.0)
    found = measure(trained, tokenizer, tokens=PART)
    assert found.verdict == "unclear" and found.loss > right + 0.03
    assert "model.norm.weight holds one value only (1 such norms)" in found.reason


@pytest.mark.parametrize("fault", ["shifted", "negated", "nan"])
def test_weights_that_were_mixed_up_fail(fault, trained, tokenizer, tensors):
    head = tensors["lm_head.weight"]
    if fault == "shifted":
        head.copy_(head.roll(1, 0))
    elif fault == "negated":
        head.neg_()
    else:
        head[3, 3] = math.nan
    found = measure(trained, tokenizer, tokens=PART)
    assert found.verdict == "fail", found


@pytest.mark.parametrize("vocab_size", [257, 512])
def test_random_weights_are_called_untrained(vocab_size):
    settings = ModelConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=32, head_dim=8, num_experts=4
    )
    model = build_model(Config(model=settings), "cpu")
    found = measure(model, ByteTokenizer(), tokens=1024)
    assert found.verdict == "unclear" and "look untrained" in found.reason
    assert found.tokens == 1024


def test_verdicts_at_their_limits():
    known = {"uniform": 10.0, "unigram": 6.0, "entropy": 3.0}
    assert [judge(x, **known)[0] for x in (3.0, 5.6, 5.8, 6.1, 10.0, math.nan, math.inf)] == [
        "pass", "pass", "unclear", "fail", "fail", "fail", "fail",
    ]  # fmt: skip
    # sharp predictions at ln(vocabulary) are wrong ones, flat ones are those of random weights
    assert judge(10.0, uniform=10.0, unigram=6.0, entropy=9.9)[0] == "unclear"
    assert judge(10.9, uniform=10.0, unigram=6.0, entropy=9.2)[0] == "unclear"
    assert judge(12.0, uniform=10.0, unigram=6.0, entropy=9.2)[0] == "fail"


@pytest.fixture(scope="module")
def checkpoint(trained, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("known")
    tokenizer.save(folder / "tokenizer.json")
    meta = {"samples_consumed": 0, "tokens": 0, "data_hash": "", "config_hash": "", "mesh": {}}
    meta |= {"seq_len": 512, "seed": 0, "model": to_dict(Config(model=MODEL))["model"]}
    meta["loss_scale"] = [1.0, 0]
    return dcp.save(
        folder / "checkpoints",
        step=0,
        tensors=dict(named_state(trained)),
        rank_tensors={},
        meta=meta,
        files={"tokenizer.json": (folder / "tokenizer.json").read_bytes()},
        mesh=Mesh.single(),
        keep=0,
    )


def test_a_checkpoint_is_measured_by_the_command(checkpoint, tmp_path, capsys):
    assert main([str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("pass: loss ") and "4096 tokens" in out
    assert main([str(checkpoint.parents[1]), "--json", "--tokens=600"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "pass" and found["tokens"] == 600
    (tmp_path / "own.txt").write_text("gq zvx kwj " * 400)
    assert main([str(checkpoint), "--text", str(tmp_path / "own.txt"), "--tokens=600"]) == 1
    assert capsys.readouterr().out.startswith("fail: loss ")


def test_what_cannot_be_measured_is_told(checkpoint, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("A few words.")
    calls = (
        ([str(checkpoint), "--tokens=5"], "--tokens 5: it takes at least 512"),
        ([str(checkpoint), "--text", str(tmp_path / "short.txt")], "give a longer one"),
        ([str(checkpoint), "--text", str(tmp_path / "none.txt")], "does not exist"),
        ([str(tmp_path)], "holds no complete checkpoint"),
    )
    for words, message in calls:
        assert main(words) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        tokenizer_of(tmp_path)


def test_a_folder_of_hugging_face_is_measured_as_its_checkpoint_is(checkpoint, tmp_path, capsys):
    folder = huggingface.export(checkpoint, tmp_path / "published")
    assert check_weights(folder) == check_weights(checkpoint)
    (folder / "tokenizer.json").unlink()
    assert main([str(folder)]) == 2 and "has no tokenizer.json" in capsys.readouterr().err


def test_more_than_the_memory_is_refused_before_anything_is_read(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(known_text.Path, "read_text", lambda *_, **__: "MemAvailable: 12 kB")
    with pytest.raises(CheckpointError, match="as fp32, 0.0 GB are free"):
        known_text._check_memory(checkpoint, 20_000)


def test_a_large_model_reads_fewer_tokens(checkpoint, monkeypatch):
    monkeypatch.setattr(known_text, "FLOPS", 1e6)
    assert check_weights(checkpoint).tokens == known_text.LEAST_TOKENS
