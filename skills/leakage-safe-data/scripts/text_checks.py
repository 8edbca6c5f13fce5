"""Judges held-out text: copies, near copies, parts, documents that are on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from severities import SURE, THRESHOLDS, Finding, percent
from text_documents import Collection, Document
from text_overlap import LEAST_WORDS, HeldOut, Overlap, compare, hold_out

from kit.errors import UsageError

EXCERPT = 60


def check_collections(
    train: Collection, others: list[Collection], told: Callable[[int, int, str], None]
) -> tuple[list[Finding], list[HeldOut], dict[str, Any]]:
    """Compare files with files. `told(done, total, what)` hears of bytes."""
    groups = Groups()
    sets = [hold_out(other.name, groups.held_out(other)) for other in others]
    for held in sets:
        if not held.places:
            raise UsageError(f"--{held.name} holds no document with any text")
    total, seen = max(train.bytes, 1), [0]

    def heard(characters: int) -> None:
        seen[0] += characters
        told(min(seen[0], total), total, "bytes of training text")

    overlap = compare(groups.training(train), sets, heard)
    if not overlap.documents:
        raise UsageError("--train holds no document with any text")
    findings = judge(sets, overlap)
    findings.append(judge_groups(groups, asked=train.group_key is not None))
    return findings, sets, describe(sets, overlap)


class Groups:
    """The groups of the documents that pass by on their way to be compared."""

    def __init__(self) -> None:
        self.train: set[str] = set()
        self.held: dict[str, list[set[str]]] = {}

    def held_out(self, other: Collection) -> Iterator[Document]:
        """Yield the documents of a held-out set."""
        own = self.held.setdefault(other.name, [])
        for document in other.documents():
            own.append(_values(document.group))
            yield document

    def training(self, train: Collection) -> Iterator[list[Document]]:
        """Yield batches of training documents."""
        for batch in train.batches():
            for document in batch:
                self.train |= _values(document.group)
            yield batch


def _values(group: Any) -> set[str]:
    """Give the group, or the groups of a packed window, as text."""
    values = group if isinstance(group, list) else [group]
    return {str(value) for value in values if value is not None}


def judge(sets: list[HeldOut], overlap: Overlap) -> list[Finding]:
    """Judge what was found, the sets taken together by their worst."""
    return [
        _copies(sets, overlap),
        _near_copies(sets),
        _parts(sets),
    ]


def _worst(sets: list[HeldOut], share: Callable[[HeldOut], float]) -> tuple[HeldOut, float]:
    held = max(sets, key=share)
    return held, share(held)


def _copies(sets: list[HeldOut], overlap: Overlap) -> Finding:
    """Judge exact copies; short texts count when they repeat more than they do in training text."""
    by_itself = overlap.repeated_short()
    counted = {held.name: held.copied & held.long for held in sets}
    left = 0
    for held in sets:
        short = held.copied & ~held.long
        if short.any() and _more_often(int(short.sum()), int((~held.long).sum()), by_itself):
            counted[held.name] = held.copied
        else:
            left += int(short.sum())
    held, share = _worst(sets, lambda held: float(counted[held.name].mean()))
    which = counted[held.name]
    fails = share > THRESHOLDS["leak-duplicates"]
    message = f"{int(which.sum())} of {len(which)} documents of {held.name} are training documents"
    message += _example(held, which) if which.any() else ""
    if left:
        message += (
            f"; {left} texts below {LEAST_WORDS} words not counted, they repeat by themselves"
        )
    return Finding(
        "leak-duplicates",
        "fail" if fails else "pass",
        message,
        value=share,
        inflation=_words(held, which) if fails else None,
    )


def _more_often(found: int, of: int, share: float) -> bool:
    """Tell whether `found` of `of` is surely more than a share that was seen elsewhere."""
    from scipy import stats

    if share == 0.0:
        return True
    return float(stats.binom.sf(found - 1, of, min(1.0, 1.5 * share))) < SURE


def _near_copies(sets: list[HeldOut]) -> Finding:
    held, share = _worst(sets, lambda held: float(held.near.mean()))
    near = held.near
    fails = share > THRESHOLDS["leak-near-duplicates"]
    message = f"{int(near.sum())} of {len(near)} documents of {held.name} are nearly training ones"
    if near.any():
        message += f" (Jaccard {held.jaccard[near].min():.2f} and up)" + _example(held, near)
    return Finding(
        "leak-near-duplicates",
        "fail" if fails else "pass",
        message,
        value=share,
        inflation=_words(held, near) if fails else None,
    )


def _parts(sets: list[HeldOut]) -> Finding:
    """Judge documents whose 13-grams are in the training text though they are no copies."""
    held, share = _worst(sets, lambda held: float(held.partly.mean()))
    partly = held.partly
    fails = share > THRESHOLDS["leak-evaluation"]
    judged = int(held.long.sum())
    message = f"{int(partly.sum())} of {len(partly)} documents of {held.name} are partly in train"
    if partly.any():
        cover = np.maximum(held.cover, held.rare_cover)[partly]
        message += f" ({percent(float(cover.mean()))} of their 13-grams)" + _example(held, partly)
    if not judged:
        return Finding(
            "leak-evaluation", "skipped", f"all are below {LEAST_WORDS} words: no 13-grams"
        )
    return Finding(
        "leak-evaluation",
        "fail" if fails else "pass",
        message,
        value=share,
        inflation=_words(held, partly) if fails else None,
    )


def _words(held: HeldOut, which: Any) -> float:
    """Give the share of the set's words that lie in these documents."""
    total = held.words.counts.sum()
    return float(held.words.counts[which].sum() / total) if total else float(which.mean())


def _example(held: HeldOut, which: Any) -> str:
    """Name the first such document, where its twin is, and how it begins."""
    first = int(np.flatnonzero(which)[0])
    twin = f" = {held.source[first]}" if held.source[first] else ""
    begin = " ".join(held.texts[first].split())[:EXCERPT]
    return f": {held.places[first]}{twin} ({begin!r})"


def judge_groups(groups: Groups, *, asked: bool) -> Finding:
    """Judge documents whose group, or a document of whose window, is in the training text too."""
    id = "leak-packed-documents"
    if not asked:
        return Finding(id, "skipped", "no --group KEY says which document a part is of")
    shares = {
        name: float(np.mean([bool(own & groups.train) for own in held]))
        for name, held in groups.held.items()
    }
    name, share = max(shares.items(), key=lambda item: item[1])
    both = sorted(set().union(*groups.held[name]) & groups.train)
    message = f"{percent(share)} of {name} has parts of documents that train has too"
    message += f": {', '.join(both[:3])}" if both else ""
    verdict = "fail" if share > THRESHOLDS[id] else "pass"
    return Finding(id, verdict, message, value=share, inflation=share or None)


def describe(sets: list[HeldOut], overlap: Overlap) -> dict[str, Any]:
    """Give the numbers of the report."""
    numbers: dict[str, Any] = {
        "train": {"documents": overlap.documents, "copies_within": overlap.repeated()}
    }
    for held in sets:
        numbers[held.name] = {
            "documents": len(held.places),
            "words": int(held.words.counts.sum()),
            "copies": int(held.copied.sum()),
            "near_copies": int(held.near.sum()),
            "partly_in_train": int(held.partly.sum()),
            "words_in_train": _words(held, held.copied | held.near | held.partly),
            "examples": [
                {"place": held.places[i], "twin": held.source[i] or None}
                for i in np.flatnonzero(held.copied | held.near | held.partly)[:20].tolist()
            ],
        }
    return numbers
