"""Text to tokens to batches.

sources finds and reads documents, splits decides which are held out, tokenizer turns them into
ids, prepare writes them to disk once, token_file reads them back, loader makes batches.
Only loader imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from curry_train.config import DataConfig
    from curry_train.data.token_file import Corpus

DATASETS = {
    "embedded": "curry_train.data.sources:embedded",
    "python_stdlib": "curry_train.data.sources:python_stdlib",
}
"""data.dataset -> the function that finds its text."""


class DataError(Exception):
    """Data that cannot be used; the message is one line for the user. Callers exit with 2."""


def open_corpus(data: DataConfig, *, cache_dir: Path | None) -> Corpus:
    """Open the tokens that `data` names, preparing them first where they are not yet on disk.

    Text is prepared into `cache_dir/<key>`, the key a hash of the text and the settings. Any number
    of processes may call this at once: one prepares, the others wait. With `cache_dir` None nothing
    outside the system's temporary folder is written, and that is removed at exit.
    A prepared folder keeps the split it was made with; data.val_fraction does not apply to it.

    Raises: DataError.
    """
    from curry_train.data import prepare, token_file

    if data.input is not None and token_file.is_corpus(Path(data.input)):
        corpus = token_file.read_corpus(Path(data.input))
        token_file.check_tokenizer(corpus, data)
    else:
        corpus = token_file.read_corpus(prepare.prepare_configured(data, cache_dir=cache_dir))
    token_file.check_windows(corpus.train, data.seq_len, "training")
    token_file.check_windows(corpus.val, data.seq_len, "validation")
    return corpus


def vocab_size_of(data: DataConfig) -> int | None:
    """Ids of the tokenizer that `data` names, before there is one; None when that is unknown."""
    from curry_train.data import token_file, tokenizer

    try:
        if data.input is not None and token_file.is_corpus(Path(data.input)):
            return token_file.read_manifest(Path(data.input))["tokenizer"]["vocab_size"]
        if data.tokenizer not in ("auto", "byte", "bpe"):
            return tokenizer.load_tokenizer(Path(data.tokenizer)).vocab_size
    except (DataError, KeyError, TypeError):
        return None
    return data.bpe_vocab_size if data.tokenizer == "bpe" else tokenizer.BYTE_VOCAB_SIZE
