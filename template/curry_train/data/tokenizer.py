"""Text to ids and back.

Two kinds with one interface (vocab_size, eos_id, sha256, encode, encode_batch, decode, save):
bytes, which need no file and no dependency, and a tokenizer.json of the `tokenizers` library,
trained here or brought along. Both are saved as JSON, and the sha256 of that JSON is what a corpus
remembers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curry_train.data import DataError

BYTE_VOCAB_SIZE = 257
END_OF_TEXT = "<|endoftext|>"
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Where tokenizer_config.json names no eos_token, the first of these that the vocabulary holds."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    vocab_size = BYTE_VOCAB_SIZE
    eos_id = 256

    def __init__(self) -> None:
        self.text = json.dumps(
            {"type": "byte", "vocab_size": self.vocab_size, "eos_id": self.eos_id}, sort_keys=True
        )
        self.sha256 = _sha256(self.text)

    def encode(self, text: str) -> list[int]:
        """Turn text into its UTF-8 bytes; a lone surrogate, which has none, becomes `?`."""
        return list(text.encode("utf-8", errors="replace"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts at once, each to uint8."""
        return [np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn any integers into text; those outside 0..255 vanish, broken UTF-8 is replaced."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        Path(path).write_text(self.text, encoding="utf-8")


class LibraryTokenizer:
    """A tokenizer.json of the `tokenizers` library, kept as the very text it came as."""

    def __init__(self, text: str, *, eos_token: str | None = None, name: str = "tokenizer") -> None:
        import tokenizers

        self.text = text
        self.sha256 = _sha256(text)
        try:
            self._library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for anything it cannot read
            raise DataError(f"{name} is no tokenizer.json: {_one_line(error)}") from None
        # Text that spells a special token out is text: otherwise a document could end another.
        self._library.encode_special_tokens = True
        self._library.no_truncation()
        self._library.no_padding()
        vocab = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eos_token = _eos_token(vocab, eos_token, name)
        self.eos_id = vocab[self.eos_token]

    def encode(self, text: str) -> list[int]:
        """Turn text into ids, without special tokens."""
        return self._library.encode(_encodable(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts at once to int64, in parallel where the library may."""
        texts = [_encodable(text) for text in texts]
        encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn any integers into text; special and unknown ids vanish."""
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
        return self._library.decode(known, skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write the JSON to `path` and the name of its end-of-document token beside it."""
        path = Path(path)
        path.write_text(self.text, encoding="utf-8", newline="")
        beside = path.with_name("tokenizer_config.json")
        beside.write_text(json.dumps({"eos_token": self.eos_token}), encoding="utf-8")


def library_json() -> str:
    """Return a tokenizer.json of the `tokenizers` library that makes the ids of ByteTokenizer."""
    from tokenizers import pre_tokenizers

    # The library writes every byte as one letter: itself where it prints, else the next free one.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printed = {ord(letter): letter for letter in letters if ord(letter) < 256}
    free = iter(letter for letter in letters if ord(letter) >= 256)
    vocab = {printed.get(byte) or next(free): byte for byte in range(256)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = {"id": len(vocab), "content": END_OF_TEXT, "special": True, **flags}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    model = {"type": "BPE", "vocab": vocab | {END_OF_TEXT: len(vocab)}, "merges": []}
    parts = {"added_tokens": [end], "pre_tokenizer": level, "decoder": level, "model": model}
    return json.dumps({"version": "1.0", **parts})


Tokenizer = ByteTokenizer | LibraryTokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, ours or the library's; a tokenizer_config.json beside it names eos.

    Raises: DataError when the file is missing, no tokenizer, or has no end-of-document token.
    """
    path = Path(path)
    text, content = _read_json(path)
    if content.get("type") == "byte":
        return ByteTokenizer()
    eos = None
    beside = path.with_name("tokenizer_config.json")
    if beside.is_file():
        eos = _read_json(beside)[1].get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
    return LibraryTokenizer(text, eos_token=eos, name=str(path))


def train_bpe(texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
    """Train a byte-level BPE; every text round-trips exactly, whatever it was trained on.

    The vocabulary holds the 256 bytes, the end-of-document token, and as many merges as fit (fewer
    when the text offers fewer).
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < BYTE_VOCAB_SIZE:
        raise DataError(
            f"bpe_vocab_size={vocab_size}: a byte-level BPE needs 256 bytes and one "
            f"end-of-document token; set it to {BYTE_VOCAB_SIZE} or more"
        )
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer=trainer)
    return LibraryTokenizer(library.to_str(), eos_token=END_OF_TEXT)


def _read_json(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_bytes().decode("utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        raise DataError(
            f"tokenizer {path} does not exist; data.tokenizer is auto, byte, bpe or the path of a "
            "tokenizer.json"
        ) from None
    except IsADirectoryError:
        raise DataError(
            f"tokenizer {path} is a folder; name the tokenizer.json in it, {path}/tokenizer.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"tokenizer {path} cannot be read: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise DataError(f"tokenizer {path} holds no JSON object")
    return text, content


def _eos_token(vocab: dict[str, int], wanted: str | None, name: str) -> str:
    for token in (wanted,) if wanted else EOS_NAMES:
        if token in vocab:
            return token
    if wanted:
        raise DataError(f"{name} has no token {wanted!r}, which tokenizer_config.json calls eos")
    raise DataError(
        f"{name} has no end-of-document token ({', '.join(EOS_NAMES)}); name it as eos_token in a "
        "tokenizer_config.json beside it"
    )


def _encodable(text: str) -> str:
    """Replace lone surrogates, which the library refuses."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
