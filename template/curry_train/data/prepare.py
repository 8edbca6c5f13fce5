"""Turn text into a prepared corpus: python -m curry_train.data.prepare INPUT [INPUT ...] --out DIR

Workers turn each part of the input into ids and a table of its documents; then one process drops
duplicates, chooses the split and copies the documents into the corpus. Where a BPE is asked for, it
is trained first. The parts are a function of the input alone, so the result is the same for any
number of workers.
Work happens in the hidden sibling `.DIR.partial`; finished parts stay there when a run is killed
and are kept by the next one. DIR appears by one rename.

A weight is the number of times that each training document of an input appears in one epoch. 2
repeats every document, 0.5 keeps half of them, 1.5 repeats half (which half is decided by document
hash). Validation documents count once whatever the weight. A document that two inputs share belongs
to the first of them.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from curry_train.data import DataError, dataset_function, splits, token_file, tokenizer
from curry_train.data.sources import Part, Source, find_source, plan_parts, read_documents
from curry_train.data.workers import WorkerDied, map_jobs, show_progress

if TYPE_CHECKING:
    from curry_train.config import DataConfig

BPE_TRAINING_CHARACTERS = 64 * 2**20
DOCUMENTS_AT_ONCE = 64
DOCUMENT = np.dtype([("hash", "<u8"), ("ids", "<i8"), ("bytes", "<i8")])
"""What a part's table says of a document: its hash, its ids with the eos, its UTF-8 bytes."""
WAITS = 100
"""Polls of 0.05 s for another process's lock before the user is told why."""


@dataclass(frozen=True)
class Settings:
    """Everything besides the text that decides the result."""

    tokenizer: str = "byte"
    """byte, bpe or the path of a tokenizer.json."""
    bpe_vocab_size: int = 1024
    val_fraction: float = 0.06
    text_key: str = "text"


def prepare_configured(data: DataConfig, *, cache_dir: Path | None) -> Path:
    """Prepare what `data` names below the cache folder, or find it there; see open_corpus."""
    if data.input is not None:
        sources = [find_source(Path(data.input))]
    else:
        sources = [dataset_function(data.dataset)[0]()]
    chosen = "byte" if data.tokenizer == "auto" else data.tokenizer
    settings = Settings(chosen, data.bpe_vocab_size, data.val_fraction)
    name = corpus_key(sources, settings)[:16]
    if cache_dir is None:
        cached = Path(data.cache_dir) / name
        if token_file.is_corpus(cached):
            return cached
        cache_dir = Path(tempfile.mkdtemp(prefix="curry-train-data-"))
        atexit.register(shutil.rmtree, cache_dir, ignore_errors=True)
    out = cache_dir / name
    return out if token_file.is_corpus(out) else prepare(sources, out, settings)


def corpus_key(sources: Sequence[Source], settings: Settings) -> str:
    """Hash the text and the settings: equal keys mean equal corpora."""
    fields = dataclasses.asdict(settings)
    if settings.tokenizer != "bpe":
        del fields["bpe_vocab_size"]
    if settings.tokenizer not in ("byte", "bpe"):
        fields["tokenizer"] = tokenizer.load_tokenizer(Path(settings.tokenizer)).sha256
    described = [(source.sha256, source.weight) for source in sources]
    text = json.dumps([token_file.FORMAT, fields, described], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def prepare(
    sources: Sequence[Source],
    out: Path,
    settings: Settings,
    *,
    workers: int | None = None,
    quiet: bool = True,
) -> Path:
    """Write the corpus to `out`, unless it is there already; return `out`.

    Any number of processes may call this at once: one works, the others wait.
    Raises: DataError.
    """
    if not 0 < settings.val_fraction < 1:
        raise DataError(
            f"val_fraction={settings.val_fraction} is not between 0 and 1; set it to 0.06, say"
        )
    key = corpus_key(sources, settings)
    if not _is_free(out, key):
        return out
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.with_name(f".{out.name}.lock")):
            if _is_free(out, key):  # else another process made it while this one waited
                try:
                    _build(sources, partial, key, settings, workers=workers, quiet=quiet)
                except WorkerDied:
                    raise
                except DataError:  # the input has to change, and with it all that was done
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
                os.replace(partial / "corpus", out)
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}") from None
    return out


def _is_free(out: Path, key: str) -> bool:
    """Say whether `out` is still to be made; false when it is this very corpus."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return True
    if token_file.is_corpus(out) and token_file.read_manifest(out).get("key") == key:
        return False
    raise DataError(f"{out} exists and holds something else; choose another folder")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with its owner, however that dies; its file is removed at the end."""
    for turn in itertools.count():
        with path.open("w") as file:
            if _is_acquired(file, path):
                try:
                    yield
                finally:
                    path.unlink()
                return
        if turn == WAITS:
            print(f"waiting for the process that holds {path}", file=sys.stderr)
        time.sleep(0.05)


def _is_acquired(file: TextIO, path: Path) -> bool:
    """Lock a file without waiting; one that its last owner has just removed does not count."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _build(
    sources: Sequence[Source],
    partial: Path,
    key: str,
    settings: Settings,
    *,
    workers: int | None,
    quiet: bool,
) -> None:
    """Fill partial/corpus with a whole corpus, keeping what an earlier run has finished."""
    state = partial / "key"
    if not state.is_file() or state.read_text() != key:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        token_file.write_atomically(state, key.encode())
    parts = plan_parts(sources)
    coder = _tokenizer(partial / token_file.TOKENIZER, parts, settings)
    dtype = token_file.dtype_for(coder.vocab_size)
    sizes = [part.bytes for part in parts]
    jobs = [(partial, number, part, settings.text_key) for number, part in enumerate(parts)]
    results = map_jobs(tokenize_part, jobs, workers=workers, size=sum(sizes))
    tables = show_progress("read text", sizes, results, quiet=quiet)

    weights = [sources[part.source].weight for part in parts]
    documents = np.concatenate([np.empty(0, DOCUMENT), *tables])
    weight = np.repeat(weights, [len(table) for table in tables])
    times = splits.assign(documents["hash"], weight, settings.val_fraction)
    if not len(documents):
        raise DataError(f"{', '.join(source.name for source in sources)}: no text in it; give some")

    corpus = partial / "corpus"
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir()
    writers = {
        split: token_file.SplitWriter(corpus, split, dtype=dtype, eos_id=coder.eos_id)
        for split in times
    }
    copied = _copy_documents(partial, tables, times, writers)
    show_progress("write tokens", sizes, copied, quiet=quiet)
    coder.save(corpus / token_file.TOKENIZER)
    manifest = _manifest(sources, settings, coder)
    manifest["key"] = key
    manifest["duplicates_removed"] = len(documents) - len(np.unique(documents["hash"]))
    manifest["splits"] = {split: writer.finish() for split, writer in writers.items()}
    token_file.write_atomically(
        corpus / token_file.MANIFEST, json.dumps(manifest, indent=1).encode("utf-8")
    )


def _tokenizer(path: Path, parts: Sequence[Part], settings: Settings) -> tokenizer.Tokenizer:
    """Make the tokenizer and save it for the workers."""
    if settings.tokenizer == "byte":
        tokenizer.ByteTokenizer().save(path)
    elif settings.tokenizer != "bpe":
        tokenizer.load_tokenizer(Path(settings.tokenizer)).save(path)
    elif not path.is_file():
        _train_bpe(parts, settings).save(path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
    return tokenizer.load_tokenizer(path)


def _train_bpe(parts: Sequence[Part], settings: Settings) -> tokenizer.LibraryTokenizer:
    """Train on the beginning of the text, without duplicates and what is held out."""
    texts: dict[int, str] = {}
    room = BPE_TRAINING_CHARACTERS
    for text in (text for part in parts for text in read_documents(part, settings.text_key)):
        texts[splits.document_hash(text)] = text
        room -= len(text)
        if room <= 0:
            break
    hashes = np.array(list(texts), dtype=np.uint64)
    times = splits.assign(hashes, np.ones(len(hashes)), settings.val_fraction)
    training = itertools.compress(texts.values(), times["train"])
    return tokenizer.train_bpe(training, settings.bpe_vocab_size)


def tokenize_part(folder: Path, number: int, part: Part, text_key: str) -> np.ndarray:
    """Write the ids of a part's documents to the folder; return their table, DOCUMENT[documents].

    The table is written last and by a rename: where it exists, the part is finished.
    """
    ids_path, table_path = (folder / f"part-{number:05d}.{kind}" for kind in ("ids", "table"))
    coder = tokenizer.load_tokenizer(folder / token_file.TOKENIZER)
    dtype = token_file.dtype_for(coder.vocab_size)
    if table_path.is_file() and ids_path.is_file():
        table = np.fromfile(table_path, dtype=DOCUMENT)
        if ids_path.stat().st_size == table["ids"].sum() * dtype.itemsize:
            return table
    documents = read_documents(part, text_key)
    rows = []
    with ids_path.open("wb") as file:
        while texts := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            for text, ids in zip(texts, coder.encode_batch(texts), strict=True):
                file.write(np.append(ids, coder.eos_id).astype(dtype).tobytes())
                rows.append((splits.document_hash(text), len(ids) + 1, len(text.encode("utf-8"))))
        file.flush()
        os.fsync(file.fileno())
    table = np.array(rows, dtype=DOCUMENT)
    token_file.write_atomically(table_path, table.tobytes())
    return table


def _copy_documents(
    folder: Path,
    tables: list[np.ndarray],
    times: dict[str, np.ndarray],
    writers: dict[str, token_file.SplitWriter],
) -> Iterator[None]:
    """Copy each document to each split as often as `times` says, int[documents]; yield by part."""
    begin = 0
    for number, table in enumerate(tables):
        path = folder / f"part-{number:05d}.ids"
        ids = np.asarray(np.memmap(path, writers["train"].dtype, "r")) if len(table) else []
        documents = np.split(ids, np.cumsum(table["ids"]))
        for split, writer in writers.items():
            own = times[split][begin : begin + len(table)]
            for turn in range(own.max(initial=0)):
                for document in np.flatnonzero(own > turn):
                    writer.write(documents[document], int(table["bytes"][document]))
        begin += len(table)
        yield


def _manifest(
    sources: Sequence[Source], settings: Settings, coder: tokenizer.Tokenizer
) -> dict[str, Any]:
    return {
        "format": token_file.FORMAT,
        "dtype": token_file.dtype_for(coder.vocab_size).name,
        "tokenizer": {
            "kind": settings.tokenizer if settings.tokenizer in ("byte", "bpe") else "file",
            "sha256": coder.sha256,
            "vocab_size": coder.vocab_size,
            "eos_id": coder.eos_id,
        },
        "val_fraction": settings.val_fraction,
        "text_key": settings.text_key,
        "sources": [
            {"name": s.name, "weight": s.weight, "sha256": s.sha256, "files": len(s.files)}
            for s in sources
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m curry_train.data.prepare",
        usage="python -m curry_train.data.prepare INPUT [INPUT ...] --out DIR [options]",
        description="Turn text into a corpus that data.input can name.",
        epilog="Killed, it continues where it was when the same command is run again. A document "
        "is a record (jsonl, parquet), a file (where there are 100 text files or more) or a piece "
        "of a text file, cut at blank lines. Exit code 0: done, 2: bad input, 130: interrupted.",
    )
    add, default = parser.add_argument, Settings()
    add("inputs", nargs="*", metavar="INPUT", help=".txt, .jsonl, .jsonl.zst, .parquet or a folder")
    add("--out", type=Path, metavar="DIR", help="folder to make")
    add("--tokenizer", default=default.tokenizer, help="byte (default), bpe or a tokenizer.json")
    says = "vocabulary of bpe, end-of-document token included (%(default)s)"
    add("--bpe-vocab-size", type=int, default=default.bpe_vocab_size, metavar="N", help=says)
    says = "one per input: times that each of its training documents appears in an epoch (1)"
    add("--weights", type=float, nargs="+", metavar="W", help=says)
    says = "share of documents held out, by document hash (%(default)s)"
    add("--val-fraction", type=float, default=default.val_fraction, metavar="F", help=says)
    says = "key or column that holds the text (%(default)s)"
    add("--text-key", default=default.text_key, metavar="KEY", help=says)
    add("--workers", type=int, metavar="N", help="processes (the cores); the result is the same")
    add("--verify", action="store_true", help="check every hash of the corpus DIR and do no more")
    add("--json", action="store_true", help="print the summary as JSON")
    return parser


def _prepare_named(arguments: argparse.Namespace) -> None:
    """Prepare what the command line names."""
    inputs, workers = arguments.inputs, arguments.workers
    weights = arguments.weights or [1.0] * len(inputs)
    if not inputs:
        raise DataError("no INPUT; name text files or folders of them")
    if len(weights) != len(inputs) or not all(0 < weight < 10_000 for weight in weights):
        raise DataError(f"--weights {weights}: give each INPUT a number above 0 and below 10000")
    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers} is not 1 or more")
    sources = [find_source(Path(p), weight=w) for p, w in zip(inputs, weights, strict=True)]
    names = (field.name for field in dataclasses.fields(Settings))
    settings = Settings(**{name: getattr(arguments, name) for name in names})
    prepare(sources, arguments.out, settings, workers=workers, quiet=False)


def _summary(corpus: token_file.Corpus, seconds: float) -> dict[str, Any]:
    manifest = corpus.manifest
    kept = ("key", "dtype", "tokenizer", "duplicates_removed")
    counts = {
        split: {name: entry[name] for name in ("tokens", "bytes", "documents")}
        for split, entry in manifest["splits"].items()
    }
    start = {"out": str(corpus.folder), "hash": corpus.hash, "seconds": round(seconds, 3)}
    return start | {name: manifest[name] for name in kept} | counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        if arguments.out is None:
            raise DataError("no --out; name the folder to make")
        if not arguments.verify:
            _prepare_named(arguments)
        corpus = token_file.read_corpus(arguments.out, verify=arguments.verify or None)
    except DataError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    found = _summary(corpus, time.monotonic() - started)
    if arguments.json:
        print(json.dumps(found))
        return 0
    kind, size = (found["tokenizer"][name] for name in ("kind", "vocab_size"))
    print(f"{found['out']}: {kind} tokenizer of {size} ids")
    print(f"{found['duplicates_removed']} duplicates removed")
    for split in ("train", "val"):
        print(f"{split}: " + ", ".join(f"{count} {name}" for name, count in found[split].items()))
    print(f"train on it with data.input={found['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
