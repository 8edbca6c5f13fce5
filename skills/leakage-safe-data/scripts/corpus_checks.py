"""Judges a project's own data: its prepared corpus or samples, and the order that it is read in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from severities import THRESHOLDS, Finding, percent
from text_checks import describe, judge
from text_documents import BATCH_CHARACTERS, BATCH_DOCUMENTS, Document
from text_overlap import HeldOut, compare, hold_out

from kit.batches import tensors
from kit.target import Target

SAMPLES_READ = 20_000
RESUMED_SAMPLES = 256


def check_corpus(
    corpus: Any, config: Any, told: Callable[[int, int, str], None]
) -> tuple[list[Finding], list[HeldOut], dict[str, Any], list[str]]:
    """Compare the two splits of a prepared corpus and look at how documents are packed."""
    held = hold_out("val", documents(corpus.val, corpus.tokenizer, "val"))
    total, seen = max(int(corpus.train.bytes), 1), [0]

    def heard(characters: int) -> None:
        seen[0] += characters
        told(min(seen[0], total), total, "bytes of training text")

    overlap = compare(_batches(corpus), [held], heard)
    findings = judge([held], overlap)
    crossing, across = packing(corpus.train, config.data.seq_len)
    broken = [name for name in ("train", "val") if not _whole(getattr(corpus, name))]
    masked = config.data.document_mask
    message = "no document is cut by the split"
    if broken:
        message = f"{' and '.join(broken)}: a document is cut where the split ends or begins"
    message += f"; {percent(crossing)} of windows hold several"
    if not masked:
        message += f", {percent(across)} of attended pairs are of two (data.document_mask off)"
    findings.append(
        Finding(
            "leak-packed-documents",
            "fail" if broken else "pass",
            message,
            value=float(len(broken)),
        )
    )
    numbers = describe([held], overlap)
    numbers["packing"] = {
        "windows_of_several_documents": crossing,
        "attended_pairs_across_documents": 0.0 if masked else across,
        "document_mask": masked,
    }
    return findings, [held], numbers, _pieces_note(corpus)


def documents(stream: Any, tokenizer: Any, name: str) -> Iterator[Document]:
    """Decode the documents of a stream of tokens, one after the other."""
    begin = 1
    for number, end in enumerate(np.asarray(stream.document_ends).tolist()):
        text = tokenizer.decode(stream.window(begin, end - begin).tolist())
        begin = end + 1
        if text.strip():
            yield Document(text, f"{name} document {number}")


def _batches(corpus: Any) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents(corpus.train, corpus.tokenizer, "train"):
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def packing(stream: Any, seq_len: int) -> tuple[float, float]:
    """Say what share of windows holds several documents, and of causal pairs is across documents.

    A window of S inputs begins at each multiple of S; an eos begins the document behind it.
    """
    windows = stream.tokens // seq_len
    if not windows:
        return 0.0, 0.0
    used = windows * seq_len
    ends = np.asarray(stream.document_ends)
    starts = np.unique(np.concatenate([np.arange(0, used, seq_len), ends[ends < used]]))
    lengths = np.diff(starts, append=used).astype(np.float64)
    own = float((lengths * (lengths + 1) / 2).sum())
    several = float((np.bincount(starts // seq_len, minlength=windows) > 1).mean())
    return several, 1 - own / (windows * seq_len * (seq_len + 1) / 2)


def _whole(stream: Any) -> bool:
    """Tell whether an eos stands in front, at every document's end and at the stream's."""
    ends = np.asarray(stream.document_ends)
    if not len(ends) or int(ends[-1]) != stream.tokens:
        return False
    places = [0, *ends[:: max(1, len(ends) // 1000)].tolist(), stream.tokens]
    return all(int(stream.window(place, 1)[0]) == stream.eos_id for place in places)


def _pieces_note(corpus: Any) -> list[str]:
    """Say when pieces of one text file are on both sides, which is how few files are split."""
    few = [
        source["name"]
        for source in corpus.manifest.get("sources", [])
        if str(source.get("name", "")).endswith(".txt") and source.get("files", 0) == 1
    ]
    if not few:
        return []
    return [f"pieces of one file are in both splits: {', '.join(few[:3])} (val is no new book)"]


def check_order(target: Target) -> Finding:
    """Judge a project's loader: each sample once an epoch, the same again, also in the middle."""
    loader = target.batches
    size = getattr(loader, "samples_per_epoch", None)
    step = getattr(loader, "global_batch_size", None)
    if not size or not step or not hasattr(loader, "samples_consumed"):
        return Finding("leak-order", "skipped", "the loader has no position to read")
    count = int(min(SAMPLES_READ, size))
    whole = count == size
    seen = _read(loader, 0, count + min(size, RESUMED_SAMPLES))
    middle = (count // 2) // step * step
    again = _read(loader, middle, min(RESUMED_SAMPLES, count - middle))
    differing = sum(a != b for a, b in zip(seen[middle:], again, strict=False))
    first, later = seen[:count], seen[count:]
    repeats = count - len(set(first))
    copies = 0
    if repeats:  # equal windows of the data itself are no fault of the order
        copies = _equal_windows(target.runtime, size) if whole else repeats
    problems = max(0, repeats - copies) + differing
    at_border = len(set(first[-step:]) & set(later[:step])) if whole and later else 0
    message = f"{count} of {size} samples of an epoch read, each once"
    if repeats > copies:
        message = f"{repeats - copies} samples come twice in {count} of an epoch of {size}"
    message += "; the same order again from the middle" if not differing else ""
    if differing:
        message += f"; {differing} samples differ when the position is set again"
    if whole and later and size > 16 and later[: step * 4] == first[: min(len(later), step * 4)]:
        message += "; every epoch has the same order"
    epochs = target.runtime.config.run.max_steps * step / size
    message += f"; run.max_steps makes {epochs:.3g} epochs"
    if at_border:
        message += f", {at_border} samples come twice within a step at their border"
    fails = problems > THRESHOLDS["leak-order"]
    return Finding("leak-order", "fail" if fails else "pass", message, value=float(problems))


def _read(loader: Any, position: int, count: int) -> list[bytes]:
    """Hash samples from a position on, in the order in which they come."""
    loader.samples_consumed = position
    found: list[bytes] = []
    while len(found) < count:
        for batch in loader.next_step():
            found += hashes_of(batch)
    return found[:count]


def hashes_of(batch: Any) -> list[bytes]:
    """Hash each sample of a batch over all its tensors whose first dim counts samples."""
    arrays = [tensor.detach().cpu().numpy() for tensor in tensors(batch) if tensor.dim()]
    if not arrays:
        return []
    count = len(arrays[0])
    digests = [hashlib.blake2b(digest_size=8) for _ in range(count)]
    for array in arrays:
        if len(array) == count:
            for digest, row in zip(digests, array, strict=True):
                digest.update(np.ascontiguousarray(row).tobytes())
    return [digest.digest() for digest in digests]


def _equal_windows(runtime: Any, size: int) -> int:
    """Count the windows or samples of the training split that equal an earlier one."""
    corpus, length = runtime.corpus, runtime.config.data.seq_len
    if isinstance(corpus.train, dict):
        arrays = list(corpus.train.values())
        keys = {b"".join(np.ascontiguousarray(a[i]).tobytes() for a in arrays) for i in range(size)}
    else:
        keys = {corpus.train.window(i * length, length + 1).tobytes() for i in range(size)}
    return size - len(keys)
