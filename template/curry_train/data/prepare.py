"""Turn text into a prepared corpus: python -m curry_train.data.prepare INPUT [INPUT ...] --out DIR

Three passes, each over parts that are a function of the input alone, so that the result is the same
for any number of workers: hash every document; in one process drop duplicates and choose the
split, then train the tokenizer where one is asked for; write each part's shard.
Work happens in the hidden sibling `.DIR.partial`; finished parts stay there when a run is killed
and are verified and kept by the next one. DIR appears by one rename.

A weight is the number of times that each training document of an input appears in one epoch. 2
repeats every document, 0.5 keeps half of them, 1.5 repeats half (which half is decided by document
hash). Validation documents count once whatever the weight. A document that two inputs share belongs
to the first of them.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curry_train.data import DATASETS, DataError, shard_writer, splits, token_file, tokenizer
from curry_train.data.folder_lock import locked, remove_folder, sync_folder
from curry_train.data.part_pool import PartPool, WorkerDied
from curry_train.data.sources import Part, Source, find_source, plan_parts, read_documents

if TYPE_CHECKING:
    from curry_train.config import DataConfig

BPE_TRAINING_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Settings:
    """Everything besides the text that decides the result."""

    tokenizer: str = "byte"
    """byte, bpe or the path of a tokenizer.json."""
    bpe_vocab_size: int = 1024
    val_fraction: float = 0.06
    text_key: str = "text"

    def problems(self) -> Iterator[str]:
        """Say in full sentences what is wrong."""
        if not 0 < self.val_fraction < 1:
            yield f"val_fraction={self.val_fraction} is not between 0 and 1; set it to 0.06, say"
        if self.tokenizer == "bpe" and self.bpe_vocab_size < tokenizer.MIN_BPE_VOCAB_SIZE:
            yield (
                f"bpe_vocab_size={self.bpe_vocab_size} is too small; a byte-level BPE needs "
                f"{tokenizer.MIN_BPE_VOCAB_SIZE} or more"
            )


def prepare_configured(data: DataConfig, *, cache_dir: Path | None) -> Path:
    """Prepare what `data` names below the cache folder, or find it there; see open_corpus."""
    if data.input is not None:
        sources = [find_source(Path(data.input))]
    elif data.dataset in DATASETS:
        module, function = DATASETS[data.dataset].split(":")
        sources = [getattr(importlib.import_module(module), function)()]
    else:
        raise DataError(
            f"data.dataset={data.dataset} is unknown; set it to {', '.join(DATASETS)}, or "
            "data.input to a text of yours"
        )
    chosen = "byte" if data.tokenizer == "auto" else data.tokenizer
    settings = Settings(chosen, data.bpe_vocab_size, data.val_fraction)
    key = corpus_key(sources, settings)[:16]
    if cache_dir is None:
        cached = Path(data.cache_dir) / key
        if token_file.is_corpus(cached):
            return cached
        cache_dir = Path(tempfile.mkdtemp(prefix="curry-train-data-"))
        atexit.register(shutil.rmtree, cache_dir, ignore_errors=True)
    out = cache_dir / key
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

    Raises: DataError.
    """
    for problem in settings.problems():
        raise DataError(problem)
    out = Path(out)
    key = corpus_key(sources, settings)
    partial = out.with_name(f".{out.name}.partial")
    if not _is_free(out, key):
        return out
    try:
        with locked(partial):
            if _is_free(out, key):  # else another process made it while this one waited
                try:
                    _build(sources, partial, key, settings, workers, quiet)
                except WorkerDied:
                    raise
                except DataError:  # the input has to change, and with it all that was done
                    remove_folder(partial)
                    raise
                os.replace(partial / "corpus", out)
                sync_folder(out.parent)
            remove_folder(partial)
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


def _build(
    sources: Sequence[Source],
    partial: Path,
    key: str,
    settings: Settings,
    workers: int | None,
    quiet: bool,
) -> None:
    """Fill partial/corpus with a whole corpus, keeping what an earlier run has finished."""
    state = partial / "key"
    if not state.is_file() or state.read_text() != key:
        for entry in partial.iterdir():
            if entry.name != "lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        shard_writer.write_atomically(state, key.encode())
    (partial / "corpus").mkdir(exist_ok=True)
    for leftover in partial.rglob("*.tmp"):
        leftover.unlink()
    parts = plan_parts(sources)
    run = PartPool(parts, workers=workers, quiet=quiet).run

    jobs = [(partial, part, settings.text_key) for part in parts]
    scans = run("hash documents", shard_writer.scan_part, jobs)
    counts = np.cumsum([0] + [scan["documents"] for scan in scans])
    hashes = np.concatenate([shard_writer.read_hashes(partial, part) for part in parts])
    kinds = splits.assign(hashes, settings.val_fraction)
    if not (kinds != splits.DROPPED).any():
        raise DataError(f"{', '.join(source.name for source in sources)}: no text in it; give some")
    groups = []
    for part in parts:
        own = slice(counts[part.index], counts[part.index + 1])
        groups.append(splits.groups(hashes[own], kinds[own], sources[part.source].weight))

    coder = _tokenizer(partial, parts, groups, settings)
    token_file.dtype_for(coder.vocab_size)
    jobs = [
        (partial, part, settings.text_key, group, scan["sha256"])
        for part, group, scan in zip(parts, groups, scans, strict=True)
    ]
    shards = run("write tokens", shard_writer.write_part, jobs)
    made = _manifest(sources, parts, shards, key, settings, coder)
    made["duplicates_removed"] = int((kinds == splits.DROPPED).sum())
    shard_writer.write_json(partial / "corpus" / token_file.MANIFEST, made)
    sync_folder(partial / "corpus")


def _tokenizer(
    partial: Path, parts: Sequence[Part], groups: list[np.ndarray], settings: Settings
) -> tokenizer.Tokenizer:
    """Pass 2: the tokenizer, trained on the training split's first BPE_TRAINING_BYTES."""
    path = partial / "corpus" / token_file.TOKENIZER
    if settings.tokenizer == "bpe":
        if not path.is_file():
            texts = _training_texts(parts, groups, settings.text_key)
            coder: tokenizer.Tokenizer = tokenizer.train_bpe(texts, settings.bpe_vocab_size)
            coder.save(path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
    elif settings.tokenizer == "byte":
        tokenizer.ByteTokenizer().save(path)
    else:
        tokenizer.load_tokenizer(Path(settings.tokenizer)).save(path)
    return tokenizer.load_tokenizer(path)


def _training_texts(
    parts: Sequence[Part], groups: list[np.ndarray], text_key: str
) -> Iterator[str]:
    room = BPE_TRAINING_BYTES
    for part in parts:
        for text, group in zip(read_documents(part, text_key), groups[part.index], strict=False):
            if group in (splits.COMMON, splits.MORE):
                yield text
                room -= len(text)
                if room < 0:
                    return


def _manifest(
    sources: Sequence[Source],
    parts: Sequence[Part],
    shards: list[dict[str, Any]],
    key: str,
    settings: Settings,
    coder: tokenizer.Tokenizer,
) -> dict[str, Any]:
    segments = _segments(sources, parts, shards)
    byte = settings.tokenizer == "byte"
    kind = settings.tokenizer if byte or settings.tokenizer == "bpe" else "file"
    return {
        "format": token_file.FORMAT,
        "key": key,
        "dtype": token_file.dtype_for(coder.vocab_size).name,
        "tokenizer": {
            "kind": kind,
            "sha256": coder.sha256,
            "vocab_size": coder.vocab_size,
            "eos_id": coder.eos_id,
            "asked_vocab_size": settings.bpe_vocab_size if kind == "bpe" else coder.vocab_size,
        },
        "val_fraction": settings.val_fraction,
        "text_key": settings.text_key,
        "sources": [
            {
                "name": s.name,
                "weight": s.weight,
                "sha256": s.sha256,
                "files": len(s.files),
                "bytes": s.bytes,
            }
            for s in sources
        ],
        "shards": [{k: v for k, v in shard.items() if k != "groups"} for shard in shards],
        "splits": {
            split: {
                "tokens": sum(s.tokens * s.repeats for s in found),
                "bytes": sum(s.bytes * s.repeats for s in found),
                "documents": sum(s.documents * s.repeats for s in found),
                "segments": [dataclasses.asdict(s) for s in found],
            }
            for split, found in segments.items()
        },
    }


def _segments(
    sources: Sequence[Source], parts: Sequence[Part], shards: list[dict[str, Any]]
) -> dict[str, list[token_file.Segment]]:
    """Tell which stretch of which shard belongs to which split, and how often."""
    segments: dict[str, list[token_file.Segment]] = {"train": [], "val": []}
    for part, shard in zip(parts, shards, strict=True):
        weight = sources[part.source].weight
        start = first_document = 0
        for number, counts in enumerate(shard["groups"]):
            repeats = (int(weight), int(weight) + 1, 1)[number]
            if counts["tokens"] and repeats:
                segments["val" if number == splits.HELD_OUT else "train"].append(
                    token_file.Segment(
                        part.index,
                        start,
                        counts["tokens"],
                        first_document,
                        counts["documents"],
                        counts["bytes"],
                        repeats,
                    )
                )
            start += counts["tokens"]
            first_document += counts["documents"]
    return segments


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m curry_train.data.prepare",
        usage="python -m curry_train.data.prepare INPUT [INPUT ...] --out DIR [options]",
        description="Turn text into a corpus that data.input can name.",
        epilog="Killed, it continues where it was when the same command is run again. A document "
        "is a record (jsonl, parquet), a file (where there are 100 text files or more) or a piece "
        "of a text file, cut at blank lines. Exit code 0: done, 2: bad input, 130: interrupted.",
    )
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help=".txt, .jsonl, .jsonl.zst, .parquet or a folder")
    add("--out", type=Path, metavar="DIR", help="folder to make")
    add("--tokenizer", default=default.tokenizer, help="byte (default), bpe, or a tokenizer.json")
    add(
        "--bpe-vocab-size",
        type=int,
        default=default.bpe_vocab_size,
        metavar="N",
        help=f"vocabulary of bpe, end-of-document token included ({default.bpe_vocab_size})",
    )
    add(
        "--weights",
        type=float,
        nargs="+",
        metavar="W",
        help="one per input: times each of its training documents appears in an epoch (1)",
    )
    add(
        "--val-fraction",
        type=float,
        default=default.val_fraction,
        metavar="F",
        help=f"share of documents held out, by document hash ({default.val_fraction})",
    )
    add(
        "--text-key",
        default=default.text_key,
        metavar="KEY",
        help=f"key or column that holds the text ({default.text_key})",
    )
    add("--workers", type=int, metavar="N", help="processes (the cores); the result is the same")
    add("--verify", action="store_true", help="check every hash of the corpus DIR and do no more")
    add("--json", action="store_true", help="print the summary as JSON")
    return parser


def _sources(arguments: argparse.Namespace) -> list[Source]:
    weights = arguments.weights or [1.0] * len(arguments.inputs)
    if not arguments.inputs:
        raise DataError("no INPUT; name text files or folders of them")
    if len(weights) != len(arguments.inputs):
        raise DataError(
            f"--weights has {len(weights)} numbers for {len(arguments.inputs)} inputs; "
            "give one for each"
        )
    if bad := [weight for weight in weights if not 0 < weight < 10_000]:
        raise DataError(f"--weights {bad[0]} is not above 0 and below 10000")
    if arguments.workers is not None and arguments.workers < 1:
        raise DataError(f"--workers {arguments.workers} is not 1 or more")
    for path in map(Path, arguments.inputs):
        if path.is_dir() and token_file.is_corpus(path):
            raise DataError(f"{path} is a prepared corpus already; name text")
    return [find_source(Path(p), weight=w) for p, w in zip(arguments.inputs, weights, strict=True)]


def _report(corpus: token_file.Corpus, as_json: bool, seconds: float) -> str:
    manifest = corpus.manifest
    counts = {
        split: {key: found[key] for key in ("tokens", "bytes", "documents")}
        for split, found in manifest["splits"].items()
    }
    coder = manifest["tokenizer"]
    if as_json:
        return json.dumps(
            {
                "out": str(corpus.folder),
                "hash": corpus.hash,
                "key": manifest["key"],
                "dtype": manifest["dtype"],
                "tokenizer": coder,
                "shards": len(manifest["shards"]),
                "duplicates_removed": manifest["duplicates_removed"],
                **counts,
                "seconds": seconds,
            }
        )
    lines = [
        f"{corpus.folder}: {coder['kind']} tokenizer of {coder['vocab_size']} ids, "
        f"{manifest['duplicates_removed']} duplicates removed"
    ]
    lines += [
        f"{split}: {found['documents']} documents, {found['bytes']} bytes, {found['tokens']} tokens"
        for split, found in counts.items()
    ]
    return "\n".join([*lines, f"train on it with data.input={corpus.folder}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        if arguments.out is None:
            raise DataError("no --out; name the folder to make")
        if not arguments.verify:
            settings = Settings(
                arguments.tokenizer,
                arguments.bpe_vocab_size,
                arguments.val_fraction,
                arguments.text_key,
            )
            prepare(
                _sources(arguments), arguments.out, settings, workers=arguments.workers, quiet=False
            )
        corpus = token_file.read_corpus(arguments.out, verify=arguments.verify or None)
    except DataError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    print(_report(corpus, arguments.json, round(time.monotonic() - started, 3)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
