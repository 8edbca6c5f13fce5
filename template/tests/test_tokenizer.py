"""Text to ids and back: exact for what was encoded, harmless for any integers."""

import json
import random

import pytest

from curry_train.data import DataError
from curry_train.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    LibraryTokenizer,
    load_tokenizer,
    train_bpe,
)

TEXTS = [
    "",
    "plain",
    "a\r\nb\tc  d\n\n",
    "na\u00efve \u2014 \u4f60\u597d \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301",
    f"a document that spells {END_OF_TEXT} out",
    "\x00\x01\x7f\u0080\ufffd\ufeff\u2028",
    " " * 50 + "deep" + "\n" * 7,
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(["the cat sat on the mat, the end\n"] * 20, 300)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_round_trips_exactly(bpe, text):
    for coder in (ByteTokenizer(), bpe):
        ids = coder.encode(text)
        assert coder.decode(ids) == text
        assert coder.eos_id not in ids
        assert all(0 <= i < coder.vocab_size for i in ids)
        assert [list(x) for x in coder.encode_batch([text, "z"])] == [ids, coder.encode("z")]


def test_any_integers_decode_without_an_error(bpe):
    draw = random.Random(0)
    for coder in (ByteTokenizer(), bpe):
        for _ in range(200):
            ids = [draw.randrange(-5, 2 * coder.vocab_size) for _ in range(30)] + [2**40]
            assert isinstance(coder.decode(ids), str)
        assert coder.decode([coder.eos_id]) == ""
        assert "\ufffd" in coder.decode(coder.encode("\u20ac")[:1])


def test_a_lone_surrogate_encodes_as_a_question_mark(bpe):
    for coder in (ByteTokenizer(), bpe):
        assert coder.decode(coder.encode("a\ud800b")) == "a?b"


def test_byte_ids_are_bytes_and_256_ends_a_document():
    coder = ByteTokenizer()
    assert coder.encode("a\u00e9") == [97, 0xC3, 0xA9]
    assert (coder.vocab_size, coder.eos_id) == (257, 256)


def test_bpe_training_repeats_and_merges(bpe):
    again = train_bpe(["the cat sat on the mat, the end\n"] * 20, 300)
    assert again.sha256 == bpe.sha256
    assert 257 < bpe.vocab_size <= 300
    assert len(bpe.encode("the cat")) < len("the cat")
    assert train_bpe(["abc"], 257).vocab_size == 257
    with pytest.raises(DataError, match="bpe_vocab_size=256.*257 or more"):
        train_bpe(["abc"], 256)


def test_saved_tokenizers_are_json_and_load_equal(tmp_path, bpe):
    for number, coder in enumerate((ByteTokenizer(), bpe)):
        path = tmp_path / str(number) / "tokenizer.json"
        path.parent.mkdir()
        coder.save(path)
        for file in path.parent.iterdir():
            json.loads(file.read_text(encoding="utf-8"))
        loaded = load_tokenizer(path)
        assert (loaded.sha256, loaded.eos_id, loaded.vocab_size) == (
            coder.sha256, coder.eos_id, coder.vocab_size,
        )  # fmt: skip
        assert loaded.encode(TEXTS[3]) == coder.encode(TEXTS[3])


def _foreign(tmp_path, eos="</s>", config=None):
    """A tokenizer.json as another project would bring it: BOS, truncation and padding on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "<pad>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    library.train_from_iterator(["some words to learn from"] * 5, trainer=trainer)
    library.add_special_tokens([eos])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    library.enable_truncation(4)
    library.enable_padding(length=16, pad_token="<pad>")
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_foreign_tokenizer_adds_cuts_and_pads_nothing(tmp_path):
    path = _foreign(tmp_path)
    coder = load_tokenizer(path)
    text = "some words to learn from, and more of them"
    assert coder.decode(coder.encode(text)) == text
    assert coder.encode_batch([text, "a"])[1] == coder.encode("a")
    assert len(coder.encode("a")) == 1
    assert coder.eos_id == coder.vocab_size - 1


@pytest.mark.parametrize("named", ["[STOP]", {"content": "[STOP]"}])
def test_tokenizer_config_names_the_end_and_saving_keeps_it(tmp_path, named):
    coder = load_tokenizer(_foreign(tmp_path, eos="[STOP]", config={"eos_token": named}))
    assert coder.eos_id == coder.vocab_size - 1
    (tmp_path / "copy").mkdir()
    coder.save(tmp_path / "copy" / "tokenizer.json")
    copy = load_tokenizer(tmp_path / "copy" / "tokenizer.json")
    assert (copy.eos_id, copy.sha256) == (coder.eos_id, coder.sha256)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    with pytest.raises(DataError, match="no end-of-document token.*tokenizer_config.json"):
        load_tokenizer(_foreign(tmp_path, eos="[STOP]"))
    with pytest.raises(DataError, match=r"no token '\[HALT\]'"):
        load_tokenizer(_foreign(tmp_path, eos="[STOP]", config={"eos_token": "[HALT]"}))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist.*byte, bpe or the path"),
        (b"\xff\xfe", "cannot be read"),
        (b"{torn", "cannot be read"),
        (b"[1]", "holds no JSON object"),
        (b"{}", "is no tokenizer.json"),
        (b'{"model": {"type": "BPE"}}', "is no tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_gives_one_line(tmp_path, content, says):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_tokenizer(tmp_path):
    with pytest.raises(DataError, match="is a folder; name the tokenizer.json in it"):
        load_tokenizer(tmp_path)


def test_the_library_tokenizer_keeps_its_text_verbatim(tmp_path):
    path = _foreign(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert LibraryTokenizer(text).text == text
    (tmp_path / "copy").mkdir()
    load_tokenizer(path).save(tmp_path / "copy" / "tokenizer.json")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == path.read_bytes()
