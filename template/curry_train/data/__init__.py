"""Text to tokens to batches, and other samples to batches.

sources finds and reads documents, splits decides which are held out, tokenizer turns them into
ids, prepare writes them to disk once, token_file reads them back, loader makes batches. What is no
text is two dicts of arrays (samples). Only loader imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curry_train.config import DataConfig
    from curry_train.data.samples import Samples
    from curry_train.data.token_file import Corpus

DATASETS = {
    "embedded": "curry_train.data.sources:embedded",
    "python_stdlib": "curry_train.data.sources:python_stdlib",
}
"""data.dataset -> the function that finds its text, `() -> Source`, or that makes its samples,
`(DataConfig) -> Samples`; which of the two is read from the annotation, before anything runs."""


class DataError(Exception):
    """Data that cannot be used; the message is one line for the user. Callers exit with 2."""


def dataset_function(name: str) -> tuple[Callable[..., Any], str]:
    """Return the function behind data.dataset and what it returns, "Source" or "Samples".

    Raises: DataError when it is unknown, does not load, or its annotation says neither.
    """
    if name not in DATASETS:
        raise DataError(
            f"data.dataset={name} is unknown; set it to {', '.join(DATASETS)}, or data.input to a"
            " text of yours"
        )
    module, _, attribute = DATASETS[name].partition(":")
    try:
        function = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DataError(f"data.dataset={name}: {DATASETS[name]} does not load: {error}") from None
    hint = getattr(function, "__annotations__", {}).get("return")
    kind = getattr(hint, "__name__", str(hint)).rpartition(".")[2]
    if kind not in ("Source", "Samples"):
        raise DataError(
            f"data.dataset={name}: {DATASETS[name]} is annotated to return {kind}; write"
            " `-> Source` of text, `-> Samples` of samples"
        )
    return function, kind


def holds_samples(data: DataConfig) -> bool:
    """Tell whether `data` names samples, not text. Raises: as `dataset_function`."""
    return data.input is None and dataset_function(data.dataset)[1] == "Samples"


def open_corpus(data: DataConfig, *, cache_dir: Path | None) -> Corpus | Samples:
    """Open what `data` names: samples, or tokens, prepared first where they are not yet on disk.

    Text is prepared into `cache_dir/<key>`, the key a hash of the text and the settings. Any number
    of processes may call this at once: one prepares, the others wait. With `cache_dir` None nothing
    outside the system's temporary folder is written, and that is removed at exit.
    A prepared folder keeps the split it was made with; data.val_fraction does not apply to it.

    Raises: DataError.
    """
    from curry_train.data import prepare, token_file

    if holds_samples(data):
        from curry_train.data.samples import Samples

        samples = dataset_function(data.dataset)[0](data)
        if not isinstance(samples, Samples):
            kind = type(samples).__name__
            raise DataError(f"data.dataset={data.dataset} returned {kind}; return Samples")
        return samples
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
        if holds_samples(data):
            return None
        if data.input is not None and token_file.is_corpus(Path(data.input)):
            return token_file.read_manifest(Path(data.input))["tokenizer"]["vocab_size"]
        if data.tokenizer not in ("auto", "byte", "bpe"):
            return tokenizer.load_tokenizer(Path(data.tokenizer)).vocab_size
    except (DataError, KeyError, TypeError):
        return None
    return data.bpe_vocab_size if data.tokenizer == "bpe" else tokenizer.BYTE_VOCAB_SIZE
