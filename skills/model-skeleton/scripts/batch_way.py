"""The way of a batch before the model: document, tokens, window, batch; or arrays, row, batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.batch_tree import leaves
from kit.target import Target

TEXT = 40


def way_of(target: Target, batch: Any) -> list[str]:
    """Return lines that follow the first sample of the batch from the dataset to the model."""
    lines = []
    if target.runtime is not None:
        lines += _text(target) if target.runtime.corpus.tokenizer else _samples(target)
    for path, tensor in leaves(batch):
        kind = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"batch {path}: {list(tensor.shape)} {kind} {tensor.device}{_range(tensor)}")
    return lines


def _range(tensor: Any) -> str:
    if tensor.numel() == 0 or tensor.is_meta or tensor.is_complex():
        return ""
    low, high = tensor.min().item(), tensor.max().item()
    return f", {low:.4g} to {high:.4g}" if tensor.is_floating_point() else f", {low} to {high}"


def _first_row(target: Target, rows: int) -> tuple[int, int]:
    """Return (sample, row) of the sample that the traced batch begins with."""
    import numpy as np

    from curry_train.data.loader import permute

    sample = target.runtime.batches.samples_consumed
    epoch, index = divmod(sample, rows)
    seed = target.runtime.config.seed
    return sample, int(permute(np.array([index]), np.array([epoch]), rows, seed)[0])


def _text(target: Target) -> list[str]:
    runtime = target.runtime
    corpus, data = runtime.corpus, runtime.config.data
    sources = corpus.manifest.get("sources", [])
    source = data.input or f"dataset {data.dataset}"
    stream = corpus.train
    documents = f"{stream.documents} documents, {stream.bytes} bytes"
    files = f" in {len(sources)} sources" if len(sources) > 1 else ""
    kind = corpus.manifest["tokenizer"]["kind"]
    sample, row = _first_row(target, stream.tokens // data.seq_len)
    start = row * data.seq_len
    ids = stream.window(start, data.seq_len + 1)
    shown = corpus.tokenizer.decode(ids[1:].tolist())[:TEXT]
    return [
        f"text: {Path(source).name}{files}, {documents} to train on, {corpus.val.bytes} held out",
        f"tokens: {kind} tokenizer of {corpus.tokenizer.vocab_size} ids, {stream.tokens} in all",
        f"document: number {_document(stream, start)} of them is where the first window begins",
        f"window: sample {sample} is window {row}, ids {start} to {start + data.seq_len}"
        f" {ids[:6].tolist()}..., {shown!r}",
        "shift: input_ids are the window without its last id, labels without its first",
    ]


def _document(stream: Any, start: int) -> int:
    import numpy as np

    return int(np.searchsorted(stream.document_ends, start, side="right"))


def _samples(target: Target) -> list[str]:
    runtime = target.runtime
    samples, name = runtime.corpus, runtime.config.data.dataset
    count, held = len(samples.train["labels"]), len(samples.val["labels"])
    sample, row = _first_row(target, count)
    arrays = ", ".join(
        f"{key} {list(array.shape[1:])} {array.dtype}" for key, array in samples.train.items()
    )
    return [
        f"samples: dataset {name}, {count} to train on, {held} held out",
        f"arrays of one sample: {arrays}",
        f"row: sample {sample} is row {row} of the training arrays",
    ]
